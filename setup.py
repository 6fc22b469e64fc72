"""Builds the native checks where there is a C++ compiler; without one the package checks in Python."""

import runpy
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/llm_op_guard/native")
SOURCES = runpy.run_path(str(NATIVE / "sources.py"))["digest"](NATIVE)
CHECK = Extension(
    "llm_op_guard.native._check",
    sources=sorted(str(path) for path in NATIVE.glob("*.cpp")),
    depends=sorted(str(path) for path in NATIVE.glob("*.h")),
    extra_compile_args=["-std=c++17", "-O2", "-fvisibility=hidden"],
    define_macros=[("Py_LIMITED_API", "0x030b0000"), ("LLM_OP_GUARD_SOURCES", f'"{SOURCES}"')],
    py_limited_api=True,
    optional=True,
)
# A Python without the global lock has no limited API.
HAS_LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[CHECK] if HAS_LIMITED_API else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if HAS_LIMITED_API else {},
)
