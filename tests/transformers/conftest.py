"""Which of these tests are for which Transformers: all but one file run with 5, a selection with 4."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

ONLY_4 = {"test_version_4.py"}
ALSO_4 = {
    "test_compile.py",
    "test_identical.py",
    "test_install.py",
    "test_logits.py",
    "test_silent_results.py",
    "test_token_ids.py",
}
NOT_IN_4 = {
    "test_no_more_compilations_automatic[static cache]": "Dynamo fails on it, unguarded",
    "test_meta_model": "it fails there, unguarded",
    "test_jit_trace": "it fails there, unguarded",
    "test_other_models[eager-qwen2_vl_text]": "its configuration has other names there",
    "test_other_models[sdpa-qwen2_vl_text]": "its configuration has other names there",
    "test_masks_that_broadcast[additive-(7, 7)-eager]": "masks have four dimensions there: test_version_4.py",
    "test_esm_rotates_in_float32": "ESM has another function there",
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
