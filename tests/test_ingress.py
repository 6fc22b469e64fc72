"""`og.ingress`: bodies of requests, whatever a client sends."""

from __future__ import annotations

import copy
import json
import math
import pickle
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_stubs

STUB = """from llm_op_guard.predicates import largest_token_id
def completions(prompt, *, max_tokens=16, temperature=1.0, stop=None, logit_bias={}, **others):
    prompt: str
    max_tokens: int
    temperature: float
    stop: None | str | list[str]
    logit_bias: dict
    require(len(prompt) <= 20, id="prompt_length")
    require(1 <= max_tokens <= 4096, id="max_tokens")
    require(0 <= temperature <= 2, id="temperature")
    require(others["m"] / 2 < 99 or others["m"] ** 2 * temperature % 7 // 3 - max_tokens < 9999, id="arithmetic")
    require(len(stop) <= 4, id="stops")
    require(all(-100 <= bias <= 100 for token, bias in items(logit_bias)), id="bias")
    require(others["n"] == 1 or others["best_of"] >= others["n"], id="best_of")
    require(largest_token_id(others["vocabulary"]) < 100, id="vocabulary")
"""
CONTRACT = parse_stubs(STUB, "requests.contract")["completions"]
LIMIT = 400
check = og.ingress(CONTRACT, max_bytes=LIMIT)


def refusal(body: Any, using: Any = check) -> og.GuardError:
    with pytest.raises(og.GuardError) as caught:
        using(body)
    return caught.value


def rules(body: Any, using: Any = check) -> list[str]:
    return [violation.rule_id for violation in refusal(body, using).violations]


FORMS = [
    lambda fields: json.dumps(fields).encode(),
    lambda fields: bytearray(json.dumps(fields), "ascii"),
    lambda fields: memoryview(json.dumps(fields, ensure_ascii=False).encode()),
    lambda fields: json.dumps(fields, ensure_ascii=False),
    dict,
]


@pytest.mark.parametrize("form", FORMS)
def test_bodies_of_every_form(form: Any) -> None:
    assert check(form({"prompt": "hé", "max_tokens": 4})) == {
        "prompt": "hé",
        "max_tokens": 4,
        "temperature": 1.0,
        "stop": None,
        "logit_bias": {},
    }
    assert rules(form({"prompt": "hé", "max_tokens": 0})) == ["max_tokens"]
    assert rules(form({"max_tokens": 4})) == ["prompt.missing"]


def test_a_missing_parameter_and_a_broken_rule_are_told_together() -> None:
    error = refusal({"max_tokens": "4", "temperature": 3})
    assert [(v.rule_id, v.argument, v.observed) for v in error.violations] == [
        ("prompt.missing", "prompt", "prompt is missing"),
        ("max_tokens.type", "max_tokens", "max_tokens is a str"),
        ("temperature", "temperature", "temperature = 3"),
    ]
    assert error.to_dict(style="openai") == {
        "error": {
            "message": "completions: prompt is missing, expected a value; completions: max_tokens is a str, expected "
            "int; completions: temperature = 3, expected 0 <= temperature <= 2",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "prompt.missing",
        }
    }


def test_fields_that_the_stub_does_not_name_are_left_alone() -> None:
    fields = {"prompt": "a", "user": "someone", "others": 3, "n": 1}
    assert check(fields) == {**fields, "max_tokens": 16, "temperature": 1.0, "stop": None, "logit_bias": {}}
    narrow = og.ingress(parse_stubs("def f(x):\n    x: int\n")["f"], max_bytes=100)
    assert narrow(b'{"x": 1, "y": 2}') == {"x": 1, "y": 2}
    assert rules({"prompt": "a", "n": 3, "best_of": 2}) == ["best_of"]
    assert check({"prompt": "a", "n": 3}) and check({"prompt": "a", "n": 3, "best_of": 3})


def test_predicates_are_asked() -> None:
    assert check({"prompt": "a", "vocabulary": {"a": 99}})
    assert rules({"prompt": "a", "vocabulary": {"a": 100}}) == ["vocabulary"]
    with pytest.raises(og.PredicateError, match=r"asks shop\.fits, which nobody registered"):
        og.ingress(parse_stubs("from shop import fits\ndef f(x):\n    require(fits(x))\n")["f"], max_bytes=1)


def test_what_is_returned_is_the_callers() -> None:
    body = {"prompt": "a"}
    first = check(body)
    first["logit_bias"]["a"] = 1
    assert check(body)["logit_bias"] == {}
    assert body == {"prompt": "a"}


# ---------------------------------------------------------------- what cannot be read


def padded(size: int) -> bytes:
    body = b'{"prompt": "a"}'
    return body + b" " * (size - len(body))


