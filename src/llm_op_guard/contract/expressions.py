"""Which Python expressions the language has, and what one of them reads."""

from __future__ import annotations

import ast
import math
from collections.abc import Container, Iterable

from llm_op_guard.contract.source import Source
from llm_op_guard.contract.vocabulary import DEVICE_TYPES, DTYPE_SETS, FUNCTIONS, KEYWORDS

_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_UNARY = (ast.Not, ast.USub, ast.UAdd)
_COMPARE = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Is, ast.IsNot, ast.In, ast.NotIn)
# An integer literal past this many bits cannot be a size, an id or a bound of any dtype.
_MAX_BITS = 128


def check_expression(node: ast.expr, source: Source, *, as_text: bool = False) -> None:
    """Raise ContractError unless `node` is an expression of the language; `as_text` also admits f-strings."""
    match node:
        case ast.Constant(value=value):
            _check_constant(node, value, source)
        case ast.Name(id=name) if name in DTYPE_SETS:
            raise source.error(f"{name} is a set of dtypes; it stands behind `in`", node)
        case ast.Name():
            if node.id.startswith("__"):
                raise source.error(f"{node.id!r}: names do not begin with two underscores", node)
        case ast.Attribute():
            if node.attr.startswith("__"):
                raise source.error(f"{node.attr!r} cannot be read", node)
            check_expression(node.value, source)
        case ast.Subscript():
            check_expression(node.slice, source)
            check_expression(node.value, source)
        case ast.UnaryOp(op=op) if isinstance(op, _UNARY):
            check_expression(node.operand, source)
        case ast.BinOp(op=op) if isinstance(op, _BINARY):
            check_expression(node.left, source, as_text=as_text)
            check_expression(node.right, source, as_text=as_text)
        case ast.BinOp(op=ast.BitOr()):
            raise source.error("| joins types, not values: write `x in (a, b)` or `or`", node)
        case ast.BoolOp():
            for operand in node.values:
                check_expression(operand, source)
        case ast.Compare(ops=ops) if all(isinstance(op, _COMPARE) for op in ops):
            _check_compare(node, source)
        case ast.IfExp():
            check_expression(node.test, source)
            check_expression(node.body, source, as_text=as_text)
            check_expression(node.orelse, source, as_text=as_text)
        case ast.Call():
            _check_call(node, source)
            if gives_tensor(node):
                raise source.error(f"{calls_in(node)[0]} gives a tensor, for a value function or a name", node)
        case ast.Tuple() | ast.List():
            for item in node.elts:
                check_expression(item.value if isinstance(item, ast.Starred) else item, source)
        case ast.JoinedStr() if as_text:
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    if part.format_spec is not None or part.conversion != -1:
                        raise source.error("a text shows plain values: {name}, without format", part)
                    check_expression(part.value, source)
        case ast.JoinedStr():
            raise source.error("f-strings stand in because= and hint= only", node)
        case _:
            raise source.error(f"{_describe(node)} not in the language", node)


def check_given(node: ast.expr, source: Source) -> None:
    """Raise ContractError unless a name may stand for `node`: an expression, or the tensor of a value function."""
    if gives_tensor(node):
        assert isinstance(node, ast.Call)
        _check_call(node, source)
    else:
        check_expression(node, source)


