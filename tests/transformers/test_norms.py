"""Norms: one class for every code that is known, what it takes and what it must not be given.

What is refused is shown unguarded first: it fails, or it computes something of another shape without a word.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import llm_op_guard as og
from llm_op_guard.install.recognise import Fingerprint, fingerprint, innermost
from llm_op_guard.integrations.transformers import norms
from llm_op_guard.integrations.transformers.known import contract_named

pytestmark = pytest.mark.usefixtures("no_alarm")

B, H, L, D = 2, 4, 7, 16
Call = Callable[[], tuple[Any, ...]]
Bad = tuple[Call, str, str]


@pytest.fixture(autouse=True)
def fixed_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


def wholes(*shape: int) -> Tensor:
    return torch.randint(1, 9, shape)


def class_named(name: str) -> Any:
    model, cls = name.split(".")
    folder, _, file = model.partition("/")
    return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{file or folder}"), cls)


@dataclass
class Norms:
    """Classes under one contract: how one of them is made, and calls of it.

    `bad` are calls with the rule they break and what happens unguarded: `error`, or `silent`.
    """

    classes: tuple[str, ...]
    make: Callable[[Any], nn.Module]
    good: dict[str, Call]
    bad: dict[str, Bad] = field(default_factory=dict)


COLUMNS: dict[str, Call] = {
    "batch": lambda: (numbers(B, L, D),),
    "heads": lambda: (numbers(B, H, L, D),),
    "one token": lambda: (numbers(1, 1, D),),
    "a row": lambda: (numbers(D),),
    "no sequences": lambda: (numbers(0, L, D),),
    "no tokens": lambda: (numbers(B, 0, D),),
    "bfloat16": lambda: (numbers(B, L, D).bfloat16(),),
    "float64": lambda: (numbers(B, L, D).double(),),
    "not contiguous": lambda: (numbers(B, D, L).transpose(1, 2),),
}


def columns(argument: str, *, whole: str = "silent", rule: str = "weight_fits") -> dict[str, Bad]:
    """What a weight of D columns does not fit; `whole` is what becomes of whole numbers, "" where they are fine."""
    bad: dict[str, Bad] = {
        "one column": (lambda: (numbers(B, L, 1),), rule, "silent"),
        "two columns": (lambda: (numbers(B, L, 2),), rule, "error"),
        "a column less": (lambda: (numbers(B, L, D - 1),), rule, "error"),
        "no columns": (lambda: (numbers(B, L, 0),), rule, "error"),
    }
    if whole:
        bad["whole numbers"] = (lambda: (wholes(B, L, D),), f"{argument}.dtype", whole)
    return bad


def width(rule: str = "width") -> dict[str, Bad]:
    """What torch's own norm over D columns rejects."""
    return {
        "one column": (lambda: (numbers(B, L, 1),), rule, "error"),
        "a column more": (lambda: (numbers(B, L, D + 1),), rule, "error"),
    }


def images(*shape: int) -> Call:
    return lambda: (numbers(*shape),)


GATED: dict[str, Call] = {
    "rows": lambda: (numbers(B * L, D), numbers(B * L, D)),
    "batch": lambda: (numbers(B, L, D), numbers(B, L, D)),
    "gate in another dtype": lambda: (numbers(B, L, D).bfloat16(), numbers(B, L, D)),
    "a gate for all rows": lambda: (numbers(B, L, D), numbers(D)),
    "a gate for each row": lambda: (numbers(B, L, D), numbers(B, L, 1)),
    "no rows": lambda: (numbers(0, D), numbers(0, D)),
    "one row": lambda: (numbers(1, D), numbers(1, D)),
}
BAD_GATES: dict[str, Bad] = {
    "a gate of more sequences": (lambda: (numbers(1, L, D), numbers(B, L, D)), "gate_fits", "silent"),
    "a gate of another width": (lambda: (numbers(B, L, D), numbers(B, L, D - 1)), "gate_fits", "error"),
    "one column": (lambda: (numbers(B, L, 1), numbers(B, L, 1)), "weight_fits", "silent"),
}


def of_width(cls: Any, **options: Any) -> nn.Module:
    norm: nn.Module = cls(D, **options)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return norm


