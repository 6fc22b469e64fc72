"""A call as data: what a contract sees of its arguments, and nothing of what they hold.

One noun for the call of a violation, for those that are made from a contract, and for what a capsule keeps. All of it
is immutable and JSON-ready. A tensor keeps its metadata, and of its elements only those that a rule named.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from llm_op_guard.contract.path import Path
from llm_op_guard.guard.reading import UNSET

Number = int | float | bool
Step = str | tuple[str | int]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its contents.

    `strides` is None where elements lie in row order without gaps. `fill` are the numbers that elements
    repeat in row order, None for noise; `at` are single elements, by their place in row order.
    """

    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"
    strides: tuple[int, ...] | None = None
    fill: tuple[Number, ...] | None = None
    at: tuple[tuple[int, Number], ...] = ()

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    def with_element(self, place: int, value: Number) -> TensorSpec:
        """The same with one element set."""
        return replace(self, at=(*(pair for pair in self.at if pair[0] != place), (place, value)))

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        text += "" if self.device == "cpu" else f" on {self.device}"
        text += "" if self.strides is None else f", strides {self.strides}"
        text += "" if self.fill is None else f" of {', '.join(map(str, self.fill[:8]))}{'…' * (len(self.fill) > 8)}"
        return text + "".join(f", element {place} is {value}" for place, value in self.at)


@dataclass(frozen=True)
class ObjectSpec:
    """Something with attributes: a module, a cache, a configuration.

    `attributes` are those that the contract reads; `answers` what its functions said of the object (`cache_length`).
    """

    kind: str
    attributes: tuple[tuple[str, Spec], ...] = ()
    answers: tuple[tuple[str, Spec], ...] = ()

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in self.attributes]
        return f"{self.kind}({', '.join(parts + [f'{name} is {value}' for name, value in self.answers])})"


@dataclass(frozen=True)
class SequenceSpec:
    """A tuple or list."""

    kind: str
    items: tuple[Spec, ...]

    def __str__(self) -> str:
        inside = ", ".join(map(str, self.items))
        return f"({inside})" if self.kind == "tuple" else f"[{inside}]"


@dataclass(frozen=True)
class MappingSpec:
    """A dict whose keys are names."""

    items: tuple[tuple[str, Spec], ...]

    def __str__(self) -> str:
        return "{" + ", ".join(f"{name}: {value}" for name, value in self.items) + "}"


@dataclass(frozen=True)
class TextSpec:
    """A text that the contract does not spell: only its length is kept."""

    length: int

    def __str__(self) -> str:
        return f"a text of {self.length}"


@dataclass(frozen=True)
class TorchSpec:
    """A dtype or a device."""

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class IdentitySpec:
    """What stands for an object: for the one at a path of the call, or for one of another call."""

    path: str | None = None

    def __str__(self) -> str:
        return "another object" if self.path is None else f"the identity of {self.path}"


Spec = (
    IdentitySpec
    | TensorSpec
    | ObjectSpec
    | SequenceSpec
    | MappingSpec
    | TextSpec
    | TorchSpec
    | int
    | float
    | bool
    | str
    | None
)


@dataclass(frozen=True)
class Entry:
    """What a contract knew before a call that has returned: its promises are held against that.

    `names` are the values that symbols and assigned names had, `tensors` what those looked like, by path, that types
    refer to.
    """

    names: tuple[tuple[str, Spec], ...] = ()
    tensors: tuple[tuple[str, TensorSpec], ...] = ()


@dataclass(frozen=True)
class Call:
    """The arguments of one call, by parameter; `seed` makes what tensors are filled with.

    A call that has returned has an `entry`, and its `result` among the arguments, which are as it has left them.
    """

    arguments: tuple[tuple[str, Spec], ...]
    seed: int = 0
    entry: Entry | None = None

    def get(self, path: Path) -> Spec | Any:
        """What stands at a path; `UNSET` where nothing does."""
        found: Any = dict(self.arguments).get(path.root, UNSET)
        for step in path.steps:
            found = _step(found, step)
        return found

    def put(self, path: Path, spec: Spec) -> Call:
        """The call with something else at a path; objects on the way to it are made where there are none."""
        return self._changed(path, spec)

    def without(self, path: Path) -> Call:
        """The call with nothing at a path."""
        return self._changed(path, UNSET)

    def _changed(self, path: Path, spec: Any) -> Call:
        given = dict(self.arguments)
        new = _set(given.get(path.root, UNSET), path.steps, spec)
        if new is UNSET:
            given.pop(path.root, None)
        else:
            given[path.root] = new
        return replace(self, arguments=tuple(given.items()))

    def tensors(self) -> Iterator[tuple[Path, TensorSpec]]:
        """Every tensor, and where it stands."""
        for name, spec in self.arguments:
            yield from _tensors(Path(name), spec)

    def __str__(self) -> str:
        return ", ".join(f"{name}={spec}" for name, spec in self.arguments)


