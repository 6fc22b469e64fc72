"""Transformers 4: where a model is entered, its masks and caches, and that guarded models compute the same.

What is refused is shown unguarded first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from outcomes import assert_clearly_wrong, assert_quiet, diagnosed, logits, suspected
from torch import Tensor
from transformers import DynamicCache, StaticCache, cache_utils

import llm_op_guard as og

pytestmark = pytest.mark.usefixtures("no_alarm")

Model = Any
Make = Callable[..., Model]
IDS = torch.tensor([[5, 9, 14, 33, 71, 3, 8], [44, 7, 20, 11, 6, 90, 17]])
PADDING = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
ONES = torch.ones_like(PADDING)
DECODER, GENERATE = "LlamaModel.forward", "GenerationMixin.generate"
each_attention = pytest.mark.parametrize("attn", ["eager", "sdpa"])


# ---------------------------------------------------------------- models compute the same

HEADS = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "gpt_neox": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"head_dim": 16, "sliding_window": 4},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4},
    "cohere2": {"sliding_window": 4},
    "qwen3": {"head_dim": 16},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4": {"head_dim": 16},
    "persimmon": {},
    "nemotron": {},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {**HEADS, **EXPERTS, "v_head_dim": 16, "first_k_dense_replace": 1},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}
WITHOUT_SDPA = {"gpt_oss"}


def scenarios(model: Model) -> dict[str, Callable[[], list[Tensor]]]:
    def decoded() -> list[Tensor]:
        cache, results = DynamicCache(config=model.config), []
        for start, end in ((0, 4), (4, 5), (5, 7)):
            output = model(IDS[:, start:end], attention_mask=PADDING[:, :end], past_key_values=cache)
            results.append(output.logits)
        return results

    generate = partial(model.generate, IDS, attention_mask=PADDING, max_new_tokens=3, do_sample=False)
    return {
        "prefill": lambda: [model(IDS).logits],
        "one token of one sequence": lambda: [model(IDS[:1, :1]).logits],
        "left padding": lambda: [model(IDS, attention_mask=PADDING).logits],
        "no cache": lambda: [model(IDS, attention_mask=PADDING, use_cache=False).logits],
        "loss": lambda: [model(IDS, labels=IDS).loss],
        "decode": decoded,
        "greedy": lambda: [generate()],
        "beams": lambda: [generate(num_beams=2)],
        "static cache": lambda: [generate(cache_implementation="static", disable_compile=True)],
    }


@each_attention
@pytest.mark.parametrize("model_type", MODELS)
@torch.no_grad()
def test_guarded_models_compute_the_same(tiny: Make, model_type: str, attn: str) -> None:
    if attn == "sdpa" and model_type in WITHOUT_SDPA:
        pytest.skip("it has no SDPA")
    calls = scenarios(tiny(model_type, attn=attn, **MODELS[model_type]))
    plain = {name: call() for name, call in calls.items()}
    with og.policy(B="raise"), og.installed("transformers"):
        for name, call in calls.items():
            assert all(torch.equal(*pair) for pair in zip(call(), plain[name], strict=True)), name
    assert og.record.total == 0


# ---------------------------------------------------------------- masks


@each_attention
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("columns", [1, 6])
def test_a_short_mask_is_padded_and_drops_the_last_tokens(tiny: Make, attn: str, use_cache: bool, columns: int) -> None:
    model = tiny(attn=attn)
    call = partial(model, IDS, attention_mask=ONES[:, :columns], use_cache=use_cache)
    assert_clearly_wrong(logits(call), logits(lambda: model(IDS)))
    violation = diagnosed(call, "create_causal_mask", "mask_covers_past_and_new")
    assert violation.observed == f"columns = {columns}, past + L = 7"
    assert violation.hint == "tokens were added to the ids and not to the mask"
    assert_quiet(partial(model, IDS, attention_mask=ONES, use_cache=use_cache))


@each_attention
def test_a_mask_of_the_new_tokens_only(tiny: Make, attn: str) -> None:
    model = tiny(attn=attn)

    def decoded(columns: int) -> Any:
        cache = model(IDS).past_key_values
        return model(IDS[:, :1], past_key_values=cache, attention_mask=torch.ones(2, columns, dtype=torch.long))

    assert_clearly_wrong(logits(lambda: decoded(1)), logits(lambda: decoded(8)))
    violation = diagnosed(lambda: decoded(1), "create_causal_mask", "mask_covers_past_and_new")
    assert violation.hint == "the mask covers the new tokens only: it is for all of past + L"
    assert_quiet(lambda: decoded(8))


@each_attention
def test_masks_of_another_batch(tiny: Make, attn: str) -> None:
    model = tiny(attn=attn)
    one = partial(model, IDS, attention_mask=PADDING[:1])
    with pytest.raises(IndexError):
        one()
    if attn == "eager":
        diagnosed(one, "create_causal_mask", "mask_of_each_sequence")
    else:
        diagnosed(one, "create_causal_mask", "padding_of_each_sequence", cost_class="B")
        assert_quiet(partial(model, IDS, attention_mask=ONES[:1]))
    suspected(partial(model, IDS, attention_mask=torch.ones(3, 7)), "create_causal_mask", "rows beyond the last")


@each_attention
def test_masks_of_another_rank(tiny: Make, attn: str) -> None:
    model = tiny(attn=attn)
    wrong = partial(model, IDS, attention_mask=torch.ones(2, 7, 7, dtype=torch.long).tril())
    with pytest.raises(RuntimeError):
        wrong()
    if attn == "eager":
        diagnosed(wrong, "create_causal_mask", "mask_of_heads")
    else:
        diagnosed(wrong, "create_causal_mask", "padding_of_heads", cost_class="B")
        assert_quiet(partial(model, IDS, attention_mask=ONES[0]))


@each_attention
def test_the_mask_of_a_sliding_window(tiny: Make, attn: str) -> None:
    model = tiny("mistral", attn=attn, sliding_window=4)

    def decoded(columns: int) -> Any:
        cache = DynamicCache(config=model.config)
        model(IDS, attention_mask=PADDING, past_key_values=cache)
        mask = torch.nn.functional.pad(PADDING, (0, 1), value=1)[:, :columns]
        return model(IDS[:, :1], attention_mask=mask, past_key_values=cache)

    assert_clearly_wrong(logits(lambda: decoded(7)), logits(lambda: decoded(8)))
    diagnosed(lambda: decoded(7), "create_sliding_window_causal_mask", "mask_covers_past_and_new")
    assert_quiet(lambda: decoded(8))


@each_attention
def test_a_mask_with_a_static_cache(tiny: Make, attn: str) -> None:
    model = tiny(attn=attn)

    def run(columns: int) -> Any:
        cache = StaticCache(config=model.config, max_cache_len=12)
        return model(IDS, attention_mask=torch.ones(2, columns), past_key_values=cache)

    assert_quiet(lambda: run(7), lambda: run(12))
    diagnosed(lambda: run(6), "create_causal_mask", "mask_covers_past_and_new")


# ---------------------------------------------------------------- the entry


def test_a_cache_of_another_model(tiny: Make) -> None:
    model, other, larger = tiny(), tiny(seed=1), tiny(num_hidden_layers=3)

    def after(first: Model) -> Any:
        return model(IDS[:, :1], past_key_values=first(IDS).past_key_values)

    assert_clearly_wrong(logits(lambda: after(other)), logits(lambda: after(model)))
    suspected(lambda: after(other), DECODER, "keys and values of another model")
    with og.installed("transformers"), pytest.raises(og.GuardError) as caught:
        after(larger)
    assert caught.value.violations[0].rule_id == "cache_filled_for_as_many_layers"
    assert_quiet(lambda: after(model))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_with_too_few_layers(tiny: Make, kind: str) -> None:
    model, config = tiny(), tiny(num_hidden_layers=1).config
    make = {"dynamic": lambda c: DynamicCache(config=c), "static": lambda c: StaticCache(config=c, max_cache_len=9)}
    with pytest.raises(IndexError):
        model(IDS, past_key_values=make[kind](config))
    diagnosed(lambda: model(IDS, past_key_values=make[kind](config)), DECODER, "cache_has_every_layer")
    assert_quiet(lambda: model(IDS, past_key_values=make[kind](model.config)))


def test_positions_and_embeddings_of_the_wrong_size(tiny: Make) -> None:
    model = tiny()
    one = partial(model, IDS, position_ids=torch.zeros(1, 1, dtype=torch.long))
    assert logits(one).shape == (2, 7, 96)
    assert diagnosed(one, DECODER, "position_ids.shape").hint == "one position for all tokens"
    narrow = partial(model, inputs_embeds=torch.ones(2, 7, 1))
    assert logits(narrow).shape == (2, 7, 96)
    diagnosed(narrow, DECODER, "embedding_width")
    given = model.get_input_embeddings()(IDS).detach()
    assert_quiet(partial(model, IDS, position_ids=torch.arange(7)[None]), partial(model, inputs_embeds=given))


@torch.no_grad()
def test_positions_past_the_table_of_gpt2(tiny: Make) -> None:
    model = tiny("gpt2", max_position_embeddings=8)

    def decoded(length: int, **options: Any) -> Any:
        return model(IDS[:, :length], past_key_values=model(IDS).past_key_values, **options)

    too_long = torch.full((1, 9), 5)
    late = {"cache_position": torch.tensor([8])}
    for call, rule, cost_class in (
        (lambda: model(too_long), "positions_in_table", "A"),
        (lambda: decoded(2), "past_and_new_in_table", "A"),
        (lambda: decoded(1, **late), "cache_positions_in_table", "B"),
        (lambda: decoded(1, position_ids=torch.tensor([[8]])), "position_ids_in_table", "B"),
    ):
        with pytest.raises(IndexError):
            call()
        diagnosed(call, "GPT2Model.forward", rule, cost_class=cost_class)
    one = partial(model, IDS, position_ids=torch.zeros(1, 1, dtype=torch.long))
    assert logits(one).shape == (2, 7, 96)
    diagnosed(one, "GPT2Model.forward", "position_for_each_token")
    assert_quiet(
        lambda: model(too_long[:, :8]),
        lambda: decoded(1),
        # The cache may be longer than the table where positions are given.
        lambda: decoded(2, cache_position=torch.tensor([6, 7])),
        lambda: decoded(1, position_ids=torch.tensor([[7]])),
    )


def test_what_generate_is_given(tiny: Make) -> None:
    model = tiny()
    generate = partial(model.generate, max_new_tokens=2, do_sample=False)
    with pytest.raises(RuntimeError):
        generate(IDS, attention_mask=ONES[:, :5])
    diagnosed(lambda: generate(IDS, attention_mask=ONES[:, :5]), GENERATE, "mask_covers_ids")
    with pytest.raises(IndexError):
        generate(IDS[0])
    diagnosed(lambda: generate(IDS[0]), GENERATE, "ids_in_batch")
    with og.policy(B="raise"), og.installed("transformers"):
        generate(IDS, attention_mask=ONES)
        generate(input_ids=IDS[:1])
    assert og.record.total == 2, "what was diagnosed before"


def test_a_misspelt_cache(tiny: Make) -> None:
    model = tiny()
    cache = model(IDS).past_key_values
    diagnosed(lambda: model(IDS[:, :1], past_key_valuess=cache), DECODER, "past_key_values_spelt")


# ---------------------------------------------------------------- caches


class Toy(cache_utils.QuantizedLayer):
    """A backend that is there without its library."""

    def _quantize(self, tensor: Any, axis: Any) -> Any:
        return tensor.clone()

    def _dequantize(self, q_tensor: Any) -> Any:
        return q_tensor


WINDOW, ROOM = 4, 8
LAYERS: dict[str, Callable[[], Any]] = {
    "dynamic": cache_utils.DynamicLayer,
    "sliding": lambda: cache_utils.DynamicSlidingWindowLayer(sliding_window=WINDOW),
    "static": lambda: cache_utils.StaticLayer(max_cache_len=ROOM),
    "static sliding": lambda: cache_utils.StaticSlidingWindowLayer(max_cache_len=ROOM, sliding_window=WINDOW),
    "quantised": lambda: Toy(residual_length=16),
}
each_layer = pytest.mark.parametrize("kind", LAYERS)


def states(batch: int = 2, heads: int = 2, tokens: int = 1, width: int = 4) -> Tensor:
    return torch.randn(batch, heads, tokens, width)


def updated(layer: Any, start: int, keys: Tensor, values: Tensor | None = None) -> Any:
    places = {"cache_position": torch.arange(start, start + keys.shape[2])}
    return layer.update(keys, keys if values is None else values, places)


def filled(kind: str) -> Any:
    layer = LAYERS[kind]()
    updated(layer, 0, states(tokens=2))
    updated(layer, 2, states())
    return layer


@each_layer
@pytest.mark.parametrize("sizes", [(2, 2, 4), (1, 1, 1), (2, 2, 0), (2, 2, 129), (0, 2, 4), (1, 4, 2)], ids=str)
def test_tokens_of_one_shape(kind: str, sizes: tuple[int, int, int]) -> None:
    batch, heads, width = sizes
    given = [
        (0, states(batch, heads, 3, width)),
        (3, states(batch, heads, 1, width)),
        (4, states(batch, heads, 2, width)),
    ]

    def run() -> list[Tensor]:
        layer = LAYERS[kind]()
        results = [x.clone() for start, keys in given for x in updated(layer, start, keys)]
        layer.reset()
        return [*results, *updated(layer, 0, given[0][1])]

    plain = run()
    with og.policy(B="raise"), og.installed("transformers"):
        guarded = run()
    assert all(torch.equal(*pair) for pair in zip(plain, guarded, strict=True))
    assert og.record.total == 0


@each_layer
@pytest.mark.parametrize("changed", ["batch", "heads", "width"])
def test_states_that_do_not_fit(kind: str, changed: str) -> None:
    wrong = {"batch": states(batch=3), "heads": states(heads=3), "width": states(width=3)}[changed]
    with pytest.raises((RuntimeError, IndexError)):
        updated(filled(kind), 3, wrong)
    layer = filled(kind)
    held = layer.keys.clone()
    with og.installed("transformers"), pytest.raises(og.GuardError) as caught:
        updated(layer, 3, wrong)
    assert all(violation.because and violation.hint for violation in caught.value.violations)
    assert torch.equal(layer.keys, held), "nothing was changed"


def test_one_sequence_that_a_full_window_would_expand() -> None:
    layer = filled("static sliding")
    updated(layer, 3, states())
    layer_again = filled("static sliding")
    updated(layer_again, 3, states())
    keys, _ = updated(layer_again, 4, states(batch=1))
    assert keys.shape == (2, 2, WINDOW, 4), "expanded without a word"
    call = lambda: updated(layer, 4, states(batch=1))  # noqa: E731
    with og.installed("transformers"), pytest.raises(og.GuardError) as caught:
        call()
    assert {violation.rule_id for violation in caught.value.violations} == {"keys_fit", "values_fit"}


def test_another_batch_in_a_window_that_was_reset() -> None:
    with og.policy(B="raise"), og.installed("transformers"):
        layer = filled("static sliding")
        layer.reset()
        updated(layer, 0, states(batch=1, tokens=WINDOW + 1))
    assert og.record.total == 0


def test_more_tokens_than_a_static_layer_has_room_for() -> None:
    with pytest.raises(IndexError):
        updated(LAYERS["static"](), 0, states(tokens=ROOM + 1))
    with og.installed("transformers"):
        with pytest.raises(og.GuardError, match="a longer prompt than max_cache_len"):
            updated(LAYERS["static"](), 0, states(tokens=ROOM + 1))
        updated(LAYERS["static"](), 0, states(tokens=ROOM))


@torch.no_grad()
def test_a_full_static_cache(tiny: Make) -> None:
    model = tiny()

    def run(length: int) -> Any:
        cache = StaticCache(config=model.config, max_cache_len=length)
        model(IDS, past_key_values=cache)
        return model(IDS[:, :1], past_key_values=cache)

    with pytest.raises(IndexError):
        run(7)
    violation = diagnosed(lambda: run(7), "Cache.update", "room", cost_class="B")
    assert violation.hint == "the cache is full: make it longer, or reset() it for another prompt"
    assert_quiet(lambda: run(8))


def test_a_layer_that_a_cache_does_not_have(tiny: Make) -> None:
    cache = DynamicCache(config=tiny().config)
    for layer, rule in ((2, "layer_exists"), (None, "layer_index")):
        with pytest.raises((IndexError, TypeError)):
            cache.update(states(), states(), layer)
        with og.installed("transformers"), pytest.raises(og.GuardError) as caught:
            cache.update(states(), states(), layer)
        assert [violation.rule_id for violation in caught.value.violations] == [rule]
    with og.installed("transformers"):
        cache.update(states(), states(), 1)
        DynamicCache().update(states(), states(), 5)
