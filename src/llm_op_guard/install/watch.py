"""Tells when modules are imported later, and leaves no trace in them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast


class ModuleWatch:
    """Calls `loaded(module)` after the import or reload of each module whose full name `wants`, once started.

    `loaded` runs in the importing thread, before the import statement goes on, and gets what `sys.modules` then
    holds. An exception in `wants` or `loaded` goes to `failed(name, error)` and not to the importer. Modules that are
    there already are not reported, nor are namespace packages and modules of loaders that only have `load_module`.
    """

    def __init__(
        self,
        wants: Callable[[str], bool],
        loaded: Callable[[ModuleType], None],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._wants = wants
        self._loaded = loaded
        self._failed = failed

    @property
    def started(self) -> bool:
        """Whether imports are being watched."""
        return any(finder is self for finder in sys.meta_path)

    def start(self) -> None:
        """Watch from now on; nothing happens when already watching."""
        if not self.started:
            sys.meta_path.insert(0, cast(Any, self))

    def stop(self) -> None:
        """Watch no longer: only our own entry leaves `sys.meta_path`. Imports under way are not reported."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(cast(Any, self))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The import system's question: answered by the finders after us, for modules that are wanted."""
        if not self._is_wanted(fullname):
            return None
        for finder in self._finders_after_us():
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):  # a namespace package has no loader
                    spec.loader = cast(Any, _ReportingLoader(spec.loader, spec, self))
                return spec
        return None

    def _finders_after_us(self) -> list[Any]:
        finders = list(sys.meta_path)
        place = next((index for index, finder in enumerate(finders) if finder is self), -1)
        return finders[place + 1 :]

    def _is_wanted(self, name: str) -> bool:
        try:
            return self._wants(name)
        except Exception as error:
            self._failed(name, error)
            return False

    def report(self, name: str, module: ModuleType) -> None:
        """Called by our loader when `module` has been executed."""
        if not self.started:
            return
        current = sys.modules.get(name)  # a module may have put another one in its place, as lazy packages do
        try:
            self._loaded(current if isinstance(current, ModuleType) else module)
        except Exception as error:
            self._failed(name, error)


class _ReportingLoader:
    """Stands for the real loader from `find_spec` until the module's first line, then gets out of the way."""

    def __init__(self, real: Any, spec: ModuleSpec, watch: ModuleWatch) -> None:
        self._real = real
        self._spec = spec
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        # Whoever asks for a spec without importing (runpy, pkgutil) gets the real loader's answers.
        # Not `self._real`: a copy made without __init__ would come back here for ever.
        return getattr(object.__getattribute__(self, "_real"), name)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        self._watch.report(self._spec.name, module)
