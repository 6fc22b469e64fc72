"""Writes the tables of docs/language.md and docs/callables.md, and docs/contract.schema.json, from the code.

The text around the tables is written by hand; each table stands between `<!-- table: NAME -->` and `<!-- end -->`.
With `--check` it only says, by its exit code, whether any of them is old.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from llm_op_guard.contract.json_schema import json_schema
from llm_op_guard.contract.vocabulary import (
    DEVICE_TYPES,
    DTYPE_NAMES,
    DTYPE_SETS,
    FUNCTIONS,
    SCALAR_TYPES,
    TENSOR_ATTRIBUTES,
)
from llm_op_guard.errors import GUARD_ERRORS
from llm_op_guard.install.callables import KINDS, REFUSED

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "language.md"
CALLABLES = DOCS / "callables.md"
SCHEMA = DOCS / "contract.schema.json"


def tables() -> dict[str, str]:
    """The tables of the language by name, in Markdown."""
    return {
        "dtypes": _sentence(DTYPE_NAMES),
        "dtype sets": _table(("set", "holds"), [(f"`{name}`", text) for name, text in DTYPE_SETS.items()]),
        "devices": _sentence(DEVICE_TYPES),
        "scalars": _table(("type", "accepts"), [(f"`{name}`", text) for name, text in SCALAR_TYPES.items()]),
        "errors": _sentence(GUARD_ERRORS),
        "tensor attributes": "  " + _sentence(TENSOR_ATTRIBUTES),
        "functions": _table(
            ("function", "class", "meaning"),
            [
                (f"`{function.signature}`", function.cost_class, function.meaning)
                for function in sorted(FUNCTIONS.values(), key=lambda function: function.cost_class)
            ],
        ),
    }


def callables_tables() -> dict[str, str]:
    """The tables of what can be guarded by name, in Markdown."""
    return {
        "kinds": _table(
            ("what", "how it is guarded", "what differs"),
            [(kind.name, kind.mechanism, kind.differs) for kind in KINDS],
        ),
        "refused": _table(("what", "instead"), [(refused.name, refused.instead) for refused in REFUSED]),
    }


def _sentence(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def renewed(page: str) -> str:
    """The page with its tables written anew. Raises KeyError for a table that nobody knows."""
    known = {**tables(), **callables_tables()}

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{known[match[2]]}\n{match[3]}"

    return re.sub(r"(<!-- table: ([a-z ]+) -->)\n.*?(<!-- end -->)", table, page, flags=re.DOTALL)


def generated() -> dict[Path, str]:
    """Every file that this script writes, as it should be."""
    pages = {path: renewed(path.read_text(encoding="utf-8")) for path in (PAGE, CALLABLES)}
    return {**pages, SCHEMA: json.dumps(json_schema(), indent=2) + "\n"}


def main() -> int:
    """Write the files, or with `--check` compare them."""
    fresh = generated()
    if "--check" in sys.argv[1:]:
        return int(any(not path.exists() or path.read_text(encoding="utf-8") != fresh[path] for path in fresh))
    for path, text in fresh.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
