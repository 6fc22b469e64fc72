"""The same operators under libraries that check annotations of shapes: as much of the rules as they can say.

They read annotations of a function; here these are put on the functions of `operators`, which do nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Annotated, Any

from llm_op_guard.benching import operators

_BARE: dict[str, Any] = {
    "RoPE": operators.apply_rotary_pos_emb,
    "RMSNorm": operators.rms_norm,
    "attention": operators.sdpa_attention_forward,
    "embedding": operators.embedding,
    "cache update": operators.update,
}


def annotated(function: FunctionType, annotations: Mapping[str, Any]) -> FunctionType:
    """A function of its own with the same code and these annotations."""
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = dict(annotations)
    return copy


def by_jaxtyping(torch: Any) -> dict[str, Callable[..., Any]]:
    """`@jaxtyped(typechecker=beartype)`. Raises ImportError where one of the two is not installed.

    `#b` is b or 1, `{…}` is evaluated at the call, other letters are sizes that agree. There is no annotation for a
    device, or for two arguments of one dtype.
    """
    jaxtyping: Any = importlib.import_module("jaxtyping")
    beartype = importlib.import_module("beartype").beartype
    tensor = torch.Tensor
    Float, Shaped, Bool = jaxtyping.Float, jaxtyping.Shaped, jaxtyping.Bool
    ids = jaxtyping.Int32[tensor, "..."] | jaxtyping.Int64[tensor, "..."]
    of_heads, of_tokens = "#b #h #l #s", "#l #s"
    mask = Bool[tensor, of_heads] | Float[tensor, of_heads] | Bool[tensor, of_tokens] | Float[tensor, of_tokens] | None
    held = "{{self.{0}.shape[0]}} {{self.{0}.shape[1]}} _ {{self.{0}.shape[3]}}"
    said: dict[str, dict[str, Any]] = {
        "RoPE": {
            "q": Float[tensor, "b h l d"],
            "k": Float[tensor, "b g l d"],
            "cos": Float[tensor, "#b l d"],
            "sin": Float[tensor, "#b l 2*(d//2)"],
            "unsqueeze_dim": int,
        },
        "RMSNorm": {"hidden_states": Float[tensor, "... {self.weight.shape[-1]}"]},
        "attention": {
            "query": Float[tensor, "b h l e"],
            "key": Float[tensor, "b g s e"],
            "value": Float[tensor, "b g+h%g s v"],
            "attention_mask": mask,
        },
        "embedding": {"input": ids, "weight": Shaped[tensor, "r _"], "padding_idx": int | None},
        "cache update": {
            "key_states": Shaped[tensor, held.format("keys")],
            "value_states": Shaped[tensor, held.format("values")],
        },
    }
    typed = jaxtyping.jaxtyped(typechecker=beartype)
    return {name: typed(annotated(_BARE[name], annotations)) for name, annotations in said.items()}


def by_dltype(torch: Any) -> dict[str, Callable[..., Any]]:
    """`@dltyped()`. Raises ImportError where it is not installed.

    A name is a size that agrees, a constraint is arithmetic on sizes, `self` may hand in sizes. There are no unions
    but with None, and there is nothing for a device or for two arguments of one dtype.
    """
    dltype = importlib.import_module("dltype")
    tensor = torch.Tensor

    def of(kind: Any, shape: str, *constraints: str) -> Any:
        return Annotated[tensor, kind(shape, constraints=set(constraints)) if constraints else kind[shape]]

    Float, Shaped = dltype.FloatTensor, dltype.TensorTypeBase
    said: dict[str, dict[str, Any]] = {
        "RoPE": {
            "q": of(Float, "b h l d", "d%2==0"),
            "k": of(Float, "b g l d"),
            "cos": of(Float, "t l d"),
            "sin": of(Float, "t l d"),
        },
        "RMSNorm": {"hidden_states": of(Float, "... width")},
        "attention": {
            "query": of(Float, "b h l e"),
            "key": of(Float, "b g s e"),
            "value": of(Float, "b g+h%g s v"),
            "attention_mask": of(Shaped, "... l s") | None,
        },
        "embedding": {"input": of(dltype.IntTensor, "..."), "weight": of(Shaped, "r c")},
        "cache update": {"key_states": of(Shaped, "b g l d"), "value_states": of(Shaped, "m w l v")},
    }
    methods = ("RMSNorm", "cache update")
    return {
        name: dltype.dltyped(*(("self",) if name in methods else ()))(annotated(_BARE[name], annotations))
        for name, annotations in said.items()
    }
