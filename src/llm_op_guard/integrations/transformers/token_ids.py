"""Token ids against the embedding table, where `generate` or a model's own forward is entered."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from llm_op_guard.contract.vocabulary import Function
from llm_op_guard.guard.reading import UNSET, NotApplicable, path_value
from llm_op_guard.install.installer import Candidate
from llm_op_guard.install.recognise import Refused, function_syntax, innermost
from llm_op_guard.integrations.transformers.known import TOKEN_IDS, Code, Family, contract_named, known

_GENERATE = Family(
    "token_ids:generate",
    {
        "354ac92aa72705d4": Code("GenerationMixin"),
        "2bf274a72db230ee": Code("GenerationMixin", versions=("4.57.6",)),
    },
    TOKEN_IDS,
)
FAMILIES = (_GENERATE,)

GENERATION_MODULE = "transformers.generation.utils"


def candidates(module: ModuleType) -> Iterator[Candidate]:
    """`generate`, or the forwards of a modeling file that look token ids up."""
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
    if isinstance(function, Refused) or "input_ids" not in inspect.signature(function).parameters:
        return
    site, operator = f"{cls.__module__}.{cls.__name__}.forward", f"{cls.__name__}.forward"
    if looks_up_token_ids(function):
        yield Candidate(site, operator, function, contract_named("token_ids:forward"), TOKEN_IDS)
    elif (look_up := _look_up_in(function)) is not None:
        yield Candidate(site, operator, reason=f"it looks token ids up in another way ({look_up})")


def looks_up_token_ids(function: FunctionType) -> bool:
    """Whether a forward does `self.embed_tokens(input_ids)` with the ids just as they came in.

    That is so when `input_ids` is never assigned to, in whole or in part, and no method that changes a tensor in
    place is called on it. Then an id outside the table fails, or reads foreign memory, for certain.
    """
    definition = function_syntax(function)
    if isinstance(definition, Refused):
        return False
    if _changes_ids(definition):
        return False
    looked_up = any(
        isinstance(node, ast.Call) and ast.unparse(node) == "self.embed_tokens(input_ids)"
        for node in ast.walk(definition)
    )
    return looked_up and {"self", "input_ids", "inputs_embeds"} <= {a.arg for a in definition.args.args}


def _changes_ids(definition: ast.AST) -> bool:
    """Whether a forward assigns to `input_ids`, in whole or in part, or calls what changes a tensor in place."""
    for node in ast.walk(definition):
        match node:
            case ast.Name(id="input_ids", ctx=ast.Store() | ast.Del()):
                return True
            case ast.Subscript(value=ast.Name(id="input_ids"), ctx=ast.Store() | ast.Del()):
                return True
            case ast.Attribute(value=ast.Name(id="input_ids"), attr=attr) if attr.endswith("_") or attr == "data":
                return True
    return False


def _look_up_in(function: FunctionType) -> str | None:
    """The look-up of token ids in a forward, as it is written: a call on `input_ids` and nothing else."""
    definition = function_syntax(function)
    if isinstance(definition, Refused):
        return None
    for node in ast.walk(definition):
        match node:
            case ast.Call(func=ast.Attribute() | ast.Call(), args=[ast.Name(id="input_ids")], keywords=[]):
                written = ast.unparse(node)
                if written.startswith("self."):
                    return written
    return None


def embedding_rows(model: Any) -> int:
    """The rows of the table in which a model's own forward looks token ids up.

    Raises NotApplicable where that is not known for certain: the model, and its decoder (`base_model_prefix`) where
    it has one, must hand the ids on as they are, to an embedding that takes them as they are.
    """
    if not _looks_up(_forward(model)):
        prefix = path_value(model, "base_model_prefix")
        inner = path_value(model, prefix) if isinstance(prefix, str) and prefix else UNSET
        if inner is UNSET or not _hands_on(_forward(model), prefix) or not _prepares_as_usual(model):
            raise NotApplicable
        if any(path_value(module, "_forward_pre_hooks") for module in (model, inner)):
            raise NotApplicable
        model = inner
        if not _looks_up(_forward(model)):
            raise NotApplicable
    table = path_value(model, "embed_tokens")
    if path_value(table, "_forward_pre_hooks") or not _takes_ids_as_they_are(_forward(table)):
        raise NotApplicable
    # The module's own count and the table's rows: either may be behind after a resize or a split over devices.
    count, rows = path_value(table, "num_embeddings"), path_value(table, "weight", "shape", (0,))
    if not isinstance(count, int) or not isinstance(rows, int):
        raise NotApplicable
    return max(count, rows)


def _forward(module: Any) -> FunctionType | None:
    """The innermost forward of a module's class; None where the instance has its own or there is none."""
    if path_value(module, "forward") is not UNSET:
        return None
    function = innermost(inspect.getattr_static(type(module), "forward", None))
    return None if isinstance(function, Refused) else function


@cache
def _looks_up(function: FunctionType | None) -> bool:
    return function is not None and looks_up_token_ids(function)


@cache
def _hands_on(function: FunctionType | None, prefix: str) -> bool:
    """Whether a forward does `self.<prefix>(input_ids=input_ids, …)` with the ids just as they came in."""
    definition = function_syntax(function) if function is not None else Refused("")
    if isinstance(definition, Refused) or _changes_ids(definition):
        return False
    wanted = f"self.{prefix}"
    return any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == wanted
        and any(k.arg == "input_ids" and ast.unparse(k.value) == "input_ids" for k in node.keywords)
        for node in ast.walk(definition)
    )


def _prepares_as_usual(model: Any) -> bool:
    """Whether `generate` hands ids to the model without a word of the model's own."""
    function = inspect.getattr_static(type(model), "prepare_inputs_for_generation", None)
    return getattr(function, "__module__", None) == "transformers.generation.utils"


@cache
def _takes_ids_as_they_are(function: FunctionType | None) -> bool:
    """Whether an embedding's forward is torch's own, or does nothing with ids but hand them to that."""
    if function is None:
        return False
    if function.__module__ == "torch.nn.modules.sparse" and function.__qualname__ == "Embedding.forward":
        return True
    definition = function_syntax(function)
    if isinstance(definition, Refused) or len(definition.args.args) != 2:
        return False
    ids = definition.args.args[1].arg
    uses = [node for node in ast.walk(definition) if isinstance(node, ast.Name) and node.id == ids]
    return len(uses) == 1 and f"super().forward({ids})" in ast.unparse(definition)


READERS = {
    Function(
        "embedding_rows",
        "A",
        (("model", "owner"),),
        "the rows of the table in which a Transformers model's own forward looks up token ids; does not apply to "
        "a model of which that is not known for certain",
    ): embedding_rows
}
