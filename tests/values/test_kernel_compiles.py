"""The Triton kernel for devices that are not here: what it is compiled to, without one. `make triton` runs this."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: make triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from llm_op_guard.values import kernel, ring  # noqa: E402 - imports Triton


def compiled(capability: int, *dtypes: str, pairs: bool) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = sum({1 << ring.KINDS[name][0] for name in dtypes})
    sizes = 0
    for name in dtypes:
        sizes |= ring.KINDS[name][1]
    constants = {"KINDS": kinds, "SIZES": sizes, "PAIRS": pairs, "TILE": kernel.TILE}
    signature = {"memory": "*i64", "scratch": "*i64", "slot": "i32", **dict.fromkeys(constants, "constexpr")}
    aligned = {(at,): [["tt.divisibility", 16]] for at in (0, 1)}
    source = ASTSource(kernel.probe, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kernel.OPTIONS)


def writes_the_number_last(ptx: str) -> None:
    last = ptx.index("atom.global.sys.release.exch.b64")
    assert "st.global" not in ptx[last:], "nothing is written behind the number of the call"
    assert ".ftz" not in ptx, "subnormal numbers are numbers"
    assert not re.search(r"\.local\s", ptx), "nothing spills"


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int64"])
def test_it_reads_16_bytes_at_once_and_writes_the_number_last(capability: int, dtype: str) -> None:
    made = compiled(capability, dtype, pairs=False)
    ptx = made.asm["ptx"]
    assert f".target sm_{capability}" in ptx and made.asm["cubin"]
    assert re.search(r"ld\.global\.v4\.b32|ld\.global\.v2\.b64", ptx), "tiles are read in steps of 16 bytes"
    writes_the_number_last(ptx)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_dtypes_and_two_questions_in_one(capability: int) -> None:
    made = compiled(capability, *ring.KINDS, pairs=True)
    assert made.asm["cubin"]
    writes_the_number_last(made.asm["ptx"])
