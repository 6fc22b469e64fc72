"""What each statement of a contract costs and when it runs: inferred from everything that it reads, never declared."""

from __future__ import annotations

import ast
from collections.abc import Container
from dataclasses import replace

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
    Remember,
    Require,
)
from llm_op_guard.contract.vocabulary import FUNCTIONS
from llm_op_guard.contract.walk import binders, paths_in_type, solvable, tensor_types


def classified(contract: Contract) -> tuple[Clause, ...]:
    """Infer from everything a clause reads what it costs, whether it waits for the result, and whether it is eager."""
    clauses = list(contract.clauses)
    bound_by = binders(contract)
    changed = True
    while changed:
        changed = False
        costs, late, untraced = _name_properties(contract, clauses, bound_by)
        for index, clause in enumerate(clauses):
            names, functions = _reads(clause, contract.symbols)
            statement = clause.statement
            waits = isinstance(statement, Remember) or (isinstance(statement, Require) and statement.promised)
            after = waits or "result" in names or any(late.get(name, False) for name in names)
            eager = (
                isinstance(statement, Remember)
                or any(f in FUNCTIONS and FUNCTIONS[f].eager for f in functions)
                or any(untraced.get(name, False) for name in names)
            )
            found = replace(
                clause,
                cost_class=max([*(_cost(f, contract) for f in functions), *(costs.get(n, "A") for n in names), "A"]),
                after_call=after or clause.after_call,
                eager=eager or clause.eager,
            )
            changed |= found != clause
            clauses[index] = found
    return tuple(clauses)


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


def _name_properties(
    contract: Contract, clauses: list[Clause], bound_by: list[tuple[str, Clause]]
) -> tuple[dict[str, CostClass], dict[str, bool], dict[str, bool]]:
    """For each symbol and assigned name: the class of the cheapest place that gives it, whether all wait for the
    result, and whether all are eager.
    """
    current = dict(zip((id(c.statement) for c in contract.clauses), clauses, strict=True))
    givers: dict[str, list[Clause]] = {}
    for symbol, clause in bound_by:
        givers.setdefault(symbol, []).append(current[id(clause.statement)])
    for expr, clause in solvable(contract):
        for name in names_in(expr.node):
            if name in contract.symbols and name not in {symbol for symbol, _ in bound_by}:
                givers.setdefault(name, []).append(current[id(clause.statement)])
    for clause in clauses:
        if isinstance(clause.statement, Assign):
            for name in clause.statement.names:
                givers.setdefault(name, []).append(clause)
    costs: dict[str, CostClass] = {name: min(clause.cost_class for clause in places) for name, places in givers.items()}
    late = {name: all(c.after_call for c in places) for name, places in givers.items()}
    untraced = {name: all(c.eager for c in places) for name, places in givers.items()}
    return costs, late, untraced


def _reads(clause: Clause, symbols: Container[str]) -> tuple[set[str], set[str]]:
    """The names and functions that decide a clause's verdict (its hint and reason do not)."""
    exprs = [condition.test.node for condition in clause.conditions]
    names: set[str] = set()
    if isinstance(clause.statement, Declare):
        names.add(clause.statement.path.root)
        names |= {path.root for path in paths_in_type(clause.statement.type)}
        for tensor in tensor_types(clause.statement.type):
            # A bare symbol is told here, not read; everything else in a size is read.
            exprs += [expr.node for expr in tensor.sizes if expr.symbol not in symbols]
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
    return names, functions
