"""Attention: the eager functions of the modeling files, and those that call SDPA, flash and flex attention for all."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType

from llm_op_guard.install.installer import Candidate
from llm_op_guard.install.recognise import innermost
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

# Code that was read and has no contract.
_LINEAR = "it is a linear attention, whose states have no contract"
_RECURRENT = "it is a recurrent cell, whose states have no contract"
LEFT_OUT = {
    "b39b41f66d07a565": Code(
        "integrations.sdpa_paged.sdpa_attention_paged_forward", reason="it calls sdpa_attention_forward alone"
    ),
    "a1c9aa68929d0caa": Code(
        "integrations.flash_paged.paged_attention_forward", reason="it calls flash_attention_forward alone"
    ),
    "031463580e25b680": Code("doge", reason="its mask differs from head to head"),
    "30abe81578fe03f7": Code(
        "integrations.sdpa_paged.sdpa_attention_paged_forward",
        reason="its keys are those of a paged cache, which it updates",
        versions=("4.57.6",),
    ),
    "ccde6372881da2fb": Code(
        "integrations.flash_paged.paged_attention_forward",
        reason="its keys are those of a paged cache, which it updates",
        versions=("4.57.6",),
    ),
    "e1b8bc67e8090d55": Code(
        "integrations.eager_paged.eager_paged_attention_forward",
        reason="its keys are those of a paged cache, which it updates",
        versions=("4.57.6",),
    ),
    "ee2d0a1727d4953d": Code("doge", reason="its mask differs from head to head", versions=("4.57.6",)),
    "b31f82b4ba632d91": Code(
        "modernbert", reason="queries, keys and values are one tensor, which its module made", versions=("4.57.6",)
    ),
    "e78dd05cadd0f1c9": Code(
        "modernbert", reason="queries, keys and values are one tensor, which its module made", versions=("4.57.6",)
    ),
    "02b680d0398cebee": Code(
        "modernbert", reason="queries, keys and values are one tensor, which its module made", versions=("4.57.6",)
    ),
    "f0272f57834032f8": Code(
        "integrations.msa_attention.msa_attention_forward",
        reason="it calls sdpa_attention_forward, or a kernel that chooses keys in blocks",
    ),
    "efcbeca2aa7f3e80": Code(
        "integrations.flex_attention.compile_friendly_flex_attention",
        reason="flex_attention_forward, which calls it, is guarded",
    ),
    "dc651790ec8c0017": Code(
        "integrations.flex_attention.compile_friendly_flex_attention",
        reason="flex_attention_forward, which calls it, is guarded",
        versions=("4.57.6",),
    ),
    "db730d1246f6a49f": Code("kimi_linear, bailing_hybrid, glm5_next", reason=_LINEAR),
    "7e259977e2ea7606": Code("kimi_linear, bailing_hybrid, glm5_next", reason=_LINEAR),
    "4d7dda5d29ac43d3": Code("qwen3_next and 5 others", reason=_LINEAR),
    "6b20d96b43acd2e9": Code("qwen3_next and 5 others", reason=_LINEAR),
    "218cb4e78fa5a4da": Code("qwen3_next", reason=_LINEAR, versions=("4.57.6",)),
    "10d17f145a796b04": Code("qwen3_next", reason=_LINEAR, versions=("4.57.6",)),
    "f783bdae868aec6a": Code(
        "mra", reason="it attends to blocks, of heads in the batch", versions=("4.57.6", "5.24.0")
    ),
    "ea75c4733bb6c7a3": Code(
        "mra", reason="it attends to blocks, of heads in the batch", versions=("4.57.6", "5.24.0")
    ),
    "f9a9f69a30247081": Code("xlstm", reason=_RECURRENT),
    "3d69dcab5fa7d867": Code("xlstm", reason=_RECURRENT),
    "d9d6de2953610f72": Code("xlstm", reason=_RECURRENT),
    "01a6ce3de557a108": Code("xlstm", reason=_RECURRENT),
    "1fec8c49181c54bf": Code("xlstm", reason=_RECURRENT, versions=("4.57.6", "5.24.0")),
    "b3620cf89d1f9c6d": Code("xlstm", reason=_RECURRENT, versions=("4.57.6", "5.24.0")),
    "63fe574df017a1da": Code("xlstm", reason=_RECURRENT, versions=("4.57.6",)),
    "00a17516fbceeb0a": Code("xlstm", reason=_RECURRENT, versions=("4.57.6",)),
    "a77e702cf4568068": Code("xlstm", reason=_RECURRENT, versions=("4.57.6",)),
    "b414e66168c049e7": Code("xlstm", reason=_RECURRENT, versions=("4.57.6",)),
}

# The modules that are for all models, with the functions that must be there.
INTEGRATIONS = "transformers.integrations"
_NEEDED = {
    "sdpa_attention": "sdpa_attention_forward",
    "flash_attention": "flash_attention_forward",
    "flex_attention": "flex_attention_forward",
    "eager_paged": "eager_paged_attention_forward",
    "sdpa_paged": "sdpa_attention_paged_forward",
    "flash_paged": "paged_attention_forward",
}
_TAKES = frozenset({"query", "key", "value"})


def candidates(module: ModuleType) -> Iterator[Candidate]:
    """The functions of a module, unless they are imported from another, where they are guarded or refused."""
    name = module.__name__
    parent, _, file = name.rpartition(".")
    needed = _NEEDED.get(file) if parent == INTEGRATIONS else None
    if needed is not None and needed not in module.__dict__:
        yield Candidate(f"{name}.{needed}", needed, reason="this version of Transformers has no such function")
    for function, found in list(module.__dict__.items()):
        if getattr(found, "__module__", name) == name and (function in _FUNCTIONS or _attends(function, found)):
            families = _FUNCTIONS.get(function, ())
            yield known(f"{name}.{function}", function, found, *families, left_out=LEFT_OUT)


def _attends(name: str, found: object) -> bool:
    """Whether that is a function of queries, keys and values; what begins with an underscore is called by these."""
    function = None if name.startswith("_") or isinstance(found, type) else innermost(found)
    return isinstance(function, FunctionType) and set(inspect.signature(function).parameters) >= _TAKES
