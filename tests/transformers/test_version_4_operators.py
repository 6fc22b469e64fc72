"""Transformers 4: the attention, rotary embeddings, norms and routers whose code is another one there."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations import eager_paged, flash_paged, flex_attention, sdpa_attention, sdpa_paged

import llm_op_guard as og
from llm_op_guard.integrations.transformers import attention, moe, norms, rope

pytestmark = pytest.mark.usefixtures("no_alarm")

Make = Callable[..., Any]
B, H, G, L, S, D = 2, 4, 2, 3, 5, 8


def modeling(model: str) -> Any:
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(autouse=True)
def guarded() -> Iterator[None]:
    """Guards are there all the time, and check when `rules` asks: putting them in is what takes time."""
    with og.installed("transformers"), og.policy(A="off", B="off"):
        yield


def rules(call: Callable[[], Any], *, values: bool = False) -> list[str]:
    """The rules that a guarded call breaks, none where it gives what it gives unguarded."""
    try:
        with og.policy(A="raise", B="raise" if values else "off"):
            found = call()
    except og.GuardError as error:
        assert all(violation.because and violation.hint for violation in error.violations)
        return [violation.rule_id for violation in error.violations]
    plain = call()
    one, other = ((x if isinstance(x, tuple) else (x,)) for x in (found, plain))
    for x, y in zip(one, other, strict=True):
        assert x is y is None or torch.equal(x.nan_to_num(), y.nan_to_num())
    return []


def fails_or_grows(call: Callable[[], Any], shape: tuple[int, ...]) -> bool:
    try:
        return bool(call()[0].shape != shape)
    except (RuntimeError, IndexError):
        return True


# ---------------------------------------------------------------- attention

CUTTING = ["align", "whisper", "gpt2", "esm", "kosmos2_5", "gpt_neox", "internvl", "modernbert_decoder", "timesfm"]
each_cutting = pytest.mark.parametrize("model", CUTTING)


class Layer(nn.Module):
    """What the functions ask of the module that calls them."""

    def __init__(self, *, causal: bool = True, cross: bool = False) -> None:
        super().__init__()
        self.is_causal, self.is_cross_attention, self.head_dim = causal, cross, D
        self.scale_attn_weights, self.scale_attn_by_inverse_layer_idx = True, False
        self.register_buffer("bias", torch.ones(1, 1, 16, 16, dtype=torch.bool).tril())
        self.attn_dropout = nn.Dropout(0.0)
        self.eval()


def attend(model: str, states: tuple[Tensor, ...], mask: Any, layer: Layer | None = None, **options: Any) -> Any:
    name = "simple_eager_attention_forward" if model == "timesfm" else "eager_attention_forward"
    return getattr(modeling(model), name)(layer or Layer(), *states, mask, scaling=1.0, **options)


def qkv(batch: int = B, heads: int = H, keys: int = S, width: int = D) -> tuple[Tensor, Tensor, Tensor]:
    return numbers(batch, heads, L, width), numbers(batch, heads, keys, width), numbers(batch, heads, keys, width)


@each_cutting
def test_attention_takes(model: str) -> None:
    mask = numbers(1, 1, L, S)
    needs_a_mask = model == "modernbert_decoder"
    calls: list[tuple[tuple[Tensor, ...], Any]] = [
        (qkv(), mask),
        (qkv(), mask.expand(B, 1, L, S)),
        (qkv(), mask.expand(B, H, L, S)),
        (qkv(), numbers(1, 1, L, 2 * S)),  # cut
        (qkv(), mask[:, :, :1]),
        (qkv(batch=0), mask),
        (qkv(width=1), mask),
        (qkv(width=129), mask),
        (qkv(heads=1), mask),
        ((numbers(B, H, L, D), numbers(B, 1, S, D), numbers(B, 1, S, D)), mask),
        ((numbers(B, H, L, D), numbers(B, H, S, D), numbers(B, H, S, 3)), mask),
    ]
    if not needs_a_mask:
        calls += [(qkv(), None), ((numbers(B, H, 1, D), *qkv()[1:]), None)]
    if model == "whisper":
        calls.append((qkv(), torch.ones(B, S, dtype=torch.bool)))  # one of padding, which it leaves alone
    for states, given in calls:
        assert rules(lambda states=states, given=given: attend(model, states, given), values=True) == []


@each_cutting
def test_attention_rejects(model: str) -> None:
    q, k, v = qkv()
    shape = (B, L, H, D)
    mask = numbers(1, 1, L, S)
    prefix = "key_states" if model == "timesfm" else "key"
    for states, given, rule in (
        ((q, k[..., :4], v), mask, f"{prefix}.shape"),
        ((q, numbers(B, 3, S, D), numbers(B, 3, S, D)), mask, "heads"),
        ((q, k, v), numbers(1, 1, L + 1, S), "attention_mask.shape"),
        ((q, k, v), numbers(1, 1, L, S - 1), "mask_covers_keys"),
        ((q, k, numbers(B, 3, S, D)), mask, "value_heads"),
    ):
        call = lambda states=states, given=given: attend(model, states, given)  # noqa: E731
        assert fails_or_grows(call, shape)
        assert rule in rules(call)
    for wrong in (torch.ones(1, 1, L, S, dtype=torch.bool), torch.ones(1, 1, L, S, dtype=torch.long)):
        assert torch.isfinite(attend(model, (q, k, v), wrong)[0]).all(), "it counts as 1 and 0 without a word"
        assert rules(lambda wrong=wrong: attend(model, (q, k, v), wrong)) == ["attention_mask.dtype"]


def suspicion(call: Callable[[], Any]) -> str:
    with og.policy(A="raise", B="raise"), pytest.warns(og.GuardWarning) as caught:
        call()
    (warning,) = caught
    return str(warning.message)


@each_cutting
def test_a_mask_of_0_and_1_in_numbers(model: str) -> None:
    keeps = torch.ones(1, 1, L, S).tril(S - L)
    additive = torch.zeros_like(keeps).masked_fill(keeps == 0, torch.finfo(torch.float32).min)
    right, wrong = (attend(model, qkv(), mask)[0] for mask in (additive, keeps))
    # GPT-2 is causal whatever the mask.
    assert model == "gpt2" or (right - wrong).abs().max() > 0.01
    assert "an additive mask holds 0 and very negative numbers" in suspicion(lambda: attend(model, qkv(), keeps))
    assert rules(lambda: attend(model, qkv(), additive), values=True) == []


@pytest.mark.parametrize("which", ["eager", "sdpa"])
def test_a_mask_of_one_column(which: str) -> None:
    layer = Layer()
    layer.num_key_value_groups = H // G
    function = modeling("llama").eager_attention_forward if which == "eager" else sdpa_attention.sdpa_attention_forward
    q, k, v = numbers(B, H, L, D), numbers(B, G, S, D), numbers(B, G, S, D)
    mask = torch.zeros(1, 1, L, 1)

    def call(queries: Tensor, **options: Any) -> Any:
        layer.is_causal = options.get("causal", True)
        return function(layer, queries, k, v, mask[:, :, : queries.shape[2]], scaling=1.0)

    lost = call(q)[0]
    assert torch.allclose(lost, call(q, causal=False)[0]), "no mask at all"
    assert "the causal mask was lost" in suspicion(lambda: call(q))
    assert rules(lambda: call(q, causal=False)) == []
    assert rules(lambda: call(q[:, :, :1])) == []


def test_gpt2_is_causal_by_itself() -> None:
    q, k, v = qkv(keys=L)
    causal = torch.zeros(1, 1, L, L).masked_fill(torch.ones(L, L).tril() == 0, torch.finfo(torch.float32).min)
    right, found = (attend("gpt2", (q, k, v), mask)[0] for mask in (causal, torch.zeros(1, 1, L, 1)))
    assert torch.equal(right, found)
    assert rules(lambda: attend("gpt2", (q, k, v), torch.zeros(1, 1, L, 1)), values=True) == []


@pytest.mark.parametrize("model", [model for model in CUTTING if model != "timesfm"])
def test_causal_attention_of_another_batch(model: str) -> None:
    q, k, v = qkv()
    mask = numbers(1, 1, L, S)
    for states in ((q[:1], k, v), (q, k[:1], v[:1])):
        call = lambda states=states, **layer: attend(model, states, mask, Layer(**layer))  # noqa: E731
        assert call()[0].shape == (B, L, H, D), "broadcast without a word"
        assert rules(call)
        assert rules(lambda call=call: call(causal=False)) == []
        # GPT-2 says that its cross-attention is causal.
        assert rules(lambda call=call: call(cross=True)) == []
    larger = numbers(B, 1, L, S)
    assert attend(model, tuple(x[:1] for x in (q, k, v)), larger)[0].shape[0] == B
    assert rules(lambda: attend(model, tuple(x[:1] for x in (q, k, v)), larger)) == ["mask_fits"]


@pytest.mark.parametrize("model", ["vit", "dinov2"])
def test_attention_without_a_mask(model: str) -> None:
    def call(states: tuple[Tensor, ...], weights: Tensor | None = None) -> Any:
        # What is called a mask is multiplied with the weights.
        return modeling(model).eager_attention_forward(Layer(causal=False), *states, weights, scaling=1.0)

    for states in (qkv(), qkv(batch=0), qkv(heads=1), qkv(width=1), qkv(width=129), qkv(keys=1)):
        assert rules(lambda states=states: call(states)) == []
    assert rules(lambda: call(qkv(), numbers(1, H, 1, 1))) == []
    q, k, v = qkv()
    with pytest.raises(RuntimeError):
        call((q, k, v[:, :, :4]))
    assert rules(lambda: call((q, k, v[:, :, :4]))) == ["value.shape"]
    with pytest.raises(RuntimeError):
        call((q, k, v[:, :3]))
    assert rules(lambda: call((q, k, v[:, :3]))) == ["value_heads"]
    for states in ((q, k, v[:, :1]), (q[:, :1], k[:, :1], v)):
        assert rules(lambda states=states: call(states)) == []


def test_flex_attention() -> None:
    def call(states: tuple[Tensor, ...], mask: Any) -> Any:
        return flex_attention.flex_attention_forward(Layer(), *states, mask, scaling=1.0)

    q, k, v = qkv()
    with og.policy(A="raise"):
        for mask in (torch.ones(B, 1, L, S, dtype=torch.bool), torch.ones(B, S)):
            with pytest.raises(og.GuardError):
                call((q, k, v), mask)
        with pytest.raises(og.GuardError, match="expand the mask to the batch"):
            call((q, k, v), numbers(1, 1, L, S))
        with pytest.raises(og.GuardError, match="groups"):
            call((q, k[:, :3], v[:, :3]), None)


def test_reasons_of_what_is_left_alone() -> None:
    found = {
        candidate.site: candidate.reason
        for module in (eager_paged, sdpa_paged, flash_paged, modeling("modernbert"), modeling("doge"))
        for part in (attention, rope)
        for candidate in part.candidates(module)
        if candidate.function is None
    }
    names = {site.rpartition(".")[2]: reason for site, reason in found.items()}
    paged = "its keys are those of a paged cache, which it updates"
    assert names == {
        "eager_paged_attention_forward": paged,
        "sdpa_attention_paged_forward": paged,
        "paged_attention_forward": paged,
        "eager_attention_forward": "queries, keys and values are one tensor, which its module made",
        "sdpa_attention_forward": "queries, keys and values are one tensor, which its module made",
        "flash_attention_forward": "queries, keys and values are one tensor, which its module made",
        "apply_rotary_unpadded": "a kernel of flash-attn for packed tokens",
        "flex_attention_forward": "its mask differs from head to head",
    }


# ---------------------------------------------------------------- rotary embeddings


def test_every_known_function_computes_the_formula_of_its_family() -> None:
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("rope_formulas.py"))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert process.returncode == 0, process.stderr
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    known = [line for line in lines if not line["refused"] and line["operator"] != "GPTNeoXAttention.forward"]
    assert len(known) > 100
    assert [line["site"] for line in known if not line["right"]] == []
    mixing, packed = (
        "it mixes the frequencies of a table, and rotates nothing",
        "a kernel of flash-attn for packed tokens",
    )
    refused = {(line["operator"].rpartition(".")[2], line["refused"]) for line in lines if line["refused"]}
    assert refused == {("apply_interleaved_mrope", mixing), ("apply_rotary_unpadded", packed)}


def table(*shape: int) -> tuple[Tensor, Tensor]:
    return numbers(*shape), numbers(*shape) + 1


@pytest.mark.parametrize("unsqueeze_dim", [1, 2, -2, -3])
@pytest.mark.parametrize(("model", "width"), [("qwen2_vl", D), ("glm4v", D), ("glm4v", 4), ("glm4v_moe", 4)])
def test_three_tables(model: str, width: int, unsqueeze_dim: int) -> None:
    apply = modeling(model).apply_multimodal_rotary_pos_emb
    sections = [1, 1, width // 2 - 2]
    first = unsqueeze_dim in (1, -3)

    def call(cos: Tensor, sin: Tensor, batch: int = B, heads: int = H) -> Any:
        shapes = [(batch, n, L, D) if first else (batch, L, n, D) for n in (heads, G)]
        return apply(*(numbers(*shape) for shape in shapes), cos, sin, sections, unsqueeze_dim=unsqueeze_dim)

    for batch in (B, 1, 0):
        for tables in {batch, 1}:
            assert rules(lambda b=batch, t=tables: call(*table(3, t, L, width), batch=b), values=True) == []
    assert rules(lambda: call(*table(3, B, L, width), heads=1)) == []

    one = lambda: call(*table(3, B, 1, width))  # noqa: E731
    assert call(*table(3, B, 1, width))[0].numel() == B * H * L * D, "one position for all, without a word"
    assert rules(one) == ["cos.shape"]
    for wrong in (table(3, B, L + 1, width), table(3, B + 1, L, width)):
        with pytest.raises(RuntimeError):
            call(*wrong)
        assert "cos.shape" in rules(lambda wrong=wrong: call(*wrong))
    cos, sin = torch.ones(3, 1, L, width), torch.ones(3, 1, L, width)
    sin[:, :, 0] = 0
    assert rules(lambda: call(cos, sin), values=True) == []
    assert rules(lambda: call(sin, cos), values=True) == ["cos_sin_swapped"]


def test_a_table_that_is_wider_than_a_head() -> None:
    apply = modeling("glm4v").apply_multimodal_rotary_pos_emb
    call = lambda width: apply(numbers(B, H, L, 4), numbers(B, G, L, 4), *table(3, 1, L, width), [1, 1, 1])  # noqa: E731
    with pytest.raises(RuntimeError):
        call(6)
    assert rules(lambda: call(6)) == ["table_within_head"]


@pytest.mark.parametrize(
    ("model", "function"), [("esm", "apply_rotary_pos_emb"), ("evolla", "apply_rotary_pos_emb_esm")]
)
def test_a_table_that_is_cut(model: str, function: str) -> None:
    apply = getattr(modeling(model), function)
    for positions in (L, L + 4, 1):
        assert rules(lambda p=positions: apply(numbers(B, H, L, D), *table(1, 1, p, D)), values=True) == []
    for batch, heads, tokens, width in ((0, H, L, D), (1, 1, 1, 2), (B, H, L, 0)):
        assert (
            rules(lambda s=(batch, heads, tokens, width): apply(numbers(*s), *table(1, 1, 9, s[3])), values=True) == []
        )
    short = lambda: apply(numbers(B, H, L, D), *table(1, 1, L - 1, D))  # noqa: E731
    with pytest.raises(RuntimeError):
        short()
    assert rules(short) == ["table_covers_tokens"]
    narrow = lambda: apply(numbers(B, H, L, D), *table(1, 1, L, 1))  # noqa: E731
    assert narrow().shape == (B, H, L, D), "one column for all, without a word"
    assert "cos.shape" in rules(narrow)


@pytest.mark.parametrize("model", ["idefics", "phimoe"])
def test_rows_that_positions_pick(model: str) -> None:
    apply = modeling(model).apply_rotary_pos_emb
    places = torch.arange(L)[None]

    def call(rows: int = 9, width: int = D, at: Tensor = places, size: int = D) -> Any:
        return apply(numbers(B, H, L, size), numbers(B, G, L, size), *table(rows, width), at)

    assert rules(call, values=True) == rules(lambda: call(L, at=places.expand(B, L)), values=True) == []
    assert rules(lambda: call(at=places - L), values=True) == [], "they count from the end"
    with pytest.raises(IndexError):
        call(L - 1)
    assert rules(lambda: call(L - 1), values=True) == ["positions_in_table"]
    for wrong, rule in (
        ((lambda: call(at=places[:, :1])), "position_ids.shape"),
        ((lambda: call(width=1)), "cos.shape"),
    ):
        assert wrong()[0].shape == (B, H, L, D), "broadcast without a word"
        assert rules(wrong) == [rule]
    assert rules(lambda: call(width=2, size=2)) == []


def test_angles_of_patches() -> None:
    apply = modeling("qwen2_5_omni").apply_rotary_pos_emb_vision
    call = lambda rows, width=D // 2, size=D: apply(numbers(1, L, H, size), numbers(rows, width))  # noqa: E731
    assert rules(lambda: call(L)) == rules(lambda: call(L, 1, 2)) == rules(lambda: call(L, 0, 0)) == []
    assert call(1).shape == (1, L, H, D), "one position for all, without a word"
    assert rules(lambda: call(1)) == ["freqs.shape"]
    with pytest.raises(RuntimeError):
        call(L, D)
    assert rules(lambda: call(L, D)) == ["freqs.shape"]


def test_the_rotary_width_of_gpt_neox() -> None:
    from transformers import GPTNeoXConfig

    def call(width: int, **options: Any) -> Callable[[], Any]:
        config = GPTNeoXConfig(hidden_size=64, num_attention_heads=4, attn_implementation="eager", **options)
        layer = modeling("gpt_neox").GPTNeoXAttention(config, layer_idx=0).eval()
        pair = (numbers(1, L, width), numbers(1, L, width))
        return lambda: layer(torch.ones(B, L, 64), None, position_embeddings=pair)

    assert rules(call(4)) == []
    assert call(16)()[0].shape == (B, L, 64), "more columns are rotated without a word"
    assert rules(call(16)) == ["rotary_width"]
    # What has a table of another width, and rightly so.
    assert rules(call(16, rope_scaling={"rope_type": "linear", "factor": 2.0})) == []
    assert rules(call(16, head_dim=64)) == []
    for part in (1 / 16, 5 / 16, 1.0):
        width = 2 * -(-int(16 * part) // 2)
        assert rules(call(width, rotary_pct=part)) == []


# ---------------------------------------------------------------- norms


@pytest.mark.parametrize(
    ("model", "cls"),
    [
        ("mamba2", "MambaRMSNormGated"),
        ("bamba", "BambaRMSNormGated"),
        ("falcon_mamba", "FalconMambaRMSNorm"),
        ("gemma3n", "Gemma3nRMSNorm"),
        ("nemotron", "NemotronLayerNorm1P"),
    ],
)
def test_norms(model: str, cls: str) -> None:
    norm = getattr(modeling(model), cls)(D)
    for shape in ((B, L, D), (B, H, L, D), (D,), (0, L, D), (1, 1, D)):
        assert rules(lambda shape=shape: norm(numbers(*shape))) == []
    for width in (1, D + 1):
        call = lambda width=width: norm(numbers(B, L, width))  # noqa: E731
        if cls != "NemotronLayerNorm1P" and width == 1:
            assert call().shape == (B, L, D), "expanded without a word"
        else:
            with pytest.raises(RuntimeError):
                call()
        assert rules(call)


def test_norms_with_a_gate_and_without_scale() -> None:
    norm = modeling("mamba2").MambaRMSNormGated(D)
    assert (
        rules(lambda: norm(numbers(B, L, D), numbers(B, L, D)))
        == rules(lambda: norm(numbers(B, L, D), numbers(D)))
        == []
    )
    larger = lambda: norm(numbers(1, L, D), numbers(B, L, D))  # noqa: E731
    assert larger().shape == (B, L, D), "a result of another size without a word"
    assert rules(larger) == ["gate_fits"]
    bare = modeling("gemma3n").Gemma3nRMSNorm(D, with_scale=False)
    assert rules(lambda: bare(numbers(B, L, D))) == rules(lambda: bare(numbers(B, L, 1))) == []
    esm = importlib.import_module("transformers.models.esm.modeling_esmfold").EsmFoldLayerNorm(D)
    assert rules(lambda: esm(numbers(B, L, D))) == []
    assert rules(lambda: esm(numbers(B, L, D + 1)))


def test_encoders_are_no_norms() -> None:
    reasons = {c.operator: c.reason for c in norms.candidates(modeling("wav2vec2")) if c.function is None}
    assert reasons == {
        "Wav2Vec2EncoderLayerStableLayerNorm.forward": "a layer of an encoder, not a norm",
        "Wav2Vec2EncoderStableLayerNorm.forward": "an encoder, not a norm",
    }


# ---------------------------------------------------------------- routers

WIDTHS = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
SIZES = {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "first_k_dense_replace": 1}
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("GptOssTopKRouter", {"num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3TopkRouter", {**WIDTHS, **SIZES, "v_head_dim": 16}),
    "glm4_moe": ("Glm4MoeTopkRouter", {**SIZES, "head_dim": 16}),
}
IDS = torch.tensor([[5, 9, 14], [44, 7, 20]])


@pytest.mark.parametrize("model_type", ROUTERS)
def test_top_k_above_the_number_of_experts(tiny: Make, model_type: str) -> None:
    router, options = ROUTERS[model_type]
    model = tiny(model_type, attn="eager", num_experts_per_tok=5, **options)
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        model(IDS)
    with og.policy(A="raise"), pytest.raises(og.GuardError) as caught:
        model(IDS)
    (violation,) = caught.value.violations
    assert (violation.operator, violation.rule_id) == (f"{router}.forward", "as_many_experts")
    for top_k in (4, 1):
        right = tiny(model_type, attn="eager", num_experts_per_tok=top_k, **options)
        assert rules(lambda right=right: right(IDS).logits) == []


def test_a_router_with_a_choice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = modeling("deepseek_v3")

    def get_topk_indices(self: Any, scores: Tensor) -> Tensor:
        return scores.topk(min(self.top_k, scores.shape[-1]), dim=-1)[1]

    monkeypatch.setattr(module.DeepseekV3TopkRouter, "get_topk_indices", get_topk_indices)
    (candidate,) = moe.candidates(module)
    assert candidate.function is None
    assert candidate.reason == "its get_topk_indices is not one that is known"
