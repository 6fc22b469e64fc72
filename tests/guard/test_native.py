"""Native programs say yes and no where `explain` does, or that they cannot tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contracts_and_calls import calls, contract_bodies, remember
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_equivalence import explained, loaded

from llm_op_guard.contract.model import Contract
from llm_op_guard.guard.fast import usable
from llm_op_guard.guard.lower import lower
from llm_op_guard.guard.plan import plan_check
from llm_op_guard.native import extension
from llm_op_guard.native.program import Program, Refused

native = usable()
pytestmark = pytest.mark.skipif(isinstance(native, Refused), reason=f"no native checks here: {native}")

EXAMPLES = settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def program_of(contract: Contract) -> Program | Refused:
    plan = plan_check(contract, {"A"})
    return Refused("it has no rules about metadata") if plan is None else lower(plan)


def judged(contract: Contract, arguments: dict[str, Any]) -> bool | None:
    """What the program of a contract says of a call; None where it cannot tell, or where there is no program."""
    plan, program = plan_check(contract, {"A"}), program_of(contract)
    if plan is None or isinstance(program, Refused):
        return None
    remember(arguments)
    said: bool | None = native.judge(extension.made(native, program), *(arguments[name] for name in plan.parameters))
    return said


@EXAMPLES
@given(contract_bodies(), st.lists(calls(), min_size=1, max_size=6), st.booleans())
def test_as_explain_says(body: list[list[str]], some_calls: list[dict[str, Any]], autocast: bool) -> None:
    contract = loaded(body)
    program = program_of(contract)
    assume(isinstance(program, Program))
    with torch.autocast("cpu", enabled=autocast):
        for arguments in some_calls:
            said = judged(contract, arguments)
            if said is not None:
                expected = explained(contract, arguments, ("A",))
                assert said is not bool(expected), (contract.text, arguments, expected)
