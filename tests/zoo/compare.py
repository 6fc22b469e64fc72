"""Whether two results are the same, bit for bit: outputs of models, caches within them, gradients, tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

Leaf = tuple[str, Any]


def leaves(result: Any) -> list[Leaf]:
    """The tensors in a result, copied, and everything else as it is; each with the way to it."""
    return list(_walk(result, "", set()))


def _walk(value: Any, path: str, inside: set[int]) -> Iterator[Leaf]:
    if isinstance(value, torch.Tensor):
        yield path, value.detach().clone()
    elif isinstance(value, Mapping):
        for key in value:
            yield from _walk(value[key], f"{path}.{key}", inside)
    elif isinstance(value, list | tuple):
        yield f"{path}#", len(value)
        for place, item in enumerate(value):
            yield from _walk(item, f"{path}[{place}]", inside)
    elif isinstance(value, bool | int | float | complex | str | bytes | None | torch.dtype | torch.device | torch.Size):
        yield path, repr(value)
    elif _is_state(value) and id(value) not in inside:
        yield f"{path}:", type(value).__qualname__
        for name, attribute in sorted(vars(value).items()):
            yield from _walk(attribute, f"{path}.{name}", inside | {id(value)})
    else:
        yield path, type(value).__qualname__


def _is_state(value: Any) -> bool:
    """Caches, their layers and the like, but neither models nor configurations."""
    return (
        type(value).__module__.partition(".")[0] == "transformers"
        and hasattr(value, "__dict__")
        and not isinstance(value, torch.nn.Module | PreTrainedConfig | type)
    )


def difference(ones: list[Leaf], others: list[Leaf]) -> str | None:
    """Where two results differ first and how; None where they are the same, NaNs and signs of zeros included."""
    for (path, one), (other_path, other) in zip(ones, others, strict=False):
        if path != other_path:
            return f"{path} against {other_path}"
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if (why := _tensors_differ(one, other)) is not None:
                return f"{path or 'result'}: {why}"
        elif isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor) or one != other:
            return f"{path or 'result'}: {one!r:.80} against {other!r:.80}"
    if len(ones) != len(others):
        return f"{len(ones)} parts against {len(others)}"
    return None


def _tensors_differ(one: torch.Tensor, other: torch.Tensor) -> str | None:
    facts = [(t.dtype, tuple(t.shape), t.stride(), t.device, t.layout) for t in (one, other)]
    if facts[0] != facts[1]:
        return f"{facts[0]} against {facts[1]}"
    if torch.equal(_bits(one), _bits(other)):
        return None
    return f"{int((one != other).sum())} of {one.numel()} numbers differ in a tensor of shape {tuple(one.shape)}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
