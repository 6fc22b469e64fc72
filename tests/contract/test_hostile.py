"""Contracts come from outside: no text of theirs reaches the generated code, and none is accepted that says nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import llm_op_guard as og

BREAK_OUT = "a\n    except Exception: pass\n    open({mark!r}, 'w')\n    try:\n        import sys"


@pytest.mark.parametrize("character", ["\n", "\r", "\x0b", "\x0c", "\x85", "\u2028", "\0"])
def test_an_id_is_one_line(character: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    file = tmp_path / "hostile.contract"
    hostile = BREAK_OUT.format(mark=str(mark)).replace("\n", character)
    file.write_text(f"def f(n):\n    n: int\n    require(n > 1, id={hostile!r})\n")
    with pytest.raises(og.ContractError, match="id= is a text of one line"):
        og.load(file)
    assert not mark.exists()


@pytest.mark.parametrize(
    "body",
    [
        "require(n == {text!r})",
        "require(n in ({text!r}, 1), hint={text!r}, because={text!r})",
        "n: {text!r} | int",
        "require(m[{text!r}] == 1)",
        "m[{text!r}]: int",
        "if n == {text!r}:\n    require(m == 2)",
    ],
)
def test_texts_of_a_contract_are_never_code(body: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    for character in ("\n", "\r", "\u2028", "'''\n", '"""\n', "\\\n"):
        text = BREAK_OUT.format(mark=str(mark)).replace("\n", character)

        @og.guard(body.format(text=text))
        def operator(n: Any, m: Any = None) -> None: ...

        with og.policy(A="record"):
            for n in (1, text, None):
                operator(n, {text: 1})
    assert not mark.exists()


SAYS_NOTHING = {
    "x: floating[B]\nrequire(x > 5)": "x is a tensor, which has no truth and no order",
    "x: floating[B]\nrequire(x)": "x is a tensor, which has no truth and no order",
    "x: floating[B]\nrequire(not x)": "x is a tensor, which has no truth and no order",
    "x: floating[B]\ny: floating[B]\nrequire(x == y)": "x is a tensor, which has no truth and no order",
    "x: int64[B]\nrequire(within(x, 'a', 3))": "within takes a number; 'a' is a text",
    "y: float\nrequire(finite(y))": "finite takes a tensor; y is a number",
    "y: int\nrequire('a' * y == 'b')": "arithmetic is for numbers",
    "a = a\nrequire(a > 1)": "a name is defined by itself",
    "x: any[B]\nrequire(x.dtyp == int64)": "'dtyp' is not read from a tensor; did you mean 'dtype'",
    "x: any[B]\nrequire(x.is_meta)": "'is_meta' is not read from a tensor; what can be read from a tensor: shape",
    "x: any[B]\nrequire(x.device.type == 'cpu')": "'type' is not read from a device",
    "x: any[B]\nrequire(len(x) > 1)": "len takes a sequence; x is a tensor: x.shape",
    "x: any[B]\nrequire(x[0] > 1)": r"x is a tensor, whose items only value functions read, such as first\(x\[0\]\)",
    "x: any[B]\nrequire(x[y] > 1)": "x is a tensor, whose items only value functions read",
    "x: any[B, C]\nrequire(x[y, 0] > 1)": "x is a tensor, whose items only value functions read",
    "x: any[B]\nif has(x[0]):\n    require(y > 1)": "x is a tensor, whose items only value functions read",
    "for n in y:\n    require(y[n:] == 1)": "Slice is not in the language",
    "require(1 == 1)": "the condition reads nothing of the call",
    "require('yes')": "the condition reads nothing of the call",
    "require(y > 1e999)": "the number is too large",
    "require(y > 1, because=3)": "because= and hint= are texts",
}


@pytest.mark.parametrize("body", SAYS_NOTHING)
def test_conditions_that_could_never_be_judged_are_refused(body: str) -> None:
    with pytest.raises(og.ContractError, match=SAYS_NOTHING[body]):

        @og.guard(body)
        def operator(x: Any, y: Any = None) -> None: ...


def test_names_of_parameters_may_be_anything() -> None:
    @og.guard("x: floating[B, D]\ntype: int\n_1: int\nrequire(len(isinstance) == type)")
    def operator(x: Any, type: Any, _1: Any, isinstance: Any, result: Any = 1, B: Any = None) -> Any:  # noqa: A002
        return result

    x = torch.ones(2, 3)
    assert operator(x, 2, 3, "ab") == 1  # B is a parameter and no number: nothing is said of that size
    assert operator(x, 2, 3, "ab", B=2) == 1
    with pytest.raises(og.GuardError, match=r"x\.shape\[0\] = 2, expected B = 3"):
        operator(x, 2, 3, "ab", B=3)
    with pytest.raises(og.GuardError, match="_1 is a str"):
        operator(x, 2, "3", "ab")
    with pytest.raises(og.ContractError, match="'result' is a parameter here and a word of the language"):
        og.guard("require(result > 1)")(lambda result: None)


# ---------------------------------------------------------------- imports


