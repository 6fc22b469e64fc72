"""Compiled models: a guard causes no graph break and no compilation, and reaches what was compiled before it came."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import llm_op_guard as og

pytestmark = pytest.mark.usefixtures("no_alarm")

Model = Any
Make = Callable[..., Model]
Step = Callable[[Model], Any]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.arange(3, 3 + batch * length).reshape(batch, length) % 96


def prefills(shapes: Sequence[tuple[int, int]]) -> Callable[[Model, Model], list[Any]]:
    return lambda _, run: [run(ids(*shape), use_cache=False).logits for shape in shapes]


def decode(cache: Callable[[Model], Any], batches: Sequence[int]) -> Callable[[Model, Model], list[Any]]:
    def steps(model: Model, run: Model) -> list[Any]:
        results = []
        for batch in batches:
            past = cache(model)
            results.append(run(ids(batch, 6), past_key_values=past).logits)
            results += [run(ids(batch, 1) + step, past_key_values=past).logits for step in range(3)]
        return results

    return steps


SEQUENCES: dict[str, Callable[[Model, Model], list[Any]]] = {
    "prefill": prefills([(2, 7), (2, 9), (2, 12), (2, 7)]),
    "batch": prefills([(2, 7), (3, 7), (1, 7), (4, 9)]),
    "dynamic cache": decode(lambda model: DynamicCache(config=model.config), [2]),
    "static cache": decode(lambda model: StaticCache(config=model.config, max_cache_len=16), [2]),
}


@dataclass
class Compilation:
    frames: int
    operations: int
    breaks: int
    results: list[torch.Tensor]


def compiled(model: Model, sequence: Callable[[Model, Model], list[Any]], **options: Any) -> Compilation:
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounter()
    run = torch.compile(model, fullgraph=True, backend=counter, **options)
    with torch.no_grad():
        results = sequence(model, run)
    return Compilation(counter.frame_count, counter.op_count, sum(counters["graph_break"].values()), results)


def assert_no_dearer(model: Model, sequence: str, **options: Any) -> None:
    plain = compiled(model, SEQUENCES[sequence], **options)
    assert plain.frames > 0
    with og.installed("transformers"):
        guarded = compiled(model, SEQUENCES[sequence], **options)
    assert guarded.breaks <= plain.breaks
    assert guarded.frames <= plain.frames
    for one, other in zip(plain.results, guarded.results, strict=True):
        assert torch.equal(one, other)
    # Reading a shape that is a symbol is an operation to Dynamo's count; with fixed shapes nothing may be added.
    if guarded.frames == plain.frames == 1 and options.get("dynamic") is not True:
        assert guarded.operations == plain.operations


@pytest.mark.parametrize("sequence", ["batch", "dynamic cache", "static cache"])
def test_no_more_compilations_automatic(tiny: Make, sequence: str) -> None:
    assert_no_dearer(tiny(attn="sdpa", num_hidden_layers=1), sequence)


def test_no_more_compilations_dynamic(tiny: Make) -> None:
    assert_no_dearer(tiny(attn="sdpa", num_hidden_layers=1), "dynamic cache", dynamic=True)


@pytest.mark.parametrize(("sequence", "dynamic"), [("prefill", None), ("batch", True)])
def test_no_more_compilations_eager_attention(tiny: Make, sequence: str, dynamic: bool | None) -> None:
    assert_no_dearer(tiny(attn="eager", num_hidden_layers=1), sequence, dynamic=dynamic)


# ---------------------------------------------------------------- one operator: quick, and the same code path

Rope = Callable[..., Any]


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    return apply_rotary_pos_emb(q, k, cos, sin)


def arguments(length: int = 7, batch: int = 2, width: int = 16) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(batch, 4, length, 16),
        torch.randn(batch, 2, length, 16),
        torch.randn(1, length, width),
        torch.randn(1, length, width),
    )


def refused(run: Rope) -> bool:
    """Whether a call with a table of one column is stopped: by our error, or by Dynamo's in a whole graph."""
    try:
        run(*arguments(width=1))
    except og.GuardError:
        return True
    except torch._dynamo.exc.TorchDynamoException:
        return True
    return False


