"""JSON ⇄ contracts, for tools that write or read them without a parser of Python.

The JSON form has the statements of the language as objects, `{"require": "D % 2 == 0", "id": "even_head_dim"}`, with
expressions and types as texts; `json_schema` describes it. It is put together as the text of a `.contract` file and
read as such, so that what a contract means is said in one place.
"""

from __future__ import annotations

import ast
import contextlib
import keyword
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llm_op_guard.contract.expressions import suggestion
from llm_op_guard.contract.json_document import Document, Pointer
from llm_op_guard.contract.model import Assign, Contract, Declare, Expr, For, If, Reason, Remember, Require, Statement
from llm_op_guard.contract.parse import MAX_CHARACTERS, MAX_NESTING, parse_stubs
from llm_op_guard.contract.source import Source
from llm_op_guard.errors import ContractError
from llm_op_guard.frozen import frozen

FILE_KEYS = ("$schema", "imports", "constants", "contracts")
CONTRACT_KEYS = ("name", "signature", "doc", "body")
REASON_KEYS = ("because", "hint", "certain", "error")
RULE_KEYS = ("id", *REASON_KEYS)
# What a statement is, by the key that says so: the keys that stand beside it, and those that may be left out.
STATEMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "declare": (("type",), REASON_KEYS),
    "assign": (("value",), ()),
    "require": ((), RULE_KEYS),
    "ensure": ((), RULE_KEYS),
    "remember": (("facts",), ()),
    "if": (("then",), ("else",)),
    "for": (("in", "do"), ()),
    "input": ((), ()),
    "output": ((), ()),
}
# The long form of a declaration: the parts of its type one by one, and conditions.
ARGUMENT_KEYS = ("type", "dtype", "shape", "device", "optional", "constraint", *REASON_KEYS)


# ---------------------------------------------------------------- contracts → JSON


def to_json(contracts: Mapping[str, Contract]) -> dict[str, Any]:
    """The JSON form of the contracts of one file; `parse_json` reads it."""
    imports = {name: module for contract in contracts.values() for name, module in contract.imports.items()}
    constants = {name: repr(value) for contract in contracts.values() for name, value in contract.constants.items()}
    shared: dict[str, Any] = {"imports": imports} if imports else {}
    shared |= {"constants": constants} if constants else {}
    return {**shared, "contracts": [_contract_data(contract) for contract in contracts.values()]}


def _contract_data(contract: Contract) -> dict[str, Any]:
    doc = {"doc": contract.doc} if contract.doc else {}
    return {"name": contract.name, "signature": contract.parameter_list, **doc, "body": _body_data(contract.body)}


def _body_data(body: Iterable[Statement]) -> list[dict[str, Any]]:
    return [_statement_data(statement) for statement in body]


def _statement_data(statement: Statement) -> dict[str, Any]:
    match statement:
        case Declare(type=declared, reason=reason):
            return {"declare": statement.target, "type": declared.text, **_reason_data(reason)}
        case Assign(names=names, expr=expr):
            return {"assign": list(names), "value": expr.text}
        case Require(expr=expr, id=rule_id, reason=reason, promised=promised):
            own_id = {"id": rule_id} if rule_id != expr.text else {}
            return {"ensure" if promised else "require": expr.text, **own_id, **_reason_data(reason)}
        case Remember(path=path, facts=facts):
            return {"remember": str(path), "facts": {name: expr.text for name, expr in facts}}
        case If(test=test, body=body, orelse=orelse):
            otherwise = {"else": _body_data(orelse)} if orelse else {}
            return {"if": test.text, "then": _body_data(body), **otherwise}
        case For(target=target, iterable=iterable, body=body):
            return {"for": target.text, "in": iterable.text, "do": _body_data(body)}


def _reason_data(reason: Reason) -> dict[str, Any]:
    texts = {"because": reason.because, "hint": reason.hint}
    data: dict[str, Any] = {name: _text_data(text) for name, text in texts.items() if text is not None}
    data |= {} if reason.certain else {"certain": False}
    return data if reason.error is None else {**data, "error": reason.error}


def _text_data(text: Expr) -> str | dict[str, str]:
    """A text as it is; one that depends on the call, as its expression."""
    if isinstance(text.node, ast.Constant) and isinstance(text.node.value, str):
        return text.node.value
    return {"expression": text.text}


# ---------------------------------------------------------------- JSON → contracts


