"""Rotary embeddings: every known function computes its family's formula; nothing else is guarded."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rope_formulas import SAMPLES
from transformers import GPTNeoXConfig
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXRotaryEmbedding
from transformers.models.llama4.configuration_llama4 import Llama4VisionConfig
from transformers.models.llama4.modeling_llama4 import Llama4VisionRotaryEmbedding, vision_apply_rotary_emb

import llm_op_guard as og
from llm_op_guard.integrations.transformers import rope

# ---------------------------------------------------------------- every function of the installed Transformers

# A family that does what another does, and more: its functions take the samples of the other one.
MORE = {
    "halves of the first columns": {"halves", "halves of the first columns, patches before heads"},
    "halves of the first columns, keys optional": {
        "halves",
        "halves of the first columns",
        "halves of the first columns, patches before heads",
    },
    "halves, queries of the last positions": {"halves"},
    "matrices of the first half of the table": {"neighbours, first half of the table"},
    "neighbours in a picture and its memory": {"neighbours in a picture"},
    "neighbours of the first columns": {"neighbours"},
    "neighbours of the first columns, first half of the table": {
        "matrices of the first half of the table",
        "neighbours, first half of the table",
    },
    "neighbours, first half of the table": {"matrices of the first half of the table"},
    "neighbours, put into halves, keys optional": {"neighbours, put into halves"},
}


@pytest.fixture(scope="module")
def functions() -> list[dict[str, Any]]:
    """A line for each function of the modeling files."""
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("rope_formulas.py"))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def test_every_known_function_computes_the_formula_of_its_family(functions: list[dict[str, Any]]) -> None:
    known = [line for line in functions if not line["refused"] and line["operator"] != "GPTNeoXAttention.forward"]
    assert len(known) > 200
    assert [line["site"] for line in known if not line["right"]] == []
    assert {line["formula"] for line in known} <= SAMPLES.keys()


def test_samples_tell_the_formulas_apart(functions: list[dict[str, Any]]) -> None:
    others = {line["formula"]: set(line["others"]) for line in functions if "others" in line}
    assert {name: found for name, found in others.items() if found} == MORE


def test_every_formula_has_samples() -> None:
    assert SAMPLES.keys() == rope.FORMULAS.keys()
    digests = Counter(digest for family in rope.FAMILIES for digest in family.code)
    assert set(digests.values()) == {1}, "one code, one family"


@pytest.mark.skipif(transformers.__version__ != "5.24.0", reason="counted in 5.24.0")
def test_none_is_refused_in_the_version_that_was_read(functions: list[dict[str, Any]]) -> None:
    assert [line for line in functions if line["refused"]] == []
    here = {
        name for name, family in rope.FORMULAS.items() for code in family.code.values() if "5.24.0" in code.versions
    }
    assert {line["formula"] for line in functions} == {*here, None}
    names = Counter(line["operator"] for line in functions)
    assert names["apply_rotary_pos_emb"] == 190
    assert names["apply_rotary_pos_emb_interleave"] == 12
    assert names["apply_rotary_pos_emb_vision"] == 27
    assert len(functions) == 190 + 12 + 27 + 16


def test_a_width_that_another_init_makes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(self: Any, config: Any, layer_idx: Any = None) -> None:
        self.rotary_ndims = 0

    monkeypatch.setattr(modeling_gpt_neox.GPTNeoXAttention, "__init__", made)
    (candidate,) = (c for c in rope.candidates(modeling_gpt_neox) if c.operator == "GPTNeoXAttention.forward")
    assert candidate.function is None
    assert candidate.reason == "its __init__ is not the one whose rotary_ndims a contract speaks of"


def test_functions_that_a_module_imports_belong_to_the_other() -> None:
    module = importlib.import_module("transformers.models.gpt_neox.modeling_gpt_neox")
    copy = type(module)("transformers.models.other.modeling_other")
    copy.__dict__.update({name: value for name, value in vars(module).items() if not name.startswith("__")})
    assert list(rope.candidates(copy)) == []
    assert {c.operator for c in rope.candidates(module)} == {"apply_rotary_pos_emb", "GPTNeoXAttention.forward"}


# ---------------------------------------------------------------- a module that knows how many columns it rotates

B, L, H, D = 2, 7, 4, 16
LONG = [1.0, 2.0]
ROPE_TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0},
    "longrope": {"factor": 2.0, "short_factor": LONG, "long_factor": LONG, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "proportional": {},
}


def neox(rope_type: str = "default", factor: float = 0.25, **config: Any) -> tuple[GPTNeoXAttention, Any]:
    """A module, and the table that the model's own rotary embedding makes for it."""
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "partial_rotary_factor": factor}
    made = GPTNeoXConfig(
        hidden_size=H * D, num_attention_heads=H, rope_parameters={**parameters, **ROPE_TYPES[rope_type]}, **config
    )
    table = GPTNeoXRotaryEmbedding(made)(torch.zeros(B, L, H * D), torch.arange(L)[None])
    return GPTNeoXAttention(made, layer_idx=0).eval(), table


