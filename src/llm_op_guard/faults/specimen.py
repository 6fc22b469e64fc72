"""A specimen: real arguments of an operator with which it runs; and a call as data laid over them.

What a contract does not speak of (the parts of a module, arguments that it has no rule for) is the specimen's; what it
reads is the call's. So an operator runs with the very tensors that its contract has judged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from llm_op_guard.contract.model import Contract
from llm_op_guard.faults.build import Builder
from llm_op_guard.frozen import frozen
from llm_op_guard.guard import functions
from llm_op_guard.guard.call import Call, MappingSpec, ObjectSpec, SequenceSpec, Spec, TensorSpec, asked
from llm_op_guard.guard.capture import capture
from llm_op_guard.guard.reading import UNSET, is_tensor, path_value
from llm_op_guard.guard.reads import read_paths

# What guards have seen of an object is nothing to an operator.
_REMEMBERED = ("recall", "filled_unseen")
# The contents of integer tensors up to that size are kept: ids, masks and positions mean something.
_MOST_CONTENTS = 64

Variants = Callable[[Any, Mapping[str, Any]], Iterator[None]]


class Unmade(Exception):  # noqa: N818 - it is no error: there is just nothing to run
    """No real arguments are like those of a call; the text says which are not."""


@frozen
class Specimen:
    """What makes the real arguments of one call that runs, anew each time, since operators change them.

    `variants` changes an object in one way after another, for one that answers what a call says of it
    (`cache_length(cache) is 7`).
    """

    contract: Contract
    make: Callable[[], dict[str, Any]]
    variants: Variants

    @cached_property
    def call(self) -> Call:
        """The real call as data. Raises what `make` raises."""
        given = self.make()
        arguments = {name: given.get(name) for name in self.contract.parameters}
        call = capture(self.contract, arguments, every_number=True)
        for path, spec in call.tensors():
            call = call.put(path, _with_contents(spec, path_value(arguments[path.root], *path.steps)))
        return call

    def arguments(self, call: Call) -> dict[str, Any]:
        """Real arguments that are what a call says. Raises Unmade where there are none."""
        import torch  # noqa: PLC0415

        given = self.make()
        over = _Over(Builder(torch, call.seed))
        seen = dict(self.call.arguments)
        for name, spec in call.arguments:
            if name in self._read or name not in given:
                given[name] = over.value(given.get(name, UNSET), spec, seen.get(name, UNSET), name)
        over.answer(self.variants)
        return given

    @cached_property
    def _read(self) -> frozenset[str]:
        return frozenset(path.root for path in read_paths(self.contract))


def _with_contents(spec: TensorSpec, tensor: Any) -> TensorSpec:
    if tensor.device.type == "meta" or not tensor.numel():
        return spec
    flat = tensor.detach().reshape(-1)
    if not tensor.is_floating_point() and not tensor.is_complex() and flat.numel() <= _MOST_CONTENTS:
        return replace(spec, fill=tuple(flat.tolist()))
    return replace(spec, fill=(flat[0].item(),)) if bool((flat == flat[0]).all()) else spec


class _Over:
    """Lays the values of one call over real ones."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._asked: list[tuple[Any, dict[str, Any], str]] = []

    def value(self, real: Any, spec: Spec, seen: Any, where: str) -> Any:
        """What a spec says, with what is real for the rest; `seen` is the spec of the real value."""
        match spec:
            case ObjectSpec() if _has_attributes(real):
                return self._object(real, spec, seen, where)
            case SequenceSpec(kind=kind, items=items) if type(real) in (tuple, list):
                held = seen.items if isinstance(seen, SequenceSpec) else ()
                parts = [self._item(real, index, part, held, where) for index, part in enumerate(items)]
                return tuple(parts) if kind == "tuple" else parts
            case MappingSpec(items=pairs) if type(real) is dict:
                known = dict(seen.items) if isinstance(seen, MappingSpec) else {}
                rest = {name: value for name, value in real.items() if name not in known}
                return rest | {
                    name: self.value(real.get(name, UNSET), part, known.get(name, UNSET), f"{where}[{name!r}]")
                    for name, part in pairs
                }
        if real is not UNSET and not isinstance(spec, TensorSpec) and type(spec) is type(seen) and spec == seen:
            return real
        return self._builder.built(spec, where)

    def _item(self, real: Any, index: int, spec: Spec, known: tuple[Spec, ...], where: str) -> Any:
        place = min(index, len(real) - 1)
        if place < 0 or (index > place and not isinstance(spec, ObjectSpec)):
            return self._builder.built(spec, f"{where}[{index}]")
        # An object more than there are is made as the last one.
        part = real[place] if index == place else copy.deepcopy(real[place])
        return self.value(part, spec, known[place] if place < len(known) else UNSET, f"{where}[{index}]")

    def _object(self, real: Any, spec: ObjectSpec, seen: Any, where: str) -> Any:
        known = dict(seen.attributes) if isinstance(seen, ObjectSpec) else {}
        for name, part in spec.attributes:
            old = getattr(real, name, UNSET)
            new = self.value(old, part, known.get(name, UNSET), f"{where}.{name}")
            if new is not old:
                _put(real, name, new)
        for name in known.keys() - dict(spec.attributes).keys():
            _drop(real, name)
        wanted = {
            key: self._builder.built(part, f"{where}: {key}")
            for key, part in spec.answers
            if asked(key)[0] not in _REMEMBERED
        }
        if wanted:
            self._asked.append((real, wanted, where))
        return real

    def answer(self, variants: Variants) -> None:
        """Have every object answer what the call says of it."""
        for owner, wanted, where in self._asked:
            if not _answers(owner, wanted) and not any(_answers(owner, wanted) for _ in variants(owner, wanted)):
                told = next(f"{key} is {value}" for key, value in wanted.items() if not _answers(owner, {key: value}))
                raise Unmade(f"no real {type(owner).__name__} is made of which {told}, as of {where}")


def _has_attributes(real: Any) -> bool:
    plain = (bool, int, float, str, tuple, list, dict)
    return real is not None and real is not UNSET and not isinstance(real, plain) and not is_tensor(real)


def _answers(owner: Any, wanted: Mapping[str, Any]) -> bool:
    for key, value in wanted.items():
        function, arguments = asked(key)
        try:
            found = functions.IMPLEMENTATIONS[function](owner, *arguments)
        except Exception:  # it does not apply to this object
            return False
        # Of a number in the place of a truth, contracts see the truth.
        if (bool(value) if type(found) is bool else value) != found:
            return False
    return True


def _put(owner: Any, name: str, value: Any) -> None:
    import torch  # noqa: PLC0415

    for kind in ("_parameters", "_buffers", "_modules"):
        held = owner.__dict__.get(kind, {})
        if name not in held:
            continue
        if kind == "_parameters" and is_tensor(value):
            value = torch.nn.Parameter(value, requires_grad=False)
        elif value is not None and (kind != "_buffers" or not is_tensor(value)):
            del held[name]  # a module keeps nothing else there
    try:
        setattr(owner, name, value)
    except (AttributeError, TypeError, ValueError) as error:
        raise Unmade(f"{name} of a {type(owner).__name__} cannot be set: {error}") from None


def _drop(owner: Any, name: str) -> None:
    try:
        delattr(owner, name)
    except AttributeError:
        raise Unmade(f"there is no {type(owner).__name__} without {name}") from None
