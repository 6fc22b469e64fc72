"""Violations → the text of an error or warning. Fits a notebook cell; tested line by line."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from llm_op_guard.guard.violation import CallSite, Violation

_MOST_RULES = 8


def render(violations: Sequence[Violation]) -> str:
    """The diagnosis of one call: what is wrong, why, the likely cause, the arguments, the caller, the rule."""
    first = violations[0]
    if len(violations) == 1:
        lines = [first.summary, *_reasons(first, "  ")]
    else:
        lines = [f"{first.operator}: {len(violations)} rules are broken"]
        for number, violation in enumerate(violations[:_MOST_RULES], 1):
            lines.append(f"  {number}. {violation.observed}, expected {violation.expected}")
            lines += _reasons(violation, "     ")
        if len(violations) > _MOST_RULES:
            lines.append(f"  … and {len(violations) - _MOST_RULES} more")
    if any(violation.blames == "operator" for violation in violations):
        lines.append("  the arguments were accepted: the operator did not keep what its contract promises")
    lines.append("")
    return "\n".join([*lines, *_table(_facts(violations))])


def _facts(violations: Sequence[Violation]) -> list[tuple[str, str]]:
    """What surrounds the broken rules: (label, text) lines."""
    first = violations[0]
    blamed = {violation.argument for violation in violations}
    facts = [(t.name, f"{t}   <- here" if t.name in blamed else str(t)) for t in first.tensors]
    if first.call_site is not None:
        facts.append(("called from", place(first.call_site)))
    for number, violation in enumerate(violations[:_MOST_RULES], 1):
        kind = "certain" if violation.certain else "suspect"
        label = "rule" if len(violations) == 1 else f"rule {number}"
        facts.append((label, f"{violation.rule_id} (class {violation.cost_class}, {kind})"))
    if first.contract_id:
        facts.append(("contract", f"{first.contract_id} {first.contract_hash}"))
    return facts


def _table(facts: list[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in facts)
    return [f"  {label:<{width}}  {text}" for label, text in facts]


def _reasons(violation: Violation, indent: str) -> list[str]:
    lines = [f"{indent}{b} from {', '.join(b.sources)}" for b in violation.bindings if b.sources]
    if violation.because:
        lines.append(f"{indent}because {violation.because}")
    if violation.hint:
        lines.append(f"{indent}likely cause: {violation.hint}")
    if violation.told_late:
        lines.append(f"{indent}{violation.told_late}")
    if violation.last_seen:
        lines.append(f"{indent}{violation.argument}: {violation.last_seen}")
    return lines


def place(site: CallSite) -> str:
    """A call site with its file shortened: below the installed packages or the working directory."""
    file = site.file.replace("\\", "/")
    _, installed, package_file = file.rpartition("/site-packages/")
    if installed:
        file = package_file
    else:
        with contextlib.suppress(ValueError, OSError):
            from pathlib import Path  # noqa: PLC0415 - few need it

            file = Path(file).relative_to(Path.cwd()).as_posix()
    return str(CallSite(file, site.line, site.function, site.module_class, site.layer_idx))