RULES: dict[str, Norms] = {
    "rms_norm": Norms(
        ("llama.LlamaRMSNorm", "gpt_oss.GptOssRMSNorm", "helium.HeliumRMSNorm"), of_width, COLUMNS,
        columns("hidden_states"),
    ),
    "rms_norm in the input's dtype": Norms(
        ("gradium_phonon_tts.GradiumPhononTTSTimestepNorm", "pocket_tts.PocketTTSTimestepNorm"), of_width,
        {name: call for name, call in COLUMNS.items() if name != "bfloat16"},
        # The variance of one number is nothing.
        {name: row for name, row in columns("hidden_states", whole="error").items() if name != "one column"},
    ),
    "t5_layer_norm": Norms(
        ("t5.T5LayerNorm",), of_width, {**COLUMNS, "whole numbers": lambda: (wholes(B, L, D),)},
        columns("hidden_states", whole=""),
    ),
    "rms_norm_of_x": Norms(
        ("gemma.GemmaRMSNorm", "moshi.MoshiRMSNorm", "llama4.Llama4TextRMSNorm",
         "muse_spark.MuseSparkTextCenteredRMSNorm", "muse_spark.MuseSparkTextInputScaledRMSNorm",
         "qwen4_exp.Qwen4ExpTextRMSNorm"), of_width, COLUMNS, columns("x"),
    ),
    "rms_norm_of_x in groups": Norms(
        ("qwen4_exp.Qwen4ExpTextRMSNorm",), lambda cls: of_width(cls, group_size=8),
        {name: call for name, call in COLUMNS.items() if not name.startswith("no ")},
        {name: (call, rule, "error" if name == "one column" else today)
         for name, (call, rule, today) in columns("x").items()},
    ),
    "rms_norm_of_tensor": Norms(
        ("imagegpt.ImageGPTLayerNorm",), of_width, COLUMNS, columns("tensor", whole="error"),
    ),
    "rms_norm_with_scale": Norms(("gemma3n.Gemma3nRMSNorm",), of_width, COLUMNS, columns("hidden_states")),
    "rms_norm_with_scale without": Norms(
        ("gemma4.Gemma4RMSNorm",), lambda cls: cls(D, with_scale=False), {**COLUMNS, "another width": images(B, L, 3)},
        {"whole numbers": (lambda: (wholes(B, L, D),), "hidden_states.dtype", "silent")},
    ),
    "unweighted_rms_norm": Norms(
        ("inkling2.Inkling2UnweightedRMSNorm",), lambda cls: cls(), {**COLUMNS, "one column": images(B, L, 1)},
        {"whole numbers": (lambda: (wholes(B, L, D),), "hidden_states.dtype", "silent")},
    ),
    "unweighted_rms_norm_of_x": Norms(
        ("nanochat.NanoChatRMSNorm", "dory.DoryL2Norm", "deepseek_v4.DeepseekV4UnweightedRMSNorm",
         "hy_v4.HYV4UnweightedRMSNorm"), lambda cls: cls(), {**COLUMNS, "one column": images(B, L, 1)},
        {"whole numbers": (lambda: (wholes(B, L, D),), "x.dtype", "silent")},
    ),
    "affine_norm_of_x": Norms(("xlstm.xLSTMRMSNorm",), of_width, COLUMNS, columns("x")),
    "affine_norm_of_x with a bias": Norms(
        ("xlstm.xLSTMRMSNorm",), lambda cls: of_width(cls, use_bias=True, use_weight=False), COLUMNS,
        columns("x", rule="bias_fits"),
    ),
    "affine_norm_of_x without": Norms(
        ("xlstm.xLSTMRMSNorm",), lambda cls: of_width(cls, use_weight=False), {**COLUMNS, "3 columns": images(B, L, 3)},
    ),
    "affine_norm_of_x of ESMFold": Norms(
        ("esm/esmfold.EsmFoldLayerNorm",), of_width,
        {name: call for name, call in COLUMNS.items() if name != "float64"},
        {name: (call, rule, "error") for name, (call, rule, _) in columns("x").items()},
    ),
    "gated_rms_norm": Norms(
        ("qwen3_next.Qwen3NextRMSNormGated", "kimi_linear.KimiLinearRMSNormGated"), of_width, GATED,
        {**BAD_GATES, "no gate": (lambda: (numbers(B, L, D), None), "gate.type", "error")},
    ),
    "grouped_rms_norm": Norms(
        ("mamba2.MambaRMSNormGated",), lambda cls: of_width(cls, group_size=8),
        {**GATED, "no gate": lambda: (numbers(B, L, D),), "None": lambda: (numbers(B, L, D), None)},
        {name: (call, rule, "error" if name == "one column" else today)
         for name, (call, rule, today) in BAD_GATES.items()},
    ),
    "grouped_rms_norm of groups that do not fit": Norms(
        ("mamba2.MambaRMSNormGated",), lambda cls: of_width(cls, group_size=5), {},
        {"16 columns in groups of 5": (lambda: (numbers(B, L, D),), "whole_groups", "error")},
    ),
    "grouped_rms_norm_of_sequences": Norms(
        ("falcon_h1.FalconH1RMSNormGated",), lambda cls: of_width(cls, n_groups=2, norm_before_gate=False),
        {"rows": GATED["rows"], "batch": GATED["batch"], "no gate": lambda: (numbers(B, L, D),)},
        {
            "heads": (lambda: (numbers(B, H, L, D),), "hidden_states.shape", "error"),
            "a gate of more sequences": BAD_GATES["a gate of more sequences"],
            "half the columns": (lambda: (numbers(B, L, D // 2),), "weight_fits", "error"),
        },
    ),
    "grouped_rms_norm_of_sequences in groups that do not fit": Norms(
        ("falcon_h1.FalconH1RMSNormGated",), lambda cls: of_width(cls, n_groups=5), {},
        {"16 columns in 5 groups": (lambda: (numbers(B, L, D),), "whole_groups", "error")},
    ),
    "affine_layer_norm": Norms(
        ("cohere.CohereLayerNorm", "deberta.DebertaLayerNorm"), of_width, COLUMNS,
        {
            "one column": (lambda: (numbers(B, L, 1),), "weight_fits", "silent"),
            "two columns": (lambda: (numbers(B, L, 2),), "weight_fits", "error"),
            "whole numbers": (lambda: (wholes(B, L, D),), "hidden_states.dtype", "silent"),
        },
    ),
    "affine_layer_norm in the input's dtype": Norms(
        ("pocket_tts.PocketTTSFlowLayerNorm",), of_width, COLUMNS,
        {"one column": (lambda: (numbers(B, L, 1),), "weight_fits", "silent")},
    ),
    "affine_layer_norm without": Norms(
        ("pocket_tts.PocketTTSFlowLayerNorm",), lambda cls: of_width(cls, elementwise_affine=False),
        {**COLUMNS, "another width": images(B, L, 3)},
    ),
    "affine_layer_norm of heads": Norms(
        ("cohere.CohereLayerNorm", "chameleon.ChameleonLayerNorm"), lambda cls: cls((H, D)),
        {"heads": images(B, L, H, D), "rows": images(B * L, H, D), "none": images(0, H, D)},
        {
            "heads on another axis": (lambda: (numbers(B, H, L, D),), "weight_fits", "error"),
            "one head": (lambda: (numbers(B, L, 1, D),), "weight_fits", "silent"),
        },
    ),
    "layer_norm": Norms(
        ("olmo.OlmoLayerNorm", "esmfold2.EsmFold2LayerNorm", "videoprism.VideoPrismLayerNorm", "esmc.EsmcLayerNorm"),
        of_width, {name: COLUMNS[name] for name in ("batch", "heads", "one token", "no tokens")}, width(),
    ),
    "layer_norm_of_input": Norms(
        ("nemotron.NemotronLayerNorm1P",), of_width,
        {name: COLUMNS[name] for name in ("batch", "heads", "one token", "no tokens")}, width(),
    ),
    "layer_norm_of_features": Norms(
        ("convnext.ConvNextLayerNorm",), lambda cls: cls(D, data_format="channels_first"),
        {"images": images(B, D, 3, 5), "one pixel": images(1, D, 1, 1), "none": images(0, D, 3, 5)},
        {
            "channels last": (images(B, 3, 5, D), "width", "error"),
            "one channel": (images(B, 1, 3, 5), "width", "error"),
            "no batch": (images(D, 3, 5), "features.shape", "error"),
        },
    ),
    "layer_norm_of_features with channels last": Norms(
        ("sam.SamLayerNorm",), of_width, {"images": images(B, 3, 5, D), "rows": images(B, D), "one": images(D)},
        {"channels first": (images(B, D, 3, 5), "width", "error")},
    ),
    "layer_norm_2d": Norms(
        ("eomt.EomtLayerNorm2d",), of_width, {"images": images(B, D, 3, 5), "none": images(0, D, 3, 5)},
        {
            "channels last": (images(B, 3, 5, D), "width", "error"),
            "no batch": (images(D, 3, 5), "hidden_state.shape", "error"),
        },
    ),
    "layer_norm_of_channels": Norms(
        ("vitdet.VitDetLayerNorm",), of_width, {"images": images(B, D, 3, 5), "one pixel": images(B, D, 1, 1)},
        {
            "one channel": (images(B, 1, 3, 5), "x.shape", "silent"),
            "channels last": (images(B, 3, 5, D), "x.shape", "error"),
        },
    ),
    "layer_norm_of_rows": Norms(
        ("squeezebert.SqueezeBertLayerNorm",), of_width, {"rows": images(B, D, L), "one": images(1, D, 1)},
        {
            "channels last": (images(B, L, D), "width", "error"),
            "an image": (images(B, D, 3, 5), "x.shape", "error"),
        },
    ),
    "layer_norm_per_head": Norms(
        ("stablelm.StableLmLayerNormPerHead",), lambda cls: cls(D, H), {"heads": images(B, H, L, D)},
        {"more heads than norms": (images(B, H + 1, L, D), "norm_for_each_head", "silent")},
    ),
    "layer_norm_with_gamma": Norms(
        ("moonshine_streaming.MoonshineStreamingLayerNorm",), of_width,
        {name: COLUMNS[name] for name in ("batch", "heads", "one token", "no tokens")},
        width("x.shape"),
    ),
    "group_norm_of_input": Norms(
        ("emu3.Emu3VQVAEGroupNorm",), lambda cls: cls(num_groups=4, num_channels=D),
        {"images": images(B, D, 3, 5), "rows": images(B, D, L), "one": images(B, D)},
        {"other channels": (images(B, 8, 3, 5), "input.shape", "error")},
    ),
    "group_norm_of_input without": Norms(
        ("emu3.Emu3VQVAEGroupNorm",), lambda cls: cls(num_groups=4, num_channels=D, affine=False),
        {"images": images(B, D, 3, 5), "other channels": images(B, 8, 3, 5)},
    ),
    "frozen_batch_norm": Norms(
        ("detr.DetrFrozenBatchNorm2d",), of_width,
        {"images": images(B, D, 3, 5), "clips": images(B, 2, D, 3, 5), "none": images(0, D, 3, 5),
         "whole numbers": lambda: (wholes(B, D, 3, 5),)},
        {
            "one channel": (images(B, 1, 3, 5), "x.shape", "silent"),
            "channels last": (images(B, 3, 5, D), "x.shape", "error"),
        },
    ),
}  # fmt: skip


def same(one: Any, other: Any) -> bool:
    ones, others = (value if isinstance(value, tuple) else (value,) for value in (one, other))
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.detach().equal(b.detach())
        for a, b in zip(ones, others, strict=True)
    )


def assert_wrong(norm: nn.Module, arguments: tuple[Any, ...], today: str) -> None:
    """What an unguarded call comes to: an error, or without a word another shape, or numbers that were cut."""
    if today == "error":
        with warnings.catch_warnings(), pytest.raises((RuntimeError, ValueError, AttributeError)):
            warnings.simplefilter("ignore")
            norm(*arguments)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = norm(*arguments)
    assert result.isfinite().all()
    given = arguments[0]
    assert given.shape != result.shape or (result - norm(given.float())).abs().max() > 0.3


@pytest.mark.parametrize("rule", RULES)
def test_what_a_norm_takes_and_what_it_must_not_be_given(rule: str) -> None:
    tried = [(RULES[rule].make(class_named(cls)), RULES[rule]) for cls in RULES[rule].classes]
    good = [(norm, call := make(), norm(*call)) for norm, case in tried for make in case.good.values()]
    bad = [(norm, make(), broken, today) for norm, case in tried for make, broken, today in case.bad.values()]
    for norm, arguments, _, today in bad:
        assert_wrong(norm, arguments, today)

    with og.installed("transformers") as report:
        for norm, arguments, plain in good:
            assert f"{type(norm).__module__}.{type(norm).__name__}.forward" in report.guarded
            assert same(plain, norm(*arguments))
        assert og.record.total == 0
        for norm, arguments, broken, _ in bad:
            with pytest.raises(og.GuardError) as caught:
                norm(*arguments)
            violation = caught.value.violations[0]
            assert (violation.rule_id, violation.operator) == (broken, f"{type(norm).__name__}.forward")
            assert (violation.cost_class, violation.certain) == ("A", True)
            assert violation.because and violation.hint


@pytest.mark.parametrize("size", [0, 1, 2, 129])
def test_widths(size: int) -> None:
    names = ("llama.LlamaRMSNorm", "gemma.GemmaRMSNorm", "t5.T5LayerNorm", "gemma3n.Gemma3nRMSNorm")
    calls = [(norm := class_named(name)(size), x := numbers(B, L, size), norm(x)) for name in names]
    with og.installed("transformers"):
        for norm, x, plain in calls:
            assert same(plain, norm(x))
            if size == 1:  # one number scales every column
                norm(numbers(B, L, size + 1))
                continue
            with pytest.raises(og.GuardError):
                norm(numbers(B, L, size + 1))


# Of weights of the user's own: their shape, that of the input, and whether the result is of that shape.
WEIGHTS = [
    ((), (B, L, D), True),
    ((1,), (B, L, D), True),
    ((1, D), (B, L, D), True),
    ((H, 1, D), (B, H, L, D), True),
    ((L, 1), (B, L, D), True),
    ((B, 1, 1), (B, L, D), True),
    ((H, 1, D), (B, 1, L, D), False),
    ((1, 1, 1, D), (B, L, D), False),
    ((D,), (B, L, 1), False),
    ((2,), (B, L, 1), False),
]


@pytest.mark.parametrize(("weight", "given", "fits"), WEIGHTS)
def test_weights_that_broadcast(weight: tuple[int, ...], given: tuple[int, ...], fits: bool) -> None:
    calls = []
    for name in ("llama.LlamaRMSNorm", "gemma.GemmaRMSNorm", "t5.T5LayerNorm", "xlstm.xLSTMRMSNorm"):
        norm, x = class_named(name)(D), numbers(*given)
        norm.weight = nn.Parameter(torch.rand(weight))
        plain = norm(x)
        assert (plain.shape == x.shape) is fits
        calls.append((norm, x, plain))
    with og.installed("transformers"):
        for norm, x, plain in calls:
            if fits:
                assert same(plain, norm(x))
                continue
            with pytest.raises(og.GuardError) as caught:
                norm(x)
            (violation,) = caught.value.violations
            assert violation.rule_id == "weight_fits"
            assert f"self.weight.shape = {tuple(weight)}" in violation.observed


def test_a_weight_of_groups_that_has_another_shape() -> None:
    norm, x = (
        of_width(class_named("falcon_h1.FalconH1RMSNormGated"), n_groups=2, norm_before_gate=False),
        numbers(B, L, D),
    )
    norm.weight = nn.Parameter(torch.rand(2, D // 2))
    plain = norm(x)
    with og.installed("transformers"):
        assert same(plain, norm(x))


def test_query_and_key_norm() -> None:
    from transformers import AutoConfig
    from transformers.models.zaya.modeling_zaya import ZayaQKNorm

    config = AutoConfig.for_model("zaya", head_dim=D, num_key_value_heads=2)
    norm, q, k = ZayaQKNorm(config), numbers(B, L, H, D), numbers(B, L, 2, D)
    plain = norm(q, k)
    one_head = norm(q, k[:, :, :1])[1]
    assert one_head.shape == k.shape, "keys of one head became keys of all"
    with og.installed("transformers"):
        assert same(plain, norm(q, k))
        with pytest.raises(og.GuardError, match=r"key_states.shape\[2\] = 1"):
            norm(q, k[:, :, :1])


# ---------------------------------------------------------------- what is recognised


def digest(found: Any) -> str:
    function = innermost(found)
    code = fingerprint(function)
    assert isinstance(code, Fingerprint)
    return code.digest


def test_a_class_of_every_code_that_is_known_was_tried() -> None:
    tried = {
        digest(class_named(cls).forward): name.partition(" ")[0] for name, row in RULES.items() for cls in row.classes
    }
    tried[digest(class_named("zaya.ZayaQKNorm").forward)] = "query_key_norm"
    told = {
        code: family.contract.partition(":")[2]
        for family in norms.FAMILIES
        for code, at in family.code.items()
        if "5.24.0" in at.versions
    }
    assert tried == told
    assert all(contract_named(family.contract).rules for family in norms.FAMILIES)


def refusals() -> dict[str, str]:
    return {refusal.site: refusal.reason for refusal in og.install("transformers").refused}


def test_what_is_left_out_has_a_reason() -> None:
    from transformers.models.cpmant import modeling_cpmant
    from transformers.models.mobilebert import modeling_mobilebert
    from transformers.models.wavlm import modeling_wavlm

    refused = refusals()
    for module, cls, reason in (
        (modeling_cpmant, "CpmAntLayerNorm", "it tests the width itself"),
        (modeling_mobilebert, "NoNorm", "a weight and a bias, not a norm"),
        (modeling_wavlm, "WavLMEncoderStableLayerNorm", "an encoder, not a norm"),
    ):
        assert refused[f"{module.__name__}.{cls}.forward"] == reason


def test_a_method_that_was_replaced_makes_the_code_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gemma import modeling_gemma

    def _norm(self: Any, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)

    monkeypatch.setattr(modeling_gemma.GemmaRMSNorm, "_norm", _norm)
    site = f"{modeling_gemma.__name__}.GemmaRMSNorm.forward"
    assert "its _norm is not one that is known (fingerprint " in refusals()[site]
    assert site not in og.status().guarded
    modeling_gemma.GemmaRMSNorm(D)(numbers(B, L, 1))
