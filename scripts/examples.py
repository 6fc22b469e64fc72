"""The Python in README.md, CONTRIBUTING.md and docs/: found, run, and the messages shown beside it written anew.

A line marked `# raises NAME` raises NAME, and a `text` block right after the example is the message, word for word.
Run without arguments, writes those blocks as they are now.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?P<between>\n```text\n(?P<text>.*?)^```\n)?", re.MULTILINE | re.DOTALL
)
_RAISES = re.compile(r"# raises (?:og\.)?(\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """One `python` block: where it stands, and the message shown after it, if there is one."""

    name: str
    code: str
    message: str | None

    @property
    def raises(self) -> str | None:
        """The name of the exception that its marked line raises."""
        marks = _RAISES.findall(self.code)
        if len(marks) > 1:
            raise ValueError(f"{self.name}: what comes after an error never runs")
        return marks[0] if marks else None

    @property
    def marked_line(self) -> int | None:
        """The number of the line that raises."""
        numbers = (number for number, line in enumerate(self.code.splitlines(), 1) if _RAISES.search(line))
        return next(numbers, None)


def examples_in(page: str, name: str) -> Iterator[Example]:
    """The examples of a page, in order."""
    for match in _BLOCK.finditer(page):
        line = page[: match.start()].count("\n") + 1
        yield Example(f"{name}:{line}", match["code"], match["text"])


def run(example: Example, folder: Path) -> None:
    """Run the example as `example.py` of `folder`, which has to be the working directory; raises what it raises."""
    file = folder / "example.py"
    file.write_text(example.code, encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(file)}
    exec(compile(example.code, str(file), "exec"), namespace)  # noqa: S102 - the examples of our own pages


def renewed(page: str, name: str) -> str:
    """The page with each message as it is now."""

    def block(match: re.Match[str]) -> str:
        if match["text"] is None:
            return match[0]
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            try:
                run(Example(name, match["code"], None), Path(folder).resolve())
            except Exception as error:
                return match[0].replace(match["between"], f"\n```text\n{error}\n```\n")
        raise ValueError(f"{name}: an example with a message raises nothing:\n{match['code']}")

    return _BLOCK.sub(block, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(renewed(path.read_text(encoding="utf-8"), path.name), encoding="utf-8")
