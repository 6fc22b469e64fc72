"""Builds the native checks where there is a C++ compiler; without one the package checks in Python."""

import sysconfig

from setuptools import Extension, setup

CHECK = Extension(
    "llm_op_guard.native._check",
    sources=["src/llm_op_guard/native/check.cpp"],
    depends=["src/llm_op_guard/native/dlpack.h"],
    extra_compile_args=["-std=c++17", "-O2", "-fvisibility=hidden"],
    define_macros=[("Py_LIMITED_API", "0x030b0000")],
    py_limited_api=True,
    optional=True,
)
# A Python without the global lock has no limited API.
HAS_LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[CHECK] if HAS_LIMITED_API else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if HAS_LIMITED_API else {},
)
