"""Transformers: which functions are operators, which code of theirs is known, and which contract holds for it.

Nothing here imports Transformers: modules are looked at when the user's program has loaded them. Each part of the
library has its file, with its families of code and `candidates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from llm_op_guard.contract.vocabulary import declare
from llm_op_guard.guard import functions
from llm_op_guard.install.installer import Candidate
from llm_op_guard.install.producer import Producer
from llm_op_guard.integrations.transformers import (
    attention,
    cache_updates,
    caches,
    entry,
    logits,
    masks,
    models,
    moe,
    norms,
    rope,
    specimens,
)
from llm_op_guard.integrations.transformers.known import LIBRARY

PARTS = (rope, norms, moe, attention, cache_updates, masks, entry, logits)
_OTHER_MODULES = frozenset(
    {
        cache_updates.CACHE_MODULE,
        entry.GENERATION_MODULE,
        logits.PROCESSORS_MODULE,
        masks.MASKS_MODULE,
    }
)
FAMILIES = tuple(family for part in PARTS for family in part.FAMILIES)
KNOWN = tuple(known for part in (rope, norms, moe, caches, masks, models) for known in part.KNOWN)
LEFT_OUT = {
    digest: code
    for part in (rope, norms, attention, cache_updates, masks, logits)
    for digest, code in part.LEFT_OUT.items()
}


__all__ = ["FAMILIES", "KNOWN", "LEFT_OUT", "LIBRARY", "TransformersIntegration", "register"]


class TransformersIntegration:
    """The operators of Transformers' modeling files, attentions, caches and logits processors, and `generate`."""

    library = LIBRARY

    def wants(self, module: str) -> bool:
        """Whether a module of that name holds operators on torch's tensors."""
        if module in _OTHER_MODULES:
            return True
        parent, _, file = module.rpartition(".")
        if parent == attention.INTEGRATIONS:
            return True
        # Until version 5 there are models of TensorFlow and Flax beside them.
        return (
            parent.startswith("transformers.models.")
            and file.startswith("modeling_")
            and not file.startswith(("modeling_tf_", "modeling_flax_"))
        )

    def candidates(self, module: ModuleType) -> Iterator[Candidate]:
        """The operators that a module defines, recognised or refused."""
        for part in PARTS:
            yield from part.candidates(module)

    def producers(self, module: ModuleType) -> Iterator[Producer]:
        """The modules that make the tables of rotary embeddings."""
        return rope.producers(module)

    def specimen(
        self, contract: str, function: Callable[..., Any], owner: type | None
    ) -> Callable[[], dict[str, Any]] | None:
        """What makes real arguments of an operator with which it runs."""
        return specimens.specimen(contract, function, owner)

    def variants(self, owner: Any, wanted: Mapping[str, Any]) -> Iterator[None]:
        """Caches, configurations and models that answer otherwise."""
        return specimens.variants(owner, wanted)


def register() -> None:
    """Give the language the readers that know Transformers."""
    for function, implementation in {**models.READERS, **masks.READERS, **caches.READERS}.items():
        declare(function)
        functions.register(function.name, implementation)
