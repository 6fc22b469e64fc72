"""Every call of a module, seen from outside: `Module.__call__` is another function while somebody watches.

Hooks would show in `module._forward_hooks`, which `nn.TransformerEncoder` looks at to choose between two ways to
compute; full backward hooks make in-place operations on what a module returns an error; and a hook of torch that is for
all modules is not given keyword arguments. Nothing of a module is touched here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Observer(Protocol):
    """Who is told of calls. What it does must not raise, unless the program is to end."""

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call begins; what is returned comes back when it ends. None: that it ends need not be told."""

    def leave(self, call: Any, result: Any) -> None:
        """It has returned this."""

    def raised(self, call: Any, error: BaseException) -> None:
        """It has raised this."""


_lock = threading.Lock()
_observers: tuple[Observer, ...] = ()
# What was last put in the place of `Module.__call__`, and what stood there.
_watching: Callable[..., Any] | None = None
_original: Callable[..., Any] | None = None
# How many blocks are open in which nothing is compiled, and what they changed.
_uncompiled = 0
_stance = contextlib.ExitStack()


def _in_a_fork() -> None:
    # Workers are nobody's to end, and a thread that is not in the child may have held the lock.
    global _lock, _observers
    _lock, _observers = threading.Lock(), ()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_a_fork)


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for `Module.__call__` and tells the observers, as long as it was the last to be put there."""
    import torch  # noqa: PLC0415

    def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        observers = _observers
        if not observers or _watching is not call or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        calls = [(o, begun) for o in observers if (begun := o.enter(module, args, kwargs)) is not None]
        try:
            result = original(module, *args, **kwargs)
        except BaseException as error:
            for observer, begun in reversed(calls):
                observer.raised(begun, error)
            raise
        for observer, begun in reversed(calls):
            observer.leave(begun, result)
        return result

    return call


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """A `with` block in which an observer is told of every call of a module, in all threads; not in forks.

    Somebody who replaced `Module.__call__` meanwhile keeps it; what stood there before is then one plain call further.
    """
    global _observers, _watching, _original  # noqa: PLW0603
    import torch  # noqa: PLC0415

    Module: Any = torch.nn.Module
    with _lock:
        if not _observers and Module.__call__ is not _watching:
            _original = Module.__call__
            Module.__call__ = _watching = _watched(_original)
        _observers = (*_observers, observer)
    try:
        yield
    finally:
        with _lock:
            _observers = tuple(other for other in _observers if other is not observer)
            if not _observers and Module.__call__ is _watching:
                Module.__call__ = _original


@contextlib.contextmanager
def uncompiled(*, always: bool = False) -> Iterator[None]:
    """A `with` block in which torch.compile'd code runs as it was written, so that its modules are called one by one.

    Unless `always`, only where a compiler has been loaded: nothing is compiled otherwise, and loading it takes seconds.
    Torch knows one stance for all threads, and blocks may overlap: the last to end restores it.
    """
    global _uncompiled  # noqa: PLW0603
    if not always and "torch._dynamo" not in sys.modules:
        yield
        return
    import torch  # noqa: PLC0415

    with _lock:
        if _uncompiled == 0:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _uncompiled += 1
    try:
        yield
    finally:
        with _lock:
            _uncompiled -= 1
            if _uncompiled == 0:
                _stance.close()


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """A `with` block that leaves the random numbers of torch as they were: the next call sees those that it saw."""
    torch: Any = importlib.import_module("torch")
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(cuda)):
        yield
