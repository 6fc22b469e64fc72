"""What no call can keep is refused when it is loaded, with both places named; and nothing else is."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from contracts_and_calls import PARAMETERS, calls, contract_bodies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llm_op_guard as og
from llm_op_guard.contract import validate
from llm_op_guard.contract.json_form import parse_json, to_json
from llm_op_guard.contract.model import Contract, Require
from llm_op_guard.contract.parse import parse_body, parse_stubs
from llm_op_guard.contract.satisfiable import Conflict, conflict
from llm_op_guard.guard.bind import Bindings
from llm_op_guard.guard.explain import explain
from llm_op_guard.guard.reading import INAPPLICABLE, Broken

SIZES = "; sizes are whole numbers from 0 on"
NEVER = "; it is never true"


def refusal(body: str) -> tuple[int, int, str] | None:
    """Where and why a contract is refused: line and column in the body, and the problem."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    try:
        parse_stubs(f"def operator(x, y, n, mode, self):\n{lines}\n", "f.contract")
    except og.ContractError as error:
        return error.line - 1, error.column - 4, error.problem
    return None


# ---------------------------------------------------------------- one rule

ALONE = {
    "x: any[D]\nrequire(D < 0)": "D < 0" + SIZES,
    "x: any[D]\nrequire(D == -1)": "D == -1" + SIZES,
    "x: any[D]\nrequire(not D >= 0)": "not D >= 0" + SIZES,
    "x: any[D]\nrequire(D == 2.5)": "D == 2.5" + SIZES,
    "x: any[D]\nrequire(4 < D < 5)": "4 < D < 5" + SIZES,
    "x: any[D]\nrequire(D % 2 == 3)": "D % 2 == 3" + SIZES,
    "x: any[D]\nrequire(2 * D == 5)": "2 * D == 5" + SIZES,
    "x: any[D]\nrequire(D + 1 == 0)": "D + 1 == 0" + SIZES,
    "x: any[D]\nrequire(-D > 0)": "-D > 0" + SIZES,
    "x: any[D]\nrequire(D // 2 < 0)": "D // 2 < 0" + SIZES,
    "x: any[D]\nrequire(D % 4 == 1 and D % 2 == 0)": "D % 4 == 1 and D % 2 == 0" + SIZES,
    "x: any[3 - D]\nrequire(D < 0)": "D < 0" + SIZES,
    "x: any[D / n]\nrequire(D == 0.5)": "D == 0.5" + SIZES,
    "x: any[D - n]\nrequire(D == 2.5)": "D == 2.5" + SIZES,
    "x: any[D]\nrequire(D is None)": "D is None" + SIZES,
    "x: None | any[D]\nrequire(D < 0)": "D < 0" + SIZES,
    "x: any[D]\nrequire(D % 0 == 0)": "D % 0 == 0; D % 0 divides by zero",
    "n: int\nrequire(not (n % 0 == 0))": "not n % 0 == 0; n % 0 divides by zero",
    "mode: int\nrequire(n // 0 > 1 or n > 1)": "n // 0 > 1 or n > 1; n // 0 divides by zero",
    "mode: int\nrequire(n == 1 and 1 > 2)": "n == 1 and 1 > 2" + NEVER,
    "mode: int\nrequire(n in ())": "n in ()" + NEVER,
    "mode: int\nrequire(n == 1 and n == 2)": "n == 1 and n == 2" + NEVER,
    "mode: int\nrequire(8 <= n < 4)": "8 <= n < 4" + NEVER,
    "mode: int\nrequire(n % 2 == 3)": "n % 2 == 3" + NEVER,
    "mode: int\nrequire(n is None and n > 2)": "n is None and n > 2" + NEVER,
    "mode: int\nrequire(has(n) and n is None)": "has(n) and n is None" + NEVER,
    "mode: int\nrequire((n == 1 or n == 2) and n in (3, 4))": "(n == 1 or n == 2) and n in (3, 4)" + NEVER,
    "mode: int\nrequire(n == 'a' if mode > 1 and mode < 0 else n in ())": (
        "n == 'a' if mode > 1 and mode < 0 else n in ()" + NEVER
    ),
    "mode: int\nrequire(len(self.layers) < 0)": "len(self.layers) < 0" + NEVER,
    "mode: int\nrequire(abs(n) == -1)": "abs(n) == -1" + NEVER,
    "mode: int\nrequire(y.dtype in half and y.dtype in integer)": "y.dtype in half and y.dtype in integer" + NEVER,
    "mode: int\nrequire(n in (), certain=False)": "n in ()" + NEVER,
    "mode: int\nensure(n in ())": "n in ()" + NEVER,
}


