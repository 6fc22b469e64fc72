"""Where NaN and infinities come from: `og.first_nonfinite` and `llm-op-guard nan`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import math
import os
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

import llm_op_guard as og
from llm_op_guard import seeking
from llm_op_guard.cli import main as command
from llm_op_guard.nonfinite import tensors
from llm_op_guard.nonfinite.calls import uncompiled
from llm_op_guard.report.terminal import Terminal

INF, NAN = math.inf, math.nan
ORIGINAL_CALL = nn.Module.__call__


@pytest.fixture(autouse=True)
def nothing_stays(no_alarm: None) -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert nn.Module.__call__ is ORIGINAL_CALL


def module(forward: Callable[..., Any], name: str = "Custom", **members: Any) -> Any:
    """A module whose class has this name and whose forward is this function of it and its inputs."""
    made = type(name, (nn.Module,), {"forward": forward})()
    for member, value in members.items():
        setattr(made, member, value)
    return made


def of_one(forward: Callable[[Any], Any], name: str = "Custom") -> Any:
    return module(lambda self, x: forward(x), name)


def found(model: Any, *args: Any, **kwargs: Any) -> Any:
    finding = og.first_nonfinite(model, *args, **kwargs)
    assert finding is not None
    assert str(finding).startswith(finding.summary)
    return finding


def who(finding: Any) -> tuple[str, str, str]:
    return finding.kind, finding.name, finding.class_name


# ---------------------------------------------------------------- parameters and buffers


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("model.embed_tokens.weight", "Embedding"),
        ("model.layers.0.input_layernorm.weight", "LlamaRMSNorm"),
        ("model.layers.0.self_attn.k_proj.weight", "Linear"),
        ("model.layers.1.mlp.down_proj.weight", "Linear"),
        ("lm_head.weight", "Linear"),
    ],
)
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_broken_weight_of_a_model_is_named(tiny: Any, name: str, cls: str, value: float) -> None:
    """`nan-weight-greedy` of the cases: greedy generation gives token 0 for ever."""
    model = tiny(tie_word_embeddings=False)
    weight = model.get_parameter(name)
    index = (3,) * weight.ndim
    with torch.no_grad():
        weight[index] = value
    ids = torch.tensor([[1, 3, 5, 3]])
    for call in (model, model.generate):
        finding = found(call, ids)
        assert who(finding) == ("parameter", name, cls)
        assert finding.place.index == index
        assert (finding.place.count, finding.place.total) == (1, weight.numel())
        assert (finding.model, finding.call, finding.certain) == ("LlamaForCausalLM", 1, True)


def test_the_diagnosis_of_a_parameter(tiny: Any) -> None:
    model = tiny()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = NAN
    assert str(og.first_nonfinite(model, torch.tensor([[1, 2]]))) == (
        "model.layers.1.mlp.down_proj.weight (parameter of Linear): nan at [3, 5] (1 of 4096 elements), "
        "expected finite numbers\n"
        "\n"
        "  weight  float32[64, 64] cpu   <- here\n"
        "  model   LlamaForCausalLM"
    )


def test_a_nan_parameter_is_told_though_nothing_came_of_it() -> None:
    model = nn.Sequential(nn.Embedding(4, 2))
    with torch.no_grad():
        model[0].weight[3, 1] = NAN
    assert who(found(model, torch.tensor([0, 1]))) == ("parameter", "0.weight", "Embedding")


def test_an_infinite_parameter_of_which_nothing_came_is_none() -> None:
    model = module(lambda self, x: x.clamp(max=self.bound), bound=nn.Parameter(torch.tensor([INF])))
    assert og.first_nonfinite(model, torch.ones(2)) is None


def test_a_parameter_that_is_used_without_a_call() -> None:
    model = module(lambda self, x: x @ self.inner.weight, inner=nn.Linear(2, 2))
    with torch.no_grad():
        model.inner.weight[0, 1] = NAN
    assert who(found(model, torch.ones(1, 2))) == ("parameter", "inner.weight", "Linear")


def test_a_parameter_written_past_torchs_count_of_changes() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        self.inner(x)
        self.inner.weight.data[1, 1] = NAN
        return self.inner(x)

    finding = found(module(forward, inner=nn.Linear(2, 2)), torch.ones(1, 2))
    assert who(finding) == ("parameter", "inner.weight", "Linear")
    assert finding.call == 2


def test_a_broken_buffer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    model[1].running_var[2] = NAN
    assert who(found(model, torch.ones(2, 3))) == ("buffer", "1.running_var", "BatchNorm1d")


def test_buffers_that_mask_or_bound_are_none() -> None:
    model = module(lambda self, x: (x + self.mask).softmax(-1).clamp(self.low, self.high))
    model.register_buffer("mask", torch.full((3, 3), -INF).triu(1))
    model.register_buffer("low", torch.tensor(-INF))
    model.register_buffer("high", torch.tensor(INF))
    assert og.first_nonfinite(model, torch.ones(3, 3)) is None
    model.forward = lambda x: (x.log() + model.mask).softmax(-1).clamp(model.low, model.high)
    assert who(found(model, -torch.ones(3, 3))) == ("output", "", "Custom")


# ---------------------------------------------------------------- outputs


def test_the_first_module_and_not_those_after_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), of_one(lambda x: torch.log(-x.abs()), "Log"), nn.Linear(2, 2), nn.ReLU())
    finding = found(model, torch.ones(1, 2))
    assert who(finding) == ("output", "1", "Log")
    assert finding.place.tensor == "output"
    assert (finding.place.index, finding.place.count, finding.place.total) == ((0, 0), 2, 2)
    assert (finding.place.dtype, finding.place.shape) == ("float32", (1, 2))
    assert math.isnan(finding.place.value)


def test_the_diagnosis_of_an_overflow() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU()).half()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[300.0, 0.0], [250.0, 0.0]]))
    finding = found(model, torch.tensor([[240.0, 1.0]]).half())
    assert str(finding) == (
        "0 (Linear): output has inf at [0, 0] (1 of 2 elements), expected finite numbers\n"
        "  what went in was finite, and so were its parameters\n"
        "  the largest finite magnitude beside it is 60000, 91.6% of what float16 holds (65504): near to overflow\n"
        "  likely cause: float16 holds no more than 65504: compute this in bfloat16 or float32\n"
        "\n"
        "  output  float16[1, 2] cpu   <- here\n"
        "  input   float16[1, 2] cpu, largest magnitude 240\n"
        "  model   Sequential"
    )
    assert (finding.place.largest, finding.place.limit) == (60000.0, 65504.0)


def test_code_between_calls_is_the_calling_modules() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.o((self.q(x) * INF).softmax(-1))

    model = nn.Sequential(module(forward, "Attention", q=nn.Linear(2, 2), o=nn.Linear(2, 2)))
    finding = found(model, torch.ones(1, 2))
    assert who(finding) == ("output", "0", "Attention")
    assert finding.surfaced == (
        "it came up between calls: 0.o (Linear) was given input with nan at [0, 0] (2 of 2 elements)"
    )


def test_the_number_of_the_call_is_told() -> None:
    log = of_one(torch.log, "Log")
    finding = found(module(lambda self, x: [self.log(x - n) for n in range(4)], log=log), torch.full((2,), 2.5))
    assert (*who(finding), finding.call) == ("output", "log", "Log", 4)
    assert "\n  call    4 of this module" in str(finding)


def test_a_module_that_is_no_submodule() -> None:
    log = of_one(lambda x: x / 0, "Divide")
    finding = found(of_one(log), torch.ones(1))
    assert who(finding) == ("output", "<a Divide that is no submodule>", "Divide")


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Holder:
    value: Any


@pytest.mark.parametrize(
    ("wrapped", "label"),
    [
        (lambda x: x, "output"),
        (lambda x: (None, x), "output[1]"),
        (lambda x: [[x]], "output[0][0]"),
        (lambda x: {"logits": x}, "output['logits']"),
        (lambda x: {"a b": x}, "output[item 0]"),
        (lambda x: Pair(1, x), "output.right"),
        (Holder, "output.value"),
        (lambda x: BaseModelOutput(last_hidden_state=x), "output.last_hidden_state"),
    ],
)
def test_outputs_are_looked_through(wrapped: Any, label: str) -> None:
    assert found(of_one(lambda x: wrapped(x / 0)), torch.ones(2)).place.tensor == label
    assert og.first_nonfinite(of_one(lambda x: wrapped(x / 2)), torch.ones(2)) is None


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e5m2, torch.float8_e4m3fn],
)
def test_every_dtype_is_read(dtype: torch.dtype) -> None:
    def poisoned(x: Tensor) -> Tensor:
        x = x.float() if dtype.itemsize == 1 else x.clone()
        x[1, 2] = NAN
        return x.to(dtype)

    finding = found(of_one(poisoned), torch.ones(3, 4).to(dtype))
    assert (finding.place.index, finding.place.count) == ((1, 2), 1)
    assert og.first_nonfinite(of_one(lambda x: x), torch.ones(3, 4).to(dtype)) is None


def test_subnormals_largest_numbers_and_empty_tensors_are_finite() -> None:
    numbers = torch.tensor([1e-45, 3.4028235e38, -3.4028235e38, 0.0])
    assert og.first_nonfinite(of_one(lambda x: (x, x[:0], x.bfloat16()[:1])), numbers) is None


# ---------------------------------------------------------------- what goes in


def test_what_the_model_was_given() -> None:
    finding = found(nn.Sequential(nn.Linear(2, 2)), torch.tensor([[1.0, NAN]]))
    assert (finding.kind, finding.name, finding.place.tensor) == ("input", "", "input")
    assert str(finding).startswith("Sequential: input has nan at [0, 1] (1 of 2 elements), expected finite numbers\n")
    assert who(found(of_one(lambda x: x["x"] + 1), {"x": torch.tensor([INF])}))[0] == "input"


def test_what_the_model_was_given_and_does_away_with() -> None:
    model = nn.Sequential(of_one(torch.nan_to_num), nn.Linear(2, 2))
    assert og.first_nonfinite(model, torch.tensor([[1.0, NAN]])) is None


def test_an_input_that_is_not_finite_hides_nothing_elsewhere() -> None:
    model = module(lambda self, x, y: self.log(x) + y, log=of_one(torch.log, "Log"))
    assert who(found(model, torch.tensor([-1.0]), y=torch.tensor([INF]))) == ("output", "log", "Log")


def test_an_input_is_judged_as_it_came_in() -> None:
    finding = found(nn.Sequential(of_one(lambda x: x.mul_(NAN), "Poison")), torch.ones(2))
    assert who(finding) == ("output", "0", "Poison")
    model = module(lambda self, x: self.poison(y=x + 1), poison=module(lambda self, y: y.mul_(NAN), "Poison"))
    assert who(found(model, torch.ones(2))) == ("output", "poison", "Poison")


# ---------------------------------------------------------------- masks


def attention(self: Any, x: Tensor, attn_mask: Tensor | None = None) -> Any:
    scores = self.q(x) @ x.transpose(-1, -2)
    if attn_mask is not None:
        scores = scores + attn_mask
    return self.o(self.softmax(scores) @ x)


def layers() -> Any:
    parts = {"q": nn.Linear(4, 4), "o": nn.Linear(4, 4), "softmax": of_one(lambda s: s.softmax(-1), "Probabilities")}
    block = module(attention, "Attention", **parts)
    return module(lambda self, x, mask: self.norm(self.block(x, attn_mask=mask)), block=block, norm=nn.LayerNorm(4))


CAUSAL = torch.full((3, 3), -INF).triu(1)


def test_a_mask_is_no_culprit() -> None:
    x = torch.randn(1, 3, 4)
    assert og.first_nonfinite(layers(), x, CAUSAL) is None
    assert og.first_nonfinite(layers(), x, mask=CAUSAL.half().float()) is None
    assert og.first_nonfinite(nn.MultiheadAttention(4, 2), x[0], x[0], x[0], attn_mask=CAUSAL) is None


def test_a_mask_hides_no_culprit() -> None:
    mask = CAUSAL.clone()
    mask[1] = -INF
    finding = found(layers(), torch.randn(1, 3, 4), mask)
    assert who(finding) == ("output", "block.softmax", "Probabilities")
    assert finding.cause == "row [0, 1] of x is -inf throughout: a softmax over it is NaN"
    assert "what went in was finite, masks apart" in str(finding)
    model = layers()
    with torch.no_grad():
        model.norm.weight[0] = NAN
    assert who(found(model, torch.randn(1, 3, 4), CAUSAL)) == ("parameter", "norm.weight", "LayerNorm")


def test_a_module_that_makes_or_passes_on_a_mask() -> None:
    def causal(self: Any, n: int) -> Tensor:
        return torch.full((n, n), -INF).triu(1) + torch.arange(n)

    def forward(self: Any, x: Tensor) -> Any:
        mask = self.alibi(x.shape[1])
        return self.inner(self.passing((x, mask))[0], mask)

    passing = of_one(lambda pair: pair, "Passing")
    model = module(forward, alibi=module(causal, "Alibi"), inner=layers(), passing=passing)
    assert og.first_nonfinite(model, torch.randn(1, 3, 4)) is None


@pytest.mark.parametrize("other", [1.0, 2.0])
def test_below_of_which_nan_came_is_told(other: float) -> None:
    """Whatever stands beside it: -inf and 0 alone look like a mask."""
    model = nn.Sequential(of_one(torch.log, "Log"), nn.Linear(2, 2))
    finding = found(model, torch.tensor([[0.0, other]]))
    assert (*who(finding), finding.place.value, finding.certain) == ("output", "0", "Log", -INF, True)


def test_below_made_by_a_layer_that_only_computes() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), of_one(lambda x: x + 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[-3e38, -3e38], [1.0, 1.0]]))
    finding = found(model, torch.ones(1, 2))
    assert (*who(finding), finding.certain) == ("output", "0", "Linear", True)


def test_below_in_the_output_alone_is_suspect() -> None:
    finding = found(nn.Sequential(of_one(lambda x: x.masked_fill(x > 2, -INF), "Head")), torch.tensor([1.0, 3.0]))
    assert (*who(finding), finding.certain) == ("output", "0", "Head", False)
    assert "suspect: the output of the model has neither NaN nor +inf; it may be meant" in str(finding)


def test_what_became_finite_again_is_suspect() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return torch.where(x > 0, self.log(x), 0.0)

    finding = found(nn.Sequential(module(forward, log=of_one(torch.log, "Log"))), torch.tensor([-1.0, 1.0]))
    assert (*who(finding), finding.certain) == ("output", "0.log", "Log", False)


def test_overflow_between_calls_is_not_blamed_on_the_norm_that_follows() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.norm(self.lin(x) * -3e38 * 10)

    model = module(forward, "Block", lin=nn.Linear(2, 2), norm=nn.LayerNorm(2))
    assert who(found(nn.Sequential(model), torch.ones(1, 2))) == ("output", "0", "Block")


def test_overflow_beside_a_mask_is_no_mask() -> None:
    def layer(self: Any, x: Tensor, attn_mask: Tensor) -> Any:
        return self.block(x, attn_mask) * 0 - 3e38 * 10 * x.abs()

    def norm(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    inner = module(layer, "Layer", block=layers().block)
    model = module(lambda self, x, mask: self.norm(self.layer(x, mask)), layer=inner, norm=of_one(norm, "Norm"))
    assert who(found(model, torch.randn(1, 3, 4), CAUSAL)) == ("output", "layer", "Layer")


def test_masks_of_torchs_own_transformer() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    x = torch.randn(2, 3, 8)
    for mode in (True, False):
        model.train(mode)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of prototypes, and masks of two kinds
            assert og.first_nonfinite(model, x, mask=CAUSAL, src_key_padding_mask=padding) is None
            assert og.first_nonfinite(model, x, src_key_padding_mask=padding) is None


# ---------------------------------------------------------------- healthy models


@pytest.mark.parametrize(
    ("model_type", "attn"),
    [*((name, attn) for name in ("llama", "gpt2", "mixtral") for attn in ("eager", "sdpa")), ("mamba", "eager")],
)
def test_healthy_models(tiny: Any, model_type: str, attn: str) -> None:
    model = tiny(model_type, attn=attn).train()
    ids = torch.arange(1, 13).reshape(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    assert og.first_nonfinite(model, ids, attention_mask=mask, labels=ids) is None
    assert og.first_nonfinite(model.eval().generate, ids, attention_mask=mask, max_new_tokens=3) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_healthy_encoders(dtype: torch.dtype) -> None:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **sizes)).to(dtype)
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    ).to(dtype)
    ids = torch.arange(1, 13).reshape(2, 6)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    for model in (bert, t5):
        assert og.first_nonfinite(model, ids, attention_mask=mask, labels=ids) is None


# ---------------------------------------------------------------- backward


def test_the_backward_pass_of_a_module() -> None:
    loss = of_one(lambda x: (x * 0).norm(dim=-1).sqrt().sum(), "Loss")
    finding = found(nn.Sequential(nn.Linear(4, 4), loss), torch.randn(2, 4))
    assert who(finding) == ("gradient", "1", "Loss")
    assert (finding.operation, finding.place.tensor) == ("SqrtBackward0", "gradient leaving SqrtBackward0")
    assert str(finding).startswith(
        "1 (Loss), backward: gradient leaving SqrtBackward0 has inf at [0] (2 of 2 elements), expected finite numbers\n"
        "  the gradient that came in was finite; SqrtBackward0 made this of it\n"
    )


def test_the_gradient_of_a_parameter() -> None:
    model = module(lambda self, x: (x * self.scale).sqrt().sum(), scale=nn.Parameter(torch.zeros(2)))
    finding = found(nn.Sequential(module(lambda self, x: self.inner(x), inner=model)), torch.ones(2))
    assert who(finding) == ("gradient", "0.inner", "Custom")
    direct = found(nn.Sequential(module(lambda self, x: self.w.sqrt().sum(), w=nn.Parameter(torch.zeros(2)))), 1)
    assert direct.place.tensor == "gradient of 0.w"


def test_the_loss_of_a_model(tiny: Any) -> None:
    ids = torch.arange(1, 7)[None]
    model = tiny()
    grow = of_one(lambda x: (x * 0).sqrt() + x, "Grow")
    model.model.layers[0].mlp.act_fn = grow
    finding = found(model, ids, labels=ids)
    assert who(finding) == ("gradient", "model.layers.0.mlp.act_fn", "Grow")
    assert og.first_nonfinite(model, ids) is None  # without a loss there is no backward pass


def test_what_becomes_zero_again_is_no_gradient_to_tell() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return torch.sqrt(self.lin(x).clamp(max=0.0).relu()).sum()

    assert og.first_nonfinite(module(forward, lin=nn.Linear(2, 2)), torch.ones(1, 2)) is None


def test_a_shared_input_blames_the_consumer_that_did_it() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = self.lin(x)
        return (self.good(h) + self.bad(h) + h).sum()

    model = module(forward, lin=nn.Linear(2, 2), good=nn.Linear(2, 2), bad=of_one(lambda h: (h * 0).sqrt(), "Bad"))
    assert who(found(model, torch.ones(1, 2))) == ("gradient", "bad", "Bad")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return checkpoint(self.bad, self.lin(x), use_reentrant=reentrant).sum()

    bad = of_one(lambda h: (h * 0).sqrt(), "Bad")
    model = module(forward, lin=nn.Linear(2, 2), bad=bad)
    if reentrant:
        with pytest.warns(og.GuardInternalWarning, match="the backward pass was not looked at"):
            assert og.first_nonfinite(model, torch.ones(1, 2)) is None
    else:
        assert who(found(model, torch.ones(1, 2))) == ("gradient", "bad", "Bad")


# ---------------------------------------------------------------- nothing is changed


def state(model: Any) -> Any:
    return {name: (x.clone(), x._version) for name, x in model.state_dict().items()}


def test_nothing_is_changed(tiny: Any) -> None:
    model = tiny(attention_dropout=0.3).train()
    model.model.embed_tokens.eval()
    ids = torch.arange(1, 7)[None]
    model(ids, labels=ids).loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    modes = {name: m.training for name, m in model.named_modules()}
    random, parameters = torch.get_rng_state(), state(model)
    assert og.first_nonfinite(model, ids, labels=ids) is None
    assert torch.equal(torch.get_rng_state(), random)
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    for name, (x, version) in state(model).items():
        assert torch.equal(x, parameters[name][0])
        assert version == parameters[name][1]
    for m in model.modules():
        assert not (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)


def test_results_and_gradients_are_those_of_the_model_alone() -> None:
    results: list[Any] = []

    def forward(self: Any, x: Tensor) -> Any:
        h = self.first(x)
        h += x  # what full backward hooks make an error
        out = self.second(self.drop(h)).pow(2).mean()
        results.append((out, h))
        return out

    model = module(forward, first=nn.Linear(3, 3), second=nn.Linear(3, 3), drop=nn.Dropout(0.5))
    x = torch.randn(2, 3)
    state = torch.get_rng_state()
    assert og.first_nonfinite(model, x) is None
    torch.set_rng_state(state)
    model(x)
    (watched, h), (plain, other) = results
    assert torch.equal(watched, plain)
    assert torch.equal(h, other)


def test_hooks_that_are_there_are_called_and_seen() -> None:
    calls: list[str] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def poison(m: Any, args: Any, output: Tensor) -> Tensor:
        calls.append("hook")
        return output / 0

    handle = model[0].register_forward_hook(poison)
    assert who(found(model, torch.ones(1, 2))) == ("output", "0", "Linear")
    assert calls == ["hook"]
    assert list(model[0]._forward_hooks) == [handle.id]


def test_no_tensor_is_kept_alive() -> None:
    kept: list[Any] = []

    def remember(x: Tensor) -> Tensor:
        y = x * NAN
        kept.append(weakref.ref(y))
        return y

    finding = og.first_nonfinite(nn.Sequential(of_one(remember), nn.Linear(2, 2)), torch.ones(1, 2))
    gc.collect()
    assert finding is not None
    assert [ref() for ref in kept] == [None]


def test_what_the_model_raises_passes() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("of the model")

    with pytest.raises(ValueError, match="of the model") as caught:
        og.first_nonfinite(nn.Sequential(nn.Linear(2, 2), of_one(fail)), torch.ones(1, 2))
    assert not hasattr(caught.value, "__notes__")
    model = nn.Sequential(of_one(lambda x: x / 0, "Divide"), nn.Sequential(nn.Identity(), of_one(fail)))
    with pytest.raises(ValueError, match="of the model") as caught:
        og.first_nonfinite(model, torch.ones(1, 2))
    (note,) = caught.value.__notes__
    assert note.startswith("before that, llm-op-guard had found this:\n0 (Divide): output has inf at [0, 0]")


def test_only_modules_are_taken() -> None:
    for wrong in (len, "model", None, nn.Linear, torch.ones(1)):
        with pytest.raises(TypeError, match=r"first_nonfinite takes an nn\.Module or a method of one, not a"):
            og.first_nonfinite(wrong)


class ByItself(nn.Module):
    """Whose calls do not go through `Module.__call__`."""

    def __call__(self, x: Tensor) -> Any:
        return x * NAN


def test_what_is_not_seen_is_said() -> None:
    for model in (ByItself(), nn.Linear(2, 2).forward):
        with pytest.warns(
            og.GuardInternalWarning, match="nothing was looked at: no module was called by its `__call__`"
        ):
            assert og.first_nonfinite(model, torch.ones(1, 2)) is None


# ---------------------------------------------------------------- all sorts of modules


def test_meta_says_nothing(tiny: Any) -> None:
    assert og.first_nonfinite(nn.Linear(2, 2, device="meta"), torch.ones(1, 2, device="meta")) is None


def test_parameters_without_memory_are_not_read() -> None:
    """FSDP frees the memory of a layer while it is not in use, and keeps its shape."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data.untyped_storage().resize_(0)
    with torch.no_grad():
        model[0].bias.fill_(NAN)

    class Frees(nn.Module):
        def forward(self, x: Any) -> Any:
            return model[0](x)

    outer = Frees()
    outer.inner = model
    assert who(found(outer, torch.ones(1, 2))) == ("parameter", "inner.0.bias", "Linear")


