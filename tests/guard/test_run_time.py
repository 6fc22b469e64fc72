"""Value rules in compiled programs: judged each time the program runs, told as without, and never in the way."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import llm_op_guard as og
from llm_op_guard.contract.vocabulary import FUNCTIONS, Function
from llm_op_guard.guard import functions, run_time

NAN = float("nan")
CONTRACT = """
q: floating[B, L]
ids: int64[B]
table: floating[V, _]
require(finite(q), hint="overflow" if highest(q) > 5 else "gone wrong")
require(within(ids, 0, V), id="ids_in_table", error=IndexError)
if n > 5:
    require(count(ids[1:], 0) < n - 5, id="few_zeros")
"""


def look_up(q: torch.Tensor, ids: torch.Tensor, table: torch.Tensor, n: int = 3) -> torch.Tensor:
    return q * 2 + table[ids % len(table)].sum() + n


def call(length: int = 8, **changed: Any) -> dict[str, Any]:
    return {"q": torch.ones(4, length), "ids": torch.tensor([0, 1, 2, 4]), "table": torch.ones(5, 2), **changed}


@pytest.fixture(autouse=True)
def raising() -> Iterator[None]:
    torch._dynamo.reset()
    og.set_policy(B="raise")
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend, **options)  # type: ignore[no-any-return]


BROKEN = [
    ({"q": torch.full((4, 8), NAN)}, "finite(q)", "q[0, 0] = nan (of 32, 32 elements are wrong, this one first)"),
    ({"ids": torch.tensor([0, 1, 5, 6])}, "ids_in_table", "ids[2] = 5 (of 4, 2 elements are wrong, this one first)"),
    (
        {"n": 6, "ids": torch.tensor([1, 0, 2, 0])},
        "few_zeros",
        "count(ids[1:], 0) = 2 (of 3, first at ids[1]), n - 5 = 1",
    ),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_rules_are_judged_when_the_program_runs(backend: str) -> None:
    guarded = compiled(og.guard(CONTRACT)(look_up), backend)
    for changed, rule_id, observed in BROKEN:
        good = call(n=changed.get("n", 3))
        assert torch.equal(guarded(**good), look_up(**good))
        with pytest.raises(og.GuardError) as raised:
            guarded(**call(**changed))
        (violation,) = raised.value.violations
        assert (violation.rule_id, violation.observed, violation.cost_class) == (rule_id, observed, "B")
        assert guarded(**good) is not None


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_call_site_is_in_the_program(requires_grad: bool) -> None:
    """And not in code that torch generates, which is of no module."""
    guarded = compiled(og.guard(CONTRACT)(look_up))
    with pytest.raises(og.GuardError) as raised:
        guarded(**call(q=torch.full((4, 8), NAN, requires_grad=requires_grad)))
    site = raised.value.violations[0].call_site
    assert site is not None and (site.file, site.function) == (__file__, "test_the_call_site_is_in_the_program")


def test_the_diagnosis_is_that_of_an_eager_call() -> None:
    guarded = og.guard(CONTRACT)(look_up)
    program = compiled(guarded)
    program(**call())
    for changed, _, _ in BROKEN[:2]:
        errors = []
        for function in (guarded, program):
            with pytest.raises(og.GuardError) as raised:
                function(**call(**changed))
            errors.append(raised.value)
        eager, later = (error.violations[0] for error in errors)
        for field in ("rule_id", "argument", "observed", "expected", "hint", "because", "error", "contract_hash"):
            assert getattr(eager, field) == getattr(later, field), field
        assert type(errors[0]) is type(errors[1])


def test_no_compilation_and_no_graph_break_more() -> None:
    counted = []
    for function in (look_up, og.guard(CONTRACT)(look_up)):
        torch._dynamo.reset()
        counter = CompileCounter()
        program = compiled(function, counter)
        for length in (5, 7, 9):
            program(**call(length))
        counted.append(counter.frame_count)
    assert counted[0] == counted[1]


def test_gradients_are_the_same() -> None:
    found = []
    for function in (look_up, og.guard(CONTRACT)(look_up)):
        q = torch.ones(4, 8, requires_grad=True)
        compiled(function)(**call(q=q)).sum().backward()
        found.append(q.grad)
    assert torch.equal(*found)  # type: ignore[misc]


def test_results_are_judged_too() -> None:
    @og.guard("ensure(finite(result), id='finite_result')")
    def root(x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()

    program = compiled(root)
    assert program(torch.ones(2)).tolist() == [1, 1]
    with pytest.raises(og.GuardError, match=r"result\[1\] = nan"):
        program(torch.tensor([1.0, -1.0]))


def test_attributes_of_a_module() -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))
            self.limit = 4

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    norm = Norm()
    og.guard("require(finite(self.weight)); require(within(x, 0, self.limit), id='limit')".replace("; ", "\n"))(norm)
    program = compiled(norm)
    assert program(torch.ones(2, 8)).shape == (2, 8)
    with pytest.raises(og.GuardError, match=r"expected 0 <= x < 4 \(self.limit\)"):
        program(torch.full((2, 8), 4.0))
    with torch.no_grad():
        norm.weight[3] = NAN
    with pytest.raises(og.GuardError, match=r"self.weight\[3\] = nan"):
        program(torch.ones(2, 8))


def test_suspect_rules_warn_and_recorded_ones_are_recorded() -> None:
    @og.guard("require(finite(x), id='odd', certain=False)\nrequire(lowest(x) >= 0, id='low')")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    program = compiled(double)
    program(torch.ones(2))
    with pytest.warns(og.GuardWarning, match=r"x\[0\] = inf"):
        program(torch.tensor([float("inf")]))
    with og.policy(B="record"):
        torch._dynamo.reset()
        og.record.clear()
        program(torch.tensor([-1.0, 1.0]))
        assert [violation.rule_id for violation in og.record.violations] == ["low"]


def test_nothing_is_left_of_it_where_values_are_off() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    guarded = og.guard(CONTRACT)(look_up)
    compiled(guarded, backend)(**call())
    assert run_time.LIBRARY in graphs[-1].code
    og.set_policy(B="off")
    torch._dynamo.reset()
    compiled(guarded, backend)(**call(q=torch.full((4, 8), NAN)))
    assert run_time.LIBRARY not in graphs[-1].code


def test_exported_programs_have_none() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Any, ids: Any, table: Any) -> Any:
            return guarded(q, ids, table)

    guarded = og.guard(CONTRACT)(look_up)
    given = tuple(call().values())
    for strict in (False, True):
        program = torch.export.export(Module(), given, strict=strict)
        assert run_time.LIBRARY not in program.graph_module.code


def test_vmap_says_nothing() -> None:
    guarded = og.guard("require(finite(x))")(lambda x: x * 2)
    program = compiled(torch.vmap(guarded))
    assert program(torch.full((3, 2), NAN)).isnan().all()


def test_checkpointed_layers() -> None:
    guarded = og.guard("require(finite(x))")(lambda x: x.sin())
    program = compiled(lambda x: checkpoint(guarded, x, use_reentrant=False))
    x = torch.ones(3, requires_grad=True)
    program(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3).cos())  # type: ignore[arg-type]
    with pytest.raises(og.GuardError, match=r"x\[0\] = nan"):
        program(torch.tensor([NAN]))


def test_rules_that_cannot_be_split_are_left_out() -> None:
    @og.guard("require(all(finite(x) for x in xs), id='each')\nrequire(finite(xs[0]), id='first')")
    def added(xs: list[torch.Tensor]) -> torch.Tensor:
        return xs[0] + xs[1]

    program = compiled(added)
    assert program([torch.ones(2), torch.full((2,), NAN)]).isnan().all()
    with pytest.raises(og.GuardError, match=r"xs\[0\]\[0\] = nan"):
        program([torch.full((2,), NAN), torch.ones(2)])


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What an integration answers of an owner: it reads what Dynamo cannot follow."""
    import linecache

    answers: dict[str, Any] = {"rows": 5}

    def rows_of_a_test(owner: Any) -> Any:
        linecache.checkcache()
        assert owner is call
        return answers["rows"]

    declared = Function(rows_of_a_test.__name__, "A", (("owner", "owner"),), "of a test", eager=True)
    monkeypatch.setitem(FUNCTIONS, declared.name, declared)
    monkeypatch.setitem(functions.IMPLEMENTATIONS, declared.name, rows_of_a_test)
    return answers


