"""The JSON form says what the text says, its schema describes it, and what is wrong is said with its place."""

from __future__ import annotations

import json
import random
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from contracts_and_calls import PARAMETERS, contract_bodies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llm_op_guard as og
from llm_op_guard.contract.json_form import parse_json, to_json
from llm_op_guard.contract.json_schema import json_schema
from llm_op_guard.contract.parse import parse_body, parse_stubs

FEW = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
FILES = [
    *(
        Path(str(file))
        for file in (resources.files("llm_op_guard") / "contracts" / "transformers").iterdir()
        if file.name.endswith(".contract")
    ),
    *(Path(__file__).parents[1] / "yardstick").glob("*.contract"),
]
SCHEMA = jsonschema.Draft202012Validator(json_schema())

EVERYTHING = """
from shop.rules import fits, known
from till import known_there
MOST = {("flash", 8): 256, ("flash", 7): 128}

def operator(self, q, k, /, mask=None, *rest, causal=False, **options):
    '''What it is.

    In two paragraphs, with "quotes".
    '''
    q: T[B, H, L, D] @ dev = why(because="one", hint=f"{D} of" if D % 2 else "other")
    k: None | (float16 | bfloat16)[B | 1, *lead, 3, _] @ (dev | cpu) = why(certain=False, error=RuntimeError)
    n = self.heads
    a, b = q.shape[2], q.shape[3]
    if causal:
        require(D % 2 == 0)
        if n is None:
            mask: like(q)
    elif n > 2:
        require(H == n * 2, id="heads \\"x\\"", because='it\\'s', hint=None, certain=False, error=IndexError)
    else:
        pass
    require(D <= MOST["flash", 8])
    require(fits(q, D) and known_there(mask), hint="b" if known(q) else "c")
    for x in (q, k):
        require(dense(x), id="dense")
    for i, item in enumerate(rest):
        if i > 0:
            require(item.ndim == 3)
    returns: (like(q), None | list[int])
    remember(self.cache, rows=L, owner=identity(self))
    ensure(all(v > 0 for v in result[1]), because="counts")
"""


# ---------------------------------------------------------------- there and back


