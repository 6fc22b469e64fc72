"""Whatever the text, reading it ends soon, in a contract or a ContractError; what was read reads the same again."""

from __future__ import annotations

import random
from importlib import resources
from pathlib import Path

from contracts_and_calls import PARAMETERS, contract_bodies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llm_op_guard as og
from llm_op_guard.contract.parse import docstring_section, parse_body, parse_stubs

FEW = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
SHIPPED = [
    file.read_text(encoding="utf-8")
    for file in (resources.files("llm_op_guard") / "contracts" / "transformers").iterdir()
    if file.name.endswith(".contract")
]
WORDS = [
    "def f(x):\n  ", "x", "y", ":", " ", "\n", "\n    ", "int64", "floating", "[", "]", "(", ")", "B", "L", "*", "...",
    "_", "|", "@", "dev", "=", "why(", "require(", "ensure(", "like(", "returns", "if ", "else:", "for ", "all(",
    ",", ".", "shape", "not ", "and ", "or ", "is None", "1", "-1", "1e400", "0x" + "f" * 40, "'", '"', "f'{x}'",
    "within(x, 0, B)", "//", "/", "%", "**", "lambda: 0", "{", "}", "\\", "#", "\t", "\r", "\x00", "\ud800", "é",
    "\u200b", "await x", "yield", "x := 1", "from os import system", "from ", "import ", "as ", "system(", "__import__",
]  # fmt: skip


def read(text: str) -> dict[str, og.Contract]:
    try:
        return parse_stubs(text)
    except og.ContractError as error:
        str(error)
        return {}


@FEW
@given(st.text())
def test_any_text(text: str) -> None:
    read(text)
    read(f"def f(x):\n    {text}")
    try:
        docstring_section(text)
        parse_body(text, "f", ("x",))
    except og.ContractError as error:
        str(error)


@FEW
@given(st.lists(st.sampled_from(WORDS), max_size=60))
def test_words_of_the_language_in_any_order(words: list[str]) -> None:
    read("".join(words))
    read("def f(x, y):\n    " + "".join(words))


@FEW
@given(st.sampled_from(SHIPPED), st.randoms(use_true_random=False), st.integers(1, 6))
def test_contracts_with_bytes_changed(text: str, rng: random.Random, changes: int) -> None:
    data = bytearray(text.encode())
    for _ in range(changes):
        position = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[position] = rng.randrange(256)
            case 1:
                del data[position : position + rng.randrange(1, 40)]
            case _:
                data[position:position] = data[rng.randrange(len(data)) :][: rng.randrange(1, 40)]
    read(data.decode("utf-8", "surrogateescape"))


@FEW
@given(st.binary(max_size=400))
def test_any_file(data: bytes) -> None:
    file = Path(__file__).with_name(".fuzz.contract")
    try:
        file.write_bytes(data)
        og.load(file)
    except og.ContractError as error:
        str(error)
    finally:
        file.unlink(missing_ok=True)


@FEW
@given(contract_bodies())
def test_the_normal_form_of_a_contract_is_the_contract(body: list[list[str]]) -> None:
    try:
        contract = parse_body("\n".join(line for lines in body for line in lines), "operator", PARAMETERS)
    except og.ContractError:
        return
    again = parse_stubs(contract.text)["operator"]
    assert again.text == contract.text
    assert [(r.id, r.cost_class, r.certain) for r in again.rules] == [
        (r.id, r.cost_class, r.certain) for r in contract.rules
    ]


@FEW
@given(contract_bodies(), st.lists(st.sampled_from(["fits", "known", "Limit"]), min_size=1, unique=True))
def test_the_normal_form_keeps_what_is_imported(body: list[list[str]], names: list[str]) -> None:
    lines = [f"from shop.{name} import {name}" for name in names] + [line for lines in body for line in lines]
    asked = [f"require({name}(x, n) or mode)" for name in names]
    try:
        contract = parse_body("\n".join([*lines, *asked]), "operator", PARAMETERS)
    except og.ContractError:
        return
    again = parse_stubs(contract.text)["operator"]
    assert (again.text, again.imports) == (contract.text, contract.imports)
    assert set(again.imports) == set(names)


def test_shipped_contracts_have_a_normal_form() -> None:
    for text in SHIPPED:
        for name, contract in parse_stubs(text).items():
            assert parse_stubs(contract.text)[name].hash == contract.hash


def test_long_flat_texts_are_read_in_good_time() -> None:
    rules = "\n".join(f"    require(x > {number})" for number in range(2000))
    assert len(read(f"def f(x):\n{rules}\n")["f"].rules) == 2000
    sizes = ", ".join(f"S{number}" for number in range(300))
    assert len(read(f"def f(x):\n    x: any[{sizes}]\n")["f"].symbols) == 300
