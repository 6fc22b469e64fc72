"""`og.guard` on every kind of callable: what is checked, what stays as it was, what is refused."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import operator as operators
import pickle
import re
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import llm_op_guard as og

POSITIVE = "require(n > 0, id='positive')"
MATRIX = "x: floating[B, D]"
GOOD, BAD = torch.ones(2, 3), torch.ones(2)


def refuses(call: Any, *args: Any, **kwargs: Any) -> None:
    """The guard refuses the call, and when the policy is off it is not there."""
    with pytest.raises(og.GuardError):
        call(*args, **kwargs)
    with og.policy(A="off", B="off"):
        try:
            call(*args, **kwargs)
        except og.GuardError:
            pytest.fail("checked though the policy is off")
        except Exception:  # what the unguarded thing makes of it is its own business
            return


# ---------------------------------------------------------------- functions


class Engine:
    size = 4

    @og.guard(POSITIVE)
    @staticmethod
    def above_static(n: int) -> int:
        return n

    @staticmethod
    @og.guard(POSITIVE)
    def below_static(n: int) -> int:
        return n

    @og.guard(POSITIVE)
    @classmethod
    def above_class(cls, n: int) -> int:
        """A class method."""
        return n + cls.size

    @classmethod
    @og.guard(POSITIVE)
    def below_class(cls, n: int) -> int:
        return n + cls.size

    @og.guard("require(n < self.size, id='fits')")
    def method(self, n: int) -> int:
        return n * self.size

    def bare(self, n: int) -> int:
        return n * self.size

    @property
    @og.guard("require(self.size > 0)")
    def half(self) -> int:
        return self.size // 2


@pytest.mark.parametrize("name", ["above_static", "below_static", "above_class", "below_class"])
def test_static_and_class_methods(name: str) -> None:
    kind = staticmethod if name.endswith("static") else classmethod
    assert type(vars(Engine)[name]) is kind
    for owner in (Engine, Engine()):
        call = getattr(owner, name)
        assert call(2) in (2, 6)
        refuses(call, 0)
        assert call.__name__ == name
        assert list(inspect.signature(call).parameters) == ["n"]
        assert inspect.ismethod(call) is (kind is classmethod)
        assert "return n" in inspect.getsource(call)
        assert pickle.loads(pickle.dumps(call)) == call
    assert Engine.above_class.__doc__ == "A class method."


def test_methods_and_what_computes_a_property() -> None:
    assert Engine().method(2) == 8
    refuses(Engine().method, 4)
    assert Engine().half == 2
    broken = Engine()
    broken.size = 0
    with pytest.raises(og.GuardError):
        _ = broken.half


def test_a_bound_method_guards_for_its_object_only() -> None:
    engine = Engine()
    engine.size = 2
    guarded = og.guard("require(n < self.size, id='fits')")(engine.bare)
    assert guarded(1) == 2
    refuses(guarded, 3)
    assert inspect.ismethod(guarded) and guarded.__self__ is engine
    assert engine.bare(3) == 6 and Engine().bare(9) == 36
    assert guarded.__qualname__ == "Engine.bare"


def test_generator_functions_are_checked_at_the_first_next() -> None:
    @og.guard(POSITIVE)
    def counting(n: int) -> Any:
        yield from range(n)

    assert inspect.isgeneratorfunction(counting)
    assert list(counting(2)) == [0, 1]
    refused = counting(0)
    with pytest.raises(og.GuardError):
        next(refused)


def test_async_generator_functions_are_checked_at_the_first_anext() -> None:
    @og.guard(POSITIVE)
    async def counting(n: int) -> Any:
        for number in range(n):
            yield number

    async def all_of(n: int) -> list[int]:
        return [number async for number in counting(n)]

    assert inspect.isasyncgenfunction(counting)
    assert asyncio.run(all_of(2)) == [0, 1]
    with pytest.raises(og.GuardError):
        asyncio.run(all_of(0))
    with pytest.raises(TypeError, match="has no result: take the rules about `result` out"):

        @og.guard("returns: int")
        async def promising() -> Any:
            yield 1


def traced(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    wrapper.note = "kept"  # type: ignore[attr-defined]
    return wrapper


@og.guard(POSITIVE)
@traced
def decorated(n: int, *rest: int, scale: int = 1) -> int:
    """Decorated."""
    return n * scale


def test_functions_made_by_wraps() -> None:
    assert decorated(2, scale=3) == 6 and decorated(n=2) == 2
    refuses(decorated, 0)
    refuses(decorated, n=0)
    assert isinstance(decorated, FunctionType)
    assert str(inspect.signature(decorated)) == "(n: 'int', *rest: 'int', scale: 'int' = 1) -> 'int'"
    assert (decorated.__doc__, decorated.note) == ("Decorated.", "kept")
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert "def decorated" in inspect.getsource(decorated)


def test_an_async_function_made_by_wraps() -> None:
    def logged(function: Any) -> Any:
        @functools.wraps(function)
        async def wrapper(*args: Any) -> Any:
            return await function(*args)

        return wrapper

    @og.guard(POSITIVE)
    @logged
    async def operator(n: int) -> int:
        return n

    assert inspect.iscoroutinefunction(operator)
    assert asyncio.run(operator(2)) == 2
    with pytest.raises(og.GuardError):
        asyncio.run(operator(0))


def test_what_a_decorator_gives_is_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    def with_pool(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args, "pool")

        return wrapper

    @og.guard(POSITIVE)
    @with_pool
    def operator(n: int, pool: Any) -> Any:
        return pool

    assert [operator(0), operator(0)] == ["pool", "pool"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "a call of operator does not fit the parameters" in said and "'pool'" in said


def test_lru_cache() -> None:
    @og.guard(POSITIVE)
    @functools.lru_cache(maxsize=8)
    def operator(n: int) -> int:
        return n + 1

    assert [operator(1), operator(1)] == [2, 2]
    assert operator.cache_info().hits == 1
    assert operator.cache_parameters() == {"maxsize": 8, "typed": False}
    operator.cache_clear()
    assert operator.cache_info().currsize == 0
    refuses(operator, 0)
    assert list(inspect.signature(operator).parameters) == ["n"]


def test_partial() -> None:
    def scaled(n: int, scale: int = 1) -> int:
        """Scale.

        Contract:
            require(n * scale > 0, id='positive')
        """
        return n * scale

    half = functools.partial(scaled, scale=2)
    half.note = "kept"  # type: ignore[attr-defined]
    guarded = og.guard(half)
    assert isinstance(guarded, functools.partial) and guarded.note == "kept"
    assert inspect.signature(guarded) == inspect.signature(half)
    assert guarded(2) == 4 and half(0) == 0
    refuses(guarded, 0)
    refuses(guarded, 1, scale=-1)


def test_torch_compiled_functions() -> None:
    torch.compiler.reset()

    def double(x: Any) -> Any:
        return x * 2

    guarded = og.guard(MATRIX)(torch.compile(double, backend="eager"))
    assert torch.equal(guarded(GOOD), GOOD * 2)
    refuses(guarded, BAD)
    assert guarded.__name__ == "double"


# ---------------------------------------------------------------- modules


@og.guard
class Norm(nn.Module):
    """A layer.

    Contract:
        x: floating[B, D]
        require(D == self.width, id='width')
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        return x * self.weight


