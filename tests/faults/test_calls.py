"""Calls as data: captured from arguments, written as JSON, and made anew."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.contract.path import Path
from llm_op_guard.faults.build import Builder, Unbuildable, build
from llm_op_guard.faults.judge import judge
from llm_op_guard.guard import memory
from llm_op_guard.guard.call import (
    Call,
    IdentitySpec,
    MappingSpec,
    ObjectSpec,
    SequenceSpec,
    Spec,
    TensorSpec,
    TextSpec,
    TorchSpec,
    answer_key,
    asked,
)
from llm_op_guard.guard.call_json import from_json, to_json
from llm_op_guard.guard.capture import capture
from llm_op_guard.guard.explain import explain
from llm_op_guard.guard.reading import UNSET


def contract(body: str, *parameters: str) -> Any:
    return parse_body(body, "operator", parameters)


NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.booleans()
NAMES = st.sampled_from(["a", "weight", "kind"])
TENSORS = st.builds(
    TensorSpec,
    st.sampled_from(["float32", "int64", "bool"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(["cpu", "meta"]),
    fill=st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    at=st.lists(st.tuples(st.integers(0, 5), NUMBERS), max_size=2).map(tuple),
    offset=st.sampled_from([0, 0, 1, 63]),
).map(lambda spec: replace(spec, at=tuple(pair for pair in spec.at if pair[0] < spec.elements)))
LEAVES = (
    TENSORS
    | NUMBERS
    | st.none()
    | st.text(max_size=5)
    | st.builds(TextSpec, st.integers(0, 9))
    | st.builds(TorchSpec, st.just("dtype"), st.just("float16"))
    | st.builds(IdentitySpec, st.none() | st.just("self"))
)
SPECS = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(SequenceSpec, st.sampled_from(["tuple", "list"]), st.lists(inner, max_size=3).map(tuple))
        | st.builds(MappingSpec, st.dictionaries(NAMES, inner, max_size=3).map(lambda pairs: tuple(pairs.items())))
        | st.builds(
            ObjectSpec,
            st.just("Module"),
            st.dictionaries(NAMES, inner, max_size=3).map(lambda pairs: tuple(pairs.items())),
            st.dictionaries(st.just("cache_length()"), inner, max_size=1).map(lambda pairs: tuple(pairs.items())),
        )
    ),
    max_leaves=8,
)
CALLS = st.builds(
    Call, st.dictionaries(NAMES, SPECS, max_size=3).map(lambda pairs: tuple(pairs.items())), st.integers(0, 9)
)


# On a busy machine the drawing alone may take longer than Hypothesis allows.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CALLS)
def test_json_and_back(call: Call) -> None:
    text = json.dumps(to_json(call), allow_nan=False)
    assert repr(from_json(json.loads(text))) == repr(call)  # repr: NaN is not equal to itself


ONE = {"tensor": "float32", "shape": [1]}
OBJECT: dict[str, Any] = {"object": "Module", "attributes": {}}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (3, 'a call is {"arguments": {name: value}}'),
        ({"arguments": {"q": {"tensor": "float32", "shape": [-1]}}}, "q: sizes are a list of whole numbers"),
        ({"arguments": {"q": {"cat": 1}}}, "q: not a value of a call"),
        ({"arguments": {"q": {"tuple": [{"number": "3e400000"}]}}}, r"q\[0\]: not a number"),
        ({"arguments": {}, "seed": "x"}, "the seed of a call is an integer"),
        ({"arguments": {"q": {"number": ""}}}, "q: not a number"),
        ({"arguments": {"q": {**ONE, "fill": 3}}}, "q: what fills a tensor is a list of numbers"),
        ({"arguments": {"q": {**ONE, "fill": []}}}, "q: what fills a tensor is a list of numbers"),
        ({"arguments": {"q": {**ONE, "fill": [None]}}}, "q: not a number"),
        ({"arguments": {"q": {**ONE, "at": 3}}}, r"q: single elements are a list of \[place, number\]"),
        ({"arguments": {"q": {**ONE, "at": [3]}}}, r"q: single elements are a list of \[place, number\]"),
        ({"arguments": {"q": {**ONE, "at": [["0", 3]]}}}, r"q: single elements are a list of \[place, number\]"),
        ({"arguments": {"q": {**ONE, "device": 3}}}, "q: a device is a text"),
        ({"arguments": {"q": {**ONE, "offset": 64}}}, "q: an offset is a whole number below 64"),
        ({"arguments": {"q": {**ONE, "offset": True}}}, "q: an offset is a whole number below 64"),
        ({"arguments": {"q": {**ONE, "offset": -1}}}, "q: an offset is a whole number below 64"),
        ({"arguments": {"q": {**OBJECT, "answers": 3}}}, r'q: answers are {"function\(\)": value}'),
        ({"arguments": {"q": {**OBJECT, "answers": {"length": 3}}}}, "'length' is no question about an object"),
        ({"arguments": {"q": {**OBJECT, "answers": {"f(g())": 3}}}}, r"'f\(g\(\)\)' is no question about an object"),
    ],
)
def test_what_is_no_call_says_where(data: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        from_json(data)


@given(st.lists(st.integers() | st.booleans() | st.text() | st.floats(allow_nan=False, allow_infinity=False)))
def test_a_question_is_read_as_it_was_written(arguments: list[Any]) -> None:
    assert asked(answer_key("recall", tuple(arguments))) == ("recall", tuple(arguments))


def test_an_empty_tensor_may_be_filled_with_nothing() -> None:
    data = {"arguments": {"q": {"tensor": "float32", "shape": [0], "fill": []}}}
    assert build(from_json(data))["q"].shape == (0,)


def test_the_same_call_makes_the_same_arguments() -> None:
    call = Call(
        (("q", TensorSpec("float32", (2, 3))), ("ids", TensorSpec("int64", (4,), fill=(1, 2, 3), at=((3, -100),))))
    )
    one, other = build(call), build(call)
    assert torch.equal(one["q"], other["q"])
    assert one["ids"].tolist() == [1, 2, 3, -100]


@pytest.mark.parametrize("strides", [(1, 2), (0, 1), (3, 0), (6, 1)])
def test_strides(strides: tuple[int, int]) -> None:
    made = build(Call((("x", TensorSpec("float32", (2, 3), strides=strides)),)))["x"]
    assert made.shape == (2, 3)
    assert made.stride() == strides


@pytest.mark.parametrize("strides", [None, (1, 2), (0, 1), (6, 1)])
def test_an_offset(strides: tuple[int, int] | None) -> None:
    spec = TensorSpec("float32", (2, 3), strides=strides, fill=(1, 2, 3) if strides == (0, 1) else (1, 2, 3, 4, 5, 6))
    aligned, off = (build(Call((("x", replace(spec, offset=offset)),)))["x"] for offset in (0, 3))
    assert torch.equal(aligned, off)
    assert aligned.stride() == off.stride()
    assert aligned.data_ptr() % 64 == 0
    assert off.data_ptr() % 64 == 12


def test_the_call_of_a_tensor_off_its_alignment() -> None:
    @og.guard("x: floating[_]\nrequire(aligned(x, 16), id='aligned')")
    def load(x: Any) -> Any:
        return x

    with pytest.raises(og.GuardError) as caught:
        load(torch.ones(64)[5:])
    call = caught.value.violations[0].call
    assert call is not None
    assert str(call.get(Path("x"))).startswith("float32[59], 5 elements past alignment")
    with pytest.raises(og.GuardError, match=r"x.data_ptr\(\) % 16 = 4"):
        load(build(call)["x"])


def test_meta_tensors_may_have_any_size() -> None:
    made = build(Call((("x", TensorSpec("float32", (1 << 31, 4), "meta")),)))["x"]
    assert made.shape == (1 << 31, 4)
    with pytest.raises(Unbuildable, match="too large to be made here"):
        build(Call((("x", TensorSpec("float32", (1 << 31, 4))),)))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (TensorSpec("float3", (2,)), "torch has no dtype float3"),
        (TensorSpec("nn", (2,)), "torch has no dtype nn"),
        (TorchSpec("dtype", "cat"), "torch has no dtype cat"),
        (TorchSpec("device", "nowhere"), "device 'nowhere': "),
        (TensorSpec("float32", (2,), "nowhere"), "on nowhere: "),
        (TensorSpec("float32", (1 << 63,), "meta"), "no tensor has such sizes and strides"),
        (TensorSpec("float32", (1,), "meta", strides=(1 << 63,)), "no tensor has such sizes and strides"),
        (TensorSpec("float32", (2, 3), strides=(1,)), "no tensor has such sizes and strides"),
        (TensorSpec("float32", (1 << 32, 1 << 32), "meta"), "overflow"),
        (TensorSpec("float32", (2,), strides=(1 << 24,)), "too large to be made here"),
        (TensorSpec("int64", (2,), fill=(float("inf"),)), "int64 holds no inf"),
        (TensorSpec("int64", (2,), at=((0, 1 << 63),)), "int64 holds no 9223372036854775808"),
        (TensorSpec("uint1", (2,)), "not implemented for 'UInt1'"),
    ],
    ids=str,
)
def test_what_cannot_be_made_here(spec: Any, says: str) -> None:
    call = Call((("x", spec),))
    with pytest.raises(Unbuildable, match=says):
        build(call)
    assert judge(contract("require(x is None)", "x"), call) is None


def test_a_slip_of_ours_is_nothing_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def slip(self: Builder, spec: ObjectSpec, where: str) -> Any:
        return spec.nothing  # type: ignore[attr-defined]

    monkeypatch.setattr(Builder, "_object", slip)
    with pytest.raises(AttributeError, match="nothing"):
        judge(contract("require(x.n > 0)", "x"), Call((("x", ObjectSpec("object", (("n", 1),))),)))


def test_capture_keeps_what_the_contract_reads_and_no_contents() -> None:
    read = contract("q: floating[B, D]\nself.weight: floating[D]\nrequire(self.mode in ('left', 'right'))", "self", "q")
    owner = SimpleNamespace(weight=torch.full((3,), 7.5), mode="left", secret="what the user wrote", other=3)
    call = capture(read, {"self": owner, "q": torch.full((2, 3), 3.25)})
    assert str(call) == "self=SimpleNamespace(weight=float32[3], mode=left), q=float32[2, 3]"
    owner.mode = "what the user wrote"
    assert capture(read, {"self": owner}).get(Path("self", ("mode",))) == TextSpec(19)
    text = json.dumps(to_json(call))
    assert "user" not in text and "7.5" not in text and "3.25" not in text


def test_capture_runs_no_code_of_arguments() -> None:
    class Loud:
        @property
        def weight(self) -> Any:
            raise AssertionError("a property was run")

        def __eq__(self, other: object) -> bool:
            raise AssertionError("== was called")

        __hash__ = None  # type: ignore[assignment]

    call = capture(contract("self.weight: floating[D]", "self"), {"self": Loud()})
    assert call.get(Path("self", ("weight",))) is UNSET


def test_the_element_that_a_rule_points_to_is_kept() -> None:
    read = contract("require(within(ids, 0, 96), id='in_table')\nrequire(finite(x), id='finite')", "ids", "x")
    ids, x = torch.tensor([[5, 6], [7, 4711]]), torch.tensor([1.5, float("nan")])
    arguments = {"ids": ids, "x": x}
    broken = [violation.rule_id for violation in explain(read, arguments)]
    assert broken == ["in_table", "finite"]
    call = capture(read, arguments, broken)
    assert call.get(Path("ids")) == TensorSpec("int64", (2, 2), at=((3, 4711),))
    assert repr(call.get(Path("x"))) == repr(TensorSpec("float32", (2,), at=((1, float("nan")),)))
    assert [violation.rule_id for violation in explain(read, build(call))] == broken


def test_put_get_and_without() -> None:
    path = Path("self", ("config", "sizes", (1,)))
    call = Call((("self", None),)).put(path, 4)
    assert call.get(path) == 4 and call.get(Path("self", ("config", "sizes", (0,)))) is None
    assert call.without(path).get(path) is UNSET
    assert call.get(Path("q", ("weight",))) is UNSET


@pytest.mark.parametrize("other", [3, None, ObjectSpec("object")])
def test_the_identity_of_what_is_none_is_that_of_another_object(other: Spec) -> None:
    filled = ObjectSpec("object", answers=((answer_key("recall", ("filled_by",)), IdentitySpec("other")),))
    made = build(Call((("cache", filled), ("other", other))))
    found = memory.recall(made["cache"], "filled_by")
    assert (found == memory.Identity("object", 0)) is not isinstance(other, ObjectSpec)
