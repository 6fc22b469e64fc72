"""Fixtures for patches: a module to patch, a check that remembers, and a look at what was left behind."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from patch_recorder import MakeModule, Recorder

from llm_op_guard.install.patch import sweep


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    yield
    assert sweep() == 0


@pytest.fixture
def seen() -> Recorder:
    return Recorder()


@pytest.fixture
def make_module(tmp_path: Path) -> Iterator[MakeModule]:
    """Makes a module of a source text, importable by name."""
    made: list[str] = []

    def make(source: str) -> ModuleType:
        name = f"patched_{len(made)}"
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        made.append(name)
        return module

    yield make
    for name in made:
        del sys.modules[name]
