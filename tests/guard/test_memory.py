"""`remember` and `recall`: facts about objects from one call to the next, weakly held, and forgotten when in doubt."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.guard import memory
from llm_op_guard.guard.interpret import InterpretedCheck
from llm_op_guard.guard.reading import NotApplicable


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    memory.forget_all()
    memory._distrusted.clear()
    yield
    memory._distrusted.clear()


class Wrapper:
    """What FlashInfer's wrappers are like: `plan` says what `run` is for."""

    calls = 0


@og.guard("""
    remember(self, rows=last(indptr), heads=heads)
""")
def plan(self: Any, indptr: torch.Tensor, heads: Any, fails: bool = False) -> None:
    if fails:
        raise RuntimeError("out of memory")


@og.guard("""
    q: floating[N, H, D]
    require(N == recall(self, "rows"), id="planned_rows", hint="plan() was made for another batch")
    require(H == recall(self, "heads"), id="planned_heads")
""")
def run(self: Any, q: torch.Tensor) -> torch.Tensor:
    return q


INDPTR = torch.tensor([0, 2, 3])
Q = torch.ones(3, 2, 4)


def test_a_fact_is_recalled() -> None:
    wrapper = Wrapper()
    plan(wrapper, INDPTR, 2)
    assert run(wrapper, Q) is Q
    with pytest.raises(og.GuardError) as caught:
        run(wrapper, torch.ones(4, 3, 4))
    assert [v.rule_id for v in caught.value.violations] == ["planned_rows", "planned_heads"]
    first = caught.value.violations[0]
    assert (first.observed, first.expected) == ("N = 4, recall(self, 'rows') = 3", "N == recall(self, 'rows')")
    assert (first.cost_class, first.hint) == ("A", "plan() was made for another batch")


def test_later_facts_replace_earlier_ones() -> None:
    wrapper = Wrapper()
    plan(wrapper, INDPTR, 2)
    plan(wrapper, torch.tensor([0, 4]), 3)
    run(wrapper, torch.ones(4, 3, 4))
    with pytest.raises(og.GuardError):
        run(wrapper, Q)


def test_nothing_remembered_is_no_alarm() -> None:
    planned, other = Wrapper(), Wrapper()
    plan(planned, INDPTR, 2)
    run(other, torch.ones(9, 9, 9))


@pytest.mark.parametrize("owner", [None, 3, "text", [1], {"a": 1}, (1,), object()])
def test_what_cannot_be_referred_to_weakly_has_no_facts(owner: Any) -> None:
    plan(owner, INDPTR, 2)
    run(owner, torch.ones(9, 9, 9))


def test_objects_are_told_apart_by_identity_and_none_of_their_code_runs() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise AssertionError

        def __hash__(self) -> int:
            raise AssertionError

        def __bool__(self) -> bool:
            raise AssertionError

    one, other = Odd(), Odd()
    plan(one, INDPTR, 2)
    run(other, torch.ones(9, 9, 9))
    with pytest.raises(og.GuardError):
        run(one, torch.ones(9, 9, 9))


def test_objects_and_tensors_are_not_kept_alive() -> None:
    wrapper = Wrapper()
    indptr = INDPTR.clone()
    plan(wrapper, indptr, 2)
    gone, tensor = weakref.ref(wrapper), weakref.ref(indptr)
    key = id(wrapper)
    assert key in memory._entries
    del wrapper, indptr
    gc.collect()
    assert gone() is None and tensor() is None
    assert key not in memory._entries


def test_an_object_at_the_address_of_another_has_none_of_its_facts() -> None:
    wrapper = Wrapper()
    memory.remember(wrapper, ("rows",), {"rows": 3})
    memory._entries[id(other := Wrapper())] = memory._entries[id(wrapper)]
    with pytest.raises(NotApplicable):
        memory.recall(other, "rows")
    assert memory.identity(other) != memory.identity(wrapper)


@pytest.mark.parametrize("value", [torch.ones(2), Wrapper(), {"a": 1}, None, ("a", Wrapper())])
def test_only_plain_values_are_kept(value: Any) -> None:
    wrapper = Wrapper()
    plan(wrapper, INDPTR, 2)
    plan(wrapper, INDPTR, value)
    run(wrapper, torch.ones(3, 9, 4))  # the heads of before are no longer known
    with pytest.raises(NotApplicable):
        memory.recall(wrapper, "heads")


