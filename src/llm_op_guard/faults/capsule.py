"""A violation as a small file that anyone can replay: what was broken, and the call as data, without its contents."""

from __future__ import annotations

import json
import platform
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.validate import clauses_of
from llm_op_guard.errors import LlmOpGuardError
from llm_op_guard.faults.edits import edits_at
from llm_op_guard.faults.ingredients import Ingredient, ingredients
from llm_op_guard.faults.judge import Judgement, judge
from llm_op_guard.faults.made_up import is_incomplete, made_up, not_held
from llm_op_guard.faults.solve import hints_of
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.call import Call, Entry, Spec, TensorSpec, TorchSpec
from llm_op_guard.guard.call_json import from_json, to_json
from llm_op_guard.guard.reads import expressions_of, reads_of
from llm_op_guard.guard.violation import Violation

FORMAT = 1
_LIBRARIES = ("torch", "transformers", "vllm", "numpy")
_TRIES = 600
# Where the rule is broken already, and it is only that others are too, or that another element is named.
_TRIES_FOR_MORE = 120
_PLAIN_FILLS = ((0,), (1,), (2,), (-1,), (0, 1))
# What a capsule is meant to stay below.
TWO_KILOBYTES = 2048
# Much more than a call can come to.
MOST_BYTES = 1 << 20


class CapsuleError(LlmOpGuardError):
    """A capsule that is none, or that cannot be made or replayed; the text says why."""


@frozen
class Capsule:
    """What is kept of one violation.

    `rules` are the rules that the call broke, the one that the capsule is about first; `observed` and `expected` what
    was wrong; `place` who called, without folders; `versions` what was running.
    """

    contract: str
    contract_hash: str
    operator: str
    site: str
    rules: tuple[str, ...]
    observed: str
    expected: str
    place: str
    versions: Mapping[str, str]
    call: Call

    def to_json(self) -> dict[str, Any]:
        """The capsule as JSON-ready data."""
        return {
            "capsule": FORMAT,
            "contract": self.contract,
            "contract_hash": self.contract_hash,
            "operator": self.operator,
            "site": self.site,
            "rules": list(self.rules),
            "observed": self.observed,
            "expected": self.expected,
            "place": self.place,
            "versions": dict(self.versions),
            "call": to_json(self.call),
        }


def versions() -> dict[str, str]:
    """What is running: Python, and the libraries that are loaded."""
    loaded = {name: str(getattr(sys.modules[name], "__version__", "")) for name in _LIBRARIES if name in sys.modules}
    return {"python": platform.python_version(), **loaded}


def capsule_of(violation: Violation) -> Capsule:
    """The capsule of a violation. Raises CapsuleError for one of which the call is not known."""
    if violation.call is None:
        raise CapsuleError(f"{violation.summary}: the call of this violation could not be kept as data")
    site = violation.call_site
    place = "" if site is None else f"{PurePath(site.file).name}:{site.line} in {site.function}"
    return Capsule(
        violation.contract_id, violation.contract_hash, violation.operator, violation.site, (violation.rule_id,),
        violation.observed, violation.expected, place, versions(), violation.call,
    )  # fmt: skip


def read(text: str) -> Capsule:
    """The capsule in a file, or that of the first violation in the lines of `llm-op-guard run --record`.

    Raises CapsuleError, saying what is wrong, for anything else.
    """
    if len(text) > MOST_BYTES:
        raise CapsuleError(f"a capsule has some kilobytes; this file has {len(text)} characters")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = next(_recorded(text), None)
    if isinstance(data, dict) and "diagnosis" in data:
        data = _of_diagnosis(data["diagnosis"])
    if not isinstance(data, dict) or "capsule" not in data:
        raise CapsuleError(
            'no capsule: a capsule is JSON with "capsule": 1; violations of `run --record` have one each'
        )
    return _capsule(data)


def _recorded(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("diagnosis"), dict) and entry["diagnosis"].get("call"):
            yield entry


