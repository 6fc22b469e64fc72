"""Runs native checks without PyTorch, for a build with sanitizers: random programs, odd arguments, references.

    make sanitize

which builds both extensions into the folder that is the one argument.
"""

from __future__ import annotations

import collections
import gc
import itertools
import random
import sys
import weakref
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), *sys.argv[1:]]

from programs import ARGUMENTS, random_program  # noqa: E402 - a script finds what lies beside it

PROGRAMS = 40_000


class Parameter:
    """Stands for `torch.nn.Parameter`, of which there are none here."""


class Module:
    """Stands for a module with tables."""

    def __init__(self, weight: Any) -> None:
        self._parameters = {"weight": weight}
        self._buffers: dict[str, Any] = {}
        self._modules: dict[str, Any] = {}


class Hostile:
    """Whose attributes nobody may ask for."""

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(f"asked for {name}")


def main() -> None:
    """Exit with what went wrong, if anything did."""
    import _check
    import stub

    unset = object()
    _check.connect(stub.Tensor, Parameter, tuple, stub.table, lambda owner, name: unset, unset, plainly)
    _check_extremes(_check, stub)
    rng = random.Random(0)
    said: collections.Counter[object] = collections.Counter()
    tensors = [
        stub.Tensor((2, 3), 2, 32, 1, 1, 0, 0),
        stub.Tensor((), 4, 16, 1, 2, 1, 0),
        stub.Tensor((0,), 0, 64, 1, 1, 0, 0),
        stub.Tensor((1 << 62, 1 << 62, 1 << 62), 2, 16, 1, 1, 0, 0),
        stub.Tensor((1,) * 16, 2, 32, 1, 1, 0, 0),
        stub.Tensor((4,), 2, 32, 1, 1, 0, 1),
        stub.Tensor((4,), 0, 8, 1, 1, 0, 0),
        stub.Tensor((4,), 2, 32, 4, 99, 7, 0),
        stub.Tensor((-1, 5, 7), 17, 4, 2, 10, -1, 0),
    ]
    numbers = [0, -1, 1 << 62, -(1 << 63), 1 << 64, 1.5, float("nan"), True]
    tuples = [(1, 2), (1, "a"), (1 << 70,), tuple(range(40)), [1, 2], {"weight": 1}, {}]
    objects = [Module(tensors[0]), Module(None), Hostile(), Hostile, object(), b"x", "text", "", None]
    others = [*numbers, *tuples, *objects]
    before = {id(value): sys.getrefcount(value) for value in (*tensors, *others)}
    for _ in range(PROGRAMS):
        try:
            program = _check.Program(*random_program(rng))
        except ValueError as error:
            said[str(error)] += 1
            continue
        for _ in range(4):
            arguments = [rng.choice(tensors if rng.random() < 0.6 else others) for _ in range(ARGUMENTS)]
            said[_check.judge(program, *arguments)] += 1
            said[_check.accepts(program, *arguments)] += 1
        for wrong in ((), (program,), (program, 1), (1, 2, 3, 4), (None, *arguments)):
            try:
                _check.judge(*wrong)
            except TypeError:
                continue
            sys.exit(f"judge took {wrong!r}")
    del program, arguments
    gc.collect()
    after = {id(value): sys.getrefcount(value) for value in (*tensors, *others)}
    # Small integers, None and the empty text are everybody's.
    grown = {key for key in before if after[key] > before[key] + 3 and before[key] < 1 << 16}
    if grown:
        sys.exit(f"references were kept: {[value for value in (*tensors, *others) if id(value) in grown]}")
    for value in (True, False, None):
        if not said[value]:
            sys.exit(f"no program said {value}: {said}")
    _check_lifetimes(_check, stub)
    sys.stdout.write(f"{PROGRAMS:,} programs: {dict(said.most_common())}\n")


def _check_extremes(extension: Any, stub: Any) -> None:
    """No more is read than there is, of no shape and no dtype."""
    read = 0
    for code, bits in itertools.product((0, 1, 2, 4, 5, 6, 17), (4, 8, 16, 32, 64, 128)):
        for shape in ((), (1,), (3,), (2, 3), (4, 1, 2), (0,), (2, 0), (-1,), (1 << 62, 4)):
            tensor = stub.Tensor(shape, code, bits, 1, 1, 0, 0)
            found = extension.extremes(tensor)
            if found not in (None, (0, 0)):
                sys.exit(f"{shape}, {code}, {bits}: {found}")
            read += found is not None
    if read < 20:
        sys.exit("hardly a tensor was read")


def _check_lifetimes(extension: Any, stub: Any) -> None:
    """A program keeps nothing of what it has read, not even a class: one may hold the function that it guards."""
    from array import array

    from llm_op_guard.native.program import Op

    local = type("Local", (), {})
    owner = local()
    owner.weight = stub.Tensor((2,), 2, 32, 1, 1, 0, 0)
    code = array("i", [Op.READ, 1, 0, 0, Op.TENSOR, 0, 1, 3, Op.YES, 0, 0, 0, Op.NO, 0, 0, 0]).tobytes()
    program = extension.Program(code, (), ("weight",), 1, 2, 1)
    if extension.judge(program, owner) is not True:
        sys.exit("the weight was not read")
    alive = weakref.ref(local)
    del owner, local
    gc.collect()
    if alive() is not None:
        sys.exit("a program held a class")


def plainly(cls: type) -> bool:
    """As `extension` says of classes."""
    return not any({"__getattribute__", "__class__"} & vars(base).keys() for base in cls.__mro__ if base is not object)


if __name__ == "__main__":
    main()
