"""Attention: a function of every code that is known, what it takes and what it must not be given.

What is refused is shown unguarded first: it fails, or it computes something else without a word. Flash attention has
no kernel here: a reference stands in for it, behind the guarded function.
"""

from __future__ import annotations

import importlib
import types
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.integrations import eager_paged, flash_attention, sdpa_attention
from transformers.integrations import flex_attention as flex_integration

import llm_op_guard as og
from llm_op_guard.install.recognise import Fingerprint, fingerprint
from llm_op_guard.integrations.transformers import TransformersIntegration, attention

B, H, G, L, D = 2, 4, 2, 7, 16
Arguments = tuple[Any, ...]
Call = Callable[[], Arguments]
Bad = tuple[Call, str, str]
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def fixed_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def function_named(name: str) -> Any:
    model, _, function = name.partition(".")
    if model == "eager_paged":
        return eager_paged.eager_paged_attention_forward
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    return getattr(module, function or "eager_attention_forward")


class Layer(nn.Module):
    """What attention functions ask of the module that calls them."""

    def __init__(self, *, causal: bool = True, groups: int = H // G) -> None:
        super().__init__()
        self.is_causal = causal
        self.num_key_value_groups = groups
        self.head_dim = D
        self.config = SimpleNamespace(_attn_implementation="flash_attention_2")
        self.eval()


class LayerWithSinks(Layer):
    """The same with one sink for each head, which some functions look for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sinks = nn.Parameter(torch.zeros(H))


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


def states(batch: int = B, heads: int = H, groups: int = G, queries: int = L, keys: int = L) -> tuple[Tensor, ...]:
    return numbers(batch, heads, queries, D), numbers(batch, groups, keys, D), numbers(batch, groups, keys, D)


def keeps(queries: int = L, keys: int = L, batch: int = B) -> Tensor:
    """The causal mask as True/False; the last query sees every key."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).expand(batch, 1, queries, keys)


def additive(*sizes: int) -> Tensor:
    keep = keeps(*sizes)
    return torch.zeros(keep.shape).masked_fill(~keep, LOWEST)


def wide(size: int, groups: int) -> Arguments:
    return numbers(B, H, L, size), numbers(B, groups, L, size), numbers(B, groups, L, size), additive()


def good_calls(groups: int, layer: type[Layer]) -> dict[str, Call]:
    """What eager attention takes; k/v heads are `groups`."""

    def causal() -> Layer:
        return layer(groups=H // groups)

    def loose() -> Layer:
        return layer(causal=False, groups=H // groups)

    def of(*sizes: int, batch: int = B) -> tuple[Tensor, ...]:
        queries, keys = sizes or (L, L)
        return states(batch, groups=groups, queries=queries, keys=keys)

    return {
        "prefill": lambda: (causal(), *of(), additive()),
        "no mask": lambda: (causal(), *of(), None),
        "one token of many": lambda: (causal(), *of(1, L), additive(1, L)),
        "one token": lambda: (causal(), *of(1, 1), torch.zeros(B, 1, 1, 1)),
        "no sequences": lambda: (causal(), *of(batch=0), None),
        "one sequence": lambda: (causal(), *of(batch=1), additive(L, L, 1)),
        "some tokens, more keys": lambda: (causal(), *of(3, L), additive(3, L)),
        "a mask for all sequences": lambda: (causal(), *of(), additive(L, L, 1)),
        "a mask for each head": lambda: (causal(), *of(), additive().expand(B, H, L, L)),
        "a mask without batch": lambda: (causal(), *of(), additive()[0, 0]),
        "a mask of keys": lambda: (causal(), *of(), torch.zeros(L)),
        "a mask of padding": lambda: (causal(), *of(), torch.zeros(B, 1, 1, L)),
        "narrower values": lambda: (causal(), *of()[:2], numbers(B, groups, L, 4), additive()),
        "bfloat16": lambda: (causal(), *(x.bfloat16() for x in of()), additive().bfloat16()),
        "learned queries": lambda: (loose(), of(batch=1)[0], *of()[1:], None),
        "one memory for all": lambda: (loose(), of()[0], *of(batch=1)[1:], None),
        "a mask for each of many memories": lambda: (loose(), *of(batch=1), torch.zeros(B, 1, L, L)),
        "other lengths": lambda: (loose(), *of(L, 30), torch.zeros(B, 1, 1, 30)),
        "a mask of one column, not causal": lambda: (loose(), *of(), torch.zeros(B, 1, 1, 1)),
        **{f"head size {size}": lambda size=size: (causal(), *wide(size, groups)) for size in (0, 1, 2, 129)},
    }


def bad_calls(groups: int, layer: type[Layer]) -> dict[str, Bad]:
    """What eager attention must not be given, the rule, and what becomes of it today."""

    def causal() -> Layer:
        return layer(groups=H // groups)

    def of(**sizes: int) -> tuple[Tensor, ...]:
        return states(**{"groups": groups, **sizes})

    return {
        "keys of one sequence": (lambda: (causal(), of()[0], *of(batch=1)[1:], None), "key.shape", "silent"),
        "a query of one sequence": (lambda: (causal(), of(batch=1)[0], *of()[1:], None), "query.shape", "silent"),
        "values of fewer tokens": (
            lambda: (causal(), *of()[:2], of(keys=L - 2)[2], None), "value.shape", "error",
        ),
        "narrower keys": (
            lambda: (causal(), of()[0], of()[1][..., 1:], of()[2], None), "key.shape", "error",
        ),
        "True and False": (lambda: (causal(), *of(), keeps()), "attention_mask.dtype", "silent"),
        "whole numbers": (lambda: (causal(), *of(), keeps().long()), "attention_mask.dtype", "silent"),
        "a mask of new tokens": (
            lambda: (causal(), *of(queries=3), additive(3, 3)), "attention_mask.shape", "error",
        ),
        "a mask of all tokens, one query": (
            lambda: (causal(), *of(queries=1), additive()), "attention_mask.shape", "silent",
        ),
        "a mask of more sequences": (lambda: (causal(), *of(batch=1), additive()), "mask_fits", "silent"),
        "a mask of another batch": (lambda: (causal(), *of(), additive(L, L, 3)), "mask_fits", "error"),
        "a mask of too few heads": (
            lambda: (causal(), *of(), additive().expand(B, 3, L, L)), "mask_fits", "error",
        ),
    }  # fmt: skip


GROUPED = (
    "llama", "gemma2", "mimo_v2_flash", "inkling", "inkling2", "llama4", "llama4.vision_eager_attention_forward",
    "evolla", "idefics2", "eager_paged", "gpt_oss", "openai_privacy_filter", "flint", "granite_swa",
)  # fmt: skip
UNGROUPED = (
    "bert", "gpt_neox", "clip", "vit", "blip_2", "t5", "gptj", "gpt2", "internvl", "bigbird_pegasus",
    "tipsv2.text_eager_attention_forward", "modernbert_decoder",
)  # fmt: skip
WITH_SINKS = ("mimo_v2_flash", "gpt_oss", "openai_privacy_filter", "flint", "granite_swa", "eager_paged")
# Sinks are made for the batch and the tokens of the queries, and nothing may make the scores more.
OF_THE_QUERIES = ("mimo_v2_flash", "gpt_oss", "openai_privacy_filter", "eager_paged")
GROWING = ("a query of one sequence", "a mask of all tokens, one query", "a mask of more sequences")


def cases(name: str) -> tuple[dict[str, Call], dict[str, Bad]]:
    groups, layer = (G if name in GROUPED else H), (LayerWithSinks if name in WITH_SINKS else Layer)
    good, bad = good_calls(groups, layer), bad_calls(groups, layer)
    if name == "modernbert_decoder":  # it always has a mask
        good = {call: make for call, make in good.items() if make()[-1] is not None}
        bad = {call: row for call, row in bad.items() if row[0]()[-1] is not None}
    if name in OF_THE_QUERIES:
        for call in ("learned queries", "a mask for each of many memories"):
            del good[call]
        bad |= {call: (bad[call][0], bad[call][1], "error") for call in GROWING}
    if name in GROUPED:
        bad["heads that do not fit"] = (lambda: (layer(), *states(groups=3), None), "groups", "error")
        bad["heads repeated before"] = (lambda: (layer(), *states(groups=H), None), "groups", "error")
        if name not in WITH_SINKS:
            good["one head for all"] = lambda: (layer(groups=1), *states(groups=1), additive())
            good["one head"] = lambda: (layer(groups=1), *states(heads=1, groups=1), additive())
    elif name != "modernbert_decoder":
        good["one head for all"] = lambda: (layer(), *states(groups=1), additive())
        good["one head"] = lambda: (layer(), *states(heads=1, groups=1), additive())
        bad["heads that do not fit"] = (lambda: (layer(), *states(groups=2), None), "heads", "error")
        bad["values of other heads"] = (
            lambda: (layer(), *states(groups=H)[:2], numbers(B, 3, L, D), None), "value_heads", "error",
        )  # fmt: skip
    return good, bad


def run(function: Any, arguments: Arguments) -> Any:
    return function(*arguments, scaling=0.25)[0].detach()


def same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def meant(arguments: Arguments) -> Arguments:
    """What a call would be of the sequences that all arguments have, with a value for each key and an additive mask."""
    layer, q, k, v, mask = arguments
    batch = min(len(q), len(k), len(v))
    v = torch.cat([v, numbers(len(v), v.shape[1], k.shape[2] - v.shape[2], v.shape[3])], 2)
    if mask is not None:
        mask = mask if mask.is_floating_point() else torch.zeros(mask.shape).masked_fill(mask == 0, LOWEST)
        mask = mask[:batch, :, -q.shape[2] :]
    return layer, q[:batch], k[:batch], v[:batch], mask


def assert_wrong(function: Any, arguments: Arguments, today: str) -> None:
    """What an unguarded call comes to: an error, or something else than what was meant, without a word."""
    with warnings.catch_warnings():
        if today == "error":
            with pytest.raises((RuntimeError, ValueError, IndexError)):
                run(function, arguments)
            return
        warnings.simplefilter("error")
        found, right = run(function, arguments), run(function, meant(arguments))
    assert found.isfinite().all()
    assert found.shape != right.shape or (found - right).abs().max() > 0.01


@pytest.mark.usefixtures("no_alarm")
@pytest.mark.parametrize("name", [*GROUPED, *UNGROUPED])
def test_eager_attention(name: str) -> None:
    function = function_named(name)
    good, bad = cases(name)
    ready = [(call, arguments := make(), run(function, arguments)) for call, make in good.items()]
    broken = [(make(), rule, today) for make, rule, today in bad.values()]
    for arguments, _, today in broken:
        assert_wrong(function, arguments, today)

    with og.installed("transformers") as report, og.policy(B="raise"):
        assert f"{function.__module__}.{function.__name__}" in report.guarded
        for call, arguments, plain in ready:
            assert same(plain, run(function, arguments)), call
        assert og.record.total == 0, og.record.counts
        for arguments, rule, _ in broken:
            with pytest.raises(og.GuardError) as caught:
                run(function, arguments)
            violation = caught.value.violations[0]
            assert (violation.rule_id, violation.cost_class, violation.certain) == (rule, "A", True)
            assert violation.because and violation.hint


@pytest.mark.usefixtures("no_alarm")
def test_without_is_causal_nothing_is_said_of_the_batch() -> None:
    layer = Layer()
    del layer.is_causal
    q, k, v = states()
    eager = function_named("llama")
    with og.installed("transformers"):
        assert run(eager, (layer, q, k[:1], v[:1], None)).shape == (B, L, H, D)


@pytest.mark.usefixtures("no_alarm")
def test_three_dimensions_of_attention_without_groups() -> None:
    layer, x = Layer(causal=False), numbers(B * H, L, D)
    clip = function_named("clip")
    plain = run(clip, (layer, x, x, x, None))
    with og.installed("transformers"):
        assert same(plain, run(clip, (layer, x, x, x, None)))


def test_attention_under_other_names() -> None:
    simple = function_named("timesfm.simple_eager_attention_forward")
    q, k, v = states(groups=H)
    plain = run(simple, (Layer(), q, k, v, additive()))
    with og.installed("transformers"):
        assert same(plain, run(simple, (Layer(), q, k, v, additive())))
        with pytest.raises(og.GuardError, match=r"value_states.shape\[2\] = 5, expected S = 7"):
            run(simple, (Layer(), q, k, v[:, :, :5], None))
        with pytest.raises(og.GuardError, match=r"attention_mask\.dtype = bool"):
            run(simple, (Layer(), q, k, v, keeps()))
        with pytest.raises(og.GuardError, match="this attention repeats no k/v heads"):
            run(simple, (Layer(), q, *states(groups=2)[1:], None))
        with pytest.raises(og.GuardError, match="each head of keys has its values"):
            run(simple, (Layer(), q, k, v[:, :3], None))
        with pytest.raises(og.GuardError, match="it covers the new tokens only"):
            run(simple, (Layer(), q[:, :, :3], k, v, additive(3, 3)))


@pytest.mark.usefixtures("no_alarm")
@pytest.mark.parametrize("name", ["timesfm.simple_eager_attention_forward", "vjepa2"])
def test_values_of_one_head_for_all(name: str) -> None:
    function, (q, k, v) = function_named(name), states(groups=H)
    calls = [(q, k, v[:, :1]), (q[:, :1], k[:, :1], v), (q, k[:, :1], v), (q[:, :1], k, v)]
    plain = [run(function, (Layer(), *call, None)) for call in calls]
    with og.installed("transformers"):
        for call, before in zip(calls, plain, strict=True):
            assert same(before, run(function, (Layer(), *call, None)))


def test_attention_that_has_no_mask() -> None:
    vjepa = function_named("vjepa2")
    q, k, v = states(groups=H)
    plain = run(vjepa, (Layer(), q, k, v, keeps()))
    with og.installed("transformers"):
        assert same(plain, run(vjepa, (Layer(), q, k, v, keeps())))
        with pytest.raises(og.GuardError, match=r"value.shape\[2\] = 5, expected S = 7"):
            run(vjepa, (Layer(), q, k, v[:, :, :5], None))
        with pytest.raises(og.GuardError, match="each head of keys has its values"):
            run(vjepa, (Layer(), q, k, v[:, :3], None))
    for function in (vjepa, function_named("timesfm.simple_eager_attention_forward")):
        with pytest.raises(RuntimeError):
            run(function, (Layer(), q, k, v[:, :3], None))


@pytest.mark.usefixtures("no_alarm")
def test_repeat_kv() -> None:
    repeat_kv = function_named("llama.repeat_kv")
    good = [(numbers(B, 1, L, D), 4), (numbers(B, G, L, D), 1), (numbers(0, G, 0, D), 2), (numbers(B, G, L, 0), 2)]
    plain = [repeat_kv(*arguments) for arguments in good]
    assert repeat_kv(numbers(B, G, L, D), 0).numel() == 0, "no heads are left, without a word"
    with og.installed("transformers"):
        assert all(same(repeat_kv(*arguments), result) for arguments, result in zip(good, plain, strict=True))
        assert og.record.total == 0
        with pytest.raises(og.GuardError, match=r"n_rep = 0"):
            repeat_kv(numbers(B, G, L, D), 0)
        with pytest.raises(og.GuardError, match=r"hidden_states.shape = \(2, 7, 32\), rank 3"):
            repeat_kv(numbers(B, L, 2 * D), 2)


# ---------------------------------------------------------------- SDPA

SDPA_GOOD: dict[str, Call] = {
    **good_calls(G, Layer),
    "True and False": lambda: (Layer(), *states(), keeps()),
    "one token, True and False": lambda: (Layer(), *states(queries=1), keeps(1, L)),
    "one head for all, not repeated": lambda: (Layer(groups=1), *states(groups=1), None),
    "as many heads": lambda: (Layer(groups=1), *states(groups=H), None),
    "a static cache, empty before": lambda: (Layer(), *states(keys=30), None),
}
# What only eager attention takes.
for gone in ("a mask of keys", "a mask for each of many memories", "no sequences", "head size 0"):
    del SDPA_GOOD[gone]
SDPA_BAD: dict[str, Bad] = {
    **{name: row for name, row in bad_calls(G, Layer).items() if name != "True and False"},
    "whole numbers": (lambda: (Layer(), *states(), keeps().long()), "attention_mask.dtype", "error"),
    "values of fewer tokens": (
        lambda: (Layer(), *states()[:2], states(keys=L - 2)[2], None), "value.shape", "silent",
    ),
    "a mask of all tokens, one query": (
        lambda: (Layer(), *states(queries=1), additive()), "attention_mask.shape", "error",
    ),
    "a mask of keys": (lambda: (Layer(), *states(), torch.zeros(L)), "attention_mask.shape", "error"),
    "a mask of more sequences": (lambda: (Layer(), *states(batch=1), additive()), "mask_fits", "error"),
    "heads that do not fit": (lambda: (Layer(), *states(groups=3), None), "groups", "error"),
}  # fmt: skip


@pytest.mark.usefixtures("no_alarm")
def test_sdpa() -> None:
    function = sdpa_attention.sdpa_attention_forward
    ready = [(call, arguments := make(), run(function, arguments)) for call, make in SDPA_GOOD.items()]
    broken = [(call, make(), rule, today) for call, (make, rule, today) in SDPA_BAD.items()]
    for _, arguments, _, today in broken:
        assert_wrong(function, arguments, today)
    with og.installed("transformers"), og.policy(B="raise"):
        for call, arguments, plain in ready:
            assert same(plain, run(function, arguments)), call
        assert og.record.total == 0, og.record.counts
        for call, arguments, rule, _ in broken:
            with pytest.raises(og.GuardError) as caught:
                run(function, arguments)
            violation = caught.value.violations[0]
            assert (call, violation.rule_id, violation.certain) == (call, rule, True)
            assert violation.because and violation.hint


# ---------------------------------------------------------------- flash attention

Kernel = Callable[..., Any]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """Guards on, and behind the guarded function a reference of the kernels, [batch, tokens, heads, width]."""
    with og.installed("transformers"):

        def reference(q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            keep = None if mask is None else mask[:, None, None, :].bool()
            result = nn.functional.scaled_dot_product_attention(
                q, k[:, :, : None if mask is None else mask.shape[1]],
                v[:, :, : None if mask is None else mask.shape[1]], attn_mask=keep, enable_gqa=True,
            )  # fmt: skip
            return result.transpose(1, 2)

        monkeypatch.setattr(flash_attention, "_flash_attention_forward", reference)
        yield flash_attention.flash_attention_forward


def half(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.bfloat16() for x in tensors)


@pytest.mark.usefixtures("no_alarm")
def test_what_flash_attention_takes(flash: Kernel) -> None:
    layer, (q, k, v) = Layer(), half(*states())
    padding = torch.ones(B, L, dtype=torch.int64)
    for arguments in (
        (q, k, v, None),
        (q, k, v, padding),
        (q, k, v, padding.bool()),
        (q[:, :, :1], k, v, padding),
        (q, *half(*states(keys=30))[1:], padding),  # a static cache is longer than its mask
        (q, k, v[..., :8], None),
        (q, *half(*states(groups=1))[1:], None),
        (q[:, :1], k[:, :1], v[:, :1], None),
        (q[:1, :, :1], k[:1], v[:1], padding[:1]),
    ):
        assert flash(layer, *arguments, scaling=0.25)[0].isfinite().all()
    assert og.record.total == 0


def test_flash_attention_of_sequences_one_after_the_other(flash: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", lambda q, *_, **__: q)
    (q, _, _), (_, k, v) = half(*states()), half(*states(batch=1, keys=30))
    packed = {"cu_seq_lens_q": torch.tensor([0, 7, 14]), "cu_seq_lens_k": torch.tensor([0, 10, 30])}
    flash(Layer(), q, k, v, None, **packed)
    assert og.record.total == 0
    with pytest.raises(og.GuardError, match=r"key.shape\[0\] = 1, expected B = 2"):
        flash(Layer(), q, k, v, None)


@pytest.mark.parametrize(
    ("changes", "rule", "observed"),
    [
        ({"cu_seq_lens_q": [0, 7, 15]}, "cu_seq_lens_q_in_tokens", "kwargs['cu_seq_lens_q'][2] = 15 (of 3, 1 element"),
        (
            {"cu_seq_lens_k": [-3, 10, 31]},
            "cu_seq_lens_k_in_tokens",
            "kwargs['cu_seq_lens_k'][0] = -3 (of 3, 2 elements",
        ),
        ({"cu_seq_lens_q": [0, 8, 7]}, "cu_seq_lens_q_ascend", "kwargs['cu_seq_lens_q'][2] = 7"),
        ({"cu_seq_lens_k": [0, 10, 8]}, "cu_seq_lens_k_ascend", "kwargs['cu_seq_lens_k'][2] = 8"),
        ({"cu_seq_lens_k": [0, 30]}, "as_many_sequences", "numel(kwargs['cu_seq_lens_q']) = 3"),
    ],
)
def test_where_sequences_one_after_the_other_begin(
    flash: Kernel, monkeypatch: pytest.MonkeyPatch, changes: dict[str, list[int]], rule: str, observed: str
) -> None:
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", lambda q, *_, **__: q)
    (q, _, _), (_, k, v) = half(*states()), half(*states(batch=1, keys=30))
    ends = {"cu_seq_lens_q": [0, 7, 14], "cu_seq_lens_k": [0, 10, 30]}
    lengths = {"max_length_q": 7, "max_length_k": 20}

    def call(mask: Any = None, **kwargs: Any) -> None:
        flash(Layer(), q, k, v, mask, **{n: torch.tensor(x, dtype=torch.int32) for n, x in kwargs.items()}, **lengths)

    with og.policy(B="raise"):
        call(**ends)
        call(cu_seq_lens_q=[0, 7, 7, 12], cu_seq_lens_k=[0, 10, 10, 29])  # an empty one, and tokens of no sequence
        with pytest.raises(og.GuardError) as caught:
            call(**ends | changes)
        (violation,) = caught.value.violations
        assert violation.rule_id == rule
        assert violation.observed.startswith(observed)
        lengths.clear()  # without these they are not looked at
        call(**ends | changes)


def test_what_flash_attention_must_not_be_given(flash: Kernel) -> None:
    layer, (q, k, v) = Layer(), half(*states())
    for arguments, rule in (
        ((q, k[:1], v[:1], None), "key.shape"),
        ((q, k, v[:, :, 1:], None), "value.shape"),
        ((q, k[..., 1:], v, None), "key.shape"),
        ((q, k, torch.cat([v, v], -1), None), "value_width"),
        ((q, *half(*states(groups=3))[1:], None), "groups"),
        ((q, k, v, additive()), "attention_mask.shape"),
        ((q, k, v, torch.ones(3, L)), "attention_mask.shape"),
        ((q, k, v, torch.ones(B, L + 1)), "mask_length"),
    ):
        with pytest.raises(og.GuardError) as caught:
            flash(layer, *arguments, scaling=0.25)
        assert rule in {violation.rule_id for violation in caught.value.violations}
        assert all(violation.because and violation.hint for violation in caught.value.violations)


def test_wide_values_of_flash_attention_are_cut_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = half(*states())
    widths: list[int] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        widths.append(v.shape[-1])
        return q

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", kernel)
    flash_attention.flash_attention_forward(Layer(), q, k, torch.cat([v, v], -1), None)
    assert widths == [D]


# ---------------------------------------------------------------- flex attention


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """Guards on; flex attention as it stands, since what it compiles to on CPU reads masks wrongly."""
    with og.installed("transformers"):
        monkeypatch.setattr(flex_integration, "compile_friendly_flex_attention", uncompiled)
        yield flex_integration.flex_attention_forward


def uncompiled(q: Tensor, k: Tensor, v: Tensor, training: bool = False, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is slow
        return flex_attention(q, k, v, **kwargs)


@pytest.mark.usefixtures("no_alarm")
def test_what_flex_attention_takes(flex: Kernel) -> None:
    q, k, v = states()
    blocks = create_block_mask(lambda b, h, i, j: i >= j, B, None, L, L, device="cpu")
    for arguments in (
        (q, k, v, None),
        (q, k, v, blocks),
        (q, k[:1], v[:1], blocks),
        (q, k, v, additive()),
        (q, k, v, additive(L, 30)),  # a static cache: the mask is cut to the keys
        (q, k, v[..., :8], None),
        (q[:, :3], k[:, :1], v[:, :1], None),
        (q[:, :1], k[:, :1], v[:, :1], additive()),
        (q[:1], k[:1], v[:1], additive()),
    ):
        assert flex(Layer(), *arguments)[0].isfinite().all()
    assert og.record.total == 0


@pytest.mark.parametrize(
    ("arguments", "rule", "today"),
    [
        (lambda q, k, v: (q, k, v, additive(L, L, 1)), "mask_covers", "error"),
        (lambda q, k, v: (q, k, v, additive(1, L)), "mask_covers", "error"),
        (lambda q, k, v: (q, k, v, additive(L, L - 1)), "mask_covers", "error"),
        (lambda q, k, v: (q, k, v, keeps()), "mask_dtype", "silent"),
        (lambda q, k, v: (q, k, v, additive()[:, 0]), "mask_rank", "error"),
        (lambda q, k, v: (q[:1], k, v, None), "key.shape", "error"),
        (lambda q, k, v: (q, k[..., 1:], v, None), "key.shape", "error"),
        (lambda q, k, v: (q, k, v[:, :, 1:], None), "value.shape", "error"),
        (lambda q, k, v: (q, k, v[:, :1], None), "value.shape", "error"),
        (lambda q, k, v: (q[:, :3], k, v, None), "groups", "error"),
    ],
)
def test_what_flex_attention_must_not_be_given(
    monkeypatch: pytest.MonkeyPatch, arguments: Any, rule: str, today: str
) -> None:
    call = arguments(*states())
    with monkeypatch.context() as patch:
        patch.setattr(flex_integration, "compile_friendly_flex_attention", uncompiled)
        assert_wrong(flex_integration.flex_attention_forward, (Layer(), *call), today)
    with og.installed("transformers"), pytest.raises(og.GuardError) as caught:
        flex_integration.flex_attention_forward(Layer(), *call)
    assert rule in {violation.rule_id for violation in caught.value.violations}


def test_masks_of_several_heads_are_suspect_in_flex_attention(flex: Kernel) -> None:
    q, k, v = states()
    mask = additive().expand(B, H, L, L)
    with pytest.warns(og.GuardWarning, match="the mask of the first head is used for all heads"):
        flex(Layer(), q, k, v, mask)


# ---------------------------------------------------------------- wrong results without a word


def told_once(call: Callable[[], Any], rule: str) -> str:
    """The text of the one suspicion that a guarded call raises; the call goes through."""
    with og.policy(B="raise"), pytest.warns(og.GuardWarning) as caught:
        call()
    assert [violation_rule for _, violation_rule in og.record.counts] == [rule]
    (warning,) = caught
    return str(warning.message)


@pytest.mark.parametrize("which", ["eager", "sdpa"])
def test_attn_mask_kv_1(which: str) -> None:
    function = function_named("llama") if which == "eager" else sdpa_attention.sdpa_attention_forward
    layer, (q, k, v) = Layer(), states()
    right, lost = (run(function, (layer, q, k, v, mask)) for mask in (additive(), additive()[..., :1]))
    assert lost.isfinite().all() and not torch.allclose(lost, right, atol=0.5)
    # Keys that are all moved by one number: no mask at all.
    assert torch.allclose(lost, run(function, (Layer(causal=False), q, k, v, None)), atol=1e-5)
    with og.installed("transformers"):
        text = told_once(lambda: run(function, (layer, q, k, v, additive()[..., :1])), "mask_key_axis")
    assert "attention_mask.shape[-1] = 1" in text
    assert "the causal mask was lost" in text


@pytest.mark.parametrize("which", ["llama", "timesfm.simple_eager_attention_forward", "sdpa"])
def test_attn_mask_float01(which: str) -> None:
    function = sdpa_attention.sdpa_attention_forward if which == "sdpa" else function_named(which)
    layer, (q, k, v) = Layer(), states(groups=H if which.startswith("timesfm") else G)
    right, wrong = (run(function, (layer, q, k, v, mask)) for mask in (additive(), keeps().float()))
    assert wrong.isfinite().all() and not torch.allclose(wrong, right, atol=0.05)
    with og.installed("transformers"):
        text = told_once(lambda: run(function, (layer, q, k, v, keeps().float())), "additive_mask")
        assert "an additive mask holds 0 and very negative numbers" in text
        og.record.clear()
        run(function, (layer, q, k, v, torch.zeros(B, 1, L, L)))  # nothing is masked
        run(function, (layer, q, k, v, additive()))
        assert og.record.total == 0
    with og.installed("transformers"):  # a look at values, which is off unless it is wanted
        run(function, (layer, q, k, v, keeps().float()))
    assert og.record.total == 0


@pytest.mark.usefixtures("no_alarm")
def test_attn_causal_and_mask() -> None:
    """SDPA on CPU takes both without a word; what calls it for the models lets the mask alone speak."""
    layer, (q, k, v) = Layer(groups=1), states(groups=H)
    padding = torch.ones(B, 1, 1, L, dtype=torch.bool)
    sdpa = nn.functional.scaled_dot_product_attention
    assert sdpa(q, k, v, attn_mask=padding, is_causal=True).isfinite().all()
    both = sdpa_attention.sdpa_attention_forward(layer, q, k, v, padding, is_causal=True)[0]
    assert torch.equal(both, sdpa_attention.sdpa_attention_forward(layer, q, k, v, padding, is_causal=False)[0])
    with og.installed("transformers"):
        assert torch.equal(both, sdpa_attention.sdpa_attention_forward(layer, q, k, v, padding, is_causal=True)[0])
    assert og.record.total == 0


# ---------------------------------------------------------------- what is recognised


def digest(function: Any) -> str:
    code = fingerprint(function)
    assert isinstance(code, Fingerprint)
    return code.digest


def test_a_function_of_every_code_that_is_known_was_tried() -> None:
    tried = {digest(function_named(name)): "eager_attention_forward" for name in GROUPED}
    tried |= {digest(function_named(name)): "ungrouped_attention_forward" for name in UNGROUPED}
    tried |= {
        digest(function_named("timesfm.simple_eager_attention_forward")): "ungrouped_attention_of_states",
        digest(function_named("vjepa2")): "unmasked_attention_forward",
        digest(function_named("llama.repeat_kv")): "repeat_kv",
        digest(sdpa_attention.sdpa_attention_forward): "sdpa_attention_forward",
        digest(flash_attention.flash_attention_forward): "flash_attention_forward",
        digest(flex_integration.flex_attention_forward): "flex_attention_forward",
    }
    assert tried == {
        code: family.contract.partition(":")[2]
        for family in attention.FAMILIES
        for code, at in family.code.items()
        if "5.24.0" in at.versions
    }


def test_what_is_left_out_has_a_reason() -> None:
    from transformers.integrations import flash_paged, sdpa_paged
    from transformers.models.doge import modeling_doge
    from transformers.models.qwen3_next import modeling_qwen3_next

    msa_attention = importlib.import_module("transformers.integrations.msa_attention")  # Transformers 4 has none
    refused = {refusal.site: refusal.reason for refusal in og.install("transformers").refused}
    for module, function, reason in (
        (sdpa_paged, "sdpa_attention_paged_forward", "it calls sdpa_attention_forward alone"),
        (flash_paged, "paged_attention_forward", "it calls flash_attention_forward alone"),
        (modeling_doge, "flex_attention_forward", "its mask differs from head to head"),
        (flex_integration, "compile_friendly_flex_attention", "flex_attention_forward, which calls it, is guarded"),
        (
            msa_attention,
            "msa_attention_forward",
            "it calls sdpa_attention_forward, or a kernel that chooses keys in blocks",
        ),
        (
            modeling_qwen3_next,
            "torch_chunk_gated_delta_rule",
            "it is a linear attention, whose states have no contract",
        ),
    ):
        assert refused[f"{module.__name__}.{function}"] == reason


def test_attention_is_told_by_its_parameters() -> None:
    def attends(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query + key + value

    def projects(query: Tensor, key: Tensor) -> Tensor:
        return query + key

    module = types.ModuleType("transformers.integrations.new_attention")
    for name, found in {"attends": attends, "_attends": attends, "projects": projects, "Cls": Layer, "n": 1}.items():
        setattr(module, name, found)
    attends.__module__ = projects.__module__ = module.__name__
    assert TransformersIntegration().wants(module.__name__)
    assert not TransformersIntegration().wants("transformers.quantizers.new_attention")
    (candidate,) = attention.candidates(module)
    assert (candidate.site, candidate.function) == (f"{module.__name__}.attends", None)
    assert "its code is not one that a contract was written for" in candidate.reason
