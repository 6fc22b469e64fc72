"""One change to a call, of a named kind: the mistakes that people make with tensors, numbers and names."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from llm_op_guard.contract.path import Path
from llm_op_guard.faults.ingredients import SMALL_NUMBERS, Ingredient, Ingredients
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.call import (
    Call,
    MappingSpec,
    ObjectSpec,
    SequenceSpec,
    Spec,
    TensorSpec,
    TextSpec,
    TorchSpec,
    row_order,
)
from llm_op_guard.guard.reading import UNSET
from llm_op_guard.guard.reads import functions_called, misspelling

# The dtypes that one is taken for most easily.
NEIGHBOURS = {
    "float32": ("bfloat16", "float16", "float64", "int64"),
    "float16": ("bfloat16", "float32"),
    "bfloat16": ("float16", "float32"),
    "float64": ("float32",),
    "int64": ("int32", "float32", "bool"),
    "int32": ("int64", "float32"),
    "bool": ("int64", "float32", "uint8"),
}
SENTINELS = (-1, -100)
PAST_INT32 = 1 << 31


@frozen
class Edit:
    """A call that differs from another by one change."""

    kind: str
    path: Path
    call: Call


def edits_at(call: Call, choice: Ingredient, made_of: Ingredients, hints: tuple[int, ...]) -> Iterator[Edit]:
    """Every change to one thing in a call; `hints` are numbers of the call that are worth trying."""
    for kind, new in _changes(call, choice, made_of, hints):
        edit = _edit(call, choice.path, kind, new)
        if edit is not None:
            yield edit


def an_edit_at(
    call: Call, choice: Ingredient, made_of: Ingredients, hints: tuple[int, ...], random_of: random.Random
) -> Edit | None:
    """One of these changes, or None."""
    changes = list(_changes(call, choice, made_of, hints))
    return _edit(call, choice.path, *random_of.choice(changes)) if changes else None


def _edit(call: Call, path: Path, kind: str, new: Any) -> Edit | None:
    if new is UNSET and not path.steps:
        return None  # a parameter that is left out has its default; None is as good as that
    changed = call.without(path) if new is UNSET else call.put(path, new)
    return Edit(kind, path, changed) if changed != call else None


def swaps(call: Call) -> Iterator[Edit]:
    """Every two tensor arguments exchanged."""
    found = list(call.tensors())
    for index, (path, spec) in enumerate(found):
        for other, other_spec in found[index + 1 :]:
            if spec != other_spec:
                yield Edit("swapped arguments", path, call.put(path, other_spec).put(other, spec))


def of_the_batch(call: Call) -> Iterator[Edit]:
    """The noise of real systems, in all tensors at once: an empty batch, one that is twice as large."""
    for kind, factor in (("empty batch", 0), ("doubled batch", 2)):
        changed = call
        for path, spec in call.tensors():
            if spec.shape:
                changed = changed.put(
                    path, replace(spec, shape=(spec.shape[0] * factor, *spec.shape[1:]), strides=None)
                )
        if changed != call:
            yield Edit(kind, Path(call.arguments[0][0]), changed)


def of_sizes(call: Call, numbers: Iterable[int] = ()) -> Iterator[Edit]:
    """A size in every tensor that has it: what a symbol stands for. `numbers` are sizes that are worth trying."""
    for size in dict.fromkeys(size for _, spec in call.tensors() for size in spec.shape):
        near = {size + 1: "one more", size - 1: "one fewer", 2 * size: "twice", size // 2: "half"}
        for other in dict.fromkeys((*near, *numbers)):
            if other >= 0 and other != size:
                kind = f"{near.get(other, 'another size')} everywhere"
                yield Edit(kind, Path(call.arguments[0][0]), resized(call, size, other))


def resized(call: Call, size: int, other: int) -> Call:
    """The call with another size wherever a tensor has this one."""
    changed = call
    for path, spec in call.tensors():
        if size in spec.shape:
            shape = tuple(other if axis == size else axis for axis in spec.shape)
            changed = changed.put(path, replace(spec, shape=shape, strides=None, at=()))
    return changed


def of_dtypes(call: Call) -> Iterator[Edit]:
    """All tensors of one dtype in another one."""
    for dtype in dict.fromkeys(spec.dtype for _, spec in call.tensors()):
        for other in dict.fromkeys((*NEIGHBOURS.get(dtype, ()), "float32", "int64")):
            changed = call
            for path, spec in call.tensors():
                if spec.dtype == dtype:
                    changed = changed.put(path, replace(spec, dtype=other, at=()))
            yield Edit("another dtype everywhere", Path(call.arguments[0][0]), changed)


def _changes(call: Call, choice: Ingredient, made_of: Ingredients, hints: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    spec = call.get(choice.path)
    if isinstance(spec, TensorSpec):
        yield from _of_tensor(spec, made_of, hints)
        for shape in dict.fromkeys(other.shape for _, other in call.tensors()):
            if shape != spec.shape:
                yield "the shape of another", replace(spec, shape=shape, strides=None, at=())
        yield "an array that is no tensor", _array(spec)
        yield "missing", None
    elif isinstance(spec, MappingSpec):
        for name, value in spec.items:
            rest = tuple(pair for pair in spec.items if pair[0] != name)
            yield "missing name", MappingSpec(rest)
            if len(name) > 3:
                yield "misspelt name", MappingSpec((*rest, (misspelling(name), value)))
        for text in made_of.texts:
            if text.isidentifier() and len(text) > 3:
                yield "misspelt name", MappingSpec((*spec.items, (misspelling(text), 1)))
        yield "missing", None
    elif isinstance(spec, SequenceSpec):
        if spec.items:
            yield "one item fewer", replace(spec, items=spec.items[:-1])
            yield "one item more", replace(spec, items=(*spec.items, spec.items[-1]))
            if isinstance(spec.items[-1], TensorSpec):
                for kind, item in _of_tensor(spec.items[-1], made_of, hints):
                    yield f"{kind}, last item", replace(spec, items=(*spec.items[:-1], item))
        for number in (0, 1, 2, *hints[:4]):
            yield "other items", SequenceSpec(spec.kind, (*spec.items[:-1], number) if spec.items else (number,))
        yield "other kind", 3
        yield "missing", None
    elif isinstance(spec, ObjectSpec):
        yield "missing", None
    else:
        yield from _of_plain(spec, made_of, hints)
        yield "a tensor", TensorSpec("float32", (2, 3))


def _of_plain(spec: Spec | Any, made_of: Ingredients, hints: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    numbers: list[int | float] = [*SMALL_NUMBERS, *hints, *made_of.numbers]
    if isinstance(spec, int | float) and not isinstance(spec, bool):
        numbers = [spec + 1, spec - 1, spec * 2, -spec, *numbers, *(h + 1 for h in hints), *(-n for n in numbers[:3])]
    for number in dict.fromkeys(numbers):
        yield _kind_of_number(spec, number), number
    yield "other kind", 0.5
    for truth in (True, False):
        yield "other truth", truth
    for text in made_of.texts:
        yield "other text", text
    yield "other text", TextSpec(5)
    yield "other kind", ObjectSpec("object")
    if spec is not None:
        yield "missing", None
        yield "missing", UNSET


def _kind_of_number(spec: Spec | Any, number: int | float) -> str:
    if isinstance(spec, int | float) and not isinstance(spec, bool):
        near = {spec + 1: "one more", spec - 1: "one fewer", spec * 2: "twice"}
        if number in near:
            return near[number]
        if 0 <= number < spec:
            return "a stale number"  # a length of before
    return "a negative number" if number < 0 else "another number"


def _of_tensor(spec: TensorSpec, made_of: Ingredients, hints: tuple[int, ...]) -> Iterator[tuple[str, TensorSpec]]:
    yield from ((kind, replace(spec, shape=shape, strides=None, at=())) for kind, shape in _shapes(spec.shape, hints))
    for dtype in dict.fromkeys((*NEIGHBOURS.get(spec.dtype, ()), "float32", "int64", *made_of.dtypes)):
        if dtype != spec.dtype:
            yield "neighbouring dtype", replace(spec, dtype=dtype, at=(), fill=None if "float" in dtype else spec.fill)
    if spec.device == "cpu":
        yield "meta device", replace(spec, device="meta")
    if spec.elements and "aligned" in functions_called(made_of.contract):
        yield "off its alignment by an element", replace(spec, offset=1)
    if spec.shape and spec.elements:
        yield "gaps between elements", replace(spec, strides=tuple(2 * stride for stride in row_order(spec.shape)))
    if len(spec.shape) > 1 and spec.elements:
        strides = row_order(spec.shape)
        yield "transposed strides", replace(spec, strides=transposed(spec.shape))
        for axis, size in enumerate(spec.shape):
            if size > 1:
                yield "expanded strides", replace(spec, strides=(*strides[:axis], 0, *strides[axis + 1 :]))
    if spec.elements and spec.device != "meta":  # which holds no elements
        yield from _values(spec, made_of, hints)


def _array(spec: TensorSpec) -> ObjectSpec:
    """What looks like a tensor and is none: an array of another library, a wrapper around one."""
    shape = SequenceSpec("tuple", spec.shape)
    dtype, device = TorchSpec("dtype", spec.dtype), TorchSpec("device", spec.device)
    return ObjectSpec("array", (("shape", shape), ("ndim", len(spec.shape)), ("dtype", dtype), ("device", device)))


def _shapes(shape: tuple[int, ...], hints: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for axis, size in enumerate(shape):
        others = {
            "one more": size + 1,
            "one fewer": max(size - 1, 0),
            "half": size // 2,
            "twice": 2 * size,
            "size 1": 1,
        }
        others["empty"] = 0
        for kind, other in others.items():
            if other != size:
                yield f"{kind} in axis {axis}", (*shape[:axis], other, *shape[axis + 1 :])
        for hint in hints[:8]:
            if hint != size:
                yield f"another size in axis {axis}", (*shape[:axis], hint, *shape[axis + 1 :])
    for rank in range(min(3, len(shape) - 1)):
        yield "the last dimensions alone" if rank else "no dimensions", shape[len(shape) - rank :]
    for axis in range(len(shape)):
        yield "rank - 1", (*shape[:axis], *shape[axis + 1 :])
        for other in range(axis + 1, len(shape)):
            swapped = list(shape)
            swapped[axis], swapped[other] = shape[other], shape[axis]
            if tuple(swapped) != shape:
                yield f"axes {axis} and {other} swapped", tuple(swapped)
    yield "rank + 1", (1, *shape)
    yield "rank + 1", (*shape, 1)
    yield "rank + 1", (2, *shape)


def transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor that was made with its last two axes exchanged."""
    *rest, before, last = row_order((*shape[:-2], shape[-1], shape[-2]))
    return (*rest, last, before)


