"""Tensors among arguments and results, and which of their elements are not finite. Runs nobody's code."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from llm_op_guard.guard.context import metadata_of
from llm_op_guard.guard.readable import plain_tensors, require_readable, unseen
from llm_op_guard.guard.reading import UNSET, NotApplicable, is_a, is_tensor, optional_attribute
from llm_op_guard.nonfinite.finding import Operand, Place
from llm_op_guard.values import plain
from llm_op_guard.values.extremes import extremes
from llm_op_guard.values.locate import first_true

# What a tensor holds that is not finite, as bits of one number.
FINITE, NAN, ABOVE, BELOW = 0, 1, 2, 4

_DEEPEST = 6
_MOST_ITEMS = 4096
_MOST_OPERANDS = 8
_UNREADABLE = (NotApplicable, RuntimeError, NotImplementedError, TypeError)
_MASK = re.compile(r"mask|bias|alibi", re.IGNORECASE)


# ---------------------------------------------------------------- found


def tensors_in(value: Any, label: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every tensor in a value, with the path to it: in tuples, lists, dicts, dataclasses and caches.

    Iterators are not consumed, and properties and methods not called.
    """
    if type(value) in plain_tensors():
        yield label, value
    elif is_tensor(value):
        return  # a subclass means by its values what it will
    elif depth < _DEEPEST:
        for step, part in _parts(value):
            yield from tensors_in(part, f"{label}{step}", depth + 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if is_a(value, dict):
        of_a_class = kind is not dict and hasattr(kind, "__dataclass_fields__")  # ModelOutput
        for number, (key, part) in enumerate(list(dict.items(value))[:_MOST_ITEMS]):
            # A key may be anything, text of users too.
            known = type(key) is str and key.isidentifier()
            yield (f".{key}" if of_a_class else f"[{key!r}]") if known else f"[item {number}]", part
    elif is_a(value, tuple) or is_a(value, list):
        base = tuple if is_a(value, tuple) else list
        fields = getattr(kind, "_fields", None) if base is tuple else None
        for number, part in enumerate(base.__iter__(value)):
            if number == _MOST_ITEMS:
                break
            yield f".{fields[number]}" if fields else f"[{number}]", part
    elif isinstance(getattr(kind, "__dataclass_fields__", None), dict) or _is_cache(kind):
        own = vars(value) if is_a(getattr(value, "__dict__", None), dict) else {}
        fields = getattr(kind, "__dataclass_fields__", own)
        for name in fields:
            if (part := optional_attribute(value, name)) is not UNSET:
                yield f".{name}", part


def _is_cache(kind: type) -> bool:
    """Whether it keeps keys and values between calls: those of Transformers, and what is named so."""
    return "Cache" in kind.__name__ or (kind.__module__ == "transformers.cache_utils" and "Layer" in kind.__name__)


def arguments_of(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors that a module is called with, each by the name of the parameter that takes it."""
    names: list[str] | None = None
    for number, value in enumerate(args):
        if value is None or is_a(value, int | float | str):
            continue
        if names is None:
            names = _positional(module)
        yield from tensors_in(value, names[number] if number < len(names) else f"input[{number}]")
    for name, value in kwargs.items():
        yield from tensors_in(value, name)


def _positional(module: Any) -> list[str]:
    """Of `forward`, read from its code and not from `inspect.signature`, which is slow and asks the function."""
    try:
        function = inspect.unwrap(type(module).forward)
        code = function.__code__
        return list(code.co_varnames[1 : code.co_argcount])
    except Exception:  # a forward that is no function of Python
        return []


# ---------------------------------------------------------------- judged


@unseen
def kinds(x: Any) -> int | None:
    """What a tensor holds that is not finite; None for one whose values cannot be read here and now."""
    try:
        y = _values(x)
        if y is None:
            return FINITE
        low, high = extremes(y)
    except _UNREADABLE:
        return None
    if math.isnan(low) or math.isnan(high):
        return NAN
    return (ABOVE if high == math.inf else FINITE) | (BELOW if low == -math.inf else FINITE)


def _values(x: Any) -> Any:
    """The values, complex ones as pairs; None where none of them can be non-finite."""
    require_readable(x)
    if not (x.dtype.is_floating_point or x.dtype.is_complex) or x.numel() == 0:
        return None
    import torch  # noqa: PLC0415

    x = x.detach()
    return torch.view_as_real(x.resolve_conj()) if x.dtype.is_complex else x


def _numbers(x: Any) -> Any:
    """As `_values`, in a dtype that torch compares."""
    y = _values(x)
    return y.float() if y is not None and y.dtype.itemsize == 1 else y


@unseen
def place(x: Any, tensor: str, *, below_allowed: bool = False) -> Place | None:
    """Where a tensor is not finite; None where it is.

    With `below_allowed`, -inf counts only where nothing else does.
    """
    try:
        y = _numbers(x)
        if y is None:
            return None
        import torch  # noqa: PLC0415

        wrong = plain.not_finite(x)
        if below_allowed and not x.dtype.is_complex:
            graver = wrong & (y != -math.inf)
            wrong = graver if graver.any() else wrong
        if (index := first_true(wrong)) is None:
            return None
        return Place(
            tensor,
            index,
            x.detach()[index].item(),
            int(wrong.sum()),
            x.numel(),
            str(x.dtype).removeprefix("torch."),
            tuple(x.shape),
            str(x.device),
            _largest(y),
            torch.finfo(x.dtype).max,
        )
    except _UNREADABLE:
        return None


def _largest(y: Any) -> float | None:
    """The largest finite magnitude."""
    finite = y[y.isfinite()]
    return None if finite.numel() == 0 else float(finite.abs().max().item())


@unseen
def is_mask(x: Any, *names: str) -> bool:
    """Whether -inf in a tensor masks: a name says so (the last part of it), or it holds nothing else but zeros."""
    if any(_MASK.search(name.rpartition(".")[2]) for name in names):
        return True
    try:
        y = _numbers(x)
        return y is not None and bool((y == 0).any()) and bool(((y == 0) | (y == -math.inf)).all())
    except _UNREADABLE:
        return False


@unseen
def operands(found: list[tuple[str, Any]]) -> tuple[Operand, ...]:
    """The tensors that went in, as a diagnosis shows them."""
    shown = []
    for name, x in found[:_MOST_OPERANDS]:
        largest, below = None, False
        try:
            if (y := _numbers(x)) is not None:
                largest, below = _largest(y), bool((y == -math.inf).any())
        except _UNREADABLE:
            pass
        shown.append(Operand(name, str(metadata_of(name, x)), largest, below))
    return tuple(shown)


@unseen
def dead_row(found: list[tuple[str, Any]]) -> str | None:
    """Of the additive masks that went in, a row that keeps no key; None where all do."""
    for name, x in found:
        try:
            if kinds(x) == BELOW and (index := first_true((x.detach() == -math.inf).all(dim=-1))) is not None:
                row = f"row {list(index)} of {name}" if index else name
                return f"{row} is -inf throughout: a softmax over it is NaN"
        except (*_UNREADABLE, IndexError):
            continue
    return None
