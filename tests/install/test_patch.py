"""Arming and disarming one function in place, beside others who do the like."""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
import types
import weakref
from typing import Any

import pytest
from patch_recorder import MakeModule, Recorder

from llm_op_guard.install.patch import Patch, copy_function, original_code

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def add(a: int, b: int = 2) -> int:
    return a + b


# ------------------------------------------------------------------------------------------------------------ refusals


def test_what_cannot_be_patched_is_refused() -> None:
    for wrong in (len, functools.partial(add, 1), print, Recorder, Recorder().check, functools.lru_cache(add), "text"):
        with pytest.raises(TypeError, match="plain Python function"):
            Patch(wrong, [])  # type: ignore[arg-type]


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter 'c'; it has a, b"):
        Patch(add, ["a", "c"])


def test_a_local_variable_is_no_parameter() -> None:
    def function(a):
        local = a + 1
        return local * local

    with pytest.raises(ValueError, match="no parameter 'local'"):
        Patch(function, ["local"])


# --------------------------------------------------------------------------------- the function stays what it was


def test_nothing_about_the_function_changes_but_its_code(seen: Recorder) -> None:
    def face() -> tuple[Any, ...]:
        return (
            inspect.signature(add),
            add.__name__,
            add.__qualname__,
            add.__module__,
            add.__doc__,
            add.__defaults__,
            dict(add.__annotations__),
            dict(vars(add)),
            add.__code__.co_name,
            add.__code__.co_qualname,
            add.__code__.co_argcount,
            pickle.dumps(add),
            inspect.unwrap(add),
        )

    before, code = face(), add.__code__
    patch = Patch(add, ["a"])
    patch.arm(seen.check)
    assert add.__code__ is not code
    assert face() == before
    assert pickle.loads(pickle.dumps(add)) is add
    assert original_code(add) is code
    assert patch.disarm()
    assert face() == before
    assert add.__code__ is code


def test_wrapped_is_left_alone(seen: Recorder) -> None:
    @functools.wraps(add)
    def outer(*args, **kwargs):
        return add(*args, **kwargs)

    patch = Patch(outer, ["args"])  # type: ignore[arg-type]
    patch.arm(seen.check)
    assert outer(1) == 3
    assert seen.calls == [((1,),)]
    assert inspect.unwrap(outer) is add
    assert str(inspect.signature(outer)).startswith("(a: ")
    patch.disarm()


def test_whoever_holds_the_function_is_reached(make_module: MakeModule, seen: Recorder) -> None:
    module = make_module("def op(a, b=2):\n    return a + b\n")
    importer = types.ModuleType("importer")
    exec(f"from {module.__name__} import op\ndef use(x): return op(x)\n", vars(importer))
    by_name = {"op": module.op}
    partial = functools.partial(module.op, b=5)

    class Owner:
        method = module.op

    method = Owner().method
    patch = Patch(module.op, ["b"])
    patch.arm(seen.check)
    assert importer.use(1) == 3 and by_name["op"](1) == 3 and partial(1) == 6
    with pytest.raises(TypeError):
        method(1)
    assert seen.calls == [(2,), (2,), (5,), (1,)]
    patch.disarm()
    importer.use(1)
    assert len(seen.calls) == 4


def test_the_module_is_as_it_was_after_disarm(make_module: MakeModule, seen: Recorder) -> None:
    module = make_module("def op(a):\n    return a\n")
    before = list(vars(module).items())
    patch = Patch(module.op, ["a"])
    patch.arm(seen.check, seen.check_result)
    assert len(vars(module)) == len(before) + 3
    patch.arm(seen.check)
    assert len(vars(module)) == len(before) + 2
    patch.disarm()
    assert list(vars(module).items()) == before


def test_arming_and_disarming_twice(seen: Recorder) -> None:
    patch, other = Patch(add, ["a"]), Recorder()
    assert not patch.armed
    assert patch.disarm()
    patch.arm(seen.check)
    patch.arm(seen.check)
    assert patch.armed
    add(1)
    patch.arm(other.check)
    add(2)
    assert seen.calls == [(1,)] and other.calls == [(2,)]
    assert patch.disarm() and not patch.armed
    assert patch.disarm()
    add(3)
    patch.arm(seen.check)
    add(4)
    assert seen.calls == [(1,), (4,)]
    assert patch.disarm()


def test_a_check_that_comes_back_brings_its_code_back(seen: Recorder) -> None:
    # Compiled callers are guarded by the code object: a new one for each arming would use up their recompilations.
    patch = Patch(add, ["a"])
    patch.arm(seen.check)
    first = add.__code__
    patch.arm(lambda a: None)
    assert add.__code__ is not first
    patch.disarm()
    patch.arm(seen.check)
    assert add.__code__ is first
    patch.disarm()