def _step(owner: Any, step: Step) -> Any:
    match owner, step:
        case ObjectSpec(attributes=attributes), str():
            return dict(attributes).get(step, UNSET)
        case MappingSpec(items=items), (str() as key,):
            return dict(items).get(key, UNSET)
        case SequenceSpec(items=items), (int() as index,) if -len(items) <= index < len(items):
            return items[index]
    return UNSET


def _set(owner: Any, steps: tuple[Step, ...], spec: Any) -> Any:
    if not steps:
        return spec
    step, rest = steps[0], steps[1:]
    inner = _set(_step(owner, step), rest, spec)
    if isinstance(step, str):
        owner = owner if isinstance(owner, ObjectSpec) else ObjectSpec("object")
        return replace(owner, attributes=_with(owner.attributes, step, inner))
    if isinstance(step[0], str):
        owner = owner if isinstance(owner, MappingSpec) else MappingSpec(())
        return replace(owner, items=_with(owner.items, step[0], inner))
    items = list(owner.items) if isinstance(owner, SequenceSpec) else []
    index = step[0] if step[0] >= 0 else len(items) + step[0]
    items += [None] * (index + 1 - len(items))
    items[index : index + 1] = [] if inner is UNSET else [inner]
    return SequenceSpec(owner.kind if isinstance(owner, SequenceSpec) else "tuple", tuple(items))


def _with(pairs: tuple[tuple[str, Any], ...], name: str, value: Any) -> tuple[tuple[str, Any], ...]:
    given = {**dict(pairs), name: value}
    return tuple((key, part) for key, part in given.items() if part is not UNSET)


def answer_key(function: str, arguments: tuple[Any, ...]) -> str:
    """What the answer of a function about an object is kept under: `makes_masks('eager')`."""
    return f"{function}({', '.join(repr(argument) for argument in arguments)})"


def asked(key: str) -> tuple[str, tuple[Any, ...]]:
    """The function and the arguments of an `answer_key`. Raises ValueError for what is none."""
    try:
        node = ast.parse(key, mode="eval").body
        match node:
            case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]):
                return function, tuple(ast.literal_eval(argument) for argument in arguments)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    raise ValueError(f"{key!r} is no question about an object")


def row_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie in row order without gaps, as torch counts them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _tensors(path: Path, spec: Spec) -> Iterator[tuple[Path, TensorSpec]]:
    match spec:
        case TensorSpec():
            yield path, spec
        case ObjectSpec(attributes=parts):
            for name, part in parts:
                yield from _tensors(Path(path.root, (*path.steps, name)), part)
        case MappingSpec(items=parts):
            for name, part in parts:
                yield from _tensors(path.item(name), part)
        case SequenceSpec(items=items):
            for index, part in enumerate(items):
                yield from _tensors(path.item(index), part)


# ---------------------------------------------------------------- JSON


def to_json(call: Call) -> dict[str, Any]:
    """The call as JSON-ready data."""
    data: dict[str, Any] = {"arguments": {name: _spec_json(spec) for name, spec in call.arguments}}
    if call.seed != 0:
        data["seed"] = call.seed
    if call.entry is not None:
        groups = {"names": call.entry.names, "tensors": call.entry.tensors}
        data["entry"] = {group: {n: _spec_json(part) for n, part in pairs} for group, pairs in groups.items()}
    return data


def _spec_json(spec: Spec) -> Any:
    match spec:
        case TensorSpec():
            data: dict[str, Any] = {"tensor": spec.dtype, "shape": list(spec.shape)}
            if spec.device != "cpu":
                data["device"] = spec.device
            if spec.strides is not None:
                data["strides"] = list(spec.strides)
            if spec.fill is not None:
                data["fill"] = [_number_json(value) for value in spec.fill]
            if spec.at:
                data["at"] = [[place, _number_json(value)] for place, value in spec.at]
            return data
        case ObjectSpec(kind=kind, attributes=attributes, answers=answers):
            data = {"object": kind, "attributes": {name: _spec_json(part) for name, part in attributes}}
            return {**data, "answers": {n: _spec_json(part) for n, part in answers}} if answers else data
        case SequenceSpec(kind=kind, items=items):
            return {kind: [_spec_json(item) for item in items]}
        case MappingSpec(items=pairs):
            return {"dict": {name: _spec_json(part) for name, part in pairs}}
        case TextSpec(length=length):
            return {"text": length}
        case IdentitySpec(path=path):
            return {"identity_of": path}
        case TorchSpec(kind=kind, name=name):
            return {kind: name}
        case bool() | int() | float():
            return _number_json(spec)
    return spec


