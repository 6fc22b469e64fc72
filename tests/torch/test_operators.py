"""A guarded operator of torch raises where torch itself raises, and in the few cases that torch computes wrongly.

Random arguments are handed to the operator with a guard and without. `left_to_torch` names what torch rejects, here or
on some backend, and no rule speaks of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import llm_op_guard as og

quiet = pytest.mark.usefixtures("no_alarm")
many = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(autouse=True)
def installed() -> Any:
    with og.policy(B="raise"), og.installed("torch"):
        yield


def rules(call: Callable[[], Any]) -> list[str]:
    """The rules that a call breaks."""
    try:
        call()
    except og.GuardError as error:
        return [violation.rule_id for violation in error.violations]
    except Exception:
        return []
    return []


def rejected(call: Callable[[], Any]) -> Exception | None:
    """What the operator itself raises."""
    with og.policy(A="off", B="off"):
        try:
            call()
        except Exception as error:
            return error
    return None


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def assert_as_torch(call: Callable[[], Any], *, wrong: bool = False, left_to_torch: bool = False) -> None:
    """The guard raises exactly where torch does, or where the result is `wrong`; `left_to_torch` need not raise."""
    broken, error = rules(call), rejected(call)
    if broken:
        assert error is not None or wrong, f"a false alarm: {broken}"
    else:
        assert left_to_torch or (error is None and not wrong), f"not noticed: {error!r}"


# ---------------------------------------------------------------- attention

SIZES = st.sampled_from([1, 1, 2, 2, 4, 3, 0])


@st.composite
def attention(draw: st.DrawFn) -> dict[str, Any]:
    """A call that is mostly right: sizes that fit, some of them changed."""
    rank = draw(st.sampled_from([4, 4, 4, 3, 2]))
    sizes = {name: draw(SIZES) for name in "BLSEV"}
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    gqa = draw(st.booleans())
    groups = draw(st.sampled_from([1, 2, 4, heads, heads]))
    lead = (sizes["B"], heads)[max(0, 4 - rank) :]
    lead_k = (sizes["B"], groups if gqa else heads)[max(0, 4 - rank) :]
    shapes = {
        "query": [*lead, sizes["L"], sizes["E"]],
        "key": [*lead_k, sizes["S"], sizes["E"]],
        "value": [*lead_k, sizes["S"], draw(st.sampled_from([sizes["E"], sizes["E"], sizes["V"]]))],
    }
    if draw(st.booleans()):
        shapes["attn_mask"] = [*lead, sizes["L"], sizes["S"]][draw(st.integers(0, rank)) :]
        shapes["attn_mask"] = [draw(st.sampled_from([n, n, 1])) for n in shapes["attn_mask"]]
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        name = draw(st.sampled_from(sorted(shapes)))
        if shapes[name]:
            shapes[name][draw(st.integers(0, len(shapes[name]) - 1))] = draw(SIZES)
    if draw(st.integers(0, 15)) == 0:
        name = draw(st.sampled_from(sorted(shapes)))
        shapes[name] = shapes[name][1:] if draw(st.booleans()) else [1, *shapes[name]]
    dtypes = [torch.float32] * 6 + [torch.bfloat16, torch.float64, torch.int64]
    same = draw(st.sampled_from(dtypes[:-1]))
    call: dict[str, Any] = {
        name: numbers(*shape, dtype=draw(st.sampled_from(dtypes)) if draw(st.integers(0, 19)) == 0 else same)
        for name, shape in shapes.items()
    }
    if "attn_mask" in call and draw(st.booleans()):
        call["attn_mask"] = call["attn_mask"] > 0
    if gqa:
        call["enable_gqa"] = True
    if draw(st.integers(0, 5)) == 0:
        call["is_causal"] = True
    if draw(st.integers(0, 9)) == 0:
        call["dropout_p"] = draw(st.sampled_from([0.5, 1.0, 0.0, 1.5, -0.5]))
    return call


def left_of_attention(call: dict[str, Any]) -> bool:
    q, k, v, mask = (call.get(name) for name in ("query", "key", "value", "attn_mask"))
    if 0 in (q.numel(), k.numel(), v.numel()):
        return True  # some of it is looked at, some is not
    if not q.ndim == k.ndim == v.ndim or q.ndim > 4:
        return True  # dimensions are broadcast from the right, and which are left over is a long story
    if call.get("dropout_p", 0) < 0:
        return True  # on some paths
    if mask is None:
        return False
    if call.get("is_causal") or mask.ndim < 2:
        return True  # on some paths
    return mask.is_floating_point() and mask.dtype not in (torch.float32, q.dtype)  # under autocast it is right


@given(attention())
@many
@pytest.mark.filterwarnings("ignore::llm_op_guard.GuardWarning")
def test_attention(call: dict[str, Any]) -> None:
    k, v = call["key"], call["value"]
    if call.get("enable_gqa") and k.ndim > 2 and k.shape[-3] == 0 and v.ndim > 2 and v.shape[-3] > 0:
        assert "some_heads" in rules(lambda: F.scaled_dot_product_attention(**call)), "torch divides by 0"
        return
    wrong = k.shape[-2:-1] != v.shape[-2:-1]
    assert_as_torch(
        lambda: F.scaled_dot_product_attention(**call),
        wrong=wrong,
        left_to_torch=left_of_attention(call),
    )


def test_values_that_are_fewer_than_keys() -> None:
    q, k = numbers(1, 2, 3, 8), numbers(1, 2, 5, 8)
    for length in (1, 4, 6):
        v = numbers(1, 2, length, 8)
        with og.policy(A="off"):
            assert torch.isfinite(F.scaled_dot_product_attention(q, k, v)).all(), "without a word"
        assert rules(lambda v=v: F.scaled_dot_product_attention(q, k, v)) == ["value.shape"]


def test_one_key_head_for_all_heads() -> None:
    q, k = numbers(2, 4, 3, 8), numbers(2, 1, 5, 8)
    assert F.scaled_dot_product_attention(q, k, k).shape == q.shape
    assert F.scaled_dot_product_attention(q, k, k, enable_gqa=True).shape == q.shape


@pytest.mark.parametrize(
    ("changes", "rule", "hint"),
    [
        ({"key": (2, 2, 5, 8), "value": (2, 2, 5, 8)}, ["heads_of_keys", "heads_of_values"], "enable_gqa"),
        ({"key": (2, 3, 5, 8), "value": (2, 3, 5, 8)}, ["heads_of_keys", "heads_of_values"], "another config"),
        ({"key": (3, 4, 5, 8), "value": (3, 4, 5, 8)}, ["batch_of_keys", "batch_of_values"], "another batch size"),
        ({"key": (2, 4, 5, 9)}, ["key.shape"], "another model"),
        ({"attn_mask": (3, 3)}, ["mask_keys"], "past"),
        ({"attn_mask": (4, 5)}, ["mask_queries"], "queries"),
        ({"attn_mask": (2, 3, 5)}, ["mask_heads"], "axis for heads"),
        ({"attn_mask": (3, 1, 3, 5)}, ["mask_batch"], "another batch"),
        ({"attn_mask": (1, 1, 1, 3, 5)}, ["mask_dimensions"], "to the scores"),
    ],
)
def test_what_is_said_of_attention(changes: dict[str, Any], rule: list[str], hint: str) -> None:
    shapes = {"query": (2, 4, 3, 8), "key": (2, 4, 5, 8), "value": (2, 4, 5, 8), **changes}
    call = {name: numbers(*shape) for name, shape in shapes.items()}
    assert isinstance(rejected(lambda: F.scaled_dot_product_attention(**call)), RuntimeError)
    with pytest.raises(RuntimeError, match=hint) as caught:
        F.scaled_dot_product_attention(**call)
    assert isinstance(caught.value, og.GuardError)
    assert [violation.rule_id for violation in caught.value.violations] == rule


def test_a_mask_beside_is_causal_is_a_suspicion() -> None:
    q, k, mask = numbers(1, 2, 3, 8), numbers(1, 2, 5, 8), numbers(3, 5)
    with og.policy(A="off"):
        both = F.scaled_dot_product_attention(q, k, k, mask, is_causal=True)
        causal = torch.ones(3, 5).tril().bool()
        combined = F.scaled_dot_product_attention(q, k, k, mask.masked_fill(~causal, -torch.inf))
    assert torch.allclose(both, combined, atol=1e-6), "on the CPU both are applied"
    with pytest.warns(og.GuardWarning, match="exclude each other"):
        assert torch.equal(F.scaled_dot_product_attention(q, k, k, mask, is_causal=True), both)
    with pytest.raises(RuntimeError, match="Explicit attn_mask"):
        F.scaled_dot_product_attention(q[0], k[0], k[0], mask, is_causal=True)


# ---------------------------------------------------------------- embedding


@quiet
@given(
    ids=st.sampled_from([(), (0,), (3,), (2, 3)]),
    dtype=st.sampled_from([torch.int64] * 4 + [torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32]),
    value=st.sampled_from([0, 0, 1, 9, 10, -1, -100, 2**20]),
    table=st.sampled_from([(10, 4)] * 4 + [(1, 4), (0, 4), (10, 0), (10,), (), (10, 4, 2)]),
    padding=st.sampled_from([None, None, 0, 9, 10, -1, -10, -11]),
    max_norm=st.sampled_from([None, None, 1.0]),
)
@many
def test_embedding(
    ids: Any, dtype: torch.dtype, value: int, table: Any, padding: int | None, max_norm: float | None
) -> None:
    if dtype in (torch.bool, torch.uint8, torch.int16):
        value = 0
    indices, weight = torch.full(ids, value, dtype=dtype), numbers(*table)
    assert_as_torch(lambda: F.embedding(indices, weight, padding, max_norm))


@pytest.mark.parametrize(
    ("ids", "hint"), [(-100, "to be ignored"), (-1, "negative id"), (10, "another table"), (9, None), (0, None)]
)
def test_what_is_said_of_ids(ids: int, hint: str | None) -> None:
    indices, weight = torch.tensor([[1, ids]]), numbers(10, 4)
    if hint is None:
        F.embedding(indices, weight)
        return
    with pytest.raises(IndexError, match=hint) as caught:
        F.embedding(indices, weight)
    assert isinstance(caught.value, og.GuardError)
    with og.policy(B="off"), pytest.raises(IndexError, match="out of range"):
        F.embedding(indices, weight)


# ---------------------------------------------------------------- norms

SHAPES = st.lists(st.sampled_from([4, 4, 3, 1, 2, 0, 129]), min_size=0, max_size=4)


@st.composite
def normalized(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], dict[str, torch.Tensor]]:
    shape = draw(SHAPES)
    count = draw(st.sampled_from([1, 1, 1, 2, 3, 0]))
    given_shape = shape[len(shape) - count :] if count <= len(shape) else [4] * count
    if draw(st.integers(0, 5)) == 0 and given_shape:
        given_shape[draw(st.integers(0, len(given_shape) - 1))] = draw(st.sampled_from([1, 3, 4, 5]))
    dtype = draw(st.sampled_from([torch.float32] * 8 + [torch.bfloat16, torch.float64, torch.int64, torch.bool]))
    tensors = {}
    for name in ("weight", "bias"):
        if draw(st.booleans()):
            own = list(given_shape)
            if draw(st.integers(0, 5)) == 0:
                own = draw(st.sampled_from([[1], [3], own[1:], [1, *own], []]))
            tensors[name] = numbers(*own, dtype=dtype if dtype.is_floating_point else torch.float32)
    return numbers(*shape, dtype=dtype), given_shape, tensors


def middle_differs(given_shape: list[int], *shapes: Any) -> bool:
    """Whether only a size between the first and the last of three is not right: the rules look at these two."""
    return len(given_shape) == 3 and any(len(s) >= 3 and s[-2] != given_shape[1] for s in shapes)


@quiet
@given(normalized())
@many
def test_layer_norm(call: Any) -> None:
    x, given_shape, tensors = call
    shapes = [tensor.shape for tensor in (x, *tensors.values())]
    assert_as_torch(lambda: F.layer_norm(x, given_shape, **tensors), left_to_torch=middle_differs(given_shape, *shapes))


@quiet
@given(normalized())
@many
def test_rms_norm(call: Any) -> None:
    x, given_shape, tensors = call
    weight = tensors.get("weight")
    shapes = [x.shape, *([] if weight is None else [weight.shape])]
    assert_as_torch(lambda: F.rms_norm(x, given_shape, weight), left_to_torch=middle_differs(given_shape, *shapes))


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_what_is_said_of_norms(norm: Any) -> None:
    x = numbers(2, 3, 129)
    for shape in ([129], (129,), torch.Size([129]), [3, 129], [2, 3, 129]):
        norm(x, shape)
        norm(x, shape, numbers(*shape))
        norm(x[:0], shape) if len(shape) < 3 else None
    for shape, weight, rule in (
        ([128], None, ["normalized_shape"]),
        ([1], None, ["normalized_shape"]),
        ([129], (1,), ["weight_shape"]),
        ([129], (3, 129), ["weight_shape"]),
        ([], None, ["dimensions"]),
        ([1, 2, 3, 129], None, ["dimensions"]),
    ):
        with pytest.raises(RuntimeError) as caught:
            norm(x, shape, None if weight is None else numbers(*weight))
        assert isinstance(caught.value, og.GuardError)
        assert [violation.rule_id for violation in caught.value.violations] == rule
    meta = numbers(129).to("meta")
    with pytest.raises(og.GuardError, match="another device"):
        norm(x, [129], meta)
    with pytest.raises(TypeError):
        norm(x, 129)


# ---------------------------------------------------------------- cross entropy


@st.composite
def losses(draw: st.DrawFn) -> dict[str, Any]:
    classes = draw(st.sampled_from([5, 5, 1, 3]))
    batch = draw(st.sampled_from([3, 3, 1, 0]))
    rest = draw(st.sampled_from([[], [], [2], [2, 2], [0]]))
    scores = draw(st.sampled_from([[batch, classes, *rest]] * 5 + [[classes], []]))
    labels = [batch, *rest] if len(scores) > 1 else draw(st.sampled_from([[], [1]]))
    probabilities = draw(st.integers(0, 3)) == 0
    target = list(scores) if probabilities else labels
    if draw(st.integers(0, 4)) == 0:
        target = draw(st.sampled_from([[], [1], [2], [batch, 1], [batch, classes], [*target, 2], target[:-1], scores]))
    kind = torch.float32 if probabilities else torch.int64
    if draw(st.integers(0, 9)) == 0:
        kind = draw(st.sampled_from([torch.int32, torch.uint8, torch.bool, torch.float32, torch.int64, torch.float64]))
    value = draw(st.sampled_from([0, 0, 0, 1, classes - 1, classes, -100, -1, 7])) if kind == torch.int64 else 0
    call: dict[str, Any] = {
        "input": numbers(*scores, dtype=draw(st.sampled_from([torch.float32] * 6 + [torch.float64, torch.bfloat16]))),
        "target": torch.full(target, value, dtype=kind),
    }
    if draw(st.integers(0, 3)) == 0:
        call["weight"] = numbers(*draw(st.sampled_from([[classes]] * 4 + [[1], [classes + 1], [1, classes], []])))
        call["weight"] = call["weight"].to(call["input"].dtype)
    if draw(st.integers(0, 3)) == 0:
        call["ignore_index"] = draw(st.sampled_from([-100, -1, 0, 7, classes]))
    if draw(st.integers(0, 5)) == 0:
        call["label_smoothing"] = draw(st.sampled_from([0.0, 0.1, 1.0, 1.5]))
    if draw(st.booleans()):
        call["reduction"] = draw(st.sampled_from(["mean", "sum", "none"]))
    return call


def left_of_losses(call: dict[str, Any]) -> bool:
    scores, target = call["input"], call["target"]
    if scores.ndim == 1 and target.shape == (1,):
        return True  # one label in a tensor of rank 1: with smoothing torch raises, without it does not
    if target.dtype == torch.uint8 and scores.ndim > 2:
        return True  # on the CPU
    if "weight" in call and call["weight"].ndim != 1:
        return True  # with scores of some ranks
    return target.dtype == torch.float64 or (target.is_floating_point() and scores.dtype == torch.bfloat16)


@quiet
@given(losses())
@many
def test_cross_entropy(call: dict[str, Any]) -> None:
    assert_as_torch(lambda: F.cross_entropy(**call), left_to_torch=left_of_losses(call))


@pytest.mark.parametrize(
    ("scores", "target", "rule", "hint"),
    [
        ((3, 5), torch.zeros(2).long(), "target.shape", "shifted or cut"),
        ((3, 7, 5), torch.zeros(3, 7).long(), "target.shape", "second axis"),
        ((3, 5), torch.zeros(3).int(), "target.dtype", r"\.long\(\)"),
        ((3, 5), torch.zeros(3), "target.shape", r"\.long\(\)"),
        ((3, 5), torch.tensor([0, 5, 1]), "labels_in_classes", "count from 1"),
        ((3, 5), torch.tensor([0, -1, 1]), "labels_in_classes", "count from 1"),
        ((5,), torch.tensor([1, 2]), "one_label", "one label"),
    ],
)
def test_what_is_said_of_losses(scores: Any, target: torch.Tensor, rule: str, hint: str) -> None:
    with pytest.raises(og.GuardError, match=hint) as caught:
        F.cross_entropy(numbers(*scores), target)
    assert [violation.rule_id for violation in caught.value.violations] == [rule]
    # Whoever catches what torch raises catches ours.
    error = rejected(lambda: F.cross_entropy(numbers(*scores), target))
    assert error is not None and isinstance(caught.value, type(error))


def test_labels_that_are_ignored() -> None:
    scores = numbers(4, 5)
    F.cross_entropy(scores, torch.tensor([0, -100, 4, 1]))
    F.cross_entropy(scores, torch.tensor([0, 255, 4, 1]), ignore_index=255)
    F.cross_entropy(scores, torch.full((4,), -100))
    F.cross_entropy(scores[:0], torch.zeros(0).long())
    with pytest.raises(IndexError, match="ignore_index is another number") as caught:
        F.cross_entropy(scores, torch.tensor([0, -100, 4, 1]), ignore_index=0)
    assert isinstance(caught.value, og.GuardError)
