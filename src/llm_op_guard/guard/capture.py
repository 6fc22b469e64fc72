"""From the arguments of a live call to the call as data. Runs no code of theirs, keeps none of them alive."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from llm_op_guard.contract.model import Contract, Require
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.validate import clauses_of
from llm_op_guard.guard import functions, memory
from llm_op_guard.guard.bind import Bindings
from llm_op_guard.guard.call import (
    Call,
    Entry,
    IdentitySpec,
    MappingSpec,
    Number,
    ObjectSpec,
    SequenceSpec,
    Spec,
    Step,
    TensorSpec,
    TextSpec,
    TorchSpec,
    answer_key,
    row_order,
)
from llm_op_guard.guard.elements import offenders
from llm_op_guard.guard.reading import UNSET, Snapshot, is_a, is_tensor, number_now, path_value
from llm_op_guard.guard.reads import asked_of_objects, read_paths, texts_spelt

# Of a container so many items are kept.
MOST_ITEMS = 64
# Of a row that breaks a rule as a whole so many elements are kept, or none.
MOST_OF_A_ROW = 32
_DEEPEST = 6


class Known(NamedTuple):
    """What the check before a call hands on to the one after it: see `explain`, as `known` and `at_entry`."""

    names: Mapping[str, Any]
    tensors: Mapping[Path, Snapshot | None]


def capture(
    contract: Contract, arguments: Mapping[str, Any], broken: Collection[str] = (), before: Known | None = None
) -> Call:
    """The call with these arguments, as far as the contract can see it: metadata, numbers, and texts that it spells.

    Of what tensors hold, the elements that the rules named in `broken` point to, and nothing else. With what was known
    `before` it, it is a call that has returned, and has its `result` among the arguments.
    """
    below = _steps_below(contract)
    seen = _Capture(frozenset(texts_spelt(contract)))
    call = Call(tuple((name, seen.spec(value, below.get(name, []), _DEEPEST)) for name, value in arguments.items()))
    if before is not None:
        call = replace(call, entry=entry_of(contract, before))
    if broken or any(asked_of_objects(contract)):
        known, after_call = before.names if before is not None else {}, before is not None
        clauses = [clause for clause in contract.clauses if after_call or not clause.after_call]
        bindings = Bindings(contract, clauses, arguments, known, after_call)
        bindings.collect()
        call = _answered(call, contract, arguments, bindings)
        call = _with_offenders(call, contract, broken, bindings)
    return call


def entry_of(contract: Contract, before: Known) -> Entry:
    """What was known before a call, as data."""
    below = _steps_below(contract)
    seen = _Capture(frozenset(texts_spelt(contract)))
    models = {str(path): _model(model) for path, model in before.tensors.items() if model is not None}
    names = {name: seen.spec(value, below.get(name, []), _DEEPEST) for name, value in before.names.items()}
    return Entry(tuple(names.items()), tuple(models.items()))


def _model(model: Snapshot) -> TensorSpec:
    shape = tuple(int(number_now(size)) for size in model.shape)
    return TensorSpec(str(model.dtype).removeprefix("torch."), shape, str(model.device))


def _steps_below(contract: Contract) -> dict[str, list[tuple[Step, ...]]]:
    below: dict[str, list[tuple[Step, ...]]] = {}
    for path in read_paths(contract):
        below.setdefault(path.root, []).append(path.steps)
    return below


def _with_offenders(call: Call, contract: Contract, broken: Collection[str], bindings: Bindings) -> Call:
    for clause in (clause for rule in broken for clause in clauses_of(contract, rule)):
        if not isinstance(clause.statement, Require) or not bindings.applies(clause):
            continue
        for path, index, value in offenders(clause.statement.expr.node, bindings.values):
            spec = call.get(path)
            if isinstance(spec, TensorSpec):
                first = sum(i * s for i, s in zip(index, row_order(spec.shape), strict=False))
                for place, number in enumerate(_numbers(value, spec, index, path, bindings), first):
                    spec = spec.with_element(place, number)
                call = call.put(path, spec)
    return call


def _numbers(value: Any, spec: TensorSpec, index: tuple[int, ...], path: Path, bindings: Bindings) -> list[Number]:
    """The element that breaks a rule, or the elements of a row that does: those stand side by side."""
    if len(index) == len(spec.shape):
        found = [value.item() if is_tensor(value) else value]
    elif math.prod(spec.shape[len(index) :]) > MOST_OF_A_ROW:
        return []
    else:
        try:
            found = bindings.values.path(path)[index].reshape(-1).tolist()
        except Exception:  # what cannot be read is not kept
            return []
    return [number for number in found if isinstance(number, bool | int | float)]


class _Capture:
    def __init__(self, spelt: frozenset[str]) -> None:
        self._spelt = spelt
        self._open: list[int] = []

    def spec(self, value: Any, below: Iterable[tuple[Step, ...]], depth: int) -> Spec:
        """What is kept of a value; `below` are the steps from it that the contract reads."""
        if value is None or type(value) in (bool, int, float):
            return value  # type: ignore[no-any-return]
        if is_tensor(value):
            return tensor_spec(value)
        if is_a(value, str):
            text = str.__str__(value)
            return text if text in self._spelt else TextSpec(len(text))
        if type(value) is memory.Identity:
            return IdentitySpec()
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Size:
            return SequenceSpec("tuple", tuple(int(number_now(size)) for size in value))
        if torch is not None and is_a(value, torch.dtype | torch.device):
            kind = "dtype" if is_a(value, torch.dtype) else "device"
            return TorchSpec(kind, str(value).removeprefix("torch."))
        if depth == 0 or id(value) in self._open:
            return ObjectSpec(type(value).__name__)
        self._open.append(id(value))
        try:
            return self._composite(value, [path for path in below if path], depth - 1)
        finally:
            self._open.pop()

    def _composite(self, value: Any, steps: list[tuple[Step, ...]], depth: int) -> Spec:
        if type(value) in (tuple, list):
            inner = [path[1:] for path in steps if not isinstance(path[0], str)]
            items = tuple(self.spec(item, inner, depth) for item in value[:MOST_ITEMS])
            return SequenceSpec(type(value).__name__, items)
        if type(value) is dict:
            # Keyword arguments are names; other keys may be what a user wrote.
            named = [(k, v) for k, v in list(value.items())[:MOST_ITEMS] if type(k) is str and k.isidentifier()]
            return MappingSpec(
                tuple((k, self.spec(v, [p[1:] for p in steps if p[0] == (k,)], depth)) for k, v in named)
            )
        parts = []
        for name in dict.fromkeys(path[0] for path in steps if isinstance(path[0], str)):
            found = _read(value, name)
            if found is not UNSET:
                parts.append((name, self.spec(found, [path[1:] for path in steps if path[0] == name], depth)))
        return ObjectSpec(type(value).__name__, tuple(parts))


def _read(owner: Any, *steps: Step) -> Any:
    try:
        return path_value(owner, *steps)
    except Exception:
        return UNSET


def tensor_spec(tensor: Any) -> TensorSpec:
    """The metadata of a tensor."""
    shape = tuple(int(number_now(size)) for size in tensor.shape)
    try:
        strides = tuple(int(number_now(stride)) for stride in tensor.stride())
    except Exception:  # sparse, nested: they have none
        strides = row_order(shape)
    device, dtype = str(tensor.device), str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(dtype, shape, device, None if strides == row_order(shape) else strides)


# ---------------------------------------------------------------- what functions say of objects


def _answered(call: Call, contract: Contract, arguments: Mapping[str, Any], bindings: Bindings) -> Call:
    """The call with what functions of the contract say of its objects, for those that know."""
    asked = list(asked_of_objects(contract))
    owners = {str(path): _read(arguments.get(path.root), *path.steps) for path, _ in asked}
    for path, node in asked:
        spec = call.get(path)
        assert isinstance(node.func, ast.Name)
        if not isinstance(spec, ObjectSpec) or node.func.id == "identity":
            continue
        try:
            given, _ = bindings.values.call_arguments(node.func.id, node)
            answer = functions.IMPLEMENTATIONS[node.func.id](*given)
        except Exception:  # the function does not apply here
            continue
        key = answer_key(node.func.id, tuple(given[1:]))
        told = {**dict(spec.answers), key: _answer(answer, owners)}
        call = call.put(path, ObjectSpec(spec.kind, spec.attributes, tuple(told.items())))
    return call


def _answer(value: Any, owners: Mapping[str, Any]) -> Spec:
    if isinstance(value, memory.Identity):
        known = (path for path, owner in owners.items() if owner is not UNSET and owner is not None)
        return IdentitySpec(next((path for path in known if _is(owners[path], value)), None))
    return _Capture(frozenset()).spec(value, (), _DEEPEST)


def _is(owner: Any, identity: memory.Identity) -> bool:
    try:
        return memory.identity(owner) == identity
    except Exception:
        return False
