"""Shows the contracts that are shipped, or those of a file, with their rules, classes and reasons, or as JSON."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from llm_op_guard import api
from llm_op_guard.contract.expressions import suggestion
from llm_op_guard.contract.json_form import to_json
from llm_op_guard.contract.json_schema import json_schema
from llm_op_guard.contract.model import Assign, Contract, Expr, Remember, Rule
from llm_op_guard.errors import InstallError
from llm_op_guard.install.callables import beneath
from llm_op_guard.report.overview import render_table
from llm_op_guard.report.terminal import Terminal


def shipped() -> dict[str, Contract]:
    """Every shipped contract by `library/file:name`, the file without its ending."""
    found: dict[str, Contract] = {}
    for library in sorted((resources.files("llm_op_guard") / "contracts").iterdir(), key=lambda entry: entry.name):
        for file in sorted(library.iterdir(), key=lambda entry: entry.name) if library.is_dir() else ():
            if file.name.endswith(".contract"):
                stem = f"{library.name}/{file.name.removesuffix('.contract')}"
                contracts = api.read(file.read_text(encoding="utf-8"), f"{library.name}/{file.name}")
                found |= {f"{stem}:{name}": contract for name, contract in contracts.items()}
    return found


def main(out: Terminal, complaints: Terminal, wanted: str | None, *, as_json: bool) -> bool:
    """List the shipped contracts, or show those that `wanted` names; False when there are none.

    `wanted` is the name of an operator, of a contract as it is listed, of a file, or FILE:OPERATOR. Raises
    ContractError for a file that is wrong.
    """
    contracts = shipped()
    selected = contracts if wanted is None else chosen(wanted, contracts)
    if not selected:
        names = [*contracts, *(contract.name for contract in contracts.values())]
        near = suggestion(str(wanted), names)
        complaints.error(f"there is no contract or file {wanted!r}{near}; llm-op-guard contracts lists the contracts")
        return False
    if as_json:
        out.line(json.dumps(to_json(selected), indent=2))
    elif wanted is None:
        rows = [_row(name, contract) for name, contract in selected.items()]
        out.line(render_table([("contract", "rules", "class", "about"), *rows]))
    else:
        out.line("\n\n".join(_shown(name, contract) for name, contract in selected.items()))
    return True


def show_schema(out: Terminal) -> None:
    """Write the JSON Schema of the JSON form."""
    out.line(json.dumps(json_schema(), indent=2))


def chosen(wanted: str, contracts: dict[str, Contract]) -> dict[str, Contract]:
    """Those that `wanted` names: an operator, a contract as it is listed, or a FILE, or FILE:OPERATOR.

    Raises ContractError for a file that is wrong.
    """
    named = {n: c for n, c in contracts.items() if wanted in (n, n.partition("/")[2], c.name)}
    return named or _of_file(wanted)


def contract_of(target: Any) -> Contract | None:
    """The contract that something guarded is held to; None for anything else."""
    try:
        function, _ = beneath(target)
    except TypeError:
        return None
    return next((site.guard.contract for site in api.sites() if site.function is function), None)


def guarded(target: str) -> tuple[Contract | None, Any]:
    """The contract of MODULE:FUNCTION and the function; (None, None) for a target that is not spelt so.

    Raises InstallError where the module cannot be imported, or holds nothing guarded of that name.
    """
    module, _, name = target.rpartition(":")
    if known := _contracts_beside(module):
        near = suggestion(name, known)
        raise InstallError(f"{module} has no contract {name!r}{near}; it has {', '.join(sorted(known))}")
    if not module or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        return None, None
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise InstallError(f"cannot import {module}: {error}") from None
    except (Exception, SystemExit) as error:  # it is anybody's code
        raise InstallError(f"cannot import {module}: it raises {type(error).__name__}: {error}") from error
    for part in name.split("."):
        found = getattr(found, part, None)
    contract = contract_of(found)
    if contract is None:
        raise InstallError(f"{target} is nothing that og.guard has guarded")
    return contract, found


def _contracts_beside(file: str) -> set[str]:
    """The names of the contracts in a file, shipped or not, where there is one."""
    if file and Path(file).is_file():
        return set(api.load(file))
    found = set()
    for name, contract in shipped().items():
        stem = name.partition(":")[0]
        if file in (stem, stem.partition("/")[2]):
            found.add(contract.name)
    return found


def _of_file(wanted: str) -> dict[str, Contract]:
    """The contracts of FILE, or the one that FILE:OPERATOR names."""
    file, _, operator = wanted.rpartition(":")
    if Path(wanted).is_file():
        return {f"{wanted}:{name}": contract for name, contract in api.load(wanted).items()}
    contract = api.load(file).get(operator) if file and Path(file).is_file() else None
    return {} if contract is None else {wanted: contract}


def _row(name: str, contract: Contract) -> tuple[str, ...]:
    classes = " ".join(sorted({rule.cost_class for rule in contract.rules}))
    return name, str(len(contract.rules)), classes, contract.doc.partition("\n")[0]


def _shown(name: str, contract: Contract) -> str:
    rows = [("rule", "class", "", "because"), *(_rule(rule, contract.constants) for rule in contract.rules)]
    return f"{name}  {contract.hash}\n{contract.doc}\n\n{contract.text}\n{render_table(rows)}"


def _rule(rule: Rule, constants: Mapping[str, Any]) -> tuple[str, ...]:
    reason = None if isinstance(rule.statement, Assign | Remember) else rule.statement.reason
    because = _text(reason.because if reason else None, constants)
    return rule.id, rule.cost_class, "certain" if rule.certain else "suspect", because


def _text(expr: Expr | None, constants: Mapping[str, Any]) -> str:
    """A reason as it is written, or what the constant says that it names; one that depends on the call, as its
    expression.
    """
    if expr is None:
        return ""
    node = expr.node
    said = constants.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)
    return said if isinstance(said, str) else expr.text