@pytest.mark.parametrize(
    "value", [1, 2.5, True, "text", (1, (2, "a")), torch.Size([1, 2]), torch.float16, torch.device("cpu")]
)
def test_plain_values(value: Any) -> None:
    wrapper = Wrapper()
    memory.remember(wrapper, ("fact",), {"fact": value})
    assert memory.recall(wrapper, "fact") == value


# ---------------------------------------------------------------- when in doubt


def test_what_does_not_apply_is_forgotten() -> None:
    wrapper = Wrapper()
    plan(wrapper, INDPTR, 2)
    plan(wrapper, torch.tensor([], dtype=torch.int64), 2)  # has no last element
    run(wrapper, torch.ones(9, 2, 4))
    with pytest.raises(og.GuardError):
        run(wrapper, torch.ones(9, 3, 4))


def test_a_call_that_fails_leaves_nothing_to_recall() -> None:
    wrapper = Wrapper()
    plan(wrapper, INDPTR, 2)
    with pytest.raises(RuntimeError):
        plan(wrapper, INDPTR, 2, fails=True)
    run(wrapper, torch.ones(9, 9, 4))


def test_a_broken_call_that_goes_on_leaves_nothing_to_recall() -> None:
    @og.guard("""
        require(heads > 0, id="some")
        remember(self, rows=last(indptr), heads=heads)
    """)
    def careful_plan(self: Any, indptr: torch.Tensor, heads: int) -> None:
        pass

    wrapper = Wrapper()
    careful_plan(wrapper, INDPTR, 2)
    with pytest.raises(og.GuardError):
        careful_plan(wrapper, INDPTR, 0)
    with pytest.raises(og.GuardError):  # the operator did not run: what was planned is planned
        run(wrapper, torch.ones(9, 9, 4))
    with og.policy(A="record"):
        careful_plan(wrapper, INDPTR, 2)
        careful_plan(wrapper, INDPTR, 0)
        assert og.record.total
    run(wrapper, torch.ones(9, 9, 4))


def test_after_a_change_of_policy_nothing_is_known() -> None:
    wrapper = Wrapper()
    plan(wrapper, INDPTR, 2)
    og.disable()
    try:
        plan(wrapper, torch.tensor([0, 9]), 9)  # unseen
    finally:
        og.enable()
    run(wrapper, torch.ones(9, 9, 4))


def test_facts_that_cost_a_look_at_values_are_kept_where_those_are_looked_at() -> None:
    wrapper = Wrapper()
    og.set_policy(B="off")
    try:
        plan(wrapper, INDPTR, 2)
        run(wrapper, torch.ones(9, 9, 4))  # one statement: its facts come together
    finally:
        og.set_policy(B="raise")
    plan(wrapper, INDPTR, 2)
    with pytest.raises(og.GuardError):
        run(wrapper, torch.ones(9, 2, 4))


@pytest.mark.parametrize("spelling", ["remember(self, rows=n)", "xs: list[int]\nremember(self, rows=n)"])
def test_of_calls_that_overlap_nobody_knows_the_last(spelling: str) -> None:
    class Planner:
        @og.guard(spelling)
        async def plan(self, n: int, wait: asyncio.Event | None = None, xs: Any = ()) -> None:
            if wait is not None:
                await wait.wait()

        @og.guard(spelling)
        def nested(self, n: int, xs: Any = ()) -> None:
            if n:
                self.nested(n - 1)

        @og.guard("require(n == recall(self, 'rows'), id='as_planned')")
        def run(self, n: int) -> None: ...

    async def overlap() -> None:
        planner, event = Planner(), asyncio.Event()
        first = asyncio.create_task(planner.plan(3, event))
        await asyncio.sleep(0)
        await planner.plan(5)
        event.set()
        await first
        planner.run(3)
        planner.run(5)
        await planner.plan(4)
        with pytest.raises(og.GuardError, match="as_planned"):
            planner.run(5)

    asyncio.run(overlap())
    planner = Planner()
    planner.nested(3)
    planner.run(0)
    planner.run(3)


