"""Where a model is entered: `forward` of the models that look token ids up and of causal LMs, and `generate`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType

from llm_op_guard.install.installer import Candidate
from llm_op_guard.install.recognise import Refused, innermost
from llm_op_guard.integrations.transformers import forwards
from llm_op_guard.integrations.transformers.known import METADATA, TOKEN_IDS, Code, Family, contract_named, known

_GENERATE = Family(
    "entry:generate",
    {
        "354ac92aa72705d4": Code("GenerationMixin"),
        "2bf274a72db230ee": Code("GenerationMixin", versions=("4.57.6",)),
    },
    TOKEN_IDS,
)
FAMILIES = (_GENERATE,)

GENERATION_MODULE = "transformers.generation.utils"


def candidates(module: ModuleType) -> Iterator[Candidate]:
    """`generate`, or the forwards of a modeling file that take token ids."""
    if module.__name__ == GENERATION_MODULE:
        yield _generate(module)
        return
    for cls in list(module.__dict__.values()):
        if inspect.isclass(cls) and cls.__module__ == module.__name__ and "forward" in cls.__dict__:
            yield from _forward_of(cls)


def _generate(module: ModuleType) -> Candidate:
    operator = "GenerationMixin.generate"
    mixin = module.__dict__.get("GenerationMixin")
    found = None if mixin is None else mixin.__dict__.get("generate")
    if found is None:
        reason = "this version of Transformers has no such function"
        return Candidate(f"{module.__name__}.{operator}", operator, reason=reason)
    return known(f"{module.__name__}.{operator}", operator, found, _GENERATE)


def _forward_of(cls: type) -> Iterator[Candidate]:
    function = innermost(cls.__dict__["forward"])
    if isinstance(function, Refused):
        return
    parameters = {*inspect.signature(function).parameters}
    if "input_ids" not in parameters:
        return
    site, operator = f"{cls.__module__}.{cls.__name__}.forward", f"{cls.__name__}.forward"
    if forwards.table_of_ids(function) is not None:
        name_of_cache = next((name for name in forwards.NAMES_OF_CACHE if name in parameters), "")
        contract = contract_named(_contract_for(function, parameters, name_of_cache), name_of_cache or "cache")
        yield Candidate(site, operator, function, contract, TOKEN_IDS)
    elif forwards.module_asked_for_table(function) is not None:
        yield Candidate(site, operator, function, contract_named("entry:token_ids"), TOKEN_IDS)
    elif forwards.learns_next_tokens(function) and {"labels", "logits_to_keep", "kwargs"} <= parameters:
        yield Candidate(site, operator, function, contract_named("entry:causal_lm"), METADATA)
    elif (look_up := forwards.look_up_of_ids(function)) is not None:
        yield Candidate(site, operator, reason=f"it looks token ids up in another way ({look_up})")


def _contract_for(function: FunctionType, parameters: set[str], name_of_cache: str) -> str:
    """The contract for a forward that looks token ids up, by what else it takes."""
    if forwards.looks_positions_up(function) and name_of_cache:
        return "entry:learned_positions_of_cache" if "cache_position" in parameters else "entry:learned_positions"
    if {"attention_mask", "position_ids", name_of_cache, "kwargs"} <= parameters:
        return "entry:forward"
    return "entry:token_ids"
