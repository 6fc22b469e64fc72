"""Routers: more experts for a token than there are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from outcomes import assert_quiet, diagnosed

import llm_op_guard as og

Make = Callable[..., Any]
IDS = torch.tensor([[5, 9, 14], [44, 7, 20]])


def mixture(tiny: Make, model_type: str, top_k: int) -> Any:
    sizes = {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32}
    widths = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1}
    own = {**sizes, **widths, "num_key_value_heads": 4} if model_type == "deepseek_v3" else {}
    experts = {"num_local_experts": 4} if model_type != "olmoe" else {"num_experts": 4}
    return tiny(model_type, num_experts_per_tok=top_k, **experts, **own)


ROUTERS = {
    "mixtral": "MixtralTopKRouter",
    "olmoe": "OlmoeTopKRouter",
    "gpt_oss": "GptOssTopKRouter",
    "deepseek_v3": "DeepseekV3TopkRouter",
}


@pytest.mark.parametrize("model_type", ROUTERS)
def test_top_k_above_the_number_of_experts(tiny: Make, model_type: str) -> None:
    attn = {"attn": "eager"} if model_type == "gpt_oss" else {}
    make = partial(tiny, **attn)
    model = mixture(make, model_type, 5)
    call = partial(model, IDS)
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        call()
    violation = diagnosed(call, f"{ROUTERS[model_type]}.forward", "as_many_experts")
    assert violation.observed == "self.top_k = 5, self.weight.shape[0] = 4"
    # All of them, and one.
    for top_k in (4, 1):
        right = mixture(make, model_type, top_k)
        assert_quiet(lambda right=right: right(IDS), lambda right=right: right(IDS[:1, :1]))


def test_a_router_that_is_not_known_is_refused() -> None:
    from transformers.models.longcat_flash import modeling_longcat_flash

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused = {refusal.site: refusal.reason for refusal in og.install("transformers").refused}
    site = f"{modeling_longcat_flash.__name__}.LongcatFlashTopkRouter.forward"
    assert "its code is not one that a contract was written for" in refused[site]
