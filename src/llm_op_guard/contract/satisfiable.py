"""Rules that no call can keep: refused when the contract is loaded, since each of its calls would be.

Two things are refused. A rule that is never true, whatever the call: `D < 0`, `n in ()`, `n == 1 and n == 2`. And
certain statements on one path of which every call that takes it breaks one: `D >= 8` and `D < 4`, `x: any[3]` and
`x.shape[0] == 4`, `D < 4` behind `if D > 8`. A call to which a rule does not apply does not break it: where an optional
argument may be None, or an undeclared one a tensor, several rules about it can all be kept.

What is refused is so for sure; much that no call can keep is not seen. Rules are compared by what they say of one and
the same expression. A Decimal or NumPy float, of which no rule can say anything, is no way to keep a rule about a
declared `float`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce

from llm_op_guard.contract.declared import Declared
from llm_op_guard.contract.expressions import names_in
from llm_op_guard.contract.model import (
    Clause,
    Condition,
    Contract,
    Declare,
    Require,
)
from llm_op_guard.contract.outcomes import Judge, State, Steps, TooMuch
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.possible import (
    ANYTHING,
    UNREAD,
    Possible,
)
from llm_op_guard.contract.source import Place
from llm_op_guard.errors import ContractError
from llm_op_guard.frozen import frozen

# More statements are not named beside the one that an error points to.
_MOST_NAMED = 3
# And no more are tried one by one to find those to name.
_MOST_WEIGHED = 20


@frozen
class Conflict:
    """Clauses that no call on the path of these conditions can keep together; `alone`, one that is never true."""

    clauses: tuple[Clause, ...]
    conditions: tuple[Condition, ...]
    tests: tuple[Condition, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether the rule is never true by itself; it may still not apply to a call."""
        return len(self.clauses) == 1 and not self.tests


def check_satisfiable(contract: Contract) -> None:
    """Raise ContractError for rules that no call can keep."""
    found = conflict(contract)
    if found is not None:
        raise _error(found, contract)


def conflict(contract: Contract) -> Conflict | None:
    """The first rules of a contract that no call can keep, if any."""
    try:
        return _Search(contract).conflict()
    except TooMuch:
        return None


# ---------------------------------------------------------------- the search


@frozen
class _Fact:
    """What a statement or test says that an expression can be."""

    origin: Clause | Condition
    value: Possible


@dataclass
class _Level:
    """One path through the branches: what is known of expressions there, by their text, and from where.

    `values` has what is known together with the levels above, of each expression that is spoken of here.
    """

    conditions: tuple[Condition, ...]
    above: _Level | None
    dead: bool = False
    values: dict[str, Possible] = field(default_factory=dict)
    facts: dict[str, list[_Fact]] = field(default_factory=dict)

    def value(self, text: str) -> Possible:
        level: _Level | None = self
        while level is not None:
            if text in level.values:
                return level.values[text]
            level = level.above
        return ANYTHING

    def facts_about(self, text: str) -> list[_Fact]:
        above = [] if self.above is None else self.above.facts_about(text)
        return above + self.facts.get(text, [])

    def add(self, text: str, fact: _Fact) -> bool:
        """Note a fact; False where the expression then has no value left."""
        self.values[text] = self.value(text).meet(fact.value)
        self.facts.setdefault(text, []).append(fact)
        return not self.values[text].is_empty

    def texts(self) -> set[str]:
        return set(self.facts) | (set() if self.above is None else self.above.texts())


