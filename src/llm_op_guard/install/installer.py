"""Puts the guards of one library in place, module by module as they are loaded, and takes them away again."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, Protocol

from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.parse import stub_signature
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.guard import Guard
from llm_op_guard.install.builtin import BuiltinSite, Replaced
from llm_op_guard.install.producer import Producer
from llm_op_guard.install.site import Refusal, Site
from llm_op_guard.install.watch import ModuleWatch
from llm_op_guard.log import log
from llm_op_guard.policy import Policy


@frozen
class Candidate:
    """A function that an integration has recognised: what guards it, or why nothing does.

    For a builtin, which stands in `replaced`, `function` is one that calls it, and the contract has a full stub.
    """

    site: str
    operator: str
    function: Callable[..., Any] | None = None
    contract: Contract | None = None
    defaults: Policy = field(default_factory=Policy)
    reason: str = ""
    replaced: Replaced | None = None


class Integration(Protocol):
    """What a library's file in `integrations` provides."""

    library: str

    def wants(self, module: str) -> bool:
        """Whether a module of that name may hold operators."""

    def candidates(self, module: ModuleType) -> Iterator[Candidate]:
        """The operators in a loaded module."""

    def producers(self, module: ModuleType) -> Iterator[Producer]:
        """What makes tensors for them in a loaded module, and is followed where somebody tracks."""

    def specimen(
        self, contract: str, function: Callable[..., Any], owner: type | None
    ) -> Callable[[], dict[str, Any]] | None:
        """What makes real arguments of an operator with which it runs, for trials; None where no such are known.

        `contract` is the one that holds for it, `rope:apply_rotary_pos_emb`, `owner` the class whose method it is.
        """

    def variants(self, owner: Any, wanted: Mapping[str, Any]) -> Iterator[None]:
        """Change an object of this library, step by step, until functions of contracts answer what is wanted of it."""


@dataclass
class Report:
    """What is guarded at one moment and what was refused, with reasons; `status()` tells of modules loaded since."""

    libraries: list[str] = field(default_factory=list)
    guarded: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"llm-op-guard: {len(self.guarded)} sites guarded in {', '.join(self.libraries) or 'no library'}"]
        lines += [f"  {site}" for site in self.guarded]
        if self.refused:
            lines.append(f"not guarded: {len(self.refused)}")
            lines += [f"  {refusal}" for refusal in self.refused]
        return "\n".join(lines)


MakeGuard = Callable[[Candidate], Guard]


class Installer:
    """The guards of one library."""

    def __init__(self, integration: Integration, make_guard: MakeGuard) -> None:
        self.integration = integration
        self.sites: list[Site] = []
        self.refused: list[Refusal] = []
        self._producers: list[Producer] = []
        self._make_guard = make_guard
        self._lock = threading.RLock()
        self._seen: dict[int, Callable[..., Any]] = {}
        self._watch = ModuleWatch(integration.wants, self._loaded, self._failed)

    @property
    def library(self) -> str:
        """The library's import name."""
        return self.integration.library

    def install(self) -> None:
        """Guard what is loaded now and watch for what is loaded later. Doing it again changes nothing."""
        with self._lock:
            if not self._watch.started and not _is_there(self.library):
                refusal = Refusal(self.library, "the library is not installed here")
                self.refused = [refusal]
                return
            self._watch.start()
            with _garbage_left_alone():
                for name, module in list(sys.modules.items()):
                    if isinstance(module, ModuleType) and self.integration.wants(name):
                        self._loaded(module)

    def uninstall(self) -> list[Refusal]:
        """Restore every function; what somebody else has changed since is left alone and returned."""
        with self._lock:
            self._watch.stop()
            left = [
                Refusal(site.name, "changed by somebody else since; left alone")
                for site in self._places()
                if not site.remove()
            ]
            self.sites.clear()
            self._producers.clear()
            self.refused.clear()
            self._seen.clear()
            return left

    def adjust(self) -> None:
        """Follow a change of policy."""
        with self._lock:
            for site in self._places():
                site.adjust()

    def _places(self) -> list[Site | Producer]:
        return [*self.sites, *self._producers]

    def _loaded(self, module: ModuleType) -> None:
        with self._lock:
            try:
                for candidate in self.integration.candidates(module):
                    self._take_or_refuse(candidate)
                for producer in self.integration.producers(module):
                    self._follow(producer)
            except Exception as error:  # a module that cannot be looked through must not stop the program
                self._failed(module.__name__, error)

    def _take_or_refuse(self, candidate: Candidate) -> None:
        try:
            self._take(candidate)
        except Exception as error:
            self._refuse(Refusal(candidate.site, f"{type(error).__name__}: {error}"))

    def _take(self, candidate: Candidate) -> None:
        function = candidate.function
        if not isinstance(function, FunctionType) or candidate.contract is None:
            self._refuse(Refusal(candidate.site, candidate.reason))
            return
        seen = function if candidate.replaced is None else candidate.replaced.builtin
        if id(seen) in self._seen:  # one function under several names, or a module met twice
            return
        site = _site(candidate, function, self._make_guard(candidate))
        self._seen[id(seen)] = seen
        site.adjust()
        self.sites.append(site)

    def _follow(self, producer: Producer) -> None:
        if id(producer.function) not in self._seen:
            self._seen[id(producer.function)] = producer.function
            producer.adjust()
            self._producers.append(producer)

    def _refuse(self, refusal: Refusal) -> None:
        if refusal not in self.refused:
            self.refused.append(refusal)

    def _failed(self, module: str, error: BaseException) -> None:
        self._refuse(Refusal(module, f"{type(error).__name__}: {error}"))
        log().error("llm-op-guard could not look at %s", module, exc_info=error)


def _site(candidate: Candidate, function: FunctionType, guard: Guard) -> Site:
    if candidate.replaced is None:
        return Site(function, guard)
    signature = stub_signature(guard.contract)
    if signature is None:
        raise TypeError(f"the contract {guard.contract.id} has no parameters of its own")
    return BuiltinSite(candidate.replaced, function, guard, signature)


@contextlib.contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """No collection meanwhile: what is made here stays, and looking through all that PyTorch has made takes as long."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _is_there(library: str) -> bool:
    if library in sys.modules:
        return True
    try:
        return importlib.util.find_spec(library) is not None
    except (ImportError, ValueError):
        return False
