"""What is guarded here and what is not, for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from llm_op_guard.frozen import frozen
from llm_op_guard.report.terminal import Terminal

_WIDTH = 100


@frozen
class Group:
    """Places that have something in common: a contract, or the reason why they have none."""

    title: str
    places: Sequence[str]


def render_facts(facts: Sequence[tuple[str, str]]) -> str:
    """Labelled lines."""
    width = max(len(label) for label, _ in facts)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in facts)


def render_groups(groups: Sequence[Group], terminal: Terminal, style: str) -> str:
    """Each group's title and, below it, its places."""
    lines = []
    for group in groups:
        lines.append(f"  {terminal.paint(group.title, style)}")
        shown = textwrap.wrap(", ".join(group.places), _WIDTH, break_long_words=False, break_on_hyphens=False)
        lines += [f"    {line}" for line in shown]
    return "\n".join(lines)


def render_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns; the last column is as long as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )
