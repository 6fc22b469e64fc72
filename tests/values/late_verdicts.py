"""What a question about a tensor is answered, told element by element in Python; and tensors to ask about."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from llm_op_guard.guard.late import Probe, Range, Verdict

NAN, INF = math.nan, math.inf


def reference(x: torch.Tensor, asked: Range | None) -> Verdict:
    """The verdict of the definition: elements are compared as exact numbers of Python."""
    flat = x.reshape(-1)
    numbers = (flat.double() if x.dtype.is_floating_point else flat).tolist()
    wrong = [at for at, number in enumerate(numbers) if not _is_right(number, asked)]
    if not wrong:
        return Verdict(0)
    index = next(itertools.islice(itertools.product(*map(range, x.shape)), wrong[0], None))
    return Verdict(len(wrong), index, numbers[wrong[0]])


def _is_right(number: float, asked: Range | None) -> bool:
    if asked is None:
        return math.isfinite(number)
    above = number > asked.low if asked.low_open else number >= asked.low
    below = number < asked.high if asked.high_open else number <= asked.high
    return (above and below) or number in asked.allow


def same(found: Verdict, wanted: Verdict) -> bool:
    """Whether two verdicts say the same; NaN is NaN."""
    values = found.value == wanted.value or (found.value != found.value and wanted.value != wanted.value)
    return (found.count, found.index) == (wanted.count, wanted.index) and values


FLOATING = ("float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
WHOLE = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "bool")
DTYPES = (*FLOATING, *WHOLE)


def tensors(dtype: str) -> Iterator[torch.Tensor]:
    """Empty, 0-d, one element, several tiles of 64 with strange elements first, in the middle and last, not aligned."""
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        limits = torch.finfo(kind)
        smallest = torch.ones(1, dtype=_bits(kind)).view(kind).double().item()  # subnormal
        strange = [NAN, INF, -INF, limits.max, limits.min, smallest, -smallest, -0.0]
    elif kind is torch.bool:
        strange = [True]
    else:
        ends = torch.iinfo(kind)
        strange = [ends.max, ends.min, ends.max - 1, max(ends.min, -1)]
    calm = (torch.arange(331) % 2).to(kind)
    yield calm[:0]
    yield calm.reshape(1, 331)[:, :0]
    yield calm[0]
    yield calm
    for number in strange:
        one = torch.tensor(number, dtype=torch.float64 if kind.is_floating_point else torch.int64).to(kind)
        yield one
        for place in (0, 130, 330):
            x = calm.clone()
            x[place] = one
            yield x
        x = calm.clone()
        x[130] = one
        yield x[1:331].reshape(5, 66)


def _bits(kind: Any) -> Any:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.itemsize]


RANGES = (
    None,
    Range(0, 2, high_open=True),
    Range(0, 1, low_open=True),
    Range(-1e30, 1e30),
    Range(-INF, 0.1),
    Range(-INF, INF, high_open=True),
    Range(2**-149, INF),
    Range(0, 2**63 - 1),
    Range(-(2**80), 2**63 - 1, high_open=True),
    Range(0, 2, high_open=True, allow=(-1,)),
    Range(0.5, 0.75, allow=(0, 1)),
    Range(2**53 + 1, 2**70, allow=(1, 0.0)),
)


def questions(x: torch.Tensor) -> list[Probe]:
    """One of each range."""
    return [Probe(x, asked) for asked in RANGES]