class Inherits(Norm):
    pass


class Overrides(Norm):
    def forward(self, x: Any) -> Any:
        return super().forward(x) + 1


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Any) -> Any:
        return x * self.weight


def test_module_class() -> None:
    assert isinstance(Norm, type) and Norm.__qualname__ == "Norm" and Norm(3).forward.__name__ == "forward"
    for cls in (Norm, Inherits, Overrides):
        layer = cls(3)
        assert layer(GOOD).shape == (2, 3)
        refuses(layer, torch.ones(2, 4))
        for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(copied(GOOD), layer(GOOD))
            refuses(copied, torch.ones(2, 4))
    assert list(Norm(3).state_dict()) == ["weight"]
    with pytest.raises(og.GuardError) as caught:
        Overrides(3)(torch.ones(2, 4))
    (violation,) = caught.value.violations
    assert (violation.operator, violation.site) == ("Norm.forward", f"{__name__}.Norm.forward")
    assert violation.call_site is not None and violation.call_site.function == "forward"


def test_a_module_class_that_inherits_its_forward() -> None:
    class Child(Bare):
        pass

    assert og.guard(MATRIX)(Child) is Child
    refuses(Child(), torch.ones(3))
    assert Bare()(torch.ones(3)).shape == (3,)


def test_module_instance() -> None:
    layer, other = Bare(), Bare()
    keys = list(layer.state_dict())
    assert og.guard(MATRIX)(layer) is layer
    assert torch.equal(layer(GOOD), other(GOOD))
    refuses(layer, torch.ones(3))
    assert other(torch.ones(3)).shape == (3,)
    assert list(layer.state_dict()) == keys and [name for name, _ in layer.named_modules()] == [""]
    layer.load_state_dict(other.state_dict())

    copied = copy.deepcopy(layer)
    assert copied.forward.__self__ is copied
    copied.weight.data.zero_()
    assert copied(GOOD).sum() == 0 and layer(GOOD).sum() == 6
    refuses(copied, torch.ones(3))

    unpickled = pickle.loads(pickle.dumps(layer))
    assert torch.equal(unpickled(GOOD), layer(GOOD))
    assert unpickled(torch.ones(3)).shape == (3,)

    seen: list[str] = []
    layer.register_forward_pre_hook(lambda module, args: seen.append("before"))
    layer.register_forward_hook(lambda module, args, result: seen.append("after"))
    layer(GOOD).sum().backward()
    assert seen == ["before", "after"] and layer.weight.grad is not None
    with pytest.raises(TypeError, match="is guarded already"):
        og.guard(MATRIX)(layer)