def test_what_was_taken_away_is_kept_by_nobody() -> None:
    def arm_all(of: list[Recorder]) -> None:
        patch = Patch(add, ["a"])
        for recorder in [*of, of[0]]:
            patch.arm(recorder.check)
            assert add(1) == 3
        patch.disarm()

    recorders = [Recorder(), Recorder()]
    arm_all(recorders)
    assert [len(recorder.calls) for recorder in recorders] == [2, 1]
    kept = [weakref.ref(recorder) for recorder in recorders]
    recorders.clear()
    gc.collect()
    assert [ref() for ref in kept] == [None, None], "the function, which lives on, keeps no check"


def test_call_is_the_original_behaviour(seen: Recorder) -> None:
    def function(a, b=2, *, c=3):
        return a, b, c

    patch = Patch(function, ["a"])
    patch.arm(seen.check)
    assert patch.call(1) == (1, 2, 3)
    assert seen.calls == []
    patch.disarm()


# ------------------------------------------------------------------------------------------------------ somebody else


def stranger(a: int, b: int = 2) -> int:
    return -1


def test_somebody_elses_code_is_not_undone(seen: Recorder) -> None:
    def function(a, b=2):
        return a + b

    patch, found = Patch(function, ["a"]), function.__code__
    patch.arm(seen.check)
    function.__code__ = theirs = stranger.__code__
    assert not patch.armed
    assert patch.disarm() is False
    assert function.__code__ is theirs
    with pytest.raises(RuntimeError, match="somebody else changed the code"):
        patch.arm(seen.check)
    assert function.__code__ is theirs
    function.__code__ = found
    assert patch.disarm()
    patch.arm(seen.check)
    patch.disarm()
    assert function.__code__ is found


def test_code_changed_while_disarmed_is_not_armed(seen: Recorder) -> None:
    def function(a, b=2):
        return a + b

    patch = Patch(function, ["a"])
    function.__code__ = stranger.__code__
    with pytest.raises(RuntimeError):
        patch.arm(seen.check)
    assert patch.disarm() is False


def test_beneath_somebody_elses_patch_ours_falls_silent(make_module: MakeModule, seen: Recorder) -> None:
    module = make_module("def op(a):\n    return a\n")
    before = dict(vars(module))
    found = module.op.__code__
    ours = Patch(module.op, ["a"])
    ours.arm(seen.check, seen.check_result)
    above = Recorder()
    theirs = Patch(module.op, ["a"])  # stands for any tool that swaps code
    theirs.arm(above.check)
    assert module.op(1) == 1
    assert ours.disarm() is False
    assert module.op(2) == 2
    assert seen.calls == [(1,)] and above.calls == [(1,), (2,)]
    assert theirs.disarm()
    assert not ours.armed
    assert module.op(3) == 3
    assert len(seen.calls) == 1
    assert ours.disarm()
    assert module.op.__code__ is found
    assert vars(module) == before


def test_a_name_rebound_by_somebody_else_stays(make_module: MakeModule, seen: Recorder) -> None:
    module = make_module("def op(a):\n    return a\n")
    function = module.op
    patch = Patch(function, ["a"])
    patch.arm(seen.check)
    module.op = replacement = lambda a: -a
    assert patch.disarm()
    assert module.op is replacement
    assert function(1) == 1 and seen.calls == []


# ----------------------------------------------------------------------------------------------------- copy_function


def test_a_copy_is_the_function_in_all_but_identity(seen: Recorder) -> None:
    cell = 10

    def function(a: int, b: int = 2, *, c: int = 3) -> int:
        """What it does."""
        return a + b + c + cell

    function.tag = "kept"  # type: ignore[attr-defined]
    copy = copy_function(function)
    assert copy is not function and copy(1) == function(1) == 16
    for name in ("__code__", "__globals__", "__defaults__", "__kwdefaults__", "__closure__", "__doc__", "__module__"):
        assert getattr(copy, name) == getattr(function, name), name
    assert copy.__qualname__ == function.__qualname__ and copy.__name__ == "function"
    assert copy.__annotations__ == function.__annotations__
    assert vars(copy) == {"tag": "kept", "__wrapped__": function}
    assert inspect.signature(copy) == inspect.signature(function)

    patch = Patch(copy, ["a"])
    patch.arm(seen.check)
    assert function(1) == 16 and seen.calls == []
    assert copy(1) == 16 and seen.calls == [(1,)]
    patch.disarm()
    copy.__kwdefaults__["c"] = 0
    assert function(1) == 16


def test_a_copy_of_an_armed_function_is_unarmed(seen: Recorder) -> None:
    patch = Patch(add, ["a"])
    patch.arm(seen.check)
    copy = copy_function(add)
    patch.disarm()
    assert copy(1) == 3
    assert seen.calls == []
