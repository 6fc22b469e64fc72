"""`@frozen`: what it makes behaves as `dataclass(frozen=True)` does, of whose methods it has none."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_op_guard.contract.model import Contract
from llm_op_guard.frozen import frozen


@frozen
class Point:
    """Two numbers, a label that does not count, and what is made for each."""

    x: int
    y: int = 2
    label: str = field(default="", compare=False)
    seen: list[int] = field(default_factory=list, compare=False, repr=False)
    kept: dict[str, int] = field(init=False, default_factory=dict, compare=False, repr=False)

    of_all: ClassVar[int] = 7

    @cached_property
    def total(self) -> int:
        return self.x + self.y


@frozen
class Pair:
    """Nothing but what stands in a row."""

    left: Any
    right: Any


@frozen(kw_only=True)
class Named:
    """Fields that have to be named."""

    a: int
    b: int = 1


@frozen(kw_only=True)
class More(Named):
    """One more of them."""

    c: int


@frozen
class Empty:
    """No field."""


@frozen
class One:
    """A single field."""

    value: Any


class TestMaking:
    def test_values_in_a_row(self) -> None:
        assert vars(Pair(1, "a")) == {"left": 1, "right": "a"}

    def test_values_by_name(self) -> None:
        assert vars(Pair(right=2, left=1)) == {"left": 1, "right": 2}
        assert list(vars(Pair(right=2, left=1))) == ["left", "right"]

    def test_defaults(self) -> None:
        point = Point(1)
        assert (point.x, point.y, point.label, point.seen, point.kept) == (1, 2, "", [], {})

    def test_what_is_made_for_each_is_its_own(self) -> None:
        assert Point(1).seen is not Point(1).seen
        assert Point(1, seen=(mine := [])).seen is mine

    def test_a_field_may_be_called_self(self) -> None:
        made = frozen(type("Odd", (), {"__annotations__": {"self": "int", "cls": "int"}, "__doc__": ""}))
        assert vars(made(1, cls=2)) == {"self": 1, "cls": 2}

    def test_named_only(self) -> None:
        assert vars(More(a=1, c=3)) == {"a": 1, "b": 1, "c": 3}

    def test_no_field_and_a_single_one(self) -> None:
        assert vars(Empty()) == {}
        assert vars(One([])) == {"value": []}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pair(1), "Pair: missing a required argument: 'right'"),
        (lambda: Pair(right=1), "Pair: missing a required argument: 'left'"),
        (lambda: Pair(1, 2, 3), "Pair: too many positional arguments"),
        (lambda: Pair(1, 2, left=3), "Pair: multiple values for argument 'left'"),
        (lambda: Pair(1, 2, middle=3), "Pair: got an unexpected keyword argument 'middle'"),
        (lambda: Pair(1, 2, 3, middle=3), "Pair: too many positional arguments"),
        (lambda: Empty(1), "Empty: too many positional arguments"),
        (lambda: Named(1), "Named: too many positional arguments"),
        (lambda: Point(1, kept={}), "Point: got an unexpected keyword argument 'kept'"),
        (lambda: Point(1, of_all=8), "Point: got an unexpected keyword argument 'of_all'"),
    ],
)
def test_wrong_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value) == message


def test_a_name_is_missing() -> None:
    # Python 3.12 says "keyword-only argument".
    with pytest.raises(TypeError, match=r"^More: missing a required .*'c'$"):
        More(a=1)


class TestEquality:
    def test_of_one_class_and_values(self) -> None:
        assert Pair(1, 2) == Pair(1, 2)
        assert Pair(1, 2) != Pair(1, 3)
        assert hash(Pair(1, 2)) == hash(Pair(1, 2))

    def test_fields_that_do_not_count(self) -> None:
        assert Point(1, label="a") == Point(1, label="b", seen=[1])
        assert hash(Point(1, label="a")) == hash(Point(1, label="b"))

    def test_another_class_is_never_equal(self) -> None:
        assert Pair(1, 2) != (1, 2)
        assert Named(a=1) != More(a=1, c=1)
        assert Empty() == Empty()
        assert Empty() != One(())

    def test_the_same_object_in_a_single_field(self) -> None:
        assert One([1]) == One([1])
        assert One([1]) != One([2])
        with pytest.raises(TypeError, match="unhashable"):
            hash(One([1]))

    def test_own_methods_are_kept(self) -> None:
        @frozen
        class Fold:  # noqa: PLW1641
            text: str

            def __eq__(self, other: object) -> bool:
                return isinstance(other, Fold) and self.text.lower() == other.text.lower()

            def __repr__(self) -> str:
                return "fold"

        @frozen
        class Hashed(Fold):
            def __hash__(self) -> int:
                return 5

        assert Fold("A") == Fold("a")
        assert repr(Fold("A")) == "fold"
        assert hash(Fold("A")) == hash(Fold("A"))
        assert hash(Hashed("A")) == 5


class TestAssignment:
    def test_is_refused(self) -> None:
        point = Point(1)
        with pytest.raises(FrozenInstanceError, match=r"^cannot assign to field 'x'$"):
            point.x = 2  # type: ignore[misc]
        with pytest.raises(FrozenInstanceError, match=r"^cannot delete field 'x'$"):
            del point.x
        with pytest.raises(FrozenInstanceError, match=r"^cannot assign to field 'other'$"):
            point.other = 2  # type: ignore[attr-defined]
        assert point.x == 1

    def test_a_plain_subclass_has_attributes_of_its_own(self) -> None:
        class Loose(Point):
            pass

        loose = Loose(1)
        loose.other = 2  # type: ignore[attr-defined]
        del loose.other  # type: ignore[attr-defined]
        with pytest.raises(FrozenInstanceError):
            loose.x = 2  # type: ignore[misc]

    def test_what_is_worked_out_once(self) -> None:
        point = Point(1)
        assert point.total == 3
        assert vars(point)["total"] == 3


class TestWithTheStandardLibrary:
    def test_dataclasses(self) -> None:
        assert is_dataclass(Point)
        assert [each.name for each in fields(Point)] == ["x", "y", "label", "seen", "kept"]
        assert asdict(One(Pair(1, [2]))) == {"value": {"left": 1, "right": [2]}}
        assert replace(Pair(1, 2), right=3) == Pair(1, 3)
        assert replace(More(a=1, c=2), b=9) == More(a=1, b=9, c=2)

    @pytest.mark.parametrize("value", [Pair(1, [2]), Point(1, 3, "b", [4]), More(a=1, c=2), Empty(), One("a")])
    def test_copies(self, value: object) -> None:
        for made in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert made == value
            assert vars(made) == vars(value)

    def test_match(self) -> None:
        match Pair(1, 2):
            case Pair(left, right=2):
                assert left == 1
            case _:
                pytest.fail("no match")
        assert More.__match_args__ == ()

    def test_repr(self) -> None:
        assert repr(Point(1, label="a")) == "Point(x=1, y=2, label='a')"
        assert repr(Empty()) == "Empty()"
        assert repr(TestWithTheStandardLibrary.Inner(1)) == "TestWithTheStandardLibrary.Inner(x=1)"

    def test_repr_of_what_holds_itself(self) -> None:
        around: list[object] = []
        around.append(One(around))
        assert repr(around) == "[One(value=[...])]"
        loop = One(None)
        vars(loop)["value"] = loop
        assert repr(loop) == "One(value=...)"

    @frozen
    class Inner:
        x: int

    def test_signature(self) -> None:
        assert str(inspect.signature(Named)) == "(*, a: 'int', b: 'int' = 1) -> None"
        assert str(inspect.signature(Empty)) == "() -> None"
        assert str(inspect.signature(Point)) == (
            "(x: 'int', y: 'int' = 2, label: 'str' = '', seen: 'list[int]' = <factory>) -> None"
        )
        assert list(inspect.signature(Contract).parameters)[:4] == ["name", "parameters", "doc", "body"]

    def test_signature_of_a_subclass_that_is_made_differently(self) -> None:
        class Same(Pair):
            pass

        class Other(Pair):
            def __init__(self, both: int) -> None:
                super().__init__(both, both)

        assert list(inspect.signature(Same).parameters) == ["left", "right"]
        assert list(inspect.signature(Other).parameters) == ["both"]

    def test_signature_of_an_instance_is_that_of_its_call(self) -> None:
        @frozen
        class Called:
            x: int

            def __call__(self, y: int) -> int:
                return self.x + y

        assert list(inspect.signature(Called(1)).parameters) == ["y"]
        assert not hasattr(Called(1), "__signature__")


def test_a_class_without_a_docstring() -> None:
    @frozen
    class Bare:
        x: int

    assert Bare.__doc__ == "Bare"
    assert Pair.__doc__ == "Nothing but what stands in a row."


def test_post_init_is_refused() -> None:
    class Late:
        def __post_init__(self) -> None:
            raise AssertionError

    with pytest.raises(TypeError, match=r"Late: @frozen calls no __post_init__$"):
        frozen(Late)


# -------------------------------------------------------- the same as a frozen dataclass, whatever the fields

VALUES = st.sampled_from([0, 1, "a", (1,), None])


@st.composite
def classes(draw: st.DrawFn) -> tuple[type, type]:
    """The same class twice: with `@frozen`, and with `dataclass(frozen=True)`."""
    options: dict[str, dict[str, Any]] = {}
    kw_only = draw(st.booleans())
    with_default = False
    for name in "abcd"[: draw(st.integers(0, 4))]:
        with_default = draw(st.booleans()) or (with_default and not kw_only)
        options[name] = {
            "compare": draw(st.booleans()),
            "repr": draw(st.booleans()),
            "hash": draw(st.sampled_from([None, True, False])),
            "init": draw(st.booleans()),
        }
        if with_default:
            options[name] |= draw(st.sampled_from([{"default": 5}, {"default_factory": list}]))

    def plain() -> type:
        made = {name: field(**said) for name, said in options.items()}
        return type("C", (), {"__doc__": "", "__annotations__": dict.fromkeys(options, "int"), **made})

    return frozen(kw_only=kw_only)(plain()), dataclass(frozen=True, kw_only=kw_only)(plain())


def outcome(do: Callable[[], object]) -> object:
    try:
        return do()
    except (TypeError, AttributeError) as error:
        return type(error)


def state(cls: type, values: list[object], named: dict[str, object]) -> object:
    return outcome(lambda: list(vars(cls(*values, **named)).items()))


@given(classes(), st.lists(VALUES, max_size=5), st.dictionaries(st.sampled_from("abcde"), VALUES, max_size=4))
def test_instances_are_made_alike(both: tuple[type, type], values: list[object], named: dict[str, object]) -> None:
    ours, theirs = both
    assert state(ours, values, named) == state(theirs, values, named)
    assert ours.__match_args__ == theirs.__match_args__  # type: ignore[attr-defined]
    assert str(inspect.signature(ours)) == str(inspect.signature(theirs))


@given(classes(), st.tuples(*[VALUES] * 4), st.tuples(*[VALUES] * 4))
def test_instances_are_compared_alike(
    both: tuple[type, type], first: tuple[object, ...], second: tuple[object, ...]
) -> None:
    def facts(cls: Any) -> list[object]:
        names = [each.name for each in fields(cls) if each.init]
        one, two = (cls(**dict(zip(names, values, strict=False))) for values in (first, second))
        return [
            outcome(lambda: one == two),
            outcome(lambda: hash(one) == hash(two)),
            outcome(lambda: hash(one) == hash(one)),
            outcome(lambda: repr(one)),
            outcome(lambda: list(vars(replace(one, **dict(zip(names, second, strict=False)))).items())),
            [outcome(lambda name=name: setattr(one, name, 1)) for name in "abcde"],  # type: ignore[misc]
            [outcome(lambda name=name: delattr(one, name)) for name in "abcde"],  # type: ignore[misc]
        ]

    ours, theirs = both
    assert facts(ours) == facts(theirs)
