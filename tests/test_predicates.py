"""Registering predicates, and those that come with the library, on real tokenizers and models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_stubs
from llm_op_guard.guard import asked
from llm_op_guard.predicates import largest_token_id, matched_modules, unmatched_targets

# ---------------------------------------------------------------- registering


def small(x: Any) -> bool:
    return bool(x < 10)


def test_a_predicate_is_returned_as_it_is_and_registered_under_its_name() -> None:
    assert og.predicate(small) is small
    assert f"{__name__}.small" in asked.registered()
    assert og.predicate(small) is small  # a module that is loaded anew


def test_what_is_called_like_a_function_can_be_a_predicate() -> None:
    cached = functools.lru_cache(small)
    assert og.predicate(cached) is cached


class Rules:
    def small(self, x: Any) -> bool:
        return bool(x < 10)


async def later(x: Any) -> bool:
    return bool(x)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x, "is not"),
        (Rules.small, r"Rules\.small is not"),
        (Rules().small, r"Rules\.small is not"),
        (functools.partial(small, 1), "partial is not"),
        (3, "int is not"),
        ("small", "str is not"),
        (later, "later is asynchronous, and nobody would await what it returns"),
    ],
)
def test_what_a_contract_could_not_name_or_ask_is_refused(function: Any, said: str) -> None:
    with pytest.raises(og.PredicateError, match=said):
        og.predicate(function)


def test_the_predicates_of_the_library_are_registered() -> None:
    known = {name.rpartition(".")[2] for name in asked.registered() if name.startswith("llm_op_guard.predicates.")}
    assert known == {"largest_token_id", "matched_modules", "unmatched_targets"}
    page = (Path(__file__).parents[1] / "docs" / "language.md").read_text("utf-8")
    assert all(f"| `{name}(" in page for name in known)


# ---------------------------------------------------------------- tokenizers

VOCABULARY = {"<unk>": 0, "a": 1, "b": 2, "c": 5}  # ids may leave gaps: the size is not the largest id


def fast() -> Any:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(VOCABULARY), unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def slow() -> Any:
    transformers = pytest.importorskip("transformers")

    class Slow(transformers.PythonBackend):  # type: ignore[misc]
        def get_vocab(self) -> dict[str, int]:
            return {**VOCABULARY, **self.added_tokens_encoder}

        vocab_size = 6

        def _tokenize(self, text: str, **_: Any) -> list[str]:
            return text.split()

        def _convert_token_to_id(self, token: str) -> int:
            return VOCABULARY.get(token, 0)

    return Slow(unk_token="<unk>")


@pytest.mark.parametrize("make", [fast, slow])
def test_the_largest_id_of_a_tokenizer_of_transformers(make: Callable[[], Any]) -> None:
    tokenizer = make()
    assert largest_token_id(tokenizer) == 5 > len(VOCABULARY) - 1
    assert tokenizer.add_tokens(["d", "e", "f"]) == 3
    added = tokenizer.convert_tokens_to_ids("f")
    assert largest_token_id(tokenizer) == max(added, 5)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert largest_token_id(tokenizer) == max(tokenizer.pad_token_id, added, 5)


def test_the_largest_id_elsewhere() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(VOCABULARY), unk_token="<unk>"))
    assert largest_token_id(inner) == 5
    assert largest_token_id(VOCABULARY) == 5
    assert largest_token_id(SimpleNamespace(max_token_value=199_999)) == 199_999  # tiktoken.Encoding
    assert largest_token_id(SimpleNamespace(get_piece_size=lambda: 32_000)) == 31_999  # SentencePieceProcessor
    for wrong in (3, "gpt2", None):
        with pytest.raises(TypeError, match="is no tokenizer that is known here"):
            largest_token_id(wrong)
    with pytest.raises(ValueError):
        largest_token_id({})


def test_a_tokenizer_fits_a_model(tiny: Callable[..., Any]) -> None:
    contract = contract_of(
        "largest_token_id",
        "require(largest_token_id(tokenizer) < embedding_rows(model), id='fits')",
        "tokenizer, model",
    )
    tokenizer, model = fast(), tiny(vocab_size=7)
    og.verify(contract, tokenizer, model)
    tokenizer.add_tokens([f"<{number}>" for number in range(6)])
    with pytest.raises(og.GuardError) as caught:
        og.verify(contract, tokenizer, model)
    observed = f"largest_token_id(tokenizer) = {largest_token_id(tokenizer)}, embedding_rows(model) = 7"
    assert caught.value.violations[0].observed == observed
    model.resize_token_embeddings(largest_token_id(tokenizer) + 1)
    og.verify(contract, tokenizer, model)


def contract_of(predicate: str, body: str, parameters: str) -> og.Contract:
    return parse_stubs(f"from llm_op_guard.predicates import {predicate}\ndef f({parameters}):\n    {body}\n")["f"]


# ---------------------------------------------------------------- modules


def llama(tiny: Callable[..., Any]) -> Any:
    pytest.importorskip("transformers")
    return tiny()


@pytest.mark.parametrize(
    ("targets", "unmatched"),
    [
        (["q_proj", "v_proj"], 0),
        (["q_proj", "FAKE"], 1),
        (("FAKE", "fake", "q_proj"), 2),
        ({"q_proj", "self_attn.k_proj"}, 0),  # PEFT keeps a set
        (["proj"], 1),  # an end of a name is no name
        (["layers.1.mlp.up_proj"], 0),
        (["model.layers.0.self_attn.q_proj"], 0),  # the whole path
        (["layers.7.mlp.up_proj"], 1),
        (["q_proj."], 1),
        ([], 0),
        (r".*\.(q|v)_proj", 0),
        (r"model\.layers\.\d+\.self_attn\.q_proj", 0),
        (r"layers\.\d+\.self_attn\.q_proj", 1),  # of the whole path
        ("q_proj", 1),
        ("", 1),  # the model itself is no target
        ("all-linear", 0),
        ("All-Linear", 0),
    ],
)
def test_targets_are_matched_as_peft_does(targets: Any, unmatched: int, tiny: Callable[..., Any]) -> None:
    assert unmatched_targets(llama(tiny), targets) == unmatched


def test_all_linear_needs_a_linear_layer(tiny: Callable[..., Any]) -> None:
    transformers = pytest.importorskip("transformers")
    assert unmatched_targets(nn.Sequential(nn.LayerNorm(2)), "all-linear") == 1
    assert unmatched_targets(nn.Sequential(nn.Linear(2, 2)), "all-linear") == 0
    gpt2 = transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, n_positions=4))
    assert not any(isinstance(module, nn.Linear) for module in gpt2.modules())
    assert unmatched_targets(gpt2, "all-linear") == 0  # Conv1D


def test_what_are_no_names_of_modules() -> None:
    for wrong in (None, 3):
        with pytest.raises(TypeError):
            unmatched_targets(nn.Linear(2, 2), wrong)
    with pytest.raises(TypeError, match="several names are expected, not one text"):
        matched_modules(nn.Linear(2, 2), "q_proj")
    with pytest.raises(AttributeError):
        matched_modules({}, ["q_proj"])


@pytest.mark.parametrize(
    ("names", "matched"),
    [
        (["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"], 2),
        (["layers.0.self_attn.q_proj"], 0),  # the end of a path
        (["language_model.model.layers.0.self_attn.q_proj", "lm_head"], 1),
        (["base_model.model.model.layers.0.self_attn.q_proj"], 1),
        (
            [
                "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
                "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight",
                "base_model.model.model.embed_tokens.lora_embedding_A",
                "base_model.model.layers.0.self_attn.q_proj.lora_A.weight",
            ],
            3,
        ),
        ({"model.norm.lora_magnitude_vector": torch.ones(2)}, 1),
        ([], 0),
    ],
)
def test_modules_are_matched_by_their_whole_path(names: Any, matched: int, tiny: Callable[..., Any]) -> None:
    assert matched_modules(llama(tiny), names) == matched


def test_an_adapter_is_verified_before_it_is_loaded(tiny: Callable[..., Any]) -> None:
    contract = contract_of(
        "matched_modules, unmatched_targets",
        "require(matched_modules(model, state) == len(state), id='all_match')\n"
        "    require(unmatched_targets(model, config.target_modules) == 0, id='each_target')",
        "model, config, state",
    )
    model, state = llama(tiny), {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(1)}
    og.verify(contract, model, SimpleNamespace(target_modules=["q_proj"]), state)
    og.verify(contract, model, SimpleNamespace(target_modules=None), state)  # PEFT knows the model's own
    with pytest.raises(og.GuardError) as caught:
        og.verify(contract, model, SimpleNamespace(target_modules=["q_proj", "q_prj"]), {"layers.0": 1, **state})
    assert [(v.rule_id, v.observed) for v in caught.value.violations] == [
        ("all_match", "matched_modules(model, state) = 1, len(state) = 2"),
        ("each_target", "unmatched_targets(model, config.target_modules) = 1"),
    ]