def test_a_body_that_is_too_large_is_refused_before_it_is_decoded() -> None:
    assert check(padded(LIMIT))
    for body in (padded(LIMIT + 1), padded(LIMIT + 1).decode(), memoryview(padded(LIMIT + 1)), b"\xff" * (LIMIT + 1)):
        error = refusal(body)
        assert [v.rule_id for v in error.violations] == ["max_bytes"]
        assert error.violations[0].summary == f"completions: the body has {LIMIT + 1} bytes, expected at most {LIMIT}"
    wide = '{"prompt": "a", "user": "' + "é" * 200 + '"}'
    assert len(wide) <= LIMIT < len(wide.encode())
    assert rules(wide) == rules(wide.encode()) == ["max_bytes"]
    assert rules(memoryview(padded(LIMIT + 4)).cast("i")) == ["max_bytes"]


UNREADABLE = {
    b"": "the body is not JSON from character 0 on, expected JSON in UTF-8",
    b'{"prompt": "a"': "the body is not JSON from character 14 on, expected JSON in UTF-8",
    b'{"prompt": "a"} {}': "the body is not JSON from character 16 on, expected JSON in UTF-8",
    b"{'prompt': 'a'}": "the body is not JSON from character 1 on, expected JSON in UTF-8",
    b'{"prompt": "a\nb"}': "the body is not JSON from character 13 on, expected JSON in UTF-8",
    b'{"prompt": "\xff"}': "the body is not UTF-8 from byte 12 on, expected JSON in UTF-8",
    '{"prompt": "a"}'.encode("utf-16"): "the body is not UTF-8 from byte 0 on, expected JSON in UTF-8",
    b'\xef\xbb\xbf{"prompt": "a"}': "the body is not JSON from character 0 on, expected JSON in UTF-8",
    b'{"prompt": "a", "x": NaN}': "a number in the body is NaN, expected JSON in UTF-8",
    b'{"prompt": "a", "x": [-Infinity]}': "a number in the body is -Infinity, expected JSON in UTF-8",
    b'{"prompt": "a", "prompt": "b"}': "one object of the body has two fields of one name, expected JSON in UTF-8",
    b'{"prompt": "a", "x": {"y": 1, "y": 1}}': "one object of the body has two fields of one name, "
    "expected JSON in UTF-8",
    b'{"prompt": "\\ud800"}': "a text in the body has half of a surrogate pair, expected texts of Unicode",
    b'{"prompt": "a", "\\udfff": 1}': "a text in the body has half of a surrogate pair, expected texts of Unicode",
    '{"prompt": "\ud800"}': "a text in the body has half of a surrogate pair, expected texts of Unicode",
    b'{"prompt": "a", "x": 1e999}': "a number in the body is too large, expected numbers of at most 64 bits",
    b'{"prompt": "a", "x": [18446744073709551616]}': "a number in the body is too large, "
    "expected numbers of at most 64 bits",
    b'{"prompt": "a", "x": ' + b"[" * 100 + b"]" * 100 + b"}": "the body is nested too deeply, "
    "expected at most 100 levels",
}


@pytest.mark.parametrize("body", UNREADABLE, ids=lambda body: repr(body)[:40])
def test_what_is_no_json(body: Any) -> None:
    error = refusal(body)
    assert [(v.rule_id, v.argument, v.cost_class, v.certain) for v in error.violations] == [("json", None, "A", True)]
    assert error.violations[0].summary == f"completions: {UNREADABLE[body]}"
    assert error.__cause__ is error.__context__ is None  # an error of json's has the whole body


def test_what_is_just_json() -> None:
    largest = b'{"prompt": "\\ud83d\\ude00", "x": [18446744073709551615, -9223372036854775808, 1.5e308, null, true]}'
    assert check(largest)["prompt"] == "😀"
    assert check(b'{"prompt": "a", "x": ' + b"[" * 99 + b"]" * 99 + b"}")


def test_very_deep_and_very_long() -> None:
    for opening in (b"[", b'{"a":'):
        assert rules(b'{"prompt": ' + opening * 150_000, large) == ["json"]
    assert rules(b'{"prompt": "a", "x": ' + b"9" * 10_000 + b"}", large) == ["json"]
    assert len(large(b'{"prompt": "a", "x": [' + b"1," * 100_000 + b"1]}")["x"]) == 100_001


def test_bodies_that_hold_themselves() -> None:
    inner: list[Any] = []
    inner.append(inner)
    assert check({"prompt": "a", "x": inner})
    for _ in range(60):
        inner = [inner, inner]
    assert check({"prompt": "a", "x": inner})  # 2**60 paths, 60 lists