class Overriding(nn.Module):
    """Methods of a model's own are not called to look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def parameters(self, recurse: bool = True) -> Any:
        raise AssertionError

    named_parameters = named_modules = modules = buffers = parameters

    def forward(self) -> Tensor:
        return self.weight.square().sum().sqrt()


def test_methods_of_the_models_own_are_not_called() -> None:
    finding = found(Overriding())
    assert (finding.kind, finding.operation) == ("gradient", "SqrtBackward0")


def test_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), of_one(lambda x: x.mul_(NAN), "Poison"), nn.ReLU())
    with torch.inference_mode():
        assert who(found(model, torch.ones(1, 2))) == ("output", "1", "Poison")


def test_a_generator_is_not_consumed() -> None:
    left: list[int] = []

    def forward(self: Any, x: Tensor) -> Any:
        made = (y for y in [x, x / 0])
        left.append(id(made))
        return made

    outer = module(lambda self, x: [float(y.sum()) for y in self.inner(x)], inner=module(forward))
    assert og.first_nonfinite(outer, torch.ones(1)) is None
    assert len(left) == 1


def test_scripted_modules_are_seen_as_a_whole() -> None:
    class Divide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), Divide()))
    assert who(found(nn.Sequential(nn.Linear(2, 2), scripted), torch.ones(1, 2)))[:2] == ("output", "1")
    with torch.no_grad():
        scripted[0].weight[0, 0] = NAN
    assert found(nn.Sequential(scripted), torch.ones(1, 2)).name == "0.0.weight"


def test_compiled_models_are_called_as_they_were_written() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(of_one(torch.log, "Log"), nn.Linear(2, 2)))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    healthy = torch.ones(1, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    compiled(healthy)
    assert og.first_nonfinite(compiled, healthy) is None
    assert who(found(compiled, -healthy)) == ("output", "_orig_mod.1.0", "Log")
    compiled(healthy)


def test_wrappers() -> None:
    inner = nn.Sequential(of_one(lambda x: x / 0, "Divide"))
    assert found(nn.DataParallel(inner), torch.ones(1)).name == "module.0"


def test_a_fast_path_is_taken_all_the_same() -> None:
    """`nn.TransformerEncoder` asks whether there are hooks."""
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    with torch.no_grad():
        model.layers[0].linear2.weight[0, 0] = NAN
        assert found(model, torch.randn(1, 3, 8)).name == "layers.0.linear2.weight"


def test_modes_of_torch_see_nothing_of_it() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with Counting():
        model(torch.ones(1, 2))
    alone, seen[:] = list(seen), []
    with Counting():
        og.first_nonfinite(model, torch.ones(1, 2))
    assert seen == alone
    assert torch.func.vmap(lambda x: og.first_nonfinite(model, x) or x)(torch.ones(3, 1, 2)).shape == (3, 1, 2)


def test_tracing_is_let_alone() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    outer = module(lambda self, x: torch.jit.trace(self.inner, x, check_trace=False)(x), inner=inner)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert og.first_nonfinite(outer, torch.ones(1, 2)) is None


def test_anomaly_mode_of_autograd() -> None:
    model = nn.Sequential(nn.Linear(2, 2), of_one(lambda x: (x * 0).norm(dim=-1).sqrt().sum(), "Loss"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with torch.autograd.detect_anomaly(check_nan=False):
            assert who(found(model, torch.ones(1, 2))) == ("gradient", "1", "Loss")


def test_subclasses_of_tensors_are_let_alone() -> None:
    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    assert og.first_nonfinite(of_one(lambda x: x.as_subclass(Own) / 0), torch.ones(1)) is None


def test_watchers_side_by_side() -> None:
    """One in each thread: each sees its own calls, and the last to end restores what was there."""
    barrier, answers = threading.Barrier(2), {}

    def wait(x: Tensor) -> Tensor:
        barrier.wait(10)
        return x

    def work(number: int) -> None:
        bad = of_one(lambda x: x / number, "Divide")
        answers[number] = og.first_nonfinite(nn.Sequential(of_one(wait), bad, of_one(wait)), torch.ones(1))

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[0] is not None and answers[0].name == "1"
    assert answers[1] is None


def test_programs_are_compiled_again_when_the_last_of_several_watchers_ends() -> None:
    """Whether torch compiles is said for all threads at once, and so it is the last to end who restores it."""
    from torch._dynamo.testing import CompileCounter

    began, ended = threading.Event(), threading.Event()

    def first() -> None:
        with uncompiled(always=True):
            began.set()
            ended.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    began.wait(10)
    with uncompiled(always=True):
        ended.set()
        thread.join()
        counter = CompileCounter()
        torch.compile(lambda x: x + 1, backend=counter)(torch.ones(1))
        assert counter.frame_count == 0, "the other one watches still"
    torch.compile(lambda x: x + 1, backend=counter)(torch.ones(1))
    assert counter.frame_count == 1


def test_somebody_elses_replacement_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        present = nn.Module.__call__

        def other(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(self)
            return present(self, *args, **kwargs)

        nn.Module.__call__ = other
        return x

    linear = nn.Linear(1, 1)
    try:
        assert og.first_nonfinite(of_one(forward), torch.ones(1)) is None
        assert nn.Module.__call__.__name__ == "other"
        linear(torch.ones(1))
        assert calls == [linear]
        for _ in range(2):  # what was put in the place of ours calls it
            assert who(found(of_one(lambda x: x / 0), torch.ones(1)))[0] == "output"
        assert nn.Module.__call__.__name__ == "other"
    finally:
        nn.Module.__call__ = ORIGINAL_CALL
    assert who(found(of_one(lambda x: x / 0), torch.ones(1)))[0] == "output"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0], tensors.FINITE),
        ([1.0, INF], tensors.ABOVE),
        ([-INF, 1.0], tensors.BELOW),
        ([-INF, INF], tensors.ABOVE | tensors.BELOW),
        ([INF, NAN, -INF], tensors.NAN),
        ([], tensors.FINITE),
    ],
)
def test_kinds(values: list[float], expected: int) -> None:
    assert tensors.kinds(torch.tensor(values)) == expected
    assert tensors.kinds(torch.tensor([values, values]).T) == expected


# ---------------------------------------------------------------- the command


def program(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(text), encoding="utf-8")
    return path


def run(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...] = ()) -> tuple[Any, str]:
    """The exit code (or what SystemExit carries) and what was said, of the command in this process."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.chdir(folder)
    try:
        code: Any = seeking.main(Terminal(out), str(program(folder, text)), arguments, is_module=False)
    except SystemExit as end:
        code = end.code
    monkeypatch.undo()
    return code, out.getvalue()


