"""The guard of one operator at one site: its compiled checks, and what happens when one does not say yes."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, Protocol

from llm_op_guard.contract.model import Contract, CostClass, Path, Require
from llm_op_guard.errors import GuardError, GuardInternalWarning
from llm_op_guard.guard.compile import compile_check
from llm_op_guard.guard.explain import explain
from llm_op_guard.guard.plan import Plan, plan_check
from llm_op_guard.guard.reading import Snapshot, is_symbolic
from llm_op_guard.guard.source import check_source
from llm_op_guard.guard.violation import Violation
from llm_op_guard.policy import Policy

logger = logging.getLogger("llm_op_guard")

_BOTH: tuple[CostClass, ...] = ("A", "B")


class Reporter(Protocol):
    """What a guard tells its violations to; `api` hands it in."""

    def report(self, guard: Guard, violations: list[Violation], arguments: Mapping[str, Any]) -> GuardError | None:
        """Act on the violations of one call as the policy says; what is returned is raised."""

    def repeated(self, guard: Guard, rule_ids: list[str]) -> None:
        """Count suspect rules that have been warned about before."""


class Guard:
    """One contract at one site.

    `parameters` are the guarded function's own, in order. `defaults` is the policy where nobody set one.
    """

    def __init__(
        self,
        contract: Contract,
        *,
        operator: str,
        site: str,
        defaults: Policy,
        reporter: Reporter,
        tally: Callable[[], None] | None = None,
    ) -> None:
        self.contract = contract
        self.operator = operator
        self.site = site
        self.defaults = defaults
        self.warned: Counter[str] = Counter()
        self._reporter = reporter
        self._tally = tally
        before = plan_check(contract, _BOTH)
        #: The arguments that the check takes, in order; the same for every choice of classes.
        self.parameters: tuple[str, ...] = before.parameters if before is not None else ()
        self._after = plan_check(contract, _BOTH, after_call=True)
        self._checks: dict[frozenset[CostClass], tuple[Callable[..., Any], Callable[..., None] | None]] = {}
        self._failed_inside = False

    @property
    def classes(self) -> frozenset[CostClass]:
        """The cost classes that the contract has rules of."""
        return frozenset(rule.cost_class for rule in self.contract.rules)

    def checks(self, classes: Iterable[CostClass]) -> tuple[Callable[..., Any], Callable[..., None] | None]:
        """The check before the call and the one after it, for the rules of these classes; compiled once.

        Both raise nothing of their own: what a violation does is the reporter's decision.
        """
        # Class B rules use the symbols that class A statements bind, so A is always compiled in.
        wanted = frozenset({"A", *classes})
        if wanted not in self._checks:
            before = self._compiled(self._plan(wanted, after_call=False))
            after = self._compiled(self._plan(wanted, after_call=True))
            self._checks[wanted] = (before or _nothing, after)
        return self._checks[wanted]

    def source(self, classes: Iterable[CostClass]) -> str:
        """The generated source of the check before the call, to read."""
        plan = self._plan(frozenset({"A", *classes}), after_call=False)
        return check_source(plan).text if plan is not None else ""

    def _plan(self, classes: frozenset[CostClass], *, after_call: bool) -> Plan | None:
        plan = plan_check(self.contract, classes, after_call=after_call)
        # A patch passes the same arguments to every choice of classes.
        return plan if plan is None or after_call else plan.with_parameters(self.parameters)

    def _compiled(self, plan: Plan | None) -> FunctionType | None:
        if plan is None:
            return None
        hooks = {
            "_failed": self._failed_after if plan.after_call else self._failed,
            "_noticed": self._noticed_after if plan.after_call else self._noticed,
            "_tracing": _tracing(),
            "_tally": self._tally or (lambda: None),
        }
        source = check_source(plan, counted=self._tally is not None)
        return compile_check(source, f"{self.operator}{' result' if plan.after_call else ''}", hooks)

    # ------------------------------------------------------------ not a plain yes

    def _failed(self, arguments: tuple[Any, ...]) -> GuardError | None:
        return self._explain(dict(zip(self.parameters, arguments, strict=True)))

    def _failed_after(self, handed: tuple[Any, tuple[Any, ...], tuple[Any, ...]]) -> GuardError | None:
        result, state, arguments = handed
        plan = self._after
        assert plan is not None
        known = dict(zip(plan.known, state, strict=False))
        at_entry = dict(zip(plan.snapshots, state[len(plan.known) :], strict=False))
        values = dict(zip(plan.parameters, arguments, strict=True))
        return self._explain({**values, "result": result}, after_call=True, known=known, at_entry=at_entry)

    def _noticed(self, doubts: list[int], arguments: tuple[Any, ...]) -> GuardError | None:
        return None if self._told(doubts) else self._failed(arguments)

    def _noticed_after(
        self, doubts: list[int], handed: tuple[Any, tuple[Any, ...], tuple[Any, ...]]
    ) -> GuardError | None:
        return None if self._told(doubts) else self._failed_after(handed)

    def _told(self, doubts: list[int]) -> bool:
        """Whether every suspect statement among these has been warned about already; counts them if so.

        Saves explaining the same doubt at every call.
        """
        ids = []
        for doubt in doubts:
            statement = self.contract.clauses[doubt].statement
            if not isinstance(statement, Require) or not self.warned[statement.id]:
                return False
            ids.append(statement.id)
        self.warned.update(ids)
        self._reporter.repeated(self, ids)
        return True

    def _explain(
        self,
        arguments: Mapping[str, Any],
        *,
        after_call: bool = False,
        known: Mapping[str, Any] | None = None,
        at_entry: Mapping[Path, Snapshot | None] | None = None,
    ) -> GuardError | None:
        if any(is_symbolic(value) for value in arguments.values()):
            return None  # a program is being traced with stand-ins that have no shape, dtype or device
        try:
            violations = explain(
                self.contract,
                arguments,
                classes=self._explained_classes(),
                after_call=after_call,
                known={k: v for k, v in (known or {}).items() if v is not None},
                at_entry=at_entry,
            )
            if not violations:
                raise RuntimeError("the compiled check said no and explain found nothing")
        except Exception as error:
            self.fail_inside(error)
            return None
        return self._reporter.report(self, violations, arguments)

    def _explained_classes(self) -> frozenset[CostClass]:
        # The widest check compiled so far; the reporter drops what the policy of this call leaves out.
        return frozenset().union(*self._checks) or frozenset({"A"})

    def fail_inside(self, error: Exception) -> None:
        """Say once that the guard itself failed; the call goes through."""
        if self._failed_inside:
            return
        self._failed_inside = True
        message = (
            f"llm-op-guard failed while checking {self.operator} ({type(error).__name__}: {error}); the call went "
            f"through unchecked. This is a fault of the guard, not of the call; it is reported once for each site."
        )
        logger.error(message, exc_info=error)
        try:
            warnings.warn(GuardInternalWarning(message), stacklevel=2)
        except GuardInternalWarning:
            logger.debug("warnings are errors here; the call goes through all the same")


def _nothing(*_: Any) -> None:
    return None


def _tracing() -> Callable[[], bool]:
    """What tells whether a program is traced at the moment; Dynamo folds it to True while it compiles."""
    torch = sys.modules.get("torch")
    return torch.compiler.is_compiling if torch is not None else lambda: False
