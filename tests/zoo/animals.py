"""The types of the zoo: which there are in the installed Transformers, and a tiny random model of each."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from settings import DRAFTS_FOR, SETTINGS
from shrink import Shrinker
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TASKS = {
    "causal LM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq LM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision-language": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "masked LM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
}


@dataclass(frozen=True)
class Animal:
    """One model type for one task, and the class that Transformers names for it."""

    task: str
    type: str
    cls: str

    @property
    def name(self) -> str:
        """How it is called on the command line and in reports."""
        return f"{self.task}:{self.type}"


def all_animals() -> list[Animal]:
    """Every type of every task; a class that stands under several names of a task is there several times."""
    return [
        Animal(task, model_type, names if isinstance(names, str) else names[0])
        for task, mapping in TASKS.items()
        for model_type, names in getattr(modeling_auto, mapping).items()
    ]


class Breeder:
    """Makes models of one type, always the same for the same seed.

    Raises what Transformers raises where the type cannot be built.
    """

    def __init__(self, animal: Animal) -> None:
        self.animal = animal
        self.cls = getattr(transformers, animal.cls)
        shrinker = Shrinker(SETTINGS.get(animal.type, {}))
        config = shrinker.config(CONFIG_MAPPING[animal.type])
        wanted = self.cls.config_class
        if wanted is not None and not isinstance(config, wanted):
            # The class is of a part of a composite.
            parts = [config.get_text_config(decoder=True), *vars(config).values()]
            config = next((part for part in parts if isinstance(part, wanted)), config)
        if animal.task == "causal LM" and getattr(config, "is_decoder", None) is False:
            config.is_decoder = True  # those that are encoders first would have neither causal masks nor caches
        self.config = config

    def other(self) -> Breeder:
        """Makes the model that generates with one of this type: of the same type, or the one that it drafts for."""
        if self.animal.type not in DRAFTS_FOR:
            return self
        return Breeder(next(a for a in all_animals() if a.name == f"causal LM:{DRAFTS_FOR[self.animal.type]}"))

    def model(self, attention: str, seed: int) -> Any:
        """A model in float32, in evaluation mode."""
        torch.manual_seed(seed)
        model = self.cls._from_config(copy.deepcopy(self.config), attn_implementation=attention)
        return model.float().eval()
