"""What a guard costs under torch.compile, and what its user sees; docs/torch-compile.md shows the numbers."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import llm_op_guard as og
from llm_op_guard import api
from recompilation_rows import FEATURES, SEQUENCES, TOGETHER, Attention, Feature, call, guarded, measured, scores, table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "torch-compile.md"


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---------------------------------------------------------------- what it costs


def feature_id(feature: Feature) -> str:
    return feature.name


def assert_extra(feature: Feature, sequence: str, **options: Any) -> None:
    plain, with_guard = measured(feature, sequence, **options)
    assert with_guard - plain == feature.extra.get(sequence, 0), (feature.name, sequence, plain)


@pytest.mark.parametrize("feature", [f for f in FEATURES if f.extra], ids=feature_id)
def test_what_costs_a_compilation(feature: Feature) -> None:
    assert all(extra == 1 for extra in feature.extra.values())
    assert_extra(feature, next(iter(feature.extra)))


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_everything_together(sequence: str) -> None:
    assert_extra(TOGETHER, sequence)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("feature", [*FEATURES, TOGETHER], ids=feature_id)
def test_every_feature_over_every_sequence(feature: Feature, sequence: str, dynamic: bool | None) -> None:
    assert_extra(feature, sequence, dynamic=dynamic)


@pytest.mark.parametrize("sequence", ["decode", pytest.param("masks", marks=pytest.mark.slow)])
def test_fixed_sizes(sequence: str) -> None:
    plain, with_guard = measured(TOGETHER, sequence, dynamic=False)
    assert with_guard == plain


def test_a_size_that_is_marked_dynamic_stays_so() -> None:
    counted = {}
    for name, operator in (("plain", scores), ("guarded", guarded(TOGETHER))):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        module = Attention()
        module.operator = operator
        run = torch.compile(module, fullgraph=True, backend=counter)
        for keys in (7, 8, 9):
            q, k, _ = call(2, 1, keys)
            torch._dynamo.mark_dynamic(k, 2)
            run(q, k)
        counted[name] = counter.frame_count
    assert counted == {"plain": 1, "guarded": 1}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_results_are_the_same(backend: str, dynamic: bool | None) -> None:
    results: list[list[torch.Tensor]] = []
    for operator in (scores, guarded(TOGETHER)):
        torch._dynamo.reset()
        module = Attention()
        module.operator = operator
        run = torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic)
        results.append([run(*arguments) for arguments in (*SEQUENCES["decode"], *SEQUENCES["masks"])])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_page_has_the_features() -> None:
    shown = PAGE.read_text(encoding="utf-8").partition("<!-- table: features -->\n")[2].partition("\n<!-- end -->")[0]
    assert shown == table(), f"docs/torch-compile.md is out of date; its table is now:\n{table()}"


# ---------------------------------------------------------------- what its user sees


@og.guard("""
    x: T[B, D] @ dev
    w: T[D] @ dev = why(because="one scale for each column", hint="a norm of another layer?")
    require(D % 2 == 0, id="even", error=IndexError)
    require(B < 100, id="small", certain=False)
    require(finite(x))
    returns: T[B, D]
""")
def norm(x: Any, w: Any, instead: Any = None) -> Any:
    return x * w if instead is None else instead


def whole(dynamic: bool | None = None, backend: str = "eager") -> Callable[..., Any]:
    run: Callable[..., Any] = torch.compile(lambda *a: norm(*a) + 1, fullgraph=True, dynamic=dynamic, backend=backend)
    return run


class Layers(torch.nn.Module):
    """Hands its input to a guarded operator."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(4, 4)])
        self.sizes = {"a": (3, 4)}
        self.home = torch.device("cpu")
        self.operator = og.guard(f"x: any[B, D] @ dev\n{rule}")(lambda self, x, n: x + 1)

    def forward(self, x: torch.Tensor, n: int) -> Any:
        return self.operator(self, x, n)


@pytest.mark.parametrize(
    "rule",
    [
        "require(self.layers[n].in_features == D)",
        "require(self.layers[n - 2].weight.shape[n] == D)",
        "require(self.sizes['a'][n] == D)",
        "require(x.shape[n] == 4)",
        "require(has(self.layers[n].bias) and D == 4)",
        "require(self.layers[n + 7].in_features == 0)\nrequire(D == 4)",
        "if self.home == cpu:\n    require(D == 4)",
        "if dev in (cpu, cuda):\n    require(D == 4)",
        "require(x.device != meta and D == 4)",
    ],
)
def test_items_and_devices_in_a_whole_graph(rule: str) -> None:
    run = torch.compile(Layers(rule), fullgraph=True, backend="eager")
    for batch in (2, 3):
        assert run(torch.ones(batch, 4), 1).shape == (batch, 4)
    with pytest.raises(og.GuardError):
        run(torch.ones(2, 5), 1)


X, W = torch.ones(2, 4), torch.ones(4)
BROKEN = {
    "w.shape": (X, torch.ones(1)),
    "w.dtype": (X, W.double()),
    "even": (torch.ones(2, 3), torch.ones(3)),
    "result.shape": (X, W, torch.ones(1)),
}


