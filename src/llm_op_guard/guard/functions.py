"""What the arithmetic and the functions of the language do. Used by the compiled check and by `explain` alike.

Value functions (cost class B) are not here: `register` receives them from the stage that has them.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from llm_op_guard.contract.solve import Undo
from llm_op_guard.contract.vocabulary import FUNCTIONS
from llm_op_guard.frozen import frozen
from llm_op_guard.guard import memory
from llm_op_guard.guard.call import answer_key
from llm_op_guard.guard.reading import Broken, NotApplicable, is_a, is_plain_sequence, is_tensor, shape_of

# Larger results stand for no size, bound or count, and could take all memory.
_MOST_BITS = 1 << 20
# Python refuses to write much longer numbers.
_MOST_BITS_TOLD = 1024
_MOST_CHARACTERS = 10_000
_MAX_EXPONENT = 256
_MAX_BASE_BITS = 64
_MAX_DIVISORS_OF = 1 << 24


def divide(a: Any, b: Any) -> Any:
    """`a / b`: exact between integers, plain with a float; never text formatting."""
    if isinstance(a, str):
        raise NotApplicable
    if b == 0:
        raise Broken(f"{_told(a)} / {_told(b)} divides by zero")
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    if a % b != 0:
        raise Broken(f"{_told(a)} / {_told(b)} is not a whole number")
    return a // b


def floor_divide(a: Any, b: Any) -> Any:
    """`a // b`."""
    if b == 0:
        raise Broken(f"{_told(a)} // {b} divides by zero")
    return a // b


def modulo(a: Any, b: Any) -> Any:
    """`a % b`; never text formatting."""
    if isinstance(a, str):
        raise NotApplicable
    if b == 0:
        raise Broken(f"{_told(a)} % {b} divides by zero")
    return a % b


def add(a: Any, b: Any) -> Any:
    """`a + b` between numbers, or between texts as those of a hint; never a long text or a sequence."""
    if isinstance(a, str) and isinstance(b, str) and len(a) + len(b) <= _MOST_CHARACTERS:
        return a + b
    return _bounded(_number(a) + _number(b))


def multiply(a: Any, b: Any) -> Any:
    """`a * b` between numbers; never repetition of a text or a sequence."""
    return _bounded(_number(a) * _number(b))


def _number(value: Any) -> Any:
    if isinstance(value, str | tuple):
        raise NotApplicable
    return value


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise NotApplicable
    return value


def _told(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS_TOLD:
        return f"an integer of {value.bit_length()} bits"
    return str(value)


def power(a: Any, b: Any) -> Any:
    """`a ** b`, as far as a size or a bound can go."""
    if isinstance(a, int) and isinstance(b, int) and (a.bit_length() > _MAX_BASE_BITS or abs(b) > _MAX_EXPONENT):
        raise NotApplicable
    if a == 0 and b < 0:
        raise Broken(f"{a} ** {b} divides by zero")
    return a**b


def undone(value: Any, *steps: tuple[Undo, Any]) -> Any:
    """An observed size, taken back through the operations of a dimension expression to the unknown; see `undo`.

    All operands are at hand: one that does not apply comes before one that leaves no size.
    """
    for operation, operand in steps:
        value = undo(operation, value, operand)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, float):
        raise Broken(f"it would be {value}")
    if value < 0:
        raise Broken(f"it would be {value}, and no size is negative")
    return value


def undo(operation: Undo, value: Any, operand: Any) -> Any:
    """One step from an observed size back to the unknown in a dimension expression.

    Raises NotApplicable where any value of the unknown would do (0 * D == 0), Broken where none does.
    """
    match operation:
        case "plus":
            return value + operand
        case "minus":
            return value - operand
        case "from":
            return operand - value
        case "times":  # of a division
            if operand == 0:
                raise Broken("it divides by zero")
            return value * operand
        case "negate":
            return -value
        case "over":
            return whole(value, operand)
        case "under":
            return whole(operand, value)


def whole(a: Any, b: Any) -> Any:
    """The whole number x with `x * b == a`, as `undo` needs it."""
    if b == 0:
        if a == 0:
            raise NotApplicable
        raise Broken(f"{_told(a)} is no multiple of {_told(b)}")
    return divide(a, b)


def broadcasts(shape: Any, target: Any) -> bool:
    """Whether `shape` broadcasts to `target` without making it larger."""
    shape, target = _as_shape(shape), _as_shape(target)
    if len(shape) > len(target):
        return False
    # zip stops at the shorter: missing leading dimensions broadcast
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(target), strict=False))


def _as_shape(value: Any) -> Any:
    if is_tensor(value):
        return value.shape
    if isinstance(value, tuple):
        return value
    raise NotApplicable


def ceil_divide(a: Any, b: Any) -> Any:
    """`a / b` rounded up."""
    if b == 0:
        raise Broken(f"ceildiv({a}, {b}) divides by zero")
    return -(-a // b)


def divisors(n: Any) -> tuple[int, ...]:
    """The divisors of n, ascending."""
    if not isinstance(n, int) or not 0 < n <= _MAX_DIVISORS_OF:
        raise NotApplicable
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def numel(x: Any) -> int:
    """The number of elements of a tensor."""
    count = 1
    for size in shape_of(x):
        count *= size
    return count


def stride(x: Any, i: Any) -> int:
    """The stride of dimension i, in elements."""
    rank = len(shape_of(x))
    if not -rank <= i < rank:
        raise NotApplicable
    return int(strides(x)[i])


def dense(x: Any) -> bool:
    """Whether elements of the last dimension lie side by side; strides of dimensions of size 1 mean nothing."""
    shape = shape_of(x)
    return len(shape) == 0 or shape[-1] <= 1 or strides(x)[-1] == 1


def aligned(x: Any, bytes: int) -> bool:  # noqa: A002 - as in the language
    """Whether the first element lies at an address that so many bytes divide."""
    if bytes <= 0:
        raise NotApplicable
    return numel(x) == 0 or address(x) % bytes == 0


def address(x: Any) -> int:
    """Where the first element of a tensor lies; raises NotApplicable for one that says nothing of that kind."""
    strides(x)  # what has none has its elements in several places
    if x.device.type not in ("cpu", "cuda"):
        raise NotApplicable
    return int(x.data_ptr())


def strides(x: Any) -> Any:
    """The strides of a tensor; raises NotApplicable for a layout that has none."""
    # Sparse and other layouts have none; a sparse matrix answers all the same.
    if str(x.layout) != "torch.strided":
        raise NotApplicable
    return x.stride()


def length(x: Any) -> int:
    """The length of a shape, tuple, list, dict or text."""
    for kind in (dict, str):
        if is_a(x, kind):
            return kind.__len__(x)  # whatever its class makes of it
    if not is_plain_sequence(x):
        raise NotApplicable
    return len(x)


def minimum(*values: Any) -> Any:
    """The smallest of several numbers."""
    return min(_numbers(values))


def maximum(*values: Any) -> Any:
    """The largest of several numbers."""
    return max(_numbers(values))


def _numbers(values: tuple[Any, ...]) -> tuple[Any, ...]:
    flat = values[0] if len(values) == 1 and isinstance(values[0], tuple) else values
    if not flat:
        raise NotApplicable
    return flat


def magnitude(x: Any) -> Any:
    """The absolute value of a number."""
    return abs(x)


def largest_number(dtype: Any) -> Any:
    """The largest number of a dtype; raises NotApplicable for what is none, or has none."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(dtype, torch.dtype) or dtype.is_complex or dtype is torch.bool:
        raise NotApplicable
    return (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max


def arch(device: Any) -> tuple[int, int]:
    """The compute capability of a CUDA device; raises NotApplicable for any other."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(device, "type", None) != "cuda" or torch.version.hip is not None:
        raise NotApplicable
    major, minor = torch.cuda.get_device_capability(device)
    return int(major), int(minor)


def version(library: Any) -> tuple[int, ...]:
    """The version of an imported library, its leading numbers; raises NotApplicable where there is none."""
    found = re.match(r"\d+(\.\d+)*", str(getattr(sys.modules.get(str(library)), "__version__", "")))
    if found is None:
        raise NotApplicable
    return tuple(int(part) for part in found.group().split("."))


class Spelling(str):
    """A key that is nearly a name of the contract, and so may be shown."""


# Keyword arguments are few and their names short; whatever else is a dict is not gone through for long.
_MOST_KEYS = 128
_LONGEST_NAME = 64
_TEXT = frozenset({str})


def misspelt(mapping: Any, *names: Any) -> Spelling | None:
    """The first key that is nearly one of these names, where that one is absent; None where there is none."""
    if not is_a(mapping, dict) or dict.__len__(mapping) > _MOST_KEYS:
        raise NotApplicable
    if type(mapping) is dict and _TEXT.issuperset(map(type, mapping)):
        keys = tuple(mapping)
    else:
        keys = tuple(str.__str__(key) for key in dict.keys(mapping) if is_a(key, str))
    if max(map(len, keys), default=0) > _LONGEST_NAME + 2:  # too long for any of the names
        keys = tuple(key for key in keys if len(key) <= _LONGEST_NAME + 2)
    return _first_misspelt(keys, names)


@functools.lru_cache(maxsize=256)  # a function is called with the same keywords over and over
def _first_misspelt(keys: tuple[str, ...], names: tuple[Any, ...]) -> Spelling | None:
    if not all(type(name) is str for name in names):
        raise NotApplicable
    absent = [name for name in names if name not in keys and len(name) <= _LONGEST_NAME]
    for key in keys:
        if key not in names and any(_is_nearly(key, name, 2 if len(name) >= 8 else len(name) // 5) for name in absent):
            return Spelling(key)
    return None


def _is_nearly(a: str, b: str, edits: int) -> bool:
    """Whether a becomes b by so many letters put in, left out, changed or swapped with the next."""
    # An edit brings one letter that was not there at most: most words are told apart by that.
    if abs(len(a) - len(b)) > edits or len(set(a).difference(b)) > edits:
        return False
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    a, b = a[same:], b[same:]
    if not a or not b:
        return True  # what one has left over is no more than the edits
    return edits > 0 and (
        _is_nearly(a[1:], b[1:], edits - 1)
        or _is_nearly(a[1:], b, edits - 1)
        or _is_nearly(a, b[1:], edits - 1)
        or (a[:2] == b[1::-1] and _is_nearly(a[2:], b[2:], edits - 1))
    )


def ends_with(text: Any, ending: Any) -> bool:
    """Whether a text ends with another."""
    if not is_a(text, str) or not is_a(ending, str):
        raise NotApplicable
    return str.endswith(text, ending)


# `has` and `get` take paths and are handled where expressions are read.
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "len": length,
    "min": minimum,
    "max": maximum,
    "abs": magnitude,
    "ceildiv": ceil_divide,
    "divisors": divisors,
    "numel": numel,
    "dense": dense,
    "aligned": aligned,
    "stride": stride,
    "broadcasts": broadcasts,
    "largest": largest_number,
    "arch": arch,
    "version": version,
    "misspelt": misspelt,
    "ends_with": ends_with,
    "recall": memory.recall,
    "identity": memory.identity,
}


@frozen
class Element:
    """One element of an argument of a value function, by the argument's published name; of a row, its index only."""

    argument: str
    index: tuple[int, ...]
    value: Any = None


@frozen
class Located:
    """Where a value rule is broken, or a value stands: the first element, row or pair; how many such, of how many.

    `note` is what else there is to say of the tensor.
    """

    elements: tuple[Element, ...]
    count: int
    total: int
    note: str = ""


# From this share of the largest number of a dtype on, the next sum or product may well be infinite.
NEAR = 0.25

# Of the arguments of a value function; None where there is nothing to point to.
Locator = Callable[..., Located | None]
LOCATORS: dict[str, Locator] = {}


def tensor_attribute(owner: Any, name: str) -> Any:
    """The shape, dtype or device of what is meant to be a tensor; raises NotApplicable for anything else."""
    if not is_tensor(owner):
        raise NotApplicable
    return getattr(owner, name)


class StandIn(SimpleNamespace):
    """An object of a call that was made from data; `_answers` are what functions of contracts say of it."""


def _of_stand_ins_too(name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """A function about an object, that of a stand-in says what is recorded, or does not apply."""

    @functools.wraps(implementation)
    def ask(owner: Any, *arguments: Any) -> Any:
        if type(owner) is not StandIn:
            return implementation(owner, *arguments)
        answers = owner.__dict__.get("_answers", {})
        key = answer_key(name, arguments)
        if key not in answers:
            raise NotApplicable
        return answers[key]

    return ask


def register(name: str, implementation: Callable[..., Any], locator: Locator | None = None) -> None:
    """Give a function of the language its implementation and, for a value function, what finds the element meant."""
    about_object = FUNCTIONS[name].arguments[0][1] == "owner"
    IMPLEMENTATIONS[name] = _of_stand_ins_too(name, implementation) if about_object else implementation
    if locator is not None:
        LOCATORS[name] = locator
