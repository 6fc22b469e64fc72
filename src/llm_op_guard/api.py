"""The library as its users see it: the one place that joins the stages."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from llm_op_guard.contract.expressions import suggestion
from llm_op_guard.contract.json_form import parse_json
from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.parse import dedented, docstring_section, parse_body, parse_stubs, read_text, stub_signature
from llm_op_guard.contract.source import Source
from llm_op_guard.errors import ContractError, GuardWarning, InstallError, LlmOpGuardError
from llm_op_guard.guard import functions, ledger, memory
from llm_op_guard.guard.guard import Guard
from llm_op_guard.guard.plan import check_order, plan_check
from llm_op_guard.ingress import Ingress
from llm_op_guard.install.callables import beneath, signature_for
from llm_op_guard.install.callables import operation as operation_of
from llm_op_guard.install.installer import Candidate, Installer, Integration, Report
from llm_op_guard.install.operation import GUARDED, Operation, no_parameters
from llm_op_guard.install.site import LivingSites, Refusal, Site
from llm_op_guard.install.tracing import Follower
from llm_op_guard.integrations import torch as _torch
from llm_op_guard.integrations import transformers as _transformers
from llm_op_guard.policy import (
    CLASSES,
    INSTALL_VARIABLE,
    Action,
    Policy,
    Setting,
    libraries_to_install,
    on_change,
    record_file,
    tracks,
)
from llm_op_guard.report.dispatch import Dispatcher
from llm_op_guard.report.record import Record
from llm_op_guard.report.sink import JsonLines
from llm_op_guard.values import late, locate, texts, verdicts
from llm_op_guard.verification import Verification, asking, bound
from llm_op_guard.waivers import Waiver, Waivers

if TYPE_CHECKING:
    import datetime

# mypy does not call the last two callable, and they may stand below `@guard`.
F = TypeVar("F", bound="Callable[..., Any] | staticmethod[..., Any] | classmethod[Any, ..., Any]")

#: The violations of this process: `record.violations`, `record.counts`, `record.total`, `record.clear()`.
record = Record()

# Contracts that users write run metadata and value rules alike.
USER_DEFAULTS = Policy(A=Setting(Action.RAISE), B=Setting(Action.RAISE))

_waivers = Waivers()
_dispatcher = Dispatcher(record, _waivers)
_user_sites = LivingSites()
_INTEGRATIONS: dict[str, Callable[[], Integration]] = {
    _transformers.LIBRARY: _transformers.TransformersIntegration,
    _torch.LIBRARY: _torch.TorchIntegration,
}
_installers: dict[str, Installer] = {}

for _name, _function in {**verdicts.FUNCTIONS, **texts.FUNCTIONS}.items():
    functions.register(_name, _function, locate.LOCATORS.get(_name))
_transformers.register()


class _Tally:
    """How many guarded calls were checked, counted where `count_checks` asked for it."""

    def __init__(self) -> None:
        self.counting = False
        self.checks = 0

    def __call__(self) -> None:
        self.checks += 1


tally = _Tally()


# ---------------------------------------------------------------- contracts


def load(path: str | os.PathLike[str]) -> dict[str, Contract]:
    """Read a `.contract` file, or one of the JSON form (`.json`): its contracts by name.

    Raises ContractError, with file, line and column, when anything in it is wrong.
    """
    return read(read_text(path), os.fspath(path))


def read(text: str, file: str) -> dict[str, Contract]:
    """The contracts in the text of a file, as `load` reads them."""
    contracts = parse_json(text, file) if file.endswith(".json") else parse_stubs(text, file)
    for contract in contracts.values():
        check_order(contract)
    return contracts


def _contract_of(operation: Operation) -> Contract:
    """The contract in the docstring of what is guarded, or of its class."""
    name = operation.name
    for documented in operation.documented:
        try:
            section = docstring_section(_doc(documented))
        except ContractError as error:
            raise ContractError(f"{name}: {error.problem}", **_place(documented)) from None
        if section is not None:
            return parse_body(section, name, _parameters(operation), _source(operation, section))
    place = _place(operation.documented[0]) if operation.documented else {}
    raise ContractError(_why_no_contract(operation), **place)


def _doc(documented: Any) -> str:
    doc = getattr(documented, "__doc__", None)
    return doc if isinstance(doc, str) else ""


def _why_no_contract(operation: Operation) -> str:
    name = operation.name
    docs = [_doc(documented) for documented in operation.documented]
    if sys.flags.optimize >= 2 and not any(docs):
        return (
            f"{name} has no docstring because python -OO removes docstrings, and its contract with it; "
            f"run with -O or less, or hand the contract to og.guard as a string or from a .contract file"
        )
    if any("Contract:" in doc for doc in docs):
        return f"no contract found for {name}: `Contract:` stands alone on its line, and the contract indented below it"
    has = "its docstring has no `Contract:` section" if any(docs) else "it has no docstring"
    return f"no contract found for {name}: {has}; add one, or hand the contract to og.guard as a string"


def _place(documented: Any) -> dict[str, Any]:
    if isinstance(documented, FunctionType):
        return {"file": documented.__code__.co_filename, "line": documented.__code__.co_firstlineno}
    try:
        return {"file": inspect.getsourcefile(documented) or "<contract>"}
    except TypeError:
        return {}


def _source(operation: Operation, text: str) -> Source:
    """Where a contract's text stands in the file of what it is for: in a docstring, or in a decorator above it."""
    wanted = [line.strip() for line in text.splitlines()]
    for documented in operation.documented:
        try:
            lines, first = inspect.getsourcelines(documented)
        except (OSError, TypeError, SyntaxError):
            continue
        for start in range(len(lines) - len(wanted) + 1):
            # The first line may share its line with the quotes of a string, the last with what closes them.
            block = lines[start : start + len(wanted)]
            if [line.strip() for line in block] == wanted:
                indent = min(len(line) - len(line.lstrip()) for line in block if line.strip())
                return Source(_place(documented)["file"], text, first + start, indent)
    return Source(f"<contract of {operation.name}>", text)


