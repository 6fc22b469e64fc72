"""The operators behind shipped contracts, to see what a call comes to without a guard."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MethodType, ModuleType
from typing import Any, Protocol

from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.parse import stub_signature
from llm_op_guard.faults.build import build
from llm_op_guard.faults.specimen import Specimen
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.call import Call
from llm_op_guard.install.installer import Candidate

_EMPTY = inspect.Parameter.empty


class Library(Protocol):
    """What finds the operators in the modules of a library."""

    library: str

    def wants(self, module: str) -> bool:
        """Whether a module of that name may hold operators."""

    def candidates(self, module: ModuleType) -> Iterator[Candidate]:
        """The operators in a loaded module."""

    def specimen(
        self, contract: str, function: Callable[..., Any], owner: type | None
    ) -> Callable[[], dict[str, Any]] | None:
        """What makes real arguments of an operator with which it runs; None where no such are known.

        `contract` is the one that holds for it, `rope:apply_rotary_pos_emb`, `owner` the class whose method it is.
        """

    def variants(self, owner: Any, wanted: Mapping[str, Any]) -> Iterator[None]:
        """Change an object of this library so that functions of contracts may answer what is wanted, step by step."""


@frozen
class Operator:
    """A function that a contract holds for.

    `contract` is what its integration has for it, where names may differ from those of the shipped text; `signature`
    that of a builtin, which has none.
    """

    site: str
    function: Callable[..., Any]
    contract: Contract | None = None
    specimen: Specimen | None = None
    signature: inspect.Signature | None = None

    def arguments(self, call: Call, origin: Call | None = None) -> dict[str, Any]:
        """What the function is given for a call as data. Raises Unmade, and Unbuildable.

        A parameter that is None in a valid call is left at its default, and so it is in calls that were made of it
        (`origin`): there None stands for what the contract has no rule about.
        """
        given = build(call) if self.specimen is None else self.specimen.arguments(call)
        before = dict((origin or call).arguments)
        for name, parameter in self._parameters.items():
            if given.get(name, parameter) is None and before.get(name) is None and parameter.default is not _EMPTY:
                given.pop(name)
        return given

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """What the function returns of `arguments`; raises what it raises."""
        function, given, parameters = self.function, dict(arguments), self._parameters
        if isinstance(function, MethodType):  # of a class: its contract knows the class as a parameter
            receiver = next(iter(inspect.signature(function.__func__).parameters), "")
            if receiver not in parameters and given.pop(receiver, None) is not None:
                function = MethodType(function.__func__, arguments[receiver])
        extra = next((n for n, p in parameters.items() if p.kind is p.VAR_KEYWORD), None)
        named = given.pop(extra, None) if extra is not None else None
        given |= named if isinstance(named, dict) else {}
        positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
        return function(*[given.pop(name) for name in positional if name in given], **given)

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return (self.signature or inspect.signature(self.function)).parameters

    def specimen_call(self) -> tuple[Call | None, str]:
        """The call of the specimen as data, or None and why there is none."""
        if self.specimen is None:
            return None, "no arguments are known with which it runs"
        try:
            return self.specimen.call, ""
        except Exception as error:  # another version of the library
            return None, f"{type(error).__name__}: {error}"


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
                        found[name] = _operator(library, name, candidate, module)
                if all(name in found for name in wanted if name.startswith(f"{library.library}/")):
                    break
    return found


def contract_name(contract: Contract) -> str:
    """How a shipped contract is called: `transformers/rope:apply_rotary_pos_emb`."""
    return f"{contract.source.file.removesuffix('.contract')}:{contract.name}"


def _operator(library: Library, name: str, candidate: Candidate, module: ModuleType) -> Operator:
    assert candidate.function is not None
    assert candidate.contract is not None
    parts = candidate.site.removeprefix(f"{module.__name__}.").split(".")
    owner = getattr(module, parts[0], None) if len(parts) > 1 else None
    make = library.specimen(name.partition("/")[2], candidate.function, owner if isinstance(owner, type) else None)
    specimen = None if make is None else Specimen(candidate.contract, make, library.variants)
    signature = None if candidate.replaced is None else stub_signature(candidate.contract)
    return Operator(candidate.site, candidate.function, candidate.contract, specimen, signature)


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


_FIRST = (
    "models.llama", "generation", "integrations", "models.bert", "models.gpt2", "models.gemma3", "models.mixtral",
    "models.t5", "models.gpt_neox", "models.qwen2_vl", "models.deepseek_v3", "models.mamba2",
)  # fmt: skip


def _names(root: ModuleType, library: Library) -> Iterator[str]:
    """The modules that may hold operators; of models those first that most others are copies of."""
    yield from filter(library.wants, (f"{root.__name__}.nn.functional", *_within(root.__name__)))
    models = [name.rpartition(".")[2] for name in _within(f"{root.__name__}.models")]
    for part in dict.fromkeys((*_FIRST, *(f"models.{name}" for name in models))):
        yield from filter(library.wants, _within(f"{root.__name__}.{part}"))


def _within(package: str) -> list[str]:
    """The modules of a package; none where there is no such package here."""
    try:
        found = importlib.import_module(package)
    except Exception:  # what it needs is not installed
        return []
    return [f"{package}.{module.name}" for module in pkgutil.iter_modules(getattr(found, "__path__", ()))]
