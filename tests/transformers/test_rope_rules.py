"""Rotary embeddings: every contract at its boundaries, what is legal and rare, and what breaks each rule."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from rope_formulas import Arguments, flat, numbers

import llm_op_guard as og
from llm_op_guard.contract.model import Require
from llm_op_guard.install.recognise import innermost
from llm_op_guard.integrations.transformers import rope
from llm_op_guard.integrations.transformers.known import contract_named

# ---------------------------------------------------------------- calls of every contract


class Sizes(NamedTuple):
    """Batch, heads of q, heads of k, tokens, width of a head."""

    b: int = 2
    h: int = 4
    g: int = 2
    n: int = 3
    d: int = 8


@dataclass(frozen=True)
class Operator:
    """A function of a contract, and how it is called; what an odd width of heads breaks, None where nothing."""

    function: str
    call: Callable[[Sizes], Arguments]
    odd: str | None


def tables(*shape: int) -> dict[str, torch.Tensor]:
    """What position 1 and later give: no sine is 0."""
    angles = torch.rand(shape, generator=torch.Generator().manual_seed(5)) + 0.1
    return {"cos": angles.cos(), "sin": angles.sin()}


def full(s: Sizes) -> Arguments:
    return {"q": numbers(s.b, s.h, s.n, s.d), "k": numbers(s.b, s.g, s.n, s.d), **tables(1, s.n, s.d)}


def part(s: Sizes) -> Arguments:
    return full(s) | tables(1, s.n, min(4, s.d // 2 * 2))


def half(s: Sizes) -> Arguments:
    return full(s) | tables(1, s.n, s.d // 2)


def of_tensor(s: Sizes) -> Arguments:
    return {"tensor": numbers(s.b, s.n, s.h, s.d), **tables(1, s.n, s.d // 2)}


def of_x(s: Sizes) -> Arguments:
    return {"x": numbers(s.b, s.n, s.h, s.d), **tables(1, s.n, s.d), "unsqueeze_dim": 2}


def tail(s: Sizes) -> Arguments:
    return of_x(s) | tables(1, s.n, min(2, s.d // 2))


def to_last(s: Sizes) -> Arguments:
    return full(s) | {"q": numbers(s.b, s.h, min(2, s.n), s.d)}


def at_positions(s: Sizes) -> Arguments:
    same = {name: numbers(s.b, s.h, s.n, s.d) for name in ("q", "k", "v")}
    return {**same, **tables(9, s.d), "position_ids": torch.arange(s.n)[None]}


def heads_first_complex(s: Sizes) -> Arguments:
    q, k = numbers(s.b, s.h, s.n, s.d), numbers(s.b, s.g, s.n, s.d)
    return {"xq": q, "xk": k, "freqs_cis": numbers(1, s.n, s.d // 2).to(torch.complex64)}


def tokens_first_complex(s: Sizes) -> Arguments:
    return {name: x.transpose(1, 2) if name != "freqs_cis" else x for name, x in heads_first_complex(s).items()}


def patches_complex(s: Sizes) -> Arguments:
    q, k = numbers(s.b, s.n, s.h, s.d), numbers(s.b, s.n, s.g, s.d)
    return {"query": q, "key": k, "freqs_ci": numbers(s.n, 1, s.d // 2).to(torch.complex64)}


def by_time(s: Sizes) -> Arguments:
    return {"hidden_states": numbers(s.b, s.n, s.d), **tables(s.b, s.n, min(4, s.d // 2 * 2))}


def sines_first(s: Sizes) -> Arguments:
    q = numbers(s.b, s.h, s.n, s.d)
    return {"sinusoidal_pos": numbers(1, 1, s.n, s.d), "query_layer": q, "key_layer": q, "value_layer": q}


def in_columns(s: Sizes) -> Arguments:
    of = SimpleNamespace(num_heads=s.h, head_size=s.d)
    x, table = numbers(s.b, s.n, s.h * s.d), numbers(2, s.n, 1, 1, s.d)
    return {"self": of, "hidden_states": x, "relative_position_embeddings": table}


def prefixed(s: Sizes) -> Arguments:
    return {"q": numbers(s.b, s.h, s.n + 2, s.d), "k": numbers(s.b, s.g, s.n + 2, s.d), **tables(s.n, s.d)}


def one_row(s: Sizes) -> Arguments:
    return {"q": numbers(s.n, s.h, s.d), "k": numbers(s.n, s.g, s.d), **tables(s.n, s.d)}


def part_of_one_row(s: Sizes) -> Arguments:
    return one_row(s) | tables(s.n, min(4, s.d // 2 * 2))


def to_memory(s: Sizes) -> Arguments:
    k = numbers(s.b, s.h, 2 * s.n + 1, s.d)
    return full(s) | {"k": k, "num_k_exclude_rope": 1, "repeat_freqs_k": True}


def crossing(s: Sizes) -> Arguments:
    own = tables(1, s.n, s.d)
    return full(s) | {"cos_k": own["cos"], "sin_k": own["sin"]}


def in_directions(s: Sizes) -> Arguments:
    width = 2 * (s.d // 3 // 2)
    of = SimpleNamespace(d_dim=width, h_dim=width, w_dim=width, attention_head_size=s.d)
    return {"self": of, "qk": numbers(s.b, s.h, s.n, s.d), "pos_ids": (torch.arange(s.n),) * 3}


@cache
def found(path: str) -> Any:
    """A function or method by `model.name`."""
    model, _, names = path.partition(".")
    value: Any = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    for name in names.split("."):
        value = getattr(value, name)
    return innermost(value)


ROTARY = "apply_rotary_pos_emb"
OPERATORS: dict[str, Operator] = {
    "rope:apply_rotary_pos_emb": Operator("llama." + ROTARY, full, "even_head_dim"),
    "rope:apply_rotary_pos_emb_keys_optional": Operator(
        "mistral_large4.apply_rotary_pos_emb_interleave", full, "even_head_dim"
    ),
    "rope:apply_partial_rotary_pos_emb": Operator("gpt_neox." + ROTARY, part, None),
    "rope:apply_partial_rotary_pos_emb_keys_optional": Operator("qwen4_exp." + ROTARY, part, None),
    "rope:apply_rotary_pos_emb_half_table": Operator("gpt_oss." + ROTARY, half, "cos.shape"),
    "rope:apply_rotary_pos_emb_of_tensor": Operator("gptj." + ROTARY, of_tensor, "sin.shape"),
    "rope:apply_rotary_pos_emb_of_x": Operator("gemma3n." + ROTARY, of_x, "even_head_dim"),
    "rope:apply_rotary_pos_emb_to_tail": Operator("deepseek_v4." + ROTARY, tail, None),
    "rope:apply_rotary_pos_emb_as_matrices": Operator("pe_audio." + ROTARY, full, "even_head_dim"),
    "rope:apply_rotary_pos_emb_to_last_queries": Operator("muse_glimmer_assistant." + ROTARY, to_last, "even_head_dim"),
    "rope:apply_rotary_pos_emb_at_positions": Operator("clvp." + ROTARY, at_positions, "even_rotary_width"),
    "rope:apply_rotary_emb": Operator("deepseek_v2.apply_rotary_emb", heads_first_complex, "freqs_cis.shape"),
    "rope:apply_rotary_emb_tokens_first": Operator("llama4.apply_rotary_emb", tokens_first_complex, "freqs_cis.shape"),
    "rope:apply_rotary_time_emb": Operator("musicflamingo.apply_rotary_time_emb", by_time, None),
    "rope:apply_rotary_position_embeddings": Operator(
        "roformer.RoFormerSelfAttention.apply_rotary_position_embeddings", sines_first, "even_head_dim"
    ),
    "rope:apply_rotary_embedding_to_columns": Operator(
        "wav2vec2_conformer.Wav2Vec2ConformerSelfAttention._apply_rotary_embedding", in_columns, None
    ),
    "rope_vision:apply_rotary_pos_emb_to_patches": Operator("dinov3_vit." + ROTARY, prefixed, "even_head_dim"),
    "rope_vision:apply_rotary_pos_emb_vision": Operator(
        "qwen2_vl.apply_rotary_pos_emb_vision", one_row, "even_head_dim"
    ),
    "rope_vision:apply_partial_rotary_pos_emb_vision": Operator(
        "minimax_m3_vl.apply_rotary_pos_emb_vision", part_of_one_row, None
    ),
    "rope_vision:vision_apply_rotary_emb": Operator(
        "llama4.vision_apply_rotary_emb", patches_complex, "table_fills_patches"
    ),
    "rope_vision:apply_rotary_pos_emb_2d": Operator("sam3.apply_rotary_pos_emb_2d", full, "even_head_dim"),
    "rope_vision:apply_rotary_pos_emb_2d_to_memory": Operator(
        "sam2_video.apply_rotary_pos_emb_2d", to_memory, "even_head_dim"
    ),
    "rope_vision:apply_rotary_pos_emb_2d_cross_attn": Operator(
        "edgetam_video.apply_rotary_pos_emb_2d_cross_attn", crossing, "even_head_dim"
    ),
    "rope_vision:apply_rotary_embeddings": Operator(
        "vjepa2.VJEPA2RopeAttention.apply_rotary_embeddings", in_directions, None
    ),
}
each_contract = pytest.mark.parametrize("contract", OPERATORS)


def test_every_contract_has_an_operator() -> None:
    here = transformers.__version__
    families = [f for f in rope.FORMULAS.values() if any(here in code.versions for code in f.code.values())]
    assert {family.contract for family in families} == OPERATORS.keys()


@cache
def guarded(contract: str) -> Callable[..., Any]:
    """A guarded copy in a namespace of its own: what guards need stands there, not in the module of Transformers."""
    function = found(OPERATORS[contract].function)
    copy = FunctionType(function.__code__, dict(function.__globals__), None, function.__defaults__)
    operator: Callable[..., Any] = og.guard(contract_named(contract))(copy)
    return operator


def outcome(call: Callable[[], Any]) -> Any:
    """The tensors that come out, or the kind of error."""
    try:
        return flat(call())
    except og.GuardError:
        raise
    except Exception as error:
        return type(error)


def assert_accepted(contract: str, arguments: Arguments) -> None:
    """The guarded call ends as the unguarded one does."""
    plain = outcome(lambda: found(OPERATORS[contract].function)(**arguments))
    checked = outcome(lambda: guarded(contract)(**arguments))
    if isinstance(plain, type):
        assert checked is plain
        return
    assert len(plain) == len(checked)
    for one, other in zip(plain, checked, strict=True):
        assert one is other if one is None else torch.equal(one, other)


def broken(contract: str, arguments: Arguments) -> dict[str, og.Violation]:
    with pytest.raises(og.GuardError) as caught:
        guarded(contract)(**arguments)
    return {violation.rule_id: violation for violation in caught.value.violations}


BOUNDARIES = {
    "usual": Sizes(),
    "one sequence": Sizes(b=1),
    "no sequences": Sizes(b=0),
    "one token": Sizes(n=1),
    "one token of one sequence": Sizes(b=1, n=1),
    "no tokens": Sizes(n=0),
    "one head": Sizes(h=1, g=1),
    "as many tokens as heads": Sizes(n=4),
    "as many heads for keys": Sizes(g=4),
    "width 0": Sizes(d=0),
    "width 2": Sizes(d=2),
    "width 130": Sizes(d=130),
}


@each_contract
@pytest.mark.parametrize("case", BOUNDARIES)
@pytest.mark.usefixtures("no_alarm")
def test_accepted(contract: str, case: str) -> None:
    assert_accepted(contract, OPERATORS[contract].call(BOUNDARIES[case]))


@each_contract
@pytest.mark.parametrize("width", [1, 129])
def test_odd_widths(contract: str, width: int) -> None:
    operator = OPERATORS[contract]
    arguments = operator.call(Sizes(d=width))
    if operator.odd is None:
        assert_accepted(contract, arguments)
    else:
        assert operator.odd in broken(contract, arguments)


# ---------------------------------------------------------------- what is legal and rare

Change = Callable[[Arguments], Arguments]


def each(change: Callable[[torch.Tensor], Any], *names: str) -> Change:
    return lambda arguments: arguments | {name: change(arguments[name]) for name in names}


def apart(width: int) -> Change:
    return each(lambda x: numbers(*x.shape[:-1], width), "k")


def columns(width: int) -> Change:
    return each(lambda x: x[..., :width], "cos", "sin")


table = "cos", "sin"
LEGAL: list[tuple[str, str, Change]] = [
    ("rope:apply_rotary_pos_emb", "a table for each sequence", each(lambda x: x.expand(2, -1, -1), *table)),
    ("rope:apply_rotary_pos_emb", "no batch", lambda a: {n: x[0] for n, x in a.items()} | {"unsqueeze_dim": 0}),
    ("rope:apply_rotary_pos_emb", "bf16", each(lambda x: x.bfloat16(), "q", "k")),
    ("rope:apply_rotary_pos_emb", "a quarter turn", each(lambda x: x * 0, "cos")),
    ("rope:apply_rotary_pos_emb", "nothing but zeros", each(lambda x: x * 0, *table)),
    ("rope:apply_rotary_pos_emb", "a row of zeros", each(lambda x: x * torch.tensor([0, 1, 1])[:, None], *table)),
    (
        "rope:apply_rotary_pos_emb",
        "behind the first position, exchanged",
        lambda a: a | {"cos": a["sin"], "sin": a["cos"]},
    ),
    ("rope:apply_rotary_pos_emb_keys_optional", "no keys", lambda a: a | {"k": None}),
    ("rope:apply_partial_rotary_pos_emb", "all columns", lambda a: a | tables(1, 3, 8)),
    ("rope:apply_partial_rotary_pos_emb", "no columns", lambda a: a | tables(1, 3, 0)),
    ("rope:apply_partial_rotary_pos_emb", "wider keys", apart(16)),
    ("rope:apply_partial_rotary_pos_emb", "keys of the table's width", apart(4)),
    ("rope:apply_partial_rotary_pos_emb_keys_optional", "no keys", lambda a: a | {"k": None}),
    ("rope:apply_rotary_pos_emb_to_tail", "all columns", lambda a: a | tables(1, 3, 4)),
    ("rope:apply_rotary_pos_emb_to_tail", "turned back", each(lambda x: -x, "sin")),
    (
        "rope:apply_rotary_pos_emb_to_last_queries",
        "no queries, one key",
        lambda a: each(lambda x: x[:, :, :0], "q")(a) | {"k": numbers(2, 2, 1, 8), **tables(1, 1, 8)},
    ),
    ("rope:apply_rotary_pos_emb_to_last_queries", "all queries", lambda a: a | {"q": numbers(2, 4, 3, 8)}),
    ("rope:apply_rotary_pos_emb_at_positions", "from the end", each(lambda x: x - 9, "position_ids")),
    ("rope:apply_rotary_pos_emb_at_positions", "of each sequence", each(lambda x: x.expand(2, -1), "position_ids")),
    ("rope:apply_rotary_position_embeddings", "no values", lambda a: a | {"value_layer": None}),
    (
        "rope:apply_rotary_embedding_to_columns",
        "a longer table",
        each(lambda x: numbers(2, 9, 1, 1, 8), "relative_position_embeddings"),
    ),
    ("rope_vision:apply_rotary_pos_emb_to_patches", "no prefix", each(lambda x: x[:, :, 2:], "q", "k")),
    ("rope_vision:apply_rotary_pos_emb_vision", "one picture", each(lambda x: x[None], "q", "k")),
    ("rope_vision:apply_rotary_pos_emb_vision", "one picture, its table", each(lambda x: x[None], "q", "k", *table)),
    (
        "rope_vision:apply_rotary_pos_emb_vision",
        "pictures of one size",
        lambda a: each(lambda x: x.expand(2, *x.shape), "q", "k")(each(lambda x: x[None], *table)(a)),
    ),
    ("rope_vision:apply_rotary_pos_emb_2d", "a table for each head", lambda a: a | {"k": a["q"], **tables(4, 3, 8)}),
    ("rope_vision:apply_rotary_pos_emb_2d", "no batch in the table", each(lambda x: x[0], *table)),
    ("rope_vision:apply_rotary_pos_emb_2d_to_memory", "one frame", each(lambda x: x[:, :, :4], "k")),
    (
        "rope_vision:apply_rotary_pos_emb_2d_to_memory",
        "one frame, not repeated",
        lambda a: each(lambda x: x[:, :, :4], "k")(a) | {"repeat_freqs_k": False},
    ),
    ("rope_vision:apply_rotary_pos_emb_2d_to_memory", "nothing with a place", each(lambda x: x[:, :, :1], "k")),
    (
        "rope_vision:apply_rotary_embeddings",
        "places of each head",
        each(lambda p: tuple(x.expand(2, 4, 3) for x in p), "pos_ids"),
    ),
]


@pytest.mark.parametrize(("contract", "case", "change"), LEGAL, ids=[f"{c}-{case}" for c, case, _ in LEGAL])
@pytest.mark.usefixtures("no_alarm")
def test_legal_and_rare(contract: str, case: str, change: Change) -> None:
    arguments = change(OPERATORS[contract].call(Sizes()))
    assert not isinstance(outcome(lambda: found(OPERATORS[contract].function)(**arguments)), type), "it is legal"
    assert_accepted(contract, arguments)


# ---------------------------------------------------------------- what breaks a rule


@dataclass(frozen=True)
class Wrong:
    """A call that breaks a rule, and how the likely cause begins."""

    contract: str
    rule: str
    hint: str
    change: Change


def position_0(arguments: Arguments) -> Arguments:
    """cos and sin with position 0, exchanged."""
    angles = torch.zeros_like(arguments["cos"])
    angles[..., 1:, :] = 0.3
    return arguments | {"cos": angles.sin(), "sin": angles.cos()}


def wrong_tables(contract: str) -> list[Wrong]:
    """What every contract with a table for each token says of it."""
    unsqueezed = "already unsqueezed: this operator adds the head dimension itself"
    return [
        Wrong(contract, "cos.shape", unsqueezed, each(lambda x: x[:, None], *table)),
        Wrong(contract, "cos.shape", "one position for many tokens", each(lambda x: x[:, :1], *table)),
        Wrong(contract, "cos.shape", "cos and sin", each(lambda x: x.repeat(1, 2, 1), *table)),
        Wrong(contract, "cos.dtype", "cos and sin", each(lambda x: x.long(), *table)),
        Wrong(contract, "sin.shape", "", each(lambda x: x[:, :1], "sin")),
        Wrong(contract, "sin.dtype", "", each(lambda x: x.double(), "sin")),
        Wrong(contract, "cos_sin_swapped", "sin was given for cos, and cos for sin", position_0),
    ]


def wrong_widths(contract: str) -> list[Wrong]:
    """What every contract says of a table that should be as wide as a head."""
    half_width = "half-width table: this operator wants every frequency twice"
    return [
        Wrong(contract, "cos.shape", half_width, each(lambda x: x[..., :4], *table)),
        Wrong(contract, "cos.shape", "", each(lambda x: x[..., :1], *table)),
        Wrong(contract, "cos.shape", "", each(lambda x: x.repeat(1, 1, 2), *table)),
    ]


FULL, OPTIONAL = "rope:apply_rotary_pos_emb", "rope:apply_rotary_pos_emb_keys_optional"
PARTIAL, PARTIAL_OPTIONAL = "rope:apply_partial_rotary_pos_emb", "rope:apply_partial_rotary_pos_emb_keys_optional"
HALF, TENSOR, X = (f"rope:apply_rotary_pos_emb_{name}" for name in ("half_table", "of_tensor", "of_x"))
TAIL, MATRICES, LAST, AT = (
    f"rope:apply_rotary_pos_emb_{name}" for name in ("to_tail", "as_matrices", "to_last_queries", "at_positions")
)
COMPLEX, TOKENS_FIRST, TIME = (
    "rope:apply_rotary_emb",
    "rope:apply_rotary_emb_tokens_first",
    "rope:apply_rotary_time_emb",
)
SINES, COLUMNS = "rope:apply_rotary_position_embeddings", "rope:apply_rotary_embedding_to_columns"
PATCHES, VISION = "rope_vision:apply_rotary_pos_emb_to_patches", "rope_vision:apply_rotary_pos_emb_vision"
PARTIAL_VISION, COMPLEX_VISION = (
    "rope_vision:apply_partial_rotary_pos_emb_vision",
    "rope_vision:vision_apply_rotary_emb",
)
PICTURE, MEMORY = "rope_vision:apply_rotary_pos_emb_2d", "rope_vision:apply_rotary_pos_emb_2d_to_memory"
CROSS, DIRECTIONS = "rope_vision:apply_rotary_pos_emb_2d_cross_attn", "rope_vision:apply_rotary_embeddings"
LARGER = "cos and sin of a model with larger heads"
CUT = "cos and sin were cut: a table has an even width"
SWAPPED = "sin was given for cos, and cos for sin"


def of_another_batch(arguments: Arguments) -> Arguments:
    """A table for each of two sequences, q and k of one."""
    return each(lambda x: x[:1], "q", "k")(each(lambda x: x.expand(2, -1, -1), *table)(arguments))


def real(name: str) -> Change:
    return each(lambda x: x.real, name)


WRONG = [
    *(w for c in (FULL, OPTIONAL, PARTIAL, PARTIAL_OPTIONAL, HALF, X, TAIL, LAST) for w in wrong_tables(c)),
    *(w for c in (FULL, OPTIONAL, X, LAST) for w in wrong_widths(c)),
    *wrong_tables(MATRICES)[1:],  # a table of other ranks is left alone: its matrices have two more
    *wrong_widths(MATRICES),
    *(
        Wrong(c, "cos.shape", "cos and sin are of another batch", of_another_batch)
        for c in (FULL, OPTIONAL, PARTIAL, HALF, MATRICES)
    ),
    *(
        Wrong(
            c,
            "cos.shape",
            "tokens stand where unsqueeze_dim says that heads do",
            each(lambda x: x.transpose(1, 2), "q", "k"),
        )
        for c in (FULL, OPTIONAL, PARTIAL, HALF)
    ),
    *(
        Wrong(c, "cos.shape", "a table of one column is broadcast without a word", each(lambda x: x[..., :1], *table))
        for c in (FULL, OPTIONAL, HALF, X, PATCHES, VISION)
    ),
    *(Wrong(c, "k.shape", "", each(lambda x: x[:, :, :2], "k")) for c in (FULL, PARTIAL, HALF, MATRICES)),
    *(
        Wrong(c, "k.shape", "", each(lambda x: x[..., :2, :], "k"))
        for c in (OPTIONAL, PARTIAL_OPTIONAL, PATCHES, PICTURE)
    ),
    *(Wrong(c, "q.dtype", "", each(lambda x: x.long(), "q")) for c in (FULL, PARTIAL, LAST, VISION, PICTURE)),
    *(
        Wrong(c, "unsqueeze_dim.type", "", lambda a: a | {"unsqueeze_dim": 1.0})
        for c in (FULL, PARTIAL, HALF, MATRICES, TAIL)
    ),
    *(Wrong(c, "table_within_head", LARGER, lambda a: a | tables(1, 3, 16)) for c in (PARTIAL, PARTIAL_OPTIONAL)),
    Wrong(PARTIAL, "table_within_head", LARGER, apart(2)),
    Wrong(PARTIAL_OPTIONAL, "table_within_key", LARGER, apart(2)),
    *(Wrong(c, "even_table", CUT, columns(n)) for c in (PARTIAL, PARTIAL_OPTIONAL) for n in (1, 3)),
    *(Wrong(c, "even_table", CUT, columns(n)) for c in (TIME, PARTIAL_VISION) for n in (1, 3)),
    Wrong(
        HALF, "cos.shape", "full-width table: this operator wants every frequency once", lambda a: a | tables(1, 3, 8)
    ),
    Wrong(
        TAIL,
        "table_within_head",
        "full-width table: this operator wants every frequency once",
        lambda a: a | tables(1, 3, 8),
    ),
    Wrong(X, "cos.shape", "tokens stand where unsqueeze_dim says that heads do", lambda a: a | {"unsqueeze_dim": 1}),
    Wrong(X, "x.dtype", "", each(lambda x: x.long(), "x")),
    Wrong(TENSOR, "sin.shape", "already unsqueezed", each(lambda x: x[:, :, None], *table)),
    Wrong(
        TENSOR, "sin.shape", "full-width table: this operator wants every frequency once", lambda a: a | tables(1, 3, 8)
    ),
    Wrong(TENSOR, "sin.shape", "a table of one column is broadcast", each(lambda x: x[..., :1], *table)),
    Wrong(TENSOR, "sin.shape", "one position for many tokens", each(lambda x: x[:, :1], *table)),
    Wrong(
        TENSOR,
        "sin.shape",
        "heads before tokens",
        lambda a: each(lambda x: x.transpose(1, 2), "tensor")(a) | tables(1, 3, 4),
    ),
    Wrong(TENSOR, "cos.shape", "", each(lambda x: x[:, :1], "cos")),
    Wrong(TENSOR, "cos_sin_swapped", "the sine comes first here: (tensor, sin, cos)", position_0),
    Wrong(LAST, "queries_are_last", "keys of another call", lambda a: a | {"q": numbers(2, 4, 4, 8)}),
    Wrong(LAST, "cos.shape", "the positions of the queries only", each(lambda x: x[:, :2], *table)),
    Wrong(AT, "cos.shape", "a table of one column is broadcast", each(lambda x: x[..., :1], *table)),
    Wrong(AT, "cos.shape", "cos and sin of another model", each(lambda x: x[..., :4], *table)),
    Wrong(AT, "sin.shape", "", each(lambda x: x[:2], "sin")),
    Wrong(AT, "v.shape", "", each(lambda x: x[:, :, :1], "v")),
    Wrong(AT, "position_ids.shape", "one position for many tokens", each(lambda x: x[:, :1], "position_ids")),
    Wrong(AT, "position_ids.dtype", "position_ids of other tokens", each(lambda x: x.float(), "position_ids")),
    Wrong(AT, "positions_in_table", "more tokens than the table was made for", each(lambda x: x + 7, "position_ids")),
    Wrong(AT, "positions_in_table", "more tokens than the table was made for", each(lambda x: x - 10, "position_ids")),
    Wrong(
        AT,
        "cos_sin_swapped",
        SWAPPED,
        lambda a: a | {"cos": a["sin"] * (torch.arange(9) > 0)[:, None], "sin": a["cos"]},
    ),
    *(
        wrong
        for c in (COMPLEX, TOKENS_FIRST)
        for wrong in (
            Wrong(c, "freqs_cis.dtype", "cos or sin: this operator takes one complex table", real("freqs_cis")),
            Wrong(c, "freqs_cis.shape", "already unsqueezed", each(lambda x: x[:, None], "freqs_cis")),
            Wrong(c, "freqs_cis.shape", "a table of one column is broadcast", each(lambda x: x[..., :1], "freqs_cis")),
            Wrong(c, "freqs_cis.shape", "one position for many tokens", each(lambda x: x[:, :1], "freqs_cis")),
            Wrong(c, "freqs_cis.shape", "a table of another model", each(lambda x: x.repeat(1, 1, 2), "freqs_cis")),
            Wrong(c, "xk.shape", "", each(lambda x: x[:1], "xk")),
            Wrong(c, "xq.dtype", "", each(lambda x: x.long(), "xq")),
        )
    ),
    Wrong(
        TOKENS_FIRST,
        "freqs_cis.shape",
        "heads before tokens",
        each(lambda x: x.transpose(1, 2), "xq", "xk"),
    ),
    Wrong(TIME, "cos.shape", "one time for many steps", each(lambda x: x[:, :1], *table)),
    Wrong(TIME, "cos.shape", "timestamps of another recording", each(lambda x: x.repeat(2, 1, 1), *table)),
    Wrong(TIME, "sin.shape", "", each(lambda x: x[:1], "sin")),
    Wrong(TIME, "table_within_states", "cos and sin of a larger model", lambda a: a | tables(2, 3, 16)),
    Wrong(TIME, "hidden_states.dtype", "", each(lambda x: x.long(), "hidden_states")),
    Wrong(TIME, "cos_sin_swapped", SWAPPED, position_0),
    Wrong(SINES, "sinusoidal_pos.shape", "one position for many tokens", each(lambda x: x[:, :, :1], "sinusoidal_pos")),
    Wrong(SINES, "sinusoidal_pos.shape", "a table of another model", each(lambda x: x[..., :4], "sinusoidal_pos")),
    *(Wrong(SINES, f"{name}.shape", "", each(lambda x: x[:, :1], name)) for name in ("key_layer", "value_layer")),
    Wrong(COLUMNS, "hidden_states.shape", "hidden_size of another config", each(lambda x: x[..., :8], "hidden_states")),
    *(
        Wrong(COLUMNS, rule, hint, each(change, "relative_position_embeddings"))
        for rule, hint, change in (
            ("relative_position_embeddings.shape", "a table of another model", lambda x: x[..., :1]),
            ("relative_position_embeddings.shape", "a table of another model", lambda x: x[:1]),
            ("relative_position_embeddings.device", "a table that was cached before", lambda x: x.to("meta")),
            ("table_long_enough", "the table was made for a shorter input", lambda x: x[:, :1]),
            ("table_long_enough", "the table was made for a shorter input", lambda x: x[:, :2]),
        )
    ),
    Wrong(PATCHES, "patches_are_tokens", "cos and sin of a larger picture", lambda a: a | tables(6, 8)),
    Wrong(
        PATCHES, "cos.shape", "half-width table: this operator wants every frequency twice", lambda a: a | tables(3, 4)
    ),
    Wrong(PATCHES, "cos.shape", "cos and sin of another model", lambda a: a | tables(3, 16)),
    Wrong(PATCHES, "sin.shape", "", each(lambda x: x[:1], "sin")),
    *(
        Wrong(c, "cos_sin_swapped", SWAPPED, position_0)
        for c in (PATCHES, VISION, PARTIAL_VISION, PICTURE, MEMORY, CROSS)
    ),
    *(
        Wrong(
            c,
            "cos.shape",
            "already unsqueezed: this operator adds the head dimension itself",
            each(lambda x: x[:, None], *table),
        )
        for c in (VISION, PARTIAL_VISION)
    ),
    *(
        Wrong(c, "cos.shape", "one position for many patches", each(lambda x: x[:1], *table))
        for c in (VISION, PARTIAL_VISION)
    ),
    *(
        Wrong(c, "cos.shape", "cos and sin of", each(lambda x: x.repeat(2, 1), *table))
        for c in (VISION, PARTIAL_VISION)
    ),
    *(Wrong(c, "sin.shape", "", each(lambda x: x[:1], "sin")) for c in (VISION, PARTIAL_VISION)),
    *(Wrong(c, "k.shape", "", each(lambda x: x[:1], "k")) for c in (VISION, PARTIAL_VISION)),
    Wrong(
        VISION, "cos.shape", "half-width table: this operator wants every frequency twice", lambda a: a | tables(3, 4)
    ),
    Wrong(
        VISION,
        "cos.shape",
        "heads before patches",
        lambda a: a | each(lambda x: x.transpose(0, 1), "q", "k")(a | {"k": a["q"]}),
    ),
    Wrong(
        VISION,
        "table_without_heads",
        "already unsqueezed: this operator adds the head dimension itself",
        each(lambda x: x[None], *table),
    ),
    Wrong(
        VISION,
        "table_of_pictures",
        "cos and sin are of another batch",
        lambda a: each(lambda x: x[None], "q", "k")(a) | tables(2, 3, 8),
    ),
    Wrong(PARTIAL_VISION, "table_within_head", LARGER, lambda a: a | tables(3, 16)),
    Wrong(PARTIAL_VISION, "table_within_head", LARGER, apart(2)),
    Wrong(COMPLEX_VISION, "freqs_ci.dtype", "cos or sin, or .to(dtype) of the model", real("freqs_ci")),
    Wrong(COMPLEX_VISION, "table_fills_patches", "a picture of another size", each(lambda x: x[:1], "freqs_ci")),
    Wrong(COMPLEX_VISION, "key.shape", "", each(lambda x: x[:1], "key")),
    *(
        wrong
        for c in (PICTURE, MEMORY, CROSS)
        for wrong in (
            Wrong(c, "cos.shape", "a table for each picture", each(lambda x: x.expand(2, -1, -1), *table)),
            Wrong(c, "cos.shape", "cos and sin of another model", each(lambda x: x.repeat(1, 1, 2), *table)),
            Wrong(c, "sin.shape", "", each(lambda x: x[:, :1], "sin")),
            Wrong(c, "k.shape", "", apart(4)),
        )
    ),
    *(
        Wrong(c, "cos.shape", "one position for many patches", each(lambda x: x[:, :1], *table))
        for c in (PICTURE, MEMORY)
    ),
    Wrong(MEMORY, "keys_are_whole_frames", "num_k_exclude_rope", lambda a: a | {"num_k_exclude_rope": 0}),
    Wrong(MEMORY, "keys_are_whole_frames", "num_k_exclude_rope", lambda a: a | {"repeat_freqs_k": False}),
    Wrong(MEMORY, "keys_are_whole_frames", "num_k_exclude_rope", lambda a: a | {"num_k_exclude_rope": 10}),
    Wrong(MEMORY, "num_k_exclude_rope.type", "", lambda a: a | {"num_k_exclude_rope": None}),
    Wrong(
        CROSS,
        "cos.shape",
        "the tables of the keys were given for those of the queries",
        lambda a: a | tables(1, 1, 8) | {"cos_k": tables(1, 1, 8)["cos"], "sin_k": tables(1, 1, 8)["sin"]},
    ),
    Wrong(CROSS, "cos_k.shape", "cos and sin of another model", each(lambda x: x[..., :1], "cos_k", "sin_k")),
    Wrong(CROSS, "sin_k.shape", "", each(lambda x: x[:, :1], "sin_k")),
    Wrong(
        DIRECTIONS,
        "pos_ids[0].shape",
        "places of another clip, or of masked tokens",
        each(lambda p: (p[0][:1], *p[1:]), "pos_ids"),
    ),
    Wrong(DIRECTIONS, "qk.dtype", "", each(lambda x: x.long(), "qk")),
]


@pytest.mark.parametrize("wrong", WRONG, ids=[f"{w.contract}-{w.rule}-{n}" for n, w in enumerate(WRONG)])
def test_rejected(wrong: Wrong) -> None:
    violations = broken(wrong.contract, wrong.change(OPERATORS[wrong.contract].call(Sizes())))
    assert wrong.rule in violations
    assert violations[wrong.rule].certain
    hint = violations[wrong.rule].hint or ""
    assert hint.startswith(wrong.hint)
    assert not wrong.hint or violations[wrong.rule].because


@each_contract
def test_every_rule_is_broken_somewhere(contract: str) -> None:
    clauses = [clause.statement for clause in contract_named(contract).clauses]
    rules = {statement.id for statement in clauses if isinstance(statement, Require)}
    tested = {wrong.rule for wrong in WRONG if wrong.contract == contract} | {OPERATORS[contract].odd}
    assert rules <= tested
