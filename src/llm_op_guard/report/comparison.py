"""One bad input, with and without the guard, side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from llm_op_guard.frozen import frozen
from llm_op_guard.report.terminal import Terminal

_LEFT = 27
_RIGHT = 66


@frozen
class Comparison:
    """What a bad input does unguarded, and what the guard says of it.

    `silent`: without the guard there is neither an error nor the right result. `stopped`: the guard raised.
    """

    title: str
    unguarded: str
    silent: bool
    guarded: Sequence[str]
    stopped: bool


def render_comparison(number: int, comparison: Comparison, terminal: Terminal) -> str:
    """The title, then two columns; fits 100 of them."""
    left = textwrap.wrap(comparison.unguarded, _LEFT)
    right = [line for text in comparison.guarded for line in _wrapped(text)]
    styles = ("bold", "red") if comparison.silent else ("dim",)
    lines = [terminal.paint(f"{number:2}. {comparison.title}", "bold")]
    for row, (one, other) in enumerate(zip_longest(left, right, fillvalue="")):
        shown = terminal.paint(other, "green" if comparison.stopped else "red") if row == 0 else other
        lines.append(f"    {terminal.paint(one, *styles)}{' ' * (_LEFT - len(one))} │ {shown}".rstrip())
    return "\n".join(lines)


def render_heading(left: str, right: str, terminal: Terminal) -> str:
    """The heads of the two columns."""
    return terminal.paint(f"    {left:<{_LEFT}} │ {right}", "dim")


def _wrapped(text: str) -> Iterator[str]:
    body = text.lstrip()
    indent = " " * (len(text) - len(body))
    yield from textwrap.wrap(body, _RIGHT, initial_indent=indent, subsequent_indent=indent + "  ")
