"""What is generated in docs/ is as the code is, and links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import llm_op_guard as og
from llm_op_guard.contract.json_form import ARGUMENT_KEYS, REASON_KEYS, STATEMENTS
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.contract.review import review
from llm_op_guard.contract.vocabulary import FUNCTIONS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("language_reference", ROOT / "scripts" / "language_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_fresh(script: ModuleType) -> None:
    for path, text in script.generated().items():
        assert path.read_text(encoding="utf-8") == text, f"docs/{path.name} is out of date; run: make docs"


def test_every_table_has_a_place(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- table: ([a-z ]+) -->", page)) == set(script.tables())
    page = script.CALLABLES.read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- table: ([a-z ]+) -->", page)) == set(script.callables_tables())


def rows_of(script: ModuleType, heading: str) -> list[tuple[str, str]]:
    """The contracts that a section of the page shows, each with what is said of it."""
    section = script.PAGE.read_text(encoding="utf-8").partition(f"## {heading}")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", section, re.MULTILINE)
    return [(body.replace("\\|", "|"), problem.replace("\\|", "|")) for body, problem in rows]


def test_what_the_page_says_is_refused_is(script: ModuleType) -> None:
    rows = rows_of(script, "Refused at load")
    assert len(rows) > 15
    for body, problem in rows:
        with pytest.raises(og.ContractError) as caught:
            parse_body(body, "operator", ("x", "y", "n", "mode"))
        assert caught.value.problem == problem, body


def test_what_the_page_says_is_not_refused_is_not(script: ModuleType) -> None:
    section = script.PAGE.read_text(encoding="utf-8").partition("What no call can keep is")[2].partition("\n## ")[0]
    bodies = [body for body in re.findall(r"`(.+?)`", section) if "require" in body]
    assert len(bodies) == 2
    for body in bodies:
        assert parse_body(body, "operator", ("x", "n")).rules
    with pytest.raises(og.ContractError, match="no call can keep this: n < 4"):
        parse_body(f"n: int; {bodies[1]}", "operator", ("x", "n"))


def test_what_the_page_says_is_warned_of_is(script: ModuleType) -> None:
    rows = rows_of(script, "Warned of by check")
    assert len(rows) > 8
    for body, problem in rows:
        contract = parse_body(body, "operator", ("x", "y", "n", "mode"))
        assert [finding.problem for finding in review({"operator": contract})] == [problem], body


def test_every_function_is_there(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert all(function.signature in page for function in FUNCTIONS.values())


def test_an_old_table_is_noticed(script: ModuleType) -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    old = page.replace("`finite(x)`", "`finite(y)`")
    assert old != page
    assert script.renewed(old) == page


def test_links_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"


def statement_rows(script: ModuleType, heading: str) -> dict[str, str]:
    """The first cells of a table that is written by hand, with the second ones."""
    section = script.PAGE.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)[2:]
    return {first.replace("\\|", "|"): second.replace("\\|", "|") for first, second in rows}


def test_the_keywords_of_statements_are_those_of_the_parser(script: ModuleType) -> None:
    shown = {
        row.split("(")[0].strip("`"): re.findall(r"(\w+)=…", row) for row in statement_rows(script, "## Statements")
    }
    for statement, body in (("path: type = why", "n: int = why(other=1)"), ("require", "require(n > 1, other=1)")):
        with pytest.raises(og.ContractError) as caught:
            parse_body(body, "operator", ("n",))
        assert caught.value.problem == f"unknown keyword 'other'; known: {', '.join(shown[statement])}"


def test_the_keys_of_json_are_those_of_its_reader(script: ModuleType) -> None:
    shown = []
    for row in statement_rows(script, "## JSON").values():
        whole = row.partition("`{")[2].partition("}`")[0]
        shown.append(set(re.findall(r'"(\w+)": ', re.sub("{.*}", "", whole))))
    known = [{kind, *needed, *optional} for kind, (needed, optional) in STATEMENTS.items() if kind != "ensure"]
    assert sorted(map(sorted, shown)) == sorted(map(sorted, known))
    # The long form: what a declaration has besides is not written out again.
    long = next(row for row in statement_rows(script, "## JSON").values() if row.startswith('`{"input"'))
    assert set(re.findall(r'"(\w+)": ', long)) == {"input", "name", *ARGUMENT_KEYS} - {"type", *REASON_KEYS}


def test_every_size_of_the_page_is_one(script: ModuleType) -> None:
    cells = [size for cell in statement_rows(script, "### Sizes") for size in re.findall("`(.+?)`", cell)]
    assert len(cells) > 8
    for size in cells:
        assert parse_body(f"y: any[D]; z: any[S, B]; w: any[{size}]", "operator", ("w", "x", "y", "z")).rules