@pytest.mark.parametrize("rule", BROKEN)
@pytest.mark.parametrize(
    ("dynamic", "first"),
    [
        (None, False),
        (True, True),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((None, True), (True, False))),
    ],
)
def test_a_whole_graph_fails_with_our_error(rule: str, dynamic: bool | None, *, first: bool) -> None:
    run = whole(dynamic)
    if not first:
        run(X, W)
    with pytest.raises(og.GuardError) as caught:
        run(*BROKEN[rule])
    with pytest.raises(og.GuardError) as plainly:
        norm(*BROKEN[rule])
    assert isinstance(caught.value, torch._dynamo.exc.Unsupported)
    assert isinstance(caught.value, IndexError) is (rule == "even")
    (violation,) = caught.value.violations
    (expected,) = plainly.value.violations
    assert (violation.rule_id, violation.observed, violation.expected) == (rule, expected.observed, expected.expected)
    assert (violation.hint, violation.because) == (expected.hint, expected.because)
    # Dynamo is asked for what the check looks at; the arguments that the contract does not mention are not at hand.
    assert {*violation.tensors} == {tensor for tensor in expected.tensors if tensor.name != "instead"}
    assert violation.call_site is not None and violation.call_site.file == __file__
    restored = pickle.loads(pickle.dumps(caught.value))
    assert type(restored) is type(plainly.value) and restored.violations == caught.value.violations
    run(X, W)


@pytest.mark.parametrize("rule", BROKEN)
def test_otherwise_the_call_is_explained_when_it_runs(rule: str) -> None:
    run = torch.compile(lambda *a: norm(*a) + 1, backend="eager")
    run(X, W)
    with pytest.raises(og.GuardError) as caught:
        run(*BROKEN[rule])
    assert type(caught.value).__mro__[1:2] != (torch._dynamo.exc.Unsupported,)
    assert [v.rule_id for v in caught.value.violations] == [rule]
    assert [v.rule_id for v in og.record.violations] == [rule]


def test_where_dynamo_lets_us_not_look_it_gives_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> Any:
        raise AttributeError("another version of torch")

    monkeypatch.setattr(torch._dynamo.comptime.ComptimeContext, "get_local", refuse)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a call of norm breaks its contract"):
        whole()(*BROKEN["w.shape"])


@pytest.mark.parametrize("action", ["warn", "record", "off"])
@pytest.mark.parametrize("rule", BROKEN)
def test_a_policy_that_does_not_raise_lets_a_whole_graph_through(action: str, rule: str) -> None:
    run = whole()
    with og.policy(A=action):
        assert torch.equal(run(*BROKEN[rule]), (norm.__wrapped__(*BROKEN[rule]) + 1))  # type: ignore[attr-defined]
    assert og.record.total == 0


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_suspect_rule_breaks_no_graph_and_is_not_told_of(fullgraph: bool) -> None:
    counters.clear()
    run = torch.compile(lambda *a: norm(*a) + 1, fullgraph=fullgraph, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(torch.ones(100, 4), W)
    assert sum(counters["graph_break"].values()) == 0
    assert og.record.total == 0


@pytest.mark.parametrize(
    "rule", ["require(m[n - 1] == D)", "require(x.shape[n - 1] == 4)", "require(m[n - 1] == 4 and x.shape[n - 1] == 4)"]
)
def test_computed_indices_of_symbolic_numbers_in_a_whole_graph(rule: str) -> None:
    operator = og.guard(f"x: any[B, D]\n{rule}")(lambda x, n, m: x * n)
    run = torch.compile(operator, fullgraph=True, dynamic=True, backend="eager")
    assert run(torch.ones(3, 4), 2, [7, 4]).shape == (3, 4)
    with pytest.raises(og.GuardError, match=r"m\[n - 1\] = 4|x\.shape\[n - 1\] = 5"):
        run(torch.ones(3, 5), 2, [7, 4])


def test_a_traced_guard_changes_no_state_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.tally, "counting", True)
    monkeypatch.setattr(api.tally, "checks", 0)
    operator = og.guard("x: T[B, D]\nw: T[D]\nrequire(B < 3, certain=False)\nreturns: T[B, D]")(scale)
    run = torch.compile(operator, fullgraph=True, backend="eager")
    run(X, W)
    run(torch.ones(5, 4), W)
    with pytest.raises(og.GuardError):
        run(X, torch.ones(1))
    assert (api.tally.checks, og.record.total) == (0, 0)
    operator(X, W)
    assert api.tally.checks == 1


def scale(x: Any, w: Any) -> Any:
    return x * w


LONG = """
    table: floating[V, E]
    require(within(ids, 0, V), id='in')
    require(E % 2 == 0, id='even')
    require(mask is None or any_per_row(mask), id='mask', certain=False)
"""


@pytest.mark.parametrize("action", ["raise", "warn", "record"])
def test_a_broken_rule_in_a_long_check(action: str) -> None:
    """Dynamo fails at compiling the half of it that would follow the break."""

    @og.guard(LONG)
    def looked_up(ids: Any, table: Any, mask: Any = None) -> Any:
        return table[ids]

    torch._dynamo.reset()
    og.record.clear()
    compiled = torch.compile(lambda ids, table: looked_up(ids, table) * 2, backend="eager")
    ids, narrow = torch.tensor([0, 1]), torch.ones(2, 3)
    with og.policy(A=action):
        for _ in range(2):
            if action == "raise":
                with pytest.raises(og.GuardError, match="E % 2 = 1"):
                    compiled(ids, narrow)
            elif action == "warn" and og.record.total == 0:
                with pytest.warns(og.GuardWarning, match="E % 2 = 1"):
                    assert compiled(ids, narrow).shape == (2, 3)
            else:
                assert compiled(ids, narrow).shape == (2, 3)
            assert compiled(ids, torch.ones(2, 4)).shape == (2, 4)
    assert og.record.counts == {(f"{__name__}.{looked_up.__qualname__}", "even"): 2}