def attend(module: GPTNeoXAttention, table: Any) -> None:
    with torch.no_grad():
        plain = module(torch.ones(B, L, H * D), attention_mask=None, position_embeddings=table)[0]
        with og.installed("transformers"):
            assert torch.equal(
                module(torch.ones(B, L, H * D), attention_mask=None, position_embeddings=table)[0], plain
            )


@pytest.mark.usefixtures("no_alarm")
@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_tables_of_every_kind_are_as_wide_as_the_module_says(rope_type: str) -> None:
    module, table = neox(rope_type)
    assert table[0].shape[-1] == (module.rotary_ndims if rope_type != "proportional" else D)
    attend(module, table)


@pytest.mark.usefixtures("no_alarm")
@pytest.mark.parametrize("factor", [0.0, 1 / 16, 0.125, 5 / 16, 1.0])
def test_an_odd_part_of_a_head_has_an_even_table(factor: float) -> None:
    module, table = neox(factor=factor)
    assert table[0].shape[-1] - module.rotary_ndims in (0, 1)
    attend(module, table)


@pytest.mark.usefixtures("no_alarm")
def test_a_head_size_of_the_configuration_makes_another_table() -> None:
    module, table = neox(head_dim=2 * D)
    assert table[0].shape[-1] == 2 * module.rotary_ndims
    attend(module, table)


@pytest.mark.parametrize("width", [2, 6, D])
def test_a_table_of_another_width_is_rejected(width: int) -> None:
    module, _ = neox()
    table = (torch.ones(1, L, width),) * 2
    with og.installed("transformers"), pytest.raises(og.GuardError) as caught:
        module(torch.ones(B, L, H * D), attention_mask=None, position_embeddings=table)
    (violation,) = caught.value.violations
    assert violation.rule_id == "rotary_width"
    assert violation.hint == (
        "full-width cos and sin given to a module that rotates a part of each head"
        if width == D
        else "cos and sin of another model"
    )


# ---------------------------------------------------------------- a table that lost its sines


def test_a_complex_table_that_a_conversion_made_real() -> None:
    """`Module.to(dtype)` casts complex buffers too: torch warns once, and the model rotates nothing any more."""
    q, k = torch.ones(1, 17, 4, 8), torch.ones(1, 17, 4, 8)
    config = Llama4VisionConfig(hidden_size=32, num_attention_heads=4, image_size=16, patch_size=4)
    table, rounded, lost = (Llama4VisionRotaryEmbedding(config) for _ in range(3))
    rounded.bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lost.to(torch.float32)
    right, wrong = (vision_apply_rotary_emb(q, k, made(q))[0] for made in (table, lost))
    assert not torch.allclose(right, wrong, atol=0.5)
    assert torch.allclose(right.norm(dim=-1), q.norm(dim=-1)), "a rotation keeps lengths"
    assert not torch.allclose(wrong.norm(dim=-1), q.norm(dim=-1), atol=0.1)

    with og.installed("transformers"):
        assert torch.equal(vision_apply_rotary_emb(q, k, table(q))[0], right)
        assert torch.equal(vision_apply_rotary_emb(q, k, rounded(q))[0], right)
        with pytest.raises(og.GuardError) as caught:
            vision_apply_rotary_emb(q, k, lost(q))
    (violation,) = caught.value.violations
    assert (violation.rule_id, violation.observed, violation.expected) == (
        "freqs_ci.dtype",
        "freqs_ci.dtype = float32",
        "complexes",
    )
    assert violation.hint == (
        "cos or sin, or .to(dtype) of the model, which drops the sines of a complex table: use .bfloat16() or .half()"
    )
