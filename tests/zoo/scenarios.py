"""What is done with every model: each scenario is a function of a specimen, and what it returns is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from inputs import TEXT_IDS, Given, drafting
from settings import DRAFTS_FOR, PROMPTS
from transformers.modeling_outputs import BaseModelOutput

BATCH, LENGTH, NEW = 2, 10, 4
# What a model may call the state that its next step goes on from.
_CACHES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")


class NotSupported(Exception):  # noqa: N818 - not an error: the type cannot do this
    """A scenario that makes no sense for a type, and why."""


def token_ids() -> torch.Tensor:
    """[2, 10], the same every time."""
    return torch.randint(*TEXT_IDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(11))


@dataclass
class Specimen:
    """A tiny model and what to feed it; `images` are arguments with a picture, or why there are none.

    `other` makes the model that generates with this one: its assistant, or the one that this one drafts for.
    `held` is how many tokens the cache held that greedy generation made by itself, where it can tell.
    """

    task: str
    model: Any
    other: Callable[[], Any]
    images: Given | str
    needs_images: bool = False
    held: int | None = None

    @property
    def is_seq2seq(self) -> bool:
        """Whether the decoder has ids of its own."""
        return bool(getattr(self.model.config, "is_encoder_decoder", False))

    @property
    def drafts(self) -> bool:
        """Whether the model only drafts tokens for another one."""
        return self.model.config.model_type in DRAFTS_FOR

    def text(self) -> Given:
        """A batch of token ids without padding; pictures too, for a model that cannot do without."""
        if self.drafts:
            return drafting(self.other(), token_ids(), torch.ones_like(token_ids()))
        if self.needs_images and isinstance(self.images, dict):
            return dict(self.images)
        ids = token_ids()
        # Some classifiers read the state at the end of the sequence.
        end = getattr(self.model.config, "eos_token_id", None)
        if self.task == "sequence classification" and isinstance(end, int):
            ids[:, -1] = end
        given = {"input_ids": ids}
        if self.is_seq2seq and self.task != "sequence classification":
            given["decoder_input_ids"] = ids.flip(1)[:, :5].contiguous()
        return given

    def padded(self) -> Given:
        """The same with padding on the left of the first row."""
        given = {"input_ids": token_ids()} if self.drafts else self.text()
        if "input_ids" not in given:
            return given
        mask = torch.ones_like(given["input_ids"])
        mask[0, :2] = 0  # placeholders of pictures come after
        ids = given["input_ids"].masked_fill(mask == 0, 0)
        return drafting(self.other(), ids, mask) if self.drafts else {**given, "input_ids": ids, "attention_mask": mask}

    def labels(self) -> torch.Tensor:
        """What to learn: a class for each row, or the ids themselves, the padding left out."""
        if self.task == "sequence classification":
            return torch.tensor([1, 0])
        given = self.text()
        ids: torch.Tensor = given["decoder_input_ids" if "decoder_input_ids" in given else "input_ids"].clone()
        ids[0, :2] = -100
        return ids


@torch.no_grad()
def prefill(specimen: Specimen) -> Any:
    return specimen.model(**specimen.text())


@torch.no_grad()
def decode(specimen: Specimen) -> Any:
    """One step that goes on from the cache of a prefill."""
    given = specimen.padded()
    first = specimen.model(**given, use_cache=True)
    name = next((name for name in _CACHES if first.get(name) is not None), None)
    if name is None:
        raise NotSupported("the outputs carry no cache")
    following = first.logits[:, -1:].argmax(-1)
    mask = given.get("attention_mask")
    if specimen.is_seq2seq:
        step = {"decoder_input_ids": following, "encoder_outputs": BaseModelOutput(first.encoder_last_hidden_state)}
    else:
        step = {"input_ids": following}
        mask = torch.cat([mask, mask[:, -1:]], 1) if mask is not None else None
    masked = {} if mask is None else {"attention_mask": mask}
    return specimen.model(**step, **masked, **{name: first[name]}, use_cache=True)


@torch.no_grad()
def left_padded(specimen: Specimen) -> Any:
    return specimen.model(**specimen.padded())


@torch.no_grad()
def with_images(specimen: Specimen) -> Any:
    """A prefill with a picture in each row."""
    if isinstance(specimen.images, str):
        raise NotSupported(specimen.images)
    return specimen.model(**specimen.images)


def backward(specimen: Specimen) -> Any:
    """Loss and gradients in training mode, dropout included."""
    model = specimen.model
    if specimen.drafts:
        raise NotSupported("it takes no labels")
    model.train()
    try:
        given = specimen.padded()
        outputs = model(**given, labels=specimen.labels())
        outputs.loss.backward()
        return outputs.loss, {name: p.grad for name, p in model.named_parameters()}
    finally:
        model.eval()
        model.zero_grad(set_to_none=True)


def _generate(**settings: Any) -> Callable[[Specimen], Any]:
    def generate(specimen: Specimen) -> Any:
        if not callable(getattr(specimen.model, "generate", None)):
            raise NotSupported("it has no `generate`")
        model = specimen.model
        more = {"num_beams": 1, "num_return_sequences": 1, **settings}  # MusicGen reads them before they have defaults
        assisted = more.pop("assisted", False)
        if specimen.drafts and not assisted:
            raise NotSupported("it drafts for another model")
        given = {"input_ids": token_ids()} if specimen.drafts else specimen.padded()
        given.pop("decoder_input_ids", None)
        if (length := PROMPTS.get(model.config.model_type)) is not None:
            given = {name: value[:, -length:] for name, value in given.items()}
        if assisted:
            assistant = specimen.other()
            if specimen.drafts:
                model, assistant = assistant, model
                assistant.generation_config.num_assistant_tokens = 3  # which checkpoints tell
            more["assistant_model"] = assistant
            given = {name: value[:1] for name, value in given.items()}
        outputs = model.generate(
            **given, max_new_tokens=NEW, min_new_tokens=NEW, disable_compile=True,
            return_dict_in_generate=True, output_scores=True, **more,
        )  # fmt: skip
        held = _tokens_held(outputs)
        if not settings.keys() - {"do_sample"}:
            specimen.held = held
        elif "cache_implementation" in settings and None not in (held, specimen.held) and held != specimen.held:
            # BLIP keeps the picture's keys apart in a dynamic cache only; to another it appends them at every step, and
            # fails, or goes on with a mask that is too short for it.
            raise NotSupported(f"such a cache holds {held} tokens where a dynamic one holds {specimen.held}")
        return outputs

    return generate


def _tokens_held(outputs: Any) -> int | None:
    cache = next((outputs[name] for name in _CACHES if outputs.get(name) is not None), None)
    try:
        length = cache.get_seq_length()  # type: ignore[union-attr]
    except (AttributeError, ValueError):  # states that count no tokens
        return None
    return None if length is None else int(length)


ENCODERS = ("sequence classification", "masked LM")


def scenarios_for(task: str) -> dict[str, Callable[[Specimen], Any]]:
    """The scenarios that make sense for a task, by name."""
    return {
        name: scenario
        for name, scenario in SCENARIOS.items()
        if (name != "images" or task == "vision-language")
        and (task not in ENCODERS or name in ("prefill", "left-padded", "backward"))
    }


SCENARIOS: dict[str, Callable[[Specimen], Any]] = {
    "prefill": prefill,
    "decode": decode,
    "left-padded": left_padded,
    "images": with_images,
    "backward": backward,
    "greedy": _generate(do_sample=False),
    "sampling": _generate(do_sample=True, temperature=1.5, top_k=20),
    "beams": _generate(do_sample=False, num_beams=3),
    "assisted": _generate(do_sample=False, assisted=True),
    "static cache": _generate(do_sample=False, cache_implementation="static"),
    "quantised cache": _generate(
        do_sample=False, cache_implementation="quantized", cache_config={"backend": "fp8"}
    ),
    "quantised cache (quanto)": _generate(
        do_sample=False, cache_implementation="quantized", cache_config={"backend": "quanto"}
    ),
}  # fmt: skip