def same(contracts: dict[str, og.Contract]) -> None:
    data = to_json(contracts)
    SCHEMA.validate(data)
    again = parse_json(json.dumps(data))
    assert list(again) == list(contracts)
    for name, contract in contracts.items():
        assert (again[name].text, again[name].doc) == (contract.text, contract.doc)
        assert [(r.id, r.cost_class, r.certain) for r in again[name].rules] == [
            (r.id, r.cost_class, r.certain) for r in contract.rules
        ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_contracts_survive(file: Path) -> None:
    same(parse_stubs(file.read_text(encoding="utf-8")))


def test_every_kind_of_statement_survives() -> None:
    contracts = parse_stubs(EVERYTHING)
    same(contracts)
    again = parse_json(json.dumps(to_json(contracts)))["operator"]
    assert again == contracts["operator"]
    assert again.imports == {"fits": "shop.rules", "known": "shop.rules", "known_there": "till"}


@FEW
@given(contract_bodies())
def test_any_contract_survives(body: list[list[str]]) -> None:
    try:
        contract = parse_body("\n".join(line for lines in body for line in lines), "operator", PARAMETERS)
    except og.ContractError:
        return
    same({"operator": contract})


def test_what_it_looks_like() -> None:
    text = """def f(q, n=1):
    q: floating[B, D] = why(hint="of another model")
    require(D % n == 0, id="divides", because=f"{n} parts", certain=False, error=IndexError)
"""
    assert to_json(parse_stubs(text)) == {
        "contracts": [
            {
                "name": "f",
                "signature": "q, n=1",
                "body": [
                    {"declare": "q", "type": "floating[B, D]", "hint": "of another model"},
                    {
                        "require": "D % n == 0",
                        "id": "divides",
                        "because": {"expression": "f'{n} parts'"},
                        "certain": False,
                        "error": "IndexError",
                    },
                ],
            }
        ]
    }


def test_a_file_is_loaded_and_guards(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    file = tmp_path / "operators.json"
    file.write_text(json.dumps(one({"declare": "x", "type": "floating[B, D]"}, {"require": "D % 2 == 0"})))
    guarded = og.guard(og.load(file)["f"])(lambda x: x)
    guarded(torch.ones(2, 4))
    with pytest.raises(og.GuardError, match="D % 2"):
        guarded(torch.ones(2, 5))


# ---------------------------------------------------------------- the long form


def one(*body: Any, signature: str | None = "x") -> dict[str, Any]:
    return {"name": "f", **({} if signature is None else {"signature": signature}), "body": list(body)}


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ({"input": {"name": "x", "shape": ["B", "H", "L", "D"], "constraint": "D % 2 == 0"}},
         "x: any[B, H, L, D]\nrequire(D % 2 == 0)"),
        ({"input": {"name": "x", "type": "int | None", "hint": "h", "because": "b"}},
         "x: int | None = why(because='b', hint='h')"),
        ({"input": {"name": "x", "dtype": ["float16", "bfloat16"], "shape": ["*lead", "B | 1", 3, "_"],
                    "device": "dev"}},
         "x: (float16 | bfloat16)[*lead, B | 1, 3, _] @ dev"),
        ({"input": {"name": "x", "dtype": "T", "shape": []}}, "x: T[()]"),
        ({"input": {"name": "x", "dtype": "T", "shape": ["..."], "device": ["cpu", "dev"]}}, "x: T[...] @ (cpu | dev)"),
        ({"input": {"name": "x", "dtype": "half", "optional": True}}, "x: None | half"),
        ({"input": {"name": "x.weight", "device": "cuda"}}, "x.weight: any @ cuda"),
        ({"input": {"name": "x", "constraint": ["x > 1", "x < 9"], "hint": "h", "certain": False}},
         "require(x > 1, hint='h', certain=False)\nrequire(x < 9, hint='h', certain=False)"),
        ({"input": {"name": "x", "type": "int", "constraint": {"require": "x > 1", "id": "i", "error": "IndexError"}}},
         "x: int\nrequire(x > 1, id='i', error=IndexError)"),
        ({"output": {"shape": [2], "constraint": "finite(result)"}}, "returns: any[2]\nensure(finite(result))"),
        ({"output": {"constraint": [{"ensure": "result > 1", "id": "i"}]}}, "ensure(result > 1, id='i')"),
    ],
)  # fmt: skip
def test_the_long_form(statement: dict[str, Any], text: str) -> None:
    extra = ({"declare": "y", "type": "any[B, D] @ dev"},)  # binds what the statement only uses
    data = one(statement, *extra, signature="x, y")
    SCHEMA.validate(data)
    stub = f"def f(x, y):\n{text}\ny: any[B, D] @ dev".replace("\n", "\n    ")
    assert parse_json(json.dumps(data))["f"].text == parse_stubs(stub)["f"].text


def test_inputs_are_the_parameters_where_no_signature_is_given() -> None:
    data = one(
        {"input": {"name": "q", "shape": ["B", "D"]}},
        {"input": {"name": "k", "shape": ["B", "D"]}},
        {"input": {"name": "q", "constraint": "D % 2 == 0"}},
        signature=None,
    )
    assert parse_json(json.dumps(data))["f"].parameters == ("q", "k")


# ---------------------------------------------------------------- what is wrong

TEXT = """{"contracts": [
  {"name": "f",
   "signature": "q, k",
   "body": [
     {"declare": "q", "type": "floating[B, D]"},
     %s
   ]}]}"""
