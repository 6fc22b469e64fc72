"""The extension module: whether it can be used, and what it needs of PyTorch and of Python."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import GetSetDescriptorType, ModuleType
from typing import Any

from llm_op_guard.native.program import Op, Program, Refused
from llm_op_guard.policy import native_wanted

# Reads one attribute without running anybody's code: (owner, name) -> value, or a mark that there is none.
AttributeReader = Callable[[Any, str], Any]

TABLE = "__dlpack_c_exchange_api__"

# Called when the extension has been connected: whoever learns of later imports lets Dynamo pass then.
when_connected: list[Callable[[], None]] = []

_lock = threading.RLock()
_state: ModuleType | Refused | None = None
_dynamo_passes = False


def usable(attribute: AttributeReader, unset: object) -> ModuleType | Refused:
    """The extension, connected to the PyTorch that is loaded, or why there is none.

    `attribute` and `unset` are for attributes that are neither in the dict of an object nor in the tables of
    `nn.Module`. Asked again once PyTorch is loaded; every other answer stays.
    """
    global _state  # noqa: PLW0603 - one extension in a process
    if _state is None:
        with _lock:
            found = _connected(attribute, unset)
            if isinstance(found, Refused) and _torch() is None:
                return found
            _state = found
    return _state


def _torch() -> Any:
    """PyTorch, or None: while it is imported, what is needed of it may still be missing."""
    torch: Any = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") and hasattr(torch, "nn") and hasattr(torch.nn, "Parameter") else None


def _connected(attribute: AttributeReader, unset: object) -> ModuleType | Refused:
    if not native_wanted():
        return Refused("LLM_OP_GUARD_NATIVE=0")
    try:
        extension = importlib.import_module("llm_op_guard.native._check")
    except ImportError as error:
        return Refused(f"the extension is not built here ({error})")
    if tuple(op.name for op in Op) != extension.OPERATIONS:
        return Refused("the extension is of another version of llm-op-guard: install it anew")
    torch = _torch()
    if torch is None:
        return Refused("PyTorch is not loaded")
    table = getattr(torch.Tensor, TABLE, None)
    if table is None:
        return Refused(f"PyTorch {torch.__version__} has no table of functions for DLPack (torch.Tensor.{TABLE})")
    try:
        extension.connect(torch.Tensor, torch.nn.Parameter, torch.Size, table, attribute, unset, _reads_plainly)
    except ValueError as error:
        return Refused(f"PyTorch {torch.__version__}: {error}")
    for callback in when_connected:
        callback()
    return extension


def let_dynamo_pass() -> None:
    """Tell Dynamo, where it is loaded, that a program which is traced accepts nothing: the Python check is traced."""
    extension = sys.modules.get("llm_op_guard.native._check")
    if extension is not None and "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.substitute_in_graph(extension.accepts, skip_signature_check=True)(
            _accepts_nothing
        )


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
