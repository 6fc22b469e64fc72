"""Real arguments of Transformers' operators, small ones, with which each runs: for trials without a guard.

By contract, or by the part of the library where what a class is made of is told by the names of its parameters. What
another version of the library lacks raises what it raises there.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from llm_op_guard.guard.call import asked

# [batch, tokens, width], [batch, tokens] and [batch, heads, tokens, width] have these sizes throughout.
BATCH, TOKENS, PAST, WIDTH, HEADS, VOCABULARY = 2, 3, 2, 16, 2, 16
HEAD = WIDTH // HEADS

Arguments = dict[str, Any]
# Takes the operator, and the class whose method it is; for functions there is none, and none is looked at.
Maker = Callable[[Callable[..., Any], Any], Arguments]


def specimen(contract: str, function: Callable[..., Any], owner: type | None) -> Callable[[], Arguments] | None:
    """What makes the arguments of an operator; None where none are known."""
    part = contract.partition(":")[0]
    make = _BY_CONTRACT.get(contract.removesuffix("_cutting_masks")) or _BY_PART.get(part)
    if make is None:
        return None

    def made() -> Arguments:
        given = make(function, owner)
        names = inspect.signature(function).parameters
        return {name: value for name, value in given.items() if name in names}

    return made


# ---------------------------------------------------------------- tensors


def _noise(*shape: int) -> Any:
    import torch  # noqa: PLC0415

    return torch.randn(shape)


def _ids(*shape: int) -> Any:
    import torch  # noqa: PLC0415

    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape) % VOCABULARY


def _ones(*shape: int) -> Any:
    import torch  # noqa: PLC0415

    return torch.ones(shape, dtype=torch.int64)


def _states(tokens: int = TOKENS, heads: int = HEADS) -> Any:
    return _noise(BATCH, heads, tokens, HEAD)


# ---------------------------------------------------------------- objects


def _named(name: str, module: str = "transformers") -> Any:
    """A class of the library."""
    return getattr(importlib.import_module(module), name)


def _constructed(cls: type, told: Mapping[str, Any]) -> Any:
    """An object of a class whose parameters are told by name; those of no known name keep their defaults."""
    names = inspect.signature(cls).parameters
    return cls(**{name: value for name, value in told.items() if name in names})


def _llama(kind: str, heads: int = HEADS, groups: int = 1) -> Any:
    """A module of Llama: a model, or an attention without caches."""
    config = _named("LlamaConfig")(
        vocab_size=VOCABULARY, hidden_size=heads * HEAD, intermediate_size=WIDTH, num_hidden_layers=1,
        num_attention_heads=heads, num_key_value_heads=heads // groups, max_position_embeddings=32,
        attn_implementation="eager", pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    arguments = {"layer_idx": 0} if kind == "LlamaAttention" else {}
    return _named(kind, "transformers.models.llama.modeling_llama")(config, **arguments).eval()


def _filled(layers: int = 1, tokens: int = PAST) -> Any:
    cache = _named("DynamicCache")()
    for layer in range(layers):
        cache.update(_states(tokens), _states(tokens), layer)
    return cache


# ---------------------------------------------------------------- norms

_NORM_SIZES = {
    "hidden_size": WIDTH, "dim": WIDTH, "normalized_shape": WIDTH, "num_channels": WIDTH, "n": WIDTH, "c_in": WIDTH,
    "num_features": WIDTH, "group_size": 4, "n_groups": 2, "num_groups": 2, "num_heads": HEADS,
}  # fmt: skip
_IMAGE = (BATCH, WIDTH, 3, 3)
_NORM_SHAPES = {
    "norm:layer_norm_2d": _IMAGE,
    "norm:layer_norm_of_channels": _IMAGE,
    "norm:frozen_batch_norm": _IMAGE,
    "norm:group_norm_of_input": _IMAGE,
    "norm:layer_norm_of_rows": (BATCH, WIDTH, TOKENS),
}


def _norm(function: Callable[..., Any], owner: type, shape: tuple[int, ...] = (BATCH, TOKENS, WIDTH)) -> Arguments:
    import torch  # noqa: PLC0415

    first, *inputs = inspect.signature(function).parameters
    # A class that names no sizes hands them on to that of torch which it is made from.
    named = (_NORM_SIZES.keys() & inspect.signature(cls).parameters.keys() for cls in owner.__mro__[:-1])
    norm = owner(**{name: _NORM_SIZES[name] for name in next(filter(None, named), ())})
    for weight in norm.parameters():  # ones hide what happens to a weight
        torch.nn.init.normal_(weight)
    return {first: norm, **{name: _noise(*shape) for name in inputs if name != "quant_states"}}


def _shaped(shape: tuple[int, ...]) -> Maker:
    return lambda function, owner: _norm(function, owner, shape)


def _norm_of_heads(_: Callable[..., Any], owner: type) -> Arguments:
    return {"self": owner((HEADS, HEAD)), "hidden_states": _noise(BATCH, TOKENS, HEADS, HEAD)}


def _norm_per_head(_: Callable[..., Any], owner: type) -> Arguments:
    return {"self": owner(HEAD, HEADS), "hidden_states": _states()}


def _query_key_norm(_: Callable[..., Any], owner: type) -> Arguments:
    norm = owner(SimpleNamespace(head_dim=HEAD, num_key_value_heads=HEADS))
    return {"self": norm, "query_states": _noise(BATCH, TOKENS, 2 * HEADS, HEAD),
            "key_states": _noise(BATCH, TOKENS, HEADS, HEAD)}  # fmt: skip


# ---------------------------------------------------------------- attention


def _attention(groups: int) -> Maker:
    def made(*_: Any) -> Arguments:
        query, key, value = _states(heads=2 * HEADS), *(_states(PAST + TOKENS, 2 * HEADS // groups) for _ in range(2))
        given = {"query": query, "key": key, "value": value}
        return {
            **given, **{f"{name}_states": tensor for name, tensor in given.items()},
            "module": _llama("LlamaAttention", 2 * HEADS, groups),
            "attention_mask": _noise(BATCH, 1, TOKENS, PAST + TOKENS), "scaling": 0.5, "kwargs": {},
        }  # fmt: skip

    return made


def _flash(*_: Any) -> Arguments:
    given = {**_attention(2)(*_), "attention_mask": _ones(BATCH, PAST + TOKENS), "is_causal": True}
    given["module"].config._attn_implementation_internal = "flash_attention_2"
    return given


# ---------------------------------------------------------------- rotary embeddings


def _rotated(contract: str) -> Maker:
    """q, k and the like, and tables."""

    def made(*_: Any) -> Arguments:
        given: Arguments = {name: _noise(*shape) for name, shape in _ROTARY[contract].items()}
        if "position_ids" in given:
            given["position_ids"] = _ids(BATCH, TOKENS)
        options = {"unsqueeze_dim": 1, "num_k_exclude_rope": 0, "repeat_freqs_k": 1}
        return options | given

    return made


_Q, _K, _TABLE, _HALF = (BATCH, 4, TOKENS, HEAD), (BATCH, 2, TOKENS, HEAD), (BATCH, TOKENS, HEAD), (BATCH, TOKENS, 4)
_PATCHES, _PLACES = (TOKENS, HEADS, HEAD), (TOKENS, HEAD)
_ROTARY: dict[str, dict[str, tuple[int, ...]]] = {
    "rope:apply_rotary_pos_emb": {"q": _Q, "k": _K, "cos": _TABLE, "sin": _TABLE},
    "rope:apply_rotary_pos_emb_keys_optional": {"q": _Q, "k": _K, "cos": _TABLE, "sin": _TABLE},
    "rope:apply_rotary_pos_emb_as_matrices": {"q": _Q, "k": _K, "cos": _TABLE, "sin": _TABLE},
    "rope:apply_partial_rotary_pos_emb": {"q": _Q, "k": _K, "cos": _HALF, "sin": _HALF},
    "rope:apply_partial_rotary_pos_emb_keys_optional": {"q": _Q, "k": _K, "cos": _HALF, "sin": _HALF},
    "rope:apply_rotary_pos_emb_half_table": {"q": _Q, "k": _K, "cos": _HALF, "sin": _HALF},
    "rope:apply_rotary_pos_emb_of_tensor": {"tensor": (BATCH, TOKENS, HEADS, HEAD), "cos": _HALF, "sin": _HALF},
    "rope:apply_rotary_pos_emb_of_x": {"x": _Q, "cos": _TABLE, "sin": _TABLE},
    "rope:apply_rotary_pos_emb_to_tail": {"x": _Q, "cos": (BATCH, TOKENS, 2), "sin": (BATCH, TOKENS, 2)},
    "rope:apply_rotary_pos_emb_to_last_queries": {
        "q": (BATCH, 4, 2, HEAD), "k": _K, "cos": _TABLE, "sin": _TABLE,
    },
    "rope:apply_rotary_pos_emb_at_positions": {
        "q": _K, "k": _K, "v": _K, "cos": (VOCABULARY, HEAD), "sin": (VOCABULARY, HEAD), "position_ids": (),
    },
    "rope:apply_rotary_time_emb": {"hidden_states": _TABLE, "cos": _TABLE, "sin": _TABLE},
    "rope_vision:apply_rotary_pos_emb_vision": {"q": _PATCHES, "k": _PATCHES, "cos": _PLACES, "sin": _PLACES},
    "rope_vision:apply_partial_rotary_pos_emb_vision": {
        "q": _PATCHES, "k": _PATCHES, "cos": (TOKENS, 4), "sin": (TOKENS, 4),
    },
    "rope_vision:apply_rotary_pos_emb_to_patches": {
        "q": (BATCH, HEADS, 1 + TOKENS, HEAD), "k": (BATCH, HEADS, 1 + TOKENS, HEAD), "cos": _PLACES, "sin": _PLACES,
    },
    "rope_vision:apply_rotary_pos_emb_2d": {"q": _K, "k": _K, "cos": _PLACES, "sin": _PLACES},
    "rope_vision:apply_rotary_pos_emb_2d_to_memory": {"q": _K, "k": _K, "cos": _PLACES, "sin": _PLACES},
    "rope_vision:apply_rotary_pos_emb_2d_cross_attn": {
        "q": _K, "k": (BATCH, HEADS, 4, HEAD), "cos": _PLACES, "sin": _PLACES, "cos_k": (4, HEAD), "sin_k": (4, HEAD),
    },
}  # fmt: skip


def _vjepa(_: Callable[..., Any], owner: type) -> Arguments:
    attention = owner(_named("VJEPA2Config")(), hidden_size=HEADS * 24, num_attention_heads=HEADS)
    return {"self": attention, "qk": _noise(BATCH, HEADS, 4, 24), "pos_ids": tuple(_ids(4) for _ in range(3))}


def _seamless(_: Callable[..., Any], owner: type) -> Arguments:
    config = _named("SeamlessM4TConfig")(hidden_size=WIDTH, speech_encoder_attention_heads=HEADS)
    table = _noise(2, TOKENS, 1, 1, HEAD)
    return {"self": owner(config), "hidden_states": _noise(BATCH, TOKENS, WIDTH),
            "relative_position_embeddings": table}  # fmt: skip


def _gpt_neox(_: Callable[..., Any], owner: type) -> Arguments:
    config = _named("GPTNeoXConfig")(hidden_size=WIDTH, num_attention_heads=HEADS, attn_implementation="eager")
    attention = owner(config, layer_idx=0).eval()
    table = _noise(BATCH, TOKENS, attention.rotary_ndims)
    return {"self": attention, "hidden_states": _noise(BATCH, TOKENS, WIDTH), "attention_mask": None,
            "position_embeddings": (table, table.clone())}  # fmt: skip


# ---------------------------------------------------------------- caches


def _layer(function: Callable[..., Any], owner: type) -> Arguments:
    import torch  # noqa: PLC0415

    rates = {"heavily_compressed_attention": 4, "compressed_sparse_attention": 4}
    config = SimpleNamespace(sliding_window=4, compress_rates=rates)
    room = PAST + TOKENS
    layer = _constructed(owner, {"max_cache_len": room, "sliding_window": room, "config": config})
    places = {"cache_kwargs": {"cache_position": torch.arange(PAST)}}
    takes = inspect.signature(function).parameters
    # It makes room for what comes first.
    layer.update(_states(PAST), _states(PAST), **{name: value for name, value in places.items() if name in takes})
    return {"self": layer, "key_states": _states(1), "value_states": _states(1),
            "cache_kwargs": {"cache_position": torch.tensor([PAST])}}  # fmt: skip


def _cache(*_: Any) -> Arguments:
    return {"self": _filled(layers=2), "key_states": _states(1), "value_states": _states(1), "layer_idx": 0,
            "cache_kwargs": None}  # fmt: skip


# ---------------------------------------------------------------- masks and models


def _mask(*_: Any) -> Arguments:
    import torch  # noqa: PLC0415

    embeddings, cache = _noise(BATCH, TOKENS, WIDTH), _filled()
    return {"config": _llama("LlamaModel").config, "inputs_embeds": embeddings, "input_embeds": embeddings,
            "attention_mask": _ones(BATCH, PAST + TOKENS), "cache": cache, "past_key_values": cache,
            "cache_position": torch.arange(PAST, PAST + TOKENS)}  # fmt: skip


def _mask_of_encoder(*_: Any) -> Arguments:
    return {**_mask(), "attention_mask": _ones(BATCH, TOKENS), "cache": None}


def _bert(_: Callable[..., Any], owner: type) -> Arguments:
    config = _named("BertConfig")(vocab_size=VOCABULARY, hidden_size=WIDTH, max_position_embeddings=32)
    return {"self": owner(config).eval(), "input_ids": _ids(BATCH, TOKENS)}


def _positions(cache: Any) -> Any:
    import torch  # noqa: PLC0415

    past = cache.get_seq_length()
    return torch.arange(past, past + TOKENS).expand(BATCH, TOKENS).clone()


def _decoder(*_: Any) -> Arguments:
    cache = _filled()
    return {"self": _llama("LlamaModel"), "input_ids": _ids(BATCH, TOKENS), "position_ids": _positions(cache),
            "attention_mask": _ones(BATCH, PAST + TOKENS), "cache": cache, "past_key_values": cache,
            "kwargs": {}}  # fmt: skip


def _gpt2(_: Callable[..., Any], owner: type) -> Arguments:
    config = _named("GPT2Config")(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_head=HEADS,
        n_layer=1,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    cache = _filled()
    return {"self": owner(config).eval(), "input_ids": _ids(BATCH, TOKENS), "position_ids": _positions(cache),
            "cache": cache, "past_key_values": cache, "cache_position": _positions(cache)[0]}  # fmt: skip


def _causal_lm(*_: Any) -> Arguments:
    ids = _ids(BATCH, TOKENS)
    return {"self": _llama("LlamaForCausalLM"), "input_ids": ids, "labels": ids.clone(), "logits_to_keep": 0,
            "kwargs": {}}  # fmt: skip


def _generate(*_: Any) -> Arguments:
    model = _llama("LlamaForCausalLM")
    options = {"attention_mask": _ones(BATCH, TOKENS), "max_new_tokens": 2, "do_sample": False}
    return {
        "self": model,
        "inputs": _ids(BATCH, TOKENS),
        "generation_config": copy.deepcopy(model.generation_config),
        "kwargs": options,
    }


def _router(_: Callable[..., Any], owner: type) -> Arguments:
    config = SimpleNamespace(
        hidden_size=WIDTH, num_local_experts=4, num_experts_per_tok=2, n_routed_experts=4, routed_scaling_factor=1.0,
        n_group=1, topk_group=1, norm_topk_prob=True,
    )  # fmt: skip
    router = owner(config)
    router.weight.data = _noise(4, WIDTH)  # memory that nobody has set may hold anything
    return {"self": router, "hidden_states": _noise(BATCH, TOKENS, WIDTH)}


# ---------------------------------------------------------------- logits


def _processor(_: Callable[..., Any], owner: type) -> Arguments:
    whisper = SimpleNamespace(
        no_timestamps_token_id=8, eos_token_id=7, bos_token_id=6, max_initial_timestamp_index=None
    )
    told = {
        "min_p": 0.1, "top_p": 0.9, "top_h": 0.5, "mass": 0.9, "epsilon": 1e-3, "penalty": 1.2, "ngram_size": 2,
        "encoder_ngram_size": 2, "encoder_input_ids": _ids(BATCH, TOKENS), "num_beams": 1, "bos_token_id": 1,
        "sequence_bias": [[[3], 1.0], [[1, 2], -1.0]], "prefix_allowed_tokens_fn": lambda _batch, _ids: [1, 2],
        "eos_token_id": 2, "max_length": TOKENS + 1, "exponential_decay_length_penalty": (1, 1.1),
        "input_ids_seq_length": 1, "min_eos_p": 0.1, "generate_config": whisper, "begin_index": 1, "no_speech_token": 3,
        "input_start_len": TOKENS, "semantic_vocab_size": 4, "codebook_size": 4, "guidance_scale": 1.5,
        "vocab_size": VOCABULARY, "device": "cpu", "ngram_len": 3, "keys": [1, 2], "sampling_table_size": 8,
        "sampling_table_seed": 0, "context_history_size": 4, "guidance_top_k": 4, "num_channels": BATCH,
        "delay_pattern": [0, 1], "max_generation_len": 8, "unconditional_ids": _ids(BATCH, TOKENS),
        "unconditional_attention_mask": _ones(BATCH, TOKENS),
    }  # fmt: skip
    if "model" in inspect.signature(owner).parameters:
        told["model"] = _llama("LlamaForCausalLM")
    tokens = 1 if owner.__name__ in ("ForcedBOSTokenLogitsProcessor", "WhisperNoSpeechDetection") else TOKENS
    return {"self": _constructed(owner, told), "input_ids": _ids(BATCH, tokens), "scores": _noise(BATCH, VOCABULARY)}


def _processors(_: Callable[..., Any], owner: type) -> Arguments:
    return {"self": owner([_named("TemperatureLogitsWarper")(0.7)]), "input_ids": _ids(BATCH, TOKENS),
            "scores": _noise(BATCH, VOCABULARY), "kwargs": {}}  # fmt: skip


def _used(function: Callable[..., Any], owner: type) -> Arguments:
    """A processor that keeps something from its first call on."""
    given = _processor(function, owner)
    given["self"](given["input_ids"], given["scores"].clone())
    return given


def _guided(function: Callable[..., Any], owner: type) -> Arguments:
    return {**_processor(function, owner), "scores": _noise(2 * BATCH, VOCABULARY)}


_BY_PART: dict[str, Maker] = {"norm": _norm, "logits": _processor}
_BY_CONTRACT: dict[str, Maker] = {
    **{contract: _shaped(shape) for contract, shape in _NORM_SHAPES.items()},
    **{contract: _rotated(contract) for contract in _ROTARY},
    "norm:affine_layer_norm": _norm_of_heads,
    "norm:layer_norm_per_head": _norm_per_head,
    "norm:query_key_norm": _query_key_norm,
    "attention:eager_attention_forward": _attention(2),
    "attention:sdpa_attention_forward": _attention(2),
    "attention:flex_attention_forward": _attention(2),
    "attention:flash_attention_forward": _flash,
    "attention:ungrouped_attention_forward": _attention(1),
    "attention:ungrouped_attention_of_states": _attention(1),
    "attention:unmasked_attention_forward": _attention(1),
    "rope:apply_rotary_embedding_to_columns": _seamless,
    "rope:gpt_neox_attention": _gpt_neox,
    "rope:gpt_neox_attention_of_rotary_pct": _gpt_neox,
    "rope_vision:apply_rotary_embeddings": _vjepa,
    "cache:growing_layer_update": _layer,
    "cache:shared_layer_update": _layer,
    "cache:static_layer_update": _layer,
    "cache:static_sliding_layer_update": _layer,
    "cache:fp8_layer_update": _layer,
    "cache:update": _cache,
    "cache:update_at_positions": _cache,
    "mask:create_causal_mask": _mask,
    "mask:create_causal_mask_padded": _mask,
    "mask:create_bidirectional_mask": _mask_of_encoder,
    "entry:token_ids": _bert,
    "entry:forward": _decoder,
    "entry:learned_positions": _gpt2,
    "entry:learned_positions_of_cache": _gpt2,
    "entry:causal_lm": _causal_lm,
    "entry:generate": _generate,
    "moe:router": _router,
    "logits:processors": _processors,
    "logits:sequence_bias": _used,
    "logits:synth_id": _used,
    "logits:dia_guidance": _guided,
}

# ---------------------------------------------------------------- objects that answer otherwise

_IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2", "flex_attention")


def variants(owner: Any, wanted: Mapping[str, Any]) -> Iterator[None]:
    """Change a configuration, cache or model in place, step by step, to what functions of contracts shall say of it."""
    if hasattr(owner, "_attn_implementation_internal") and any(asked(key)[0] == "makes_masks" for key in wanted):
        for name in _IMPLEMENTATIONS:
            owner._attn_implementation_internal = name
            yield
    elif hasattr(owner, "layer_class_to_replicate"):
        yield from _caches(owner, wanted)
    else:
        yield from _models(owner, wanted)


def _caches(cache: Any, wanted: Mapping[str, Any]) -> Iterator[None]:
    growing, sliding = (
        _named(name, "transformers.cache_utils") for name in ("DynamicLayer", "DynamicSlidingWindowLayer")
    )
    length, capacity = wanted.get("cache_length()", PAST), wanted.get("cache_capacity()")
    used = wanted.get("cache_layers_in_use()", 1 if length else 0)
    many = wanted.get("cache_layers()", used)
    if any(type(number) is not int or number > _MOST for number in (length, used, many, capacity or 0)):
        return
    columns = [given for function, given in map(asked, wanted) if function == "mask_columns"]
    room = [capacity] if capacity is not None else [None, *(number for (number,) in columns)]
    for window in room:
        layers = [growing() if window is None else sliding(int(window)) for _ in range(many)]
        for layer in layers[:used]:
            layer.update(_states(length), _states(length))
        cache.layers = layers
        yield


# A table, a cache or a model of more than that is not made for a trial.
_MOST = 1024


def _models(model: Any, wanted: Mapping[str, Any]) -> Iterator[None]:
    import torch  # noqa: PLC0415

    numbers = {key: int(value) for key, value in wanted.items() if isinstance(value, int) and 0 <= value <= _MOST}
    inner = model
    for name in ("model", "transformer"):
        inner = getattr(inner, name, inner)
    rows, columns = numbers.get("embedding_rows()"), numbers.get("embedding_width()")
    for name in ("embed_tokens", "wte", "word_embeddings"):
        table = getattr(inner, name, None)
        if table is not None and (rows is not None or columns is not None):
            rows = table.num_embeddings if rows is None else rows
            columns = table.embedding_dim if columns is None else columns
            setattr(inner, name, torch.nn.Embedding(rows, columns))
            yield
    places = numbers.get("position_rows()")
    if places is not None and hasattr(inner, "wpe"):
        inner.wpe = torch.nn.Embedding(places, inner.wpe.embedding_dim)
        yield
    layers = numbers.get("decoder_layers()")
    if layers is not None and hasattr(inner, "layers"):
        inner.config.num_hidden_layers = layers
        inner.layers = torch.nn.ModuleList(copy.deepcopy(inner.layers[0]) for _ in range(layers))
        yield
