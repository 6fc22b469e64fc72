"""Source → function: the only `exec` of the library.

The source is registered with `linecache`, so that a debugger or a traceback can step into a guard.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import linecache
import weakref
from types import CodeType, FunctionType
from typing import Any, cast

from llm_op_guard.contract.vocabulary import DTYPE_NAMES
from llm_op_guard.guard import functions, memory, readable, reading
from llm_op_guard.guard.evaluate import dtype_values, dtypes_named, evaluated
from llm_op_guard.guard.source import CHECK, CheckSource

_serial = itertools.count(1)


def compile_function(source: str, name: str, label: str, namespace: dict[str, Any]) -> FunctionType:
    """Run `source`, which defines the function `name`, in `namespace` and return that function.

    `label` is what a traceback shows in place of a file: `<llm-op-guard LABEL #1>`.
    """
    filename = f"<llm-op-guard {label} #{next(_serial)}>"
    exec(_named(_compiled(source), filename), namespace)  # noqa: S102 - the one place; sources come from our generators
    function = cast(FunctionType, namespace[name])
    keep_source(function.__code__, source)
    return function


@functools.lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    return compile(source, "<llm-op-guard>", "exec")


def _named(code: CodeType, filename: str) -> CodeType:
    """The same code, and that of the functions in it, from another file."""
    inner = (_named(part, filename) if isinstance(part, CodeType) else part for part in code.co_consts)
    return code.replace(co_filename=filename, co_consts=tuple(inner))


def keep_source(code: CodeType, source: str) -> None:
    """Show `source` for the lines of `code` in tracebacks and debuggers, for as long as `code` lives."""
    filename = code.co_filename
    # No mtime: linecache.checkcache leaves such an entry alone.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(code, linecache.cache.pop, filename, None)


def compile_check(source: CheckSource, label: str, hooks: dict[str, Any]) -> FunctionType:
    """The function for a check's source. `hooks` are what it calls when it does not come to a plain yes."""
    used = source.used
    if "_Tensor" in used:
        # A guard may be made before its program imports torch; a contract with tensors in it needs the real class.
        with contextlib.suppress(ImportError):
            importlib.import_module("torch")
    namespace: dict[str, Any] = {
        **_NAMESPACE,
        **{f"_fn_{name}": implementation for name, implementation in functions.IMPLEMENTATIONS.items()},
        **{f"_is_{kind}": test for kind, test in reading.SCALAR_TESTS.items()},
        **{name: frozenset().union(*map(dtype_values, dtypes)) for name, dtypes in source.dtype_sets.items()},
        **{f"_dtype_{name}": dtypes_named(name) for name in DTYPE_NAMES if f"_dtype_{name}" in used},
        **source.constants,
        "_Tensor": reading.tensor_class(),
        **hooks,
    }
    return compile_function(source.text, CHECK, label, namespace)


_NAMESPACE: dict[str, Any] = {
    "_Broken": reading.Broken,
    "_inapplicable": reading.INAPPLICABLE,
    "_unjudged": (*reading.INAPPLICABLE, reading.Broken),
    "_forget": memory.forget,
    "_remember": memory.remember,
    "_unset": reading.UNSET,
    "_agreed": reading.agreed,
    "_apart": reading.apart,
    "_as_index": reading.as_index,
    "_attribute": reading.attribute,
    "_tensor_attribute": functions.tensor_attribute,
    "_compared": reading.compared,
    "_attribute_or_unset": reading.optional_attribute,
    "_evaluated": evaluated,
    "_item": reading.item,
    "_part": readable.part,
    "_kept": reading.kept,
    "_known": reading.known,
    "_parts": reading.parts,
    "_path_value": reading.path_value,
    "_plain": reading.plain,
    "_there": reading.there,
    "_present": reading.present,
    "_snapshot": reading.snapshot,
    "_tensor_at": reading.tensor_at,
    "_whole": reading.whole,
    "_device_type": reading.device_type,
    "_add": functions.add,
    "_divide": functions.divide,
    "_floor_divide": functions.floor_divide,
    "_modulo": functions.modulo,
    "_multiply": functions.multiply,
    "_power": functions.power,
    "_undone": functions.undone,
}
