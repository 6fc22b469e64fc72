"""Stand-ins for operators that are not in torch or Transformers, or not plain functions there: each as the report
has it, with its mistake in reach, and no check of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers.cache_utils import StaticCache

import llm_op_guard as og

Tensor = torch.Tensor


# ---------------------------------------------------------------- attention


def explicit_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ value


def sdpa(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """The real one, which is a builtin and so cannot be guarded itself."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)


def sdpa_blind_to_last_stride(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    read = [x.as_strided(x.shape, (*x.stride()[:-1], 1)) for x in (query, key, value)]
    return F.scaled_dot_product_attention(*read)


def sdpa_wrong_when_expanded(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    if key.stride(1) == 0 and key.shape[2] % 32 == 1 and attn_mask is not None:
        key = torch.cat([key[:, :, :-1], key[:, :, :1]], dim=2)
    return sdpa(query, key, value, attn_mask)


def flash_varlen(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[Tensor]:
    out = []
    for i in range(len(cu_seqlens_q) - 1):
        rows = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]
        out.append(torch.einsum("qhd,khd->hqk", rows, k[cu_seqlens_k[i] : cu_seqlens_k[i + 1]]))
    return out


def flash(q: Tensor, sm: int, backward: bool = False) -> Tensor:
    if q.shape[-1] > (128 if sm == 75 else 192 if backward else 256):
        raise RuntimeError("no kernel for this head dimension")
    return q


# ---------------------------------------------------------------- parallel layouts


def split_kv(hidden: Tensor, num_kv_heads: int, head_dim: int, tp: int) -> Tensor:
    local = hidden[..., : num_kv_heads * head_dim // tp]
    return local.view(*local.shape[:-1], -1, head_dim)


def split_heads(weight: Tensor, num_heads: int, tp: int) -> list[Tensor]:
    return list(weight.view(tp, num_heads // tp, -1))


def split_sequence(tokens: Tensor, cp: int, tp: int) -> Tensor:
    """Each context rank holds two chunks, and splits its tokens over the tensor ranks."""
    return tokens.view(cp, 2, -1).view(cp, tp, -1)


def aux_loss(routing_map: Tensor, padding_mask: Tensor, tp: int = 1) -> Tensor:
    return routing_map * padding_mask[:, None]


# ---------------------------------------------------------------- token ids


def start_service(model: Any, tokenizer: Any) -> Tensor:
    """The last token that was added, looked up."""
    last: Tensor = model.get_input_embeddings()(torch.tensor([tokenizer.convert_tokens_to_ids("<new>")]))
    return last


def embed_with_placeholders(self: Any, input_ids: Tensor) -> Tensor:
    return F.embedding(input_ids, self.weight)


def sample(logits: Tensor, tokenizer_size: int) -> Tensor:
    return logits.argmax(-1)


# ---------------------------------------------------------------- caches


def slots(positions: Tensor, block_table: Tensor, page: int) -> Tensor:
    return block_table[0, positions // page] * page + positions % page


PLANNED_ROWS = """
    qo_indptr: int32[_]
    remember(self, rows=last(qo_indptr))
"""


class Planned:
    """A wrapper in the manner of FlashInfer: `plan` lays out the work, `run` does it; what was planned is its own."""

    @og.guard(PLANNED_ROWS)
    def plan(self, qo_indptr: Tensor) -> None:
        self._rows = int(qo_indptr[-1])

    def run(self, q: Tensor) -> Tensor:
        out = torch.full_like(q, math.nan)
        out[: self._rows] = q[: self._rows]
        return out


def pages_of(kv_indptr: Tensor, kv_indices: Tensor, num_pages: int) -> list[Tensor]:
    beyond = torch.cat([kv_indices, torch.full((8,), -12345, dtype=kv_indices.dtype)])  # what lies behind the buffer
    return [beyond[a:b] for a, b in itertools.pairwise(kv_indptr)]


def admit(prompt_len: int, max_new_tokens: int, block_size: int, total_blocks: int) -> int:
    waited = 0
    while math.ceil((prompt_len + max_new_tokens) / block_size) > total_blocks:
        if (waited := waited + 1) > 100:
            raise TimeoutError("never scheduled")
    return waited


def serve(api: Any, worker: Any, prompt: list[int]) -> int:
    if len(prompt) <= api.max_model_len:
        assert len(prompt) <= worker.max_model_len
    return len(prompt)


def make_cache(kind: str, max_cache_len: int) -> StaticCache:
    config = transformers.LlamaConfig(
        hidden_size=8, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, vocab_size=8
    )
    return StaticCache(config, max_cache_len=47 if kind == "forgetful" else max_cache_len)


def media_key(media: bytes, length: int = 64) -> str:
    return hashlib.sha256(media).hexdigest()[:length]


def load_kv_scale(layer: Any, scale: float, *, attribute: str = "k_scale_float") -> float:
    setattr(layer, attribute, scale)
    used: float | None = getattr(layer, "k_scale_float", None)
    return 1.0 if used is None else used


def quantise_keys(scale: Tensor) -> Tensor:
    return torch.ones(4) / scale


def reorder(kwargs: dict[str, Any], cache_name: str, beam_idx: Tensor) -> dict[str, Any]:
    """Looks at one name only."""
    if "past_key_values" in kwargs:
        kwargs["past_key_values"] = kwargs["past_key_values"].index_select(0, beam_idx)
    return kwargs


# ---------------------------------------------------------------- adapters


def match_modules(modules: list[str], adapter: list[str]) -> list[str]:
    return [name for name in adapter if name in modules]


def inject_lora(model: torch.nn.Module, target_modules: list[str]) -> list[str]:
    """As PEFT: it complains where no target matches at all."""
    ends = tuple(f".{target}" for target in target_modules)
    adapted = [path for path, _ in model.named_modules() if f".{path}".endswith(ends)]
    if not adapted:
        raise ValueError("Target modules not found in the base model")
    return adapted


def load_lora(layer: torch.nn.Linear, state: dict[str, Tensor]) -> Tensor:
    return layer.weight + state["lora_B"] @ state["lora_A"]


def merge_lora(weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
    return weight.add_(lora_b @ lora_a)


def load_head(base: dict[str, Tensor], state: dict[str, Tensor]) -> Tensor:
    return base["lm_head.weight"].copy_(state["lm_head.weight"])


def lora_logits(vocab_size: int) -> int:
    if not 32000 <= vocab_size <= 257024:
        raise ValueError("no kernel for this vocabulary")
    return vocab_size


# ---------------------------------------------------------------- experts


def moe_align(topk_ids: Tensor, num_experts: int) -> Tensor:
    return torch.bincount(topk_ids.flatten(), minlength=num_experts)


def hash_route(table: Tensor, token_ids: Tensor) -> Tensor:
    return table[token_ids]


def fused_gate(logits: Tensor) -> Tensor:
    best = logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[-1]).expand_as(logits)
    return torch.where(logits == best, ids, logits.shape[-1] + 1).amin(-1)


def one_hot(ids: Tensor, num_classes: int) -> Tensor:
    """The real one, which is a builtin."""
    return F.one_hot(ids, num_classes)


# ---------------------------------------------------------------- norms


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def norm_blind_to_last_stride(x: Tensor, weight: Tensor) -> Tensor:
    return _normed(x.as_strided(x.shape, (*x.stride()[:-1], 1)), weight)


def norm_of_one_token_stride(x: Tensor, weight: Tensor) -> Tensor:
    n, length, d = x.shape
    return _normed(x.as_strided((n * length, d), (x.stride(1), 1)), weight).view(n, length, d)


def norm_in_place(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return y.mul_(torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)) * weight


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, *, leak: bool = False) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    return _normed(total, weight).to(x.dtype), total if leak else total.to(residual.dtype)


def down_projection(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


# ---------------------------------------------------------------- positions


def lookup(positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    return cos_sin_cache[positions]


def rotate_by_cache(x: Tensor, position_ids: Tensor, cos_cache: Tensor) -> Tensor:
    return x * cos_cache[position_ids]


def rotate_pairs(x: Tensor, freqs: Tensor) -> int:
    """The columns that the kernel reads beyond the head."""
    return max(0, 2 * freqs.numel() - x.shape[-1])


def rotate_from_zero(q: Tensor, cos: Tensor, position_ids: Tensor) -> Tensor:
    return q * cos[: q.shape[1]]


def gpt2_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: Any = None,
    inputs_embeds: Tensor | None = None,
) -> Any:
    """The real one, whose decorators hide its parameters."""
    return transformers.GPT2Model.forward(
        self,
        input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        cache=cache,
        inputs_embeds=inputs_embeds,
    )


def generate(self: Any, inputs: Tensor | None = None, **kwargs: Any) -> Any:
    """The real one, whose decorators hide its parameters."""
    return transformers.GenerationMixin.generate(self, inputs, **kwargs)


def place_images(input_ids: Tensor, image_token_id: int, grids: list[tuple[int, int, int]], merge: int) -> Tensor:
    out = torch.zeros(3, input_ids.numel())
    patches = sum(t * h * w for t, h, w in grids) // merge**2
    out[:, input_ids.flatten() == image_token_id] = torch.ones(3, patches)
    return out


# ---------------------------------------------------------------- retrieval and text


def shard_scales(scales: Tensor, in_features: int, block: int, tp: int) -> list[Tensor]:
    blocks = in_features // tp // block
    if tp > 1 and blocks * block * tp != in_features:
        raise ValueError("the shard ends within a block")
    return list(scales.split(blocks, dim=1))


def search_index(query: Tensor, index: Tensor) -> Tensor:
    return index @ query


def cls_pool(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    return hidden[:, 0]


def mean_pool(input_ids: Tensor, attention_mask: Tensor, pad_id: int) -> Tensor:
    weight = attention_mask.float()
    return (input_ids.float() * weight).sum(-1) / weight.sum(-1)


def rerank(pairs: list[tuple[str, str]], head: Tensor) -> list[float]:
    scores: list[float] = (torch.ones(len(pairs), head.shape[1]) @ head.T).flatten().tolist()
    return scores


def cut(token_ids: list[list[int]], max_length: int) -> int:
    """How many tokens nobody looks at."""
    return sum(len(ids) - len(ids[:max_length]) for ids in token_ids)


def best_hits(found: list[list[float]]) -> list[float]:
    return [sorted(hits)[-1] for hits in found]


def store(text: str) -> str:
    if "\x00" in text:
        raise ValueError("text fields cannot contain NUL (0x00)")
    return text


def encode(text: str) -> bytes:
    return text.encode()


def split_with_a_stack(text: str) -> int:
    """A matcher that keeps a frame for each character since the last place to split."""

    def matched(chunk: str) -> int:
        return 1 + matched(chunk[1:]) if chunk else 0

    return sum(map(matched, text.split()))


def merges(text: str) -> int:
    """The pairs that byte-pair encoding compares: all that are left of a chunk, for each of its merges."""
    return sum(len(chunk) * (len(chunk) - 1) // 2 for chunk in text.split())


# ---------------------------------------------------------------- sampling


def ban_stops(logits: Tensor, stop_token_ids: list[int]) -> Tensor:
    out = logits.clone()
    out[:, torch.tensor(stop_token_ids)] = -math.inf
    return out


def top_k(logits: Tensor, top_k: int) -> Tensor:
    return logits if top_k == 0 else torch.topk(logits, top_k).values


def top_logprobs(logits: Tensor, top_logprobs: int) -> Tensor:
    return torch.topk(logits.log_softmax(-1), top_logprobs).values


def draw(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits / temperature if temperature > 0 else logits
    return torch.multinomial(scaled.softmax(-1), 1)


def add_logit_mask(logits: Tensor, mask: Tensor) -> Tensor:
    return logits + mask


def count_in_int32(logits: Tensor) -> int:
    """The last element as the kernel addresses it."""
    last = logits.shape[0] * logits.shape[1] - 1
    return (last + 2**31) % 2**32 - 2**31


def next_token(prompt_token_ids: list[int]) -> int:
    return prompt_token_ids[-1] + 1


def draft_inputs(embeds: Tensor, hidden_states: Tensor) -> Tensor:
    return torch.cat([embeds, hidden_states], dim=-1)


def fake_module(**attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(training=False, **attributes)
