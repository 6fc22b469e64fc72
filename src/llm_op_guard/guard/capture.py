"""From the arguments of a live call to the call as data. Runs no code of theirs, keeps none of them alive."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from llm_op_guard.contract.model import Contract, Require
from llm_op_guard.contract.parse import stub_signature
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.validate import clauses_of
from llm_op_guard.guard import functions, memory
from llm_op_guard.guard.bind import Bindings
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
    Step,
    TensorSpec,
    TextSpec,
    TorchSpec,
    answer_key,
    row_order,
)
from llm_op_guard.guard.elements import offenders
from llm_op_guard.guard.reading import UNSET, Snapshot, is_a, is_tensor, number_now, path_value
from llm_op_guard.guard.reads import (
    asked_of_objects,
    functions_called,
    read_paths,
    read_whole,
    texts_spelt,
)

# Of a container so many items are looked at; the others of a list are taken to be as the last of these.
MOST_ITEMS = 64
# Of a row that breaks a rule as a whole so many elements are kept, or none: more where all are the same.
MOST_OF_A_ROW = 32
MOST_OF_AN_EVEN_ROW = 1024
# Of a list of numbers that the contract does not just go through so many are kept, or none: a size has no more.
MOST_OF_A_SIZE = 8
_DEEPEST = 6


class Known(NamedTuple):
    """What the check before a call hands on to the one after it: see `explain`, as `known` and `at_entry`."""

    names: Mapping[str, Any]
    tensors: Mapping[Path, Snapshot | None]


def capture(
    contract: Contract,
    arguments: Mapping[str, Any],
    broken: Collection[str] = (),
    before: Known | None = None,
    *,
    every_number: bool = False,
) -> Call:
    """The call with these arguments, as far as the contract can see it: metadata, numbers, and texts that it spells.

    Of what tensors and lists of numbers hold, the elements that the rules named in `broken` point to, and nothing else.
    With what was known `before` it, it is a call that has returned, and has its `result` among the arguments.
    With `every_number` numbers and keys are kept that the contract does not read: for arguments that are no user's.
    """
    seen = _Capture(contract, every_number)
    call = Call(tuple((name, seen.argument(name, value)) for name, value in arguments.items()))
    if before is not None:
        call = replace(call, entry=_entry(seen, before))
    if broken or any(asked_of_objects(contract)):
        known, after_call = before.names if before is not None else {}, before is not None
        clauses = [clause for clause in contract.clauses if after_call or not clause.after_call]
        bindings = Bindings(contract, clauses, arguments, known, after_call)
        bindings.collect()
        call = _answered(call, contract, arguments, bindings, seen)
        call = _with_offenders(call, contract, broken, bindings, seen)
    return call


def entry_of(contract: Contract, before: Known) -> Entry:
    """What was known before a call, as data."""
    return _entry(_Capture(contract), before)


def _entry(seen: _Capture, before: Known) -> Entry:
    models = {str(path): _model(model) for path, model in before.tensors.items() if model is not None}
    # A symbol or an assigned name is read, or nobody would have given it a value.
    names = {name: seen.argument(name, value, [()]) for name, value in before.names.items()}
    return Entry(tuple(names.items()), tuple(models.items()))


def _model(model: Snapshot) -> TensorSpec:
    shape = tuple(int(number_now(size)) for size in model.shape)
    return TensorSpec(str(model.dtype).removeprefix("torch."), shape, str(model.device))


def _with_offenders(
    call: Call, contract: Contract, broken: Collection[str], bindings: Bindings, seen: _Capture
) -> Call:
    for clause in (clause for rule in broken for clause in clauses_of(contract, rule)):
        if not isinstance(clause.statement, Require) or not bindings.applies(clause):
            continue
        node = clause.statement.expr.node
        for path, index, value in offenders(node, bindings.values):
            place = seen.path(path)
            spec = call.get(place)
            if isinstance(spec, TensorSpec) and index:
                first = sum(i * s for i, s in zip(index, row_order(spec.shape), strict=False))
                call = call.put(place, spec.with_elements(first, _numbers(value, spec, index, path, bindings)))
            elif isinstance(spec, NumberSpec) and not index and type(value) in (bool, int, float):
                call = call.put(place, value)
    return call


def _numbers(value: Any, spec: TensorSpec, index: tuple[int, ...], path: Path, bindings: Bindings) -> list[Number]:
    """The element that breaks a rule, or the elements of a row that does: those stand side by side."""
    if len(index) == len(spec.shape):
        found = [value.item() if is_tensor(value) else value]
    elif math.prod(spec.shape[len(index) :]) > MOST_OF_AN_EVEN_ROW:
        return []
    else:
        try:
            found = bindings.values.path(path)[index].reshape(-1).tolist()
        except Exception:  # what cannot be read is not kept
            return []
        if len(found) > MOST_OF_A_ROW and any(repr(number) != repr(found[0]) for number in found):
            return []
    return [number for number in found if isinstance(number, bool | int | float)]


class _Capture:
    """What makes one call data; texts that are equal in it are so in the data."""

    def __init__(self, contract: Contract, every_number: bool = False) -> None:
        self._every_number = every_number
        self._spelt = frozenset(texts_spelt(contract))
        self._below: dict[str, list[tuple[Step, ...]]] = {}
        for path in read_paths(contract):
            self._below.setdefault(path.root, []).append(path.steps)
        self._whole = read_whole(contract)
        self._keywords = _own_keywords(contract)
        asked = [node for _, node in asked_of_objects(contract) if isinstance(node.func, ast.Name)]
        self._near = [
            tuple(name.value for name in node.args[1:] if isinstance(name, ast.Constant))
            for node in asked
            if isinstance(node.func, ast.Name) and node.func.id == "misspelt"
        ]
        called = functions_called(contract)
        self._counted = called & {"controls", "surrogates"}
        self._asks_of_alignment = "aligned" in called
        self._texts: dict[str, TextSpec] = {}
        self._taken = set(self._spelt)
        self._open: list[int] = []

    def argument(self, name: str, value: Any, below: Iterable[tuple[Step, ...]] = ()) -> Spec:
        """What is kept of an argument."""
        return self._spec(value, Path(name), [*self._below.get(name, []), *below], _DEEPEST)

    def path(self, path: Path) -> Path:
        """Where what stands at a path of the call stands in the data: keys may be others there."""
        return Path(path.root, tuple((self._key(*s),) if isinstance(s, tuple) else s for s in path.steps))

    def may_show(self, value: Any) -> bool:
        """Whether a value may stand in the data as it is: no text of a user."""
        return not is_a(value, str) or value in self._spelt

    def _spec(self, value: Any, at: Path, below: Iterable[tuple[Step, ...]], depth: int) -> Spec:
        """What is kept of a value; `below` are the steps from it that the contract reads, none where it is read."""
        if value is None:
            return None
        if type(value) in (bool, int, float):
            return value if self._every_number or () in below else NumberSpec(type(value).__name__)
        if is_tensor(value):
            return tensor_spec(value, offset=_offset(value) if self._asks_of_alignment else 0)
        if is_a(value, str):
            text = str.__str__(value)
            return text if text in self._spelt else self._text(text)
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
            return self._composite(value, at, [path for path in below if path], depth - 1)
        finally:
            self._open.pop()

    def _composite(self, value: Any, at: Path, steps: list[tuple[Step, ...]], depth: int) -> Spec:
        if type(value) in (tuple, list):
            return self._sequence(value, at, steps, depth)
        if type(value) is dict:
            pairs: dict[str, Spec] = {}
            for key, part in list(value.items())[:MOST_ITEMS]:
                if self._every_number and not (type(key) is str and key.isidentifier()):
                    continue
                name = key if self._is_shown(key, value, at) else self._key(key)
                name = name if type(name) is str and name not in pairs else f"key {len(pairs)}"
                inner = [path[1:] for path in steps if path[0] == (key,)]
                pairs[name] = self._spec(part, at.item(name), inner, depth)
            return MappingSpec(tuple(pairs.items()))
        parts = []
        for name in dict.fromkeys(path[0] for path in steps if isinstance(path[0], str)):
            found = _read(value, name)
            if found is not UNSET:
                inner = [path[1:] for path in steps if path[0] == name]
                parts.append((name, self._spec(found, Path(at.root, (*at.steps, name)), inner, depth)))
        return ObjectSpec(type(value).__name__, tuple(parts))

    def _sequence(self, value: Any, at: Path, steps: list[tuple[Step, ...]], depth: int) -> Spec:
        kind, length = type(value).__name__, len(value)
        is_size = at in self._whole and length <= MOST_OF_A_SIZE
        items: list[Spec] = []
        for number, item in enumerate(value[:MOST_ITEMS]):
            here = {(number,), (number - length,)}
            # What is read of any item is read of each; a number only where the very item is, or all are as a size.
            inner = [path[1:] for path in steps if not isinstance(path[0], str) and (path[1:] or path[0] in here)]
            items.append(self._spec(item, at.item(number), [*inner, *([()] if is_size else [])], depth))
        made_up = {item for item in items if isinstance(item, NumberSpec)}
        alike = length > MOST_OF_A_SIZE and len(made_up) == 1 and all(isinstance(item, NumberSpec) for item in items)
        if self._every_number or not (alike or length > MOST_ITEMS):
            return SequenceSpec(kind, tuple(items))
        each: Spec = items[-1]
        if isinstance(each, bool | int | float):
            each = NumberSpec(type(each).__name__)
        other = tuple((number, item) for number, item in enumerate(items) if repr(item) != repr(each))
        return ManySpec(kind, each, min(length, MOST_REPEATED), other)

    def _is_shown(self, key: Any, owner: Any, at: Path) -> bool:
        """Whether a key may be kept: the programmer's, not a user's."""
        if type(key) is not str:
            return False
        if self._every_number or key in self._spelt or (at == Path(self._keywords) and key.isidentifier()):
            return True
        return any(functions.misspelt(owner, *names) == key for names in self._near if len(owner) <= MOST_ITEMS)

    def _key(self, key: Any) -> Any:
        """What stands for a key of a dict; a number is one of a list too, and stays."""
        if type(key) is int:
            return key
        if not is_a(key, str):
            return f"a {type(key).__name__}"
        text = str.__str__(key)
        return text if text in self._spelt else self._text(text).made_up

    def _text(self, text: str) -> TextSpec:
        if text not in self._texts:
            length = min(len(text), MOST_REPEATED)
            counts = {name: min(int(functions.IMPLEMENTATIONS[name](text)), length) for name in self._counted}
            specs = (TextSpec(length, number, **counts) for number in range(len(self._taken) + 1))
            spec = next((spec for spec in specs if spec.made_up not in self._taken), TextSpec(length, 0, **counts))
            self._taken.add(spec.made_up)
            self._texts[text] = spec
        return self._texts[text]


def _own_keywords(contract: Contract) -> str:
    """The parameter that takes the keyword arguments that have no name of their own; empty where there is none."""
    signature = stub_signature(contract)
    parameters = signature.parameters.values() if signature is not None else ()
    return next((parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD), "")


def _read(owner: Any, *steps: Step) -> Any:
    try:
        return path_value(owner, *steps)
    except Exception:
        return UNSET


def tensor_spec(tensor: Any, *, offset: int = 0) -> TensorSpec:
    """The metadata of a tensor."""
    shape = tuple(int(number_now(size)) for size in tensor.shape)
    try:
        strides = tuple(int(number_now(stride)) for stride in tensor.stride())
    except Exception:  # sparse, nested: they have none
        strides = row_order(shape)
    device, dtype = str(tensor.device), str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(dtype, shape, device, None if strides == row_order(shape) else strides, offset=offset)


def _offset(tensor: Any) -> int:
    try:
        return functions.address(tensor) % ALIGNMENT // int(tensor.element_size())
    except Exception:  # it has no memory, or none that is told of
        return 0


# ---------------------------------------------------------------- what functions say of objects


def _answered(call: Call, contract: Contract, arguments: Mapping[str, Any], bindings: Bindings, seen: _Capture) -> Call:
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
        if not all(seen.may_show(argument) for argument in given[1:]):
            continue
        key = answer_key(node.func.id, tuple(given[1:]))
        told = {**dict(spec.answers), key: _answer(answer, owners, seen)}
        call = call.put(path, ObjectSpec(spec.kind, spec.attributes, tuple(told.items())))
    return call


def _answer(value: Any, owners: Mapping[str, Any], seen: _Capture) -> Spec:
    if isinstance(value, memory.Identity):
        known = (path for path, owner in owners.items() if owner is not UNSET and owner is not None)
        return IdentitySpec(next((path for path in known if _is(owners[path], value)), None))
    return seen.argument("", value, [()])


def _is(owner: Any, identity: memory.Identity) -> bool:
    try:
        return memory.identity(owner) == identity
    except Exception:
        return False