@pytest.mark.parametrize("body", ALONE)
def test_a_rule_that_is_never_true(body: str) -> None:
    column = body.splitlines()[1].index("(") + 2
    assert refusal(body) == (2, column, f"no call can keep this: {ALONE[body]}")


# ---------------------------------------------------------------- several statements

TOGETHER = {
    "x: any[D]\nrequire(D >= 8)\nrequire(D < 4)": (3, 9, "D < 4, while D >= 8 is required in line 3"),
    "x: any[D]\nrequire(D < 4)\nrequire(D >= 4)": (3, 9, "D >= 4, while D < 4 is required in line 3"),
    "x: any[D]\nrequire(D > 3)\nrequire(D < 4)": (3, 9, "D < 4, while D > 3 is required in line 3"),
    "x: any[D]\nrequire(D > 3)\nrequire(D < 5)\nrequire(D != 4)": (
        4, 9, "D != 4, while D > 3 is required in line 3 and D < 5 is required in line 4",
    ),
    "x: any[D]\nrequire(D % 4 == 0)\nrequire(D % 4 == 1)": (3, 9, "D % 4 == 1, while D % 4 == 0 is required in line 3"),
    "x: any[D]\nrequire(D % 4 == 0)\nrequire(D % 6 == 3)": (3, 9, "D % 6 == 3, while D % 4 == 0 is required in line 3"),
    "x: any[D]\nrequire(D % 2 == 0)\nrequire(D == 7)": (3, 9, "D == 7, while D % 2 == 0 is required in line 3"),
    "x: any[D]\nrequire(D % 2 == 0)\nrequire(6 < D < 8)": (3, 9, "6 < D < 8, while D % 2 == 0 is required in line 3"),
    "x: any[D]\nrequire(D >= 8)\nensure(D < 4)": (3, 8, "D < 4, while D >= 8 is required in line 3"),
    "x: any[D]\nensure(D >= 8)\nensure(D < 4)": (3, 8, "D < 4, while D >= 8 is promised in line 3"),
    "n: int\nrequire(4 < n < 5)": (2, 9, "4 < n < 5, while n is declared as int in line 2"),
    "n: int\nrequire(n == 1)\nrequire(n == 2)": (3, 9, "n == 2, while n == 1 is required in line 3"),
    "n: int\nrequire(n == 2)\nrequire(n != 2)": (3, 9, "n != 2, while n == 2 is required in line 3"),
    "n: int\nrequire(n in (1, 2))\nrequire(n in (3, 4))": (
        3, 9, "n in (3, 4), while n in (1, 2) is required in line 3",
    ),
    "n: int\nrequire(n in (1, 2))\nrequire(n > 2)": (3, 9, "n > 2, while n in (1, 2) is required in line 3"),
    "n: int\nrequire(n not in (1, 2))\nrequire(0 < n < 3)": (
        3, 9, "0 < n < 3, while n not in (1, 2) is required in line 3",
    ),
    "n: int\nrequire(n == 1)\nensure(n == 2)": (3, 8, "n == 2, while n == 1 is required in line 3"),
    "n: float\nrequire(n >= 8)\nrequire(n < 4)": (3, 9, "n < 4, while n >= 8 is required in line 3"),
    "n: float\nrequire(n >= 4)\nrequire(n < 4)": (3, 9, "n < 4, while n >= 4 is required in line 3"),
    "n: 1 | 2\nrequire(n > 2)": (2, 9, "n > 2, while n is declared as 1 | 2 in line 2"),
    "n: bool\nrequire(n == 2)": (2, 9, "n == 2, while n is declared as bool in line 2"),
    "mode: 'left' | 'right'\nrequire(mode == 'center')": (
        2, 9, "mode == 'center', while mode is declared as 'left' | 'right' in line 2",
    ),
    "mode: str\nrequire(mode != 'a')\nrequire(mode == 'a')": (
        3, 9, "mode == 'a', while mode != 'a' is required in line 3",
    ),
    "x: floating[3, D]\nrequire(x.shape[0] == 4)": (
        2, 9, "x.shape[0] == 4, while x is declared as floating[3, D] in line 2",
    ),
    "require(x.shape[0] == 4)\nx: floating[3, D]": (
        2, 1, "x: floating[3, D], while x.shape[0] == 4 is required in line 2",
    ),
    "x: any[..., 3]\nrequire(x.shape[-1] == 4)": (
        2, 9, "x.shape[-1] == 4, while x is declared as any[..., 3] in line 2",
    ),
    "x: any[2 | 4]\nrequire(x.shape[0] == 3)": (2, 9, "x.shape[0] == 3, while x is declared as any[2 | 4] in line 2"),
    "x: (any[3], any[4])\nrequire(x[1].shape[0] == 3)": (
        2, 9, "x[1].shape[0] == 3, while x is declared as (any[3], any[4]) in line 2",
    ),
    "x: T[B, L]\nrequire(x.ndim == 3)": (2, 9, "x.ndim == 3, while x is declared as T[B, L] in line 2"),
    "x: T[B, L, ...]\nrequire(len(x.shape) == 1)": (
        2, 9, "len(x.shape) == 1, while x is declared as T[B, L, ...] in line 2",
    ),
    "x: any[D]\nrequire(x is None)": (2, 9, "x is None, while x is declared as any[D] in line 2"),
    "x: any[D]\nrequire(not has(x))": (2, 9, "not has(x), while x is declared as any[D] in line 2"),
    "x: T[D]\nrequire(T in half)\nrequire(T in integer)": (3, 9, "T in integer, while T in half is required in line 3"),
    "x: T[D]\nrequire(T in floating)\nrequire(T == int64)": (
        3, 9, "T == int64, while T in floating is required in line 3",
    ),
    "x: floating[D]\nrequire(x.dtype == int64)": (
        2, 9, "x.dtype == int64, while x is declared as floating[D] in line 2",
    ),
    "x: float32[D]\nrequire(x.dtype in (float16, bfloat16))": (
        2, 9, "x.dtype in (float16, bfloat16), while x is declared as float32[D] in line 2",
    ),
    "x: float32[D]\ny: int64[D]\nrequire(x.dtype == y.dtype)": (
        3, 9, "x.dtype == y.dtype, while x is declared as float32[D] in line 2 and y is declared as int64[D] in line 3",
    ),
    "x: any @ cpu\ny: any @ cuda\nrequire(x.device == y.device)": (
        3, 9,
        "x.device == y.device, while x is declared as any @ cpu in line 2 and y is declared as any @ cuda in line 3",
    ),
    "returns: any[3]\nensure(result.shape[0] == 4)": (
        2, 8, "result.shape[0] == 4, while result is declared as any[3] in line 2",
    ),
    "n: int\nrequire(n >= 8)\nif mode:\n    require(n < 4)": (4, 13, "n < 4, while n >= 8 is required in line 3"),
    "n: int\nif mode:\n    require(n < 4)\nrequire(n >= 8)": (4, 9, "n >= 8, while n < 4 is required in line 4"),
    "n: int\nfor i in (3, 4):\n    require(n == i)": (3, 13, "n == 4, while n == 3 is required in line 4"),
}  # fmt: skip


