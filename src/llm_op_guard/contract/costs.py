"""What each statement of a contract costs and when it runs: inferred from everything that it reads, never declared."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from llm_op_guard.contract.expressions import LOOPS, calls_in, names_in
from llm_op_guard.contract.loops import written_out
from llm_op_guard.contract.model import (
    Assign,
    Clause,
    Contract,
    CostClass,
    Declare,
    DeviceSymbol,
    DtypeSymbol,
    ListType,
    Remember,
    Require,
    Size,
    SizeOneOf,
)
from llm_op_guard.contract.path import Path, path_of
from llm_op_guard.contract.vocabulary import FUNCTIONS
from llm_op_guard.contract.walk import binders, paths_in_type, solvable, tensor_types


def classified(contract: Contract) -> tuple[Clause, ...]:
    """Infer from everything a clause reads what it costs, whether it waits for the result, and whether it is eager."""
    clauses = list(contract.clauses)
    lists = _lists(contract)
    reads = [_reads(clause, contract.symbols, lists) for clause in clauses]
    readers: dict[str, list[int]] = {}
    for index, (names, _) in enumerate(reads):
        for name in names:
            readers.setdefault(name, []).append(index)
    givers = _givers(contract)
    given: dict[int, list[str]] = {}
    for name, indices in givers.items():
        for index in indices:
            given.setdefault(index, []).append(name)
    known = {name: _Property.of(clauses[index] for index in indices) for name, indices in givers.items()}
    waiting = list(range(len(clauses)))
    while waiting:
        index = waiting.pop()
        clause = clauses[index]
        found = _classified(clause, *reads[index], known, contract)
        if found == clause:
            continue
        clauses[index] = found
        for name in given.get(index, ()):
            now = _Property.of(clauses[giver] for giver in givers[name])
            if now != known[name]:
                known[name] = now
                waiting += readers.get(name, ())
    return tuple(clauses)


class _Property(NamedTuple):
    """What is known of a symbol or assigned name: the class of the cheapest place that gives it, whether all places
    wait for the result, and whether all are eager.
    """

    cost_class: CostClass
    late: bool
    eager: bool

    @classmethod
    def of(cls, places: Iterable[Clause]) -> _Property:
        clauses = list(places)
        return cls(
            min(clause.cost_class for clause in clauses),
            all(clause.after_call for clause in clauses),
            all(clause.eager for clause in clauses),
        )


def _classified(
    clause: Clause, names: set[str], functions: set[str], known: Mapping[str, _Property], contract: Contract
) -> Clause:
    statement = clause.statement
    waits = isinstance(statement, Remember) or (isinstance(statement, Require) and statement.promised)
    read = [known[name] for name in names if name in known]
    own = isinstance(statement, Remember) or any(f in FUNCTIONS and FUNCTIONS[f].eager for f in functions)
    return replace(
        clause,
        cost_class=max([*(_cost(f, contract) for f in functions), *(name.cost_class for name in read), "A"]),
        after_call=clause.after_call or waits or "result" in names or any(name.late for name in read),
        eager=clause.eager or own or any(name.eager for name in read),
    )


def _cost(function: str, contract: Contract) -> CostClass:
    if function in contract.imports:
        return "C"
    if function in LOOPS:
        return "B"  # as long as what it goes through
    return FUNCTIONS[function].cost_class if function in FUNCTIONS else "A"


def check_costs(contract: Contract) -> None:
    """Refuse what would never be judged, and texts that cost more than the rule that they belong to."""
    for clause in contract.clauses:
        statement = clause.statement
        if clause.cost_class == "C" and clause.after_call:
            raise contract.source.error(
                "nothing would come of this: it waits for the result, and imported predicates are asked where there is "
                "none (og.verify)",
                statement.place,
            )
        reason = None if isinstance(statement, Assign | Remember) else statement.reason
        for text in (reason.because, reason.hint) if reason is not None else ():
            for call in ast.walk(written_out(text, contract.source).node) if text is not None else ():
                name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
                if (cost := _cost(name, contract)) > clause.cost_class:
                    raise contract.source.error(
                        f"a hint costs no more than its rule: {name} is of class {cost}, the rule of class "
                        f"{clause.cost_class}",
                        call,
                    )


def _givers(contract: Contract) -> dict[str, list[int]]:
    """For each symbol and assigned name, the clauses that give it, by number."""
    number = {id(clause): index for index, clause in enumerate(contract.clauses)}
    bound_by = binders(contract)
    # What only the result shows may be solved for before the call.
    bound = {symbol for symbol, clause in bound_by if not _declares_result(clause)}
    givers: dict[str, list[int]] = {}
    for symbol, clause in bound_by:
        givers.setdefault(symbol, []).append(number[id(clause)])
    for expr, clause in solvable(contract):
        for name in names_in(expr.node):
            if name in contract.symbols and name not in bound:
                givers.setdefault(name, []).append(number[id(clause)])
    for index, clause in enumerate(contract.clauses):
        if isinstance(clause.statement, Assign):
            for name in clause.statement.names:
                givers.setdefault(name, []).append(index)
    return {name: list(dict.fromkeys(places)) for name, places in givers.items()}


def _declares_result(clause: Clause) -> bool:
    return isinstance(clause.statement, Declare) and clause.statement.path.root == "result"


def _lists(contract: Contract) -> set[Path]:
    """The paths that may be lists of any length."""
    return {
        clause.statement.path
        for clause in contract.clauses
        if isinstance(clause.statement, Declare)
        and any(isinstance(alternative, ListType) for alternative in clause.statement.type.alternatives)
    }


def _goes_through(node: ast.expr, lists: Container[Path | None]) -> bool:
    """Whether an expression compares a list as a whole, looks for something in it or asks for its least or largest."""
    for part in ast.walk(node):
        match part:
            case ast.Compare(left=left, ops=[op, *_], comparators=others) if not isinstance(op, ast.Is | ast.IsNot):
                whole = [left, *others]
            case ast.Call(func=ast.Name(id="min" | "max"), args=whole):
                pass
            case _:
                continue
        if any(path_of(one) in lists for one in whole):
            return True
    return False


def _reads(clause: Clause, symbols: Container[str], lists: Container[Path | None]) -> tuple[set[str], set[str]]:
    """The names and functions that decide a clause's verdict (its hint and reason do not)."""
    exprs = [condition.test.node for condition in clause.conditions]
    names: set[str] = set()
    if isinstance(clause.statement, Declare):
        names.add(clause.statement.path.root)
        names |= {path.root for path in paths_in_type(clause.statement.type)}
        for tensor in tensor_types(clause.statement.type):
            # A bare symbol is told here, not read; everything else in a size is read, and what is one of several.
            for dim in tensor.dims or ():
                if isinstance(dim, SizeOneOf):
                    exprs += [option.node for option in dim.options]
                elif isinstance(dim, Size) and dim.expr.symbol not in symbols:
                    exprs.append(dim.expr.node)
            if len(tensor.dtypes) > 1:
                names |= {dtype.name for dtype in tensor.dtypes if isinstance(dtype, DtypeSymbol)}
            if len(tensor.devices or ()) > 1:
                names |= {device.name for device in tensor.devices or () if isinstance(device, DeviceSymbol)}
    elif isinstance(clause.statement, Remember):
        names.add(clause.statement.path.root)
        exprs += [expr.node for _, expr in clause.statement.facts]
    else:
        exprs.append(clause.statement.expr.node)
    functions: set[str] = set()
    for node in exprs:
        names |= set(names_in(node))
        functions |= set(calls_in(node))
        if _goes_through(node, lists):
            functions.add(LOOPS[0])
    return names, functions
