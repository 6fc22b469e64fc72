"""How the cost of a class A guard grows: with the arguments, with the rules, and with the size of the tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from llm_op_guard import api
from llm_op_guard.benching import by_hand
from llm_op_guard.benching.by_hand import floating_dtypes
from llm_op_guard.benching.calls import BY_HAND, NATIVE, PYTHON, InPython, guarded, why_not_native
from llm_op_guard.benching.clock import calling, calls_for, interleaved
from llm_op_guard.benching.estimate import Estimate, estimates, medians
from llm_op_guard.benching.operators import Absent, rope
from llm_op_guard.contract.model import Contract
from llm_op_guard.guard.compile import compile_function

COUNTS = (2, 4, 8, 16, 32)
KILOBYTE, GIGABYTE = 2**10, 2**30
SIZES = tuple(KILOBYTE * 16**power for power in range(6))  # 1 KB to 1 GB
_NAME, _BARE = "operator", "bare"
# What the tensors of all are, but for those of `SIZES`.
_SHAPE = (2, 8, 16)


@dataclass
class Curve:
    """What each variant adds to a call, in nanoseconds, at each number of `of`; None where it cannot be had there.

    `last_to_first` is the ratio of the ends. `notes` say what could not be had, and why.
    """

    of: str
    at: list[int]
    added: dict[str, list[Estimate | None]] = field(default_factory=dict)
    last_to_first: dict[str, Estimate] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def by_arguments(*, rounds: int, block: float) -> Curve:
    """Each argument a tensor of one shape, floating, on one device."""
    return _curve("arguments", COUNTS, lambda count: _Program(count, 0), rounds, block)


def by_rules(*, rounds: int, block: float) -> Curve:
    """Two such tensors, and so many comparisons of their sizes."""
    return _curve("rules", COUNTS, lambda count: _Program(2, count), rounds, block)


class _Program:
    """A function of so many tensors, its contract with so many rules besides, and the same checks by hand."""

    def __init__(self, tensors: int, rules: int) -> None:
        torch = importlib.import_module("torch")
        names = [f"x{number}" for number in range(tensors)]
        head = f"def {_NAME}({', '.join(names)}):"
        sizes = [(number, number + 1) for number in range(1, rules + 1)]
        contract = [head, *(f"    {name}: floating[B, L, D] @ dev" for name in names)]
        contract += [f"    require(L * {less} <= D * {more})" for less, more in sizes]
        self.contract = api.read("\n".join(contract) + "\n", "growth.contract")[_NAME]
        self.bare = _function([head, "    return x0"], {})
        checks = [
            head,
            "    shape, device = x0.shape, x0.device",
            "    if len(shape) != 3 or x0.dtype not in floating:",
            "        raise ValueError('x0')",
        ]
        for name in names[1:]:
            checks += [
                f"    if {name}.shape != shape or {name}.dtype not in floating or {name}.device != device:",
                f"        raise ValueError('{name}')",
            ]
        checks += ["    _, L, D = shape"] if sizes else []
        for less, more in sizes:
            checks += [f"    if L * {less} > D * {more}:", "        raise ValueError('sizes')"]
        self.by_hand = _function([*checks, "    return x0"], {"floating": floating_dtypes(torch)})
        self.arguments = tuple(torch.randn(_SHAPE) for _ in names)

    def variants(self) -> dict[str, Callable[..., Any]]:
        """Those of which `Curve` tells, and what they add to."""
        return _variants(self.bare, self.contract, self.by_hand)


def _variants(
    bare: Callable[..., Any], contract: Contract, checked: Callable[..., Any]
) -> dict[str, Callable[..., Any]]:
    native = {} if why_not_native(contract) else {NATIVE: guarded(bare, contract).function}
    return {_BARE: bare, **native, PYTHON: guarded(bare, contract, InPython).function, BY_HAND: checked}


def _function(lines: Sequence[str], names: dict[str, Any]) -> FunctionType:
    return compile_function("\n".join(lines) + "\n", _NAME, "benchmark", dict(names))


def _curve(of: str, counts: Sequence[int], make: Callable[[int], _Program], rounds: int, block: float) -> Curve:
    programs = {count: make(count) for count in counts}
    points = [(count, program.variants(), program.arguments) for count, program in programs.items()]
    reasons = {count: why_not_native(program.contract) for count, program in programs.items()}
    notes = [f"not checked natively with {count} {of}: {reason}" for count, reason in reasons.items() if reason]
    return _measured(Curve(of, list(counts), notes=notes), points, rounds, block)


def by_size(*, rounds: int, block: float, sizes: Sequence[int] = SIZES) -> Curve:
    """The rotary embedding; queries, keys and both tables are views of memory of so many bytes that nobody touches."""
    torch = importlib.import_module("torch")
    curve, operator = Curve("bytes", list(sizes)), rope()
    if isinstance(operator, Absent):
        curve.notes.append(operator.reason)
        return curve
    if reason := why_not_native(operator.contract):
        curve.notes.append(f"not checked natively: {reason}")
    try:
        memory = torch.empty(max(sizes) // 4)
    except RuntimeError as error:
        curve.notes.append(f"the machine does not give that much memory: {str(error).splitlines()[0]}")
        return curve
    variants = _variants(operator.bare, operator.contract, by_hand.checks(torch)[operator.name])
    points: list[_Point] = []
    for size in sizes:
        heads = memory[: size // 4].view(1, 1, -1, 16)
        points.append((size, variants, (heads, heads, heads[0], heads[0])))
    return _measured(curve, points, rounds, block)


_Point = tuple[int, dict[str, Callable[..., Any]], tuple[Any, ...]]


def _measured(curve: Curve, points: Sequence[_Point], rounds: int, block: float) -> Curve:
    blocks = {}
    for at, variants, arguments in points:
        for name, function in variants.items():
            blocks[name, at] = calling(function, arguments, calls_for(function, arguments, block))
    times = interleaved({f"{name} {at}": block for (name, at), block in blocks.items()}, rounds)
    had = [(name, at) for name, at in blocks if name != _BARE]
    ends = [name for name in (NATIVE, PYTHON, BY_HAND) if {(name, curve.at[0]), (name, curve.at[-1])} <= set(had)]

    def figures(chosen: Sequence[int]) -> dict[str, float]:
        found = medians(times, chosen)
        added = {f"{name} {at}": found[f"{name} {at}"] - found[f"{_BARE} {at}"] for name, at in had}
        ratios = {name: added[f"{name} {curve.at[-1]}"] / added[f"{name} {curve.at[0]}"] for name in ends}
        return {**added, **ratios}

    estimated = estimates(rounds, figures)
    for name in dict.fromkeys(name for name, _ in had):
        curve.added[name] = [estimated.get(f"{name} {at}") for at in curve.at]
    curve.last_to_first = {name: estimated[name] for name in ends}
    return curve
