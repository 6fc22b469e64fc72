"""`pytest --op-guard`: a project's own tests with guards on; what breaks a rule fails, swallowed or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

_guards = pytest.StashKey[ExitStack]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option, and the libraries to guard."""
    group = parser.getgroup("llm-op-guard")
    group.addoption(
        "--op-guard",
        action="store_true",
        help="run with the operators of libraries guarded, values too; a broken rule fails the test that broke it",
    )
    parser.addini("op_guard_libraries", "libraries that --op-guard guards (default: transformers)", "args", [])


def pytest_configure(config: pytest.Config) -> None:
    """Guards come before the tests are collected, and with them the modules that take operators by name."""
    config.addinivalue_line("markers", "op_guard_expected: a test that breaks rules on purpose, under --op-guard")
    if not config.getoption("--op-guard"):
        return
    import llm_op_guard as og  # noqa: PLC0415 - not for who does not ask for it
    from llm_op_guard.api import default_libraries, known_libraries  # noqa: PLC0415

    libraries = config.getini("op_guard_libraries") or default_libraries()
    if unknown := [name for name in libraries if name not in known_libraries()]:
        raise pytest.UsageError(f"op_guard_libraries: nothing is known of {', '.join(unknown)}")
    guards = config.stash[_guards] = ExitStack()
    guards.enter_context(og.policy(A="raise", B="raise"))
    guards.enter_context(og.installed(*libraries))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Take the guards away."""
    if _guards in config.stash:
        config.stash[_guards].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test during which a rule was broken for certain, where its error did not get out."""
    if _guards not in item.config.stash:
        return (yield)
    import llm_op_guard as og  # noqa: PLC0415

    before = og.record.total
    yield
    count = og.record.total - before
    fresh = og.record.violations[-count:] if count > 0 else []
    certain = [violation for violation in fresh if violation.certain and violation.waived is None]
    if certain and item.get_closest_marker("op_guard_expected") is None:
        lines = "\n".join(f"  {violation.summary}" for violation in certain)
        pytest.fail(
            f"rules were broken and the test passed; one that means to is marked op_guard_expected:\n{lines}",
            pytrace=False,
        )
    return None