@pytest.mark.parametrize("body", TOGETHER)
def test_statements_that_contradict_each_other(body: str) -> None:
    line, column, problem = TOGETHER[body]
    assert refusal(body) == (line, column, f"no call can keep this: {problem}")


BRANCHES = {
    "x: any[D]\nif D > 8:\n    require(D < 4)": (3, "D < 4", "D > 8", "not (D > 8)"),
    "x: any[D]\nif D > 8:\n    require(y > 1)\nelse:\n    require(D == 9)": (5, "D == 9", "not (D > 8)", "D > 8"),
    "if mode == 'old':\n    require(mode == 'new')": (2, "mode == 'new'", "mode == 'old'", "not (mode == 'old')"),
    "if mode is None:\n    require(mode is not None)": (2, "mode is not None", "mode is None", "not (mode is None)"),
    "if x.ndim == 3:\n    x: T[B, L]": (2, "x: T[B, L]", "x.ndim == 3", "not (x.ndim == 3)"),
}


@pytest.mark.parametrize("body", BRANCHES)
def test_a_rule_that_its_own_branch_contradicts(body: str) -> None:
    line, rule, test, instead = BRANCHES[body]
    at = next(number for number, text in enumerate(body.splitlines(), 2) if text.startswith("if "))
    found = refusal(body)
    assert found is not None
    assert (found[0], found[2]) == (
        line,
        f"no call can keep this: {rule}, while the branch of line {at} is for {test}; "
        f"to forbid the branch, write require({instead})",
    )


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "f.contract"
    file.write_text("def f(n):\n    n: int\n\n    require(n > 2)\n    require(n < 1)\n")
    with pytest.raises(og.ContractError) as caught:
        og.load(file)
    assert str(caught.value).splitlines() == [
        f"{file}:5:13: no call can keep this: n < 1, while n > 2 is required in line 4",
        "        require(n < 1)",
        "                ^",
    ]


