"""What the language reads, and the places it gives for what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

import llm_op_guard as og
from llm_op_guard.contract.model import (
    Assign,
    Declare,
    DtypeName,
    DtypeSet,
    DtypeSymbol,
    If,
    NoneType,
    Require,
    Rest,
    ScalarType,
    Size,
    SizeOneOf,
    TensorType,
)
from llm_op_guard.contract.parse import MAX_CHARACTERS, docstring_section, parse_body, parse_stubs


def stub(body: str, parameters: str = "x, y, z") -> og.Contract:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return parse_stubs(f"def operator({parameters}):\n{lines}\n", "f.contract")["operator"]


def declared(text: str) -> Declare:
    statement = stub(f"y: T[B, L, D] @ dev\nx: {text}").body[1]
    assert isinstance(statement, Declare)
    return statement


def tensor(text: str) -> TensorType:
    alternative = declared(text).type.alternatives[-1]
    assert isinstance(alternative, TensorType)
    return alternative


def test_a_whole_contract() -> None:
    contract = stub(
        '''"""Rotate."""
if z == 1:
    x: T[B, H, L, D] @ dev
else:
    x: T[B, L, H, D] @ dev
y: floating[B | 1, L, D] @ dev = why(because="a", hint="b" if y.ndim == 2 else "c")
half_width = D / 2
require(D % 2 == 0, id="even", because="pairs", hint="h", error=IndexError, certain=False)
returns: like(x)'''
    )
    assert contract.doc == "Rotate."
    assert contract.parameters == ("x", "y", "z")
    assert [type(statement) for statement in contract.body] == [If, Declare, Assign, Require, Declare]
    assert contract.symbols == {"T": "dtype", "B": "size", "H": "size", "L": "size", "D": "size", "dev": "device"}
    assert contract.assigned == {"half_width"}
    rule = contract.body[3]
    assert isinstance(rule, Require)
    assert (rule.id, rule.reason.error, rule.reason.certain) == ("even", "IndexError", False)
    assert str(contract.body[4].path) == "result"  # type: ignore[union-attr]


def test_dtypes() -> None:
    assert tensor("float32[B]").dtypes == (DtypeName("float32"),)
    assert tensor("floating[B]").dtypes == (DtypeSet("floating"),)
    assert tensor("U2[B]").dtypes == (DtypeSymbol("U2"),)
    assert tensor("(int32 | int64)[B]").dtypes == (DtypeName("int32"), DtypeName("int64"))
    assert tensor("bool[B]").dtypes == (DtypeName("bool"),)
    assert declared("bool").type.alternatives == (ScalarType("bool"),)


def test_dimensions() -> None:
    assert tensor("any").dims is None
    assert tensor("any[()]").dims == ()
    dims = tensor("any[B, 3, _, D / 2, ..., B | 1]").dims
    assert dims is not None
    assert [type(dim).__name__ for dim in dims] == ["Size", "Size", "AnySize", "Size", "Rest", "SizeOneOf"]
    assert dims[4] == Rest(None)
    assert tensor("any[*lead, D]").dims[0] == Rest("lead")  # type: ignore[index]
    assert isinstance(dims[0], Size)
    assert dims[0].expr.symbol == "B"
    assert isinstance(dims[5], SizeOneOf)
    assert [option.text for option in dims[5].options] == ["B", "1"]


def test_devices() -> None:
    assert tensor("any[B]").devices is None
    assert tensor("any[B] @ any").devices is None
    assert [type(d).__name__ for d in tensor("any[B] @ (dev | cpu)").devices or ()] == ["DeviceSymbol", "DeviceType"]
    assert tensor("any[B] @ cuda").devices is not None


def test_unions_and_optionals_are_the_same() -> None:
    for text in ("None | int64[B]", "optional[int64[B]]"):
        assert declared(text).type.alternatives[0] == NoneType()


def test_a_rule_without_id_is_named_by_its_normalised_text() -> None:
    assert stub("require(  x.shape[0]%2==0 )").rules[0].id == "x.shape[0] % 2 == 0"


def test_cost_class_is_inferred_from_everything_a_rule_reads() -> None:
    contract = stub(
        """x: int64[N]
y: floating[V, D]
require(N > 0, id="a")
require(within(x, 0, V), id="b")
top = highest(x)
require(top < V, id="c")
if finite(y):
    require(D > 0, id="d")
    z: any[K]
