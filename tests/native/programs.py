"""Programs that are sound by their shape and otherwise at random: what a loader must refuse or a run survive."""

from __future__ import annotations

import random
from array import array
from typing import Any

from llm_op_guard.native.program import DTYPES, Op

CONSTANTS = (0, 1, -1, 2, 1 << 62, -(1 << 63), 1.5, "text", None, True, (3, -1, -1, -1, 5, -1, 6), (1, 0, 7, 4, -1))
NAMES = ("weight", "missing", "_parameters")
ARGUMENTS, TENSORS = 3, 3
VALUES = 24


def random_program(rng: random.Random) -> tuple[bytes, tuple[Any, ...], tuple[str, ...], int, int, int]:
    """What `Program` is made of, most of whose operands are in bounds."""
    length = rng.randint(1, 30)
    instructions = array("i")
    for at in range(length - 1):
        wild = rng.random() < 0.02
        operands = [rng.randint(-3, 1 << 20) if wild else rng.randint(0, VALUES - 1) for _ in range(3)]
        op = rng.choice(list(Op))
        small = {Op.TENSOR: (0,), Op.HELD: (0,), Op.MATCH: (0,), Op.LIKE: (0, 1), Op.RANK: (0,), Op.DTYPE_IN: (0,)}
        for place in small.get(op, (1,) if op in _READS_TENSOR else ()):
            operands[place] = rng.randrange(TENSORS)
        for place in _JUMPS.get(op, ()):
            operands[place] = rng.randint(at + 1, length - 1)
        if op in (Op.ITEM, Op.ON_DEVICE, Op.IN_DTYPES, Op.AMONG, Op.MATCH):
            operands[2] = rng.randrange(len(CONSTANTS))
        if op is Op.READ:
            operands[2] = rng.randrange(len(NAMES))
        instructions.extend([op, *operands])
    instructions.extend([rng.choice([Op.YES, Op.NO, Op.CANNOT]), 0, 0, 0])
    return instructions.tobytes(), CONSTANTS, NAMES, ARGUMENTS, VALUES, TENSORS


_READS_TENSOR = {
    Op.SIZE,
    Op.SIZES,
    Op.SIZE_IS,
    Op.DEVICE_IS,
    Op.NDIM,
    Op.NUMEL,
    Op.DTYPE,
    Op.DEVICE,
    Op.DENSE,
    Op.STRIDE,
}
_JUMPS = {
    Op.JUMP: (0,), Op.ON_ABSENT: (0,), Op.UNLESS: (2,), Op.WHERE_FALSE: (1,), Op.WHERE_TRUE: (1,), Op.WHERE_SET: (1,),
    Op.TENSOR: (2,), Op.RANK: (2,), Op.RANK_AT_LEAST: (2,), Op.DTYPE_IN: (2,), Op.DEVICE_IN: (2,), Op.LIKE: (2,),
    Op.SIGHT: (2,), Op.IS_KIND: (2,), Op.IS_LITERAL: (2,),
}  # fmt: skip
assert len(DTYPES) < 63
