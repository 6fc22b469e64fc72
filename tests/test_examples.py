"""The Python in README.md and docs/ runs, and does what the page says: see scripts/examples.py."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from pathlib import Path

import pytest

import llm_op_guard as og

ROOT = Path(__file__).resolve().parents[1]

_spec = importlib.util.spec_from_file_location("examples_of_the_pages", ROOT / "scripts" / "examples.py")
assert _spec is not None and _spec.loader is not None
pages = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = pages  # dataclasses look their module up
_spec.loader.exec_module(pages)

ALL = [example for page in pages.PAGES for example in pages.examples_in(page.read_text(encoding="utf-8"), page.name)]


def check(example: pages.Example, folder: Path) -> None:
    if example.raises is None:
        pages.run(example, folder)
        return
    with pytest.raises(Exception) as caught:
        pages.run(example, folder)
    assert example.raises in {cls.__name__ for cls in type(caught.value).__mro__}
    assert example.marked_line in {e.lineno + 1 for e in caught.traceback if str(e.path) == str(folder / "example.py")}
    if example.message is not None:
        assert str(caught.value) == example.message.rstrip("\n"), "the page shows another message; run: make docs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("example", ALL, ids=lambda example: example.name)
def test_example_runs(example: pages.Example, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if "transformers" in example.code:
        pytest.importorskip("transformers")
    check(example, tmp_path)


def test_the_pages_have_examples() -> None:
    assert {example.name.partition(":")[0] for example in ALL} >= {"README.md", "language.md", "production.md"}


def test_the_readme_shows_whole_diagnoses() -> None:
    assert sum(example.message is not None for example in ALL if example.name.startswith("README.md")) >= 2


PAGE = "```python\nraise ValueError('no')  # raises ValueError\n```\n\n```text\nno\n```\n"


def test_a_right_example_passes(tmp_path: Path) -> None:
    (example,) = pages.examples_in(PAGE, "page")
    check(example, tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        PAGE.replace("text\nno", "text\nyes"),
        PAGE.replace("raise ValueError('no')", "pass"),
        PAGE.replace("# raises ValueError", "# raises KeyError"),
        PAGE.replace("raise ValueError", "int('x')\nraise ValueError"),
    ],
)
def test_a_wrong_example_fails(wrong: str, tmp_path: Path) -> None:
    (example,) = pages.examples_in(wrong, "page")
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(example, tmp_path)


def test_a_message_is_written_anew() -> None:
    assert pages.renewed(PAGE.replace("text\nno", "text\nold"), "page") == PAGE


def modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages(og.__path__, "llm_op_guard.")]
    return [name for name in names if not name.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_a_module_can_be_imported_and_its_examples_run(name: str) -> None:
    if name == "llm_op_guard.values.kernel":
        pytest.importorskip("triton", reason="Triton is not installed: make triton")
    module = importlib.import_module(name)
    # doctest takes 50 ms to look through a module that has none.
    if str(module.__file__).endswith(".py") and ">>>" in inspect.getsource(module):
        found = doctest.testmod(module)
        assert (found.failed, found.attempted > 0) == (0, True)
