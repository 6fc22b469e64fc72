"""The rules of the contracts as a careful person writes them at the head of a function: `if`, and `raise`.

Each shape, dtype and device is read once; taking a shape apart checks its rank. Nothing is called that can be said in
place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def floating_dtypes(torch: Any) -> frozenset[Any]:
    """Every real floating-point dtype of this PyTorch."""
    dtypes = (value for value in vars(torch).values() if isinstance(value, torch.dtype))
    return frozenset(dtype for dtype in dtypes if dtype.is_floating_point)


def checks(torch: Any) -> dict[str, Callable[..., Any]]:
    """The function of each operator."""
    return {
        "RoPE": _rope(torch),
        "RMSNorm": _norm(torch),
        "attention": _attention(torch),
        "embedding": _embedding(torch),
        "cache update": update,
    }


def _rope(torch: Any) -> Callable[..., Any]:
    floating = floating_dtypes(torch)

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        if not isinstance(unsqueeze_dim, int):
            raise TypeError("unsqueeze_dim")
        if unsqueeze_dim in (1, -3):
            B, _, L, D = q.shape
            kB, _, kL, kD = k.shape
        elif unsqueeze_dim in (2, -2):
            B, L, _, D = q.shape
            kB, kL, _, kD = k.shape
        else:
            return q, k
        if kB != B or kL != L or kD != D:
            raise ValueError("k: sizes")
        if q.dtype not in floating or k.dtype not in floating:
            raise ValueError("q, k: dtype")
        device = q.device
        if k.device != device:
            raise ValueError("k: device")
        shape, dtype = cos.shape, cos.dtype
        cB, cL, cD = shape
        if (cB != 1 and cB != B) or cL != L or cD != D:
            raise ValueError("cos: sizes")
        if dtype not in floating:
            raise ValueError("cos: dtype")
        if cos.device != device or sin.device != device:
            raise ValueError("cos, sin: device")
        if sin.shape != shape or sin.dtype != dtype:
            raise ValueError("sin: unlike cos")
        if D % 2 != 0:
            raise ValueError("D is odd")
        return q, k

    return apply_rotary_pos_emb


def _norm(torch: Any) -> Callable[..., Any]:
    floating = floating_dtypes(torch)

    def rms_norm(self: Any, hidden_states: Any) -> Any:
        weight = self.weight
        if hidden_states.dtype not in floating or weight.dtype not in floating:
            raise ValueError("dtype")
        if hidden_states.device != weight.device:
            raise ValueError("device")
        shape, scale = hidden_states.shape, weight.shape
        if not shape:
            raise ValueError("no dimension")
        if len(scale) != 1 or scale[0] != shape[-1]:
            if len(scale) > len(shape):
                raise ValueError("the weight has more dimensions")
            for there, here in zip(reversed(scale), reversed(shape), strict=False):
                if there != 1 and there != here:
                    raise ValueError("the weight does not fit")
        return hidden_states

    return rms_norm


def _attention(torch: Any) -> Callable[..., Any]:
    floating, boolean = floating_dtypes(torch), torch.bool

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
        B, H, L, E = query.shape
        M, G, S, W = key.shape
        vM, vG, vS, _ = value.shape
        if is_causal is None:
            is_causal = getattr(module, "is_causal", L > 1)
        if W != E or (is_causal and M != B):
            raise ValueError("key: sizes")
        if vM != M or vG != G or vS != S:
            raise ValueError("value: sizes")
        if query.dtype not in floating or key.dtype not in floating or value.dtype not in floating:
            raise ValueError("dtype")
        device = query.device
        if key.device != device or value.device != device:
            raise ValueError("device")
        if H != 1 and H % G != 0:
            raise ValueError("heads")
        if attention_mask is not None:
            shape, dtype = attention_mask.shape, attention_mask.dtype
            rank = len(shape)
            if rank < 2:
                raise ValueError("mask: dimensions")
            rows, columns = shape[-2], shape[-1]
            if (rows != 1 and rows != L) or (columns != 1 and columns != S):
                raise ValueError("mask: sizes")
            if is_causal and columns == 1 and L > 1 and S > 1:
                raise ValueError("mask: one column")
            if dtype != boolean and dtype not in floating:
                raise ValueError("mask: dtype")
            if attention_mask.device != device:
                raise ValueError("mask: device")
            if rank == 4 and (shape[0] not in (1, B, M) or shape[1] not in (1, H, G)):
                raise ValueError("mask: batch or heads")
        return query, None

    return sdpa_attention_forward


def _embedding(torch: Any) -> Callable[..., Any]:
    long, short = torch.int64, torch.int32

    def embedding(
        input: Any,
        weight: Any,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        dtype = input.dtype
        if dtype != long and dtype != short:
            raise ValueError("input: dtype")
        rows, _ = weight.shape
        if padding_idx and not -rows <= padding_idx < rows:
            raise ValueError("padding_idx")
        return weight

    return embedding


def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
    """`DynamicLayer.update`, whose layer may be empty."""
    keys, values = self.keys, self.values
    if keys is not None and keys.ndim == 4:
        B, G, _, D = keys.shape
        b, g, _, d = key_states.shape
        if b != B or g != G or d != D:
            raise ValueError("key_states: sizes")
        if key_states.dtype != keys.dtype or key_states.device != keys.device:
            raise ValueError("key_states: dtype or device")
    if values is not None and values.ndim == 4:
        M, W, _, V = values.shape
        m, w, _, v = value_states.shape
        if m != M or w != W or v != V:
            raise ValueError("value_states: sizes")
        if value_states.device != values.device:
            raise ValueError("value_states: device")
    return key_states, value_states