def _of_diagnosis(found: Any) -> Any:
    if not isinstance(found, dict) or not isinstance(found.get("call"), dict):
        return None
    named = {"contract": found.get("contract_id"), "rules": [found.get("rule_id")]}
    return {**found, **named, "capsule": FORMAT, "place": "", "versions": {}}


def _capsule(data: dict[str, Any]) -> Capsule:
    if data["capsule"] != FORMAT:
        raise CapsuleError(
            f"a capsule of format {data['capsule']!r}; this version of llm-op-guard reads format {FORMAT}"
        )
    texts = {name: data.get(name) for name in ("contract", "contract_hash", "operator", "site", "observed", "expected")}
    rules, told = data.get("rules"), data.get("versions", {})
    if not all(isinstance(text, str) for text in texts.values()):
        wrong = next(name for name, text in texts.items() if not isinstance(text, str))
        raise CapsuleError(f"the capsule has no text {wrong!r}")
    if not isinstance(rules, list) or not rules or not all(isinstance(rule, str) for rule in rules):
        raise CapsuleError('the capsule has no list of "rules"')
    if not isinstance(told, dict):
        raise CapsuleError('"versions" of a capsule are names and texts')
    try:
        call = from_json(data.get("call"))
    except (ValueError, RecursionError) as error:
        raise CapsuleError(f"the call of the capsule cannot be read: {error}") from None
    known = {name: str(text) for name, text in texts.items()}
    return Capsule(**known, rules=tuple(rules), place=str(data.get("place", "")), versions=told, call=call)


# ---------------------------------------------------------------- replay


@frozen
class Replay:
    """A call made from a capsule, and what its contract says of it now.

    `reproduced`: the rule that the capsule is about is broken again. `contract_changed`: the contract says something
    else than when the capsule was made.
    """

    capsule: Capsule
    judgement: Judgement
    contract_changed: bool

    @property
    def reproduced(self) -> bool:
        """Whether the rule is broken again."""
        return self.capsule.rules[0] in self.judgement.broken

    @property
    def elsewhere(self) -> str:
        """What is told of the rule where that is not what the capsule tells: of another element, another item."""
        found = [v.observed for v in self.judgement.violations if v.rule_id == self.capsule.rules[0]]
        about_values = any(
            clause.cost_class != "A" for clause in clauses_of(self.judgement.contract, self.capsule.rules[0])
        )
        told = _element_told if about_values else _item_told
        return "" if not found or told(self.capsule.observed) in map(told, found) else _element_told(found[0])

    @property
    def not_held(self) -> list[str]:
        """What the rule reads that the capsule does not hold, and that was made up."""
        return not_held(self.capsule.call, self.judgement.contract, self.capsule.rules[0])


def replay(capsule: Capsule, contract: Contract) -> Replay:
    """Make the call of a capsule anew and judge it.

    Where the rule is about values that the capsule does not hold, made-up ones are sought which break it, at the same
    element, and no other rule. Raises CapsuleError for a call that cannot be made on this machine.
    """
    changed = contract.hash != capsule.contract_hash
    unknown = {name for name, _ in capsule.call.arguments}.difference((*contract.parameters, "result"))
    if unknown and not changed:
        raise CapsuleError(f"{capsule.contract} has no parameter {min(unknown)!r}, which the call of the capsule has")
    if changed:  # a contract that says something else now may well say nothing of this call
        return Replay(capsule, _made_here(contract, made_up(capsule.call, 1)), changed)
    search = _Search(contract, capsule)
    return Replay(capsule, search.nearest(search.start()), changed)


def _made_here(contract: Contract, call: Call) -> Judgement:
    judgement = _judged(contract, call)
    if judgement is None:
        raise CapsuleError("the call of the capsule cannot be made here: its tensors are too large or of unknown kinds")
    return judgement


def _judged(contract: Contract, call: Call) -> Judgement | None:
    # Tensors of an accelerator are made on the CPU where there is none: the rules are the same.
    return judge(contract, call) or judge(contract, _on_cpu(call))