def test_shallow_copies_of_modules() -> None:
    """Why the page sends `copy.copy` and DataParallel to the class."""
    layer = og.guard(MATRIX)(Bare())
    assert copy.copy(layer).forward.__self__ is layer
    of_class = copy.copy(Norm(3))
    of_class.width = 4
    refuses(of_class, torch.ones(2, 3))
    replica = Norm(3)._replicate_for_data_parallel()
    assert replica.forward.__self__ is replica


def test_module_whose_forward_is_decorated() -> None:
    @og.guard(MATRIX + "\nrequire(D == self.width)")
    class Frozen(nn.Module):
        width = 3

        @torch.no_grad()
        def forward(self, x: Any, *, scale: int = 1) -> Any:
            return x * scale * torch.ones(1, requires_grad=True)

    assert not Frozen()(GOOD, scale=2).requires_grad
    refuses(Frozen(), torch.ones(2, 4))
    refuses(Frozen(), x=BAD)


def test_module_whose_forward_has_another_name() -> None:
    def apply_weight(self: Any, x: Any) -> Any:
        return x

    class Aliased(nn.Module):
        forward = apply_weight

    globals()["Aliased"], Aliased.__qualname__ = Aliased, "Aliased"
    layer = og.guard(MATRIX)(Aliased())
    refuses(layer, BAD)
    assert pickle.loads(pickle.dumps(layer))(BAD) is not None


def test_library_modules_by_instance() -> None:
    layer = og.guard("input: floating[B, D]\nrequire(D == self.in_features)")(nn.Linear(3, 2))
    assert layer(GOOD).shape == (2, 2)
    refuses(layer, torch.ones(2, 4))
    refuses(nn.Sequential(layer), torch.ones(2, 4))
    assert nn.Linear(4, 2)(torch.ones(4)).shape == (2,)


# ---------------------------------------------------------------- torch


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, power: int) -> Any:
        """Square.

        Contract:
            x: floating[B, D]
            returns: like(x)
        """
        ctx.save_for_backward(x)
        return x**power

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * grad, None


