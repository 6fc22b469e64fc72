"""Reading the values of tensors: whether they may be read here and now, and how nobody notices."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from llm_op_guard.guard.reading import NotApplicable, as_index, is_tensor, item


def part(x: Any, *index: Any) -> Any:
    """A part of a tensor, `x[:, :1]`, or an item of what holds tensors; raises NotApplicable where there is none."""
    if not is_tensor(x):
        if len(index) != 1:
            raise NotApplicable
        return item(x, as_index(index[0]))
    try:
        return _taken(x, index)
    except (IndexError, TypeError, ValueError, RuntimeError):  # no such part, or a layout that has no parts
        raise NotApplicable from None


def require_readable(x: Any) -> None:
    """Raise NotApplicable unless the values of `x` may be read here and now: they are there (`require_values`), and
    it is no CUDA tensor while the stream is captured into a graph.
    """
    require_values(x)
    if is_captured(x):
        raise NotApplicable


def require_values(x: Any) -> None:
    """Raise NotApplicable unless the values of `x` exist and may be asked for without disturbing anybody.

    That excludes meta, fake, functorch-wrapped, sparse, nested, quantised and subclassed tensors, those whose memory
    was freed, and anything while a program is traced or compiled.
    """
    global _has_values  # noqa: PLW0603 - made once torch is there; it is asked for every tensor whose values are read
    test = _has_values
    if test is None:
        test = _has_values = _values_test()
    if not test(x):
        raise NotApplicable


def is_captured(x: Any) -> bool:
    """Whether what is asked of a tensor now goes into a CUDA graph, to be done whenever that is replayed."""
    return x.is_cuda and _captures(sys.modules["torch"])


def is_capturing() -> bool:
    """Whether the current CUDA stream is captured: it cannot be waited for, and an error ends the capture."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and _captures(torch)


def _captures(torch: Any) -> bool:
    try:
        return torch.cuda.is_current_stream_capturing()  # type: ignore[no-any-return]
    except RuntimeError:  # the device is lost, and no graph comes of what was captured
        return False


@functools.cache
def plain_tensors() -> frozenset[type]:
    """The classes of tensors whose values are read: subclasses know alone what they hold."""
    import torch  # noqa: PLC0415 - who asks has a contract about the values of tensors, or watches modules

    return frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


_has_values: Callable[[Any], bool] | None = None


def _values_test() -> Callable[[Any], bool]:
    torch = sys.modules.get("torch")
    if torch is None:
        raise NotApplicable  # there are no tensors yet
    kinds, strided = plain_tensors(), torch.strided
    is_compiling, traces = torch.compiler.is_compiling, torch._C._get_tracing_state
    # Whoever watches or replaces operations (make_fx, fake tensors, counters) must not see ours.
    modes, is_wrapped = torch._C._len_torch_dispatch_stack, torch._C._functorch.is_functorch_wrapped_tensor

    def has_values(x: Any) -> bool:
        return (
            type(x) in kinds
            and not is_compiling()
            and traces() is None
            and not modes()
            and x.layout is strided
            and not (x.is_meta or x.is_nested or x.is_quantized)
            and not is_wrapped(x)
            # FSDP frees the memory of parameters and keeps their shapes: who reads those ends the process.
            and (x.untyped_storage().nbytes() > 0 or x.numel() == 0)
        )

    return has_values


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose operations on tensors no TorchFunctionMode sees or replaces."""
    is_watched: Callable[[], bool] | None = None

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal is_watched
        if is_watched is None:
            torch = sys.modules.get("torch")
            if torch is None:
                return function(*arguments, **keywords)
            is_watched = torch._C._is_torch_function_mode_enabled
        if not is_watched():
            return function(*arguments, **keywords)
        with sys.modules["torch"]._C.DisableTorchFunction():
            return function(*arguments, **keywords)

    return call


@unseen
def _taken(x: Any, index: tuple[Any, ...]) -> Any:
    require_readable(x)  # taking a part is an operation, too
    return x[tuple(map(_bounded, index))]


# Torch warns of bounds that have more than 64 bits; no tensor is as long.
_FARTHEST = 2**62


def _bounded(index: Any) -> Any:
    if not isinstance(index, slice):
        return index
    bounds = (index.start, index.stop, index.step)
    return slice(*(max(-_FARTHEST, min(b, _FARTHEST)) if type(b) is int else b for b in bounds))
