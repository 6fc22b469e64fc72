"""For the tests of those who write contracts: calls made from a contract, and violations again, from capsules."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llm_op_guard.catalogue import contract_of
from llm_op_guard.contract.model import Contract
from llm_op_guard.faults import capsule as capsules
from llm_op_guard.faults.build import build
from llm_op_guard.faults.ingredients import ingredients
from llm_op_guard.faults.mutants import mutants
from llm_op_guard.faults.solve import valid_calls
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.call import Call
from llm_op_guard.guard.violation import Violation, error_class
from llm_op_guard.replaying import contract_for, dressed
from llm_op_guard.report.text import render

__all__ = ["Case", "capsule", "cases", "replay"]


def capsule(violation: Violation) -> str:
    """A violation as a text of a kilobyte or two, which `llm-op-guard replay` and `replay` make anew anywhere.

    It holds the metadata of the arguments, numbers and texts that the contract speaks of, and the elements and items
    that the broken rule named: nothing else of what tensors and lists hold, no text and no key of a user. Raises
    CapsuleError where the call is not known.
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
        raise error_class(violations)(render(violations), violations)


@frozen
class Case:
    """A call that a contract accepts (`rule` is None), or that breaks `rule`, made by a change of that `kind`."""

    call: Call
    rule: str | None = None
    kind: str = "valid"

    @property
    def accepted(self) -> bool:
        """Whether the contract accepts it."""
        return self.rule is None

    def arguments(self) -> dict[str, Any]:
        """The arguments by name, made anew each time; objects have the attributes that the contract reads."""
        return build(self.call)

    def __str__(self) -> str:
        return "valid" if self.rule is None else f"{self.rule}, {self.kind}"


def cases(target: Any, *, valid: int = 20, broken: int = 3, seed: int = 0) -> Callable[[Any], Any]:
    """Parametrise a test, which takes `case`, over calls made from a contract: valid ones, and some for every rule.

    Promises (`returns`, `ensure`) have none: no call breaks them.

    `target` is something guarded, or a contract that `og.load` has read. `valid` is the number of valid calls,
    `broken` the most for a rule. Raises TypeError for another target.
    """
    import pytest  # noqa: PLC0415 - for tests alone

    contract = target if isinstance(target, Contract) else contract_of(target)
    if contract is None:
        raise TypeError(f"cases takes something guarded, or a contract; not a {type(target).__name__}")
    made_of = replace(ingredients(contract), usual=True)
    right = valid_calls(made_of, seed, valid)
    found = [Case(judgement.call) for judgement in right]
    for rule, kinds in mutants(made_of, right, seed).items():
        found += [Case(mutant.call, rule, mutant.kind) for mutant in kinds[:broken]]
    return pytest.mark.parametrize("case", found, ids=str)