ROWS = "ids: int64[_]\nrequire(within(ids, 0, rows_of_a_test(owner)), id='in_table')"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_an_integration_answers_is_asked_while_tracing(rows: dict[str, Any], backend: str) -> None:
    counted = []
    for function in (lambda ids, owner: ids + 1, og.guard(ROWS)(lambda ids, owner: ids + 1)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        program = compiled(function, counter)
        for length in (3, 5, 7):
            assert program(torch.full((length,), 4), call).tolist() == [5] * length
        counted.append(counter.frame_count)
    assert counted[0] == counted[1]
    with pytest.raises(og.GuardError) as raised:
        program(torch.tensor([7, 7]), call)
    (violation,) = raised.value.violations
    assert violation.observed == "ids[0] = 7 (of 2, 2 elements are wrong, this one first)"
    assert violation.expected == "0 <= ids < 5 (rows_of_a_test(owner))"


def test_an_answer_that_is_out_of_date_is_no_alarm(rows: dict[str, Any]) -> None:
    """Dynamo knows nothing of what was read for it, and what it is about may be in another graph."""
    program = torch.compile(og.guard(ROWS)(lambda ids, owner: ids + 1), backend="eager")
    program(torch.tensor([4]), call)
    rows["rows"] = 9
    assert program(torch.tensor([8]), call).tolist() == [9]
    rows["rows"] = None
    assert program(torch.tensor([8]), call).tolist() == [9]
    rows["rows"] = 5
    with pytest.raises(og.GuardError, match=r"ids\[0\] = 8"):
        program(torch.tensor([8]), call)
    run_time._owners.clear()  # as in a process that loaded the program
    assert program(torch.tensor([8]), call).tolist() == [9]


def test_the_number_of_an_object_that_is_gone_is_nobodys_again() -> None:
    """A graph may hold it still, and Dynamo use that for a third object."""
    owner = torch.nn.Identity()
    number = run_time.owner_number(owner)
    assert run_time.owner_number(owner) == number != run_time.NOBODY
    del owner
    gc.collect()
    assert run_time.owner_number(torch.nn.Identity()) != number


def test_no_answer_no_rule(rows: dict[str, Any]) -> None:
    rows["rows"] = None
    program = compiled(og.guard(f"{ROWS}\nrequire(lowest(ids) >= 0, id='low')")(lambda ids, owner: ids + 1))
    assert program(torch.tensor([8]), call).tolist() == [9]
    with pytest.raises(og.GuardError, match="lowest"):
        program(torch.tensor([-1]), call)


def test_branches_on_what_an_integration_answers_are_left_out(rows: dict[str, Any]) -> None:
    contract = (
        "if rows_of_a_test(owner) > 3:\n    require(unique(ids), id='unique')\nrequire(lowest(ids) >= 0, id='low')"
    )
    program = compiled(og.guard(contract)(lambda ids, owner: ids + 1))
    assert program(torch.tensor([7, 7]), call).tolist() == [8, 8]
    with pytest.raises(og.GuardError, match="lowest"):
        program(torch.tensor([-1]), call)


def test_optional_arguments_that_are_not_there() -> None:
    @og.guard("mask: optional[boolean[L]]\nrequire(mask is None or any_per_row(mask), id='alive')")
    def masked(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x if mask is None else x * mask

    program = compiled(masked)
    assert program(torch.ones(2)).sum() == 2
    assert program(torch.ones(2), torch.tensor([True, False])).sum() == 1
    with pytest.raises(og.GuardError, match="mask has no true value"):
        program(torch.ones(2), torch.tensor([False, False]))


def test_a_guard_that_is_gone_judges_nothing() -> None:
    guarded = og.guard("require(finite(x), id='gone')")(lambda x: x * 2)
    assert any(name.endswith("<lambda>") for name in run_time._judges)
    name = next(name for name in run_time._judges if name.endswith("<lambda>"))
    run_time._judge("nobody", 0, [torch.full((2,), NAN)], "", [])
    del guarded
    gc.collect()
    run_time._judge(name, 0, [torch.ones(1)], "", [])


def test_a_guard_that_fails_lets_the_program_run(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(og.guard("require(finite(x), id='fails')")(lambda x: x * 2))

    def fail(*_: Any) -> Any:
        raise ValueError("a fault of ours")

    program(torch.ones(2))
    monkeypatch.setattr(run_time, "describe_rule", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert program(torch.full((2,), NAN)).isnan().all()
    assert any(issubclass(warning.category, og.GuardInternalWarning) for warning in caught)


def test_a_block_that_switches_values_off_holds_while_the_program_runs() -> None:
    program = compiled(og.guard("require(finite(x))")(lambda x: x * 2))
    program(torch.ones(2))
    with og.policy(B="off"):
        assert program(torch.full((2,), NAN)).isnan().all()
    with pytest.raises(og.GuardError):
        program(torch.full((2,), NAN))


FIRST_IN_THREADS = """
import sys
import threading
import torch
from llm_op_guard.guard import run_time

sys.setswitchinterval(1e-6)
barrier, defined = threading.Barrier(8), []
work = lambda: (barrier.wait(), defined.append(run_time.operator()))
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(defined), len(set(map(id, defined))))
"""


def test_threads_that_make_the_first_guards_at_once_define_the_operator_once() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_IN_THREADS], capture_output=True, text=True, check=True)
    assert done.stdout == "8 1\n", done.stderr
