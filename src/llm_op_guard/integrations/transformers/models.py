"""What is read of a Transformers model itself: its tables, its layers, what its loss takes.

Each answer holds only for a model whose modules do in plain sight what is asked (`forwards`), with code that is known
where a fingerprint can know it, and without hooks that could come between; else there is none. Fingerprints were taken
from Transformers 5.24.0 and 4.57.6. A program that is traced gets no answer: it would trace what is asked.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from llm_op_guard.contract.vocabulary import Function
from llm_op_guard.guard.reading import UNSET, NotApplicable, path_value, present
from llm_op_guard.install.recognise import digest_of
from llm_op_guard.integrations.transformers import forwards
from llm_op_guard.integrations.transformers.known import Code, KnownCode
from llm_op_guard.integrations.transformers.modules import (
    AFTER,
    BEFORE,
    CALLS_OF_LAYERS,
    class_function,
    contents,
    digest_in_library,
    forward,
    global_hooks,
    held,
    innermost_of_library,
    is_of_library,
    known_forward,
    may_change,
    undisturbed,
)

# Bodies of rotary modules that make one angle of each position, whatever the shape of `position_ids`.
_ROTARY = {
    "51d117f54e575d41": Code("llama and 126 others"),
    "19b1cc23ae7e1283": Code("gemma3 and 16 others: a frequency for each kind of layer"),
    "cb1f334d51cb7844": Code("olmo and 5 others: in float32"),
    "6d4ad7a056cfa86f": Code("cohere and 3 others: each frequency twice in a row"),
    "1b3c6ff829a598c5": Code("olmo3 and 2 others: a frequency for each kind of layer, in float32"),
    "1e5c6553c3644600": Code("llama4, deepseek_v2: complex"),
    "626bb21051b7bb04": Code("gpt_oss: half a table"),
    "a837fa15cb54e536": Code("llama and 64 others", versions=("4.57.6",)),
    "50f1d625c3ff3b09": Code("olmo and 3 others: in float32", versions=("4.57.6",)),
    "20532a9e8a5b6f65": Code("ernie4_5, ernie4_5_moe: in float32", versions=("4.57.6",)),
    "16d8ac4bd3847f77": Code("blt, cohere, cohere2: each frequency twice in a row", versions=("4.57.6",)),
    "43e98f0334cea7ee": Code("llama4, deepseek_v2: complex", versions=("4.57.6",)),
    "e982be9f19cc2753": Code("gpt_oss: half a table", versions=("4.57.6",)),
    "a79b4e8efd33bfca": Code("dbrx, recurrent_gemma", versions=("4.57.6",)),
    "bff137080df95f04": Code("chameleon", versions=("4.57.6",)),
}
# The library's own of what a model may do in its own way.
_INPUT_EMBEDDINGS = {"956dcdbe2849ee9a": Code("EmbeddingAccessMixin.get_input_embeddings")}
_INPUTS = {
    "57a189505e9f8c36": Code("GenerationMixin.prepare_inputs_for_generation"),
    "7d0cd4199c97dfef": Code(
        "GenerationMixin.prepare_inputs_for_generation: counts positions too", versions=("4.57.6",)
    ),
}
_POSITIONS = {"1f674f76d2606bcf": Code("GenerationMixin._prepare_position_ids_for_generation")}
_LOSS = {"7db8500805c1f0ca": Code("PreTrainedModel.loss_function", versions=("4.57.6", "5.24.0"))}
# `ForCausalLMLoss`, which shifts labels, and ignores -100.
_CAUSAL_LM_LOSS = {"92434fe932f2ec9f": Code("loss_utils.ForCausalLMLoss", versions=("4.57.6", "5.24.0"))}

KNOWN = (
    KnownCode("models: angles of positions", r"transformers\.models\..*RotaryEmbedding\.forward", _ROTARY),
    KnownCode(
        "models: the table of ids",
        r"transformers\.modeling_utils\.EmbeddingAccessMixin\.get_input_embeddings",
        _INPUT_EMBEDDINGS,
        module="transformers.modeling_utils",
    ),
    KnownCode(
        "models: calls of layers",
        r"transformers\.modeling_layers\.GradientCheckpointingLayer\.__call__",
        CALLS_OF_LAYERS,
        module="transformers.modeling_layers",
    ),
    KnownCode(
        "models: inputs of generate",
        r"transformers\.generation\.utils\.GenerationMixin\.prepare_inputs_for_generation",
        _INPUTS,
    ),
    KnownCode(
        "models: positions of generate",
        r"transformers\.generation\.utils\.GenerationMixin\._prepare_position_ids_for_generation",
        _POSITIONS,
    ),
    KnownCode(
        "models: which loss",
        r"transformers\.modeling_utils\.PreTrainedModel\.loss_function",
        _LOSS,
        module="transformers.modeling_utils",
    ),
    KnownCode(
        "models: the loss of a causal LM",
        r"transformers\.loss\.loss_utils\.ForCausalLMLoss",
        _CAUSAL_LM_LOSS,
        module="transformers.loss.loss_utils",
    ),
)


def embedding_rows(model: Any) -> int:
    """The rows of the table in which a model's own forward looks token ids up.

    Raises NotApplicable where that is not known for certain: the model, and its decoder (`base_model_prefix`) where
    it has one, must hand the ids on as they are, to an embedding that takes them as they are.
    """
    return _rows(_table_of_ids(_as_generated(model)))


def embedding_width(model: Any) -> int:
    """The columns of that table; raises NotApplicable where embeddings of the caller may go another way than its."""
    decoder = _as_generated(model)
    table = _table_of_ids(decoder)
    if not forwards.embeds_as_given(known_forward(decoder)):
        raise NotApplicable
    width, columns = path_value(table, "embedding_dim"), path_value(table, "weight", "shape", (1,))
    if not isinstance(width, int) or width != columns:
        raise NotApplicable
    return width


def takes_positions(model: Any) -> bool:
    """Whether each token's `position_ids` turn its queries and keys; raises NotApplicable where that is not known."""
    decoder = _as_generated(model)
    function = known_forward(decoder)
    rotary = path_value(decoder, "rotary_emb")
    if may_change(_table_of_ids(decoder), AFTER) or may_change(rotary, BEFORE) or may_change(rotary, AFTER):
        raise NotApplicable
    if not forwards.rotates_positions(function) or not forwards.embeds_as_given(function):
        raise NotApplicable
    if digest_of(known_forward(rotary)) not in _ROTARY:
        raise NotApplicable
    return True


