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
    Family(
        "attention:unmasked_attention_forward",
        {
            "857a60009fc3153a": Code("vjepa2"),
            "85ec5ff3d3c0cb81": Code(
                "vit and 14 others: weights are multiplied by what is called a mask", versions=("4.57.6",)
            ),
        },
    ),
    Family(
        "attention:ungrouped_attention_forward_cutting_masks",
        {
            "cecb12ccf07c7f6f": Code("align and 5 others: heads are weighted by `head_mask`", versions=("4.57.6",)),
            "90e5ed36a9f11bc2": Code("whisper, qwen2_audio, voxtral: other masks are left alone", versions=("4.57.6",)),
            "ae86b655ed41f0d3": Code("gpt2, decision_transformer: causal by itself", versions=("4.57.6",)),
            "6bafdfd43ae21c97": Code("esm, evolla: with positions relative to each other", versions=("4.57.6",)),
            "db535003a45bd871": Code("kosmos2_5, persimmon", versions=("4.57.6",)),
            "f61d080e052247c9": Code("gpt_neox: heads are weighted by `head_mask`", versions=("4.57.6",)),
            "b9f74123a787e96e": Code("internvl", versions=("4.57.6",)),
            "152703f4eb3e431e": Code("modernbert_decoder: there is always a mask", versions=("4.57.6",)),
        },
    ),
    Family(
        "attention:ungrouped_attention_of_states_cutting_masks",
        {"3836b388a299e954": Code("phi4_multimodal, timesfm", versions=("4.57.6",))},
    ),
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
_FLEX = (
    Family(
        "attention:flex_attention_forward",
        {
            "cd6034355ff44d5f": Code("integrations.flex_attention"),
            "9a88626514efbcf4": Code("integrations.flex_attention", versions=("4.57.6",)),
        },
    ),
)
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
    "sdpa_attention_paged_forward": (),
    "paged_attention_forward": (),
}

# Code that was read and has no contract: in 5.24.0, then in 4.57.6.
_LEFT_OUT = {
    "b39b41f66d07a565": "it calls sdpa_attention_forward alone",
    "a1c9aa68929d0caa": "it calls flash_attention_forward alone",
    "031463580e25b680": "its mask differs from head to head",
    "30abe81578fe03f7": "its keys are those of a paged cache, which it updates",
    "ccde6372881da2fb": "its keys are those of a paged cache, which it updates",
    "e1b8bc67e8090d55": "its keys are those of a paged cache, which it updates",
    "ee2d0a1727d4953d": "its mask differs from head to head",
    "b31f82b4ba632d91": "queries, keys and values are one tensor, which its module made",
    "e78dd05cadd0f1c9": "queries, keys and values are one tensor, which its module made",
    "02b680d0398cebee": "queries, keys and values are one tensor, which its module made",
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
        if function in _FUNCTIONS and getattr(found, "__module__", name) == name:
            yield known(f"{name}.{function}", function, found, *_FUNCTIONS[function], left_out=_LEFT_OUT)
