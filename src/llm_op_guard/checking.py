"""Loads contract files, says of each whether it is right, and warns of what stands in it for nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llm_op_guard import api
from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.review import Finding, review
from llm_op_guard.errors import ContractError
from llm_op_guard.frozen import frozen
from llm_op_guard.report.terminal import Terminal


@dataclass
class Checked:
    """What came of a file: its contracts with what was found in them, or why there are none."""

    file: str
    contracts: dict[str, Contract] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    error: ContractError | None = None
    unreadable: str | None = None

    def as_data(self) -> dict[str, Any]:
        """The same for programs."""
        error = self.error
        place = {} if error is None else {"line": error.line, "column": error.column}
        problem = self.unreadable if error is None else error.problem
        return {
            "file": self.file,
            "contracts": len(self.contracts),
            "rules": _rules(self.contracts),
            "error": None if problem is None else {"problem": problem, **place},
            "warnings": [{**asdict(finding), "file": self.file} for finding in self.findings],
        }


@frozen
class Sum:
    """How many files are wrong, how many could not be read, and how many warnings there are."""

    wrong: int
    unreadable: int
    warnings: int


def main(out: Terminal, complaints: Terminal, files: Sequence[str], *, as_json: bool = False) -> Sum:
    """Check every file, and say what came of it."""
    every: list[Checked] = []
    for file in files:
        checked = _checked(file)
        every.append(checked)
        if checked.unreadable is not None:
            complaints.error(f"cannot read {file}: {checked.unreadable}")
        elif not as_json:
            _say(out, checked)
    if as_json:
        out.line(json.dumps({"files": [checked.as_data() for checked in every]}, indent=2))
    return Sum(
        wrong=sum(checked.error is not None for checked in every),
        unreadable=sum(checked.unreadable is not None for checked in every),
        warnings=sum(len(checked.findings) for checked in every),
    )


def _checked(file: str) -> Checked:
    try:
        with Path(file).open("rb"):
            contracts = api.load(file)
    except ContractError as error:
        return Checked(file, error=error)
    except OSError as error:
        return Checked(file, unreadable=str(error.strerror or error))
    return Checked(file, contracts, review(contracts))


def _say(out: Terminal, checked: Checked) -> None:
    if checked.error is not None:
        out.line(str(checked.error))
        return
    for finding in checked.findings:
        out.line(str(finding))
    contracts = checked.contracts
    counts = [_count(len(contracts), "contract"), _count(_rules(contracts), "rule")]
    if checked.findings:
        counts.append(_count(len(checked.findings), "warning"))
    out.line(f"{checked.file}: {', '.join(counts)}{_asked(contracts)}")


def _rules(contracts: dict[str, Contract]) -> int:
    return sum(len(contract.rules) for contract in contracts.values())


def _asked(contracts: dict[str, Contract]) -> str:
    """The rules that no call judges, and the modules of the predicates that they ask."""
    rules = [rule for contract in contracts.values() for rule in contract.rules if rule.cost_class == "C"]
    modules = sorted({module for contract in contracts.values() for module in contract.imports.values()})
    return f"; {len(rules)} of class C (og.verify), with {', '.join(modules)}" if rules else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
