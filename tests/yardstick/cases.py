"""The yardstick: for each public report that a contract can say, a call with its mistake and a near one without."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import operators as ops
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache
from transformers.models.bert.modeling_bert import BertEmbeddings
from transformers.models.gpt2.modeling_gpt2 import GPT2Model
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaEmbeddings

Call = Callable[[Callable[..., Any]], Any]


@dataclass(frozen=True)
class Case:
    """One report: its operator, the rule that rejects `broken` and not `near`.

    `symptom` is what happens to `broken` without a guard: the error that it raises, or what is true of its result and
    not of that of `near`. A rule that is not `certain` warns, and the call goes on.
    """

    report: str
    operator: Callable[..., Any]
    rule: str
    cost: str
    broken: Call
    near: Call
    symptom: type[Exception] | Callable[[Any], bool]
    certain: bool = True
    blames: str = "caller"


@dataclass(frozen=True)
class Unsaid:
    """A report that no contract can say: why, and what it would take."""

    report: str
    why: str
    needed: str


def call(*args: Any, **kwargs: Any) -> Call:
    return lambda operator: operator(*args, **kwargs)


def fresh(*makers: Callable[[], Any], **kwargs: Any) -> Call:
    """A call whose arguments are made anew each time: the operator changes them."""
    return lambda operator: operator(*(make() for make in makers), **kwargs)


def differs(expected: Any) -> Callable[[Any], bool]:
    return lambda result: not torch.allclose(result.float(), expected.float(), atol=1e-4)


def has_nan(result: Any) -> bool:
    return bool(result.isnan().any())


def rand(*shape: int, dtype: Any = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def ids(*values: int, dtype: Any = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


# ---------------------------------------------------------------- attention

Q, K, V = rand(1, 2, 3, 8), rand(1, 2, 4, 8), rand(1, 2, 4, 8)
KEEP = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
DEAD = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
LLAMA = ops.fake_module(num_key_value_groups=1)
EXPANDED = rand(1, 1, 33, 8).expand(1, 2, 33, 8)
KEEP33 = torch.ones(3, 33).bool()
TRANSPOSED = rand(1, 2, 8, 4).transpose(2, 3)


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -math.inf)


def attend(mask: torch.Tensor) -> Call:
    """Trains a multi-head attention whose loss leaves query 1 out; gives the gradient of the shared projection."""

    def run(operator: Callable[..., Any]) -> Any:
        x = rand(3, 1, 8)
        weight, out = rand(24, 8).requires_grad_(), rand(8, 8)
        result, _ = operator(
            x, x, x, 8, 2, weight, None, None, None, False, 0.0, out, None,
            training=True, need_weights=True, attn_mask=mask,
        )  # fmt: skip
        result[[0, 2]].sum().backward()
        return weight.grad

    return run


ATTENTION = [
    Case("att-01", ops.explicit_attention, "no_dead_row", "B", call(Q, K, V, DEAD), call(Q, K, V, KEEP), has_nan),
    Case(
        "att-02", ops.sdpa, "no_dead_row", "B", call(Q, K, V, additive(DEAD)), call(Q, K, V, additive(KEEP)),
        lambda out: not bool((out.abs().sum(-1) > 0).all()), certain=False,
    ),
    Case(
        "att-04", ops.sdpa, "additive_mask", "B", call(Q, K, V, KEEP.float()), call(Q, K, V, additive(KEEP)),
        differs(ops.sdpa(Q, K, V, KEEP)), certain=False,
    ),
    Case(
        "att-07", ops.sdpa_blind_to_last_stride, "dense(key)", "A",
        call(Q, TRANSPOSED, V), call(Q, TRANSPOSED.contiguous(), V), differs(ops.sdpa(Q, TRANSPOSED, V)),
    ),
    Case(
        "att-08", ops.sdpa_wrong_when_expanded, "no_expanded_heads", "A",
        call(Q, EXPANDED, rand(1, 2, 33, 8), KEEP33), call(Q, EXPANDED.contiguous(), rand(1, 2, 33, 8), KEEP33),
        differs(ops.sdpa(Q, EXPANDED, rand(1, 2, 33, 8), KEEP33)), certain=False,
    ),
    Case(
        "att-09", eager_attention_forward, "mask_covers_the_cache", "A",
        call(LLAMA, rand(1, 2, 9, 8), rand(1, 2, 16, 8), rand(1, 2, 16, 8), torch.zeros(1, 1, 9, 9), scaling=1.0),
        call(LLAMA, rand(1, 2, 9, 8), rand(1, 2, 16, 8), rand(1, 2, 16, 8), torch.zeros(1, 1, 9, 16), scaling=1.0),
        RuntimeError,
    ),
    Case(
        "att-10", eager_attention_forward, "mask_is_of_this_layer", "A",
        call(LLAMA, rand(1, 2, 5, 8), rand(1, 2, 16, 8), rand(1, 2, 16, 8), torch.zeros(1, 1, 5, 12), scaling=1.0),
        call(LLAMA, rand(1, 2, 5, 8), rand(1, 2, 12, 8), rand(1, 2, 12, 8), torch.zeros(1, 1, 5, 12), scaling=1.0),
        RuntimeError,
    ),
    Case(
        "att-13", ops.flash_varlen, "cu_seqlens_k.shape", "A",
        call(rand(5, 1, 8, dtype=torch.bfloat16), rand(5, 1, 8, dtype=torch.bfloat16),
             ids(0, 2, 5, dtype=torch.int32), ids(0, 5, dtype=torch.int32)),
        call(rand(5, 1, 8, dtype=torch.bfloat16), rand(5, 1, 8, dtype=torch.bfloat16),
             ids(0, 2, 5, dtype=torch.int32), ids(0, 3, 5, dtype=torch.int32)),
        IndexError,
    ),
    Case(
        "att-14", ops.flash, "head_dim_limit", "A",
        call(rand(1, 2, 3, 256, dtype=torch.float16), 80, backward=True),
        call(rand(1, 2, 3, 256, dtype=torch.float16), 80, backward=False), RuntimeError,
    ),
    Case(
        "att-16", ops.sdpa, "value.dtype", "A",
        call(Q, K, V.bfloat16()), call(Q.bfloat16(), K.bfloat16(), V.bfloat16()), RuntimeError,
    ),
    Case("att-18", F.multi_head_attention_forward, "no_dead_row", "B",
         attend(~torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 1]]).bool()),
         attend(~torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 1]]).bool()), has_nan),
]  # fmt: skip

# ---------------------------------------------------------------- parallel layouts

DISTRIBUTED = [
    Case("dst-08", ops.split_kv, "kv_heads_split", "A", call(rand(4, 6, 512), 4, 128, 8),
         call(rand(4, 6, 512), 4, 128, 4),
         RuntimeError),
    Case("dst-09", ops.split_heads, "heads_split", "A", call(rand(64, 2), 64, 3),
         call(rand(64, 2), 64, 4), RuntimeError),
    Case("dst-10", ops.split_sequence, "sequence_splits", "A", call(torch.zeros(36), 2, 4), call(torch.zeros(40), 2, 4),
         RuntimeError),
    Case("dst-12", ops.aux_loss, "same_tokens", "A", call(torch.ones(4, 2), torch.ones(16), tp=4),
         call(torch.ones(4, 2), torch.ones(4), tp=4), RuntimeError),
]  # fmt: skip

# ---------------------------------------------------------------- token ids

LABELS = rand(3, 5)


@functools.cache
def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def tokenizer_of(tokens: int) -> Any:
    """A tokenizer as it is before somebody adds tokens, with one added."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"{i}": i for i in range(tokens - 1)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="0")
    tokenizer.add_tokens(["<new>"])
    return tokenizer


