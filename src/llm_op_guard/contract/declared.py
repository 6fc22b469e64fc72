"""What declarations say that the paths of a contract can be."""

from __future__ import annotations

import ast

from llm_op_guard.contract.model import (
    Alternative,
    Contract,
    Declare,
    DeviceType,
    Dim,
    DtypeName,
    DtypeSet,
    Like,
    ListType,
    LiteralType,
    NoneType,
    ScalarType,
    Size,
    SizeOneOf,
    TensorType,
    TupleType,
    Type,
    dim_symbol,
)
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.possible import (
    ABSENT,
    ALL_NAMES,
    ALL_NUMBERS,
    ANYTHING,
    OTHER,
    SIZES,
    TRUTHS,
    WHOLE,
    Names,
    Numbers,
    Possible,
    joined,
)
from llm_op_guard.contract.vocabulary import dtype_names

_SIZE = Possible(SIZES)
_DTYPE = Possible(dtypes=ALL_NAMES)


class Declared:
    """What each declaration of one contract says of a path."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._parameters = frozenset(contract.parameters)
        self._shown: dict[int, set[str]] = {}

    def by_itself(self, path: Path) -> Possible:
        """What a path can be, whatever is declared."""
        kind = self._contract.symbols.get(path.root)
        if path.root in self._contract.constants and not path.steps:
            return Possible.of(self._contract.constants[path.root])
        if kind == "dtype" and not path.steps:
            return _DTYPE.join(ABSENT)
        if kind == "size" and not path.steps:
            return _SIZE.join(ABSENT)
        return ANYTHING

    def names(self, statement: Declare) -> set[str]:
        """The names that a declaration says something of: its root, and the symbols that it shows."""
        return {statement.path.root, *self._symbols(statement)}

    def _symbols(self, statement: Declare) -> set[str]:
        if id(statement) not in self._shown:
            self._shown[id(statement)] = _shown(statement.type)
        return self._shown[id(statement)]

    def told(self, path: Path, statement: Declare) -> Possible | None:
        """What one declaration says of a path, if anything."""
        declared, at = statement.type, statement.path
        always_there = not at.steps and (at.root in self._parameters or at.root == "result")
        if path.root == at.root and path.steps[: len(at.steps)] == at.steps:
            value = _within(declared, path.steps[len(at.steps) :])
            return value if always_there else value.join(ABSENT)
        kind = self._contract.symbols.get(path.root)
        if not path.steps and always_there and path.root in self._symbols(statement):
            if kind == "dtype":
                return _DTYPE
            if kind == "size":
                return _SIZE
        return None


# ---------------------------------------------------------------- what a type says


def _within(declared: Type, steps: tuple[str | tuple[str | int], ...]) -> Possible:
    """What a path can be that leads into a value of this type."""
    return joined([_within_one(alternative, steps) for alternative in declared.alternatives])


def _within_one(alternative: Alternative, steps: tuple[str | tuple[str | int], ...]) -> Possible:
    match alternative:
        case NoneType():
            return ABSENT if steps else Possible.of(None)
        case LiteralType(value=value) if not steps:
            return Possible.of(value)
        case ScalarType(text=kind) if not steps:
            return _SCALARS.get(kind, ANYTHING)
        case TupleType(items=items) if steps and isinstance(steps[0], tuple) and isinstance(steps[0][0], int):
            index = steps[0][0]
            return _within(items[index], steps[1:]) if -len(items) <= index < len(items) else ABSENT
        case ListType(item=item) if steps and isinstance(steps[0], tuple):
            return _within(item, steps[1:]).join(ABSENT)
        case TupleType() | ListType() if not steps:
            return OTHER
        case Like():
            return _of_tensor(TensorType((DtypeSet("any"),), None, None, alternative.text), steps)
        case TensorType():
            return _of_tensor(alternative, steps)
    return ANYTHING


def _of_tensor(tensor: TensorType, steps: tuple[str | tuple[str | int], ...]) -> Possible:
    dims = tensor.dims
    rest = tensor.rest_index
    match steps:
        case ():
            return OTHER
        case ("ndim",):
            if dims is None:
                return _SIZE
            return Possible(Numbers(frozenset({len(dims)})) if rest is None else Numbers(low=len(dims) - 1, whole=True))
        case ("shape", (int() as index,)):
            if dims is None:
                return _SIZE.join(ABSENT)
            if rest is None:
                return _of_dim(dims[index]) if -len(dims) <= index < len(dims) else ABSENT
            if 0 <= index < rest or rest < len(dims) + index < len(dims):
                return _of_dim(dims[index])
            return _SIZE if -len(dims) < index < len(dims) - 1 else _SIZE.join(ABSENT)
        case ("dtype",):
            return joined([_of_dtype(dtype) for dtype in tensor.dtypes])
        case ("device",):
            devices = tensor.devices
            if devices is None or not all(isinstance(device, DeviceType) for device in devices):
                return Possible(devices=ALL_NAMES)
            return Possible(devices=Names(frozenset(d.name for d in devices if isinstance(d, DeviceType))))
    return ANYTHING


def _of_dim(dim: Dim) -> Possible:
    options = (dim.expr,) if isinstance(dim, Size) else dim.options if isinstance(dim, SizeOneOf) else ()
    values = [option.node.value for option in options if isinstance(option.node, ast.Constant)]
    return joined([Possible.of(value) for value in values]) if values and len(values) == len(options) else _SIZE


def _of_dtype(dtype: object) -> Possible:
    if isinstance(dtype, DtypeName | DtypeSet) and dtype != DtypeSet("any"):
        return Possible(dtypes=Names(dtype_names(dtype)))
    return _DTYPE


_SCALARS = {
    "int": Possible(WHOLE),
    "float": Possible(ALL_NUMBERS),
    "bool": Possible(TRUTHS),
    "str": Possible(texts=ALL_NAMES),
    "dict": OTHER,
}


def _shown(declared: Type) -> set[str]:
    """The symbols that every value of a type shows directly."""
    found: set[str] | None = None
    for alternative in declared.alternatives:
        names: set[str] = set()
        if isinstance(alternative, TensorType):
            told = (*map(dim_symbol, alternative.dims or ()), alternative.dtype_symbol, alternative.device_symbol)
            names = {name for name in told if name is not None}
        elif isinstance(alternative, TupleType):
            names = set().union(*(_shown(item) for item in alternative.items))
        found = names if found is None else found & names
    return found or set()
