"""What a capsule does not hold, made up: numbers, texts and the items of lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.validate import clauses_of
from llm_op_guard.guard.call import (
    Call,
    ManySpec,
    MappingSpec,
    Number,
    NumberSpec,
    ObjectSpec,
    SequenceSpec,
    Spec,
    TensorSpec,
    TextSpec,
)
from llm_op_guard.guard.reads import expressions_of, reads_of

_KINDS: dict[str, type[Number]] = {"bool": bool, "int": int, "float": float}


def made_up(call: Call, number: Number) -> Call:
    """The call with a number for each that it does not hold, and texts of the same lengths."""
    arguments = tuple((name, _made_up(spec, number)) for name, spec in call.arguments)
    if call.entry is None:
        return replace(call, arguments=arguments)
    names = tuple((name, _made_up(spec, number)) for name, spec in call.entry.names)
    return replace(call, arguments=arguments, entry=replace(call.entry, names=names))


def _made_up(spec: Spec, number: Number) -> Spec:
    match spec:
        case NumberSpec(kind=kind):
            return _KINDS[kind](number)
        case TextSpec():
            return spec.made_up
        case SequenceSpec(items=items):
            return replace(spec, items=tuple(_made_up(item, number) for item in items))
        case ManySpec(kind=kind, each=each, length=length, at=at):
            many = [_made_up(each, number)] * length
            for place, item in at:
                many[place] = _made_up(item, number)
            return SequenceSpec(kind, tuple(many))
        case MappingSpec(items=pairs):
            return MappingSpec(tuple((name, _made_up(part, number)) for name, part in pairs))
        case ObjectSpec(attributes=attributes, answers=answers):
            return replace(
                spec,
                attributes=tuple((name, _made_up(part, number)) for name, part in attributes),
                answers=tuple((name, _made_up(part, number)) for name, part in answers),
            )
    return spec


def is_incomplete(call: Call) -> bool:
    """Whether there are numbers to be made up."""
    return made_up(call, 0) != made_up(call, 1)


def not_held(call: Call, contract: Contract, rule: str) -> list[str]:
    """What a rule reads of which the call, as it stands in a capsule, does not hold the contents."""
    paths = dict.fromkeys(
        read.path
        for clause in clauses_of(contract, rule)
        for node in expressions_of(clause)
        for read in reads_of(node, contract)
    )
    about_values = any(clause.cost_class != "A" for clause in clauses_of(contract, rule))
    return list(dict.fromkeys(text for path in paths for text in _lacking(call.get(path), path, about_values)))


def _lacking(spec: Spec, path: Path, about_values: bool) -> Iterator[str]:
    match spec:
        case TextSpec():
            yield f"the text {path}"
        case NumberSpec():
            yield f"the number {path}"
        case TensorSpec(elements=elements, at=at) if about_values and len(at) < elements:
            yield f"the elements of {path}" if not at else f"the other elements of {path}"
        case ManySpec() | SequenceSpec():
            parts = (spec.each,) if isinstance(spec, ManySpec) else spec.items
            if any(True for part in parts for _ in _lacking(part, path, about_values)):
                yield f"the items of {path}"
        case MappingSpec():
            yield f"the keys of {path}"
