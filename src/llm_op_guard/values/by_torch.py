"""The questions of a call in operations of torch: for what Triton cannot read, and where there is none.

Nothing waits: the answers are made on the device and copied to the slot in the order of the stream. Needs memory for a
piece of a tensor at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_op_guard.guard.late import Probe, Range
from llm_op_guard.values import plain, ring
from llm_op_guard.values.pieces import pieces

# A device is kept busy by larger pieces than a processor's cache holds.
_MOST_ELEMENTS = 1 << 22


def send(memory: Any, slot: int, number: int, probes: Sequence[Probe]) -> None:
    """Have the probes answered in a slot, by number: two questions stand for each row."""
    import torch  # noqa: PLC0415 - only who has tensors

    device = probes[0].tensor.device
    with torch.no_grad():
        answers = torch.stack([_answer(probe) for probe in probes])
        if number == ring.AT_EACH_REPLAY:
            _keep(memory, slot, answers)
            return
        numbers = torch.full((1,), number, dtype=torch.int64, device=device)
        _write(memory[slot], ring.ANSWERS_AT, answers.reshape(-1))
        # A copy of its own, behind the answers in the stream: whoever sees the number sees them.
        _write(memory[slot], ring.NUMBER_AT, numbers)


def _keep(memory: Any, slot: int, answers: Any) -> None:
    """What is done at each replay: count it, and keep its answers where it is the first that breaks a rule."""
    import torch  # noqa: PLC0415

    before = memory[slot].to(answers.device, non_blocking=True)
    kept, _, read, replays, broken, kept_at = before[: ring.ROWS_AT].unbind()
    breaks = (answers[:, 0] > 0).any()
    keeps = breaks & (kept == read)
    former = before[ring.ANSWERS_AT : ring.ANSWERS_AT + answers.numel()]
    _write(memory[slot], ring.ANSWERS_AT, torch.where(keeps, answers.reshape(-1), former))
    counts = torch.stack((replays + 1, broken + breaks, torch.where(keeps, replays + 1, kept_at)))
    _write(memory[slot], ring.REPLAYS_AT, counts)
    _write(memory[slot], ring.NUMBER_AT, (kept + keeps).reshape(1))
    # That there is something to be read, perhaps: other streams write this as well, and none may take it back.
    _write(memory[0], ring.NUMBER_AT, torch.ones_like(kept).reshape(1))


def _write(words: Any, at: int, wanted: Any) -> None:
    """Copy to memory of the host, in the order of the stream."""
    words[at : at + len(wanted)].copy_(wanted, non_blocking=True)


def _answer(probe: Probe) -> Any:
    """How many elements are wrong, the place of the first in row order, and its bits: three words on the device."""
    import torch  # noqa: PLC0415

    x = probe.tensor.detach()
    zero = torch.zeros((), dtype=torch.int64, device=x.device)
    count, first, bits, before = zero, zero, zero, 0
    for piece in pieces(x, most=_MOST_ELEMENTS):
        part = piece.part
        if part.numel() == 0:
            continue
        wrong = _wrong(part, probe.range).reshape(-1)
        here = wrong.sum()
        place = wrong.view(torch.uint8).argmax()
        is_first = (count == 0) & (here > 0)
        element = _bits(part.resolve_neg().reshape(-1)).index_select(0, place.reshape(1)).reshape(())
        first = torch.where(is_first, before + place, first)
        bits = torch.where(is_first, element.to(torch.int64), bits)
        count = count + here
        before += part.numel()
    return torch.stack((count, first, bits))


def _wrong(x: Any, asked: Range | None) -> Any:
    """Where an element is not as asked: not by `plain`, which reads nothing while a graph is captured."""
    import torch  # noqa: PLC0415

    y, offset, whole = plain.comparable(x)
    if asked is None:
        return torch.zeros_like(y, dtype=torch.bool) if whole else ~y.isfinite()
    low, high, sentinels = ring.closed(asked, whole=whole)
    if not whole:
        wrong = ~((y >= low) & (y <= high))
    elif low - offset > ring.MOST or high - offset < ring.LEAST:
        wrong = torch.ones_like(y, dtype=torch.bool)
    else:
        wrong = ~((y >= max(low - offset, ring.LEAST)) & (y <= min(high - offset, ring.MOST)))
    for sentinel in sentinels:
        if not whole or ring.LEAST <= sentinel - offset <= ring.MOST:
            wrong &= y != sentinel - offset
    return wrong


def _bits(x: Any) -> Any:
    import torch  # noqa: PLC0415

    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])
