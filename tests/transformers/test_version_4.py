"""What is different in Transformers 4: masks that are cut to the keys, an unused parameter, other caches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache, cache_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import llm_op_guard as og
from llm_op_guard.guard.reading import NotApplicable
from llm_op_guard.integrations.transformers import caches

pytestmark = pytest.mark.usefixtures("no_alarm")

Make = Callable[..., Any]
B, H, G, L, S, D = 2, 4, 2, 3, 5, 8
ATTENTION: dict[str, Callable[..., Any]] = {
    "eager": modeling_llama.eager_attention_forward,
    "sdpa": sdpa_attention_forward,
}
each_attention = pytest.mark.parametrize("attn", ATTENTION)


def layer(**attributes: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in {"num_key_value_groups": H // G, "is_causal": True, **attributes}.items():
        setattr(module, name, value)
    return module.eval()


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def q_k_v(batch: int = B) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return numbers(batch, H, L, D), numbers(batch, G, S, D), numbers(batch, G, S, D)


def attend(attn: str, mask: Any, module: Any = None, qkv: Any = None) -> torch.Tensor:
    result: torch.Tensor = ATTENTION[attn](module or layer(), *(qkv or q_k_v()), mask, scaling=D**-0.5)[0]
    return result


def alarms(call: Callable[[], Any]) -> list[str]:
    """The rules that a guarded call breaks; what else it raises is not looked at."""
    with og.installed("transformers"):
        try:
            call()
        except og.GuardError as error:
            return [violation.rule_id for violation in error.violations]
        except Exception:
            return []
    return []


# ---------------------------------------------------------------- masks


@each_attention
@pytest.mark.parametrize("boolean", [False, True], ids=["additive", "boolean"])
def test_a_mask_that_raises_or_makes_the_result_larger_is_what_is_refused(attn: str, boolean: bool) -> None:
    if boolean and attn == "eager":
        pytest.skip("added to the scores, a boolean mask is wrong")
    # One column is a suspicion, by which nothing is refused.
    sizes = [(1, B, B + 1), (1, H, 2), (1, L, L + 1), (L, S - 1, S, S + 1, 2 * S)]
    seen = set()
    for shape in itertools.product(*sizes):
        mask = torch.ones(shape, dtype=torch.bool) if boolean else numbers(*shape)
        try:
            wrong = attend(attn, mask).shape != (B, L, H, D)
        except (RuntimeError, IndexError):
            wrong = True
        assert bool(alarms(lambda mask=mask: attend(attn, mask))) == wrong, shape
        seen.add(wrong)
    assert seen == {False, True}


@each_attention
def test_a_longer_mask_computes_what_the_cut_one_does(attn: str) -> None:
    mask = numbers(1, 1, L, 2 * S)
    plain = attend(attn, mask)
    with og.installed("transformers"):
        assert torch.equal(attend(attn, mask), plain)
        assert torch.equal(attend(attn, mask[..., :S]), plain)


@pytest.mark.parametrize("shape", [(L, S), (H, L, S), (1, B, H, L, S), (S,)], ids=str)
def test_masks_of_other_ranks(shape: tuple[int, ...]) -> None:
    mask = numbers(*shape)
    assert alarms(lambda: attend("eager", mask)) == ["attention_mask.shape"]
    if len(shape) < 4:
        with pytest.raises(IndexError):
            attend("eager", mask)
    else:
        assert attend("eager", mask).ndim == 5, "it becomes larger without a word"


def test_sdpa_takes_masks_of_lower_rank_as_they_are() -> None:
    for shape in ((L, S), (H, L, S), (1, S)):
        mask = numbers(*shape)
        plain = attend("sdpa", mask)
        with og.installed("transformers"):
            assert torch.equal(attend("sdpa", mask), plain)
    mask = numbers(L, S + 1)
    with pytest.raises(RuntimeError):
        attend("sdpa", mask)
    assert alarms(lambda: attend("sdpa", mask)) == ["mask_covers_keys"]


@pytest.mark.parametrize(
    ("mask", "hint"),
    [(torch.ones(1, 1, L, S, dtype=torch.bool), "masks are for SDPA"), (torch.ones(1, 1, L, S).long(), "additive")],
    ids=["boolean", "integer"],
)
def test_masks_that_eager_attention_adds_without_a_word(mask: torch.Tensor, hint: str) -> None:
    assert torch.isfinite(attend("eager", mask)).all()
    with og.installed("transformers"), pytest.raises(og.GuardError, match=hint):
        attend("eager", mask)


@each_attention
def test_keys_of_batch_1(attn: str) -> None:
    q, k, v = q_k_v()
    for one, others in ((q[:1], (k, v)), (q, (k[:1], v[:1]))):
        call = lambda one=one, others=others: attend(attn, None, qkv=(one, *others))  # noqa: E731
        assert torch.isfinite(call()).all(), "broadcast without a word"
        assert alarms(call)
        assert alarms(lambda one=one, others=others: attend(attn, None, layer(is_causal=False), (one, *others))) == []


# ---------------------------------------------------------------- rotary positions


def test_position_ids_that_nobody_reads() -> None:
    q, k, cos, sin = numbers(B, H, L, D), numbers(B, G, L, D), numbers(1, L, D), numbers(1, L, D)
    plain = apply_rotary_pos_emb(q, k, cos, sin, torch.arange(99))
    with og.installed("transformers"):
        guarded = apply_rotary_pos_emb(q, k, cos, sin, torch.arange(99))
        assert all(torch.equal(one, other) for one, other in zip(plain, guarded, strict=True))
        with pytest.raises(og.GuardError, match=r"cos.shape\[2\] = 1"):
            apply_rotary_pos_emb(q, k, cos[..., :1], sin[..., :1], torch.arange(99))


# ---------------------------------------------------------------- caches


def told_of(cache: Any) -> tuple[Any, Any, Any]:
    """Length, capacity and layers; None where there is no answer."""
    found = []
    for reader in (caches.cache_length, caches.cache_capacity, caches.cache_layers):
        try:
            found.append(reader(cache))
        except NotApplicable:
            found.append(None)
    return tuple(found)  # type: ignore[return-value]


class Toy(cache_utils.QuantizedLayer):
    """A backend that is there without its library."""

    def _quantize(self, tensor: Any, axis: Any) -> Any:
        return tensor.clone()

    def _dequantize(self, q_tensor: Any) -> Any:
        return q_tensor


CACHES: dict[str, Callable[[Any], Any]] = {
    "lazy": lambda config: DynamicCache(),
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=16),
    "quantised": lambda config: cache_utils.Cache(layers=[Toy(residual_length=2) for _ in range(2)]),
    "encoder and decoder": lambda config: EncoderDecoderCache(DynamicCache(config=config), DynamicCache()),
    "static decoder": lambda config: EncoderDecoderCache(StaticCache(config, 16), StaticCache(config, 16)),
}


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", CACHES)
def test_what_is_read_of_a_cache_is_what_it_says(tiny: Make, kind: str, window: int | None) -> None:
    model = tiny()
    config = copy.deepcopy(model.config)
    if window is not None:
        config.sliding_window = window
    cache = CACHES[kind](config)
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache

    def compared() -> None:
        length, capacity, layers = told_of(cache)
        told = cache.get_seq_length()
        assert length == (None if isinstance(told, torch.Tensor) else told)
        told = cache.get_max_cache_shape() if len(own.layers) else -1
        assert capacity == (told if told >= 0 else None)
        assert layers == (None if kind == "lazy" else len(cache))

    compared()
    held = 0
    with torch.no_grad():
        for length in (3, 1, 1, 1, 2):
            model(torch.full((2, length), 5), past_key_values=own, use_cache=True)
            held += length
            compared()
            if not (kind.startswith("static") and window is None):
                assert told_of(cache)[0] == held
    cache.reset()
    compared()


class Overridden(DynamicCache):
    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise AssertionError("code of an argument was run")

    get_max_cache_shape = __len__ = get_seq_length  # type: ignore[assignment]


def test_caches_of_several_layers_and_of_other_code() -> None:
    dynamic, sliding = cache_utils.DynamicLayer(), cache_utils.DynamicSlidingWindowLayer(sliding_window=4)
    static = cache_utils.StaticLayer(max_cache_len=8)
    # Its own `get_max_cache_shape` is that of the first layer, and another layer grows for ever.
    assert told_of(cache_utils.Cache(layers=[sliding, dynamic])) == (0, None, 2)
    assert told_of(cache_utils.Cache(layers=[sliding, static])) == (0, 8, 2)
    assert told_of(Overridden()) == (None, None, None)
    assert told_of(cache_utils.Cache(layers=[object()])) == (None, None, 1)  # type: ignore[list-item]
    pair = (torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 8))
    assert told_of((pair, pair)) == (5, None, 2)


def test_a_rule_about_a_cache(tiny: Make) -> None:
    @og.guard('x: any[B, L]\nrequire(cache_length(cache) + L <= cache_capacity(cache), id="fits", error=IndexError)')
    def run(x: Any, cache: Any) -> None:
        return None

    config = tiny().config
    run(torch.ones(1, 4), StaticCache(config, 4))
    run(torch.ones(1, 9), DynamicCache(config=config))
    with pytest.raises(IndexError, match=r"cache_length\(cache\) \+ L = 5, cache_capacity\(cache\) = 4"):
        run(torch.ones(1, 5), StaticCache(config, 4))
