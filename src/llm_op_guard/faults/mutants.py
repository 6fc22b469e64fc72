"""For every rule of a contract, calls that break it and as few others as can be; `explain` says which they are."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from llm_op_guard.contract.model import Clause, Contract, Rule
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.unbreakable import unbreakable
from llm_op_guard.contract.validate import clauses_of
from llm_op_guard.faults.answers import LENGTHS, identities, with_answer
from llm_op_guard.faults.build import MOST_ELEMENTS
from llm_op_guard.faults.edits import Edit, edits_at, of_dtypes, of_sizes, of_the_batch, swaps
from llm_op_guard.faults.ingredients import Ingredient, Ingredients
from llm_op_guard.faults.judge import Judgement, judge
from llm_op_guard.faults.solve import changed, hints_of
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.call import Call, ObjectSpec, Spec
from llm_op_guard.guard.call_json import to_json

# Of valid calls, so many are changed in every way that there is.
CHANGED_CALLS = 8
# What tensors are filled with instead of one value, the most different elements first.
_REAL_FILLS = (None, (0.25, 0.75, 0.5), (1.0, 2.0, 4.0))
_WHOLE_FILLS = (tuple(range(64)), (0, 1, 2), (1, 0), (0, 1), None)
_BOOL_FILLS = ((1, 0), (0, 1), None)
# And objects of so many others are tried in them.
_OTHERS = 2
# Of the numbers that a contract spells so many are tried as sizes, as far as tensors of them are soon made.
_MOST_SIZES = 6
_LARGEST_SIZE = 4096
# Of a rule, so many mutants are kept, each of another kind.
MOST_OF_A_RULE = 12
# For one that a single change does not break alone, so often a way is looked for from one of so many of the nearest
# valid calls, so many steps far; for each step so many changes are tried.
_ATTEMPTS = 10
_NEAREST = 3
_STEPS = 8
_TRIES = 25


@frozen
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


def promised(contract: Contract) -> list[Rule]:
    """The rules that the operator keeps: those about its result, and about what it leaves behind."""
    late = {id(clause.statement) for clause in contract.clauses if clause.after_call}
    return [rule for rule in contract.rules if id(rule.statement) in late]


def breakable(contract: Contract) -> list[Rule]:
    """The rules that a call can break: neither promises, nor those that are never false."""
    kept, never = {id(rule.statement) for rule in promised(contract)}, unbreakable(contract)
    return [rule for rule in contract.rules if id(rule.statement) not in kept and rule.id not in never]


def mutants(
    made_of: Ingredients, valid: list[Judgement], seed: int, told: Callable[[Judgement | None], None] | None = None
) -> dict[str, list[Mutant]]:
    """By rule, the mutants found: those that break the fewest other rules first, each of another kind.

    Each change of a valid call is `told`, None where it cannot be made here: they are not kept, as their tensors are
    large together.
    """
    rules = breakable(made_of.contract)
    found: dict[str, dict[str, Mutant]] = {rule.id: {} for rule in rules}
    judged: set[Call] = {judgement.call for judgement in valid}
    # Of tensors that have no contents here, little can be changed, and an operator may make contents for them.
    valid = [judgement for judgement in valid if not is_huge(judgement.call)] or valid
    for number, judgement in enumerate(valid[:CHANGED_CALLS]):
        for edit in all_edits(made_of, judgement, valid[number + 1 : number + 1 + _OTHERS]):
            if edit.call not in judged:
                judged.add(edit.call)
                new = judge(made_of.contract, edit.call)
                if told is not None:
                    told(new)
                if new is not None:
                    keep(found, new, edit.kind, judgement.call)
    random_of = random.Random(seed)
    for rule in rules:
        if not any(not mutant.others for mutant in found[rule.id].values()):
            for edit, new, origin in _searched(made_of, rule, valid, random_of):
                keep(found, new, edit.kind, origin)
    return {rule: _best(list(kinds.values())) for rule, kinds in found.items()}


def distinct(made: Iterable[Mutant]) -> list[Mutant]:
    """The first of those whose arguments are the same, however they came about and whatever their seeds are."""
    found: dict[str, Mutant] = {}
    for mutant in made:
        found.setdefault(_arguments(mutant.call), mutant)
    return list(found.values())


def _arguments(call: Call) -> str:
    return json.dumps(to_json(replace(call, seed=0)), sort_keys=True)


def varied(judgement: Judgement, *, whole_numbers: bool = True) -> Judgement:
    """The valid call with different elements in its tensors of one value, as far as the contract lets it have them.

    Where all elements are 1 or 0, calls of other shapes and dtypes may come to the same, whatever an operator makes of
    them. With `whole_numbers` those vary, too: an operator may take them for indices.
    """
    now = judgement
    for path, spec in judgement.call.tensors():
        is_real = spec.dtype.startswith(("float", "bfloat", "complex"))
        if spec.fill is None or len(set(spec.fill)) != 1 or not spec.elements or not (is_real or whole_numbers):
            continue
        for fill in _REAL_FILLS if is_real else _BOOL_FILLS if spec.dtype == "bool" else _WHOLE_FILLS:
            new = judge(now.contract, now.call.put(path, replace(spec, fill=fill)))
            if new is not None and not new.broken:
                now = new
                break
    return now


def is_huge(call: Call) -> bool:
    """Whether a call has tensors that are too large to hold anything on this machine."""
    return any(spec.elements > MOST_ELEMENTS for _, spec in call.tensors())


def all_edits(made_of: Ingredients, judgement: Judgement, others: list[Judgement]) -> Iterator[Edit]:
    """Every change to a valid call; `others` are valid calls whose objects may take the place of its own."""
    hints = hints_of(judgement)
    for choice in made_of.choices:
        if choice.kind != "answer":
            yield from edits_at(judgement.call, choice, made_of, hints)
        else:
            for answer in identities(choice) or (*made_of.numbers, 0, 1, *LENGTHS, *hints, True, False):
                yield from _of_answer(made_of, judgement, choice, answer)
        if choice.kind == "object":
            for other in others:
                yield from _from_another_call(judgement.call, choice.path, other.call)
    yield from swaps(judgement.call)
    yield from of_the_batch(judgement.call)
    yield from of_dtypes(judgement.call)
    yield from of_sizes(judgement.call, _sizes_spelt(made_of))


def _sizes_spelt(made_of: Ingredients) -> list[int]:
    """Sizes at the numbers that a contract speaks of, and one behind."""
    numbers = [n for n in made_of.numbers if isinstance(n, int) and 2 < n <= _LARGEST_SIZE][:_MOST_SIZES]
    return [size for number in numbers for size in (number, number + 1)]


def _of_answer(made_of: Ingredients, judgement: Judgement, choice: Ingredient, answer: Spec) -> Iterator[Edit]:
    call = with_answer(judgement.call, choice, answer, made_of.contract)
    if call != judgement.call:
        yield Edit("another object", choice.path, call)


def _from_another_call(call: Call, path: Path, other: Call) -> Iterator[Edit]:
    """The object of another valid call: a cache that another model filled, a module of another layer."""
    mine, its = call.get(path), other.get(path)
    if mine != its and isinstance(its, ObjectSpec):
        yield Edit("an object of another call", path, call.put(path, its))


def keep(found: dict[str, dict[str, Mutant]], judgement: Judgement, kind: str, origin: Call) -> None:
    """Note, by the rules in `found`, a call that breaks them: of a kind the one that breaks the fewest others."""
    for rule in judgement.broken:
        if rule in found:
            others = tuple(other for other in judgement.broken if other != rule)
            known = found[rule].get(kind)
            if known is None or len(others) < len(known.others):
                found[rule][kind] = Mutant(rule, kind, judgement.call, origin, others)


def _best(made: list[Mutant]) -> list[Mutant]:
    """Those that break the least else, and of these one of each family of kinds before the second of any."""
    ranked: list[tuple[int, int, Mutant]] = []
    seen: Counter[tuple[int, str]] = Counter()
    for mutant in distinct(sorted(made, key=lambda mutant: len(mutant.others))):
        family = (len(mutant.others), re.sub(r"[-\d.]+|, .*", "", mutant.kind))
        ranked.append((len(mutant.others), seen[family], mutant))
        seen[family] += 1
    return [mutant for *_, mutant in sorted(ranked, key=lambda one: one[:2])[:MOST_OF_A_RULE]]


def _searched(
    made_of: Ingredients, rule: Rule, valid: list[Judgement], random_of: random.Random
) -> Iterator[tuple[Edit, Judgement, Call]]:
    """Several changes in a row, from the valid calls that are nearest to breaking the rule, until it alone is broken.

    At each step what stands in the way is changed: the first condition that is not met, then the rule itself.
    """
    for clause in clauses_of(made_of.contract, rule.id):
        nearest = sorted(valid, key=lambda judgement: judgement.away_from_breaking(clause))
        for attempt in range(_ATTEMPTS):
            if not nearest:
                return
            now = origin = nearest[attempt % min(len(nearest), _NEAREST)]
            for _ in range(_STEPS):
                new = _nearer(made_of, rule, clause, now, random_of)
                if new is None:
                    break
                if rule.id in new.broken:
                    yield Edit("several changes", made_of.choices[0].path, new.call), new, origin.call
                    if len(new.broken) == 1:
                        return
                now = new


def _nearer(
    made_of: Ingredients, rule: Rule, clause: Clause, now: Judgement, random_of: random.Random
) -> Judgement | None:
    """A call that is nearer to breaking the rule alone, by one change; failing that one that is as near."""
    unmet = now.first_unmet(clause)
    if unmet is not None:
        options = made_of.read_by([unmet.test.node])
    else:
        options = made_of.mentioned(clause)
        if rule.id in now.broken:  # what else is broken is in the way
            others = [c for other in now.broken if other != rule.id for c in clauses_of(made_of.contract, other)]
            options = [choice for other in others for choice in made_of.mentioned(other)]
    if not options:
        return None
    away, as_near = _away(now, clause, rule.id), None
    for _ in range(_TRIES):
        call = changed(made_of, now, random_of.choice(options), random_of)
        new = judge(made_of.contract, call) if call is not None and call != now.call else None
        if new is None:
            continue
        found = _away(new, clause, rule.id)
        if found < away:
            return new
        if found == away:
            as_near = new
    return as_near


def _away(judgement: Judgement, clause: Clause, rule: str) -> tuple[int, int]:
    broken = rule in judgement.broken
    return (0 if broken else 1 + judgement.away_from_breaking(clause), len(judgement.broken) - broken)
