"""The plain definitions of the value functions: what each of them means, before anything makes it fast.

Every function raises NotApplicable on a tensor whose values cannot be read here and now (`require_readable`).
"""

from __future__ import annotations

import math
from typing import Any

from llm_op_guard.guard.reading import NotApplicable, is_tensor


def require_readable(x: Any) -> None:
    """Raise NotApplicable unless the values of `x` exist and may be read without disturbing anybody.

    That excludes meta, fake, functorch-wrapped, sparse, nested, quantised and subclassed tensors, anything while a
    program is traced or compiled, and CUDA tensors while their stream is captured into a graph.
    """
    import torch  # noqa: PLC0415 - the user's torch; loaded by the time a tensor exists

    if not is_tensor(x) or type(x) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise NotApplicable
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        raise NotApplicable
    # Whoever watches or replaces operations (make_fx, fake tensors, counters) must not see ours.
    if torch._C._len_torch_dispatch_stack():
        raise NotApplicable
    if x.layout != torch.strided or x.device.type == "meta" or x.is_nested or x.is_quantized:
        raise NotApplicable
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise NotApplicable
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotApplicable


def finite(x: Any) -> bool:
    """No element is NaN or infinite; true for integers and for an empty tensor."""
    require_readable(x)
    return not _not_finite(x).any()


def within(x: Any, low: Any, high: Any, allow: Any = ()) -> bool:
    """Every element is at least `low` and below `high`, or is one of the sentinels in `allow`; true when empty."""
    require_readable(x)
    return not _outside(x, low, high, allow).any()


def lowest(x: Any) -> Any:
    """The smallest element; raises NotApplicable for an empty tensor."""
    return _extreme(x, "min")


def highest(x: Any) -> Any:
    """The largest element; raises NotApplicable for an empty tensor."""
    return _extreme(x, "max")


def absmax(x: Any) -> Any:
    """The largest magnitude; raises NotApplicable for an empty tensor."""
    return max(abs(_extreme(x, "min")), abs(_extreme(x, "max")))


def first(x: Any) -> Any:
    """The first element in row order; raises NotApplicable for an empty tensor."""
    return _element(x, 0)


def last(x: Any) -> Any:
    """The last element in row order; raises NotApplicable for an empty tensor."""
    return _element(x, -1)


def _element(x: Any, index: int) -> Any:
    require_readable(x)
    if x.numel() == 0:
        raise NotApplicable
    return x.detach().reshape(-1)[index].item()


def count(x: Any, value: Any) -> int:
    """How many elements equal the value."""
    require_readable(x)
    return int(_is_one_of(x, (value,)).sum())


def only(x: Any, *values: Any) -> bool:
    """Every element is one of the values; true when empty."""
    require_readable(x)
    return bool(_is_one_of(x, values).all())


def nondecreasing(x: Any) -> bool:
    """Along the last dimension no element is below the one before."""
    require_readable(x)
    if x.ndim == 0 or x.dtype.is_complex:
        raise NotApplicable
    y = _comparable(x)[0]
    return bool((y[..., 1:] >= y[..., :-1]).all())


def unique(x: Any) -> bool:
    """No element occurs twice."""
    require_readable(x)
    ordered = _comparable(x)[0].reshape(-1).sort().values
    return not (ordered[1:] == ordered[:-1]).any()


def all_true(x: Any) -> bool:
    """Every element is true; holds for an empty tensor."""
    require_readable(x)
    return bool((x.detach() != 0).all())


def any_per_row(x: Any) -> bool:
    """Along the last dimension some element is true."""
    require_readable(x)
    if x.ndim == 0:
        raise NotApplicable
    return bool((x.detach() != 0).any(dim=-1).all())


def live_rows(mask: Any) -> bool:
    """Every row of an attention mask keeps a key.

    In an additive mask a key is dropped at half the lowest number of its dtype or below: masks that were added up, or
    scaled, are dropped too.
    """
    import torch  # noqa: PLC0415

    require_readable(mask)
    if mask.ndim == 0:
        raise NotApplicable
    mask = mask.detach()
    kept = mask > torch.finfo(mask.dtype).min / 2 if mask.dtype.is_floating_point else mask != 0
    return bool(kept.any(dim=-1).all())


def equal(a: Any, b: Any, where: Any = None) -> bool:
    """Of one shape and equal in every element, or in those where a third tensor is true."""
    require_readable(a)
    require_readable(b)
    if a.shape != b.shape or a.device != b.device:
        return False
    same = a.detach() == b.detach()
    if where is not None:
        require_readable(where)
        if where.shape != a.shape or where.device != a.device:
            raise NotApplicable
        same |= where.detach() == 0
    return bool(same.all())


def negated(mask: Any) -> Any:
    """True where the mask is not."""
    require_readable(mask)
    return mask.detach() == 0


def consecutive(x: Any) -> Any:
    """What x would be if it counted up by one from its first element, along the last dimension."""
    import torch  # noqa: PLC0415

    require_readable(x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise NotApplicable
    return x.detach()[..., :1] + torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)


def positions_of(mask: Any) -> Any:
    """The position of each token that a padding mask keeps, counted from 0 in its row."""
    require_readable(mask)
    if mask.ndim == 0:
        raise NotApplicable
    return (mask.detach() != 0).long().cumsum(dim=-1) - 1


