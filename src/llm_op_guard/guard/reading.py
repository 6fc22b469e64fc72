"""Reading arguments without running anybody's code, and what a reader may meet.

Attributes come from instance dictionaries, the tables of `nn.Module` and plain class attributes; properties and
methods are never called, and a `__getattribute__` is asked for `__dict__` only. What cannot be read so is not
applicable.
"""

from __future__ import annotations

import sys
from types import MemberDescriptorType
from typing import Any, NamedTuple

from llm_op_guard.contract.vocabulary import TENSOR_ATTRIBUTES


class NotApplicable(Exception):  # noqa: N818 - not an error: the rule has nothing to say about this call
    """What an expression reads is absent, or is not of a kind that it can be applied to."""


class Broken(Exception):  # noqa: N818 - not an error of ours: the call is
    """An expression has no value because the call is wrong: 129 / 2, n % 0. The argument says so in words."""


# What evaluating an expression on strange arguments may raise besides `NotApplicable`; all of it means the same.
INAPPLICABLE = (NotApplicable, TypeError, OverflowError, RuntimeError)

_TABLES = ("_parameters", "_buffers", "_modules")
_UNSET: Any = object()


class _NoTensor:
    pass


_tensor_class: type | None = None


def tensor_class() -> type:
    """`torch.Tensor` where torch is loaded, else a class that nothing is an instance of."""
    global _tensor_class  # noqa: PLW0603 - looked up once: this is on the way of every attribute that is read
    if _tensor_class is None:
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "Tensor"):
            return _NoTensor
        _tensor_class = torch.Tensor
    return _tensor_class


def is_tracing() -> bool:
    """Whether a program is traced or compiled at the moment; Dynamo folds it to True."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def is_tensor(value: object) -> bool:
    """Whether `value` is a torch tensor."""
    try:  # as `is_a` does: asked for everything that is read, most of all where nothing else is done
        return isinstance(value, _tensor_class or tensor_class())
    except Exception:
        return False


def is_a(value: object, kind: Any) -> bool:
    """`isinstance`, also for objects whose `__class__` raises."""
    try:
        return isinstance(value, kind)
    except Exception:
        return False


def is_beyond(value: Any) -> bool:
    """Whether `value` is beyond what the language speaks of.

    A tensor that is nested (it has no one shape), quantised (its dtype says nothing about its values) or not
    initialised yet (it has no shape); or something that takes torch's functions over by a `__torch_function__` of its
    own, as the stand-ins of `torch.fx` and `torch.nn.attention.bias.CausalBias` do: it alone knows what they mean, and
    what its shape is of.
    """
    if not is_tensor(value):
        return any("__torch_function__" in vars(cls) for cls in type(value).__mro__)
    torch = sys.modules["torch"]
    default = torch._C._disabled_torch_function_impl  # of parameters, fake tensors, DTensor
    for cls in type(value).__mro__[: type(value).__mro__.index(torch.Tensor)]:
        if vars(cls).get("__torch_function__", default) is not default:
            return True
    return torch.nn.parameter.is_lazy(value) or bool(value.is_nested) or bool(value.is_quantized)


# Those for which autocast can be on.
_AUTOCAST_DEVICES = ("cuda", "cpu", "xpu", "mps", "hpu", "xla")


def autocast_dtype(one: Any, other: Any) -> Any:
    """The dtype that autocast, where it is on, casts tensors of two floating dtypes to; None where it does not.

    It leaves float64 alone. It is asked for no device in particular: which of two tensors was met first must not
    change a verdict.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    for dtype in (one, other):
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype == torch.float64:
            return None
    for device in _AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def agreed(one: Any, other: Any) -> Any:
    """The dtype that a symbol stands for which was seen as these two; raises Broken unless autocast makes them one."""
    dtype = autocast_dtype(one, other)
    if dtype is None:
        raise Broken(f"{one} is not {other}")
    return dtype


def apart(one: Any, other: Any) -> bool:
    """Whether two dtypes that are not the same stay apart: autocast does not make them one."""
    return autocast_dtype(one, other) is None


