"""Which code is this? A hash of a function and of what it calls, or the reason why there is none."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import symtable
import tokenize
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, Concatenate, ParamSpec, TypeVar

from llm_op_guard.frozen import frozen
from llm_op_guard.install.patch import is_call, original_code
from llm_op_guard.install.wrapper import Parameters


@frozen
class Refused:
    """No answer, and why."""

    reason: str


@frozen
class Fingerprint:
    """What a function's code is recognised by: `digest`, 16 hex digits.

    `reaches` lists, sorted, the other functions that went into it, as `name=digest` or, where their source does not
    count, `name=module:qualified name`.
    """

    digest: str
    reaches: tuple[str, ...]


@frozen
class _Own:
    """A function by itself: its digest and the names it takes from outside."""

    digest: str
    outside: tuple[str, ...]


_More = ParamSpec("_More")
_Answer = TypeVar("_Answer")
_Entry = tuple[weakref.ref[CodeType], dict[Any, _Answer]]


def once_for_code(
    ask: Callable[Concatenate[FunctionType, _More], _Answer],
) -> Callable[Concatenate[FunctionType, _More], _Answer]:
    """`ask(function, …)`, asked once for the code that a function has now and its globals.

    Other code is asked for anew; neither code nor functions are kept alive. Functions with free variables, which may
    share their code and do something else, are asked for each time; the class that `super()` needs is none of these.
    """
    # By identity: code objects compare by value, and functions that differ in their defaults have equal ones.
    answers: dict[int, _Entry[_Answer]] = {}

    @functools.wraps(ask)
    def asked(function: FunctionType, /, *more: _More.args, **named: _More.kwargs) -> _Answer:
        entry = answers.get(id(function.__code__))
        if entry is None:
            code = original_code(function)
            if code.co_freevars not in ((), ("__class__",)):
                return ask(function, *more, **named)
            entry = _kept_for(code, answers, {})
            # A wrapper of ours is known by itself, too: what it stands in front of never changes.
            entry = _kept_for(function.__code__, answers, entry[1])
        known = entry[1]
        call = (id(function.__globals__), more, tuple(named.items())) if named else (id(function.__globals__), more)
        if call not in known:
            known[call] = ask(function, *more, **named)
        return known[call]

    return asked


def _kept_for(code: CodeType, answers: dict[int, _Entry[_Answer]], known: dict[Any, _Answer]) -> _Entry[_Answer]:
    """The entry of a code, for as long as it lives; a new one holds what is `known`."""
    key = id(code)
    if key not in answers:
        answers[key] = weakref.ref(code, lambda _: answers.pop(key, None)), known
    return answers[key]


def fingerprint(function: object) -> Fingerprint | Refused:
    """Recognise `function` by its source and that of the functions it reaches.

    Docstrings, comments, annotations, decorators and layout do not count; names, the parameters' among them, and
    written defaults do. Functions are reached through global names and free variables as they are bound now, so a
    replaced `rotate_half` changes the digest: those of the same top-level package by their source, recursively,
    others by module and qualified name. Attributes (`self.x`, `nn.functional.x`), classes, modules, constants and
    callable objects are not followed. Wrappers of ours are looked through.

    The text that is hashed is `ast.unparse`'s: the same on each Python version, but for f-strings with nested quotes
    (3.12) and syntax that `unparse` prints otherwise in later versions.
    """
    if not isinstance(function, FunctionType):
        return Refused(f"not a Python function but {type(function).__name__}")
    own = _own(function)
    if isinstance(own, Refused):
        return own
    package = _package(function)
    reached: set[str] = set()
    seen = {function}
    pending = [(function, own)]
    while pending:
        caller, caller_own = pending.pop()
        for name, callee in _reached_from(caller, caller_own.outside):
            if _package(callee) != package:
                reached.add(f"{name}={callee.__globals__.get('__name__')}:{original_code(callee).co_qualname}")
                continue
            callee_own = _own(callee)
            if isinstance(callee_own, Refused):
                return Refused(f"{name}, which it calls: {callee_own.reason}")
            reached.add(f"{name}={callee_own.digest}")
            if callee not in seen:
                seen.add(callee)
                pending.append((callee, callee_own))
    reaches = tuple(sorted(reached))
    return Fingerprint(_digest("\n".join((own.digest, *reaches))), reaches)


def digest_of(function: object) -> str:
    """The digest of a function's code, empty where there is none (`fingerprint`): cheap enough for every call.

    Code that is put into the function later has its own; what it calls is looked at once.
    """
    return _digest_now(function) if isinstance(function, FunctionType) else ""


@once_for_code
def _digest_now(function: FunctionType) -> str:
    code = fingerprint(function)
    return code.digest if isinstance(code, Fingerprint) else ""


def innermost(function: object) -> FunctionType | Refused:
    """The plain function within methods, `staticmethod` and `classmethod` objects and `functools.wraps` decorators.

    A guarded function is itself, armed or not: where its source stands is not another function.
    """
    current: Any = function
    visited: set[int] = set()
    while id(current) not in visited:
        visited.add(id(current))
        if isinstance(current, FunctionType):
            wrapped = current.__dict__.get("__wrapped__")
            if wrapped is None or is_call(wrapped):
                return current
            current = wrapped
        elif isinstance(current, MethodType | staticmethod | classmethod):
            current = current.__func__
        else:
            # Static, because an object that makes up attributes (a mock, a lazy namespace) must not be asked for one.
            wrapped = inspect.getattr_static(current, "__wrapped__", None)
            if wrapped is None:
                return Refused(f"not a Python function but {type(current).__name__}")
            current = wrapped
    return Refused("its __wrapped__ leads back to itself")


def function_syntax(function: FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef | Refused:
    """The syntax tree of `function` without docstrings, annotations and decorators. Not to be changed: it is shared."""
    code = original_code(function)
    parsed = _parsed(code, function.__globals__)
    return parsed if isinstance(parsed, Refused) else parsed.definition


def _package(function: FunctionType) -> str:
    # Not function.__module__: functools.wraps copies that one onto a replacement from elsewhere.
    return str(function.__globals__.get("__name__")).partition(".")[0]


def _reached_from(function: FunctionType, names: tuple[str, ...]) -> Iterator[tuple[str, FunctionType]]:
    cells = dict(zip(original_code(function).co_freevars, function.__closure__ or (), strict=True))
    for name in names:
        value: Any = function.__globals__.get(name)
        if name in cells:
            try:
                value = cells[name].cell_contents
            except ValueError:  # not assigned yet
                continue
        if isinstance(value, FunctionType):
            yield name, value


@once_for_code
def _own(function: FunctionType) -> _Own | Refused:
    parsed = _parsed(original_code(function), function.__globals__)
    return parsed if isinstance(parsed, Refused) else parsed.own


def _parsed(code: CodeType, module_globals: dict[str, Any]) -> _Parsed | Refused:
    if code.co_name == "<lambda>":
        return Refused("a lambda has no source of its own")
    # inspect.getsource asks every loaded module for its file first, which takes milliseconds.
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, module_globals)
    if not lines:
        return Refused(f"no source at {code.co_filename}")
    try:
        block = inspect.getblock(lines[code.co_firstlineno - 1 :])
    except (SyntaxError, tokenize.TokenError):
        block = []
    parsed = _parse("".join(block))
    last_line = max((line for _, _, line in code.co_lines() if line is not None), default=0)
    if (
        parsed is None
        or parsed.name != code.co_name
        or parsed.parameters != Parameters.of(code).all()
        or last_line >= code.co_firstlineno + len(block)
    ):
        return Refused(f"{code.co_filename}:{code.co_firstlineno} is not the source of the code: was the file edited?")
    return parsed


@frozen
class _Parsed:
    name: str
    parameters: tuple[str, ...]
    own: _Own
    definition: ast.FunctionDef | ast.AsyncFunctionDef


@functools.lru_cache(maxsize=4096)  # modeling files repeat each other word for word
def _parse(source: str) -> _Parsed | None:
    try:
        # `if` takes a method's indentation without a dedent, which a docstring's first column would defeat.
        body = ast.parse(f"if 1:\n{source}" if source[:1].isspace() else source).body
    except (SyntaxError, ValueError):  # ValueError: a null byte
        return None
    definition = body[0] if body else None
    if isinstance(definition, ast.If):
        definition = definition.body[0]
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    definition = _Strip().visit(definition)
    text = ast.unparse(definition)
    tables = symtable.symtable(text, "<source>", "exec").get_children()
    table = next(table for table in tables if table.get_name() == definition.name)
    own = _Own(_digest(text), tuple(sorted(_outside(table))))
    arguments = definition.args
    variadic = [argument for argument in (arguments.vararg,) if argument]
    keywords = [argument for argument in (arguments.kwarg,) if argument]
    ordered = [*arguments.posonlyargs, *arguments.args, *variadic, *arguments.kwonlyargs, *keywords]
    return _Parsed(definition.name, tuple(argument.arg for argument in ordered), own, definition)


class _Strip(ast.NodeTransformer):
    """Removes what does not change what a function does."""

    def _definition(self, node: Any) -> Any:
        node.decorator_list = []
        node.type_params = []
        node.returns = None
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _definition  # noqa: N815 - the names ast asks for

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        assignment = ast.Assign(targets=[node.target], value=self.visit(node.value))
        return ast.copy_location(assignment, node)


def _outside(table: symtable.SymbolTable) -> set[str]:
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return names.union(*(_outside(child) for child in table.get_children()))


def _digest(text: str) -> str:
    import hashlib  # noqa: PLC0415 - few need it

    return hashlib.sha256(text.encode()).hexdigest()[:16]
