"""The only change to foreign code: a check in front of one Python function, put there and taken away in place.

What is swapped is `function.__code__`. The function object stays, so whoever holds it is reached: names imported
earlier, partials, registries, captured methods, compiled callers.
"""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, FunctionType, GeneratorType
from typing import Any

from llm_op_guard.guard.compile import compile_function, keep_source
from llm_op_guard.guard.context import WRAPPER_LABEL
from llm_op_guard.guard.fast import Accepting
from llm_op_guard.install.wrapper import FACTORY, Names, Parameters, wrapper_source

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# A frame that waits here for its compilation has not begun, and so is in no thread's stack.
_COMPILER = "torch._dynamo.convert_frame"

_Check = Callable[..., Any]
_CheckResult = Callable[..., None]
_Around = Callable[[Callable[..., Any]], Callable[..., Any]]

_lock = threading.RLock()  # reentrant: deleting a check may run a finaliser that disarms another patch
_serial = itertools.count(1)
# A wrapper, by its address, and what it stands in front of: code objects compare, and hash, by all that is in them.
_originals: dict[int, tuple[weakref.ref[CodeType], CodeType]] = {}
_calls: dict[int, weakref.ref[FunctionType]] = {}  # the `call` of each patch, by its address


@dataclass(eq=False)
class _Arming:
    """One wrapper and the globals it needs, kept so that arming again with the same check recompiles no caller."""

    code: CodeType
    names: Names
    injected: dict[str, Any]
    home: dict[str, Any]  # the globals of the function
    end: weakref.finalize[[_Arming], FunctionType] | None = None

    def enter(self, function: FunctionType) -> None:
        self.home.update(self.injected)
        if self.end is None:
            # A function that is gone needs no names; its module, which holds them, stays.
            self.end = weakref.finalize(function, _gone.append, self)
            self.end.atexit = False

    def leave(self) -> None:
        for name in self.injected:
            self.home.pop(name, None)
        if self.end is not None:
            self.end.detach()  # it would hold the check for as long as there is the function
            self.end = None

    def fall_silent(self) -> None:
        for name in (self.names.check, self.names.check_result, self.names.accepts):
            if name in self.home:
                self.home[name] = _nothing

    def may_still_run(self) -> bool:
        """Whether a frame that has begun, or a suspended one, may still look up one of the names."""
        if any(self._is_in_stack(top) for top in sys._current_frames().values()):
            return True
        # A suspended generator or coroutine is in no thread's stack.
        return bool(self.code.co_flags & _SUSPENDABLE) and any(code is self.code for code in _suspended())

    def _is_in_stack(self, top: FrameType) -> bool:
        frame: FrameType | None = top
        while frame is not None:
            code = frame.f_code
            # By name, not by code: a compiler's rewriting of the wrapper is another code object.
            if not self.injected.keys().isdisjoint(code.co_names) or frame.f_globals.get("__name__") == _COMPILER:
                return True
            frame = frame.f_back
        # The other threads go on while we look: a generator that was suspended meanwhile has forgotten its caller.
        return bool(code.co_flags & _SUSPENDABLE)


_retired: set[_Arming] = set()  # off, their names still in a module
# Those of functions that are no more. Finalisers run at any time and do no more than put them here.
_gone: list[_Arming] = []


