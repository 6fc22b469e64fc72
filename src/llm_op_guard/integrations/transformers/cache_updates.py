"""Caches: `update` of Transformers' caches and of their layers, where new keys and values are put in."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

from llm_op_guard.install.installer import Candidate
from llm_op_guard.integrations.transformers.known import Code, Family, known

FAMILIES = (
    Family("cache:update", {"7d05a2b9c43b7ec3": Code("Cache, and with it all but EncoderDecoderCache")}),
    Family(
        "cache:update_at_positions",
        {"69fbaa6eb60add85": Code("Cache, and with it all but EncoderDecoderCache", versions=("4.57.6",))},
    ),
    Family(
        "cache:growing_layer_update",
        {
            "dba70fe538cfa7b2": Code("DynamicLayer, and with it the indexed and the mixed ones"),
            "b15d9f2a7ba11ac6": Code("DynamicSlidingWindowLayer, and with it a mixed one"),
            "91c3df20a7363573": Code("QuantizedLayer, and with it those of Quanto and HQQ"),
            "ee330906973e0c37": Code("DynamicLayer", versions=("4.57.6",)),
            "6b5d8172b57c33a6": Code("DynamicSlidingWindowLayer", versions=("4.57.6",)),
            "a9ead790b2cddce5": Code("QuantizedLayer, and with it those of Quanto and HQQ", versions=("4.57.6",)),
        },
    ),
    Family("cache:shared_layer_update", {"c8394c0f98ba9b72": Code("deepseek_v4")}),
    Family(
        "cache:static_layer_update",
        {
            "322360d4b9dd3537": Code("StaticLayer, indexed and mixed ones too"),
            "e0367a3579176fb1": Code("StaticLayer: `cache_position` says where", versions=("4.57.6",)),
        },
    ),
    Family(
        "cache:static_sliding_layer_update",
        {
            "3f0712f35c3defef": Code("StaticSlidingWindowLayer, a mixed one too"),
            "d977d282b2dd6960": Code("StaticSlidingWindowLayer", versions=("4.57.6",)),
        },
    ),
    Family("cache:fp8_layer_update", {"977be2c6908cd372": Code("Fp8QuantizedLayer")}),
)

CACHE_MODULE = "transformers.cache_utils"

# Code that was read and has no contract.
LEFT_OUT = {
    "c3f965074b8d8c80": Code("DummyLayer", reason="it holds nothing, and says so"),
    "d4f076ddb22ab079": Code("unlimited_ocr", reason="it keeps the prompt apart from the window"),
    "da2528865b7152b9": Code("unlimited_ocr", reason="it keeps the prompt apart from the window"),
}
_KINDS = frozenset({"Cache", "CacheLayerMixin", "DummyLayer"})


def candidates(module: ModuleType) -> Iterator[Candidate]:
    """The `update` of every cache and layer of a cache that a module defines."""
    for cls in list(module.__dict__.values()):
        if not inspect.isclass(cls) or cls.__module__ != module.__name__ or not _holds_keys(cls):
            continue
        update = cls.__dict__.get("update")
        if update is None or getattr(update, "__isabstractmethod__", False):
            continue
        site, operator = f"{cls.__module__}.{cls.__name__}.update", f"{cls.__name__}.update"
        yield known(site, operator, update, *FAMILIES, left_out=LEFT_OUT)


def _holds_keys(cls: type) -> bool:
    return any(base.__name__ in _KINDS and base.__module__ == CACHE_MODULE for base in cls.__mro__)
