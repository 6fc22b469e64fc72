"""The published tables of the language: dtypes, device types, scalar types, functions."""

from __future__ import annotations

from typing import Literal

from llm_op_guard.contract.model import CostClass, DtypeName, DtypeSet
from llm_op_guard.frozen import frozen

DTYPE_NAMES = (
    "float64", "float32", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
    "complex128", "complex64", "complex32",
)  # fmt: skip

DTYPE_SETS: dict[str, str] = {
    "floating": "every real floating-point dtype, float8 included",
    "half": "float16 and bfloat16",
    "integer": "signed and unsigned integers, not bool",
    "boolean": "bool",
    "complexes": "complex dtypes",
    "any": "every dtype",
}

DEVICE_TYPES = ("cpu", "cuda", "xpu", "npu", "mps", "hpu", "xla", "meta")

SCALAR_TYPES: dict[str, str] = {
    "int": "an integer (NumPy integers and bool included)",
    "float": "a real number (integers included)",
    "bool": "True or False",
    "str": "text",
    "dict": "a dict",
    "callable": "anything that can be called",
    "object": "anything",
}

# What may be read from a tensor.
TENSOR_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad")

ArgumentKind = Literal["tensor", "path", "owner", "int", "number", "shape", "sequence", "object", "string", "text"]

# Arguments of these kinds are handed over as they are; all others must be plain values.
RAW_KINDS = ("tensor", "owner", "shape", "sequence")


@frozen
class Function:
    """One function of the language: `arguments` are (name, kind); those past `required` may be left out.

    What `gives_tensor` is an argument of other value functions and nothing else. What is `eager` has no meaning while a
    program is traced. Functions `of_extremes` ask for no more of a tensor than its lowest and highest element, or
    whether it has any: a check that has several of them reads the tensor once.
    """

    name: str
    cost_class: CostClass
    arguments: tuple[tuple[str, ArgumentKind], ...]
    meaning: str
    required: int | None = None
    variadic: bool = False
    gives_tensor: bool = False
    eager: bool = False
    of_extremes: bool = False

    @property
    def signature(self) -> str:
        """How the function is written, for messages and tables."""
        names = [name if i < self.least else f"{name}=…" for i, (name, _) in enumerate(self.arguments)]
        return f"{self.name}({', '.join(names)}{', …' if self.variadic else ''})"

    @property
    def least(self) -> int:
        """How many arguments must be given."""
        return len(self.arguments) if self.required is None else self.required


