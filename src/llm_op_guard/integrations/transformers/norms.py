"""Norms: the classes of the modeling files that are named so."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

from llm_op_guard.install.installer import Candidate
from llm_op_guard.integrations.transformers.known import Code, Family, known

FAMILIES = (
    Family(
        "norm:rms_norm",
        {
            "580bd6ee67df25ac": Code(
                "llama and 141 others: weight times the rounded norm", versions=("4.57.6", "5.24.0")
            ),
            "23036fa880041935": Code("afmoe, gpt_oss: rounded after the weight", versions=("4.57.6", "5.24.0")),
        },
    ),
)


def candidates(module: ModuleType) -> Iterator[Candidate]:
    """The `forward` of every class that a modeling file calls RMSNorm."""
    for cls in list(module.__dict__.values()):
        if (
            inspect.isclass(cls)
            and cls.__module__ == module.__name__
            and "RMSNorm" in cls.__name__
            and "forward" in cls.__dict__
        ):
            site = f"{cls.__module__}.{cls.__name__}.forward"
            yield known(site, f"{cls.__name__}.forward", cls.__dict__["forward"], *FAMILIES)