def device_type(value: Any) -> str:
    """The type of a device; raises NotApplicable for what is none, a text too."""
    torch = sys.modules.get("torch")
    if torch is None or not is_a(value, torch.device):
        raise NotApplicable
    return str(value.type)


class DeviceKind:
    """`cpu` in an expression: equal to every device of that type."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return device_type(other) == self.name

    __hash__ = None  # type: ignore[assignment] # it equals many


def attribute(owner: Any, name: str) -> Any:
    """Read one attribute; raises NotApplicable where it is absent or would run code."""
    value = optional_attribute(owner, name)
    if value is _UNSET:
        raise NotApplicable
    return value


def optional_attribute(owner: Any, name: str) -> Any:
    """Read one attribute, `UNSET` where it is absent or would run code."""
    if is_tensor(owner):
        return getattr(owner, name) if name in TENSOR_ATTRIBUTES else _UNSET
    if is_tracing():
        if isinstance(getattr(type(owner), name, None), property):
            return _UNSET
        # The program that is traced sees what we read: a plain read keeps its parameters' names.
        return getattr(owner, name, _UNSET)
    try:
        own = owner.__dict__
    except Exception:
        own = None
    if type(own) is dict:
        if name in own:
            return own[name]
        if "_parameters" in own:
            for table in _TABLES:
                entries = own.get(table)
                if type(entries) is dict and name in entries:
                    return entries[name]
    for cls in owner.__mro__ if is_a(owner, type) else type(owner).__mro__:
        if name in cls.__dict__:
            value = cls.__dict__[name]
            if isinstance(value, MemberDescriptorType) or type(value).__name__ == "_tuplegetter":
                try:
                    return object.__getattribute__(owner, name)  # a slot or a namedtuple field: no code behind it
                except AttributeError:
                    return _UNSET
            return _UNSET if any("__get__" in kind.__dict__ for kind in type(value).__mro__) else value
    return _UNSET


UNSET = _UNSET


def item(owner: Any, key: Any) -> Any:
    """Read one item of a dict, list, tuple, shape or container of `torch.nn`, as its own class would.

    Raises NotApplicable for a key that is not there and for anything else, a subclass with a `__getitem__` of its own
    among it.
    """
    if is_a(owner, dict):
        if not dict.__contains__(owner, key):
            raise NotApplicable
        return dict.__getitem__(owner, key)
    if is_a(owner, list | tuple):
        if not is_plain_sequence(owner) or not isinstance(key, int) or not -len(owner) <= key < len(owner):
            raise NotApplicable
        return owner[key]
    return _contained(owner, key)


def is_plain_sequence(value: Any) -> bool:
    """Whether a value is a list or tuple whose class leaves its length, items and order to Python."""
    cls = type(value)
    if cls in (list, tuple) or cls.__module__ == "torch":  # torch: a shape
        return is_a(value, list | tuple)
    names = ("__len__", "__getitem__", "__iter__")
    return any(
        is_a(value, kind) and all(getattr(cls, name) is getattr(kind, name) for name in names) for kind in (list, tuple)
    )


def as_index(value: Any) -> Any:
    """A value that something is looked up with; raises NotApplicable for one whose class would have a say in that.

    Not to be found is another thing than not to be looked for: `has` tells the two apart.
    """
    if value is None or type(value) is str:
        return value
    value = plain(value)  # of an argument that is declared as int, NumPy's too
    if type(value).__name__ == "SymInt":  # where a traced program is explained
        value = number_now(value)
    if not _is_key(value):
        raise NotApplicable
    return value


def _is_key(key: Any) -> bool:
    """Whether looking a key up in a dict runs no code of its class."""
    kind = type(key)
    if kind is tuple:
        return all(_is_key(part) for part in key)
    if kind in (str, int, bool, float) or key is None:
        return True
    if kind.__module__ == "torch":
        return kind.__name__ in ("dtype", "device")
    bases: tuple[Any, ...] = (str, int)
    return any(kind.__hash__ is base.__hash__ and kind.__eq__ is base.__eq__ for base in bases)


def _contained(owner: Any, key: Any) -> Any:
    """An item of a container of `torch.nn`, from its tables."""
    nn = sys.modules.get("torch.nn")
    if nn is None or not is_a(owner, nn.Module):
        raise NotApplicable
    reader = getattr(type(owner), "__getitem__", None)
    if reader in (nn.ModuleList.__getitem__, nn.Sequential.__getitem__):
        return item(list(attribute(owner, "_modules").values()), key)
    if reader is nn.ModuleDict.__getitem__:
        return item(attribute(owner, "_modules"), key)
    if reader is nn.ParameterDict.__getitem__:
        item(attribute(owner, "_keys"), key)  # it is one of them
        return attribute(owner, key)
    if reader is nn.ParameterList.__getitem__:
        return attribute(owner, str(item(tuple(range(attribute(owner, "_size"))), key)))
    raise NotApplicable


def path_value(owner: Any, *steps: str | tuple[str | int]) -> Any:
    """Read several attributes and items in a row, `UNSET` as soon as one is absent."""
    for step in steps:
        if isinstance(step, str):
            owner = optional_attribute(owner, step)
        elif type(owner) is dict:
            owner = owner.get(step[0], _UNSET)
        else:
            try:
                owner = item(owner, step[0])
            except NotApplicable:
                return _UNSET
        if owner is _UNSET:
            return _UNSET
    return owner


def present(owner: Any, *steps: str | tuple[str | int]) -> bool:
    """Whether a path exists and is not None."""
    value = path_value(owner, *steps)
    return value is not _UNSET and value is not None


def plain(value: Any) -> Any:
    """The value itself when it can stand in arithmetic and comparisons; raises NotApplicable for tensors and objects.

    A tensor would answer a comparison with a tensor, and turning that into a truth waits for the device.
    """
    if is_a(value, float) and _is_of_numpy(value):
        return float(value)
    if value is None or is_a(value, int | float | str):
        return value
    if is_a(value, tuple | list):
        return _plain_sequence(value)
    torch = sys.modules.get("torch")
    if torch is not None and is_a(
        value, torch.dtype | torch.device | torch.layout | torch.SymInt | torch.SymFloat | torch.SymBool
    ):
        return value
    if is_integer(value):
        return value.__index__()  # of a NumPy integer, say: its own arithmetic overflows
    if _is_of_numpy(value) and is_real(value):
        return float(value)
    raise NotApplicable


# Tuples of tuples beyond that are no size and no bound; comparing them could take for ever.
_DEEPEST = 4
# More items than any list of layers, stop tokens or images has: what is longer is not gone through in a call.
LONGEST = 100_000
# What needs no look at each item, and from how many items on it pays to ask so.
_OWN = frozenset({int, float, str, bool, type(None)})
_MANY = 32


class _SomeItems:
    """A list or tuple that is not empty, whose items are tensors or objects, or more than are gone through.

    As a condition by itself it is true; whatever else is asked of it does not apply.
    """

    def __bool__(self) -> bool:
        return True

    def _not_applicable(self, *_: object) -> bool:
        raise NotApplicable

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _not_applicable
    __hash__ = None  # type: ignore[assignment] # nothing equals it


SOME_ITEMS = _SomeItems()


def _plain_sequence(value: Any) -> Any:
    if type(value).__module__ == "torch":  # a shape
        return value
    if not is_plain_sequence(value):
        raise NotApplicable
    try:
        return _plain_items(value, _DEEPEST, [LONGEST])
    except NotApplicable:
        return SOME_ITEMS


def _plain_items(value: Any, depth: int, left: list[int]) -> Any:
    """The items of a list or tuple, of which all within it together may have as many as are `left`."""
    if type(value).__module__ == "torch":
        return value
    if depth == 0 or not is_plain_sequence(value):
        raise NotApplicable
    left[0] -= len(value)
    if left[0] < 0:
        raise NotApplicable
    if len(value) > _MANY and not is_tracing() and _OWN.issuperset(map(type, value)):
        return tuple(value)
    return tuple(_plain_items(v, depth - 1, left) if is_a(v, tuple | list) else plain(v) for v in value)


def compared(value: Any) -> Any:
    """As `plain`, of what is compared: an optional argument that is None has no value."""
    if value is None:
        raise NotApplicable
    return plain(value)


def _is_of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy"


def is_integer(value: Any) -> bool:
    """Whether a value counts as `int`: Python, NumPy and symbolic integers; bool too; never a tensor."""
    if is_a(value, int):
        return True
    return _is_known_number(value) and hasattr(type(value), "__index__") and not hasattr(type(value), "__len__")


def number_now(value: Any) -> int:
    """The number that an integer is; for a symbol of a traced program the one it has now, without making it that."""
    node = getattr(value, "node", None)
    hint = getattr(node, "hint", None)
    return hint if isinstance(hint, int) else int(value)


def is_real(value: Any) -> bool:
    """Whether a value counts as `float`: any real number that is not a tensor."""
    if is_a(value, int | float):
        return True
    return _is_known_number(value) and not hasattr(type(value), "__len__") and hasattr(type(value), "__float__")


def _is_known_number(value: Any) -> bool:
    """Whether a class that is not Python's own is one of numbers all the same: of NumPy, or a size that is a symbol."""
    torch = sys.modules.get("torch")
    return _is_of_numpy(value) or (torch is not None and is_a(value, torch.SymInt | torch.SymFloat))


