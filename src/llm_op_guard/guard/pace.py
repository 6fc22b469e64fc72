"""Value rules in some calls only: which of them may be left out, and whether it is the turn of this call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llm_op_guard.contract.model import Clause, Contract, Declare, DtypeName, DtypeSet, Require, TensorType
from llm_op_guard.contract.path import Path, path_of
from llm_op_guard.contract.vocabulary import dtype_names
from llm_op_guard.guard.deferred import deferred
from llm_op_guard.policy import Action, Policy, Setting, current

if TYPE_CHECKING:
    from random import Random

_WHOLE = dtype_names(DtypeSet("integer"))
# A check before the call and the one after it.
Checks = tuple[Callable[..., Any], Callable[..., None] | None]


def lean(contract: Contract) -> Contract:
    """The contract without the value rules that may be left out of a call."""
    return replace(
        contract, clauses=tuple(clause for clause in contract.clauses if not may_be_left_out(clause, contract))
    )


def may_be_left_out(clause: Clause, contract: Contract) -> bool:
    """Whether a rule reads values and protects no memory access.

    What indexes memory is whole numbers: a rule about tensors that are declared as nothing else protects an access,
    and so does one whose breach is an IndexError. It is judged before every call, since afterwards is too late.
    """
    if clause.cost_class != "B" or not isinstance(clause.statement, Require):
        return False
    if clause.statement.reason.error == "IndexError":
        return False
    parts = deferred(clause)
    return parts is None or not all(_is_whole(path_of(node), contract) for node in parts.tensors)


def _is_whole(path: Path | None, contract: Contract) -> bool:
    declared = [
        c.statement.type for c in contract.clauses if isinstance(c.statement, Declare) and c.statement.path == path
    ]
    tensors = [a for one in declared for a in one.alternatives if isinstance(a, TensorType)]
    fixed = [d for tensor in tensors for d in tensor.dtypes]
    return bool(fixed) and all(isinstance(d, DtypeName | DtypeSet) and dtype_names(d) <= _WHOLE for d in fixed)


@functools.cache
def _chance() -> Random:
    """Of its own: what the program draws must not depend on guards."""
    from random import Random  # noqa: PLC0415 - few need it

    return Random()


class Pace:
    """The turns of one guard; `count` is told of each call whether it was judged in full."""

    def __init__(self, defaults: Policy, names: tuple[str, ...], count: Callable[[bool], None]) -> None:
        self._defaults = defaults
        self._names = names
        self._count = count
        self._calls = itertools.count()

    def is_due(self) -> bool:
        """Whether value rules that may be left out are judged in this call."""
        setting = current(self._defaults, self._names).B
        due = setting is not None and setting.action is not Action.OFF and self._is_turn(setting)
        self._count(due)
        return due

    def _is_turn(self, setting: Setting) -> bool:
        if setting.every != 1:
            return next(self._calls) % setting.every == 0
        return setting.sample == 1 or _chance().random() < setting.sample


def paced(full: Checks, without: Checks, is_due: Callable[[], bool], is_tracing: Callable[[], bool]) -> Checks:
    """Checks that are the full ones in some calls, and else those without what may be left out.

    A program that is traced has the full ones: the turns of calls are no part of it.
    """

    def check(*arguments: Any) -> Any:
        before, after = full if is_tracing() or is_due() else without
        return after, before(*arguments)

    def check_result(result: Any, handed: Any) -> None:
        after, state = handed
        if after is not None:
            after(result, state)

    return check, check_result if full[1] is not None or without[1] is not None else None
