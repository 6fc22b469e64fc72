"""Wrong results that Transformers computes without a word, and what the guard says of the same calls.

Each test first shows the wrong result unguarded: finite, no error, no warning, and further from the right one than
rounding explains by orders of magnitude. Then the same call, guarded, ends in the diagnosis before any tensor
operation has run.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import FalconConfig, FalconForCausalLM, GPTNeoXConfig, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXRotaryEmbedding
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

import llm_op_guard as og

B, H, G, L, D = 2, 4, 2, 7, 16
Call = Callable[[], Any]
# How often the error must be larger than what rounding makes of the right result.
CLEARLY = 1000


@pytest.fixture(autouse=True)
def fixed_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=H * D, num_attention_heads=H, num_key_value_heads=G, head_dim=D, max_position_embeddings=128
    )


def silently(call: Call) -> torch.Tensor:
    """The result of an unguarded call that ends without an error or a warning in finite numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = call()
    first = result[0] if isinstance(result, tuple) else result
    assert first.isfinite().all()
    return first


def assert_clearly_wrong(wrong: torch.Tensor, right: torch.Tensor, exact: torch.Tensor) -> None:
    """`wrong` has the shape of `right` and is far from it; `exact`, in float64, tells what rounding does."""
    assert wrong.shape == right.shape
    rounding = (right.double() - exact).abs().max()
    assert rounding < 1e-4
    assert (wrong - right).abs().max() > CLEARLY * rounding
    assert not torch.allclose(wrong, right, rtol=0.05, atol=0.05)