def test_a_script_that_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = run(tmp_path, "nn.Linear(2, 2)(torch.ones(1, 2))", monkeypatch)
    assert (code, said) == (0, "llm-op-guard: 1 call of modules, nothing that is not finite\n")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_is_not_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a worker would be ended, and whoever waits for it would wait for ever."""
    text = """
        import os
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, float("nan"))
        if (child := os.fork()) == 0:
            try:
                model(torch.ones(1, 2))
            except BaseException:
                os._exit(5)
            os._exit(4)
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    code, said = run(tmp_path, text, monkeypatch)
    assert (code, said) == (4, "llm-op-guard: WARNING: nothing was watched: the program called no module of torch\n")


def test_a_script_that_makes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    class Divide(nn.Module):
        def forward(self, x):
            return x / 0

    def predict(model):
        try:
            model(torch.ones(1, 2))
        except Exception:
            print("swallowed")
        print("went on")

    predict(nn.Sequential(nn.Linear(2, 2), Divide()))
    """
    code, said = run(tmp_path, text, monkeypatch)
    assert code == 1
    assert said.startswith("llm-op-guard: not finite: 1 (Divide): output has ")
    assert said.endswith("\n  called from  program.py:10 in predict\n")


def test_a_training_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    class Norm(nn.Module):
        def forward(self, x):
            return (x * 0).norm(dim=-1).sqrt()

    model = nn.Sequential(nn.Linear(2, 2), Norm())
    loss = model(torch.ones(1, 2)).mean()
    loss.backward()
    """
    code, said = run(tmp_path, text, monkeypatch)
    assert code == 1
    assert said.startswith("llm-op-guard: not finite: 1 (Norm), backward: gradient leaving SqrtBackward0 has inf")
    assert said.endswith("\n  called from                     program.py:10 in <module>\n")


