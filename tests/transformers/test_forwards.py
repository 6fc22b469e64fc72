"""What a syntax tree shows for certain: each question with forwards where it is so, and near ones where it is not."""

from __future__ import annotations

import pytest
from transformers.models.gpt2.modeling_gpt2 import GPT2Model
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

from llm_op_guard.install.recognise import innermost
from llm_op_guard.integrations.transformers import forwards


def test_of_real_models() -> None:
    llama, causal_lm, attention = (innermost(cls.forward) for cls in (LlamaModel, LlamaForCausalLM, LlamaAttention))
    gpt2, layer = innermost(GPT2Model.forward), innermost(LlamaDecoderLayer.forward)
    assert (forwards.table_of_ids(llama), forwards.table_of_ids(gpt2)) == ("embed_tokens", "wte")
    assert forwards.table_of_ids(causal_lm) is None
    assert forwards.hands_ids_on(causal_lm, "model") and not forwards.hands_ids_on(causal_lm, "transformer")
    assert forwards.embeds_as_given(llama) and not forwards.embeds_as_given(gpt2)
    assert forwards.rotates_positions(llama) and not forwards.rotates_positions(gpt2)
    assert forwards.looks_positions_up(gpt2) and not forwards.looks_positions_up(llama)
    assert forwards.runs_every_layer(llama) and not forwards.runs_every_layer(gpt2)
    assert forwards.hands_cache_on(layer) and not forwards.hands_cache_on(attention)
    assert forwards.fills_its_layer(attention) and forwards.fails_without_tokens(attention)
    assert forwards.learns_next_tokens(causal_lm) and not forwards.learns_next_tokens(llama)


def clamped(self, input_ids, inputs_embeds=None):
    input_ids = input_ids.clamp(min=0)
    return self.embed(input_ids)


def in_place(self, input_ids, inputs_embeds=None):
    input_ids[input_ids < 0] = 0
    return self.embed(input_ids)


def in_place_by_method(self, input_ids, inputs_embeds=None):
    input_ids.clamp_(min=0)
    return self.embed(input_ids)


def two_tables(self, input_ids, inputs_embeds=None):
    return self.embed(input_ids) + self.other(input_ids)


def reshaped(self, input_ids, inputs_embeds=None):
    input_ids = input_ids.view(-1, 3)
    return self.embed(input_ids)


def flattened(self, input_ids, inputs_embeds=None):
    input_shape = input_ids.size()
    input_ids = input_ids.view(-1, input_shape[-1])
    return self.embed(input_ids)


def without_embeddings(self, input_ids):
    return self.embed(input_ids)


def scaled_ids(self, input_ids, inputs_embeds=None):
    return self.embed(input_ids + 1)


@pytest.mark.parametrize(
    ("function", "table"),
    [(clamped, None), (in_place, None), (in_place_by_method, None), (two_tables, None), (reshaped, None),
     (flattened, "embed"), (without_embeddings, None), (scaled_ids, None)],
)  # fmt: skip
def test_table_of_ids(function, table) -> None:
    assert forwards.table_of_ids(function) == table


def scaled(self, inputs_embeds, position_ids):
    if inputs_embeds is None:
        inputs_embeds = self.embed()
    inputs_embeds = inputs_embeds * self.scale
    hidden_states = inputs_embeds
    return self.norm(hidden_states)


def projected(self, inputs_embeds, position_ids):
    inputs_embeds = self.projection(inputs_embeds)
    hidden_states = inputs_embeds
    return self.norm(hidden_states)


def joined(self, inputs_embeds, position_ids):
    hidden_states = inputs_embeds + self.more
    return self.norm(hidden_states)


def test_embeds_as_given() -> None:
    assert forwards.embeds_as_given(scaled)
    assert not forwards.embeds_as_given(projected) and not forwards.embeds_as_given(joined)


def rotated(self, x, position_ids=None):
    if position_ids is None:
        position_ids = self.count(x)
    return self.rotary_emb(x, position_ids)


def rotated_by_name(self, x, position_ids):
    return self.rotary_emb(x, position_ids=position_ids)


def stacked(self, x, position_ids):
    if position_ids.ndim == 2:
        position_ids = position_ids[None].expand(4, -1, -1)
    return self.rotary_emb(x, position_ids)


def rotated_twice(self, x, position_ids):
    return self.rotary_emb(x, position_ids) + self.rotary_emb(x, position_ids[:, :1])


def test_rotates_positions() -> None:
    assert forwards.rotates_positions(rotated) and forwards.rotates_positions(rotated_by_name)
    assert not forwards.rotates_positions(stacked) and not forwards.rotates_positions(rotated_twice)
    assert not forwards.rotates_positions(scaled)


def fills_sometimes(self, key, value, cache):
    if cache is not None and not self.shared:
        key, value = cache.update(key, value, self.layer_idx)
    return key


def fills_another(self, key, value, cache):
    if cache is not None:
        key, value = cache.update(key, value, 0)
    return key


def test_fills_its_layer() -> None:
    assert not forwards.fills_its_layer(fills_sometimes) and not forwards.fills_its_layer(fills_another)


def hands_on(self, x, cache=None):
    y, _ = self.self_attn(self.norm(x), cache=cache)
    return x + y


def hands_on_sometimes(self, x, cache=None):
    if self.kind == "attention":
        x, _ = self.self_attn(x, cache=cache)
    return x


def leaves_early(self, x, cache=None):
    if self.skipped:
        return x
    x, _ = self.self_attn(x, cache=cache)
    return x


def hands_nothing_on(self, x, cache=None):
    x, _ = self.self_attn(x, cache=None)
    return x


def hands_another_on(self, x, cache=None):
    cache = cache[0]
    x, _ = self.self_attn(x, cache=cache)
    return x


def test_hands_cache_on() -> None:
    assert forwards.hands_cache_on(hands_on)
    for function in (hands_on_sometimes, leaves_early, hands_nothing_on, hands_another_on):
        assert not forwards.hands_cache_on(function)


def shifted_before(self, logits, labels, **kwargs):
    return self.loss_function(logits, None, self.vocab_size, shift_labels=labels[:, 1:], **kwargs)


def other_labels(self, logits, labels, **kwargs):
    labels = labels.masked_fill(labels == -1, -100)
    return self.loss_function(logits, labels, self.vocab_size, **kwargs)


def other_classes(self, logits, labels, **kwargs):
    return self.loss_function(logits, labels, logits.shape[-1], **kwargs)


def test_learns_next_tokens() -> None:
    for function in (shifted_before, other_labels, other_classes):
        assert not forwards.learns_next_tokens(function)


def test_what_has_no_source_shows_nothing() -> None:
    scope = {}
    exec("def forward(self, input_ids, inputs_embeds=None):\n    return self.embed(input_ids)", scope)
    assert forwards.table_of_ids(scope["forward"]) is None
    assert not forwards.rotates_positions(scope["forward"])
    assert not forwards.hands_ids_on(scope["forward"], "model")