def test_a_refused_call_is_not_compiled_into_our_explanation() -> None:
    run = torch.compile(rotate, backend="eager")
    with og.installed("transformers"):
        run(*arguments())
        before = counters["frames"]["total"]
        assert refused(run)
    # The caller, the wrapper and the check, and what follows a graph break; not the frames of `explain`.
    assert counters["frames"]["total"] - before < 20


def test_a_refused_call_in_a_whole_graph_says_that_a_contract_is_broken() -> None:
    run = torch.compile(rotate, fullgraph=True, backend="eager")
    with og.installed("transformers"):
        run(*arguments())
        with pytest.raises((og.GuardError, torch._dynamo.exc.TorchDynamoException)) as caught:
            run(*arguments(width=1))
    assert "apply_rotary_pos_emb" in str(caught.value)
    # The reader learns that the call is wrong, not that Dynamo lacks something.
    assert isinstance(caught.value, og.GuardError) or "contract" in str(caught.value).partition("from user code")[0]


def test_what_was_compiled_before_gets_the_guard_and_loses_it() -> None:
    counter = CompileCounter()
    run = torch.compile(rotate, backend=counter)
    run(*arguments())
    assert not refused(run)
    before = counter.frame_count
    with og.installed("transformers"):
        assert refused(run)
        run(*arguments())
    assert not refused(run)
    run(*arguments())
    # The code of the guarded function is in the graphs: in all, as many again for the guarded one.
    assert counter.frame_count <= 2 * before


def test_what_was_compiled_whole_before_gets_the_guard_and_loses_it() -> None:
    run = torch.compile(rotate, fullgraph=True, backend="eager")
    run(*arguments())
    assert not refused(run)
    with og.installed("transformers"):
        assert refused(run)
        run(*arguments())
    assert not refused(run)


def test_a_guard_that_comes_back_costs_no_compilation() -> None:
    counter = CompileCounter()
    run = torch.compile(rotate, backend=counter)
    with og.installed("transformers"):
        run(*arguments())
        with og.policy(B="raise"):
            run(*arguments())
        seen = counter.frame_count
        og.set_policy(A="off")
        run(*arguments())
        og.set_policy(A="raise")
        run(*arguments())
        with og.policy(B="raise"):
            run(*arguments())
        # One compilation without the guard; with it, what was compiled is still there.
        assert counter.frame_count <= seen + 1


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_policy_change_acts_on_what_is_compiled(fullgraph: bool) -> None:
    run = torch.compile(rotate, fullgraph=fullgraph, backend="eager")
    with og.installed("transformers"):
        run(*arguments())
        og.set_policy(A="off")
        assert not refused(run)
        og.set_policy(A="raise")
        assert refused(run)
        run(*arguments())


@pytest.mark.parametrize("dynamic", [None, True])
def test_eleven_shapes(dynamic: bool | None) -> None:
    shapes = [(7, 2), (9, 2), (1, 2), (1, 3), (12, 3), (7, 1), (1, 1), (30, 4), (2, 2), (8, 8), (64, 5)]

    def count() -> tuple[int, int]:
        torch._dynamo.reset()
        counters.clear()
        counter = CompileCounter()
        run = torch.compile(rotate, fullgraph=True, backend=counter, dynamic=dynamic)
        for length, batch in shapes:
            run(*arguments(length, batch))
        return counter.frame_count, counter.op_count

    plain = count()
    with og.installed("transformers"):
        guarded = count()
    assert guarded[0] <= plain[0]


def test_heads_that_change_compile_no_more_often() -> None:
    def count() -> int:
        torch._dynamo.reset()
        counter = CompileCounter()
        run = torch.compile(rotate, fullgraph=True, backend=counter)
        for heads in (4, 8, 2, 16):
            q, _, cos, sin = arguments()
            run(q.repeat(1, heads, 1, 1), q, cos, sin)
            run(q, q[:, :1].repeat(1, heads, 1, 1), cos, sin)
        return counter.frame_count

    plain = count()
    with og.installed("transformers"):
        assert count() <= plain
