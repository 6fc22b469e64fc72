"""Whatever its size, a text within the limits is read, or refused, in good time."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import llm_op_guard as og
from llm_op_guard.contract.parse import MAX_CHARACTERS, MAX_PARTS
from llm_op_guard.contract.validate import MAX_CLAUSES, MAX_WRITTEN


def stub(body: str) -> str:
    return f"def f(x, n):\n{body}"


def repeated(line: Callable[[int], str], times: int) -> str:
    return stub("".join(line(i) for i in range(times)))


ITEMS = ", ".join(f"n + {i}" for i in range(60))

# More than anybody would write, of all kinds; each once took time that grew with the square of its length, or more.
TEXTS = {
    "rules": repeated(lambda i: f" require(n > {i})\n", 25_000),
    "as many rules as are read": repeated(lambda i: f" require(n > {i})\n", MAX_CLAUSES),
    "branches": repeated(lambda i: f" if n == {i}:\n  require(x.shape[0] > {i})\n", MAX_CLAUSES),
    "names": repeated(lambda i: f" a{i} = n + {i}\n require(a{i} > 5)\n", MAX_CLAUSES // 2),
    "names, the last first": stub(
        "".join(f" a{i} = a{i + 1} + 1\n" for i in range(MAX_CLAUSES - 1)) + f" a{MAX_CLAUSES - 1} = count(x, n)\n"
    ),
    "dimensions": stub(f" x: any[{', '.join(f'D{i}' for i in range(20_000))}]\n"),
    "dimensions that solve each other": stub(
        f" x: any[{', '.join(f'D{i} + D{i + 1}' for i in range(4_000))}, D4000]\n"
    ),
    "one condition": stub(f" require({' or '.join(f'n == {i}' for i in range(8_000))})\n"),
    "alternatives": stub(f" n: {' | '.join(f'(int, {i})' for i in range(50))}\n"),
    "a large test of many rules": stub(
        f" if {' or '.join(f'n == {i}' for i in range(3_000))}:\n"
        + "".join(f"  require(x.shape[{i}] > 1)\n" for i in range(900))
    ),
    "loops": repeated(lambda i: f" for a in ({ITEMS}):\n  require(a > {i})\n", 100),
    "loops in hints": repeated(
        lambda i: f" require(n > {i}, hint='a' if all(a * a + {i} > a for a in ({ITEMS})) else 'b')\n", 100
    ),
    "stubs": "".join(f"def f{i}(n):\n require(n > {i})\n" for i in range(4_000)),
    "stubs of loops": "".join(
        f"def f{i}(n):\n for a in ({', '.join('n' * 60)}):\n  require(a > {i} * len('{'x' * 1000}'))\n"
        for i in range(200)
    ),
    "parameters": f"def f({', '.join(f'p{i}' for i in range(30_000))}):\n"
    + "".join(f" require(p{i} > 1)\n" for i in range(900)),
    "imports": f"from m import {', '.join(f'p{i}' for i in range(40_000))}\n"
    + "".join(f"def f{i}(n):\n require(n > 1)\n" for i in range(600)),
    "constants": "".join(f"ABC{i} = {i}\n" for i in range(8_000))
    + "".join(f"def f{i}(n):\n require(n > 1)\n" for i in range(600)),
}


def in_good_time(file: Path) -> None:
    start = time.perf_counter()
    with contextlib.suppress(og.ContractError):
        og.load(file)
    # A second or two on a machine of its own; it was minutes.
    assert time.perf_counter() - start < 40


@pytest.mark.parametrize("kind", TEXTS)
def test_a_large_text_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "large.contract"
    file.write_text(TEXTS[kind])
    in_good_time(file)


def test_a_large_text_of_json_is_read_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    body = [{"require": f"n > {i}"} for i in range(15_000)]
    file.write_text(json.dumps({"name": "f", "signature": "n", "body": body}))
    with pytest.raises(og.ContractError, match=r"large\.json:1:1: the text is too large: at most 50000"):
        og.load(file)
    file.write_text(json.dumps({"name": "f", "signature": "n", "body": body[: MAX_CLAUSES + 1]}))
    with pytest.raises(og.ContractError, match=r"body\[2000\].*the contract has more than 2000 statements"):
        og.load(file)
    file.write_text(json.dumps({"name": "f", "signature": "n", "body": body[:MAX_CLAUSES]}))
    in_good_time(file)


def test_what_is_too_large_is_told() -> None:
    def refused(body: str) -> str:
        with pytest.raises(og.ContractError) as caught:
            og.guard(body)(lambda x=None, n=None: None)
        return str(caught.value)

    rules = [f"require(n > {i})" for i in range(MAX_CLAUSES + 1)]
    og.guard("\n".join(rules[:-1]))
    assert refused("\n".join(rules)).splitlines() == [
        f"<contract of <lambda>>:2001:1: the contract has more than {MAX_CLAUSES} statements, loops written out",
        "    require(n > 2000)",
        "    ^",
    ]
    test = " or ".join(f"n == {i}" for i in range(1_000))
    assert f"written out, the contract has more than {MAX_WRITTEN} characters" in refused(
        f"if {test}:\n" + "\n".join(f" {rule}" for rule in rules[:50])
    )
    assert f"at most {MAX_PARTS} names, numbers, operators" in refused(f"require(n in ({'n, ' * 26_000}))")
    assert f"at most {MAX_CHARACTERS} are read" in refused("require(n > 1)" + " " * MAX_CHARACTERS)


def test_the_contracts_of_one_file_share_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "many.contract"
    one = "def f{}(n):\n for a in ({}):\n  require(a in ('{}', n))\n"
    texts = [one.format(i, ", ".join(f"n + {k}" for k in range(50)), "x" * 2_000) for i in range(6)]
    file.write_text("".join(texts[:4]))
    assert len(og.load(file)) == 4
    file.write_text("".join(texts))
    with pytest.raises(og.ContractError, match="written out, the contracts have more than 500000 characters"):
        og.load(file)
