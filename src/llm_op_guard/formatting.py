"""Contract files in one style: that of Python, by Ruff, with their comments; the JSON form indented."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llm_op_guard import api
from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.parse import read_text
from llm_op_guard.errors import ContractError, LlmOpGuardError
from llm_op_guard.report.terminal import Terminal

_RUFF = ("format", "--isolated", "--quiet", "--line-length=120", "--stdin-filename=contract.py", "-")


def main(out: Terminal, complaints: Terminal, files: Sequence[str], *, check_only: bool) -> tuple[int, int]:
    """Format every file in place; how many were (to check only: would be) changed, and how many could not be.

    Raises LlmOpGuardError where Ruff is not installed.
    """
    changed = failed = 0
    for file in files:
        try:
            text = read_text(Path(file))
            neat = formatted(text, file)
            if neat == text:
                continue
            changed += 1
            if not check_only:
                _replace(Path(file), neat)
            out.line(f"{'would format' if check_only else 'formatted'} {file}")
        except (ContractError, OSError) as error:
            failed += 1
            complaints.line(
                str(error) if isinstance(error, ContractError) else f"cannot write {file}: {error.strerror}"
            )
    return changed, failed


def formatted(text: str, file: str) -> str:
    """The text of a contract file in the one style.

    Raises ContractError for a text that is wrong or that Ruff cannot format, LlmOpGuardError where it is not installed.
    """
    before = api.read(text, file)
    if Path(file).suffix == ".json":
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"
    neat = _by_ruff(text, file)
    if _texts(api.read(neat, file)) != _texts(before):
        raise ContractError(
            "would mean something else when formatted, so it was left alone: please report it", file=file
        )
    return neat


def _texts(contracts: dict[str, Contract]) -> list[str]:
    return [contract.text for contract in contracts.values()]


def _by_ruff(text: str, file: str) -> str:
    if importlib.util.find_spec("ruff") is None:
        raise LlmOpGuardError("fmt formats with Ruff, which is not installed: pip install 'llm-op-guard[fmt]'")
    # -P: a file of the current folder that is named like a module of Python is none of its modules.
    command = [sys.executable, "-P", "-m", "ruff", *_RUFF]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    if done.returncode != 0:
        raise ContractError(f"Ruff failed: {done.stderr.decode(errors='replace').strip()}", file=file)
    return done.stdout.decode()


def _replace(file: Path, text: str) -> None:
    """Write a file whole or not at all; a link stays a link, and the mode stays."""
    target = file.resolve()
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as new:
            new.write(text)
        shutil.copymode(target, name)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