class _Search:
    """Goes through the paths of a contract, those before the call first."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.steps = Steps()
        self.paths: dict[str, Path] = {}
        self.declared = Declared(contract)
        self.about: dict[tuple[bool, str], list[Clause]] = {}
        for clause in contract.clauses:
            if isinstance(clause.statement, Declare) and clause.certain:
                for name in self.declared.names(clause.statement):
                    self.about.setdefault((clause.after_call, name), []).append(clause)
        # What is known before the call and cannot change in it.
        self.lasting: dict[str, list[_Fact]] = {}

    def conflict(self) -> Conflict | None:
        alone = Judge(self._by_itself, self.contract, self.steps)
        for clause in self._rules():
            if alone.outcomes(clause.statement.expr.node).true is None:  # type: ignore[union-attr]
                return Conflict((clause,), clause.conditions)
        for after in (False, True):
            for level, clauses in self._levels(after):
                found = self._conflict_at(level, clauses, after)
                if found is not None:
                    return found
                if not after and not level.conditions:
                    self._keep_what_lasts(level)
        return None

    def _rules(self) -> Iterator[Clause]:
        return (clause for clause in self.contract.clauses if isinstance(clause.statement, Require))

    def _levels(self, after: bool) -> Iterator[tuple[_Level, list[Clause]]]:
        """Every path with the clauses that stand just there, those above it first."""
        clauses: dict[tuple[Condition, ...], list[Clause]] = {(): []}
        for clause in self.contract.clauses:
            if clause.after_call == after and clause.certain:
                for depth in range(len(clause.conditions)):
                    clauses.setdefault(clause.conditions[:depth], [])
                clauses.setdefault(clause.conditions, []).append(clause)
        levels: dict[tuple[Condition, ...], _Level] = {}
        for conditions in sorted(clauses, key=len):
            levels[conditions] = _Level(conditions, levels[conditions[:-1]] if conditions else None)
            yield levels[conditions], clauses[conditions]

    def _conflict_at(self, level: _Level, clauses: list[Clause], after: bool) -> Conflict | None:
        if level.above is not None and (level.above.dead or not self._enter(level, level.above, after)):
            level.dead = True  # no call that keeps the rest comes here, whatever the rules here say
            return None
        for clause in clauses:
            if isinstance(clause.statement, Declare) and level.above is not None:
                for text in sorted(level.texts()):
                    self.steps.take()
                    value = self.declared.told(self.paths[text], clause.statement) if text in self.paths else None
                    if value is not None and not level.add(text, _Fact(clause, value)):
                        return self._named(clause, value, level, text, after)
        judge = self._judge(level.conditions, after)
        for clause in clauses:
            if isinstance(clause.statement, Require):
                kept = judge.outcomes(clause.statement.expr.node).kept
                if kept is None:
                    return self._broken_by_types(clause, clause.statement, level, after)
                for text, value in kept.items():
                    if not level.add(text, _Fact(clause, value)):
                        return self._named(clause, value, level, text, after)
        return None

    def _enter(self, level: _Level, above: _Level, after: bool) -> bool:
        """Note what the test of a branch says; False where no call takes it."""
        condition = level.conditions[-1]
        outcomes = self._judge(above.conditions, after).outcomes(condition.test.node)
        state: State | None = outcomes.true if condition.wanted else outcomes.false
        return state is not None and all(level.add(text, _Fact(condition, value)) for text, value in state.items())

    def _keep_what_lasts(self, level: _Level) -> None:
        """A parameter that is a number, text or None stays what it is in the call, and so does a symbol."""
        for name in (*self.contract.parameters, *self.contract.symbols):
            facts = [*self._facts(Path(name), (), after=False), *level.facts.get(name, [])]
            if facts and reduce(Possible.meet, (fact.value for fact in facts)).meet(UNREAD).is_empty:
                self.lasting[name] = facts

    # ------------------------------------------------------------ what paths can be

    def _judge(self, conditions: tuple[Condition, ...], after: bool) -> Judge:
        def of_path(path: Path) -> Possible:
            values = [fact.value for fact in self._facts(path, conditions, after)]
            return reduce(Possible.meet, values, self._by_itself(path))

        return Judge(of_path, self.contract, self.steps)

    def _by_itself(self, path: Path) -> Possible:
        """What a path can be, whatever is declared; the path is noted."""
        self.paths[str(path)] = path
        return self.declared.by_itself(path)

    def _facts(self, path: Path, conditions: tuple[Condition, ...], after: bool) -> list[_Fact]:
        """What is declared of a path for the calls that come to these conditions."""
        found = list(self.lasting.get(str(path), ())) if after else []
        for clause in self.about.get((after, path.root), ()):
            self.steps.take()
            if isinstance(clause.statement, Declare) and clause.conditions == conditions[: len(clause.conditions)]:
                value = self.declared.told(path, clause.statement)
                if value is not None:
                    found.append(_Fact(clause, value))
        return found

    # ------------------------------------------------------------ what to name

    def _named(self, clause: Clause, value: Possible, level: _Level, text: str, after: bool) -> Conflict:
        """The clause with as few others as leave an expression no value."""
        known = level.facts_about(text)
        if text in self.paths:
            known = [*known, *self._facts(self.paths[text], level.conditions, after)]
        needed = [fact for fact in known if fact.origin is not clause]
        for fact in needed:
            if fact.value.meet(value).is_empty:
                return _conflict(clause, [fact.origin], level)
        for fact in needed[-_MOST_WEIGHED:]:
            rest = [other for other in needed if other is not fact]
            if reduce(Possible.meet, (other.value for other in rest), value).is_empty:
                needed = rest
        return _conflict(clause, [fact.origin for fact in needed], level)

    def _broken_by_types(self, clause: Clause, rule: Require, level: _Level, after: bool) -> Conflict:
        """The clause with as few others as make its condition false."""
        needed: list[_Fact] = []

        def known(path: Path) -> Possible:
            facts = self._facts(path, level.conditions, after)
            needed.extend(fact for fact in facts if all(fact.origin is not other.origin for other in needed))
            return reduce(Possible.meet, (fact.value for fact in facts), self._by_itself(path))

        Judge(known, self.contract, self.steps).outcomes(rule.expr.node)
        for fact in needed[-_MOST_WEIGHED:]:
            rest = [other for other in needed if other is not fact]
            if self._is_broken(rule, [other.origin for other in rest], level, after):
                needed = rest
        return _conflict(clause, [fact.origin for fact in needed], level)

    def _is_broken(self, rule: Require, origins: list[Clause | Condition], level: _Level, after: bool) -> bool:
        """Whether these make a rule's condition false."""

        def known(path: Path) -> Possible:
            facts = self._facts(path, level.conditions, after)
            values = [fact.value for fact in facts if any(fact.origin is origin for origin in origins)]
            return reduce(Possible.meet, values, self._by_itself(path))

        return Judge(known, self.contract, self.steps).outcomes(rule.expr.node).kept is None


