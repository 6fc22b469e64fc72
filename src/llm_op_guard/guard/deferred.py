"""What a value rule needs to be judged later, when a compiled program runs: tensors, and what else it reads.

While a program is traced tensors have no values, but all else that a rule reads is known. So the rule is split: what
stands around its value functions is worked out then, and the tensors are handed to the program itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

from llm_op_guard.contract.expressions import LOOPS, SEQUENCES, is_read
from llm_op_guard.contract.model import Clause, Require
from llm_op_guard.contract.path import Path, path_of
from llm_op_guard.contract.vocabulary import BUILT_IN, FUNCTIONS, RAW_KINDS
from llm_op_guard.frozen import frozen


@frozen
class Asked:
    """A question that an integration answers about one object: the name of its function, and where the object is."""

    function: str
    owner: Path


@frozen
class Deferred:
    """A rule with the parts that it needs: tensors to read, and facts that are known without reading any."""

    clause: Clause
    tensors: tuple[ast.expr, ...]
    facts: tuple[ast.expr, ...]

    @property
    def rule(self) -> Require:
        """The statement that the clause is about."""
        assert isinstance(self.clause.statement, Require)
        return self.clause.statement

    @cached_property
    def asked(self) -> dict[int, Asked]:
        """The facts, by number, that an integration answers: what it reads of foreign code is not traced."""
        return {at: found for at, node in enumerate(self.facts) if (found := _asked(node)) is not None}

    @property
    def is_traceable(self) -> bool:
        """Whether all other facts may be worked out by Dynamo."""
        return all(at in self.asked or is_traceable(node) for at, node in enumerate(self.facts))


def deferred(clause: Clause) -> Deferred | None:
    """The parts of a value rule; None where they cannot be told apart: in a loop."""
    rule = clause.statement
    if not isinstance(rule, Require):
        return None
    found = list(_parts(rule.expr.node))
    tensors = [node for is_tensor, node in found if is_tensor and node is not None]
    facts = [node for is_tensor, node in found if not is_tensor and node is not None]
    if any(node is None for _, node in found) or not tensors:
        return None
    return Deferred(clause, _each_once(tensors), _each_once(facts))


def _each_once(nodes: list[ast.expr]) -> tuple[ast.expr, ...]:
    return tuple({ast.unparse(node): node for node in nodes}.values())


# (whether it is a tensor, the part); None for what cannot be split off.
_Part = tuple[bool, ast.expr | None]


def _parts(node: ast.expr) -> Iterator[_Part]:
    if not asks_values(node):
        if not _is_literal(node):
            yield False, node
        return
    match node:
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords) if name in FUNCTIONS:
            kinds = FUNCTIONS[name].arguments
            given = [(kinds[min(i, len(kinds) - 1)][1], argument) for i, argument in enumerate(arguments)]
            given += [(dict(kinds)[str(keyword.arg)], keyword.value) for keyword in keywords]
            for kind, argument in given:
                if kind == "tensor":
                    yield from _of_tensor(argument)
                elif kind in RAW_KINDS:
                    yield False, None
                else:
                    yield from _parts(argument)
        case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare() | ast.IfExp() | ast.Tuple() | ast.List():
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    yield from _parts(child)
        case _:
            yield False, None


def _of_tensor(node: ast.expr) -> Iterator[_Part]:
    """A tensor argument: what is read, taken part of, or what another value function makes of one."""
    match node:
        case ast.Call():
            yield from _parts(node)
        case ast.Subscript(value=owner, slice=index) if path_of(node) is None:
            yield from _of_tensor(owner)
            for part in index.elts if isinstance(index, ast.Tuple) else [index]:
                bounds = (part.lower, part.upper, part.step) if isinstance(part, ast.Slice) else (part,)
                for bound in bounds:
                    if bound is not None:
                        yield from _parts(bound)
        case _:
            yield True, node if is_read(node) else None


def _asked(node: ast.expr) -> Asked | None:
    match node:
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if (
            name in FUNCTIONS and name not in BUILT_IN
        ):
            kinds, path = [kind for _, kind in FUNCTIONS[name].arguments], path_of(argument)
            return Asked(name, path) if kinds == ["owner"] and path is not None else None
    return None


def is_traceable(node: ast.expr) -> bool:
    """Whether what an expression asks of its arguments may be worked out by Dynamo, while it traces.

    Functions that an integration declares read the source of foreign code, and what is `eager` changes between calls.
    """
    asked = {
        part.func.id
        for part in ast.walk(node)
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id not in LOOPS
    }
    return all(name in BUILT_IN and not FUNCTIONS[name].eager for name in asked - {*SEQUENCES})


def asks_values(node: ast.expr) -> bool:
    """Whether an expression has a value function in it."""
    return any(map(_is_value_call, ast.walk(node)))


def _is_value_call(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in FUNCTIONS
        and FUNCTIONS[node.func.id].cost_class == "B"
    )


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True