class Double(torch.autograd.Function):
    @staticmethod
    def forward(x: Any) -> Any:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return grad * 2


def test_autograd_function() -> None:
    guarded: Any = og.guard(Square)
    assert guarded is Square
    x = torch.full((2, 3), 3.0, requires_grad=True)
    guarded.apply(x, 2).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 6.0))
    refuses(guarded.apply, BAD, 2)
    og.guard(MATRIX)(Double)
    Double.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 8.0))
    refuses(Double.apply, BAD)
    assert isinstance(inspect.getattr_static(Double, "forward"), staticmethod)


@og.guard(MATRIX)
@torch.library.custom_op("llm_op_guard_tests::triple", mutates_args=())
def triple(x: torch.Tensor, times: float = 3.0) -> torch.Tensor:
    """Triple."""
    return x * times


@triple.register_fake
def _(x: torch.Tensor, times: float = 3.0) -> torch.Tensor:
    return torch.empty_like(x)


def test_custom_op() -> None:
    assert torch.equal(triple(GOOD), GOOD * 3) and torch.equal(triple(x=GOOD, times=2.0), GOOD * 2)
    refuses(triple, BAD)
    refuses(triple, x=BAD)
    assert torch.equal(torch.ops.llm_op_guard_tests.triple(BAD), BAD * 3)  # the dispatcher's own: not guarded
    assert triple._qualname == "llm_op_guard_tests::triple"


def test_ops_of_the_dispatcher() -> None:
    packet = og.guard(MATRIX + "\nrequire(times < 9)")(torch.ops.llm_op_guard_tests.triple)
    assert torch.equal(packet(GOOD), GOOD * 3)
    refuses(packet, BAD)
    refuses(packet, GOOD, times=9.0)
    assert packet.overloads() == ["default"] and packet.default is torch.ops.llm_op_guard_tests.triple.default
    overload = og.guard("self: floating[B, D]")(torch.ops.aten.add.Tensor)
    assert torch.equal(overload(GOOD, GOOD), GOOD * 2)
    refuses(overload, BAD, BAD)
    refuses(overload, self=BAD, other=BAD)
    with pytest.raises(TypeError, match=re.escape("the parameters of aten.add are; write a stub")):
        og.guard("x: any")(torch.ops.aten.add)


def stub(folder: Path, text: str) -> og.Contract:
    file = folder / "mine.contract"
    file.write_text(text)
    (contract,) = og.load(file).values()
    return contract


ADD = "def add(input, other, *, alpha=1):\n    input: T[*S]\n    other: T[*S] | int\n    require(alpha != 0)\n"


def test_builtins_of_torch_with_a_stub(tmp_path: Path) -> None:
    add = og.guard(stub(tmp_path, ADD))(torch.add)
    out = torch.empty(2, 3)
    assert torch.equal(add(GOOD, GOOD), GOOD * 2) and torch.equal(add(GOOD, 1), GOOD + 1)
    assert add(GOOD, other=GOOD, alpha=2, out=out) is out
    refuses(add, GOOD, torch.ones(2, 1))
    refuses(add, GOOD, GOOD, alpha=0)
    refuses(add, input=GOOD, other=torch.ones(2, 1), out=out)
    assert (add.__name__, add.__doc__, add.__module__) == ("add", torch.add.__doc__, torch.add.__module__)
    with pytest.raises(ValueError, match="no signature found"):
        inspect.signature(add)
    with pytest.raises(TypeError, match="takes 2 positional arguments but 4 were given"):
        add(GOOD, 2, 3, 4)
    with pytest.raises(TypeError, match=r"^Python cannot say .* of \S*add are; write a stub, def add\("):
        og.guard("input: any")(torch.add)
    with pytest.raises(og.ContractError, match=r"mine.contract:1:16: .* a default in its stub has to be a literal"):
        og.guard(stub(tmp_path, "def add(input, s=len, other=1):\n    input: any\n"))(torch.add)