def _values(spec: TensorSpec, made_of: Ingredients, hints: tuple[int, ...]) -> Iterator[tuple[str, TensorSpec]]:
    places = {0: "first", spec.elements - 1: "last"}
    places = {spec.elements // 2: "in the middle"} | places
    is_real = spec.dtype.startswith(("float", "bfloat"))
    bounds = [n for n in (*hints, *made_of.numbers) if isinstance(n, int)]
    numbers: list[int | float] = [
        *SENTINELS,
        0,
        1,
        2,
        3,
        PAST_INT32,
        *bounds,
        *(n - 1 for n in bounds),
        *(n + 1 for n in bounds),
    ]
    if spec.dtype == "bool":
        numbers = [0, 1]
    elif is_real:
        numbers = [float("nan"), float("inf"), -float("inf"), 0, 1, -1, 0.5, 1e30, *made_of.numbers, *bounds]
    for number in dict.fromkeys(numbers):
        for place, where in places.items():
            yield f"element {number}, {where}", spec.with_elements(place, [number])
    columns = spec.shape[-1] if spec.shape else 1
    for name, fill in {"all 0": (0,), "all 1": (1,), "0 and 1": (0, 1), "1 and 0": (1, 0)}.items():
        yield name, replace(spec, fill=fill, at=())
    if spec.dtype != "bool":
        count = min(spec.elements, 64)
        yield "ascending", replace(spec, fill=tuple(range(count)), at=())
        yield "descending", replace(spec, fill=tuple(range(count, 0, -1)), at=())
        yield "repeated", replace(spec, fill=(1, 1, 2), at=())
        yield "all negative", replace(spec, fill=(-1,), at=())
        for bound in bounds[:4]:
            yield "all at a bound", replace(spec, fill=(bound,), at=())
    if is_real:
        yield "noise", replace(spec, fill=None, at=())
    if spec.elements > columns and columns <= 256:
        for row in dict.fromkeys((0, spec.elements // columns - 1)):
            for value in (0, 1):
                at = tuple((row * columns + column, value) for column in range(columns))
                yield f"a row of {value}", replace(spec, at=at)