def _parameters(operation: Operation) -> tuple[str, ...]:
    """What the contract may name; raises TypeError where nobody but a stub can say."""
    if operation.parameters is None:
        raise TypeError(no_parameters(operation.name))
    return operation.parameters


# ---------------------------------------------------------------- guard


@overload
def guard(target: F) -> F: ...
@overload
def guard(target: str | Contract) -> Callable[[F], F]: ...
def guard(target: Any) -> Any:
    """Guard something that can be called: a function, a method, an nn.Module, an operator of C; docs/callables.md.

    `@guard` reads the contract from the `Contract:` section of the docstring, `@guard("…")` takes the body of a
    contract as text, `@guard(contract)` one that `load` has read. Returns a guarded function of the same name,
    signature and docstring; the one handed in is left as it is. A module or a class is guarded in place and returned.
    Parameters that the contract does not mention are free.

    A call that breaks a certain rule raises GuardError before the function runs. Raises ContractError when there is
    no contract or it is wrong, TypeError for what cannot be guarded.
    """
    if isinstance(target, str | Contract):

        def decorate(target_of_contract: Any) -> Any:
            operation = operation_of(target_of_contract)
            made = _body_contract(target, operation) if isinstance(target, str) else _fitting(target, operation)
            return _guarded(operation, made)

        return decorate
    operation = operation_of(target)
    return _guarded(operation, _contract_of(operation))


def _body_contract(text: str, operation: Operation) -> Contract:
    text = dedented(text)
    return parse_body(text, operation.name, _parameters(operation), _source(operation, text))


def _fitting(contract: Contract, operation: Operation) -> Contract:
    for name in operation.lacks(contract):
        raise ContractError(
            f"the contract {contract.name} has a parameter {name!r} that {operation.name} lacks"
            f"{suggestion(name, operation.parameters or ())}",
            file=contract.source.file,
            line=contract.source.first_line,
        )
    return contract


def _guarded(operation: Operation, contract: Contract) -> Any:
    check_order(contract)
    if contract.rules and all(clause.cost_class == "C" for clause in contract.clauses):
        raise contract.source.error(
            f"nothing of this contract runs in a call of {operation.name}: every rule asks an imported predicate "
            f"(class C); use og.verify",
            contract.place,
        )
    _read_surroundings()
    made = _make_guard(contract, operation.name, operation.site, USER_DEFAULTS)
    carrier, binding = operation.carrier(contract, made.parameters)
    if inspect.isasyncgenfunction(carrier) and plan_check(contract, CLASSES, after_call=True) is not None:
        raise TypeError(
            f"{operation.name} is an async generator function, which has no result: take the rules about `result` out"
        )
    site = Site(carrier, made, binding)
    setattr(carrier, GUARDED, site)
    _user_sites.add(site)
    site.adjust()
    return operation.place(carrier)


def _make_guard(contract: Contract, operator: str, site: str, defaults: Policy) -> Guard:
    return Guard(
        contract,
        operator=operator,
        site=site,
        defaults=defaults,
        reporter=_dispatcher,
        tally=tally if tally.counting else None,
        ask=asking(contract, operator=operator, site=site, dispatcher=_dispatcher),
    )


# ---------------------------------------------------------------- verify


