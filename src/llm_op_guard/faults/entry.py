"""What was known before a call that has returned: read off arguments, and made again from data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llm_op_guard.contract.model import Contract, Declare
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.walk import paths_in_type
from llm_op_guard.faults.build import build
from llm_op_guard.guard.bind import Bindings
from llm_op_guard.guard.call import Call, TensorSpec, TorchSpec
from llm_op_guard.guard.capture import Known
from llm_op_guard.guard.reading import Snapshot, kept, snapshot


def known_before(contract: Contract, arguments: Mapping[str, Any]) -> Known:
    """What a check before the call learns of these arguments."""
    bindings = Bindings(
        contract, [clause for clause in contract.clauses if not clause.after_call], arguments, {}, False
    )
    bindings.collect()
    assigned = {name: kept(value) for name, value in bindings.values.assigned.items()}
    models = {path: snapshot(arguments.get(path.root), *path.steps) for path in _models(contract)}
    return Known({**bindings.values.symbols, **assigned}, models)


def known_again(contract: Contract, call: Call) -> Known | None:
    """What the entry of a call says, as values; None for a call that has not returned.

    Raises as `build` does.
    """
    if call.entry is None:
        return None
    tensors = dict(call.entry.tensors)
    # None there, not left out: what was no tensor before the call is not looked at after it.
    models = {path: _snapshot(tensors.get(str(path))) for path in _models(contract)}
    names = build(Call(call.entry.names, call.seed))
    return Known({name: value for name, value in names.items() if value is not None}, models)


def before_return(call: Call) -> Call:
    """The call without its result and what was known before it."""
    return call if call.entry is None else replace(call.without(Path("result")), entry=None)


def _models(contract: Contract) -> list[Path]:
    """What the types of results refer to."""
    return [
        path
        for clause in contract.clauses
        if clause.after_call and isinstance(clause.statement, Declare)
        for path in paths_in_type(clause.statement.type)
        if path.root != "result"
    ]


def _snapshot(spec: TensorSpec | None) -> Snapshot | None:
    if spec is None:
        return None
    made = build(Call((("model", replace(spec, device="meta")), ("device", TorchSpec("device", spec.device)))))
    return Snapshot(made["model"].dtype, made["model"].shape, made["device"])
