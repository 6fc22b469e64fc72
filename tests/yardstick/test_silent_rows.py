"""Wrong results that Transformers computes without a word, and errors that name nothing: each row has its test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

# A row of the cases, and the test that shows the wrong result first and then what is said of it.
ROWS = {
    "rope-width-1": "transformers/test_silent_results.py::test_rope_width_1",
    "rope-length-1": "transformers/test_silent_results.py::test_rope_length_1",
    "rope-swapped": "transformers/test_silent_results.py::test_rope_swapped",
    "rope-batch-grows": "transformers/test_silent_results.py::test_rope_batch_grows",
    "rope-unsqueezed": "transformers/test_silent_results.py::test_rope_unsqueezed",
    "rope-partial-full": "transformers/test_silent_results.py::test_rope_partial_full",
    "rope-layout": "transformers/test_silent_results.py::test_rope_layout",
    "attn-kv-batch-1": "transformers/test_silent_results.py::test_attn_kv_batch_1",
    "attn-q-batch-1": "transformers/test_silent_results.py::test_attn_q_batch_1",
    "attn-v-length": "transformers/test_silent_results.py::test_attn_v_length_sdpa",
    "attn-mask-kv-1": "transformers/test_attention.py::test_attn_mask_kv_1",
    "attn-mask-bool-eager": "transformers/test_silent_results.py::test_attn_mask_not_additive_eager",
    "attn-mask-int": "transformers/test_silent_results.py::test_attn_mask_not_additive_eager",
    "attn-mask-float01": "transformers/test_attention.py::test_attn_mask_float01",
    "attn-causal-and-mask": "transformers/test_attention.py::test_attn_causal_and_mask",
    "attn-one-kv-head": "transformers/test_silent_results.py::test_attn_one_kv_head_falcon",
    "mask-short": "transformers/test_masks.py::test_mask_short",
    "mask-padded-long": "transformers/test_masks.py::test_mask_padded_long",
    "mask-additive-2d": "transformers/test_masks.py::test_mask_additive_2d",
    "mask-row-dead": "transformers/test_masks.py::test_mask_row_dead_is_suspect",
    "decode-mask-new-only": "transformers/test_masks.py::test_decode_mask_new_only",
    "kwarg-typo": "transformers/test_entry.py::test_kwarg_typo",
    "positions-broadcast": "transformers/test_entry.py::test_positions_broadcast",
    "cache-other-model": "transformers/test_entry.py::test_cache_other_model",
    "cache-more-layers": "transformers/test_entry.py::test_cache_more_layers",
    "cache-dtype": "transformers/test_cache_updates.py::test_cache_dtype",
    "norm-input-1": "transformers/test_silent_results.py::test_norm_input_1",
    "embeds-width-1": "transformers/test_entry.py::test_embeds_width_1",
    "nan-weight-greedy": "test_nonfinite.py::test_a_broken_weight_of_a_model_is_named",
    # What ends in an error that names nothing.
    "ids equal to the vocabulary size, negative, -100": "transformers/test_token_ids.py::test_forward_names_the_id",
    "1-D ids": "transformers/test_entry.py::test_ids_without_a_batch",
    "empty ids": "transformers/test_entry.py::test_no_tokens",
    "a cache with other heads, head size or batch": (
        "transformers/test_cache_updates.py::test_a_cache_of_another_model_or_batch"
    ),
    "a cache with fewer layers": "transformers/test_entry.py::test_cache_fewer_layers",
    "a full StaticCache": "transformers/test_cache_updates.py::test_a_full_static_cache",
    "position_ids past GPT-2's table": "transformers/test_entry.py::test_positions_past_a_learned_table",
    "kv heads that do not divide heads": "transformers/test_attention.py::test_eager_attention",
    "mask batch 1 for batch 2": "transformers/test_masks.py::test_mask_batch_1",
    "top_k above the number of experts": "transformers/test_moe.py::test_top_k_above_the_number_of_experts",
}  # Of vllm-rope-width, which is a kernel of vLLM, the width alone is said: pos-06 of the reports.


@pytest.mark.parametrize("row", ROWS)
def test_the_row_has_its_test(row: str) -> None:
    file, name = ROWS[row].split("::")
    found = [
        node
        for node in ast.walk(ast.parse((TESTS / file).read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(found) == 1
