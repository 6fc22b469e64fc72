"""Attention masks, in the functions that make them for nearly every model: a 2-D mask of padding against the tokens.

There, and nowhere before, it is certain what a mask is measured against: models hand over theirs as they got it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from llm_op_guard.contract.vocabulary import Function
from llm_op_guard.guard.reading import NotApplicable, optional_attribute
from llm_op_guard.install.installer import Candidate
from llm_op_guard.install.recognise import digest_of
from llm_op_guard.integrations.transformers.caches import cache_capacity, cache_length
from llm_op_guard.integrations.transformers.known import Code, Family, KnownCode, known

MASKS_MODULE = "transformers.masking_utils"

FAMILIES = (
    Family(
        "mask:create_causal_mask",
        {
            "c1b77a0501de53b0": Code("masking_utils.create_causal_mask"),
            "f657c45ab2c1e680": Code("masking_utils.create_sliding_window_causal_mask"),
            "c04afbcbbd3b80c5": Code("masking_utils.create_chunked_causal_mask"),
        },
    ),
    Family(
        "mask:create_causal_mask_padded",
        {
            "e4c1e1fb10ded6d6": Code("masking_utils.create_causal_mask", versions=("4.57.6",)),
            "95a694ffc4fbe4c2": Code("masking_utils.create_sliding_window_causal_mask", versions=("4.57.6",)),
            "6e747a4704cb7ec0": Code("masking_utils.create_chunked_causal_mask", versions=("4.57.6",)),
        },
    ),
    Family(
        "mask:create_bidirectional_mask",
        {
            "440fcc8288d4d050": Code("masking_utils.create_bidirectional_mask"),
            "6efba5d109cf6818": Code("masking_utils.create_bidirectional_sliding_window_mask"),
        },
    ),
)
_FUNCTIONS = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_bidirectional_mask",
    "create_bidirectional_sliding_window_mask",
)

# Code that was read and has no contract.
_CALLS = "it calls those that are guarded"
LEFT_OUT = {
    "a24cfbeefb7f6ec2": Code(
        "masking_utils.create_recurrent_attention_mask",
        reason="it cuts a mask to the new tokens, and takes every length",
    ),
    "53496f18eb50a6ca": Code("masking_utils.create_masks_for_generate", reason=_CALLS),
    "ad772a04cf4e0445": Code("masking_utils.create_masks_for_generate", reason=_CALLS, versions=("4.57.6",)),
    "9c3d11bf7f95420c": Code("gemma3", reason=_CALLS),
    "d72ce787d4451b98": Code("gemma4, gemma4_unified", reason=_CALLS),
    "b396edf26725d5c2": Code("unlimited_ocr", reason="it measures a mask against the window of its own layers"),
    "cb074fa59e4716bd": Code(
        "integrations.sdpa_attention.create_position_bias_mask",
        reason="sdpa_attention_forward, which calls it, is guarded",
    ),
}
_NAMED_SO = re.compile(r"create_\w*masks?(_\w+)?")

# What turns a 2-D mask into the one of an attention, by its code; where an attention has none, masks are not looked at.
_MAKERS = {
    "eager": {
        "178cb883f268ce1b": Code("masking_utils.eager_mask"),
        "5eccfd3470f41ef9": Code("masking_utils.eager_mask", versions=("4.57.6",)),
    },
    "sdpa": {
        "22d6fa97fcc72a52": Code("masking_utils.sdpa_mask"),
        "fefc0482071e6b1b": Code("masking_utils.sdpa_mask", versions=("4.57.6",)),
    },
    "flash": {
        "1f46d179868dffab": Code("masking_utils.flash_attention_mask"),
        "5246d7eab01fcc91": Code("masking_utils.flash_attention_mask", versions=("4.57.6",)),
    },
    "flex": {
        "b2c706e093a5a1c1": Code("masking_utils.flex_attention_mask"),
        "143c897c0aaf6f4d": Code("masking_utils.flex_attention_mask", versions=("4.57.6",)),
    },
}
KNOWN = tuple(
    KnownCode(f"masks: {name}", rf"transformers\.masking_utils\.{name}(_attention)?_mask(_\w+)?", code)
    for name, code in _MAKERS.items()
)


def candidates(module: ModuleType) -> Iterator[Candidate]:
    """The functions that make masks, in a module that defines some."""
    module_name = module.__name__
    if module_name == MASKS_MODULE:
        for name in _FUNCTIONS:
            if name not in module.__dict__:
                reason = "this version of Transformers has no such function"
                yield Candidate(f"{module_name}.{name}", name, reason=reason)
    for name, found in list(module.__dict__.items()):
        if _NAMED_SO.fullmatch(name) and getattr(found, "__module__", None) == module_name:
            yield known(f"{module_name}.{name}", name, found, *FAMILIES, left_out=LEFT_OUT)


def makes_masks(config: Any, *names: str) -> bool:
    """Whether one of these ("eager", "sdpa", "flash", "flex") makes the masks of a model.

    Raises NotApplicable where that is a function that is not known.
    """
    module = sys.modules.get(MASKS_MODULE)
    makers = None if module is None else module.__dict__.get("ALL_MASK_ATTENTION_FUNCTIONS")
    name = optional_attribute(config, "_attn_implementation_internal")
    if type(name) is not str or makers is None:
        raise NotApplicable
    for mapping in (optional_attribute(makers, "_local_mapping"), optional_attribute(makers, "_global_mapping")):
        if type(mapping) is dict and name in mapping:
            return _maker(mapping[name]) in names
    raise NotApplicable


_MAKER_OF = {digest: name for name, code in _MAKERS.items() for digest in code}


def _maker(function: Any) -> str:
    maker = _MAKER_OF.get(digest_of(function))
    if maker is None:
        raise NotApplicable
    return maker


def mask_columns(cache: Any, new: int) -> int:
    """The columns of a 2-D mask that are looked at when so many tokens come to those of a cache, or to none.

    Raises NotApplicable for a static cache in use, which counts on the device.
    """
    if cache is None:
        return new
    columns = cache_length(cache) + new
    try:
        return int(max(columns, cache_capacity(cache)))
    except NotApplicable:
        return int(columns)


READERS: dict[Function, Callable[..., Any]] = {
    Function(
        "makes_masks", "A", (("config", "owner"), ("name", "text")),
        'one of those named, of "eager", "sdpa", "flash" and "flex", makes masks for a Transformers model of this '
        "config; does not apply to functions that are not known",
        variadic=True,
        eager=True,
    ): makes_masks,
    Function(
        "mask_columns", "A", (("cache", "owner"), ("new", "int")),
        "the columns of a 2-D mask that are looked at when so many new tokens come to a Transformers cache, or to "
        "None; does not apply to a static cache in use",
        eager=True,
    ): mask_columns,
}  # fmt: skip
