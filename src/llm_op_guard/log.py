"""The log of the package, `llm_op_guard`. `logging` is imported with the first line that is written to it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logging import Logger


@cache
def log() -> Logger:
    """The logger; where its lines go, if anywhere, is for the program to say."""
    import logging  # noqa: PLC0415 - 3 ms, and most processes write no line

    logger = logging.getLogger("llm_op_guard")
    logger.addHandler(logging.NullHandler())
    return logger
