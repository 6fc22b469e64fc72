"""The first value that is not finite, with everything needed to understand it. Plain data: no tensor, no module."""

from __future__ import annotations

import math
from typing import Literal

from llm_op_guard.frozen import frozen
from llm_op_guard.guard.functions import NEAR
from llm_op_guard.guard.violation import CallSite
from llm_op_guard.report.text import place

Kind = Literal["parameter", "buffer", "input", "output", "gradient"]


@frozen
class Place:
    """Where a tensor is not finite: the first offending element in row order, its value, how many there are of `total`.

    `largest` is the largest finite magnitude in the tensor (None where nothing is finite), `limit` the largest finite
    number of its dtype.
    """

    tensor: str
    index: tuple[int, ...]
    value: complex
    count: int
    total: int
    dtype: str
    shape: tuple[int, ...]
    device: str
    largest: float | None
    limit: float

    def __str__(self) -> str:
        at = f" at [{', '.join(map(str, self.index))}]" if self.index else ""
        elements = "element" if self.total == 1 else "elements"
        return f"{self.value}{at} ({self.count} of {self.total} {elements})"

    @property
    def metadata(self) -> str:
        """Dtype, shape and device, as a diagnosis shows them."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}] {self.device}"

    @property
    def is_overflow(self) -> bool:
        """Whether the value is infinite."""
        return not isinstance(self.value, complex) and math.isinf(self.value)


@frozen
class Operand:
    """A tensor that went in: what it looked like, its largest finite magnitude, and whether -inf masks in it."""

    name: str
    metadata: str
    largest: float | None
    masks: bool

    def __str__(self) -> str:
        text = self.metadata
        if self.largest is not None:
            text += f", largest magnitude {self.largest:.5g}"
        return f"{text}, masks with -inf" if self.masks else text


@frozen
class NonFinite:
    """What `first_nonfinite` found. `str()` of it is the diagnosis.

    `kind` says what was not finite: a parameter or buffer of a module, the output of one whose inputs were finite, the
    gradient that the backward pass of one made of a finite one, or what went into the model. `name` is the qualified
    name below the outermost module, empty for that module itself; `class_name` is the class of the module, `model` that
    of the outermost one. `call` counts the calls of this module from 1. `place` tells tensor, index, value and count.

    `surfaced` says which module was first given the value, where a module's own code made it between calls of others;
    `operation` which node of autograd did, in the backward pass; `inputs` what went in, `cause` what is likely.
    `certain` is False where nothing came of it: the output of the outermost module was finite all the same, or has -inf
    alone, as what is masked out has.
    """

    kind: Kind
    name: str
    class_name: str
    model: str
    call: int
    place: Place
    certain: bool = True
    surfaced: str | None = None
    operation: str | None = None
    inputs: tuple[Operand, ...] = ()
    cause: str | None = None
    call_site: CallSite | None = None

    @property
    def summary(self) -> str:
        """One line: who, what, where."""
        whose = f"{self.name} ({self.class_name})" if self.name else self.class_name
        match self.kind:
            case "parameter" | "buffer":
                return f"{self.name} ({self.kind} of {self.class_name}): {self.place}, expected finite numbers"
            case "gradient":
                whose += ", backward"
        return f"{whose}: {self.place.tensor} has {self.place}, expected finite numbers"

    def __str__(self) -> str:
        lines = [self.summary, *(f"  {line}" for line in self._reasons()), ""]
        facts = [(self.place.tensor, f"{self.place.metadata}   <- here")]
        facts += [(operand.name, str(operand)) for operand in self.inputs]
        if self.name:
            facts.append(("model", self.model))
        if self.call > 1:
            facts.append(("call", f"{self.call} of this module"))
        if self.call_site is not None:
            facts.append(("called from", place(self.call_site)))
        width = max(len(label) for label, _ in facts)
        return "\n".join([*lines, *(f"  {label:<{width}}  {text}" for label, text in facts)])

    def _reasons(self) -> list[str]:
        lines = []
        if self.kind == "output":
            masked = ", masks apart" if any(operand.masks for operand in self.inputs) else ""
            lines.append(f"what went in was finite{masked}, and so were its parameters")
        elif self.kind == "input":
            lines.append("the outermost module was given this, and its output is not finite either")
        elif self.kind == "gradient" and self.operation is not None:
            lines.append(f"the gradient that came in was finite; {self.operation} made this of it")
        elif self.kind == "gradient":
            lines.append("the gradient came in like this: what made it lies behind the output of the model")
        if self.surfaced is not None:
            lines.append(self.surfaced)
        if self.place.is_overflow:
            lines.append(self._nearness())
        if self.cause is not None:
            lines.append(f"likely cause: {self.cause}")
        if not self.certain:
            lines.append("suspect: the output of the model has neither NaN nor +inf; it may be meant")
        return lines

    def _nearness(self) -> str:
        largest, limit = self.place.largest, self.place.limit
        if largest is None:
            return f"nothing else in it is finite; {self.place.dtype} holds up to {limit:.5g}"
        share = largest / limit
        told = f"{share:.1%}" if share >= 0.001 else f"{share:.0e}"
        near = "near to" if share >= NEAR else "far from"
        return (
            f"the largest finite magnitude beside it is {largest:.5g}, {told} of what {self.place.dtype} holds "
            f"({limit:.5g}): {near} overflow"
        )
