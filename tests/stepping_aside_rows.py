"""Where tensors and programs are not plain: what a guard does there, as data, with a call for each row."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import llm_op_guard as og

Tensor = torch.Tensor
Operator = Callable[..., Any]

CONTRACT = """
    q: T[B, L, D] @ dev
    w: T[D] @ dev
    require(D % 2 == 0, id='even')
    require(dense(w), id='dense')
    require(finite(q[:]), id='finite')
"""


def scale(q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Takes a `w` of one element, which its contract does not: what is let through computes."""
    return q * w


@og.guard(CONTRACT)
def guarded_scale(q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return q * w


def both(q: Any, w: Any) -> Any:
    """Computes nothing, for tensors that torch can do little with."""
    return q, w


@og.guard(CONTRACT)
def guarded_both(q: Any, w: Any) -> Any:
    return q, w


class Scale(torch.nn.Module):
    """Holds an operator."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, q: torch.Tensor, w: torch.Tensor) -> Any:
        return self.operator(q, w)


class WithWeight(torch.nn.Module):
    """Its operator finds `w` on the module."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(w)

    def forward(self, q: torch.Tensor) -> Any:
        return q * self.weight

    guarded = og.guard(CONTRACT.replace("w:", "self.weight:").replace("dense(w)", "dense(self.weight)"))(forward)


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Subclass(torch.Tensor):
    pass


class OfItsOwn(torch.Tensor):
    """Says itself what torch's functions do with it, as `torch.nn.attention.bias.CausalBias`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Watching(TorchDispatchMode):
    """Sees every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Overseeing(TorchFunctionMode):
    """Sees every function of torch that is called, reads of metadata left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in ("__get__", "stride"):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Row:
    """`call(operator, q, w)` calls the operator in some surroundings and returns what to compare."""

    where: str
    a: bool
    b: bool
    why: str
    call: Callable[[Operator, Tensor, Tensor], Any]
    plain: Operator = scale
    guarded: Operator = guarded_scale

    def line(self) -> str:
        said = ["checked" if applies else "does not apply" for applies in (self.a, self.b)]
        return f"| {self.where} | {said[0]} | {said[1]} | {self.why} |"


def table() -> str:
    """The rows as the page shows them."""
    return "\n".join(
        ["| where | class A | class B | why |", "| --- | --- | --- | --- |", *(row.line() for row in ROWS)]
    )


# ---------------------------------------------------------------- calls


def watched(f: Operator, q: Tensor, w: Tensor) -> Any:
    with Watching() as mode:
        return f(q, w), mode.seen


def overseen(f: Operator, q: Tensor, w: Tensor) -> Any:
    with Overseeing() as mode:
        return f(q, w), mode.seen


def fake(f: Operator, q: Tensor, w: Tensor) -> Any:
    mode = FakeTensorMode()
    with mode:
        result = f(mode.from_tensor(q), mode.from_tensor(w))
    return [*result.shape, result.dtype]


def exported(f: Operator, q: Tensor, w: Tensor, *, strict: bool, dynamic: bool) -> Any:
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    shapes = (sizes, {}) if dynamic else None
    program = torch.export.export(Scale(f), (q, w), strict=strict, dynamic_shapes=shapes)
    return str(program.graph), sorted(map(str, program.range_constraints.values()))


def export_row(*, strict: bool, dynamic: bool) -> Row:
    name = f"`torch.export`, {'strict' if strict else 'non-strict'}{', dynamic sizes' if dynamic else ''}"
    why = "tensors are fake, their metadata is right; nothing is left in the program"
    return Row(name, True, False, why, lambda f, q, w: exported(f, q, w, strict=strict, dynamic=dynamic))


def traced(mode: str) -> Callable[[Operator, Tensor, Tensor], Any]:
    return lambda f, q, w: make_fx(f, tracing_mode=mode)(q, w).code


def quantised(f: Operator, q: Tensor, w: Tensor) -> Any:
    q, w = (torch.quantize_per_tensor(x.nan_to_num(), 0.1, 0, torch.qint8) for x in (q, w))
    return [x.dequantize() for x in f(q, w)]


def distributed(f: Operator, q: Tensor, w: Tensor) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    return f(distribute_tensor(q, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Replicate()])).to_local()


def mixed_autocast(f: Operator, q: Tensor, w: Tensor) -> Any:
    with torch.autocast("cpu"):
        return f(q, w.bfloat16())


def inferred(f: Operator, q: Tensor, w: Tensor) -> Any:
    with torch.inference_mode():
        return f(q.clone(), w).clone()


def compiled(f: Operator, q: Tensor, w: Tensor, *, fullgraph: bool) -> Any:
    torch._dynamo.reset()
    return torch.compile(Scale(f), fullgraph=fullgraph, backend="eager")(q, w)


def checkpointed(f: Operator, q: Tensor, w: Tensor) -> Any:
    q = q.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(f, q, w, use_reentrant=False).sum().backward()
    return q.grad


def scripted(f: Operator, q: Tensor, w: Tensor) -> Any:
    return torch.jit.script(f)(q, w)


def jit_traced(f: Operator, q: Tensor, w: Tensor) -> Any:
    return torch.jit.trace(Scale(f), (q, w), check_trace=False)(q, w)


def parametrised(f: Operator, q: Tensor, w: Tensor) -> Any:
    module = WithWeight(w)
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
    return f(module, q)


def captured(f: Operator, q: Tensor, w: Tensor) -> Any:
    q, w, graph = q.cuda(), w.cuda(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = f(q, w)
    graph.replay()
    return result.cpu()


STAND_IN = "stand-ins have neither shape nor values"
WRAPPED = "the wrappers have the shape that the operator sees; their values are not to be read"
IDENTITY: dict[str, Any] = {"plain": both, "guarded": guarded_both}

ROWS = [
    Row("autograd", True, True, "a check computes nothing that is differentiated",
        lambda f, q, w: torch.autograd.grad(f(x := q.clone().requires_grad_(), w).sum(), x)),
    Row("inference mode", True, True, "a check makes no tensor that outlives it", inferred),
    Row("`torch.utils.checkpoint`", True, True, "the call that is repeated is checked again", checkpointed),
    Row("autocast", True, True, "floating dtypes that differ agree, see below", mixed_autocast),
    Row("`torch.vmap`", True, False, WRAPPED, lambda f, q, w: torch.vmap(lambda q: f(q, w))(torch.stack([q, q]))),
    Row("`torch.vmap` over a weight", True, False, "as above, for the tensor that is wrapped",
        lambda f, q, w: torch.vmap(f)(torch.stack([q, q]), torch.stack([w, w]))),
    Row("`torch.func.grad`", True, False, WRAPPED, lambda f, q, w: torch.func.grad(lambda q: f(q, w).sum())(q)),
    Row("`torch.func.jvp`", True, False, WRAPPED, lambda f, q, w: torch.func.jvp(lambda q: f(q, w), (q,), (q,))),
    Row("`torch.func.functionalize`", True, False, WRAPPED,
        lambda f, q, w: torch.func.functionalize(lambda q: f(q, w))(q)),
    Row("`torch.fx.symbolic_trace`", False, False, STAND_IN,
        lambda f, q, w: torch.fx.symbolic_trace(lambda q: f(q, w)).code),
    Row("`make_fx`, real", True, False, "what traces sees every operation, and must not see ours", traced("real")),
    Row("`make_fx`, fake", True, False, "fake tensors have no values", traced("fake")),
    Row("`make_fx`, symbolic", True, False, "fake tensors have no values, sizes are symbols with a hint",
        traced("symbolic")),
    Row("a `TorchDispatchMode`", True, False, "what watches operations must not see ours", watched),
    Row("a `TorchFunctionMode`", True, True, "it sees that metadata is read, and no operation of ours", overseen),
    Row("fake tensors", True, False, "they have no values", fake),
    *(export_row(strict=strict, dynamic=dynamic) for strict in (False, True) for dynamic in (False, True)),
    Row("`torch.jit.script`", False, False, "it compiles the source of the function, which the guard is not in",
        scripted),
    Row("`torch.jit.trace`", False, False, "sizes are tensors there, and a test of one would be warned of", jit_traced),
    Row("`torch.compile`", True, True, "metadata is judged while Dynamo traces, values when the program runs",
        lambda f, q, w: compiled(f, q, w, fullgraph=False)),
    Row("`torch.compile(fullgraph=True)`", True, True, "as above; the error about metadata comes while Dynamo traces",
        lambda f, q, w: compiled(f, q, w, fullgraph=True)),
    Row("CUDA-graph capture", True, False,
        "reading would wait for the device; what can be told late is judged at each replay (values.md)", captured),
    Row("DTensor", True, False, "shape, dtype and device are those of the whole tensor; values are on all ranks",
        distributed),
    Row("tensor subclasses", True, False, "what their operations mean is their own business",
        lambda f, q, w: f(q.as_subclass(Subclass), w).as_subclass(torch.Tensor)),
    Row("tensor subclasses with a `__torch_function__` of their own", False, False,
        "they say themselves what torch's functions mean, and what their shape is of (`CausalBias`)",
        lambda f, q, w: f(q.as_subclass(OfItsOwn), w).as_subclass(torch.Tensor)),
    Row("meta tensors", True, False, "they have no values",
        lambda f, q, w: [*f(q.to("meta"), w.to("meta")).shape]),
    Row("sparse tensors, COO", True, False, "they have no strides, so rules about these do not apply either",
        lambda f, q, w: [x.to_dense() for x in f(q.to_sparse(), w)], **IDENTITY),
    Row("sparse tensors, CSR", True, False, "as above",
        lambda f, q, w: [x.to_dense() for x in f(q.to_sparse_csr(), w)], **IDENTITY),
    Row("MKL-DNN tensors", True, False, "as above",
        lambda f, q, w: [x.to_dense() if x.is_mkldnn else x for x in f(q.to_mkldnn(), w)], **IDENTITY),
    Row("nested tensors, jagged", False, False, "one shape is not what they have",
        lambda f, q, w: f(torch.nested.nested_tensor([*q], layout=torch.jagged), w).values()),
    Row("nested tensors, strided", False, False, "as above",
        lambda f, q, w: f(torch.nested.nested_tensor([*q]), w)[0].to_padded_tensor(0), **IDENTITY),
    Row("quantised tensors", False, False, "their dtype does not say what their values are", quantised, **IDENTITY),
    Row("uninitialised parameters", False, False, "they have no shape yet",
        lambda f, q, w: f(q, torch.nn.UninitializedParameter())[0], **IDENTITY),
    Row("parametrised modules", False, True, "the attribute is a property there, and properties are never called; "
        "rules that do not read it are checked", parametrised, WithWeight.forward, WithWeight.guarded),
    Row("modules wrapped by `torch.compile`, as arguments", False, True, "what they pass on is read by code of theirs; "
        "rules that do not read it are checked",
        lambda f, q, w: f(torch.compile(WithWeight(w), backend="eager"), q), WithWeight.forward, WithWeight.guarded),
    Row("conjugated views", True, True, "they are read as what they stand for",
        lambda f, q, w: torch.view_as_real(f(torch.complex(q, q).conj(), torch.complex(w, w)).resolve_conj())),
    Row("negated views", True, True, "as above", lambda f, q, w: f(q._neg_view(), w)),
    Row("`copy.deepcopy` of a module", True, True, "its function is the same, guard and all",
        lambda f, q, w: copy.deepcopy(Scale(f))(q, w)),
    Row("pickled modules", True, True, "as above", lambda f, q, w: pickle.loads(pickle.dumps(Scale(f)))(q, w)),
]  # fmt: skip