def test_a_broken_call_names_its_arguments(tmp_path: Path) -> None:
    add = og.guard(stub(tmp_path, ADD))(torch.add)
    with pytest.raises(og.GuardError) as caught:
        add(GOOD, torch.ones(2, 1))
    (violation,) = caught.value.violations
    assert [tensor.name for tensor in violation.tensors] == ["input", "other"]
    assert (violation.operator, violation.site) == ("add", "torch.add")
    assert violation.call_site is not None and violation.call_site.file == __file__


def test_torch_function_is_asked_as_before(tmp_path: Path) -> None:
    asked = []

    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    add = og.guard(stub(tmp_path, ADD))(torch.add)
    assert type(add(GOOD.as_subclass(Wrapped), 1)) is Wrapped
    assert torch.add in asked


def test_results_of_builtins(tmp_path: Path) -> None:
    contract = stub(
        tmp_path, "def gelu(input, *, approximate='none'):\n    returns: like(input)\n    require(result.shape[0] < 9)"
    )
    gelu = og.guard(contract)(torch._C._nn.gelu)
    assert torch.equal(gelu(GOOD), torch.nn.functional.gelu(GOOD))
    refuses(gelu, torch.ones(9))


def test_pybind_functions(tmp_path: Path) -> None:
    text = "def parse_schema(schema, allow_typevars=True):\n    schema: str\n    require(allow_typevars)"
    parse = og.guard(stub(tmp_path, text))(torch._C.parse_schema)
    assert parse("ns::f(Tensor x) -> Tensor").name == "ns::f"
    refuses(parse, 3)
    refuses(parse, "ns::f(Tensor x) -> Tensor", allow_typevars=False)


def test_builtins_of_python() -> None:
    guarded: Any = og.guard("require(obj is not None)")(len)
    assert guarded([1, 2]) == 2
    refuses(guarded, None)
    assert inspect.signature(guarded) == inspect.signature(len)

    class Holder:
        size = guarded  # as a builtin, it does not bind

    assert Holder().size([1]) == 1
    assert pickle.loads(pickle.dumps(guarded)) is len
    assert copy.deepcopy(guarded) is guarded and copy.copy(guarded) is guarded


def test_a_stand_in_that_has_taken_the_name_is_pickled_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = og.guard("require(x > 0)")(math.sqrt)
    monkeypatch.setattr("math.sqrt", guarded)
    assert pickle.loads(pickle.dumps(guarded)) is guarded


def test_methods_of_builtin_types(tmp_path: Path) -> None:
    mul = og.guard(stub(tmp_path, "def mul(self, other):\n    self: floating[B, D]\n"))(torch.Tensor.mul)

    class Sub(torch.Tensor):
        mul_checked = mul

    assert torch.equal(mul(GOOD, 2), GOOD * 2)
    refuses(mul, BAD, 2)
    assert torch.equal(GOOD.as_subclass(Sub).mul_checked(2), GOOD * 2)
    refuses(BAD.as_subclass(Sub).mul_checked, 2)


def test_functions_that_take_anything_need_a_stub(tmp_path: Path) -> None:
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    guarded = og.guard(stub(tmp_path, "def dispatch(n, *, k=1):\n    require(n > k)"))(dispatch)
    assert guarded(2) == ((2,), {}) and guarded(n=3, k=2, z=1) == ((), {"n": 3, "k": 2, "z": 1})
    refuses(guarded, 1)


def test_a_stub_for_a_function_may_have_any_defaults_and_no_wrong_names(tmp_path: Path) -> None:
    def operator(n: int, m: int = 2, **options: Any) -> int:
        return n

    guarded = og.guard(stub(tmp_path, "def operator(n, m=len):\n    require(n > m)"))(operator)
    assert guarded(3) == 3
    refuses(guarded, 1)
    with pytest.raises(og.ContractError, match=r"the contract operator has a parameter 'nn' that .*operator lacks"):
        og.guard(stub(tmp_path, "def operator(nn, m):\n    require(nn > m)"))(operator)


# ---------------------------------------------------------------- objects


