"""A violation as a small file that anyone can replay: what was broken, and the call as data, without its contents."""

from __future__ import annotations

import json
import platform
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from llm_op_guard.contract.model import Contract
from llm_op_guard.errors import LlmOpGuardError
from llm_op_guard.faults.edits import Edit, edits_at
from llm_op_guard.faults.ingredients import Ingredients, ingredients
from llm_op_guard.faults.judge import Judgement, judge
from llm_op_guard.faults.solve import hints_of
from llm_op_guard.guard.call import Call, TensorSpec, from_json, to_json
from llm_op_guard.guard.violation import Violation

FORMAT = 1
_LIBRARIES = ("torch", "transformers", "vllm", "numpy")
_TRIES = 600
# Much more than a call can come to.
MOST_BYTES = 1 << 20


class CapsuleError(LlmOpGuardError):
    """A capsule that is none, or that cannot be made or replayed; the text says why."""


@dataclass(frozen=True)
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


def capsule_of(violation: Violation, also: tuple[Violation, ...] = ()) -> Capsule:
    """The capsule of a violation; `also` are the others of the same call.

    Raises CapsuleError for a violation of which the call is not known.
    """
    if violation.call is None:
        raise CapsuleError(f"{violation.summary}: the call of this violation could not be kept as data")
    site = violation.call_site
    place = "" if site is None else f"{PurePath(site.file).name}:{site.line} in {site.function}"
    rules = dict.fromkeys([violation.rule_id, *(other.rule_id for other in also)])
    return Capsule(
        violation.contract_id, violation.contract_hash, violation.operator, violation.site, tuple(rules),
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
    names = {"contract_id": "contract", "rule_id": "rules"}
    data = {names.get(name, name): value for name, value in found.items()}
    return {**data, "capsule": FORMAT, "rules": [found.get("rule_id")], "place": "", "versions": {}}


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
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CapsuleError(f"the call of the capsule cannot be read: {error}") from None
    known = {name: str(text) for name, text in texts.items()}
    return Capsule(**known, rules=tuple(rules), place=str(data.get("place", "")), versions=told, call=call)


# ---------------------------------------------------------------- replay


@dataclass(frozen=True)
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


def replay(capsule: Capsule, contract: Contract) -> Replay:
    """Make the call of a capsule anew and judge it.

    Where the rule is about values that the capsule does not hold, made-up ones are sought which break it and no other.
    Raises CapsuleError for a call that cannot be made on this machine.
    """
    # Tensors of an accelerator are made on the CPU where there is none: the rules are the same.
    judgement = judge(contract, capsule.call) or judge(contract, _on_cpu(capsule.call))
    if judgement is None:
        raise CapsuleError("the call of the capsule cannot be made here: its tensors are too large or of unknown kinds")
    changed = contract.hash != capsule.contract_hash
    # A contract that says something else now may well say nothing of this call.
    found = judgement if changed else _nearest(contract, judgement, set(capsule.rules))
    return Replay(capsule, found, changed)


def _on_cpu(call: Call) -> Call:
    kinds = dict.fromkeys(tensor.device for _, tensor in call.tensors() if tensor.device not in ("cpu", "meta"))
    # Two devices stay two: the first is the CPU, another stands as meta, which has no values.
    stand_in = {device: "cpu" if index == 0 else "meta" for index, device in enumerate(kinds)}
    for path, tensor in call.tensors():
        call = call.put(path, replace(tensor, device=stand_in.get(tensor.device, tensor.device)))
    return call


def _nearest(contract: Contract, start: Judgement, wanted: set[str]) -> Judgement:
    if _away(start, wanted) == (0, 0):
        return start
    made_of, random_of = ingredients(contract), random.Random(start.call.seed)
    best = now = start
    for step in range(_TRIES):
        if step % 30 == 0:
            now = best
        options = list(_value_edits(made_of, now))
        if not options:
            break
        new = judge(contract, random_of.choice(options).call)
        if new is not None and _away(new, wanted) <= _away(now, wanted):
            now = new
        if _away(now, wanted) < _away(best, wanted):
            best = now
        if _away(best, wanted) == (0, 0):
            break
    return best


def _away(judgement: Judgement, wanted: set[str]) -> tuple[int, int]:
    broken = set(judgement.broken)
    return len(wanted - broken), len(broken - wanted)


def _value_edits(made_of: Ingredients, now: Judgement) -> Iterator[Edit]:
    """Changes of what tensors hold, and of nothing else."""
    for choice in made_of.choices:
        old = now.call.get(choice.path)
        if isinstance(old, TensorSpec):
            for edit in edits_at(now.call, choice, made_of, hints_of(now)):
                new = edit.call.get(choice.path)
                if isinstance(new, TensorSpec) and replace(new, fill=None, at=()) == replace(old, fill=None, at=()):
                    yield edit
