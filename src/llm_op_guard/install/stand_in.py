"""What stands for a callable that has no Python code to swap: calls go through a guarded function, the rest through."""

from __future__ import annotations

import copy
import functools
import sys
from types import FunctionType, MethodType
from typing import Any, cast


class StandIn:
    """Calls `_guarded_call`; every attribute is that of `__wrapped__`, the object it stands for.

    Unlike a function it does not bind in a class body, as builtins and callable objects do not.
    """

    def __init__(self, target: Any, call: FunctionType | MethodType) -> None:
        own = vars(self)
        own["__wrapped__"] = target
        own["_guarded_call"] = call
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(target, name):
                own[name] = getattr(target, name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call what is guarded."""
        return self._guarded_call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Not `self.__wrapped__`: a copy made without __init__ would come back here for ever.
        return getattr(object.__getattribute__(self, "__wrapped__"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__wrapped__, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__wrapped__, name)

    def __dir__(self) -> list[str]:
        return dir(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __copy__(self) -> Any:
        return self._standing_for(copy.copy(self.__wrapped__))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._standing_for(copy.deepcopy(self.__wrapped__, memo))

    def _standing_for(self, target: Any) -> Any:
        """The same for a copy of the target; the copy itself where the guarded function calls the target only."""
        if target is self.__wrapped__:
            return self
        call = self._guarded_call
        return type(self)(target, MethodType(call.__func__, target)) if isinstance(call, MethodType) else target

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By name where the name leads here, else as what it stands for: its guard is not in the pickle."""
        found: Any = sys.modules.get(str(getattr(self, "__module__", None)))
        name = getattr(self, "__qualname__", "")
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (_without_guard, (self.__wrapped__,))


def _without_guard(target: Any) -> Any:
    return target


class KernelStandIn(StandIn):
    """Stands for a kernel that is launched as `kernel[grid](...)`; its guarded call takes (launcher, args, kwargs)."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Not a launch: what the kernel makes of it."""
        return self.__wrapped__(*args, **kwargs)

    def _standing_for(self, target: Any) -> Any:
        return KernelStandIn(target, self._guarded_call)

    def __getitem__(self, grid: Any) -> Any:
        launcher = self.__wrapped__[grid]
        launch = self._guarded_call

        def launched(*args: Any, **kwargs: Any) -> Any:
            return launch(launcher, args, kwargs)

        return launched


def through(call: Any, kind: str) -> FunctionType:
    """A function that does nothing but call `call`: of the same kind as `inspect` tells them apart."""
    # The names are those that the patch hands to the check, and that reports leave out; `binding.PACKED`.
    if kind == "coroutine":

        async def coroutine(*_llm_op_guard_args: Any, **_llm_op_guard_kwargs: Any) -> Any:
            return await call(*_llm_op_guard_args, **_llm_op_guard_kwargs)

        return cast(FunctionType, coroutine)
    if kind == "generator":

        def generator(*_llm_op_guard_args: Any, **_llm_op_guard_kwargs: Any) -> Any:
            return (yield from call(*_llm_op_guard_args, **_llm_op_guard_kwargs))

        return cast(FunctionType, generator)

    def plain(*_llm_op_guard_args: Any, **_llm_op_guard_kwargs: Any) -> Any:
        return call(*_llm_op_guard_args, **_llm_op_guard_kwargs)

    return cast(FunctionType, plain)


def launching() -> FunctionType:
    """The function that a `KernelStandIn` launches with."""

    def launch(_llm_op_guard_launcher: Any, _llm_op_guard_args: Any, _llm_op_guard_kwargs: Any) -> Any:
        return _llm_op_guard_launcher(*_llm_op_guard_args, **_llm_op_guard_kwargs)

    return cast(FunctionType, launch)
