"""Where a model is entered: positions, embeddings, caches, spelling, labels and prompts, wrong and odd.

Each test shows first what the unguarded call does. Token ids have a file of their own, masks another.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from outcomes import Call, assert_clearly_wrong, assert_quiet, diagnosed, logits, suspected
from transformers import BatchEncoding, DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel, StaticCache
from transformers.loss import loss_utils
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import llm_op_guard as og
from llm_op_guard.guard.reading import NotApplicable
from llm_op_guard.integrations.transformers import models

Model = Any
Make = Callable[..., Model]
DECODER, CAUSAL_LM, GENERATE = "LlamaModel.forward", "LlamaForCausalLM.forward", "GenerationMixin.generate"
IDS = torch.tensor([[5, 9, 14, 33, 71, 3, 8], [44, 7, 20, 11, 6, 90, 17]])
PADDING = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
POSITIONS = torch.arange(7)[None]


@pytest.fixture
def model(tiny: Make) -> Model:
    return tiny()


# ---------------------------------------------------------------- ids and embeddings


def test_ids_without_a_batch(model: Model) -> None:
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(IDS[0])
    violation = diagnosed(lambda: model(IDS[0]), DECODER, "input_ids.shape")
    assert (violation.observed, violation.hint) == (
        "input_ids.shape = (7,), rank 1",
        "one sequence without a batch: input_ids[None]",
    )
    assert_quiet(lambda: model(IDS[:1]), lambda: model(IDS[:1, :1]))


@pytest.mark.parametrize(("batch", "length"), [(2, 0), (0, 7), (0, 0)])
def test_no_tokens(model: Model, batch: int, length: int) -> None:
    ids, embeds = IDS[:batch, :length], torch.zeros(batch, length, 64)
    for call in (lambda: model(ids), lambda: model(inputs_embeds=embeds)):
        with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
            call()
        diagnosed(call, DECODER, "some_tokens")


def test_an_attention_that_does_without_tokens(tiny: Make) -> None:
    model = tiny("gpt_neox")
    with og.installed("transformers"), pytest.raises(RuntimeError) as caught:
        model(IDS[:, :0])
    assert not isinstance(caught.value, og.GuardError)


def test_embeds_width_1(model: Model) -> None:
    call = partial(model, inputs_embeds=torch.ones(2, 7, 1))
    assert logits(call).shape == (2, 7, 96), "one column became the width of the model"
    violation = diagnosed(call, DECODER, "embedding_width")
    assert violation.observed == "W = 1, embedding_width(self) = 64"
    assert violation.hint == "one column: they were reduced or sliced before"
    diagnosed(lambda: model(inputs_embeds=torch.ones(2, 7, 32)), DECODER, "embedding_width")
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(inputs_embeds=torch.ones(7, 64))
    diagnosed(lambda: model(inputs_embeds=torch.ones(7, 64)), DECODER, "inputs_embeds.shape")
    embeds = model.get_input_embeddings()(IDS).detach()
    assert_quiet(lambda: model(inputs_embeds=embeds), lambda: model(inputs_embeds=embeds.double().float()))


def test_a_table_that_is_scaled_or_of_another_kind(tiny: Make, model: Model) -> None:
    granite = tiny("granite", embedding_multiplier=2.0)
    diagnosed(lambda: granite(inputs_embeds=torch.ones(2, 7, 1)), "GraniteModel.forward", "embedding_width")
    model.model.embed_tokens = torch.nn.EmbeddingBag(96, 64)
    with pytest.raises(NotApplicable):
        models.embedding_width(model)


# ---------------------------------------------------------------- positions


def test_positions_broadcast(model: Model) -> None:
    def call(positions: torch.Tensor) -> Any:
        return model(IDS, position_ids=positions)

    right = logits(lambda: call(POSITIONS))
    wrong = logits(lambda: call(torch.zeros(1, 1, dtype=torch.long)))
    assert wrong.shape == right.shape
    assert not torch.allclose(wrong, right, atol=1e-4)
    violation = diagnosed(lambda: call(torch.zeros(1, 1, dtype=torch.long)), DECODER, "position_ids.shape")
    assert (violation.observed, violation.expected) == ("position_ids.shape[1] = 1", "L = 7")
    assert violation.hint == "one position for all tokens"


WRONG_POSITIONS = [
    ((2, 2), "position_ids.shape", "positions of another call"),
    ((2, 8), "position_ids.shape", "positions of past and new tokens: only those of the new ones belong here"),
    ((3, 7), "position_ids.shape", "positions of another batch"),
    ((7,), "positions_in_batch", "one sequence without a batch: position_ids[None]"),
]


@pytest.mark.parametrize(("shape", "rule_id", "hint"), WRONG_POSITIONS)
def test_positions_of_other_shapes(model: Model, shape: tuple[int, ...], rule_id: str, hint: str) -> None:
    positions = torch.ones(shape, dtype=torch.long)
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(IDS, position_ids=positions)
    assert diagnosed(lambda: model(IDS, position_ids=positions), DECODER, rule_id).hint == hint


def test_positions_that_are_right(tiny: Make, model: Model) -> None:
    padded = (PADDING.cumsum(-1) - 1).clamp(min=0)

    def decoded(positions: torch.Tensor) -> Any:
        return model(IDS[:, :1], cache=model(IDS).cache, position_ids=positions)

    assert_quiet(
        lambda: model(IDS, position_ids=POSITIONS),
        lambda: model(IDS, position_ids=POSITIONS.float()),
        lambda: model(IDS, position_ids=padded, attention_mask=PADDING),
        lambda: model(IDS[:1], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), use_cache=False),  # packed
        lambda: decoded(torch.tensor([[7]])),
        lambda: decoded(torch.tensor([[7], [7]])),
        lambda: decoded(torch.tensor([7])),
    )


def test_positions_past_a_learned_table(tiny: Make) -> None:
    model, operator = tiny("gpt2", max_position_embeddings=16), "GPT2Model.forward"
    with pytest.raises(IndexError, match="out of range"):
        model(torch.ones(1, 17, dtype=torch.long))
    diagnosed(lambda: model(torch.ones(1, 17, dtype=torch.long)), operator, "positions_in_table")
    diagnosed(lambda: model(inputs_embeds=torch.ones(1, 17, 64)), operator, "positions_in_table")
    cache = model(torch.ones(1, 16, dtype=torch.long)).cache
    violation = diagnosed(lambda: model(IDS[:1, :1], cache=cache), operator, "past_and_new_in_table")
    assert violation.observed == "cache_length(cache) + length = 17, position_rows(self) = 16"
    for positions, where in ((POSITIONS + 10, "[0, 6] = 16"), (POSITIONS - 1, "[0, 0] = -1")):
        with pytest.raises(IndexError, match="out of range"):
            model(IDS, position_ids=positions)
        call = partial(model, IDS, position_ids=positions)
        assert where in diagnosed(call, operator, "position_ids_in_table", cost_class="B").observed
    for options in ({}, {"position_ids": POSITIONS[0]}):
        without_batch = partial(model, inputs_embeds=torch.ones(7, 64), **options)
        with pytest.raises((IndexError, RuntimeError)):
            without_batch()
        violation = diagnosed(without_batch, operator, "inputs_embeds.shape")
        assert violation.hint == "one sequence without a batch: inputs_embeds[None]"
    one = partial(model, IDS, position_ids=torch.zeros(1, 1, dtype=torch.long))
    assert_clearly_wrong(logits(one), logits(lambda: model(IDS)))
    diagnosed(one, operator, "position_for_each_token")
    assert_quiet(
        lambda: model(torch.ones(1, 16, dtype=torch.long)),
        lambda: model(IDS, position_ids=POSITIONS + 9),
        lambda: model(IDS, position_ids=POSITIONS[0]),
        lambda: model(IDS[:, :1], cache=model(torch.ones(2, 15, dtype=torch.long)).cache),
    )


# ---------------------------------------------------------------- classes of errors

ERRORS: dict[str, Callable[[Model], Any]] = {
    "ids without a batch": lambda model: model(IDS[0]),
    "embeddings without a batch": lambda model: model(inputs_embeds=torch.ones(7, 64)),
    "embeddings of another width": lambda model: model(inputs_embeds=torch.ones(2, 7, 32)),
    "positions of another length": lambda model: model(IDS, position_ids=POSITIONS[:, :4]),
    "a cache of another batch": lambda model: model(IDS[:1, :1], cache=filled(model, DynamicCache())),
    "a static cache of another batch": lambda model: model(
        IDS[:1, :1], cache=filled(model, StaticCache(model.config, max_cache_len=16))
    ),
    "a cache of fewer layers": lambda model: model(IDS, cache=of_one_layer(model)),
    "a mask of whole numbers": lambda model: model(IDS, attention_mask=torch.ones(2, 1, 7, 7, dtype=torch.long)),
    "a mask that is too wide": lambda model: model(IDS, attention_mask=torch.zeros(2, 1, 7, 9)),
    "a mask of one dimension": lambda model: model(IDS, attention_mask=PADDING[0]),
}


def of_one_layer(model: Model) -> Any:
    config = copy.copy(model.config)
    config.num_hidden_layers = 1
    return DynamicCache(config=config)


@pytest.mark.parametrize("name", ERRORS)
@torch.no_grad()
def test_who_catches_what_the_unguarded_call_raises_catches_it_guarded(model: Model, name: str) -> None:
    with pytest.raises((RuntimeError, IndexError)) as unguarded:
        ERRORS[name](model)
    with og.policy(B="raise"), og.installed("transformers"), pytest.raises(unguarded.type) as guarded:
        ERRORS[name](model)
    assert isinstance(guarded.value, og.GuardError)


# ---------------------------------------------------------------- hooks


def adds_two(_: Any, given: Any, embeds: torch.Tensor) -> torch.Tensor:
    return torch.cat([embeds.new_zeros(embeds.shape[0], 2, embeds.shape[-1]), embeds], 1)


def keeps_three(_: Any, given: Any, output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state[:, -3:]
    return output


def of_tables(hook: Any) -> Any:
    """The same hook for every module, which leaves all but tables alone."""
    return lambda module, *given: hook(module, *given) if isinstance(module, torch.nn.Embedding) else None


every = torch.nn.modules.module
NINE, THREE = torch.cat([IDS[:, :2], IDS], 1), IDS[:, :3]
HOOKS: list[tuple[Callable[..., Any], Callable[[Model], Any]]] = [
    (lambda model: model.model.embed_tokens.register_forward_hook(adds_two), lambda model: model(IDS, labels=NINE)),
    (lambda model: every.register_module_forward_hook(of_tables(adds_two)), lambda model: model(IDS, labels=NINE)),
    (
        lambda model: model.model.embed_tokens.register_forward_hook(adds_two),
        lambda model: model(IDS, position_ids=torch.arange(9)[None]),
    ),
    (
        lambda model: every.register_module_forward_hook(of_tables(adds_two)),
        lambda model: model(IDS, position_ids=torch.arange(9)[None]),
    ),
    (lambda model: model.model.embed_tokens.register_forward_hook(adds_two), lambda model: model(IDS[:, :0])),
    (lambda model: model.model.register_forward_hook(keeps_three), lambda model: model(IDS, labels=THREE)),
    (
        lambda model: model.model.norm.register_forward_hook(lambda _, given, x: x[:, -3:]),
        lambda model: model(IDS, labels=THREE),
    ),
    (
        lambda model: model.model.layers[1].register_forward_hook(lambda _, given, x: x[:, -3:]),
        lambda model: model(IDS, labels=THREE),
    ),
    (
        lambda model: model.lm_head.register_forward_pre_hook(lambda _, given: given[0][:, -3:]),
        lambda model: model(IDS, labels=THREE),
    ),
    (
        lambda model: every.register_module_forward_pre_hook(of_tables(lambda _, given: given[0].clamp(0, 95))),
        lambda model: model(IDS + 90),
    ),
    (
        lambda model: model.register_forward_pre_hook(lambda _, given: (given[0].clamp(0, 95),)),
        lambda model: model(IDS + 90),
    ),
]


@pytest.mark.parametrize("hook", range(len(HOOKS)))
def test_hooks_that_change_what_is_looked_up_or_how_many_there_are(
    model: Model, hook: int, request: pytest.FixtureRequest
) -> None:
    register, call = HOOKS[hook]
    request.addfinalizer(register(model).remove)
    assert_quiet(lambda: call(model))


@pytest.mark.parametrize("table", ["wte", "wpe"])
def test_hooks_of_learned_positions(tiny: Make, table: str) -> None:
    model = tiny("gpt2")
    if table == "wte":
        model.transformer.wte.register_forward_hook(lambda _, given, x: torch.cat([x, x], 1))
        positions = torch.arange(14)[None]
    else:
        model.transformer.wpe.register_forward_hook(lambda _, given, x: x.expand(1, 7, -1))
        positions = torch.zeros(1, 1, dtype=torch.long)
    assert_quiet(lambda: model(IDS, position_ids=positions))


def test_a_part_of_the_users_own_may_drop_tokens(model: Model) -> None:
    class LastThree(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[:, -3:])

    model.lm_head = LastThree(64, 96)
    assert_quiet(lambda: model(IDS, labels=THREE))


def test_hooks_of_the_library_only_write_down(model: Model) -> None:
    model(IDS, output_hidden_states=True, output_attentions=True)
    assert model.model.layers[0]._forward_hooks, "this test is about them"
    diagnosed(loss(model, IDS[:, 1:]), CAUSAL_LM, "a_label_for_each_token")


# ---------------------------------------------------------------- caches


def test_cache_other_model(tiny: Make, model: Model) -> None:
    other = tiny(seed=1)

    def decoded(by: Model) -> Any:
        return model(IDS[:, :1], cache=by(IDS).cache)

    assert_clearly_wrong(logits(lambda: decoded(other)), logits(lambda: decoded(model)))
    text = suspected(lambda: decoded(other), DECODER, "keys and values of another model")
    assert "recall(cache, 'filled_by') = LlamaModel" in text


def test_a_cache_of_the_same_model(tiny: Make, model: Model) -> None:
    other = tiny(seed=1)

    def after_a_reset() -> Any:
        cache = DynamicCache(config=model.config)
        other(IDS, cache=cache)
        cache.reset()
        model(IDS, cache=cache)
        return model(IDS[:, :1], cache=cache)

    def by_the_decoder() -> Any:
        return model(IDS[:, :1], cache=model.model(IDS).cache)

    assert_quiet(after_a_reset, by_the_decoder)
    with og.installed("transformers"):
        first = model.generate(IDS, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        model.generate(first.sequences, cache=first.cache, max_new_tokens=2, do_sample=False)
    assert og.record.total == 0


def filled(model: Model, cache: Any) -> Any:
    model(IDS, cache=cache)
    return cache


@pytest.mark.parametrize("made", [lambda model: DynamicCache(config=model.config), lambda model: DynamicCache()])
def test_cache_more_layers(tiny: Make, model: Model, made: Callable[[Model], Any]) -> None:
    larger = tiny(num_hidden_layers=4)
    wrong = logits(lambda: model(IDS[:, :1], cache=filled(larger, made(larger))))
    assert_clearly_wrong(wrong, logits(lambda: model(IDS[:, :1], cache=filled(model, made(model)))))
    violation = diagnosed(
        lambda: model(IDS[:, :1], cache=filled(larger, made(larger))), DECODER, "cache_filled_for_as_many_layers"
    )
    assert "recall(cache, 'filled_layers') = 4, layers = 2" in violation.observed
    assert violation.hint == "the cache was filled by a model with more layers"
    # Filled unguarded: it is the layers that tell, and they may be there on purpose.
    cache = filled(larger, made(larger))
    text = suspected(lambda: model(IDS[:, :1], cache=cache), DECODER, "cache_layers_in_use")
    assert "cache_layers_in_use(cache) = 4, layers = 2" in text
    assert "the cache was filled by a model with more layers" in text


def test_a_cache_of_the_same_model_with_fewer_layers_since(tiny: Make) -> None:
    larger = tiny(num_hidden_layers=4)

    def cut() -> Any:
        cache = larger.model(IDS).cache
        del larger.model.layers[2:]
        larger.config.num_hidden_layers = 2
        return larger.model(IDS[:, :1], cache=cache)

    violation = diagnosed(cut, DECODER, "cache_filled_for_as_many_layers")
    assert "recall(cache, 'filled_layers') = 4, layers = 2" in violation.observed


def test_cache_fewer_layers(tiny: Make, model: Model) -> None:
    larger = tiny(num_hidden_layers=4)
    for cache in (StaticCache(model.config, max_cache_len=16), DynamicCache(config=model.config)):
        with pytest.raises(IndexError, match="list index out of range"):
            larger(IDS, cache=cache)
    for cache in (StaticCache(model.config, max_cache_len=16), DynamicCache(config=model.config)):
        violation = diagnosed(lambda cache=cache: larger(IDS, cache=cache), DECODER, "cache_has_every_layer")
        assert violation.observed == "cache_layers(cache) = 2, layers = 4"
    cache = filled(model, DynamicCache(config=model.config))
    diagnosed(lambda: larger(IDS[:, :1], cache=cache), DECODER, "cache_has_every_layer")
    diagnosed(
        lambda: larger(IDS[:, :1], cache=filled(model, DynamicCache())), DECODER, "cache_filled_for_as_many_layers"
    )
    cache = filled(model, DynamicCache())
    text = suspected(lambda: larger(IDS[:, :1], cache=cache), DECODER, "cache_layers_in_use")
    assert "the cache was filled by a model with fewer layers" in text


def without_attention(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states


class WithoutAttention(LlamaDecoderLayer):
    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


def skips_in_the_instance(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[1].forward = without_attention


def skips_in_a_subclass(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[1] = WithoutAttention(model.config, 1)


def skips_in_the_class(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    own = LlamaDecoderLayer.forward

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if self.self_attn.layer_idx == 1 else own(self, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)


def skips_when_called(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    class Skipping(LlamaDecoderLayer):
        def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return hidden_states

    model.model.layers[1] = Skipping(model.config, 1)


def keeps_no_keys_by_a_hook(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.model.layers[1].register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "cache": None}), with_kwargs=True
    )


def attends_without_a_cache(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = model.model.layers[1].self_attn
    own = attention.forward
    attention.forward = lambda *args, **kwargs: own(*args, **{**kwargs, "cache": None})


@pytest.mark.parametrize(
    "skips",
    [skips_in_the_instance, skips_in_a_subclass, skips_in_the_class, skips_when_called, keeps_no_keys_by_a_hook,
     attends_without_a_cache],
)  # fmt: skip
def test_a_layer_that_keeps_no_keys(
    model: Model, skips: Callable[[Model, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = copy.copy(model.config)
    fewer.num_hidden_layers = 1
    skips(model, monkeypatch)

    def decoded() -> Any:
        cache = DynamicCache()
        cache.update(torch.ones(2, 2, 7, 16), torch.ones(2, 2, 7, 16), 0)
        return model(IDS[:, :1], cache=cache)

    assert_quiet(
        decoded, lambda: model(IDS[:, :1], cache=model(IDS).cache), lambda: model(IDS, cache=DynamicCache(config=fewer))
    )
    with pytest.raises(NotApplicable):
        models.decoder_layers(model.model)


def test_a_layer_of_another_in_the_same_cache(model: Model) -> None:
    def decoded() -> Any:
        cache = filled(model, DynamicCache())
        cache.update(torch.ones(2, 2, 7, 16), torch.ones(2, 2, 7, 16), 2)
        return model(IDS[:, :1], cache=cache)

    assert_quiet(decoded)


def test_a_static_cache_of_more_layers_is_only_larger(tiny: Make, model: Model) -> None:
    config = tiny(num_hidden_layers=4).config
    assert_quiet(
        lambda: model(IDS, cache=StaticCache(config, max_cache_len=16)),
        lambda: model(IDS, cache=DynamicCache(config=config)),
        lambda: model(IDS[:, :1], cache=filled(model, DynamicCache(config=config))),
    )


SWITCHES: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (og.uninstall, lambda: og.install("transformers")),
    (lambda: og.set_policy(A="off", B="off"), lambda: og.set_policy(A="raise", B="raise")),
]


@pytest.mark.parametrize("switch", range(len(SWITCHES)))
def test_what_a_guarded_call_remembered_is_forgotten_while_guards_are_off(
    tiny: Make, model: Model, switch: int, no_alarm: None
) -> None:
    off, on = SWITCHES[switch]
    other, cache = tiny(seed=1), DynamicCache()
    og.install("transformers")
    other(IDS, cache=cache)
    off()
    cache.crop(0)
    model(IDS, cache=cache)
    on()
    model(IDS[:, :1], cache=cache)
    assert og.record.total == 0


# ---------------------------------------------------------------- spelling

MISSPELT = [
    ("atention_mask", "attention_mask"),
    ("position_id", "position_ids"),
    ("input_embeds", "inputs_embeds"),
    ("past_key_value", "past_key_values"),
]


@pytest.mark.parametrize(("typo", "name"), MISSPELT)
def test_kwarg_typo(model: Model, typo: str, name: str) -> None:
    call = partial(model, IDS, **{typo: PADDING})
    assert torch.equal(logits(call), logits(lambda: model(IDS))), "swallowed"
    violation = diagnosed(call, DECODER, f"{name}_spelt")
    assert violation.observed.startswith(f"misspelt(kwargs, '{name}'")
    assert violation.observed.endswith(f" = '{typo}'")
    assert violation.hint == f"did you mean {name}?"


def test_labels_misspelt(model: Model) -> None:
    assert_quiet(  # columns of a data set: one label for each sequence, none, texts
        lambda: model(IDS, label=torch.tensor([0, 1])),
        lambda: model(IDS, label=torch.tensor([[0], [1]])),
        lambda: model(IDS, label=None),
        lambda: model(IDS, label=["a", "b"]),
    )
    assert model(IDS, lables=IDS).loss is None
    assert diagnosed(lambda: model(IDS, lables=IDS), CAUSAL_LM, "labels_spelt").hint == "did you mean labels?"


def test_other_arguments(tiny: Make, model: Model) -> None:
    assert_quiet(
        lambda: model(IDS, output_attentions=False, output_hidden_states=True, num_items_in_batch=3),
        lambda: model(IDS, attention_mask=PADDING, attention_masks=None),
        lambda: model(IDS, something_else=3, position_bias=None),
        lambda: model(IDS, atention_mask=None, past_key_value=None),
        lambda: model(IDS, cache=DynamicCache()),
    )
    model.config._attn_implementation_internal = "mine"
    with og.installed("transformers"), pytest.raises(KeyError):
        model(IDS, atention_mask=PADDING)  # an attention of the user's own may take it


def test_generate_says_itself_what_it_does_not_know(model: Model) -> None:
    with pytest.raises(ValueError, match=r"not used by the model: \['atention_mask'\]"):
        model.generate(IDS, atention_mask=PADDING, max_new_tokens=2)


# ---------------------------------------------------------------- labels


def loss(model: Model, labels: torch.Tensor, **options: Any) -> Call:
    return lambda: model(IDS, labels=labels, **options).loss


def test_labels_of_another_size(model: Model) -> None:
    for labels, hint in ((IDS[:, 1:], "labels are not to be shifted"), (IDS[:1], "labels of another batch")):
        with pytest.raises(ValueError, match="to match target batch_size"):
            loss(model, labels)()
        violation = diagnosed(loss(model, labels), CAUSAL_LM, "a_label_for_each_token")
        assert violation.observed == f"numel(labels) = {labels.numel()}, tokens = 14"
        assert violation.hint is not None and violation.hint.startswith(hint)


def test_labels_transposed_are_suspect(model: Model) -> None:
    labels = IDS.T.contiguous()
    assert not torch.allclose(loss(model, labels)(), loss(model, IDS)())
    assert "labels were transposed or flattened" in suspected(loss(model, labels), CAUSAL_LM, "shifted by one")


@pytest.mark.parametrize(("label", "hint"), [(-1, "only -100 is ignored; -1 is not"), (96, "tokenizer belongs to")])
def test_labels_outside_the_vocabulary(model: Model, label: int, hint: str) -> None:
    labels = torch.where(IDS == 9, label, IDS)
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        loss(model, labels)()
    violation = diagnosed(loss(model, labels), CAUSAL_LM, "labels_in_vocabulary", cost_class="B")
    assert violation.observed.startswith(f"labels[0, 1] = {label} (of 12")
    assert violation.hint is not None and hint in violation.hint


def test_labels_that_are_right(model: Model) -> None:
    def quietly(call: Call) -> None:
        plain = call()
        with og.policy(B="raise"), og.installed("transformers"):
            assert torch.equal(plain.nan_to_num(), call().nan_to_num())
        assert og.record.total == 0

    quietly(loss(model, IDS))
    quietly(loss(model, torch.where(PADDING == 0, -100, IDS)))
    quietly(loss(model, torch.full_like(IDS, -100)))
    quietly(loss(model, torch.where(IDS == 5, -1, IDS)))  # the first label of a row is compared with nothing
    quietly(loss(model, IDS[:, -3:], logits_to_keep=3))
    quietly(loss(model, torch.where(IDS == 9, -1, IDS), ignore_index=-1))
    quietly(loss(model, IDS[:, :3], shift_labels=IDS))
    quietly(lambda: model(inputs_embeds=torch.ones(2, 7, 64), labels=IDS).loss)
    quietly(lambda: model(IDS[:1, :1], labels=IDS[:1, :1]).loss)


def test_another_loss_is_left_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.label_classes(model) == 96
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", lambda **_: torch.zeros(1))
    with pytest.raises(NotApplicable):
        models.label_classes(model)
    monkeypatch.undo()
    model.loss_function = lambda **_: torch.zeros(1)
    with og.policy(B="raise"), og.installed("transformers"):
        assert loss(model, IDS[:, :3] - 100)().item() == 0


# ---------------------------------------------------------------- generate


def test_prompts_without_a_batch_or_a_token(model: Model) -> None:
    for how in ("inputs", "input_ids"):
        with pytest.raises(IndexError):
            model.generate(**{how: IDS[0]}, max_new_tokens=2)
        rule_id = "ids_in_batch" if how == "inputs" else "input_ids_in_batch"
        call = partial(model.generate, **{how: IDS[0]}, max_new_tokens=2)
        diagnosed(call, GENERATE, rule_id)
        with pytest.raises(IndexError, match="index -1 is out of bounds"):
            model.generate(**{how: IDS[:, :0]}, max_new_tokens=2)
        rule_id = "some_tokens" if how == "inputs" else "some_input_tokens"
        call = partial(model.generate, **{how: IDS[:, :0]}, max_new_tokens=2)
        diagnosed(call, GENERATE, rule_id)


@pytest.mark.parametrize("columns", [1, 6])
def test_a_mask_shorter_than_the_prompt(model: Model, columns: int) -> None:
    mask = PADDING[:, -columns:]

    def call() -> Any:
        return model.generate(IDS, attention_mask=mask, max_new_tokens=2, do_sample=False)

    if columns == 1:
        call()  # one position for all tokens, without a word
    else:
        with pytest.raises(RuntimeError, match="size of tensor"):
            call()
    diagnosed(call, GENERATE, "mask_covers_ids")
    named = partial(model.generate, input_ids=IDS, attention_mask=mask, max_new_tokens=2)
    diagnosed(named, GENERATE, "mask_covers_input_ids")


def test_tokens_that_the_model_does_not_have_are_suspect(model: Model) -> None:
    ended = {"max_new_tokens": 4, "do_sample": False}
    suspected(lambda: model.generate(IDS, pad_token_id=1000, **ended), GENERATE, "looked up as any other")
    suspected(lambda: model.generate(IDS, eos_token_id=1000, **ended), GENERATE, "never ends a sequence")
    with pytest.raises(IndexError, match="index 1000 is out of bounds"):
        model.generate(IDS, forced_eos_token_id=1000, **ended)
    with og.installed("transformers"), pytest.warns(og.GuardWarning, match="the last token"), pytest.raises(IndexError):
        model.generate(IDS, forced_eos_token_id=1000, **ended)


@pytest.mark.parametrize("how", ["inputs", "input_ids"])
def test_ids_that_are_no_tensor(model: Model, how: str) -> None:
    for ids in (IDS.tolist(), IDS.numpy(), {"input_ids": IDS}, BatchEncoding({"input_ids": IDS})):
        call = partial(model.generate, **{how: ids}, max_new_tokens=2)
        with pytest.raises(AttributeError):
            call()
        rule_id = "inputs.type" if how == "inputs" else "kwargs['input_ids'].type"
        violation = diagnosed(call, GENERATE, rule_id)
        assert violation.hint is not None and violation.hint.startswith("ids as a list: torch.tensor([ids])")


def test_no_beams(model: Model) -> None:
    for beams, error in ((0, ZeroDivisionError), (-1, RuntimeError)):
        for options in ({"num_beams": beams}, {"generation_config": GenerationConfig(num_beams=beams)}):
            call = partial(model.generate, IDS, max_new_tokens=2, **options)
            with pytest.raises(error) as caught:
                call()
            assert not isinstance(caught.value, og.GuardError)
            assert diagnosed(call, GENERATE, "some_beams").observed == f"beams = {beams}"


def test_no_sequences_of_several_beams(model: Model) -> None:
    call = partial(model.generate, IDS, num_beams=2, num_return_sequences=0, max_new_tokens=2)
    with pytest.raises(RuntimeError, match="Expected reduction dim"):
        call()
    diagnosed(call, GENERATE, "some_sequences")


def test_a_penalty_for_what_has_no_end(model: Model) -> None:
    options = {"exponential_decay_length_penalty": (1, 1.1), "max_new_tokens": 2, "do_sample": False}
    model.generation_config.eos_token_id = None
    with pytest.raises(RuntimeError, match="Could not infer dtype of NoneType"):
        model.generate(IDS, **options)
    diagnosed(lambda: model.generate(IDS, **options), GENERATE, "an_end_to_favour")


def test_a_text_for_do_sample_is_suspect(model: Model) -> None:
    torch.manual_seed(0)
    sampled = model.generate(IDS, do_sample="False", max_new_tokens=4)
    assert not torch.equal(sampled, model.generate(IDS, do_sample=False, max_new_tokens=4))
    suspected(lambda: model.generate(IDS, do_sample="False", max_new_tokens=4), GENERATE, "it samples")


def test_a_recipe_of_the_users_own_is_left_alone(model: Model) -> None:
    with og.installed("transformers"), pytest.raises(IndexError) as caught:
        model.generate(IDS[0], custom_generate=lambda *_, **__: IDS, max_new_tokens=2)
    assert not isinstance(caught.value, og.GuardError)


@pytest.mark.usefixtures("no_alarm")
def test_generation_that_is_right(model: Model) -> None:
    greedy = {"max_new_tokens": 3, "do_sample": False}
    with og.policy(B="raise"), og.installed("transformers"):
        model.generate(IDS, attention_mask=PADDING, pad_token_id=0, eos_token_id=-1, **greedy)
        model.generate(IDS, eos_token_id=[2, 3], **greedy)
        model.generate(IDS, num_return_sequences=0, **greedy)  # one
        model.generate(IDS, num_beams=1, generation_config=GenerationConfig(num_beams=0), **greedy)
        model.generate(IDS, num_beams=2, num_return_sequences=2, do_sample=True, max_new_tokens=2)
        model.generate(IDS, exponential_decay_length_penalty=(1, 1.1), **greedy)
        model.generate(input_ids=IDS, do_sample=0, max_new_tokens=2)
        model.generate(inputs_embeds=torch.ones(2, 7, 64), **greedy)
        model.generate(torch.empty(2, 0, dtype=torch.long), inputs_embeds=torch.ones(2, 7, 64), **greedy)
        cache = model(IDS).cache
        model.generate(torch.cat([IDS, IDS[:, :1]], 1), cache=cache, attention_mask=torch.ones(2, 8), **greedy)
        model.generate(IDS, attention_mask=PADDING, pad_token_id=-1, **greedy)  # of which Transformers warns itself
    assert og.record.total == 0


def test_a_mask_of_four_dimensions_is_left_to_generate(model: Model) -> None:
    with og.installed("transformers"), pytest.raises(ValueError, match="must be 2D") as caught:
        model.generate(IDS, attention_mask=torch.ones(2, 1, 7, 7), max_new_tokens=2)
    assert not isinstance(caught.value, og.GuardError)


# ---------------------------------------------------------------- what is the library's own


def told(reader: Callable[[Any], Any], model: Model) -> Any:
    try:
        return reader(model)
    except NotApplicable:
        return None


@pytest.mark.parametrize("name", ["prepare_inputs_for_generation", "_prepare_position_ids_for_generation"])
def test_generation_that_was_changed(model: Model, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    assert told(models.embedding_rows, model) == 96
    original = getattr(GenerationMixin, name)
    for changed in (own, wraps(original)(own)):
        with monkeypatch.context() as patch:
            patch.setattr(GenerationMixin, name, changed)
            assert told(models.embedding_rows, model) is None
        with monkeypatch.context() as patch:
            patch.setattr(type(model), name, changed)
            assert told(models.embedding_rows, model) is None
        with monkeypatch.context() as patch:
            patch.setattr(model, name, changed)
            assert told(models.embedding_rows, model) is None
    assert told(models.embedding_rows, model) == 96


def test_a_loss_that_was_changed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(self: Any) -> Any:
        raise AssertionError

    assert told(models.label_classes, model) == 96
    for cls in (PreTrainedModel, type(model)):
        with monkeypatch.context() as patch:
            patch.setattr(cls, "loss_function", property(own), raising=False)
            assert told(models.label_classes, model) is None
    assert told(models.label_classes, model) == 96


def test_an_embedding_that_was_changed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clamping(torch.nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch calls it
            return super().forward(input.clamp(max=95))

    Clamping.__module__, Clamping.__qualname__ = "torch.nn.modules.sparse", "Embedding"
    Clamping.forward.__module__, Clamping.forward.__qualname__ = "torch.nn.modules.sparse", "Embedding.forward"
    assert told(models.embedding_rows, model) == 96
    monkeypatch.setattr(model.model.embed_tokens, "__class__", Clamping)
    assert told(models.embedding_rows, model) is None
