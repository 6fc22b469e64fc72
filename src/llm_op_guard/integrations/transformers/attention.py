"""Attention: the eager functions of the modeling files, and those that call SDPA, flash and flex attention for all."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from llm_op_guard.install.installer import Candidate
from llm_op_guard.integrations.transformers.known import Code, Family, known

_EAGER = (
    Family(
        "attention:eager_attention_forward",
        {
            "dabc28315e4a558d": Code("llama and 171 others: grouped heads, the mask added"),
            "1adad04cda902df1": Code("gemma2 and 11 others: scores are capped where `softcap` says so"),
            "7c45c79f0612381f": Code("gpt_oss, deepseek_v4, hy_v4: with sinks"),
            "33e36402bf87d27c": Code("mimo_v2_flash, hy_v4_vl: with sinks or without"),
            "32e751c176d44964": Code("openai_privacy_filter: with sinks, in float32"),
            "6ead1fe145192607": Code("flint: with sinks, scores in float32"),
            "24683fd8b84f9015": Code("granite_swa, granitemoe_swa: scaled by sinks"),
            "cc1d29d556e6e96d": Code("inkling2, inkling2_loop: with a bias and sinks"),
            "91b28f385da259b0": Code("inkling: with a bias"),
            "89dc54bd3a9669e0": Code("llama4: softmax in the dtype of the scores"),
            "5f661b3feb8f132c": Code("llama4: its vision tower, scaled by the head size"),
            "2cd491724fa65410": Code("evolla: groups where the module has them"),
            "cd1a1fc8b9ea4075": Code("idefics2: groups where the module has them"),
            "2ea15daedb09157a": Code(
                "integrations.eager_paged: groups where the module has them, with sinks or without"
            ),
        },
    ),
    Family(
        "attention:ungrouped_attention_forward",
        {
            "9a8c4c418df37887": Code("bert, bart and 77 others"),
            "ecb2ca7256c3db97": Code("gpt_neox and 18 others: softmax in float32", versions=("4.57.6", "5.24.0")),
            "b46bf1a79d0e9456": Code("clip, opt and 16 others: softmax in float32", versions=("4.57.6", "5.24.0")),
            "041a045cdaf87172": Code("vit and 10 others: softmax in float32"),
            "d4743481daa2517a": Code("blip_2 and 6 others", versions=("4.57.6", "5.24.0")),
            "1786d19120b701bf": Code("t5 and 13 others: with a bias of positions"),
            "2c02427be2bd6149": Code("gptj, codegen: scores in float32"),
            "de341be91f44ac88": Code("gpt2, decision_transformer: weights in the dtype of the values"),
            "2b675e6734a1bc3e": Code("internvl, qianfan_ocr"),
            "f456688e9570b5dc": Code("bigbird_pegasus: weights in the dtype of the values"),
            "7a6d560b56e557fd": Code("tipsv2: its text tower"),
            "ba4f8fdc21d3c9a9": Code("modernbert_decoder: there is always a mask"),
            "2c78c0f316b2265c": Code("bart and 25 others: heads are weighted by `head_mask`", versions=("4.57.6",)),
            "4a611ebd6b2910ae": Code("clip, metaclip_2: softmax in float32", versions=("4.57.6",)),
        },
    ),
    Family("attention:ungrouped_attention_of_states", {"fb3ce7fe9c058f06": Code("phi4_multimodal, timesfm")}),
    Family("attention:unmasked_attention_forward", {"857a60009fc3153a": Code("vjepa2")}),
    Family(
        "attention:eager_attention_forward_cutting_masks",
        {
            "6075c8092dde433c": Code("llama and 68 others: grouped heads, the mask added", versions=("4.57.6",)),
            "41b9dd576104503e": Code(
                "gemma2 and 4 others: scores are capped where `softcap` says so", versions=("4.57.6",)
            ),
            "64edf5858484bb58": Code("gpt_oss: with sinks", versions=("4.57.6",)),
            "63626d14488a8543": Code("llama4: softmax in the dtype of the scores", versions=("4.57.6",)),
            "3c353b744fadb3ba": Code("llama4: its vision tower", versions=("4.57.6",)),
            "354895105c6fe190": Code("idefics2: groups where the module has them", versions=("4.57.6",)),
        },
    ),
)
_REPEAT_KV = (
    Family(
        "attention:repeat_kv",
        {"31651d3080c70900": Code("llama and 201 others, and the integrations", versions=("4.57.6", "5.24.0"))},
    ),
)
_SDPA = (
    Family("attention:sdpa_attention_forward", {"9b0498c56248740b": Code("integrations.sdpa_attention")}),
    Family(
        "attention:sdpa_attention_forward_cutting_masks",
        {"156e01b2d1f65374": Code("integrations.sdpa_attention", versions=("4.57.6",))},
    ),
)
_FLASH = (
    Family(
        "attention:flash_attention_forward",
        {"9e8ed82043890750": Code("integrations.flash_attention, before its kernels are loaded")},
    ),
)
_FLEX = (Family("attention:flex_attention_forward", {"cd6034355ff44d5f": Code("integrations.flex_attention")}),)
FAMILIES = (*_EAGER, *_REPEAT_KV, *_SDPA, *_FLASH, *_FLEX)

_FUNCTIONS = {
    "eager_attention_forward": _EAGER,
    "simple_eager_attention_forward": _EAGER,
    "text_eager_attention_forward": _EAGER,
    "vision_eager_attention_forward": _EAGER,
    "eager_paged_attention_forward": _EAGER,
    "sdpa_attention_forward": _SDPA,
    "flash_attention_forward": _FLASH,
    "flex_attention_forward": _FLEX,
    "repeat_kv": _REPEAT_KV,
}

# Code that was read and has no contract.
_LEFT_OUT = {
    ("transformers.integrations.sdpa_paged", "sdpa_attention_paged_forward"): "it calls sdpa_attention_forward alone",
    ("transformers.integrations.flash_paged", "paged_attention_forward"): "it calls flash_attention_forward alone",
    ("transformers.models.doge.modeling_doge", "flex_attention_forward"): "its mask differs from head to head",
}

# The modules that are for all models, each with the function that must be there.
INTEGRATIONS = {
    "transformers.integrations.sdpa_attention": "sdpa_attention_forward",
    "transformers.integrations.flash_attention": "flash_attention_forward",
    "transformers.integrations.flex_attention": "flex_attention_forward",
    "transformers.integrations.eager_paged": "eager_paged_attention_forward",
    "transformers.integrations.sdpa_paged": "sdpa_attention_paged_forward",
    "transformers.integrations.flash_paged": "paged_attention_forward",
}


def candidates(module: ModuleType) -> Iterator[Candidate]:
    """The functions of a module, unless they are imported from another, where they are guarded or refused."""
    name = module.__name__
    needed = INTEGRATIONS.get(name)
    if needed is not None and needed not in module.__dict__:
        yield Candidate(f"{name}.{needed}", needed, reason="this version of Transformers has no such function")
    for function, found in list(module.__dict__.items()):
        if (reason := _LEFT_OUT.get((name, function))) is not None:
            yield Candidate(f"{name}.{function}", function, reason=reason)
        elif function in _FUNCTIONS and getattr(found, "__module__", name) == name:
            yield known(f"{name}.{function}", function, found, *_FUNCTIONS[function])