KINDS = "a statement says with one key what it is: declare, assign, require, ensure, remember, if, for, input, output"


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ('{"require": "B > E"}', "6:23: contracts[0].body[1].require: unknown name 'E'"),
        ('{"require": "B > "}', "6:18: contracts[0].body[1].require: not Python syntax: invalid syntax"),
        ('{"requre": "B > 1"}', f"6:6: contracts[0].body[1]: {KINDS}; did you mean 'require'?"),
        ('{"require": "B > 1", "ensure": "B > 1"}', f"6:6: contracts[0].body[1]: {KINDS}"),
        ('{"require": 3}', "6:18: contracts[0].body[1].require: a text is wanted, not a number"),
        ('{"require": "B > 1", "becase": "x"}',
         "6:6: contracts[0].body[1]: unknown key 'becase'; did you mean 'because'?"),
        ('{"require": "B > 1", "certain": "no"}', "6:38: contracts[0].body[1].certain: true or false is wanted"),
        ('{"require": "B > 1", "error": "OSError"}', "6:36: contracts[0].body[1].error: error= is one of IndexError, "
         "TypeError, RuntimeError, KeyError, ValueError"),
        ('{"require": "B > 1", "hint": {"expr": "x"}}',
         "6:35: contracts[0].body[1].hint: unknown key 'expr'; known: expression"),
        ('{"declare": "k"}', "6:6: contracts[0].body[1]: 'type' is missing"),
        ('{"declare": "k", "type": "floting[B]"}',
         "6:31: contracts[0].body[1].type: unknown type 'floting'; did you mean 'floating'?"),
        ('{"declare": "kk", "type": "int"}',
         "6:18: contracts[0].body[1].declare: 'kk' is not a parameter of f; did you mean 'k'?"),
        ('{"assign": ["if"], "value": "B"}',
         "6:17: contracts[0].body[1].assign: a name is letters, digits and _, and no word of Python"),
        ('{"if": "B > 1", "then": {}}', "6:30: contracts[0].body[1].then: an array is wanted, not an object"),
        ('{"input": {"name": "k"}}', "6:16: contracts[0].body[1].input: nothing is said of it: type, or dtype, shape, "
         "device, or constraint"),
        ('{"input": {"name": "k", "type": "int", "shape": []}}',
         "6:16: contracts[0].body[1].input: beside 'type' there is no 'shape': write one or the other"),
        ('{"input": {"name": "k", "shape": ["B, D"]}}',
         "6:40: contracts[0].body[1].input.shape[0]: one size is wanted: a number, a symbol or an expression"),
        ('{"input": {"name": "k", "shape": ["0] + _[0"]}}', "6:40: contracts[0].body[1].input.shape[0]: one size is "
         "wanted: a number, a symbol or an expression"),
        ('{"require": "B > 1", "require": "B > 2"}', "1:1: not JSON: the key 'require' stands twice in one object"),
        (r'{"require": "\ud800"}', "1:1: not JSON: a text holds half a character (a lone surrogate)"),
        ("{", "7:4: not JSON: Expecting property name enclosed in double quotes"),
        ("NaN", "1:1: not JSON: NaN is not a number of JSON"),
        ("[]", "6:6: contracts[0].body[1]: an object is wanted, not an array"),
    ],
)  # fmt: skip
def test_what_is_wrong_and_where(statement: str, said: str) -> None:
    with pytest.raises(og.ContractError) as caught:
        parse_json(TEXT % statement, "a.json")
    assert str(caught.value).splitlines()[0] == f"a.json:{said}"


