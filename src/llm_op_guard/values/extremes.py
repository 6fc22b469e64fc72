"""The smallest and the largest element of a tensor, in one read and without a copy of it.

`torch.aminmax` comes near the speed of memory where it takes a dtype and a layout; what it refuses, or would copy, is
brought to it in pieces.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from llm_op_guard.guard import fast
from llm_op_guard.guard.reading import NotApplicable, is_tensor
from llm_op_guard.values.pieces import gathered, pieces


class _Later:
    """Torch, once somebody has tensors: guards import none."""

    def __getattr__(self, name: str) -> Any:
        global _torch  # noqa: PLW0603 - import statements in functions take as long as a small tensor
        import torch  # noqa: PLC0415

        _torch = torch
        return getattr(torch, name)


_torch: Any = _Later()

# The extremes of tensors that were read during one check: by identity, with the tensor, so that it keeps its identity.
Reads = dict[int, tuple[Any, Any, Any]]


def extremes(x: Any, reads: Reads | None = None) -> tuple[Any, Any]:
    """(lowest, highest) of a readable tensor with elements, as Python numbers; both NaN where an element is.

    Raises NotApplicable for complex numbers and for what is packed, which have no order or no single elements.
    """
    if reads is not None and (known := reads.get(id(x))) is not None:
        return known[1], known[2]
    y = x.detach() if x.requires_grad else x
    reader = _readers().get(x.dtype)
    if reader is None:
        raise NotApplicable
    if y.is_contiguous() or (y := gathered(y)).is_contiguous():
        low, high = reader(y)
    else:
        low, high = _joined(reader(piece.part) for piece in pieces(y))
    if reads is not None:
        reads[id(x)] = (x, low, high)
    return low, high


def at_once(x: Any, reads: Reads | None = None) -> tuple[Any, Any] | None:
    """What `extremes` gives, of a small tensor that native code can read: it is readable, and nobody is disturbed.

    None for every other, while operations are traced or replaced, and where there is no native code.
    """
    if not is_tensor(x) or x.is_neg() or _torch._C._len_torch_dispatch_stack() or _torch._C._get_tracing_state():
        return None
    if reads is not None and (known := reads.get(id(x))) is not None:
        return known[1], known[2]
    found: tuple[Any, Any] | None = _native(x)
    if found is not None and reads is not None:
        reads[id(x)] = (x, *found)
    return found


def _first_native(x: Any) -> Any:
    global _native  # noqa: PLW0603 - chosen once there is a tensor to read
    _native = fast.usable().extremes if fast.is_usable() else _nothing
    return _native(x)


def _nothing(_: Any) -> None:
    return None


_native: Callable[[Any], Any] = _first_native


def _plainly(x: Any) -> tuple[Any, Any]:
    if x.numel() == 1:  # one token, of a decode step
        low = x.item()
        return low, low
    low, high = _torch.aminmax(x)
    return low.item(), high.item()


def _as_bytes(x: Any) -> tuple[Any, Any]:
    """Of bool, whose elements are bytes: 0, and 1 or (in a view of bytes) any other that stands for true."""
    low, high = _plainly(x.view(_torch.uint8))
    return min(low, 1), min(high, 1)


def _widened(dtype: str, x: Any) -> tuple[Any, Any]:
    """Of a dtype that aminmax does not take, in one that holds all its numbers."""
    wider = getattr(_torch, dtype)
    return _joined(_plainly(piece.part.to(wider)) for piece in pieces(x))


def _of_uint64(x: Any) -> tuple[Any, Any]:
    signed = x.view(_torch.int64)
    low, high = _joined(_plainly(piece.part ^ -(2**63)) for piece in pieces(signed))
    return low + 2**63, high + 2**63


def _of_float8(x: Any) -> tuple[Any, Any]:
    """By their bytes: from 0 to 127 the numbers rise, from 128 to 255 they fall from (minus) zero.

    NaN is the last byte of either half; in the dtypes without a minus zero, it stands in the place of that.
    """
    number = _number_of_byte(x.dtype)
    low = high = None
    # In pieces, so that the second look at each finds it in the cache.
    for piece in pieces(x.view(_torch.uint8), most=1 << 18):
        ends = [*_plainly(piece.part.view(_torch.int8)), *_plainly(piece.part)]
        found = [number[byte % 256] for byte in ends]
        if any(map(math.isnan, found)):
            return float("nan"), float("nan")
        low = min(found) if low is None else min(low, *found)
        high = max(found) if high is None else max(high, *found)
    return low, high


@functools.cache
def _number_of_byte(dtype: Any) -> list[float]:
    return _torch.arange(256).to(_torch.uint8).view(dtype).double().tolist()  # type: ignore[no-any-return]


def _joined(found: Iterator[tuple[Any, Any]]) -> tuple[Any, Any]:
    low, high = next(found)
    for lower, higher in found:
        if math.isnan(lower):
            return lower, higher
        low, high = min(low, lower), max(high, higher)
    return low, high


@functools.cache
def _readers() -> dict[Any, Any]:
    """By dtype, what reads a contiguous tensor, or a piece of one."""
    readers: dict[Any, Any] = {
        getattr(_torch, name): _plainly
        for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
    }
    readers[_torch.bool] = _as_bytes
    readers[_torch.uint16] = functools.partial(_widened, "int32")
    readers[_torch.uint32] = functools.partial(_widened, "int64")
    readers[_torch.uint64] = _of_uint64
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"):
        readers[getattr(_torch, name)] = _of_float8
    if hasattr(_torch, "float8_e8m0fnu"):
        readers[_torch.float8_e8m0fnu] = functools.partial(_widened, "float32")  # has no minus
    return readers
