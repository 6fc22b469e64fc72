"""What a module of torch shows of itself without being run: what it holds, its hooks, the code of its methods.

Asked several times for each call of a model, so these are written to be quick.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

from llm_op_guard.guard.reading import UNSET, NotApplicable, path_value
from llm_op_guard.install.patch import is_call
from llm_op_guard.install.recognise import digest_of
from llm_op_guard.integrations.transformers.known import Code

# What calls a layer's forward as torch does, unless it checkpoints gradients: then it drops the cache.
CALLS_OF_LAYERS = {"54d6ed5e184d4129": Code("GradientCheckpointingLayer.__call__", versions=("4.57.6",))}

# ---------------------------------------------------------------- hooks

BEFORE, AFTER = "_forward_pre_hooks", "_forward_hooks"
_GLOBAL = {when: f"_global{when}" for when in (BEFORE, AFTER)}
# Its hooks write down what a module returns, and return nothing.
_OUTPUT_CAPTURING = "transformers.utils.output_capturing"


def may_change(module: Any, when: str) -> bool:
    """Whether hooks may change what a module is given, or what it returns."""
    hooks = contents(module).get(when)
    return (
        global_hooks(when)
        or not isinstance(hooks, dict)
        or not all(
            isinstance(hook, FunctionType) and hook.__globals__.get("__name__") == _OUTPUT_CAPTURING
            for hook in list(hooks.values())
        )
    )


def global_hooks(when: str) -> bool:
    """Whether there are hooks for every module."""
    return bool(vars(sys.modules["torch.nn.modules.module"]).get(_GLOBAL[when]))


def undisturbed(*modules: Any) -> list[dict[str, Any]]:
    """What modules hold; raises NotApplicable where one has hooks before its forward, or a forward of its own.

    The short way for what is asked of every layer.
    """
    try:
        found = [module.__dict__ for module in modules]
    except Exception:
        raise NotApplicable from None
    for own in found:
        if type(own) is not dict or type(own.get("_modules")) is not dict or own.get(BEFORE) or "forward" in own:
            raise NotApplicable
    return found


def held(module: Any, name: str) -> Any:
    """What a module has under a name itself, or among its modules; `UNSET` where that is neither."""
    own = contents(module)
    if name in own:
        return own[name]
    modules = own.get("_modules")
    return modules.get(name, UNSET) if type(modules) is dict else UNSET


def contents(module: Any) -> dict[str, Any]:
    """What a module holds itself, its tables among it."""
    try:
        own = module.__dict__
    except Exception:
        raise NotApplicable from None
    if type(own) is not dict:
        raise NotApplicable
    return own


# ---------------------------------------------------------------- code


def forward(module: Any) -> FunctionType | None:
    """The innermost forward of a class; None where the instance has its own, or it is called in another way."""
    if "forward" in contents(module):
        return None
    # Both names in one go, without a call: this is asked several times for each call of a model.
    function = called = UNSET
    for base in type(module).__mro__:
        methods = base.__dict__
        if function is UNSET and "forward" in methods:
            function = methods["forward"]
        if called is UNSET and "__call__" in methods:
            called = methods["__call__"]
        if called is not UNSET and function is not UNSET:
            break
    if not isinstance(called, FunctionType) or not _calls_forward(called, module):
        return None
    return innermost_of_library(function) if isinstance(function, FunctionType) else None


def _calls_forward(called: FunctionType, module: Any) -> bool:
    """Whether `__call__` is torch's, or does nothing else where no gradients are checkpointed."""
    if called.__globals__.get("__name__") == "torch.nn.modules.module":
        return True
    return digest_of(called) in CALLS_OF_LAYERS and path_value(module, "gradient_checkpointing") is False


def known_forward(module: Any) -> FunctionType:
    """As `forward`; raises NotApplicable where that is None."""
    function = forward(module)
    if function is None:
        raise NotApplicable
    return function


def class_function(cls: type, name: str) -> FunctionType | None:
    """The innermost function that a class has under a name; None where it has none, or somebody's own is around it."""
    found = class_attribute(cls, name)
    return innermost_of_library(found) if isinstance(found, FunctionType) else None


def class_attribute(cls: type, name: str) -> Any:
    """What a class has under a name, as it stands there; None where there is nothing."""
    for base in cls.__mro__:
        if name in (own := base.__dict__):
            return own[name]
    return None


def innermost_of_library(function: FunctionType) -> FunctionType | None:
    """The function within the library's decorators; None where somebody else's is around it, who may do anything."""
    for _ in range(_MOST_DECORATORS):
        wrapped = function.__dict__.get("__wrapped__")
        if wrapped is None or is_call(wrapped):
            return function
        if not isinstance(wrapped, FunctionType) or not is_of_library(function):
            return None
        function = wrapped
    return None


# More than any function has: where they go round, there is no end.
_MOST_DECORATORS = 100
_LIBRARIES = ("transformers.", "torch.")


def is_of_library(function: FunctionType) -> bool:
    """Whether a function was written in Transformers or torch."""
    module = function.__globals__.get("__name__")
    return type(module) is str and (module.startswith(_LIBRARIES) or f"{module}." in _LIBRARIES)


def digest_in_library(model: Any, name: str) -> str:
    """The digest of a method of a model's class, within decorators of the library and no others."""
    if path_value(model, name) is not UNSET:
        return ""
    found = class_attribute(type(model), name)
    found = found.fget if isinstance(found, property) else found
    return digest_of(innermost_of_library(found)) if isinstance(found, FunctionType) else ""