def _on_cpu(call: Call) -> Call:
    kinds = dict.fromkeys(tensor.device for _, tensor in call.tensors() if tensor.device not in ("cpu", "meta"))
    # Two devices stay two: the first is the CPU, another stands as meta, which has no values.
    stand_in = {device: "cpu" if index == 0 else "meta" for index, device in enumerate(kinds)}
    for path, tensor in call.tensors():
        call = call.put(path, replace(tensor, device=stand_in.get(tensor.device, tensor.device)))
    if call.entry is not None:
        names = tuple((name, _moved(spec, stand_in)) for name, spec in call.entry.names)
        models = tuple((path, replace(m, device=stand_in.get(m.device, m.device))) for path, m in call.entry.tensors)
        call = replace(call, entry=Entry(names, models))
    return call


def _moved(spec: Spec, stand_in: Mapping[str, str]) -> Spec:
    if isinstance(spec, TorchSpec) and spec.kind == "device":
        return replace(spec, name=stand_in.get(spec.name, spec.name))
    if isinstance(spec, TensorSpec):
        return replace(spec, device=stand_in.get(spec.device, spec.device))
    return spec


class _Search:
    """Seeks values for what the capsule does not hold."""

    def __init__(self, contract: Contract, capsule: Capsule) -> None:
        self._contract = contract
        self._wanted = capsule.rules
        self._told = capsule.observed
        self._call = capsule.call
        self._kept = {path: tensor.at for path, tensor in made_up(capsule.call, 1).tensors()}
        made_of = ingredients(contract)
        self._made_of = replace(made_of, choices=(*made_of.choices, Ingredient(Path("result"), "tensor")))
        # A loop over tensors reads their values, and of what it goes through the object.
        self._read = {
            read.path
            for clause in contract.clauses
            for node in expressions_of(clause)
            for read in reads_of(node, contract)
            if read.aspect == "value" or clause.cost_class != "A"
        }

    def start(self) -> Judgement:
        """A judgement with one number for all that the capsule does not hold, the one that is the least away."""
        best = _made_here(self._contract, made_up(self._call, 1))
        if not is_incomplete(self._call):
            return best
        spoken = [n for known in self._made_of.numbers for n in (known, known - 1, known + 1)]
        for number in dict.fromkeys((*(fill for (fill, *_) in _PLAIN_FILLS), *spoken)):
            if self._away(best) == (0, False, 0) and not set(best.broken).difference(self._wanted):
                break
            new = _judged(self._contract, made_up(self._call, number))
            if new is not None and self._all_away(new) < self._all_away(best):
                best = new
        return best

    def _all_away(self, judgement: Judgement) -> tuple[int, bool, int]:
        lacking, elsewhere, _ = self._away(judgement)
        return lacking, elsewhere, len(set(judgement.broken).difference(self._wanted))

    def nearest(self, start: Judgement) -> Judgement:
        """A judgement of the same metadata that is the least away from what the capsule says."""
        best = now = self._filled(start)
        random_of = random.Random(start.call.seed)
        for step in range(_TRIES):
            away = self._away(best)
            if away == (0, False, 0) or (away[0] == 0 and step >= _TRIES_FOR_MORE):
                break
            if step % 30 == 0:
                now = best
            options = list(self._value_edits(now))
            if not options:
                break
            new = judge(self._contract, random_of.choice(options))
            if new is not None and self._away(new) <= self._away(now):
                now = new
            if self._away(now) < away:
                best = now
        return best

    def _filled(self, start: Judgement) -> Judgement:
        """With plain values in one tensor after the other, where that is nearer: noise is seldom within bounds."""
        best = start
        for path in self._concerned(start):
            for fill in _PLAIN_FILLS:
                old = best.call.get(path)
                if self._away(best) == (0, False, 0) or not isinstance(old, TensorSpec):
                    break
                new = judge(self._contract, best.call.put(path, replace(old, fill=fill)))
                if new is not None and self._away(new) < self._away(best):
                    best = new
        return best

    def _away(self, judgement: Judgement) -> tuple[int, bool, int]:
        """Wanted rules that are not broken; whether the first tells of another element; rules about values besides."""
        return len(self._lacking(judgement)), self._tells_of_another(judgement), len(self._besides(judgement))

    def _lacking(self, judgement: Judgement) -> set[str]:
        return set(self._wanted).difference(judgement.broken)

    def _tells_of_another(self, judgement: Judgement) -> bool:
        first = [v for v in judgement.violations if v.rule_id == self._wanted[0]]
        told = _item_told if first and first[0].cost_class == "A" else _element_told
        return bool(first) and told(first[0].observed) != told(self._told)

    def _besides(self, judgement: Judgement) -> set[str]:
        # Whatever tensors hold, rules about their shapes stay broken.
        return {v.rule_id for v in judgement.violations if v.cost_class != "A"}.difference(self._wanted)

    def _concerned(self, judgement: Judgement) -> list[Path]:
        """The tensors whose values decide about the rules that are to be broken, or not to be."""
        wrong = self._lacking(judgement) | self._besides(judgement)
        wrong |= {self._wanted[0]} if self._tells_of_another(judgement) else set()
        if not wrong:
            return []
        clauses = [clause for rule in sorted(wrong) for clause in clauses_of(self._contract, rule)]
        nodes = [node for clause in clauses for node in expressions_of(clause)]
        # Of a test that could not be made (`if first(x) > 1`) there is no statement.
        decisive = {choice.path for choice in self._made_of.read_by(nodes)} & self._read if clauses else self._read
        return [path for path, _ in judgement.call.tensors() if any(_leads_to(start, path) for start in decisive)]

    def _value_edits(self, now: Judgement) -> Iterator[Call]:
        """Changes of what tensors hold, and of nothing else; the elements that the capsule has stay as they are."""
        for path in self._concerned(now):
            old, kept = now.call.get(path), dict(self._kept.get(path, ()))
            for edit in edits_at(now.call, Ingredient(path, "tensor"), self._made_of, hints_of(now)):
                new = edit.call.get(path)
                if isinstance(new, TensorSpec) and isinstance(old, TensorSpec) and _is_like(new, old):
                    yield now.call.put(path, replace(new, at=tuple({**dict(new.at), **kept}.items())))


