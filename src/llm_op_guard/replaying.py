"""The program behind `llm-op-guard replay`: a capsule's diagnosis again, what happens without, a test, a script."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_op_guard import api, catalogue
from llm_op_guard.contract.model import Contract
from llm_op_guard.faults import capsule as capsules
from llm_op_guard.faults.capsule import Capsule, CapsuleError, Replay
from llm_op_guard.faults.entry import before_return
from llm_op_guard.faults.made_up import made_up
from llm_op_guard.faults.operators import Operator, operators_of
from llm_op_guard.faults.outcome import alone
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.call import Call, SequenceSpec, TensorSpec
from llm_op_guard.guard.context import tensor_metadata
from llm_op_guard.guard.violation import Violation
from llm_op_guard.report.terminal import Terminal
from llm_op_guard.report.text import render

# A list that is longer is not written out in a program.
_MOST_WRITTEN = 16


@frozen
class Wanted:
    """What was asked for on the command line."""

    file: str
    contract: str | None = None
    unguarded: bool = False
    as_test: bool = False
    as_script: bool = False


def main(out: Terminal, complaints: Terminal, wanted: Wanted) -> bool:
    """Show what was asked for; whether the rule is broken again. Raises CapsuleError for what cannot be replayed."""
    try:
        text = Path(wanted.file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CapsuleError(f"{wanted.file} is no text") from None
    except OSError as error:
        raise CapsuleError(f"cannot read {wanted.file}: {error.strerror or error}") from None
    capsule = capsules.read(text)
    if wanted.as_test or wanted.as_script:
        out.line(_test(capsule, wanted) if wanted.as_test else _script(capsule, wanted))
        return True
    name, contract = contract_for(capsule, wanted.contract)
    replayed = capsules.replay(capsule, contract)
    for difference in _differences(replayed):
        complaints.warning(difference)
    if replayed.judgement.violations:
        out.line(render(dressed(replayed)))
    if not replayed.reproduced:
        complaints.error(
            f"the rule {capsule.rules[0]} is not broken by the call that was made from the capsule{_not_held(replayed)}"
        )
    elif replayed.elsewhere and not replayed.contract_changed:
        complaints.warning(
            f"the capsule tells of {capsule.observed}, and the call that was made from it of {replayed.elsewhere}"
            f"{_not_held(replayed)}"
        )
    if wanted.unguarded:
        operator = _operator(name, wanted.contract)
        outcome = None if operator is None else alone(operator, before_return(replayed.judgement.call))
        says = "no operator is known for this contract here" if outcome is None else f"{outcome.kind}: {outcome.text}"
        out.line(f"\nwithout a guard  {says}")
    return replayed.reproduced


def _not_held(replayed: Replay) -> str:
    lacking = replayed.not_held
    return f": it does not hold {', '.join(lacking)}, which the rule reads" if lacking else ""


def contract_for(capsule: Capsule, wanted: str | None) -> tuple[str, Contract]:
    """The contract that a capsule speaks of: a shipped one, or the one that is named; and how it is called.

    Raises CapsuleError where it is not known.
    """
    if wanted is not None:
        found = catalogue.chosen(wanted, {})
        if not found and (contract := catalogue.guarded(wanted)[0]) is not None:
            found = {wanted: contract}
        named = {name: c for name, c in found.items() if c.id == capsule.contract or len(found) == 1}
        if not named:
            raise CapsuleError(f"{wanted} has no contract {capsule.contract}")
        return next(iter(named.items()))
    shipped = {name: c for name, c in catalogue.shipped().items() if c.id == capsule.contract}
    same = {name: c for name, c in shipped.items() if c.hash == capsule.contract_hash} or shipped
    if not same:
        said = _function_of(capsule) if capsule.contract.startswith("<") else None
        raise CapsuleError(
            f"the contract {capsule.contract} is not one of those that are shipped; "
            f"say --contract {said or 'FILE, FILE:OPERATOR or MODULE:FUNCTION'}"
        )
    return next(iter(same.items()))


def _function_of(capsule: Capsule) -> str | None:
    """MODULE:FUNCTION of what was guarded, where its site says it; None for what has no name in its module."""
    module = capsule.site.removesuffix(f".{capsule.operator}")
    if module == capsule.site or "<" in capsule.site:
        return None
    return f"{module}:{capsule.operator}"


def dressed(replayed: Replay) -> list[Violation]:
    """The violations of a replayed call, called as in the capsule, that of the capsule first."""
    capsule, judgement = replayed.capsule, replayed.judgement
    tensors = tensor_metadata(judgement.contract, judgement.arguments)
    found = [
        replace(violation, operator=capsule.operator, site=capsule.site, tensors=tensors, call=judgement.call)
        for violation in judgement.violations
    ]
    return sorted(found, key=lambda violation: violation.rule_id != capsule.rules[0])


def _differences(replayed: Replay) -> list[str]:
    found = []
    if replayed.contract_changed:
        found.append(f"the contract {replayed.capsule.contract} has changed since the capsule was made")
    running = capsules.versions()
    for name, version in replayed.capsule.versions.items():
        if name in running and running[name] != version:
            found.append(f"{name} is {running[name]} here, and was {version} where the capsule was made")
    return found


def _operator(name: str, wanted: str | None) -> Operator | None:
    if wanted is not None:
        function = catalogue.guarded(wanted)[1]
        return None if function is None else Operator(name, function)
    return operators_of(api.integrations(), {name}).get(name)


# ---------------------------------------------------------------- programs


def _literal(capsule: Capsule) -> str:
    return json.dumps(capsule.to_json(), ensure_ascii=True).replace("\\", "\\\\").replace("'", "\\'")


def _arguments(wanted: Wanted) -> str:
    return "" if wanted.contract is None else f", contract={wanted.contract!r}"


def _name(rule: str) -> str:
    return "".join(character if character.isalnum() and character.isascii() else "_" for character in rule).strip("_")


def _test(capsule: Capsule, wanted: Wanted) -> str:
    rule = capsule.rules[0]
    return f'''"""A violation that was seen: {_plain(capsule.operator)}, {_plain(capsule.observed)}."""

import pytest

import llm_op_guard as og
from llm_op_guard.testing import replay

CAPSULE = '{_literal(capsule)}'


def test_{_name(rule)}() -> None:
    with pytest.raises(og.GuardError) as caught:
        replay(CAPSULE{_arguments(wanted)})
    assert {rule!r} in [violation.rule_id for violation in caught.value.violations]'''


def _plain(text: str) -> str:
    return text.replace("\\", "/").replace('"', "'")


def _script(capsule: Capsule, wanted: Wanted) -> str:
    module, function = (wanted.contract or _function_of(capsule) or "").rpartition(":")[::2]
    library = capsule.site.partition(".")[0]
    if is_shipped := library in api.known_libraries() and capsule.site.startswith(f"{library}."):
        module, _, function = capsule.site.rpartition(".")
    call = made_up(capsule.call, 1)
    shown = {name: _written(spec) for name, spec in call.arguments}
    if capsule.call.entry is not None:
        shown["result"] = None  # no call makes an operator return it
    named = all(part.isidentifier() for part in (*module.split("."), *function.split(".")))
    if not named or None in shown.values():
        return f"from llm_op_guard.testing import replay\n\nreplay('{_literal(capsule)}'{_arguments(wanted)})"
    lines = [f"{name} = {text}" for name, text in shown.items()] + _elements(call)
    install = [f'og.install("{library}")'] if is_shipped else []
    return "\n".join(
        [
            "import importlib\n\nimport torch\n\nimport llm_op_guard as og\n",
            *install,
            f'module = importlib.import_module("{module}")',
            "torch.manual_seed(0)",
            *lines,
            'with og.policy(B="raise"):',
            f"    module.{function}({', '.join(f'{name}={name}' for name in shown)})",
        ]
    )


def _written(spec: Any) -> str | None:
    """An argument as Python; None for what takes more than a line."""
    if isinstance(spec, SequenceSpec) and len(spec.items) <= _MOST_WRITTEN:
        inside = [_written(item) for item in spec.items]
        comma = "," if spec.kind == "tuple" and len(inside) == 1 else ""
        text = ", ".join(text for text in inside if text is not None) + comma
        return None if None in inside else f"({text})" if spec.kind == "tuple" else f"[{text}]"
    if isinstance(spec, TensorSpec):
        if spec.device not in ("cpu", "meta") or spec.strides is not None or spec.offset or spec.fill is not None:
            return None
        size, dtype = list(spec.shape), f"dtype=torch.{spec.dtype}"
        if spec.device == "meta":
            return f'torch.empty({size}, {dtype}, device="meta")'
        real = spec.dtype.startswith(("float", "bfloat"))
        return f"torch.randn({size}).to(torch.{spec.dtype})" if real else f"torch.zeros({size}, {dtype})"
    return repr(spec) if spec is None or isinstance(spec, bool | int | str) else None


def _elements(call: Call) -> list[str]:
    return [
        f"{path}.view(-1)[{place}] = {value if math.isfinite(value) else f'float({str(value)!r})'}"
        for path, tensor in call.tensors()
        for place, value in tensor.at
    ]
