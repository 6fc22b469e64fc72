"""Guarded models compute what unguarded ones do, bit for bit, and no valid call raises an alarm.

The last part hunts for false alarms with calls that are odd and legal.
"""

from __future__ import annotations

import copy
import functools
import pickle
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from transformers import IdeficsConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.idefics.modeling_idefics import IdeficsForVisionText2Text
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, apply_rotary_pos_emb

import llm_op_guard as og
from llm_op_guard import api
from llm_op_guard.guard.guard import Guard

Model = Any
Make = Callable[..., Model]
IDS = torch.tensor([[5, 9, 14, 33, 71, 3, 8], [44, 7, 20, 11, 6, 90, 17]])
LEFT_PADDED = torch.tensor([[0, 0, 0, 33, 71, 3, 8], [44, 7, 20, 11, 6, 90, 17]])
MASK = (LEFT_PADDED != 0).long()
# A only but for the token ids, which is the default; and B switched on as well.
BOTH: tuple[dict[str, str], ...] = ({}, {"B": "raise"})


@contextmanager
def counted(**policy: str) -> Iterator[Counter[str]]:
    """Guards on; how often the check of each operator was run: native yeses, and what the checks are asked."""
    ran: Counter[str] = Counter()
    compiled = Guard.checks

    def checks(self: Guard, classes: Any, **noting: Any) -> Any:
        checks = compiled(self, classes, **noting)
        name = self.contract.name.removesuffix("_cutting_masks")  # what Transformers 4 has of attention

        def counting(*arguments: Any) -> Any:
            ran[name] += 1
            return checks.before(*arguments)

        if checks.accepting is None:
            return checks._replace(before=counting)
        accepts = checks.accepting.accepts

        def accepting(program: Any, *arguments: Any) -> bool:
            accepted = accepts(program, *arguments)
            ran[name] += accepted
            return accepted

        return checks._replace(before=counting, accepting=checks.accepting._replace(accepts=accepting))

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(Guard, "checks", checks)
        stack.enter_context(og.policy(**policy) if policy else nullcontext())
        stack.enter_context(og.installed("transformers"))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        yield ran
        assert og.record.total == 0, og.record.counts
        # The guard's report that it failed inside is a warning too.
        ours = [w for w in caught if issubclass(w.category, og.GuardWarning | og.GuardInternalWarning)]
        assert not ours, str(ours[0].message)


def flat(value: Any) -> list[Any]:
    """The tensors in a result, in order, with everything else as it is."""
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    if isinstance(value, dict):
        return [part for key in sorted(value) for part in (key, *flat(value[key]))]
    if isinstance(value, tuple | list):
        return [part for item in value for part in flat(item)]
    return [value]


def assert_same(one: Any, other: Any) -> None:
    """Bit for bit, dtypes and NaNs included."""
    ones, others = flat(one), flat(other)
    assert len(ones) == len(others)
    for a, b in zip(ones, others, strict=True):
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
            if a.device.type != "meta":
                assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
        else:
            assert a == b


def assert_identical(call: Callable[[], Any], *operators: str, policies: tuple[dict[str, str], ...] = BOTH[1:]) -> None:
    """The same result and the same random numbers afterwards, unguarded and guarded; `operators` were checked."""

    def run() -> tuple[Any, torch.Tensor]:
        torch.manual_seed(7)
        return call(), torch.random.get_rng_state()

    plain, plain_state = run()
    for policy in policies:
        with counted(**policy) as ran:
            guarded, guarded_state = run()
        assert_same(plain, guarded)
        assert torch.equal(plain_state, guarded_state)
        for operator in operators:
            assert ran[operator] > 0, f"the guard of {operator} was never asked; asked: {dict(ran)}"


