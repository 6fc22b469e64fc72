import pytest
import torch
from paged_gather import paged_gather

import llm_op_guard as og
from llm_op_guard.testing import Case, cases


@cases(paged_gather)
@pytest.mark.op_guard_expected
def test_what_the_contract_says(case: Case) -> None:
    """Valid calls give what they should; each broken one is stopped by the rule that it breaks."""
    arguments = case.arguments()
    with og.policy(B="raise"):
        if case.accepted:
            keys = paged_gather(**arguments)
            assert keys.shape[1] == arguments["length"]
            return
        with pytest.raises(og.GuardError) as caught:
            paged_gather(**arguments)
    assert case.rule in [violation.rule_id for violation in caught.value.violations]


def test_keys_come_from_their_blocks() -> None:
    cache = torch.arange(4.0)[:, None, None, None].expand(4, 2, 1, 1)
    keys = paged_gather(cache, torch.tensor([[3, 0]]), 3)
    assert keys.flatten().tolist() == [3.0, 3.0, 0.0]
