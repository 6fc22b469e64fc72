"""Rotary position embeddings: `apply_rotary_pos_emb` of the modeling files."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from llm_op_guard.install.installer import Candidate
from llm_op_guard.integrations.transformers.known import Code, Family, known

FAMILIES = (
    Family(
        "rope:apply_rotary_pos_emb",
        {
            "449ca673353426d7": Code("llama and 118 others: in the dtype of q and cos"),
            "fbdc58d8a41e613f": Code("olmo: the result in q's dtype"),
            "3ae6ee8735c53311": Code("esm, modernbert: computed in float32"),
            # Their `position_ids` are not used.
            "e95ec27031776296": Code("llama and 58 others: in the dtype of q and cos", versions=("4.57.6",)),
            "1afe587c93cd1213": Code("olmo and 3 others: the result in q's dtype", versions=("4.57.6",)),
        },
    ),
)


def candidates(module: ModuleType) -> Iterator[Candidate]:
    """The one of a modeling file, unless it is imported from another, where it is guarded or refused."""
    name, function = module.__name__, "apply_rotary_pos_emb"
    found = module.__dict__.get(function)
    if found is not None and getattr(found, "__module__", name) == name:
        yield known(f"{name}.{function}", function, found, *FAMILIES)
