"""What one call costs: unguarded, guarded in each way, checked by hand, checked by other libraries.

A variant is first tried with the calls that break one rule each and with those that are right, since a time says
nothing of a check that does not check; what it lets through, or refuses without a reason, is told beside its time.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llm_op_guard.benching import by_hand, peers, torch_checks
from llm_op_guard.benching.clock import calling, calls_for, interleaved
from llm_op_guard.benching.estimate import Estimate, estimates, medians
from llm_op_guard.benching.operators import Absent, Operator
from llm_op_guard.contract.model import Contract
from llm_op_guard.errors import GuardWarning
from llm_op_guard.guard import fast
from llm_op_guard.guard.fast import Accepting
from llm_op_guard.guard.guard import Guard
from llm_op_guard.guard.plan import Plan
from llm_op_guard.install.patch import copy_function
from llm_op_guard.install.site import Site
from llm_op_guard.native.program import Refused
from llm_op_guard.policy import Action, Policy, Setting
from llm_op_guard.report.dispatch import Dispatcher
from llm_op_guard.report.record import Record
from llm_op_guard.waivers import Waivers

METADATA = Policy(A=Setting(Action.RAISE), B=Setting(Action.OFF))

UNGUARDED, OFF, NATIVE, PYTHON = "unguarded", "guard taken away", "guard, native", "guard, in Python"
BY_HAND, TORCH_CHECK, JAXTYPING, DLTYPE = "ifs by hand", "torch._check", "jaxtyping+beartype", "dltype"
REAL, REAL_GUARDED = "the operator itself", "the operator itself, guarded"
CHECKING = (NATIVE, PYTHON, BY_HAND, TORCH_CHECK, JAXTYPING, DLTYPE)


@dataclass
class Variant:
    """What was found of one way to call an operator.

    `nanoseconds` are those of a call, `added` what is above the unguarded one. A variant that checks has the rules
    that it lets a call break, and how many right calls it refuses; one that is left out has the reason.
    """

    name: str
    nanoseconds: Estimate | None = None
    added: Estimate | None = None
    let_through: list[str] = field(default_factory=list)
    wrongly_refused: int = 0
    left_out: str = ""

    @property
    def checks(self) -> bool:
        """Whether it says no to anything."""
        return self.name in CHECKING


@dataclass
class Measured:
    """One operator: its rules, and each variant. `ratios` are of what the native and the Python guard add."""

    operator: str
    contract: str
    rules: list[str] = field(default_factory=list)
    valid_calls: int = 0
    variants: list[Variant] = field(default_factory=list)
    ratios: dict[str, Estimate] = field(default_factory=dict)
    left_out: str = ""

    def variant(self, name: str) -> Variant | None:
        """The variant of that name, where it was timed."""
        return next((v for v in self.variants if v.name == name and v.nanoseconds is not None), None)


class InPython(Guard):
    """A guard as it is where there is no extension."""

    def accepted_by(self, plan: Plan, *, noted: bool = False) -> Accepting | None:  # noqa: ARG002 - as the guard's
        """Nothing."""
        return None


def guarded(function: Any, contract: Contract, kind: type[Guard] = Guard) -> Site:
    """A copy of a function with a guard of class A in front of it, that no policy reaches."""
    copy = copy_function(function)
    guard = kind(
        contract,
        operator=function.__name__,
        site=f"benchmark.{function.__name__}",
        defaults=METADATA,
        reporter=Dispatcher(Record(), Waivers()),
    )
    site = Site(copy, guard)
    site.adjust()
    return site


def why_not_native(contract: Contract) -> str:
    """Why the metadata rules of a contract are not checked natively here; empty where they are."""
    native = fast.usable()
    if isinstance(native, Refused):
        return native.reason
    checked, reasons = fast.natively(contract)
    return "" if checked else "; ".join(reasons)


def measure(operator: Operator | Absent, *, rounds: int, block: float) -> Measured:
    """Try and time every variant of one operator; a block of calls takes about so many nanoseconds."""
    if isinstance(operator, Absent):
        return Measured(operator.name, "", left_out=operator.reason)
    measured = Measured(
        operator.name,
        operator.contract.id,
        rules=[rule for rule, _ in operator.broken],
        valid_calls=len(operator.valid) + 1,
    )
    functions: dict[str, Callable[..., Any]] = {}
    for name, make in _makers(operator).items():
        variant = Variant(name)
        measured.variants.append(variant)
        try:
            if variant.checks:
                # Timed is another one: a native check remembers what it could not tell.
                variant.let_through, variant.wrongly_refused = tried(make(), operator)
            functions[name] = make()
        except _LeftOutError as reason:
            variant.left_out = str(reason)
    with importlib.import_module("torch").no_grad():
        calls = {name: calls_for(function, operator.arguments, block) for name, function in functions.items()}
        blocks = {name: calling(function, operator.arguments, calls[name]) for name, function in functions.items()}
        _estimate(measured, interleaved(blocks, rounds))
    return measured


class _LeftOutError(Exception):
    """A variant that there is not here; the text says why."""


def _makers(operator: Operator) -> dict[str, Callable[[], Callable[..., Any]]]:
    """What makes each variant anew; raises _LeftOutError."""
    torch = importlib.import_module("torch")

    def native() -> Callable[..., Any]:
        if reason := why_not_native(operator.contract):
            raise _LeftOutError(reason)
        return guarded(operator.bare, operator.contract).function

    def taken_away() -> Callable[..., Any]:
        site = guarded(operator.bare, operator.contract)
        site.remove()
        return site.function

    def peer(make: Callable[[Any], dict[str, Callable[..., Any]]]) -> Callable[..., Any]:
        try:
            return make(torch)[operator.name]
        except ImportError as error:
            raise _LeftOutError(f"{error.name} is not installed: pip install 'llm-op-guard[bench]'") from None

    return {
        UNGUARDED: lambda: operator.bare,
        OFF: taken_away,
        NATIVE: native,
        PYTHON: lambda: guarded(operator.bare, operator.contract, InPython).function,
        BY_HAND: lambda: by_hand.checks(torch)[operator.name],
        TORCH_CHECK: lambda: torch_checks.checks(torch)[operator.name],
        JAXTYPING: lambda: peer(peers.by_jaxtyping),
        DLTYPE: lambda: peer(peers.by_dltype),
        REAL: lambda: _fresh(operator, operator.real),
        REAL_GUARDED: lambda: _fresh(operator, guarded(operator.real, operator.contract).function),
    }


def _fresh(operator: Operator, function: Callable[..., Any]) -> Callable[..., Any]:
    before = operator.before_real
    if before is None:
        return function

    def call(*arguments: Any) -> Any:
        before()
        return function(*arguments)

    return call


def tried(function: Callable[..., Any], operator: Operator) -> tuple[list[str], int]:
    """The rules of which it lets a broken call through, and how many right calls it refuses."""
    through = [rule for rule, call in operator.broken if not refuses(function, call)]
    return through, sum(refuses(function, call) for call in (operator.arguments, *operator.valid))


def refuses(function: Callable[..., Any], call: Sequence[Any]) -> bool:
    """Whether a function that does nothing but check raises, or warns as guards do of what they are not sure of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", GuardWarning)
        try:
            function(*call)
        except Exception:
            return True
    return False


def _estimate(measured: Measured, times: dict[str, list[float]]) -> None:
    ratios = {
        f"{above} / {below}": (above, below)
        for above in (NATIVE, PYTHON)
        for below in (BY_HAND, TORCH_CHECK, JAXTYPING, DLTYPE)
        if above in times and below in times
    }

    def figures(chosen: Sequence[int]) -> dict[str, float]:
        found = medians(times, chosen)
        added = {name: value - found[REAL if name == REAL_GUARDED else UNGUARDED] for name, value in found.items()}
        return {
            **found,
            **{f"added {name}": value for name, value in added.items()},
            **{ratio: added[above] / added[below] for ratio, (above, below) in ratios.items() if added[below]},
        }

    estimated = estimates(len(times[UNGUARDED]), figures)
    for variant in measured.variants:
        if variant.name in times:
            variant.nanoseconds, variant.added = estimated[variant.name], estimated[f"added {variant.name}"]
    measured.ratios = {ratio: estimated[ratio] for ratio in ratios if ratio in estimated}
