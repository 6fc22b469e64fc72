"""What the native check runs: instructions on numbered values, and why a plan has none.

An instruction is four numbers, its operation and up to three operands. Jumps go forward only, so that every program
ends. `operations.h` holds the same table in the same order, `run.cpp` says what each operation does, and `program.cpp`
refuses a program whose numbers lead out of it.
"""

from __future__ import annotations

from array import array
from enum import IntEnum, auto
from typing import Any

from llm_op_guard.frozen import frozen


class Op(IntEnum):
    """The operations. `x` is a tensor, `v` a value, `d` where the outcome goes, `t` the instruction to go on with."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:  # noqa: ARG004
        return count

    YES = auto()
    NO = auto()
    CANNOT = auto()
    JUMP = auto()  # t
    UNLESS = auto()  # v number t
    WHERE_FALSE = auto()  # v t
    WHERE_TRUE = auto()  # v t
    WHERE_SET = auto()  # v t
    ON_ABSENT = auto()  # t
    ABSENT = auto()
    COPY = auto()  # d v
    PLAIN = auto()  # d v
    COMPARED = auto()  # d v
    READ = auto()  # d v name
    ITEM = auto()  # d v constant
    NEED = auto()  # v
    TENSOR = auto()  # x v t
    HELD = auto()  # x v
    MATCH = auto()  # x v form
    RANK = auto()  # x number t
    RANK_AT_LEAST = auto()  # x number t
    DTYPE_IN = auto()  # x constant t
    DEVICE_IN = auto()  # x constant t
    SIZE = auto()  # d x axis
    SIZES = auto()  # d x first-and-behind
    NDIM = auto()  # d x
    NUMEL = auto()  # d x
    DTYPE = auto()  # d x
    DEVICE = auto()  # d x
    DENSE = auto()  # d x
    STRIDE = auto()  # d x v
    ALIGNED = auto()  # d x v
    LIKE = auto()  # x x t
    SIZE_IS = auto()  # d x axis
    DEVICE_IS = auto()  # d x
    SIGHT = auto()  # d v t
    SIGHT_DTYPE = auto()  # d v
    IS_KIND = auto()  # v kind t
    IS_LITERAL = auto()  # v constant t
    IS_NONE = auto()  # d v
    PRESENT = auto()  # d v
    ADD = auto()  # d v v
    SUBTRACT = auto()  # d v v
    MULTIPLY = auto()  # d v v
    DIVIDE = auto()  # d v v
    FLOOR_DIVIDE = auto()  # d v v
    MODULO = auto()  # d v v
    CEIL_DIVIDE = auto()  # d v v
    LEAST = auto()  # d v v
    GREATEST = auto()  # d v v
    NEGATE = auto()  # d v
    ABSOLUTE = auto()  # d v
    NOT = auto()  # d v
    EQUAL = auto()  # d v v
    UNEQUAL = auto()  # d v v
    LESS = auto()  # d v v
    AT_MOST = auto()  # d v v
    AMONG = auto()  # d v numbers
    IN_DTYPES = auto()  # d v constant
    ON_DEVICE = auto()  # d v constant
    LENGTH = auto()  # d v
    AT = auto()  # d v v
    TUPLE = auto()  # d v number
    BROADCASTS = auto()  # d v v
    WHOLE = auto()  # d v
    WHOLE_RATIO = auto()  # d v v
    NO_FACTOR = auto()  # v
    NO_SIZE = auto()  # v


class Kind(IntEnum):
    """What `IS_KIND` asks for."""

    NONE = 0
    INT = 1
    FLOAT = 2
    BOOL = 3
    STR = 4
    DICT = 5


# By their place in this table `reading.cpp` tells dtypes apart; it can't tell int8 and uint8 from narrower ones.
DTYPES = (
    "float64", "float32", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    "int64", "int32", "int16", "uint64", "uint32", "uint16", "bool", "complex128", "complex64", "complex32",
)  # fmt: skip
# Those that it meets and knows nothing of: no program may ask for them alone.
UNCERTAIN_DTYPES = frozenset({"int8", "uint8"})
# The DLPack device types that a device of PyTorch may be.
DEVICES = {"cpu": (1,), "cuda": (2, 10), "mps": (8,), "xpu": (14,)}

# What the loader takes, and the size of an operand.
MOST_DIMS = 8
MOST_NUMBERS = 1024  # of those that AMONG looks through
LARGEST_OPERAND = (1 << 31) - 1
MOST_VALUES = 384
MOST_TENSORS = 64
MOST_INSTRUCTIONS = 4096


@frozen
class Program:
    """A check as `run.cpp` runs it. Its first values are the arguments, in order, its last ones the constants.

    A constant that is a tuple is no value. It is the form of a tensor, for `MATCH`: how many dimensions (at least), the
    place of a dimension of open length or -1, the set of its dtypes or -1, the value that its device is or -1, and for
    each other dimension the value that its size is, or -1. Or it is the numbers that `AMONG` looks through.
    """

    instructions: array[int]
    constants: tuple[Any, ...]
    names: tuple[str, ...]
    arguments: int
    values: int
    tensors: int


@frozen
class Refused:
    """Why there is no program for a plan: the Python check is used."""

    reason: str