def test_a_call_that_went_through_a_change_of_policy_remembers_nothing() -> None:
    @og.guard("remember(self, rows=n)")
    def switching(self: Any, n: int) -> None:
        og.disable()
        self.n = n + 1
        og.enable()

    wrapper = Wrapper()
    switching(wrapper, 3)
    with pytest.raises(NotApplicable):
        memory.recall(wrapper, "rows")


# ---------------------------------------------------------------- the rest of the language


def test_branches_results_and_identity() -> None:
    @og.guard("""
        if fill:
            remember(cache, owner=identity(self))
        remember(result, of=identity(self), length=len(values))
    """)
    def forward(self: Any, cache: Any, values: list[int], fill: bool) -> Any:
        return Wrapper()

    @og.guard("""
        require(recall(cache, "owner") == identity(self), id="cache_owner", certain=False,
                hint="this cache was filled by another model")
    """)
    def decode(self: Any, cache: Any) -> None:
        pass

    one, other, cache = Wrapper(), Wrapper(), Wrapper()
    result = forward(one, cache, [1, 2], fill=False)
    assert memory.recall(result, "of") == memory.identity(one) and memory.recall(result, "length") == 2
    decode(other, cache)
    forward(one, cache, [], fill=True)
    decode(one, cache)
    with pytest.warns(og.GuardWarning, match=r"recall\(cache, 'owner'\) = Wrapper \d+, identity\(self\) = Wrapper \d+"):
        decode(other, cache)


def test_what_is_remembered_is_what_is_after_the_call() -> None:
    @og.guard("""
        before = self.calls
        remember(self, before=before, after=self.calls)
    """)
    def call(self: Any) -> None:
        self.calls += 1

    wrapper = Wrapper()
    call(wrapper)
    assert (memory.recall(wrapper, "before"), memory.recall(wrapper, "after")) == (0, 1)


def test_a_fact_in_a_name_and_in_a_hint() -> None:
    @og.guard("""
        x: floating[N]
        rows = recall(self, "rows")
        require(N <= rows * 2, id="twice", hint=f"planned for {recall(self, 'rows')} rows")
        ensure(rows > 2, id="more_than_two")
        remember(self, rows=N)
    """)
    def use(self: Any, x: torch.Tensor) -> None:
        pass

    wrapper = Wrapper()
    use(wrapper, torch.ones(3))
    use(wrapper, torch.ones(6))
    with pytest.raises(og.GuardError, match="planned for 6 rows"):
        use(wrapper, torch.ones(13))
    use(wrapper, torch.ones(2))
    with pytest.raises(og.GuardError, match="more_than_two"):
        use(wrapper, torch.ones(2))


def test_with_lists() -> None:
    @og.guard("""
        xs: list[floating[N]]
        require(N == recall(self, "rows"), id="same_rows")
        remember(self, rows=N, first=xs[0].shape[0])
    """)
    def use(self: Any, xs: list[torch.Tensor]) -> None:
        if len(xs) > 2:
            raise RuntimeError

    wrapper = Wrapper()
    use(wrapper, [torch.ones(3)])
    assert memory.recall(wrapper, "first") == 3
    use(wrapper, [torch.ones(3), torch.ones(3)])
    with pytest.raises(og.GuardError, match="same_rows"):
        use(wrapper, [torch.ones(4)])
    with pytest.raises(RuntimeError):
        use(wrapper, [torch.ones(3)] * 3)
    use(wrapper, [torch.ones(4)])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("remember(x)", "written as remember(owner, name=value, …): what is kept of an argument, by name"),
        ("remember(rows=1)", "written as remember(owner, name=value, …): what is kept of an argument, by name"),
        ("remember(x + 1, rows=1)", "written as remember(owner, name=value, …): what is kept of an argument, by name"),
        ("remember(x, **y)", "each fact has a name of its own: remember(owner, rows=…, heads=…)"),
        ("remember(z, rows=1)", "'z' is not a parameter of f"),
        ("n = x.cache\nremember(n, rows=1)", "remember takes a parameter, or what can be read from one; 'n' is a name"),
        ("require(recall(x, 3) == 1)", "recall takes a text here, such as 'rows'"),
        ("require(recall(x, y) == 1)", "recall takes a text here, such as 'rows'"),
        ("require(recall(x + 1, 'rows') == 1)", "recall takes a parameter or what can be read from one"),
        ("ensure(recall(x, 'rows') == 1)", "after the call nothing of before is recalled: name it first, before = "
         "recall(…)"),
        ("for v in (x, y):\n    remember(v, rows=1)", "a loop remembers nothing: remember stands outside"),
        (
            "for v in x:\n    remember(v, rows=1)",
            "a loop over a sequence of the call holds require, ensure and if; it remembers nothing: remember stands "
            "outside",
        ),
        ("remember = 3", "'remember' has a meaning in the language; choose another name"),
        ("remembr(x, rows=1)", "unknown statement 'remembr'; did you mean 'remember'?"),
    ],
)  # fmt: skip
def test_refused(body: str, problem: str) -> None:
    with pytest.raises(og.ContractError) as caught:
        parse_body(body, "f", ("x", "y"))
    assert caught.value.problem == problem