def test_lines_are_those_of_a_json_file() -> None:
    contracts = parse_stubs("def f(n):\n    n: int\n    require(n > 2)\n    require(n < 4)\n")
    text = json.dumps(to_json(contracts), indent=2)
    with pytest.raises(og.ContractError) as caught:
        parse_json(text.replace("n < 4", "n < 1"))
    lines = text.splitlines()
    first, second = (1 + next(i for i, line in enumerate(lines) if rule in line) for rule in ("n > 2", "n < 4"))
    assert caught.value.line == second
    assert caught.value.problem.endswith(f"no call can keep this: n < 1, while n > 2 is required in line {first}")


# ---------------------------------------------------------------- what is not refused

LEFT_ALONE = [
    # A call to which a rule does not apply keeps it.
    "x: None | T[4]\nrequire(x.shape[0] == 3)",
    "x: None | any[D]\nrequire(D >= 8)\nrequire(D < 4)",
    "require(n == 1)\nrequire(n == 2)",
    "require(self.k == 1)\nrequire(self.k == 2)",
    "self.k: int\nrequire(self.k == 1)\nrequire(self.k == 2)",
    "self.w: any[3]\nrequire(self.w.shape[0] == 4)",
    "x: list[any[3]]\nrequire(x[0].shape[0] == 4)",
    "n: None | int\nrequire(n > 3)\nrequire(n < 2)",
    "require(n > 0)\nrequire(n == 'auto')",
    # A breach of a suspicion is legal.
    "x: any[D]\nrequire(D >= 8)\nrequire(D < 4, certain=False)",
    "x: any[D] = why(certain=False)\nrequire(D >= 8)\nrequire(D < 4)",
    "if mode == 'old':\n    require(mode != 'old', certain=False)",
    # Branches that exclude each other, and branches that no call takes.
    "n: int\nif mode == 'a':\n    require(n == 1)\nelse:\n    require(n == 2)",
    "n: int\nif mode == 'a':\n    require(n == 1)\nif mode == 'b':\n    require(n == 2)",
    "mode: 'left' | 'right'\nif mode == 'center':\n    require(n == 1)\n    require(n == 2)",
    "x: any[D]\nrequire(D >= 8)\nif D < 4:\n    require(n > 1)",
    "x: any[D]\nif D > 8:\n    if D < 4:\n        require(D == 5)",
    "if mode == 'old':\n    require(version('torch') >= (n, 9))",
    "if x is None:\n    require(y is not None)",
    # What may change in the call.
    "x: any[3]\nensure(x.shape[0] == 4)",
    "require(self.k == 1)\nensure(self.k == 2)",
    "x: float32[D]\nensure(x.dtype == float16)",
    "n: int\nif x.ndim == 3:\n    require(n == 1)\n    ensure(n == 2)",
    # Numbers that are no sizes.
    "n: float\nrequire(4 < n < 5)",
    "n: float\nrequire(n % 2 == 2)",
    "n: float\nrequire(not (n >= 0))\nrequire(not (n < 0))",
    "n: float\nrequire(n + 1 == n)\nrequire(n > 1)",
    "require(4 < n < 5)",
    "n: int\nrequire(n < 0)\nrequire(n % 3 == 2)",
    # Near misses.
    "x: any[D]\nrequire(D >= 4)\nrequire(D <= 4)",
    "x: any[D]\nrequire(D == 0)\nrequire(D < 1)",
    "x: any[D]\nrequire(D == 4 or D > 8)\nrequire(D != 4)",
    "x: any[D]\nrequire(D % 4 == 1)\nrequire(D % 6 == 3)",
    "x: any[D]\nrequire(D % 2 == 0)\nrequire(6 < D < 10)",
    "x: any[D]\nrequire(D % -2 == 0)\nrequire(D == 7 or D == 8)",
    "n: int\nrequire(n in (1, 2))\nrequire(n in (2, 3))",
    "n: bool\nrequire(n == 1)",
    "n: int\nrequire(n == True)\nrequire(n == 1.0)",
    "x: T[D]\nrequire(T in floating)\nrequire(T in half)\nrequire(T != float16)",
    "x: T[D]\ny: any[D]\nrequire(T == float32)\nrequire(y.dtype == int64)",
    "x: any[..., 3]\nrequire(x.shape[0] == 4)",
    "x: any @ (cpu | cuda)\ny: any @ cuda\nrequire(x.device == y.device)",
    "require(n > 2 or n in ())",
    "require(mode not in ())",
]