def test_a_checkpoint_that_computes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    from torch.utils.checkpoint import checkpoint

    class Root(nn.Module):
        def forward(self, x):
            return (x * 0).sqrt()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.root = nn.Linear(2, 2), Root()

        def forward(self, x):
            return checkpoint(self.root, self.first(x), use_reentrant=True)

    model = Outer()
    model(torch.ones(1, 2)).sum().backward()
    """
    code, said = run(tmp_path, text, monkeypatch)
    assert code == 1
    assert said.startswith("llm-op-guard: not finite: root (Root), backward: gradient leaving SqrtBackward0 has")


def test_an_optimizer_that_breaks_a_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=float("nan"))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    """
    code, said = run(tmp_path, text, monkeypatch)
    assert code == 1
    assert said.startswith(
        "llm-op-guard: not finite: 0.weight (parameter of Linear): nan at [0, 0] (4 of 4 elements), expected finite "
        "numbers\n  likely cause: it was finite in the call before: what writes parameters (an optimizer's step) came "
        "since\n"
    )
    assert "\n  call         2 of this module\n" in said


def test_a_loss_outside_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = run(tmp_path, "(nn.Linear(2, 2)(torch.ones(1, 2)) * 0).sqrt().sum().backward()", monkeypatch)
    assert code == 1
    assert "Linear, backward: gradient entering AddmmBackward0 has nan at [0, 0]" in said
    assert "the gradient came in like this: what made it lies behind the output of the model" in said


