"""Rules that no call can break, and why: in their branch they are never false, or none comes there.

Nothing is taken as kept but the tests of the branches, so what is said here holds for every call. A rule that merely
follows from another one is broken together with it, and is none of these (`review` warns of it).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from llm_op_guard.contract.implied import Implications, may_break, settled
from llm_op_guard.contract.model import (
    AnySize,
    Clause,
    Condition,
    Contract,
    Declare,
    DtypeName,
    DtypeSet,
    NoneType,
    Require,
    Rest,
    TensorType,
    dim_symbol,
)
from llm_op_guard.contract.outcomes import TooMuch
from llm_op_guard.contract.path import path_of
from llm_op_guard.contract.satisfiable import meant
from llm_op_guard.contract.validate import exclusive, rules_of
from llm_op_guard.contract.walk import bound_symbols, tensor_types


def unbreakable(contract: Contract) -> dict[str, str]:
    """By their ids, the rules before the call that no call can break, with the reason; much is not seen."""
    found: dict[str, list[str | None]] = {}
    proofs = _Proofs(contract)
    for clause in contract.clauses:
        if not clause.after_call:
            for rule_id, reason in proofs.of(clause):
                found.setdefault(rule_id, []).append(reason)
    # One rule may stand in several branches.
    return {rule: reasons[0] for rule, reasons in found.items() if reasons[0] is not None and None not in reasons}


class _Proofs:
    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._implications = Implications(contract)

    def of(self, clause: Clause) -> Iterator[tuple[str, str | None]]:
        """The rules of a statement, each with the reason why no call breaks it, or None."""
        dead = self._dead(clause.conditions)
        for rule in rules_of(clause):
            reason = dead
            if reason is None and isinstance(clause.statement, Require):
                reason = self._never_false(clause.statement.expr.node, clause.conditions)
            elif reason is None and isinstance(clause.statement, Declare):
                path, _, aspect = rule.id.rpartition(".")
                if path == str(clause.statement.path):
                    always = self._always_a_tensor if aspect == "type" else self._always_fits
                    reason = always(clause, clause.statement, aspect)
            yield rule.id, reason

    def _dead(self, conditions: tuple[Condition, ...]) -> str | None:
        for depth, condition in enumerate(conditions):
            reason = self._excluded(conditions[:depth], condition.test.node, condition.wanted)
            if reason is not None:
                line = self._contract.source.line(condition.place)
                return f"no call comes to the branch of line {line}: {meant(condition)} is never true{reason}"
        return None

    def _never_false(self, node: ast.expr, conditions: tuple[Condition, ...]) -> str | None:
        reason = self._excluded(conditions, node, False)
        if reason is None or may_break(node):
            return None
        return f"{ast.unparse(node)} is never false in line {self._contract.source.line(node)}{reason}"

    def _excluded(self, conditions: Sequence[Condition], node: ast.expr, outcome: bool) -> str | None:
        """Why a condition never comes out so behind these tests, to be put behind what is said of it."""
        try:
            reasons = self._implications.excludes(conditions, node, outcome)
        except TooMuch:
            return None
        if reasons is None:
            return None
        branches = [
            f"the branch of line {self._contract.source.line(one.place)} is for {meant(one)}"
            for one in reasons
            if isinstance(one, Condition)
        ]
        return f", while {' and '.join(branches)}" if branches else ""

    # ------------------------------------------------------------ types

    def _always_a_tensor(self, clause: Clause, declared: Declare, _aspect: str) -> str | None:
        """Why nothing but a tensor comes to the declaration of one, or None."""
        if declared.path.steps or declared.path.root not in self._contract.tensors:
            return None
        for condition in clause.conditions:
            for part, _ in settled(condition.test.node, condition.wanted):
                if isinstance(part, ast.Compare) and _asks_of_a_tensor(part, declared.path.root):
                    line, at = self._contract.source.line(declared.place), self._contract.source.line(condition.place)
                    return f"tensors alone come to line {line}, while the branch of line {at} is for {meant(condition)}"
        return None

    def _always_fits(self, clause: Clause, declared: Declare, aspect: str) -> str | None:
        """Why the shape, dtype or device of every tensor that comes to a declaration is right, or None."""
        tensors = [alternative for alternative in declared.type.alternatives if isinstance(alternative, TensorType)]
        others = [a for a in declared.type.alternatives if not isinstance(a, TensorType | NoneType)]
        facts = [_needed(aspect, str(declared.path), tensor) for tensor in tensors]
        # Of several alternatives that of its rank counts, whose dtype may be another one's.
        if not facts or others or (aspect == "dtype" and len(facts) > 1):
            return None
        expected: list[str] = []
        symbols: list[str] = []
        for fact in facts:
            if fact is None:
                return None
            expected += [fact[0]] if fact[0] is not None else []
            symbols += fact[1]
        if not all(self._shown_here_only(symbol, clause) for symbol in symbols):
            return None
        reason = ""
        if len(expected) == len(facts) and not (aspect == "shape" and self._ranks_read(clause, declared, tensors)):
            excluded = self._excluded(clause.conditions, ast.parse(" or ".join(expected), mode="eval").body, False)
            if excluded is None:
                return None
            reason = excluded
        shown = f"; nothing else shows {', '.join(dict.fromkeys(symbols))}" if symbols else ""
        line = self._contract.source.line(declared.place)
        return f"every tensor that comes to line {line} has the {aspect} of {declared.type.text}{reason}{shown}"

    def _ranks_read(self, clause: Clause, declared: Declare, tensors: list[TensorType]) -> bool:
        """Whether a tensor has enough dimensions for one of the types, since a test reads as many."""
        least = min((len(t.dims or ()) - 1 for t in tensors if t.rest_index is not None), default=None)
        return least is not None and any(
            isinstance(part, ast.Compare) and any(d >= least for d in _dimensions_read(part, str(declared.path)))
            for condition in clause.conditions
            for part, _ in settled(condition.test.node, condition.wanted)
        )

    def _shown_here_only(self, symbol: str, clause: Clause) -> bool:
        """Whether no other tensor of a call says what a symbol is: then it is what this one says."""
        for other in self._contract.clauses:
            if isinstance(other.statement, Declare) and not exclusive(other.conditions, clause.conditions):
                for tensor in tensor_types(other.statement.type):
                    if [*bound_symbols(tensor, self._contract)].count(symbol) > (other is clause):
                        return False
        return True


def _asks_of_a_tensor(comparison: ast.Compare, name: str) -> bool:
    """Whether a comparison has an outcome only where an argument has the shape, dtype or device of a tensor."""
    for part in _always_evaluated(comparison):
        match part:
            case ast.Attribute(value=ast.Name(id=owner), attr="shape" | "dtype" | "device" | "ndim") if owner == name:
                return True
            case ast.Call(
                func=ast.Name(id="numel" | "dense" | "stride" | "aligned"), args=[ast.Name(id=owner), *_]
            ) if owner == name:
                return True
    return False


def _dimensions_read(comparison: ast.Compare, path: str) -> Iterator[int]:
    """How many dimensions a tensor has at least where a comparison has an outcome."""
    for part in _always_evaluated(comparison):
        if isinstance(part, ast.Subscript) and isinstance(part.value, ast.Attribute) and part.value.attr == "shape":
            whole = path_of(part)
            index = whole.steps[-1][0] if whole is not None else None
            if isinstance(index, int) and ast.unparse(part.value.value) == path:
                yield index + 1 if index >= 0 else -index


def _always_evaluated(comparison: ast.Compare) -> Iterator[ast.AST]:
    """The parts of a comparison that are evaluated wherever it has an outcome."""
    pending: list[ast.AST] = [comparison]
    if len(comparison.ops) != 1 or isinstance(comparison.ops[0], ast.Is | ast.IsNot):
        return
    while pending:
        part = pending.pop()
        yield part
        match part:
            case ast.IfExp() | ast.BoolOp() | ast.GeneratorExp() | ast.Call(func=ast.Name(id="has" | "get")):
                continue
        pending += ast.iter_child_nodes(part)


def _needed(aspect: str, path: str, tensor: TensorType) -> tuple[str | None, list[str]] | None:
    """What the type says of one aspect of a tensor.

    That is a condition, or None where it takes any, and the symbols that it shows by it; None where it says more.
    """
    if aspect == "device":
        return None if tensor.device_symbol is None else (None, [tensor.device_symbol])
    if aspect == "dtype":
        if tensor.dtype_symbol is not None:
            return None, [tensor.dtype_symbol]
        names = [dtype.name for dtype in tensor.dtypes if isinstance(dtype, DtypeName | DtypeSet)]
        return (f"{path}.dtype in ({', '.join(names)},)", []) if len(names) == len(tensor.dtypes) else None
    symbols = []
    for dim in tensor.dims or ():
        symbol = dim_symbol(dim)
        if symbol is not None:
            symbols.append(symbol)
        elif not isinstance(dim, AnySize | Rest):
            return None
    count = len(tensor.dims or ())
    if tensor.rest_index is None:
        return f"{path}.ndim == {count}", symbols
    return (f"{path}.ndim >= {count - 1}" if count > 1 else None), symbols
