"""Guards on torch.nn.functional: put there, taken away, and never in the way of what else speaks of these functions."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

import llm_op_guard as og
from llm_op_guard.integrations import torch as integration

pytestmark = [
    pytest.mark.usefixtures("no_alarm"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:There is a performance drop"),
]

NAMES = ("scaled_dot_product_attention", *integration.CODE)
BUILTIN = F.scaled_dot_product_attention
SITES = [f"torch.nn.functional.{name}" for name in NAMES]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def q_and(length: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 2, 4, 8, generator=generator), torch.randn(1, 2, length, 8, generator=generator)


def guarded(call: Callable[[], Any]) -> bool:
    """Whether a guard stops the call; torch may stop it later."""
    try:
        call()
    except Exception as error:
        return isinstance(error, og.GuardError)
    return False


def bad_attention(function: Any = None) -> Any:
    q = torch.ones(1, 2, 4, 8)
    return (function or F.scaled_dot_product_attention)(q, q, torch.ones(1, 2, 7, 8))


BAD: dict[str, Callable[[], Any]] = {
    "scaled_dot_product_attention": bad_attention,
    "embedding": lambda: F.embedding(torch.zeros(2), torch.ones(3, 4)),
    "rms_norm": lambda: F.rms_norm(torch.ones(3, 4), (3,)),
    "layer_norm": lambda: F.layer_norm(torch.ones(3, 4), (3,)),
    "cross_entropy": lambda: F.cross_entropy(torch.ones(3, 4), torch.zeros(2).long()),
}


def snapshot() -> dict[str, Any]:
    found = dict(vars(F))
    for name, function in vars(F).items():
        if hasattr(function, "__code__"):
            found[f"{name}()"] = (function.__code__, function.__defaults__, dict(vars(function)))
    return found


# ---------------------------------------------------------------- there, and gone again


def test_all_five_are_guarded_and_restored() -> None:
    before = snapshot()
    report = og.install("torch")
    assert report.guarded == SITES and report.refused == []
    assert {name for name, call in BAD.items() if guarded(call)} == {*NAMES}
    assert og.uninstall("torch") == []
    after = snapshot()
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] or after[name] == before[name] for name in before)
    assert F.scaled_dot_product_attention is BUILTIN
    assert not any(guarded(call) for call in BAD.values())


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_biases_of_torch_are_no_masks_of_their_shape(bias: Any, heads: int) -> None:
    q, k = torch.randn(1, heads, 1, 16), torch.randn(1, heads, 9, 16)
    right = F.scaled_dot_product_attention(q, k, k, attn_mask=bias(1, 9))
    with og.installed("torch"):
        assert torch.equal(F.scaled_dot_product_attention(q, k, k, attn_mask=bias(1, 9)), right)


def test_twice_is_once() -> None:
    og.install("torch")
    stand_in = F.scaled_dot_product_attention
    assert og.install("torch").guarded == SITES
    assert F.scaled_dot_product_attention is stand_in
    og.uninstall()
    assert F.scaled_dot_product_attention is BUILTIN


def test_references_to_the_builtin() -> None:
    earlier = F.scaled_dot_product_attention
    with og.installed("torch"):
        later = F.scaled_dot_product_attention
        assert not guarded(lambda: bad_attention(earlier)), "taken before: not guarded"
        assert guarded(lambda: bad_attention(later))
        assert later == earlier and later in {earlier} and earlier in {later}
        assert later.__name__ == "scaled_dot_product_attention" and later.__doc__ == earlier.__doc__
        assert copy.deepcopy(later) is later
        assert pickle.loads(pickle.dumps(later)) is BUILTIN
        assert pickle.loads(pickle.dumps(earlier)) is BUILTIN
        assert pickle.loads(pickle.dumps(F.embedding)) is F.embedding
    assert not guarded(lambda: bad_attention(later)), "one plain call"
    with og.installed("torch"):
        assert not guarded(lambda: bad_attention(later)), "that one is gone"


def test_off_gives_the_builtin_back() -> None:
    before = snapshot()
    og.set_policy(A="off", B="off")
    assert og.install("torch").guarded == SITES
    assert snapshot() == before
    og.set_policy(A="raise")
    stand_in = F.scaled_dot_product_attention
    assert all(guarded(call) for call in BAD.values())
    og.disable()
    assert F.scaled_dot_product_attention is BUILTIN
    assert vars(stand_in)["_guarded_call"] is BUILTIN, "who holds it calls the builtin, and nothing besides"
    og.enable()
    assert F.scaled_dot_product_attention is stand_in
    assert guarded(bad_attention)


def test_what_somebody_put_there_later_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return "theirs"

    og.install("torch")
    stand_in = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    og.set_policy(A="off")
    og.set_policy(A="raise")
    assert F.scaled_dot_product_attention is theirs
    assert "steps aside" in caplog.text
    assert [refusal.site for refusal in og.uninstall()] == SITES[:1]
    assert F.scaled_dot_product_attention is theirs
    assert not guarded(lambda: bad_attention(stand_in))
    monkeypatch.undo()
    F.scaled_dot_product_attention = BUILTIN


def test_what_somebody_put_there_earlier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args: "theirs")
    monkeypatch.setattr(F, "layer_norm", lambda *args: "theirs")
    report = og.install("torch")
    assert [refusal.site for refusal in report.refused] == [SITES[0], "torch.nn.functional.layer_norm"]
    assert report.refused[0].reason == "not a builtin but function"
    assert F.scaled_dot_product_attention() == F.layer_norm() == "theirs"
    og.uninstall()


def test_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    report = og.install("torch")
    assert report.guarded == []
    assert {refusal.reason for refusal in report.refused} == {"its rules were compared with torch 2.13; this is 2.14.0"}
    assert F.scaled_dot_product_attention is BUILTIN


def test_other_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "handle_torch_function", lambda *args: None)
    reasons = {refusal.site: refusal.reason for refusal in og.install("torch").refused}
    assert reasons.keys() == {*SITES[1:]}


def test_torch_that_is_loaded_later() -> None:
    program = """
        import sys
        import llm_op_guard as og
        assert og.install("torch").guarded == [] and "torch" not in sys.modules
        import torch
        print(*og.status().guarded, *og.status().refused, sep=chr(10))
        try:
            torch.nn.functional.layer_norm(torch.ones(3, 4), (3,))
        except og.GuardError:
            print("guarded")
        torch.nn.Embedding(3, 4)(torch.tensor([2]))
    """
    process = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", textwrap.dedent(program)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == [*SITES, "guarded"]


def test_values_wait_for_a_policy() -> None:
    ids, table = torch.tensor([10]), torch.ones(10, 4)
    with og.installed("torch"):
        with pytest.raises(IndexError) as caught:
            F.embedding(ids, table)
        assert not isinstance(caught.value, og.GuardError)
        with og.policy(B="raise"):
            assert guarded(lambda: F.embedding(ids, table))
            assert guarded(lambda: F.cross_entropy(torch.ones(1, 4), torch.tensor([4])))


# ---------------------------------------------------------------- whoever asks which function it is


class Doubling(TorchFunctionMode):
    """Asks by identity, as `torch.overrides` says to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.scaled_dot_product_attention else result


