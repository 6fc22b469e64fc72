"""The driver of Transformers' suites, on suites of our own: `make transformers-suites` runs the real ones."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from suite_settings import COMPLETE, TYPES

import suites

COMMON = """
import unittest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from .exporters.test_export import ExportTesterMixin
from .generation.test_utils import GenerationTesterMixin

class ModelTesterMixin(ExportTesterMixin):
    def test_forward(self):
        config, given = self.model_tester.prepare_config_and_inputs_for_common()
        for cls in self.all_model_classes:
            cls(config)(**given)

    def test_fails(self):
        raise ValueError(f"no: {torch.rand(1)} in {object()}")

    def test_skips_a_part(self):
        with self.subTest("one"):
            self.skipTest("not here")

    def test_fails_in_parts(self):
        for part in "ab":
            with self.subTest(part):
                self.assertEqual(part, "c")

    def test_sees_the_guards(self):
        import llm_op_guard
        self.assertEqual(llm_op_guard.status().guarded, [])

    def test_breaks_a_rule(self):
        q, table = torch.zeros(1, 2, 4, 8), torch.zeros(1, 1, 8)
        apply_rotary_pos_emb(q, q, table, table)

    def test_breaks_a_rule_and_says_nothing(self):
        q, table = torch.zeros(1, 2, 4, 8), torch.zeros(1, 1, 8)
        try:
            apply_rotary_pos_emb(q, q, table, table)
        except ValueError:
            pass
"""
TRAINING = """
class TrainingTesterMixin:
    def test_overfit(self):
        self.assertIn("ForCausalLM", self.model_tester.causal_lm_class.__name__)