def placeholder_table(token: int) -> Any:
    return SimpleNamespace(weight=rand(32, 4), config=SimpleNamespace(image_token_index=token))


EMBEDDING = [
    Case("emb-01", F.embedding, "ids_in_table", "B", call(ids(1, 100), rand(100, 4)), call(ids(1, 99), rand(100, 4)),
         IndexError),
    Case("emb-02", ops.start_service, "tokenizer_fits", "C", fresh(llama, lambda: tokenizer_of(33)),
         fresh(llama, lambda: tokenizer_of(32)), IndexError),
    Case("emb-03", ops.embed_with_placeholders, "placeholders_are_stripped", "B",
         call(placeholder_table(32), ids(1, 32, 2)), call(placeholder_table(32), ids(1, 2)), IndexError),
    Case("emb-06", ops.sample, "sampled_is_a_token", "B", call(F.one_hot(ids(155), 160).float(), 150),
         call(F.one_hot(ids(149), 160).float(), 150), lambda token: bool(token >= 150), blames="operator"),
    Case("emb-07", F.cross_entropy, "labels_are_classes", "B", call(LABELS, ids(1, -1, 2)),
         call(LABELS, ids(1, -100, 2)),
         IndexError),
]  # fmt: skip

# ---------------------------------------------------------------- caches