def verify(target: Any, /, *args: Any, **kwargs: Any) -> None:
    """Hold arguments against a contract without calling anything: at start-up, when an adapter is loaded, in tests.

    `target` is a contract of `load`, or something guarded; the arguments are those that it would be called with. Every
    rule is judged that needs no result, those of class C too, whatever policies say: certain ones that are broken
    raise GuardError, all of them together, and suspect ones give a GuardWarning. Both are recorded, waivers hold (the
    site of a contract is `file:name`), and while guards are switched off (`disable`, `LLM_OP_GUARD=off`) nothing is
    judged.

    Raises TypeError for another target and for arguments that do not fit, PredicateError for a predicate that nobody
    registered. One that raises is a GuardInternalWarning, and the rules that need it are not judged.
    """
    _read_surroundings()
    owner: tuple[Any, ...] = ()
    if isinstance(target, Contract):
        contract, operator, site, signature = target, target.name, target.id, stub_signature(target)
    else:
        function, owner = beneath(target)
        found = next((found for found in sites() if found.function is function), None)
        if found is None:
            kind = type(target).__name__
            raise TypeError(f"og.verify takes a contract that og.load has read, or something guarded; not a {kind}")
        contract, operator, site = found.guard.contract, found.guard.operator, found.name
        signature = signature_for(function, contract)
    if signature is None:
        raise TypeError(no_parameters(operator))
    verification = Verification(contract, operator=operator, site=site, dispatcher=_dispatcher)
    if (error := verification.broken(bound(signature, operator, (*owner, *args), kwargs))) is not None:
        raise error


def ingress(contract: Contract, *, max_bytes: int) -> Ingress:
    """What checks the bodies of requests: call it with bytes, a text, or a dict that was decoded already.

    It returns the fields of the body as a dict, defaults of the stub filled in, or raises GuardError, of which
    `to_dict(style="openai")` is what to send back. A larger body is refused before it is decoded (rule `max_bytes`),
    then one that is no JSON (`json`), no object (`json_object`), or lacks a parameter without a default
    (`NAME.missing`). The rest is as with `verify`, and nothing that the client sent stands in a message.

    Raises TypeError for a contract that is no stub or takes arguments by position, ValueError for a `max_bytes` that
    makes no sense, PredicateError for a predicate that nobody registered.
    """
    _read_surroundings()
    return Ingress(contract, max_bytes, _dispatcher)


# ---------------------------------------------------------------- install


def install(*libraries: str) -> Report:
    """Guard the operators of libraries, `install("transformers")`: those loaded now and those loaded later.

    Returns what was guarded and what was refused, with reasons. A library that is not installed is a refusal; doing
    it again changes nothing. Raises InstallError for a library that nothing is known of.
    """
    if not libraries:
        raise InstallError(f"name the libraries to guard; known: {', '.join(_INTEGRATIONS)}")
    _check_known(libraries)
    _read_surroundings()
    _native_follower.expect_torch()
    for library in libraries:
        if library not in _installers:
            _installers[library] = Installer(_INTEGRATIONS[library](), _guard_for)
            memory.forget_all()
        _installers[library].install()
    return _report(libraries)


def uninstall(*libraries: str) -> list[Refusal]:
    """Take the guards of these libraries away (of all, without names) and restore what was there.

    Returns the places that somebody else has changed since; they are left alone. Raises InstallError for a library
    that nothing is known of.
    """
    _check_known(libraries)
    left: list[Refusal] = []
    for library in libraries or tuple(_installers):
        installer = _installers.pop(library, None)
        if installer is not None:
            left += installer.uninstall()
            memory.forget_all()  # what goes by unguarded may change what was remembered
    return left


@contextlib.contextmanager
def installed(*libraries: str) -> Iterator[Report]:
    """A `with` block in which libraries are guarded; those that were guarded before stay so afterwards."""
    before = set(_installers)
    report = install(*libraries)
    try:
        yield report
    finally:
        fresh = [library for library in dict.fromkeys(libraries) if library not in before]
        if fresh:
            uninstall(*fresh)


def status() -> Report:
    """The sites that carry a guard, switched on or off by the policy, and what was refused, in all libraries."""
    return _report(tuple(_installers))


def integrations() -> list[Integration]:
    """What finds the operators of each library."""
    return [make() for make in _INTEGRATIONS.values()]


def known_libraries() -> tuple[str, ...]:
    """The libraries that `install` knows."""
    return tuple(_INTEGRATIONS)


def default_libraries() -> tuple[str, ...]:
    """Those that are guarded where nobody names any: not torch itself, whose functions everything calls."""
    return tuple(library for library in _INTEGRATIONS if library != _torch.LIBRARY)