require(K > 1, id="e")
require(N > 1, id="f")"""
    )
    classes = {rule.id: rule.cost_class for rule in contract.rules}
    assert {name: classes[name] for name in "abcdef"} == {"a": "A", "b": "B", "c": "B", "d": "B", "e": "B", "f": "A"}


def test_what_mentions_the_result_waits_for_it() -> None:
    contract = stub("x: any[B]\nreturns: any[B, K]\nrequire(K > 0)\nrequire(B > 0)")
    assert [clause.after_call for clause in contract.clauses] == [False, True, True, False]


def test_two_spellings_have_one_hash_and_two_contracts_have_two() -> None:
    one, same = stub("require(x.ndim==2)"), stub("require( x.ndim  ==  2 )  # why")
    assert one.hash == same.hash
    assert one.hash != stub("require(x.ndim == 3)").hash


def test_elif_and_nested_branches_flatten_to_conditions() -> None:
    contract = stub("if z == 1:\n    x: any[B]\nelif z == 2:\n    x: any[B, 1]\nelse:\n    x: any[B, 2]")
    wanted = [[condition.wanted for condition in clause.conditions] for clause in contract.clauses]
    assert wanted == [[True], [False, True], [False, False]]


# ---------------------------------------------------------------- refused

REFUSED = {
    "x: foating[B]": ("unknown type 'foating'; did you mean 'floating'?", 4),
    "x: tensor": ("unknown type 'tensor'; a tensor type begins with its dtype: floating[B, D], T[B, D], int64[N]", 4),
    "x: dict[str, int]": ("dict takes nothing in brackets: write dict", 4),
    "x: None | int[B]": ("int takes nothing in brackets: write int", 11),
    "x: tuple[any[B], int]": ("a tuple is written (type, type), one of any length list[type]", 4),
    "x: tuple": ("a tuple is written (type, type), one of any length list[type]", 4),
    "x: any[B, *y]": ("'y' is a parameter or assigned name, so it cannot stand for several sizes", 1),
    "x: any[B, *B]": ("'B' stands for a size elsewhere and for several sizes here", 1),
    "w: any[B]": ("'w' is not a parameter of operator", 1),
    "inptu: any[B]": ("'inptu' is not a parameter of operator; did you mean 'input'?", 1),
    "x: any[B * B]": (
        "'B' is never bound: no argument is declared with it as a plain dimension, so nothing that uses it could be "
        "checked",
        8,
    ),
    "x: any[B | 1]": (
        "'B' is never bound: no argument is declared with it as a plain dimension, so nothing that uses it could be "
        "checked",
        8,
    ),
    "x: any[-1]": ("a dimension cannot be negative", 8),
    "x: any[1.5]": ("a dimension is a whole number, a symbol or an expression of these", 8),
    "x: any[(1, 2), 3]": ("a dimension is a whole number, a symbol or an expression of these", 8),
    f"x: any[{'_,' * 256}*a]": ("more than 255 dimensions beside a group of open length", 520),
    "x: any[..., *a]": ("at most one dimension group of open length: `...`, `*lead` or `*x.shape`", 13),
    "x: any[B] @ 3": ("a device is a symbol, a device type such as cpu or cuda, any, or x.device", 13),
    "x: T[B] | T[C]": ("T[B] and T[C] cannot be told apart by None, type, rank or dtype", 1),
    "x: T[N, C] | T[N, C, *s]": ("T[N, C] and T[N, C, *s] cannot be told apart by None, type, rank or dtype", 1),
    "x: int64[B, L] | int64[3, N]": (
        "int64[B, L] and int64[3, N] cannot be told apart by None, type, rank or dtype",
        1,
    ),
    "x: like(x)": ("x is declared by itself", 1),
    "x: int = 3": ("behind a type only = why(because=…, hint=…, certain=…, error=…) may stand", 10),
    "require(q > 1)": ("unknown name 'q'", 9),
    "require(x > 1, hints='a')": (
        "unknown keyword 'hints'; did you mean 'hint'?; known: id, because, hint, certain, error",
        16,
    ),
    "require(x > 1, error=OSError)": ("error= is one of IndexError, TypeError, RuntimeError, KeyError, ValueError", 22),
    "require(x > 1, certain=1)": ("certain= is True or False", 24),
    "require()": ("require takes one condition, then id=, because=, hint=, certain=, error=", 1),
    "require(x == 64 | 128)": ("| joins types, not values: write `x in (a, b)` or `or`", 14),
    "require(x.dtype == half)": ("half is a set of dtypes: use `in`", 20),
    "require(x.ndim in 3)": ("behind `in` stands a tuple, a set of dtypes or a shape", 19),
    "require(x is 1)": ("`is` compares with None, True or False; use == otherwise", 14),
    "require(x.sum() > 1)": ("methods are never called; functions are those of the language's table", 9),
    "require(withn(x, 0, 1))": ("unknown function 'withn'; did you mean 'within'?", 9),
    "require(within(x, 0))": ("within(x, low, high, allow=…) takes 3 to 4 arguments; 2 given", 9),
    "require(finite(1))": ("finite takes a parameter or what can be read from one", 16),
    "require(x.__class__ == 1)": ("'__class__' cannot be read", 9),
    "require([i for i in x])": ("comprehensions are not in the language", 9),
    "require((lambda: 1)())": ("methods are never called; functions are those of the language's table", 10),
    "require(f'{x}' == 'a')": ("f-strings stand in because= and hint= only", 9),
    "require(x == b'a')": ("the constant b'a' is not in the language", 14),
    "require(x & 1)": ("& is not in the language", 9),
    "require(~x == 1)": ("~ is not in the language", 9),
    "require(sum(x) == y)": ("written as sum(item for item in x)", 9),
    "require(any(x.sizes))": ("written as any(condition for item in x.sizes)", 9),
    "x: dict; require('a' in x)": (
        "nothing is in a dict: has(x['a']) asks for a key; `in` takes a tuple, a shape or a text",
        25,
    ),
    "assert x": ("write require(…): assert vanishes under python -O", 1),
    "requires(x)": ("unknown statement 'requires'; did you mean 'require'?", 1),
    "del x": (
        "not a statement of the language; known are: name: type, name = expression, if/elif/else, for, require(…), "
        "ensure(…), remember(…), returns: type",
        1,
    ),
    "import os": ("imports stand at the top of a contract file, or of a contract that is no stub", 1),
    "x.y = 3": ("only names can be assigned to", 1),
    "x = 3": ("'x' is a parameter; choose another name", 1),
    "finite = 3": ("'finite' has a meaning in the language; choose another name", 1),
}


@pytest.mark.parametrize("body", REFUSED)
def test_refused_with_place_and_reason(body: str) -> None:
    problem, column = REFUSED[body]
    with pytest.raises(og.ContractError) as caught:
        stub(body, "x, y, z, input")
    assert (caught.value.problem, caught.value.line, caught.value.column) == (problem, 2, column + 4)


def test_the_message_shows_file_line_column_and_a_caret() -> None:
    with pytest.raises(og.ContractError) as caught:
        stub("x: floating[B]\nrequire(C > 1)")
    assert str(caught.value).splitlines() == [
        "f.contract:3:13: unknown name 'C'",
        "        require(C > 1)",
        "                ^",
    ]


def test_columns_count_characters_not_bytes() -> None:
    with pytest.raises(og.ContractError) as caught:
        stub("require(x == 1, because='ü') if 1 else require(q)")
    assert caught.value.line == 2
    with pytest.raises(og.ContractError) as caught:
        stub("require(x == 'üü' and q)")
    assert caught.value.column == 4 + len("require(x == 'üü' and q") and caught.value.problem == "unknown name 'q'"


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    require(" + "(" * 250 + "x" + ")" * 250 + ")",
        "def f(x):\n    require(" + "not " * 100 + "x)",
        "def f(x):\n    require(x == " + "-" * 5000 + "1)",
        "def f(x):\n    require(x > " + "9" * 6000 + ")",
        "def f(x):\n    require(x > 1" + "0" * 100 + ")",
        "def f(x):\n    require(x)\0",
        "def f(x):\n    require('\ud800' == x)",
        "#" * (MAX_CHARACTERS + 1),
        "def f(x):\n\tx: any\n        y: any",
    ],
)
def test_hostile_text_is_refused_not_suffered(text: str) -> None:
    with pytest.raises(og.ContractError):
        parse_stubs(text)


def test_statements_that_need_each_other_in_a_circle(tmp_path: Path) -> None:
    for body in ("a = b\n    b = a\n    require(a == 1)", "if B == 1:\n        x: any[B]"):
        file = tmp_path / "circle.contract"
        file.write_text(f"def f(x):\n    {body}\n")
        with pytest.raises(og.ContractError, match="cannot be put in order"):
            og.load(file)


@pytest.mark.parametrize("text", ["because", "hint"])
@pytest.mark.parametrize(
    ("statement", "dearer"),
    [
        ("require(N > 1, {text}='big' if highest(x) > 3 else 'small')", "highest"),
        ("require(N > 1, {text}=f'{{highest(x)}}')", "highest"),
        ("x: int64[N] = why({text}='odd' if unique(x) else '')", "unique"),
        ("require(N > 1, {text}='some' if any(i > 1 for i in z) else '')", "any"),
    ],
)
def test_a_hint_costs_no_more_than_its_rule(statement: str, dearer: str, text: str) -> None:
    line = statement.format(text=text)
    with pytest.raises(og.ContractError) as caught:
        stub(f"y: int64[N]\n{line}")
    message = f"a hint costs no more than its rule: {dearer} is of class B, the rule of class A"
    assert (caught.value.problem, caught.value.column) == (message, 5 + line.index(f"{dearer}("))


def test_a_hint_may_cost_what_its_rule_costs() -> None:
    stub("x: int64[N]\nrequire(within(x, 0, 3), hint='big' if highest(x) > 3 else 'negative')")
    stub("x: int64[N]\nrequire(N > 1, hint='some' if any(i > 1 for i in (N, y)) else '')")  # written out


# ---------------------------------------------------------------- carriers


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(og.ContractError, match="cannot read the file: No such file"):
        og.load(tmp_path / "absent.contract")
    (tmp_path / "latin.contract").write_bytes(b"def f(x):\n    require(x == '\xe9')\n")
    with pytest.raises(og.ContractError, match="not UTF-8 text"):
        og.load(tmp_path / "latin.contract")
    (tmp_path / "empty.contract").write_text("")
    with pytest.raises(og.ContractError, match="no contract here"):
        og.load(tmp_path / "empty.contract")


def test_a_file_holds_stubs_with_different_names() -> None:
    assert list(parse_stubs('"""Two."""\ndef a(x):\n    require(x)\ndef b(x):\n    require(x)\n')) == ["a", "b"]
    with pytest.raises(og.ContractError, match="a second contract is named 'a'"):
        parse_stubs("def a(x):\n    require(x)\ndef a(x):\n    require(x)\n")
    with pytest.raises(og.ContractError, match="a contract file holds stubs"):
        parse_stubs("del x\n")
    with pytest.raises(og.ContractError, match="types stand in the body"):
        parse_stubs("def a(x: int):\n    require(x)\n")


def test_stub_parameters_of_every_kind() -> None:
    contract = parse_stubs("def a(p, /, q, *rest, k=1, **kw):\n    require(k)\n")["a"]
    assert contract.parameters == ("p", "q", "rest", "k", "kw")


def test_docstring_section_ends_with_its_indentation() -> None:
    doc = """Summary.

    Contract:
        x: any[B]

        require(B > 0)

    Returns:
        something
    """
    assert docstring_section(doc) == "x: any[B]\n\nrequire(B > 0)"
    assert docstring_section("Summary.") is None
    assert docstring_section("Summary: Contract: none") is None


def test_an_empty_body_is_refused() -> None:
    with pytest.raises(og.ContractError, match="the contract is empty"):
        parse_body("", "f", ("x",))


def test_nothing_in_a_contract_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    for body in (
        f"require(open({str(mark)!r}, 'w'))",
        f"x: any[open({str(mark)!r}, 'w')]",
        f"x: (lambda: open({str(mark)!r}, 'w'))()",
        f"y = open({str(mark)!r}, 'w')",
        f"require(x, hint=f\"{{open({str(mark)!r}, 'w')}}\")",
    ):
        with pytest.raises(og.ContractError):
            stub(body, "x")
    parse_stubs(f"def f(x=open({str(mark)!r}, 'w')):\n    require(x)\n")
    assert not mark.exists()