def position_rows(model: Any) -> int:
    """The rows of the table in which a model looks positions up; raises NotApplicable where that is not certain."""
    decoder = _as_generated(model)
    if not forwards.looks_positions_up(known_forward(decoder)):
        raise NotApplicable
    table = _embedding(path_value(decoder, "wpe"))
    if may_change(table, AFTER) or may_change(_table_of_ids(decoder), AFTER):
        raise NotApplicable
    return _rows(table)


def decoder_layers(model: Any) -> int:
    """The layers of a decoder, each of which fills one of its cache; raises NotApplicable where that is not certain."""
    layers, count = _layers(model), contents(held(model, "config")).get("num_hidden_layers")
    if not layers or type(count) is not int or count != len(layers):
        raise NotApplicable
    if not forwards.runs_every_layer(known_forward(model)) or global_hooks(BEFORE):
        raise NotApplicable
    # Every layer may be another one, or somebody's own: here each is looked at, and each pair of classes below, once.
    attentions = [own["_modules"].get("self_attn") for own in undisturbed(*layers)]
    for index, own in enumerate(undisturbed(*attentions)):
        layer_idx = own.get("layer_idx")
        if type(layer_idx) is not int or layer_idx != index:
            raise NotApplicable
    kinds = dict(
        zip(
            zip(map(id, map(type, layers)), map(id, map(type, attentions)), strict=True),
            zip(layers, attentions, strict=True),
            strict=True,
        )
    )
    for layer, attention in kinds.values():
        if not forwards.hands_cache_on(known_forward(layer)):
            raise NotApplicable
        # One that asks for weights may leave it to the forward that it overrides.
        known_forward(attention)
        for cls in type(attention).__mro__[:-2]:
            if "forward" in (methods := cls.__dict__):
                function = methods["forward"]
                function = innermost_of_library(function) if isinstance(function, FunctionType) else None
                if function is None or not forwards.fills_its_layer(function):
                    raise NotApplicable
    return len(layers)


