"""The questions of a call in one launch of Triton: every tensor is read once, at the speed of memory.

Each program reads tiles of a tensor; the last one to finish writes the answers to the slot in host memory, and behind a
fence the number of the call. A launch that a CUDA graph holds is the same one, of a slot that says so: nothing is
compiled, loaded or allocated while a graph is captured, and the graph has no more in it than the launch. This module
imports Triton: ask `values.late` whether there is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from llm_op_guard.guard.late import Probe
from llm_op_guard.values import ring

_ROWS_AT = tl.constexpr(ring.ROWS_AT)
_ROW_WORDS = tl.constexpr(ring.ROW_WORDS)
_ANSWERS_AT = tl.constexpr(ring.ANSWERS_AT)
_ANSWER_WORDS = tl.constexpr(ring.ANSWER_WORDS)
_SLOT_WORDS = tl.constexpr(ring.SLOT_WORDS)
_WANTED_AT = tl.constexpr(ring.WANTED_AT)
_AT_EACH_REPLAY = tl.constexpr(ring.AT_EACH_REPLAY)
_READ_AT = tl.constexpr(ring.READ_AT)
_REPLAYS_AT = tl.constexpr(ring.REPLAYS_AT)
_BROKEN_AT = tl.constexpr(ring.BROKEN_AT)
_KEPT_AT = tl.constexpr(ring.KEPT_AT)
_SCRATCH_WORDS = tl.constexpr(ring.SCRATCH_WORDS)
_DONE = tl.constexpr(ring.DONE_AT)
_NOWHERE = tl.constexpr(ring.NOWHERE)

TILE = 4096
# Nothing is multiplied; Triton warns where nobody says whether sums may be fused.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def _bound(words, at, NUMBER: tl.constexpr):
    word = tl.load(words + at)
    if NUMBER == tl.int64:
        return word
    return word.to(tl.float64, bitcast=True).to(NUMBER)


@triton.jit
def _number(x, NUMBER: tl.constexpr, FORM: tl.constexpr):
    """Elements as what they are compared in, exactly; narrow floats by their bits, on every device alike."""
    if FORM == 1:  # bfloat16 is the upper half of a float32
        return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    if FORM == 2:  # float8_e5m2 that of a float16
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    if FORM == 3:  # float8_e4m3fn has an exponent that is 8 higher, no infinities, and NaN last
        bits = x.to(tl.uint16)
        scaled = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), scaled * 256)
    return x.to(NUMBER)


@triton.jit
def _wrong(x, low, high, sentinel, other):
    # NaN is not in any range.
    return (((x >= low) & (x <= high)) == 0) & (x != sentinel) & (x != other)


@triton.jit
def _note(scratch, question, count, first):
    if count > 0:
        tl.atomic_add(scratch + question * 2, count, sem="relaxed")
        tl.atomic_min(scratch + question * 2 + 1, first, sem="relaxed")


@triton.jit
def _scan(
    words, scratch, row, ELEMENT: tl.constexpr, SIZE: tl.constexpr, NUMBER: tl.constexpr, FORM: tl.constexpr,
    PAIRS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    address = tl.load(words)
    numel = tl.load(words + 1)
    low = _bound(words, 3, NUMBER)
    high = _bound(words, 4, NUMBER)
    sentinel = _bound(words, 5, NUMBER)
    other = _bound(words, 6, NUMBER)
    low_2 = _bound(words, 7, NUMBER)
    high_2 = _bound(words, 8, NUMBER)
    sentinel_2 = _bound(words, 9, NUMBER)
    other_2 = _bound(words, 10, NUMBER)

    program = tl.program_id(0)
    programs = tl.num_programs(0)
    lanes = tl.arange(0, TILE)
    # Whole tiles begin where 16 bytes can be read at once; what lies before and after them is for the first program.
    start = tl.minimum(((16 - address % 16) % 16) // SIZE, numel)
    tiles = (numel - start) // TILE
    begin = address.to(tl.pointer_type(ELEMENT))
    aligned = tl.multiple_of((address + start * SIZE).to(tl.pointer_type(ELEMENT)), 16)

    counts = tl.zeros([TILE], tl.int32)
    counts_2 = tl.zeros([TILE], tl.int32)
    # Which tile each lane has found the first wrong element in.
    found = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    found_2 = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    tile = program.to(tl.int64)
    while tile < tiles:
        x = _number(tl.load(aligned + tile * TILE + lanes), NUMBER, FORM)
        wrong = _wrong(x, low, high, sentinel, other)
        counts += wrong.to(tl.int32)
        found = tl.where(wrong, tl.minimum(found, tile.to(tl.int32)), found)
        if PAIRS:
            wrong_2 = _wrong(x, low_2, high_2, sentinel_2, other_2)
            counts_2 += wrong_2.to(tl.int32)
            found_2 = tl.where(wrong_2, tl.minimum(found_2, tile.to(tl.int32)), found_2)
        tile += programs
    count = tl.sum(counts.to(tl.int64), axis=0)
    places = tl.where(found < 0x7FFFFFFF, start + found.to(tl.int64) * TILE + lanes, _NOWHERE)
    _note(scratch, row * 2, count, tl.min(places, axis=0))
    if PAIRS:
        count = tl.sum(counts_2.to(tl.int64), axis=0)
        places = tl.where(found_2 < 0x7FFFFFFF, start + found_2.to(tl.int64) * TILE + lanes, _NOWHERE)
        _note(scratch, row * 2 + 1, count, tl.min(places, axis=0))

    if program == 0:
        for edge in tl.static_range(2):
            places = lanes.to(tl.int64) if edge == 0 else start + tiles * TILE + lanes
            inside = places < (start if edge == 0 else numel)
            x = _number(tl.load(begin + places, mask=inside), NUMBER, FORM)
            wrong = _wrong(x, low, high, sentinel, other) & inside
            count = tl.sum(wrong.to(tl.int64), axis=0)
            _note(scratch, row * 2, count, tl.min(tl.where(wrong, places, _NOWHERE), axis=0))
            if PAIRS:
                wrong = _wrong(x, low_2, high_2, sentinel_2, other_2) & inside
                count = tl.sum(wrong.to(tl.int64), axis=0)
                _note(scratch, row * 2 + 1, count, tl.min(tl.where(wrong, places, _NOWHERE), axis=0))


@triton.jit
def _number_to_write(start, scratch, rows, PAIRS: tl.constexpr):
    """The number that goes with the answers: that of the call. Of a replay none, but where it is to be kept."""
    count = tl.zeros([], tl.int64)
    for row in range(rows):
        count += tl.load(scratch + row * 4, volatile=True)
        if PAIRS:
            count += tl.load(scratch + row * 4 + 2, volatile=True)
    number = tl.load(start + _WANTED_AT, volatile=True)
    replayed = number == _AT_EACH_REPLAY
    broken = replayed & (count > 0)
    replay = tl.load(start + _REPLAYS_AT, mask=replayed, other=0, volatile=True) + 1
    breaks = tl.load(start + _BROKEN_AT, mask=broken, other=0, volatile=True) + 1
    kept = tl.load(start, mask=broken, other=0, volatile=True)
    keeps = broken & (tl.load(start + _READ_AT, mask=broken, other=0, volatile=True) == kept)
    tl.debug_barrier()  # every warp has read before one writes
    tl.store(start + _REPLAYS_AT, replay, mask=replayed)
    tl.store(start + _BROKEN_AT, breaks, mask=broken)
    tl.store(start + _KEPT_AT, replay, mask=keeps)
    return tl.where(keeps, kept + 1, number)


@triton.jit
def _answer(words, answers, scratch, row, question, is_written, SIZES: tl.constexpr):
    at = scratch + (row * 2 + question) * 2
    count = tl.load(at, volatile=True)
    first = tl.load(at + 1, volatile=True)
    tl.store(at, tl.zeros([], tl.int64))
    tl.store(at + 1, tl.full([], _NOWHERE, tl.int64))
    bits = tl.zeros([], tl.int64)
    if count > 0:
        size = _size(tl.load(words + 2))
        place = tl.load(words) + first * size
        if SIZES & 1:
            if size == 1:
                bits = tl.load(place.to(tl.pointer_type(tl.int8))).to(tl.int64)
        if SIZES & 2:
            if size == 2:
                bits = tl.load(place.to(tl.pointer_type(tl.int16))).to(tl.int64)
        if SIZES & 4:
            if size == 4:
                bits = tl.load(place.to(tl.pointer_type(tl.int32))).to(tl.int64)
        if SIZES & 8:
            if size == 8:
                bits = tl.load(place.to(tl.pointer_type(tl.int64)))
    out = answers + (row * 2 + question) * _ANSWER_WORDS
    tl.store(out, count, mask=is_written)
    tl.store(out + 1, first, mask=is_written)
    tl.store(out + 2, bits, mask=is_written)


@triton.jit
def _size(kind):
    size = tl.full([], 1, tl.int64)
    size = tl.where((kind == 2) | (kind == 3) | (kind == 8) | (kind == 11), 2, size)
    size = tl.where((kind == 0) | (kind == 7) | (kind == 12), 4, size)
    return tl.where((kind == 1) | (kind == 6), 8, size)


@triton.jit(do_not_specialize=["slot"])
def probe(memory, scratch, slot, KINDS: tl.constexpr, SIZES: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr):
    """Answer what stands in a slot; the grid is (programs for each row, rows).

    KINDS and SIZES are the kinds and sizes of elements that occur in the rows, as bits: others are not compiled.
    """
    start = memory + slot * _SLOT_WORDS
    row = tl.program_id(1)
    words = start + _ROWS_AT + row * _ROW_WORDS
    scratch += slot * _SCRATCH_WORDS
    kind = tl.load(words + 2)
    if KINDS & 1:
        if kind == 0:
            _scan(words, scratch, row, tl.float32, 4, tl.float32, 0, PAIRS, TILE)
    if KINDS & 2:
        if kind == 1:
            _scan(words, scratch, row, tl.float64, 8, tl.float64, 0, PAIRS, TILE)
    if KINDS & 4:
        if kind == 2:
            _scan(words, scratch, row, tl.float16, 2, tl.float32, 0, PAIRS, TILE)
    if KINDS & 8:
        if kind == 3:
            _scan(words, scratch, row, tl.uint16, 2, tl.float32, 1, PAIRS, TILE)
    if KINDS & 16:
        if kind == 4:
            _scan(words, scratch, row, tl.uint8, 1, tl.float32, 2, PAIRS, TILE)
    if KINDS & 32:
        if kind == 5:
            _scan(words, scratch, row, tl.uint8, 1, tl.float32, 3, PAIRS, TILE)
    if KINDS & 64:
        if kind == 6:
            _scan(words, scratch, row, tl.int64, 8, tl.int64, 0, PAIRS, TILE)
    if KINDS & 128:
        if kind == 7:
            _scan(words, scratch, row, tl.int32, 4, tl.int64, 0, PAIRS, TILE)
    if KINDS & 256:
        if kind == 8:
            _scan(words, scratch, row, tl.int16, 2, tl.int64, 0, PAIRS, TILE)
    if KINDS & 512:
        if kind == 9:
            _scan(words, scratch, row, tl.int8, 1, tl.int64, 0, PAIRS, TILE)
    if KINDS & 1024:
        if kind == 10:
            _scan(words, scratch, row, tl.uint8, 1, tl.int64, 0, PAIRS, TILE)
    if KINDS & 2048:
        if kind == 11:
            _scan(words, scratch, row, tl.uint16, 2, tl.int64, 0, PAIRS, TILE)
    if KINDS & 4096:
        if kind == 12:
            _scan(words, scratch, row, tl.uint32, 4, tl.int64, 0, PAIRS, TILE)

    tl.debug_barrier()
    rows = tl.num_programs(1)
    done = tl.atomic_add(scratch + _DONE, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) * rows - 1:
        number = _number_to_write(start, scratch, rows, PAIRS)
        is_written = number != _AT_EACH_REPLAY
        for each in range(rows):
            of_row = start + _ROWS_AT + each * _ROW_WORDS
            _answer(of_row, start + _ANSWERS_AT, scratch, each, 0, is_written, SIZES)
            if PAIRS:
                _answer(of_row, start + _ANSWERS_AT, scratch, each, 1, is_written, SIZES)
        tl.store(scratch + _DONE, tl.zeros([], tl.int64))
        tl.debug_barrier()
        # Whoever sees the number sees the answers. Of replays the very first word says that there is one to be seen.
        replayed = tl.load(start + _WANTED_AT) == _AT_EACH_REPLAY
        tl.atomic_xchg(start, number, mask=is_written, sem="release", scope="sys")
        tl.atomic_xchg(memory, number, mask=is_written & replayed, sem="release", scope="sys")


def runs_on(device: Any) -> bool:
    """Whether Triton can be used for tensors on a device: in its interpreter on any."""
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


class Launcher:
    """Launches for the calls on one device."""

    def __init__(self, device: Any) -> None:
        import torch  # noqa: PLC0415 - only who has tensors

        self._device = device
        self._most = 1
        self._kinds = {name: kind for name, (kind, _) in ring.KINDS.items()}
        if device.type == "cuda":
            self._most = 4 * torch.cuda.get_device_properties(device).multi_processor_count
        # What is compiled for this device, and loaded there.
        self._loaded: set[tuple[int, int, bool]] = set()

    def ask(
        self, answers: ring.Ring, slot: int, number: int, probes: Sequence[Probe], *, captured: bool = False
    ) -> tuple[list[int], list[ring.Look]] | None:
        """Launch, on the current stream: which questions the probes are, and how to read their answers.

        None where a tensor has gaps, or a question is none that the kernel can be asked, or (`captured`: into a graph)
        where the kernel would have to be compiled first.
        """
        questions, looks, rows, pairs, largest = [0] * len(probes), [], [], False, 0
        grouped = ring.grouped(probes)
        of_probe: dict[int, ring.Look] = {}
        for at, group in enumerate(grouped):
            x = probes[group[0]].tensor
            kind, look = self._kinds.get(str(x.dtype)[6:]), ring.dense(x)
            words = [ring.question(probes[one].range, x.dtype) for one in group]
            if kind is None or look is None or x.is_neg() or x._is_zerotensor():
                return None
            known = [word for word in words if word is not None]
            if len(known) < len(words):
                return None
            numel = x.numel() // look.times
            largest = max(largest, numel)
            pairs |= len(group) > 1
            rows.append([x.data_ptr(), numel, kind, *known[0], *known[-1]])
            for which, one in enumerate(group):
                questions[one] = at * ring.QUESTIONS + which
                of_probe[one] = look
        looks = [of_probe[one] for one in range(len(probes))]
        programs = max(min(largest // TILE, self._most), 1)
        kinds = sizes = 0
        for row in rows:
            kinds |= 1 << row[2]
            sizes |= _SIZES[row[2]]
        if captured and (kinds, sizes, pairs) not in self._loaded:
            return None
        answers.write(slot, number, rows)
        with self._on_device():
            probe[(programs, len(rows))](
                answers.memory, answers.scratch, slot, KINDS=kinds, SIZES=sizes, PAIRS=pairs, TILE=TILE, **OPTIONS
            )
        self._loaded.add((kinds, sizes, pairs))
        return questions, looks

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        import torch  # noqa: PLC0415

        if self._device.type != "cuda" or torch.cuda.current_device() == self._device.index:
            return contextlib.nullcontext()
        return torch.cuda.device(self._device)


_SIZES = dict(ring.KINDS.values())
