"""Attention: the eager function of the modeling files, and the function that calls SDPA for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from llm_op_guard.install.installer import Candidate
from llm_op_guard.integrations.transformers.known import Code, Family, known

_EAGER = Family(
    "attention:eager_attention_forward",
    {"dabc28315e4a558d": Code("llama and 156 others: grouped heads, the mask added")},
)
_EAGER_CUTTING_MASKS = Family(
    "attention:eager_attention_forward_cutting_masks",
    {
        "6075c8092dde433c": Code("llama and 68 others: grouped heads, the mask cut and added", versions=("4.57.6",)),
        "63626d14488a8543": Code("llama4: the same, softmax in the scores' dtype", versions=("4.57.6",)),
    },
)
_SDPA = Family("attention:sdpa_attention_forward", {"9b0498c56248740b": Code("integrations.sdpa_attention")})
_SDPA_CUTTING_MASKS = Family(
    "attention:sdpa_attention_forward_cutting_masks",
    {"156e01b2d1f65374": Code("integrations.sdpa_attention", versions=("4.57.6",))},
)
FAMILIES = (_EAGER, _EAGER_CUTTING_MASKS, _SDPA, _SDPA_CUTTING_MASKS)

SDPA_MODULE = "transformers.integrations.sdpa_attention"


def candidates(module: ModuleType) -> Iterator[Candidate]:
    """The one of a modeling file, unless it is imported from another, where it is guarded or refused."""
    name = module.__name__
    function = "sdpa_attention_forward" if name == SDPA_MODULE else "eager_attention_forward"
    families = (_SDPA, _SDPA_CUTTING_MASKS) if name == SDPA_MODULE else (_EAGER, _EAGER_CUTTING_MASKS)
    found = module.__dict__.get(function)
    if found is not None and getattr(found, "__module__", name) == name:
        yield known(f"{name}.{function}", function, found, *families)
    elif name == SDPA_MODULE:
        yield Candidate(f"{name}.{function}", function, reason="this version of Transformers has no such function")