I32 = torch.int32


def append(device: str) -> Call:
    def run(operator: Callable[..., Any]) -> Any:
        layer = DynamicLayer()
        layer.update(rand(1, 2, 3, 4).to(device), rand(1, 2, 3, 4).to(device))
        return operator(layer, rand(1, 2, 1, 4), rand(1, 2, 1, 4))[0] + 0.0

    return run


def planned(*indptr: int) -> Callable[[Any], Any]:
    """A run of six rows after a plan for these."""

    def both(run: Any) -> Any:
        wrapper = ops.Planned()
        wrapper.plan(torch.tensor(indptr, dtype=I32))
        return run(wrapper, rand(6, 1, 8))

    return both


CACHE = [
    Case("kv-01", ops.slots, "column_in_table", "B", call(ids(3, 100), torch.zeros(1, 4, dtype=I32), 16),
         call(ids(3, 63), torch.zeros(1, 4, dtype=I32), 16), IndexError),
    Case("kv-03", ops.Planned.run, "planned_rows", "A", planned(0, 4), planned(0, 4, 6), has_nan),
    Case("kv-04", ops.pages_of, "indptr_within_indices", "B",
         call(ids(0, 3, 9, dtype=I32), torch.arange(5, dtype=I32), 8),
         call(ids(0, 3, 5, dtype=I32), torch.arange(5, dtype=I32), 8), lambda pages: bool((pages[-1] < 0).any())),
    Case("kv-07", ops.admit, "fits_the_pool", "A", call(100, 60, 16, 9), call(100, 44, 16, 9), TimeoutError),
    Case("kv-09", ops.serve, "one_length", "A",
         call(SimpleNamespace(max_model_len=262144), SimpleNamespace(max_model_len=15168), [1] * 20000),
         call(SimpleNamespace(max_model_len=15168), SimpleNamespace(max_model_len=15168), [1] * 20000), AssertionError),
    Case("kv-10", DynamicLayer.update, "self.keys.device", "A", append("meta"), append("cpu"), RuntimeError),
    Case("kv-12", ops.reorder, "beams_follow", "B",
         fresh(lambda: {"state": ids(3, 4)}, lambda: "state", lambda: ids(1, 1)),
         fresh(lambda: {"past_key_values": ids(3, 4)}, lambda: "past_key_values", lambda: ids(1, 1)),
         lambda kwargs: any(len(set(cache.tolist())) > 1 for cache in kwargs.values()), blames="operator"),
    Case("kv-14", ops.make_cache, "requested_length", "A", call("forgetful", 2048), call("static", 2048),
         lambda cache: cache.layers[0].max_cache_len != 2048, blames="operator"),
    Case("kv-16", ops.media_key, "64_bits", "A", call(b"picture", 4), call(b"picture", 16),
         lambda key: 16 ** len(key) < 2**64, blames="operator"),
    Case("kv-17", ops.load_kv_scale, "scale_reaches_the_backend", "A",
         fresh(SimpleNamespace, lambda: 0.05, attribute="k_scale"), fresh(SimpleNamespace, lambda: 0.05),
         lambda used: used == 1.0, blames="operator"),
    Case("kv-18", ops.quantise_keys, "usable_scale", "B", call(torch.tensor(math.inf)), call(torch.tensor(0.05)),
         lambda keys: bool((keys == 0).all())),
]  # fmt: skip

# ---------------------------------------------------------------- adapters

PATHS = ["language_model.model.layers.0.q_proj", "language_model.model.layers.0.v_proj"]

