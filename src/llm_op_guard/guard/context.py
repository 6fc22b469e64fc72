"""What surrounds a call: who called, and what the tensor arguments look like. Never raises."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from llm_op_guard.contract.model import Contract, Declare
from llm_op_guard.contract.validate import declared_paths
from llm_op_guard.guard.reading import UNSET, is_a, is_tensor, optional_attribute, path_value
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


def call_site() -> CallSite | None:
    """The first frame outside this library and the framework's wrappers."""
    try:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_wrapper(frame):
            frame = frame.f_back
        return None if frame is None else _site(frame)
    except Exception:
        return None


def _is_wrapper(frame: FrameType) -> bool:
    if frame.f_code.co_filename.startswith("<llm-op-guard"):
        return True
    module = frame.f_globals.get("__name__", "")
    return isinstance(module, str) and any(module == name or module.startswith(f"{name}.") for name in _WRAPPERS)


def _site(frame: FrameType) -> CallSite:
    owner = frame.f_locals.get("self")
    layer = optional_attribute(owner, "layer_idx") if owner is not None else UNSET
    return CallSite(
        file=frame.f_code.co_filename,
        line=frame.f_lineno,
        function=frame.f_code.co_name,
        module_class=None if owner is None else type(owner).__name__,
        layer_idx=layer if isinstance(layer, int) else None,
    )


def tensor_metadata(contract: Contract, arguments: Mapping[str, Any]) -> tuple[TensorMetadata, ...]:
    """Shape, dtype and device of every tensor argument, of those inside containers, and of declared attributes."""
    found: dict[str, TensorMetadata] = {}
    for name, value in _tensors(contract, arguments):
        if name not in found and len(found) < _MOST_TENSORS:
            try:
                found[name] = TensorMetadata(
                    name, str(value.dtype).removeprefix("torch."), _sizes(value), str(value.device)
                )
            except Exception:
                found[name] = TensorMetadata(name, "unreadable", (), "unknown")
    return tuple(found.values())


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in value.shape)


def _tensors(contract: Contract, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in arguments.items():
        if is_tensor(value):
            yield name, value
        elif is_a(value, tuple | list):
            yield from ((f"{name}[{i}]", part) for i, part in enumerate(value[:_MOST_TENSORS]) if is_tensor(part))
        elif type(value) is dict:
            yield from ((f"{name}[{key!r}]", part) for key, part in value.items() if is_tensor(part))
    for clause in contract.clauses:
        if isinstance(clause.statement, Declare) and clause.statement.path.root in arguments:
            for path, _ in declared_paths(clause.statement.path, clause.statement.type):
                value = path_value(arguments[path.root], *path.steps)
                if path.steps and is_tensor(value):
                    yield str(path), value
