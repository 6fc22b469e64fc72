"""A call as JSON, and read again: whatever stands in a file is a call or a ValueError with its place."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from llm_op_guard.guard.call import (
    ALIGNMENT,
    MOST_REPEATED,
    Call,
    Entry,
    IdentitySpec,
    ManySpec,
    MappingSpec,
    Number,
    NumberSpec,
    ObjectSpec,
    SequenceSpec,
    Spec,
    TensorSpec,
    TextSpec,
    TorchSpec,
    asked,
)

_OF_TEXTS = ("number", "controls", "surrogates")


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
            if spec.offset:
                data["offset"] = spec.offset
            if spec.fill is not None:
                data["fill"] = [_number_json(value) for value in spec.fill]
            if spec.at:
                data["at"] = [
                    [place, _number_json(value), *([count] if count > 1 else [])]
                    for place, value, count in _stretches(spec.at)
                ]
            return data
        case ObjectSpec(kind=kind, attributes=attributes, answers=answers):
            data = {"object": kind, "attributes": {name: _spec_json(part) for name, part in attributes}}
            return {**data, "answers": {n: _spec_json(part) for n, part in answers}} if answers else data
        case SequenceSpec(kind=kind, items=items):
            return {kind: [_spec_json(item) for item in items]}
        case ManySpec(kind=kind, each=each, length=length, at=at):
            alike: dict[str, Any] = {"each": _spec_json(each), "length": length}
            return {kind: {**alike, "at": [[number, _spec_json(item)] for number, item in at]} if at else alike}
        case MappingSpec(items=pairs):
            return {"dict": {name: _spec_json(part) for name, part in pairs}}
        case TextSpec():
            return {"text": spec.length, **{name: n for name in _OF_TEXTS if (n := getattr(spec, name))}}
        case NumberSpec(kind=kind):
            return {"a": kind}
        case IdentitySpec(path=path):
            return {"identity_of": path}
        case TorchSpec(kind=kind, name=name):
            return {kind: name}
        case bool() | int() | float():
            return _number_json(spec)
    return spec


def _stretches(at: tuple[tuple[int, Number], ...]) -> list[tuple[int, Number, int]]:
    """Single elements, those taken together that stand side by side and are the same: place, value, how many."""
    found: list[tuple[int, Number, int]] = []
    for place, value in at:
        if found and found[-1][0] + found[-1][2] == place and repr(found[-1][1]) == repr(value):
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((place, value, 1))
    return found


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
        case {"tuple": {"each": each, "length": int() as length}} | {"list": {"each": each, "length": int() as length}}:
            if not 0 <= length <= MOST_REPEATED:
                raise ValueError(f"{where}: a list has {MOST_REPEATED} items at most")
            kind = next(iter(data))
            return ManySpec(kind, _spec(each, where), length, _of_many(data[kind].get("at", []), length, where))
        case {"dict": dict() as pairs}:
            return MappingSpec(tuple((name, _spec(part, f"{where}[{name!r}]")) for name, part in pairs.items()))
        case {"text": int() as length} if 0 <= length <= MOST_REPEATED:
            return _text(length, data, where)
        case {"a": "bool" | "int" | "float" as kind}:
            return NumberSpec(kind)
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
    match data.get("offset", 0):
        case int() as offset if type(offset) is int and 0 <= offset < ALIGNMENT:
            tensor = replace(tensor, offset=offset)
        case _:
            raise ValueError(f"{where}: an offset is a whole number below {ALIGNMENT}")
    match data.get("fill"):
        case None:
            pass
        case list() as fill if fill or not tensor.elements:
            tensor = replace(tensor, fill=tuple(_number(value, where) for value in fill))
        case _:
            raise ValueError(f"{where}: what fills a tensor is a list of numbers")
    match data.get("at", []):
        case list() as places if all(_is_place(place, 2, 3) for place in places):
            at = [(place, _number(value, where), *(count or [1])) for place, value, *count in places]
        case _:
            raise ValueError(f"{where}: single elements are a list of [place, number] or [place, number, how many]")
    if sum(count for *_, count in at) > MOST_REPEATED:
        raise ValueError(f"{where}: a tensor has {MOST_REPEATED} single elements at most")
    for place, _, count in at:
        if place < 0 or count < 1 or place + count > tensor.elements:
            raise ValueError(f"{where}: element {place + max(count, 1) - 1} of {tensor.elements}")
    return replace(tensor, at=tuple((place + n, value) for place, value, count in at for n in range(count)))


def _is_place(data: Any, *lengths: int) -> bool:
    return isinstance(data, list) and len(data) in lengths and all(type(n) is int for n in (data[0], *data[2:]))


def _of_many(data: Any, length: int, where: str) -> tuple[tuple[int, Spec], ...]:
    """The items of a list that are not as the others."""
    if not isinstance(data, list) or not all(_is_place(item, 2) and 0 <= item[0] < length for item in data):
        raise ValueError(f"{where}: single items are a list of [number, value], numbers below {length}")
    return tuple((number, _spec(part, f"{where}[{number}]")) for number, part in data)


def _text(length: int, data: dict[str, Any], where: str) -> TextSpec:
    told = {name: data.get(name, 0) for name in _OF_TEXTS}
    if any(type(count) is not int or not 0 <= count <= MOST_REPEATED for count in told.values()):
        raise ValueError(f"{where}: {', '.join(_OF_TEXTS)} of a text are whole numbers")
    return TextSpec(length, **told)


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