def _number_json(value: Number) -> Any:
    # JSON has neither NaN nor infinities, and readers of it no integers beyond 2**53.
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    return {"number": str(value)} if type(value) is int and abs(value) > 2**53 else value


def from_json(data: Any) -> Call:
    """The call of `to_json`'s data; raises ValueError, with the place, for anything else."""
    if not isinstance(data, dict) or not isinstance(data.get("arguments"), dict):
        raise ValueError('a call is {"arguments": {name: value}}')
    seed = data.get("seed", 0)
    if type(seed) is not int:
        raise ValueError("the seed of a call is an integer")
    arguments = tuple((name, _spec(part, name)) for name, part in data["arguments"].items())
    return Call(arguments, seed, _entry(data["entry"]) if data.get("entry") is not None else None)


def _entry(data: Any) -> Entry:
    match data:
        case {"names": dict() as names, "tensors": dict() as tensors}:
            seen = {path: _spec(part, path) for path, part in tensors.items()}
            models = tuple((path, spec) for path, spec in seen.items() if isinstance(spec, TensorSpec))
            return Entry(tuple((name, _spec(part, name)) for name, part in names.items()), models)
    raise ValueError('the entry of a call is {"names": {name: value}, "tensors": {path: tensor}}')


def _spec(data: Any, where: str) -> Spec:
    if data is None or isinstance(data, bool | int | float | str):
        return data
    match data:
        case {"number": str()}:
            return _number(data, where)
        case {"tensor": str() as dtype, "shape": list() as shape}:
            return _tensor(TensorSpec(dtype, _sizes(shape, where)), data, where)
        case {"object": str() as kind, "attributes": dict() as attributes}:
            return ObjectSpec(
                kind,
                tuple((name, _spec(part, f"{where}.{name}")) for name, part in attributes.items()),
                _answers(data.get("answers", {}), where),
            )
        case {"tuple": list() as items} | {"list": list() as items}:
            return SequenceSpec(
                next(iter(data)), tuple(_spec(part, f"{where}[{index}]") for index, part in enumerate(items))
            )
        case {"dict": dict() as pairs}:
            return MappingSpec(tuple((name, _spec(part, f"{where}[{name!r}]")) for name, part in pairs.items()))
        case {"text": int() as length} if 0 <= length <= 1_000_000:
            return TextSpec(length)
        case {"identity_of": str() | None as path}:
            return IdentitySpec(path)
        case {"dtype": str() as name} | {"device": str() as name}:
            return TorchSpec(next(iter(data)), name)
    raise ValueError(f"{where}: not a value of a call")


def _tensor(tensor: TensorSpec, data: dict[str, Any], where: str) -> TensorSpec:
    """A tensor of which dtype and shape are read, with the rest of what is said of it."""
    match data.get("device", "cpu"):
        case str() as device:
            tensor = replace(tensor, device=device)
        case _:
            raise ValueError(f"{where}: a device is a text")
    if "strides" in data:
        tensor = replace(tensor, strides=_sizes(data["strides"], where))
    match data.get("fill"):
        case None:
            pass
        case list() as fill if fill or not tensor.elements:
            tensor = replace(tensor, fill=tuple(_number(value, where) for value in fill))
        case _:
            raise ValueError(f"{where}: what fills a tensor is a list of numbers")
    match data.get("at", []):
        case list() as places if all(_is_place(place) for place in places):
            return replace(tensor, at=tuple((place, _number(value, where)) for place, value in places))
    raise ValueError(f"{where}: single elements are a list of [place, number]")


def _is_place(data: Any) -> bool:
    return isinstance(data, list) and len(data) == 2 and type(data[0]) is int


def _answers(data: Any, where: str) -> tuple[tuple[str, Spec], ...]:
    if not isinstance(data, dict):
        raise ValueError(f'{where}: answers are {{"function()": value}}')
    for key in data:
        asked(key)
    return tuple((key, _spec(part, f"{where}: {key}")) for key, part in data.items())


def _sizes(data: Any, where: str) -> tuple[int, ...]:
    if not isinstance(data, list) or not all(type(size) is int and size >= 0 for size in data):
        raise ValueError(f"{where}: sizes are a list of whole numbers")
    return tuple(data)


def _number(data: Any, where: str) -> Number:
    match data:
        case bool() | int() | float():
            return data
        case {"number": "nan" | "inf" | "-inf" as text}:
            return float(text)
        case {"number": str() as text} if text.lstrip("-").isdecimal() and len(text) < 100:
            return int(text)
    raise ValueError(f"{where}: not a number")