@pytest.mark.parametrize("target", ["os.system", "subprocess.run", "webbrowser.open"])
def test_a_contract_runs_nothing_of_what_it_imports(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = target.split(".")
    ran: list[Any] = []
    monkeypatch.setattr(f"{module}.{name}", lambda *arguments: ran.append(arguments), raising=True)
    file = tmp_path / "hostile.contract"
    file.write_text(
        f"from {module} import {name}\ndef f(n):\n    n: int\n    m = {name}('touch x')\n"
        f"    if {name}(n):\n        require(m > n)\n    require({name}('x') or n > {name}(n), hint=f'{{{name}(m)}}')\n"
    )
    contract = og.load(file)["f"]
    assert {rule.cost_class for rule in contract.rules if rule.id != "n.type"} == {"C"}
    assert og.guard(contract)(lambda n: n)(3) == 3
    with pytest.raises(og.GuardError, match="n is a str"):
        og.guard(contract)(lambda n: n)("x")
    for judge in (lambda: og.verify(contract, 3), lambda: og.ingress(contract, max_bytes=99)):
        with pytest.raises(og.PredicateError, match=rf"asks {module}\.{name}, which nobody registered"):
            judge()
    assert ran == []


@pytest.mark.parametrize(
    "line",
    [
        "from os import __import__",
        "from builtins import __import__",
        "from __builtins__ import eval",
        "from __future__ import annotations",
        "from os.__dict__ import system",
        "from os import system as finite",
        "from os import *",
        "from os import finite",
        "from os import require",
        "from .os import system",
        "import os",
        "import os.path as require",
    ],
)
def test_imports_that_could_mean_something_else_are_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "hostile.contract"
    file.write_text(f"{line}\ndef f(x):\n    require(finite(x))\n")
    with pytest.raises(og.ContractError):
        og.load(file)


def test_an_imported_name_is_no_object_to_read_from() -> None:
    for body in ("require(system.__globals__ > x)", "require(system.x > x)", "y = system", "require(system[0] > x)"):
        with pytest.raises(og.ContractError):
            og.guard(f"from os import system\n{body}")(lambda x, y=None: None)
    assert callable(os.system)


# ---------------------------------------------------------------- what a file may hold


@pytest.mark.parametrize(
    "literal",
    ["{1, 2}", "b'a'", "...", "2j", "1e400", "-1e400", "(1, {2})", "{'a': [1, ...]}", "{(1, 2j): 3}", "[1e999]"],
)
def test_constants_are_numbers_texts_and_what_holds_them(literal: str, tmp_path: Path) -> None:
    file = tmp_path / "a.contract"
    file.write_text(f"TABLE = {literal}\ndef f(n):\n    require(n in TABLE)\n")
    with pytest.raises(og.ContractError, match="a constant is a number, a text, or a tuple, list or dict of these"):
        og.load(file)
    file.write_text("TABLE = {('a', -1): [1.5, True, None], 2: {}}\ndef f(n):\n    require(n in TABLE[2])\n")
    og.load(file)


def test_constants_have_names_of_ascii(tmp_path: Path) -> None:
    file = tmp_path / "a.contract"
    file.write_text("\u0391\u0392\u0393 = 3\ndef f(n):\n    require(n < \u0391\u0392\u0393)\n")
    with pytest.raises(og.ContractError, match=r"a constant has a name of capitals \(A to Z\)"):
        og.load(file)


@pytest.mark.parametrize(
    "body",
    [
        "require(n > 1, hint='\\ud800')",
        "require(n > 1, because=f'{n} \\udfff')",
        "require(n > 1, id='\\ud800')",
        "require(n == '\\ud800')",
        "n: '\\ud800' | int",
        "'\\ud800'\n    n: int",
        "n: int = why(because='\\ud800')",
        "pass\ndef g(n='\\ud800'):\n    pass",
    ],
)
def test_a_text_that_cannot_be_written_is_refused(body: str, tmp_path: Path) -> None:
    file = tmp_path / "a.contract"
    file.write_text(f"def f(n):\n    {body}\n")
    with pytest.raises(og.ContractError, match="half a character") as caught:
        og.load(file)
    str(caught.value).encode()


def test_a_contract_in_python_with_half_a_character_is_refused() -> None:
    with pytest.raises(og.ContractError) as caught:
        og.guard("require(n > 1, hint='\ud800')")(lambda n: n)
    str(caught.value).encode()


@pytest.mark.parametrize("name", ["a.contract", "a.json"])
def test_a_byte_order_mark_is_no_part_of_the_text(name: str, tmp_path: Path) -> None:
    text = {"a.contract": "def f(n):\n    n: int\n    require(n >> 1)\n"}.get(
        name, '{"name": "f", "signature": "n", "body": [{"require": "n >> 1"}]}'
    )
    file = tmp_path / name
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    with pytest.raises(og.ContractError) as marked:
        og.load(file)
    file.write_text(text)
    with pytest.raises(og.ContractError) as plain:
        og.load(file)
    assert str(marked.value) == str(plain.value)
    file.write_bytes(b"\xef\xbb\xbf" + text.replace(">>", ">").encode())
    assert og.load(file)["f"].rules
