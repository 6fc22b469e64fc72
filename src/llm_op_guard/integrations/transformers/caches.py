"""Transformers' caches: the tokens that one holds and can hold, and its layers, read without running its code.

What `get_seq_length`, `get_max_length` and `len` would answer is told by the code of these methods, whose fingerprints
were taken from Transformers 5.24.0 and 4.57.6 (`get_max_cache_shape` there): what has other code, in a subclass or
another version, has no answer. A program that is traced gets none either: a cache is changed by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from llm_op_guard.contract.vocabulary import Function
from llm_op_guard.guard.functions import numel
from llm_op_guard.guard.memory import recall
from llm_op_guard.guard.reading import NotApplicable, attribute, is_a, is_tensor
from llm_op_guard.install.recognise import digest_of
from llm_op_guard.integrations.transformers.known import Code, KnownCode

# Of caches: that of the layers, and that of the self-attention cache of an encoder and decoder.
_LENGTH = {"16edc69b624341e4": Code("Cache")}
_LENGTH_OF_FIRST = {"a0a17d0a444e2b57": Code("Cache: of the first layer, whatever it is", versions=("4.57.6",))}
_LENGTH_OF_LAYERS = {**_LENGTH, **_LENGTH_OF_FIRST}
_LENGTH_OF_DECODER = {"4cd35ae922fe5c2a": Code("EncoderDecoderCache", versions=("4.57.6", "5.24.0"))}
_CAPACITY = {"ddd79ce8cd88fa8e": Code("Cache")}
_CAPACITY_OF_DECODER = {"63966cc5c8722aa9": Code("EncoderDecoderCache")}
_SHAPE = {"0b20ad40a4980539": Code("Cache", versions=("4.57.6",))}
_SHAPE_OF_DECODER = {"7f284e764d8cfa73": Code("EncoderDecoderCache", versions=("4.57.6",))}
_COUNT = {"cb4a7bda1adf7b54": Code("Cache", versions=("4.57.6", "5.24.0"))}
_COUNT_OF_DECODER = {"03b7ab59d85fe91a": Code("EncoderDecoderCache", versions=("4.57.6", "5.24.0"))}
# Of layers.
_GROWN = {"51c5e8015a85d7a7": Code("DynamicLayer", versions=("4.57.6", "5.24.0"))}
_COUNTED = {
    "a1f93eb7ef6d0371": Code(
        "DynamicSlidingWindowLayer, QuantizedLayer; StaticSlidingWindowLayer of 4", versions=("4.57.6", "5.24.0")
    )
}
_COUNTED_TWICE = {"d58eedf4b778c46f": Code("StaticSlidingWindowLayer")}
_COUNTED_ON_THE_DEVICE = {
    "017b00efd317fbc9": Code("StaticLayer"),
    "d12b2c797e5051fa": Code("StaticLayer", versions=("4.57.6",)),
}
_ENDLESS = {"ad9d3e1b6237a37e": Code("DynamicLayer, DummyLayer")}
_WINDOW = {"cf2f5e535749cda2": Code("DynamicSlidingWindowLayer")}
_ROOM = {"0ab768cbfb11f103": Code("StaticLayer")}
_ENDLESS_SHAPE = {"59246556a618fcf6": Code("DynamicLayer", versions=("4.57.6",))}
_WINDOW_SHAPE = {"d57899dfa0281a1a": Code("DynamicSlidingWindowLayer", versions=("4.57.6",))}
_ROOM_SHAPE = {"f49f83f89171792d": Code("StaticLayer", versions=("4.57.6",))}

KNOWN = tuple(
    KnownCode(
        f"caches: {method}",
        rf"transformers\.cache_utils\.\w+\.{method}",
        {digest: known for some in code for digest, known in some.items()},
    )
    for method, code in {
        "get_seq_length": (
            _LENGTH,
            _LENGTH_OF_FIRST,
            _LENGTH_OF_DECODER,
            _GROWN,
            _COUNTED,
            _COUNTED_TWICE,
            _COUNTED_ON_THE_DEVICE,
        ),
        "get_max_length": (_CAPACITY, _CAPACITY_OF_DECODER, _ENDLESS, _WINDOW, _ROOM),
        "get_max_cache_shape": (_SHAPE, _SHAPE_OF_DECODER, _ENDLESS_SHAPE, _WINDOW_SHAPE, _ROOM_SHAPE),
        "__len__": (_COUNT, _COUNT_OF_DECODER),
    }.items()
)


def cache_length(cache: Any) -> Any:
    """The tokens that a cache holds, `get_seq_length()`; raises NotApplicable where that is not known for certain.

    A static layer counts in a tensor, which is not read: there is no answer once it is in use.
    """
    if is_a(cache, tuple | list):
        return _pairs(cache)[0][0].shape[-2]
    cache, code = _of_decoder(cache, "get_seq_length", _LENGTH_OF_LAYERS, _LENGTH_OF_DECODER)
    layers = _layers(cache)
    if not layers:
        return 0
    if code in _LENGTH and not _is_attention(layers[0], cache, "get_seq_length"):
        if _method(layers[0], "get_seq_length") is not None or _digest(cache, "__len__") not in _COUNT:
            raise NotApplicable
        layers = [layer for layer in layers if _is_attention(layer, cache, "get_seq_length")]
        if not layers:
            raise NotApplicable
    return _answer(layers[0], "get_seq_length", _LENGTHS)


def cache_capacity(cache: Any) -> int:
    """The tokens that the layers of a cache have room for, `get_max_length()`: of a sliding window its width.

    Raises NotApplicable where an attention layer grows without end, and where that is not known for certain.
    """
    method, own, of_decoder = "get_max_length", _CAPACITY, _CAPACITY_OF_DECODER
    if _method(cache, method) is None:
        method, own, of_decoder = "get_max_cache_shape", _SHAPE, _SHAPE_OF_DECODER
    cache, _ = _of_decoder(cache, method, own, of_decoder)
    found: list[int] = []
    for layer in _layers(cache):
        capacity = _answer(layer, method, _CAPACITIES)
        if capacity >= 0:
            found.append(capacity)
        elif _is_attention(layer, cache, method):
            raise NotApplicable
    if not found:
        raise NotApplicable
    return max(found)


def cache_layers(cache: Any) -> int:
    """The layers of a cache; raises NotApplicable where it makes them as they come."""
    if is_a(cache, tuple | list):
        return len(_pairs(cache))
    cache, _ = _of_decoder(cache, "__len__", _COUNT, _COUNT_OF_DECODER)
    if attribute(cache, "layer_class_to_replicate") is not None:
        raise NotApplicable
    return len(_layers(cache))


def cache_layers_in_use(cache: Any) -> int:
    """The layers of a cache up to the last one that holds tokens; raises NotApplicable where that is not known."""
    if is_a(cache, tuple | list):
        return len(_pairs(cache))
    cache, _ = _of_decoder(cache, "get_seq_length", _LENGTH_OF_LAYERS, _LENGTH_OF_DECODER)
    layers = _layers(cache)
    for count in range(len(layers), 0, -1):
        if _answer(layers[count - 1], "get_seq_length", _LENGTHS) > 0:
            return count
    return 0


def filled_unseen(cache: Any) -> bool:
    """Whether no guarded model is known to have filled a cache."""
    try:
        recall(cache, "filled_by")
    except NotApplicable:
        return True
    return False


READERS: dict[Function, Callable[[Any], Any]] = {
    Function(
        "cache_length", "A", (("cache", "owner"),),
        "the tokens that a Transformers cache holds; does not apply to a static cache in use, which counts on the "
        "device, nor to code that is not known",
        eager=True,
    ): cache_length,
    Function(
        "cache_capacity", "A", (("cache", "owner"),),
        "the tokens that a static or sliding Transformers cache has room for; does not apply to one that grows",
        eager=True,
    ): cache_capacity,
    Function(
        "cache_layers", "A", (("cache", "owner"),),
        "the layers of a Transformers cache; does not apply to one that makes them as they come",
        eager=True,
    ): cache_layers,
    Function(
        "cache_layers_in_use", "A", (("cache", "owner"),),
        "the layers of a Transformers cache up to the last one that holds tokens; does not apply to a static cache in "
        "use, nor to layers that keep no tokens",
        eager=True,
    ): cache_layers_in_use,
    Function(
        "filled_unseen", "A", (("cache", "owner"),),
        "no guarded model is known to have filled a Transformers cache",
        eager=True,
    ): filled_unseen,
}  # fmt: skip


# ---------------------------------------------------------------- layers


_Readings = Mapping[str, Callable[[Any], Any]]


def _grown(layer: Any) -> Any:
    if attribute(layer, "is_initialized") is False:
        return 0
    keys = attribute(layer, "keys")
    return 0 if numel(keys) == 0 else keys.shape[-2]


def _counted_on_the_device(layer: Any) -> int:
    if attribute(layer, "is_initialized") is not False:
        raise NotApplicable
    return 0


def _readings(*readings: tuple[Mapping[str, Code], Callable[[Any], Any]]) -> _Readings:
    return {digest: read for code, read in readings for digest in code}


_LENGTHS = _readings(
    (_GROWN, _grown),
    (_COUNTED, lambda layer: attribute(layer, "cumulative_length")),
    (_COUNTED_TWICE, lambda layer: attribute(layer, "cumulative_length_int")),
    (_COUNTED_ON_THE_DEVICE, _counted_on_the_device),
)
_CAPACITIES = _readings(
    ({**_ENDLESS, **_ENDLESS_SHAPE}, lambda layer: -1),  # noqa: ARG005
    ({**_WINDOW, **_WINDOW_SHAPE}, lambda layer: attribute(layer, "sliding_window")),
    ({**_ROOM, **_ROOM_SHAPE}, lambda layer: attribute(layer, "max_cache_len")),
)


def _answer(layer: Any, method: str, readings: _Readings) -> Any:
    read = readings.get(_digest(layer, method))
    answer = None if read is None else read(layer)
    if type(answer).__name__ not in ("int", "SymInt"):
        raise NotApplicable
    return answer


# ---------------------------------------------------------------- recognition


def _of_decoder(cache: Any, method: str, own: Mapping[str, Code], of_decoder: Mapping[str, Code]) -> tuple[Any, str]:
    """The cache whose layers answer, and the digest of its method: itself, or the self-attention cache of both."""
    code = _digest(cache, method)
    if code in of_decoder:
        cache = attribute(cache, "self_attention_cache")
        code = _digest(cache, method)
    if code not in own:
        raise NotApplicable
    return cache, code


def _layers(cache: Any) -> list[Any]:
    layers = attribute(cache, "layers")
    if type(layers) is not list:
        raise NotApplicable
    return layers


def _is_attention(layer: Any, cache: Any, method: str) -> bool:
    """Whether a layer is what the cache's own code takes for one of attention."""
    function = _method(cache, method)
    mixin = None if function is None else function.__globals__.get("CacheLayerMixin")
    if mixin is None:
        raise NotApplicable
    return mixin in type(layer).__mro__


def _method(owner: Any, name: str) -> FunctionType | None:
    """The plain function that a class has under a name; None where the object has its own."""
    try:
        own = owner.__dict__
    except Exception:
        own = None
    if type(own) is dict and name in own:
        return None
    for cls in type(owner).__mro__:
        if name in (methods := cls.__dict__):
            found = methods[name]
            return found if isinstance(found, FunctionType) else None
    return None


def _digest(owner: Any, name: str) -> str:
    """What the code of a method is recognised by, of no method nothing."""
    return digest_of(_method(owner, name))


def _pairs(cache: Any) -> Any:
    """A cache as it was once: for each layer its keys and values, [batch, heads, tokens, width]; of one length."""
    if len(cache) == 0:
        raise NotApplicable
    for layer in cache:
        if not is_a(layer, tuple | list) or len(layer) != 2 or not all(is_tensor(x) and x.ndim == 4 for x in layer):
            raise NotApplicable
        if not layer[0].shape[-2] == layer[1].shape[-2] == cache[0][0].shape[-2]:
            raise NotApplicable
    return cache
