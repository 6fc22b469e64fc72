"""Where a device leaves its answers: a ring of slots in memory that the host reads without asking the device.

A slot is what one call asks and what it is answered, in 64-bit words: the number of the call, which is written last,
then for each tensor its rows of questions, and for each question its answer. Reading takes no call of CUDA, so it works
when the context is dead.

A launch that a CUDA graph holds runs again at each replay, and whoever reads may come after many of them. Its slot
counts them, and keeps the answers of the first replay that broke a rule until they have been read: the number, which
is written last, counts what was so kept, and the reader writes down which of it was read. The device alone writes the
one, the reader the other.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from llm_op_guard.guard.late import MOST_PROBES, Number, Probe, Range, Verdict
from llm_op_guard.guard.readable import unseen
from llm_op_guard.values.pieces import gathered
from llm_op_guard.values.plain import nearest_from

SLOTS = 256
# A row is a tensor with up to two questions.
ROWS = MOST_PROBES
QUESTIONS = 2
# Of a row: address, number of elements, what an element is, then low, high and two sentinels of each question.
ROW_WORDS = 3 + 4 * QUESTIONS
# Of a question: how many elements are wrong, which is the first, its bits.
ANSWER_WORDS = 3
# What comes first: the number of the call, or of what is kept of replays, and that which the device is to write there.
NUMBER_AT, WANTED_AT = 0, 1
# It is this one where a graph holds the launch. Then there are, too: which number was read last, how many replays there
# were, how many of them broke a rule, and which of them is kept.
AT_EACH_REPLAY = 0
READ_AT, REPLAYS_AT, BROKEN_AT, KEPT_AT = 2, 3, 4, 5
# Rows and answers begin at a multiple of 16 bytes.
ROWS_AT = 6
ANSWERS_AT = ROWS_AT + ROWS * ROW_WORDS
SLOT_WORDS = ANSWERS_AT + ROWS * QUESTIONS * ANSWER_WORDS
# Of the device's own memory: count and first element of each question, and how many programs are done.
SCRATCH_WORDS = ROWS * QUESTIONS * 2 + 2
DONE_AT = SCRATCH_WORDS - 2
NOWHERE = 2**63 - 1

# What an element is, by the name of its dtype: its number in a row, and its size.
KINDS = {
    "float32": (0, 4), "float64": (1, 8), "float16": (2, 2), "bfloat16": (3, 2), "float8_e5m2": (4, 1),
    "float8_e4m3fn": (5, 1), "int64": (6, 8), "int32": (7, 4), "int16": (8, 2), "int8": (9, 1), "uint8": (10, 1),
    "bool": (10, 1), "uint16": (11, 2), "uint32": (12, 4),
}  # fmt: skip


class Look(NamedTuple):
    """How to read an answer about a tensor that may be gone: which of its axes are where in memory.

    `axes` are those of `sizes`, from the slowest to the fastest; an axis that is not among them is expanded. Every
    element in memory occurs `times` times.
    """

    dtype: Any
    ndim: int
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    times: int = 1

    @property
    def in_memory(self) -> bool:
        """Whether the order in memory is another one than that of the tensor."""
        return self.axes != tuple(sorted(self.axes))

    def verdict(self, count: int, first: int, bits: int) -> Verdict:
        """The answer, as it is told."""
        if not count:
            return Verdict(0)
        index = [0] * self.ndim
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            first, index[axis] = divmod(first, size)
        return Verdict(count * self.times, tuple(index), number_of(bits, self.dtype), self.in_memory)


def look_of(x: Any) -> Look:
    """Of a tensor in row order."""
    return Look(x.dtype, x.ndim, tuple(range(x.ndim)), tuple(x.shape))


def dense(x: Any) -> Look | None:
    """Of a tensor whose elements, without those that are expanded, lie in memory without gaps; None for others."""
    if x.is_contiguous():
        return look_of(x)
    if not gathered(x).is_contiguous():
        return None
    axes = [axis for axis in range(x.ndim) if x.shape[axis] == 1 or x.stride(axis) != 0]
    axes.sort(key=lambda axis: -x.stride(axis))
    times = math.prod(size for axis, size in enumerate(x.shape) if axis not in axes)
    return Look(x.dtype, x.ndim, tuple(axes), tuple(x.shape[axis] for axis in axes), times)


@unseen
def number_of(bits: int, dtype: Any) -> Number:
    """The number that an element of a dtype is, by its bits."""
    import torch  # noqa: PLC0415 - only who has tensors
    from torch.utils._python_dispatch import _disable_current_modes  # noqa: PLC0415

    with _disable_current_modes():  # of the call that it is told in: fake tensors have no values
        word = torch.tensor([bits], dtype=torch.int64, device="cpu")
        number: Number = word.view(torch.uint8)[: dtype.itemsize].clone().view(dtype).item()
    return number


# ---------------------------------------------------------------- questions as words


@functools.lru_cache(maxsize=4096)
def question(asked: Range | None, dtype: Any) -> tuple[int, int, int, int] | None:
    """The words of a question about elements of a dtype: low and high, both allowed, and two sentinels.

    Of whole numbers as they are, else the bits of a float64. None where it cannot be put so.
    """
    import torch  # noqa: PLC0415 - only who has tensors

    if not dtype.is_floating_point:
        if asked is None:
            return LEAST, MOST, LEAST, LEAST
        low, high, sentinels = closed(asked, whole=True)
        low, high = max(low, LEAST), min(high, MOST)
        if dtype is torch.bool and low <= 1 <= high:
            high = MOST  # any other byte than 0 stands for true
        sentinels = tuple(s for s in sentinels if LEAST <= s <= MOST)
        if low > high or len(sentinels) > 2:
            return None
        first, second, *_ = (*sentinels, low, low)
        return int(low), int(high), int(first), int(second)
    if asked is None:
        most = torch.finfo(dtype).max
        return _bits(-most), _bits(most), _NAN, _NAN
    low, high, sentinels = closed(asked, whole=False)
    if dtype is not torch.float64:  # compared in float32, of which the bounds have to be, too
        low, high = _single_at_least(low), -_single_at_least(-high)
        sentinels = tuple(s for s in sentinels if _single_at_least(s) == s)
    if len(sentinels) > 2:
        return None
    first, second, *_ = (*map(_bits, sentinels), _NAN, _NAN)
    return _bits(low), _bits(high), first, second


LEAST, MOST = -(2**63), 2**63 - 1


def closed(asked: Range, *, whole: bool) -> tuple[Number, Number, tuple[Number, ...]]:
    """The smallest and the largest number in a range, and the sentinels: whole numbers, or those of float64."""
    if whole:
        low, high = _whole_at_least(asked.low, asked.low_open), -_whole_at_least(-asked.high, asked.high_open)
        return low, high, tuple(int(s) for s in asked.allow if math.isfinite(s) and s == int(s))
    nearest = nearest_from(asked.low, is_open=asked.low_open), -nearest_from(-asked.high, is_open=asked.high_open)
    return *nearest, tuple(map(float, asked.allow))


def _whole_at_least(bound: Number, is_open: bool) -> int:
    """The smallest whole number that is not below a bound, or above it; beyond 64 bits for an infinity."""
    if isinstance(bound, float) and math.isinf(bound):
        return 2 * LEAST if bound < 0 else 2 * MOST
    return math.floor(bound) + 1 if is_open else math.ceil(bound)


def _single_at_least(bound: float) -> float:
    """The smallest float32 that is not below a float64."""
    try:
        (nearest,) = struct.unpack("<f", struct.pack("<f", bound))
    except OverflowError:
        return math.inf if bound > 0 else _SINGLE_LEAST
    if nearest >= bound or math.isnan(bound):
        return float(nearest)
    if nearest == 0:
        return 2.0**-149
    (bits,) = struct.unpack("<i", struct.pack("<f", nearest))
    (above,) = struct.unpack("<f", struct.pack("<i", bits + (1 if nearest > 0 else -1)))
    return float(above)


_SINGLE_LEAST = -(2 - 2.0**-23) * 2.0**127


def _bits(number: float) -> int:
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return int(bits)


_NAN = _bits(math.nan)


# ---------------------------------------------------------------- the memory


class Ring:
    """Slots for the calls on one device; `memory` is the tensor that they are in: pinned, where there is a device.

    `scratch` is what a launch needs of the device's own memory for each of them.
    """

    def __init__(self, device: Any, slots: int = SLOTS) -> None:
        import ctypes  # noqa: PLC0415 - few need it
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - few need it

        self.device = device
        self.slots = slots
        # In a thread of its own no mode is on: an inference tensor could not be written to elsewhere, and what is
        # allocated where a graph is being prepared would be taken for a part of that graph.
        with ThreadPoolExecutor(1) as thread:
            self.memory, self.scratch = thread.submit(_allocated, device, slots).result()
        self._words = (ctypes.c_int64 * (slots * SLOT_WORDS)).from_address(self.memory.data_ptr())

    def write(self, slot: int, number: int, rows: Sequence[list[Any]]) -> None:
        """What a call asks; its number, where the device takes it from, stands behind that of the last answer."""
        start = slot * SLOT_WORDS
        self._words[start + WANTED_AT] = number
        for at, row in enumerate(rows):
            first = start + ROWS_AT + at * ROW_WORDS
            self._words[first : first + ROW_WORDS] = row

    def has(self, slot: int, number: int) -> bool:
        """Whether a call is answered."""
        return bool(self._words[slot * SLOT_WORDS] == number)

    def word(self, slot: int, at: int) -> int:
        """A word of a slot."""
        return int(self._words[slot * SLOT_WORDS + at])

    def put_word(self, slot: int, at: int, word: int) -> None:
        """Write a word of a slot that no device writes."""
        self._words[slot * SLOT_WORDS + at] = word

    def answers(self, slot: int, questions: Sequence[int]) -> list[tuple[int, int, int]]:
        """The answers to questions by their number (two for each row)."""
        found = []
        for question_number in questions:
            first = slot * SLOT_WORDS + ANSWERS_AT + question_number * ANSWER_WORDS
            count, index, bits = self._words[first : first + ANSWER_WORDS]
            found.append((count, index, bits))
        return found


def _allocated(device: Any, slots: int) -> tuple[Any, Any]:
    """The memory of slots and the scratch for them, filled."""
    import torch  # noqa: PLC0415 - only who has tensors

    on_cuda = device.type == "cuda"
    stream: Any = None
    if on_cuda:  # one that has no work to be waited for
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        memory = torch.zeros(slots, SLOT_WORDS, dtype=torch.int64, device="cpu", pin_memory=on_cuda)
        scratch = torch.zeros(slots, SCRATCH_WORDS, dtype=torch.int64, device=device)
        scratch[:, 1:DONE_AT:2] = NOWHERE
        if stream is not None:
            stream.record_event().synchronize()
    return memory, scratch


def grouped(probes: Sequence[Probe]) -> list[list[int]]:
    """The probes by number in rows: up to two of one tensor."""
    rows: list[list[int]] = []
    for at, probe in enumerate(probes):
        for row in rows:
            if probes[row[0]].tensor is probe.tensor and len(row) < QUESTIONS:
                row.append(at)
                break
        else:
            rows.append([at])
    return rows