def needs_tokens(model: Any) -> bool:
    """Whether a model's attention fails without tokens; raises NotApplicable where that is not certain."""
    decoder = _as_generated(model)
    layer = next(iter(_layers(decoder)), None)
    attention = path_value(layer, "self_attn")
    if may_change(_table_of_ids(decoder), AFTER) or may_change(layer, BEFORE) or may_change(attention, BEFORE):
        raise NotApplicable
    if not forwards.hands_cache_on(known_forward(layer)):
        raise NotApplicable
    if not forwards.fails_without_tokens(known_forward(attention)):
        raise NotApplicable
    return True


def keeps_tokens(model: Any) -> bool:
    """Whether a causal LM gives logits for each of its tokens; raises NotApplicable where that is not certain."""
    decoder = _inner(model)
    takes_positions(decoder)
    parts = [part for own in undisturbed(model, decoder) for part in own["_modules"].values()] + _layers(decoder)
    parts = [part for part in parts if part is not None and not _is_list(part)]
    if any(own.get(AFTER) and may_change(part, AFTER) for own, part in zip(undisturbed(*parts), parts, strict=True)):
        raise NotApplicable
    kinds = {id(type(part)): part for part in parts}
    if global_hooks(BEFORE) or global_hooks(AFTER):
        raise NotApplicable
    if not all(is_of_library(known_forward(part)) for part in kinds.values()):
        raise NotApplicable
    return True


def label_classes(model: Any) -> int:
    """How many classes the labels of a causal LM have; raises NotApplicable where another loss may be taken."""
    if not forwards.learns_next_tokens(known_forward(model)) or present(model, "_loss_function"):
        raise NotApplicable
    takes_positions(_inner(model))
    base = sys.modules.get("transformers.modeling_utils")
    mapping = path_value(base, "LOSS_MAPPING")
    loss = mapping.get(path_value(model, "loss_type")) if type(mapping) is dict else None
    if digest_of(loss) not in _CAUSAL_LM_LOSS or digest_in_library(model, "loss_function") not in _LOSS:
        raise NotApplicable
    classes = path_value(model, "config", "vocab_size")
    if not isinstance(classes, int) or path_value(model, "vocab_size") not in (UNSET, classes):
        raise NotApplicable
    return classes


READERS: dict[Function, Callable[[Any], Any]] = {
    Function(
        "embedding_rows", "A", (("model", "owner"),),
        "the rows of the table in which a Transformers model's own forward looks up token ids; does not apply to "
        "a model of which that is not known for certain",
        eager=True,
    ): embedding_rows,
    Function(
        "embedding_width", "A", (("model", "owner"),),
        "the columns of that table, where embeddings of the caller go the same way as its own; else it does not apply",
        eager=True,
    ): embedding_width,
    Function(
        "takes_positions", "A", (("model", "owner"),),
        "a Transformers model rotates every token by its own of `position_ids`; does not apply where that is not known",
        eager=True,
    ): takes_positions,
    Function(
        "position_rows", "A", (("model", "owner"),),
        "the rows of the table in which a Transformers model looks positions up; does not apply where that is unknown",
        eager=True,
    ): position_rows,
    Function(
        "decoder_layers", "A", (("model", "owner"),),
        "the layers of a Transformers decoder, each with one of its cache; does not apply where that is not known",
        eager=True,
    ): decoder_layers,
    Function(
        "needs_tokens", "A", (("model", "owner"),),
        "the attention of a Transformers model fails without tokens; does not apply where that is not known",
        eager=True,
    ): needs_tokens,
    Function(
        "keeps_tokens", "A", (("model", "owner"),),
        "a Transformers causal LM gives logits for each of its tokens; does not apply where that is not known",
        eager=True,
    ): keeps_tokens,
    Function(
        "label_classes", "A", (("model", "owner"),),
        "the classes that the labels of a Transformers causal LM stand for; does not apply to another loss",
        eager=True,
    ): label_classes,
}  # fmt: skip


# ---------------------------------------------------------------- modules