def parse_json(text: str, file: str = "<contract>") -> dict[str, Contract]:
    """Read the text of a file of the JSON form: its contracts by name.

    Raises ContractError, with the place in the file and the keys that lead there, when anything in it is wrong.
    """
    document = Document(Source(file, text), MAX_CHARACTERS)
    lines = list(_Writer(document).file())

    def in_file(error: ContractError) -> ContractError:
        piece, offset = lines[min(error.line, len(lines)) - 1].at(error.column - 1)
        return document.error(error.problem, piece.at, piece.text, offset)

    try:
        written = "\n".join(line.text for line in lines)
        return parse_stubs(written, file, Source(file, written, in_file=in_file))
    except ContractError as error:
        raise in_file(error) from None


@frozen
class _Piece:
    """A text and the part of the document that it comes from."""

    text: str
    at: Pointer


@frozen
class _Line:
    """A line of the contract's text."""

    pieces: tuple[_Piece, ...]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def at(self, column: int) -> tuple[_Piece, int]:
        """The piece that stands at a column, and how far into it that is."""
        for piece in self.pieces:
            if column < len(piece.text):
                return piece, column
            column -= len(piece.text)
        return self.pieces[0], 0

    def indented(self) -> _Line:
        return _Line((_Piece("    ", self.pieces[0].at), *self.pieces))


