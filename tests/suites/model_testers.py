"""A test case of Transformers' own mixins for a model type: the tiny model and the inputs that the mixins ask for.

Each model's own test file, which has these upstream, is not in the source distribution. Configurations and pictures
are those of the zoo.
"""

from __future__ import annotations

import copy
import unittest
from typing import Any

import torch
import transformers
from inputs import TEXT_IDS, images_for
from settings import SETTINGS
from shrink import IMAGE, Shrinker
from suite_settings import TYPES
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# As many rows as some tests need, which make up more of their own otherwise; ids below TEXT_IDS are special.
BATCH, LENGTH, IMAGE_TOKEN = 7, 10, 5

_MAPPINGS = (
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
)


class ModelTester:
    """What the mixins know of a model type; the attributes are named as upstream."""

    is_training = True
    batch_size = BATCH

    def __init__(self, model_type: str) -> None:
        self._config = Shrinker(SETTINGS.get(model_type, {})).config(CONFIG_MAPPING[model_type])
        if hasattr(self._config, "image_token_id"):
            self._config.image_token_id = IMAGE_TOKEN  # tests make vocabularies smaller than the id of the zoo
        classes = _classes(model_type)
        if self._config.is_encoder_decoder:
            classes.pop("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", None)  # decoders alone, which take other inputs
        self.causal_lm_class = next(iter(classes.get("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", ())), None)
        if self.causal_lm_class is not None:
            self._config.pad_token_id = 0  # the training test prompts with the tokens 1 to 19, and opt pads with 1
        self.model_classes = tuple(dict.fromkeys(cls for found in classes.values() for cls in found))
        self._inputs = self._given()
        self._tell_sizes()

    def get_config(self) -> Any:
        """A configuration that the test may change."""
        return copy.deepcopy(self._config)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """The same, and arguments of `forward`."""
        return self.get_config(), copy.deepcopy(self._inputs)

    def _given(self) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(5)
        ids = torch.randint(*TEXT_IDS, (BATCH, LENGTH), generator=draw)
        main = self.model_classes[0].main_input_name
        if main == "pixel_values":
            return {main: torch.randn(BATCH, 3, IMAGE, IMAGE, generator=draw)}
        if hasattr(self._config, "vision_config"):
            torch.manual_seed(0)
            given = images_for(self.model_classes[-1](self.get_config()).eval(), ids)
            if isinstance(given, str):
                raise ValueError(given)
            return given
        if main == "input_features":
            shape = BATCH, self._config.num_mel_bins, 2 * self._config.max_source_positions
            given = {main: torch.randn(*shape, generator=draw)}
        else:
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self._config.is_encoder_decoder:
            ids[:, -1] = self._config.eos_token_id  # some classifiers read the state at the end of the sequence
            given["decoder_input_ids"] = ids.clone()
            given["decoder_attention_mask"] = torch.ones_like(ids)
        return given

    def _tell_sizes(self) -> None:
        text = self._config.get_text_config()
        for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
            if (value := getattr(text, name, None)) is not None:
                setattr(self, name, value)
        ids = self._inputs.get("decoder_input_ids", self._inputs.get("input_ids"))
        if ids is not None:
            self.seq_length: int = ids.shape[1]
        else:
            self.image_size, self.patch_size = self._config.image_size, self._config.patch_size
            self.mask_length = (self.image_size // self.patch_size) ** 2
            self.seq_length = self.mask_length + 1
            self.num_masks = self.seq_length // 2
        if hasattr(self._config, "vision_config"):
            self.text_config, self.vision_config = text.to_dict(), self._config.vision_config.to_dict()
        if "input_features" in self._inputs:
            self.encoder_seq_length = self.key_length = self._config.max_source_positions


def _classes(model_type: str) -> dict[str, list[Any]]:
    """The model with each of its heads, by mapping."""
    found: dict[str, list[Any]] = {}
    for mapping in _MAPPINGS:
        names = getattr(modeling_auto, mapping).get(model_type, ())
        found[mapping] = [getattr(transformers, name) for name in ([names] if isinstance(names, str) else names)]
    return found


def test_case(model_type: str, common: type, training: type) -> type[unittest.TestCase]:
    """The test case of a model type; `training` is a mixin for those that are causal LMs first."""
    tester = ModelTester(model_type)
    settings = {"model_tester": tester, "all_model_classes": tester.model_classes, **TYPES[model_type]}
    mixins = (common, training) if tester.causal_lm_class is not None else (common,)
    return type(model_type, (*mixins, unittest.TestCase), settings)
