"""Violations → the text of an error or warning. Fits a notebook cell; tested line by line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llm_op_guard.guard.violation import CallSite, Violation

_LABEL_WIDTH = 14
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
    lines.append("")
    blamed = {violation.argument for violation in violations}
    for tensor in first.tensors:
        mark = "   <- here" if tensor.name in blamed else ""
        lines.append(_labelled(tensor.name, f"{tensor}{mark}"))
    if first.call_site is not None:
        lines.append(_labelled("called from", place(first.call_site)))
    for number, violation in enumerate(violations[:_MOST_RULES], 1):
        kind = "certain" if violation.certain else "suspect"
        label = "rule" if len(violations) == 1 else f"rule {number}"
        lines.append(_labelled(label, f"{violation.rule_id} (class {violation.cost_class}, {kind})"))
    if first.contract_id:
        lines.append(_labelled("contract", f"{first.contract_id} {first.contract_hash}"))
    return "\n".join(lines)


def _reasons(violation: Violation, indent: str) -> list[str]:
    lines = [f"{indent}{b} from {', '.join(b.sources)}" for b in violation.bindings if b.sources]
    if violation.because:
        lines.append(f"{indent}because {violation.because}")
    if violation.hint:
        lines.append(f"{indent}likely cause: {violation.hint}")
    return lines


def _labelled(label: str, text: str) -> str:
    return f"  {label:<{_LABEL_WIDTH}} {text}"


def place(site: CallSite) -> str:
    """A call site with its file shortened: below the installed packages or the working directory."""
    file = site.file.replace("\\", "/")
    _, installed, package_file = file.rpartition("/site-packages/")
    if installed:
        file = package_file
    else:
        try:
            file = Path(file).relative_to(Path.cwd()).as_posix()
        except (ValueError, OSError):
            pass
    return str(CallSite(file, site.line, site.function, site.module_class, site.layer_idx))
