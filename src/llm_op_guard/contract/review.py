"""What a contract says for nothing: rules that others imply or contradict, branches that no call takes or all calls
take, names that nothing uses, alternatives that another covers. It may stand; `llm-op-guard check` warns of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from llm_op_guard.contract.implied import Implications, Known, may_break
from llm_op_guard.contract.model import (
    Alternative,
    Assign,
    Clause,
    Condition,
    Contract,
    Declare,
    DeviceSymbol,
    DeviceType,
    DtypeName,
    DtypeSet,
    ListType,
    LiteralType,
    Require,
    ScalarType,
    SizeOneOf,
    SymbolKind,
    TensorType,
    Type,
)
from llm_op_guard.contract.outcomes import TooMuch
from llm_op_guard.contract.satisfiable import given, meant, place_of
from llm_op_guard.contract.source import Place
from llm_op_guard.contract.vocabulary import dtype_names
from llm_op_guard.contract.walk import binders, declared_types, items_of, tensor_types
from llm_op_guard.errors import ContractError
from llm_op_guard.frozen import frozen

Kind = Literal["redundant", "contradictory", "never-taken", "always-taken", "unused", "covered"]

# More statements are not named beside the one that a finding is about.
_MOST_NAMED = 3


@frozen
class Finding:
    """Something that is written for nothing, with its place in the file.

    `contract` and `rule` name what it stands in, where it stands in one; `line` and `column` count from 1, `text` is
    that line.
    """

    kind: Kind
    contract: str | None
    rule: str | None
    problem: str
    file: str
    line: int
    column: int
    text: str

    def __str__(self) -> str:
        place = ContractError(
            f"warning: {self.problem}", file=self.file, line=self.line, column=self.column, text=self.text
        )
        return str(place)


def review(contracts: Mapping[str, Contract]) -> list[Finding]:
    """What the contracts of one file say for nothing, in the order of the file."""
    found = [finding for contract in contracts.values() for finding in _of_contract(contract)]
    found += _of_file(list(contracts.values()))
    return sorted(dict.fromkeys(found), key=lambda finding: (finding.line, finding.column))


def _of_contract(contract: Contract) -> Iterator[Finding]:
    yield from _unused_names(contract)
    yield from _covered(contract)
    yield from _Branches(contract).findings()


def _finding(kind: Kind, contract: Contract, problem: str, place: Place, rule: str | None = None) -> Finding:
    at = contract.source.located(problem, place)
    return Finding(kind, contract.name, rule, at.problem, at.file, at.line, at.column, at.text)


# ---------------------------------------------------------------- rules and branches


class _Branches:
    """The rules and branches of a contract, beside what is known where they stand.

    A rule or test that a loop writes out several times says nothing if none of its copies says anything.
    """

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.implications = Implications(contract)
        # Of each place, what was found of every copy that stands there.
        self.branches: dict[tuple[Place, bool], list[Finding | None]] = {}
        self.whole: dict[Place, list[Finding | None]] = {}
        self.rules: dict[Place, list[Finding | None]] = {}

    def findings(self) -> Iterator[Finding]:
        """What says nothing; of a contract that is too large to look at all of it, none."""
        try:
            for after_call in (False, True):
                self._look([clause for clause in self.contract.clauses if clause.after_call == after_call])
        except TooMuch:
            return
        for (place, wanted), found in self.branches.items():
            yield from _if_all(found)
            if wanted and (place, False) not in self.branches:
                yield from _if_all(self.whole.get(place, [None]))
        for found in self.rules.values():
            yield from _if_all(found)

    def _look(self, clauses: list[Clause]) -> None:
        at: dict[tuple[Condition, ...], list[Clause]] = {}
        runs: dict[tuple[Condition, ...], list[Clause]] = {}
        for clause in clauses:
            at.setdefault(clause.conditions, []).append(clause)
            for depth in range(1, len(clause.conditions) + 1):
                runs.setdefault(clause.conditions[:depth], []).append(clause)
            for condition in clause.conditions:
                self.branches.setdefault((condition.place, condition.wanted), [])
        never: set[tuple[Condition, ...]] = set()
        for conditions in sorted(runs, key=len):
            if conditions[:-1] in never or self._is_never_taken(conditions, runs[conditions], at):
                never.add(conditions)
        dropped: set[int] = set()
        told: set[frozenset[int]] = set()
        for clause in reversed(clauses):
            if isinstance(clause.statement, Require) and clause.conditions not in never:
                found = self._look_at_rule(clause, clause.statement, at, dropped, told)
                self.rules.setdefault(clause.statement.place, []).insert(0, found)

    # ------------------------------------------------------------ branches

    def _is_never_taken(
        self, conditions: tuple[Condition, ...], inside: list[Clause], at: Mapping[tuple[Condition, ...], list[Clause]]
    ) -> bool:
        *above, condition = conditions
        test, wanted = condition.test.node, condition.wanted
        cheapest = min(inside, key=lambda clause: (clause.cost_class, clause.eager))
        known = [
            one
            for one in _known(tuple(above), at)
            if isinstance(one, Condition) or (one.certain and _runs_with(one, cheapest))
        ]
        copies = self.branches[condition.place, wanted]
        reasons = self.implications.excludes(known, test, wanted)
        if reasons is not None:
            comes = "no call comes here" if wanted else "no call comes to the else of this"
            problem = f"{comes}: {condition.test.text}{self._because(reasons, wanted)}"
            copies.append(_finding("never-taken", self.contract, problem, condition.place))
            return True
        copies.append(None)
        if wanted:
            found = None
            reasons = self.implications.excludes(known, test, outcome=False)
            if reasons is not None and not may_break(test) and self.implications.always_applies(known, test):
                problem = f"every call that comes here takes this branch: {condition.test.text}"
                problem += self._because(reasons, outcome=False)
                found = _finding("always-taken", self.contract, problem, condition.place)
            self.whole.setdefault(condition.place, []).append(found)
        return False

    # ------------------------------------------------------------ rules

    def _look_at_rule(
        self,
        clause: Clause,
        rule: Require,
        at: Mapping[tuple[Condition, ...], list[Clause]],
        dropped: set[int],
        told: set[frozenset[int]],
    ) -> Finding | None:
        known = [
            one
            for one in _known(clause.conditions, at)
            if isinstance(one, Condition) or (_stands_for(one, clause) and id(one) not in dropped)
        ]
        look = self.implications.repeats if may_break(rule.expr.node) else self.implications.excludes
        reasons = look(known, rule.expr.node, False)
        if reasons is not None:
            dropped.add(id(clause))
            problem = f"{_called(rule)} says nothing new: {rule.expr.text}{self._because(reasons, outcome=False)}"
            return _finding("redundant", self.contract, problem, place_of(clause), rule.id)
        if not clause.certain:
            # That a branch is unusual is said by a suspect rule that contradicts its test.
            known = [one for one in known if not isinstance(one, Condition)]
        reasons = self.implications.excludes(known, rule.expr.node, outcome=True)
        if not reasons:
            return None
        group = frozenset(map(id, (clause, *reasons)))
        if group in told:
            return None
        told.add(group)
        problem = f"{_called(rule)} is kept only where it does not apply: {rule.expr.text}"
        problem += self._because(reasons, outcome=True)
        return _finding("contradictory", self.contract, problem, place_of(clause), rule.id)

    def _because(self, reasons: Sequence[Known], outcome: bool) -> str:
        if not reasons:
            return f" is never {'true' if outcome else 'false'}"
        lines = []
        for one in reasons[:_MOST_NAMED]:
            if isinstance(one, Clause):
                lines.append(given(one, self.contract))
            else:
                lines.append(f"the branch of line {self.contract.source.line(one.place)} is for {meant(one)}")
        return f", while {' and '.join(lines)}"


def _known(conditions: tuple[Condition, ...], at: Mapping[tuple[Condition, ...], list[Clause]]) -> Iterator[Known]:
    """The tests of the branches that lead to a place, and the clauses that hold there."""
    yield from conditions
    for depth in range(len(conditions) + 1):
        yield from at.get(conditions[:depth], ())


def _runs_with(other: Clause, clause: Clause) -> bool:
    """Whether one is judged wherever the other is."""
    return other.cost_class <= clause.cost_class and other.eager <= clause.eager


def _stands_for(other: Clause, clause: Clause) -> bool:
    """Whether one is judged wherever the other is, and a breach of it is as bad."""
    return other is not clause and _runs_with(other, clause) and other.certain >= clause.certain


def _called(rule: Require) -> str:
    return f"the rule {rule.id!r}" if rule.id != rule.expr.text else "this rule"


def _if_all(found: Iterable[Finding | None]) -> Iterator[Finding]:
    found = list(found)
    if found and None not in found and found[0] is not None:
        yield found[0]


# ---------------------------------------------------------------- names

_INSTEAD: dict[SymbolKind, str] = {
    "size": "write _ for any size",
    "sizes": "write ... for any dimensions",
    "dtype": "write any for any dtype",
    "device": "leave it out",
}


def _unused_names(contract: Contract) -> Iterator[Finding]:
    # The items of a list share their symbols: one place there compares many.
    shared = {
        name
        for declared in declared_types(contract)
        for alternative in declared.alternatives
        if isinstance(alternative, ListType)
        for tensor in tensor_types(alternative.item)
        for name in _words(tensor.text)
    }
    count: dict[str, int] = {}
    for word in (word for text in _texts(contract) for word in _words(text)):
        count[word] = count.get(word, 0) + 1
    told = {name for name, _ in binders(contract)}
    for name, kind in contract.symbols.items():
        # In an expression, one place says that a size is even.
        if count.get(name) == 1 and name in told and name not in shared:
            clause = next(c for c in contract.clauses if name in _words(c.statement.text))
            problem = f"{name!r} stands here only and says nothing: {_INSTEAD[kind]}"
            yield _finding("unused", contract, problem, contract.source.within(clause.statement.place, name))
    for clause in contract.clauses:
        statement = clause.statement
        # One that may divide by zero, or with a rest, is a rule as well.
        if (
            isinstance(statement, Assign)
            and not may_break(statement.expr.node)
            and not any(count.get(name) for name in statement.names)
        ):
            names = " and ".join(map(repr, statement.names))
            yield _finding("unused", contract, f"nothing uses {names}", statement.place)


def _texts(contract: Contract) -> Iterator[str]:
    """Everything that reads names, each test once for every statement behind it."""
    for clause in contract.clauses:
        yield clause.statement.expr.text if isinstance(clause.statement, Assign) else clause.statement.text
        yield from (condition.test.text for condition in clause.conditions)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _of_file(contracts: Sequence[Contract]) -> Iterator[Finding]:
    """The constants and imports of a file of which no contract makes use."""
    first = contracts[0]
    used = {name for contract in contracts for name in (*contract.constants, *contract.imports)}
    for node in ast.parse(first.source.text).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) if first.signature is not None and name not in used:
                yield _unused_of_file(first, f"no contract uses {name!r}", Place.of(node))
            case ast.ImportFrom(names=aliases):
                for alias in aliases:
                    if alias.name not in used:
                        place = Place(alias.lineno, alias.col_offset)
                        yield _unused_of_file(first, f"no contract uses {alias.name!r}", place)


def _unused_of_file(first: Contract, problem: str, place: Place) -> Finding:
    return replace(_finding("unused", first, problem, place), contract=None)


# ---------------------------------------------------------------- types


def _covered(contract: Contract) -> Iterator[Finding]:
    for clause in contract.clauses:
        statement = clause.statement
        if isinstance(statement, Declare):
            for less, more in _covers(statement.type):
                problem = f"{less} adds nothing to {more}" if less != more else f"{less} stands here twice"
                yield _finding("covered", contract, f"{statement.target}: {problem}", statement.place)


def _covers(declared: Type) -> Iterator[tuple[str, str]]:
    """What stands in a type beside something that takes it in, and that."""
    alternatives = declared.alternatives
    for one in alternatives:
        for other in alternatives:
            if one is not other and _takes_in(other, one):
                yield one.text, other.text
        for item in items_of(one):
            yield from _covers(item)
        if isinstance(one, TensorType):
            yield from _covers_within(one)


def _takes_in(more: Alternative, less: Alternative) -> bool:
    match more, less:
        case ScalarType(text="object"), _:
            return True
        case ScalarType(text="float"), ScalarType(text="int"):
            return True
        case ScalarType(text="int" | "float"), LiteralType(value=int()):
            return True
        case (ScalarType(text="float"), LiteralType(value=float())) | (
            ScalarType(text="str"),
            LiteralType(value=str()),
        ):
            return True
        case ScalarType(text="bool"), LiteralType(value=bool()):
            return True
    return False


def _covers_within(tensor: TensorType) -> Iterator[tuple[str, str]]:
    named = [dtype for dtype in tensor.dtypes if isinstance(dtype, DtypeName | DtypeSet)]
    for number, less in enumerate(named):
        # Of two that are the same, the later one.
        wider = [more for more in named if dtype_names(less) < dtype_names(more)] or [
            more for more in named[:number] if more == less
        ]
        if wider:
            yield less.name, wider[0].name
    for dim in tensor.dims or ():
        options = [option.text for option in dim.options] if isinstance(dim, SizeOneOf) else []
        yield from ((text, text) for text in dict.fromkeys(options) if options.count(text) > 1)
    for device in dict.fromkeys(tensor.devices or ()):
        if (tensor.devices or ()).count(device) > 1:
            name = device.name if isinstance(device, DeviceSymbol | DeviceType) else f"{device.path}.device"
            yield name, name
