"""What calls of a contract are made of: the paths that it reads, of what kind each is, and the numbers it speaks of."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, Literal

from llm_op_guard.contract.expressions import names_in
from llm_op_guard.contract.model import (
    Assign,
    Clause,
    Contract,
    Declare,
    DtypeName,
    DtypeSet,
    Like,
    TensorType,
    Type,
)
from llm_op_guard.contract.path import Path, path_of
from llm_op_guard.contract.vocabulary import DTYPE_NAMES
from llm_op_guard.contract.walk import declared_paths, tensor_types
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.evaluate import dtype_values
from llm_op_guard.guard.reads import asked_of_objects, expressions_of, reads_of, reads_of_items, texts_spelt

Kind = Literal["tensor", "plain", "object", "answer"]

# Tried for every number of which nothing else is known.
SMALL_NUMBERS = (0, 1, 2, 3, 4, 8)
# Made on the CPU without loss of what a rule could be about.
DTYPES = tuple(name for name in DTYPE_NAMES if name not in ("float4_e2m1fn_x2", "complex32"))


@frozen
class Ingredient:
    """One thing to choose in a call: what stands at a path, or (`answer`) what a function says of the object there.

    `types` are the types that it is declared as, in any branch. An answer that is compared with an identity
    (`recall(cache, "filled_by") == identity(self)`) is one, mostly that of the object at `identity_of`.
    """

    path: Path
    kind: Kind
    types: tuple[Type, ...] = ()
    question: ast.Call | None = None
    identity_of: Path | None = None


@frozen
class Ingredients:
    """All there is to choose in calls of a contract; `numbers` and `texts` are those that its text spells.

    `named` are the paths of dicts whose keys are looked at. With `usual` calls are sketched as most calls are, in
    dtypes that operators are mostly called with.
    """

    contract: Contract
    choices: tuple[Ingredient, ...]
    numbers: tuple[int | float, ...]
    texts: tuple[str, ...]
    named: frozenset[Path]
    dtypes: tuple[str, ...]
    usual: bool = False

    def mentioned(self, clause: Clause) -> list[Ingredient]:
        """What a rule depends on, its conditions aside."""
        statement = clause.statement
        if isinstance(statement, Declare):
            wanted = {path for path, _ in declared_paths(statement.path, statement.type)}
            return [choice for choice in self.choices if choice.path in wanted]
        return self.read_by(expressions_of(clause)[len(clause.conditions) :])

    def read_by(self, expressions: list[ast.expr]) -> list[Ingredient]:
        """What expressions depend on."""
        wanted = {
            read.path
            for node in self._with_assigned(expressions)
            for read in (*reads_of(node, self.contract), *reads_of_items(node))
        }
        symbols = {name.id for node in expressions for name in ast.walk(node) if isinstance(name, ast.Name)}
        for clause in self.contract.clauses:
            # A symbol is what the tensors say that show it.
            if isinstance(clause.statement, Declare) and symbols & set(names_shown(clause.statement.type)):
                wanted.add(clause.statement.path)
        return [choice for choice in self.choices if choice.path in wanted]

    def _with_assigned(self, nodes: list[ast.expr]) -> Iterator[ast.expr]:
        """The expressions, and those of the assigned names in them."""
        seen: set[str] = set()
        pending = list(nodes)
        while pending:
            node = pending.pop()
            yield node
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and name.id in self.contract.assigned and name.id not in seen:
                    seen.add(name.id)
                    pending += [
                        clause.statement.expr.node
                        for clause in self.contract.clauses
                        if isinstance(clause.statement, Assign) and name.id in clause.statement.names
                    ]


def ingredients(contract: Contract) -> Ingredients:
    """Read them off a contract."""
    declared: dict[Path, list[Type]] = {}
    aspects: dict[Path, set[str]] = {}
    for clause in contract.clauses:
        if clause.after_call:
            continue
        if isinstance(clause.statement, Declare):
            for path, kind in declared_paths(clause.statement.path, clause.statement.type):
                declared.setdefault(path, []).append(kind)
        for node in expressions_of(clause):
            for read in (*reads_of(node, contract), *reads_of_items(node)):
                aspects.setdefault(read.path, set()).add(read.aspect)
    named = frozenset(_named(contract))
    # A dict answers for itself which of its names are misspelt.
    asked = [
        (path, node)
        for path, node in asked_of_objects(contract)
        if path.root in contract.parameters and path not in named
    ]
    owners = {path for path, _ in asked} | named
    paths = [
        path
        for path in dict.fromkeys([*map(Path, contract.parameters), *declared, *aspects])
        if path.root in contract.parameters and ("_",) not in path.steps
    ]
    choices = [
        Ingredient(path, _kind(path, paths, declared, aspects, owners), tuple(declared.get(path, ()))) for path in paths
    ]
    questions: dict[str, Ingredient] = {}
    identities = dict(_compared_with_identities(contract))
    for path, node in asked:
        if isinstance(node.func, ast.Name) and node.func.id != "identity":
            text = ast.unparse(node)
            asks = Ingredient(path, "answer", question=node, identity_of=identities.get(text))
            questions.setdefault(text, asks)
    constants = [
        node.value
        for clause in contract.clauses
        for expression in expressions_of(clause)
        for node in ast.walk(expression)
        if isinstance(node, ast.Constant)
    ] + list(_plain(contract.constants))
    numbers = dict.fromkeys(value for value in constants if type(value) in (int, float))
    texts = dict.fromkeys(texts_spelt(contract))
    dtypes = dict.fromkeys(
        node.id
        for clause in contract.clauses
        for expression in expressions_of(clause)
        for node in ast.walk(expression)
        if isinstance(node, ast.Name) and node.id in DTYPE_NAMES
    )
    return Ingredients(contract, (*choices, *questions.values()), tuple(numbers), tuple(texts), named, tuple(dtypes))


def _compared_with_identities(contract: Contract) -> Iterator[tuple[str, Path]]:
    """What is compared with `identity(...)`, as text, and the object whose identity it is."""
    for clause in contract.clauses:
        for expression in expressions_of(clause):
            for node in ast.walk(expression):
                match node:
                    case (
                        ast.Compare(left=other, comparators=[ast.Call(func=ast.Name(id="identity"), args=[owner])])
                        | ast.Compare(left=ast.Call(func=ast.Name(id="identity"), args=[owner]), comparators=[other])
                    ):
                        path = path_of(owner)
                        if path is not None:
                            yield ast.unparse(other), path


def _named(contract: Contract) -> Iterator[Path]:
    """What `misspelt` looks the names of."""
    for clause in contract.clauses:
        for expression in expressions_of(clause):
            for node in ast.walk(expression):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "misspelt":
                    path = path_of(node.args[0])
                    if path is not None:
                        yield path


def _kind(
    path: Path,
    paths: list[Path],
    declared: dict[Path, list[Type]],
    aspects: dict[Path, set[str]],
    owners: set[Path],
) -> Kind:
    tensors = [
        alternative
        for kind in declared.get(path, ())
        for alternative in kind.alternatives
        if isinstance(alternative, TensorType | Like)
    ]
    if tensors or aspects.get(path, set()) & {"shape", "dtype", "device", "value"}:
        return "tensor"
    within = any(
        other.root == path.root and other.steps[: len(path.steps)] == path.steps for other in paths if other != path
    )
    return "object" if within or path in owners else "plain"


def _plain(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for part in (*value.keys(), *value.values()):
            yield from _plain(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _plain(part)
    else:
        yield value


def names_shown(declared: Type) -> Iterator[str]:
    """The symbols in the dimensions of a type."""
    for tensor in tensor_types(declared):
        for expr in tensor.sizes:
            yield from names_in(expr.node)


def dtypes_of(declared: TensorType, symbols: dict[str, Any]) -> list[str]:
    """The names of the dtypes that a tensor type accepts, as far as that can be told without the call."""
    found: list[str] = []
    for dtype in declared.dtypes:
        if isinstance(dtype, DtypeName | DtypeSet):
            if dtype.name == "any":
                return list(DTYPES)
            found += sorted(str(value).removeprefix("torch.") for value in dtype_values(dtype))
        elif dtype_symbol := getattr(dtype, "name", None):
            found += [str(symbols[dtype_symbol])] if dtype_symbol in symbols else list(DTYPES)
    return [name for name in found if name in DTYPES] or list(DTYPES)
