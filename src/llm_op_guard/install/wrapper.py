"""Code object → the source of the wrapper that takes its place: pure text, nothing is run here."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import CodeType
from typing import Any

from llm_op_guard.frozen import frozen

FACTORY = "factory"
BOUND = "bound"


@frozen
class Names:
    """What one wrapper calls its globals, but for `state` and `result`, which are local."""

    accepts: str
    program: str
    check: str
    call: str
    check_result: str
    state: str
    result: str

    @classmethod
    def numbered(cls, serial: int) -> Names:
        """Names that no user code has, told apart by `serial`."""
        prefix = f"__llm_op_guard_{serial}_"
        return cls(
            accepts=prefix + "accepts",
            program=prefix + "program",
            check=prefix + "check",
            call=prefix + "call",
            check_result=prefix + "check_result",
            state=prefix + "state",
            result=prefix + "result",
        )


@frozen
class Parameters:
    """The parameter names of a code object, by kind. Defaults are not here: they live on the function."""

    positional_only: tuple[str, ...]
    positional: tuple[str, ...]
    variadic: tuple[str, ...]  # the name after `*`, or nothing
    keyword_only: tuple[str, ...]
    keywords: tuple[str, ...]  # the name after `**`, or nothing

    @classmethod
    def of(cls, code: CodeType) -> Parameters:
        """Read from `code`: a `__signature__` may say otherwise, but this is how calls bind."""
        names = iter(code.co_varnames)

        def take(count: int) -> tuple[str, ...]:
            return tuple(next(names) for _ in range(count))

        positional_only = take(code.co_posonlyargcount)
        positional = take(code.co_argcount - code.co_posonlyargcount)
        keyword_only = take(code.co_kwonlyargcount)
        variadic = take(1 if code.co_flags & inspect.CO_VARARGS else 0)
        keywords = take(1 if code.co_flags & inspect.CO_VARKEYWORDS else 0)
        return cls(positional_only, positional, variadic, keyword_only, keywords)

    def all(self) -> tuple[str, ...]:
        """Every name, in the order of a `def`."""
        return self.positional_only + self.positional + self.variadic + self.keyword_only + self.keywords

    def declaration(self) -> str:
        """The text between the parentheses of a `def`, without defaults."""
        parts = [*self.positional_only]
        if self.positional_only:
            parts.append("/")
        parts += self.positional
        if self.variadic or self.keyword_only:
            parts.append("*" + "".join(self.variadic))
        parts += self.keyword_only
        parts += [f"**{name}" for name in self.keywords]
        return ", ".join(parts)

    def forwarding(self) -> str:
        """The text between the parentheses of a call that hands everything on."""
        parts = [*self.positional_only, *self.positional]
        parts += [f"*{name}" for name in self.variadic]
        parts += [f"{name}={name}" for name in self.keyword_only]
        parts += [f"**{name}" for name in self.keywords]
        return ", ".join(parts)


def wrapper_source(
    code: CodeType, handed: Sequence[str], names: Names, *, checks_result: bool, asks_first: bool = False
) -> str:
    """The source of a `factory()` returning the wrapper of `code`, of the same parameters, kind and free variables.

    The wrapper hands the parameters `handed` to the check, then everything to the original. With `asks_first` the check
    is for calls alone that are not accepted otherwise.
    """
    parameters = Parameters.of(code)
    call = f"{names.call}({parameters.forwarding()})"
    keyword = "def"
    if code.co_flags & inspect.CO_COROUTINE:
        keyword, call = "async def", f"await {call}"
    elif code.co_flags & inspect.CO_GENERATOR:
        call = f"yield from {call}"
    check = f"{names.check}({', '.join(handed)})"
    if asks_first:
        # One line of two parts: Dynamo goes on in the middle of neither.
        check = f"{names.accepts}({', '.join([names.program, *handed])}) or {check}"

    if code.co_flags & inspect.CO_ASYNC_GENERATOR:
        keyword = "async def"
        body = [check, *_delegating(call, names)]
    elif checks_result:
        body = [
            f"{names.state} = {check}",
            f"{names.result} = {call}",
            f"{names.check_result}({names.result}, {names.state})",
            f"return {names.result}",
        ]
    else:
        body = [check, f"return ({call})"]

    closure = []
    if code.co_freevars:
        closure = [f"    {' = '.join(code.co_freevars)} = None"]
        # Never reached and compiled to nothing, yet it makes these names free variables of the wrapper: a function
        # takes only code with as many free variables as its closure has cells.
        body.append(f"({', '.join(code.co_freevars)},)")
    return "\n".join(
        [
            f"def {FACTORY}():",
            *closure,
            f"    {keyword} wrapper({parameters.declaration()}):",
            *(f"        {line}" for line in body),
            "    return wrapper",
            "",
        ]
    )


def _delegating(call: str, names: Names) -> list[str]:
    """What `yield from` would do if an async generator had it; an async generator has no result."""
    inner, value, error = names.state, names.result, names.result + "_error"
    return [
        f"{inner} = {call}",
        "try:",
        f"    {value} = await {inner}.__anext__()",
        "    while True:",
        "        try:",
        f"            {value} = yield {value}",
        "        except GeneratorExit:",
        f"            await {inner}.aclose()",
        "            raise",
        f"        except BaseException as {error}:",
        f"            {value} = await {inner}.athrow({error})",
        "        else:",
        f"            {value} = await {inner}.asend({value})",
        "except StopAsyncIteration:",
        "    return",
    ]


def bound_source(
    signature: inspect.Signature, wanted: Sequence[str], needed: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """The source of a function with the parameters of `signature` that hands `wanted` to `_llm_op_guard_check`.

    With it what its defaults are called. It takes more than the signature names, and drops it; it raises TypeError
    where one of `needed` is `_llm_op_guard_absent`.
    """
    defaults: dict[str, Any] = {}
    parts: dict[Any, list[str]] = {kind: [] for kind in inspect._ParameterKind}
    for number, parameter in enumerate(signature.parameters.values()):
        text = parameter.name
        if parameter.default is not parameter.empty:
            defaults[f"_llm_op_guard_default_{number}"] = parameter.default
            text += f"=_llm_op_guard_default_{number}"
        parts[parameter.kind].append(text)
    positional_only = parts[inspect.Parameter.POSITIONAL_ONLY]
    declaration = [
        *positional_only,
        *(["/"] if positional_only else []),
        *parts[inspect.Parameter.POSITIONAL_OR_KEYWORD],
        f"*{''.join(parts[inspect.Parameter.VAR_POSITIONAL]) or '_llm_op_guard_more'}",
        *parts[inspect.Parameter.KEYWORD_ONLY],
        f"**{''.join(parts[inspect.Parameter.VAR_KEYWORD]) or '_llm_op_guard_rest'}",
    ]
    lines = [f"def {BOUND}({', '.join(declaration)}):"]
    for name in needed:
        lines += [f"    if {name} is _llm_op_guard_absent:", f"        raise TypeError('{name} is left out')"]
    lines.append(f"    return _llm_op_guard_check({', '.join(wanted)})")
    return "\n".join([*lines, ""]), defaults