class _Writer:
    """Puts the text of the contracts of a document together; raises ContractError for what is no such document."""

    def __init__(self, document: Document) -> None:
        self._document = document

    def file(self) -> Iterator[_Line]:
        data = self._document.data
        if isinstance(data, dict) and "contracts" not in data and "name" in data:
            yield from self._contract(data, ())
            return
        self._check_keys(data, ("contracts",), FILE_KEYS, ())
        self._string(data.get("$schema", ""), ("$schema",))
        at: Pointer = ("imports",)
        for name, module in self._object(data.get("imports", {}), at).items():
            here = (*at, name)
            yield _line(here, "from ", self._module(module, here), " import ", _Piece(self._name(name, here), here))
        at = ("constants",)
        for name, literal in self._object(data.get("constants", {}), at).items():
            here = (*at, name)
            yield _line(here, _Piece(self._name(name, here), here), " = ", self._expression(literal, here))
        contracts = self._array(data["contracts"], ("contracts",))
        if not contracts:
            raise self._document.error("no contract here; at least one is wanted", ("contracts",))
        for index, contract in enumerate(contracts):
            yield from self._contract(contract, ("contracts", index))

    def _contract(self, data: Any, at: Pointer) -> Iterator[_Line]:
        self._check_keys(data, ("name", "body"), CONTRACT_KEYS, at)
        name = _Piece(self._name(data["name"], (*at, "name")), (*at, "name"))
        yield _line(at, "def ", name, "(", self._signature(data, at), "):")
        if "doc" in data:
            yield _line((*at, "doc"), repr(self._string(data["doc"], (*at, "doc")))).indented()
        yield from self._body(data["body"], (*at, "body"))

    def _signature(self, data: dict[str, Any], at: Pointer) -> _Piece:
        if "signature" in data:
            here = (*at, "signature")
            text = self._string(data["signature"], here)
            # The line break ends a comment, so that nothing behind the parameters goes unseen.
            node = self._parsed(f"(lambda {text}\n: 0)", here)
            if isinstance(node, ast.Lambda):
                return _Piece(ast.unparse(node.args), here)
            raise self._document.error("a signature is a list of parameters, such as 'q, k, *, dim=1'", here)
        # The long form names its arguments one by one.
        body = self._array(data["body"], (*at, "body"))
        inputs = [statement.get("input") for statement in body if isinstance(statement, dict)]
        names = [argument.get("name") for argument in inputs if isinstance(argument, dict)]
        plain = [
            name for name in names if isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
        ]
        if not plain:
            raise self._document.error("'signature' is missing: the parameters, such as 'q, k, *, dim=1'", at)
        return _Piece(", ".join(dict.fromkeys(plain)), at)

    # ------------------------------------------------------------ statements

    def _body(self, data: Any, at: Pointer) -> Iterator[_Line]:
        if len(at) > 2 * MAX_NESTING:
            raise self._document.error("nested too deeply", at)
        statements = self._array(data, at)
        for index, statement in enumerate(statements):
            for line in self._statement(statement, (*at, index)):
                yield line.indented()
        if not statements:
            yield _line(at, "pass").indented()

    def _statement(self, data: Any, at: Pointer) -> Iterator[_Line]:
        kinds = [key for key in self._object(data, at) if key in STATEMENTS]
        if len(kinds) != 1:
            known = ", ".join(STATEMENTS)
            near = next((suggestion(str(key), STATEMENTS) for key in data if suggestion(str(key), STATEMENTS)), "")
            problem = f"a statement says with one key what it is: {known}"
            raise self._document.error(problem + ("" if kinds else near), at)
        kind = kinds[0]
        needed, optional = STATEMENTS[kind]
        self._check_keys(data, (kind, *needed), optional, at)
        here = (*at, kind)
        match kind:
            case "declare":
                target, declared = self._expression(data[kind], here), self._expression(data["type"], (*at, "type"))
                yield _line(at, target, ": ", declared, *self._why(data, at))
            case "assign":
                names = [data[kind]] if isinstance(data[kind], str) else self._array(data[kind], here)
                joined = ", ".join(self._name(name, here) for name in names)
                yield _line(at, _Piece(joined, here), " = ", self._expression(data["value"], (*at, "value")))
            case "require" | "ensure":
                yield _line(at, f"{kind}(", self._expression(data[kind], here), *self._keywords(data, at), ")")
            case "remember":
                facts = self._object(data["facts"], (*at, "facts"))
                parts: list[str | _Piece] = []
                for name, value in facts.items():
                    key: Pointer = (*at, "facts", name)
                    parts += [", ", _Piece(self._name(name, key), key), "=", self._expression(value, key)]
                yield _line(at, "remember(", self._expression(data[kind], here), *parts, ")")
            case "if":
                yield _line(at, "if ", self._expression(data[kind], here), ":")
                yield from self._body(data["then"], (*at, "then"))
                if "else" in data:
                    yield _line((*at, "else"), "else:")
                    yield from self._body(data["else"], (*at, "else"))
            case "for":
                target, iterable = self._expression(data[kind], here), self._expression(data["in"], (*at, "in"))
                yield _line(at, "for ", target, " in ", iterable, ":")
                yield from self._body(data["do"], (*at, "do"))
            case "input":
                yield from self._argument(data[kind], ("name",), "require", here)
            case "output":
                yield from self._argument(data[kind], (), "ensure", here)

    def _argument(self, data: Any, needed: tuple[str, ...], rule: str, at: Pointer) -> Iterator[_Line]:
        """The long form of a declaration, and of the rules about it."""
        self._check_keys(data, needed, ARGUMENT_KEYS, at)
        target = self._expression(data["name"], (*at, "name")) if needed else _Piece("returns", at)
        declared = list(self._type(data, at))
        constraints = data.get("constraint", [])
        if constraints == [] and "constraint" in data:
            raise self._document.error("at least one is wanted", (*at, "constraint"))
        if declared:
            yield _line(at, target, ": ", *declared, *self._why(data, at))
        elif constraints == []:
            raise self._document.error("nothing is said of it: type, or dtype, shape, device, or constraint", at)
        for index, constraint in enumerate(constraints if isinstance(constraints, list) else [constraints]):
            here = (*at, "constraint", index) if isinstance(constraints, list) else (*at, "constraint")
            if isinstance(constraint, dict):
                self._check_keys(constraint, (rule,), RULE_KEYS, here)
                condition, own = self._expression(constraint[rule], (*here, rule)), self._keywords(constraint, here)
            else:
                condition = self._expression(constraint, here)
                own = [] if declared else self._keywords({k: v for k, v in data.items() if k in REASON_KEYS}, at)
            yield _line(here, f"{rule}(", condition, *own, ")")

    def _type(self, data: dict[str, Any], at: Pointer) -> Iterator[str | _Piece]:
        parts = [key for key in ("dtype", "shape", "device") if key in data]
        if "type" in data and parts:
            raise self._document.error(f"beside 'type' there is no {parts[0]!r}: write one or the other", at)
        optional = data.get("optional", False)
        if not isinstance(optional, bool):
            raise self._document.error("true or false is wanted", (*at, "optional"))
        if optional and ("type" in data or parts):
            yield "None | "
        if "type" in data:
            yield self._expression(data["type"], (*at, "type"))
        if not parts:
            return
        yield from self._union(data.get("dtype", "any"), (*at, "dtype"))
        if "shape" in data:
            here = (*at, "shape")
            sizes = [self._size(size, (*here, index)) for index, size in enumerate(self._array(data["shape"], here))]
            yield "["
            for index, size in enumerate(sizes):
                yield from ([", "] if index else [])
                yield size
            yield "]" if sizes else "()]"
        if "device" in data:
            yield " @ "
            yield from self._union(data["device"], (*at, "device"))

    def _union(self, data: Any, at: Pointer) -> Iterator[str | _Piece]:
        options = data if isinstance(data, list) else [data]
        if not options:
            raise self._document.error("at least one is wanted", at)
        pieces = [self._expression(option, (*at, i) if options is data else at) for i, option in enumerate(options)]
        for index, piece in enumerate(pieces):
            yield " | " if index else "(" * (len(pieces) > 1)
            yield piece
        yield ")" * (len(pieces) > 1)

    def _size(self, data: Any, at: Pointer) -> _Piece:
        if isinstance(data, float) and data.is_integer():
            data = int(data)  # 3.0 is a whole number of JSON
        if isinstance(data, int) and not isinstance(data, bool):
            if data < 0:
                raise self._document.error("a size is a whole number from 0 on", at)
            return _Piece(str(data), at)
        # In the brackets of a type, `*lead` stands too.
        node = self._parsed(f"_[{self._string(data, at)}]", at)
        match node:
            case ast.Subscript(value=ast.Name(id="_"), slice=ast.Tuple(elts=[ast.Starred() as size])):
                return _Piece(ast.unparse(size), at)
            case ast.Subscript(value=ast.Name(id="_"), slice=size) if not isinstance(size, ast.Tuple | ast.Slice):
                return _Piece(ast.unparse(size), at)
        raise self._document.error("one size is wanted: a number, a symbol or an expression", at)

    # ------------------------------------------------------------ reasons

    def _why(self, data: dict[str, Any], at: Pointer) -> list[str | _Piece]:
        keywords = self._keywords({key: value for key, value in data.items() if key in REASON_KEYS}, at)
        return [" = why(", *keywords[1:], ")"] if keywords else []

    def _keywords(self, data: dict[str, Any], at: Pointer) -> list[str | _Piece]:
        """The keywords of a rule, each behind a comma."""
        parts: list[str | _Piece] = []
        for key in (key for key in RULE_KEYS if key in data):
            value, here = data[key], (*at, key)
            if key == "certain":
                if not isinstance(value, bool):
                    raise self._document.error("true or false is wanted", here)
                piece = _Piece(str(value), here)
            elif key == "error":
                piece = self._expression(value, here)
            elif key in ("because", "hint") and isinstance(value, dict):
                self._check_keys(value, ("expression",), (), here)
                piece = self._expression(value["expression"], (*here, "expression"))
            else:
                piece = _Piece(repr(self._string(value, here)), here)
            parts += [", ", f"{key}=", piece]
        return parts

    # ------------------------------------------------------------ JSON values

    def _expression(self, data: Any, at: Pointer) -> _Piece:
        text = self._string(data, at)
        node = self._bracketed(text) or self._parsed(text.strip(), at)
        try:
            return _Piece(ast.unparse(node), at)
        except (RecursionError, ValueError):
            raise self._document.error("nested too deeply", at) from None

    def _bracketed(self, text: str) -> ast.expr | None:
        """An expression that stands in several lines, as it may within brackets."""
        if "\n" not in text.strip():
            return None
        with contextlib.suppress(ContractError):
            # A text that closes a bracket of its own accord cannot do so with both kinds.
            self._parsed(f"[\n{text}\n]", ())
            return self._parsed(f"(\n{text}\n)", ())
        return None

    def _parsed(self, text: str, at: Pointer) -> ast.expr:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is wrong with a contract is said by a ContractError
                return ast.parse(text, mode="eval").body
        except SyntaxError as error:
            raise self._document.error(f"not Python syntax: {error.msg}", at) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._document.error(f"cannot be read: {str(error) or 'nested too deeply'}", at) from None

    def _name(self, data: Any, at: Pointer) -> str:
        name = self._string(data, at)
        if not name.isidentifier() or keyword.iskeyword(name):
            raise self._document.error("a name is letters, digits and _, and no word of Python", at)
        return name

    def _module(self, data: Any, at: Pointer) -> _Piece:
        for part in self._string(data, at).split("."):
            self._name(part, at)
        return _Piece(data, at)

    def _string(self, data: Any, at: Pointer) -> str:
        if not isinstance(data, str):
            raise self._document.error(f"a text is wanted, not {_kind(data)}", at)
        return data

    def _array(self, data: Any, at: Pointer) -> list[Any]:
        if not isinstance(data, list):
            raise self._document.error(f"an array is wanted, not {_kind(data)}", at)
        return data

    def _object(self, data: Any, at: Pointer) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise self._document.error(f"an object is wanted, not {_kind(data)}", at)
        return data

    def _check_keys(self, data: Any, needed: Iterable[str], optional: Iterable[str], at: Pointer) -> None:
        known = list(dict.fromkeys((*needed, *optional)))
        for key in self._object(data, at):
            if key not in known:
                near = suggestion(key, known) or f"; known: {', '.join(known)}"
                if key in FILE_KEYS and "body" in known:
                    near = "; it stands in the file, beside 'contracts'"
                raise self._document.error(f"unknown key {key[:50]!r}{near}", at)
        for key in needed:
            if key not in data:
                raise self._document.error(f"{key!r} is missing", at)


def _line(at: Pointer, *parts: str | _Piece) -> _Line:
    return _Line(tuple(part if isinstance(part, _Piece) else _Piece(part, at) for part in parts))


def _kind(data: Any) -> str:
    kinds = {dict: "an object", list: "an array", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(data), "a number")
