"""Shows the contracts that are shipped, or one of them with its rules, their classes and reasons."""

from __future__ import annotations

import ast
from importlib import resources

from llm_op_guard.contract.expressions import suggestion
from llm_op_guard.contract.model import Assign, Contract, Expr, Rule
from llm_op_guard.contract.parse import parse_stubs
from llm_op_guard.report.overview import render_table
from llm_op_guard.report.terminal import Terminal


def shipped() -> dict[str, Contract]:
    """Every shipped contract by `library/file:name`, the file without its ending."""
    found: dict[str, Contract] = {}
    for library in sorted((resources.files("llm_op_guard") / "contracts").iterdir(), key=lambda entry: entry.name):
        for file in sorted(library.iterdir(), key=lambda entry: entry.name) if library.is_dir() else ():
            if file.name.endswith(".contract"):
                stem = f"{library.name}/{file.name.removesuffix('.contract')}"
                contracts = parse_stubs(file.read_text(encoding="utf-8"), f"{library.name}/{file.name}")
                found |= {f"{stem}:{name}": contract for name, contract in contracts.items()}
    return found


def main(out: Terminal, complaints: Terminal, wanted: str | None) -> bool:
    """List the contracts, or show those whose name or id is `wanted`; False when there is none."""
    contracts = shipped()
    if wanted is None:
        rows = [
            ("contract", "rules", "class", "about"),
            *(_row(name, contract) for name, contract in contracts.items()),
        ]
        out.line(render_table(rows))
        return True
    chosen = {n: c for n, c in contracts.items() if wanted in (n, n.partition("/")[2], c.name)}
    if not chosen:
        names = [*contracts, *(contract.name for contract in contracts.values())]
        complaints.error(
            f"there is no contract {wanted!r}{suggestion(wanted, names)}; llm-op-guard contracts lists them"
        )
        return False
    out.line("\n\n".join(_shown(name, contract) for name, contract in chosen.items()))
    return True


def _row(name: str, contract: Contract) -> tuple[str, ...]:
    classes = " ".join(sorted({rule.cost_class for rule in contract.rules}))
    return name, str(len(contract.rules)), classes, contract.doc.partition("\n")[0]


def _shown(name: str, contract: Contract) -> str:
    rows = [("rule", "class", "", "because"), *(_rule(rule) for rule in contract.rules)]
    return f"{name}  {contract.hash}\n{contract.doc}\n\n{contract.text}\n{render_table(rows)}"


def _rule(rule: Rule) -> tuple[str, ...]:
    reason = None if isinstance(rule.statement, Assign) else rule.statement.reason
    return rule.id, rule.cost_class, "certain" if rule.certain else "suspect", _text(reason.because if reason else None)


def _text(expr: Expr | None) -> str:
    """A reason as it is written; one that depends on the call, as its expression."""
    if expr is None:
        return ""
    return expr.node.value if isinstance(expr.node, ast.Constant) and isinstance(expr.node.value, str) else expr.text
