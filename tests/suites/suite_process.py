"""One process: one suite, with guards or without, and what came of each test.

python suite_process.py TESTS NAME JSON [--guarded]
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time
import traceback
import unittest
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from suite_settings import COMPLETE

import llm_op_guard as og
from llm_op_guard import api

PACKAGE = "transformers_suites"
# Bases of the mixins whose files the source distribution lacks: without them, their own tests are not run.
LACKING = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
Error = tuple[type[BaseException], BaseException, TracebackType]


class Alarms(logging.Handler):
    """What the library has to say: every warning of it is logged too, which `warnings` filters do not hold up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())

    def taken(self) -> list[str]:
        """What has come since it was last asked; violations that were raised, or only counted, too."""
        told = [*self.told, *(violation.summary for violation in og.record.violations)]
        told = told or [f"{site}: {rule} was broken" for site, rule in og.record.counts]
        self.told.clear()
        og.record.clear()
        return told


class Outcomes(unittest.TestResult):
    """Keeps what came of each test, by name; every test starts from the same random numbers."""

    def __init__(self, alarms: Alarms) -> None:
        super().__init__()
        self.of: dict[str, dict[str, Any]] = {}
        self._alarms = alarms

    def startTest(self, test: unittest.TestCase) -> None:
        from transformers import set_seed

        super().startTest(test)
        set_seed(7)
        self.of[_name(test)] = {"outcome": "passed", "told": ""}
        self._started, self._checks = time.perf_counter(), api.tally.checks

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        found = self.of[_name(test)]
        found["seconds"] = round(time.perf_counter() - self._started, 3)
        found["checks"] = api.tally.checks - self._checks
        found["alarms"] = self._alarms.taken()

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._failed(test, err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._failed(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self._failed(test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        found = self.of[_name(test)]
        if found["outcome"] == "passed":
            found |= {"outcome": "skipped", "told": reason}

    def _failed(self, test: unittest.TestCase, err: Error) -> None:
        found = self.of[_name(test)]
        earlier = found["told"] + "\n" if found["outcome"] == "failed" else ""
        found |= {"outcome": "failed", "told": earlier + told(err[1])}


def told(error: BaseException) -> str:
    """An exception in a line that is the same in every run: type, message, and where it was raised."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if Path(frame.filename).name != "case.py"] or frames
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    text = re.sub(r"0x[0-9a-f]+", "0x…", f"{type(error).__name__}: {text} ({place})")
    return re.sub(r"/tmp\w{8}\b", "/tmp…", text)


def _name(test: Any) -> str:
    whole = getattr(test, "test_case", test)  # what is skipped in a `subTest` comes with that
    return str(whole.id()).rpartition(".")[2]


def prepare(tests: Path) -> None:
    """Make the files in the folder `tests` of the source distribution modules of a package."""
    package = ModuleType(PACKAGE)
    package.__path__ = [str(tests)]
    sys.modules[PACKAGE] = package
    for file, mixin in LACKING.items():
        module = ModuleType(f"{PACKAGE}.{file}")
        setattr(module, mixin, type(mixin, (), {}))
        sys.modules[module.__name__] = module


def suite(name: str) -> unittest.TestSuite:
    """The tests of a model type, or of a file in COMPLETE."""
    loader = unittest.defaultTestLoader
    if name in COMPLETE:
        return loader.loadTestsFromModule(import_module(f"{PACKAGE}.{name}"))
    from model_testers import test_case

    common = import_module(f"{PACKAGE}.test_modeling_common").ModelTesterMixin
    training = import_module(f"{PACKAGE}.test_training_mixin").TrainingTesterMixin
    return loader.loadTestsFromTestCase(test_case(name, common, training))


def main(tests: str, name: str, json_file: str, *options: str) -> None:
    """Run the suite of that name and write what came of it."""
    alarms = Alarms()
    logging.getLogger("llm_op_guard").addHandler(alarms)
    if "--guarded" in options:  # before Transformers is imported, as a program would
        og.set_policy(A="raise", B="raise")
        api.count_checks()
        og.install("transformers")
    prepare(Path(tests))
    outcomes = Outcomes(alarms)
    tests_found = suite(name)
    before = alarms.taken()
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # as pytest does; some tests look for warnings
        tests_found.run(outcomes)
    report = {"tests": outcomes.of, "alarms": before, "sites": sorted(og.status().guarded)}
    Path(json_file).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        main(*sys.argv[1:])
