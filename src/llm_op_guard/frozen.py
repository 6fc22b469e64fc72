"""`@frozen`: `dataclass(frozen=True)`, without the code that `dataclasses` writes and compiles for every class.

That code takes 0.2 to 0.3 ms a class, which for more than a hundred classes was the largest part of importing the
package (decision 0009). Here `dataclasses` only finds the fields, for `fields`, `replace`, `asdict` and `match`; the
methods are closures that know the names of the fields. Every frozen class of the package is made with it.

`__post_init__`, `InitVar`, `order` and `slots` are left out: nothing here needs them. Fields are compared as those of a
tuple, where Python 3.13 compares one by one (one NaN is equal to itself); `dataclass(frozen=True)` takes no such class
for its base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from inspect import Parameter, Signature
from operator import attrgetter
from reprlib import recursive_repr
from typing import Any, NoReturn, TypeVar, dataclass_transform, overload

_Class = TypeVar("_Class", bound=type)
_Fields = tuple[Field[Any], ...]
_Method = Callable[..., Any]

_PUT = object.__setattr__


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@overload
def frozen(cls: _Class, /) -> _Class: ...
@overload
def frozen(*, kw_only: bool) -> Callable[[_Class], _Class]: ...
def frozen(cls: Any = None, /, *, kw_only: bool = False) -> Any:
    """A class of the values of its annotated fields, which are given once and cannot be assigned to.

    Two instances of one class are equal when their fields are. `kw_only`: the fields it adds are given by name.
    """
    return _define(cls, kw_only=False) if cls is not None else lambda cls: _define(cls, kw_only=kw_only)


def _define(cls: Any, *, kw_only: bool) -> Any:
    if hasattr(cls, "__post_init__"):
        raise TypeError(f"{cls.__qualname__}: @frozen calls no __post_init__")
    if cls.__doc__ is None:  # a private class, or python -OO: `dataclasses` would work out a signature to stand there
        cls.__doc__ = cls.__name__
    # What the class says itself is kept. Beside an `__eq__` of its own, Python has put the None for `__hash__`.
    own = {name for name, value in cls.__dict__.items() if name != "__hash__" or value is not None}
    cls = dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
    of_class = fields(cls)
    init = _init(cls, of_class)
    setattr_, delattr_ = _refusals(cls, of_class)
    methods = {
        "__init__": init,
        "__signature__": _Parameters(init),
        "__repr__": _repr,
        "__eq__": _eq(of_class),
        "__hash__": _hash(of_class),
        "__setattr__": setattr_,
        "__delattr__": delattr_,
    }
    for name, method in methods.items():
        if name not in own:
            setattr(cls, name, method)
    return cls


def _init(cls: Any, of_class: _Fields) -> _Method:
    names = [each.name for each in of_class]
    positional = [each.name for each in of_class if each.init and not each.kw_only]
    count = len(names) if positional == names else None  # as many values in a row are all of them

    rows = [(each.name, each.init, each.default, each.default_factory) for each in of_class]

    def all_of(values: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        given = {**dict(zip(positional, values)), **named} if values else named  # noqa: B905 - counted below
        state = {}
        taken = 0
        for name, may_be_given, default, make in rows:
            if may_be_given and name in given:
                state[name] = given[name]
                taken += 1
            elif make is not MISSING:
                state[name] = make()
            elif may_be_given:
                if default is MISSING:
                    _refuse(cls, values, named)
                state[name] = default
        if taken != len(values) + len(named):
            _refuse(cls, values, named)
        return state

    def init(self: object, /, *values: Any, **named: Any) -> None:
        if named or len(values) != count:
            for name, value in all_of(values, named).items():
                _PUT(self, name, value)
        else:
            for name, value in zip(names, values):  # noqa: B905 - as many as there are names
                _PUT(self, name, value)

    return init


def _refuse(cls: Any, values: tuple[Any, ...], named: dict[str, Any]) -> NoReturn:
    try:
        _signature(cls).bind(*values, **named)
    except TypeError as error:
        raise TypeError(f"{cls.__qualname__}: {error}") from None
    raise AssertionError


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


def _eq(of_class: _Fields) -> _Method:
    compared = _values([each.name for each in of_class if each.compare])

    def eq(self: object, other: object) -> Any:
        return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

    return eq


def _hash(of_class: _Fields) -> _Method:
    hashed = _values([each.name for each in of_class if (each.compare if each.hash is None else each.hash)])

    def hash_(self: object) -> int:
        return hash(hashed(self))

    return hash_


def _values(names: list[str]) -> Callable[[object], tuple[Any, ...]]:
    if not names:
        return lambda instance: ()  # noqa: ARG005
    value = attrgetter(*names)
    return value if len(names) > 1 else lambda instance: (value(instance),)


def _refusals(cls: Any, of_class: _Fields) -> tuple[_Method, _Method]:
    names = frozenset(each.name for each in of_class)

    # A subclass that is no @frozen class may have attributes beside the fields.
    def set_(self: object, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        _PUT(self, name, value)

    def delete(self: object, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        object.__delattr__(self, name)

    return set_, delete


class _Parameters:
    """The `__signature__` of a class, made when `inspect.signature` or `help` asks for it."""

    def __init__(self, init: _Method) -> None:
        self._init = init

    def __get__(self, instance: object, owner: Any) -> Signature:
        if instance is not None or owner.__init__ is not self._init:
            raise AttributeError("__signature__")
        return _signature(owner)


def _signature(cls: Any) -> Signature:
    parameters = [_parameter(each) for each in fields(cls) if each.init]
    return Signature(sorted(parameters, key=lambda parameter: parameter.kind), return_annotation=None)


def _parameter(each: Field[Any]) -> Parameter:
    kind = Parameter.KEYWORD_ONLY if each.kw_only else Parameter.POSITIONAL_OR_KEYWORD
    default = Parameter.empty if each.default is MISSING else each.default
    if each.default_factory is not MISSING:
        default = _FACTORY
    return Parameter(each.name, kind, default=default, annotation=each.type)


class _Factory:
    """Stands in a signature for a default that is made anew for each instance."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()
