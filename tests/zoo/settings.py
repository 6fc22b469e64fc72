"""What the names of fields do not tell: settings by model type, each with its reason.

`default` are fields without which the configuration's own defaults cannot be built. A dotted name is a field of a
nested configuration.
"""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}

_DOTS3 = {"head_dim": 32, "per_layer_config": {2: {"qk_nope_head_dim": 24, "kv_lora_rank": 128}}}
_TWO_KINDS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
}


def _text(settings: dict[str, Any]) -> dict[str, Any]:
    return {f"text_config.{name}": value for name, value in settings.items()}


_OMNI = {**_text({"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}), "vision_start_token_id": 120}

# The tower of its checkpoints is timm's, which is not installed: for the text, and where it gives patches, any will do.
_TOWER = {"default": {"vision_config": {"model_type": "siglip_vision_model"}}}

SETTINGS: dict[str, dict[str, Any]] = {
    "fast_vlm": _TOWER,
    "perception_lm": {**_TOWER, "vision_config.model_args": {"embed_dim": 64}, "vision_use_cls_token": False},
    # Without a full attention layer, the cache has no sequence length.
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    # Kinds of layers that checkpoints choose.
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "cohere_compass_text": _TWO_KINDS,
    "cohere_compass": _text(_TWO_KINDS),
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "unlimited_ocr": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1]},
    "diffusion_gemma": _text({"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 128}),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "zamba": {
        # The shared block is tied between two hybrid layers.
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    # Two layers of their own and two that share their keys and values.
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "dory": {
        # One layer before the loop, two in it, one after.
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "n_input_layers": 1,
        "n_output_layers": 1,
    },
    # Products of heads and head sizes that must be expand * hidden_size.
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16},
    # Its attention reads a field that its configuration lacks, and cannot do without clipping.
    "dbrx": {"attn_config.rope_theta": 10_000.0, "attn_config.clip_qkv": 8.0},
    # Its defaults do not fit together.
    "gemma4_assistant": {
        "default": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
    },
    # Axial positions would tie the length of a training sequence to the configuration.
    "reformer": {
        "axial_pos_embds": False,
        "num_buckets": 4,
        "attn_layers": ("local", "lsh"),
        "local_attn_chunk_length": 5,
        "lsh_attn_chunk_length": 5,
    },
    # Half a head is rotated, and that half is `qk_rope_head_dim`.
    "mistral4": {"qk_nope_head_dim": 8},
    # Boxes are embedded in parts that make up the width: 4 coordinates, width and height.
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "lilt": {"hidden_size": 96},
    # With fewer landmarks than tokens, it takes no mask.
    "nystromformer": {"segment_means_seq_len": 10, "num_landmarks": 10},
    # The rotated quarter of a head is `qk_rope_head_dim`.
    "dots3_note_text": _DOTS3,
    "dots3_note": _text(_DOTS3),
    # Sections of the rotary embedding default to those of large heads.
    **{
        name: _text({"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}})
        for name in (
            "glm4v",
            "glm_ocr",
            "glm46v",
            "glmga",
            "paddleocr_vl",
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3_vl",
            "qwen3_vl_moe",
            "hyperclovax_vision_v2",
            "video_llama_3",
        )
    },
    "qwen2_5_omni_thinker": _OMNI,
    "qwen3_omni_moe_thinker": _OMNI,
    "glm4v_moe": _text({"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}),
    "ernie4_5_vl_moe": _text({"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}}),
    "hunyuan_vl": _text({"rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2, 2]}}),
    "glm5_next": _text({"index_kpool": 2}),
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "nemotron_h_omni": {"vision_config.video_temporal_patch_size": 2},
    # Names of pixel values, by which the vocabulary of images is found.
    "chameleon": {"vocabulary_map": {"<image>": 120, "IMGIMGBA": 121, "IMGIMGBS": 122}},
    "emu3": {"vocabulary_map": {"<image>": 120, "<|extra_200|>": 121, "<|visual token 000000|>": 122}},
    # Ranges of ids for the codes of images, then of audio.
    "apertus1p5": {"image_token_offset": 128, "audio_token_offset": 256, "text_config.vocab_size": 384},
    "vibevoice_asr": {
        "acoustic_tokenizer_chunk_size": 3200,
        # Each of seven stages has twice the filters of the one before.
        "acoustic_tokenizer_encoder_config.num_filters": 2,
        "semantic_tokenizer_encoder_config.num_filters": 2,
    },
    # Placeholders of pictures and starts of sequences, which checkpoints give.
    "blip-2": {"image_token_index": 120},
    "instructblip": {"image_token_index": 120},
    "instructblipvideo": {"video_token_index": 120},
    # A patch is 8 x 8 pixels of three colours.
    "pix2struct": {"vision_config.patch_embed_hidden_size": 192},
    # Four pixels are shuffled into the channels of one.
    "llama4": {"vision_config.intermediate_size": 256},
    "vision-encoder-decoder": {"decoder_start_token_id": 1},
    "udop": {"decoder_start_token_id": 0},
    # A window for its sliding layers, which checkpoints give.
    "step3p7": _text({"sliding_window": 8}),
    # It has no groups of query heads, and says so.
    "esmc": {"num_key_value_heads": 4},
    # The first layer is one of self-attention, whose cache tells how many tokens there were.
    "mllama": _text({"cross_attention_layers": [1]}),
    "dots1": {"n_shared_experts": 1},
    # One codebook: `input_ids` are then those of any other model. The decoder alone is told no start by the whole.
    "musicgen": {"decoder.num_codebooks": 1, "decoder.decoder_start_token_id": 0},
    "musicgen_melody": {"decoder.num_codebooks": 1, "decoder.decoder_start_token_id": 0},
    "xmod": {"default_language": "en_XX"},
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": _text(_INDEXER),
    # Its cache asks for a count of layers that only its parts have.
    "blt": {"encoder_hash_byte_group_vocab": 128, "num_hidden_layers": 2},
    # Its chunks assume that keys and values are of one size.
    "xlstm": {"qk_dim_factor": 1.0},
}

# How many tokens `generate` begins with, by the model type of the configuration, where it cannot be any number.
PROMPTS = {
    # It cuts a prompt to its last token, and leaves the mask as it is.
    "musicgen_decoder": 1,
}

# Types that draft tokens for a model of another type, from its hidden states, keys and values, and do nothing else.
DRAFTS_FOR = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