@pytest.mark.parametrize("body", LEFT_ALONE)
def test_what_some_call_keeps_is_left_alone(body: str) -> None:
    assert refusal(body) is None


def test_contracts_that_people_use_are_left_alone() -> None:
    shipped = (resources.files("llm_op_guard") / "contracts" / "transformers").iterdir()
    yardstick = (Path(__file__).parents[1] / "yardstick").glob("*.contract")
    files = [file for file in (*shipped, *yardstick) if file.name.endswith(".contract")]
    assert len(files) > 10
    for file in files:
        assert parse_stubs(file.read_text(encoding="utf-8"), file.name)


# ---------------------------------------------------------------- no call is wronged


@contextmanager
def conflicts() -> Iterator[list[Conflict | None]]:
    """Contracts are read without being refused for a conflict; those of each are noted."""
    found: list[Conflict | None] = []

    def note(contract: Contract) -> None:
        found.append(conflict(contract))

    # What says nothing of any call is refused before; here it is no matter.
    with mock.patch.object(validate, "check_satisfiable", note), mock.patch.object(validate.Uses, "check"):
        yield found


def read(text: str) -> tuple[Contract, Conflict] | None:
    """A contract that no call can keep, with its conflict; None for any other text."""
    with conflicts() as found:
        try:
            contract = parse_body(text, "operator", PARAMETERS)
        except og.ContractError:
            return None
    return None if found[0] is None else (contract, found[0])


def bound(contract: Contract, arguments: Mapping[str, Any], known: Mapping[str, Any], after: bool) -> Bindings:
    clauses = [clause for clause in contract.clauses if after or not clause.after_call]
    bindings = Bindings(contract, clauses, arguments, known, after_call=after)
    bindings.collect()
    return bindings


def holds(bindings: Bindings, node: Any, wanted: bool = True) -> bool:
    try:
        return bool(bindings.values.value_of(node)) is wanted
    except (*INAPPLICABLE, Broken):
        return False


def assert_no_call_keeps(contract: Contract, found: Conflict, before: dict[str, Any], after: dict[str, Any]) -> None:
    """`before` and `after` are the arguments of one call, which may have changed some in place."""
    early = {name: value for name, value in before.items() if name != "result"}
    late = any(clause.after_call for clause in found.clauses)
    bindings = bound(contract, early, {}, after=False)
    known = {**bindings.values.symbols, **bindings.values.assigned}
    if late:
        bindings = bound(contract, after, known, after=True)
    if found.alone:
        rule = found.clauses[0].statement
        assert isinstance(rule, Require)
        assert not holds(bindings, rule.expr.node), (contract.text, before, after)
        return
    if all(holds(bindings, condition.test.node, condition.wanted) for condition in found.conditions):
        violations = explain(contract, early)
        if not any(violation.certain for violation in violations):
            violations = explain(contract, after, after_call=True, known=known)
        assert any(violation.certain for violation in violations), (contract.text, found, before, after)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(contract_bodies(), st.lists(calls(), min_size=2, max_size=6))
def test_no_random_call_keeps_what_is_refused(body: list[list[str]], some_calls: list[dict[str, Any]]) -> None:
    refused = read("\n".join(line for lines in body for line in lines))
    for arguments in some_calls if refused is not None else ():
        assert_no_call_keeps(*refused, arguments, changed(arguments, some_calls[0]))


