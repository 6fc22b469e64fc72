"""The extension itself: what it takes for a program, what it sees of tensors, what it keeps, when it looks away."""

from __future__ import annotations

import gc
import math
import random
import sys
import threading
import weakref
from array import array
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from programs import ARGUMENTS, random_program

from llm_op_guard.guard.fast import usable
from llm_op_guard.native import extension
from llm_op_guard.native.program import (
    DEVICES,
    DTYPES,
    MOST_DIMS,
    MOST_INSTRUCTIONS,
    MOST_NUMBERS,
    MOST_TENSORS,
    MOST_VALUES,
    UNCERTAIN_DTYPES,
    Op,
    Refused,
)

native: Any = usable()
pytestmark = pytest.mark.skipif(isinstance(native, Refused), reason=f"no native checks here: {native}")

YES, NO = (Op.YES, 0, 0, 0), (Op.NO, 0, 0, 0)


def program(
    *instructions: tuple[int, ...],
    constants: tuple[Any, ...] = (),
    names: tuple[str, ...] = (),
    arguments: int = 1,
    values: int = 4,
    tensors: int = 1,
) -> Any:
    """A program; values that are no arguments come before the constants."""
    code = array("i", [number for instruction in instructions for number in instruction])
    return native.Program(code.tobytes(), constants, names, arguments, arguments + values + len(constants), tensors)


def takes_tensors(*instructions: tuple[int, ...], constants: tuple[Any, ...] = ()) -> Any:
    return program((Op.HELD, 0, 0, 0), *instructions, YES, NO, constants=constants)


def test_operations_are_those_of_the_table() -> None:
    assert tuple(op.name for op in Op) == native.OPERATIONS


@pytest.mark.parametrize("dtype", [*DTYPES, *sorted(UNCERTAIN_DTYPES)])
def test_every_dtype_is_known_or_cannot_be_told(dtype: str) -> None:
    torch_dtype = getattr(torch, dtype)
    x = torch.empty(2, 2, dtype=torch_dtype)
    if dtype in UNCERTAIN_DTYPES:
        assert native.judge(takes_tensors(), x) is None
        return
    only, others = 1 << DTYPES.index(dtype), ~(1 << DTYPES.index(dtype)) & (1 << len(DTYPES)) - 1
    asks = takes_tensors((Op.DTYPE_IN, 0, 0, 3), constants=(only,))
    assert native.judge(asks, x) is True
    asks = takes_tensors((Op.DTYPE_IN, 0, 0, 3), constants=(others,))
    assert native.judge(asks, x) is False


def test_narrow_integers_are_not_taken_for_int8() -> None:
    for dtype in (torch.uint1, torch.uint4, torch.uint7, torch.int4, torch.int8, torch.uint8):
        assert native.judge(takes_tensors(), torch.empty(2, dtype=dtype)) is None


def test_devices() -> None:
    (cpu,) = DEVICES["cpu"]
    asks = takes_tensors((Op.DEVICE_IN, 0, 0, 3), constants=(1 << cpu,))
    assert native.judge(asks, torch.empty(2)) is True
    assert native.judge(asks, torch.empty(2, device="cpu:0")) is True
    asks = takes_tensors((Op.DEVICE_IN, 0, 0, 3), constants=(1 << DEVICES["cuda"][0],))
    assert native.judge(asks, torch.empty(2)) is False


def seen(x: object) -> bool | None:
    """Whether a tensor can be read."""
    said: bool | None = native.judge(takes_tensors(), x)
    assert sys.exc_info() == (None, None, None)
    return said


