"""The text that a contract was read from, and places in it: what an error points to."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import NamedTuple

from llm_op_guard.errors import ContractError
from llm_op_guard.frozen import frozen


class Place(NamedTuple):
    """Where something stands in a text: as `ast` counts, lines from 1 and columns from 0, in bytes."""

    lineno: int
    col_offset: int

    @classmethod
    def of(cls, node: ast.expr | ast.stmt) -> Place:
        """Where a syntax node begins."""
        return cls(node.lineno, node.col_offset)


@frozen
class Source:
    """Text that a contract was read from, and the predicates that it imports: names with their modules.

    Turns a syntax node into a place for an error. `in_file` turns an error in the text into that in the file, where the
    file is not made of this text.
    """

    file: str
    text: str
    first_line: int = 1
    indent: int = 0
    in_file: Callable[[ContractError], ContractError] | None = field(default=None, compare=False, repr=False)
    imports: Mapping[str, str] = field(default_factory=dict, compare=False)

    def error(self, problem: str, node: ast.AST | Place | None = None) -> ContractError:
        """The error for `problem` at a syntax node or place (the start of the text when there is none)."""
        line = getattr(node, "lineno", 1)
        offset = getattr(node, "col_offset", 0)
        return self.error_at(problem, line, offset)

    def line(self, node: ast.expr | Place) -> int:
        """The line of the file that a syntax node or place is in."""
        return self.located("", node).line

    def located(self, problem: str, node: ast.expr | Place) -> ContractError:
        """The error for `problem` as it is to be shown where loading does not end with it."""
        error = self.error(problem, node)
        return error if self.in_file is None else self.in_file(error)

    def within(self, place: Place, name: str) -> Place:
        """Where a name first stands from a place on; the place itself where it does not."""
        lines = self.text.splitlines()
        for number in range(place.lineno, len(lines) + 1):
            start = place.col_offset if number == place.lineno else 0
            line = lines[number - 1].encode("utf-8", "surrogatepass")
            if found := re.search(rb"\b%s\b" % re.escape(name.encode()), line[start:]):
                return Place(number, start + found.start())
        return place

    def error_at(self, problem: str, line: int, byte_offset: int = 0) -> ContractError:
        """The error for `problem` at a 1-based `line` and a 0-based offset in UTF-8 bytes, as `ast` counts them."""
        lines = self.text.splitlines() or [""]
        shown = lines[min(line, len(lines)) - 1]
        column = len(shown.encode("utf-8", "surrogatepass")[:byte_offset].decode("utf-8", "replace"))
        return ContractError(
            problem,
            file=self.file,
            line=self.first_line + line - 1,
            column=self.indent + column + 1,
            # What Python itself refused may hold half a character, which nobody could print.
            text=" " * self.indent + shown.encode("utf-8", "replace").decode(),
        )
