"""What a syntax tree shows for certain: each question with forwards where it is so, and near ones where it is not."""

from __future__ import annotations

import pytest
import torch
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


def in_place_by_another_name(self, input_ids, inputs_embeds=None):
    ids = input_ids
    ids[ids < 0] = 0
    return self.embed(input_ids)


def in_place_of_a_view(self, input_ids, inputs_embeds=None):
    rows, _ = input_ids.view(-1), self.kept
    rows.clamp_(min=0)
    return self.embed(input_ids)


def in_place_of_a_view_without_a_name(self, input_ids, inputs_embeds=None):
    input_ids[:, 1:].clamp_(min=0)
    return self.embed(input_ids)


def in_place_of_each_row(self, input_ids, inputs_embeds=None):
    for row in input_ids:
        row += self.offset  # noqa: PLW2901 - in place
    return self.embed(input_ids)


def in_place_by_function(self, input_ids, inputs_embeds=None):
    torch.clamp(input_ids, min=0, out=input_ids)
    return self.embed(input_ids)


def in_place_by_function_of_that_name(self, input_ids, inputs_embeds=None):
    torch.relu_(input_ids)
    return self.embed(input_ids)


def used_beside(self, input_ids, inputs_embeds=None):
    mask = torch.zeros_like(input_ids)
    mask[:, 0] = 1
    sizes = list(input_ids.shape)
    sizes[0] = 2
    return self.embed(input_ids)


def of_a_module_within(self, input_ids, inputs_embeds=None):
    return self.decoder.embed(input_ids)


def where_none_are_given(self, input_ids, inputs_embeds=None):
    if inputs_embeds is None and input_ids is not None:
        inputs_embeds = self.embed(input_ids)
    return inputs_embeds


def under_a_condition(self, input_ids, inputs_embeds=None):
    if self.config.looks_up:
        return self.embed(input_ids)
    return self.hash(input_ids.float())


def by_a_condition(self, input_ids, inputs_embeds=None):
    return self.embed(input_ids) if self.training else self.hash(input_ids.float())


def behind_a_return(self, input_ids, inputs_embeds=None):
    if input_ids.shape[1] > 8:
        return None
    return self.embed(input_ids)


def caught(self, input_ids, inputs_embeds=None):
    try:
        return self.embed(input_ids)
    except IndexError:
        return None


def later(self, input_ids, inputs_embeds=None):
    return lambda: self.embed(input_ids)


