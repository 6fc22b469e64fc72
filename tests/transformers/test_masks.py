"""2-D masks where they are made into those of an attention: what is silently wrong or fails obscurely, and what is not.

Each test shows first what the unguarded call does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from outcomes import assert_clearly_wrong, assert_quiet, diagnosed, logits, suspected
from transformers import DynamicCache, StaticCache, masking_utils
from transformers.masking_utils import create_causal_mask

import llm_op_guard as og
from llm_op_guard.guard.reading import NotApplicable
from llm_op_guard.integrations.transformers import masks

Model = Any
Make = Callable[..., Model]
OPERATOR = "create_causal_mask"
IDS = torch.tensor([[5, 9, 14, 33, 71, 3, 8], [44, 7, 20, 11, 6, 90, 17]])
PADDING = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
ONES = torch.ones_like(PADDING)
each_attention = pytest.mark.parametrize("attn", ["eager", "sdpa"])


# ---------------------------------------------------------------- length


@each_attention
def test_mask_short(tiny: Make, attn: str) -> None:
    model = tiny(attn=attn)
    call = partial(model, IDS, attention_mask=ONES[:, :6])
    assert_clearly_wrong(logits(call), logits(lambda: model(IDS)))
    violation = diagnosed(call, OPERATOR, "mask_covers_past_and_new")
    assert violation.observed == "columns = 6, cache_length(cache) + L = 7"
    assert violation.expected == "columns >= cache_length(cache) + L"
    assert violation.hint == "tokens were added to the ids and not to the mask"


@each_attention
def test_decode_mask_new_only(tiny: Make, attn: str) -> None:
    model = tiny(attn=attn)

    def decoded(columns: int) -> Any:
        cache = model(IDS).cache
        return model(IDS[:, :1], cache=cache, attention_mask=torch.ones(2, columns, dtype=torch.long))

    assert_clearly_wrong(logits(lambda: decoded(1)), logits(lambda: decoded(8)))
    violation = diagnosed(lambda: decoded(1), OPERATOR, "mask_covers_past_and_new")
    assert violation.observed == "columns = 1, cache_length(cache) + L = 8"
    assert violation.hint == "the mask covers the new tokens only: it is for all of past + L"
    assert_quiet(lambda: decoded(8))


def test_a_short_mask_without_a_cache(tiny: Make) -> None:
    model = tiny(attn="eager")
    short = partial(model, IDS, attention_mask=ONES[:, :6], use_cache=False)
    with pytest.raises(RuntimeError, match="size of tensor"):
        short()
    diagnosed(short, OPERATOR, "mask_covers_tokens")
    one = partial(model, IDS, attention_mask=ONES[:, :1], use_cache=False)
    assert_clearly_wrong(logits(one), logits(lambda: model(IDS)))
    assert diagnosed(one, OPERATOR, "mask_covers_tokens").observed == "columns = 1, L = 7"


def test_a_short_mask_without_a_cache_for_sdpa(tiny: Make) -> None:
    model = tiny()
    # A mask of ones is not looked at, and nothing is wrong.
    assert_quiet(lambda: model(IDS, attention_mask=ONES[:, :6], use_cache=False))
    short = partial(model, IDS, attention_mask=PADDING[:, :6], use_cache=False)
    with pytest.raises(RuntimeError, match="size of tensor"):
        short()
    violation = diagnosed(short, OPERATOR, "padding_covers_tokens", cost_class="B")
    assert violation.observed.startswith("columns = 6, L = 7, attention_mask[0, 0] = 0")


@each_attention
def test_mask_padded_long(tiny: Make, attn: str) -> None:
    model = tiny(attn=attn)
    long = torch.nn.functional.pad(ONES, (5, 0))
    call = partial(model, IDS, attention_mask=long)
    assert_clearly_wrong(logits(call), logits(lambda: model(IDS)))
    assert "padded on the left to another length" in suspected(
        call, OPERATOR, "columns are counted from the first token"
    )
    # Ones of any length change nothing.
    assert_quiet(lambda: model(IDS, attention_mask=torch.ones(2, 12)))


@each_attention
def test_a_mask_of_the_size_of_a_static_cache(tiny: Make, attn: str) -> None:
    model = tiny(attn=attn)

    def steps(columns: int) -> Any:
        cache = StaticCache(model.config, max_cache_len=16)
        model(IDS, attention_mask=torch.nn.functional.pad(PADDING, (0, columns - 7), value=1), cache=cache)
        return model(IDS[:, :1], attention_mask=torch.nn.functional.pad(PADDING, (0, 9), value=1), cache=cache)

    assert_quiet(lambda: steps(7), lambda: steps(16))
    diagnosed(lambda: steps(6), OPERATOR, "mask_covers_past_and_new")


# ---------------------------------------------------------------- batch and rank


def test_mask_batch_1(tiny: Make) -> None:
    eager, sdpa = tiny(attn="eager"), tiny()
    for attention_mask in (ONES[:1], PADDING[:1]):
        call = partial(eager, IDS, attention_mask=attention_mask)
        with pytest.raises(IndexError, match="index 1 is out of bounds"):
            call()
        violation = diagnosed(call, OPERATOR, "mask_of_each_sequence")
        assert violation.observed == "attention_mask.shape[0] = 1, B = 2"
        assert violation.hint == "a mask of one sequence is not broadcast: expand it"
    # SDPA does without a mask of ones.
    assert_quiet(lambda: sdpa(IDS, attention_mask=ONES[:1]))
    call = partial(sdpa, IDS, attention_mask=PADDING[:1])
    with pytest.raises(IndexError, match="index 1 is out of bounds"):
        call()
    diagnosed(call, OPERATOR, "padding_of_each_sequence", cost_class="B")


@each_attention
def test_a_mask_of_more_sequences_is_suspect(tiny: Make, attn: str) -> None:
    model = tiny(attn=attn)
    call = partial(model, IDS, attention_mask=torch.cat([PADDING, ONES]))
    assert torch.equal(logits(call), logits(lambda: model(IDS, attention_mask=PADDING)))
    suspected(call, OPERATOR, r"attention_mask\.shape\[0\] = 4, B = 2")


def test_masks_of_other_ranks(tiny: Make) -> None:
    eager, sdpa = tiny(attn="eager"), tiny()
    causal = ONES[:, :, None].expand(2, 7, 7).tril().bool()
    wrong = ((PADDING[0], "rank", "a mask of one sequence"), (causal, "of_heads", "a dimension for heads"))
    for attention_mask, rule, hint in wrong:
        for model, rule_id, cost_class in ((eager, f"mask_{rule}", "A"), (sdpa, f"padding_{rule}", "B")):
            call = partial(model, IDS, attention_mask=attention_mask)
            with pytest.raises((IndexError, RuntimeError)):
                call()
            violation = diagnosed(call, OPERATOR, rule_id, cost_class=cost_class)
            assert violation.hint is not None and hint in violation.hint
    additive = torch.zeros(2, 1, 7, 7).masked_fill(~causal[:, None], torch.finfo(torch.float32).min)
    assert_quiet(
        lambda: eager(IDS, attention_mask=additive),
        lambda: sdpa(IDS, attention_mask=causal[:, None]),
    )


# ---------------------------------------------------------------- values


@each_attention
def test_mask_additive_2d(tiny: Make, attn: str) -> None:
    model = tiny(attn=attn)
    additive = torch.zeros(2, 7).masked_fill(PADDING == 0, -1e9)
    call = partial(model, IDS, attention_mask=additive)
    assert_clearly_wrong(logits(call), logits(lambda: model(IDS, attention_mask=PADDING)))
    violation = diagnosed(call, OPERATOR, "mask_keeps_or_drops", cost_class="B")
    assert violation.observed == "lowest(attention_mask) = -1000000000.0 at attention_mask[0, 0]"
    assert violation.because is not None and "read inverted" in violation.because


@each_attention
def test_mask_row_dead_is_suspect(tiny: Make, attn: str) -> None:
    model = tiny(attn=attn)
    dead = PADDING * torch.tensor([[0], [1]])
    call = partial(model, IDS, attention_mask=dead)
    assert logits(call).isfinite().all()
    assert "attention_mask[0] keeps no key" in suspected(call, OPERATOR, "numbers without a meaning")


def test_values_are_looked_at_only_when_asked_for(tiny: Make) -> None:
    model = tiny()
    with og.installed("transformers"), warnings.catch_warnings():
        warnings.simplefilter("error", og.GuardWarning)
        model(IDS, attention_mask=PADDING * torch.tensor([[0], [1]]))
        model(IDS, attention_mask=torch.zeros(2, 7))
    assert og.record.total == 0


@each_attention
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.uint8], ids=str)
def test_masks_of_any_dtype_and_size(tiny: Make, attn: str, dtype: torch.dtype) -> None:
    model = tiny(attn=attn, sliding_window=None)
    mask = PADDING.to(dtype)
    assert_quiet(
        lambda: model(IDS, attention_mask=mask),
        lambda: model(IDS, attention_mask=mask, use_cache=False),
        lambda: model(IDS[:1, :1], attention_mask=mask[1:, :1]),
        lambda: model(IDS, attention_mask=2 * mask if dtype is not torch.bool else mask),
    )


@each_attention
def test_sliding_windows(tiny: Make, attn: str) -> None:
    model = tiny("mistral", attn=attn, sliding_window=4)

    def decoded(columns: int) -> Any:
        cache = DynamicCache(config=model.config)
        model(IDS, attention_mask=PADDING, cache=cache)
        mask = torch.nn.functional.pad(PADDING, (0, max(0, columns - 7)), value=1)[:, :columns]
        return model(IDS[:, :1], attention_mask=mask, cache=cache)

    assert_quiet(lambda: decoded(8), lambda: model(IDS, attention_mask=PADDING[:1].expand(2, 7)))
    operator = "create_sliding_window_causal_mask"
    assert_clearly_wrong(logits(lambda: decoded(7)), logits(lambda: decoded(8)))
    diagnosed(lambda: decoded(7), operator, "mask_covers_past_and_new")


# ---------------------------------------------------------------- what is not known is left alone


def test_attention_whose_masks_nobody_knows(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    embeds = model.get_input_embeddings()(IDS)

    def made(mask: Any, **options: Any) -> Any:
        arguments = {"config": model.config, "inputs_embeds": embeds, "attention_mask": mask, "cache": DynamicCache()}
        return create_causal_mask(**{**arguments, **options})

    with og.installed("transformers"):
        with pytest.raises(og.GuardError):
            made(ONES[:, :6])
        og.record.clear()
        made(ONES[:, :6], layer_idx=0)
        made(None)
        model.config.is_causal = False
        made(ONES[:, :6])
        model.config.is_causal = True
        monkeypatch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda **_: None)
        made(ONES[:, :6])
        model.config._attn_implementation_internal = "mine"
        made(ONES[:, :6])
    assert og.record.total == 0


def test_what_makes_masks(tiny: Make) -> None:
    config = tiny().config
    for name, maker in (
        ("sdpa", "sdpa"),
        ("eager", "eager"),
        ("flash_attention_2", "flash"),
        ("flex_attention", "flex"),
    ):
        config._attn_implementation_internal = name
        assert masks.makes_masks(config, maker) and masks.makes_masks(config, "none", maker)
        assert not masks.makes_masks(config, "none")
    for odd in (None, 3, object()):
        with pytest.raises(NotApplicable):
            masks.makes_masks(odd, "eager")


def test_columns_that_are_looked_at(tiny: Make) -> None:
    config = tiny().config
    key = torch.ones(1, 2, 3, 4)
    dynamic, static = DynamicCache(), StaticCache(config, max_cache_len=16)
    assert (masks.mask_columns(None, 5), masks.mask_columns(dynamic, 5), masks.mask_columns(static, 5)) == (5, 5, 16)
    dynamic.update(key, key, 0)
    static.update(key, key, 0)
    assert masks.mask_columns(dynamic, 5) == 8
    with pytest.raises(NotApplicable):
        masks.mask_columns(static, 5)


def test_a_replaced_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "find_first_full_attention_index", lambda cache: 0)
    refused = {refusal.site: refusal.reason for refusal in og.install("transformers").refused}
    reason = refused["transformers.masking_utils.create_causal_mask"]
    assert "its code is not one that a contract was written for" in reason
    monkeypatch.delattr(masking_utils, "create_chunked_causal_mask")
    refused = {refusal.site: refusal.reason for refusal in og.install("transformers").refused}
    site = "transformers.masking_utils.create_chunked_causal_mask"
    assert refused[site] == "this version of Transformers has no such function"
