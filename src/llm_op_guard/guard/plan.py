"""Contract → Plan: the steps of a check in an order in which every step finds what it needs.

Statements of a contract have no order; a check has. Each statement becomes one or two steps (first what a tensor
tells about symbols, then what must agree with them), and steps are put behind those that give the names they need.
A contract whose steps wait for each other in a circle is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from llm_op_guard.contract.expressions import names_in
from llm_op_guard.contract.model import (
    Alternative,
    Assign,
    Clause,
    Contract,
    CostClass,
    Declare,
    DeviceOf,
    DeviceSymbol,
    Dim,
    DtypeOf,
    DtypeSymbol,
    Expr,
    Like,
    Path,
    Require,
    RestOf,
    Size,
    SizeOneOf,
    TensorType,
    TupleType,
    Type,
)
from llm_op_guard.contract.solve import inverse
from llm_op_guard.contract.validate import bound_symbols
from llm_op_guard.contract.walk import paths_in_type
from llm_op_guard.policy import CLASSES

StepKind = Literal["test", "read", "match", "solve", "agree", "let", "require"]


@dataclass(frozen=True)
class Given:
    """A fact that a step waits for: a branch test that came out as wanted, an alternative that was committed to."""

    name: str
    value: bool | int


@dataclass(frozen=True)
class Step:
    """One thing that a check does.

    `gives` are the names it may bind (`surely`: those that have a value whenever the step has not failed the call),
    `needs` those it uses; it runs only where all of `given` hold. `clause` is the statement it comes from, which for
    a test is the first statement in the branch.
    """

    kind: StepKind
    clause: Clause
    given: tuple[Given, ...]
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset()
    surely: frozenset[str] = frozenset()
    fact: str | None = None
    test: Expr | None = None
    path: Path | None = None
    type: Type | None = None
    tensor: TensorType | None = None
    symbol: str | None = None
    dim: Dim | None = None
    axis: int | None = None

    @property
    def certain(self) -> bool:
        """Whether breaking this step is wrong for sure."""
        return self.kind == "test" or self.clause.certain


@dataclass(frozen=True)
class Plan:
    """The steps of one check in order: those before the call, or (`after_call`) those that wait for the result.

    `parameters` are the arguments that the check needs, in signature order. What the check before the call hands on
    to the check after it: the symbols and assigned names `known`, what the tensors at `snapshots` looked like, and
    the arguments `hands_on`. `has_later` says whether there is a check after it.
    """

    contract: Contract
    steps: tuple[Step, ...]
    parameters: tuple[str, ...]
    after_call: bool = False
    known: tuple[str, ...] = ()
    snapshots: tuple[Path, ...] = ()
    hands_on: tuple[str, ...] = ()
    has_later: bool = False

    def with_parameters(self, parameters: tuple[str, ...]) -> Plan:
        """The same steps in a check that takes these arguments, some of which it may not use."""
        return replace(self, parameters=parameters)


def plan_check(contract: Contract, classes: Iterable[CostClass], *, after_call: bool = False) -> Plan | None:
    """The plan for the rules of these cost classes, or None when there are none at that time.

    Of class C there is none: imported predicates are never asked in a call. Raises ContractError when statements need
    each other in a circle.
    """
    wanted = frozenset(classes) & frozenset(CLASSES)
    clauses = [c for c in contract.clauses if c.cost_class in wanted]
    later = [c for c in clauses if c.after_call]
    if not clauses or (after_call and not later):
        return None
    known = _handed_on(contract, later) if later else ()
    snapshots = tuple(dict.fromkeys(p for c in later for p in _paths_at_entry(c)))
    before = list(_steps(contract, [c for c in clauses if not c.after_call]))
    after = list(_steps(contract, later))
    used = {
        *(name for step in before for name in _parameters_of(step)),
        *(name for step in after for name in _parameters_of(step)),
    }
    # A parameter may be called result; what the contract calls so is what was returned.
    parameters = tuple(name for name in contract.parameters if name in used and name != "result")
    steps = _ordered(after if after_call else before, contract, set(known) if after_call else set())
    # After the call all arguments are at hand again, so that explain can say where a symbol got its value.
    return Plan(
        contract, tuple(steps), parameters, after_call, known, snapshots, parameters if later else (), bool(later)
    )


def check_order(contract: Contract) -> None:
    """Raise ContractError when statements need each other in a circle, those of class C among them."""
    for after_call in (False, True):
        plan_check(contract, CLASSES, after_call=after_call)
    _ordered(list(_steps(contract, [c for c in contract.clauses if not c.after_call])), contract, set())


def _handed_on(contract: Contract, later: list[Clause]) -> tuple[str, ...]:
    """The symbols and assigned names of the check before the call that the check after it reads."""
    earlier = {
        name
        for clause in contract.clauses
        if not clause.after_call
        for step in _steps(contract, [clause])
        for name in step.gives
    }
    read = {name for step in _steps(contract, later) for name in (*step.needs, *step.gives)}
    return tuple(sorted(earlier & read))


def _paths_at_entry(clause: Clause) -> Iterator[Path]:
    if isinstance(clause.statement, Declare):
        yield from (path for path in paths_in_type(clause.statement.type) if path.root != "result")


# ---------------------------------------------------------------- steps


def _steps(contract: Contract, clauses: list[Clause]) -> Iterator[Step]:
    facts: dict[tuple[tuple[Given, ...], str], str] = {}
    # A test is as cheap as the cheapest statement in its branch. Statements of class A first, so that it is theirs.
    for clause in sorted(clauses, key=lambda c: c.cost_class):
        given: tuple[Given, ...] = ()
        for condition in clause.conditions:
            key = (given, condition.test.text)
            if key not in facts:
                facts[key] = f"case_{len(facts) + 1}"
                yield Step(
                    "test",
                    clause,
                    given,
                    needs=_names(contract, condition.test.node),
                    fact=facts[key],
                    test=condition.test,
                )
            given = (*given, Given(facts[key], condition.wanted))
        match clause.statement:
            case Declare(path=path, type=declared):
                yield from _declaration_steps(contract, clause, given, path, declared)
            case Assign(names=names, expr=expr):
                yield Step("let", clause, given, needs=_names(contract, expr.node), gives=frozenset(names))
            case Require(expr=expr):
                yield Step("require", clause, given, needs=_names(contract, expr.node))


def _declaration_steps(
    contract: Contract, clause: Clause, given: tuple[Given, ...], path: Path, declared: Type
) -> Iterator[Step]:
    root = frozenset({path.root}) if path.root in contract.assigned else frozenset()
    # One path may be declared in several branches; each has facts of its own.
    branch = "".join(f" {g.name}={g.value}" for g in given)
    if path.steps or root:
        fact = f"{path} is there{branch}"
        yield Step("read", clause, given, needs=root, fact=fact, path=path)
        given = (*given, Given(fact, True))
    alternatives = declared.alternatives
    fact = f"kind of {path}{branch}"
    bound = [frozenset(bound_symbols(a, contract) if isinstance(a, TensorType) else ()) for a in alternatives]
    certain = clause.certain
    # What follows a certain declaration of one alternative need not ask whether it fitted.
    has_fact = len(alternatives) > 1 or not certain
    others = frozenset(p.root for p in paths_in_type(declared) if p.root in contract.assigned)
    yield Step(
        "match",
        clause,
        given,
        needs=root | others,
        gives=frozenset().union(*bound),
        surely=frozenset.intersection(*bound) if certain else frozenset(),
        fact=fact if has_fact else None,
        path=path,
        type=declared,
    )
    for index, alternative in enumerate(alternatives):
        inner = (*given, Given(fact, index)) if has_fact else given
        yield from _alternative_steps(contract, clause, inner, path, alternative)


def _alternative_steps(
    contract: Contract, clause: Clause, given: tuple[Given, ...], path: Path, alternative: Alternative
) -> Iterator[Step]:
    if isinstance(alternative, TupleType):
        for index, item in enumerate(alternative.items):
            yield from _declaration_steps(contract, clause, given, path.item(index), item)
    if not isinstance(alternative, TensorType):
        return
    for axis, dim in enumerate(alternative.dims or ()):
        if isinstance(dim, Size) and not directly_checked(dim, contract):
            for name in names_in(dim.expr.node):
                if name in contract.symbols and inverse(dim.expr.node, name) is not None:
                    yield Step(
                        "solve",
                        clause,
                        given,
                        needs=_names(contract, dim.expr.node) - {name},
                        gives=frozenset({name}),
                        path=path,
                        tensor=alternative,
                        symbol=name,
                        dim=dim,
                        axis=axis,
                    )
    needs = frozenset(name for dim in alternative.dims or () for name in _needed_by(dim, contract))
    needs |= frozenset(d.name for d in alternative.dtypes if isinstance(d, DtypeSymbol) and len(alternative.dtypes) > 1)
    needs |= frozenset(
        d.name for d in alternative.devices or () if isinstance(d, DeviceSymbol) and len(alternative.devices or ()) > 1
    )
    if needs or late_dtype(alternative) or late_device(alternative) or _has_late_size(alternative, contract):
        yield Step("agree", clause, given, needs=needs, path=path, tensor=alternative)


def directly_checked(dim: Dim, contract: Contract) -> bool:
    """Whether a dimension is bound or compared as soon as its tensor is met: a symbol or a constant."""
    match dim:
        case Size(expr=expr):
            return isinstance(expr.node, ast.Constant) or (expr.symbol is not None and expr.symbol in contract.symbols)
        case SizeOneOf() | RestOf():
            return False
    return True


def late_dtype(tensor: TensorType) -> bool:
    """Whether the dtype can only be judged when other names are known."""
    return any(isinstance(d, DtypeOf) for d in tensor.dtypes) or (
        len(tensor.dtypes) > 1 and any(isinstance(d, DtypeSymbol) for d in tensor.dtypes)
    )


def late_device(tensor: TensorType) -> bool:
    """Whether the device can only be judged when other names are known."""
    devices = tensor.devices or ()
    if any(isinstance(d, DeviceOf) for d in devices):
        return True
    return len(devices) > 1 and any(isinstance(d, DeviceSymbol) for d in devices)


def _has_late_size(tensor: TensorType, contract: Contract) -> bool:
    return any(not directly_checked(dim, contract) for dim in tensor.dims or ())


def _needed_by(dim: Dim, contract: Contract) -> Iterator[str]:
    if directly_checked(dim, contract):
        return
    exprs = [dim.expr] if isinstance(dim, Size) else list(dim.options) if isinstance(dim, SizeOneOf) else []
    for expr in exprs:
        yield from _names(contract, expr.node)


def _names(contract: Contract, node: ast.AST) -> frozenset[str]:
    """The symbols and assigned names that an expression uses."""
    return frozenset(n for n in names_in(node) if n in contract.symbols or n in contract.assigned)


def _parameters_of(step: Step) -> Iterator[str]:
    """The names that a step reads."""
    if step.path is not None:
        yield step.path.root
    if step.type is not None:
        yield from (path.root for path in paths_in_type(step.type))
    if step.tensor is not None:
        yield from (name for expr in step.tensor.sizes for name in names_in(expr.node))
        for part in (*step.tensor.dtypes, *(step.tensor.dims or ()), *(step.tensor.devices or ())):
            if isinstance(part, DtypeOf | RestOf | DeviceOf):
                yield part.path.root
    if step.test is not None:
        yield from names_in(step.test.node)
    if step.kind in ("let", "require") and isinstance(step.clause.statement, Assign | Require):
        yield from names_in(step.clause.statement.expr.node)


# ---------------------------------------------------------------- order


_RANK: dict[StepKind, int] = {"test": 0, "read": 1, "match": 2, "let": 3, "solve": 4, "agree": 5, "require": 6}


def _ordered(steps: list[Step], contract: Contract, known: set[str]) -> list[Step]:
    waiting = sorted(steps, key=lambda s: (s.clause.cost_class, not s.certain, not _is_scalar(s), _RANK[s.kind]))
    done: list[Step] = []
    facts: set[str] = set()
    while waiting:
        open_steps = [s for s in waiting if all(g.name in facts for g in s.given)]
        step = (
            next((s for s in open_steps if not _pending(s, waiting)), None)
            or next((s for s in open_steps if _settled(s, done, known)), None)
            # Solutions that wait only for each other: whichever finds its operands at run time goes through.
            or next((s for s in open_steps if s.kind == "solve" and not _pending(s, waiting, but_solve=True)), None)
        )
        if step is None:
            stuck = waiting[0]
            names = sorted({n for s in waiting for n in s.needs & {g for w in waiting for g in w.gives}})
            raise contract.source.error(
                f"cannot be put in order: {', '.join(names) or 'a branch'} is needed to decide what gives its value",
                (stuck.test.node if stuck.test is not None else stuck.clause.statement.place),
            )
        waiting.remove(step)
        if step.kind != "solve" or not sure(step.symbol, step.given, done, known):
            done.append(step)
        if step.fact is not None:
            facts.add(step.fact)
    return done


def _is_scalar(step: Step) -> bool:
    """Whether a step declares a plain argument: what is known to be a number can be compared without more ado."""
    return step.type is not None and not any(isinstance(a, TensorType | Like) for a in step.type.alternatives)


def _pending(step: Step, waiting: list[Step], *, but_solve: bool = False) -> bool:
    """Whether a step that might give a needed name has not been placed yet."""
    return any(
        other is not step
        and other.clause.cost_class <= step.clause.cost_class
        and not never_both(step.given, other.given)
        and (
            (other.gives & step.needs and not (but_solve and other.kind == "solve"))
            # A solution is the last resort: every direct sighting of its symbol comes first.
            or (step.kind == "solve" and other.kind != "solve" and step.symbol in other.gives)
        )
        for other in waiting
    )


def _settled(step: Step, done: list[Step], known: set[str]) -> bool:
    return step.kind != "solve" and all(sure(name, step.given, done, known) for name in step.needs)


def sure(name: str | None, given: tuple[Given, ...], done: list[Step], known: set[str]) -> bool:
    """Whether a name has a value for certain wherever these facts hold."""
    if name in known:
        return False
    return any(name in s.surely and set(s.given) <= set(given) for s in done)


def never_both(a: tuple[Given, ...], b: tuple[Given, ...]) -> bool:
    """Whether two steps stand in branches that exclude each other."""
    wanted = {g.name: g.value for g in a}
    return any(wanted.get(g.name, g.value) != g.value for g in b)
