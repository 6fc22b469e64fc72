"""The shape of the code: who imports whom, and what may stand where. Read with `ast`; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "llm_op_guard"

# A stage imports itself and those before it. `__init__` is what users import: the stages behind it are programs.
STAGES = [
    "errors",
    "frozen",
    "log",
    "policy",
    "contract",
    "native",
    "guard",
    "values",
    "install",
    "integrations",
    "faults",
    "waivers",
    "report",
    "predicates",
    "verification",
    "ingress",
    "nonfinite",
    "api",
    "__init__",
    "demo",
    "doctor",
    "checking",
    "formatting",
    "catalogue",
    "injecting",
    "replaying",
    "benching",
    "testing",
    "run",
    "seeking",
    "pytest_plugin",
    "startup",
    "cli",
    "__main__",
]
FRAMEWORKS = {"torch", "transformers", "numpy"}
MOST_LINES = 500
VAGUE = {"utils", "util", "helpers", "helper", "manager", "base", "common", "misc"}

MAY_EXECUTE = {"guard/compile.py"}
MAY_WRITE = ("cli.py", "report/")
MAY_EXIT = {"cli.py", "__main__.py"}
# How to draw is the terminal's business (NO_COLOR, TERM); what to check is the policy's.
MAY_READ_ENVIRONMENT = {"policy.py", "report/terminal.py"}


def stage_of(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


def breaches(file: str, source: str) -> Iterator[str]:
    """What is wrong with a file of the package; `file` is its path below the package."""
    tree = ast.parse(source)
    ignored = {id(node) for branch in _type_checking(tree) for node in ast.walk(branch)}
    nodes = [node for node in ast.walk(tree) if id(node) not in ignored]
    yield from _layering(file, nodes)
    yield from _top_level_frameworks(tree, ignored)
    yield from _calls(file, nodes)
    yield from _attributes(file, nodes)
    if Path(file).stem in VAGUE or any(part in VAGUE for part in Path(file).parts):
        yield "a name that says nothing"
    if (lines := source.count("\n")) > MOST_LINES:
        yield f"{lines} lines; at most {MOST_LINES}"


def _type_checking(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from node.body


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        # `from a import b`: b may be a module of a.
        return [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return []


def _layering(file: str, nodes: list[ast.AST]) -> Iterator[str]:
    own = stage_of(file)
    if own not in STAGES:
        yield f"{own} is no known stage; give it a place in STAGES"
        return
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"line {node.lineno}: relative import"
        for name in _imported(node):
            package, _, rest = name.partition(".")
            if package != "llm_op_guard":
                continue
            stage = rest.partition(".")[0]
            stage = stage if stage in STAGES else "__init__"
            if STAGES.index(stage) > STAGES.index(own):
                yield f"line {node.lineno}: {own} imports {stage}, which comes after it"


def _top_level_frameworks(tree: ast.Module, ignored: set[int]) -> Iterator[str]:
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        for name in _imported(node):
            if name.partition(".")[0] in FRAMEWORKS and id(node) not in ignored:
                yield f"line {node.lineno}: {name} is imported when the module is"
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


def _calls(file: str, nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in ("exec", "eval", "compile") and file not in MAY_EXECUTE:
            yield f"line {node.lineno}: {name}() stands in guard/compile.py only"
        if name.endswith("dataclass") and any(keyword.arg == "frozen" for keyword in node.keywords):
            yield f"line {node.lineno}: a frozen class is made with @frozen (docs/decisions/0009)"
        if name == "print" and not file.startswith(MAY_WRITE):
            yield f"line {node.lineno}: print() stands in cli.py and report/ only"
        if name in ("exit", "quit", "os._exit", "os.abort") and file not in MAY_EXIT:
            yield f"line {node.lineno}: only cli.py ends the process"


def _attributes(file: str, nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        names = _imported(node) if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            where = f"line {getattr(node, 'lineno', 0)}: {name}"
            if name in ("sys.stdout", "sys.stderr", "sys.__stdout__") and not file.startswith(MAY_WRITE):
                yield f"{where} is for cli.py and report/ only"
            if name == "sys.exit" and file not in MAY_EXIT:
                yield f"{where} is for cli.py only"
            if name in ("os.environ", "os.getenv", "os.putenv") and file not in MAY_READ_ENVIRONMENT:
                yield f"{where} is for policy.py only"


FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("file", FILES)
def test_house_rules(file: str) -> None:
    assert list(breaches(file, FILES[file].read_text(encoding="utf-8"))) == []


def test_exec_stands_in_one_place() -> None:
    found = [file for file, path in FILES.items() if "    exec(" in path.read_text(encoding="utf-8")]
    assert found == ["guard/compile.py"]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("contract/parse.py", "from llm_op_guard.guard import plan"),
        ("contract/parse.py", "def f():\n    import llm_op_guard.api"),
        ("guard/plan.py", "from llm_op_guard import api"),
        ("guard/plan.py", "from llm_op_guard import Violation"),
        ("values/plain.py", "from llm_op_guard.report.text import render"),
        ("api.py", "from llm_op_guard import cli"),
        ("guard/plan.py", "from . import source"),
        ("mystery.py", ""),
        ("guard/plan.py", "import torch"),
        ("guard/plan.py", "from torch import nn"),
        ("integrations/x.py", "try:\n    import transformers.models\nexcept ImportError:\n    pass"),
        ("demo.py", "class A:\n    import numpy as np"),
        ("guard/plan.py", "exec('1')"),
        ("api.py", "eval('1')"),
        ("contract/parse.py", "compile('1', 'x', 'eval')"),
        ("api.py", "print(1)"),
        ("guard/plan.py", "@dataclass(frozen=True)\nclass A: ..."),
        ("cli.py", "@dataclasses.dataclass(kw_only=True, frozen=True)\nclass A: ..."),
        ("demo.py", "import sys\nsys.stdout.write('')"),
        ("demo.py", "from sys import stderr"),
        ("demo.py", "import sys\nsys.exit(1)"),
        ("run.py", "import os\nos._exit(1)"),
        ("api.py", "import os\nos.environ['X']"),
        ("api.py", "from os import getenv"),
        ("guard/utils.py", ""),
        ("base.py", ""),
        ("guard/plan.py", "\n" * 501),
    ],
)
def test_a_breach_is_found(file: str, source: str) -> None:
    assert list(breaches(file, source))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("errors.py", "if TYPE_CHECKING:\n    from llm_op_guard.guard.violation import Violation"),
        ("guard/plan.py", "from llm_op_guard.policy import Policy\nfrom llm_op_guard.guard.source import X"),
        ("values/plain.py", "def f():\n    import torch"),
        ("contract/parse.py", "import re\nre.compile('x')"),
        ("guard/compile.py", "exec(compile('1', 'x', 'exec'))"),
        ("cli.py", "import sys\nfrom llm_op_guard import __version__, demo\nprint(1)\nsys.exit(0)"),
        ("report/terminal.py", "import os\nos.environ.get('NO_COLOR')"),
        ("guard/plan.py", "@frozen\nclass A: ...\n@dataclass(eq=False)\nclass B: ..."),
        ("api.py", "\n" * 500),
    ],
)
def test_what_is_allowed_passes(file: str, source: str) -> None:
    assert list(breaches(file, source)) == []