class Scaler:
    """Scales.

    Contract:
        require(n < self.limit, id='limit')
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, n: int) -> int:
        return n * 2


def test_callable_object() -> None:
    scaler = Scaler(5)
    guarded = og.guard(scaler)
    assert guarded(2) == 4
    refuses(guarded, 5)
    assert scaler(5) == 10
    guarded.limit = 9
    assert scaler.limit == 9 and guarded(5) == 10
    assert list(inspect.signature(guarded).parameters) == ["n"] and callable(guarded)
    for copied in (copy.deepcopy(guarded), copy.copy(guarded)):
        copied.limit = 1
        refuses(copied, 2)
        assert guarded(2) == 4
    restored = pickle.loads(pickle.dumps(guarded))
    assert type(restored) is Scaler and restored(50) == 100
    with pytest.raises(og.GuardError) as caught:
        guarded(10)
    assert caught.value.violations[0].operator == "Scaler"
    assert "limit" in dir(guarded) and repr(guarded) == repr(scaler)
    del guarded.limit
    assert not hasattr(scaler, "limit")
    with pytest.raises(TypeError, match="is guarded already"):
        og.guard(guarded)


def test_guards_of_objects_are_collected_with_them() -> None:
    import gc

    from llm_op_guard.guard.guard import Guard
    from llm_op_guard.install import stand_in
    from llm_op_guard.install.patch import sweep

    def left() -> tuple[int, int]:
        for _ in range(4):
            gc.collect()
            sweep()
        return sum(type(found) is Guard for found in gc.get_objects()), len(vars(stand_in))

    def make() -> None:
        og.guard("require(obj is not None)")(len)([])
        og.guard(Scaler(3))(1)
        og.guard(MATRIX)(Bare())(GOOD)
        og.guard(JITFunction(add_kernel))[(1,)](torch.ones(2), torch.ones(2), 2, 16)

    make()
    before = left()
    make()
    assert left() == before


def test_callable_objects_of_c(tmp_path: Path) -> None:
    row = "obj" if sys.version_info >= (3, 13) else "row"  # it has a signature since
    getter = og.guard(stub(tmp_path, f"def getter({row}):\n    require({row} is not None)"))(operators.itemgetter(0))
    assert getter([7]) == 7
    refuses(getter, None)


# ---------------------------------------------------------------- kernels


class JITFunction:
    """As triton.runtime.JITFunction: `kernel[grid](...)` gives a launcher that calls `run`."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.arg_names = list(inspect.signature(fn).parameters)
        self.__name__, self.__doc__, self.__module__ = fn.__name__, fn.__doc__, fn.__module__
        self.__qualname__ = fn.__qualname__
        self.launches: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> str:
        self.launches.append((grid, args, kwargs))
        return "compiled"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")


class Autotuner:
    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.fn[grid](*args, BLOCK=64, **kwargs)


def add_kernel(x_ptr, out_ptr, n, BLOCK):  # type: ignore[no-untyped-def]
    """Add.

    Contract:
        x_ptr: floating[N] @ dev
        out_ptr: like(x_ptr)
        require(n <= N, id='inside')
        require(BLOCK % 16 == 0, id='block')
    """


def test_kernel_launches() -> None:
    jitted = JITFunction(add_kernel)
    kernel = og.guard(jitted)
    x = torch.ones(32)
    assert kernel[(2,)](x, x.clone(), 32, BLOCK=16, num_warps=4) == "compiled"
    ((grid, args, kwargs),) = jitted.launches
    assert grid == (2,) and len(args) == 3 and kwargs == {"BLOCK": 16, "num_warps": 4}
    refuses(kernel[(2,)], x, x.clone(), 33, BLOCK=16)
    refuses(kernel[(2,)], x, x.clone(), n=32, BLOCK=15, num_warps=4)
    refuses(kernel[lambda meta: (meta["BLOCK"],)], x, torch.ones(3), 32, BLOCK=16)
    assert kernel.arg_names == ["x_ptr", "out_ptr", "n", "BLOCK"] and kernel.fn is add_kernel
    assert (kernel.__name__, kernel.__doc__) == ("add_kernel", add_kernel.__doc__)
    refuses(copy.copy(kernel)[(1,)], x, x, 33, BLOCK=16)
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        kernel(x)
    with pytest.raises(og.GuardError) as caught:
        kernel[(1,)](x, x, 33, BLOCK=16)
    assert caught.value.violations[0].operator == "add_kernel"
    assert [tensor.name for tensor in caught.value.violations[0].tensors] == ["x_ptr", "out_ptr"]


