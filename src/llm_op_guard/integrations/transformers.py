"""Transformers: which functions are operators, which code of theirs is known, and which contract holds for it.

Nothing here imports Transformers: modules are looked at when the user's program has loaded them.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import FunctionType, ModuleType
from typing import Any

from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.parse import parse_stubs
from llm_op_guard.contract.vocabulary import Function, declare
from llm_op_guard.guard import functions
from llm_op_guard.guard.reading import UNSET, NotApplicable, path_value
from llm_op_guard.install.installer import Candidate
from llm_op_guard.install.recognise import Fingerprint, Refused, fingerprint, function_syntax, innermost
from llm_op_guard.integrations import caches
from llm_op_guard.policy import Action, Policy, Setting

LIBRARY = "transformers"

# Shipped contracts check metadata; their value rules wait for the user's policy.
METADATA = Policy(A=Setting(Action.RAISE), B=Setting(Action.OFF))
# But for token ids at the entry: the commonest crash of all, and small.
TOKEN_IDS = Policy(A=Setting(Action.RAISE), B=Setting(Action.RAISE))


@dataclass(frozen=True)
class Family:
    """A group of functions that compute the same: their contract, and the fingerprints of the code that was read.

    `versions` are the Transformers versions whose code these fingerprints were taken from.
    """

    contract: str
    fingerprints: frozenset[str]
    defaults: Policy = METADATA
    versions: tuple[str, ...] = ("5.24.0",)


FAMILIES: dict[str, Family] = {
    "apply_rotary_pos_emb": Family(
        "rope:apply_rotary_pos_emb",
        frozenset(
            {
                "449ca673353426d7",  # llama and 118 others: in the dtype of q and cos
                "fbdc58d8a41e613f",  # olmo: the result in q's dtype
                "3ae6ee8735c53311",  # esm, modernbert: computed in float32
            }
        ),
    ),
    "rms_norm": Family(
        "norm:rms_norm",
        frozenset(
            {
                "580bd6ee67df25ac",  # llama and 141 others: weight times the rounded norm
                "23036fa880041935",  # afmoe, gpt_oss: rounded after the weight
            }
        ),
    ),
    "eager_attention_forward": Family("attention:eager_attention_forward", frozenset({"dabc28315e4a558d"})),
    "sdpa_attention_forward": Family("attention:sdpa_attention_forward", frozenset({"9b0498c56248740b"})),
    "generate": Family("token_ids:generate", frozenset({"354ac92aa72705d4"}), TOKEN_IDS),
}


def contract_named(name: str) -> Contract:
    """A shipped contract by `file:name`, for example `rope:apply_rotary_pos_emb`."""
    file, _, operator = name.partition(":")
    return _contracts(file)[operator]


@cache
def _contracts(file: str) -> dict[str, Contract]:
    path = resources.files("llm_op_guard") / "contracts" / LIBRARY / f"{file}.contract"
    return parse_stubs(path.read_text(encoding="utf-8"), f"{LIBRARY}/{file}.contract")


class TransformersIntegration:
    """The operators of Transformers' modeling files, of its attention integrations and of `generate`."""

    library = LIBRARY

    def wants(self, module: str) -> bool:
        """Whether a module of that name holds operators."""
        return module in _SINGLE_SITES or (module.startswith("transformers.models.") and ".modeling_" in module)

    def candidates(self, module: ModuleType) -> Iterator[Candidate]:
        """The operators that a module defines, recognised or refused."""
        name = module.__name__
        if name in _SINGLE_SITES:
            yield from _single_site(module, *_SINGLE_SITES[name])
            return
        for function_name in ("apply_rotary_pos_emb", "eager_attention_forward"):
            found = module.__dict__.get(function_name)
            # Imported from another modeling file: guarded, or refused, there.
            if found is not None and getattr(found, "__module__", name) == name:
                yield _known(f"{name}.{function_name}", function_name, found, function_name)
        for cls in list(module.__dict__.values()):
            if inspect.isclass(cls) and cls.__module__ == name and "forward" in cls.__dict__:
                yield from _class_sites(cls)


# Functions that stand alone: module → (owner class or None, function, family).
_SINGLE_SITES: dict[str, tuple[str | None, str, str]] = {
    "transformers.integrations.sdpa_attention": (None, "sdpa_attention_forward", "sdpa_attention_forward"),
    "transformers.generation.utils": ("GenerationMixin", "generate", "generate"),
}


def _single_site(module: ModuleType, owner: str | None, function: str, family: str) -> Iterator[Candidate]:
    holder: Any = module if owner is None else module.__dict__.get(owner)
    found = None if holder is None else holder.__dict__.get(function)
    operator = function if owner is None else f"{owner}.{function}"
    site = f"{module.__name__}.{operator}"
    if found is None:
        yield Candidate(site, operator, reason="this version of Transformers has no such function")
    else:
        yield _known(site, operator, found, family)


def _class_sites(cls: type) -> Iterator[Candidate]:
    site, operator = f"{cls.__module__}.{cls.__name__}.forward", f"{cls.__name__}.forward"
    forward = cls.__dict__["forward"]
    if "RMSNorm" in cls.__name__:
        yield _known(site, operator, forward, "rms_norm")
        return
    function = innermost(forward)
    if isinstance(function, Refused) or "input_ids" not in inspect.signature(function).parameters:
        return
    if looks_up_token_ids(function):
        yield Candidate(site, operator, function, contract_named("token_ids:forward"), TOKEN_IDS)
    elif (look_up := _look_up_in(function)) is not None:
        yield Candidate(site, operator, reason=f"it looks token ids up in another way ({look_up})")


def _known(site: str, operator: str, found: object, family: str) -> Candidate:
    """A candidate whose code must be one that was read."""
    function = innermost(found)
    if isinstance(function, Refused):
        return Candidate(site, operator, reason=function.reason)
    code = fingerprint(function)
    if isinstance(code, Refused):
        return Candidate(site, operator, reason=code.reason)
    known = FAMILIES[family]
    if code.digest not in known.fingerprints:
        return Candidate(site, operator, reason=_unknown(code))
    return Candidate(site, operator, function, contract_named(known.contract), known.defaults)


def _unknown(code: Fingerprint) -> str:
    return f"its code is not one that a contract was written for (fingerprint {code.digest})"


# ---------------------------------------------------------------- token ids


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


def register() -> None:
    """Give the language the readers that know Transformers."""
    rows = Function(
        "embedding_rows",
        "A",
        (("model", "owner"),),
        "the rows of the table in which a Transformers model's own forward looks up token ids; does not apply to "
        "a model of which that is not known for certain",
    )
    for function, implementation in {rows: embedding_rows, **caches.READERS}.items():
        declare(function)
        functions.register(function.name, implementation)
