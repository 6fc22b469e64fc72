"""What two values differ in: copies of their parts, to be compared after both calls.

Nothing of the classes of a user runs: of an object its `__dict__` and its slots are read, of containers what they hold.
What else an object consists of is not known; two of one class are the same there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, Literal

from llm_op_guard.frozen import frozen
from llm_op_guard.guard.reading import is_a, is_beyond, is_tensor

# Of a value so many parts are looked at, and so deep.
_MOST_PARTS = 20_000
_DEEPEST = 40
_NUMBERS = (bool, int, float, complex)

# Of values of one form only numbers, texts and the like differ: they may do so each time.
What = Literal["form", "value"]


@frozen
class Part:
    """A piece of a value, `['scores'][0]`: a container has its length or its keys here, its items are further parts."""

    place: str
    kind: str
    value: Any = None


@frozen
class Difference:
    """One part that differs, in its form or in its value alone; `off` is how far, where `text` is empty."""

    place: str
    what: What
    text: str = ""
    off: float = 0.0


def parts_of(value: Any) -> list[Part]:
    """The parts of a value as they are now: what becomes of it later does not change them."""
    found: list[Part] = []
    for part in _parts("", value, ()):
        found.append(part)
        if len(found) == _MOST_PARTS:
            break
    return found


def differences(right: list[Part], found: list[Part]) -> list[Difference]:
    """Where the parts of two values differ; behind a part of another form, nothing is compared any more."""
    told: list[Difference] = []
    for one, other in zip(right, found, strict=False):
        if one.place != other.place:  # one of them goes deeper than is looked
            break
        difference = _difference(one, other)
        if difference is not None:
            told.append(difference)
            if difference.what == "form":
                break
    return told


def said(told: Sequence[Difference]) -> str:
    """The differences in one line: the first that is no number, or how far off the numbers are."""
    for difference in told:
        if difference.text:
            return f"{difference.text} in {difference.place}" if difference.place else difference.text
    return f"off by {max(difference.off for difference in told):.2g}"


# ---------------------------------------------------------------- parts


def _parts(place: str, value: Any, within: tuple[int, ...]) -> Iterator[Part]:
    kind = type(value).__name__
    if is_tensor(value):
        yield Part(place, "Tensor", None if is_beyond(value) else value.detach().clone())
        return
    if _is_array(value):
        yield Part(place, kind, value.copy() if value.dtype.kind in "biufc" else (value.shape, value.tobytes()))
        return
    if type(value) in (*_NUMBERS, str, bytes, type(None), range) or is_a(value, type) or _is_of_torch(value):
        yield Part(place, kind, value)
        return
    if id(value) in within or len(within) == _DEEPEST or isinstance(value, FunctionType):
        yield Part(place, kind)
        return
    within = (*within, id(value))
    if isinstance(value, dict):
        yield from _of_a_dict(place, kind, value, within)
    elif isinstance(value, tuple | list):
        items = list(tuple.__iter__(value) if isinstance(value, tuple) else list.__iter__(value))
        yield Part(place, kind, len(items))
        for index, item in enumerate(items):
            yield from _parts(f"{place}[{index}]", item, within)
    elif isinstance(value, set | frozenset):
        members = set.__iter__(value) if isinstance(value, set) else frozenset.__iter__(value)
        yield Part(place, kind, tuple(sorted(_key(member) for member in members)))
    else:
        yield Part(place, kind)
    held = _attributes(value)
    for name in sorted(held):
        yield from _parts(f"{place}.{name}", held[name], within)


def _of_a_dict(place: str, kind: str, value: dict[Any, Any], within: tuple[int, ...]) -> Iterator[Part]:
    items = sorted(((_key(key), part) for key, part in dict.items(value)), key=lambda item: item[0])
    yield Part(place, kind, tuple(key for key, _ in items))
    for key, part in items:
        yield from _parts(f"{place}[{key}]", part, within)


def _key(key: Any) -> str:
    """A key as a text; of a class of the user its name alone."""
    if isinstance(key, tuple) and type(key) is tuple:
        return f"({', '.join(map(_key, key))})"
    plain = type(key) in (*_NUMBERS, str, bytes, type(None)) or _is_of_torch(key)
    return repr(key) if plain else type(key).__name__


def _attributes(value: Any) -> dict[str, Any]:
    """The `__dict__` and the slots of an object, read without its code."""
    held: dict[str, Any] = {}
    known: set[str] = set()
    for cls in type(value).__mro__:
        for name, descriptor in vars(cls).items():
            if name in known:
                continue
            known.add(name)
            if name == "__dict__" and isinstance(descriptor, GetSetDescriptorType):
                held |= {key: part for key, part in descriptor.__get__(value).items() if isinstance(key, str)}
            elif isinstance(descriptor, MemberDescriptorType) and not name.startswith("__"):
                try:
                    held[name] = descriptor.__get__(value)
                except AttributeError:  # a slot that was never set
                    continue
    return held


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value).__module__ == "numpy" and is_a(value, (numpy.ndarray, numpy.generic))


def _is_of_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and is_a(value, (torch.dtype, torch.device))


# ---------------------------------------------------------------- comparison


def _difference(one: Part, other: Part) -> Difference | None:
    place = one.place
    if one.kind != other.kind:
        # A truth is a number, and so on: what is told is what a reader of types would see.
        return Difference(place, "form", f"{_a(other.kind)} instead of {_a(one.kind)}")
    a, b = one.value, other.value
    if is_tensor(a) and is_tensor(b):
        return _of_tensors(place, a, b)
    if _is_array(a) and _is_array(b):
        return _of_arrays(place, a, b)
    if type(a) is not type(b) or a is None:
        return None
    match one.kind:
        case "list" | "tuple":
            return None if a == b else Difference(place, "form", _lengths(place, a, b))
        case "int" | "float" | "complex":
            return _of_numbers(place, a, b)
        case "str":
            return None if a == b else Difference(place, "value", "another text")
        case "bytes":
            return None if a == b else Difference(place, "value", "other bytes")
        case "set" | "frozenset":
            return None if a == b else Difference(place, "value", "other members")
    if a is b or (not isinstance(a, type) and a == b):  # keys, truths, dtypes: none of them is of a class of the user
        return None
    if isinstance(a, int) and not isinstance(a, bool):  # a list or tuple of a class of its own
        return Difference(place, "form", _lengths(place, a, b))
    if isinstance(a, tuple):
        is_bytes = len(a) == 2 and isinstance(a[1], bytes)
        return Difference(place, "form", "another array" if is_bytes else "other keys")
    return Difference(place, "value", f"{_named(b)} instead of {_named(a)}")


def _lengths(place: str, one: int, other: int) -> str:
    return f"{other} {'items' if place else 'results'} instead of {one}"


def _named(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


def _a(kind: str) -> str:
    return f"{'an' if kind[:1] in 'aeio' else 'a'} {kind}"


def _of_tensors(place: str, one: Any, other: Any) -> Difference | None:
    import torch  # noqa: PLC0415

    for a, b, says in (
        (list(one.shape), list(other.shape), "a result of"),
        (one.device, other.device, "a result on"),
        (one.dtype, other.dtype, "a result in"),
        (one.layout, other.layout, "a result laid out as"),
    ):
        if a != b:
            return Difference(place, "form", f"{says} {b} instead of {a}")
    if one.device.type == "meta" or not one.numel():
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        a, b = ((part if part.layout == torch.strided else part.to_dense()).to(wide) for part in (one, other))
        a_nan, b_nan = torch.isnan(a.abs()), torch.isnan(b.abs())
        if bool((a_nan != b_nan).any()):
            return _of_nan(place, bool((b_nan & ~a_nan).any()))
        apart = (a - b).abs().masked_fill(a == b, 0.0)  # equal infinities are not
        # The difference of two numbers is NaN where that of their infinite parts is.
        apart = apart.masked_fill(a_nan, 0.0).nan_to_num(float("inf"), float("inf"))
        off = float(apart.max())
    return Difference(place, "value", off=off) if off else None


def _of_arrays(place: str, one: Any, other: Any) -> Difference | None:
    if one.shape != other.shape:
        return Difference(place, "form", f"a result of {list(other.shape)} instead of {list(one.shape)}")
    if one.dtype != other.dtype:
        return Difference(place, "form", f"a result in {other.dtype} instead of {one.dtype}")
    import torch  # noqa: PLC0415

    a, b = (torch.from_numpy(part.astype("complex128").reshape(-1)) for part in (one, other))
    return _of_tensors(place, a, b)


def _of_numbers(place: str, one: Any, other: Any) -> Difference | None:
    if one == other:
        return None
    if one != one or other != other:  # noqa: PLR0124 - NaN
        return None if one != one and other != other else _of_nan(place, other != other)  # noqa: PLR0124
    try:
        return Difference(place, "value", off=float(abs(other - one)))
    except OverflowError:
        return Difference(place, "value", off=float("inf"))


def _of_nan(place: str, in_result: bool) -> Difference:
    return Difference(place, "value", "NaN in the result" if in_result else "numbers where the valid call has NaN")