def test_a_scaler_overflows_on_purpose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    model = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 2) * 4).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    """
    code, said = run(tmp_path, text, monkeypatch)
    assert (code, said.splitlines()) == (
        0,
        [
            "llm-op-guard: gradients overflowed under a GradScaler, which skips such steps",
            "llm-op-guard: 1 call of modules, nothing that is not finite",
        ],
    )


def test_a_thread_is_let_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    import threading

    class Divide(nn.Module):
        def forward(self, x):
            return x / 0

    done = []
    thread = threading.Thread(target=lambda: (Divide()(torch.ones(1)), done.append(1)))
    thread.start()
    thread.join()
    raise SystemExit(7 if done else 8)
    """
    code, said = run(tmp_path, text, monkeypatch)
    assert code == 1
    assert said.startswith("llm-op-guard: not finite: Divide: output has inf at [0]")


def test_a_script_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = run(tmp_path, "nn.Linear(2, 2)(torch.ones(1, 3))", monkeypatch)
    assert code == 1
    assert said.startswith("Traceback (most recent call last):\n  File")
    assert said.endswith("llm-op-guard: 1 call of modules, nothing that is not finite\n")
    assert "/seeking.py" not in said
    assert run(tmp_path, "raise SystemExit(7)", monkeypatch)[0] == 7


