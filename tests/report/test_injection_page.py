"""The page of injection: every figure is where a reader looks for it, and no text gets out of its place."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Parsed, case, contract, injected

from llm_op_guard.cli import main
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.faults.edits import edits_at, of_dtypes, of_sizes, of_the_batch, swaps
from llm_op_guard.faults.ingredients import ingredients
from llm_op_guard.faults.solve import valid_calls
from llm_op_guard.report.injection_page import GROUPS, OTHER_KINDS, group_of, injection_page

GOOD, BAD = "lib/norm:good", "lib/norm:bad"


@pytest.fixture(scope="module")
def page() -> Parsed:
    return Parsed(injection_page(injected()))


def test_a_cell_has_the_worst_verdict_the_count_and_the_gravest_outcome(page: Parsed) -> None:
    assert page.cells(GOOD) == {
        "false alarms": "false alarms ✓ 0 of 20 calls",
        "sizes": "sizes ✓ 2 mutants: 2 caught by the intended rule; without a guard: 1 silent",
        "dtypes": "dtypes ✓ 1 mutants: 1 caught by the intended rule; without a guard: 1 obscure",
        "kinds": "kinds ✓ 1 mutants: 1 caught by the intended rule; without a guard: 1 harmless",
        "names": "names ✓ 1 mutants: 1 caught by the intended rule; without a guard: 1 not run",
    }
    assert page.cells(BAD) == {
        "false alarms": "false alarms ✗ 1 of 20 calls",
        "axes": ("axes ≈ 2 mutants: 1 caught by another rule, 1 caught by the intended rule; without a guard: 1 died"),
        "values": "values ✗ 2 mutants: 1 missed, 1 caught by the intended rule; without a guard: 1 hung",
        "numbers": "numbers ≈ 1 mutants: 1 caught by another rule; without a guard: 1 silent",
        "other": "other ✓ 1 mutants: 1 caught by the intended rule; without a guard: 1 silent",
        "not checked": "not checked ? 6",
    }


@pytest.mark.parametrize(
    ("row", "column", "look"),
    [
        (GOOD, "false alarms", "caught valid"),
        (GOOD, "sizes", "caught grave"),
        (GOOD, "dtypes", "caught error"),
        (GOOD, "kinds", "caught harmless"),
        (GOOD, "names", "caught unrun"),
        (BAD, "false alarms", "alarm"),
        (BAD, "axes", "other"),
        (BAD, "values", "missed"),
        (BAD, "not checked", "unchecked"),
        ("lib/norm:alone", "false alarms", "unchecked"),
    ],
)
def test_the_look_of_a_cell(page: Parsed, row: str, column: str, look: str) -> None:
    assert page.looks[row, column] == look


def test_a_cell_opens_the_calls_worst_first(page: Parsed) -> None:
    assert page.opened_by(BAD, "values") == (
        "lib/norm:bad: valuesClose"
        "breaks within(x, 0, 4) by: element -1x=float32[2] made by element -1"
        "without a guardit hungno result after 20 s"
        "with its guardmissed"
        "again: llm-op-guard inject lib/norm:bad --seed 7 --valid 20 --case id-element -1"
        "breaks within(x, 0, 4) by: element 4x=float32[2] made by element 4"
        "without a guardno error, another resultoff by 2"
        "with its guardcaught by the intended ruletold of element 4"
        "again: llm-op-guard inject lib/norm:bad --seed 7 --valid 20 --case id-element 4"
    )
    assert page.opened_by(BAD, "false alarms").endswith("a valid call was stoppedx=float32[0]bad: x is empty")


def test_a_long_call_has_a_line_for_each_argument() -> None:
    document = injected()
    call = {"q": 1, "rest": 2, "n": 3}
    text = "q=float32[2, 4, 7, 16] of 1, 2, 3, 4, rest=Module(n=4, q_proj=float32[16, 16], eps=1e-06), n=3"
    for entry in document["cases"]:
        entry |= {"call": text, "arguments": {"arguments": call}}
    page = injection_page(document)
    assert "q=float32[2, 4, 7, 16] of 1, 2, 3, 4,\nrest=Module(n=4, q_proj=float32[16, 16], eps=1e-06),\nn=3" in page


def test_what_was_not_checked_stands_beside(page: Parsed) -> None:
    opened = page.opened_by(BAD, "not checked")
    for text in ("y.shape", "y.dtype", "result.shape", "x.device", "3 of: RuntimeError: float8"):
        assert text in opened
    assert "nothing was run without a guard" in page.opened_by("lib/norm:alone", "not checked")
    assert page.rows[-1] == ["other/norm:absent", "left out: other is not installed"]
    text = " ".join(page.text.split())
    for told in (
        "Contracts left out, or tried in part: 2",
        "Rules that no call was found to break: 2",
        "lib/norm:bad: y.shape",
        "Capsules that do not replay to the same rule: 1",
        "lib/norm:bad: result.shape: it breaks nothing",
        "Capsules that tell of another element when they are replayed: 1",
        "Possibly too strict: without a guard nothing changed: 1",
        "Valid calls that the operator itself does not take, by error: 1",
    ):
        assert told in text


def test_the_figures(page: Parsed) -> None:
    for told in (
        "Injection: 3 contracts, seed 7",
        "mutants caught10 of 11",
        "by the intended rule8 of 11",
        "false alarms1 of 60 valid calls",
        "rules broken9 of 12",
        "capsules that replay11 of 12, the largest of 900 bytes",
        "the mutants without a guard1 died, 1 hung, 4 silent, 1 obscure, 1 clear, 2 harmless, 1 not run",
        "only the rows with a finding (missed, caught by another rule, a false alarm, or a capsule that does not "
        "replay): 1 of 4",
    ):
        assert told in page.text
    wrong = [attributes for tag, attributes in page.tags if ("class", "wrong") in attributes]
    assert len(wrong) == 3


def test_without_findings_nothing_stands_out() -> None:
    document = injected()
    document["cases"] = [case for case in document["cases"] if case["contract"] == GOOD]
    document["contracts"] = document["contracts"][:1]
    document["left_out"] = []
    document["summary"] |= {"mutants": 5, "caught": 5, "false_alarms": 0, "capsules_replayed": 12}
    page = Parsed(injection_page(document))
    assert "No row has a finding" in page.text
    assert "Contracts left out, or tried in part: none" in page.text
    assert not [tag for tag, attributes in page.tags if tag == "input" or ("class", "wrong") in attributes]
    assert OTHER_KINDS not in page.rows[0]


def test_an_empty_document_is_a_page() -> None:
    empty = dict.fromkeys(injected()["summary"], 0)
    page = Parsed(
        injection_page({"summary": empty, "seed": 0, "valid": 1, "contracts": [], "left_out": [], "cases": []})
    )
    assert "mutants caught0 of 0" in page.text and len(page.rows) == 1


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("one more in axis 0", "sizes"),
        ("another size in axis 3", "sizes"),
        ("rank + 1", "axes"),
        ("axes 0 and 1 swapped", "axes"),
        ("element nan", "values"),
        ("all at a bound", "values"),
        ("a row of 0", "values"),
        ("one more", "numbers"),
        ("a negative number", "numbers"),
        ("missing", "kinds"),
        ("missing name", "names"),
        ("a tensor", "kinds"),
        ("one item more", "items"),
        ("several changes", "several"),
        ("one fewer everywhere", "sizes"),
        ("half in axis 1, last item", "sizes"),
        ("another dtype everywhere", "dtypes"),
        ("gaps between elements", "strides"),
        ("ranking", "other"),
        ("", "other"),
    ],
)
def test_the_group_of_a_kind(kind: str, group: str) -> None:
    assert group_of(kind) == group


def test_every_kind_that_is_made_has_a_column() -> None:
    """Edits of one call that has one of everything."""
    body = """
        x: floating[B, D]
        ids: int64[B, D]
        mask: boolean[B, D]
        side: 'left' | 'right'
        n: int
        sizes: list[int]
        xs: list[any[D]]
        require(within(ids, 0, 40))
        require(misspelt(kwargs, 'attention_mask') is None)
    """
    parameters = ("x", "ids", "mask", "side", "n", "sizes", "xs", "kwargs")
    made_of = ingredients(parse_body(body, "operator", parameters))
    (judgement,) = valid_calls(made_of, 0, 1)[:1]
    call = judgement.call
    made = [edit for choice in made_of.choices for edit in edits_at(call, choice, made_of, (4, 40))]
    made += [*swaps(call), *of_the_batch(call), *of_sizes(call), *of_dtypes(call)]
    groups = {group_of(edit.kind) for edit in made}
    assert {edit.kind for edit in made if group_of(edit.kind) == OTHER_KINDS} == set()
    assert groups >= {"sizes", "axes", "dtypes", "devices", "strides", "values", "numbers", "texts", "kinds", "batch"}


def test_what_was_not_run_is_told_beside_the_gravest_of_what_was() -> None:
    document = injected()
    document["cases"] += [case(GOOD, "x.shape", "half in axis 0", "caught by the intended rule", "not run")] * 3
    cells = Parsed(injection_page(document)).cells(GOOD)
    assert cells["sizes"] == "sizes ✓ 5 mutants: 5 caught by the intended rule; without a guard: 1 silent3 not run"


def test_inject_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub, out = tmp_path / "mine.contract", tmp_path / "out.html"
    stub.write_text("def f(x, n):\n    x: floating[B, 4]\n    require(n < 3)\n    n: int\n", encoding="utf-8")
    asked = ["inject", str(stub), "--valid", "5", "--jobs", "1", "--html"]
    assert main([*asked, str(out)]) == 0
    page = Parsed(out.read_text(encoding="utf-8"))
    cells = page.cells(f"{stub}:f")
    assert cells["false alarms"].startswith("false alarms ✓ 0 of ") and cells["sizes"].endswith(" not run")
    assert "x.shape[1] = " in page.opened_by(f"{stub}:f", "sizes")
    assert main([*asked, str(tmp_path / "nowhere" / "out.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main([*asked, str(stub)]) == 2
    assert "name a file that ends in .html" in capsys.readouterr().err


# ---------------------------------------------------------------- what stands in the data stays a text


def with_every_text(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [with_every_text(part, change) for part in value]
    if isinstance(value, dict):
        return {
            (change(key) if key.startswith("RuntimeError") else key): with_every_text(part, change)
            for key, part in value.items()
        }
    return value


MEANINGFUL = "<>/&'\"=-![]\x00\n\r a;#x\ud800\u202e"
HOSTILE = [
    "<script>window.broken = 1</script>",
    "</style><img src=x onerror='window.broken = 1'>",
    '"\' onclick=alert(1) x="',
    "]]>--><!--",
    "&lt;b&gt;&#60;b>&amp",
    "</pre></section></body></html><h1>",
    "\u202egnp.exe\x00\x1b[2J\ud800\r\x85",
    "javascript:alert(1)",
    "<plaintext>",
]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(HOSTILE) | st.text(alphabet=st.sampled_from("<>/&'\"=-![]\x00\n\r a;#x\ud800\u202e"), min_size=1)
)
def test_no_text_becomes_a_tag(hostile: str) -> None:
    plain = Parsed(injection_page(with_every_text(injected(), lambda text: f"{text}x")))
    document = with_every_text(injected(), lambda text: f"{text}{hostile}")
    page = Parsed(injection_page(document))
    assert page.tags == plain.tags
    if hostile.isprintable():
        for text in (document["cases"][0]["message"], document["cases"][1]["call"], document["left_out"][1]["reason"]):
            assert text in page.text
    assert all(character.isprintable() or character == "\n" for character in page.text)


def test_long_texts_are_cut() -> None:
    document = injected()
    document["cases"][0]["message"] = "x" * 100_000
    text = injection_page(document)
    assert "x" * 5000 + "…" in text and "x" * 5001 not in text


def test_the_page_needs_nothing_and_runs_nothing() -> None:
    text = injection_page(injected())
    page = Parsed(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "form", "base", "a"}
    names = {name for _, attributes in page.tags for name, _ in attributes}
    assert not {name for name in names if name in ("src", "href", "style", "srcset", "action") or name.startswith("on")}
    style = re.search("<style>(.*?)</style>", text, re.DOTALL)
    assert style and "url(" not in style[1] and "@import" not in style[1] and "<" not in style[1]
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    (policy,) = re.findall('Content-Security-Policy" content="([^"]*)"', text)
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_every_look_has_its_style_and_its_sign_in_the_legend() -> None:
    text = injection_page(injected())
    looks = set(re.findall(r'class="cell ([^"]*)"', text))
    style = text[text.index("<style>") : text.index("</style>")]
    for look in looks - {"none"}:
        assert f".cell.{look.split()[-1]}" in style
    assert set(GROUPS) < set(Parsed(text).rows[0])


def test_a_thousand_cases_are_a_page_of_some_size() -> None:
    document = injected()
    names = [f"lib/many:operator_{number}" for number in range(100)]
    document["contracts"] = [contract(name) for name in names]
    document["cases"] = [
        case(name, "x.shape", f"{group[0]}axis 0", "caught by the intended rule", "silent", "off by 0.3")
        for name in names
        for group in GROUPS.values()
    ]
    assert len(document["cases"]) >= 1000
    assert len(injection_page(document)) < 2_000_000