def taken(x: Any, index: Any) -> Any:
    """The rows of x that `index` picks along the first dimension, as a copy: of its shape and that of a row.

    Raises NotApplicable where x has no such row.
    """
    import torch  # noqa: PLC0415

    require_readable(x)
    require_readable(index)
    if x.ndim == 0 or index.dtype is torch.bool or index.dtype.is_floating_point or index.dtype.is_complex:
        raise NotApplicable
    rows = index.detach().to(x.device, torch.int64)
    if _outside(rows, 0, x.shape[0], ()).any():  # a device would not survive it
        raise NotApplicable
    return x.detach().index_select(0, rows.reshape(-1)).reshape(*rows.shape, *x.shape[1:])


def _is_one_of(x: Any, values: tuple[Any, ...]) -> Any:
    """Where an element is one of the values: outside the empty range, with the values for sentinels."""
    return ~_outside(x, 0, 0, values)


# What the language calls each of them, and what finds the offending element where there is one.
FUNCTIONS: dict[str, Any] = {
    "finite": finite,
    "within": within,
    "lowest": lowest,
    "highest": highest,
    "absmax": absmax,
    "first": first,
    "last": last,
    "count": count,
    "only": only,
    "nondecreasing": nondecreasing,
    "unique": unique,
    "all_true": all_true,
    "any_per_row": any_per_row,
    "live_rows": live_rows,
    "equal": equal,
    "negated": negated,
    "consecutive": consecutive,
    "positions_of": positions_of,
    "taken": taken,
}


def locate_not_finite(x: Any) -> tuple[tuple[int, ...], Any, int]:
    """The first element that is not finite: its index, its value, how many there are."""
    require_readable(x)
    return _first(x, _not_finite(x))


def locate_outside(x: Any, low: Any, high: Any, allow: Any = ()) -> tuple[tuple[int, ...], Any, int]:
    """The first element outside the range: its index, its value, how many there are."""
    require_readable(x)
    return _first(x, _outside(x, low, high, allow))


def _not_finite(x: Any) -> Any:
    import torch  # noqa: PLC0415

    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        return torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    return ~torch.isfinite(x.detach() if x.dtype.is_complex else _comparable(x)[0])


def _outside(x: Any, low: Any, high: Any, allow: Any) -> Any:
    """Where an element is neither in the range nor a sentinel, as numbers compare: no bound is cast to a dtype."""
    sentinels = allow if isinstance(allow, tuple) else (allow,)
    if x.dtype.is_complex or not all(isinstance(number, int | float) for number in (low, high, *sentinels)):
        raise NotApplicable
    y, offset, whole = _comparable(x)
    outside = ~(_at_least(y, low, offset, whole) & ~_at_least(y, high, offset, whole))  # so that NaN is outside
    if y.is_floating_point():
        outside |= y != y  # noqa: PLR0124 - NaN
    for sentinel in sentinels:
        if not whole:
            outside &= y != float(sentinel)
        elif sentinel == int(sentinel) and _fits_int64(int(sentinel) - offset):
            outside &= y != int(sentinel) - offset
    return outside


def _at_least(y: Any, bound: Any, offset: int, whole: bool) -> Any:
    if not whole:
        return y >= float(bound)
    if isinstance(bound, float) and not math.isfinite(bound):
        return (y != y) if bound > 0 else (y == y)  # noqa: PLR0124 - nowhere, everywhere
    smallest = math.ceil(bound) - offset
    if _fits_int64(smallest):
        return y >= smallest
    return (y != y) if smallest > 0 else (y == y)  # noqa: PLR0124 - nowhere, everywhere


def _fits_int64(value: int) -> bool:
    return -(2**63) <= value < 2**63


def _extreme(x: Any, which: str) -> Any:
    require_readable(x)
    if x.numel() == 0 or x.dtype.is_complex:
        raise NotApplicable
    y, offset, whole = _comparable(x)
    extreme = getattr(y, which)().item()
    return extreme + offset if whole else extreme


def _comparable(x: Any) -> tuple[Any, int, bool]:
    """The values as int64 (plus an offset to add) or as float64, both exact; and whether they are whole numbers."""
    import torch  # noqa: PLC0415

    x = x.detach()
    if x.dtype.is_floating_point:
        if x.dtype is getattr(torch, "float4_e2m1fn_x2", None):
            raise NotApplicable  # two values to a byte; torch cannot take them apart
        return x.to(torch.float64), 0, False
    if x.dtype is torch.uint64:
        return x.contiguous().view(torch.int64) ^ -(2**63), 2**63, True  # the same order, shifted
    return x.to(torch.int64), 0, True


def _first(x: Any, offending: Any) -> tuple[tuple[int, ...], Any, int]:
    flat = offending.reshape(-1)
    count = int(flat.sum().item())
    position = int(flat.to(dtype=_uint8()).argmax().item())
    index: list[int] = []
    rest = position
    for size in reversed(x.shape):
        index.append(rest % size)
        rest //= size
    place = tuple(reversed(index))
    return place, x.detach()[place].item(), count


def _uint8() -> Any:
    import torch  # noqa: PLC0415

    return torch.uint8


LOCATORS: dict[str, Any] = {"finite": locate_not_finite, "within": locate_outside}