def _conflict(clause: Clause, others: list[Clause | Condition], level: _Level) -> Conflict:
    found = list({id(origin): origin for origin in (*others, clause)}.values())
    clauses = tuple(origin for origin in found if isinstance(origin, Clause))
    return Conflict(clauses, level.conditions, tuple(origin for origin in found if isinstance(origin, Condition)))


# ---------------------------------------------------------------- the message


def _error(found: Conflict, contract: Contract) -> ContractError:
    *others, last = sorted(found.clauses, key=place_of)
    place = place_of(last)
    problem = f"no call can keep this: {said(last)}"
    if found.alone:
        return contract.source.error(problem + _why(last, contract), place)
    reasons = [given(clause, contract) for clause in others]
    for test in found.tests:
        line = contract.source.line(test.test.node)
        reasons.append(f"the branch of line {line} is for {meant(test)}")
    problem += f", while {' and '.join(reasons[:_MOST_NAMED])}"
    if found.tests:
        test = found.tests[0]
        problem += f"; to forbid the branch, write require({meant(replace(test, wanted=not test.wanted))})"
    return contract.source.error(problem, place)


def place_of(clause: Clause) -> Place:
    """Where a message about a clause points to: the condition of a rule."""
    statement = clause.statement
    return Place.of(statement.expr.node) if isinstance(statement, Require) else statement.place


def said(clause: Clause) -> str:
    """What a clause says, its reasons left out."""
    statement = clause.statement
    if isinstance(statement, Declare):
        return f"{statement.path}: {statement.type.text}"
    return statement.expr.text if isinstance(statement, Require) else statement.text


def given(clause: Clause, contract: Contract) -> str:
    """What a clause says, and where, as the reason for something else."""
    statement = clause.statement
    line = contract.source.line(place_of(clause))
    if isinstance(statement, Declare):
        return f"{statement.path} is declared as {statement.type.text} in line {line}"
    what = "promised" if isinstance(statement, Require) and statement.promised else "required"
    return f"{said(clause)} is {what} in line {line}"


def meant(condition: Condition) -> str:
    """The condition on which a branch is taken."""
    return condition.test.text if condition.wanted else f"not ({condition.test.text})"


def _why(clause: Clause, contract: Contract) -> str:
    """What to look for in a rule that is never true by itself."""
    assert isinstance(clause.statement, Require)
    node = clause.statement.expr.node
    for part in ast.walk(node):
        match part:
            case ast.BinOp(op=ast.Div() | ast.FloorDiv() | ast.Mod(), right=ast.Constant(value=0)):
                return f"; {ast.unparse(part)} divides by zero"
    if any(contract.symbols.get(name) == "size" for name in names_in(node)):
        return "; sizes are whole numbers from 0 on"
    return "; it is never true"