LORA = [
    Case("lora-01", ops.match_modules, "every_module_is_matched", "A",
         call(PATHS, ["model.layers.0.q_proj", "model.layers.0.v_proj"]), call(PATHS, PATHS[:1]),
         lambda matched: not matched, blames="operator"),
    Case("lora-03", ops.inject_lora, "each_target_matches", "C", fresh(llama, lambda: ["q_proj", "k_prj"]),
         fresh(llama, lambda: ["q_proj", "k_proj"]), lambda adapted: not any("k_proj" in path for path in adapted)),
    Case("lora-05", ops.load_lora, "not_a_placeholder", "B",
         call(nn.Linear(4, 6), {"lora_A": rand(2, 4), "lora_B": torch.empty(0)}),
         call(nn.Linear(4, 6), {"lora_A": rand(2, 4), "lora_B": rand(6, 2)}), RuntimeError),
    Case("lora-06", ops.merge_lora, "lora_b.shape", "A", call(rand(6, 4), rand(2, 4), rand(6, 2, 1)),
         call(rand(6, 4), rand(2, 4), rand(6, 2)), RuntimeError),
    Case("lora-10", ops.load_head, "same_vocabulary", "A",
         call({"lm_head.weight": rand(60, 4)}, {"lm_head.weight": rand(64, 4)}),
         call({"lm_head.weight": rand(64, 4)}, {"lm_head.weight": rand(64, 4)}), RuntimeError),
    Case("lora-11", nn.Linear.forward, "self.weight.device", "A", call(nn.Linear(4, 2, device="meta"), rand(3, 4)),
         call(nn.Linear(4, 2), rand(3, 4)), RuntimeError),
    Case("lora-12", ops.lora_logits, "vocabulary_size", "A", call(31999), call(32000), ValueError),
]  # fmt: skip

# ---------------------------------------------------------------- experts

MOE = [
    Case("moe-01", ops.moe_align, "expert_ids", "B", call(torch.tensor([[-1, 0]]), 4), call(torch.tensor([[3, 0]]), 4),
         RuntimeError),
    Case("moe-02", ops.hash_route, "token_in_hash_table", "B", call(torch.zeros(9, 2, dtype=torch.int64), ids(3, 9)),
         call(torch.zeros(9, 2, dtype=torch.int64), ids(3, 8)), IndexError),
    Case("moe-04", ops.fused_gate, "finite_router", "B", call(torch.full((1, 4), math.nan)), call(rand(1, 4)),
         lambda expert: bool(expert >= 4)),
    Case("moe-06", ops.one_hot, "expert_ids", "B", call(ids(4), 4), call(ids(3), 4), RuntimeError),
]  # fmt: skip

# ---------------------------------------------------------------- norms

ONES8, ONES16 = torch.ones(8), torch.ones(16)
COLUMNS = rand(8, 8).t()
SLICE = rand(4, 3, 16)[:, :2]
INPUT = rand(2, 8)


def added_to_itself(x: torch.Tensor) -> Call:
    """The residual connection around a norm: the input as it is after the call."""

    def run(operator: Callable[..., Any]) -> Any:
        residual = x.clone()
        operator(residual, ONES8)
        return residual

    return run


NORM = [
    Case("nrm-01", ops.norm_blind_to_last_stride, "last_dim_dense", "A", call(COLUMNS, ONES8),
         call(COLUMNS.contiguous(), ONES8), differs(F.rms_norm(COLUMNS, (8,), ONES8, 1e-6))),
    Case("nrm-02", ops.norm_of_one_token_stride, "one_token_stride", "A", call(SLICE, ONES16),
         call(SLICE.contiguous(), ONES16), differs(F.rms_norm(SLICE, (16,), ONES16, 1e-6))),
    Case("nrm-05", ops.norm_in_place, "input_unchanged", "B", added_to_itself(INPUT), added_to_itself(INPUT.half()),
         lambda x: x.dtype == torch.float32 and differs(INPUT)(x), blames="operator"),
    Case("nrm-07", ops.add_norm, "residual_dtype", "A", call(INPUT.bfloat16(), INPUT.bfloat16(), ONES8, leak=True),
         call(INPUT.bfloat16(), INPUT.bfloat16(), ONES8), lambda result: result[1].dtype == torch.float32,
         blames="operator"),
    Case("num-01", ops.down_projection, "no_overflow", "B",
         call(torch.full((1, 300), 16.0).half(), torch.full((1, 300), 16.0).half()),
         call(torch.full((1, 200), 16.0).half(), torch.full((1, 200), 16.0).half()),
         lambda out: bool(out.isinf().any()), blames="operator"),
]  # fmt: skip