def test_the_check_keeps_what_the_definition_says() -> None:
    body = """
        x: floating[N, D] | floating[N]
        middle = D / 2
        if flag:
            remember(self, n=N, d=D, middle=middle, sum=x.shape[0] + 1, all=x.shape, kind=x.dtype)
        else:
            remember(self, flag=flag, last=last(x), div=4 / N)
        remember(self.inner, n=N)
    """
    contract = parse_body(body, "f", ("self", "x", "flag"))
    guarded: Callable[..., None] = og.guard(body)(lambda self, x, flag: None)
    check = InterpretedCheck(
        contract,
        contract.parameters,
        frozenset({"A", "B"}),
        failed=lambda _: None,
        failed_after=lambda _: None,
        tally=lambda: None,
        jit_state=lambda: None,
        notes=(lambda _: None, lambda *_: None),
    )
    for x in (torch.ones(2, 4), torch.ones(2, 3), torch.ones(4), torch.ones(0), torch.ones(3)):
        for flag in (True, False, None):
            one, other = Wrapper(), Wrapper()
            one.inner, other.inner = Wrapper(), Wrapper()  # type: ignore[attr-defined]
            with contextlib.suppress(og.GuardError):
                guarded(one, x, flag)
            check.after(None, check.before(other, x, flag))
            for path in ("self", "inner"):
                mine, its = (owner if path == "self" else owner.inner for owner in (one, other))  # type: ignore[attr-defined]
                assert facts_of(mine) == facts_of(its)


def facts_of(owner: object) -> dict[str, Any]:
    return memory._entries[id(owner)].facts if id(owner) in memory._entries else {}


# ---------------------------------------------------------------- threads, compiled programs


def test_threads() -> None:
    wrappers = [Wrapper() for _ in range(4)]
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            for turn in range(50):
                rows = (number + turn) % 7 + 1
                own, shared = Wrapper(), wrappers[turn % 4]
                plan(own, torch.tensor([0, rows]), 2)
                run(own, torch.ones(rows, 2, 4))
                plan(shared, INDPTR, 2)
                memory.identity(shared)
                run(shared, Q)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_two_threads_give_one_object_one_identity() -> None:
    for _ in range(20):
        owner, found, barrier = Wrapper(), set(), threading.Barrier(4)

        def name(owner: Wrapper = owner, found: set[Any] = found, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            found.add(memory.identity(owner))

        threads = [threading.Thread(target=name) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 1


def test_compiled_programs_change_nothing_and_are_not_relied_upon() -> None:
    wrapper = Wrapper()
    plan(wrapper, INDPTR, 2)
    compiled_run = torch.compile(run, fullgraph=True, backend="eager")
    compiled_run(wrapper, torch.ones(9, 9, 4))  # rules that recall step aside
    with pytest.raises(og.GuardError):
        run(wrapper, torch.ones(9, 2, 4))
    compiled_plan = torch.compile(plan, fullgraph=True, backend="eager")
    compiled_plan(wrapper, torch.tensor([0, 9]), 2)
    run(wrapper, torch.ones(9, 2, 4))  # planned for 9 rows by a program that the guard did not see
    torch.compiler.reset()


def test_an_object_of_which_the_class_is_changed_stays_itself() -> None:
    """As `fully_shard` changes that of a model."""

    class Model: ...

    class Sharded(Model): ...

    model = Model()
    before = memory.identity(model)
    model.__class__ = Sharded
    assert memory.identity(model) == before
    assert str(before).startswith("Model ")
