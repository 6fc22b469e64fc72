"""The operators whose guards are timed: a call that is right, others that are, and calls that break one rule each.

What is timed is a function that takes the operator's arguments and does nothing (`bare`), so that only checks count;
`real` is the operator itself. The contracts are those that `install` puts in front of it here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import FunctionType
from typing import Any

from llm_op_guard.contract.model import Contract
from llm_op_guard.frozen import frozen
from llm_op_guard.install.installer import Integration
from llm_op_guard.integrations.torch import TorchIntegration
from llm_op_guard.integrations.transformers import TransformersIntegration

Call = tuple[Any, ...]


@frozen
class Operator:
    """One operator. `broken` has the rule that a call breaks, and the call."""

    name: str
    bare: FunctionType
    real: FunctionType
    contract: Contract
    arguments: Call
    valid: list[Call]
    broken: list[tuple[str, Call]]
    before_real: Callable[[], None] | None = None


@frozen
class Absent:
    """An operator that cannot be timed here, and why."""

    name: str
    reason: str


def operators() -> list[Operator | Absent]:
    """All five, made anew."""
    return [rope(), _norm(), _attention(), _embedding(), _cache()]


def _found(integration: Integration, module: str, path: str) -> tuple[FunctionType, Contract] | str:
    """An operator of a library and its contract, or why it is not guarded."""
    home = importlib.import_module(module)
    for candidate in integration.candidates(home):
        if candidate.site == f"{module}.{path}":
            if isinstance(candidate.function, FunctionType) and candidate.contract is not None:
                return candidate.function, candidate.contract
            return candidate.reason
    return f"there is no {path} in {module}"


def _made(name: str, found: tuple[FunctionType, Contract] | str, **rest: Any) -> Operator | Absent:
    if isinstance(found, str):
        return Absent(name, found)
    return Operator(name=name, real=found[0], contract=found[1], **rest)


def _torch() -> Any:
    return importlib.import_module("torch")


# ---------------------------------------------------------------- rotary embedding


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """As in `modeling_llama`."""
    return q, k


def rope() -> Operator | Absent:
    """`apply_rotary_pos_emb` of Llama."""
    torch = _torch()
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16)
    cos, sin = torch.randn(1, 8, 16), torch.randn(1, 8, 16)
    both = cos.repeat(2, 1, 1)
    tokens_first = q.transpose(1, 2), k.transpose(1, 2), cos, sin
    return _made(
        "RoPE",
        _found(TransformersIntegration(), "transformers.models.llama.modeling_llama", "apply_rotary_pos_emb"),
        bare=apply_rotary_pos_emb,
        arguments=(q, k, cos, sin),
        valid=[(q, k, both, both), (*tokens_first, 2), (q.half(), k.half(), cos, sin), (q, q, cos, sin, -3)],
        broken=[
            ("k has the batch of q", (q, k[:1], cos, sin)),
            ("k has the positions of q", (q, k[:, :, :3], cos, sin)),
            ("k has the width of q", (q, k[..., :8], cos, sin)),
            ("q is floating", (q.long(), k, cos, sin)),
            ("k is floating", (q, k.long(), cos, sin)),
            ("k is on the device of q", (q, k.to("meta"), cos, sin)),
            ("cos has three dimensions", (q, k, cos[:, None], sin[:, None])),
            ("cos has batch 1 or that of q", (q[:1], k[:1], both, both)),
            ("cos has the positions of q", (q, k, cos[:, :1], sin[:, :1])),
            ("cos has the width of q", (q, k, cos[..., :1], sin[..., :1])),
            ("cos is floating", (q, k, cos.long(), sin.long())),
            ("cos is on the device of q", (q, k, cos.to("meta"), sin.to("meta"))),
            ("sin has the shape of cos", (q, k, both, sin)),
            ("sin has the dtype of cos", (q, k, cos, sin.double())),
            ("sin is on the device of cos", (q, k, cos, sin.to("meta"))),
            ("the width is even", (q[..., :15], k[..., :15], cos[..., :15], sin[..., :15])),
            ("heads are where unsqueeze_dim says", tokens_first),
            ("unsqueeze_dim is a whole number", (q, k, cos, sin, 1.0)),
        ],
    )


# ---------------------------------------------------------------- RMSNorm


def rms_norm(self: Any, hidden_states: Any) -> Any:
    """As `LlamaRMSNorm.forward`."""
    return hidden_states


def _norm() -> Operator | Absent:
    torch, llama = _torch(), importlib.import_module("transformers.models.llama.modeling_llama")

    class Norm(llama.LlamaRMSNorm):  # type: ignore[misc, name-defined]
        """With what dltype asks an object for that names sizes."""

        def get_dltype_scope(self) -> dict[str, int]:
            return {"width": self.weight.shape[-1]}

    norm, half = Norm(16), Norm(16).half()
    whole = Norm(16)
    whole.weight = torch.nn.Parameter(torch.ones(16, dtype=torch.int64), requires_grad=False)
    hidden = torch.randn(2, 8, 16)
    return _made(
        "RMSNorm",
        _found(TransformersIntegration(), llama.__name__, "LlamaRMSNorm.forward"),
        bare=rms_norm,
        arguments=(norm, hidden),
        valid=[(norm, hidden[0, 0]), (norm, hidden[:, None]), (half, hidden.half()), (norm, hidden.half())],
        broken=[
            ("the input has a dimension", (norm, torch.tensor(1.0))),
            ("the input is floating", (norm, hidden.long())),
            ("the weight is floating", (whole, hidden)),
            ("both are on one device", (norm, hidden.to("meta"))),
            ("the weight has the width of the input", (norm, hidden[..., :8])),
            ("an input of one column is not expanded", (norm, hidden[..., :1])),
        ],
    )


# ---------------------------------------------------------------- attention


def sdpa_attention_forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Any = None,
    **kwargs: Any,
) -> Any:
    """As in `transformers.integrations.sdpa_attention`."""
    return query, None


def _attention() -> Operator | Absent:
    torch, llama = _torch(), importlib.import_module("transformers.models.llama.modeling_llama")
    config = importlib.import_module("transformers").LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64
    )
    module, both_ways = llama.LlamaAttention(config, 0), llama.LlamaAttention(config, 0)
    both_ways.is_causal = False
    q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 12, 16), torch.randn(2, 2, 12, 16)
    mask = torch.ones(2, 1, 8, 12, dtype=torch.bool)
    return _made(
        "attention",
        _found(TransformersIntegration(), "transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
        bare=sdpa_attention_forward,
        arguments=(module, q, k, v, mask),
        valid=[
            (module, q, k, v, None),
            (module, q, k, v, mask.float()),
            (module, q, k, v, mask[0, 0]),
            (module, q, k, v, mask[:1, :, :1]),
            (module, q, k, v[..., :8], mask),
            (both_ways, q[:1], k, v, mask),
        ],
        broken=[
            ("the query has four dimensions", (module, q[0], k, v, mask)),
            ("the query is floating", (module, q.long(), k, v, mask)),
            ("keys have the batch of the query", (module, q, k[:1], v[:1], mask[:1])),
            ("keys have the width of the query", (module, q, k[..., :8], v, mask)),
            ("keys are floating", (module, q, k.long(), v, mask)),
            ("keys are on the device of the query", (module, q, k.to("meta"), v, mask)),
            ("values have the batch of the keys", (module, q, k, v[:1], mask)),
            ("values have the heads of the keys", (module, q, k, v[:, :1], mask)),
            ("values are as many as keys", (module, q, k, v[:, :, :3], mask)),
            ("values are floating", (module, q, k, v.long(), mask)),
            ("values are on the device of the query", (module, q, k, v.to("meta"), mask)),
            ("the mask has two dimensions or more", (module, q, k, v, mask[0, 0, 0])),
            ("the mask is boolean or floating", (module, q, k, v, mask.long())),
            ("the mask is of the queries", (module, q, k, v, mask[:, :, :3])),
            ("the mask is of the keys", (module, q, k, v, mask[..., :8])),
            ("the mask keeps its axis of keys", (module, q, k, v, mask[..., :1])),
            ("the mask is on the device of the query", (module, q, k, v, mask.to("meta"))),
            ("the mask has batch 1 or theirs", (module, q, k, v, mask.repeat(2, 1, 1, 1))),
            ("the mask has one head or theirs", (module, q, k, v, mask.repeat(1, 3, 1, 1))),
            ("heads are shared out evenly", (module, q[:, :3], k, v, mask)),
        ],
    )


# ---------------------------------------------------------------- embedding


def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """As in `torch.nn.functional`."""
    return weight


def _embedding() -> Operator | Absent:
    torch = _torch()
    ids, table = torch.arange(16).reshape(2, 8), torch.randn(32, 16)
    return _made(
        "embedding",
        _found(TorchIntegration(), "torch.nn.functional", "embedding"),
        bare=embedding,
        arguments=(ids, table, 0),
        valid=[(ids.int(), table), (ids[0, 0], table, -32), (ids, table.half(), 31)],
        broken=[
            ("ids are whole numbers", (ids.float(), table)),
            ("ids have 32 or 64 bits", (ids.to(torch.int8), table)),
            ("the table has two dimensions", (ids, table[0])),
            ("padding_idx is a row of the table", (ids, table, 32)),
        ],
    )


# ---------------------------------------------------------------- cache


def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
    """As `DynamicLayer.update`."""
    return key_states, value_states


def _cache() -> Operator | Absent:
    torch, caches = _torch(), importlib.import_module("transformers.cache_utils")

    class Layer(caches.DynamicLayer):  # type: ignore[misc, name-defined]
        """With what dltype asks an object for that names sizes; an empty layer has none."""

        def get_dltype_scope(self) -> dict[str, int]:
            if self.keys is None:
                return {}
            (b, g, _, d), (m, w, _, v) = self.keys.shape, self.values.shape
            return {"b": b, "g": g, "d": d, "m": m, "w": w, "v": v}

    keys, values = torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    k, v = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16)
    layer = Layer()
    layer.update(keys, values)
    held = layer.keys, layer.values

    def as_before() -> None:
        layer.keys, layer.values = held

    return _made(
        "cache update",
        _found(TransformersIntegration(), caches.__name__, "DynamicLayer.update"),
        bare=update,
        arguments=(layer, k, v),
        valid=[(Layer(), k, v), (layer, keys, values), (layer, k[:, :, :0], v[:, :, :0])],
        broken=[
            ("keys have four dimensions", (layer, k[0], v)),
            ("keys have the batch of the layer", (layer, k[:1], v)),
            ("keys have the heads of the layer", (layer, k[:, :1], v)),
            ("keys have the width of the layer", (layer, k[..., :8], v)),
            ("keys have the dtype of the layer", (layer, k.half(), v)),
            ("keys are on the device of the layer", (layer, k.to("meta"), v)),
            ("values have four dimensions", (layer, k, v[0])),
            ("values have the batch of the layer", (layer, k, v[:1])),
            ("values have the heads of the layer", (layer, k, v[:, :1])),
            ("values have the width of the layer", (layer, k, v[..., :8])),
            ("values are on the device of the layer", (layer, k, v.to("meta"))),
        ],
        before_real=as_before,
    )
