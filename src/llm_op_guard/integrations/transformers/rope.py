"""Rotary position embeddings: the functions and methods of the modeling files that apply a table of cosines and sines.

Families differ in what is rotated, in how columns are paired, and in what the table holds:

- halves: column i is paired with column i + D/2, as in llama; neighbours: columns 2i and 2i + 1, as in RoFormer.
- A table has a value for each column, or one for each pair; in a table for halves the second half repeats the first,
  and code that pairs neighbours may take the first half and repeat each of its values.

Each family's formula stands in `tests/transformers/rope_formulas.py`; `test_rope.py` holds every function of the
installed Transformers to the formula of its family.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType

from llm_op_guard.install.installer import Candidate
from llm_op_guard.install.producer import Producer
from llm_op_guard.install.recognise import digest_of, innermost
from llm_op_guard.integrations.transformers.known import Code, Family, KnownCode, known

# What the functions compute, and which do.
FORMULAS: dict[str, Family] = {
    "halves": Family(
        "rope:apply_rotary_pos_emb",
        {
            "449ca673353426d7": Code("llama and 118 others: in the dtype of q and cos"),
            "fbdc58d8a41e613f": Code("olmo and 6 others: the result in q's dtype"),
            "3ae6ee8735c53311": Code("esm, evolla, modernbert, modernbert_decoder: computed in float32"),
            "545bdc88133517f9": Code("hunyuan_vl: cos and sin in float32 too"),
            "e95ec27031776296": Code(
                "llama and 58 others: in the dtype of q and cos, position_ids unused", versions=("4.57.6",)
            ),
            "1afe587c93cd1213": Code(
                "olmo and 3 others: the result in q's dtype, position_ids unused", versions=("4.57.6",)
            ),
        },
    ),
    "halves, turned the other way": Family(
        "rope:apply_rotary_pos_emb",
        {"f48240e66ac5e8ed": Code("nanochat: rotate_half with the signs exchanged")},
    ),
    "neighbours": Family(
        "rope:apply_rotary_pos_emb",
        {
            "cf7c2f593ffa9dc4": Code("cohere, cohere2, cohere2_moe, efficientloftr, lightglue: computed in float32"),
            "f98804f0e9d164e0": Code("blt: in the dtype of q and cos"),
            "eb80da26be12f00b": Code("ernie4_5_vl_moe: computed in float32"),
            "f7148658a8401505": Code(
                "cohere, cohere2, efficientloftr, lightglue: computed in float32, position_ids unused",
                versions=("4.57.6",),
            ),
            "5dbeaf1604287614": Code("blt: in the dtype of q and cos, position_ids unused", versions=("4.57.6",)),
            "02c765a70a27193a": Code(
                "qwen2_5_omni: in the dtype of q and cos, position_ids unused", versions=("4.57.6",)
            ),
        },
    ),
    "neighbours, first half of the table": Family(
        "rope:apply_rotary_pos_emb",
        {
            "8d6763f8c4259ce3": Code("ernie4_5, ernie4_5_moe, hy_v4_vl: computed in float32"),
            "7ba6fcdc51944562": Code("helium: in the dtype of q and cos"),
            "51f1b24dbdac576c": Code(
                "ernie4_5, ernie4_5_moe: computed in float32, position_ids unused", versions=("4.57.6",)
            ),
            "a945d5ee578a96c0": Code("helium: in the dtype of q and cos, position_ids unused", versions=("4.57.6",)),
        },
    ),
    "neighbours, put into halves": Family(
        "rope:apply_rotary_pos_emb",
        {"deac6f5f2dbf205b": Code("deepseek_v3 and 10 others: apply_rotary_pos_emb_interleave")},
    ),
    "neighbours, put into halves first": Family(
        "rope:apply_rotary_pos_emb",
        {"0810d4a0ca954e7d": Code("deepseek_v3, longcat_flash: position_ids unused", versions=("4.57.6",))},
    ),
    "neighbours, put into halves, keys optional": Family(
        "rope:apply_rotary_pos_emb_keys_optional",
        {"28c1c5a188040a7f": Code("mistral_large4: apply_rotary_pos_emb_interleave")},
    ),
    "matrices of the first half of the table": Family(
        "rope:apply_rotary_pos_emb_as_matrices",
        {"3de05cffafe5b974": Code("pe_audio, pe_audio_video, pe_video: neighbours")},
    ),
    "halves of the first columns": Family(
        "rope:apply_partial_rotary_pos_emb",
        {
            "2b880560b8c7d133": Code("gpt_neox and 15 others"),
            "7a1ab850e949b5e5": Code(
                "glmasr, nemotron3_5_transcribe, nemotron3_diarization: position_ids unused",
                versions=("4.57.6", "5.24.0"),
            ),
            "f2a39562e58476ea": Code("nemotron, dots3_note"),
            "d0a7b9295568566c": Code("phi3, phi4_multimodal"),
            "b4fc67a5fd496cf7": Code("phi3, phi4_multimodal: position_ids unused", versions=("4.57.6",)),
            "26714ff32112ee62": Code("nemotron: position_ids unused", versions=("4.57.6",)),
        },
    ),
    "halves of the first columns, keys optional": Family(
        "rope:apply_partial_rotary_pos_emb_keys_optional",
        {"8c22665e5d2de598": Code("qwen4_exp")},
    ),
    "neighbours of the first columns": Family(
        "rope:apply_partial_rotary_pos_emb",
        {"1690138fa2ff242a": Code("glm4v, glm_ocr")},
    ),
    "neighbours of the first columns, first half of the table": Family(
        "rope:apply_partial_rotary_pos_emb",
        {
            "5ec5d370415467ff": Code("glm, glm4, moonshine, moonshine_streaming"),
            "56974222cf8841c6": Code("glm, glm4, moonshine: position_ids unused", versions=("4.57.6",)),
        },
    ),
    "halves, half table": Family(
        "rope:apply_rotary_pos_emb_half_table",
        {
            "02c60eb566b7a0d9": Code("gpt_oss"),
            "5301ccfba46db709": Code("gpt_oss: position_ids unused", versions=("4.57.6",)),
        },
    ),
    "neighbours, half table": Family(
        "rope:apply_rotary_pos_emb_half_table",
        {"21661c78a0e9bb64": Code("openai_privacy_filter")},
    ),
    "neighbours of one tensor, half table": Family(
        "rope:apply_rotary_pos_emb_of_tensor",
        {"e8bf3b8ed545a9fb": Code("gptj, codegen: sin before cos", versions=("4.57.6", "5.24.0"))},
    ),
    "halves, three tables": Family(
        "rope:apply_multimodal_rotary_pos_emb",
        {"c47c6693bc1ce666": Code("qwen2_vl, qwen2_5_vl, qwen2_5_omni", versions=("4.57.6",))},
    ),
    "halves of the first columns, three tables": Family(
        "rope:apply_partial_multimodal_rotary_pos_emb",
        {"a8dfe4e578c042f8": Code("glm4v_moe", versions=("4.57.6",))},
    ),
    "neighbours of the first columns, first half of three tables": Family(
        "rope:apply_partial_multimodal_rotary_pos_emb",
        {"d2e21f4e58957015": Code("glm4v", versions=("4.57.6",))},
    ),
    "halves of one tensor, table cut to its tokens": Family(
        "rope:apply_rotary_pos_emb_cutting_table",
        {
            "3d355e1347d2db0c": Code("esm", versions=("4.57.6",)),
            "c1644f970f66f82d": Code("evolla: apply_rotary_pos_emb_esm", versions=("4.57.6",)),
        },
    ),
    "halves of one tensor": Family(
        "rope:apply_rotary_pos_emb_of_x",
        {
            "80395bbe3fb5a33d": Code("gemma3n, gemma4, gemma4_unified, diffusion_gemma"),
            "4e9a7aa46ad206bf": Code("gemma3n: position_ids unused", versions=("4.57.6",)),
        },
    ),
    "halves of each part of one tensor": Family(
        "rope:apply_rotary_pos_emb_of_x",
        {"6607351b57553551": Code("gemma4: apply_multidimensional_rope, as many parts as position_ids has columns")},
    ),
    "neighbours of the last columns, half table": Family(
        "rope:apply_rotary_pos_emb_to_tail",
        {"55ddf87766ace1d6": Code("deepseek_v4: computed in float32")},
    ),
    "halves, queries of the last positions": Family(
        "rope:apply_rotary_pos_emb_to_last_queries",
        {"52ba192f29bf15b4": Code("muse_glimmer_assistant")},
    ),
    "halves at positions": Family(
        "rope:apply_rotary_pos_emb_at_positions",
        {"3b32b2e3c0d80a06": Code("clvp: values too", versions=("4.57.6", "5.24.0"))},
    ),
    "halves at positions, no values": Family(
        "rope:apply_rotary_pos_emb_of_positions",
        {"1ab0bbe4fc135456": Code("idefics, phimoe, open_llama", versions=("4.57.6",))},
    ),
    "complex numbers": Family(
        "rope:apply_rotary_emb",
        {"ec09939403cdccf5": Code("deepseek_v2: apply_rotary_emb", versions=("4.57.6", "5.24.0"))},
    ),
    "complex numbers, tokens before heads": Family(
        "rope:apply_rotary_emb_tokens_first",
        {"865b1b86eb538200": Code("llama4: apply_rotary_emb", versions=("4.57.6", "5.24.0"))},
    ),
    "neighbours by time": Family(
        "rope:apply_rotary_time_emb",
        {"f41e01a21b01b5e4": Code("musicflamingo: apply_rotary_time_emb, computed in float64")},
    ),
    "neighbours, sines before cosines": Family(
        "rope:apply_rotary_position_embeddings",
        {
            "8ddd444bd15745ec": Code(
                "roformer: RoFormerSelfAttention.apply_rotary_position_embeddings", versions=("4.57.6", "5.24.0")
            )
        },
    ),
    "halves of heads in columns": Family(
        "rope:apply_rotary_embedding_to_columns",
        {
            "7bba2555165952a4": Code(
                "wav2vec2_conformer, wav2vec2_bert, seamless_m4t: _apply_rotary_embedding",
                versions=("4.57.6", "5.24.0"),
            )
        },
    ),
    "halves, patches only": Family(
        "rope_vision:apply_rotary_pos_emb_to_patches",
        {
            "5db1f3cb81031628": Code(
                "dinov3_vit, eomt_dinov3, sapiens2: prefix tokens are passed on", versions=("4.57.6", "5.24.0")
            )
        },
    ),
    "halves, patches before heads": Family(
        "rope_vision:apply_rotary_pos_emb_vision",
        {
            "500aa491f4af9c22": Code(
                "qwen2_vl and 24 others: apply_rotary_pos_emb_vision", versions=("4.57.6", "5.24.0")
            )
        },
    ),
    "halves of one tensor, angles of patches": Family(
        "rope_vision:apply_rotary_pos_emb_vision_of_tensor",
        {"77395b37b7e58c0a": Code("qwen2_5_omni: apply_rotary_pos_emb_vision", versions=("4.57.6",))},
    ),
    "neighbours, patches before heads": Family(
        "rope_vision:apply_rotary_pos_emb_vision",
        {"88db74f0191084a6": Code("inkling2: apply_rotary_pos_emb_vision")},
    ),
    "halves of the first columns, patches before heads": Family(
        "rope_vision:apply_partial_rotary_pos_emb_vision",
        {"57bfb37a1ceed2ee": Code("minimax_m3_vl: apply_rotary_pos_emb_vision")},
    ),
    "complex numbers, patches before heads": Family(
        "rope_vision:vision_apply_rotary_emb",
        {"e2c85387b492aa46": Code("llama4: vision_apply_rotary_emb", versions=("4.57.6", "5.24.0"))},
    ),
    "neighbours in a picture": Family(
        "rope_vision:apply_rotary_pos_emb_2d",
        {
            "f8654f42ea8ae376": Code("sam3: apply_rotary_pos_emb_2d"),
            "8e068ada810b2e69": Code("edgetam_video: apply_rotary_pos_emb_2d_self_attn", versions=("4.57.6", "5.24.0")),
        },
    ),
    "neighbours in a picture and its memory": Family(
        "rope_vision:apply_rotary_pos_emb_2d_to_memory",
        {
            "70e2c08f1f928754": Code(
                "sam2_video, sam3_tracker_video: apply_rotary_pos_emb_2d", versions=("4.57.6", "5.24.0")
            )
        },
    ),
    "neighbours in a picture, keys with a table of their own": Family(
        "rope_vision:apply_rotary_pos_emb_2d_cross_attn",
        {"6c645fb5a0c9bd5b": Code("edgetam_video: apply_rotary_pos_emb_2d_cross_attn", versions=("4.57.6", "5.24.0"))},
    ),
    "neighbours by frame, height and width": Family(
        "rope_vision:apply_rotary_embeddings",
        {
            "b37c874248b4fb1d": Code("vjepa2: VJEPA2RopeAttention.apply_rotary_embeddings"),
            "78447f4503b10430": Code("vjepa2: VJEPA2RopeAttention.apply_rotary_embeddings", versions=("4.57.6",)),
        },
    ),
}

# Not a rotary embedding, but where it can be seen that one gets the table of another model.
ROTARY_WIDTH = (
    Family("rope:gpt_neox_attention", {"8ee25074b25e27b1": Code("gpt_neox: GPTNeoXAttention.forward")}),
    Family(
        "rope:gpt_neox_attention_of_rotary_pct",
        {"0511fe026ed2f67d": Code("gpt_neox: GPTNeoXAttention.forward", versions=("4.57.6",))},
    ),
)
# The __init__ that says what `rotary_ndims` is.
_ROTARY_NDIMS = {
    "369b98605116e64d": Code("gpt_neox: GPTNeoXAttention.__init__"),
    "4ec7491cf4086bf1": Code("gpt_neox: GPTNeoXAttention.__init__", versions=("4.57.6",)),
}
KNOWN = (
    KnownCode("rope: rotary_ndims", r"transformers\.models\.gpt_neox\..*\.GPTNeoXAttention\.__init__", _ROTARY_NDIMS),
)

FAMILIES = (*FORMULAS.values(), *ROTARY_WIDTH)

# Code that was read and has no contract.
LEFT_OUT = {
    "dae69ea5e1eaae54": Code(
        "qwen3_omni_moe, qwen3_vl, qwen3_vl_moe",
        reason="it mixes the frequencies of a table, and rotates nothing",
        versions=("4.57.6",),
    ),
    "fa5afc8dfcfc3f7d": Code("modernbert", reason="a kernel of flash-attn for packed tokens", versions=("4.57.6",)),
}


def candidates(module: ModuleType) -> Iterator[Candidate]:
    """Those that a modeling file defines; what it imports from another is guarded or refused there."""
    name = module.__name__
    for function, found in list(module.__dict__.items()):
        # What begins with an underscore is called by these, with tables that they have prepared.
        if _applies(function) and not function.startswith("_") and getattr(found, "__module__", name) == name:
            yield known(f"{name}.{function}", function, found, *FORMULAS.values(), left_out=LEFT_OUT)
        elif inspect.isclass(found) and found.__module__ == name:
            for method, inner in list(found.__dict__.items()):
                if _applies(method):
                    operator = f"{found.__name__}.{method}"
                    yield known(f"{name}.{operator}", operator, inner, *FORMULAS.values(), left_out=LEFT_OUT)
            if found.__name__ == "GPTNeoXAttention" and "forward" in found.__dict__:
                yield _rotary_width(found)


def _applies(name: str) -> bool:
    return "apply" in name and ("rotary" in name or "rope" in name)


def _rotary_width(attention: type) -> Candidate:
    operator = f"{attention.__name__}.forward"
    site = f"{attention.__module__}.{operator}"
    if digest_of(attention.__dict__.get("__init__")) not in _ROTARY_NDIMS:
        return Candidate(site, operator, reason="its __init__ is not the one whose rotary_ndims a contract speaks of")
    return known(site, operator, attention.__dict__["forward"], *ROTARY_WIDTH)


def producers(module: ModuleType) -> Iterator[Producer]:
    """The `forward` of every class that a modeling file calls a rotary embedding: cosines and sines come from there."""
    for cls in list(module.__dict__.values()):
        if inspect.isclass(cls) and cls.__module__ == module.__name__ and cls.__name__.endswith("RotaryEmbedding"):
            function = innermost(cls.__dict__.get("forward"))
            if isinstance(function, FunctionType) and function.__code__.co_varnames[:1] == ("self",):
                operator = f"{cls.__name__}.forward"
                yield Producer(function, operator=operator, site=f"{module.__name__}.{operator}")
