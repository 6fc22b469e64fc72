"""Configurations of any model type, made small by the names of their fields.

A configuration is walked field by field, nested ones too. What a field's name says it is decides its new value: widths
become 64, heads 4, layers as few as show every kind of layer. A field that the configuration fills in by itself
(declared None) is left to it. What a name does not tell is in `settings.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

WIDTH, INNER, HEADS, HEAD_SIZE, ROTARY_SIZE, LAYERS = 64, 128, 4, 16, 8, 2
VOCABULARY, POSITIONS, WINDOW, EXPERTS = 128, 128, 8, 4
IMAGE, PATCH = 32, 8

# The first pattern that matches a whole field name tells its new value; a number that is smaller already stays.
_SIZES: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile("|".join(patterns)), size)
    for size, *patterns in (
        (IMAGE, "image_size", "crop_size", "resolution", "max_img_size", "max_image_size"),
        (PATCH, "patch_size", "encoder_stride"),
        (VOCABULARY, r"\w*vocab_size\w*", "codebook_size", "num_embeddings"),
        (POSITIONS, r"(max|num)_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"),
        (POSITIONS, "model_max_length", r"max_\w+_position\w*", "mem_len", "max_pos_emb", "seq_length"),
        (WINDOW, r"sliding_window\w*", r"attention_window\w*", "attention_chunk_size", "local_attention"),
        (WINDOW, r"(mamba_)?chunk_size", "local_attention_window_len", "keep_window_size"),
        (EXPERTS, r"\w*num_(routed_|local_)?experts", r"n_routed_experts"),
        (2, r"\w*top_?k", r"num_experts_per_tok(en)?", "moe_k", r"index_topk\w*"),
        (2, "n_group", "num_expert_group"),
        (1, "topk_group"),
        (4, "mm_tokens_per_image"),
        (9, r"\w*kernel_size"),
        (8, r"(mamba_num|mamba_n|n_mamba)_heads"),
        (HEADS, r"\w*heads\w*", "n_head", "num_query_groups", r"linear_num_\w+"),
        (ROTARY_SIZE, "qk_rope_head_dim", "rotary_dim"),
        (HEAD_SIZE, r"\w*head_dim", r"\w*head_size", "d_kv", "d_head", "dim_head", "kv_channels", r"mamba_d_head"),
        (HEAD_SIZE, "mamba_headdim", r"\w*d_state", r"\w*state_size"),
        (INNER, r"\w*intermediate_size\w*", r"\w*ffn_(dim|hidden_size)", r"\w*mlp_(dim|hidden\w*)", "dim_ff", "d_ff"),
        (INNER, "dff", "d_inner", "n_inner", "feed_forward_size"),
        (0, "num_kv_shared_layers"),
        (LAYERS, r"(\w+_)?layers?(_per_stack)?", r"(resampler_)?depth", "num_blocks", "num_self_attends_per_block"),
        (1, "first_k_dense_replace", "num_dense_layers", "moe_layer_(start|end)_index", "attn_layer_offset"),
        (2, r"\w*(period|_interval|every_n_layers|sparse_step)", "cross_attention_frequency", "layer_group_size"),
        (8, "num_query_tokens", "resampler_n_latents", "num_latents", "latent_query_num", r"\w*num_landmarks"),
        (8, "canvas_length"),
        (WIDTH, r"\w*_(size|dim|rank|width|channels|features|embed)", r"d_\w+", "n_embd", "dim", "width"),
        (WIDTH, "hidden_sizes", "hidden_size_global"),
    )
)
_TOKEN = re.compile(r"\w*(token_ids?|token_index|_start_id|_end_id|_newline_id)")
_LAYER_COUNT = re.compile("num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|depth|layers")
_OTHERS = ("id2label", "label2id", "transformers_version", "architectures", "dtype", "per_layer_config")
# What many configurations leave to checkpoints: None is no size to build a model with.
_NEEDED = {
    "vocab_size": VOCABULARY,
    "head_dim": HEAD_SIZE,
    "num_key_value_heads": 2,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "decoder_start_token_id": 0,
}
_LAYER_INDICES = re.compile(
    r"deepstack_visual_indexes|global_attn_indexes|fullatt_block_indexes|intermediate_layers_indices|"
    r"cross_attention_layers|spatial_target_layers|vision_feature_layer"
)
_FIRST_SPECIAL = 10  # ids below are what they are in every vocabulary: padding, beginning, end


class Shrinker:
    """Makes small configurations of one model type; `special` gives each large token id its small one."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self.special: dict[int, int] = {}

    def config(self, cls: type[PreTrainedConfig], path: str = "", like: PreTrainedConfig | None = None) -> Any:
        """A small configuration of a class; `like` is the one whose values are made smaller, default the class's own.

        Raises whatever the class says about values that do not fit together.
        """
        large = cls(**self._settings.get("default", {})) if like is None else like
        given = self.fields(large, path)
        small = cls(**given)
        missing = {name: value for name, value in _NEEDED.items() if _value(small, name) is None}
        if _value(small, "is_encoder_decoder") is True and _value(small, "decoder_start_token_id") is ...:
            missing["decoder_start_token_id"] = 0
        if missing:
            small = cls(**given, **missing)
        different = vars(small).get("_heterogeneity_spec")
        if different is not None and "per_layer_config" not in given:  # layers that have sizes of their own
            small.per_layer_config = {
                layer: {name: self._own_number(name, value, large, own) for name, value in own.items()}
                for layer, own in different.per_layer_overrides.items()
            }
        return small

    def fields(self, large: PreTrainedConfig, path: str) -> dict[str, Any]:
        """The small values of the fields of `large`."""
        derived = {f.name for f in dataclasses.fields(large) if f.default is None}  # type: ignore[arg-type]
        kept = _kept_layers(large)
        small: dict[str, Any] = {}
        for name in [field.name for field in dataclasses.fields(large)]:  # type: ignore[arg-type]
            value = _value(large, name)
            if value is ... or (large.attribute_map.get(name) in small):
                continue
            if isinstance(value, PreTrainedConfig):
                small[name] = self.config(type(value), f"{path}{name}.", value)
            elif name in _OTHERS:
                continue
            elif isinstance(value, list | tuple) and kept is not None and len(value) == kept[0]:
                small[name] = type(value)(value[i] for i in kept[1])
                if all(isinstance(v, int) and not isinstance(v, bool) for v in value):
                    small[name] = type(value)(self._number(name, item, vars(large)) for item in small[name])
            elif name == "rope_parameters" and isinstance(value, dict):
                small[name] = value
            elif name == "num_key_value_heads" and name in derived and "kv_lora_rank" not in vars(large):
                small[name] = HEADS // 2  # left open, it would be as many as there are heads
            elif isinstance(value, int) and not isinstance(value, bool):
                if kept is not None and _LAYER_COUNT.fullmatch(name) and value == kept[0]:
                    small[name] = len(kept[1])
                elif _TOKEN.fullmatch(name) or name not in derived:
                    small[name] = self._number(name, value, vars(large))
            elif isinstance(value, list | tuple) and _LAYER_INDICES.fullmatch(name):
                small[name] = type(value)(range(min(len(value), LAYERS)))
            elif name == "image_grid_pinpoints":
                small[name] = [[IMAGE, IMAGE], [IMAGE, 2 * IMAGE]]
            elif isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
                small[name] = type(value)(self._number(name, item, vars(large)) for item in value)
            elif name not in derived:
                small[name] = value
        small["pad_token_id"] = small.get("pad_token_id") or 0
        for name, value in self._settings.items():
            if name.rpartition(".")[0] == path.rstrip(".") and name != "default":
                small[name.removeprefix(path)] = value
        if isinstance(small.get("rope_parameters"), dict):
            small["rope_parameters"] = _rope(small["rope_parameters"], small)
        return small

    def _own_number(self, name: str, value: Any, large: PreTrainedConfig, own: Mapping[str, Any]) -> Any:
        """A size that one layer has of its own; one that is greater than that of the others stays so."""
        small, usual = self._number(name, value, {**vars(large), **own}), vars(large).get(name)
        return 2 * small if isinstance(usual, int) and isinstance(value, int) and value > usual else small

    def _number(self, name: str, value: Any, beside: Mapping[str, Any]) -> Any:
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if _TOKEN.fullmatch(name):
            if value < _FIRST_SPECIAL:
                return value
            return self.special.setdefault(value, VOCABULARY - 1 - len(self.special))
        if re.fullmatch(r"\w*(kv|key_value)_heads|kv_n_heads", name):
            return HEADS if value == beside.get("num_attention_heads") else min(value, HEADS // 2)
        if name == "head_dim" and value == beside.get("qk_rope_head_dim"):
            return ROTARY_SIZE
        if name == "vocab_size":
            return VOCABULARY
        for pattern, size in _SIZES:
            if pattern.fullmatch(name):
                return min(value, size)
        return value


def _value(config: PreTrainedConfig, name: str) -> Any:
    """A field's value, where its name is another's alias too; `...` where there is none."""
    return vars(config).get(config.attribute_map.get(name, name), vars(config).get(name, ...))


def _kept_layers(large: PreTrainedConfig) -> tuple[int, list[int]] | None:
    """How many layers there are and which to keep: the first of each kind, and two at least."""
    for name in (field.name for field in dataclasses.fields(large)):  # type: ignore[arg-type]
        count = vars(large).get(name)
        if _LAYER_COUNT.fullmatch(name) and isinstance(count, int) and count > 1:
            lists = [v for v in vars(large).values() if isinstance(v, list | tuple) and len(v) == count]
            lists = [v for v in lists if all(isinstance(item, str | int | float) for item in v)]
            kinds: dict[tuple[Any, ...], int] = {}
            for layer in range(count):
                kinds.setdefault(tuple(values[layer] for values in lists), layer)
            kept = list(kinds.values())
            if len(kept) > 6:  # lists of indices: every layer is of its own kind
                kept = kept[:LAYERS]
            kept += [layer for layer in range(count) if layer not in kept][: max(0, LAYERS - len(kept))]
            return count, sorted(kept)
    return None


def _rope(rope: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters for heads that became smaller: the sections of their frequencies go with them."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {kind: _rope(value, small) if isinstance(value, dict) else value for kind, value in rope.items()}
    rope = dict(rope)
    if "mrope_section" in rope:
        total = sum(rope["mrope_section"])
        size = small.get("head_dim") or small["hidden_size"] // small["num_attention_heads"]
        half = int(size * (rope.get("partial_rotary_factor") or 1)) // 2
        sections = [max(1, section * half // total) for section in rope["mrope_section"]]
        sections[0] += half - sum(sections)
        rope["mrope_section"] = sections
    return rope
