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
_original: Callable[..., Any] | None = None  # set once
# How many blocks are open in which nothing is compiled, and what they changed.
_uncompiled = 0
_stance = contextlib.ExitStack()


def _in_a_fork() -> None:
    # Workers are nobody's to end, and a thread that is not in the child may have held the lock.
    global _lock, _observers
    _lock, _observers = threading.Lock(), ()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_a_fork)


def _watched(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What stands for `Module.__call__`."""
    import torch  # noqa: PLC0415

    original = _original
    assert original is not None
    observers = _observers
    if not observers or torch.compiler.is_compiling():
        return original(module, *args, **kwargs)
    calls = [(o, call) for o in observers if (call := o.enter(module, args, kwargs)) is not None]
    try:
        result = original(module, *args, **kwargs)
    except BaseException as error:
        for observer, call in reversed(calls):
            observer.raised(call, error)
        raise
    for observer, call in reversed(calls):
        observer.leave(call, result)
    return result


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """A `with` block in which an observer is told of every call of a module, in all threads; not in forks.

    Somebody who replaced `Module.__call__` meanwhile keeps it; what stood there before is then one plain call further.
    """
    global _observers, _original  # noqa: PLW0603
    import torch  # noqa: PLC0415

    Module: Any = torch.nn.Module
    with _lock:
        if not _observers and Module.__call__ is not _watched:
            _original = Module.__call__
            Module.__call__ = _watched
        _observers = (*_observers, observer)
    try:
        yield
    finally:
        with _lock:
            _observers = tuple(other for other in _observers if other is not observer)
            if not _observers and Module.__call__ is _watched and _original is not None:
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
