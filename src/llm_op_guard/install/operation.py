"""What is called in a callable of any kind, and how a guarded function takes its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from llm_op_guard.contract.model import Contract, Declare
from llm_op_guard.contract.parse import stub_signature
from llm_op_guard.frozen import frozen
from llm_op_guard.install.binding import ABSENT, Binding
from llm_op_guard.install.patch import copy_function
from llm_op_guard.install.wrapper import Parameters

# Where a guarded function keeps its site, which lives as long as the function.
GUARDED = "__llm_op_guard__"


def known_as(module: str) -> str:
    """The name by which settings, waivers and contracts know a module: a spawned worker calls the script otherwise."""
    return "__main__" if module == "__mp_main__" else module


@frozen
class Operation:
    """What is called in a callable, and how a guarded function is put in its place.

    `qualname` and `module` say where it is. `documented` are the objects whose docstring or source may hold the
    contract, the first one first. `signature` is what callers see, None where nobody can say. `function` is the
    Python function whose code a copy shares, None where there is none. `front` makes the function that stands in
    front otherwise, `place` puts the guarded function in its place and returns what the user gets.
    """

    qualname: str
    module: str
    documented: tuple[Any, ...]
    signature: inspect.Signature | None
    front: Callable[[], FunctionType]
    place: Callable[[FunctionType], Any]
    function: FunctionType | None = None

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.qualname.rpartition("<locals>.")[2]

    @property
    def site(self) -> str:
        """`module.qualified_name`."""
        return f"{known_as(self.module)}.{self.qualname}" if self.module else self.qualname

    @property
    def own(self) -> tuple[str, ...] | None:
        """The parameters of the code that can be swapped, if there is any."""
        return None if self.function is None else Parameters.of(self.function.__code__).all()

    @property
    def parameters(self) -> tuple[str, ...] | None:
        """What callers see as parameters."""
        return None if self.signature is None else tuple(self.signature.parameters)

    def lacks(self, contract: Contract) -> tuple[str, ...]:
        """Those parameters of a contract that are none here; a stub says what `*args, **kwargs` leave open."""
        known = {*(self.own or ()), *(self.parameters or ())}
        missing = tuple(name for name in contract.parameters if name not in known)
        if not missing or (self._leaves_open(contract) and stub_signature(contract) is not None):
            return ()
        return missing

    def _leaves_open(self, contract: Contract) -> bool:
        """Whether the signature takes anything besides parameters that the contract has too."""
        if self.signature is None:
            return True
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = self.signature.parameters.values()
        named = {parameter.name for parameter in parameters if parameter.kind not in variadic}
        return len(named) < len(parameters) and named <= {*contract.parameters}

    def carrier(self, contract: Contract, wanted: tuple[str, ...]) -> tuple[FunctionType, Binding | None]:
        """The function to guard for a contract whose checks take `wanted`.

        A Binding comes with it where the function takes its arguments packed. Raises TypeError where nobody can say
        what the parameters are.
        """
        function: Any = self.function  # mypy takes a function in a class for a method
        names = set(contract.parameters)
        if function is not None and names <= set(self.own or ()):
            return copy_function(function), None
        fits = self.signature is not None and names <= {*self.signature.parameters}
        signature = self.signature if fits else stub_signature(contract)
        if signature is None:
            raise TypeError(no_parameters(self.name))
        if inspect.isasyncgenfunction(self.function):
            raise TypeError(
                f"{self.name} is an async generator function whose decorator hides its parameters; "
                f"put @og.guard below the other decorators, right above the def"
            )
        return self.front(), Binding(signature, wanted, self.name, _absent_and_declared(signature, contract))


def _absent_and_declared(signature: inspect.Signature, contract: Contract) -> list[str]:
    declarations = [clause.statement for clause in contract.clauses if isinstance(clause.statement, Declare)]
    declared = {declaration.path.root for declaration in declarations if not declaration.path.steps}
    return [p.name for p in signature.parameters.values() if p.default is ABSENT and p.name in declared]


def no_parameters(name: str) -> str:
    """What to say where only a stub can name the parameters."""
    last = name.rpartition(".")[2]
    return (
        f"Python cannot say what the parameters of {name} are; write a stub, def {last}(x, y, *, scale=1): …, in a "
        f".contract file and hand og.guard what og.load reads from it"
    )
