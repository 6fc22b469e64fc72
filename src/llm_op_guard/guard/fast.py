"""The native program in front of a check, where the plan has one and it can be run here."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from llm_op_guard.contract.model import Contract
from llm_op_guard.guard import reading
from llm_op_guard.guard.lower import Lowered, lower
from llm_op_guard.guard.plan import Plan, plan_check
from llm_op_guard.guard.remainder import remainder
from llm_op_guard.native import extension
from llm_op_guard.native.program import Refused
from llm_op_guard.policy import native_wanted


class Accepting(NamedTuple):
    """`accepts(program, *arguments)` is true where a call is right but for `remainder`, which is for Python to check.

    Where that is None, the call is right. What else it says is the Python check's to judge. Dynamo takes it for False.
    """

    accepts: Callable[..., bool]
    program: Any
    remainder: Plan | None


def accepted_by(plan: Plan, *, noted: bool = False) -> Accepting | None:
    """What accepts the calls that a check would, at a small part of its price; None where there is no such thing.

    A `noted` call leaves something to do in Python, whatever its plan.
    """
    if not native_wanted():
        return None
    lowered = _lowered(plan)
    if isinstance(lowered, Refused):
        return None
    if lowered.program.tensors:
        # A guard may be made before its program imports torch; a contract with tensors in it needs the real class.
        with contextlib.suppress(ImportError):
            importlib.import_module("torch")
    native = usable()
    if isinstance(native, Refused):
        return None
    remains = remainder(plan, ()) if noted and lowered.remainder is None else lowered.remainder
    return Accepting(native.accepts, extension.made(native, lowered.program), remains)


def usable() -> Any:
    """The extension, or `Refused` with why it cannot be used here."""
    return extension.usable(reading.optional_attribute, reading.UNSET)


def is_usable() -> bool:
    """Whether the extension can be used here; raises PolicyError for a bad `LLM_OP_GUARD_NATIVE`."""
    return not isinstance(usable(), Refused)


class Natively(NamedTuple):
    """How far the metadata rules of a contract are checked natively: whether any are, and why others are not."""

    any: bool
    reasons: tuple[str, ...]


def natively(contract: Contract) -> Natively:
    """What the program of a contract checks, where the extension can be used."""
    plan = plan_check(contract, {"A"})
    lowered = Refused("it has no rules about metadata") if plan is None else _lowered(plan)
    if isinstance(lowered, Refused):
        return Natively(False, (lowered.reason,))
    return Natively(True, lowered.reasons)


def _lowered(plan: Plan) -> Lowered | Refused:
    """Made once for all guards of a contract."""
    made, key = plan.contract.programs, (id(plan.steps), plan.parameters)
    if key not in made:
        made[key] = plan.steps, lower(plan)  # the steps are kept, so that their number stands for no others
    lowered: Lowered | Refused = made[key][1]
    return lowered
