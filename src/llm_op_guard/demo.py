"""The main job on a tiny model: generation with and without guards, then bad inputs with and without guards."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from llm_op_guard import api
from llm_op_guard.errors import GuardError
from llm_op_guard.frozen import frozen
from llm_op_guard.policy import policy
from llm_op_guard.report.comparison import Comparison, render_comparison, render_heading
from llm_op_guard.report.terminal import Terminal

VOCABULARY = 100
WIDTH = 16  # of one head
TOKENS = 7
NEW_TOKENS = 24
_SHOWN_LINES = 5


@frozen
class Case:
    """One bad input.

    `bad` makes the call; `right` makes the one that was meant, where there is one. `guarded` makes the bad call where
    a guard is not installed from outside: a user's own operator.
    """

    title: str
    bad: Callable[[], Any]
    right: Callable[[], Any] | None = None
    guarded: Callable[[], Any] | None = None


def main(out: Terminal) -> bool:
    """Run the whole demonstration; whether the tokens are identical and every bad input was stopped."""
    started = time.perf_counter()
    torch, _ = _frameworks()
    torch.set_num_threads(1)  # tensors this small are not worth sharing, least of all on a busy machine
    identical = compare_generation(out)
    out.line()
    stopped = compare_bad_inputs(out)
    out.line(out.paint(f"{time.perf_counter() - started:.0f} seconds", "dim"))
    return identical and stopped


# ---------------------------------------------------------------- generation


def compare_generation(out: Terminal) -> bool:
    """Sample from a tiny Llama with and without guards; whether tokens and scores are the same, bit for bit."""
    torch, transformers = _frameworks()
    transformers.logging.set_verbosity_error()
    out.line(out.paint("A tiny random Llama generates, with and without guards", "bold"))
    out.line(out.paint(f"torch {torch.__version__}, transformers {transformers.__version__}", "dim"))
    api.count_checks()
    plain, guarded = [], []
    checks, calls, sites = 0, 0, 0
    violations = api.record.total
    for attention in ("eager", "sdpa"):
        model = tiny_llama(attention)
        plain.append(_sampled(model))
        before = api.tally.checks
        count = [0]
        hook = model.register_forward_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        with api.installed("transformers") as report:
            guarded.append(_sampled(model))
            sites = max(sites, len(report.guarded))
        hook.remove()
        checks += api.tally.checks - before
        calls += count[0]

    tokens = all(torch.equal(one.sequences, other.sequences) for one, other in zip(plain, guarded, strict=True))
    scores = all(
        torch.equal(one, other)
        for without, with_guard in zip(plain, guarded, strict=True)
        for one, other in zip(without.scores, with_guard.scores, strict=True)
    )
    out.line(f"tokens: {_verdict(out, tokens)}")
    out.line(f"scores: {_verdict(out, scores)}{', bit for bit' if scores else ''}")
    out.line(
        f"guarded: {sites} sites, {checks} checks in {calls} forward passes (eager and SDPA attention), "
        f"{api.record.total - violations} violations"
    )
    return tokens and scores and checks > 0


def _frameworks() -> tuple[Any, Any]:
    """Both as Any: Transformers has no types for what is called here."""
    return importlib.import_module("torch"), importlib.import_module("transformers")


def tiny_llama(attention: str) -> Any:
    """A random Llama with grouped heads, the same at each call."""
    torch, transformers = _frameworks()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4 * WIDTH,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config).eval()


def _sampled(model: Any) -> Any:
    import torch

    torch.manual_seed(1)  # sampling shows that the guards leave the random state alone
    prompt = torch.randint(1, VOCABULARY, (2, TOKENS))
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0  # padded on the left
    return model.generate(
        prompt,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        pad_token_id=0,
        eos_token_id=None,
        output_scores=True,
        return_dict_in_generate=True,
    )


def _verdict(out: Terminal, same: bool) -> str:
    return out.paint("identical", "bold", "green") if same else out.paint("DIFFERENT", "bold", "red")


# ---------------------------------------------------------------- bad inputs


def compare_bad_inputs(out: Terminal) -> bool:
    """Make every bad call with and without guards and show both; whether all were stopped."""
    out.line(out.paint("Bad inputs", "bold"))
    out.line(render_heading("without the guard", "with the guard", out))
    results = []
    for number, case in enumerate(cases(), 1):
        results.append(compare(case))
        out.line(render_comparison(number, results[-1], out))
    stopped, silent = sum(r.stopped for r in results), sum(r.silent for r in results)
    out.line()
    summary = f"{stopped} of {len(results)} stopped; {silent} of them are silent without the guard"
    out.line(out.paint(summary, "bold", "green" if stopped == len(results) else "red"))
    return stopped == len(results)


def compare(case: Case) -> Comparison:
    """Make the bad call without and with the guard, and measure how far off the unguarded result is."""
    unguarded, silent = _unguarded(case)
    # Whatever LLM_OP_GUARD says, this is about what a guard that raises does.
    with policy(A="raise", B="raise"), api.installed("transformers"):
        try:
            (case.guarded or case.bad)()
        except GuardError as error:
            return Comparison(case.title, unguarded, silent, _shortened(str(error)), stopped=True)
        except Exception as error:
            return Comparison(case.title, unguarded, silent, [f"not stopped: {_named(error)}"], stopped=False)
    return Comparison(case.title, unguarded, silent, ["not stopped"], stopped=False)


def _shortened(diagnosis: str) -> list[str]:
    """The head of a diagnosis; of the reasons, the likely cause is enough here."""
    head = diagnosis.partition("\n\n")[0].splitlines()
    return [line for line in head if not line.lstrip().startswith("because ")][:_SHOWN_LINES]


def _unguarded(case: Case) -> tuple[str, bool]:
    """What happens in words, and whether a wrong result comes without a word."""
    try:
        result = case.bad()
    except Exception as error:
        return _named(error), False
    if case.right is None:
        return "silent: no error", True
    off = _difference(list(_tensors(result)), list(_tensors(case.right())))
    return (f"silent: {off}", True) if off else ("the right result", False)


def _named(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:70]}{'…' if len(text) > 70 else ''}"


def _difference(results: list[Any], expected: list[Any]) -> str:
    """How the results differ from the right ones; empty when they do not."""
    for result, right in zip(results, expected, strict=True):
        if result.shape != right.shape:
            return f"shape {list(result.shape)} instead of {list(right.shape)}"
    off = max(float((result - right).abs().max()) for result, right in zip(results, expected, strict=True))
    if math.isnan(off):
        return "NaN in the result"
    return f"off by {off:#.2g}" if off else ""


def _tensors(result: Any) -> Iterator[Any]:
    if isinstance(result, tuple):
        for part in result:
            yield from _tensors(part)
    elif result is not None:
        yield result.detach()


def cases() -> list[Case]:
    """The bad inputs, on tensors that are the same at each call."""
    import torch

    torch.manual_seed(2)
    return [*_rope_cases(), *_attention_cases(), _norm_case(), *_token_cases(), _own_case()]


def _rope_cases() -> list[Case]:
    import torch
    from transformers.models.llama import modeling_llama as llama

    q, k = torch.randn(2, 4, TOKENS, WIDTH), torch.randn(2, 2, TOKENS, WIDTH)
    positions = torch.arange(TOKENS)[None]
    cos, sin = tiny_llama("eager").model.rotary_emb(q, positions)

    def rotate(cos: Any, sin: Any, batch: int = 2) -> Any:
        return llama.apply_rotary_pos_emb(q[:batch], k[:batch], cos, sin)

    def right() -> Any:
        return rotate(cos, sin)

    def right_for_one() -> Any:
        return rotate(cos, sin, batch=1)

    return [
        Case("RoPE: cos and sin have one column", lambda: rotate(cos[..., :1], sin[..., :1]), right),
        Case("RoPE: cos and sin of one position", lambda: rotate(cos[:, :1], sin[:, :1]), right),
        Case(
            "RoPE: cos and sin of two sequences, q of one",
            lambda: rotate(cos.repeat(2, 1, 1), sin.repeat(2, 1, 1), batch=1),
            right_for_one,
        ),
        Case("RoPE: cos and sin are unsqueezed already", lambda: rotate(cos[:, None], sin[:, None]), right),
    ]


def _attention_cases() -> list[Case]:
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama import modeling_llama as llama

    module = tiny_llama("eager").model.layers[0].self_attn
    q = torch.randn(2, 4, TOKENS, WIDTH)
    k, v = torch.randn(2, 2, TOKENS, WIDTH), torch.randn(2, 2, TOKENS, WIDTH)
    keep = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    additive = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~keep, torch.finfo(torch.float32).min)
    # A view into zeros, so that reading past its end stays inside memory of ours.
    short = torch.zeros(2 * v.numel())[: v[:, :, 2:].numel()].view(2, 2, TOKENS - 2, WIDTH).copy_(v[:, :, :-2])

    def eager(q: Any = q, k: Any = k, v: Any = v, mask: Any = additive) -> Any:
        return llama.eager_attention_forward(module, q, k, v, mask, scaling=module.scaling)[0]

    def sdpa(v: Any = v) -> Any:
        return sdpa_attention_forward(module, q, k, v, None, scaling=module.scaling)[0]

    return [
        Case("Attention: keys and values of one sequence, queries of two", lambda: eager(k=k[:1], v=v[:1]), eager),
        Case("Attention: queries of one sequence, keys and values of two", lambda: eager(q=q[:1]), eager),
        Case("SDPA: fewer values than keys", lambda: sdpa(v=short), sdpa),
        Case("Eager attention: a True/False mask", lambda: eager(mask=keep), eager),
        Case("Eager attention: a 0/1 integer mask", lambda: eager(mask=keep.long()), eager),
    ]


def _norm_case() -> Case:
    import torch

    norm = tiny_llama("eager").model.norm
    hidden = torch.randn(2, TOKENS, norm.weight.shape[0])
    return Case("RMSNorm: an input with one column", lambda: norm(hidden[..., :1]), lambda: norm(hidden))


def _token_cases() -> list[Case]:
    import torch

    model = tiny_llama("sdpa")
    ids = torch.randint(1, VOCABULARY, (2, TOKENS))

    def with_id(token: int) -> Any:
        changed = ids.clone()
        changed[1, 3] = token
        return changed

    def generate(token: int) -> Any:
        return model.generate(with_id(token), max_new_tokens=2, do_sample=False, pad_token_id=0)

    return [
        Case("Model: a token id equal to the vocabulary size", lambda: model(with_id(VOCABULARY)).logits),
        Case("Model: -100, which belongs in labels", lambda: model(with_id(-100)).logits),
        Case("generate: a negative token id", lambda: generate(-1)),
    ]


def _own_case() -> Case:
    import torch

    def mean_pool(hidden: Any, mask: Any) -> Any:
        """One vector for each text: the mean over its tokens.

        Contract:
            hidden: floating[B, L, E] @ dev
            mask: integer[B, L] @ dev = why(because="each token counts or does not",
                                            hint="a mask of lengths, or of another batch?")
        """
        return (hidden * mask[..., None]).sum(1) / mask.sum(1)[:, None]

    guarded = api.guard(mean_pool)
    hidden = torch.randn(2, TOKENS, 8)
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    return Case(
        "An operator of your own: a mask of one column",
        lambda: mean_pool(hidden, mask[:, :1]),
        lambda: mean_pool(hidden, mask),
        lambda: guarded(hidden, mask[:, :1]),
    )