FUNCTIONS: dict[str, Function] = {
    function.name: function
    for function in (
        Function("has", "A", (("path", "path"),), "the path exists and is not None"),
        Function(
            "get", "A", (("path", "path"), ("default", "object")),
            "the path, or a default where it is absent or None",
        ),
        Function("len", "A", (("sequence", "sequence"),), "the length of a shape, tuple, list, dict or string"),
        Function("min", "A", (("first", "number"),), "the smallest argument, or item of the only one", variadic=True),
        Function("max", "A", (("first", "number"),), "the largest argument, or item of the only one", variadic=True),
        Function("abs", "A", (("x", "number"),), "the absolute value"),
        Function("ceildiv", "A", (("a", "int"), ("b", "int")), "a / b rounded up"),
        Function("divisors", "A", (("n", "int"),), "the divisors of n, ascending"),
        Function("numel", "A", (("x", "tensor"),), "the number of elements"),
        Function("dense", "A", (("x", "tensor"),), "elements of the last dimension lie side by side (or it has one)"),
        Function("stride", "A", (("x", "tensor"), ("i", "int")), "the stride of dimension i, in elements"),
        Function(
            "aligned", "A", (("x", "tensor"), ("bytes", "int")),
            "the first element lies at an address that so many bytes divide; holds for an empty tensor, does not apply "
            "to one without memory, as on meta",
            eager=True,
        ),
        Function(
            "broadcasts", "A", (("shape", "shape"), ("target", "shape")),
            "the shape broadcasts to the target without making it larger",
        ),
        Function(
            "recall", "A", (("owner", "owner"), ("name", "text")),
            "a fact that an earlier call remembered about an object; does not apply where there is none",
            eager=True,
        ),
        Function(
            "identity", "A", (("owner", "owner"),),
            "what stands for an object and for no other, for `remember` and `recall`",
            eager=True,
        ),
        Function(
            "finite", "B", (("x", "tensor"),), "no element is NaN or infinite; holds for an empty tensor",
            of_extremes=True,
        ),
        Function(
            "within", "B", (("x", "tensor"), ("low", "number"), ("high", "number"), ("allow", "object")),
            "every element is at least low and below high, or is one of the sentinels given as allow=; "
            "holds for an empty tensor, and for no other where a bound is NaN",
            required=3, of_extremes=True,
        ),
        Function(
            "lowest", "B", (("x", "tensor"),), "the smallest element; does not apply to an empty tensor",
            of_extremes=True,
        ),
        Function(
            "highest", "B", (("x", "tensor"),), "the largest element; does not apply to an empty tensor",
            of_extremes=True,
        ),
        Function(
            "absmax", "B", (("x", "tensor"),), "the largest magnitude; does not apply to an empty tensor",
            of_extremes=True,
        ),
        Function("first", "B", (("x", "tensor"),), "the first element, in row order; not of an empty tensor"),
        Function("last", "B", (("x", "tensor"),), "the last element, in row order; not of an empty tensor"),
        Function("count", "B", (("x", "tensor"), ("value", "number")), "how many elements equal the value"),
        Function(
            "nondecreasing", "B", (("x", "tensor"),), "along the last dimension no element is below the one before"
        ),
        Function("unique", "B", (("x", "tensor"),), "no element occurs twice"),
        Function(
            "only", "B", (("x", "tensor"), ("value", "number")), "every element is one of the values", variadic=True
        ),
        Function("all_true", "B", (("x", "tensor"),), "every element is true (not 0)"),
        Function("any_per_row", "B", (("x", "tensor"),), "along the last dimension some element is true (not 0)"),
        Function(
            "live_rows", "B", (("mask", "tensor"),),
            "every row of an attention mask keeps a key: what is not 0 in a mask of bools or integers; in an additive "
            "one what is above -1e8 (in float16 -32752, in float8 half the lowest number), unless a row of several "
            "keys is filled with one number of -9984 or below (bfloat16's -1e4)",
        ),
        Function(
            "equal", "B", (("a", "tensor"), ("b", "tensor"), ("where", "tensor")),
            "of one shape and equal in every element, or in those where a third tensor is true",
            required=2,
        ),
        Function("negated", "B", (("mask", "tensor"),), "true where the mask is not", gives_tensor=True),
        Function(
            "consecutive", "B", (("x", "tensor"),),
            "what x would be if it counted up by one from its first element, along the last dimension; does not apply "
            "where that is so large that it may have been rounded (bfloat16: from 256 on)",
            gives_tensor=True,
        ),
        Function(
            "positions_of", "B", (("mask", "tensor"),),
            "the position of each token that a padding mask keeps, counted from 0 in its row",
            gives_tensor=True,
        ),
        Function(
            "taken", "B", (("x", "tensor"), ("index", "tensor")),
            "the rows of x that a tensor of whole numbers picks, along the first dimension; does not apply where one "
            "is not there",
            gives_tensor=True,
        ),
        Function("largest", "A", (("dtype", "object"),), "the largest number of a dtype"),
        Function(
            "arch", "A", (("device", "object"),),
            "the compute capability of a CUDA device as (major, minor); does not apply to other devices",
        ),
        Function("version", "A", (("library", "object"),), "the version of an imported library as a tuple of numbers"),
        Function(
            "misspelt", "A", (("mapping", "owner"), ("name", "text")),
            "the first key of a dict that is nearly one of these names, which is itself not there, else None: two "
            "letters off at most, one where the name has fewer than 8 letters, none where it has fewer than 5; name "
            "both of a pair such as top_k and top_p, or the other is taken for a misspelling",
            variadic=True,
            eager=True,
        ),
        Function("ends_with", "A", (("text", "string"), ("ending", "string")), "the text ends with the other"),
        Function("surrogates", "B", (("text", "string"),), "how many lone surrogates a text has: it has no UTF-8"),
        Function(
            "controls", "B", (("text", "string"),),
            "how many control characters a text has, tab, line feed and carriage return left out",
        ),
        Function(
            "longest_run", "B", (("text", "string"),), "the length of the longest stretch of a text without whitespace"
        ),
    )
}  # fmt: skip


# Those of the language itself: their code is ours, and is traced as part of a program that is compiled.
BUILT_IN = frozenset(FUNCTIONS)


def declare(function: Function) -> None:
    """Add a function to the language: what an integration can read that the language cannot."""
    FUNCTIONS[function.name] = function


def dtype_names(dtype: DtypeName | DtypeSet) -> frozenset[str]:
    """The exact dtype names that a name or set of dtypes stands for."""
    if isinstance(dtype, DtypeName):
        return frozenset({dtype.name})
    match dtype.name:
        case "any":
            return frozenset(DTYPE_NAMES)
        case "half":
            return frozenset({"float16", "bfloat16"})
        case "boolean":
            return frozenset({"bool"})
        case "floating":
            return frozenset(name for name in DTYPE_NAMES if name.startswith(("float", "bfloat")))
        case "integer":
            return frozenset(name for name in DTYPE_NAMES if name.startswith(("int", "uint")))
        case _:
            return frozenset(name for name in DTYPE_NAMES if name.startswith("complex"))


# Words with a meaning of their own; no parameter, symbol or assigned name can be spelt so.
KEYWORDS = frozenset({"require", "ensure", "remember", "why", "like", "optional", "returns"})
