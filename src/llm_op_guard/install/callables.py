"""Every kind of callable → how a guard is put on it. `KINDS` and `REFUSED` are the whole of it; the first row fits.

Either the code of a copy is swapped, which costs nothing when off, or a function that calls the thing stands in front
of it. `make docs` writes these tables into docs/callables.md.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any, cast

from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.parse import stub_signature
from llm_op_guard.frozen import frozen
from llm_op_guard.install.binding import ABSENT, usable
from llm_op_guard.install.operation import GUARDED, Operation
from llm_op_guard.install.stand_in import KernelStandIn, StandIn, launching, through

# Where a function carries these, which torch.compile gave it, Dynamo looks beneath it and would miss the check.
_DYNAMO_SKIPS = ("_torchdynamo_orig_callable", "_torchdynamo_inline")


@frozen
class Kind:
    """A row of the table: what it is, how to tell, how it is taken; for the docs how it is guarded and what differs."""

    name: str
    applies: Callable[[Any], bool]
    take: Callable[[Any], Operation]
    mechanism: str
    differs: str


@frozen
class Refused:
    """What cannot be guarded, and what to do instead."""

    name: str
    applies: Callable[[Any], bool]
    instead: str


def operation(target: Any) -> Operation:
    """What is to be guarded in `target`. Raises TypeError for what is guarded already and what cannot be."""
    if is_guarded(target):
        name = getattr(target, "__qualname__", type(target).__qualname__)
        raise TypeError(f"{name} is guarded already; put both contracts into one")
    for refused in REFUSED:
        if refused.applies(target):
            name = getattr(target, "__qualname__", None) or type(target).__qualname__
            raise TypeError(f"og.guard cannot guard {name}, {refused.name}: {refused.instead}")
    return next(kind for kind in KINDS if kind.applies(target)).take(target)


def is_guarded(target: Any) -> bool:
    """Whether the callable has a guard of its own."""
    # An instance or a class keeps what is in its `__dict__` to itself; what functools.wraps made has a copy of it.
    return isinstance(target, StandIn) or GUARDED in getattr(target, "__dict__", ())


def beneath(target: Any) -> tuple[Any, tuple[Any, ...]]:
    """The function that carries the guard of something guarded, and what it is bound to."""
    if isinstance(target, StandIn):
        target = target._guarded_call
    elif isinstance(target, _torch("nn.Module")) or _is_class_of(target, "nn.Module"):
        target = target.forward
    return (target.__func__, (target.__self__,)) if isinstance(target, MethodType) else (target, ())


def _seen_signature(target: Any, *, follow_wrapped: bool = True) -> inspect.Signature | None:
    try:
        return usable(inspect.signature(target, follow_wrapped=follow_wrapped))
    except (ValueError, TypeError):
        return None


def signature_for(function: Any, contract: Contract) -> inspect.Signature | None:
    """The signature by which calls of a guarded function give what its contract names; None where nobody can say."""
    for seen in (_seen_signature(function, follow_wrapped=False), _seen_signature(function)):
        if seen is not None and {*contract.parameters} <= {*seen.parameters}:
            return seen
    return stub_signature(contract)


def _names(target: Any) -> tuple[str, str]:
    """Name and module, for reports."""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or type(target).__qualname__
    owner = target if hasattr(target, "__qualname__") or hasattr(target, "__name__") else type(target)
    return str(name), str(getattr(owner, "__module__", None) or "")


def _flavour(target: Any) -> str:
    if inspect.iscoroutinefunction(target):
        return "coroutine"
    return "generator" if inspect.isgeneratorfunction(target) else "plain"


def _function(target: FunctionType) -> Operation:
    name, _ = _names(target)

    def front() -> FunctionType:
        made: Any = functools.update_wrapper(through(target, _flavour(target)), target)
        for name in _DYNAMO_SKIPS:
            vars(made).pop(name, None)
        return cast(FunctionType, made)

    return Operation(
        qualname=name,
        module=target.__module__,
        documented=(target,),
        signature=_seen_signature(target),
        front=front,
        place=lambda guarded: guarded,
        function=target,
    )


def _method(target: MethodType) -> Operation:
    return _within(target.__func__, lambda guarded: MethodType(guarded, target.__self__))


def _within(inner: Any, placed: Callable[[Any], Any]) -> Operation:
    """The operation of a callable around `inner`; `placed` makes the same around the guarded one."""
    taken = operation(inner)
    return replace(taken, place=lambda guarded: placed(taken.place(guarded)))


def _static_or_class_method(target: Any) -> Operation:
    return _within(target.__func__, type(target))


def _partial(target: functools.partial[Any]) -> Operation:
    def placed(guarded: Any) -> Any:
        made = type(target)(guarded, *target.args, **target.keywords)
        vars(made).update(vars(target))
        return made

    return _within(target.func, placed)


def _class_with_forward(target: Any) -> Operation:
    def placed(guarded: Any) -> Any:
        target.forward = guarded
        return target

    taken = _within(inspect.getattr_static(target, "forward"), placed)
    name, module = _names(target)
    return replace(taken, qualname=f"{name}.forward", module=module, documented=(*taken.documented, target))


def _module(target: Any) -> Operation:
    def placed(guarded: Any) -> Any:
        if isinstance(guarded, MethodType):
            guarded.__func__.__name__ = "forward"  # what a pickle asks the module for
        target.forward = guarded
        return target

    taken = _within(target.forward, placed)
    name, module = _names(type(target))
    return replace(taken, qualname=f"{name}.forward", module=module, documented=(*taken.documented, type(target)))


def _python_callable(target: Any) -> Operation:
    taken = operation(type(target).__call__)
    name, module = _names(type(target))
    return replace(
        taken,
        qualname=name,
        module=module,
        documented=(target, *taken.documented),
        place=lambda guarded: StandIn(target, MethodType(taken.place(guarded), target)),
    )


def _in_front(target: Any) -> Operation:
    name, module = _names(target)
    last = name.rpartition(".")[2]
    if getattr(sys.modules.get(module), last, None) is target:
        name = last  # torch.add calls itself _VariableFunctionsClass.add
    return Operation(
        qualname=name,
        module=module,
        documented=(target,),
        signature=_seen_signature(target),
        front=lambda: through(target, _flavour(target)),
        place=lambda guarded: StandIn(target, guarded),
    )


def _binding_in_front(target: Any) -> Operation:
    """As `_in_front`, for what binds in a class body: a function does so as well."""

    def placed(guarded: FunctionType) -> FunctionType:
        functools.update_wrapper(guarded, target)
        for name in ("cache_info", "cache_clear", "cache_parameters"):
            if hasattr(target, name):
                setattr(guarded, name, getattr(target, name))
        return guarded

    return replace(_in_front(target), place=placed)


def _custom_op(target: Any) -> Operation:
    if hasattr(target, "_init_fn"):
        name, module = _names(target._init_fn)
        signature = _seen_signature(target._init_fn)
        documented: tuple[Any, ...] = (target._init_fn,)
    else:
        name, module, documented = str(target), "torch.ops", ()
        signature = _schema_signature(target)
    return replace(_in_front(target), qualname=name, module=module, signature=signature, documented=documented)


def _schema_signature(target: Any) -> inspect.Signature | None:
    """The signature of an overload, or of a packet that has but one."""
    if hasattr(target, "overloads"):
        overloads = target.overloads()
        if len(overloads) != 1:
            return None
        target = getattr(target, overloads[0])
    parameters = [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
        )
        for argument in target._schema.arguments
        if argument.name.isidentifier()
    ]
    if len(parameters) != len(target._schema.arguments):
        return None
    try:
        return usable(inspect.Signature(parameters))
    except ValueError:  # keywords such as `from` are no names of parameters
        return None


def _kernel(target: Any) -> Operation:
    function = _kernel_function(target)
    assert function is not None
    signature = inspect.signature(function)
    # An autotuner may give what the caller leaves out.
    filled = [
        parameter.replace(default=ABSENT, annotation=inspect.Parameter.empty)
        if parameter.default is parameter.empty
        else parameter
        for parameter in signature.parameters.values()
    ]
    name, module = _names(function)
    return Operation(
        qualname=name,
        module=module,
        documented=(function,),
        signature=inspect.Signature(filled),
        front=launching,
        place=lambda guarded: KernelStandIn(target, guarded),
    )


def _kernel_function(target: Any) -> FunctionType | None:
    """The Python function of a kernel, beneath autotuners and heuristics; None for what is no kernel."""
    if isinstance(target, type) or not hasattr(type(target), "__getitem__"):
        return None
    inner, depth = getattr(target, "fn", None), 0
    while inner is not None and not isinstance(inner, FunctionType) and depth < 10:
        inner, depth = getattr(inner, "fn", None), depth + 1
    return inner if isinstance(inner, FunctionType) else None


# ---------------------------------------------------------------- what is torch's; torch is not imported for it


def _torch(path: str) -> Any:
    """What `path` names in torch, or an empty tuple, which nothing is an instance of, where that is not loaded."""
    module, _, name = f"torch.{path}".rpartition(".")
    return getattr(sys.modules.get(module), name, ())


def _is_class_of(target: Any, path: str) -> bool:
    return isinstance(target, type) and issubclass(target, _torch(path))


def _is_custom_op(target: Any) -> bool:
    places = ("_library.custom_ops.CustomOpDef", "_ops.OpOverload", "_ops.OpOverloadPacket")
    return any(isinstance(target, _torch(path)) for path in places)


def _is_scripted(target: Any) -> bool:
    return isinstance(target, _torch("jit.ScriptModule")) or _is_class_of(target, "jit.ScriptModule")


_SWAP = "the code of a copy is swapped"
_FRONT = "a stand-in calls it"

KINDS: tuple[Kind, ...] = (
    Kind(
        "function: plain, a method in a class body, async, generator, async generator",
        lambda target: isinstance(target, FunctionType),
        _function,
        f"{_SWAP}; where a decorator hides the parameters, a function in front of it",
        "async: checked when awaited; generators: at the first `next`/`anext`",
    ),
    Kind(
        "bound method",
        lambda target: isinstance(target, MethodType),
        _method,
        f"{_SWAP}, bound to the same object",
        "the contract sees `self` (or `cls`); other objects of the class are not guarded",
    ),
    Kind(
        "`staticmethod`, `classmethod` (guard above or below)",
        lambda target: isinstance(target, staticmethod | classmethod),
        _static_or_class_method,
        "what it holds is guarded",
        "nothing",
    ),
    Kind(
        "`functools.partial`",
        lambda target: isinstance(target, functools.partial),
        _partial,
        "a partial of the guarded function",
        "the contract sees all parameters of the function, those preset too",
    ),
    Kind(
        "`nn.Module` class",
        lambda target: _is_class_of(target, "nn.Module"),
        _class_with_forward,
        "`forward` is replaced on the class, which is returned",
        "pre-hooks run before the check; a subclass with a `forward` of its own is guarded where it calls `super()`",
    ),
    Kind(
        "`autograd.Function` class",
        lambda target: _is_class_of(target, "autograd.Function"),
        _class_with_forward,
        "`forward`, which `apply` calls, is replaced on the class, which is returned",
        "the contract sees the parameters of `forward`, `ctx` too if it has one",
    ),
    Kind(
        "`nn.Module` instance",
        lambda target: isinstance(target, _torch("nn.Module")),
        _module,
        "`forward` is set on the instance, which is returned",
        "deep copies are guarded; what comes out of a pickle is not; for `copy.copy` and `nn.DataParallel`, whose "
        "copies would call the `forward` of this instance, guard the class",
    ),
    Kind(
        "Triton kernel, launched through `kernel[grid]`",
        lambda target: _kernel_function(target) is not None,
        _kernel,
        f"{_FRONT}: launches through `[grid]` are checked",
        "another object, attributes pass through; `run` and `warmup` are not checked; inside other kernels call the "
        "unguarded one; rules about parameters left to an autotuner do not apply, "
        "and a launch that leaves out a declared one is not checked",
    ),
    Kind(
        "custom op: `torch.library.custom_op`, `torch.ops.ns.name`, an overload",
        _is_custom_op,
        _custom_op,
        _FRONT,
        "another object, attributes such as `register_fake` pass through; the dispatcher's own op is not guarded; "
        "several overloads need a stub",
    ),
    Kind(
        "`functools.lru_cache` object, method of a builtin type (`torch.Tensor.add`)",
        lambda target: isinstance(
            target, types.MethodDescriptorType | types.WrapperDescriptorType | functools._lru_cache_wrapper
        ),
        _binding_in_front,
        "a function calls it, and binds in a class as it does",
        "it is a function; the cache is shared, and every call checked, cached or not",
    ),
    Kind(
        "callable object with a `__call__` in Python",
        lambda target: callable(target) and isinstance(inspect.getattr_static(type(target), "__call__"), FunctionType),
        _python_callable,
        f"{_SWAP}, that of `__call__`, and a stand-in calls it",
        "another object, attributes pass through, other special methods do not; the contract sees `self`; "
        "copies are guarded; what comes out of a pickle is not",
    ),
    Kind(
        "builtin, pybind function, callable object of C (`torch.add`, `len`)",
        callable,
        _in_front,
        _FRONT,
        "another object, not a builtin to `inspect`; parameters that Python cannot say need a stub",
    ),
)

REFUSED: tuple[Refused, ...] = (
    Refused(
        "a property",
        lambda target: isinstance(target, property | functools.cached_property),
        "put @og.guard below it, on the function that computes it",
    ),
    Refused(
        "a method made by functools",
        lambda target: isinstance(target, functools.partialmethod | functools.singledispatchmethod),
        "put @og.guard on the functions that it calls",
    ),
    Refused(
        "a scripted module",
        _is_scripted,
        "it runs no Python; guard the module that it was scripted from, or a function that calls it",
    ),
    Refused(
        "a compiled module",
        lambda target: isinstance(target, _torch("_dynamo.eval_frame.OptimizedModule")),
        "guard the module first, then hand it to torch.compile",
    ),
    Refused(
        "a class",
        lambda target: (
            isinstance(target, type)
            and not _is_class_of(target, "nn.Module")
            and not _is_class_of(target, "autograd.Function")
        ),
        "put @og.guard on its methods; classes are guarded when they are an nn.Module or an autograd.Function",
    ),
    Refused(
        "nothing that can be called",
        lambda target: (
            not callable(target)
            and not isinstance(target, staticmethod | classmethod)
            # A kernel need not be callable: it is launched.
            and _kernel_function(target) is None
        ),
        "it takes a callable, a contract as text, or a loaded contract",
    ),
)
