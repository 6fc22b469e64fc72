"""The same rules by `torch._check(condition, message)`, PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llm_op_guard.benching.by_hand import floating_dtypes


def checks(torch: Any) -> dict[str, Callable[..., Any]]:
    """The function of each operator."""
    return {
        "RoPE": _rope(torch),
        "RMSNorm": _norm(torch),
        "attention": _attention(torch),
        "embedding": _embedding(torch),
        "cache update": _update(torch),
    }


def _rope(torch: Any) -> Callable[..., Any]:
    floating, check = floating_dtypes(torch), torch._check

    def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        check(isinstance(unsqueeze_dim, int), lambda: "unsqueeze_dim")
        if unsqueeze_dim in (1, -3):
            B, _, L, D = q.shape
            kB, _, kL, kD = k.shape
        elif unsqueeze_dim in (2, -2):
            B, L, _, D = q.shape
            kB, kL, _, kD = k.shape
        else:
            return q, k
        check(kB == B and kL == L and kD == D, lambda: "k: sizes")
        check(q.dtype in floating and k.dtype in floating, lambda: "q, k: dtype")
        device = q.device
        check(k.device == device, lambda: "k: device")
        shape, dtype = cos.shape, cos.dtype
        cB, cL, cD = shape
        check((cB == 1 or cB == B) and cL == L and cD == D, lambda: "cos: sizes")
        check(dtype in floating, lambda: "cos: dtype")
        check(cos.device == device and sin.device == device, lambda: "cos, sin: device")
        check(sin.shape == shape and sin.dtype == dtype, lambda: "sin: unlike cos")
        check(D % 2 == 0, lambda: "D is odd")
        return q, k

    return apply_rotary_pos_emb


def _norm(torch: Any) -> Callable[..., Any]:
    floating, check = floating_dtypes(torch), torch._check

    def rms_norm(self: Any, hidden_states: Any) -> Any:
        weight = self.weight
        check(hidden_states.dtype in floating and weight.dtype in floating, lambda: "dtype")
        check(hidden_states.device == weight.device, lambda: "device")
        shape, scale = hidden_states.shape, weight.shape
        check(len(shape) > 0, lambda: "no dimension")
        if len(scale) != 1 or scale[0] != shape[-1]:
            check(len(scale) <= len(shape), lambda: "the weight has more dimensions")
            for there, here in zip(reversed(scale), reversed(shape), strict=False):
                check(there == 1 or there == here, lambda: "the weight does not fit")
        return hidden_states

    return rms_norm


def _attention(torch: Any) -> Callable[..., Any]:
    floating, boolean, check = floating_dtypes(torch), torch.bool, torch._check

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
        check(W == E and (not is_causal or M == B), lambda: "key: sizes")
        check(vM == M and vG == G and vS == S, lambda: "value: sizes")
        check(query.dtype in floating and key.dtype in floating and value.dtype in floating, lambda: "dtype")
        device = query.device
        check(key.device == device and value.device == device, lambda: "device")
        check(H == 1 or H % G == 0, lambda: "heads")
        if attention_mask is not None:
            shape, dtype = attention_mask.shape, attention_mask.dtype
            rank = len(shape)
            check(rank >= 2, lambda: "mask: dimensions")
            rows, columns = shape[-2], shape[-1]
            check((rows == 1 or rows == L) and (columns == 1 or columns == S), lambda: "mask: sizes")
            check(not is_causal or columns != 1 or L == 1 or S == 1, lambda: "mask: one column")
            check(dtype == boolean or dtype in floating, lambda: "mask: dtype")
            check(attention_mask.device == device, lambda: "mask: device")
            check(
                rank != 4 or (shape[0] in (1, B, M) and shape[1] in (1, H, G)),
                lambda: "mask: batch or heads",
            )
        return query, None

    return sdpa_attention_forward


def _embedding(torch: Any) -> Callable[..., Any]:
    long, short, check = torch.int64, torch.int32, torch._check

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
        check(dtype in (long, short), lambda: "input: dtype")
        rows, _ = weight.shape
        check(not padding_idx or -rows <= padding_idx < rows, lambda: "padding_idx")
        return weight

    return embedding


def _update(torch: Any) -> Callable[..., Any]:
    check = torch._check

    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = self.keys, self.values
        if keys is not None and keys.ndim == 4:
            B, G, _, D = keys.shape
            b, g, _, d = key_states.shape
            check(b == B and g == G and d == D, lambda: "key_states: sizes")
            check(
                key_states.dtype == keys.dtype and key_states.device == keys.device,
                lambda: "key_states: dtype or device",
            )
        if values is not None and values.ndim == 4:
            M, W, _, V = values.shape
            m, w, _, v = value_states.shape
            check(m == M and w == W and v == V, lambda: "value_states: sizes")
            check(value_states.device == values.device, lambda: "value_states: device")
        return key_states, value_states

    return update
