"""What contracts ask of texts and of the names of keyword arguments."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.contract.vocabulary import FUNCTIONS
from llm_op_guard.guard.explain import explain
from llm_op_guard.guard.functions import IMPLEMENTATIONS, ends_with, misspelt
from llm_op_guard.guard.reading import NotApplicable

pytestmark = pytest.mark.usefixtures("no_alarm")

NAMES = ("attention_mask", "position_ids", "labels", "mask", "q")


def boom(*_: Any, **__: Any) -> Any:
    raise AssertionError("code of an argument was run")


class Loud(str):
    __hash__ = str.__hash__
    __eq__ = endswith = __len__ = __iter__ = split = __str__ = __repr__ = boom  # type: ignore[assignment]


class LoudDict(dict):  # type: ignore[type-arg]
    __iter__ = keys = __getitem__ = __contains__ = __len__ = boom


def kind(odd: object) -> str:
    return type(odd).__name__


# ---------------------------------------------------------------- misspelt


@pytest.mark.parametrize(
    "key",
    ["attention_msk", "atention_mask", "attention_masks", "attention_maks", "attnetion_mask", "attentoin_maks",
     "attention-mask", "Attention_Mask", "attentionmask", "attention_mas", "attention_ma", "xattention_maskx",
     "_attention_mask", "positions_ids", "position_id", "positon_id", "labls", "label", "Labels", "lables"],
)  # fmt: skip
def test_a_key_that_is_nearly_a_name(key: str) -> None:
    assert misspelt({"input_ids": 1, key: 2}, *NAMES) == key


@pytest.mark.parametrize(
    "key",
    ["attention", "attention_m", "mask_attention", "attn_mask", "atenton_msk", "position", "pos_ids", "input_ids",
     "lable", "lab", "use_labels", "msk", "masks", "task", "k", "", "q_", "attention_mask_2d", "token_type_ids"],
)  # fmt: skip
def test_a_key_that_is_another_word(key: str) -> None:
    assert misspelt({key: 2}, *NAMES) is None


@pytest.mark.parametrize(("name", "allowed"), [("abcd", 0), ("abcde", 1), ("abcdefg", 1), ("abcdefgh", 2)])
def test_how_many_edits_by_the_length_of_a_name(name: str, allowed: int) -> None:
    for count in range(1, 4):
        key = "_" * count + name[count:]
        assert misspelt({key: 1}, name) == (key if count <= allowed else None)


def edits(a: str, b: str) -> int:
    """Letters put in, left out, changed or swapped with the next: the table of the textbook (optimal alignment)."""
    table = {(i, 0): i for i in range(len(a) + 1)} | {(0, j): j for j in range(len(b) + 1)}
    for i, x in enumerate(a, 1):
        for j, y in enumerate(b, 1):
            table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and y == a[i - 2]:
                table[i, j] = min(table[i, j], table[i - 2, j - 2] + 1)
    return table[len(a), len(b)]


@given(
    st.text("ab_c", max_size=12),
    st.lists(st.tuples(st.sampled_from(["put", "leave", "swap", "change"]), st.integers(0, 12)), max_size=3),
)
def test_nearly_is_by_edits(name: str, changes: list[tuple[str, int]]) -> None:
    key = name
    for change, i in changes:
        rest = {"put": "b" + key[i:], "leave": key[i + 1 :], "change": "c" + key[i + 1 :]}
        rest["swap"] = key[i : i + 2][::-1] + key[i + 2 :]
        key = key[:i] + rest[change]
    allowed = 2 if len(name) >= 8 else 1 if len(name) >= 5 else 0
    nearly = 0 < edits(key, name) <= allowed
    assert (misspelt({key: 1}, name) == key) is nearly


def test_what_is_there_is_not_looked_for_and_what_is_a_name_is_right() -> None:
    assert misspelt({"attention_mask": 1, "attention_masks": 2}, *NAMES) is None
    assert misspelt({"past_key_value": 1}, "past_key_values", "past_key_value") is None
    assert misspelt({"past_key_value": 1}, "past_key_values") == "past_key_value"
    assert misspelt({"labls": 1, "attention_msk": 2}, *NAMES) == "labls"
    assert misspelt({}, *NAMES) is None


def test_what_is_looked_at_is_bounded() -> None:
    many = {f"key_{i}": i for i in range(127)}
    assert misspelt({**many, "labls": 1}, *NAMES) == "labls"
    with pytest.raises(NotApplicable):
        misspelt({**many, "labls": 1, "labels": 2}, *NAMES)
    long = "x" * 1_000_000
    assert misspelt({long: 1, long + "y": 2}, long + "yz", *NAMES) is None
    others: dict[Any, int] = {1: 2, None: 3, ("labls",): 4, b"labls": 6}
    assert misspelt(others, *NAMES) is None
    assert misspelt({Loud("labls"): 5}, *NAMES) == "labls"
    assert misspelt({Loud("labels"): 5, "labls": 6}, *NAMES) is None


@pytest.mark.parametrize(
    "odd", [None, 3, "labls", ["labls"], {"labls"}, UserDict(labls=1), Mock(), torch.ones(2)], ids=kind
)
def test_what_is_no_dict_does_not_apply(odd: Any) -> None:
    with pytest.raises(NotApplicable):
        misspelt(odd, *NAMES)


def test_dicts_of_other_classes_run_no_code() -> None:
    assert misspelt(OrderedDict(labls=1), *NAMES) == "labls"
    assert misspelt(LoudDict(labls=1), *NAMES) == "labls"


def test_a_rule_about_keyword_arguments() -> None:
    @og.guard("""
        x: any[...]
        require(misspelt(kwargs, "attention_mask", "position_ids") is None, id="known_names", error=TypeError,
                hint=f"{misspelt(kwargs, 'attention_mask', 'position_ids')} is not an argument")
    """)
    def forward(x: Any, **kwargs: Any) -> Any:
        return x

    x = torch.ones(1)
    assert forward(x) is x
    assert forward(x, attention_mask=1, position_ids=2, use_cache=True) is x
    assert forward(x, attention_mask=1, attention_masks=2) is x
    with pytest.raises(TypeError, match="'attention_msk' is not an argument") as caught:
        forward(x, position_ids=1, attention_msk=2)
    (violation,) = caught.value.violations  # type: ignore[attr-defined]
    assert (violation.rule_id, violation.cost_class) == ("known_names", "A")
    assert violation.observed == "misspelt(kwargs, 'attention_mask', 'position_ids') = 'attention_msk'"


def test_a_key_that_is_shown_is_one_line() -> None:
    contract = parse_body("require(misspelt(d, 'attention_mask') is None)", "operator", ("d",))
    (violation,) = explain(contract, {"d": {"attention\nmask": 1}})
    assert violation.observed == r"misspelt(d, 'attention_mask') = 'attention\nmask'"


def test_a_traced_program_is_not_looked_at() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    body = "require(misspelt(kwargs, 'attention_mask') is None)\nrequire(ends_with(name, 'proj'))\n"
    body += "require(longest_run(name) < 9)"
    guarded = og.guard(body)(lambda x, name, **kwargs: x + len(kwargs))
    run = torch.compile(guarded, fullgraph=True, backend=counter)
    assert run(torch.ones(1), "q_proj", attention_msk=1).item() == 2
    assert counter.frame_count == 1
    with pytest.raises(og.GuardError, match="ends_with"):
        run(torch.ones(1), "q_projection")
    with pytest.raises(og.GuardError, match="misspelt"):
        guarded(torch.ones(1), "q_proj", attention_msk=1)


# ---------------------------------------------------------------- ends_with


def test_ends_with() -> None:
    assert ends_with("model.layers.0.q_proj", "q_proj")
    assert ends_with("q_proj", "q_proj") and ends_with("q_proj", "")
    assert not ends_with("q_proj", "model.q_proj") and not ends_with("q_proj.x", "q_proj")
    assert ends_with(Loud("q_proj"), "proj")
    for text, ending in (
        (None, "a"),
        ("a", None),
        (b"ab", "b"),
        (3, 3),
        (torch.ones(1), "a"),
        ("a", ("a",)),
        (Mock(), "a"),
    ):
        with pytest.raises(NotApplicable):
            ends_with(text, ending)


# ---------------------------------------------------------------- texts as a whole

TEXTS: list[tuple[str, int, int, int]] = [  # surrogates, controls, longest run
    ("", 0, 0, 0),
    ("plain text", 0, 0, 5),
    ("a\tb\nc\rd", 0, 0, 1),
    ("\ud800", 1, 0, 1),
    ("x\udfffy\udbc0", 2, 0, 4),
    ("\ud7ff\ue000\U0010ffff\U0001f600", 0, 0, 4),
    ("\ud83d\ude00", 2, 0, 2),
    ("\x00\x08\x0b\x0c\x0e\x1f\x7f\x80\x9f", 0, 9, 3),
    ("\x20\x7e\xa0\xad", 0, 0, 1),
    (" aaa  bb ", 0, 0, 3),
    ("a\u2003bb\u3000ccc", 0, 0, 3),
    ("a\u200bb", 0, 0, 3),
]


@pytest.mark.parametrize(("text", "surrogates", "controls", "longest_run"), TEXTS)
def test_texts(text: str, surrogates: int, controls: int, longest_run: int) -> None:
    expected = {"surrogates": surrogates, "controls": controls, "longest_run": longest_run}
    for name, number in expected.items():
        assert IMPLEMENTATIONS[name](text) == number, name
        assert IMPLEMENTATIONS[name](Loud(text)) == number, name
        assert FUNCTIONS[name].cost_class == "B"
    try:
        text.encode()
    except UnicodeEncodeError:
        assert surrogates > 0
    else:
        assert surrogates == 0


def test_long_texts() -> None:
    assert IMPLEMENTATIONS["longest_run"]("ab " * 300_000 + "c" * 1000) == 1000
    assert IMPLEMENTATIONS["surrogates"]("a" * 1_000_000 + "\ud800") == 1
    assert IMPLEMENTATIONS["controls"]("\x00" * 1000 + "a" * 1_000_000) == 1000


@pytest.mark.parametrize("odd", [None, 3, b"a\x00", ["a"], Mock(), torch.ones(1), UserDict()], ids=kind)
@pytest.mark.parametrize("name", ["surrogates", "controls", "longest_run"])
def test_what_is_no_text_does_not_apply(name: str, odd: Any) -> None:
    with pytest.raises(NotApplicable):
        IMPLEMENTATIONS[name](odd)
    assert explain(parse_body(f"require({name}(t) == 99)", "operator", ("t",)), {"t": odd}) == []


def test_a_text_is_never_shown() -> None:
    body = (
        "require(surrogates(t) == 0)\nrequire(controls(t) < 1)\nrequire(longest_run(t) < 5)\nrequire(ends_with(t, '.'))"
    )

    @og.guard(body)
    def ingest(t: str) -> str:
        return t

    assert ingest("a b.") == "a b."
    with pytest.raises(og.GuardError) as caught:
        ingest("secret\x00\ud800")
    assert [v.observed for v in caught.value.violations] == [
        "surrogates(t) = 1",
        "controls(t) = 1",
        "longest_run(t) = 8",
        "t = a text of 8 characters",
    ]
    assert "secret" not in str(caught.value)


REFUSED = {
    "require(longest_run(3) < x)": "longest_run takes a text here",
    "require(ends_with(x, 3))": "ends_with takes a text here",
    "x: int\nrequire(surrogates(x) == 0)": "surrogates takes a text here",
    "x: any[N]\nrequire(controls(x) == 0)": "controls takes a text here",
    "require(misspelt(x, 'abcde', None) is None)": "misspelt takes a text here",
    "require(misspelt(x) is None)": "misspelt.mapping, name, …. takes 2 arguments; 1 given",
    "require(misspelt('abc', 'abcde') is None)": "misspelt takes a parameter or what can be read from one",
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_takes_a_text_is_given_one(body: str) -> None:
    with pytest.raises(og.ContractError, match=REFUSED[body]):
        parse_body(body, "operator", ("x",))


def test_misspelt_among_keys_that_are_no_plain_texts() -> None:
    class Text(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            raise AssertionError("a key was compared by its own class")

    for keys in ({Text("atention_mask"): 1}, {1: 1, "atention_mask": 1}, {"x" * 1000: 1, "atention_mask": 1}):
        assert misspelt(keys, *NAMES) == "atention_mask"