@pytest.mark.parametrize(
    ("body", "kind"),
    [(b"[]", "a list"), (b"3", "an int"), ("null", "null"), (b'"a"', "a str"), (None, "null"), ([1], "a list"),
     (SimpleNamespace(), "a types.SimpleNamespace")],
)  # fmt: skip
def test_what_is_no_object(body: Any, kind: str) -> None:
    error = refusal(body)
    assert [v.rule_id for v in error.violations] == ["json_object"]
    assert error.violations[0].summary == f"completions: the body is {kind}, expected an object with named fields"


def test_a_buffer_that_is_gone() -> None:
    view = memoryview(b"{}")
    view.release()
    assert rules(view) == ["json"]


# ---------------------------------------------------------------- what it never says

SECRET = "Sesam-öffne-dich"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": SECRET * 9},
        {"prompt": [SECRET]},
        {"prompt": {SECRET: SECRET}},
        {SECRET: 1},
        {"prompt": "a", "max_tokens": SECRET},
        {"prompt": "a", "stop": [SECRET] * 5},
        {"prompt": "a", "stop": {SECRET: 1}},
        {"prompt": "a", "logit_bias": {SECRET: 101}},
        {"prompt": "a", "n": SECRET, "best_of": SECRET[:5]},
        {"prompt": "a", "vocabulary": {SECRET: 100}},
        {"prompt": "a", "vocabulary": SECRET, "max_tokens": 0},
        {"prompt": "a", "temperature": (SECRET,)},
        {"prompt": "a", "x": SECRET + "\ud800"},
        {"prompt": "a", SECRET + "\ud800": 1},
    ],
)
def test_contents_and_names_of_fields_stand_in_no_message(fields: dict[str, Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = refusal(fields)
    told = [str(error), repr(error.to_dict()), repr(error.to_dict(style="openai")), repr(error.violations)]
    assert not any(SECRET[:5] in text for text in (*told, *(str(warning.message) for warning in caught)))


@pytest.mark.parametrize(
    "body",
    [SECRET, f'{{"{SECRET}', f'{{"{SECRET}": 1, "{SECRET}": 2}}', f'{{"{SECRET}": NaN}}', f'["{SECRET}"]'],
)
def test_what_cannot_be_read_stands_in_no_message(body: str) -> None:
    for sent in (body, body.encode()):
        assert SECRET[:5] not in str(refusal(sent)) + repr(refusal(sent).to_dict(style="openai"))


# ---------------------------------------------------------------- policies, waivers, threads


def test_refusals_are_recorded() -> None:
    refusal(b"")
    refusal({"prompt": "a", "max_tokens": 5000})
    assert [(v.site, v.rule_id) for v in og.record.violations] == [
        ("requests.contract:completions", "json"),
        ("requests.contract:completions", "max_tokens"),
    ]


def test_waivers_are_for_rules_and_not_for_what_leaves_nothing_to_go_on_with() -> None:
    where = "requests.contract:completions"
    with og.waive("max_tokens", site=where, reason="r"), og.waive("prompt.missing", site=where, reason="r"):
        assert check({"max_tokens": 5000})["max_tokens"] == 5000
    with og.waive("json", site=where, reason="r"), og.waive("max_bytes", site=where, reason="r"):
        assert rules(b"") == ["json"]
        assert rules(padded(LIMIT + 1)) == ["max_bytes"]


def test_switched_off_it_decodes_and_no_more() -> None:
    og.disable()
    try:
        assert check(b'{"max_tokens": 5000}')["max_tokens"] == 5000
        assert rules(b"") == ["json"]
        assert rules(padded(LIMIT + 1)) == ["max_bytes"]
        assert rules(b"[]") == ["json_object"]
    finally:
        og.enable()


def test_a_suspect_rule_warns_and_the_request_goes_on() -> None:
    suspect = parse_stubs("def f(x):\n    require(x > 1, certain=False)\n", "s.contract")["f"]
    with pytest.warns(og.GuardWarning, match="f: x = 1, expected x > 1"):
        assert og.ingress(suspect, max_bytes=100)(b'{"x": 1}') == {"x": 1}


def test_one_checker_serves_many_threads() -> None:
    wrong: list[Any] = []

    def work(number: int) -> None:
        for _ in range(50):
            try:
                assert check({"prompt": "a", "max_tokens": number})["max_tokens"] == number
                assert f"max_tokens = {-number}" in str(refusal({"prompt": "a", "max_tokens": -number}))
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_misuse() -> None:
    for wrong in (0, -1, True, 1.5, "10", None):
        with pytest.raises(ValueError, match="max_bytes= is the size of the largest body, in bytes, at least 1"):
            og.ingress(CONTRACT, max_bytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        og.ingress(CONTRACT)  # type: ignore[call-arg]
    for signature, name in (("x, /", "x"), ("*rest", "rest")):
        contract = parse_stubs(f"def f({signature}):\n    {name}: object\n")["f"]
        with pytest.raises(TypeError, match=f"f: a request has names only, so {name} could not be given"):
            og.ingress(contract, max_bytes=1)
    for no_stub in (check, "def f(x): ...", og.guard("x: int")(lambda x: x)):
        with pytest.raises(TypeError, match=r"og\.ingress takes a contract that og\.load has read"):
            og.ingress(no_stub, max_bytes=1)  # type: ignore[arg-type]


# ---------------------------------------------------------------- anything at all

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
NAMES = ["prompt", "max_tokens", "temperature", "stop", "logit_bias", "n", "m", "best_of", "vocabulary", "others", ""]
ODD = st.sampled_from(
    ["50%", "%999999999d", 0, -1, 1, 1.5, True, None, 2**63, -(2**63), 2**64, 10**400, 10**5000, math.nan, math.inf,
     "\ud800", [], {}, [[]], {"a": {}}, ["a"] * 5, {"a": 101, "b": "c"}]
)  # fmt: skip
PIECES = [
    "{", "}", "[", "]", ":", ",", '"', '"prompt"', '"max_tokens"', '"a"', "1", "-", "1e999", "0.5", "NaN", "null",
    "true", "\\", "\\ud800", "\\u0000", " ", "\n", "9" * 5000, "\x00", "é", "%",
]  # fmt: skip
large = og.ingress(CONTRACT, max_bytes=1_000_000)
MANY = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


def survives(body: Any, using: Any = check) -> None:
    """It returns a dict or raises a GuardError, and llm-op-guard does not fail within."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            assert isinstance(using(body), dict)
        except og.GuardError as error:
            json.dumps(error.to_dict(style="openai")).encode()
            json.dumps(error.to_dict()).encode()
            assert str(error) and error.violations
    said = [str(warning.message) for warning in caught]
    assert not [text for text in said if not text.startswith("the predicate llm_op_guard.predicates.largest_token_id")]


@MANY
@given(st.binary(max_size=600))
def test_any_bytes(body: bytes) -> None:
    survives(body)
    survives(memoryview(body))


@MANY
@given(st.text(st.characters(codec=None), max_size=500))
def test_any_text(body: str) -> None:
    survives(body)
    survives(f'{{"prompt": "{body}"}}')


@MANY
@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_pieces_of_json_in_any_order(pieces: list[str]) -> None:
    survives("".join(pieces), large)
    survives('{"prompt": "a", "n": ' + "".join(pieces) + "}", large)


@MANY
@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, ODD | TREES)),
    st.dictionaries(st.text(max_size=4), ODD | TREES, max_size=3),
)
def test_any_fields(named: dict[str, Any], others: dict[str, Any]) -> None:
    fields = {"prompt": "a", **others, **named}
    survives(fields)
    try:
        body = json.dumps(fields).encode()
    except ValueError:
        return
    survives(body, large)


@MANY
@given(TREES)
def test_any_value(value: Any) -> None:
    survives(value)


# ---------------------------------------------------------------- what a server may hand in


class OddDict(dict[Any, Any]):
    def _fails(self, *_: Any) -> Any:
        raise ZeroDivisionError

    keys = items = values = get = __iter__ = __getitem__ = __contains__ = __len__ = _fails


class OddText(str):
    def encode(self, *_: Any) -> Any:
        raise ZeroDivisionError

    isascii = __len__ = __str__ = __eq__ = encode
    __hash__ = str.__hash__


class OddBytes(bytes):
    def __bytes__(self) -> Any:
        raise ZeroDivisionError

    decode = __len__ = __bytes__


class OddList(list[Any]):
    def __iter__(self) -> Any:
        raise ZeroDivisionError

    __len__ = __getitem__ = __iter__


class NoClass:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "body",
    [
        lambda: OddDict(prompt="a"),
        lambda: OddText('{"prompt": "a"}'),
        lambda: OddBytes(b'{"prompt": "a"}'),
        lambda: {OddText("prompt"): "a"},
    ],
)
def test_classes_of_the_server_are_not_asked(body: Any) -> None:
    fields = check(body())
    assert type(fields) is dict
    assert fields["prompt"] == "a"


def test_what_is_no_body_is_refused() -> None:
    assert rules({1: 2, "prompt": "a"}) == ["json"]
    assert rules({"prompt": "a", "user": {(1, 2): 3}}) == ["json"]
    assert rules(NoClass()) == ["json_object"]
    assert refusal({1: 2}).violations[0].observed == "an object of the body has a field whose name is no text"


def test_it_is_copied_as_it_is_and_not_pickled() -> None:
    assert copy.deepcopy({"check": check})["check"] is check
    with pytest.raises(TypeError, match=r"what og\.ingress returns belongs to its process"):
        pickle.dumps(check)


def test_a_hostile_list_is_one_violation() -> None:
    assert rules({"prompt": "a", "stop": [1] * 20_000}) == ["stop[_].type", "stops"]
    assert len(og.record.violations) == 2
