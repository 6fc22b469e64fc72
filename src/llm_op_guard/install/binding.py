"""Arguments of a call that goes through → the check's own parameters."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Sequence
from typing import Any

from llm_op_guard.errors import GuardError
from llm_op_guard.guard.compile import compile_function
from llm_op_guard.guard.context import WRAPPER_LABEL
from llm_op_guard.guard.reading import UNSET
from llm_op_guard.install.wrapper import BOUND, bound_source
from llm_op_guard.log import log

# What the functions in `stand_in` call what they were given.
PACKED = ("_llm_op_guard_args", "_llm_op_guard_kwargs")


# The default of a parameter that somebody other than the caller may give.
ABSENT = UNSET


class Binding:
    """Puts the arguments of a call of `name` to the parameters of `signature`, and hands `wanted` of them to a check.

    What the signature does not name is left out; a call that lacks what it names is not checked, and said once. So is
    one where a parameter of `needed` has the default `ABSENT`; rules about another such parameter do not apply.
    """

    def __init__(
        self, signature: inspect.Signature, wanted: Sequence[str], name: str, needed: Sequence[str] = ()
    ) -> None:
        self._signature = signature
        self._wanted = tuple(wanted)
        self._needed = tuple(needed)
        self._name = name
        self._told = False
        # Kept: the same check has to give the same function, or compiled callers would be compiled again.
        self._made: dict[Callable[..., Any], Callable[..., Any]] = {}

    def around(self, check: Callable[..., Any]) -> Callable[..., Any]:
        """The check of `(args, kwargs)` that calls `check(*wanted)`."""
        if check not in self._made:
            self._made[check] = self._new(check)
        return self._made[check]

    def _new(self, check: Callable[..., Any]) -> Callable[..., Any]:
        text, defaults = bound_source(self._signature, self._wanted, self._needed)
        label = f"{WRAPPER_LABEL} {self._name}"
        hooks = {"_llm_op_guard_check": check, "_llm_op_guard_absent": ABSENT}
        bound = compile_function(text, BOUND, label, {**defaults, **hooks})
        unbound = self._unbound

        def packed_check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                return bound(*args, **kwargs)
            except GuardError:
                raise
            except TypeError as error:
                unbound(error)
                return None

        return packed_check

    def _unbound(self, error: TypeError) -> None:
        if self._told:
            return
        self._told = True
        log().warning(
            "llm-op-guard: a call of %s does not fit the parameters %s (%s) and went unchecked; this is said once",
            self._name,
            f"({', '.join(self._signature.parameters)})",
            str(error).removeprefix(f"{BOUND}() "),
        )


def usable(signature: inspect.Signature) -> inspect.Signature | None:
    """The signature, or None where a parameter has a name that no function of Python can have."""
    odd = any(keyword.iskeyword(name) or not name.isidentifier() for name in signature.parameters)
    return None if odd else signature