class Operations(TorchDispatchMode):
    """Writes down every operation that reaches a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def diagnosed(call: Call) -> og.Violation:
    """The one violation that the guarded call ends in."""
    (violation,) = all_diagnosed(call)
    return violation


def all_diagnosed(call: Call) -> tuple[og.Violation, ...]:
    """The violations that the guarded call ends in, with not a single tensor operation run."""
    # Some rows fail today as well, later and with another message.
    with Operations() as unguarded, contextlib.suppress(RuntimeError):
        call()
    assert unguarded.seen, "the call runs operations, so seeing none of them means something"
    with og.installed("transformers"), Operations() as guarded, pytest.raises(og.GuardError) as caught:
        call()
    assert guarded.seen == []
    for violation in caught.value.violations:
        assert (violation.cost_class, violation.certain) == ("A", True)
        assert violation.call_site is not None
        assert violation.call_site.file == __file__
        assert f"{violation.observed}, expected {violation.expected}" in str(caught.value)
        assert violation.because and violation.because in str(caught.value), "says why the rule holds"
        assert violation.hint and violation.hint in str(caught.value), "names the likely cause"
    return caught.value.violations


def assert_says(violation: og.Violation, **wanted: object) -> None:
    assert {name: getattr(violation, name) for name in wanted} == wanted


# ---------------------------------------------------------------- rotary embedding


def rotary(batch: int = 1) -> tuple[torch.Tensor, ...]:
    """q and k of B sequences, cos and sin as the model makes them, the same again in float64."""
    embedding = LlamaRotaryEmbedding(config())
    q, k = torch.randn(B, H, L, D), torch.randn(B, G, L, D)
    cos, sin = embedding(q, torch.arange(L).expand(batch, L))
    return q, k, cos, sin


def rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return apply_rotary_pos_emb(q, k, cos, sin)[0]


def doubled(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.double() for tensor in tensors)


def test_rope_width_1() -> None:
    q, k, cos, sin = rotary()
    narrow = cos[..., :1], sin[..., :1]
    wrong = silently(lambda: apply_rotary_pos_emb(q, k, *narrow))
    assert_clearly_wrong(wrong, rotated(q, k, cos, sin), rotated(*doubled(q, k, cos, sin)))

    violation = diagnosed(lambda: apply_rotary_pos_emb(q, k, *narrow))
    assert_says(
        violation,
        operator="apply_rotary_pos_emb",
        rule_id="cos.shape",
        argument="cos",
        observed="cos.shape[2] = 1",
        expected="D = 16",
        because="cos and sin are broadcast over heads and over the batch, never over positions or width",
        hint="a table of one column is broadcast without a word",
        site="transformers.models.llama.modeling_llama.apply_rotary_pos_emb",
    )
    assert [str(binding) for binding in violation.bindings] == ["D = 16"]
    assert violation.bindings[0].sources == ("q.shape[3]", "k.shape[3]")


def test_rope_length_1() -> None:
    q, k, cos, sin = rotary()
    short = cos[:, :1], sin[:, :1]
    wrong = silently(lambda: apply_rotary_pos_emb(q, k, cos[:, 3:4], sin[:, 3:4]))
    assert_clearly_wrong(wrong, rotated(q, k, cos, sin), rotated(*doubled(q, k, cos, sin)))

    assert_says(
        diagnosed(lambda: apply_rotary_pos_emb(q, k, *short)),
        rule_id="cos.shape",
        argument="cos",
        observed="cos.shape[1] = 1",
        expected="L = 7",
        hint="one position for many tokens: position_ids was broadcast",
    )


def test_rope_batch_grows() -> None:
    q, k, cos, sin = rotary(batch=2)
    q, k = q[:1], k[:1]
    grown = silently(lambda: apply_rotary_pos_emb(q, k, cos, sin))
    assert grown.shape[0] == 2 != q.shape[0]

    assert_says(
        diagnosed(lambda: apply_rotary_pos_emb(q, k, cos, sin)),
        rule_id="cos.shape",
        argument="cos",
        observed="cos.shape[0] = 2",
        expected="B = 1",
        hint="cos and sin are of another batch",
    )


def test_rope_unsqueezed() -> None:
    q, k, cos, sin = rotary()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    grown = silently(lambda: apply_rotary_pos_emb(q, k, cos, sin))
    assert grown.ndim == 5 != q.ndim

    assert_says(
        diagnosed(lambda: apply_rotary_pos_emb(q, k, cos, sin)),
        rule_id="cos.shape",
        argument="cos",
        observed="cos.shape = (1, 1, 7, 16), rank 4",
        expected="rank 3, [B | 1, L, D]",
        hint="already unsqueezed: this operator adds the head dimension itself",
    )


def test_rope_swapped() -> None:
    q, k, cos, sin = rotary()
    wrong = silently(lambda: apply_rotary_pos_emb(q, k, sin, cos))
    assert_clearly_wrong(wrong, rotated(q, k, cos, sin), rotated(*doubled(q, k, cos, sin)))

    # Values are looked at where the user wants it.
    with og.installed("transformers"):
        assert torch.equal(apply_rotary_pos_emb(q, k, sin, cos)[0], wrong)
    with og.installed("transformers"), og.policy(B="raise"), pytest.raises(og.GuardError) as caught:
        apply_rotary_pos_emb(q, k, sin, cos)
    (violation,) = caught.value.violations
    assert_says(
        violation,
        rule_id="cos_sin_swapped",
        cost_class="B",
        certain=True,
        argument="cos",
        because="no position has a cosine of 0 at every frequency; position 0 has a sine of 0 at every one",
        hint="sin was given for cos, and cos for sin",
    )
    assert violation.observed.startswith("cos[0, 0] has no true value (of 7, 1 row is wrong)")
    with og.installed("transformers"), og.policy(B="raise"):
        apply_rotary_pos_emb(q, k, cos, sin)
        # Behind position 0 an exchange cannot be told from other positions.
        apply_rotary_pos_emb(q[:, :, 1:], k[:, :, 1:], sin[:, 1:], cos[:, 1:])


def test_rope_partial_full() -> None:
    parts = GPTNeoXConfig(hidden_size=H * D, num_attention_heads=H, intermediate_size=H * D, num_hidden_layers=1)
    module = GPTNeoXAttention(parts, layer_idx=3).eval()
    for linear in (module.query_key_value, module.dense):
        torch.nn.init.normal_(linear.weight, std=0.3)
    x, positions = torch.randn(B, L, H * D), torch.arange(L)[None]
    own = GPTNeoXRotaryEmbedding(parts)(x, positions)
    full = LlamaRotaryEmbedding(config())(x, positions)
    assert (own[0].shape[-1], full[0].shape[-1]) == (D // 4, D)

    def call(cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return module(x, attention_mask=None, position_embeddings=(cos, sin))

    right = call(*own)[0]
    exact = module.double()(x.double(), attention_mask=None, position_embeddings=doubled(*own))[0]
    module.float()
    assert_clearly_wrong(silently(lambda: call(*full)), right, exact)

    assert_says(
        diagnosed(lambda: call(*full)),
        operator="GPTNeoXAttention.forward",
        rule_id="rotary_width",
        argument="position_embeddings[0]",
        because="as many columns are rotated as the table has, and this module was made for rotary_ndims",
        hint="full-width cos and sin given to a module that rotates a part of each head",
        site="transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXAttention.forward",
    )
    with og.installed("transformers"):
        assert torch.equal(call(*own)[0], right)


def test_rope_layout() -> None:
    q, k, cos, sin = rotary()
    q, k = torch.randn(B, L, L, D), torch.randn(B, L, L, D)  # as many heads as tokens
    right = rotated(q, k, cos, sin)
    tokens_first = q.transpose(1, 2), k.transpose(1, 2)
    wrong = silently(lambda: apply_rotary_pos_emb(*tokens_first, cos, sin)).transpose(1, 2)
    assert_clearly_wrong(wrong, right, rotated(*doubled(q, k, cos, sin)))
    # The same call is right for other tensors, and the sizes are all there is: docs/transformers.md says so.
    with og.installed("transformers"), og.policy(B="raise"):
        assert torch.equal(apply_rotary_pos_emb(*tokens_first, cos, sin)[0].transpose(1, 2), wrong)

    # With another number of heads, today's error names sizes; the guard tells them apart.
    fewer = q[:, :H].transpose(1, 2), k[:, :H].transpose(1, 2)
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        apply_rotary_pos_emb(*fewer, cos, sin)
    assert_says(
        diagnosed(lambda: apply_rotary_pos_emb(*fewer, cos, sin)),
        rule_id="cos.shape",
        observed="cos.shape[1] = 7",
        expected="L = 4",
        hint="tokens stand where unsqueeze_dim says that heads do",
    )


# ---------------------------------------------------------------- attention

ATTENTION: dict[str, Callable[..., Any]] = {"eager": eager_attention_forward, "sdpa": sdpa_attention_forward}
OPERATOR = {"eager": "eager_attention_forward", "sdpa": "sdpa_attention_forward"}


def attention(which: str, q: Any, k: Any, v: Any, mask: Any = None) -> Callable[[], Any]:
    """A call as LlamaAttention makes it, of a real LlamaAttention."""
    module = LlamaAttention(config(), layer_idx=3).eval()
    return lambda: ATTENTION[which](module, q, k, v, mask, dropout=0.0, scaling=module.scaling)


def states() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(B, H, L, D), torch.randn(B, G, L, D), torch.randn(B, G, L, D)


def exact_attention(which: str, q: Any, k: Any, v: Any, mask: Any = None) -> torch.Tensor:
    result = attention(which, q.double(), k.double(), v.double(), mask if mask is None else mask.double())()[0]
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.parametrize("which", ["eager", "sdpa"])
def test_attn_kv_batch_1(which: str) -> None:
    q, k, v = states()
    right, exact = attention(which, q, k, v)()[0], exact_attention(which, q, k, v)
    call = attention(which, q, k[:1], v[:1])
    assert_clearly_wrong(silently(call), right, exact)

    key, value = all_diagnosed(call)
    assert_says(
        key,
        operator=OPERATOR[which],
        rule_id="key.shape",
        argument="key",
        observed="key.shape[0] = 1",
        expected="B = 2",
        because="keys belong to the sequences of the queries; batch 1 would be broadcast without a word",
        hint="a cache of another batch size",
    )
    assert_says(value, rule_id="value.shape", argument="value", observed="value.shape[0] = 1", expected="B = 2")
    assert key.bindings[0].sources == ("query.shape[0]",)


@pytest.mark.parametrize("which", ["eager", "sdpa"])
def test_attn_q_batch_1(which: str) -> None:
    q, k, v = states()
    right, exact = attention(which, q, k, v)()[0], exact_attention(which, q, k, v)
    call = attention(which, q[:1], k, v)
    assert_clearly_wrong(silently(call), right, exact)

    assert_says(
        diagnosed(call),
        operator=OPERATOR[which],
        rule_id="query.shape",
        argument="query",
        observed="query.shape[0] = 1",
        expected="B = 2",
        hint="queries of one sequence, keys of several",
    )


def test_attn_v_length_sdpa() -> None:
    q, k, v = states()
    right, exact = attention("sdpa", q, k, v)()[0], exact_attention("sdpa", q, k, v)
    short = v[:, :, : L - 2]
    call = attention("sdpa", q, k, short)
    wrong = silently(call)
    assert_clearly_wrong(wrong, right, exact)
    # Keys without a value are not seen at all.
    assert torch.allclose(wrong, attention("sdpa", q, k[:, :, : L - 2], short)()[0], atol=1e-5)

    assert_says(
        diagnosed(call),
        rule_id="value.shape",
        argument="value",
        observed="value.shape[2] = 5",
        expected="S = 7",
        hint="keys and values come from different calls or caches",
    )


def test_attn_v_length_eager() -> None:
    q, k, v = states()
    call = attention("eager", q, k, v[:, :, : L - 2])
    with pytest.raises(RuntimeError) as today:
        call()
    assert "value" not in str(today.value), "today's error does not name the argument"

    assert_says(
        diagnosed(call), rule_id="value.shape", argument="value", observed="value.shape[2] = 5", expected="S = 7"
    )


def causal_masks() -> tuple[torch.Tensor, torch.Tensor]:
    """The causal mask as True/False and as what is added to the scores."""
    keep = torch.ones(L, L, dtype=torch.bool).tril()[None, None].expand(B, 1, L, L)
    return keep, torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_attn_mask_not_additive_eager(dtype: torch.dtype) -> None:
    q, k, v = states()
    keep, additive = causal_masks()
    right, exact = attention("eager", q, k, v, additive)()[0], exact_attention("eager", q, k, v, additive)
    call = attention("eager", q, k, v, keep.to(dtype))
    assert_clearly_wrong(silently(call), right, exact)

    name = str(dtype).removeprefix("torch.")
    assert_says(
        diagnosed(call),
        operator="eager_attention_forward",
        rule_id="attention_mask.dtype",
        argument="attention_mask",
        observed=f"attention_mask.dtype = {name}",
        expected="floating",
        because="this attention adds the mask to the scores: 0 keeps a key, a very negative number drops it",
        hint=(
            "True/False masks are for SDPA: added to scores they count as 1 and 0"
            if dtype is torch.bool
            else "a 0/1 mask added to scores hardly changes them: make it additive"
        ),
    )


def test_attn_mask_int_sdpa() -> None:
    q, k, v = states()
    keep, _ = causal_masks()
    call = attention("sdpa", q, k, v, keep.long())
    with pytest.raises(RuntimeError):
        call()

    assert_says(
        diagnosed(call),
        argument="attention_mask",
        observed="attention_mask.dtype = int64",
        hint="convert a 0/1 integer mask with .bool()",
    )


@pytest.mark.usefixtures("no_alarm")
@pytest.mark.parametrize("which", ["eager", "sdpa"])
def test_attn_one_kv_head_falcon(which: str) -> None:
    heads: list[tuple[int, int]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        heads.append((query.shape[1], key.shape[1]))
        return real(query, key, *args, **kwargs)

    falcon = FalconConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, multi_query=True, pad_token_id=0
    )
    model = FalconForCausalLM._from_config(falcon, attn_implementation=which).eval()
    ids = torch.randint(3, 96, (2, 7))
    plain = model.generate(ids, max_new_tokens=4, do_sample=False), model(ids).logits
    with og.installed("transformers"), og.policy(B="raise"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        guarded = model.generate(ids, max_new_tokens=4, do_sample=False), model(ids).logits
    assert torch.equal(plain[0], guarded[0])
    assert torch.equal(plain[1], guarded[1])
    assert og.record.total == 0
    assert which == "eager" or (4, 1) in heads, "one k/v head for four query heads is what this test is about"


@pytest.mark.usefixtures("no_alarm")
def test_attn_one_kv_head_is_broadcast_by_the_guarded_sdpa() -> None:
    module = torch.nn.Module()  # no num_key_value_groups: SDPA itself broadcasts the head
    module.is_causal = True
    q, k, v = torch.randn(B, H, L, D), torch.randn(B, 1, L, D), torch.randn(B, 1, L, D)
    plain = sdpa_attention_forward(module, q, k, v, None)[0]
    repeated = sdpa_attention_forward(module, q, k.expand(B, H, L, D), v.expand(B, H, L, D), None)[0]
    assert torch.allclose(plain, repeated, atol=1e-5)
    with og.installed("transformers"):
        assert torch.equal(plain, sdpa_attention_forward(module, q, k, v, None)[0])
    assert og.record.total == 0


def test_attention_of_a_real_layer_is_named_by_class_and_index() -> None:
    module = LlamaAttention(config(), layer_idx=3).eval()
    module.config._attn_implementation = "eager"
    x = torch.randn(B, L, H * D)
    positions = LlamaRotaryEmbedding(config())(x, torch.arange(L)[None])
    keep, _ = causal_masks()
    with og.installed("transformers"), pytest.raises(og.GuardError) as caught:
        module(x, position_embeddings=positions, attention_mask=keep)
    site = caught.value.violations[0].call_site
    assert site is not None
    assert (site.module_class, site.layer_idx, site.file) == ("LlamaAttention", 3, modeling_llama.__file__)


# ---------------------------------------------------------------- norm


def test_norm_input_1() -> None:
    norm = LlamaRMSNorm(H * D)
    norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(B, L, 1)
    wrong = silently(lambda: norm(x))
    assert wrong.shape == (B, L, H * D), "one column became the width of the weight"
    assert torch.allclose(wrong.abs(), norm.weight.expand_as(wrong), rtol=1e-2), "only the sign of the input is left"

    assert_says(
        diagnosed(lambda: norm(x)),
        operator="LlamaRMSNorm.forward",
        rule_id="weight_fits",
        argument="hidden_states",
        observed="(hidden_states.shape[-1],) = (1,), self.weight.shape = (64,), hidden_states.shape = (2, 7, 1)",
        because="the weight scales each column; an input of width 1 would be expanded to the width of the weight",
        hint="the input has one column: it was reduced or sliced before",
    )
