"""What one process does with one type: every scenario without guards, then with them, and the comparison."""

from __future__ import annotations

import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy
import torch
import transformers
import transformers.generation.utils
import transformers.integrations.sdpa_attention  # loaded once, before processes are forked
from animals import Animal, Breeder
from compare import Leaf, difference, leaves
from inputs import Given, images_for
from scenarios import NotSupported, Specimen, prefill, scenarios_for, token_ids

import llm_op_guard as og
from llm_op_guard import api

ATTENTIONS = ("eager", "sdpa")
LIBRARY = "transformers"
_OURS = (og.GuardWarning, og.GuardInternalWarning)


@dataclass
class Outcome:
    """What came of one scenario: a result, or a failure as text."""

    result: list[Leaf] = field(default_factory=list)
    failure: str | None = None
    alarms: list[str] = field(default_factory=list)
    checks: int = 0


def examine(animal: Animal) -> dict[str, Any]:
    """Everything there is to say about one type, as JSON.

    `error` instead of `scenarios` where it cannot be built. Each scenario has an `outcome`: "same", "not supported"
    (with the `reason`, the same with and without guards), "diagnosed" (it fails without guards too, and a guard says
    why), "difference", "alarm", or "unsteady", where it differs from itself without guards too.
    """
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    started = time.perf_counter()
    report: dict[str, Any] = {"task": animal.task, "type": animal.type, "class": animal.cls}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            breeder = Breeder(animal)
            model = breeder.model("eager", 0)
    except Exception as error:  # whatever Transformers says
        return {**report, "error": _told(error), "seconds": time.perf_counter() - started}
    fed: Given | str = "no images"
    text_alone = Outcome()
    if animal.task == "vision-language":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fed = images_for(model, token_ids())
        text_alone = _observed(partial(prefill, Specimen(animal.task, model, lambda: None, fed)))
    specimen = partial(Specimen, animal.task, images=fed, needs_images=text_alone.failure is not None)
    report["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    modules = {type(module).__module__ for module in model.modules()}
    del model
    plain = {attention: _run(breeder, specimen, attention) for attention in ATTENTIONS}
    api.count_checks()
    with og.installed(LIBRARY), og.policy(A="raise", B="raise"):
        guarded = {a: _run(breeder, specimen, a, like=plain[a]["build"].result) for a in ATTENTIONS}
        status = og.status()
    scenarios = {}
    for attention in ATTENTIONS:
        compared = _compared(plain[attention], guarded[attention])
        outcomes = {found["outcome"] for found in compared.values()}
        repeat = partial(_run, breeder, specimen, attention, like=plain[attention]["build"].result)
        if "difference" in outcomes:
            _amend(compared, "difference", "unsteady", plain[attention], repeat())
        if "diagnosed" in outcomes:
            # Where guards only take notes, it has to fail as it does without them.
            with og.installed(LIBRARY), og.policy(A="record", B="record"):
                _amend(compared, "diagnosed", "difference", plain[attention], repeat())
        scenarios |= {f"{attention}/{name}": found for name, found in compared.items()}
    of_this = tuple(f"{module}." for module in modules)
    return {
        **report,
        "scenarios": scenarios,
        "guarded": sorted(site for site in status.guarded if site.startswith(of_this)),
        "refused": {r.site: r.reason for r in status.refused if r.site.startswith(of_this)},
        "seconds": time.perf_counter() - started,
    }


def _run(
    breeder: Breeder, with_model: Callable[..., Specimen], attention: str, like: list[Leaf] | None = None
) -> dict[str, Outcome]:
    """Build a model and run every scenario on it; `like` are the parameters that it is to have."""
    built: dict[str, Any] = {}

    def build() -> Any:
        built["model"] = breeder.model(attention, 0)
        return built["model"].state_dict()

    outcomes = {"build": _observed(build)}
    if "model" not in built:
        return outcomes
    if like:
        # Should a parameter be left as memory was, that is one difference and not one in every scenario.
        parameters = {path.removeprefix(".result."): value for path, value in like}
        built["model"].load_state_dict(parameters, strict=False)
    other = cache(partial(breeder.other().model, attention, 1))
    specimen = with_model(built["model"], other)
    for name, scenario in scenarios_for(breeder.animal.task).items():
        outcomes[name] = _observed(partial(scenario, specimen))
    return outcomes


def _observed(call: Any) -> Outcome:
    """Run one scenario with the same random numbers every time; guards are looked at whether or not there are any."""
    outcome = Outcome()
    checks = api.tally.checks
    og.record.clear()
    # Reformer draws the seeds of its dropout from the machine.
    with _caught(outcome.alarms), patch.object(torch, "seed", torch.initial_seed):
        transformers.set_seed(7)
        try:
            result = call()
            outcome.result = leaves({"result": result, "random": _random_state()})
        except Exception as error:  # that a type cannot do something is an outcome
            outcome.failure = _told(error)
            if isinstance(error, og.GuardError):
                outcome.alarms.append(str(error))
    # What was raised or warned of has been told in full; a doubt that was told before is only counted.
    outcome.alarms = outcome.alarms or [f"{site}: {rule} was broken" for site, rule in og.record.counts]
    outcome.checks = api.tally.checks - checks
    return outcome


@contextmanager
def _caught(alarms: list[str]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    alarms += [str(warning.message) for warning in caught if issubclass(warning.category, _OURS)]


def _random_state() -> Any:
    return torch.random.get_rng_state(), repr(random.getstate()), repr(numpy.random.get_state())


def _compared(plain: dict[str, Outcome], guarded: dict[str, Outcome]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, one in plain.items():
        other = guarded.get(name, Outcome(failure="it could not be built"))
        why = _differ(one, other)
        entry: dict[str, Any] = {"outcome": "same", "checks": other.checks}
        alarms = "\n".join(dict.fromkeys(other.alarms))
        if alarms and one.failure is None:
            entry |= {"outcome": "alarm", "reason": alarms}
        elif alarms:
            entry |= {"outcome": "diagnosed", "reason": f"{alarms}\n  without guards: {one.failure}"}
        elif why is not None:
            entry |= {"outcome": "difference", "reason": why}
        elif one.failure is not None:
            entry |= {"outcome": "not supported", "reason": one.failure}
        found[name] = entry
    return found


def _amend(
    compared: dict[str, dict[str, Any]],
    outcome: str,
    better: str,
    plain: dict[str, Outcome],
    again: dict[str, Outcome],
) -> None:
    """Give scenarios of one outcome a better one where they did not do again what they did at first."""
    for name, found in compared.items():
        if found["outcome"] == outcome and _differ(plain[name], again[name]) is not None:
            found["outcome"] = better


def _differ(one: Outcome, other: Outcome) -> str | None:
    if one.failure != other.failure:
        return f"{one.failure or 'no failure'} against {other.failure or 'no failure'}"
    return difference(one.result, other.result)


def _told(error: Exception) -> str:
    """An exception in a line that is the same in every run."""
    if isinstance(error, NotSupported):
        return str(error)
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return re.sub(r"0x[0-9a-f]+", "0x…", f"{type(error).__name__}: {text} ({place})")
