"""Random programs, most of them sound: what a loader must refuse or a run survive."""

from __future__ import annotations

import random
from array import array
from typing import Any

from llm_op_guard.native.program import Op

CONSTANTS = (0, 1, -1, 2, 1 << 62, -(1 << 63), 1.5, "text", None, True, (2, -1, -1, 5, -1, 6), (1, 0, 7, 4, -1, 5))
SETS, KEYS, TUPLES = (1, 3, 4), (0, 1, 2, 7), (10, 11)
NAMES = ("weight", "missing", "_parameters")
ARGUMENTS, TENSORS, VALUES = 3, 3, 24

# What each operand of an operation is: v a value, d one to write to, x a tensor, X one to load, t a jump, s a set,
# c a constant, f a form, k a name, n any number.
OPERANDS = {
    "v..": (Op.NEED, Op.NO_FACTOR, Op.NO_SIZE),
    "t..": (Op.JUMP, Op.ON_ABSENT),
    "vnt": (Op.UNLESS, Op.IS_KIND),
    "vt.": (Op.WHERE_FALSE, Op.WHERE_TRUE, Op.WHERE_SET),
    "dv.": (
        Op.COPY, Op.PLAIN, Op.COMPARED, Op.SIGHT_DTYPE, Op.IS_NONE, Op.PRESENT, Op.NEGATE, Op.ABSOLUTE, Op.NOT,
        Op.LENGTH, Op.WHOLE,
    ),
    "dvk": (Op.READ,),
    "dvi": (Op.ITEM,),
    "dvs": (Op.IN_DTYPES, Op.ON_DEVICE),
    "dvf": (Op.AMONG,),
    "Xvt": (Op.TENSOR,),
    "Xv.": (Op.HELD,),
    "Xvf": (Op.MATCH,),
    "xnt": (Op.RANK, Op.RANK_AT_LEAST),
    "xst": (Op.DTYPE_IN, Op.DEVICE_IN),
    "dxn": (Op.SIZE, Op.SIZES, Op.SIZE_IS),
    "dx.": (Op.DEVICE_IS, Op.NDIM, Op.NUMEL, Op.DTYPE, Op.DEVICE, Op.DENSE),
    "dxv": (Op.STRIDE, Op.ALIGNED),
    "xxt": (Op.LIKE,),
    "dvt": (Op.SIGHT,),
    "vct": (Op.IS_LITERAL,),
    "dvn": (Op.TUPLE,),
    "...": (Op.YES, Op.NO, Op.CANNOT, Op.ABSENT),
    "dvv": (
        Op.ADD, Op.SUBTRACT, Op.MULTIPLY, Op.DIVIDE, Op.FLOOR_DIVIDE, Op.MODULO, Op.CEIL_DIVIDE, Op.LEAST, Op.GREATEST,
        Op.EQUAL, Op.UNEQUAL, Op.LESS, Op.AT_MOST, Op.AT, Op.BROADCASTS, Op.WHOLE_RATIO,
    ),
}  # fmt: skip
KINDS = {op: kinds for kinds, ops in OPERANDS.items() for op in ops}


def random_program(rng: random.Random) -> tuple[bytes, tuple[Any, ...], tuple[str, ...], int, int, int]:
    """What `Program` is made of; one operand in 200 is out of bounds."""
    length = rng.randint(2, 40)
    loaded: set[int] = set()
    instructions = array("i")
    for at in range(length - 1):
        op = rng.choice([op for op in Op if loaded or "x" not in KINDS[op]])
        if op in (Op.YES, Op.NO, Op.CANNOT) and rng.random() < 0.9:
            op = Op.HELD
        for kind in KINDS[op]:
            if kind == "X":
                loaded.add(tensor := rng.randrange(TENSORS))
        instructions.append(op)
        for kind in KINDS[op]:
            operand = {
                "v": lambda: rng.randrange(VALUES),
                "d": lambda: rng.randrange(ARGUMENTS, VALUES),
                "x": lambda: rng.choice(sorted(loaded)),
                "X": lambda: tensor,
                "t": lambda: rng.randint(at + 1, length - 1),  # noqa: B023
                "s": lambda: rng.choice(SETS),
                "i": lambda: rng.choice(KEYS),
                "c": lambda: rng.randrange(10),
                "f": lambda: rng.choice(TUPLES),
                "k": lambda: rng.randrange(len(NAMES)),
                "n": lambda: rng.randint(-2, 6),
                ".": lambda: 0,
            }[kind]()
            instructions.append(rng.choice([-1, 1 << 20, -(1 << 31)]) if rng.random() < 0.005 else operand)
    instructions.extend([rng.choice([Op.YES, Op.NO, Op.CANNOT]), 0, 0, 0])
    return instructions.tobytes(), CONSTANTS, NAMES, ARGUMENTS, VALUES, TENSORS
