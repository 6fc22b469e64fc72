"""What is written for nothing is found, with its place and reason; and nothing is that says something."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from contracts_and_calls import PARAMETERS, calls, contract_bodies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_satisfiable import bound, changed, contract_text, holds, some_call

import llm_op_guard as og
from llm_op_guard.contract.json_form import parse_json, to_json
from llm_op_guard.contract.model import Contract, Require
from llm_op_guard.contract.parse import parse_body, parse_stubs
from llm_op_guard.contract.review import Finding, review
from llm_op_guard.guard.explain import explain
from llm_op_guard.guard.violation import Violation


def found(body: str) -> list[tuple[int, int, str, str]]:
    """What is found in a contract: line and column in the body, the kind, and the problem."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    contracts = parse_stubs(f"def operator(x, y, n, mode, self):\n{lines}\n", "f.contract")
    return [(f.line - 1, f.column - 4, f.kind, f.problem) for f in review(contracts) if f.kind != "unused"]


# ---------------------------------------------------------------- rules that say nothing new

REDUNDANT = {
    "x: any[D]\nrequire(D > 0)\nrequire(D > 4)": (2, 9, "this rule", "D > 0, while D > 4 is required in line 4"),
    "x: any[D]\nrequire(D > 4)\nrequire(D > 0, id='some')": (
        3, 9, "the rule 'some'", "D > 0, while D > 4 is required in line 3",
    ),
    "x: any[D]\nrequire(D > 4)\nrequire(D >= 5)": (3, 9, "this rule", "D >= 5, while D > 4 is required in line 3"),
    "x: any[D]\nrequire(D > 4, id='a')\nrequire(D > 4, id='b')": (
        3, 9, "the rule 'b'", "D > 4, while D > 4 is required in line 3",
    ),
    "x: any[D]\nrequire(D % 2 == 0)\nrequire(D % 4 == 0)": (
        2, 9, "this rule", "D % 2 == 0, while D % 4 == 0 is required in line 4",
    ),
    "x: any[D]\nrequire(D < 8)\nrequire(D > 4)\nrequire(D in (3, 6, 7))": (
        2, 9, "this rule", "D < 8, while D in (3, 6, 7) is required in line 5",
    ),
    "x: any[D]\nrequire(D >= 0)": (2, 9, "this rule", "D >= 0 is never false"),
    "x: any[3, D]\nrequire(x.shape[0] == 3)": (
        2, 9, "this rule", "x.shape[0] == 3, while x is declared as any[3, D] in line 2",
    ),
    "x: None | any[B, D]\nrequire(x.ndim == 2)": (
        2, 9, "this rule", "x.ndim == 2, while x is declared as None | any[B, D] in line 2",
    ),
    "x: half[D]\nrequire(x.dtype in floating)": (
        2, 9, "this rule", "x.dtype in floating, while x is declared as half[D] in line 2",
    ),
    "n: int\nrequire(n is not None)": (2, 9, "this rule", "n is not None, while n is declared as int in line 2"),
    "n: int\nif n % 2 == 0:\n    require(n % 2 == 0)": (
        3, 13, "this rule", "n % 2 == 0, while the branch of line 3 is for n % 2 == 0",
    ),
    "n: int\nif n > 8:\n    mode: int\nelse:\n    require(n < 10)": (
        5, 13, "this rule", "n < 10, while the branch of line 3 is for not (n > 8) and n is declared as int in line 2",
    ),
    "require(n > 4)\nif mode:\n    require(n > 2)": (3, 13, "this rule", "n > 2, while n > 4 is required in line 2"),
    "require(finite(x), id='a')\nif mode:\n    require(finite(x), id='b')": (
        3, 13, "the rule 'b'", "finite(x), while finite(x) is required in line 2",
    ),
    "require(finite(x) and n > 2)\nrequire(finite(x))": (
        2, 9, "this rule", "finite(x), while finite(x) and n > 2 is required in line 2",
    ),
    "require(finite(x))\nrequire(finite(y))\nrequire(finite(x) and finite(y))": (
        3, 9, "this rule",
        "finite(x) and finite(y), while finite(x) is required in line 2 and finite(y) is required in line 3",
    ),
    "require(x.device == y.device)\nrequire(n > 2 or not (x.device != y.device))": (
        2, 9, "this rule",
        "n > 2 or not x.device != y.device, while x.device == y.device is required in line 2",
    ),
    "x: any[D]\nrequire(D / 2 > n, id='a')\nrequire(D / 2 > n, id='b')": (
        3, 9, "the rule 'b'", "D / 2 > n, while D / 2 > n is required in line 3",
    ),
    "require(n > 4)\nrequire(n > 2, certain=False)": (2, 9, "this rule", "n > 2, while n > 4 is required in line 2"),
    "ensure(len(result) > 4)\nensure(len(result) > 2)": (
        2, 8, "this rule", "len(result) > 2, while len(result) > 4 is promised in line 2",
    ),
    "for t in (x, y):\n    require(t.ndim > 1)\n    require(t.ndim > 0)": (
        3, 13, "this rule", "x.ndim > 0, while x.ndim > 1 is required in line 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("body", REDUNDANT)
def test_a_rule_that_says_nothing_new(body: str) -> None:
    line, column, called, reason = REDUNDANT[body]
    assert found(body) == [(line, column, "redundant", f"{called} says nothing new: {reason}")]


# ---------------------------------------------------------------- rules that contradict each other

CONTRADICTORY = {
    "require(n > 8)\nrequire(n < 4)": (2, 9, "this rule", "n < 4, while n > 8 is required in line 2"),
    "require(n > 8)\nrequire(n < 4, id='few', certain=False)": (
        2, 9, "the rule 'few'", "n < 4, while n > 8 is required in line 2",
    ),
    "x: None | any[4]\nrequire(x.shape[0] == 3)": (
        2, 9, "this rule", "x.shape[0] == 3, while x is declared as None | any[4] in line 2",
    ),
    "require(finite(x))\nrequire(not finite(x))": (
        2, 9, "this rule", "not finite(x), while finite(x) is required in line 2",
    ),
    "if y.ndim != 2:\n    require(y.ndim in (2,))": (
        2, 13, "this rule", "y.ndim in (2,), while the branch of line 2 is for y.ndim != 2",
    ),
    "require(mode == 'a')\nif n:\n    require(mode == 'b')": (
        3, 13, "this rule", "mode == 'b', while mode == 'a' is required in line 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("body", CONTRADICTORY)
def test_a_rule_that_others_contradict(body: str) -> None:
    line, column, called, reason = CONTRADICTORY[body]
    assert found(body) == [(line, column, "contradictory", f"{called} is kept only where it does not apply: {reason}")]


# ---------------------------------------------------------------- branches

BRANCHES = {
    "x: any[D]\nif D < 0:\n    n: int": (2, "never-taken", "no call comes here: D < 0 is never true"),
    "n: int\nif n is None:\n    mode: int": (
        2, "never-taken", "no call comes here: n is None, while n is declared as int in line 2",
    ),
    "if n > 8:\n    if n < 4:\n        mode: int": (
        2, "never-taken", "no call comes here: n < 4, while the branch of line 2 is for n > 8",
    ),
    "if n > 8:\n    mode: int\nelif n > 9:\n    mode: str": (
        3, "never-taken", "no call comes here: n > 9, while the branch of line 2 is for not (n > 8)",
    ),
    "require(n > 8)\nif n < 4:\n    mode: int": (
        2, "never-taken", "no call comes here: n < 4, while n > 8 is required in line 2",
    ),
    "if finite(x):\n    if not finite(x):\n        mode: int": (
        2, "never-taken", "no call comes here: not finite(x), while the branch of line 2 is for finite(x)",
    ),
    "require(n > 8)\nif n > 4:\n    mode: int\nelse:\n    mode: str": (
        2, "never-taken", "no call comes to the else of this: n > 4, while n > 8 is required in line 2",
    ),
    "n: int\nif n is not None:\n    mode: int": (
        2, "always-taken", "every call that comes here takes this branch: n is not None, while n is declared as int in "
        "line 2",
    ),
    "n: int\nif n > 8:\n    mode: str\nelif n <= 8:\n    mode: int": (
        4, "always-taken", "every call that comes here takes this branch: n <= 8, while the branch of line 3 is for "
        "not (n > 8) and n is declared as int in line 2",
    ),
    "x: any[B]\ny: any[B]\nfor t in (x, y):\n    if t.ndim == 2:\n        require(finite(t))": (
        4, "never-taken", "no call comes here: x.ndim == 2, while x is declared as any[B] in line 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("body", BRANCHES)
def test_a_branch_that_none_or_all_take(body: str) -> None:
    line, kind, problem = BRANCHES[body]
    column = len(body.splitlines()[line - 1]) - len(body.splitlines()[line - 1].lstrip()) + 1
    assert found(body) == [(line, column, kind, problem)]


# ---------------------------------------------------------------- what is left alone

LEFT_ALONE = [
    # A rule that tells more than the others, at a boundary.
    "x: any[D]\nrequire(D > 4)\nrequire(D > 5, certain=False)\nrequire(D < 9)",
    "x: any[D]\nrequire(D > 0)",
    "x: any[D]\nrequire(D % 4 == 0)\nrequire(D % 6 == 0)",
    "n: float\nrequire(n > 2)\nrequire(n >= 2 and n != 2.5)",
    "if n > 8:\n    mode: str\nelif n <= 8:\n    mode: int",  # NaN
    "n: float\nrequire(n >= 0 or n < 0)",  # NaN
    "require(n == n)",  # NaN
    # The other says less, or is not judged wherever this one is.
    "require(n > 2)\nrequire(n > 4, certain=False)",
    "n: int = why(certain=False)\nrequire(n is not None)",
    "require(n > 2)\nrequire(n > 4 and finite(x))",
    "if mode:\n    require(n > 4)\nrequire(n > 2)",
    "if mode:\n    require(n > 4)\nelse:\n    require(n > 2)",
    "require(n > 2)\nensure(n > 2, id='after')",
    "x: any[3]\nensure(x.shape[0] == 3)",
    "require(n > 2 and n == recall(self, 'n'))\nrequire(n > 1)",  # a program is traced
    "require(n > 1)\nrequire(mode == 1 or n > 2)",
    # The later part of a rule is not looked at where the first does not apply.
    "require(n > 2 and finite(x))\nrequire(finite(x))",
    # A division is a rule of its own.
    "x: any[D]\nrequire(D > 4)\nrequire(D / 2 > 1)",
    "x: any[D]\nrequire(D > 4)\nrequire(D % n >= 0 or D > 3)",
    "x: any[D]\nrequire(D > 4)\nif D / 2 > 1:\n    mode: int",
    # Rules about one argument, which may be of several kinds.
    "require(n >= 0)\nrequire(n >= 'a')",
    "require(n is None or n > 2)\nrequire(n is None or mode > 2)",
    # A suspect rule says that a branch is unusual.
    "if n > 8:\n    require(n < 4, certain=False)",
    # Where a test does not apply, neither branch is taken.
    "if n > 8:\n    mode: int\nelse:\n    mode: str",
    "x: None | any[D]\nif x.ndim == 1:\n    mode: int",
    # One copy of a loop says something.
    "x: any[B, D]\nfor t in (x, y):\n    require(t.ndim == 2)",
    "x: any[B]\nfor t in (x, y):\n    if t.ndim == 2:\n        require(finite(t))",
    # Under autocast a symbol of dtypes is another dtype than that of the argument.
    "x: T[B]\ny: T[B]\nrequire(T in half)\nrequire(x.dtype in half)",
]


@pytest.mark.parametrize("body", LEFT_ALONE)
def test_what_says_something_is_left_alone(body: str) -> None:
    assert found(body) == []


# ---------------------------------------------------------------- names

UNUSED = {
    "def f(x): x: any[B]": (1, 18, "'B' stands here only and says nothing: write _ for any size"),
    "def f(x): x: any[*lead]": (1, 19, "'lead' stands here only and says nothing: write ... for any dimensions"),
    "def f(x): x: T[_]": (1, 14, "'T' stands here only and says nothing: write any for any dtype"),
    "def f(x): x: any[_] @ dev": (1, 23, "'dev' stands here only and says nothing: leave it out"),
    "def f(x): x: any[2, _]; m = x.shape[0]": (1, 25, "nothing uses 'm'"),
    "def f(x): x: any[2, _]; m, o = x.shape": (1, 25, "nothing uses 'm' and 'o'"),
    "SIZES = (1, 2)\ndef f(n): require(n > 1)": (1, 1, "no contract uses 'SIZES'"),
    "from shop import fits\ndef f(n): require(n > 1)": (1, 18, "no contract uses 'fits'"),
}


@pytest.mark.parametrize("text", UNUSED)
def test_a_name_that_nothing_uses(text: str) -> None:
    line, column, problem = UNUSED[text]
    (finding,) = review(parse_stubs(text, "f.contract"))
    assert (finding.line, finding.column, finding.kind, finding.problem) == (line, column, "unused", problem)
    assert (finding.contract, finding.rule) == (None if "no contract" in problem else "f", None)


@pytest.mark.parametrize(
    "text",
    [
        "def f(x, y): x: any[B]; y: any[B]",
        "def f(x, y): x: any[B]; y: any[B + 1]",
        "def f(x): x: any[B] = why(hint=f'{B} rows')",
        "def f(x): x: any[2 * K]",  # an even size
        "def f(x): x: list[T[B, ...] @ dev]",  # the items share them
        "def f(x): x: (any[B], any[B])",
        "def f(x, n): x: any[n]",
        "def f(x, n): x: any[B]; require(n == B)",
        "def f(x, self): x: any[B]; remember(self, rows=B)",
        "def f(x): x: any[D, _]; m = x.shape[0] / 2; require(D > 1)",  # an even size
        "def f(x): m, o = x.shape; require(m > 1)",
        "def f(x): m = x.shape[0]; require(x.ndim > 1, because=f'{m}')",
        "def f(x, y): m = x.shape; y: any[*m.shape]",
        "SIZES = (1, 2)\ndef f(n): require(n > 1)\ndef g(n): require(n in SIZES)",
        "from shop import fits\ndef f(n): require(fits(n))",
    ],
)
def test_a_name_that_is_used(text: str) -> None:
    assert review(parse_stubs(text, "f.contract")) == []


# ---------------------------------------------------------------- alternatives

COVERED = {
    "int | 3": "3 adds nothing to int",
    "3 | int": "3 adds nothing to int",
    "int | True": "True adds nothing to int",
    "float | int": "int adds nothing to float",
    "float | 2.5": "2.5 adds nothing to float",
    "str | 'a'": "'a' adds nothing to str",
    "bool | True": "True adds nothing to bool",
    "None | object": "None adds nothing to object",
    "any[2] | object": "any[2] adds nothing to object",
    "(half | floating)[2]": "half adds nothing to floating",
    "(int64 | any)[2]": "int64 adds nothing to any",
    "(int64 | int64)[2]": "int64 stands here twice",
    "any[2 | 2]": "2 stands here twice",
    "any[2] @ (cpu | cpu)": "cpu stands here twice",
    "(int | 3, str)": "3 adds nothing to int",
    "list[int | 3]": "3 adds nothing to int",
}


@pytest.mark.parametrize("declared", COVERED)
def test_an_alternative_that_another_covers(declared: str) -> None:
    assert found(f"x: {declared}") == [(1, 1, "covered", f"x: {COVERED[declared]}")]


@pytest.mark.parametrize(
    "declared",
    ["int | 2.5", "int | 'a'", "str | 3", "int | str", "bool | 2", "None | int", "(half | int64)[2]", "any[2 | 3]",
     "any[2] @ (cpu | cuda)", "object", "int | bool", "any[2] | int", "(int, int)", "1 | 2"],
)  # fmt: skip
def test_alternatives_that_differ(declared: str) -> None:
    assert found(f"x: {declared}") == []


# ---------------------------------------------------------------- where it is said


def test_a_finding_shows_its_line() -> None:
    (finding,) = review(parse_stubs("def f(n):\n    require(n > 4)\n    require(n > 2, id='few')\n", "f.contract"))
    assert str(finding) == (
        "f.contract:3:13: warning: the rule 'few' says nothing new: n > 2, while n > 4 is required in line 2\n"
        "        require(n > 2, id='few')\n"
        "                ^"
    )
    assert (finding.contract, finding.rule) == ("f", "few")


def test_a_finding_in_json_has_its_place_there() -> None:
    text = '{"name": "f", "signature": "n", "body": [\n{"require": "n > 4"},\n{"require": "n > 2"}]}'
    (finding,) = review(parse_json(text, "f.json"))
    assert (finding.line, finding.column) == (3, 13)
    assert finding.problem == (
        "body[1].require: this rule says nothing new: n > 2, while n > 4 is required in line 2"
    )  # fmt: skip
    text = (
        '{"constants": {"SIZES": "1"}, "contracts": [{"name": "f", "signature": "n", "body": [{"require": "n > 4"}]}]}'
    )
    (finding,) = review(parse_json(text, "f.json"))
    assert finding.problem == "constants.SIZES: no contract uses 'SIZES'"


SHIPPED = [
    *(Path(og.__file__).parent / "contracts").rglob("*.contract"),
    *(Path(__file__).parents[1] / "yardstick").glob("*.contract"),
]


@pytest.mark.parametrize("file", sorted(SHIPPED), ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_what_is_shipped_says_nothing_for_nothing(file: Any) -> None:
    contracts = parse_stubs(file.read_text(encoding="utf-8"), file.name)
    assert review(contracts) == []
    assert review(parse_json(json.dumps(to_json(contracts)), file.name)) == []


@pytest.mark.parametrize(
    "body",
    [
        "\n".join(f"require(n > {number})" for number in range(2000)),
        "n: int\n" + "\n".join(f"if mode == {number}:\n    require(n == {number})" for number in range(1000)),
        "require(" + " or ".join(f"self.a{number} == n" for number in range(2000)) + ")",
        "require(" + " and ".join(f"(n == {number} or mode == {number})" for number in range(800)) + ")",
        "\n".join(f"{'    ' * depth}if n != {depth}:" for depth in range(50)) + "\n" + "    " * 50 + "require(n == 51)",
    ],
    ids=range(5),
)
def test_it_ends_soon(body: str) -> None:
    contract = parse_body(body, "operator", ("x", "n", "mode", "self"))
    started = time.perf_counter()
    review({"operator": contract})
    assert time.perf_counter() - started < 30


def test_a_hundred_rules_about_one_expression_are_looked_at() -> None:
    body = "\n".join(f"require(n != {number})" for number in range(100))
    assert found(f"{body}\nrequire(n > 0)") == [
        (1, 9, "redundant", "this rule says nothing new: n != 0, while n > 0 is required in line 102")
    ]


# ---------------------------------------------------------------- nothing is said wrongly


def read(text: str) -> Contract | None:
    try:
        return parse_body(text, "operator", PARAMETERS)
    except og.ContractError:
        return None


def judged(
    contract: Contract, before: Mapping[str, Any], after: Mapping[str, Any], classes: tuple[str, ...] = ("A", "B")
) -> list[Violation]:
    """What a call breaks, `before` and `after` being its arguments."""
    early = {name: value for name, value in before.items() if name != "result"}
    violations = explain(contract, early, classes=classes)
    if any(violation.certain for violation in violations):
        return violations
    bindings = bound(contract, early, {}, after=False)
    known = {**bindings.values.symbols, **bindings.values.assigned}
    return violations + explain(contract, after, classes=classes, after_call=True, known=known)


def verdict(violations: list[Violation]) -> tuple[bool, bool]:
    return bool(violations), any(violation.certain for violation in violations)


def without_line(text: str, line: int) -> str:
    lines = text.splitlines()
    lines[line - 1] = re.match(r"\s*", lines[line - 1])[0] + "pass"  # type: ignore[index]
    return "\n".join(lines)


def without_name(text: str, finding: Finding) -> str:
    """The text with what the finding says to write instead."""
    lines = text.splitlines()
    line, start = lines[finding.line - 1], finding.column - 1
    name = re.match(r"\w+", line[start:])[0]  # type: ignore[index]
    if "leave it out" in finding.problem:
        lines[finding.line - 1] = line[:start].removesuffix(" @ ") + line[start + len(name) :]
        return "\n".join(lines)
    instead = re.search(r"write (\S+) for", finding.problem)[1]  # type: ignore[index]
    before = line[:start].removesuffix("*") if instead == "..." else line[:start]
    lines[finding.line - 1] = before + instead + line[start + len(name) :]
    return "\n".join(lines)


def assert_right(text: str, contract: Contract, finding: Finding, some_calls: list[dict[str, Any]]) -> bool:
    """Whether anything could be asked of these calls."""
    pairs = [(arguments, changed(arguments, some_calls[0])) for arguments in some_calls]
    shown = (text, str(finding), some_calls)
    match finding.kind:
        case "redundant" | "unused":
            shorter = (
                without_line(text, finding.line)
                if "stands here" not in finding.problem
                else without_name(text, finding)
            )
            other = read(shorter)
            if other is None:
                return False  # it is refused for something else, which a name of no value kept it from
            for before, after in pairs:
                for classes in (("A",), ("A", "B")):
                    one, two = (judged(c, before, after, classes) for c in (contract, other))
                    assert verdict(one) == verdict(two), shown
        case "contradictory":
            clauses = [c for c in contract.clauses if c.statement.place.lineno == finding.line]
            for before, after in pairs:
                kept = not judged(contract, before, after)
                for clause in clauses if kept else ():
                    assert isinstance(clause.statement, Require)
                    bindings = of_phase(contract, before, after, clause.after_call)
                    if all(holds(bindings, c.test.node, c.wanted) for c in clause.conditions):
                        assert not holds(bindings, clause.statement.expr.node), shown
        case "never-taken" | "always-taken":
            never, wanted = finding.kind == "never-taken", "the else" not in finding.problem
            for clause in contract.clauses:
                for number, condition in enumerate(clause.conditions):
                    if condition.place.lineno != finding.line or (never and condition.wanted is not wanted):
                        continue
                    for before, after in pairs:
                        if verdict(judged(contract, before, after))[1]:
                            continue
                        bindings = of_phase(contract, before, after, clause.after_call)
                        if all(holds(bindings, c.test.node, c.wanted) for c in clause.conditions[:number]):
                            assert holds(bindings, condition.test.node, condition.wanted) is not never, shown
    return True


def of_phase(contract: Contract, before: Mapping[str, Any], after: Mapping[str, Any], after_call: bool) -> Any:
    early = {name: value for name, value in before.items() if name != "result"}
    bindings = bound(contract, early, {}, after=False)
    if not after_call:
        return bindings
    return bound(contract, dict(after), {**bindings.values.symbols, **bindings.values.assigned}, after=True)


# Few expressions, so that statements often speak of the same one.
ATOMS = [
    "n > 1", "n > 2", "n >= 3", "n < 2", "n == 2", "n != 2", "n in (1, 2)", "n % 2 == 0", "n is None", "not n", "n",
    "n > D", "D > 1", "D >= 0", "D < 3", "D == 2", "D % 2 == 0", "D % 4 == 0", "D / 2 > 0", "D == n", "D in (2, 3, 4)",
    "D % n == 0", "x.ndim == 1", "x.ndim > 1", "x.ndim != 2", "x.shape[0] == D", "x.shape[0] > 2", "x.dtype in half",
    "T in floating", "has(box.k)", "box.k == 2", "box.k > 1", "get(box.k, 1) > 0", "box is not None", "finite(x)",
    "finite(y)", "mode == 'a'", "mode", "mode == n", "x is not None", "x.dtype == y.dtype", "y.ndim == x.ndim",
    "len(x.shape) == 2", "1 <= n < 3",
]  # fmt: skip
TYPES = [
    "x: any[D]", "x: any[D]", "x: T[D, ...]", "x: None | any[D]", "x: half[D] | any[D, 2]", "n: int", "n: float",
    "n: None | int", "y: like(x)", "y: any[D + 1]", "n: 1 | 2", "mode: str", "box.k: int", "y: int64[_]",
    "x: any[D] = why(certain=False)", "n: int = why(certain=False)", "returns: any[D]", "m = n", "y: list[any[D]]",
]  # fmt: skip


def pointed(rng: random.Random, depth: int = 0) -> str:
    match rng.randrange(9 if depth < 2 else 6):
        case 6:
            return f"({pointed(rng, depth + 1)} and {pointed(rng, depth + 1)})"
        case 7:
            return f"({pointed(rng, depth + 1)} or {pointed(rng, depth + 1)})"
        case 8:
            return f"(not {pointed(rng, depth + 1)})"
    return rng.choice(ATOMS)


def pointed_statements(rng: random.Random, depth: int = 0) -> list[str]:
    match rng.randrange(8 if depth < 3 else 5):
        case 0 if rng.random() < 0.3:
            return [rng.choice(TYPES)]
        case 5 | 6:
            lines = [f"if {pointed(rng, 1)}:"]
            for _ in range(rng.randrange(1, 3)):
                lines += [f"    {line}" for line in pointed_statements(rng, depth + 1)]
            if rng.random() < 0.5:
                lines += ["else:", *(f"    {line}" for line in pointed_statements(rng, depth + 1))]
            return lines
        case 7:
            inner = rng.choice(("t.ndim > 1", "t.dtype in half", "finite(t)", "t.ndim == 1 or n > 1"))
            return ["for t in (x, y):", f"    require({inner})"]
    keywords = rng.choice(("", "", ", certain=False", f", id='{rng.randrange(1000)}'"))
    return [f"{rng.choice(('require', 'require', 'ensure'))}({pointed(rng)}{keywords})"]


def pointed_text(rng: random.Random) -> str:
    chosen = {text.partition(":")[0]: text for text in rng.sample(TYPES, rng.randrange(1, 4))}.values()
    return "\n".join([*chosen, *(line for _ in range(rng.randrange(1, 6)) for line in pointed_statements(rng))])


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(contract_bodies(), st.lists(calls(), min_size=2, max_size=6))
def test_no_random_call_shows_a_finding_wrong(body: list[list[str]], some_calls: list[dict[str, Any]]) -> None:
    text = "\n".join(line for lines in body for line in lines)
    contract = read(text)
    if contract is not None:
        for finding in review({"operator": contract}):
            assert_right(text, contract, finding, some_calls)


@pytest.mark.parametrize("seed", range(4))
def test_no_call_shows_a_finding_wrong(seed: int) -> None:
    rng = random.Random(seed)
    some_calls = [some_call(rng) for _ in range(12)]
    seen: Counter[str] = Counter()
    for _ in range(150):
        text = rng.choice((contract_text, pointed_text, pointed_text))(rng)
        contract = read(text)
        for finding in review({"operator": contract}) if contract is not None else ():
            seen[finding.kind] += assert_right(text, contract, finding, some_calls)
    assert min(seen[kind] for kind in ("redundant", "contradictory", "never-taken", "unused")) > 0
