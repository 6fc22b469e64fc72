"""2-D masks of encoders, and of decoders that attend to them: `create_bidirectional_mask`.

Each test shows first what the unguarded call does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from outcomes import assert_clearly_wrong, diagnosed, suspected
from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertModel
from transformers.masking_utils import create_bidirectional_mask, create_bidirectional_sliding_window_mask

import llm_op_guard as og

OPERATOR = "create_bidirectional_mask"
IDS = torch.tensor([[5, 9, 14, 33, 71, 0, 0], [44, 7, 20, 11, 6, 90, 17]])
PADDING = (IDS != 0).long()
ONES = torch.ones_like(PADDING)
each_attention = pytest.mark.parametrize("attn", ["eager", "sdpa"])


def bert(attn: str) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
    )
    return BertModel._from_config(config, attn_implementation=attn).eval()


def bart(attn: str) -> Any:
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = BartConfig(vocab_size=96, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, **sizes)
    return BartForConditionalGeneration._from_config(config, attn_implementation=attn).eval()


def states(call: Any) -> torch.Tensor:
    with torch.no_grad():
        hidden: torch.Tensor = call().last_hidden_state
    return hidden


def assert_quiet(call: Any) -> None:
    """With guards the call gives what it gives without, values looked at; the fixture asks that nothing is told."""
    plain = call()[0]
    with og.installed("transformers"), og.policy(B="raise"):
        assert torch.equal(call()[0], plain)


@each_attention
def test_a_mask_that_is_too_short(attn: str) -> None:
    model = bert(attn)
    short = partial(model, IDS, attention_mask=PADDING[:, :6])
    with pytest.raises(RuntimeError, match="size of tensor"):
        short()
    violation = diagnosed(short, OPERATOR, "padding_covers_tokens", cost_class="B")
    assert violation.observed.startswith("attention_mask.shape[1] = 6, S = 7, attention_mask[0, 5] = 0")
    assert violation.hint == "tokens were added to the ids and not to the mask"


@each_attention
def test_a_mask_of_one_column_drops_no_padding(attn: str) -> None:
    model = bert(attn)
    one = partial(model, IDS, attention_mask=torch.tensor([[0], [1]]))
    assert_clearly_wrong(states(one), states(partial(model, IDS, attention_mask=PADDING)))
    with og.installed("transformers"), og.policy(B="raise"), pytest.raises(og.GuardError) as caught:
        one()
    assert [v.rule_id for v in caught.value.violations] == ["padding_covers_tokens", "mask_keeps_a_token"]


@each_attention
def test_a_mask_of_ones_may_have_any_size(attn: str) -> None:
    model = bert(attn)
    right = states(lambda: model(IDS))
    for mask in (ONES[:, :1], ONES[:1], ONES[:, :6], torch.ones(2, 9), ONES[0], None):
        call = partial(model, IDS, attention_mask=mask)
        assert torch.equal(states(call), right)
        assert_quiet(call)


@each_attention
def test_a_mask_of_one_sequence(attn: str) -> None:
    model = bert(attn)
    call = partial(model, IDS, attention_mask=PADDING[:1])
    with pytest.raises(IndexError, match="out of bounds"):
        call()
    violation = diagnosed(call, OPERATOR, "padding_of_each_sequence", cost_class="B")
    assert violation.hint == "a mask of one sequence is not broadcast: expand it"


@each_attention
def test_a_mask_of_more_sequences_is_suspect(attn: str) -> None:
    model = bert(attn)
    call = partial(model, IDS[:1], attention_mask=PADDING)
    assert "rows beyond the last sequence are cut off" in suspected(call, OPERATOR, "rows beyond the last")


@each_attention
def test_an_additive_mask_is_read_inverted(attn: str) -> None:
    model = bert(attn)
    additive = (1.0 - PADDING) * -1e9
    call = partial(model, IDS, attention_mask=additive)
    assert_clearly_wrong(states(call), states(partial(model, IDS, attention_mask=PADDING)))
    diagnosed(call, OPERATOR, "mask_keeps_or_drops", cost_class="B")


@each_attention
def test_a_sequence_of_padding_is_suspect(attn: str) -> None:
    model = bert(attn)
    mask = PADDING.clone()
    mask[1] = 0
    call = partial(model, IDS, attention_mask=mask)
    with og.policy(B="raise"):
        assert "gives numbers without a meaning" in suspected(call, OPERATOR, "gives numbers")


@each_attention
@pytest.mark.parametrize("rank", [1, 3])
def test_masks_of_other_ranks(attn: str, rank: int) -> None:
    model = bert(attn)
    mask = PADDING[0] if rank == 1 else PADDING[:, None].expand(2, 7, 7)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        model(IDS, attention_mask=mask)
    rule = "padding_rank" if rank == 1 else "padding_of_heads"
    violation = diagnosed(partial(model, IDS, attention_mask=mask), OPERATOR, rule, cost_class="B")
    assert violation.observed.startswith(f"attention_mask.ndim = {rank}")


@each_attention
@pytest.mark.parametrize("tokens", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_right_masks_pass(attn: str, tokens: int, dtype: torch.dtype) -> None:
    model = bert(attn)
    ids, mask = IDS[:, :tokens], PADDING[:, :tokens].to(dtype)
    assert_quiet(partial(model, ids, attention_mask=mask))
    prepared = mask[:, None, None] != 0 if attn == "sdpa" else (1.0 - mask.float())[:, None, None] * -1e9
    assert_quiet(partial(model, ids, attention_mask=prepared))


@each_attention
def test_attention_to_an_encoder_is_of_its_tokens(attn: str) -> None:
    model = bart(attn)
    assert_quiet(lambda: model(input_ids=IDS, attention_mask=PADDING, decoder_input_ids=IDS[:, :3]))
    encoded = model.get_encoder()(IDS, attention_mask=PADDING)
    call = partial(model, encoder_outputs=encoded, attention_mask=PADDING[:, :6], decoder_input_ids=IDS[:, :3])
    with pytest.raises(RuntimeError, match="size of tensor"):
        call()
    violation = diagnosed(call, OPERATOR, "padding_covers_tokens", cost_class="B")
    assert violation.observed.startswith("attention_mask.shape[1] = 6, S = 7")


@pytest.mark.parametrize("make", [create_bidirectional_mask, create_bidirectional_sliding_window_mask])
def test_both_functions(make: Any) -> None:
    config = bert("sdpa").config
    config.sliding_window = 3
    embeds = torch.zeros(2, 7, 4)
    make(config=config, inputs_embeds=embeds, attention_mask=PADDING)
    empty = make(config=config, inputs_embeds=embeds[:0], attention_mask=PADDING[:0])
    with og.installed("transformers"), og.policy(B="raise"):
        make(config=config, inputs_embeds=embeds, attention_mask=PADDING)
        assert type(make(config=config, inputs_embeds=embeds[:0], attention_mask=PADDING[:0])) is type(empty)
        with pytest.raises(og.GuardError, match="tokens were added to the ids and not to the mask"):
            make(config=config, inputs_embeds=embeds, attention_mask=PADDING[:, :6])
