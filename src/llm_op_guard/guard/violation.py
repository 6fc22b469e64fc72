"""A broken rule with everything needed to understand it. Plain data: picklable, JSON-ready, no tensor contents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, field, replace
from typing import Any, Literal, Self

from llm_op_guard.contract.model import CostClass
from llm_op_guard.errors import GUARD_ERRORS, GuardError
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.call import Call
from llm_op_guard.guard.call_json import to_json


@frozen
class TensorMetadata:
    """What a tensor argument looked like: never its contents."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}] {self.device}"


@frozen
class Binding:
    """The value of a symbol and where it was seen: `D = 16`, from `q.shape[3]` and `k.shape[3]`."""

    symbol: str
    value: str
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.symbol} = {self.value}"


@frozen
class CallSite:
    """The first frame outside this library and the framework's wrappers.

    `module_class` and `layer_idx` are those of the caller's `self`, where it has them.
    """

    file: str
    line: int
    function: str
    module_class: str | None = None
    layer_idx: int | None = None

    def __str__(self) -> str:
        layer = "" if self.layer_idx is None else f", layer {self.layer_idx}"
        owner = f" ({self.module_class}{layer})" if self.module_class else ""
        return f"{self.file}:{self.line} in {self.function}{owner}"


@frozen
class LastSeen:
    """Where a tensor was before it broke a rule: the last guarded call of its thread that had it.

    `when` says whether it went in, as `argument`, or came out; `valid` that it was judged there and broke no rule, else
    it was only seen. `module_class` and `layer_idx` are those of the module whose call it was, where known. `calls_ago`
    is how many guarded calls have begun since, the one that breaks the rule among them. `is_view` says that it is a
    view of what was seen, and not the same tensor. `changes` is how many changes in place torch has counted since;
    None where it counts none (inference mode), and writes that go past torch are in no count.
    """

    operator: str
    site: str
    when: Literal["entering", "leaving"]
    valid: bool
    argument: str | None
    module_class: str | None
    layer_idx: int | None
    calls_ago: int
    is_view: bool
    changes: int | None

    @classmethod
    def of(cls, data: Any) -> Self | None:
        """What `Violation.to_dict` wrote, read again; None for anything else, which may stand in a file too."""
        match data:
            case {
                "operator": str(),
                "site": str(),
                "when": "entering" | "leaving",
                "valid": bool(),
                "argument": str() | None,
                "module_class": str() | None,
                "layer_idx": int() | None,
                "calls_ago": int(),
                "is_view": bool(),
                "changes": int() | None,
            }:
                return cls(**{name: data[name] for name in cls.__dataclass_fields__})
        return None

    def __str__(self) -> str:
        text = f"last {'valid' if self.valid else 'seen'} {self.when} {self.operator}"
        if self.is_view:
            text = f"a view of what was {text}"
        if self.argument is not None:
            text += f" as {self.argument}"
        if self.module_class is not None and not self.operator.startswith(f"{self.module_class}."):
            text += f" of {self.module_class}"
        if self.layer_idx is not None:
            text += f", layer {self.layer_idx}"
        if self.calls_ago:
            text += f", {self.calls_ago} guarded call{'s' if self.calls_ago > 1 else ''} ago"
        return f"{text}, and changed in place since" if self.changes else text


@frozen
class Replayed:
    """That a call was captured in a CUDA graph: `at` is the replay that broke the rule, the first one since a replay
    was last told of, and `broken` how many broke a rule of that call since, of all `replays` so far.

    `protects` says that the operator would not have run elsewhere: a graph waits for no verdict.
    """

    at: int
    broken: int
    replays: int
    protects: bool

    def __str__(self) -> str:
        text = f"captured in a CUDA graph, broken at replay {self.at}"
        if self.broken > 1:
            text += f" and in {self.broken} replays since then"
        text += f", of {self.replays} so far"
        return text + ("; a graph does not wait, so that the operator ran" if self.protects else "")


@frozen
class ToldLate:
    """That a verdict was not waited for: which call of its guard it is about, and how many guarded calls began since.

    Calls are those of guards with rules that may be told late, from the start of the process. `replayed` is of calls
    that were captured.
    """

    call: int
    calls_later: int
    replayed: Replayed | None = None

    def __str__(self) -> str:
        if self.replayed is not None:
            return f"call {self.call} of this operator; {self.replayed}"
        later = f"{self.calls_later} guarded call{'s' if self.calls_later != 1 else ''} later"
        return f"call {self.call} of this operator; told {later}"


@frozen
class Violation:
    """One broken rule.

    `argument` is what to look at first, `observed` and `expected` say what is wrong with it, `bindings` where the
    symbols of the rule got their values, `because` why the rule holds, `hint` the likely cause. `site` is where the
    guard is installed, `call_site` who called it, `blames` whose rule it was to keep: the caller's, or (a promise of
    the contract) the operator's. `waived` is the reason of the waiver that let it pass, if one did. `last_seen` is
    where the tensor was before, if `track` is on and it is known. `told_late` says which call it is about, where the
    verdict was not waited for. `call` are the arguments as data, without what tensors hold: what a capsule is made of.
    """

    operator: str
    rule_id: str
    cost_class: CostClass
    certain: bool
    argument: str | None
    observed: str
    expected: str
    bindings: tuple[Binding, ...] = ()
    because: str | None = None
    hint: str | None = None
    tensors: tuple[TensorMetadata, ...] = ()
    call_site: CallSite | None = None
    site: str = ""
    contract_id: str = ""
    contract_hash: str = ""
    error: str | None = None
    blames: Literal["caller", "operator"] = "caller"
    waived: str | None = None
    last_seen: LastSeen | None = None
    told_late: ToldLate | None = None
    call: Call | None = field(default=None, compare=False, repr=False)

    @property
    def summary(self) -> str:
        """One line: what is wrong, without the why."""
        return f"{self.operator}: {self.observed}, expected {self.expected}"

    def to_dict(self) -> dict[str, Any]:
        """The violation as JSON-ready data."""
        data = asdict(replace(self, call=None))
        data["call"] = None if self.call is None else to_json(self.call)
        data["bindings"] = [{"symbol": b.symbol, "value": b.value, "sources": list(b.sources)} for b in self.bindings]
        data["tensors"] = [{**asdict(t), "shape": list(t.shape)} for t in self.tensors]
        return data


def error_class(violations: Iterable[Violation]) -> type[GuardError]:
    """What is raised of these: the error that the first of them names that names one, or a GuardError."""
    named = next((violation.error for violation in violations if violation.error is not None), None)
    return GUARD_ERRORS[named or "ValueError"]
