"""Statements that say nothing of any call: refused when the contract is loaded, since nobody would notice later."""

from __future__ import annotations

import ast

from llm_op_guard.contract.expressions import calls_in, names_in
from llm_op_guard.contract.kinds import ANYTHING, OWNER, SHOWN, SIZE, called, kinds_of
from llm_op_guard.contract.model import (
    Assign,
    Clause,
    Contract,
    Declare,
    DeviceOf,
    DtypeOf,
    Like,
    Remember,
    Require,
    RestOf,
    TensorType,
    Type,
)
from llm_op_guard.contract.operands import Operands
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.source import Place
from llm_op_guard.contract.walk import items_of


class Uses:
    """Checks the clauses of one contract."""

    def __init__(self, contract: Contract) -> None:
        self.operands = Operands(contract)

    def check(self, clause: Clause) -> None:
        """Raise ContractError for an expression that says nothing of a call, or uses a thing as what it is not."""
        statement = clause.statement
        if isinstance(statement, Assign) and set(statement.names) & set(names_in(statement.expr.node)):
            raise self.operands.error("a name is defined by itself", statement.place)
        # A library's version is no part of the call, and yet what a call may depend on.
        if (
            isinstance(statement, Require)
            and not names_in(statement.expr.node)
            and "version" not in calls_in(statement.expr.node)
        ):
            raise self.operands.error("the condition reads nothing of the call", statement.expr.node)
        for number, condition in enumerate(clause.conditions):
            self.operands.enter(clause.conditions[:number], clause.after_call)
            self.operands.truth(condition.test.node)
        self.operands.enter(clause.conditions, clause.after_call)
        self._statement(clause)

    # ------------------------------------------------------------ statements

    def _statement(self, clause: Clause) -> None:
        statement = clause.statement
        match statement:
            case Require(expr=expr):
                self.operands.truth(expr.node)
            case Remember(path=path, facts=facts):
                kinds = kinds_of(self.operands.declared.get(path, ANYTHING))
                if not kinds & OWNER.kinds:
                    problem = f"{OWNER.words.format('remember')}; {path} is {called(kinds)}"
                    raise self.operands.error(problem, statement.place)
                for _, expr in facts:
                    self.operands.operand(expr.node)
            case Assign(expr=expr, names=names):
                thing = self.operands.raw(expr.node)
                if len(names) > 1:
                    self.operands.parts(thing, len(names), expr.node)
            case Declare(type=declared):
                self._type(declared, statement.place)
        if isinstance(statement, Declare | Require):
            for text in (statement.reason.because, statement.reason.hint):
                if text is not None:
                    self._text(text.node)

    def _type(self, declared: Type, place: Place) -> None:
        for alternative in declared.alternatives:
            if isinstance(alternative, Like):
                self._read(alternative.path, "like takes a tensor; {} is {}", place)
            for item in items_of(alternative):
                self._type(item, place)
            if isinstance(alternative, TensorType):
                for part in (*alternative.dtypes, *(alternative.dims or ()), *(alternative.devices or ())):
                    match part:
                        case DtypeOf(path=path) | RestOf(path=path) | DeviceOf(path=path):
                            aspect = {DtypeOf: "dtype", RestOf: "shape", DeviceOf: "device"}[type(part)]
                            self._read(path, f"{{}} is {{}}, which has no {aspect}", place)
                for expr in alternative.sizes:
                    self.operands.taken(expr.node, self.operands.value(expr.node), SIZE)

    def _read(self, path: Path, problem: str, place: Place) -> None:
        kinds = kinds_of(self.operands.declared.get(path, ANYTHING))
        if "tensor" not in kinds:
            raise self.operands.error(problem.format(path, called(kinds)), place)

    def _text(self, node: ast.expr) -> None:
        match node:
            case ast.BinOp(left=left, right=right):
                self._text(left)
                self._text(right)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.operands.truth(test)
                self._text(body)
                self._text(orelse)
            case ast.JoinedStr(values=parts):
                for part in parts:
                    if isinstance(part, ast.FormattedValue):
                        self.operands.taken(part.value, self.operands.value(part.value), SHOWN)
            case _:
                self.operands.value(node)
