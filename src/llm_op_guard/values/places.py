"""Where the launches that CUDA graphs hold leave their answers: a slot for each, which no other launch gets.

Nobody tells when a graph is gone, and one that is not may be replayed: a place is kept for as long as the process
lives, at 1.4 KB. Nothing can be allocated while a graph is captured, so there are always some to spare; where they run
out, or after the last that there may be, calls are captured without being asked about.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from llm_op_guard.guard.late import LateCall, Replay, Verdict
from llm_op_guard.values import ring
from llm_op_guard.values.ring import Look, Ring

# Slots that are allocated at once, and how many there may be of one device.
BLOCK = 1024
MOST = 32 * BLOCK
# The first word of a block says whether there is something to be read in it.
_FLAG = 0


@dataclass(eq=False)
class Place:
    """A captured call: its slot, the answers that are of it, and what they are about; and what was read so far."""

    call: LateCall
    thread: int
    ring: Ring
    slot: int
    questions: list[int]
    looks: list[Look]
    counted: int = 0
    told: int = 0

    def replays(self) -> int:
        """How many replays there were since this was last asked."""
        replays = self.ring.word(self.slot, ring.REPLAYS_AT)
        fresh, self.counted = replays - self.counted, replays
        return fresh

    def found(self, *, take: bool) -> tuple[list[Verdict], Replay] | None:
        """The verdicts of the first replay that broke a rule since they were last taken, if there was one."""
        kept = self.ring.word(self.slot, ring.NUMBER_AT)
        if kept == self.ring.word(self.slot, ring.READ_AT):
            return None
        answers = self.ring.answers(self.slot, self.questions)
        verdicts = [look.verdict(*answer) for look, answer in zip(self.looks, answers, strict=True)]
        at, broken, replays = (
            self.ring.word(self.slot, word) for word in (ring.KEPT_AT, ring.BROKEN_AT, ring.REPLAYS_AT)
        )
        replay = Replay(at, broken - self.told, replays)
        if take:
            self.told = broken
            # From here on the device may write the next.
            self.ring.put_word(self.slot, ring.READ_AT, kept)
        return verdicts, replay


class Places:
    """The places of one device."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._blocks: list[Ring] = []
        self._free: deque[tuple[Ring, int]] = deque()
        self.taken: list[Place] = []
        self.provide()

    def provide(self) -> None:
        """See that there are places to spare; not while a graph is captured."""
        if len(self._free) < BLOCK // 2 and len(self._blocks) * BLOCK < MOST:
            block = Ring(self._device, BLOCK)
            self._blocks.append(block)
            self._free.extend((block, slot) for slot in range(_FLAG + 1, BLOCK))

    def free(self) -> tuple[Ring, int] | None:
        """A slot that nothing was launched into; None where there is no more."""
        return self._free.popleft() if self._free else None

    def has_more(self) -> bool:
        """Whether a replay that broke a rule may have been kept since `found` was last asked."""
        return any(block.word(_FLAG, ring.NUMBER_AT) for block in self._blocks)

    def found(self, *, take: bool) -> list[tuple[Place, list[Verdict], Replay]]:
        """What was kept of replays that broke a rule; what is not taken is found again."""
        if take:
            for block in self._blocks:
                block.put_word(_FLAG, ring.NUMBER_AT, 0)
        return [(place, *found) for place in self.taken if (found := place.found(take=take)) is not None]