"""


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    """A source distribution with suites of our own."""
    (tmp_path / "PKG-INFO").write_text(f"Name: transformers\nVersion: {version('transformers')}\n")
    (tmp_path / "tests").mkdir()
    files = {"modeling_common": COMMON, "training_mixin": TRAINING}
    for name, text in files.items():
        (tmp_path / "tests" / f"test_{name}.py").write_text(text)
    return tmp_path


def run(sdist: Path, types: str, expected: int) -> dict[str, Any]:
    file = sdist / "found.json"
    assert suites.main([str(sdist), "--types", types, "--jobs", "1", "--json", str(file)]) == expected
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def side(**tests: str) -> dict[str, Any]:
    """The report of a process: each test with what it told, `passed` or `failed X`; `alarm` is one."""
    found = {}
    for name, text in tests.items():
        outcome, _, told = text.partition(" ")
        found[name] = {"outcome": outcome, "told": told, "alarms": ["q is wrong"] if told == "alarm" else []}
        found[name]["checks"] = 0
    return {"tests": found, "alarms": [], "sites": []}


def test_what_a_suite_comes_to(sdist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (report,) = run(sdist, "llama", 1)["types"]
    tests = report["tests"]
    assert {name: one["outcome"] for name, one in tests.items()} == {
        "test_forward": "passed",
        "test_overfit": "passed",
        "test_fails": "failed",
        "test_fails_in_parts": "failed",
        "test_skips_a_part": "skipped",
        "test_sees_the_guards": "different",
        "test_breaks_a_rule": "alarm",
        "test_breaks_a_rule_and_says_nothing": "alarm",
    }
    assert report["checks"] > 2
    assert "transformers.models.llama.modeling_llama.apply_rotary_pos_emb" in report["sites"]
    assert "cos.shape[1] = 1, expected L = 4" in tests["test_breaks_a_rule"]["reason"]
    assert tests["test_sees_the_guards"]["reason"].startswith("passed without guards, failed AssertionError: Lists")
    assert tests["test_skips_a_part"]["reason"] == "not here"
    told = capsys.readouterr().out
    assert "fails without guards too: llama: test_fails: ValueError: no: tensor(" in told
    assert "in <object object at 0x…> (test_modeling_common.py:" in told
    assert "ALARM: llama test_breaks_a_rule: " in told
    assert "DIFFERENT: llama test_sees_the_guards: passed without guards" in told


def test_suites_that_are_the_same_with_guards(sdist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = side(a="passed", b="failed ValueError: no", c="skipped slow")
    monkeypatch.setattr(suites, "_run", lambda *_: given)
    found = run(sdist, "llama,test_monkey_patching", 0)
    assert found["summary"]["outcomes"] == {"passed": 2, "failed": 2, "skipped": 2}
    given["tests"]["a"]["alarms"].append("q is wrong")
    found = run(sdist, "llama,test_monkey_patching", 1)
    assert found["summary"]["outcomes"] == {"alarm": 2, "failed": 2, "skipped": 2}


def test_a_process_that_dies_is_a_fault(sdist: Path) -> None:
    (sdist / "tests" / "test_monkey_patching.py").write_text("import os\nos._exit(3)")
    (report,) = run(sdist, "test_monkey_patching", 1)["types"]
    assert [one["outcome"] for one in report["tests"].values()] == ["died", "died"]
    assert report["tests"]["the process with guards"]["reason"] == "its process ended with status 3: "


@pytest.mark.parametrize(
    ("plain", "guarded", "outcome"),
    [
        ("passed", "passed", "passed"),
        ("failed ValueError: no", "failed ValueError: no", "failed"),
        ("skipped slow", "skipped slow", "skipped"),
        ("failed ValueError: no", "failed TypeError: no", "different"),
        ("failed ValueError: no", "failed ValueError: yes", "different"),
        ("passed", "failed ValueError: no", "different"),
        ("failed ValueError: no", "passed", "different"),
        ("passed", "skipped slow", "different"),
        ("passed", "passed alarm", "alarm"),
        ("failed alarm", "failed alarm", "alarm"),
    ],
)
def test_outcomes(plain: str, guarded: str, outcome: str) -> None:
    assert suites.compared(side(test=plain), side(test=guarded))["test"]["outcome"] == outcome


def test_a_test_that_one_process_lacks() -> None:
    found = suites.compared(side(a="passed"), side(b="passed"))
    assert found["a"] == {"outcome": "different", "reason": "passed without guards, absent with them"}
    assert found["b"] == {"outcome": "different", "reason": "absent without guards, passed with them"}


def test_what_the_guards_say_while_modules_are_loaded() -> None:
    found = suites.compared(side(), {**side(), "alarms": ["could not look at x"]})
    assert found == {"before the first test": {"outcome": "alarm", "reason": "could not look at x"}}


def test_tests_of_another_version_are_not_run(sdist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sdist / "PKG-INFO").write_text("Version: 4.0.0\n")
    assert suites.main([str(sdist)]) == 2
    assert f"has the tests of Transformers 4.0.0, and {version('transformers')} is installed" in capsys.readouterr().err


def test_a_folder_that_is_no_sdist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suites.main([str(tmp_path / "nowhere")]) == 2
    assert "is no unpacked source distribution: No such file or directory" in capsys.readouterr().err


def test_an_unknown_type(sdist: Path) -> None:
    with pytest.raises(SystemExit, match=r"there is no suite for lama; there are: llama, .*, test_monkey_patching"):
        suites.main([str(sdist), "--types", "lama"])


def test_no_suite_is_run_twice() -> None:
    assert not set(TYPES) & set(COMPLETE)


@pytest.mark.parametrize("model_type", TYPES)
def test_every_model_takes_its_inputs(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it did not, the suites would fail alike and prove nothing."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "zoo"), *sys.path])
    from model_testers import ModelTester

    tester = ModelTester(model_type)
    assert tester.model_classes
    for cls in tester.model_classes:
        transformers.set_seed(0)
        config, given = tester.prepare_config_and_inputs_for_common()
        with torch.no_grad():
            outputs = cls(config).eval()(**given)
        assert len(outputs[0]) in (tester.batch_size, 3 * tester.batch_size)  # rows, or the patches of pictures
