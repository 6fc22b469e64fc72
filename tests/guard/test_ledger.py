"""Where a tensor was last seen: what is said, what is not, and that nothing is kept alive for it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import llm_op_guard as og
from llm_op_guard.guard import ledger
from llm_op_guard.guard.violation import LastSeen

pytestmark = pytest.mark.usefixtures("no_alarm")


@og.guard("x: floating[N]")
def double(x: Any) -> Any:
    return x * 2


@og.guard("x: floating[N]; y: floating[N]")
def pair(x: Any, y: Any) -> Any:
    return x, y


@og.guard("x: floating[N]; returns: floating[N]")
def promised(x: Any) -> Any:
    return x + 1


@og.guard("x: floating[7]")
def strict(x: Any) -> Any:
    return x


@pytest.fixture(autouse=True)
def tracked() -> None:
    og.track()


def broken(call: Callable[[], Any]) -> og.Violation:
    with pytest.raises(og.GuardError) as caught:
        call()
    return caught.value.violations[0]


def seen(x: Any, operator: Callable[[Any], Any] = strict) -> str | None:
    """What is said of a tensor that breaks the rule of an operator."""
    found = broken(lambda: operator(x)).last_seen
    return None if found is None else str(found)


# ---------------------------------------------------------------- what is said


def test_a_result() -> None:
    assert seen(double(torch.ones(3))) == "last seen leaving double, 1 guarded call ago"


def test_a_result_that_was_judged() -> None:
    assert seen(promised(torch.ones(3))) == "last valid leaving promised, 1 guarded call ago"


def test_an_argument_that_kept_its_rules() -> None:
    x = torch.ones(3)
    double(x)
    double(torch.ones(3))
    assert seen(x) == "last valid entering double as x, 2 guarded calls ago"


def test_a_part_of_a_result() -> None:
    x, y = torch.ones(3), torch.ones(3)
    pair(x, y)
    assert seen(y) == "last seen leaving pair, 1 guarded call ago"


def test_arguments_have_their_names() -> None:
    @og.guard("x: floating[N]; y: floating[N]")
    def first(x: Any, y: Any) -> None: ...

    x, y = torch.ones(3), torch.ones(3)
    first(x, y=y)
    assert seen(y) == "last valid entering first as y, 1 guarded call ago"


def test_the_last_call_counts() -> None:
    x = double(torch.ones(3))
    assert seen(x) == "last seen leaving double, 1 guarded call ago"
    promised(x)
    assert seen(x) == "last valid entering promised as x, 1 guarded call ago"


def test_a_call_that_broke_its_contract_is_no_witness() -> None:
    x = double(torch.ones(3))
    for ago in range(1, 4):
        calls = "call" if ago == 1 else "calls"
        assert seen(x) == f"last seen leaving double, {ago} guarded {calls} ago"


def test_a_call_that_went_on_broken_is_no_witness() -> None:
    x = double(torch.ones(3))
    with og.policy(A="record"):
        # It returns x itself, which is seen there, and not valid.
        strict(x)
    assert seen(x) == "last seen leaving strict, 1 guarded call ago"
    with og.policy(A="record"):
        promised(torch.ones(3, dtype=torch.int64))
        kept = strict(x)
    assert seen(kept) == "last seen leaving strict, 1 guarded call ago"


def test_a_result_that_broke_its_promise_is_no_witness() -> None:
    @og.guard("x: floating[N]; returns: floating[2]")
    def breaking(x: Any) -> Any:
        return x + 1

    with og.policy(A="record"):
        x = breaking(torch.ones(3))
    assert seen(x) is None
    violation = broken(lambda: breaking(double(torch.ones(3))))
    assert violation.blames == "operator"
    assert violation.last_seen is None


def test_a_doubt_is_no_witness() -> None:
    @og.guard("x: floating[N]; require(N == 2, certain=False, id='two')")
    def doubting(x: Any) -> None: ...

    x = torch.ones(3)
    with pytest.warns(og.GuardWarning):
        doubting(x)
    assert seen(x) is None
    doubting(x)  # the doubt is not told again, and the call is counted
    double(x)
    assert seen(x) == "last valid entering double as x, 1 guarded call ago"
    doubting(x)
    assert seen(x) == "last valid entering double as x, 3 guarded calls ago"


def test_a_result_that_is_an_argument_still() -> None:
    @og.guard("x: floating[N]; returns: floating[2]")
    def same(x: Any) -> Any:
        return x

    found = broken(lambda: same(torch.ones(3))).last_seen
    assert found is not None and found.calls_ago == 0
    assert str(found) == "last valid entering same as x"


def test_lists_of_tensors_are_checked_and_noted() -> None:
    @og.guard("xs: list[floating[N]]; y: floating[N]; returns: floating[N]")
    def stacked(xs: Any, y: Any) -> Any:
        return y + 1

    y = torch.ones(3)
    made = stacked([torch.ones(3)], y)
    assert seen(made) == "last valid leaving stacked, 1 guarded call ago"
    assert seen(y) == "last valid entering stacked as y, 2 guarded calls ago"


def test_a_method_tells_its_class_and_layer() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, layer_idx: Any) -> None:
            super().__init__()
            self.layer_idx = layer_idx
            self.width = 3

        @og.guard("x: floating[N]; require(self.width == N, id='width')")
        def forward(self, x: Any) -> Any:
            return x * 2

    class Special(Layer): ...

    name = f"{test_a_method_tells_its_class_and_layer.__name__}.<locals>."
    for cls, idx, said in ((Layer, 4, ", layer 4"), (Special, 5, " of Special, layer 5"), (Layer, "x", "")):
        layer = cls(idx)
        x = torch.ones(3)
        made = layer(x)
        assert name not in str(seen(x))
        assert seen(x) == f"last valid entering Layer.forward as x{said}, 2 guarded calls ago"
        assert seen(made) == f"last seen leaving Layer.forward{said}, 3 guarded calls ago"
        del layer  # what is gone is not asked
        gc.collect()
        assert seen(made) == "last seen leaving Layer.forward, 4 guarded calls ago"


# ---------------------------------------------------------------- the same tensor, and views of it


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad])
def test_views(grad: Callable[[], Any]) -> None:
    with grad():
        x = double(torch.ones(2, requires_grad=True).repeat(2))
        said = "a view of what was last seen leaving double"
        for number, view in enumerate((x[1:], x.view(2, 2), x[1:][1:].t(), x.expand(3, 4), x.detach_()[:3]), 1):
            assert str(seen(view)).startswith(f"{said}, {number} guarded"), number


def test_the_tensor_may_be_gone() -> None:
    x = double(torch.ones(4))[1:]
    gc.collect()
    assert seen(x) == "a view of what was last seen leaving double, 1 guarded call ago"


def test_the_tensor_itself_is_told_of_rather_than_its_base() -> None:
    base = torch.ones(4)
    view = base[1:]

    @og.guard("x: floating[N]; y: floating[M]")
    def both(x: Any, y: Any) -> None: ...

    both(base, view)
    assert seen(view) == "last valid entering both as y, 1 guarded call ago"


def test_a_view_of_the_same_tensor_is_another_tensor() -> None:
    """Queries and keys are views of one projection: what was said of the one is no news of the other."""
    projection = torch.ones(8)
    query, key = projection[:4], projection[4:]
    double(query)
    assert seen(key) is None
    assert seen(query) is not None
    assert seen(query[:3]) is None  # it might as well be a view of the key


@og.guard("x: floating[N, M]")
def matrix(x: Any) -> None: ...


def test_a_view_that_leaves_nothing_out() -> None:
    """As heads are taken apart: `projection.view(…).transpose(1, 2)`."""
    heads = torch.ones(8).view(2, 4).t()
    matrix(heads)
    assert seen(heads) == "last valid entering matrix as x, 1 guarded call ago"
    assert seen(heads[1:]) == "a view of what was last valid entering matrix as x, 2 guarded calls ago"
    heads.add_(1)
    assert str(seen(heads.t()[:1])).endswith("3 guarded calls ago, and changed in place since")


@pytest.mark.parametrize(
    "partial",
    [
        lambda whole: whole.view(2, 4)[:, 1:],
        lambda whole: whole[:1].expand(2, 4),
        lambda whole: whole.as_strided((2, 4), (1, 1)),
    ],
    ids=["slice", "expanded", "overlapping"],
)
def test_a_view_that_leaves_something_out(partial: Callable[[Any], Any]) -> None:
    whole = torch.ones(8)
    view = partial(whole)
    matrix(view)
    assert seen(whole[5:]) is None
    assert seen(whole) is None
    assert seen(view) is not None


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.detach(),
        lambda x: x.data,
        lambda x: x.clone(),
        lambda x: x.to(torch.float64),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: x.detach()[1:],
    ],
    ids=["detach", "data", "clone", "to", "numpy", "view of detached"],
)
def test_another_tensor(other: Callable[[Any], Any]) -> None:
    x = double(torch.ones(4))
    assert seen(other(x)) is None


def test_a_new_tensor_at_the_old_address() -> None:
    reused = 0
    for _ in range(200):
        x = double(torch.ones(3))
        address = id(x), x.data_ptr()
        del x
        y = torch.ones(3)
        reused += id(y) == address[0]
        assert seen(y) is None
    assert reused  # else nothing was tested


def test_changed_in_place() -> None:
    x = double(torch.ones(3))
    view = x[:1]
    for changes in range(3):
        violation = broken(lambda: strict(x))
        assert violation.last_seen is not None and violation.last_seen.changes == changes
        assert str(violation.last_seen).endswith(", and changed in place since") == (changes > 0)
        view.add_(1)
    found = broken(lambda: strict(x[1:].t()[:1])).last_seen
    assert found is not None and found.is_view and found.changes == 3


def test_inference_mode_counts_no_changes() -> None:
    with torch.inference_mode():
        x = double(torch.ones(3))
        x.add_(1)
        violation = broken(lambda: strict(x))
        assert violation.last_seen is not None and violation.last_seen.changes is None
        assert str(violation.last_seen) == "last seen leaving double, 1 guarded call ago"
        assert seen(x[1:]) is None  # torch does not know there what it is a view of


def test_fewer_changes_than_before_are_none() -> None:
    x = torch.ones(3)
    x.add_(1)
    double(x)
    torch._C._autograd._unsafe_set_version_counter((x,), (0,))
    found = broken(lambda: strict(x)).last_seen
    assert found is not None and found.changes is None


# ---------------------------------------------------------------- as a message and as data


def test_the_message() -> None:
    x = double(torch.ones(3))
    with pytest.raises(og.GuardError) as caught:
        strict(x)
    lines = str(caught.value).splitlines()
    assert lines[:3] == [
        "strict: x.shape[0] = 3, expected 7",
        "  x: last seen leaving double, 1 guarded call ago",
        "",
    ]


def test_as_data() -> None:
    x = double(torch.ones(3))
    violation = broken(lambda: strict(x[:1]))
    expected = LastSeen("double", f"{__name__}.double", "leaving", False, None, None, None, 1, True, 0)
    assert violation.last_seen == expected
    assert violation.to_dict()["last_seen"] == json.loads(json.dumps(asdict(expected)))
    assert pickle.loads(pickle.dumps(violation)) == violation


def test_in_the_file(tmp_path: Path) -> None:
    og.record_to(tmp_path / "guards.jsonl")
    x = double(torch.ones(3))
    broken(lambda: strict(x))
    og.record_to(None)
    (line,) = map(json.loads, (tmp_path / "guards.jsonl").read_text().splitlines())
    assert line["diagnosis"]["last_seen"]["operator"] == "double"


def test_what_is_no_tensor() -> None:
    double(torch.ones(3))
    assert seen(7) is None
    assert seen(None) is None


# ---------------------------------------------------------------- weak, bounded, apart


def test_nothing_is_kept_alive() -> None:
    class Owner(torch.nn.Module):
        width = 3

        @og.guard("x: floating[N]; require(self.width == N, id='width')")
        def forward(self, x: Any) -> Any:
            return x * 2

    owner, x = Owner(), torch.ones(3)
    made = owner(x)
    gone = [weakref.ref(thing) for thing in (owner, x, x.untyped_storage(), made, made.untyped_storage())]
    assert len(ledger._state.trail.events) == 2
    gc.disable()  # without cycles either
    try:
        del owner, x, made
        assert [reference() for reference in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_it_is_bounded() -> None:
    x, kept = double(torch.ones(3)), torch.ones(3)
    for _ in range(ledger.EVENTS_KEPT // 2 - 1):
        double(kept)
    assert seen(x) is not None
    double(kept)
    assert seen(x) is None
    assert len(ledger._state.trail.events) == ledger.EVENTS_KEPT


def test_the_parts_of_a_result_are_bounded() -> None:
    @og.guard("n: int")
    def many(n: int) -> Any:
        return [torch.ones(3) for _ in range(n)]

    made = many(1000)
    assert seen(made[0]) is not None
    assert seen(made[-1]) is None


def test_threads() -> None:
    x = double(torch.ones(3))
    said: list[str | None] = []

    def work() -> None:
        said.append(seen(x))
        said.append(seen(double(torch.ones(3))))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert said == [None, "last seen leaving double, 1 guarded call ago"]
    assert seen(x) == "last seen leaving double, 1 guarded call ago"


def test_tasks() -> None:
    """Those of a loop share a thread: what is said is of the tensor, whichever task had it."""

    async def work(number: int) -> list[str | None]:
        x = double(torch.ones(3 + number))
        await asyncio.sleep(0)
        return [seen(x), seen(torch.ones(3 + number))]

    async def both() -> list[list[str | None]]:
        return await asyncio.gather(work(0), work(1))

    assert asyncio.run(both()) == [
        ["last seen leaving double, 2 guarded calls ago", None],
        ["last seen leaving double, 3 guarded calls ago", None],
    ]


def test_coroutines_and_generators() -> None:
    @og.guard("x: floating[N]")
    async def later(x: Any) -> Any:
        return x * 2

    @og.guard("x: floating[N]")
    def generated(x: Any) -> Any:
        yield x
        return x * 2

    assert seen(asyncio.run(later(torch.ones(3)))) == "last seen leaving later, 1 guarded call ago"

    def outer() -> Iterator[Any]:
        made = yield from generated(torch.ones(3))
        yield made

    *_, made = outer()
    assert seen(made) == "last seen leaving generated, 1 guarded call ago"


# ---------------------------------------------------------------- on and off


def test_off() -> None:
    og.track(on=False)
    x = double(torch.ones(3))
    assert seen(x) is None
    og.track()
    assert seen(x) is None
    assert len(ledger._state.trail.events) == 0


def test_on_again_changes_nothing() -> None:
    x = double(torch.ones(3))
    og.track()
    assert seen(x) is not None


def test_off_is_the_code_of_before() -> None:
    og.track(on=False)
    code = double.__code__
    og.track()
    assert double.__code__ is not code
    og.track(on=False)
    assert double.__code__ is code


def test_guards_that_are_off_see_nothing() -> None:
    og.disable()
    x = double(torch.ones(3))
    og.enable()
    assert seen(x) is None


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from llm_op_guard.api import forget_surroundings

    def made() -> Any:
        @og.guard("x: floating[N]")
        def operator(x: Any) -> Any:
            return x * 2

        return operator(torch.ones(3))

    for value, said in (("1", True), ("0", False), ("", False)):
        forget_surroundings()
        monkeypatch.setenv("LLM_OP_GUARD_TRACK", value)
        x = made()
        assert (seen(x) is not None) == said
    monkeypatch.setenv("LLM_OP_GUARD_TRACK", "1")
    og.track(on=False)  # the program has the last word
    assert seen(made()) is None
    forget_surroundings()
    monkeypatch.setenv("LLM_OP_GUARD_TRACK", "yes")
    with pytest.raises(og.PolicyError, match="LLM_OP_GUARD_TRACK='yes' cannot be understood; write 1 to track"):
        made()


# ---------------------------------------------------------------- where it stays out


class Watching(torch.Tensor):
    asked: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Watching.asked.append(str(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_subclasses_are_not_asked() -> None:
    @og.guard("x: any")
    def free(x: Any) -> Any:
        return x

    counts = []
    for on in (False, True):
        og.track(on=on)
        x = torch.ones(3).as_subclass(Watching)
        Watching.asked = []
        pair(x, x)
        with contextlib.suppress(og.GuardError):
            strict(x)
        counts.append(Watching.asked)
    assert counts[0] == counts[1] != []


def test_functorch() -> None:
    assert torch.vmap(double)(torch.ones(2, 3)).shape == (2, 3)
    x = double(torch.ones(3))
    with pytest.raises(og.GuardError):
        torch.vmap(strict)(x.repeat(2, 1))
    grad = torch.func.grad(lambda x: double(x).sum())(torch.ones(3))
    assert grad.tolist() == [2, 2, 2]


def test_sparse_and_meta() -> None:
    for x in (torch.ones(3).to_sparse(), torch.ones(3, device="meta")):
        assert seen(double(x)) == "last seen leaving double, 1 guarded call ago"


def test_jit_trace() -> None:
    traced = torch.jit.trace(double, (torch.ones(3),))
    assert traced(torch.ones(3)).tolist() == [2, 2, 2]


def test_what_cannot_be_noted_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError

    x = double(torch.ones(3))
    monkeypatch.setattr(ledger, "_seen", fail)
    made = double(torch.ones(3))
    monkeypatch.undo()
    assert seen(made) is None
    monkeypatch.setattr(ledger, "_said", fail)
    assert seen(x) is None


def test_compiled() -> None:
    torch._dynamo.reset()
    counts = []
    for on in (False, True):
        og.track(on=on)
        counter = CompileCounter()

        @torch.compile(backend=counter, fullgraph=True, dynamic=True)
        def program(x: Any) -> Any:
            first, _ = pair(double(x), x)
            return promised(first)

        for size in (3, 4, 5):
            made = program(torch.ones(size))
            assert made.tolist() == [3.0] * size
        counts.append((counter.frame_count, counter.op_count))
        assert len(ledger._state.trail.events) == 0
        assert seen(made) is None
    assert counts[0] == counts[1]
    torch._dynamo.reset()


def test_the_values_of_a_dict_that_is_returned() -> None:
    states = og.guard("x: floating[N]")(lambda x: {"key": x * 2, "value": x * 3})
    assert str(seen(states(torch.ones(3))["value"])).startswith("last seen leaving ")
