"""Which of these tests are for which Transformers: all but one file run with 5, a selection with 4."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

ONLY_4 = {"test_version_4.py", "test_version_4_models.py", "test_version_4_operators.py"}
ALSO_4 = {
    "test_compile.py",
    "test_entry.py",
    "test_forwards.py",
    "test_identical.py",
    "test_install.py",
    "test_logits.py",
    "test_masks.py",
    "test_silent_results.py",
    "test_token_ids.py",
}
_CACHE = "the cache has another name there: test_version_4_models.py"
_MASKS = "masks that are too short are padded there: test_version_4_models.py"
NOT_IN_4 = {
    "test_a_cache_of_the_same_model_with_fewer_layers_since": _CACHE,
    "test_no_more_compilations_automatic[static cache]": "Dynamo fails on it, unguarded",
    "test_meta_model": "it fails there, unguarded",
    "test_jit_trace": "it fails there, unguarded",
    "test_other_models[eager-qwen2_vl_text]": "its configuration has other names there",
    "test_other_models[sdpa-qwen2_vl_text]": "its configuration has other names there",
    "test_masks_that_broadcast[additive-(7, 7)-eager]": "masks have four dimensions there: test_version_4.py",
    "test_esm_rotates_in_float32": "ESM has another function there",
    "test_positions_of_other_shapes[shape3-positions_in_batch-one sequence without a batch: position_ids[None]]": (
        "it fails there with another error"
    ),
    "test_positions_that_are_right": _CACHE,
    "test_positions_past_a_learned_table": _CACHE,
    "test_cache_other_model": _CACHE,
    "test_a_cache_of_the_same_model": _CACHE,
    "test_cache_more_layers[<lambda>0]": _CACHE,
    "test_cache_more_layers[<lambda>1]": _CACHE,
    "test_cache_fewer_layers": _CACHE,
    "test_kwarg_typo[past_key_value-past_key_values]": "Transformers warns of it there",
    "test_other_arguments": "Transformers warns of one of them there",
    "test_generation_that_is_right": _CACHE,
    "test_mask_short[eager]": _MASKS,
    "test_mask_short[sdpa]": _MASKS,
    "test_a_short_mask_without_a_cache": _MASKS,
    "test_a_short_mask_without_a_cache_for_sdpa": _MASKS,
    "test_decode_mask_new_only[eager]": _CACHE,
    "test_decode_mask_new_only[sdpa]": _CACHE,
    "test_a_mask_of_the_size_of_a_static_cache[eager]": _CACHE,
    "test_a_mask_of_the_size_of_a_static_cache[sdpa]": _CACHE,
    "test_sliding_windows[eager]": _CACHE,
    "test_sliding_windows[sdpa]": _CACHE,
    "test_attention_whose_masks_nobody_knows": _CACHE,
    "test_a_replaced_function_is_refused": _CACHE,
    **{
        f"test_who_catches_what_the_unguarded_call_raises_catches_it_guarded[{case}]": _CACHE
        for case in ("a cache of another batch", "a static cache of another batch", "a cache of fewer layers")
    },
    "test_who_catches_what_the_unguarded_call_raises_catches_it_guarded[a mask that is too wide]": (
        "wide masks are cut there: test_version_4.py"
    ),
    "test_rope_partial_full": "an attention that stands by itself fails there, unguarded",
    "test_attn_mask_hints_are_about_what_is_wrong[eager]": "wide masks are cut there: test_version_4.py",
    "test_attn_mask_hints_are_about_what_is_wrong[sdpa]": "wide masks are cut there: test_version_4.py",
    "test_hooks_of_the_library_only_write_down": "the library writes outputs down without hooks there",
    **{
        f"test_a_layer_that_keeps_no_keys[{case}]": _CACHE
        for case in (
            "skips_in_the_instance",
            "skips_in_a_subclass",
            "skips_in_the_class",
            "skips_when_called",
            "keeps_no_keys_by_a_hook",
            "attends_without_a_cache",
        )
    },
    "test_generation_that_was_changed[_prepare_position_ids_for_generation]": "there is no such method there",
}

IS_4 = transformers.__version__.startswith("4.")
collect_ignore = (
    [file.name for file in Path(__file__).parent.glob("test_*.py") if file.name not in ONLY_4 | ALSO_4]
    if IS_4
    else sorted(ONLY_4)
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if IS_4 and item.path.parent == Path(__file__).parent and item.name in NOT_IN_4:
            item.add_marker(pytest.mark.skip(reason=f"Transformers 4: {NOT_IN_4[item.name]}"))
