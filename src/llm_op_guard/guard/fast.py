"""The native program in front of a check, where the plan has one and it can be run here."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from llm_op_guard.contract.model import Contract
from llm_op_guard.guard import reading
from llm_op_guard.guard.lower import lower
from llm_op_guard.guard.plan import Plan, plan_check
from llm_op_guard.native import extension
from llm_op_guard.native.program import Program, Refused


class Accepting(NamedTuple):
    """`accepts(program, *arguments)` is true where a call is right; anything else is the Python check's to say.

    Dynamo takes it for False.
    """

    accepts: Callable[..., bool]
    program: Any


def accepted_by(plan: Plan) -> Accepting | None:
    """What accepts the calls that a check would, at a small part of its price; None where there is no such thing."""
    program = _program(plan)
    if isinstance(program, Refused):
        return None
    if program.tensors:
        # A guard may be made before its program imports torch; a contract with tensors in it needs the real class.
        with contextlib.suppress(ImportError):
            importlib.import_module("torch")
    native = usable()
    return None if isinstance(native, Refused) else Accepting(native.accepts, extension.made(native, program))


def usable() -> Any:
    """The extension, or `Refused` with why it cannot be used here."""
    return extension.usable(reading.optional_attribute, reading.UNSET)


def is_usable() -> bool:
    """Whether the extension can be used here; raises PolicyError for a bad `LLM_OP_GUARD_NATIVE`."""
    return not isinstance(usable(), Refused)


def refusal(contract: Contract) -> str | None:
    """Why the metadata rules of a contract are checked in Python; None where a program checks them."""
    plan = plan_check(contract, {"A"})
    if plan is None:
        return "it has no rules about metadata"
    program = _program(plan)
    return program.reason if isinstance(program, Refused) else None


def _program(plan: Plan) -> Program | Refused:
    """Made once for all guards of a contract, of its rules about metadata."""
    if any(step.clause.cost_class != "A" for step in plan.steps):
        return Refused("it reads the values of tensors")
    made, key = plan.contract.plans, ("program", plan.parameters, plan.after_call)
    if key not in made:
        made[key] = lower(plan)
    program: Program | Refused = made[key]
    return program
