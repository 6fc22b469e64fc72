"""What surrounds a call: who called, and what the tensor arguments look like. Never raises."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

from llm_op_guard.contract.model import Contract, Declare, Remember
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.walk import declared_paths, numbers_declared
from llm_op_guard.guard.reading import (
    UNSET,
    is_a,
    is_beyond,
    is_foreign_number,
    is_tensor,
    number_now,
    optional_attribute,
    path_value,
)
from llm_op_guard.guard.reads import reads_of
from llm_op_guard.guard.violation import CallSite, TensorMetadata

# Frames of these modules stand between the caller and the operator and say nothing about either.
_WRAPPERS = (
    "llm_op_guard",
    "torch",
    "functools",
    "contextlib",
    "accelerate.hooks",
    "transformers.utils",
    "transformers.modeling_layers",
)
_MOST_TENSORS = 24
# What the wrappers in `install` are compiled as.
WRAPPER_LABEL = "around"
_WRAPPER_FILES = f"<llm-op-guard {WRAPPER_LABEL} "
# Their parameters that hold the arguments of a call unnamed.
_UNNAMED = "_llm_op_guard_"


def call_site() -> CallSite | None:
    """The first frame outside this library and the framework's wrappers."""
    try:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_wrapper(frame):
            frame = frame.f_back
        return None if frame is None else site_of(frame)
    except Exception:
        return None


def caller() -> tuple[CodeType, int] | None:
    """The code and line of the same frame: cheap, and it keeps nothing of the frame."""
    try:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_wrapper(frame):
            frame = frame.f_back
        return None if frame is None else (frame.f_code, frame.f_lineno)
    except Exception:
        return None


def _is_wrapper(frame: FrameType) -> bool:
    if frame.f_code.co_filename.startswith(("<llm-op-guard", "<eval_with_key>")):  # ours, and graphs of torch.fx
        return True
    module = frame.f_globals.get("__name__")
    if module is None:  # what AOTAutograd generates is named after a file of torch
        return frame.f_code.co_filename.startswith(tuple(getattr(sys.modules.get("torch"), "__path__", ())))
    return isinstance(module, str) and any(module == name or module.startswith(f"{name}.") for name in _WRAPPERS)


def site_of(frame: FrameType) -> CallSite:
    """Where a frame is, and the module whose method it runs."""
    owner = frame.f_locals.get("self")
    layer = optional_attribute(owner, "layer_idx") if owner is not None else UNSET
    return CallSite(
        file=frame.f_code.co_filename,
        line=frame.f_lineno,
        function=frame.f_code.co_name,
        module_class=None if owner is None else type(owner).__name__,
        layer_idx=layer if isinstance(layer, int) else None,
    )


def all_arguments(known: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the guarded call in the order of its signature, those too that its contract does not mention.

    `known` are those that the check was given; the others stand in the frame of the wrapper that called it.
    """
    try:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(_WRAPPER_FILES):
            frame = frame.f_back
        if frame is None:
            return dict(known)
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        names = [name for name in code.co_varnames[:count] if not name.startswith(_UNNAMED)]
        found = {name: frame.f_locals[name] for name in names if name in frame.f_locals}
        return {**found, **known}
    except Exception:
        return dict(known)


def tensor_metadata(contract: Contract, arguments: Mapping[str, Any]) -> tuple[TensorMetadata, ...]:
    """Shape, dtype and device of every tensor argument, of those inside containers, and of declared attributes."""
    found: dict[str, TensorMetadata] = {}
    try:
        for name, value in tensors_among(contract, arguments):
            if name not in found and len(found) < _MOST_TENSORS:
                found[name] = metadata_of(name, value)
    except Exception:  # an argument that does not even let itself be looked through
        return tuple(found.values())
    return tuple(found.values())


def tensor_named(name: str | None, contract: Contract, arguments: Mapping[str, Any]) -> Any:
    """The tensor that a violation calls so; None where there is none."""
    try:
        return next((tensor for found, tensor in tensors_among(contract, arguments) if found == name), None)
    except Exception:
        return None


def metadata_of(name: str, value: Any) -> TensorMetadata:
    """What a tensor looks like. Never raises."""
    try:
        shape = tuple(number_now(size) for size in value.shape)
        return TensorMetadata(name, str(value.dtype).removeprefix("torch."), shape, str(value.device))
    except Exception:
        return TensorMetadata(name, "unreadable", (), "unknown")


def tensors_among(contract: Contract, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every tensor among arguments, those too that stand in containers and at paths that the contract names."""
    named = [(str(path), path_value(arguments[path.root], *path.steps)) for path in _paths(contract, arguments)]
    seen = [value for _, value in named]
    for name, value in arguments.items():
        if is_tensor(value):
            yield name, value
        elif is_a(value, tuple | list | dict):
            # By position: a key may be anything, user text too. Those that the contract names come below.
            parts = list(value.values() if is_a(value, dict) else value)[:_MOST_TENSORS]
            for index, part in enumerate(parts):
                if is_tensor(part) and not any(part is other for other in seen):
                    yield (f"{name}[item {index}]" if is_a(value, dict) else f"{name}[{index}]"), part
    yield from ((name, value) for name, value in named if is_tensor(value))


def any_beyond(contract: Contract, arguments: Mapping[str, Any]) -> bool:
    """Whether anything that the rules look at is beyond what the language speaks of."""
    numbers = numbers_declared(contract)
    return any(
        is_beyond(value) or (name in numbers and is_foreign_number(value)) for name, value in arguments.items()
    ) or any(is_beyond(tensor) for _, tensor in tensors_among(contract, arguments))


def _paths(contract: Contract, arguments: Mapping[str, Any]) -> Iterator[Path]:
    """The paths of more than a name that a contract declares or reads."""
    for clause in contract.clauses:
        if isinstance(clause.statement, Declare):
            found = [path for path, _ in declared_paths(clause.statement.path, clause.statement.type)]
        elif isinstance(clause.statement, Remember):
            found = [clause.statement.path]
        else:
            found = [read.path for read in reads_of(clause.statement.expr.node, contract)]
        yield from (path for path in found if path.steps and path.root in arguments)
