"""Every exception and warning of the library, with the condition that raises it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm_op_guard.guard.violation import Violation


class LlmOpGuardError(Exception):
    """What every error of this library can be caught as, a broken contract apart (`GuardError`)."""


class ContractError(LlmOpGuardError, ValueError):
    """A contract's text is wrong: syntax, an unknown name, a symbol nobody binds, rules that no call can keep.

    Raised where the contract is loaded, never in a guarded call. `file`, `line` and `column` (1-based) say where.
    """

    def __init__(
        self, problem: str, *, file: str = "<contract>", line: int = 1, column: int = 1, text: str = ""
    ) -> None:
        self.problem = problem
        self.file = file
        self.line = line
        self.column = column
        self.text = text
        super().__init__(problem)

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}: {self.problem}"
        if not self.text:
            return place
        return f"{place}\n    {self.text}\n    {' ' * (self.column - 1)}^"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_contract_error, (self.problem, self.file, self.line, self.column, self.text)


def _rebuild_contract_error(problem: str, file: str, line: int, column: int, text: str) -> ContractError:
    return ContractError(problem, file=file, line=line, column=column, text=text)


class PolicyError(LlmOpGuardError, ValueError):
    """A policy, a waiver or where to record cannot be understood: in a call, the environment or pyproject.toml."""


class InstallError(LlmOpGuardError, ValueError):
    """`install` was asked for a library that has no integration; the message lists the known ones."""


class GuardWarning(UserWarning):
    """A suspect rule is broken, or a certain one whose policy is `warn`. Given once per rule and site."""


class GuardInternalWarning(RuntimeWarning):
    """The guard itself failed; the guarded call went through unchecked. Given once per site."""


class GuardError(ValueError):
    """A guarded call broke its contract; the operator was not run (a broken `returns`: its result was withheld).

    `violations` holds every broken rule. Where a rule names the error that the unguarded call would have raised
    (`error=IndexError`), the instance is of a subclass of both, so existing `except` clauses still work.
    """

    def __init__(self, message: str, violations: Sequence[Violation] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.violations: tuple[Violation, ...] = tuple(violations)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.violations)

    def to_dict(self, style: str | None = None) -> dict[str, Any]:
        """The error as JSON-ready data: `error`, `details`, `suggestion`, `violations`.

        `style="openai"` gives what clients of that API read: `{"error": {"message", "type", "param", "code"}}`, where
        `param` is the argument and `code` the id of the rule that is broken first. It names no file. Raises ValueError
        for another style.
        """
        if style == "openai":
            return {"error": self._for_openai_clients()}
        if style is not None:
            raise ValueError(f"unknown style {style!r} of GuardError.to_dict; known: 'openai', or none")
        hints = [violation.hint for violation in self.violations if violation.hint]
        return {
            "error": "INPUT_VALIDATION_FAILED",
            "details": "; ".join(violation.summary for violation in self.violations) or self.message,
            "suggestion": hints[0] if hints else None,
            "violations": [violation.to_dict() for violation in self.violations],
        }

    def _for_openai_clients(self) -> dict[str, Any]:
        first = self.violations[0] if self.violations else None
        return {
            "message": "; ".join(violation.summary for violation in self.violations) or self.message,
            "type": "invalid_request_error",
            "param": first.argument if first is not None else None,
            "code": first.rule_id if first is not None else None,
        }


class GuardIndexError(GuardError, IndexError):
    """A `GuardError` whose rule says `error=IndexError`."""


class GuardTypeError(GuardError, TypeError):
    """A `GuardError` whose rule says `error=TypeError`."""


class GuardRuntimeError(GuardError, RuntimeError):
    """A `GuardError` whose rule says `error=RuntimeError`."""


class GuardKeyError(GuardError, KeyError):
    """A `GuardError` whose rule says `error=KeyError`."""


# What `error=` may name, and the class that is raised for it.
GUARD_ERRORS: dict[str, type[GuardError]] = {
    "IndexError": GuardIndexError,
    "TypeError": GuardTypeError,
    "RuntimeError": GuardRuntimeError,
    "KeyError": GuardKeyError,
    "ValueError": GuardError,
}