def is_foreign_number(value: Any) -> bool:
    """Whether a value has arithmetic of its own (Decimal, a class with `__index__`), of which nothing is known here."""
    if is_a(value, int | float) or is_tensor(value) or _is_known_number(value):
        return False
    names = {name for cls in type(value).__mro__ for name in cls.__dict__}
    return bool(names & {"__index__", "__float__"}) and "__len__" not in names


def shape_of(value: Any) -> Any:
    """The shape of a tensor; raises NotApplicable for anything else (a NumPy array is not a tensor)."""
    if not is_tensor(value):
        raise NotApplicable
    return value.shape


class Snapshot(NamedTuple):
    """What a tensor looked like before the call, which may change its arguments in place."""

    dtype: Any
    shape: Any
    device: Any


def tensor_at(owner: Any, *steps: str | tuple[str | int]) -> Any:
    """The tensor that a path leads to, or None."""
    value = path_value(owner, *steps)
    return value if is_tensor(value) else None


def snapshot(owner: Any, *steps: str | tuple[str | int]) -> Snapshot | None:
    """What the tensor looks like that a path leads to, or None."""
    value = tensor_at(owner, *steps)
    return None if value is None else Snapshot(value.dtype, value.shape, value.device)


def known(value: Any) -> Any:
    """A symbol or assigned name that may have no value; raises NotApplicable where it has none."""
    if value is None:
        raise NotApplicable
    return value


def there(value: Any) -> Any:
    """What was read at a path; raises NotApplicable where there is nothing."""
    if value is _UNSET:
        raise NotApplicable
    return value


def whole(value: Any) -> Any:
    """A whole number, as a size is; raises NotApplicable for anything else."""
    if not is_integer(value):
        raise NotApplicable
    return value


def kept(value: Any) -> Any:
    """What a name given before the call stands for after it: a list or dict as it was, whatever is done to it."""
    return list(value) if type(value) is list else dict(value) if type(value) is dict else value


def parts(value: Any, count: int) -> Any:
    """The items of a sequence of just this length; raises NotApplicable for anything else."""
    if not is_a(value, tuple | list) or len(value) != count:
        raise NotApplicable
    return value


SCALAR_TESTS: dict[str, Any] = {
    "int": is_integer,
    "float": is_real,
    # NumPy's bool is called bool_ up to version 1 and bool since.
    "bool": lambda value: type(value).__name__ in ("bool", "bool_", "SymBool"),
    "str": lambda value: is_a(value, str),
    "dict": lambda value: is_a(value, dict),
    "callable": callable,
    "object": lambda value: True,  # noqa: ARG005
}