def _as_generated(model: Any) -> Any:
    """The module whose forward looks token ids up when a model is called or generates: itself or its decoder."""
    if _looks_up(model):
        return model
    inner = _inner(model)
    if not _prepares_as_usual(model) or may_change(model, BEFORE):
        raise NotApplicable
    return inner


def _inner(model: Any) -> Any:
    """The decoder (`base_model_prefix`) to which a model hands token ids as they are."""
    prefix = path_value(model, "base_model_prefix")
    inner = path_value(model, prefix) if isinstance(prefix, str) and prefix else UNSET
    if inner is UNSET or not forwards.hands_ids_on(known_forward(model), prefix):
        raise NotApplicable
    if may_change(inner, BEFORE) or not _looks_up(inner):
        raise NotApplicable
    return inner


def _looks_up(module: Any) -> bool:
    function = forward(module)
    return function is not None and (
        forwards.table_of_ids(function) is not None or forwards.module_asked_for_table(function) is not None
    )


def _table_of_ids(model: Any) -> Any:
    function = known_forward(model)
    name = forwards.table_of_ids(function)
    if name is not None:
        return _embedding(functools.reduce(held, name.split("."), model))
    path = forwards.module_asked_for_table(function)
    if path is None:
        raise NotApplicable
    return _embedding(_input_embeddings(path_value(model, *path)))


def _input_embeddings(module: Any) -> Any:
    """What a module's `get_input_embeddings()` returns, by reading; raises NotApplicable where its code is unknown."""
    function = class_function(type(module), "get_input_embeddings")
    if function is None or path_value(module, "get_input_embeddings") is not UNSET:
        raise NotApplicable
    child = forwards.asks_for_table_of(function)
    if child is not None:
        return _input_embeddings(_child(module, child))
    if digest_of(function) not in _INPUT_EMBEDDINGS:
        raise NotApplicable
    name = path_value(module, "_input_embed_layer")
    if not isinstance(name, str):
        raise NotApplicable
    for owner in (module, _child(module, "embeddings"), _child(module, "model")):
        if owner is not None and (table := _child(owner, name)) is not None:
            return table
    language_model = _child(module, "language_model")
    if language_model is None or language_model is module:
        raise NotApplicable
    return _input_embeddings(language_model)


def _child(module: Any, name: str) -> Any:
    """`getattr(module, name, None)`; raises NotApplicable for a property."""
    value = path_value(module, name)
    if value is UNSET and any(name in cls.__dict__ for cls in type(module).__mro__):
        raise NotApplicable
    return None if value is UNSET else value


def _embedding(table: Any) -> Any:
    if may_change(table, BEFORE) or not _takes_ids_as_they_are(known_forward(table)):
        raise NotApplicable
    return table


def _rows(table: Any) -> int:
    # The module's own count and the table's rows: either may be behind after a resize or a split over devices.
    count, rows = held(table, "num_embeddings"), path_value(table, "weight", "shape", (0,))
    if not isinstance(count, int) or not isinstance(rows, int):
        raise NotApplicable
    return max(count, rows)


def _layers(decoder: Any) -> list[Any]:
    """The modules that `self.layers` gives in order; raises NotApplicable where its class has a say in that."""
    layers = held(decoder, "layers")
    if not _is_list(layers):
        raise NotApplicable
    return list(contents(layers)["_modules"].values())


def _is_list(module: Any) -> bool:
    container = sys.modules.get("torch.nn.modules.container")
    return container is not None and type(module) is vars(container).get("ModuleList")


def _prepares_as_usual(model: Any) -> bool:
    """Whether `generate` makes what the model is given without a word of the model's own."""
    if digest_in_library(model, "prepare_inputs_for_generation") not in _INPUTS:
        return False
    counts = "_prepare_position_ids_for_generation"  # Transformers 4 has none: the other counts positions, too
    return digest_in_library(model, counts) in _POSITIONS or not any(counts in vars(c) for c in type(model).__mro__)


def _takes_ids_as_they_are(function: FunctionType) -> bool:
    """Whether an embedding's forward is torch's own, or does nothing with ids but hand them to that."""
    torchs = path_value(sys.modules.get("torch.nn"), "Embedding")
    own = class_function(torchs, "forward") if isinstance(torchs, type) else None
    return (own is not None and function.__code__ is own.__code__) or forwards.hands_on_to_super(function)
