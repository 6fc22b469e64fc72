"""`from module import predicate`: noted when the contract is read, and nothing more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_body, parse_stubs
from llm_op_guard.contract.vocabulary import FUNCTIONS

HEAD = "from shop.rules import fits, known\n"


def stub(body: str, parameters: str = "x, y, z", head: str = HEAD) -> og.Contract:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return parse_stubs(f"{head}def operator({parameters}):\n{lines}\n", "f.contract")["operator"]


def classes(contract: og.Contract) -> dict[str, str]:
    return {rule.id: rule.cost_class for rule in contract.rules}


def test_a_contract_keeps_the_predicates_that_it_asks() -> None:
    assert stub("require(fits(x))").imports == {"fits": "shop.rules"}
    assert stub("require(fits(x, known(y)), hint='a')").imports == {"fits": "shop.rules", "known": "shop.rules"}
    assert stub("require(x > 1)").imports == {}
    body = parse_body(f"'''Says.'''\n{HEAD}require(fits(x))", "f", ("x",))
    assert (body.imports, body.doc) == ({"fits": "shop.rules"}, "Says.")


def test_a_docstring_and_a_string_may_import() -> None:
    @og.guard("from shop.rules import fits\nx: int\nrequire(fits(x))")
    def one(x: int) -> int:
        return x

    @og.guard
    def two(x: int) -> int:
        """Do.

        Contract:
            from shop.rules import fits
            x: int
            require(fits(x))
        """
        return x

    assert one(1) == two(1) == 1


@pytest.mark.parametrize(
    "body",
    [
        "require(fits(x), id='a')",
        "require(x > 1 and fits(x, y.shape[0] + 1, 'a', (1, y), -1), id='a')",
        "require(all(fits(i) for i in x), id='a')",
        "require(len(x) == 3 or known(x) > 2, id='a')",
        "n = fits(x)\nrequire(n > 3, id='a')",
        "n = fits(x)\nm = n + 1\nrequire(y == m, id='a')",
        "if fits(x):\n    require(y > 1, id='a')",
        "if y > 2:\n    pass\nelif fits(x):\n    require(y > 1, id='a')",
        "if fits(x):\n    pass\nelse:\n    require(y > 1, id='a')",
        "if fits(x):\n    y: any[N]\nz: any[N + 1]\nrequire(N > 1, id='a')",
    ],
)
def test_what_asks_a_predicate_is_of_class_c(body: str) -> None:
    assert classes(stub(body))["a"] == "C"


def test_what_needs_no_predicate_keeps_its_class() -> None:
    contract = stub(
        "x: int64[N]\nn = fits(x)\nif y > 1:\n    m = fits(y)\nelse:\n    m = 3\n"
        "require(N > 1, id='a')\nrequire(within(x, 0, 3), id='b')\nrequire(m > 1, id='m')\nrequire(n > 1, id='c')"
    )
    assert {name: classes(contract)[name] for name in "abcm"} == {"a": "A", "b": "B", "c": "C", "m": "A"}


def test_imports_are_part_of_text_and_hash() -> None:
    contract = stub("require(fits(x, known(y)))")
    assert contract.text == (
        "from shop.rules import fits\nfrom shop.rules import known\n"
        "def operator(x, y, z):\n    require(fits(x, known(y)))\n"
    )
    again = parse_stubs(contract.text)["operator"]
    assert (again.text, again.imports, classes(again)) == (contract.text, contract.imports, classes(contract))
    other = stub("require(fits(x, known(y)))", head="from shop.other import fits\nfrom shop.rules import known\n")
    assert other.hash != contract.hash
    turned = stub("require(fits(x, known(y)))", head="from shop.rules import known\nfrom shop.rules import fits\n")
    assert turned.hash == contract.hash


REFUSED = {
    "import shop": ("predicates are imported as: from package.module import name", 1),
    "from . import fits": ("a module is named in full; there are no relative imports", 1),
    "from .rules import fits": ("a module is named in full; there are no relative imports", 1),
    "from shop import *": ("predicates are imported one by one, by name", 18),
    "from shop import fits as f": ("a predicate keeps its name; `as` is not in the language", 18),
    "from shop import __import__": ("'__import__': names do not begin with two underscores", 18),
    "from __future__ import annotations": ("nothing is imported from '__future__'", 1),
    "from __builtins__ import eval": ("nothing is imported from '__builtins__'", 1),
    "from shop.__main__ import fits": ("nothing is imported from 'shop.__main__'", 1),
    "from shop import len": ("'len' has a meaning in the language; give the predicate another name", 18),
    "from shop import finite": ("'finite' has a meaning in the language; give the predicate another name", 18),
    "from shop import all": ("'all' has a meaning in the language; give the predicate another name", 18),
    "from shop import items": ("'items' has a meaning in the language; give the predicate another name", 18),
    "from shop import require": ("'require' has a meaning in the language; give the predicate another name", 18),
    "from shop import result": ("'result' has a meaning in the language; give the predicate another name", 18),
    "from shop import float32": ("'float32' has a meaning in the language; give the predicate another name", 18),
    "from shop import half": ("'half' has a meaning in the language; give the predicate another name", 18),
    "from shop import cuda": ("'cuda' has a meaning in the language; give the predicate another name", 18),
    "from shop import str": ("'str' has a meaning in the language; give the predicate another name", 18),
    "from shop import fits, fits\nfrom other import fits": ("'fits' is imported from shop already", 1),
}


@pytest.mark.parametrize("head", REFUSED)
def test_imports_that_are_refused(head: str) -> None:
    with pytest.raises(og.ContractError) as caught:
        stub("require(x > 1)", head=f"{head}\n")
    assert (caught.value.problem, caught.value.column) == REFUSED[head]
    with pytest.raises(og.ContractError) as caught:
        parse_body(f"{head}\nrequire(x > 1)", "f", ("x",))
    assert (caught.value.problem, caught.value.column) == REFUSED[head]


USES = {
    "require(fits)": ("'fits' is imported to be called: fits(…)", 9),
    "require(fits == 1)": ("'fits' is imported to be called: fits(…)", 9),
    "require(known.all == 1)": ("'known' is imported to be called: known(…)", 9),
    "require(fits(x=1))": ("an imported predicate is given its arguments by position", 16),
    "require(fits(x, **y))": ("an imported predicate is given its arguments by position", 19),
    "require(fits(*x))": ("arguments are written one by one", 14),
    "require(fits(x.y()))": ("methods are never called; functions are those of the language's table", 14),
    "require(fits(lambda: 1))": ("lambda is not in the language", 14),
    "require(fits(x.__class__))": ("'__class__' cannot be read", 14),
    "require(fits(x[1:]))": ("Slice is not in the language", 16),
    "require(fits(negated(x)))": ("negated gives a tensor, for a value function or a name", 14),
    "require(fits(q))": ("unknown name 'q'", 14),
    "require(fit(x))": ("unknown function 'fit'; did you mean 'fits'?", 9),
    "require(fits('a'))": ("the condition reads nothing of the call", 9),
    "fits = 3": ("'fits' has a meaning in the language; choose another name", 1),
    "x: any[fits]": ("'fits' has a meaning in the language; choose another symbol", 8),
    "x: fits[3]": (
        "unknown type 'fits'; a tensor type begins with its dtype: floating[B, D], T[B, D], int64[N]",
        4,
    ),
    "for fits in x:\n    require(fits > 1)": ("a loop gives names: for x in …, for x, y in …", 5),
    "from shop.rules import fits\nrequire(fits(x))": (
        "imports stand at the top of a contract file, or of a contract that is no stub",
        1,
    ),
    "fits(x)": ("unknown statement 'fits'", 1),
}


@pytest.mark.parametrize("body", USES)
def test_uses_that_are_refused(body: str) -> None:
    with pytest.raises(og.ContractError) as caught:
        stub(body)
    assert (caught.value.problem, caught.value.column) == (USES[body][0], USES[body][1] + 4)


@pytest.mark.parametrize(
    "body",
    [
        "ensure(fits(result))",
        "ensure(fits(x))",
        "require(fits(result) > 1)",
        "n = fits(x)\nensure(result == n)",
        "if fits(x):\n    returns: like(x)",
    ],
)
def test_a_predicate_about_the_result_is_refused(body: str) -> None:
    with pytest.raises(og.ContractError, match="nothing would come of this: it waits for the result"):
        stub(body)


def test_imports_stand_at_the_top() -> None:
    for text in (
        "SIZES = (1, 2)\nfrom shop import fits\ndef f(x):\n    require(fits(x))\n",
        "def f(x):\n    require(x > 1)\nfrom shop import fits\n",
        "def f(x):\n    require(x > 1)\nimport shop\n",
    ):
        with pytest.raises(og.ContractError, match="imports stand at the top of a contract file"):
            parse_stubs(text)
    with pytest.raises(og.ContractError, match="imports stand at the top"):
        parse_body("require(x > 1)\nfrom shop import fits", "f", ("x",))
    with pytest.raises(og.ContractError, match="no contract here"):
        parse_stubs("from shop import fits\n")


def test_one_name_is_one_thing() -> None:
    with pytest.raises(og.ContractError) as caught:
        stub("require(y > 1)", "y, fits")
    assert str(caught.value).startswith("f.contract:2:1: 'fits' is a parameter here and imported from shop.rules")
    with pytest.raises(og.ContractError, match="'fits' is a parameter here and imported from shop"):
        parse_body("from shop import fits\nrequire(fits > 1)", "f", ("fits",))
    with pytest.raises(og.ContractError, match="'LIMIT' is a constant here and imported from shop"):
        parse_stubs("from shop import LIMIT\nLIMIT = 3\ndef f(x):\n    require(x < LIMIT)\n")


def test_hints_cost_no_more_than_their_rule() -> None:
    for rule in ("require(x > 1, hint=f'{fits(x)}')", "x: int = why(because='a' if fits(x) else 'b')"):
        with pytest.raises(og.ContractError, match="fits is of class C, the rule of class A"):
            stub(rule)
    with pytest.raises(og.ContractError, match="fits is of class C, the rule of class B"):
        stub("require(finite(x), hint='a' if fits(x) else 'b')")
    stub("require(fits(x), hint='a' if known(x) else f'{highest(y)}')")


def test_reading_imports_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "imported"
    (tmp_path / "marking_module.py").write_text(f"open({str(mark)!r}, 'w')\ndef fits(x): return True\n")
    file = tmp_path / "f.contract"
    file.write_text("from marking_module import fits\ndef f(x):\n    x: int\n    require(fits(x))\n")
    sys.path.insert(0, str(tmp_path))
    try:
        contract = og.load(file)["f"]
        og.guard(contract)(lambda x: x)(1)
        with pytest.raises(og.PredicateError):
            og.verify(contract, 1)
    finally:
        sys.path.remove(str(tmp_path))
    assert not mark.exists()
    assert "marking_module" not in sys.modules


def test_no_function_of_the_table_is_of_class_c() -> None:
    assert {function.cost_class for function in FUNCTIONS.values()} == {"A", "B"}
