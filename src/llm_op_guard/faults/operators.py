"""The operators behind shipped contracts, to see what a call comes to without a guard."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Protocol

from llm_op_guard.contract.model import Contract
from llm_op_guard.faults.build import build
from llm_op_guard.guard.call import Call
from llm_op_guard.guard.functions import StandIn
from llm_op_guard.install.installer import Candidate

# What operators take besides what their contracts speak of, by the names that they all have for it.
USUAL_ARGUMENTS: dict[str, Any] = {"scaling": 0.5, "dropout": 0.0, "config": None}
# And what they read of the module that they belong to.
USUAL_ATTRIBUTES: dict[str, Any] = {
    "training": False, "variance_epsilon": 1e-6, "eps": 1e-6, "epsilon": 1e-6, "norm_eps": 1e-6, "dropout": 0.0,
    "attention_dropout": 0.0, "scaling": 0.5, "layer_idx": 0, "hidden_size": 8, "sliding_window": None,
    "filter_value": float("-inf"), "penalty": 1.2, "temperature": 1.0, "top_k": 2,
}  # fmt: skip


class Library(Protocol):
    """What finds the operators in the modules of a library."""

    library: str

    def wants(self, module: str) -> bool:
        """Whether a module of that name may hold operators."""

    def candidates(self, module: ModuleType) -> Iterator[Candidate]:
        """The operators in a loaded module."""


@dataclass(frozen=True)
class Operator:
    """A function that a contract holds for; `owner` is the class whose method it is."""

    site: str
    function: Callable[..., Any]
    owner: type | None = None

    def __call__(self, call: Call) -> Any:
        """What the function returns for a call as data; raises what it raises."""
        given = build(call)
        parameters = inspect.signature(self.function).parameters
        if self.owner is not None and "self" in given and isinstance(given["self"], StandIn):
            given["self"] = _of_class(self.owner, given["self"])
        for name, value in list(given.items()):
            if isinstance(value, StandIn) and name in ("module", "config"):
                given[name] = _of_class(type("Module", (), {}), value)
        for name, parameter in parameters.items():
            if name in given and given[name] is None and parameter.default is not parameter.empty:
                given.pop(name)
            if name not in given and parameter.default is parameter.empty and name in USUAL_ARGUMENTS:
                given[name] = USUAL_ARGUMENTS[name]
        extra = next((n for n, p in parameters.items() if p.kind is p.VAR_KEYWORD), None)
        named = given.pop(extra, None) if extra is not None else None
        given |= named if isinstance(named, dict) else {}
        positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
        return self.function(*[given.pop(name) for name in positional if name in given], **given)


def _of_class(owner: type, given: StandIn) -> Any:
    """An object with the attributes of a stand-in, and with the methods of a class for the rest."""

    def missing(self: Any, name: str) -> Any:
        found = inspect.getattr_static(owner, name, None)
        if isinstance(found, FunctionType):
            return found.__get__(self)
        if isinstance(found, staticmethod):
            return found.__func__
        if found is not None and not hasattr(type(found), "__get__"):
            return found
        if name in USUAL_ATTRIBUTES:
            return USUAL_ATTRIBUTES[name]
        raise AttributeError(f"{owner.__name__} made from data has no {name}")

    made = type(owner.__name__, (StandIn,), {"__getattr__": missing})()
    made.__dict__.update(given.__dict__)
    return made


def operators_of(libraries: Iterable[Library], wanted: set[str]) -> dict[str, Operator]:
    """By the names of contracts, `transformers/rope:apply_rotary_pos_emb`, an operator that each holds for.

    Modules of the libraries that are installed are loaded until every contract has one.
    """
    found: dict[str, Operator] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in libraries:
            for module in _modules(library):
                for candidate in library.candidates(module):
                    if candidate.function is None or candidate.contract is None:
                        continue
                    name = contract_name(candidate.contract)
                    if name in wanted and name not in found:
                        found[name] = _operator(candidate, module)
                if all(name in found for name in wanted if name.startswith(f"{library.library}/")):
                    break
    return found


def contract_name(contract: Contract) -> str:
    """How a shipped contract is called: `transformers/rope:apply_rotary_pos_emb`."""
    return f"{contract.source.file.removesuffix('.contract')}:{contract.name}"


def _operator(candidate: Candidate, module: ModuleType) -> Operator:
    assert candidate.function is not None
    parts = candidate.site.removeprefix(f"{module.__name__}.").split(".")
    owner = getattr(module, parts[0], None) if len(parts) > 1 else None
    return Operator(candidate.site, candidate.function, owner if isinstance(owner, type) else None)


def _modules(library: Library) -> Iterator[ModuleType]:
    try:
        root = importlib.import_module(library.library)
    except ImportError:
        return
    for name in _names(root, library):
        try:
            yield importlib.import_module(name)
        except Exception:  # its own dependencies are not installed
            continue


_FIRST = ("llama", "gpt2", "bert", "gemma3", "mixtral", "t5", "gpt_neox", "qwen2_vl", "deepseek_v3", "mamba2")


def _names(root: ModuleType, library: Library) -> Iterator[str]:
    """The modules that may hold operators; of models those first that most others are copies of."""
    yield from filter(library.wants, (f"{root.__name__}.nn.functional", *_within(root.__name__)))
    for part in ("integrations", "generation"):
        yield from filter(library.wants, _within(f"{root.__name__}.{part}"))
    models = [name.rpartition(".")[2] for name in _within(f"{root.__name__}.models")]
    for name in (*_FIRST, *(name for name in models if name not in _FIRST)):
        yield from filter(library.wants, _within(f"{root.__name__}.models.{name}"))


def _within(package: str) -> list[str]:
    """The modules of a package; none where there is no such package here."""
    try:
        found = importlib.import_module(package)
    except Exception:  # what it needs is not installed
        return []
    return [f"{package}.{module.name}" for module in pkgutil.iter_modules(getattr(found, "__path__", ()))]