def test_the_place_is_shown() -> None:
    with pytest.raises(og.ContractError) as caught:
        parse_json(TEXT % '{"require": "B > E"}', "a.json")
    assert str(caught.value).splitlines()[1:] == ['         {"require": "B > E"}', "                          ^"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "an object is wanted, not an array"),
        (
            {"contracts": [one()], "constants": {"MOST": "open('x')"}},
            "constants.MOST: a constant is a number, a text, or",
        ),
        ({"contracts": [one()], "imports": ["fits"]}, "imports: an object is wanted, not an array"),
        ({"contracts": [one()], "imports": {"fits": 1}}, "imports.fits: a text is wanted, not a number"),
        ({"contracts": [one()], "imports": {"fits": ".shop"}}, "imports.fits: a name is letters"),
        ({"contracts": [one()], "imports": {"fits": "os import x\n"}}, "imports.fits: a name is letters"),
        ({"contracts": [one()], "imports": {"*": "os"}}, "imports.*: a name is letters"),
        ({"contracts": [one()], "imports": {"len": "os"}}, "imports.len: 'len' has a meaning in the language"),
        ({"contracts": [one()], "imports": {"x": "os"}}, "contracts[0]: 'x' is a parameter here and imported from os"),
        ({"contracts": [one()], "imports": {"f": "__os__"}}, "imports.f: nothing is imported from '__os__'"),
        ({"contracts": []}, "contracts: no contract here"),
        ({"contracts": [1]}, "contracts[0]: an object is wanted, not a number"),
        ({"name": "f g", "signature": "", "body": []}, "name: a name is letters"),
        ({"name": "f", "body": []}, "'signature' is missing"),
        ({"name": "f", "body": None}, "body: an array is wanted, not null"),
        ({"name": "f", "signature": "x): pass #", "body": []}, "signature: not Python syntax"),
        ({"name": "f", "signature": "x: 0) + (lambda y", "body": []}, "signature: a signature is a list of parameters"),
        ({"name": "f", "signature": "x", "doc": 1, "body": []}, "doc: a text is wanted, not a number"),
        ({"name": "f", "signature": "x", "bdy": [], "body": []}, "unknown key 'bdy'; did you mean 'body'?"),
        (
            {"name": "f", "signature": "x", "constants": {}, "body": []},
            "unknown key 'constants'; it stands in the file, beside 'contracts'",
        ),
        (
            {"name": "f", "signature": "x", "zzz": [], "body": []},
            "unknown key 'zzz'; known: name, body, signature, doc",
        ),
        ({"zzz": [], "contracts": []}, "unknown key 'zzz'; known: contracts, $schema, imports, constants"),
        ({"name": "f", "signature": "x", "body": [{"require": "x > 1\nimport os"}]}, "body[0].require: not Python"),
        ({"name": "f", "signature": "x", "body": [{"require": "(" * 500 + "x" + ")" * 500}]}, "body[0].require: "),
    ],
)
def test_what_is_wrong_with_the_whole(data: Any, said: str) -> None:
    with pytest.raises(og.ContractError) as caught:
        parse_json(json.dumps(data))
    assert caught.value.problem.startswith(said), caught.value.problem


def test_deep_nesting_is_refused() -> None:
    body: list[Any] = [{"require": "x > 1"}]
    for _ in range(200):
        body = [{"if": "x > 0", "then": body}]
    with pytest.raises(og.ContractError, match="nested too deeply"):
        parse_json(json.dumps(one(*body)))
    with pytest.raises(og.ContractError, match="not JSON: nested too deeply"):
        parse_json("[" * 100_000)


# ---------------------------------------------------------------- the schema, and anything at all

SAME = [
    # (a document, whether it is right)
    (one({"require": "x.shape[0]\n> 1"}), True),
    (one({"require": " x.shape[0] > 1\n"}), True),
    (one({"require": "# why\nx.shape[0] > 1"}), True),
    (one({"input": {"name": "x", "shape": [3.0, 0]}}), True),
    (one({"input": {"name": "x", "shape": [-1]}}), False),
    (one({"input": {"name": "x", "shape": [2.5]}}), False),
    (one({"input": {"name": "x", "shape": [" "]}}), False),
    (one({"input": {"name": "x", "dtype": ""}}), False),
    (one({"input": {"name": "x", "device": [" "]}}), False),
    (one({"require": ""}), False),
    (one({"require": " \n"}), False),
    (one({"declare": "x", "type": ""}), False),
    (one({"require": "x.shape[0] > 1", "id": " "}), False),
    (one({"require": "x.shape[0] > 1", "id": "a\nb"}), False),
    (one({"require": "x.shape[0] > 1", "id": "a\u00a0b"}), False),
    (one({"require": "x.shape[0] > 1", "id": " a b "}), True),
    (one({"assign": ["for"], "value": "x.shape"}), False),
    (one({"remember": "x", "facts": {"class": "x.shape"}}), False),
    ({**one(), "name": "class"}, False),
    ({"contracts": [one()], "$schema": "x"}, True),
    ({"contracts": [one()], "$schema": 5}, False),
    ({"contracts": [one()], "$schema": None}, False),
    ({"contracts": [one()], "constants": {"\u0391\u0392\u0393": "1"}}, False),
    ({"contracts": [one()], "constants": {"___": "1"}}, False),
    ({"contracts": [one()], "constants": {"_A1": "1"}}, True),
    ({"contracts": [one()], "constants": {"ABC": ""}}, False),
    ({"contracts": [one()], "imports": {"__a": "c"}}, False),
    ({"contracts": [one()], "imports": {"_a": "c.d"}}, True),
    ({"contracts": [one()], "imports": {"a": "c.__d__"}}, False),
    ({"contracts": [one()], "imports": {"a": "__main__"}}, True),
]