@pytest.mark.parametrize(
    ("function", "table"),
    [(clamped, None), (in_place, None), (in_place_by_method, None), (two_tables, None), (reshaped, None),
     (flattened, "embed"), (without_embeddings, None), (scaled_ids, None),
     (in_place_by_another_name, None), (in_place_of_a_view, None), (in_place_of_a_view_without_a_name, None),
     (in_place_of_each_row, None), (in_place_by_function, None), (in_place_by_function_of_that_name, None),
     (used_beside, "embed"), (of_a_module_within, "decoder.embed"), (where_none_are_given, "embed"),
     (under_a_condition, None), (by_a_condition, None), (behind_a_return, None), (caught, None), (later, None)],
    ids=lambda given: getattr(given, "__name__", None),
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


def scaled_and_joined(self, inputs_embeds, position_ids):
    inputs_embeds = inputs_embeds * self.scale + self.positions(position_ids)
    hidden_states = inputs_embeds
    return self.norm(hidden_states)


def projected_where_wide(self, inputs_embeds, position_ids):
    if inputs_embeds.shape[-1] != self.width:
        return self.norm(self.projection(inputs_embeds))
    hidden_states = inputs_embeds
    return self.norm(hidden_states)


def taken_sometimes(self, inputs_embeds, position_ids):
    hidden_states = self.start
    if self.config.takes_embeds:
        hidden_states = inputs_embeds
    return self.norm(hidden_states)


def test_embeds_as_given() -> None:
    assert forwards.embeds_as_given(scaled)
    for function in (projected, joined, scaled_and_joined, projected_where_wide, taken_sometimes):
        assert not forwards.embeds_as_given(function), function.__name__


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


def rotated_sometimes(self, x, position_ids):
    return self.rotary_emb(x, position_ids) if self.config.rotates else x


def rotated_by_changed(self, x, position_ids):
    positions = position_ids[:, :]
    positions -= positions.min()
    return self.rotary_emb(x, position_ids)


def test_rotates_positions() -> None:
    assert not forwards.rotates_positions(rotated_sometimes) and not forwards.rotates_positions(rotated_by_changed)
    assert forwards.rotates_positions(rotated) and forwards.rotates_positions(rotated_by_name)
    assert not forwards.rotates_positions(stacked) and not forwards.rotates_positions(rotated_twice)
    assert not forwards.rotates_positions(scaled)


def counted(self, input_ids, position_ids=None, cache=None, inputs_embeds=None):
    if position_ids is None:
        past_seen_tokens = cache.get_seq_length() if cache is not None else 0
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
        position_ids = position_ids.unsqueeze(0)
    return inputs_embeds + self.wpe(position_ids)


def counted_by_two(self, input_ids, position_ids=None, cache=None, inputs_embeds=None):
    if position_ids is None:
        past_seen_tokens = cache.get_seq_length() if cache is not None else 0
        position_ids = torch.arange(inputs_embeds.shape[1] // 2, device=inputs_embeds.device) + past_seen_tokens
    return inputs_embeds + self.wpe(position_ids)


def counted_from_below(self, input_ids, position_ids=None, cache=None, inputs_embeds=None):
    if position_ids is None:
        past_seen_tokens = cache.get_seq_length() - self.sinks if cache is not None else 0
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
    return inputs_embeds + self.wpe(position_ids)


def counted_and_cut(self, input_ids, position_ids=None, cache=None, inputs_embeds=None):
    if position_ids is None:
        past_seen_tokens = cache.get_seq_length() if cache is not None else 0
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
        position_ids = position_ids.clamp(max=self.last)
    return inputs_embeds + self.wpe(position_ids)


def counted_on_the_other_side(self, input_ids, position_ids=None, cache=None, inputs_embeds=None):
    if position_ids is None:
        past_seen_tokens = cache.get_seq_length() if cache is not None else 0
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) * 2 + past_seen_tokens
    return inputs_embeds + self.wpe(position_ids)


def counted_by_the_cache(self, input_ids, position_ids=None, cache=None, cache_position=None, inputs_embeds=None):
    if cache_position is None:
        past_seen_tokens = cache.get_seq_length() if cache is not None else 0
        cache_position = torch.arange(
            past_seen_tokens, past_seen_tokens + inputs_embeds.shape[1], device=inputs_embeds.device
        )
    if position_ids is None:
        position_ids = cache_position.unsqueeze(0)
    return inputs_embeds + self.wpe(position_ids)


def test_looks_positions_up() -> None:
    assert forwards.looks_positions_up(counted) and forwards.looks_positions_up(counted_by_the_cache)
    for function in (counted_by_two, counted_from_below, counted_and_cut, counted_on_the_other_side):
        assert not forwards.looks_positions_up(function), function.__name__


def every_layer(self, hidden_states, cache=None, use_cache=None):
    if use_cache and cache is None:
        cache = self.new()
    for i, layer in enumerate(self.layers[: self.config.num_hidden_layers]):
        hidden_states = layer(hidden_states, self.masks[i], cache=cache, use_cache=use_cache)
    return hidden_states


def stops(self, hidden_states, cache=None):
    for layer in self.layers[: self.config.num_hidden_layers]:
        hidden_states = layer(hidden_states, cache=cache)
        if hidden_states.isnan().any():
            break
    return hidden_states


def leaves_out(self, hidden_states, cache=None):
    for i, layer in enumerate(self.layers[: self.config.num_hidden_layers]):
        if i in self.left_out:
            continue
        hidden_states = layer(hidden_states, cache=cache)
    return hidden_states


def returns_early(self, hidden_states, cache=None):
    for layer in self.layers[: self.config.num_hidden_layers]:
        hidden_states = layer(hidden_states, cache=cache)
        if self.exits(hidden_states):
            return hidden_states
    return hidden_states


def returns_before(self, hidden_states, cache=None):
    if hidden_states.shape[1] == 0:
        return hidden_states
    for layer in self.layers[: self.config.num_hidden_layers]:
        hidden_states = layer(hidden_states, cache=cache)
    return hidden_states


def some_layers(self, hidden_states, cache=None):
    for layer in self.layers[: self.config.num_hidden_layers][::2]:
        hidden_states = layer(hidden_states, cache=cache)
    return hidden_states


def layers_sometimes(self, hidden_states, cache=None):
    for layer in self.layers[: self.config.num_hidden_layers]:
        if self.training:
            hidden_states = layer(hidden_states, cache=cache)
    return hidden_states


def something_else(self, hidden_states, cache=None):
    for layer in self.layers[: self.config.num_hidden_layers]:
        hidden_states = self.mixer(hidden_states, layer, cache=cache)
    return hidden_states


def another_layer(self, hidden_states, cache=None):
    for layer in self.layers[: self.config.num_hidden_layers]:
        layer = self.first  # noqa: PLW2901 - another one
        hidden_states = layer(hidden_states, cache=cache)
    return hidden_states


def another_cache(self, hidden_states, cache=None):
    cache = self.own_cache
    for layer in self.layers[: self.config.num_hidden_layers]:
        hidden_states = layer(hidden_states, cache=cache)
    return hidden_states


def test_runs_every_layer() -> None:
    assert forwards.runs_every_layer(every_layer)
    for function in (
        stops, leaves_out, returns_early, returns_before, some_layers, layers_sometimes, something_else,
        another_layer, another_cache,
    ):  # fmt: skip
        assert not forwards.runs_every_layer(function), function.__name__


def fills(self, key, value, cache):
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx, kwargs=self.more)
    return key