# ---------------------------------------------------------------- positions

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TABLE = rand(16, 4)
SHORT = torch.tensor([[5, 6]])
LEFT, LEFT_MASK = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
RIGHT, RIGHT_MASK = torch.tensor([[5, 6, 0], [7, 8, 9]]), torch.tensor([[1, 1, 0], [1, 1, 1]])


@functools.cache
def roberta() -> Any:
    config = transformers.XLMRobertaConfig(**SMALL, max_position_embeddings=18, pad_token_id=1)
    return XLMRobertaEmbeddings(config).eval()


@functools.cache
def bert() -> Any:
    return BertEmbeddings(transformers.BertConfig(**SMALL, max_position_embeddings=16)).eval()


@functools.cache
def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    return GPT2Model(config).eval()


def fed_again(length: int) -> Call:
    def run(operator: Callable[..., Any]) -> Any:
        cache = DynamicCache()
        gpt2()(torch.full((1, 10), 3), cache=cache, use_cache=True)
        return operator(gpt2(), torch.full((1, length), 3), cache=cache)

    return run


def padded_positions(positions: list[list[int]]) -> Call:
    return lambda operator: operator(gpt2(), LEFT, attention_mask=LEFT_MASK, position_ids=torch.tensor(positions))


def short_row_is_wrong(output: Any) -> bool:
    """The padded row of a batch does not come out as it does alone."""
    alone = gpt2()(SHORT).last_hidden_state[0, -1]
    return not torch.allclose(output.last_hidden_state[0, -1], alone, atol=1e-4)


def off_by_positions(positions: list[int]) -> Call:
    """How far the result is from that of a kernel that reads the positions."""
    wanted = TABLE[torch.tensor(positions)]
    return lambda operator: (
        (operator(torch.ones(1, 3, 4), TABLE, torch.tensor([positions])) - wanted).abs().max().item()
    )


def generate(input_ids: torch.Tensor, mask: torch.Tensor) -> Call:
    options = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return lambda operator: operator(llama(), input_ids, attention_mask=mask, **options)


def short_prompt_goes_wrong(output: Any) -> bool:
    alone = llama()(SHORT).logits[0, -1]
    return not torch.allclose(output.logits[0][0], alone, atol=1e-4)


POSITION = [
    Case("pos-01", XLMRobertaEmbeddings.forward, "positions_fit", "B",
         lambda operator: operator(roberta(), torch.full((1, 17), 5)),
         lambda operator: operator(roberta(), torch.full((1, 16), 5)), Exception),
    Case("pos-02", BertEmbeddings.forward, "positions_fit", "A",
         lambda operator: operator(bert(), torch.full((1, 20), 5)),
         lambda operator: operator(bert(), torch.full((1, 16), 5)), Exception),
    Case("pos-03", ops.lookup, "positions_in_table", "B", call(ids(3, 40), TABLE), call(ids(3, 15), TABLE), IndexError),
    Case("pos-04", ops.rotate_by_cache, "positions_in_table", "B", call(torch.ones(2, 4), ids(-1, 0), TABLE),
         call(torch.ones(2, 4), ids(1, 0), TABLE), lambda out: bool(torch.equal(out[0], TABLE[-1]))),
    Case("pos-06", ops.rotate_pairs, "pairs_fit_the_head", "A", call(rand(2, 33), torch.arange(0, 33, 2).float()),
         call(rand(2, 34), torch.arange(0, 33, 2).float()), lambda beyond: beyond > 0),
    Case("pos-08", ops.rotate_from_zero, "positions_count_from_0", "B",
         off_by_positions([5, 6, 7]), off_by_positions([0, 1, 2]), lambda error: error > 0),
    Case("pos-11", ops.gpt2_forward, "positions_fit", "A", fed_again(11), fed_again(1), IndexError),
    Case("pos-13", ops.gpt2_forward, "positions_follow_the_mask", "B", padded_positions([[0, 1, 2], [0, 1, 2]]),
         padded_positions([[1, 0, 1], [0, 1, 2]]), short_row_is_wrong, certain=False),
    Case("pos-14", ops.generate, "left_padding", "B", generate(RIGHT, RIGHT_MASK),
         generate(LEFT, LEFT_MASK), short_prompt_goes_wrong, certain=False),
    Case("pos-15", ops.place_images, "placeholders_match_grids", "B", call(ids(9, 9, 9, 1, 1), 9, [(1, 4, 4)], 2),
         call(ids(9, 9, 9, 9, 1), 9, [(1, 4, 4)], 2), RuntimeError),
]  # fmt: skip

