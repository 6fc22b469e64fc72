"""What can be asked of a text that must be gone through as a whole.

Every function raises NotApplicable for what is no text. None of them says what stands in it.
"""

from __future__ import annotations

import re
from typing import Any

from llm_op_guard.guard.reading import NotApplicable, is_a

_SURROGATES = re.compile("[\ud800-\udfff]")
# The control characters of Unicode (category Cc) but for tab, line feed and carriage return.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def surrogates(text: Any) -> int:
    """How many lone surrogates a text has; one is enough for it to have no UTF-8."""
    return _count(_SURROGATES, text)


def controls(text: Any) -> int:
    """How many control characters a text has, tab, line feed and carriage return left out."""
    return _count(_CONTROLS, text)


def longest_run(text: Any) -> int:
    """The length of the longest stretch of a text without whitespace."""
    if not is_a(text, str):
        raise NotApplicable
    return max(map(len, str.split(text)), default=0)


def _count(characters: re.Pattern[str], text: Any) -> int:
    if not is_a(text, str):
        raise NotApplicable
    return sum(1 for _ in characters.finditer(text))


FUNCTIONS: dict[str, Any] = {"surrogates": surrogates, "controls": controls, "longest_run": longest_run}
