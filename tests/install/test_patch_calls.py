"""Every call of an armed function reaches the check and the original as it was made."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
from patch_recorder import MakeModule, Recorder

from llm_op_guard.install.patch import Patch
from llm_op_guard.install.wrapper import Names, Parameters, wrapper_source

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def add(a: int, b: int = 2) -> int:
    return a + b


class SpecialError(Exception):
    pass


# ------------------------------------------------------------------------------------------------ what the check gets


def test_the_check_gets_the_named_parameters_in_the_given_order(seen: Recorder) -> None:
    def function(a, b, c=3):
        return a, b, c

    patch = Patch(function, ["c", "a"])
    patch.arm(seen.check)
    assert function(1, b=2) == (1, 2, 3)
    assert seen.calls == [(3, 1)]
    patch.disarm()
    assert function(1, b=2) == (1, 2, 3)
    assert len(seen.calls) == 1


def test_a_check_may_want_nothing(seen: Recorder) -> None:
    def function(a):
        return a

    patch = Patch(function, [])
    patch.arm(seen.check)
    assert function(1) == 1
    assert seen.calls == [()]
    patch.disarm()


def test_every_parameter_kind_is_forwarded(seen: Recorder) -> None:
    def function(a, b=2, /, c=3, *rest, d, e=5, **others):
        return a, b, c, rest, d, e, others

    calls: list[Callable[[], Any]] = [
        lambda: function(1, d=4),
        lambda: function(1, 20, 30, 40, 50, d=4, e=6, a=7, b=8, z=9),
        lambda: function(1, c=0, d=4),
        lambda: function(*range(6), **{"d": 1, "not an identifier": 2}),
    ]
    plain = [call() for call in calls]
    patch = Patch(function, ["a", "rest", "d", "others"])
    patch.arm(seen.check, seen.check_result)
    assert [call() for call in calls] == plain
    assert seen.calls[1] == (1, (40, 50), 4, {"a": 7, "b": 8, "z": 9})
    assert [result for result, _ in seen.results] == plain
    patch.disarm()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 2, 3, 4), {"k": 1}), ((1,), {"a": 1, "k": 1}), ((1, 2), {}), ((1, 2), {"k": 1, "unknown": 1})],
)
def test_a_wrong_call_gives_the_error_that_it_gives_unarmed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    def function(a, b, *, k):
        return a, b, k

    with pytest.raises(TypeError) as plain:
        function(*args, **kwargs)
    patch = Patch(function, ["a"])
    patch.arm(lambda a: None)
    with pytest.raises(TypeError) as armed:
        function(*args, **kwargs)
    assert str(armed.value) == str(plain.value)
    patch.disarm()


def test_parameters_named_like_anything_in_the_wrapper(seen: Recorder) -> None:
    def function(check, call, state, result, wrapper, factory, CHECK):
        return check, call, state, result, wrapper, factory, CHECK

    patch = Patch(function, ["result", "check"])
    patch.arm(seen.check, seen.check_result)
    assert function(*range(7)) == tuple(range(7))
    assert seen.calls == [(3, 0)]
    patch.disarm()


def test_defaults_changed_after_arming_hold(seen: Recorder) -> None:
    def function(a, b=2, *, c=3):
        return a, b, c

    patch = Patch(function, ["b", "c"])
    patch.arm(seen.check)
    function.__defaults__ = (20,)
    function.__kwdefaults__ = {"c": 30}
    assert function(1) == (1, 20, 30)
    assert seen.calls == [(20, 30)]
    patch.disarm()
    assert function(1) == (1, 20, 30)


def test_the_state_of_the_check_reaches_the_check_of_the_result(seen: Recorder) -> None:
    def function(a):
        return a * 10

    patch = Patch(function, ["a"])
    patch.arm(lambda a: ("state", a), seen.check_result)
    assert function(4) == 40
    assert seen.results == [(40, ("state", 4))]
    patch.disarm()


# --------------------------------------------------------------------------------------------------- closures, methods


def test_a_closure(seen: Recorder) -> None:
    def make(z: int, a: int) -> tuple[Callable[[int], int], Callable[[int], None]]:
        def function(x: int) -> int:
            return x + a * z

        def move(to: int) -> None:
            nonlocal a
            a = to

        return function, move

    function, move = make(10, 1)
    twin, _ = make(100, 1)  # the same code object
    assert isinstance(function, types.FunctionType)
    closure = function.__closure__
    patch = Patch(function, ["x"])
    patch.arm(seen.check)
    assert function(5) == 15
    move(2)
    assert function(5) == 25
    assert twin(5) == 105
    assert seen.calls == [(5,), (5,)]
    assert function.__closure__ is closure
    assert inspect.getclosurevars(function).nonlocals == {"a": 2, "z": 10}
    patch.disarm()
    assert function(5) == 25


def test_free_variables_named_like_the_wrapper_and_its_factory(seen: Recorder) -> None:
    wrapper = factory = 1

    def function(x):
        return x + wrapper + factory

    patch = Patch(function, ["x"])
    patch.arm(seen.check)
    assert function(1) == 3
    patch.disarm()


def test_super_and_class_cell(seen: Recorder) -> None:
    class Base:
        def forward(self, x):
            return x + 1

    class Child(Base):
        def forward(self, x):
            return super().forward(x) * 2, __class__  # type: ignore[name-defined]

    child = Child()
    captured = child.forward
    patch = Patch(Child.forward, ["self", "x"])
    patch.arm(seen.check)
    assert child.forward(1) == (4, Child)
    assert captured(2) == (6, Child)
    assert seen.calls == [(child, 1), (child, 2)]
    patch.disarm()
    assert child.forward(1) == (4, Child)


def test_static_and_class_methods_through_their_function(seen: Recorder) -> None:
    class Owner:
        @staticmethod
        def s(a):
            return a

        @classmethod
        def c(cls, a):
            return cls, a

    static, klass = Patch(Owner.s, ["a"]), Patch(Owner.c.__func__, ["cls", "a"])  # type: ignore[attr-defined]
    static.arm(seen.check)
    klass.arm(seen.check)
    assert Owner.s(1) == 1
    assert Owner.c(2) == (Owner, 2)
    assert seen.calls == [(1,), (Owner, 2)]
    static.disarm()
    klass.disarm()


def test_recursion_checks_every_level(make_module: MakeModule, seen: Recorder) -> None:
    module = make_module("def fact(n):\n    return 1 if n == 0 else n * fact(n - 1)\n")
    patch = Patch(module.fact, ["n"])
    patch.arm(seen.check)
    assert module.fact(4) == 24
    assert seen.calls == [(4,), (3,), (2,), (1,), (0,)]
    patch.disarm()


# ---------------------------------------------------------------------------------------------------------- exceptions


def test_exceptions_pass_through_unchanged(seen: Recorder) -> None:
    error = SpecialError("from the function")

    def function(a):
        raise error

    patch = Patch(function, ["a"])
    patch.arm(seen.check, seen.check_result)
    with pytest.raises(SpecialError) as caught:
        function(1)
    assert caught.value is error
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert seen.results == []
    patch.disarm()


def test_what_the_check_raises_keeps_the_function_from_running() -> None:
    ran = []

    def function(a):
        ran.append(a)

    def check(a):
        raise SpecialError(a)

    patch = Patch(function, ["a"])
    patch.arm(check)
    with pytest.raises(SpecialError):
        function(1)
    assert ran == []
    patch.disarm()
    function(1)
    assert ran == [1]


def test_a_traceback_shows_the_wrapper_by_the_functions_name() -> None:
    def check(a):
        raise SpecialError

    patch = Patch(add, ["a"])
    patch.arm(check)
    with pytest.raises(SpecialError) as caught:
        add(1)
    frame = caught.traceback[1]
    assert frame.frame.code.raw.co_qualname == "add"
    assert "_check(a)" in str(frame.statement)
    patch.disarm()


# ---------------------------------------------------------------------------------------------------------- the source


def test_the_source_of_a_wrapper() -> None:
    def function(a, /, b, *rest, c, **more):
        return a

    text = wrapper_source(function.__code__, ["b", "more"], Names.numbered(7), checks_result=False)
    assert text == (
        "def factory():\n"
        "    def wrapper(a, /, b, *rest, c, **more):\n"
        "        __llm_op_guard_7_check(b, more)\n"
        "        return (__llm_op_guard_7_call(a, b, *rest, c=c, **more))\n"
        "    return wrapper\n"
    )
    assert Parameters.of(function.__code__).all() == ("a", "b", "rest", "c", "more")


def test_keyword_only_without_a_starred_name() -> None:
    def function(*, a, b=1):
        return a

    assert Parameters.of(function.__code__).declaration() == "*, a, b"
