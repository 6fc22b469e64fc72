"""The forms in which vision-language models take pictures, and a search for the one that a model takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from shrink import IMAGE, PATCH, POSITIONS, WIDTH

# Below: padding, beginning, end; above: what small configurations use as placeholders.
TEXT_IDS = (12, 90)
Given = dict[str, Any]

_SIDE = IMAGE // PATCH
_FEATURES = re.compile(r"features:? *(?:torch\.Size\(\[)?(\d+)")


def images_for(model: Any, text: torch.Tensor) -> Given | str:
    """Arguments with a picture for each row of `text` that the model takes, or why none of the known forms is.

    How many placeholders stand for a picture is what the model itself says when there is another number of them.
    """
    complaint = ""
    for token in (*_image_tokens(model.config), None):
        for pixels in _forms(model, len(text)):
            count = 4
            for _ in range(3):
                given = {**_with_placeholders(text, token, count, model), **pixels}
                try:
                    with torch.no_grad():
                        model(**given)
                except Exception as error:  # whatever a model says to a form that it does not take
                    complaint = complaint or f"{type(error).__name__}: {' '.join(str(error).split())}"
                    told = _FEATURES.search(str(error))
                    features = int(told[1]) if told is not None else 0
                    if features > POSITIONS:  # some count the numbers in them
                        features //= WIDTH
                    if features in (0, count * len(text)):
                        break
                    count = features // len(text)
                else:
                    return given
    return f"none of the known forms of images is taken; to the first: {complaint}"


@torch.no_grad()
def drafting(main: Any, text: torch.Tensor, mask: torch.Tensor) -> Given:
    """What a drafting model is given for the token after `text`, by the model that it drafts for."""
    told = main(input_ids=text, attention_mask=mask, output_hidden_states=True, return_shared_kv_states=True)
    last = main.get_input_embeddings()(text[:, -1:])
    return {
        "inputs_embeds": torch.cat([last, told.hidden_states[-1][:, -1:]], -1),
        "shared_kv_states": told.shared_kv_states,
        "position_ids": mask.sum(1, keepdim=True) - 1,
        "attention_mask": mask,
    }


def _image_tokens(config: Any) -> list[int]:
    names = ("image_token_id", "image_token_index", "image_patch_id", "img_token_id")
    return [token for name in names if isinstance(token := getattr(config, name, None), int)][:1]


def _with_placeholders(text: torch.Tensor, token: int | None, count: int, model: Any) -> Given:
    ids = text
    if token is not None:
        ids = torch.cat([text[:, :2], torch.full((len(text), count), token), text[:, 2:]], 1)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    taken = inspect.signature(model.forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in taken:
            given[name] = (ids == token).int() if token is not None else torch.zeros_like(ids).int()
    if "input_ids" not in taken:
        given = {}
    if "qformer_input_ids" in taken:
        given["qformer_input_ids"] = text
    if "image_attention_mask" in taken:
        given["image_attention_mask"] = torch.ones(*ids.shape, 1)
    if "image_embeds_position_mask" in taken:
        given["image_embeds_position_mask"] = torch.zeros_like(ids).index_fill(1, torch.arange(8) + 2, 1)
    if "bbox" in taken:
        given["bbox"] = torch.zeros(*ids.shape, 4, dtype=torch.long)
    if "decoder_input_ids" in taken:
        given["decoder_input_ids"] = text.flip(1)[:, :5].contiguous()
    return given


def _forms(model: Any, rows: int) -> Iterator[Given]:
    """Pixels as planes, as a list of patches with a grid, as several pictures a row, as tiles of one picture."""
    taken = inspect.signature(model.forward).parameters
    draw = torch.Generator().manual_seed(5)

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    if "image_grid_thw" in taken:
        vision = getattr(model.config, "vision_config", model.config)
        patch = getattr(vision, "patch_size", PATCH)
        times = getattr(vision, "temporal_patch_size", 1)
        grid = torch.tensor([[1, _SIDE, _SIDE]] * rows)
        for width in (3 * times * patch * patch, 3 * patch * patch):
            yield {"pixel_values": pixels(rows * _SIDE * _SIDE, width), "image_grid_thw": grid}
        yield {"pixel_values": pixels(rows * _SIDE * _SIDE, 3, patch, patch), "image_grid_thw": grid}
    sizes = torch.tensor([[IMAGE, IMAGE]] * rows)
    if "image_sizes" in taken:
        yield {"pixel_values": pixels(rows, 2, 3, IMAGE, IMAGE), "image_sizes": sizes}
        yield {"pixel_values": pixels(rows, 3, IMAGE, IMAGE), "image_sizes": sizes}
    yield {"pixel_values": pixels(rows, 3, IMAGE, IMAGE)}
    yield {"pixel_values": pixels(rows, 1, 3, IMAGE, IMAGE)}
    if "flattened_patches" in taken:  # row and column of each patch stand before its pixels
        vision = getattr(model.config, "vision_config", model.config)
        width = 3 * getattr(vision, "patch_size", PATCH) ** 2
        place = torch.cartesian_prod(torch.arange(1.0, _SIDE + 1), torch.arange(1.0, _SIDE + 1))
        patches = torch.cat([place.expand(rows, -1, -1), pixels(rows, _SIDE * _SIDE, width)], 2)
        yield {"flattened_patches": patches}
