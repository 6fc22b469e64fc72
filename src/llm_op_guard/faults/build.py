"""From a call as data to arguments that can be handed over: the same call makes the same arguments.

What a tensor is filled with hangs on its place in the call and on its size alone: two calls that differ in one argument
have the same numbers in all others.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

from llm_op_guard.guard import memory
from llm_op_guard.guard.call import (
    Call,
    IdentitySpec,
    MappingSpec,
    Number,
    ObjectSpec,
    SequenceSpec,
    Spec,
    TensorSpec,
    TextSpec,
    TorchSpec,
    asked,
    row_order,
)
from llm_op_guard.guard.functions import StandIn
from llm_op_guard.guard.reading import NotApplicable

# More elements than that are made on the device "meta" only.
MOST_ELEMENTS = 1 << 24
# What is less than that may be 0, or the least that there is.
_LEAST = 1e-7
# More than torch counts elements with.
_BEYOND_INT64 = 1 << 63


class Unbuildable(ValueError):  # noqa: N818 - it is no error: this machine is another
    """Arguments that cannot be made on this machine: a dtype or device that it lacks, a tensor too large."""


def build(call: Call) -> dict[str, Any]:
    """The arguments of a call. Raises Unbuildable for what cannot be made here."""
    import torch  # noqa: PLC0415 - only who makes tensors needs it

    builder = Builder(torch, call.seed)
    made = {name: builder.built(spec, name) for name, spec in call.arguments}
    for owner, name, fact in builder.facts:
        memory.remember(owner, [name], {name: builder.fact(fact, made)})
    return made


class Builder:
    """What makes the values of one call; `facts` are what is to be remembered of the objects that it made."""

    def __init__(self, torch: Any, seed: int) -> None:
        self.torch = torch
        self.facts: list[tuple[Any, str, Spec]] = []
        self._seed = seed

    def built(self, spec: Spec, where: str) -> Any:
        """The value that stands at a place, `self.layers[0]`."""
        match spec:
            case TensorSpec():
                return self._tensor(spec, where)
            case ObjectSpec():
                return self._object(spec, where)
            case SequenceSpec(kind=kind, items=items):
                parts = [self.built(item, f"{where}[{index}]") for index, item in enumerate(items)]
                return tuple(parts) if kind == "tuple" else parts
            case MappingSpec(items=pairs):
                return {name: self.built(part, f"{where}[{name!r}]") for name, part in pairs}
            case TextSpec(length=length):
                return "x" * length
            case TorchSpec(kind="dtype", name=name):
                return self._dtype(name)
            case TorchSpec(name=name):
                return self._device(name)
            case IdentitySpec():
                return None
        return spec

    def fact(self, spec: Spec, made: dict[str, Any]) -> Any:
        """A fact about an object; identities are those of objects that are made by now."""
        if not isinstance(spec, IdentitySpec):
            return self.built(spec, "")
        owner = None
        if spec.path is not None:
            root, *names = spec.path.split(".")
            owner = made.get(root)
            for name in names:
                owner = getattr(owner, name, None)
        try:
            return memory.identity(owner)
        except NotApplicable:  # nothing that could be remembered: some object that is not of this call
            return memory.Identity("object", 0)

    def _object(self, spec: ObjectSpec, where: str) -> StandIn:
        made = StandIn(**{name: self.built(part, f"{where}.{name}") for name, part in spec.attributes})
        answers = {}
        for key, part in spec.answers:
            match self._asked(key):
                case ("recall", (str() as fact,)):
                    self.facts.append((made, fact, part))
                case _:
                    answers[key] = self.built(part, f"{where}: {key}")
        if answers:
            made._answers = answers
        return made

    def _asked(self, key: str) -> tuple[str, tuple[Any, ...]]:
        try:
            return asked(key)
        except ValueError as error:  # an argument that is no literal: NaN
            raise Unbuildable(str(error)) from None

    def _dtype(self, name: str) -> Any:
        found = getattr(self.torch, name, None)
        if not isinstance(found, self.torch.dtype):
            raise Unbuildable(f"torch has no dtype {name}")
        return found

    def _device(self, name: str) -> Any:
        try:
            return self.torch.device(name)
        except RuntimeError as error:
            raise Unbuildable(f"device {name!r}: {error}") from None

    def _tensor(self, spec: TensorSpec, where: str) -> Any:
        strides = row_order(spec.shape) if spec.strides is None else spec.strides
        if len(strides) != len(spec.shape) or any(size >= _BEYOND_INT64 for size in (*spec.shape, *strides)):
            raise Unbuildable(f"{spec}: no tensor has such sizes and strides")
        dtype = self._dtype(spec.dtype)
        try:
            return self._of(spec, dtype, strides, where)
        # Whatever torch says of a kind, a number or a device that it cannot do here; of TypeError and the like, which
        # are ours, nothing is made.
        except (RuntimeError, ValueError, OverflowError, MemoryError, AssertionError) as error:
            raise Unbuildable(f"{spec}: {error}") from error

    def _of(self, spec: TensorSpec, dtype: Any, strides: tuple[int, ...], where: str) -> Any:
        torch, place = self.torch, spec.device
        if place == "meta":
            return torch.empty_strided(spec.shape, strides, dtype=dtype, device="meta")
        if spec.elements > MOST_ELEMENTS:
            raise Unbuildable("too large to be made here")
        flat = self._elements(spec, dtype, where)
        if spec.strides is None and not spec.offset:
            return flat.reshape(spec.shape).to(place)
        pairs = list(zip(spec.shape, strides, strict=True))
        reach = 1 + sum((size - 1) * stride for size, stride in pairs if size > 1)
        if reach > MOST_ELEMENTS:
            raise Unbuildable("too large to be made here")
        storage = torch.zeros(spec.offset + max(reach, 1), dtype=dtype)
        made = storage.as_strided(spec.shape, strides, spec.offset)
        if all(stride > 0 or size <= 1 for size, stride in pairs):
            made.copy_(flat.reshape(spec.shape))
        elif flat.numel():
            # Elements that share memory have one value.
            storage[spec.offset :].copy_(flat.repeat(reach // flat.numel() + 1)[:reach])
        return made if place == "cpu" else storage.to(place).as_strided(spec.shape, strides, spec.offset)

    def _elements(self, spec: TensorSpec, dtype: Any, where: str) -> Any:
        torch, count = self.torch, spec.elements
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {where}".encode()))
        if spec.fill is not None and count:
            flat = self._numbers(list(spec.fill), dtype).repeat(count // len(spec.fill) + 1)[:count].clone()
        elif dtype.is_complex:
            flat = torch.randn(count, generator=generator, dtype=torch.complex64).to(dtype)
        elif dtype.is_floating_point and dtype.itemsize > 1:
            flat = torch.randn(count, generator=generator).to(dtype)
        elif dtype.is_floating_point:
            flat = self._numbers([1.0, 2.0], torch.float32).repeat(count // 2 + 1)[:count].to(torch.uint8).view(dtype)
        else:
            flat = torch.randint(0, 2, (count,), generator=generator).to(dtype)
        for index, value in spec.at:
            if 0 <= index < count:
                flat[index] = self._numbers([value], dtype)[0]
        return flat

    def _numbers(self, values: list[Number], dtype: Any) -> Any:
        torch = self.torch
        if dtype == torch.bool:
            return torch.tensor([bool(value) for value in values])
        if not dtype.is_floating_point and not dtype.is_complex:
            bounds = torch.iinfo(dtype)
            for value in values:
                if not bounds.min <= value <= bounds.max:  # NaN, too
                    raise Unbuildable(f"{str(dtype).removeprefix('torch.')} holds no {value}")
            return torch.tensor([int(value) for value in values], dtype=torch.int64).to(dtype)
        wanted = torch.tensor([float(value) for value in values], dtype=torch.float64)
        held = wanted.to(dtype)
        if not dtype.is_complex:
            self._hold(wanted, held)
        return held

    def _hold(self, wanted: Any, held: Any) -> None:
        """Raises Unbuildable where a dtype has neither these numbers nor some that are near."""
        found = held.to(wanted.dtype).tolist()
        for value, number in zip(wanted.tolist(), found, strict=True):
            near = math.isclose(value, number, rel_tol=0.5, abs_tol=_LEAST)
            if not near and not (math.isnan(value) and math.isnan(number)):
                raise Unbuildable(f"{str(held.dtype).removeprefix('torch.')} holds no {value}")
