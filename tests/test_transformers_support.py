"""The page of what is guarded in Transformers, and the command that writes it and drafts what to add.

That the whole page is as the installed version is takes as long as importing every model: `make support-check` does it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

import llm_op_guard as og
from llm_op_guard.integrations.transformers import FAMILIES, LEFT_OUT
from llm_op_guard.integrations.transformers.known import Code

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "bert", "gptj", "opt", "no_such_model")]
ROPE = "transformers.models.llama.modeling_llama.apply_rotary_pos_emb"


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("transformers_support", ROOT / "scripts" / "transformers_support.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


script = loaded()


@pytest.fixture(scope="module")
def found() -> Any:
    return script.looked_through(SAMPLE)


# ---------------------------------------------------------------- the page


def test_the_families_on_the_page_are_those_of_the_integration() -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.renewed(page, {"families": script.families({})}) == page, "run: make support"


def test_the_installed_version_is_on_the_page() -> None:
    page = script.PAGE.read_text(encoding="utf-8")
    table = page.partition(f"<!-- table: {transformers.__version__} -->")[2].partition("<!-- end -->")[0]
    assert "| rope |" in table and "| all |" in table


def test_an_old_table_is_noticed_and_one_without_a_place() -> None:
    page = "above\n<!-- table: 1.0 -->\nold\n<!-- end -->\nbelow\n<!-- table: 2.0 -->\nleft\n<!-- end -->\n"
    assert script.renewed(page, {"1.0": "new"}) == page.replace("old", "new")
    with pytest.raises(KeyError, match=r"no place for a table 3\.0"):
        script.renewed(page, {"3.0": "new"})


def test_what_is_found_is_what_is_installed(found: Any) -> None:
    report = og.install("transformers")
    models = tuple(f"{name}." for name in SAMPLE)
    guarded = {site for site in report.guarded if site.startswith(models)}
    refused = {(refusal.site, refusal.reason) for refusal in report.refused if refusal.site.startswith(models)}
    assert {place.site for place in found.places if place.contract} == guarded
    assert {(place.site, place.reason) for place in found.places if not place.contract} == refused
    assert ROPE in guarded and refused
    assert found.version == transformers.__version__
    assert [module for module, _ in found.failed] == [SAMPLE[-1]]


def test_the_tables_count(found: Any) -> None:
    text = script.tables(found, {})[found.version]
    norms = sum(place.part == "norms" for place in found.places if place.contract)
    assert f"| norms | {norms} | 0 |" in text
    guarded = sum(bool(place.contract) for place in found.places)
    assert f"| all | {guarded} | {len(found.places) - guarded} |" in text
    assert "cannot be imported here: `no_such_model.modeling_no_such_model` (ModuleNotFoundError" in text
    assert "fingerprint" not in text


def test_contracts_and_what_forwards_show_are_counted(found: Any) -> None:
    text = script.tables(found, {})[found.version]
    norms = sum(place.contract == "norm:rms_norm" for place in found.places)
    assert norms and f"| norm:rms_norm | {norms} |" in text
    facts = dict(found.facts)
    assert facts["runs_every_layer"] == 1 and f"| table_of_ids | {facts['table_of_ids']} |" in text
    nothing = script.tables(dataclasses.replace(found, facts=()), {})[found.version]
    assert "| table_of_ids | 0 |" in nothing


def test_a_number_that_has_fallen_is_named(found: Any) -> None:
    before = script.tables(found, {})[found.version]
    assert list(script.fallen(before, before)) == []
    one = next(place for place in found.places if place.contract == "norm:rms_norm")
    places = tuple(place for place in found.places if place is not one)
    fewer = dataclasses.replace(found, places=places, facts=(("runs_every_layer", 1),))
    after = script.tables(fewer, {})[found.version]
    told = list(script.fallen(before, after))
    assert f"table_of_ids fell from {dict(found.facts)['table_of_ids']} to 0" in told
    assert not any(line.startswith("runs_every_layer") for line in told)
    assert any(line.startswith("norm:rms_norm fell from 1 to 0") for line in told)
    assert list(script.fallen(after, before)) == []


def test_a_python_that_cannot_look_says_so() -> None:
    with pytest.raises(RuntimeError, match="could not look through its Transformers"):
        script.survey("/bin/false")


# ---------------------------------------------------------------- versions


def known_places(found: Any, *digests: str) -> Any:
    place = next(place for place in found.places if place.site == ROPE)
    return tuple(dataclasses.replace(place, digest=digest) for digest in digests)


def test_versions_that_are_not_true() -> None:
    one, other = list(FAMILIES[0].code)[:2]
    place = script.Place("rope", ROPE, FAMILIES[0].contract, "", one, "")
    right = script.untrue(script.Survey("5.100.0", (place,), ()))
    assert right == {one: (*FAMILIES[0].code[one].versions, "5.100.0")}
    [version] = {version for code in FAMILIES[0].code.values() for version in code.versions} & {"5.24.0"}
    right = script.untrue(script.Survey(version, (place,), ()))
    assert one not in right
    assert version not in right[other]
    refused = dataclasses.replace(place, contract="", reason="for another reason")
    assert script.untrue(script.Survey("5.100.0", (refused,), ())) == {}


def test_a_candidate_of_a_release_comes_before_it() -> None:
    one = next(iter(FAMILIES[0].code))
    place = script.Place("rope", ROPE, FAMILIES[0].contract, "", one, "")
    right = script.untrue(script.Survey("5.25.0rc1", (place,), ()))
    assert right[one][-1] == "5.25.0rc1"


def test_known_code_that_is_no_family_has_true_versions_too(found: Any) -> None:
    rotary = next(place for place in found.beside if place.site.endswith("LlamaRotaryEmbedding.forward"))
    assert (rotary.part, rotary.contract, rotary.reason) == ("models: angles of positions", "", "")
    alone = script.Survey("5.100.0", (), (), (rotary,))
    assert script.untrue(alone) == {rotary.digest: ("5.24.0", "5.100.0")}
    version = "5.24.0"
    gone = script.untrue(script.Survey(version, (), (), ()))
    assert gone[rotary.digest] == ()
    left_out = next(digest for digest, code in LEFT_OUT.items() if code.versions == (version,))
    refused = script.Place("norms", "somewhere", "", LEFT_OUT[left_out].reason, left_out, "")
    assert gone[left_out] == () and left_out not in script.untrue(script.Survey(version, (refused,), ()))


def test_code_that_is_known_for_two_reasons_is_known_once() -> None:
    digests = [digest for _, digest, _ in script.known_code()]
    assert sorted(digests) == sorted(set(digests))


def test_versions_are_written_where_the_code_stands() -> None:
    source = (
        'CODE = {\n    "11": Code("one, é: q\'s", versions=("1.0",)), "22": Code("two"),\n'
        '    "33": Code(\n        "three",\n        versions=("1.0",),\n    ),\n}\nOTHER = {**CODE, 1: 2}\n'
    )
    right = {"11": ("1.0", "2.0"), "33": Code("").versions}
    written = script.corrected(source, right)
    namespace: dict[str, Any] = {"Code": Code}
    exec(written, namespace)
    assert namespace["CODE"] == {
        "11": Code("one, é: q's", versions=("1.0", "2.0")), "22": Code("two"), "33": Code("three"),
    }  # fmt: skip
    assert script.corrected(source, {}) == source


# ---------------------------------------------------------------- the draft


def changed(found: Any, digest: str = "0123456789abcdef") -> tuple[Any, Any]:
    """The places of a version whose rotary embedding has another parameter, and those of one where it is known."""
    known = next(place for place in found.places if place.site == ROPE)
    new = dataclasses.replace(
        known, contract="", digest=digest, reason=f"its code is unknown (fingerprint {digest})",
        source=known.source.replace("unsqueeze_dim=1)", "position_ids=None, unsqueeze_dim=1)"),
    )  # fmt: skip
    assert new.source != known.source
    return script.Survey("9.9.9", (new,), ()), script.Survey("5.24.0", found.places, ())


def test_unknown_code_is_drafted_beside_what_it_is_most_like(found: Any) -> None:
    new, beside = changed(found)
    lines = [line.strip() for line in script.draft(new, beside)]
    assert lines[1] == f"rope 0123456789abcdef: 1 sites, llama; {ROPE}"
    assert lines[2].startswith("most like rope:apply_rotary_pos_emb ")
    assert lines[2].endswith(f"%: {ROPE}")
    assert "-def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):" in lines
    assert "+def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):" in lines
    entry = next(line for line in lines if line.startswith('"0123456789abcdef": '))
    call = ast.parse(f"{{{entry}}}", mode="eval")
    assert ast.unparse(call) == "{'0123456789abcdef': Code('llama: ...', versions=('9.9.9',))}"


def test_code_that_calls_something_else_shows_what_it_calls(found: Any) -> None:
    place = next(place for place in found.places if place.site == ROPE)
    assert "def rotate_half(x):" in place.source


def test_nothing_is_drafted_for_what_is_like_nothing(found: Any) -> None:
    new, beside = changed(found)
    strange = dataclasses.replace(new.places[0], source="def apply_rotary_pos_emb(x):\n    return x")
    lines = list(script.draft(dataclasses.replace(new, places=(strange,)), beside))
    assert any("most like" in line for line in lines)
    assert not any("Code(" in line for line in lines)
    alone = list(script.draft(new, None))
    assert "--beside" in alone[-1]


def test_what_is_refused_beside_too_is_left_out(found: Any) -> None:
    new, beside = changed(found)
    both = dataclasses.replace(beside, places=(*beside.places, *new.places))
    assert [line for line in script.draft(new, both) if line] == [
        "\nleft out: 1 sites whose code is refused in 5.24.0 too"
    ]


def test_code_that_contracts_ask_about_is_drafted_too(found: Any) -> None:
    rotary = next(place for place in found.beside if place.site.endswith("LlamaRotaryEmbedding.forward"))
    new = dataclasses.replace(rotary, digest="0123456789abcdef", reason="unknown (fingerprint 0123456789abcdef)")
    beside = script.Survey("5.24.0", (), (), found.beside)
    lines = [line.strip() for line in script.draft(script.Survey("9.9.9", (), (), (new,)), beside)]
    assert f"models: angles of positions 0123456789abcdef: 1 sites, llama; {rotary.site}" in lines
    assert f"most like models: angles of positions {rotary.digest}, 100%: {rotary.site}" in lines
    assert any(line.startswith('"0123456789abcdef": Code("llama: ...", versions=("9.9.9",))') for line in lines)
    known = list(script.draft(script.Survey("9.9.9", (), (), (rotary,)), None))
    assert known == [
        f"models: angles of positions {rotary.digest}: the same code, 1 sites; make support adds the version"
    ]


def test_known_code_without_the_version_is_said(found: Any) -> None:
    again = script.Survey("9.9.9", found.places, ())
    digest = next(place.digest for place in found.places if place.site == ROPE)
    assert f"rope:apply_rotary_pos_emb {digest}: the same code, 1 sites; make support adds the version" in list(
        script.draft(again, None)
    )
