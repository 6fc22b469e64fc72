"""What the tests of patches share."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

MakeModule = Callable[[str], ModuleType]


class Recorder:
    """A check, and a check of results, that write down what they were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.results: list[Any] = []

    def check(self, *values: Any) -> int:
        self.calls.append(values)
        return len(self.calls)

    def check_result(self, result: Any, state: Any) -> None:
        self.results.append((result, state))
