"""Token ids of models of text and pictures, which ask for their table: `self.get_input_embeddings()(input_ids)`."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.llava.modeling_llava import LlavaModel

import llm_op_guard as og
from llm_op_guard.guard.reading import NotApplicable
from llm_op_guard.integrations.transformers.models import embedding_rows

VOCAB, PICTURE, PATCHES = 96, 90, 4
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EYE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = torch.tensor([[5, 9, 14, 71]])

pytestmark = pytest.mark.usefixtures("no_alarm")


@pytest.fixture
def llava() -> Any:
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=4, patch_size=2, projection_dim=32, **EYE),
        text_config=LlamaConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2, **TEXT),
        image_token_id=PICTURE,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config).eval()


@pytest.mark.parametrize(("bad", "unguarded"), [(VOCAB, IndexError), (-1, IndexError)])
def test_an_id_outside_the_table_is_named(llava: Any, bad: int, unguarded: type[Exception]) -> None:
    ids = IDS.clone()
    ids[0, 2] = bad
    with pytest.raises(unguarded, match="index out of range in self"):
        llava(input_ids=ids)
    with og.installed("transformers"), pytest.raises(IndexError) as caught:
        llava(input_ids=ids)
    assert isinstance(caught.value, og.GuardError)
    (violation,) = caught.value.violations
    assert (violation.operator, violation.rule_id) == ("LlavaModel.forward", "token_ids_in_table")
    assert violation.observed == f"input_ids[0, 2] = {bad} (of 4, 1 element is wrong)"
    assert violation.expected == f"0 <= input_ids < {VOCAB} (embedding_rows(self))"


def test_generate_names_it_before_anything_runs(llava: Any) -> None:
    ids = IDS.clone()
    ids[0, 2] = VOCAB
    with og.installed("transformers"), pytest.raises(og.GuardError) as caught:
        llava.generate(input_ids=ids, max_new_tokens=1)
    assert caught.value.violations[0].operator == "GenerationMixin.generate"


def test_the_last_id_and_pictures_pass(llava: Any) -> None:
    ids = torch.tensor([[5, *[PICTURE] * PATCHES, VOCAB - 1]])
    pixels = torch.randn(1, 3, 4, 4)
    plain = llava(input_ids=ids, pixel_values=pixels).logits
    with og.installed("transformers"):
        assert torch.equal(llava(input_ids=ids, pixel_values=pixels).logits, plain)
        assert llava.generate(input_ids=ids, pixel_values=pixels, max_new_tokens=2).shape[0] == 1


def test_embeddings_of_the_caller_are_not_ids(llava: Any) -> None:
    embeds = llava.get_input_embeddings()(IDS)
    with og.installed("transformers"):
        llava(inputs_embeds=embeds)


def test_a_placeholder_beyond_the_table_is_right_where_the_model_replaces_it() -> None:
    """Gemma 3 looks up 0 where a picture goes, whose id may lie outside of the table."""
    config = Gemma3Config(
        text_config=Gemma3TextConfig(head_dim=16, pad_token_id=0, **TEXT),
        vision_config={"image_size": 4, "patch_size": 2, "model_type": "siglip_vision_model", **EYE},
        mm_tokens_per_image=1,
        image_token_id=VOCAB + 1,
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    ids = torch.tensor([[5, VOCAB + 1, 7]])
    pixels = torch.randn(1, 3, 4, 4)
    plain = model(input_ids=ids, pixel_values=pixels).logits
    with og.installed("transformers"):
        assert torch.equal(model(input_ids=ids, pixel_values=pixels).logits, plain)


def test_the_table_is_the_one_that_the_model_asks_for(llava: Any) -> None:
    assert embedding_rows(llava) == embedding_rows(llava.model) == VOCAB
    llava.resize_token_embeddings(VOCAB + 3)
    assert embedding_rows(llava.model) == VOCAB + 3


def test_a_table_of_its_own_is_not_read(llava: Any) -> None:
    other = torch.nn.Embedding(7, 32)
    llava.model.get_input_embeddings = MethodType(lambda self: other, llava.model)
    with pytest.raises(NotApplicable):
        embedding_rows(llava.model)
    with og.installed("transformers"), pytest.raises(IndexError) as caught:
        llava(input_ids=torch.tensor([[5, 9]]))
    assert not isinstance(caught.value, og.GuardError)


def test_a_class_that_looks_elsewhere_is_not_read(llava: Any) -> None:
    class Elsewhere(LlavaModel):
        def get_input_embeddings(self) -> Any:
            return self.language_model.layers

    llava.model.__class__ = Elsewhere
    with pytest.raises(NotApplicable):
        embedding_rows(llava.model)


def test_a_property_is_not_run(llava: Any) -> None:
    class Lazy(LlavaModel):
        @property
        def embed_tokens(self) -> Any:
            raise AssertionError("code of the model was run")

    llava.model.__class__ = Lazy
    with pytest.raises(NotApplicable):
        embedding_rows(llava.model)


def test_qwen2_vl_is_looked_at_where_it_looks_up() -> None:
    config = Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        vision_config={"embed_dim": 32, "hidden_size": 32, "depth": 1, "num_heads": 2},
        image_token_id=PICTURE,
        video_token_id=PICTURE + 1,
    )
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config).eval()
    with og.installed("transformers"):
        model(input_ids=IDS)
        with pytest.raises(og.GuardError) as caught:
            model(input_ids=IDS + 60)
    assert caught.value.violations[0].operator == "Qwen2VLModel.forward"