def test_a_script_that_fails_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    class Divide(nn.Module):
        def forward(self, x):
            return x / 0

    class Check(nn.Module):
        def forward(self, x):
            raise ValueError("of the script")

    nn.Sequential(Divide(), Check())(torch.ones(1))
    """
    code, said = run(tmp_path, text, monkeypatch)
    assert code == 1
    assert said.startswith("llm-op-guard: not finite: 0 (Divide): output has inf at [0]")
    assert said.endswith("ValueError: of the script\n")


def test_a_doubt_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    class Head(nn.Module):
        def forward(self, x):
            return x.masked_fill(x > 2, -torch.inf)

    Head()(torch.tensor([1.0, 3.0]))
    """
    code, said = run(tmp_path, text, monkeypatch)
    assert code == 0
    assert said.startswith("llm-op-guard: WARNING: perhaps not meant: Head: output has -inf at [1] (1 of 2 elements)")
    assert said.endswith("llm-op-guard: 1 call of modules, nothing else that is not finite\n")


def test_a_script_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = run(tmp_path, "print(1)", monkeypatch)
    assert (code, said) == (
        0,
        "llm-op-guard: WARNING: nothing was watched: the program called no module of torch\n",
    )


def test_a_script_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert command(["nan", "/nowhere/x.py"]) == 2
    assert capsys.readouterr().err == "llm-op-guard: error: there is no file /nowhere/x.py\n"
    with contextlib.suppress(SystemExit):
        assert command(["nan"]) == 2
    assert capsys.readouterr().err.startswith("usage: llm-op-guard nan")
