"""What a contract allows and no call of several has: alternatives, dtypes, branches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llm_op_guard.contract.model import Clause, Contract, Declare, TensorType
from llm_op_guard.contract.path import Path
from llm_op_guard.faults.ingredients import dtypes_of
from llm_op_guard.faults.judge import Judgement
from llm_op_guard.guard.bind import committed
from llm_op_guard.guard.call import TensorSpec
from llm_op_guard.guard.reading import INAPPLICABLE


def untried(contract: Contract, valid: Iterable[Judgement]) -> list[str]:
    """What stands in the contract for valid calls and is in none of these, each with its line."""
    wanted = dict.fromkeys(_allowed(contract))
    for judgement in valid:
        for name in _in_call(judgement):
            wanted.pop(name, None)
    return list(wanted)


def untried_dtypes(contract: Contract, valid: Iterable[Judgement]) -> list[tuple[Clause, Path, str]]:
    """The dtypes that a declared tensor has in none of these calls: its statement, where it stands, the dtype."""
    wanted = {
        (number, dtype): (clause, clause.statement.path, dtype)
        for number, clause in enumerate(contract.clauses)
        if isinstance(clause.statement, Declare) and not clause.after_call
        for alternative in clause.statement.type.alternatives
        if isinstance(alternative, TensorType) and alternative.dtype_symbol is None
        for dtype in dtypes_of(alternative, {})
    }
    for judgement in valid:
        for number, (clause, path, _) in {number: found for (number, _), found in wanted.items()}.items():
            spec = judgement.call.get(path)
            if isinstance(spec, TensorSpec) and judgement.bindings.applies(clause):
                wanted.pop((number, spec.dtype), None)
    return list(wanted.values())


def _allowed(contract: Contract) -> Iterator[str]:
    for clause in contract.clauses:
        if clause.after_call:
            continue
        for condition in clause.conditions:
            line = contract.source.line(condition.place)
            yield f"line {line}: a call for which {condition.test.text} is {str(condition.wanted).lower()}"
        if isinstance(clause.statement, Declare):
            declared, line = clause.statement, contract.source.line(clause.statement.place)
            for alternative in declared.type.alternatives:
                if len(declared.type.alternatives) > 1:
                    yield f"line {line}: {declared.path} as {alternative.text}"
                if isinstance(alternative, TensorType) and alternative.dtype_symbol is None:
                    for dtype in dtypes_of(alternative, {}):
                        yield f"line {line}: {declared.path} as {alternative.text} of {dtype}"


def _in_call(judgement: Judgement) -> Iterator[str]:
    contract, bindings = judgement.contract, judgement.bindings
    for clause in contract.clauses:
        if clause.after_call:
            continue
        for condition in clause.conditions:
            outcome = bindings.outcome(condition.test)
            line = contract.source.line(condition.place)
            if outcome is condition.wanted:
                yield f"line {line}: a call for which {condition.test.text} is {str(condition.wanted).lower()}"
            else:
                break
        else:
            if isinstance(clause.statement, Declare):
                yield from _declared(judgement, clause.statement)


def _declared(judgement: Judgement, declared: Declare) -> Iterator[str]:
    try:
        value = judgement.bindings.values.path(declared.path)
    except INAPPLICABLE:
        return
    alternative = committed(declared.type, value)
    if alternative is not None:
        line = judgement.contract.source.line(declared.place)
        yield f"line {line}: {declared.path} as {alternative.text}"
        if isinstance(alternative, TensorType):
            yield f"line {line}: {declared.path} as {alternative.text} of {str(value.dtype).removeprefix('torch.')}"
