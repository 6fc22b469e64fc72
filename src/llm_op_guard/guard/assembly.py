"""What a program of the native check is put together from: instructions, places that are not known yet, constants."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from llm_op_guard.contract.path import Path
from llm_op_guard.native.program import (
    LARGEST_OPERAND,
    MOST_INSTRUCTIONS,
    MOST_TENSORS,
    MOST_VALUES,
    Op,
    Program,
)


class NoProgram(Exception):  # noqa: N818 - a refusal, not an error
    """What no program can say."""


class Label:
    """A place in the program that is not known yet."""

    def __init__(self) -> None:
        self.place: int | None = None


class Constant:
    """The value of a constant: they lie behind all others, whose number is not known yet."""

    def __init__(self, number: int) -> None:
        self.number = number


Operand = int | Label | Constant


class Assembly:
    """The program of one check, as far as it is written. Its first values are the arguments of the check."""

    def __init__(self, parameters: Sequence[str]) -> None:
        self.values = len(parameters)
        self.forms: list[list[Operand]] = []
        self._arguments = len(parameters)
        self._code: list[tuple[Op, tuple[Operand, ...]]] = []
        self._constants: dict[tuple[type, Any], int] = {}
        self._attributes: dict[str, int] = {}
        self._kept: dict[str, int] = {f"own {name}": number for number, name in enumerate(parameters)}
        self._tensors: dict[str, int] = {}

    def emit(self, op: Op, *operands: Operand) -> None:
        """Write one instruction."""
        for operand in operands:
            if isinstance(operand, int) and abs(operand) > LARGEST_OPERAND:
                raise NoProgram(f"{operand} takes more than 32 bits")
        self._code.append((op, operands))

    def mark(self) -> tuple[int, int]:
        """How much is written."""
        return len(self._code), len(self.forms)

    def back_to(self, mark: tuple[int, int]) -> None:
        """Take back what was written since."""
        del self._code[mark[0] :], self.forms[mark[1] :]

    def put(self, label: Label) -> None:
        """Say that a label stands in front of the next instruction."""
        label.place = len(self._code)

    def fresh(self, count: int = 1) -> int:
        """A value that nothing else uses, or the first of several side by side."""
        self.values += count
        return self.values - count

    def keep(self, name: str) -> int:
        """Where something with a name of its own is kept: a symbol, a fact, what stands at a path."""
        if name not in self._kept:
            self._kept[name] = self.fresh()
        return self._kept[name]

    def own(self, name: str) -> int:
        """Where a parameter, symbol or assigned name is kept."""
        return self.keep(f"own {name}")

    def tensor(self, path: Path) -> int:
        """Where the metadata of a tensor are."""
        return self._tensors.setdefault(str(path), len(self._tensors))

    def constant(self, value: object) -> int:
        """The number of a constant among them all."""
        return self._constants.setdefault((type(value), value), len(self._constants))

    def given(self, value: object) -> Constant:
        """A constant as a value."""
        return Constant(self.scalar(value))

    def made(self, op: Op, *operands: Operand) -> int:
        """The place of what an operation makes of its operands."""
        into = self.fresh()
        self.emit(op, into, *operands)
        return into

    def where(self, path: Path) -> int:
        """Where the value of a path is that a step has read, or of an argument."""
        return self.keep(f"path {path}") if path.steps else self.own(path.root)

    def walk(self, root: Operand, steps: Sequence[str | tuple[str | int]]) -> Operand:
        """Read several attributes and items in a row; absent as soon as one is."""
        for step in steps:
            if isinstance(step, str):
                root = self.made(Op.READ, root, self._attributes.setdefault(step, len(self._attributes)))
            elif isinstance(step[0], bool):
                raise NoProgram(f"{step[0]} is no index")
            else:
                root = self.made(Op.ITEM, root, self.constant(step[0]))
        return root

    def scalar(self, value: object) -> int:
        """The number of a constant that must be None, a number of at most 64 bits or a text."""
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise NoProgram(f"{value} takes more than 64 bits")
        if value is not None and not isinstance(value, int | float | str):
            raise NoProgram(f"{value!r} is no plain scalar")
        return self.constant(value)

    def assembled(self) -> Program:
        """The program. Labels and constants get their numbers: the forms of tensors are constants too."""
        constants = [value for _, value in self._constants]
        count = self.values + len(constants) + len(self.forms)
        if count > MOST_VALUES or len(self._tensors) > MOST_TENSORS or len(self._code) > MOST_INSTRUCTIONS:
            raise NoProgram("it is too long")
        forms = [tuple(self._number(part) for part in form) for form in self.forms]
        instructions = array("i")
        for op, operands in self._code:
            numbers = [self._number(operand) for operand in operands]
            if op == Op.MATCH:
                numbers[2] += len(constants)
            instructions.extend([op, *numbers, *[0] * (3 - len(numbers))])
        return Program(
            instructions, (*constants, *forms), tuple(self._attributes), self._arguments, count, len(self._tensors)
        )

    def _number(self, operand: Operand) -> int:
        match operand:
            case Label(place=place):
                return place or 0
            case Constant(number=number):
                return self.values + number
        return operand