class Patch:
    """A check in front of one Python function, for as long as it is armed.

    `parameters` names those of the function's own parameters that the check gets, positionally, in this order; the
    name after `*` stands for a tuple, the one after `**` for a dict. The code found now is the original for good.

    A coroutine function is checked when it is awaited, a generator function at the first `next()`, an async one at
    the first `anext()`; what it returns in the end is its result, and an async generator function has none.

    `function` is the function, `call` another one that does what the original code does; its defaults are those of
    the time of construction.

    Raises TypeError for what is not a plain Python function, ValueError for a parameter that the function lacks.
    """

    def __init__(self, function: FunctionType, parameters: Sequence[str]) -> None:
        _refuse_unless_patchable(function)
        known = Parameters.of(function.__code__).all()
        if unknown := [name for name in parameters if name not in known]:
            raise ValueError(f"{function.__qualname__} has no parameter {unknown[0]!r}; it has {', '.join(known)}")
        self.function = function
        self.parameters = tuple(parameters)
        self.call: FunctionType = _rebuild(function, function.__code__)
        key = id(self.call)
        _calls[key] = weakref.ref(self.call, lambda _: _calls.pop(key, None))
        self._original = function.__code__
        self._armings: dict[tuple[_Check, _CheckResult | None, _Around | None], _Arming] = {}
        self._current: _Arming | None = None

    @property
    def armed(self) -> bool:
        """Whether a call of the function runs the check, as far as can be seen: nobody swapped the code since."""
        current = self._current
        return current is not None and self.function.__code__ is current.code

    def arm(
        self,
        check: _Check,
        check_result: _CheckResult | None = None,
        around: _Around | None = None,
        accepting: Accepting | None = None,
    ) -> None:
        """Run `check(*parameters)` before each call and `check_result(result, what the check returned)` after it.

        Where there is no `check_result`, the check is not run for calls that `accepting` says are right.
        `around` makes what is called in between of what does as the original code. What the checks raise reaches the
        caller. An armed patch changes over to the new checks; calls in flight finish with the old ones. A check
        (hashable, as functions are) is kept, and compiled callers with it: one that comes back costs them no
        recompilation.

        Raises RuntimeError when the function's code is neither the original nor ours.
        """
        with _lock:
            leaving = self._in_place()
            if leaving is None and self.function.__code__ is not self._original:
                raise RuntimeError(f"somebody else changed the code of {self.function.__qualname__}: not guarded")
            arming = self._arming(check, check_result, around, accepting)
            _retired.discard(arming)
            arming.enter(self.function)  # before the code that needs the names
            self.function.__code__ = arming.code
            self._current = arming
            if leaving is not None and leaving is not arming:
                _retired.add(leaving)
            sweep()

    def disarm(self) -> bool:
        """Put the original code object back and delete our names from the module's globals; True when it is back.

        False when somebody else changed the code since: the function is left as it is, and where their code still
        calls ours, our check does nothing any more. Names that a call in flight needs stay until the next `sweep`.
        """
        with _lock:
            self._current = None
            leaving = self._in_place()
            if leaving is not None:
                self.function.__code__ = self._original
                _retired.add(leaving)
            elif self.function.__code__ is not self._original:
                for arming in self._armings.values():
                    arming.fall_silent()
                return False
            sweep()
            return True

    def _in_place(self) -> _Arming | None:
        code = self.function.__code__
        return next((arming for arming in self._armings.values() if arming.code is code), None)

    def _arming(
        self,
        check: _Check,
        check_result: _CheckResult | None,
        around: _Around | None,
        accepting: Accepting | None,
    ) -> _Arming:
        key = (check, check_result, around)  # by equality: a bound method is a new object each time it is named
        if key not in self._armings:
            self._armings[key] = self._new_arming(check, check_result, around, accepting)
        return self._armings[key]

    def _new_arming(
        self,
        check: _Check,
        check_result: _CheckResult | None,
        around: _Around | None,
        accepting: Accepting | None,
    ) -> _Arming:
        home = self.function.__globals__
        # A second copy of this library may have numbered its own.
        names = next(names for names in map(Names.numbered, _serial) if names.check not in home)
        call = self.call if around is None else around(self.call)
        injected: dict[str, Any] = {names.check: check, names.call: call}
        if check_result is not None:
            injected[names.check_result] = check_result
            accepting = None  # it waits for what the check returns
        if accepting is not None:
            injected |= {names.accepts: accepting.accepts, names.program: accepting.program}

        original = self._original
        asks, checks_result = accepting is not None, check_result is not None
        source = wrapper_source(original, self.parameters, names, checks_result=checks_result, asks_first=asks)
        wrapper = compile_function(source, FACTORY, f"{WRAPPER_LABEL} {original.co_qualname}", {})()
        code: CodeType = wrapper.__code__.replace(
            co_name=original.co_name,
            co_qualname=original.co_qualname,
            co_flags=wrapper.__code__.co_flags | original.co_flags & inspect.CO_ITERABLE_COROUTINE,
        )
        keep_source(code, source)
        key = id(code)
        _originals[key] = weakref.ref(code, lambda _: _originals.pop(key, None)), original
        return _Arming(code, names, injected, home)


def sweep() -> int:
    """Delete the names of disarmed wrappers that nothing runs any more; how many wrappers remain.

    Each `arm` and `disarm`, of any patch, does this as well.
    """
    with _lock:
        while _gone:
            _retired.add(_gone.pop())
        for arming in [arming for arming in tuple(_retired) if not arming.may_still_run()]:
            _retired.discard(arming)
            arming.leave()
        return len(_retired)


def original_code(function: FunctionType) -> CodeType:
    """The code of `function` without our wrappers, armed or not."""
    code = function.__code__
    while (beneath := _originals.get(id(code))) is not None:
        code = beneath[1]
    return code


def is_call(function: object) -> bool:
    """Whether a function is the `call` of a patch: what the guarded one has for its source, and no operator itself."""
    return id(function) in _calls


def copy_function(function: FunctionType) -> FunctionType:
    """A function of its own that behaves as `function` does unarmed, with `__wrapped__` pointing to it."""
    copy = _rebuild(function, original_code(function))
    functools.update_wrapper(copy, function)
    return copy


def _rebuild(function: FunctionType, code: CodeType) -> FunctionType:
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
    # Annotations, too: who reads a guarded function's signature reads that of its `call`.
    functools.update_wrapper(copy, function, updated=())
    del vars(copy)["__wrapped__"]
    return copy


def _refuse_unless_patchable(function: object) -> None:
    if not isinstance(function, FunctionType):
        raise TypeError(f"only a plain Python function has code to swap, not {type(function).__name__}: {function!r}")
    code = function.__code__
    if odd := [name for name in (*Parameters.of(code).all(), *code.co_freevars) if not name.isidentifier()]:
        raise TypeError(f"{function.__qualname__} was not written as a function: it has a variable named {odd[0]!r}")


def _nothing(*_: object) -> None:
    """Stands where a check was, beneath somebody else's patch."""


def _suspended() -> Iterator[CodeType]:
    # Only the collector knows them all.
    for candidate in gc.get_objects():
        if type(candidate) is GeneratorType and candidate.gi_frame is not None:
            yield candidate.gi_code
        elif type(candidate) is CoroutineType and candidate.cr_frame is not None:
            yield candidate.cr_code
        elif type(candidate) is AsyncGeneratorType and candidate.ag_frame is not None:
            yield candidate.ag_code