def _is_like(one: TensorSpec, other: TensorSpec) -> bool:
    return replace(one, fill=None, at=()) == replace(other, fill=None, at=())


def _leads_to(start: Path, path: Path) -> bool:
    return start.root == path.root and path.steps[: len(start.steps)] == start.steps


def _element_told(observed: str) -> str:
    """What is said of one element, without how many others there are."""
    return observed.partition(" (of ")[0]


def _item_told(observed: str) -> str:
    """Which item of a loop is told of, and of its number; of a rule about metadata all else is the same anywhere."""
    what, found, where = observed.rpartition(" at item ")
    return f"{what}{found}{where}" if found else ""


@frozen
class Replayed:
    """What became of a capsule: its size in bytes, and why it does not replay to the same rule; empty where it does.

    `elsewhere` says that it does, but that the diagnosis tells of another element than the capsule.
    """

    rule: str
    size: int
    reason: str = ""
    elsewhere: bool = False


def retried(violation: Violation, contract: Contract) -> Replayed:
    """Write the capsule of a violation, read it and replay it."""
    rule = violation.rule_id
    try:
        text = json.dumps(capsule_of(violation).to_json())
    except CapsuleError as error:
        return Replayed(rule, 0, str(error))
    try:
        replayed = replay(read(text), contract)
    except CapsuleError as error:
        return Replayed(rule, len(text), str(error))
    if not replayed.reproduced:
        return Replayed(rule, len(text), f"it breaks {', '.join(replayed.judgement.broken) or 'nothing'}")
    return Replayed(rule, len(text), elsewhere=bool(replayed.elsewhere))