class Counting(TorchFunctionMode):
    """Knows the functions from before there was a guard."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is BUILTIN:
            self.seen.append("attention")
        if func is F.embedding:
            self.seen.append("embedding")
        return func(*args, **(kwargs or {}))


def attend(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = F.scaled_dot_product_attention(q, q, v)
    return result


BIAS = causal_lower_right(2, 4)


def biased(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = F.scaled_dot_product_attention(q[:, :, :2], q, v, BIAS)
    return result


def in_a_mode(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with Doubling():
        return attend(q, v)


@pytest.mark.parametrize("call", [attend, biased, in_a_mode])
@pytest.mark.parametrize("fullgraph", [None, False, True], ids=["eager", "compiled", "whole graph"])
def test_who_asks_for_attention_by_identity(call: Any, fullgraph: bool | None) -> None:
    def result() -> torch.Tensor:
        torch._dynamo.reset()
        run = call if fullgraph is None else torch.compile(call, fullgraph=fullgraph, backend="eager")
        return run(*q_and())

    plain = result()
    with og.installed("torch"):
        assert torch.equal(result(), plain)
        stand_in = F.scaled_dot_product_attention
        assert stand_in is not BUILTIN
        if fullgraph is None:
            assert guarded(lambda: call(*q_and(7))) or call is biased
        assert F.scaled_dot_product_attention is stand_in, "put aside and put back"
    assert F.scaled_dot_product_attention is BUILTIN


def test_who_knows_the_builtin_from_before() -> None:
    with og.installed("torch"), Counting() as mode:
        attend(*q_and())
        F.embedding(torch.tensor([1]), torch.ones(3, 4))
    assert mode.seen == ["attention", "embedding"]


def test_nested_tensors() -> None:
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).unflatten(-1, [2, 4]).transpose(1, 2)
    plain = F.scaled_dot_product_attention(x, x, x).values()
    with og.installed("torch"):
        assert torch.equal(F.scaled_dot_product_attention(x, x, x).values(), plain)


class Own:
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func.__name__


def test_what_takes_the_functions_over() -> None:
    own: Any = Own()
    with og.installed("torch"):
        assert F.scaled_dot_product_attention(own, own, own) == "scaled_dot_product_attention"
        assert F.embedding(own, own) == "embedding"
        assert F.layer_norm(own, [1]) == "layer_norm"
        assert F.rms_norm(own, [1]) == "rms_norm"
        assert F.cross_entropy(own, own) == "cross_entropy"


def test_threads_that_put_it_aside() -> None:
    failures: list[Any] = []

    def work() -> None:
        try:
            for _ in range(50):
                assert torch.equal(biased(*q_and()), expected)
                attend(*q_and())
        except BaseException as error:
            failures.append(error)

    expected = biased(*q_and())
    with og.installed("torch"):
        stand_in = F.scaled_dot_product_attention
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert F.scaled_dot_product_attention is stand_in
        assert guarded(bad_attention)
    assert F.scaled_dot_product_attention is BUILTIN


def test_a_default_device_is_a_mode_too() -> None:
    with og.installed("torch"), torch.device("cpu"):
        attend(*q_and())
        assert guarded(bad_attention)


# ---------------------------------------------------------------- compilers, exporters, transforms

LABELS = torch.tensor([0, 2, 1])


def network(ids: torch.Tensor, table: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = F.layer_norm(F.rms_norm(F.embedding(ids, table), (8,)), (8,), torch.ones(8), torch.zeros(8))
    heads = x.view(1, -1, 2, 4).transpose(1, 2)
    x = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).reshape(-1, 8)
    return F.cross_entropy(x, labels)


class Network(torch.nn.Module):
    def forward(self, ids: torch.Tensor, table: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return network(ids, table, labels)


def arguments(length: int = 3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return (
        torch.arange(length) % 9,
        torch.randn(9, 8, generator=generator),
        torch.arange(length) % 8,
    )


def exported(strict: bool, dynamic: bool) -> Any:
    length = torch.export.Dim("length", min=2, max=64)
    shapes = ({0: length}, None, {0: length}) if dynamic else None
    program = torch.export.export(Network(), arguments(), dynamic_shapes=shapes, strict=strict)
    return [str(node.target) for node in program.graph.nodes], program.module()(*arguments())


def faked() -> Any:
    with FakeTensorMode() as mode:
        fake = network(*(mode.from_tensor(x) for x in arguments()))
    return fake.shape, fake.dtype


def autocast() -> Any:
    q, v = q_and()
    with torch.autocast("cpu", torch.bfloat16):
        return network(*arguments()), F.scaled_dot_product_attention(q, q.bfloat16(), v)


def gradients() -> Any:
    ids, table, labels = arguments()
    return torch.func.grad(lambda table: network(ids, table, labels))(table)


def backward() -> Any:
    ids, table, labels = arguments()
    table.requires_grad_()
    network(ids, table, labels).backward()
    return table.grad


def vmapped() -> Any:
    ids, table, labels = arguments()
    return torch.stack([ids, ids]), table, labels


EVERYWHERE: dict[str, Callable[[], Any]] = {
    "eager": lambda: network(*arguments()),
    "inference mode": lambda: torch.inference_mode()(network)(*arguments()),
    "backward": backward,
    "autocast": autocast,
    "vmap": lambda: torch.vmap(network, (0, None, None))(*vmapped()),
    "func.grad": gradients,
    "fake tensors": faked,
    "make_fx": lambda: make_fx(network)(*arguments()).code,
    "make_fx, symbolic": lambda: make_fx(network, tracing_mode="symbolic")(*arguments()).code,
    "symbolic_trace": lambda: torch.fx.symbolic_trace(lambda q: F.scaled_dot_product_attention(q, q, q)).code,
    "jit.trace": lambda: torch.jit.trace(network, arguments())(*arguments()),
    "jit.script": lambda: torch.jit.script(scripted())(*arguments()),
    "jit.script of modules": lambda: [
        torch.jit.script(torch.nn.Embedding(3, 4, _weight=torch.ones(3, 4)))(torch.tensor([1])),
        torch.jit.script(torch.nn.LayerNorm(4))(torch.ones(3, 4)),
        torch.jit.script(torch.nn.RMSNorm(4))(torch.ones(3, 4)),
        torch.jit.script(torch.nn.CrossEntropyLoss())(torch.ones(3, 4), LABELS),
    ],
    "export": lambda: exported(strict=False, dynamic=False),
    "export, dynamic": lambda: exported(strict=False, dynamic=True),
    "export, strict": lambda: exported(strict=True, dynamic=False),
    "export, strict, dynamic": lambda: exported(strict=True, dynamic=True),
    "compiled": lambda: torch.compile(network, fullgraph=True, backend="aot_eager")(*arguments()),
    "inductor": lambda: torch.compile(network, fullgraph=True)(*arguments()),
}


def scripted() -> Any:
    """A function of its own each time: what was scripted once is not looked at again."""

    def script(ids: torch.Tensor, table: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(F.rms_norm(F.embedding(ids, table), [8]), [8])
        x = F.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        return F.cross_entropy(x, labels)

    return script


def flat(value: Any) -> list[Any]:
    return [part for item in value for part in flat(item)] if isinstance(value, tuple | list) else [value]


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(flat(one), flat(other), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("where", EVERYWHERE)
def test_the_same_everywhere(where: str) -> None:
    plain = EVERYWHERE[where]()
    with og.policy(B="raise"), og.installed("torch"):
        assert_same(plain, EVERYWHERE[where]())
    torch._dynamo.reset()
    assert_same(plain, EVERYWHERE[where]())
    assert og.record.total == 0


@pytest.mark.parametrize("dynamic", [None, True])
def test_no_more_compilations_and_the_same_graph(dynamic: bool | None) -> None:
    def count() -> tuple[int, int, int]:
        torch._dynamo.reset()
        counters.clear()
        counter = CompileCounter()
        run = torch.compile(network, fullgraph=True, backend=counter, dynamic=dynamic)
        for length in (3, 5, 9, 4):
            run(*arguments(length))
        return counter.frame_count, counter.op_count, sum(counters["graph_break"].values())

    plain = count()
    with og.installed("torch"):
        assert count() == plain


def test_compiled_with_aot_and_other_sizes() -> None:
    def count() -> int:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        run = torch.compile(network, fullgraph=True, backend=counter)
        for length in (3, 5, 9, 4):
            run(*arguments(length))
        return counter.frame_count

    plain = count()
    with og.installed("torch"):
        assert count() <= plain


@pytest.mark.parametrize("strict", [False, True])
def test_sizes_that_nobody_knows(strict: bool) -> None:
    class Chosen(torch.nn.Module):
        def forward(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            keep = labels != 7
            x = F.layer_norm(scores[keep], (8,))
            return F.cross_entropy(x, labels[keep], reduction="sum")

    given = (torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 7, 2]))

    def run() -> Any:
        try:
            program = torch.export.export(Chosen(), given, strict=strict)
        except Exception as error:
            return type(error).__name__
        return program.module()(*given)

    plain = run()
    with og.policy(B="raise"), og.installed("torch"):
        assert_same(plain, run())
    assert og.record.total == 0


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_broken_call_in_a_compiled_program(name: str, fullgraph: bool) -> None:
    with og.installed("torch"):
        run = torch.compile(BAD[name], fullgraph=fullgraph, backend="eager")
        with pytest.raises((og.GuardError, torch._dynamo.exc.TorchRuntimeError)) as caught:
            run()
    assert f"contract     functional.contract:{name}" in str(caught.value)


def test_modules_are_guarded() -> None:
    with og.installed("torch"):
        attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).train()
        x = torch.randn(2, 3, 8)
        attention(x, x, x, need_weights=False)
        assert guarded(lambda: torch.nn.LayerNorm(4)(torch.ones(3, 5)))
        assert guarded(lambda: torch.nn.Embedding(4, 4)(torch.ones(3)))
        assert guarded(lambda: torch.nn.CrossEntropyLoss()(torch.ones(3, 4), torch.zeros(2).long()))
    assert isinstance(F.scaled_dot_product_attention, BuiltinFunctionType)


def test_both_libraries_together(tiny: Callable[..., Any]) -> None:
    model = tiny()
    ids = torch.tensor([[5, 9, 14, 33, 71, 3, 8]])
    plain = model(ids, labels=ids)
    with og.policy(B="raise"), og.installed("torch", "transformers"):
        both = model(ids, labels=ids)
        generated = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(plain.logits, both.logits) and torch.equal(plain.loss, both.loss)
    assert torch.equal(generated, model.generate(ids, max_new_tokens=3, do_sample=False))
    assert og.record.total == 0
