"""The extension module: whether it can be used, and what it needs of PyTorch and of Python."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import GetSetDescriptorType, ModuleType
from typing import Any

from llm_op_guard.native import sources
from llm_op_guard.native.program import Op, Program, Refused
from llm_op_guard.policy import native_wanted

# Reads one attribute without running anybody's code: (owner, name) -> value, or a mark that there is none.
AttributeReader = Callable[[Any, str], Any]

TABLE = "__dlpack_c_exchange_api__"

# Called when the extension is wanted before PyTorch is there, and when it has been connected.
when_awaited: list[Callable[[], None]] = []
when_connected: list[Callable[[], None]] = []

_lock = threading.RLock()
_state: ModuleType | Refused | None = None
_dynamo_passes = False
# What somebody saw come to its end, before the import system says so.
_seen_loaded: set[str] = set()


def usable(attribute: AttributeReader, unset: object) -> ModuleType | Refused:
    """The extension, connected to the PyTorch that is loaded, or why there is none.

    `attribute` and `unset` are for attributes that are neither in the dict of an object nor in the tables of
    `nn.Module`. Asked again once PyTorch is loaded; every other answer stays.
    """
    global _state  # noqa: PLW0603 - one extension in a process
    if _state is not None:
        return _state
    with _lock:
        found = _found()
        if isinstance(found, ModuleType):
            if not is_loaded("torch"):
                for callback in when_awaited:
                    callback()
                return Refused("PyTorch is not loaded")
            found = _connected(found, attribute, unset)
        _state = found
    if isinstance(found, ModuleType):
        for callback in when_connected:
            callback()
    return found


def is_loaded(name: str) -> bool:
    """Whether a module has been imported, to its end."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return name in _seen_loaded or (module is not None and not getattr(spec, "_initializing", False))


def note_loaded(name: str) -> None:
    """Say that a module has been imported to its end."""
    _seen_loaded.add(name)


def _found() -> ModuleType | Refused:
    if not native_wanted():
        return Refused("LLM_OP_GUARD_NATIVE=0")
    try:
        extension = importlib.import_module("llm_op_guard.native._check")
    except ImportError as error:
        return Refused(f"the extension is not built here ({error})")
    here = sources.digest()
    built_of_others = here and getattr(extension, "SOURCES", None) not in ("", here)
    if built_of_others or tuple(op.name for op in Op) != extension.OPERATIONS:
        return Refused("the extension is of another version of llm-op-guard: install it anew")
    return extension


def _connected(extension: ModuleType, attribute: AttributeReader, unset: object) -> ModuleType | Refused:
    torch = sys.modules["torch"]
    # What builds documentation puts mocks in its place.
    version = getattr(torch, "__version__", "of no version")
    table = getattr(getattr(torch, "Tensor", None), TABLE, None)
    if table is None:
        return Refused(f"PyTorch {version} has no table of functions for DLPack (torch.Tensor.{TABLE})")
    try:
        extension.connect(torch.Tensor, torch.nn.Parameter, torch.Size, table, attribute, unset, _reads_plainly)
    except (TypeError, ValueError) as error:
        return Refused(f"PyTorch {version}: {error}")
    return extension


def let_dynamo_pass() -> None:
    """Tell Dynamo, which is loaded, that a program accepts nothing: the Python check is traced instead."""
    global _dynamo_passes  # noqa: PLW0603 - Dynamo keeps what it is told for good
    with _lock:
        if not _dynamo_passes and isinstance(_state, ModuleType):
            traced_as = sys.modules["torch"].compiler.substitute_in_graph(_state.accepts, skip_signature_check=True)
            traced_as(_accepts_nothing)
            _dynamo_passes = True


def _accepts_nothing(*_: Any) -> bool:
    return False


def _reads_plainly(cls: type) -> bool:
    """Whether a class's objects are of that class for everybody, with attributes in a dict that nothing hides."""
    for base in cls.__mro__:
        own = vars(base)
        if base is not object and ("__getattribute__" in own or "__class__" in own):
            return False
        if "__dict__" in own and not isinstance(own["__dict__"], GetSetDescriptorType):
            return False
    return True


def made(extension: ModuleType, program: Program) -> Any:
    """A program that `extension.accepts` runs. Each has a memory of its own of what it could not tell."""
    return extension.Program(
        program.instructions.tobytes(),
        program.constants,
        program.names,
        program.arguments,
        program.values,
        program.tensors,
    )
