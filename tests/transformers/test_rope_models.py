"""A tiny model for each way of calling a rotary embedding: guarded it computes the same, and raises no alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_identical import IDS, LEFT_PADDED, MASK, assert_identical

Make = Callable[..., Any]
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "cohere": ({}, ("apply_rotary_pos_emb",)),
    "helium": ({"head_dim": 16}, ("apply_rotary_pos_emb",)),
    "ernie4_5": ({"head_dim": 16}, ("apply_rotary_pos_emb",)),
    "nanochat": ({}, ("apply_rotary_pos_emb",)),
    "deepseek_v3": (LATENT, ("apply_rotary_pos_emb",)),
    "gpt_neox": ({}, ("apply_partial_rotary_pos_emb", "gpt_neox_attention")),
    "nemotron": ({"head_dim": 16}, ("apply_partial_rotary_pos_emb",)),
    "phi3": ({}, ("apply_partial_rotary_pos_emb",)),
    "glm": ({"head_dim": 16}, ("apply_partial_rotary_pos_emb",)),
    "gpt_oss": (
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
        ("apply_rotary_pos_emb_half_table",),
    ),
    "gptj": ({"rotary_dim": 8}, ("apply_rotary_pos_emb_of_tensor",)),
    "gemma3n_text": (
        {
            "head_dim": 16, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 96,
            "hidden_size_per_layer_input": 16,
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
        },
        ("apply_rotary_pos_emb_of_x",),
    ),
    "deepseek_v2": (LATENT, ("apply_rotary_emb",)),
    "llama4_text": (
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64},
        ("apply_rotary_emb_tokens_first",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_models(tiny: Make, model_type: str, dtype: torch.dtype) -> None:
    changes, operators = MODELS[model_type]
    model = tiny(model_type, attn="eager", dtype=dtype, **changes)

    @torch.no_grad()
    def call() -> Any:
        padded = model(LEFT_PADDED, attention_mask=MASK)
        decoded = model.generate(
            LEFT_PADDED, attention_mask=MASK, max_new_tokens=3, min_new_tokens=3, num_beams=2, do_sample=False
        )
        return model(IDS)[0], model(IDS[:1, :1])[0], padded[0], decoded

    assert_identical(call, *operators)
