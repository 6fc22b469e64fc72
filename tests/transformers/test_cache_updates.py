"""Caches: what a layer takes besides what it holds, and what it must not be given."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, LlamaConfig, StaticCache, cache_utils
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HCACache
from transformers.models.unlimited_ocr import modeling_unlimited_ocr

import llm_op_guard as og
from llm_op_guard.install.recognise import Fingerprint, fingerprint
from llm_op_guard.integrations.transformers import cache_updates

Make = Callable[..., Any]
HERE = "5.24.0"  # the version whose code is tried
B, G, D = 2, 2, 4
WINDOW, ROOM = 4, 8
IDS = torch.tensor([[5, 9, 14, 33], [44, 7, 20, 11]])


@pytest.fixture(autouse=True)
def fixed_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


class Toy(cache_utils.QuantizedLayer):
    """A backend that is there without its library."""

    def _quantize(self, tensor: Any, axis: Any) -> Any:
        return tensor.clone()

    def _dequantize(self, q_tensor: Any) -> Any:
        return q_tensor


LAYERS: dict[str, Callable[[], Any]] = {
    "dynamic": cache_utils.DynamicLayer,
    "sliding": lambda: cache_utils.DynamicSlidingWindowLayer(sliding_window=WINDOW),
    "static": lambda: cache_utils.StaticLayer(max_cache_len=ROOM),
    "static sliding": lambda: cache_utils.StaticSlidingWindowLayer(max_cache_len=ROOM, sliding_window=WINDOW),
    "quantised": lambda: Toy(residual_length=16),
    "fp8": cache_utils.Fp8QuantizedLayer,
    "indexed": cache_utils.DynamicIndexedLayer,
    "static indexed": lambda: cache_utils.StaticIndexedLayer(max_cache_len=ROOM),
    "mixed": cache_utils.LinearAttentionAndFullAttentionLayer,
    "mixed sliding": lambda: cache_utils.LinearAttentionAndSlidingWindowAttentionLayer(sliding_window=WINDOW),
    "mixed static": lambda: cache_utils.LinearAttentionAndStaticFullAttentionLayer(max_cache_len=ROOM),
    "mixed static sliding": lambda: cache_utils.LinearAttentionAndStaticSlidingWindowAttentionLayer(
        max_cache_len=ROOM, sliding_window=WINDOW
    ),
}
each_layer = pytest.mark.parametrize("kind", LAYERS)


def numbers(batch: int = B, heads: int = G, tokens: int = 1, width: int = D) -> Tensor:
    return torch.randn(batch, heads, tokens, width)


def filled(kind: str, tokens: int = 3) -> Any:
    """A layer that holds some tokens; of quantised ones some are not quantised yet."""
    layer = LAYERS[kind]()
    for length in (tokens - 1, 1):
        layer.update(numbers(tokens=length), numbers(tokens=length))
    return layer


def same(one: Any, other: Any) -> bool:
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------- layers


SHAPES = [(B, G, D), (1, 1, 1), (B, G, 0), (B, G, 129), (0, G, D), (1, 4, 2)]


@pytest.mark.usefixtures("no_alarm")
@each_layer
def test_tokens_of_one_shape(kind: str) -> None:
    # Of FP8 there is no largest number of nothing to scale by.
    shapes = [sizes for sizes in SHAPES if kind != "fp8" or 0 not in sizes]
    given = {(b, h, w): [torch.randn(b, h, tokens, w) for tokens in (3, 1, 1, 1, 2)] for b, h, w in shapes}

    def run(inputs: list[Tensor]) -> list[Any]:
        layer = LAYERS[kind]()
        results = [tuple(x.clone() for x in layer.update(x, x + 1)) for x in inputs]
        layer.reset()
        return [*results, layer.update(inputs[0], inputs[0])]

    plain = {sizes: run(inputs) for sizes, inputs in given.items()}
    with og.installed("transformers"), og.policy(B="raise"):
        for sizes, inputs in given.items():
            assert all(same(one, other) for one, other in zip(plain[sizes], run(inputs), strict=True)), sizes
            assert og.record.total == 0, sizes


@pytest.mark.usefixtures("no_alarm")
@each_layer
def test_values_of_another_shape_than_keys(kind: str) -> None:
    with og.installed("transformers"), og.policy(B="raise"):
        layer = LAYERS[kind]()
        for _ in range(3):
            layer.update(numbers(), numbers(width=9))
    assert og.record.total == 0


@pytest.mark.usefixtures("no_alarm")
@each_layer
def test_another_batch_after_reset_beams_and_cuts(kind: str) -> None:
    with og.installed("transformers"), og.policy(B="raise"):
        layer = filled(kind)
        layer.reorder_cache(torch.tensor([1, 0]))
        layer.update(numbers(), numbers())
        if hasattr(layer, "batch_repeat_interleave") and kind not in ("quantised", "fp8"):
            layer.batch_repeat_interleave(2)
            layer.update(numbers(batch=2 * B), numbers(batch=2 * B))
            layer.batch_select_indices(torch.tensor([0]))
            layer.update(numbers(batch=1), numbers(batch=1))
        if kind in ("dynamic", "indexed", "sliding", "mixed", "mixed sliding", "quantised", "fp8"):
            layer.reset()
            layer.update(numbers(batch=5), numbers(batch=5))
    assert og.record.total == 0


@pytest.mark.usefixtures("no_alarm")
@pytest.mark.parametrize("kind", ["static sliding", "mixed static sliding"])
def test_a_long_prompt_replaces_what_an_empty_window_holds(kind: str) -> None:
    layer = filled(kind)
    layer.reset()
    with og.installed("transformers"):
        assert layer.update(numbers(batch=1, tokens=WINDOW + 1), numbers(batch=1, tokens=WINDOW + 1))[0].shape[0] == 1
    assert og.record.total == 0


OTHERS: dict[str, dict[str, int]] = {
    "batch": {"batch": 3}, "one sequence": {"batch": 1}, "heads": {"heads": 4}, "one head": {"heads": 1},
    "width": {"width": 8}, "one column": {"width": 1},
}  # fmt: skip


@each_layer
@pytest.mark.parametrize("tokens", [1, 2])
def test_tokens_of_another_shape_than_the_layer_holds(kind: str, tokens: int) -> None:
    given = {what: numbers(tokens=tokens, **sizes) for what, sizes in OTHERS.items()}
    slides = "static sliding" in kind and tokens == 1
    for what, states in given.items():
        layer = filled(kind, 5)
        if slides and what.startswith("one"):
            kept = layer.update(states, states)[0]
            assert kept.shape == (B, G, WINDOW, D), "expanded to what the layer holds, without a word"
        else:
            with pytest.raises(RuntimeError) as today:
                layer.update(states, states)
            assert "key_states" not in str(today.value), "today's error does not name the argument"

    layers = {what: filled(kind, 5) for what in given}
    with og.installed("transformers"):
        for what, states in given.items():
            assert_refused(kind, layers[what], what, states)


def assert_refused(kind: str, layer: Any, what: str, states: Tensor) -> None:
    held = layer.keys
    with pytest.raises(og.GuardError) as caught:
        layer.update(states, states)
    assert layer.keys is held, "nothing was changed"
    keys, values = caught.value.violations
    assert keys.operator == f"{next(c for c in type(layer).__mro__ if 'update' in vars(c)).__name__}.update"
    assert keys.certain and values.certain and keys.cost_class == "A", what
    assert keys.because and keys.hint and values.because and values.hint
    if what == "batch" and kind != "fp8":
        assert keys.hint == "the cache is of another batch size"
    if kind in ("dynamic", "static") and what == "heads":
        assert (keys.argument, keys.observed, keys.expected) == ("key_states", "key_states.shape[1] = 4", "G = 2")
        assert "self.keys.shape[1]" in keys.bindings[0].sources


@each_layer
def test_tokens_in_another_dtype_than_the_layer_holds(kind: str) -> None:
    given, layer = numbers(tokens=2).bfloat16(), filled(kind)
    if kind in ("static", "static indexed", "mixed static"):
        with pytest.raises(RuntimeError, match="same dtype"):
            layer.update(given, given)
        with og.installed("transformers"), pytest.raises(og.GuardError, match=r"key_states\.dtype = bfloat16"):
            layer.update(given, given)
        return
    kept = layer.update(given, given)[0]
    assert kept.dtype == torch.float32, "joined with what the layer holds, without a word"
    layer = filled(kind)
    with og.installed("transformers"), pytest.warns(og.GuardWarning, match=r"self\.keys\.dtype = float32"):
        layer.update(given, given)


def test_a_layer_whose_keys_are_its_values() -> None:
    config = type("Config", (), {"sliding_window": WINDOW, "compress_rates": {"heavily_compressed_attention": 2}})()
    layer = DeepseekV4HCACache(config)
    with og.installed("transformers"):
        for _ in range(3):
            layer.update(numbers(), numbers(heads=9))  # values are not looked at
        assert og.record.total == 0
        with pytest.raises(og.GuardError, match=r"key_states\.shape\[3\] = 8, expected D = 4"):
            layer.update(numbers(width=8), numbers(width=8))


@pytest.mark.parametrize("kind", ["static", "static indexed", "mixed static"])
def test_room(kind: str) -> None:
    def full() -> Any:
        layer = LAYERS[kind]()
        layer.update(numbers(tokens=ROOM), numbers(tokens=ROOM))
        return layer

    with pytest.raises(IndexError, match="out of bounds"):
        full().update(numbers(), numbers())
    with og.installed("transformers"):
        layer = full()
        with pytest.raises(IndexError) as caught:  # the values are looked at where class B is wanted
            layer.update(numbers(), numbers())
        assert not isinstance(caught.value, og.GuardError)
        with pytest.raises(IndexError) as caught:
            LAYERS[kind]().update(numbers(tokens=ROOM + 1), numbers(tokens=ROOM + 1))
        assert isinstance(caught.value, og.GuardError)
        assert caught.value.violations[0].observed == "L = 9, self.max_cache_len = 8"
        with og.policy(B="raise"):
            layer = full()
            with pytest.raises(IndexError) as caught:
                layer.update(numbers(), numbers())
            assert isinstance(caught.value, og.GuardError)
            (violation,) = caught.value.violations
            assert (violation.rule_id, violation.cost_class) == ("room", "B")
            assert violation.observed.startswith("highest(self.cumulative_length) + L = 9")
            assert violation.hint == "the cache is full: make it longer, or reset() it for another prompt"
            layer.reset()
            layer.update(numbers(tokens=ROOM), numbers(tokens=ROOM))
            layer.update(numbers(tokens=0), numbers(tokens=0))
    assert og.record.total == 2


def test_a_layer_that_is_made_with_what_is_no_state() -> None:
    flat = torch.ones(3, 4)
    with pytest.raises(IndexError, match="dimensionality"):
        LAYERS["static"]().update(flat, flat)
    with og.installed("transformers"), pytest.raises(og.GuardError, match="heads were not taken apart"):
        LAYERS["static"]().update(flat, flat)


# ---------------------------------------------------------------- caches


def test_the_index_of_a_layer() -> None:
    static = StaticCache(LlamaConfig(num_hidden_layers=2), ROOM)
    with pytest.raises(IndexError, match="list index out of range"):
        static.update(numbers(), numbers(), 2)
    with pytest.raises(TypeError, match="NoneType"):
        DynamicCache().update(numbers(), numbers(), None)  # type: ignore[arg-type]
    with og.installed("transformers"):
        for index in (0, 1, -1, torch.tensor(1)):
            static.update(numbers(), numbers(), index)
        DynamicCache().update(numbers(), numbers(), 7)  # it makes its layers as they come
        assert og.record.total == 0
        for index in (2, -3):
            with pytest.raises(IndexError) as caught:
                static.update(numbers(), numbers(), index)
            assert isinstance(caught.value, og.GuardError)
            violation = caught.value.violations[0]
            assert (violation.operator, violation.rule_id) == ("Cache.update", "layer_exists")
            assert violation.hint == "the cache was made for a model with fewer layers"
        with pytest.raises(TypeError, match="the attention was made without layer_idx"):
            DynamicCache().update(numbers(), numbers(), None)  # type: ignore[arg-type]


def cache_of(model: Any, ids: Tensor) -> Any:
    with torch.no_grad():
        return model(ids, use_cache=True).cache


@pytest.mark.parametrize(
    ("changes", "rows", "observed"),
    [
        ({}, 1, "[0] = 1"),
        ({"num_key_value_heads": 4}, 2, "[1] = 2"),
        ({"num_key_value_heads": 1}, 2, "self.keys.shape[1] = 1"),
        ({"head_dim": 32}, 2, "[3] = 16"),
    ],
    ids=["batch", "more heads", "fewer heads", "head size"],
)
def test_a_cache_of_another_model_or_batch(tiny: Make, changes: dict[str, int], rows: int, observed: str) -> None:
    filled_by, model = tiny(**changes), tiny()
    with pytest.raises(RuntimeError) as today, torch.no_grad():
        model(IDS[:, :1], cache=cache_of(filled_by, IDS[:rows]))
    assert "cache" not in str(today.value) and "key" not in str(today.value)
    cache = cache_of(filled_by, IDS[:rows])
    with og.installed("transformers"), pytest.raises(og.GuardError) as caught, torch.no_grad():
        model(IDS[:, :1], cache=cache)
    violation = caught.value.violations[0]
    assert violation.operator == "DynamicLayer.update"
    assert violation.observed.endswith(observed)
    assert violation.call_site is not None and violation.call_site.module_class == "DynamicCache"


def test_cache_dtype(tiny: Make) -> None:
    model, narrow = tiny(), tiny(dtype=torch.bfloat16)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UserWarning)
        right = model(IDS[:, :1], cache=cache_of(model, IDS)).logits
        wrong = model(IDS[:, :1], cache=cache_of(narrow, IDS)).logits
    assert wrong.isfinite().all() and wrong.dtype == right.dtype
    assert (wrong - right).abs().max() > 1e-4
    cache = cache_of(narrow, IDS)
    with og.installed("transformers"), torch.no_grad(), pytest.warns(og.GuardWarning) as caught:
        guarded = model(IDS[:, :1], cache=cache).logits
    assert torch.equal(guarded, wrong), "a suspicion, no more"
    text = str(caught[0].message)
    assert "self.keys.dtype = bfloat16, key_states.dtype = float32" in text
    assert "the cache was filled by a model in another dtype" in text


def test_a_full_static_cache(tiny: Make) -> None:
    model = tiny()
    full = StaticCache(config=model.config, max_cache_len=4)
    with torch.no_grad():
        model(IDS, cache=full)
        with og.installed("transformers"), og.policy(B="raise"), pytest.raises(IndexError) as caught:
            model(IDS[:, :1], cache=full)
    assert isinstance(caught.value, og.GuardError)
    assert [violation.rule_id for violation in caught.value.violations] == ["room"]


# ---------------------------------------------------------------- compiled


# Of caches without a window: test_compile.py.
@pytest.mark.parametrize("static", [False, True])
def test_a_decoding_program_is_compiled_no_more_often(tiny: Make, static: bool) -> None:
    model = tiny("mistral", num_hidden_layers=1, sliding_window=6)

    def count() -> tuple[int, list[Tensor]]:
        torch._dynamo.reset()
        counter = CompileCounter()
        run = torch.compile(model, fullgraph=True, backend=counter)
        cache = StaticCache(model.config, 16) if static else DynamicCache(config=model.config)
        with torch.no_grad():
            model(IDS, cache=cache)
            results = [run(IDS[:, :1] + step, cache=cache).logits for step in range(5)]
        return counter.frame_count, results

    frames, plain = count()
    with og.installed("transformers"):
        guarded_frames, guarded = count()
    assert guarded_frames <= frames
    assert all(torch.equal(one, other) for one, other in zip(plain, guarded, strict=True))
    torch._dynamo.reset()


# ---------------------------------------------------------------- what is recognised


def digest(function: Any) -> str:
    code = fingerprint(function)
    assert isinstance(code, Fingerprint)
    return code.digest


def test_every_update_is_guarded_or_refused_with_a_reason() -> None:
    report = og.install("transformers")
    refused = {refusal.site: refusal.reason for refusal in report.refused}
    for module in (cache_utils, modeling_unlimited_ocr):
        for cls in vars(module).values():
            update = vars(cls).get("update") if isinstance(cls, type) else None
            if update is None or cls.__module__ != module.__name__ or hasattr(update, "__isabstractmethod__"):
                continue
            site = f"{module.__name__}.{cls.__name__}.update"
            assert (site in report.guarded) != (site in refused), site
    assert refused[f"{cache_utils.__name__}.DummyLayer.update"] == "it holds nothing, and says so"
    known = {code for family in cache_updates.FAMILIES for code, at in family.code.items() if HERE in at.versions}
    tried = [cache_utils.Cache, DeepseekV4HCACache, *(type(make()) for make in LAYERS.values())]
    assert {digest(cls.update) for cls in tried} == known
