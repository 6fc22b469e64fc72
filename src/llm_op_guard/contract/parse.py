"""Text → statements. Contract text is Python syntax read with `ast`; nothing in it is ever executed.

`parse_file` reads stubs, `parse_body` the statements of one contract, `docstring_section` finds them in a docstring.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llm_op_guard.contract.expressions import (
    LOOPS,
    SEQUENCES,
    check_expression,
    check_given,
    check_iterable,
    check_target,
    suggestion,
)
from llm_op_guard.contract.model import Assign, Contract, Declare, Expr, For, If, Reason, Remember, Require, Statement
from llm_op_guard.contract.path import Path, path_of
from llm_op_guard.contract.source import Place, Source
from llm_op_guard.contract.types import parse_type
from llm_op_guard.contract.validate import validated, written_length
from llm_op_guard.contract.vocabulary import (
    DEVICE_TYPES,
    DTYPE_NAMES,
    DTYPE_SETS,
    FUNCTIONS,
    KEYWORDS,
    SCALAR_TYPES,
)
from llm_op_guard.errors import GUARD_ERRORS, ContractError

# Far above any real contract; they keep a hostile text from exhausting the parser, or whoever waits for it.
MAX_CHARACTERS = 500_000
MAX_NESTING = 60
# Names, numbers, operators and the like, as `ast` counts them.
MAX_PARTS = 50_000

_WHERE_IMPORTS_STAND = "imports stand at the top of a contract file, or of a contract that is no stub"


def read_text(file: str | os.PathLike[str]) -> str:
    """The text of a contract file; raises ContractError when it cannot be read as UTF-8 text."""
    from pathlib import Path as FilePath  # noqa: PLC0415 - few need it

    try:
        return FilePath(file).read_bytes().decode("utf-8-sig")  # with its own line ends
    except OSError as error:
        raise ContractError(f"cannot read the file: {error.strerror or error}", file=str(file)) from None
    except UnicodeDecodeError as error:
        raise ContractError(f"the file is not UTF-8 text (byte {error.start})", file=str(file)) from None


def parse_stubs(text: str, file: str = "<contract>", source: Source | None = None) -> dict[str, Contract]:
    """Read the text of a `.contract` file; `source` places errors when the file is not made of this text."""
    source, _, statements = opened(source or Source(file, text))
    contracts: dict[str, Contract] = {}
    constants: dict[str, Any] = {}
    characters = 0
    for node in statements:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                constants[name] = read_constant(name, node, constants, source)
            case ast.FunctionDef():
                if node.name in contracts:
                    raise source.error(f"a second contract is named {node.name!r}; names in one file differ", node)
                contracts[node.name] = read_stub(node, source, constants)
                characters += sum(written_length(clause) for clause in contracts[node.name].clauses)
                if characters > MAX_CHARACTERS:
                    raise source.error(f"written out, the contracts have more than {MAX_CHARACTERS} characters", node)
            case ast.Import() | ast.ImportFrom():
                raise source.error(_WHERE_IMPORTS_STAND, node)
            case _:
                raise source.error("a contract file holds stubs (def operator(arguments): …) and constants", node)
    if not contracts:
        raise source.error("no contract here; write one as a stub: def operator(arguments): …")
    return contracts


def parse_body(text: str, name: str, parameters: Sequence[str], source: Source | None = None) -> Contract:
    """Read the statements of one contract for an operator with these parameters.

    `source` places errors when the text is a part of a larger file; the text is dedented.
    """
    source, doc, body = opened(source or Source(f"<contract of {name}>", dedented(text)))
    if not body:
        raise source.error("the contract is empty; declare an argument (name: type) or write require(…)")
    _check_parameters(parameters, body, source)
    return validated(
        Contract(
            name=name,
            parameters=tuple(parameters),
            doc=doc,
            body=_statements(body, source),
            source=source,
            imports=_used(source.imports, body),
        )
    )


def stub_signature(contract: Contract) -> inspect.Signature | None:
    """The signature of the stub that a contract was read from, None when it was no stub.

    Raises ContractError for a default that is not a literal: nothing is executed to find out what it is.
    """
    if contract.signature is None:
        return None
    stub = ast.parse(f"def stub({contract.signature}): ...").body[0]
    assert isinstance(stub, ast.FunctionDef)
    arguments = stub.args

    def made(argument: ast.arg, kind: Any, default: ast.expr | None = None) -> inspect.Parameter:
        value: Any = inspect.Parameter.empty
        if default is not None:
            try:
                value = ast.literal_eval(default)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                raise contract.source.error(
                    f"to guard this operator, a default in its stub has to be a literal, such as 1, None or 'x'; that "
                    f"of {argument.arg} is {ast.unparse(default)}",
                    contract.source.within(contract.place, argument.arg),
                ) from None
        return inspect.Parameter(argument.arg, kind, default=value)

    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    defaults = [*[None] * missing, *arguments.defaults]
    kind = inspect.Parameter
    kinds = [kind.POSITIONAL_ONLY for _ in arguments.posonlyargs] + [kind.POSITIONAL_OR_KEYWORD for _ in arguments.args]
    parameters = [made(*parts) for parts in zip(positional, kinds, defaults, strict=True)]
    if arguments.vararg is not None:
        parameters.append(made(arguments.vararg, kind.VAR_POSITIONAL))
    parameters += [
        made(argument, kind.KEYWORD_ONLY, value)
        for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        parameters.append(made(arguments.kwarg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


def docstring_section(doc: str) -> str | None:
    """The text of the `Contract:` section of a docstring, dedented; None when it has none.

    Raises ContractError when it has several.
    """
    lines = doc.expandtabs().splitlines()
    headings = [number for number, line in enumerate(lines) if re.fullmatch(r"\s*Contract:\s*", line)]
    if not headings:
        return None
    if len(headings) > 1:
        raise ContractError("a docstring has one `Contract:` section; this one has several")
    section: list[str] = []
    for line in lines[headings[0] + 1 :]:
        if line.strip() and _indent(line) <= _indent(lines[headings[0]]):
            break
        section.append(line)
    return dedented("\n".join(section)).rstrip()


# ---------------------------------------------------------------- syntax


def _syntax(source: Source) -> list[ast.stmt]:
    if len(source.text) > MAX_CHARACTERS:
        raise source.error(f"the text has {len(source.text)} characters; at most {MAX_CHARACTERS} are read")
    try:
        with warnings.catch_warnings():
            # Python warns of odd backslashes in texts; what is wrong with a contract is said by a ContractError.
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            module = ast.parse(source.text)
    except SyntaxError as error:
        offset = len((error.text or "")[: max((error.offset or 1) - 1, 0)].encode())
        raise source.error_at(f"not Python syntax: {error.msg}", error.lineno or 1, offset) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise source.error(f"cannot be read: {str(error) or 'nested too deeply'}") from None
    parts = 0
    for statement in module.body:
        parts += _parts(statement, source)
        if parts > MAX_PARTS:
            raise source.error(f"the text is too large: at most {MAX_PARTS} names, numbers, operators …", statement)
    return module.body


def opened(source: Source) -> tuple[Source, str, list[ast.stmt]]:
    """What a text says of itself, its imports (noted in the source; nothing is imported), and the rest of it."""
    statements = _syntax(source)
    doc = ""
    if statements and isinstance(statements[0], ast.Expr) and isinstance(statements[0].value, ast.Constant):
        doc, statements = _doc(statements[0], source), statements[1:]
    imports: dict[str, str] = {}
    while statements and isinstance(statements[0], ast.Import | ast.ImportFrom):
        for name, module in _imported(statements[0], source):
            if imports.setdefault(name, module) != module:
                raise source.error(f"{name!r} is imported from {imports[name]} already", statements[0])
        statements = statements[1:]
    return replace(source, imports=imports), doc, statements


def _imported(node: ast.stmt, source: Source) -> Iterator[tuple[str, str]]:
    """The names that `from package.module import name, other` gives, each with its module."""
    if not isinstance(node, ast.ImportFrom):
        raise source.error("predicates are imported as: from package.module import name", node)
    if node.level or node.module is None:
        raise source.error("a module is named in full; there are no relative imports", node)
    if node.module != "__main__" and any(part.startswith("__") for part in node.module.split(".")):
        raise source.error(f"nothing is imported from {node.module!r}", node)
    # Read now: integrations add functions to the table.
    taken = {
        *FUNCTIONS, *LOOPS, *SEQUENCES, *KEYWORDS, *DTYPE_NAMES, *DTYPE_SETS, *DEVICE_TYPES, *SCALAR_TYPES,
        "list", "result", "_",
    }  # fmt: skip
    for alias in node.names:
        if alias.name == "*":
            raise source.error("predicates are imported one by one, by name", alias)
        if alias.asname is not None:
            raise source.error("a predicate keeps its name; `as` is not in the language", alias)
        if alias.name.startswith("__"):
            raise source.error(f"{alias.name!r}: names do not begin with two underscores", alias)
        if alias.name in taken:
            raise source.error(f"{alias.name!r} has a meaning in the language; give the predicate another name", alias)
        yield alias.name, node.module


def _parts(statement: ast.stmt, source: Source) -> int:
    """How many parts a statement has; raises ContractError where they stand too deep within each other, and for texts
    that no file can hold.
    """
    parts = 0
    level: list[ast.AST] = [statement]
    for _ in range(MAX_NESTING):
        parts += len(level)
        for node in level:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and not _is_writable(node.value):
                raise source.error("a text holds half a character (a lone surrogate)", node)
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return parts
    raise source.error(f"nested deeper than {MAX_NESTING} levels", statement)


def _is_writable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_stub(node: ast.FunctionDef, source: Source, constants: dict[str, Any], *, proven: bool = False) -> Contract:
    """The contract of one stub, of a file with these constants; `proven` as in `validated`."""
    if node.decorator_list:
        raise source.error("a stub has no decorators", node.decorator_list[0])
    arguments = node.args
    everything = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    body, doc = node.body, ""
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        doc, body = _doc(body[0], source), body[1:]
    for argument in everything:
        if argument is not None and argument.annotation is not None:
            raise source.error("types stand in the body, as statements: name: type", argument.annotation)
    parameters = tuple(argument.arg for argument in everything if argument is not None)
    _check_parameters(parameters, body, source, node)
    return validated(
        Contract(
            name=node.name,
            parameters=parameters,
            doc=doc,
            body=_statements(body, source),
            source=source,
            place=Place.of(node),
            signature=ast.unparse(arguments),
            constants=_used(constants, body),
            imports=_used(source.imports, body),
        ),
        proven=proven,
    )


def _check_parameters(
    parameters: Sequence[str], body: list[ast.stmt], source: Source, place: ast.stmt | None = None
) -> None:
    for name in parameters:
        if name in source.imports:
            raise source.error(f"{name!r} is a parameter here and imported from {source.imports[name]}", place)
    reserved = {*KEYWORDS, "result"} & set(parameters)
    for statement in body if reserved else ():
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id in reserved:
                raise source.error(f"{node.id!r} is a parameter here and a word of the language", node)


def _used(known: Mapping[str, Any], body: list[ast.stmt]) -> dict[str, Any]:
    names = {node.id for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return {name: value for name, value in known.items() if name in names}


def read_constant(name: str, node: ast.Assign, constants: dict[str, Any], source: Source) -> Any:
    """The value of `NAME = literal`: numbers, texts, tuples, lists and dicts of these."""
    if not name.isupper() or not name.isascii() or name in constants or len(name) < 3:
        raise source.error("a constant has a name of capitals (A to Z), at least three, that no other has", node)
    if name in source.imports:
        raise source.error(f"{name!r} is a constant here and imported from {source.imports[name]}", node)
    try:
        value = ast.literal_eval(node.value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        value = ...
    if not _is_constant(value):
        raise source.error("a constant is a number, a text, or a tuple, list or dict of these", node.value)
    return value


def _is_constant(value: Any) -> bool:
    match value:
        case dict():
            return all(_is_constant(part) for part in (*value.keys(), *value.values()))
        case tuple() | list():
            return all(_is_constant(part) for part in value)
        case float():
            return math.isfinite(value)
    return value is None or isinstance(value, int | str)


def _doc(node: ast.Expr, source: Source) -> str:
    if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        import textwrap  # noqa: PLC0415 - few need it

        return textwrap.dedent(node.value.value).strip()
    raise source.error("not a statement of the language", node)


def dedented(text: str) -> str:
    """The text without common indentation and without blank lines around it."""
    import textwrap  # noqa: PLC0415 - few need it

    return textwrap.dedent(text.expandtabs()).strip("\n")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


# ---------------------------------------------------------------- statements


def _statements(body: Iterable[ast.stmt], source: Source) -> tuple[Statement, ...]:
    return tuple(_statement(node, source) for node in body if not isinstance(node, ast.Pass))


def _statement(node: ast.stmt, source: Source) -> Statement:
    match node:
        case ast.AnnAssign():
            return _declaration(node, source)
        case ast.Assign(targets=[target]):
            names = _names(target, source)
            (check_given if len(names) == 1 else check_expression)(node.value, source)
            return Assign(names, Expr.of(node.value), Place.of(node))
        case ast.If():
            return If(
                _expression(node.test, source),
                _statements(node.body, source),
                _statements(node.orelse, source),
                Place.of(node),
            )
        case ast.For(target=target, iter=iterable, body=body, orelse=[]):
            check_target(target, source)
            check_iterable(iterable, source)
            return For(Expr.of(target), Expr.of(iterable), _statements(body, source), Place.of(node))
        case ast.Expr(value=ast.Call(func=ast.Name(id="require")) as call):
            return _require(call, node, source, promised=False)
        case ast.Expr(value=ast.Call(func=ast.Name(id="ensure")) as call):
            return _require(call, node, source, promised=True)
        case ast.Expr(value=ast.Call(func=ast.Name(id="remember")) as call):
            return _remember(call, source)
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) as function)):
            known = ["require", "ensure", "remember"]
            raise source.error(f"unknown statement {name!r}{suggestion(name, known)}", function)
        case ast.Import() | ast.ImportFrom():
            raise source.error(_WHERE_IMPORTS_STAND, node)
        case ast.Assert():
            raise source.error("write require(…): assert vanishes under python -O", node)
    raise source.error(
        "not a statement of the language; known are: name: type, name = expression, if/elif/else, for, require(…), "
        "ensure(…), remember(…), returns: type",
        node,
    )


def _declaration(node: ast.AnnAssign, source: Source) -> Declare:
    target = path_of(node.target)
    if target is None:
        raise source.error("a declaration names a parameter or what can be read from one", node.target)
    path = Path("result", target.steps) if target.root == "returns" else target
    reason = Reason()
    if node.value is not None:
        match node.value:
            case ast.Call(func=ast.Name(id="why"), args=[]):
                reason, _ = _keywords(node.value, source, "because", "hint", "certain", "error")
            case _:
                problem = "behind a type only = why(because=…, hint=…, certain=…, error=…) may stand"
                raise source.error(problem, node.value)
    return Declare(path, parse_type(node.annotation, source), reason, Place.of(node))


def _require(call: ast.Call, node: ast.stmt, source: Source, *, promised: bool) -> Require:
    if len(call.args) != 1:
        name = "ensure" if promised else "require"
        raise source.error(f"{name} takes one condition, then id=, because=, hint=, certain=, error=", call)
    reason, rule_id = _keywords(call, source, "id", "because", "hint", "certain", "error")
    expr = _expression(call.args[0], source)
    return Require(expr, rule_id or expr.text, reason, promised, Place.of(node))


def _remember(call: ast.Call, source: Source) -> Remember:
    owner = path_of(call.args[0]) if len(call.args) == 1 else None
    if owner is None or not call.keywords:
        raise source.error("written as remember(owner, name=value, …): what is kept of an argument, by name", call)
    facts: dict[str, Expr] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in facts:
            raise source.error("each fact has a name of its own: remember(owner, rows=…, heads=…)", keyword)
        facts[keyword.arg] = _expression(keyword.value, source)
    return Remember(owner, tuple(facts.items()), Place.of(call))


def _keywords(call: ast.Call, source: Source, *allowed: str) -> tuple[Reason, str | None]:
    """The keywords of `why` and `require`: the reason, the id."""
    seen: dict[str, ast.expr] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg not in allowed:
            raise source.error(
                f"unknown keyword {keyword.arg!r}{suggestion(keyword.arg or '', allowed)}; known: {', '.join(allowed)}",
                keyword,
            )
        if keyword.arg in seen:
            raise source.error(f"{keyword.arg}= is given twice", keyword)
        seen[keyword.arg] = keyword.value
    certain = True
    if "certain" in seen:
        match seen["certain"]:
            case ast.Constant(value=bool() as certain):
                pass
            case other:
                raise source.error("certain= is True or False", other)
    because, hint = _text(seen.get("because"), source), _text(seen.get("hint"), source)
    return Reason(because, hint, certain, _error(seen.get("error"), source)), _id(seen.get("id"), source)


def _text(node: ast.expr | None, source: Source) -> Expr | None:
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return None
    check_expression(node, source, as_text=True)
    if isinstance(node, ast.Constant) and not isinstance(node.value, str):
        raise source.error("because= and hint= are texts", node)
    return Expr.of(node)


def _id(node: ast.expr | None, source: Source) -> str | None:
    match node:
        case None:
            return None
        case ast.Constant(value=str() as rule_id) if rule_id.strip() and rule_id.isprintable() and len(rule_id) <= 100:
            return rule_id
    raise source.error("id= is a text of one line, at most 100 characters", node)


def _error(node: ast.expr | None, source: Source) -> str | None:
    match node:
        case None:
            return None
        case ast.Name(id=name) if name in GUARD_ERRORS:
            return name
    raise source.error(f"error= is one of {', '.join(GUARD_ERRORS)}", node)


def _names(target: ast.expr, source: Source) -> tuple[str, ...]:
    items: Sequence[ast.expr] = target.elts if isinstance(target, ast.Tuple) else [target]
    names = []
    for item in items:
        if not isinstance(item, ast.Name):
            raise source.error("only names can be assigned to", item)
        if item.id in KEYWORDS or item.id in FUNCTIONS or item.id in source.imports or item.id == "result":
            raise source.error(f"{item.id!r} has a meaning in the language; choose another name", item)
        names.append(item.id)
    return tuple(names)


def _expression(node: ast.expr, source: Source) -> Expr:
    check_expression(node, source)
    return Expr.of(node)
