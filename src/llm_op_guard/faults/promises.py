"""For every promise of a contract, results that break it: made up, as the operator would have returned them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from llm_op_guard.contract.model import Contract, Remember, Rule
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.validate import clauses_of
from llm_op_guard.faults.edits import Edit, edits_at
from llm_op_guard.faults.entry import before_return, known_before
from llm_op_guard.faults.ingredients import Ingredient, Ingredients, ingredients
from llm_op_guard.faults.judge import Judgement, judge
from llm_op_guard.faults.mutants import MOST_OF_A_RULE, Mutant, distinct, keep, promised
from llm_op_guard.faults.solve import changed, hints_of, valid_calls
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.capture import entry_of

_RESULT = Path("result")
# So many calls with a result are tried, and so many of their results changed in every way that there is.
_MOST_CALLS = 40
_CHANGED_CALLS = 6
_TRIES = 100


@frozen
class Returned:
    """Calls that have returned: with results that keep every promise, and, by rule, with results that break it."""

    kept: list[Judgement]
    broken: dict[str, list[Mutant]]


def returned(contract: Contract, valid: list[Judgement], seed: int) -> Returned:
    """Give calls results; `valid` are calls for which none may be found that keeps every promise."""
    rules = promised(contract)
    if not rules:
        return Returned([], {})
    made_of = ingredients(_with_result(contract))
    found = valid_calls(made_of, seed, min(len(valid), _MOST_CALLS), attempts=4 * _MOST_CALLS)
    kept = [judgement for one in found if (judgement := _returned(contract, one)) is not None and not judgement.broken]
    without = [judgement for one in valid if (judgement := _returned(contract, one)) is not None]
    starts = kept or without
    kinds: dict[str, dict[str, Mutant]] = {rule.id: {} for rule in rules}
    for start in starts[:_CHANGED_CALLS]:
        for edit in _edits(made_of, start):
            if (changed_one := judge(contract, edit.call)) is not None:
                _keep(kinds, changed_one, edit.kind, start)
    for start in without:
        # The promise to leave something else behind is broken by an operator that does nothing.
        _keep({rule: ways for rule, ways in kinds.items() if not ways}, start, "none, and nothing done", start)
    random_of = random.Random(seed)
    for rule in rules:
        if not kinds[rule.id] and starts:
            _search(kinds, made_of, rule, starts, random_of)
    best = {rule: distinct(sorted(ways.values(), key=lambda one: len(one.others))) for rule, ways in kinds.items()}
    return Returned(kept, {rule: ways[:MOST_OF_A_RULE] for rule, ways in best.items()})


def _with_result(contract: Contract) -> Contract:
    """A contract of which the result is one more argument, which makes promises rules of the call."""
    clauses = tuple(
        replace(clause, after_call=False) for clause in contract.clauses if not isinstance(clause.statement, Remember)
    )
    parameters = (*(name for name in contract.parameters if name != _RESULT.root), _RESULT.root)
    return replace(contract, parameters=parameters, clauses=clauses)


def _returned(contract: Contract, found: Judgement) -> Judgement | None:
    """The call after it has returned its result, None where it has none; None for a call that is not valid itself."""
    call = found.call.without(_RESULT)
    before = judge(contract, call)
    if before is None or before.broken:
        return None
    result = dict(found.call.arguments).get(_RESULT.root)
    entry = entry_of(contract, known_before(contract, before.arguments))
    return judge(contract, replace(call.put(_RESULT, result), entry=entry))


def _edits(made_of: Ingredients, start: Judgement) -> Iterator[Edit]:
    for choice in made_of.choices:
        if choice.path.root == _RESULT.root and choice.kind != "answer":
            yield from edits_at(start.call, choice, made_of, hints_of(start))


def _keep(kinds: dict[str, dict[str, Mutant]], judgement: Judgement, kind: str, start: Judgement) -> None:
    keep(kinds, judgement, f"result: {kind}", before_return(start.call))


def _search(
    kinds: dict[str, dict[str, Mutant]],
    made_of: Ingredients,
    rule: Rule,
    starts: list[Judgement],
    random_of: random.Random,
) -> None:
    """Several changes of a result in a row, until the promise is broken."""
    options: list[Ingredient] = [
        choice
        for clause in clauses_of(made_of.contract, rule.id)
        for choice in made_of.mentioned(clause) + made_of.read_by([test.test.node for test in clause.conditions])
        if choice.path.root == _RESULT.root
    ]
    if not options:
        return
    contract, now = starts[0].contract, starts[0]
    for step in range(_TRIES):
        if step % 20 == 0:
            now = random_of.choice(starts)
        call = changed(made_of, now, random_of.choice(options), random_of)
        new = judge(contract, call) if call is not None else None
        if new is None:
            continue
        _keep({rule.id: kinds[rule.id]}, new, "several changes", now)
        if kinds[rule.id]:
            return
        now = new
