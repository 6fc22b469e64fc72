"""A JSON text with the place of each of its parts, so that an error points to where it was written."""

from __future__ import annotations

import ast
import contextlib
import math
import warnings
from typing import Any, NoReturn

from llm_op_guard.contract.source import Source
from llm_op_guard.errors import ContractError

# The keys and indices that lead from the whole to a part: ("contracts", 0, "body", 2, "require").
Pointer = tuple[str | int, ...]

# Longer lines are written by programs; a caret below one helps nobody.
_LONGEST_SHOWN = 200


class Document:
    """What a JSON text holds (`data`), and where each part of it stands."""

    def __init__(self, source: Source, most_characters: int) -> None:
        """Raises ContractError for what is not JSON, has a key twice, or is too long."""
        import json  # noqa: PLC0415 - few need it

        self._source = source
        text = source.text
        if len(text) > most_characters:
            raise source.error(f"the text has {len(text)} characters; at most {most_characters} are read")
        try:
            self.data: Any = json.loads(
                text, object_pairs_hook=_without_repeats, parse_constant=_not_a_number, parse_float=_finite
            )
            json.dumps(self.data, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            start = text.rfind("\n", 0, error.pos) + 1
            offset = len(text[start : error.pos].encode("utf-8", "surrogatepass"))
            raise source.error_at(f"not JSON: {error.msg}", error.lineno, offset) from None
        except UnicodeEncodeError:
            raise source.error("not JSON: a text holds half a character (a lone surrogate)") from None
        except (ValueError, RecursionError) as error:
            problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise source.error(f"not JSON: {problem}") from None
        self._tree = _tree(text)

    def error(self, problem: str, at: Pointer, fragment: str = "", offset: int = 0) -> ContractError:
        """The error for `problem` at a part, or `offset` characters into `fragment`, the text that stands there."""
        problem = f"{_spelt(at)}: {problem}" if at else problem
        node = self._node(at)
        if node is None:
            return ContractError(problem, file=self._source.file)
        line = self._source.text.split("\n")[node.lineno - 1].encode("utf-8", "surrogatepass")
        column = node.col_offset - (1 if node.lineno == 1 else 0)
        # Only where the text stands there as it is, without escapes, is the place within it known.
        if line[column + 1 :].startswith(fragment[:offset].encode("utf-8", "surrogatepass")) and offset:
            column += 1 + len(fragment[:offset].encode("utf-8", "surrogatepass"))
        error = self._source.error_at(problem, node.lineno, column)
        if len(line) > _LONGEST_SHOWN:
            return ContractError(problem, file=error.file, line=error.line, column=error.column)
        return error

    def _node(self, at: Pointer) -> ast.expr | None:
        node = self._tree
        for key in at:
            match node:
                case ast.Dict(keys=keys, values=values):
                    found = [
                        v for k, v in zip(keys, values, strict=True) if isinstance(k, ast.Constant) and k.value == key
                    ]
                    node = found[0] if found else node
                case ast.List(elts=elts) if isinstance(key, int) and key < len(elts):
                    node = elts[key]
        return node


def _tree(text: str) -> ast.expr | None:
    """The syntax tree of a JSON text, which is Python but for a few escapes; it serves to find places only."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(f"({text})", mode="eval").body
    return None


def _spelt(at: Pointer) -> str:
    """`contracts[0].body[2].require`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in at).removeprefix(".")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:50]!r} stands twice in one object")
        found[key] = value
    return found


def _finite(number: str) -> float:
    if not math.isfinite(float(number)):
        raise ValueError(f"the number {number[:50]} is too large")
    return float(number)


def _not_a_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number of JSON")