def fills_that_of_the_decoder(self, key, value, cache):
    if cache is not None:
        cache = cache.self_attention_cache
        key, value = cache.update(key, value, self.layer_idx)
    return key


def leaves_it_to_another(self, key, value, cache, weights=False):
    if weights:
        return super().forward(key, value, cache)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    return key


def returns_without(self, key, value, cache):
    if key.shape[0] == 0:
        return key
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    return key


def fills_that_of_another(self, key, value, cache):
    if cache is not None:
        cache = cache.cross_attention_cache
        key, value = cache.update(key, value, self.layer_idx)
    return key


def fills_sometimes(self, key, value, cache):
    if cache is not None and not self.shared:
        key, value = cache.update(key, value, self.layer_idx)
    return key


def fills_another(self, key, value, cache):
    if cache is not None:
        key, value = cache.update(key, value, 0)
    return key


def test_fills_its_layer() -> None:
    for function in (fills, fills_that_of_the_decoder, leaves_it_to_another):
        assert forwards.fills_its_layer(function), function.__name__
    for function in (fills_sometimes, fills_another, returns_without, fills_that_of_another):
        assert not forwards.fills_its_layer(function), function.__name__


def views(self, hidden_states):
    input_shape = hidden_states.shape[:-1]
    hidden_shape = (*input_shape, -1, self.head_dim)
    return self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)


def views_what_is_padded(self, hidden_states):
    hidden_states = self.pad(hidden_states)
    input_shape = hidden_states.shape[:-1]
    hidden_shape = (*input_shape, -1, self.head_dim)
    return self.q_proj(hidden_states).view(hidden_shape)


def views_as_heads(self, hidden_states):
    input_shape = hidden_states.shape[:-1]
    hidden_shape = (*input_shape, -1, self.head_dim)
    hidden_shape = (*input_shape, self.num_heads, self.head_dim)
    return self.q_proj(hidden_states).view(hidden_shape)


def views_later(self, hidden_states):
    if hidden_states.numel() == 0:
        return hidden_states
    input_shape = hidden_states.shape[:-1]
    hidden_shape = (*input_shape, -1, self.head_dim)
    return self.q_proj(hidden_states).view(hidden_shape)


def test_fails_without_tokens() -> None:
    assert forwards.fails_without_tokens(views)
    for function in (views_what_is_padded, views_as_heads, views_later):
        assert not forwards.fails_without_tokens(function), function.__name__


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


def learns(self, hidden_states, labels, **kwargs):
    logits = self.lm_head(hidden_states[:, self.kept, :])
    logits = torch.tanh(logits / self.cap) * self.cap
    loss = None
    if labels is not None:
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
    return loss


def cuts_logits(self, hidden_states, labels, **kwargs):
    logits = self.lm_head(hidden_states)
    logits = logits[:, self.prefix :]
    return self.loss_function(logits, labels, self.vocab_size, **kwargs)


def labels_by_another_name(self, hidden_states, labels, **kwargs):
    logits = self.lm_head(hidden_states)
    targets = labels
    targets[targets == self.config.pad_token_id] = -100
    return self.loss_function(logits, labels, self.vocab_size, **kwargs)


