"""Loads contract files and says of each whether it is right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llm_op_guard import api
from llm_op_guard.contract.model import Contract
from llm_op_guard.errors import ContractError
from llm_op_guard.report.terminal import Terminal


def main(out: Terminal, complaints: Terminal, files: Sequence[str]) -> tuple[int, int]:
    """Check every file; how many are wrong, and how many could not be read."""
    wrong = unreadable = 0
    for file in files:
        try:
            with Path(file).open("rb"):
                contracts = api.load(file)
        except ContractError as error:
            wrong += 1
            out.line(str(error))
        except OSError as error:
            unreadable += 1
            complaints.error(f"cannot read {file}: {error.strerror or error}")
        else:
            rules = sum(len(contract.rules) for contract in contracts.values())
            out.line(f"{file}: {_count(len(contracts), 'contract')}, {_count(rules, 'rule')}{_asked(contracts)}")
    return wrong, unreadable


def _asked(contracts: dict[str, Contract]) -> str:
    """The rules that no call judges, and the modules of the predicates that they ask."""
    rules = [rule for contract in contracts.values() for rule in contract.rules if rule.cost_class == "C"]
    modules = sorted({module for contract in contracts.values() for module in contract.imports.values()})
    return f"; {len(rules)} of class C (og.verify), with {', '.join(modules)}" if rules else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