def changed(arguments: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """The same call after the operator changed its tensors in place, and its objects."""
    fixed = (int, float, str, bool, type(None), tuple)
    return {
        name: value if isinstance(value, fixed) or (name != "result" and type(others[name]) is not type(value))
        else others[name]
        for name, value in arguments.items()
    }  # fmt: skip


DECLARATIONS = [
    "x: any[D]", "x: T[D]", "x: T[3, D]", "x: None | any[D]", "x: floating[D, 2 | 4]", "x: any[B, ..., 3]", "x: any[3]",
    "x: (any[3], T[D])", "x: int64[D] @ cpu", "x: T[D] | T[D, 2]", "x: list[any[D]]", "x: any[D] = why(certain=False)",
    "n: int", "n: int", "n: None | int", "n: float", "n: 1 | 2 | 'a'", "n: str", "n: bool", "n: object", "n: None",
    "mode: 'left' | 'right'", "mode: str", "y: like(x)", "y: any[3 - D]", "y: any[2 * D]", "y: any[D]", "y: half[D, 3]",
    "y: any[D - n]", "returns: any[D]", "returns: T[3]", "m = D + 1", "m = n", "box.k: int", "box.w: any[D]",
]  # fmt: skip
PARTS = [
    "D", "D", "D", "n", "n", "n", "mode", "x.shape[0]", "x.shape[-1]", "x.shape[1]", "x.ndim", "len(x.shape)", "D % 2",
    "n % 3", "n % -2", "D % 4", "2 * D", "D - 3", "D // 2", "D / 2", "-n", "abs(n)", "n + 1", "x[0].shape[0]", "m",
    "x[1].shape[0]", "box.k", "n % 1.5", "n / 2", "y.shape[0]", "D * n", "min(D, 2)", "get(n, 1)", "ceildiv(D, 2)",
    "result.shape[0]", "(n if mode else D)", "numel(x)", "n // 0", "n % 2 - n",
]  # fmt: skip
NUMBERS = ["0", "1", "2", "3", "4", "-1", "2.5", "1.0", "True", "D", "n"]


def comparison(rng: random.Random) -> str:
    part = rng.choice(PARTS)
    match rng.randrange(12):
        case 0:
            return rng.choice([part, f"not {part}", f"{part} is None", f"{part} is not None", "has(n)", "has(x)"])
        case 1:
            return f"{part} {rng.choice(('in', 'not in'))} ({', '.join(rng.choices(NUMBERS, k=rng.randrange(4)))})"
        case 2:
            below, above = rng.choice(("<", "<=")), rng.choice(("<", "<="))
            return f"{rng.choice(NUMBERS)} {below} {part} {above} {rng.choice(NUMBERS)}"
        case 3:
            dtypes = ("half", "floating", "integer", "(float16, int64)", "(float32,)", "any")
            return f"{rng.choice(('T', 'x.dtype', 'y.dtype'))} {rng.choice(('in', 'not in'))} {rng.choice(dtypes)}"
        case 4:
            dtypes = ("int64", "y.dtype", "float16")
            return f"{rng.choice(('T', 'x.dtype'))} {rng.choice(('==', '!='))} {rng.choice(dtypes)}"
        case 5:
            return (
                f"{rng.choice(('n', 'mode', part))} {rng.choice(('==', '!=', '<'))} {rng.choice(('left', 'a', ''))!r}"
            )
    return f"{part} {rng.choice(('==', '==', '!=', '<', '<=', '>', '>='))} {rng.choice(NUMBERS)}"


def condition(rng: random.Random, depth: int = 0) -> str:
    match rng.randrange(8 if depth < 2 else 5):
        case 5:
            return f"({condition(rng, depth + 1)} and {condition(rng, depth + 1)})"
        case 6:
            return f"({condition(rng, depth + 1)} or {condition(rng, depth + 1)})"
        case 7:
            return f"(not {condition(rng, depth + 1)})"
    return comparison(rng)


def statements(rng: random.Random, depth: int = 0) -> list[str]:
    match rng.randrange(10 if depth < 2 else 8):
        case 0 if rng.random() < 0.3:
            return [rng.choice(DECLARATIONS)]
        case 2:
            return [
                f"{rng.choice(('ensure', 'ensure', 'require'))}({condition(rng)}{rng.choice(('', ', certain=False'))})"
            ]
        case 8 | 9:
            lines = [f"if {condition(rng, 1)}:"]
            for _ in range(rng.randrange(1, 3)):
                lines += [f"    {line}" for line in statements(rng, depth + 1)]
            if rng.random() < 0.5:
                lines += ["else:", *(f"    {line}" for line in statements(rng, depth + 1))]
            return lines
    return [f"require({condition(rng)})"]


def contract_text(rng: random.Random) -> str:
    chosen = [rng.choice(DECLARATIONS[:10]), *rng.sample(DECLARATIONS, rng.randrange(3))]
    declared = {text.partition(":")[0]: text for text in chosen}.values()  # a second one of a path is refused anyway
    return "\n".join([*declared, *(line for _ in range(rng.randrange(1, 6)) for line in statements(rng))])


def some_tensor(rng: random.Random) -> torch.Tensor:
    shape = [rng.choice((0, 1, 2, 3, 3, 4, 5)) for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3)))]
    return torch.zeros(shape, dtype=rng.choice((torch.float32, torch.float16, torch.int64)))