SEEN: dict[str, Callable[[], object]] = {
    "a plain tensor": lambda: torch.empty(2),
    "of no dimension": lambda: torch.empty(()),
    "empty": lambda: torch.empty(0, 3),
    "with a gradient": lambda: torch.empty(2, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.empty(2)),
    "the outcome of a differentiable call": lambda: torch.empty(2, requires_grad=True) * 2,
    "a view with strides": lambda: torch.empty(4, 4)[::2, 1:].T,
    "expanded": lambda: torch.empty(1, 3).expand(4, 3),
    "complex": lambda: torch.empty(2, dtype=torch.complex64),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
}
UNSEEN: dict[str, Callable[[], object]] = {
    "meta": lambda: torch.empty(2, device="meta"),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "uninitialised": torch.nn.UninitializedParameter,
    "a subclass": lambda: torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
    "of more dimensions than a form has": lambda: torch.empty((1,) * 9),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_is_seen(name: str) -> None:
    assert seen(SEEN[name]()) is True


@pytest.mark.parametrize("name", UNSEEN)
def test_what_cannot_be_told(name: str) -> None:
    assert seen(UNSEEN[name]()) is None


def test_what_cannot_be_told_in_transforms() -> None:
    said: list[bool | None] = []

    def looked_at(x: torch.Tensor) -> torch.Tensor:
        said.append(seen(x))
        return x.sum()

    torch.vmap(looked_at)(torch.ones(2, 3))
    torch.func.grad(looked_at)(torch.ones(3))
    with torch._subclasses.FakeTensorMode():
        looked_at(torch.ones(3))
    assert said == [None] * 3


def test_no_tensors() -> None:
    for value in (None, 1, "x", [torch.ones(2)], object()):
        # Where there is nothing the rule has nothing to say; what else could be read is not known.
        assert native.judge(takes_tensors(), value) is None or value is None


SOUND = ((Op.HELD, 0, 0, 0), (Op.SIZE, 1, 0, 0), YES)
UNSOUND: dict[str, tuple[tuple[tuple[int, ...], ...], str]] = {
    "no instructions": ((), "none"),
    "an open end": ((SOUND[0],), "the end is open"),
    "no such operation": (((999, 0, 0, 0), YES), "no such operation"),
    "a jump back": ((SOUND[0], (Op.JUMP, 0, 0, 0), YES), "back"),
    "a jump to itself": (((Op.JUMP, 0, 0, 0), YES), "back"),
    "a jump beyond": (((Op.JUMP, 7, 0, 0), YES), "leads nowhere"),
    "a value beyond": (((Op.COPY, 1, 99, 0), YES), "no value"),
    "an argument is written": (((Op.COPY, 0, 1, 0), YES), "an argument is written to"),
    "a tensor beyond": (((Op.HELD, 5, 0, 0), YES), "no tensor"),
    "a name beyond": (((Op.READ, 1, 0, 3), YES), "no name"),
    "a constant beyond": ((SOUND[0], (Op.DTYPE_IN, 0, 3, 2), YES), "no constant"),
    "a tensor not loaded": (((Op.SIZE, 1, 0, 0), YES), "before it is loaded"),
    "a tensor loaded on one way": (((Op.JUMP, 2, 0, 0), SOUND[0], (Op.SIZE, 1, 0, 0), YES), "before it is loaded"),
    "too many in a tuple": (((Op.TUPLE, 1, 0, 9), YES), "no value"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_what_is_no_program(name: str) -> None:
    instructions, reason = UNSOUND[name]
    with pytest.raises(ValueError, match=reason):
        program(*instructions)
    assert native.judge(program(*SOUND), torch.ones(2)) is True


def test_no_program_of_odd_parts() -> None:
    sound = array("i", [*YES]).tobytes()
    for parts in (
        (sound[:-1], (), (), 0, 0, 0), (sound, (), (), -1, 0, 0), (sound, (), (), 3, 2, 0), (sound, (), (), 0, 1000, 0),
        (sound, (), (), 0, 0, 1000), (sound, (), (1,), 0, 1, 0), (sound * 5000, (), (), 0, 0, 0),
        (sound, (1,), (), 0, 0, 0),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            native.Program(*parts)


def test_the_limits_are_those_of_the_table() -> None:
    def made(instructions: int, values: int, tensors: int) -> Any:
        return native.Program(array("i", YES).tobytes() * instructions, (), (), 0, values, tensors)

    limits = (MOST_INSTRUCTIONS, MOST_VALUES, MOST_TENSORS)
    assert native.judge(made(*limits)) is True
    for number in range(3):
        with pytest.raises(ValueError, match="too many"):
            made(*(limit + (number == index) for index, limit in enumerate(limits)))


def test_the_limits_of_constants_are_those_of_the_table() -> None:
    def made(*constants: Any) -> Any:
        code = array("i", [*(Op.HELD, 0, 0, 0), *(Op.MATCH, 0, 0, 1), *(Op.AMONG, 1, 0, 2), *YES])
        return native.Program(code.tobytes(), (0, *constants), (), 1, 5, 1)

    form, numbers = (MOST_DIMS, -1, -1, -1, *[-1] * MOST_DIMS), tuple(range(MOST_NUMBERS))
    made(form, numbers)
    with pytest.raises(ValueError, match="an operand is no form"):
        made((MOST_DIMS + 1, -1, -1, -1, *[-1] * (MOST_DIMS + 1)), numbers)
    with pytest.raises(ValueError, match="an operand is no tuple of numbers"):
        made(form, (*numbers, 0))


def test_what_somebody_elses_class_says_of_itself_cannot_be_told() -> None:
    class Claims:
        @property
        def __class__(self) -> Any:
            raise AssertionError

    branches = program((Op.TENSOR, 0, 0, 2), YES, YES)  # whether there is a tensor or not
    for known in (None, 1, "x", [1], object(), torch.nn.Linear(1, 1), torch.ones(1)):
        assert native.judge(branches, known) is True
    for unknown in (Claims(), weakref.proxy(torch.nn.Linear), Mock(spec=torch.Tensor)):
        assert native.judge(branches, unknown) is None


def test_random_programs_come_to_an_end() -> None:
    rng = random.Random(0)
    values = [torch.ones(2, 3), torch.ones(()), None, 1, True, "text", (1, 2), torch.nn.Linear(2, 3), 1 << 70]
    said = set()
    for _ in range(3000):
        try:
            made = native.Program(*random_program(rng))
        except ValueError:
            continue
        for _ in range(3):
            said.add(native.judge(made, *(rng.choice(values) for _ in range(ARGUMENTS))))
    assert said == {True, False, None}


def test_nothing_is_kept() -> None:
    reads = program((Op.READ, 1, 0, 0), (Op.HELD, 0, 1, 0), YES, names=("weight",))
    layer, weight = torch.nn.Linear(2, 3), torch.ones(2)
    before = sys.getrefcount(layer.weight), sys.getrefcount(layer), sys.getrefcount(weight)
    for _ in range(1000):
        assert native.accepts(reads, layer)
        native.accepts(reads, weight)
    assert (sys.getrefcount(layer.weight), sys.getrefcount(layer), sys.getrefcount(weight)) == before


def test_no_class_is_kept() -> None:
    reads = program((Op.READ, 1, 0, 0), (Op.HELD, 0, 1, 0), YES, names=("weight",))
    local = type("Local", (torch.nn.Module,), {})
    owner = local()
    owner.weight = torch.nn.Parameter(torch.ones(2))
    assert native.judge(reads, owner) is True
    alive = weakref.ref(local)
    del owner, local
    gc.collect()
    assert alive() is None
    assert native.judge(reads, torch.nn.Linear(2, 3)) is True


def test_interrupts_reach_the_caller() -> None:
    class Interrupted:
        def __getattribute__(self, name: str) -> Any:
            raise KeyboardInterrupt

    class Failing:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError

    reads = program((Op.READ, 1, 0, 0), YES, names=("weight",))
    for ask in (native.judge, native.accepts):
        with pytest.raises(KeyboardInterrupt):
            ask(reads, Interrupted())
    assert native.judge(reads, Failing()) is True  # there is none

    class Key:
        def __init__(self, error: type[BaseException]) -> None:
            self.error = error

        def __hash__(self) -> int:
            return hash("weight")

        def __eq__(self, other: object) -> bool:
            raise self.error

    looks = program((Op.ITEM, 1, 0, 0), YES, constants=("weight",))
    with pytest.raises(KeyboardInterrupt):
        native.judge(looks, {Key(KeyboardInterrupt): 1})
    assert native.judge(looks, {Key(RuntimeError): 1}) is None


def test_attributes_run_no_code() -> None:
    class Odd:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    class Computed:
        @property
        def weight(self) -> Any:
            raise AssertionError

    reads = program((Op.READ, 1, 0, 0), (Op.WHERE_SET, 1, 3, 0), YES, NO, names=("weight",))
    for owner in (Odd(), Computed(), Odd, object(), 1, None):
        assert native.judge(reads, owner) in (True, None)  # there is none, or it cannot be told


def test_class_attributes_and_slots_are_read() -> None:
    class Slotted:
        __slots__ = ("weight",)

    class Shared:
        weight = 3

    slotted = Slotted()
    reads = program((Op.READ, 1, 0, 0), (Op.WHERE_SET, 1, 3, 0), NO, YES, names=("weight",))
    assert native.judge(reads, slotted) is False
    slotted.weight = 3
    assert native.judge(reads, slotted) is True
    assert native.judge(reads, Shared()) is True


def test_what_cannot_be_told_is_left_alone_for_a_while() -> None:
    asks = takes_tensors()
    meta, plain = torch.empty(2, device="meta"), torch.empty(2)
    assert not native.accepts(asks, meta)
    refused = 0
    while not native.accepts(asks, plain):
        refused += 1
    assert 0 < refused < 10  # it looks again soon
    for _ in range(10_000):
        assert not native.accepts(asks, meta)
    refused = 0
    while not native.accepts(asks, plain):
        refused += 1
        assert refused <= 2048  # and at last now and then
    assert native.accepts(asks, plain)
    assert native.judge(asks, plain) is True


def test_wrong_calls_are_errors() -> None:
    asks = takes_tensors()
    for given in ((), (asks,), (asks, 1, 2), (None, 1)):
        with pytest.raises(TypeError):
            native.accepts(*given)
        with pytest.raises(TypeError):
            native.judge(*given)


def test_threads() -> None:
    asks = takes_tensors((Op.SIZE_IS, 1, 0, 0), (Op.SIZE_IS, 1, 0, 1))
    wrong: list[object] = []

    def look(x: torch.Tensor, expected: bool) -> None:
        wrong.extend(said for _ in range(5000) if (said := native.judge(asks, x)) is not expected)

    threads = [threading.Thread(target=look, args=(torch.empty(2, n), n == 2)) for n in (2, 3, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_state_is_asked_once() -> None:
    assert usable() is native
    assert extension.usable(lambda owner, name: None, None) is native


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_extremes(dtype: torch.dtype) -> None:
    told = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    numbers: list[float] = [0, 1, -2, told.min, told.max]
    if dtype.is_floating_point:
        numbers += [float("inf"), -float("inf"), -0.0, torch.finfo(dtype).smallest_normal / 2]
    rng = random.Random(0)
    for length in range(1, 40):
        x = torch.tensor([rng.choice(numbers) for _ in range(length)], dtype=dtype)
        assert native.extremes(x) == tuple(end.item() for end in torch.aminmax(x))
        if dtype.is_floating_point:
            x[rng.randrange(length)] = float("nan")
            assert all(map(math.isnan, native.extremes(x)))


ELSEWHERE: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(0),
    "meta": lambda: torch.empty(2, device="meta"),
    "of no number": lambda: torch.ones(2, dtype=torch.bool),
    "of bytes": lambda: torch.ones(2, dtype=torch.uint8),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "with gaps": lambda: torch.ones(4)[::2],
    "expanded": lambda: torch.ones(1).expand(2),
    "large": lambda: torch.ones(1 << 13),
    "across": lambda: torch.frombuffer(bytearray(9), dtype=torch.float32, offset=1, count=2),
    "sparse": lambda: torch.ones(2).to_sparse(),
    "a subclass": lambda: torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_extremes_that_native_code_leaves_to_others(name: str) -> None:
    assert native.extremes(torch.ones(2)) == (1, 1)
    assert native.extremes(ELSEWHERE[name]()) is None