def learns_sometimes(self, hidden_states, labels, **kwargs):
    logits = self.lm_head(hidden_states)
    if self.training:
        return self.loss_function(logits, labels, self.vocab_size, **kwargs)
    return None


def test_learns_next_tokens() -> None:
    assert forwards.learns_next_tokens(learns)
    for function in (
        shifted_before, other_labels, other_classes, cuts_logits, labels_by_another_name, learns_sometimes,
    ):  # fmt: skip
        assert not forwards.learns_next_tokens(function), function.__name__


def overrides(self, input_ids):
    return super().forward(input_ids) * self.scale


def overrides_sometimes(self, input_ids):
    return super().forward(input_ids) if self.scale else None


def overrides_another(self, input_ids):
    return super(type(self), self).forward(input_ids)


def test_hands_on_to_super() -> None:
    assert forwards.hands_on_to_super(overrides)
    assert not forwards.hands_on_to_super(overrides_sometimes)
    assert not forwards.hands_on_to_super(overrides_another)


def hands_ids(self, input_ids, **kwargs):
    return self.model(input_ids=input_ids, **kwargs)


def hands_ids_sometimes(self, input_ids, **kwargs):
    if self.config.is_encoder_decoder:
        return self.model(input_ids, **kwargs)
    return self.decoder(input_ids, **kwargs)


def hands_ids_once(self, input_ids, **kwargs):
    return self.model(input_ids, **kwargs) + self.model(inputs_embeds=self.more)


def hands_shifted_ids(self, input_ids, **kwargs):
    return self.model(input_ids=input_ids[:, 1:], **kwargs)


def test_hands_ids_on() -> None:
    assert forwards.hands_ids_on(hands_ids, "model") and not forwards.hands_ids_on(hands_ids, "decoder")
    for function in (hands_ids_sometimes, hands_ids_once, hands_shifted_ids):
        assert not forwards.hands_ids_on(function, "model"), function.__name__


def asks(self, input_ids, inputs_embeds=None):
    if inputs_embeds is None:
        inputs_embeds = self.get_input_embeddings()(input_ids)
    return inputs_embeds


def asks_a_child(self, input_ids, inputs_embeds=None):
    if inputs_embeds is None:
        inputs_embeds = self.model.decoder.get_input_embeddings()(input_ids)
    return inputs_embeds


def asks_one_of_several(self, input_ids, inputs_embeds=None):
    if inputs_embeds is None:
        inputs_embeds = self.models[0].get_input_embeddings()(input_ids)
    return inputs_embeds


def asks_and_scales(self, input_ids, inputs_embeds=None):
    if inputs_embeds is None:
        inputs_embeds = self.get_input_embeddings()(input_ids) * self.scale
    return inputs_embeds


def asks_behind_a_return(self, input_ids, inputs_embeds=None):
    if self.training:
        return None
    if inputs_embeds is None:
        inputs_embeds = self.get_input_embeddings()(input_ids)
    return inputs_embeds


@pytest.mark.parametrize(
    ("function", "path"),
    [(asks, ()), (asks_a_child, ("model", "decoder")), (asks_one_of_several, None), (asks_and_scales, None),
     (asks_behind_a_return, None)],
    ids=lambda given: getattr(given, "__name__", None),
)  # fmt: skip
def test_module_asked_for_table(function, path) -> None:
    assert forwards.module_asked_for_table(function) == path


def child_asked(self):
    return self.model.get_input_embeddings()


def child_itself(self):
    return self.model


def test_asks_for_table_of() -> None:
    assert forwards.asks_for_table_of(child_asked) == "model"
    assert forwards.asks_for_table_of(child_itself) is None


def test_a_changed_forward_is_looked_at_again() -> None:
    def forward(self, input_ids, inputs_embeds=None):
        return self.embed(input_ids)

    def other(self, input_ids, inputs_embeds=None):
        return self.embed(input_ids.clamp(min=0))

    assert forwards.table_of_ids(forward) == "embed"
    forward.__code__ = other.__code__
    assert forwards.table_of_ids(forward) is None


def test_what_has_no_source_shows_nothing() -> None:
    scope = {}
    exec("def forward(self, input_ids, inputs_embeds=None):\n    return self.embed(input_ids)", scope)
    assert forwards.table_of_ids(scope["forward"]) is None
    assert not forwards.rotates_positions(scope["forward"])
    assert not forwards.hands_ids_on(scope["forward"], "model")
