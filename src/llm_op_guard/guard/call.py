"""A call as data: what a contract sees of its arguments, and nothing of what they hold.

One noun for the call of a violation, for those that are made from a contract, and for what a capsule keeps. All of it
is immutable and JSON-ready. A tensor keeps its metadata, and of its elements only those that a rule named.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from llm_op_guard.contract.path import Path
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.reading import UNSET

Number = int | float | bool
# Of a list or text, as data: longer ones are cut.
MOST_REPEATED = 1_000_000
# Where PyTorch begins the memory of a tensor of the CPU, in bytes; of CUDA at a multiple.
ALIGNMENT = 64
Step = str | tuple[str | int]


@frozen
class TensorSpec:
    """A tensor without its contents.

    `strides` is None where elements lie in row order without gaps. The first element lies `offset` elements past an
    address that `ALIGNMENT` divides. `fill` are the numbers that elements
    repeat in row order, None for noise; `at` are single elements, by their place in row order.
    """

    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"
    strides: tuple[int, ...] | None = None
    fill: tuple[Number, ...] | None = None
    at: tuple[tuple[int, Number], ...] = ()
    offset: int = 0

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    def with_elements(self, first: int, values: Iterable[Number]) -> TensorSpec:
        """The same with some elements set that stand side by side, from the place of the first."""
        return replace(self, at=tuple((dict(self.at) | dict(enumerate(values, first))).items()))

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        text += "" if self.device == "cpu" else f" on {self.device}"
        text += "" if self.strides is None else f", strides {self.strides}"
        text += "" if self.offset == 0 else f", {self.offset} elements past alignment"
        text += "" if self.fill is None else f" of {', '.join(map(str, self.fill[:8]))}{'…' * (len(self.fill) > 8)}"
        return text + "".join(f", element {place} is {value}" for place, value in self.at)


@frozen
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


@frozen
class SequenceSpec:
    """A tuple or list."""

    kind: str
    items: tuple[Spec, ...]

    def __str__(self) -> str:
        inside = ", ".join(map(str, self.items))
        return f"({inside})" if self.kind == "tuple" else f"[{inside}]"


@frozen
class ManySpec:
    """A tuple or list of `length` items that are alike; `at` are those that are not, by number."""

    kind: str
    each: Spec
    length: int
    at: tuple[tuple[int, Spec], ...] = ()

    def __str__(self) -> str:
        return f"a {self.kind} of {self.length}" + "".join(f", item {number} is {item}" for number, item in self.at)


@frozen
class MappingSpec:
    """A dict whose keys are names; others are made up."""

    items: tuple[tuple[str, Spec], ...]

    def __str__(self) -> str:
        return "{" + ", ".join(f"{name}: {value}" for name, value in self.items) + "}"


@frozen
class TextSpec:
    """A text that the contract does not spell: only its length is kept, and which other texts of the call it equals.

    Different texts of one length have different `number`s. Where the contract counts them, how many `controls` and
    `surrogates` it has.
    """

    length: int
    number: int = 0
    controls: int = 0
    surrogates: int = 0

    @property
    def made_up(self) -> str:
        """A text of that length, another one for another number."""
        odd = ("\x01" * self.controls + "\ud800" * self.surrogates)[: self.length]
        plain, number = ["x"] * (self.length - len(odd)), self.number
        for place in reversed(range(len(plain))):
            number, letter = divmod(number, 26)
            plain[place] = chr(ord("a") + (ord("x") - ord("a") + letter) % 26)
        return odd + "".join(plain)

    def __str__(self) -> str:
        return f"a text of {self.length}"


@frozen
class NumberSpec:
    """A number that no statement of the contract reads: only its kind is kept."""

    kind: str

    def __str__(self) -> str:
        return f"{'an' if self.kind == 'int' else 'a'} {self.kind}"


@frozen
class TorchSpec:
    """A dtype or a device."""

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name


@frozen
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
    | ManySpec
    | MappingSpec
    | TextSpec
    | NumberSpec
    | TorchSpec
    | int
    | float
    | bool
    | str
    | None
)


@frozen
class Entry:
    """What a contract knew before a call that has returned: its promises are held against that.

    `names` are the values that symbols and assigned names had, `tensors` what those looked like, by path, that types
    refer to.
    """

    names: tuple[tuple[str, Spec], ...] = ()
    tensors: tuple[tuple[str, TensorSpec], ...] = ()


@frozen
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
        case ManySpec(each=each, length=length, at=at), (int() as index,) if -length <= index < length:
            return dict(at).get(index % length, each)
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
    if isinstance(owner, ManySpec) and -owner.length <= step[0] < owner.length:
        return replace(owner, at=tuple((dict(owner.at) | {step[0] % owner.length: inner}).items()))
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