def some_scalar(rng: random.Random) -> Any:
    return rng.choice(
        (0, 1, 2, 3, 4, 5, -1, -2, -3, 0.5, 2.5, -1e-30, 4.5, float("nan"), float("inf"), -float("inf"), None, "left",
         "right", "a", "", True, False, (1, 2), (), 2**70, object(), torch.tensor(2), 3.0, 6, 7, 8)
    )  # fmt: skip


def some_call(rng: random.Random) -> dict[str, Any]:
    def value() -> Any:
        tensor = some_tensor(rng)
        return rng.choice((tensor, tensor, tensor, None, (some_tensor(rng), some_tensor(rng)), [tensor], "text", 3))

    x = value()
    return {
        "x": x, "y": rng.choice((x, value())), "z": None, "n": some_scalar(rng), "mode": some_scalar(rng),
        "box": rng.choice((None, SimpleNamespace(), SimpleNamespace(k=some_scalar(rng), w=value()))), "result": value(),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_no_call_keeps_what_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    some_calls = [some_call(rng) for _ in range(40)]
    seen = {True: 0, False: 0}
    for _ in range(500):
        refused = read(contract_text(rng))
        if refused is not None:
            seen[refused[1].alone] += 1
            for arguments in some_calls:
                assert_no_call_keeps(*refused, arguments, changed(arguments, rng.choice(some_calls)))
    assert min(seen.values()) > 5


# ---------------------------------------------------------------- in good time


@pytest.mark.parametrize(
    "body",
    [
        "\n".join(f"require(n > {number})" for number in range(2000)),
        "\n".join(f"require(n != {number})" for number in range(2000)),
        "\n".join(f"require(n % {2**100 + number} != 1)" for number in range(1000)),
        "n: int\n" + "\n".join(f"require(n % {number} == 1)" for number in range(2, 1500)),
        "n: int\n" + "\n".join(f"if mode == {number}:\n    require(n == {number})" for number in range(1000)),
        "require(n in (" + ", ".join(map(str, range(20_000))) + "))",
        "require(" + " and ".join(f"self.a{number} > 1" for number in range(5000)) + ")",
        "require(" + " or ".join(f"self.a{number} == n" for number in range(5000)) + ")",
        "require(" + " or ".join(f"(n == {number} and mode == {number})" for number in range(3000)) + ")",
        "x: any[D]\nrequire(D % (2 ** 128) == 1)\nrequire(D * 2 ** 128 > 2 ** 200)\nrequire(D ** D ** D > 1)",
        "x: any[D]\nrequire(D " + "* (2 ** 127) " * 50 + "> 1)",
    ],
    ids=range(11),
)
def test_it_ends_soon(body: str) -> None:
    started = time.perf_counter()
    with conflicts():
        parse_body(body, "operator", ("x", "n", "mode", "self"))
    assert time.perf_counter() - started < 30


@pytest.mark.parametrize("number", ["1" + "0" * 4000, "1e300", "True", "'a'", "None", "(1, 2)"])
def test_constants_of_every_kind(number: str) -> None:
    rules = [
        "D < LIMIT",
        "D == LIMIT",
        "D in (LIMIT, 2)",
        "D * LIMIT > n",
        "n % LIMIT == 1",
        "D - LIMIT != 0.5",
        "-LIMIT > D",
    ]
    for rule in rules:
        with conflicts():
            parse_stubs(f"LIMIT = {number}\ndef f(x, n):\n    x: any[D]\n    n: int\n    require({rule})\n")
    assert refusal("x: any[D]\nrequire(D * 9 " + f"* {2**127} " * 50 + "> n)\nrequire(1e300 * D > 2)") is None