@pytest.mark.parametrize(("data", "right"), SAME)
def test_the_schema_and_the_reader_agree(data: Any, right: bool) -> None:
    assert SCHEMA.is_valid(data) is right
    if right:
        assert parse_json(json.dumps(data))
    else:
        with pytest.raises(og.ContractError):
            parse_json(json.dumps(data))


@pytest.mark.parametrize("text", ["n) + (n\n", "n] + [n\n", "n\n) + (n > 1", "n > 1)\n#", "n\n > 1\n)"])
def test_several_lines_close_no_bracket_of_ours(text: str) -> None:
    with pytest.raises(og.ContractError, match="not Python syntax"):
        parse_json(json.dumps({"name": "f", "signature": "n", "body": [{"require": text}]}))


def test_numbers_without_end_are_refused() -> None:
    with pytest.raises(og.ContractError, match="not JSON: the number 1e400 is too large"):
        parse_json('{"name": "f", "body": [{"input": {"name": "q", "shape": [1e400]}}]}')


def mutated(data: Any, rng: random.Random) -> Any:
    """The document with one thing changed somewhere."""
    data = json.loads(json.dumps(data))
    places: list[tuple[Any, Any]] = []

    def visit(part: Any) -> None:
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            places.append((part, key))
            if isinstance(value, dict | list):
                visit(value)

    visit(data)
    owner, key = rng.choice(places)
    match rng.randrange(4):
        case 0:
            del owner[key]
        case 1:
            owner[key] = rng.choice([None, 1, True, "x", "", [], {}, ["x"], {"expression": "x"}, 1.5])
        case 2 if isinstance(owner, dict):
            owner[rng.choice(["if", "type", "id", "x", "certain", "constraint", "name", "doc"])] = owner.pop(key)
        case _:
            other, other_key = rng.choice(places)
            owner[key] = json.loads(json.dumps(other[other_key] if other is not owner else 1))
    return data


LONG = one(
    {"input": {"name": "x", "dtype": ["half", "T"], "shape": ["B", 3], "constraint": [{"require": "B > 1"}]}},
    {"output": {"type": "like(x)"}},
)


@FEW
@given(st.sampled_from([to_json(parse_stubs(EVERYTHING)), LONG]), st.randoms(use_true_random=False), st.integers(1, 2))
def test_what_the_schema_refuses_is_refused(data: Any, rng: random.Random, changes: int) -> None:
    for _ in range(changes):
        data = mutated(data, rng)
    try:
        parse_json(json.dumps(data))
    except og.ContractError as error:
        str(error)
        return
    SCHEMA.validate(data)


@FEW
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["contracts", "name", "body", "require", "input", "if", "then"]), inner)
        ),
        max_leaves=20,
    )
)
def test_any_json(data: Any) -> None:
    for document in (data, one(data), {"contracts": [data]}, one({"require": data}), one({"input": data})):
        try:
            parse_json(json.dumps(document))
        except og.ContractError as error:
            str(error)


@FEW
@given(st.text())
def test_any_text(text: str) -> None:
    for whole in (text, TEXT % text, TEXT % f'{{"require": "{text}"}}'):
        try:
            parse_json(whole)
        except og.ContractError as error:
            str(error)
