"""For every rule of a contract, calls that break it and as few others as can be; `explain` says which they are."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from llm_op_guard.contract.model import Clause, Contract, Rule
from llm_op_guard.faults.answers import with_answer
from llm_op_guard.faults.edits import Edit, edits_at, of_dtypes, of_sizes, of_the_batch, swaps
from llm_op_guard.faults.ingredients import Ingredient, Ingredients
from llm_op_guard.faults.judge import Judgement, judge
from llm_op_guard.faults.solve import changed, hints_of
from llm_op_guard.guard.call import Call, Spec, to_json

# Of valid calls, so many are changed in every way that there is.
_CHANGED_CALLS = 8
# Of a rule, so many mutants are kept, each of another kind.
MOST_OF_A_RULE = 12
_TRIES = 400


@dataclass(frozen=True)
class Mutant:
    """A call that breaks a rule, made from the valid call `origin` as `kind` says; `others` is what else it breaks."""

    rule: str
    kind: str
    call: Call
    origin: Call
    others: tuple[str, ...]

    @property
    def id(self) -> str:
        """The same for the same rule and call, whatever else was made."""
        text = json.dumps([self.rule, self.kind, to_json(self.call)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]


def breakable(contract: Contract) -> list[Rule]:
    """The rules that a call can break: all but the promises, which the operator keeps."""
    late = {id(clause.statement) for clause in contract.clauses if clause.after_call}
    return [rule for rule in contract.rules if id(rule.statement) not in late]


def mutants(made_of: Ingredients, valid: list[Judgement], seed: int) -> dict[str, list[Mutant]]:
    """By rule, the mutants found: those that break the fewest other rules first, each of another kind."""
    found: dict[str, dict[str, Mutant]] = {rule.id: {} for rule in breakable(made_of.contract)}
    for judgement in valid[:_CHANGED_CALLS]:
        for edit in _all_edits(made_of, judgement):
            _keep(found, made_of.contract, edit, judgement.call)
    random_of = random.Random(seed)
    for rule in breakable(made_of.contract):
        if not any(not mutant.others for mutant in found[rule.id].values()):
            for edit, origin in _searched(made_of, rule, valid, random_of):
                _keep(found, made_of.contract, edit, origin)
    return {rule: _best(list(kinds.values())) for rule, kinds in found.items()}


def _all_edits(made_of: Ingredients, judgement: Judgement) -> Iterator[Edit]:
    hints = hints_of(judgement)
    for choice in made_of.choices:
        if choice.kind != "answer":
            yield from edits_at(judgement.call, choice, made_of, hints)
        else:
            for answer in (*made_of.numbers, 0, 1, 7, 96, *hints, True, False):
                yield from _of_answer(made_of, judgement, choice, answer)
    yield from swaps(judgement.call)
    yield from of_the_batch(judgement.call)
    yield from of_dtypes(judgement.call)
    yield from of_sizes(judgement.call)


def _of_answer(made_of: Ingredients, judgement: Judgement, choice: Ingredient, answer: Spec) -> Iterator[Edit]:
    call = with_answer(judgement.call, choice, answer, made_of.contract)
    if call != judgement.call:
        yield Edit("another object", choice.path, call)


def _keep(found: dict[str, dict[str, Mutant]], contract: Contract, edit: Edit, origin: Call) -> None:
    judgement = judge(contract, edit.call)
    if judgement is None:
        return
    for rule in judgement.broken:
        if rule in found:
            others = tuple(other for other in judgement.broken if other != rule)
            known = found[rule].get(edit.kind)
            if known is None or len(others) < len(known.others):
                found[rule][edit.kind] = Mutant(rule, edit.kind, edit.call, origin, others)


def _best(made: list[Mutant]) -> list[Mutant]:
    return list(islice(sorted(made, key=lambda mutant: len(mutant.others)), MOST_OF_A_RULE))


def _searched(
    made_of: Ingredients, rule: Rule, valid: list[Judgement], random_of: random.Random
) -> Iterator[tuple[Edit, Call]]:
    """Several changes in a row, from valid calls, until the rule is broken; then until nothing else is."""
    clause = next(clause for clause in made_of.contract.clauses if clause.statement is rule.statement)
    options = made_of.mentioned(clause) + made_of.read_by([c.test.node for c in clause.conditions])
    if not options or not valid:
        return
    now = origin = random_of.choice(valid)
    for step in range(_TRIES):
        if step % 40 == 0:
            now = origin = random_of.choice(valid)
        call = changed(made_of, now, random_of.choice(options), random_of)
        new = judge(made_of.contract, call) if call is not None else None
        if new is None:
            continue
        if rule.id in new.broken:
            yield Edit("several changes", options[0].path, new.call), origin.call
            if len(new.broken) == 1:
                return
        if _away(new, clause, rule.id) <= _away(now, clause, rule.id):
            now = new


def _away(judgement: Judgement, clause: Clause, rule: str) -> tuple[int, int]:
    broken = rule in judgement.broken
    return (0 if broken else 1 + judgement.away_from(clause), len(judgement.broken) - broken)