# ---------------------------------------------------------------- retrieval and text

HIDDEN = rand(1, 3, 4) * torch.tensor([[0, 1, 1]])[..., None]  # what comes out for a pad is 0
PAIRS = [("q", "a"), ("q", "b")]

RETRIEVAL = [
    Case("q-01", ops.shard_scales, "whole_blocks", "A", call(rand(4, 4), 512, 128, 8), call(rand(4, 4), 512, 128, 4),
         ValueError),
    Case("rag-01", ops.search_index, "index.shape", "A", call(rand(1536), rand(10, 384)),
         call(rand(384), rand(10, 384)),
         RuntimeError),
    Case("rag-03", ops.cls_pool, "first_is_a_token", "B", call(HIDDEN, torch.tensor([[0, 1, 1]])),
         call(HIDDEN.flip(1), torch.tensor([[1, 1, 0]])), lambda sentence: bool((sentence == 0).all())),
    Case("rag-04", ops.mean_pool, "pads_are_masked", "B", call(torch.tensor([[6, 6, 0, 0]]), torch.ones(1, 4), 0),
         call(torch.tensor([[6, 6, 0, 0]]), torch.tensor([[1, 1, 0, 0]]), 0), lambda mean: mean.item() != 6.0,
         certain=False),
    Case("rag-06", ops.rerank, "one_score_a_pair", "A", call(PAIRS, torch.ones(2, 4)), call(PAIRS, torch.ones(1, 4)),
         lambda scores: len(scores) == 4, blames="operator"),
    Case("rag-09", ops.cut, "nothing_is_cut", "B", call([[1] * 4, [1] * 9], 8), call([[1] * 4, [1] * 8], 8),
         lambda lost: lost > 0, certain=False),
    Case("rag-10", ops.best_hits, "has_candidates", "B", call([[0.5], []]), call([[0.5], [0.1]]), IndexError),
    Case("txt-01", ops.encode, "no_lone_surrogate", "B", call("a\udbc0b"), call("a\U0010ffffb"), UnicodeEncodeError),
    Case("txt-03", ops.split_with_a_stack, "splittable", "B", call("^" * 5000), call("^^^^ " * 5000), RecursionError),
    Case("txt-04", ops.merges, "splittable", "B", call("aB3/" * 1000), call("aB3/ " * 1000),
         lambda compared: compared > 1000000),
    Case("txt-06", ops.store, "no_nul", "A", call("a\x00b"), call("a\tb"), ValueError),
]  # fmt: skip

# ---------------------------------------------------------------- sampling

LOGITS = rand(1, 50)
BANNED = torch.tensor([[25.0, -100.0, 25.0]]).half()

SAMPLING = [
    Case("smp-02", ops.ban_stops, "stop_ids_in_vocabulary", "B", call(LOGITS, [2, 50]),
         call(LOGITS, [2, 49]), IndexError),
    Case("smp-03", ops.top_k, "top_k", "A", call(LOGITS, 51), call(LOGITS, 0), RuntimeError),
    Case("smp-04", ops.top_logprobs, "top_logprobs", "A", call(LOGITS, 1000000), call(LOGITS, 20), RuntimeError),
    Case("smp-06", ops.draw, "temperature_overflow", "B", call(BANNED, 3e-4), call(BANNED, 3e-2), RuntimeError),
    Case("smp-08", ops.add_logit_mask, "mask.shape", "A", call(LOGITS, torch.zeros(47)), call(LOGITS, torch.zeros(50)),
         RuntimeError),
    Case("smp-09", ops.count_in_int32, "int32_index", "A", call(torch.zeros(1).expand(15408, 151936)),
         call(torch.zeros(1).expand(14134, 151936)), lambda address: address < 0),
    Case("smp-11", ops.next_token, "not_empty", "A", call([]), call([1]), IndexError),
    Case("spc-02", ops.draft_inputs, "hidden_states.shape", "A", call(torch.zeros(8, 2), torch.zeros(6, 2)),
         call(torch.zeros(8, 2), torch.zeros(8, 2)), RuntimeError),
]  # fmt: skip