def sites() -> list[Site]:
    """Every guarded function of this process: of libraries, and of `guard`."""
    return [*(site for installer in _installers.values() for site in installer.sites), *_user_sites]


def _check_known(libraries: tuple[str, ...]) -> None:
    for library in libraries:
        if library not in _INTEGRATIONS:
            known = ", ".join(_INTEGRATIONS)
            raise InstallError(
                f"nothing is known of {library!r}{suggestion(str(library), _INTEGRATIONS)}; known: {known}"
            )


def _guard_for(candidate: Candidate) -> Guard:
    assert candidate.contract is not None
    return _make_guard(candidate.contract, candidate.operator, candidate.site, candidate.defaults)


def _report(libraries: tuple[str, ...]) -> Report:
    installers = [_installers[library] for library in dict.fromkeys(libraries) if library in _installers]
    return Report(
        libraries=[installer.library for installer in installers],
        guarded=[site.name for installer in installers for site in installer.sites],
        refused=[refusal for installer in installers for refusal in installer.refused],
    )


def _adjust(*, wait: bool = True) -> None:
    for site in _user_sites:
        site.adjust(wait=wait)
    for installer in list(_installers.values()):
        installer.adjust()


on_change(_adjust)
_native_follower = Follower(lambda: _adjust(wait=False))
# Guards may have been off for a while: what was remembered about objects need not be so any more.
on_change(memory.forget_all)


def count_checks() -> None:
    """Count checked calls in `tally` from now on, in guards made from now on; costs a few nanoseconds a call."""
    tally.counting = True


# ---------------------------------------------------------------- in production


def record_to(path: str | os.PathLike[str] | None, *, max_records: int = 10_000, keep: int = 5) -> None:
    """Append violations to a file as lines of JSON, from now on; None ends it. The policy stays what it is.

    Violations of one rule at one site from one call site are counted rather than repeated. After `max_records` lines
    the file becomes PATH.1, PATH.2 and so on up to `keep`. `llm-op-guard report PATH` reads it. No contents of tensors
    are written, but for the first offending element of a value rule. Where the file cannot be written to, that is
    said once, and guarded calls go on. Raises PolicyError for a directory, or numbers that make no sense.
    """
    global _environment_read  # noqa: PLW0603 - the program has the last word
    fresh = JsonLines(path, max_records=max_records, keep=keep) if path is not None else None
    _environment_read = True
    former, record.sink = record.sink, fresh
    if former is not None:
        former.close()


def track(*, on: bool = True) -> None:
    """Have violations say where their tensor was last seen: `violation.last_seen`, and a line of the message.

    Guards then note weakly which tensors go into the calls of a thread and come out. It costs; docs/production.md.
    """
    global _track_read  # noqa: PLW0603 - the program has the last word
    _track_read = True
    ledger.switch(on=on)
    _adjust()


def waive(rule: str, *, site: str, reason: str, until: str | datetime.date | None = None) -> Waiver:
    """Let one rule be broken at one site: recorded, marked as waived, and neither raised nor warned of.

    `until` is the last day on which it holds, `"2027-01-31"`; after that the rule holds again, which is said once.
    `withdraw()` takes it back, and so does the end of a `with` block; it is for all threads. Raises PolicyError for
    a waiver without a reason, for several sites, or with a date that is none.
    """
    return _waivers.add(rule, site, reason, until)


def waivers() -> list[Waiver]:
    """The waivers of the process: those of `waive` that were not withdrawn, and those of pyproject.toml."""
    _read_surroundings()
    return _waivers.all()


_environment_read = False
_track_read = False


def _read_surroundings() -> None:
    """Take what stands in pyproject.toml and in the environment, once, when it is first needed. Raises PolicyError."""
    _waivers.read_file()
    if not _environment_read and (path := record_file()) is not None:
        record_to(path)
    if not _track_read and tracks():
        track()


def install_from_environment() -> None:
    """Install what `LLM_OP_GUARD_INSTALL` names; what is wrong is a warning, since this happens at import."""
    try:
        if libraries := libraries_to_install():
            install(*libraries)
    except LlmOpGuardError as error:
        message = f"llm-op-guard guards nothing in this process: {error} (from {INSTALL_VARIABLE})"
        warnings.warn(GuardWarning(message), stacklevel=2)


def forget_surroundings() -> None:
    """End recording and tracking, forget waivers and late verdicts, and read the surroundings anew; for tests."""
    global _environment_read, _track_read  # noqa: PLW0603
    record_to(None)
    track(on=False)
    _track_read = False
    _waivers.clear()
    late.queue.forget()
    _environment_read = False