def gives_tensor(node: ast.expr) -> bool:
    """Whether an expression is a call of a value function that gives a tensor."""
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            return FUNCTIONS[name].gives_tensor
    return False


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` when some known word is near, else nothing."""
    import difflib  # noqa: PLC0415 - few need it

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


# What is asked of all items of a sequence, and what goes through several sequences at once.
LOOPS = ("all", "any", "sum")
SEQUENCES = ("zip", "enumerate", "items", "range")


def names_in(node: ast.AST) -> dict[str, ast.Name]:
    """Every name that an expression reads from outside (functions that it calls and the names of its loops left out),
    each at its first place.
    """
    found: dict[str, ast.Name] = {}

    def visit(part: ast.AST, inner: frozenset[str]) -> None:
        match part:
            case ast.Name(id=name):
                if name not in inner:
                    found.setdefault(name, part)
            case ast.Call(func=func, args=arguments, keywords=keywords):
                for child in (*([] if isinstance(func, ast.Name) else [func]), *arguments, *keywords):
                    visit(child, inner)
            case ast.GeneratorExp(elt=elt, generators=[loop]):
                visit(loop.iter, inner)
                bound = inner | {name.id for name in ast.walk(loop.target) if isinstance(name, ast.Name)}
                for child in (*loop.ifs, elt):
                    visit(child, bound)
            case _:
                for child in ast.iter_child_nodes(part):
                    visit(child, inner)

    visit(node, frozenset())
    return found


def is_read(node: ast.expr) -> bool:
    """Whether an expression is a name or what is read from one: attributes, and items at any index."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return isinstance(node, ast.Name)


def steps_of(node: ast.expr) -> tuple[ast.Name, list[str | ast.expr]]:
    """The name that something is read from, and the attributes and indices that lead there."""
    steps: list[str | ast.expr] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        steps.append(node.attr if isinstance(node, ast.Attribute) else node.slice)
        node = node.value
    assert isinstance(node, ast.Name)
    return node, steps[::-1]


def device_types(node: ast.expr, own: Container[str]) -> tuple[str, ...]:
    """The types of device that an operand is: of `cpu` one, of `(cpu, cuda)` two; none of anything else.

    `own` are the names that the contract gives a meaning: a parameter that is called cpu is that parameter.
    """
    parts = node.elts if isinstance(node, ast.Tuple | ast.List) else [node]
    names = [part.id for part in parts if isinstance(part, ast.Name) and part.id in DEVICE_TYPES and part.id not in own]
    return tuple(names) if len(names) == len(parts) else ()


def calls_in(node: ast.AST) -> list[str]:
    """The names of the functions that an expression calls."""
    return [call.func.id for call in ast.walk(node) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)]


def _check_constant(node: ast.expr, value: object, source: Source) -> None:
    if value is Ellipsis or isinstance(value, bytes | complex):
        raise source.error(f"the constant {value!r} is not in the language", node)
    if isinstance(value, float) and not math.isfinite(value):
        raise source.error("the number is too large", node)
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise source.error("the integer is too large", node)


def _check_compare(node: ast.Compare, source: Source) -> None:
    for op, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(op, ast.Is | ast.IsNot) and not (
            isinstance(right, ast.Constant) and (right.value is None or isinstance(right.value, bool))
        ):
            raise source.error("`is` compares with None, True or False; use == otherwise", right)
    for op, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(op, ast.In | ast.NotIn):
            if isinstance(right, ast.Constant):
                raise source.error("behind `in` stands a tuple, a set of dtypes or a shape", right)
            if _is_dtype_set(right):
                continue
            if isinstance(right, ast.Tuple | ast.List):
                for item in right.elts:
                    if not _is_dtype_set(item):
                        check_expression(item.value if isinstance(item, ast.Starred) else item, source)
                continue
        if _is_dtype_set(right):
            raise source.error(f"{ast.unparse(right)} is a set of dtypes: use `in`", right)
        check_expression(right, source)
    if _is_dtype_set(node.left):
        raise source.error(f"{ast.unparse(node.left)} is a set of dtypes; it stands behind `in`", node.left)
    check_expression(node.left, source)


def _is_dtype_set(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in DTYPE_SETS


def _check_call(node: ast.Call, source: Source) -> None:
    if not isinstance(node.func, ast.Name):
        raise source.error("methods are never called; functions are those of the language's table", node.func)
    if node.func.id in LOOPS:
        _check_loop(node, source)
        return
    if node.func.id in source.imports:
        _check_asked(node, source)
        return
    function = FUNCTIONS.get(node.func.id)
    if function is None:
        known = [*FUNCTIONS, *LOOPS, *source.imports]
        raise source.error(f"unknown function {node.func.id!r}{suggestion(node.func.id, known)}", node.func)
    names = [name for name, _ in function.arguments]
    given = len(node.args)
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg not in names[given:]:
            raise source.error(f"{function.signature} has no argument {keyword.arg!r} left", keyword)
    total = given + len(node.keywords)
    missing = [n for n in names[given : function.least] if n not in {k.arg for k in node.keywords}]
    if missing or (total > len(names) and not function.variadic):
        raise source.error(f"{function.signature} takes {_count(function.least, len(names))}; {total} given", node)
    for argument in node.args:
        if isinstance(argument, ast.Starred):
            raise source.error("arguments are written one by one", argument)
    for index, argument in enumerate(node.args):
        kind = function.arguments[min(index, len(function.arguments) - 1)][1]
        if kind == "tensor":
            _check_tensor(function.name, argument, source)
            continue
        if kind in ("path", "owner") and not is_read(argument):
            raise source.error(f"{function.name} takes a parameter or what can be read from one", argument)
        if kind == "text" and not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
            raise source.error(f"{function.name} takes a text here, such as 'rows'", argument)
        check_expression(argument, source)
    for keyword in node.keywords:
        kind = dict(function.arguments)[str(keyword.arg)]
        if kind == "tensor":
            _check_tensor(function.name, keyword.value, source)
        else:
            check_expression(keyword.value, source)


def _check_asked(node: ast.Call, source: Source) -> None:
    """The call of an imported predicate: expressions, by position."""
    for keyword in node.keywords:
        raise source.error("an imported predicate is given its arguments by position", keyword.value)
    for argument in node.args:
        if isinstance(argument, ast.Starred):
            raise source.error("arguments are written one by one", argument)
        check_expression(argument, source)


def _check_loop(node: ast.Call, source: Source) -> None:
    match node:
        case ast.Call(func=ast.Name(), args=[ast.GeneratorExp(elt=elt, generators=[loop])], keywords=[]) if (
            not loop.is_async
        ):
            check_target(loop.target, source)
            check_iterable(loop.iter, source)
            for part in (*loop.ifs, elt):
                check_expression(part, source)
        case ast.Call(func=ast.Name(id=name), args=[xs], keywords=[]) if is_read(xs):
            each = "item" if name == "sum" else "condition"
            raise source.error(f"written as {name}({each} for item in {ast.unparse(xs)})", node)
        case _:
            raise source.error("written as all(condition for x in xs), any(…) or sum(…), over one sequence", node)


def check_target(node: ast.expr, source: Source) -> None:
    """Raise ContractError unless `node` is a name, or several, that a loop may give."""
    names = node.elts if isinstance(node, ast.Tuple) else [node]
    for name in names:
        if not isinstance(name, ast.Name) or name.id in {*FUNCTIONS, *LOOPS, *SEQUENCES, *KEYWORDS, *source.imports}:
            raise source.error("a loop gives names: for x in …, for x, y in …", name)
    if len({name.id for name in names if isinstance(name, ast.Name)}) < len(names):
        raise source.error("a loop gives each name once", node)


def check_iterable(node: ast.expr, source: Source) -> None:
    """Raise ContractError unless `node` is a sequence: read, written out, or of zip, enumerate, items or range."""
    match node:
        case ast.Call(func=ast.Name(id="range"), args=[count], keywords=[]):
            check_expression(count, source)
        case ast.Call(func=ast.Name(id="items"), args=[mapping], keywords=[]) if is_read(mapping):
            check_expression(mapping, source)
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner], keywords=[]):
            check_iterable(inner, source)
        case ast.Call(func=ast.Name(id="zip"), args=[_, *_] as inners, keywords=[]):
            for inner in inners:
                check_iterable(inner, source)
        case ast.Tuple() | ast.List():
            check_expression(node, source)
        case _ if is_read(node):
            check_expression(node, source)
        case _:
            raise source.error("a loop goes over what is read or written out, or zip, enumerate, items or range", node)


def _check_tensor(function: str, node: ast.expr, source: Source) -> None:
    """A tensor argument: something read from a parameter, a part of it (`cos[:, :1]`), or what a function gives."""
    match node:
        case _ if gives_tensor(node):
            assert isinstance(node, ast.Call)
            _check_call(node, source)
        case ast.Subscript(value=value, slice=index):
            for part in index.elts if isinstance(index, ast.Tuple) else [index]:
                _check_slice(part, source)
            _check_tensor(function, value, source)
        case _ if not is_read(node):
            raise source.error(f"{function} takes a parameter or what can be read from one", node)
        case _:
            check_expression(node, source)


def tensor_arguments(call: ast.Call) -> list[ast.expr]:
    """The arguments of a function of the language that it takes as tensors."""
    assert isinstance(call.func, ast.Name)
    kinds = FUNCTIONS[call.func.id].arguments
    given = [a for i, a in enumerate(call.args) if kinds[min(i, len(kinds) - 1)][1] == "tensor"]
    return given + [k.value for k in call.keywords if dict(kinds).get(str(k.arg)) == "tensor"]


def _check_slice(node: ast.expr, source: Source) -> None:
    parts = [node.lower, node.upper, node.step] if isinstance(node, ast.Slice) else [node]
    for part in parts:
        if part is not None and not (isinstance(part, ast.Constant) and part.value is Ellipsis):
            check_expression(part, source)


def _count(least: int, most: int) -> str:
    return f"{least} arguments" if least == most else f"{least} to {most} arguments"


def _describe(node: ast.expr) -> str:
    names = {
        ast.Lambda: "lambda is",
        ast.NamedExpr: "the walrus is",
        ast.GeneratorExp: "this comprehension is",
        ast.ListComp: "comprehensions are",
        ast.SetComp: "comprehensions are",
        ast.DictComp: "comprehensions are",
        ast.Await: "await is",
        ast.Starred: "a star here is",
    }
    if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in _OPERATORS:
        return f"{_OPERATORS[type(node.op)]} is"
    return names.get(type(node), f"{type(node).__name__} is")


# Those of Python that the language has not.
_OPERATORS: dict[type[ast.AST], str] = {
    ast.BitAnd: "&", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>", ast.MatMult: "@", ast.Invert: "~",
}  # fmt: skip
