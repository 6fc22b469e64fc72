"""Writes the tables of docs/language.md from the vocabulary of the language; `--check` only says whether they are old.

The text around the tables is written by hand; each table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from llm_op_guard.contract.vocabulary import DEVICE_TYPES, DTYPE_NAMES, DTYPE_SETS, FUNCTIONS, SCALAR_TYPES
from llm_op_guard.errors import GUARD_ERRORS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "language.md"


def tables() -> dict[str, str]:
    """The tables by name, in Markdown."""
    return {
        "dtypes": _sentence(DTYPE_NAMES),
        "dtype sets": _table(("set", "holds"), [(f"`{name}`", text) for name, text in DTYPE_SETS.items()]),
        "devices": _sentence(DEVICE_TYPES),
        "scalars": _table(("type", "accepts"), [(f"`{name}`", text) for name, text in SCALAR_TYPES.items()]),
        "errors": _sentence(GUARD_ERRORS),
        "functions": _table(
            ("function", "class", "meaning"),
            [(f"`{function.signature}`", function.cost_class, function.meaning) for function in FUNCTIONS.values()],
        ),
    }


def _sentence(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def renewed(page: str) -> str:
    """The page with its tables written anew. Raises KeyError for a table that nobody knows."""
    known = tables()

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{known[match[2]]}\n{match[3]}"

    return re.sub(r"(<!-- table: ([a-z ]+) -->)\n.*?(<!-- end -->)", table, page, flags=re.DOTALL)


def main() -> int:
    """Write the page, or with `--check` compare it."""
    page = PAGE.read_text(encoding="utf-8")
    fresh = renewed(page)
    if "--check" in sys.argv[1:]:
        return int(fresh != page)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
