"""Python predicates that contracts may import (cost class C), and those that come with the library.

A predicate is asked by `og.verify` and `og.ingress`, never in a guarded call.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from llm_op_guard.errors import PredicateError
from llm_op_guard.guard import asked
from llm_op_guard.install.operation import known_as

P = TypeVar("P", bound=Callable[..., Any])


def predicate(function: P) -> P:
    """Let contracts ask this function, which stands at the top of a module: `from module import function`.

    It is given what the contract writes, by position, and returns a truth, a number, a text or a tuple of these; None
    where it has nothing to say, and then the rule does not apply. Returns the function as it is. Raises PredicateError
    for what a contract could not name or ask.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not (callable(function) and isinstance(module, str) and isinstance(name, str) and name.isidentifier()):
        raise PredicateError(
            f"a predicate is a function at the top of a module, so that a contract can import it by name; "
            f"{name or type(function).__name__} is not"
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise PredicateError(f"{name} is asynchronous, and nobody would await what it returns")
    asked.register(f"{known_as(module)}.{name}", function)
    return function


@predicate
def largest_token_id(tokenizer: Any) -> int:
    """The largest id that a tokenizer knows a token for, added and special ones included.

    Takes a tokenizer of transformers, tokenizers, tiktoken or sentencepiece, or its vocabulary as a dict. Raises
    TypeError for anything else, ValueError for one without tokens.
    """
    if isinstance(tokenizer, dict):
        return int(max(tokenizer.values()))
    if hasattr(tokenizer, "get_vocab"):
        return int(max(tokenizer.get_vocab().values()))
    if hasattr(tokenizer, "max_token_value"):  # tiktoken
        return int(tokenizer.max_token_value)
    if hasattr(tokenizer, "get_piece_size"):  # sentencepiece
        return int(tokenizer.get_piece_size()) - 1
    raise TypeError(f"a {type(tokenizer).__name__} is no tokenizer that is known here")


# PEFT's word for every linear layer, in any case.
_ALL_LINEAR = "all-linear"


@predicate
def unmatched_targets(model: Any, targets: Any) -> int:
    """How many of a LoRA's `target_modules` match no module of an `nn.Module`: PEFT ignores those if another one does.

    As PEFT has it: a text is a regular expression for whole paths, or "all-linear"; of several names each matches the
    modules whose path is it, or ends in it behind a dot.
    """
    paths = [path for path, _ in model.named_modules() if path]
    if isinstance(targets, str) and targets.lower() == _ALL_LINEAR:
        return 0 if any(_is_linear(module) for module in model.modules()) else 1
    if isinstance(targets, str):
        return 0 if any(re.fullmatch(targets, path) for path in paths) else 1
    return sum(not any(path == name or path.endswith(f".{name}") for path in paths) for name in _names(targets))


def _is_linear(module: Any) -> bool:
    kinds = (
        getattr(sys.modules.get(where), name, ())
        for where, name in (("torch.nn", "Linear"), ("transformers.pytorch_utils", "Conv1D"))
    )
    return any(isinstance(module, kind) for kind in kinds)


# In the files of PEFT: in front of a module's path, and behind it.
_PEFT_PREFIX = "base_model.model."
_PEFT_WEIGHT = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\..*)?$")


@predicate
def matched_modules(model: Any, names: Any) -> int:
    """How many of these paths lead to a module of an `nn.Module`: whole paths, not their ends.

    The names may be those of the weights in a file of PEFT: `base_model.model.` in front and `.lora_A.weight` behind
    are left out.
    """
    paths = {path for path, _ in model.named_modules() if path}
    modules = (_PEFT_WEIGHT.sub("", name) for name in _names(names))
    return sum(module in paths or module.removeprefix(_PEFT_PREFIX) in paths for module in modules)


def _names(names: Any) -> Iterable[str]:
    if isinstance(names, str):
        raise TypeError("several names are expected, not one text")
    return [str(name) for name in names]
