"""For the tests of those who write contracts: violations again, from capsules."""

from __future__ import annotations

import json

from llm_op_guard.errors import GUARD_ERRORS
from llm_op_guard.faults import capsule as capsules
from llm_op_guard.guard.violation import Violation
from llm_op_guard.replaying import contract_for, dressed
from llm_op_guard.report.text import render

__all__ = ["capsule", "replay"]


def capsule(violation: Violation) -> str:
    """A violation as a text of a kilobyte or two, which `llm-op-guard replay` and `replay` make anew anywhere.

    It holds the metadata of the arguments, numbers and texts that the contract speaks of, and the elements that the
    broken rule named: nothing else of what tensors hold, no text of a user. Raises CapsuleError where the call is not
    known.
    """
    return json.dumps(capsules.capsule_of(violation).to_json())


def replay(text: str, *, contract: str | None = None) -> None:
    """Make the call of a capsule anew and judge it: raises GuardError with its diagnosis, as the call did.

    `text` is a capsule; `contract` names the contract where it is not one of those that are shipped:
    FILE, FILE:OPERATOR, or MODULE:FUNCTION. Returns where nothing is broken. Raises CapsuleError for a text that is
    none, or a contract that is not known.
    """
    found = capsules.read(text)
    replayed = capsules.replay(found, contract_for(found, contract)[1])
    violations = dressed(replayed)
    if violations:
        named = next((violation.error for violation in violations if violation.error is not None), None)
        raise GUARD_ERRORS[named or "ValueError"](render(violations), violations)
