"""Lines for people at a terminal: colour where it is wanted, and nothing that the stream cannot encode."""

from __future__ import annotations

import os
from typing import TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


class Terminal:
    """A stream to write lines to, or None: Python has none where the descriptor was closed (`>&-`).

    Colour only where the stream is a terminal and NO_COLOR is not set.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.colour = _wants_colour(stream)

    def line(self, text: str = "") -> None:
        """Write one line (or several, where the text has them) and flush, so that slow work shows progress."""
        if self.stream is None:
            return
        encoding = self.stream.encoding or "utf-8"
        self.stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self.stream.flush()

    def paint(self, text: str, *styles: str) -> str:
        """The text in these styles: bold, dim, red, green, yellow."""
        if not self.colour or not text:
            return text
        return f"\033[{';'.join(_CODES[style] for style in styles)}m{text}\033[0m"

    def warning(self, text: str) -> None:
        """A line that must not be overlooked."""
        self.line(self.paint(f"llm-op-guard: WARNING: {text}", "bold", "yellow"))

    def error(self, text: str) -> None:
        """Why the command did not do what was asked."""
        self.line(f"{self.paint('llm-op-guard: error:', 'bold', 'red')} {text}")


def _wants_colour(stream: TextIO | None) -> bool:
    # no-color.org: set and not empty. These say how to draw, not what to check, so they are not policy.
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream is not None and stream.isatty()