OPERATORS = {
    "eager": ("apply_rotary_pos_emb", "rms_norm", "forward", "eager_attention_forward"),
    "sdpa": ("apply_rotary_pos_emb", "rms_norm", "forward", "sdpa_attention_forward"),
}
DTYPES = [torch.float32, torch.bfloat16]
each_model = pytest.mark.parametrize("model_type", ["llama", "qwen2"])
each_attention = pytest.mark.parametrize("attn", ["eager", "sdpa"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def test_the_comparison_can_fail() -> None:
    with pytest.raises(AssertionError):
        assert_same(torch.zeros(3), -torch.zeros(3))
    with pytest.raises(AssertionError, match="never asked"):
        assert_identical(lambda: torch.zeros(1), "rms_norm")
    with pytest.raises(AssertionError):
        values = iter([torch.zeros(1), torch.ones(1), torch.ones(1)])
        assert_identical(lambda: next(values))


# ---------------------------------------------------------------- Llama and Qwen2


@each_model
@each_attention
@each_dtype
def test_prefill_and_left_padding_and_decode(tiny: Make, model_type: str, attn: str, dtype: torch.dtype) -> None:
    model = tiny(model_type, attn=attn, dtype=dtype)

    @torch.no_grad()
    def call() -> Any:
        prefill = model(IDS)
        padded = model(LEFT_PADDED, attention_mask=MASK)
        cached = model(
            IDS[:, :1], past_key_values=padded.past_key_values, attention_mask=torch.cat([MASK, MASK[:, -1:]], 1)
        )
        return prefill.logits, padded.logits, cached.logits

    assert_identical(call, *OPERATORS[attn], policies=BOTH)


@each_model
@each_attention
@each_dtype
def test_generate(tiny: Make, model_type: str, attn: str, dtype: torch.dtype) -> None:
    model = tiny(model_type, attn=attn, dtype=dtype)

    def call() -> Any:
        common: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 4, "min_new_tokens": 4}
        greedy = model.generate(LEFT_PADDED, do_sample=False, **common)
        sampled = model.generate(LEFT_PADDED, do_sample=True, temperature=1.5, **common)
        beams = model.generate(LEFT_PADDED, do_sample=False, num_beams=3, **common)
        return greedy, sampled, beams

    assert_identical(call, "generate", *OPERATORS[attn], policies=BOTH)


@each_model
@each_attention
def test_generate_with_a_static_cache(tiny: Make, model_type: str, attn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(model_type, attn=attn)
    model.generation_config.disable_compile = True

    def call() -> Any:
        return model.generate(
            LEFT_PADDED, attention_mask=MASK, max_new_tokens=4, do_sample=False, cache_implementation="static"
        )

    assert_identical(call, "generate", *OPERATORS[attn], policies=BOTH)


@each_model
@each_attention
@each_dtype
@pytest.mark.parametrize("how", ["plain", "checkpointed", "autocast"])
def test_backward(tiny: Make, model_type: str, attn: str, dtype: torch.dtype, how: str) -> None:
    if how == "autocast" and dtype is torch.bfloat16:
        pytest.skip("autocast of a bf16 model changes nothing")
    model = tiny(model_type, attn=attn, dtype=dtype, attention_dropout=0.1).train()
    if how == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def call() -> Any:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            loss = model(LEFT_PADDED, attention_mask=MASK, labels=IDS, use_cache=False).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    assert_identical(call, *OPERATORS[attn], policies=BOTH)


def test_the_tally_of_the_library_counts(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.tally, "counting", True)
    monkeypatch.setattr(api.tally, "checks", 0)
    model = tiny()
    model(IDS)
    assert api.tally.checks == 0
    with og.installed("transformers"):
        model(IDS)
    # Two entries, one mask; per layer two norms, one rotary embedding, one attention, the cache and its layer; the
    # last norm.
    assert api.tally.checks == 3 + 2 * 6 + 1


# ---------------------------------------------------------------- other models

OTHERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "mistral": ({"sliding_window": 4}, ("apply_rotary_pos_emb", "rms_norm", "forward")),
    "gemma2": ({"head_dim": 16, "sliding_window": 4}, ("apply_rotary_pos_emb", "forward")),
    "qwen3": ({"head_dim": 16}, ("apply_rotary_pos_emb", "rms_norm", "forward")),
    "phi3": ({}, ("rms_norm", "forward")),
    "phi": ({}, ("forward",)),
    "stablelm": ({}, ("apply_rotary_pos_emb", "forward")),
    "olmo2": ({}, ("rms_norm", "forward")),
    "cohere": ({}, ("forward",)),
    "gpt_neox": ({}, ("generate",)),
    "falcon": ({"multi_query": True}, ("generate",)),
    "granite": ({}, ("apply_rotary_pos_emb", "rms_norm", "forward")),
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, ("apply_rotary_pos_emb", "rms_norm", "forward")),
    "deepseek_v3": (
        {
            "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        },
        ("rms_norm", "forward"),
    ),
    "qwen2_vl_text": (
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        ("rms_norm", "forward"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", OTHERS)
@each_attention
def test_other_models(tiny: Make, model_type: str, attn: str) -> None:
    changes, operators = OTHERS[model_type]
    if model_type == "gemma2" and attn == "sdpa":
        pytest.skip("gemma2 caps its scores, which SDPA cannot")
    make = text_of_qwen2_vl if model_type == "qwen2_vl_text" else functools.partial(tiny, model_type)
    model = make(attn=attn, **changes)
    generates = hasattr(model, "generate")

    @torch.no_grad()
    def call() -> Any:
        results = [model(IDS)[0], model(IDS[:1, :1])[0], model(LEFT_PADDED, attention_mask=MASK)[0]]
        if generates:
            results.append(model.generate(LEFT_PADDED, attention_mask=MASK, max_new_tokens=3, do_sample=False))
        return results

    assert_identical(call, *operators)


def test_every_head_with_a_key_of_its_own_whatever_the_config_says(tiny: Make) -> None:
    # Latent attention makes a key for each head; SDPA is told to group and finds groups of one. So do bailing_hybrid
    # and kimi_linear.
    model = tiny(
        "deepseek_v2", num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    )  # fmt: skip

    @torch.no_grad()
    def call() -> Any:
        return model(IDS).logits, model.generate(IDS, max_new_tokens=3, num_beams=2, do_sample=False)

    assert_identical(call, "rms_norm", "sdpa_attention_forward")


def text_of_qwen2_vl(attn: str, **changes: Any) -> Model:
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

    config = Qwen2VLTextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen2VLTextModel._from_config(config, attn_implementation=attn).eval()


def test_esm_rotates_in_float32() -> None:
    from transformers import EsmConfig, EsmModel

    config = EsmConfig(
        vocab_size=33, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        position_embedding_type="rotary", pad_token_id=1, mask_token_id=32, token_dropout=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = EsmModel(config).eval()
    ids = torch.tensor([[4, 5, 6, 7, 1], [9, 8, 7, 6, 5]])
    with torch.no_grad():
        assert_identical(lambda: model(ids, attention_mask=(ids != 1).long())[0], "apply_rotary_pos_emb")


# ---------------------------------------------------------------- odd and legal: operators

B, H, G, L, D = 2, 4, 2, 7, 16
ATTENTION: dict[str, tuple[str, Callable[..., Any]]] = {
    "eager": ("eager_attention_forward", modeling_llama.eager_attention_forward),
    "sdpa": ("sdpa_attention_forward", sdpa_attention_forward),
}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def q_k_v(batch: int = B) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return numbers(batch, H, L, D), numbers(batch, G, L, D, seed=1), numbers(batch, G, L, D, seed=2)


def layer(**attributes: Any) -> LlamaAttention:
    module = LlamaAttention(
        LlamaConfig(hidden_size=H * D, num_attention_heads=H, num_key_value_heads=G, head_dim=D), layer_idx=0
    ).eval()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def assert_attention_identical(attn: str, *args: Any, **kwargs: Any) -> None:
    operator, function = ATTENTION[attn]
    assert_identical(lambda: function(*args, scaling=0.25, **kwargs)[0], operator)


@each_attention
@pytest.mark.parametrize("shape", [(B, 1, 1, L), (1, 1, L, L), (B, H, L, L), (1, 1, 1, L), (L, L)], ids=str)
@pytest.mark.parametrize("boolean", [False, True], ids=["additive", "boolean"])
def test_masks_that_broadcast(attn: str, shape: tuple[int, ...], boolean: bool) -> None:
    if boolean and attn == "eager":
        pytest.skip("added to the scores, a boolean mask is wrong")
    mask = torch.zeros(shape) if not boolean else torch.ones(shape, dtype=torch.bool)
    assert_attention_identical(attn, layer(), *q_k_v(), mask)


@each_attention
def test_one_query_token_and_longer_keys(attn: str) -> None:
    q, k, v = q_k_v()
    assert_attention_identical(attn, layer(), q[:, :, -1:], k, v, None)
    assert_attention_identical(attn, layer(), q[:, :, -3:], k, v, torch.zeros(B, 1, 3, L))


@each_attention
def test_cross_attention_to_other_lengths_and_widths(attn: str) -> None:
    q, k, v = numbers(B, H, L, D), numbers(B, G, 30, D), numbers(B, G, 30, 8)
    assert_attention_identical(attn, layer(is_causal=False), q, k, v, None)


@each_attention
def test_learned_queries_of_batch_1(attn: str) -> None:
    q, k, v = q_k_v()
    assert_attention_identical(attn, layer(is_causal=False), q[:1], k, v, None)


@each_attention
def test_one_learned_query_of_batch_1_that_pools(attn: str) -> None:
    # One query sees every key, so that causal or not makes no difference and nobody sets is_causal.
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    q, k, v = q_k_v()
    assert_attention_identical(attn, module, q[:1, :, :1], k, v, None)


@each_attention
def test_cross_attention_to_one_memory_for_the_whole_batch(attn: str) -> None:
    q, k, v = q_k_v()
    assert_attention_identical(attn, layer(is_causal=False), q, k[:1], v[:1], None)


def test_sdpa_groups_by_the_heads_it_is_given() -> None:
    # Without a mask SDPA gets enable_gqa and takes any number of keys that divides the queries.
    q, _, _ = q_k_v()
    assert_attention_identical("sdpa", layer(), q, q, q, None)


def test_no_sequences_in_eager_attention() -> None:
    q, k, v = q_k_v()
    assert_attention_identical("eager", layer(), q[:0], k[:0], v[:0], None)


@each_attention
def test_vmap_over_attention(attn: str) -> None:
    operator, function = ATTENTION[attn]
    module = layer()
    stacked = tuple(torch.stack([x, x + 1]) for x in q_k_v())
    assert_identical(
        lambda: torch.vmap(lambda q, k, v: function(module, q, k, v, None, scaling=0.25)[0])(*stacked), operator
    )


def rope_arguments() -> tuple[torch.Tensor, ...]:
    return numbers(B, H, L, D), numbers(B, G, L, D, seed=1), numbers(1, L, D, seed=2), numbers(1, L, D, seed=3)


ROPE: dict[str, Callable[..., Any]] = {
    "unsqueeze_dim=2": lambda f, q, k, c, s: f(q.transpose(1, 2), k.transpose(1, 2), c, s, unsqueeze_dim=2),
    "unsqueeze_dim=-2": lambda f, q, k, c, s: f(q.transpose(1, 2), k.transpose(1, 2), c, s, unsqueeze_dim=-2),
    "unsqueeze_dim=-3": lambda f, q, k, c, s: f(q, k, c, s, unsqueeze_dim=-3),
    "unsqueeze_dim=0": lambda f, q, k, c, s: f(q, k, c[0], s[0], unsqueeze_dim=0),
    "no batch": lambda f, q, k, c, s: f(q[0], k[0], c[0], s[0], unsqueeze_dim=0),
    "bf16 q, fp32 cos": lambda f, q, k, c, s: f(q.bfloat16(), k.bfloat16(), c, s),
    "bf16 q, fp32 k": lambda f, q, k, c, s: f(q.bfloat16(), k, c, s),
    "fp32 q, bf16 cos": lambda f, q, k, c, s: f(q, k, c.bfloat16(), s.bfloat16()),
    "no sequences": lambda f, q, k, c, s: f(q[:0], k[:0], c, s),
    "no sequences in cos": lambda f, q, k, c, s: f(q[:0], k[:0], c[:0], s[:0]),
    "no tokens": lambda f, q, k, c, s: f(q[:, :, :0], k[:, :, :0], c[:, :0], s[:, :0]),
    "one token": lambda f, q, k, c, s: f(q[:, :, :1], k[:, :, :1], c[:, :1], s[:, :1]),
    "one head": lambda f, q, k, c, s: f(q[:, :1], k[:, :1], c, s),
    "positions of each row": lambda f, q, k, c, s: f(q, k, c.expand(B, L, D), s.expand(B, L, D)),
    "vmap": lambda f, q, k, c, s: torch.vmap(lambda q, k: f(q, k, c, s))(torch.stack([q, q]), torch.stack([k, k])),
    "vmap over cos": lambda f, q, k, c, s: torch.vmap(lambda c: f(q, k, c, c))(torch.stack([c, s])),
    "func.grad": lambda f, q, k, c, s: torch.func.grad(lambda q: f(q, k, c, s)[0].square().sum())(q),
    "jvp": lambda f, q, k, c, s: torch.func.jvp(lambda q: f(q, k, c, s)[0], (q,), (q,)),
    "inference mode": lambda f, *a: torch.inference_mode()(f)(*a),
    "meta": lambda f, *a: f(*(x.to("meta") for x in a)),
    "packed tokens": lambda f, q, k, c, s: f(q[0].transpose(0, 1), k[0].transpose(0, 1), c[0], s[0]),
    "one cos without a batch": lambda f, q, k, c, s: f(q, k, c[0], s[0], unsqueeze_dim=-3),
}


@pytest.mark.parametrize("case", ROPE)
def test_rotary_calls(case: str) -> None:
    arguments = rope_arguments()
    assert_identical(lambda: ROPE[case](apply_rotary_pos_emb, *arguments), "apply_rotary_pos_emb")


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Subclass(torch.Tensor):
    pass


def parametrized() -> LlamaRMSNorm:
    norm = LlamaRMSNorm(64)
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())
    return norm


NORM: dict[str, Callable[[torch.Tensor], Any]] = {
    "one token without batch": lambda x: LlamaRMSNorm(64)(x[0, 0]),
    "five dimensions": lambda x: LlamaRMSNorm(64)(x.view(1, 2, 7, 1, 64)),
    "no sequences": lambda x: LlamaRMSNorm(64)(x[:0]),
    "bf16 input": lambda x: LlamaRMSNorm(64)(x.bfloat16()),
    "float64 input": lambda x: LlamaRMSNorm(64)(x.double()),
    "one column": lambda x: LlamaRMSNorm(1)(x[..., :1]),
    "parametrized weight": lambda x: parametrized().forward(x),
    "tensor subclass": lambda x: LlamaRMSNorm(64)(x.as_subclass(Subclass)).as_subclass(torch.Tensor),
    "nested": lambda x: LlamaRMSNorm(64)(torch.nested.nested_tensor([x[0], x[1][:3]], layout=torch.jagged)).values(),
    "vmap": lambda x: torch.vmap(LlamaRMSNorm(64))(x.clone()),
}


@pytest.mark.parametrize("case", NORM)
def test_norm_calls(case: str) -> None:
    x = numbers(2, 7, 64)
    assert_identical(lambda: NORM[case](x), "rms_norm")


# ---------------------------------------------------------------- odd and legal: models


@each_attention
def test_model_calls(tiny: Make, attn: str) -> None:
    model = tiny(attn=attn)
    rows = torch.arange(L)[None]
    additive = torch.zeros(B, 1, L, L).masked_fill(torch.ones(L, L).triu(1).bool(), torch.finfo(torch.float32).min)
    calls: list[Callable[[], Any]] = [
        lambda: model(IDS, position_ids=rows).logits,
        lambda: model(IDS, position_ids=rows.expand(B, L)).logits,
        lambda: model(IDS, attention_mask=additive).logits,
        lambda: model(IDS, attention_mask=MASK.bool()).logits,
        lambda: model(IDS, attention_mask=MASK.float()).logits,
        lambda: model(IDS.int()).logits,
        lambda: model(inputs_embeds=numbers(B, L, 64)).logits,
        lambda: copy.deepcopy(model)(IDS).logits,
        lambda: pickle.loads(pickle.dumps(model))(IDS).logits,
        lambda: torch.inference_mode()(model)(IDS).logits,
    ]
    if attn == "sdpa":
        calls.append(lambda: model(IDS, attention_mask=torch.ones(L, L).tril().bool().expand(B, 1, L, L)).logits)
    for call in calls:
        with torch.no_grad():
            assert_identical(call, *OPERATORS[attn])


@each_attention
def test_functorch(tiny: Make, attn: str) -> None:
    model = tiny(attn=attn)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def outputs(parameters: Any, buffers: Any) -> torch.Tensor:
        result = torch.func.functional_call(model, (parameters, buffers), (IDS,), {"use_cache": False}).logits
        assert isinstance(result, torch.Tensor)
        return result

    assert_identical(lambda: outputs(parameters, buffers), *OPERATORS[attn])
    assert_identical(lambda: torch.func.grad(lambda p: outputs(p, buffers).square().sum())(parameters), "rms_norm")
    stacked = torch.func.stack_module_state([model, tiny(attn=attn, seed=1)])
    assert_identical(lambda: torch.vmap(outputs)(*stacked), *OPERATORS[attn])
    embedded = numbers(2, 1, L, 64)
    assert_identical(lambda: torch.vmap(lambda e: model(inputs_embeds=e, use_cache=False).logits)(embedded))
    assert_identical(lambda: torch.vmap(lambda i: model(i, use_cache=False).logits)(IDS[:, None]), "forward")


def test_threads(tiny: Make) -> None:
    model = tiny()

    def call() -> Any:
        results: list[Any] = [None] * 4

        def work(place: int) -> None:
            with torch.no_grad():
                results[place] = model(IDS + place).logits

        threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    assert_identical(call, *OPERATORS["sdpa"])


def test_meta_model(tiny: Make) -> None:
    with torch.device("meta"):
        model = tiny()
    # Without a mask, Transformers itself reads values to look for packed sequences.
    mask = torch.zeros(B, 1, L, L, device="meta")
    assert_identical(lambda: model(IDS.to("meta"), attention_mask=mask, use_cache=False).logits, *OPERATORS["sdpa"])


@pytest.mark.parametrize("ids", ["fake", "real"])
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_fake_tensors(tiny: Make, ids: str, symbolic: bool) -> None:
    model = tiny()

    def call() -> Any:
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv() if symbolic else None)
        given = mode.from_tensor(IDS) if ids == "fake" else IDS
        with mode:
            return [int(size) for size in model(given, use_cache=False).logits.shape]

    assert_identical(call, *OPERATORS["sdpa"])


class Reads(TorchFunctionMode):
    """Fails on anything that would compute: reading metadata is all that class A may do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__ in ("__get__", "__len__", "size", "dim"), func
        return func(*args, **(kwargs or {}))


def test_class_a_only_reads_metadata() -> None:
    arguments = rope_arguments()
    with og.installed("transformers"):
        sites = {site.guard.contract.name: site for site in api._installers["transformers"].sites}
        check = sites["apply_rotary_pos_emb"].guard.checks(("A",)).before
        with Reads():
            check(*arguments, 1)


# ---------------------------------------------------------------- odd and legal: tracing


def trace_of(mode: str, call: Callable[..., Any], *args: Any) -> str:
    # Warnings as they are: a tracer that stumbles over a guard warns first.
    return str(make_fx(call, tracing_mode=mode, _allow_non_fake_inputs=True)(*args).code)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_make_fx_of_a_model(tiny: Make, mode: str) -> None:
    model = tiny(attn="eager")
    mask = torch.zeros(B, 1, L, L)
    assert_identical(lambda: trace_of(mode, lambda i: model(i, attention_mask=mask, use_cache=False).logits, IDS))


def test_make_fx_of_the_rotary_embedding_leaves_symbols_alone() -> None:
    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos, sin)

    def call() -> Any:
        graph = make_fx(rotate, tracing_mode="symbolic")(*rope_arguments())
        sizes = [str(size) for node in graph.graph.nodes if node.op == "placeholder" for size in node.meta["val"].shape]
        return sorted(str(node.target) for node in graph.graph.nodes), sizes

    assert_identical(call, "apply_rotary_pos_emb")


def exported(model: Model, *, strict: bool, dynamic: bool) -> torch.export.ExportedProgram:
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    shapes = {"input_ids": sizes, "use_cache": None} if dynamic else None
    arguments = {"input_ids": IDS, "use_cache": False}
    return torch.export.export(model, (), arguments, dynamic_shapes=shapes, strict=strict)


@pytest.mark.parametrize(("strict", "dynamic"), [(False, True), (True, True)], ids=["non-strict", "strict"])
def test_export(tiny: Make, strict: bool, dynamic: bool) -> None:
    model = tiny(attn="eager", num_hidden_layers=1)
    plain = exported(model, strict=strict, dynamic=dynamic)
    with og.installed("transformers"):
        guarded = exported(model, strict=strict, dynamic=dynamic)
    assert [str(n.target) for n in guarded.graph.nodes if n.op == "call_function"] == [
        str(n.target) for n in plain.graph.nodes if n.op == "call_function"
    ]
    assert guarded.range_constraints == plain.range_constraints
    assert guarded.state_dict.keys() == plain.state_dict.keys()
    # Names by which tools find a weight in the program.
    assert guarded.graph_signature.inputs_to_parameters == plain.graph_signature.inputs_to_parameters


class Logits(torch.nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> Any:
        return self.model(ids, use_cache=False).logits


def test_jit_trace(tiny: Make) -> None:
    module = Logits(tiny(attn="sdpa"))

    def call() -> tuple[torch.Tensor, Counter[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            traced = torch.jit.trace(module, (IDS,), check_trace=False)
        return traced(IDS.flip(0)).detach(), Counter(str(warning.category.__name__) for warning in caught)

    plain, plain_warnings = call()
    with og.installed("transformers"):
        guarded, guarded_warnings = call()
    assert_same(plain, guarded)
    # `if size != other:` on traced sizes makes torch warn that the trace might be incorrect.
    assert guarded_warnings == plain_warnings


# ---------------------------------------------------------------- odd and legal: token ids


def test_a_forward_pre_hook_that_makes_ids_valid(tiny: Make) -> None:
    model = tiny()
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: (args[0].clamp(0, 95),))
    assert_identical(lambda: model(torch.tensor([[1, -1, 100]])).logits, "forward")


class Wrapping(torch.nn.Embedding):
    """An embedding that takes ids beyond its rows, as textual inversion and decoupled tables do."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids % self.num_embeddings)


def test_an_embedding_class_that_takes_other_ids(tiny: Make) -> None:
    model = tiny()
    model.model.embed_tokens = Wrapping(96, 64)
    assert_identical(lambda: model(torch.tensor([[1, -1, 100]])).logits, "forward")


def test_decoupled_embedding_of_idefics() -> None:
    vision = {
        "image_size": 16, "patch_size": 8, "embed_dim": 32, "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 32,
    }  # fmt: skip
    config = IdeficsConfig(
        vocab_size=96, additional_vocab_size=4, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, cross_layer_interval=1, use_resampler=False, vision_config=vision,
    )  # fmt: skip
    torch.manual_seed(0)
    model = IdeficsForVisionText2Text(config).eval()
    ids = torch.tensor([[1, 97, 5, 6]])  # 97 is in the additional table
    pixels, seen = numbers(1, 1, 3, 16, 16), torch.ones(1, 4, 1)
    with torch.no_grad():
        assert_identical(
            lambda: (
                model(
                    input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids), image_attention_mask=seen
                ).logits
            )
        )


class WithImages(LlamaForCausalLM):
    """Replaces the placeholder -200 before the decoder sees it, as LLaVA's own code does."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.model.embed_tokens(input_ids.clamp(min=0))
        return super().forward(input_ids=None, inputs_embeds=inputs_embeds, **kwargs)


def test_placeholders_that_a_subclass_replaces(tiny: Make) -> None:
    model = WithImages(tiny().config).eval()
    ids = torch.tensor([[1, -200, 5]])
    assert_identical(lambda: model(ids).logits)
    assert_identical(lambda: model.generate(ids, max_new_tokens=3, do_sample=False), "generate")


def test_generate_from_embeddings_with_placeholder_ids(tiny: Make) -> None:
    model = tiny()
    embedded = model.get_input_embeddings()(torch.tensor([[1, 2, 5]])).detach()
    ids = torch.tensor([[1, -200, 5]])  # only carried along: the first step reads the embeddings
    assert_identical(
        lambda: model.generate(input_ids=ids, inputs_embeds=embedded, max_new_tokens=3, do_sample=False), "generate"
    )