def test_an_autotuner_gives_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    kernel = og.guard(Autotuner(JITFunction(add_kernel)))
    x = torch.ones(32)
    assert kernel[(2,)](x, x.clone(), 32) == "compiled"
    refuses(kernel[(2,)], x, x.clone(), 33)
    assert not caplog.records
    declared = og.guard("x_ptr: floating[N]\nBLOCK: int\nrequire(n <= N)")(Autotuner(JITFunction(add_kernel)))
    for _ in range(2):
        assert declared[(2,)](x, x.clone(), 33) == "compiled"
    (said,) = [record.getMessage() for record in caplog.records]
    assert "does not fit the parameters (x_ptr, out_ptr, n, BLOCK) (BLOCK is left out) and went unchecked" in said


def test_off_is_the_code_that_was_there() -> None:
    layer, length, scaler = og.guard(MATRIX)(Bare()), og.guard("require(obj != [])")(len), og.guard(Scaler(3))
    carriers = [layer.forward.__func__, length._guarded_call, scaler._guarded_call.__func__, decorated, Norm.forward]
    armed = [carrier.__code__ for carrier in carriers]
    og.set_policy(A="off", B="off")
    off = [carrier.__code__ for carrier in carriers]
    assert off[0] is Bare.forward.__code__ and off[2] is Scaler.__call__.__code__
    assert not any(code.co_filename.startswith("<llm-op-guard") for code in off)
    assert length([]) == 0 and scaler(9) == 18 and layer(torch.ones(3)).shape == (3,) and decorated(0) == 0
    og.set_policy(A="raise", B="raise")
    assert [carrier.__code__ for carrier in carriers] == armed
    for call, bad in ((length, []), (scaler, 9), (layer, torch.ones(3)), (decorated, 0)):
        with pytest.raises(og.GuardError):
            call(bad)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (property(lambda self: 1), "a property: put @og.guard below it"),
        (functools.cached_property(lambda self: 1), "a property: put @og.guard below it"),
        (functools.partialmethod(len), "put @og.guard on the functions that it calls"),
        (functools.singledispatchmethod(lambda self: 1), "put @og.guard on the functions that it calls"),
        (Scaler, "og.guard cannot guard Scaler, a class: put @og.guard on its methods"),
        (3, "it takes a callable, a contract as text, or a loaded contract"),
    ],
)
def test_refused(target: Any, says: str) -> None:
    for guard in (og.guard, og.guard("n: int")):
        with pytest.raises(TypeError, match=re.escape(says)):
            guard(target)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_and_compiled_modules_are_refused() -> None:
    with pytest.raises(TypeError, match="it runs no Python; guard the module that it was scripted from"):
        og.guard(MATRIX)(torch.jit.trace(Bare(), GOOD))
    with pytest.raises(TypeError, match=r"guard the module first, then hand it to torch\.compile"):
        og.guard(MATRIX)(torch.compile(Bare(), backend="eager"))


@pytest.mark.parametrize(
    "again",
    [
        decorated,
        Engine.below_class,
        Engine.__dict__["above_static"],
        Engine().method,
        functools.partial(decorated),
        functools.lru_cache(decorated),
        Norm,
        Inherits,
        Norm(3),
        triple,
        torch.no_grad()(decorated),
    ],
)
def test_guarded_twice(again: Any) -> None:
    with pytest.raises(TypeError, match="guarded already; put both contracts into one"):
        og.guard(POSITIVE)(again)