# ---------------------------------------------------------------- legal, though it looks odd


def with_static_cache(operator: Callable[..., Any]) -> Any:
    model = gpt2()
    cache = StaticCache(model.config, max_cache_len=16)
    model(torch.full((1, 4), 3), cache=cache, use_cache=True)
    return operator(model, torch.full((1, 3), 3), cache=cache)


def without_ids(embeddings: Callable[[], Any]) -> Call:
    return lambda operator: operator(embeddings(), inputs_embeds=rand(1, 4, 16))


LEGAL: list[tuple[str, Call]] = [
    ("att-01", call(Q, K[:, :1], V[:, :1], torch.ones(1, 4).bool())),
    ("att-02", call(Q, K, V)),
    ("att-02", call(Q, K, V, KEEP)),
    ("att-04", call(Q, K, V, torch.zeros(3, 4))),
    ("att-09", call(LLAMA, Q, K, V, None, scaling=1.0)),
    ("att-09", call(LLAMA, Q, K, V, torch.zeros(4), scaling=1.0)),
    ("att-16", call(Q, K[:, :1], V[:, :1, :, :4])),
    ("att-18", attend(torch.zeros(3, 3))),
    ("emb-01", call(ids(1, 2, dtype=I32), torch.ones(4, 2, dtype=torch.int64))),
    ("emb-01", call(torch.zeros(0, 3, dtype=torch.int64), rand(4, 2))),
    ("emb-07", call(LABELS, ids(1, 4, 2, dtype=torch.uint8))),
    ("emb-07", call(LABELS, LABELS.softmax(-1))),
    ("emb-07", call(LABELS[0], torch.tensor(4))),
    ("emb-07", call(rand(2, 5, 3), torch.full((2, 3), 4))),
    ("emb-07", call(LABELS, ids(1, -1, 2), ignore_index=-1)),
    ("kv-10", lambda operator: operator(DynamicLayer(), rand(1, 2, 1, 4), rand(1, 2, 1, 8))),
    ("moe-06", call(ids(0, 4), -1)),
    ("nrm-05", call(torch.full((2, 8), math.nan), ONES8)),
    ("num-01", call(torch.full((1, 4), math.inf), torch.ones(1, 4))),
    ("pos-01", lambda operator: operator(roberta(), torch.tensor([[5] * 14 + [1] * 6]))),
    ("pos-01", without_ids(roberta)),
    ("pos-02", without_ids(bert)),
    ("pos-11", with_static_cache),
    ("pos-11", without_ids(gpt2)),
    ("smp-06", call(torch.tensor([[25.0, -math.inf, 1.0]]).half(), 3e-2)),
    ("smp-06", call(BANNED, 0.0)),
]

GROUPS = {
    "attention": ATTENTION,
    "distributed": DISTRIBUTED,
    "embedding": EMBEDDING,
    "cache": CACHE,
    "lora": LORA,
    "moe": MOE,
    "norm": NORM,
    "position": POSITION,
    "retrieval": RETRIEVAL,
    "sampling": SAMPLING,
}

UNSAID = [
    Unsaid("dst-01", "a rank sees its own call only", "rules across ranks: `agree(…)` over a fingerprint of the call"),
    Unsaid("dst-02", "a rank sees its own call only", "rules across ranks that know the order of collectives"),
    Unsaid("dst-06", "whether a value is the same on all ranks is not in the call", "rules across ranks: `agree(…)`"),
    Unsaid(
        "dst-07",
        "the rank that should have called does not call",
        "rules across ranks, and a time limit for the others",
    ),
]
