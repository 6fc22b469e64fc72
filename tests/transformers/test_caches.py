"""What is read of a cache is what its own methods say, for every class of cache and layer that Transformers has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, QuantizedLayer
from transformers.models.deepseek_v4 import modeling_deepseek_v4  # noqa: F401 - it brings layers of its own
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl  # noqa: F401 - as above
from transformers.models.unlimited_ocr import modeling_unlimited_ocr  # noqa: F401 - as above

import llm_op_guard as og
from llm_op_guard.guard.reading import NotApplicable
from llm_op_guard.integrations.transformers import caches

pytestmark = pytest.mark.usefixtures("no_alarm")

Make = Callable[..., Any]


def read(reader: Callable[[Any], Any], cache: Any) -> Any:
    """What is read, None where there is no answer."""
    try:
        return reader(cache)
    except NotApplicable:
        return None


def assert_as_told(cache: Any, *, length: bool = True, capacity: bool = True) -> None:
    """The cache's own methods say the same; where they say nothing of use, and only there, nothing is read.

    `length` and `capacity` say whether there must be an answer where the cache has one.
    """
    told = cache.get_seq_length()
    found = read(caches.cache_length, cache)
    if isinstance(told, torch.Tensor) or not length:
        assert found is None
    else:
        assert found == told
    told = cache.get_max_length() if read(len, cache) else -1
    found = read(caches.cache_capacity, cache)
    assert found == (told if told >= 0 and capacity else None)


class Toy(QuantizedLayer):
    """A backend that is there without its library."""

    def _quantize(self, tensor: Any, axis: Any) -> Any:
        return tensor.clone()

    def _dequantize(self, q_tensor: Any) -> Any:
        return q_tensor


CACHES: dict[str, Callable[[Any], Any]] = {
    "lazy": lambda config: DynamicCache(),
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=16),
    "fp8": lambda config: QuantizedCache("fp8", config),
    "quantised": lambda config: Cache(layers=[Toy(residual_length=2) for _ in range(config.num_hidden_layers)]),
    "encoder and decoder": lambda config: EncoderDecoderCache(DynamicCache(config=config), DynamicCache()),
    "static decoder": lambda config: EncoderDecoderCache(StaticCache(config, 16), StaticCache(config, 16)),
    "mtp": lambda config: cache_utils.MtpCache(config=config),
    "dflash": lambda config: cache_utils.DFlashCache(config=config),
}


def told_of(cache: Any) -> tuple[Any, Any, Any]:
    return tuple(read(reader, cache) for reader in (caches.cache_length, caches.cache_capacity, caches.cache_layers))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kind", "window"), [(kind, window) for kind in CACHES for window in (None, 4) if (kind, window) != ("fp8", 4)]
)
def test_prefill_and_decode_of_a_model(tiny: Make, kind: str, window: int | None) -> None:
    model = tiny()
    config = copy.deepcopy(model.config)
    if window is not None:
        config.sliding_window = window
    cache = CACHES[kind](config)
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    layers = config.num_hidden_layers
    assert_as_told(cache)
    assert told_of(cache)[2] == (None if kind == "lazy" else layers)
    held = 0
    with torch.no_grad():
        for length in (3, 1, 1, 1, 2):
            model(torch.full((2, length), 5), cache=own, use_cache=True)
            assert_as_told(cache)
            held += length
            if not (kind.startswith("static") and window is None):
                assert told_of(own)[0] == held
    cache.reset()
    assert_as_told(cache)


def test_what_is_read_of_the_usual_caches(tiny: Make) -> None:
    config = tiny().config
    layers = config.num_hidden_layers
    assert told_of(DynamicCache()) == (0, None, None)
    assert told_of(DynamicCache(config=config)) == (0, None, layers)
    static = StaticCache(config=config, max_cache_len=16)
    assert told_of(static) == (0, 16, layers)
    key = torch.ones(1, 2, 3, 4)
    static.update(key, key, 0)
    assert told_of(static) == (None, 16, layers)
    dynamic = DynamicCache()
    dynamic.update(key, key, 0)
    dynamic.update(key, key, 0)
    assert told_of(dynamic) == (6, None, None)
    dynamic.update(key[:, :, :0], key[:, :, :0], 1)
    assert told_of(dynamic) == (6, None, None)


def subclasses(cls: type) -> Iterator[type]:
    for one in cls.__subclasses__():
        yield one
        yield from subclasses(one)


def made(cls: Any) -> Any:
    """A layer of a class, where it can be made without more than lengths."""
    for options in ({}, {"sliding_window": 4}, {"max_cache_len": 8}, {"max_cache_len": 8, "sliding_window": 4}):
        try:
            return cls(**options)
        except (TypeError, ImportError, AttributeError):
            continue
    return None


LAYERS = sorted(
    {
        cls
        for base in (CacheLayerMixin, LinearAttentionCacheLayerMixin, cache_utils.DummyLayer)
        for cls in (base, *subclasses(base))
        if made(cls) is not None
    },
    key=lambda cls: cls.__name__,
)
# Code of their own, which is not known.
OWN = ("UnlimitedOcrDynamicReferenceSlidingWindowLayer", "UnlimitedOcrStaticReferenceSlidingWindowLayer")


def test_the_caches_and_layers_that_are_tried() -> None:
    theirs = {cls.__name__ for cls in subclasses(Cache) if cls.__module__.startswith("transformers.")}
    assert theirs == {"DynamicCache", "StaticCache", "QuantizedCache", "EncoderDecoderCache", "MtpCache", "DFlashCache",
                      "MiniMaxCache"}  # fmt: skip
    assert len(LAYERS) >= 17
    assert set(OWN) <= {cls.__name__ for cls in LAYERS}


@pytest.mark.parametrize("cls", LAYERS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("before", [None, cache_utils.LinearAttentionLayer, cache_utils.DummyLayer])
def test_every_layer(cls: Any, before: Any) -> None:
    layers = [*([] if before is None else [before()]), made(cls)]
    cache = Cache(layers=layers)
    known = cls.__name__ not in OWN
    if not isinstance(layers[-1], CacheLayerMixin):
        assert told_of(cache) == (None, None, len(layers))
        return
    assert_as_told(cache, length=known, capacity=known)
    key = torch.ones(1, 2, 1, 4)
    for _ in range(6):
        cache.update(key, key, len(layers) - 1)
        assert_as_told(cache, length=known, capacity=known)
    assert read(caches.cache_layers, cache) == len(layers)


def test_layers_of_several_kinds() -> None:
    dynamic, sliding = cache_utils.DynamicLayer(), cache_utils.DynamicSlidingWindowLayer(sliding_window=4)
    static = cache_utils.StaticLayer(max_cache_len=8)
    # Its own `get_max_length` says 4, and the first layer grows for ever: no rule is to be broken by that.
    assert told_of(Cache(layers=[dynamic, sliding])) == (0, None, 2)
    assert told_of(Cache(layers=[sliding, static])) == (0, 8, 2)
    assert told_of(Cache(layers=[cache_utils.DummyLayer(), static])) == (0, 8, 2)
    assert told_of(Cache(layers=[cache_utils.DummyLayer()])) == (None, None, 1)


def test_a_cache_of_a_model_of_its_own() -> None:
    cache = MiniMaxCache()
    key = torch.ones(1, 2, 3, 4)
    cache.update(key, key, 0)
    assert_as_told(cache)
    assert read(caches.cache_layers, cache) is None  # its __len__ is its own


def test_pairs_of_keys_and_values() -> None:
    pair = (torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 8))
    assert told_of((pair, pair)) == (5, None, 2)
    assert told_of([list(pair)]) == (5, None, 1)
    short = tuple(x[:, :, :4] for x in pair)
    for odd in ((), (pair, short), ((pair[0], short[1]),), (pair[0],), ((1, 2),), (pair, None), (pair[:1],), (1, 2),
                ((*pair, *pair),), ((pair[0][0], pair[1][0]),)):  # fmt: skip
        assert told_of(odd) == (None, None, None)


def test_code_that_is_changed_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_seq_length(self: Any, layer_idx: int = 0) -> int:
        return 3

    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), 0)
    assert read(caches.cache_length, cache) == 5
    monkeypatch.setattr(Cache.get_seq_length, "__code__", get_seq_length.__code__)
    assert read(caches.cache_length, cache) is None
    monkeypatch.undo()
    assert read(caches.cache_length, cache) == 5


def boom(*_: Any, **__: Any) -> Any:
    raise AssertionError("code of an argument was run")


class Overridden(DynamicCache):
    get_seq_length = get_max_length = __len__ = boom


class Wrapped(DynamicCache):
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx)


class Proxied:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        boom()


class Virtual(DynamicCache):
    layers = property(boom)  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


class OwnLayer(cache_utils.DynamicLayer):
    get_seq_length = get_max_length = boom


class NoLayer:
    get_seq_length = boom


def patched() -> Any:
    cache = DynamicCache()
    cache.get_seq_length = cache.get_max_length = boom  # type: ignore[method-assign]
    return cache


def of_itself() -> Any:
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    cache.self_attention_cache = cache
    return cache


def without_layers() -> Any:
    cache = DynamicCache()
    del cache.layers
    return cache


ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "number": lambda: 3,
    "text": lambda: "abcd",
    "dict": lambda: {"layers": []},
    "class": lambda: DynamicCache,
    "mock": Mock,
    "magic mock": MagicMock,
    "mock of a cache": lambda: Mock(spec=DynamicCache),
    "overridden": Overridden,
    "proxy": lambda: Proxied(DynamicCache()),
    "property": Virtual,
    "of itself": of_itself,
    "without layers": without_layers,
    "not a list": lambda: setattr(cache := DynamicCache(), "layers", (1,)) or cache,
    "odd layers": lambda: setattr(cache := DynamicCache(), "layers", [None, 3]) or cache,
    "a layer that only looks so": lambda: Cache(layers=[NoLayer(), cache_utils.DynamicLayer()]),  # type: ignore[list-item]
    "module": lambda: torch.nn.ModuleList([torch.nn.Linear(2, 2)]),
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_objects_have_no_answer_and_run_no_code(odd: str) -> None:
    length, capacity, _ = told_of(ODD[odd]())
    assert (length, capacity) == (None, None)


def test_what_has_code_of_its_own_is_not_known() -> None:
    assert told_of(Wrapped()) == (None, None, None)
    assert told_of(patched()) == (None, None, None)
    assert told_of(Cache(layers=[OwnLayer()])) == (None, None, 1)
    assert told_of(Overridden()) == (None, None, None)


def test_a_rule_about_a_cache(tiny: Make) -> None:
    config = tiny().config

    @og.guard("""
        x: any[B, L, ...]
        require(cache_length(cache) + L <= cache_capacity(cache), id="fits", error=IndexError)
        require(cache_layers(cache) == layers, id="layers", hint=f"a cache of {cache_layers(cache)} layers")
        require(mask_length == cache_length(cache) + L, id="mask_covers_the_cache")
    """)
    def run(x: Any, cache: Any, mask_length: int, layers: int = config.num_hidden_layers) -> Any:
        return x

    key = torch.ones(1, 2, 3, 4)
    dynamic = DynamicCache()
    dynamic.update(key, key, 0)
    for cache, mask, length in ((dynamic, 5, 2), (None, 9, 2), (Mock(), 9, 2), (StaticCache(config, 4), 4, 4)):
        run(torch.ones(1, length), cache, mask)
    with pytest.raises(og.GuardError, match=r"cache_length\(cache\) \+ L = 5"):
        run(torch.ones(1, 2), dynamic, 4)
    with pytest.raises(IndexError, match=r"cache_length\(cache\) \+ L = 5, cache_capacity\(cache\) = 4"):
        run(torch.ones(1, 5), StaticCache(config, 4), 5)
    with pytest.raises(og.GuardError, match="a cache of 2 layers"):
        run(torch.ones(1, 1), DynamicCache(config=config), 1, 3)


def test_a_traced_program_is_not_told(tiny: Make) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    rule = "require(cache_length(cache) == 99 and cache_layers(cache) == 99)\nrequire(cache_capacity(cache) == 99)"
    guarded = og.guard(rule)(lambda x, cache: x + cache.layers[0].keys.shape[-2])
    cache = DynamicCache(config=tiny().config)
    key = torch.ones(1, 2, 3, 4)
    cache.update(key, key, 0)
    with pytest.raises(og.GuardError):
        guarded(torch.ones(1), cache)
    assert torch.compile(guarded, fullgraph=True, backend=counter)(torch.ones(1), cache).item() == 4
    assert counter.frame_count == 1
