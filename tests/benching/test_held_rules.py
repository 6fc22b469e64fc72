"""Who is timed checks what the table says: guards and checks by hand hold every rule and refuse no right call."""

from __future__ import annotations

import inspect

import pytest

from llm_op_guard.benching import by_hand, peers, torch_checks
from llm_op_guard.benching.calls import InPython, guarded, refuses, tried, why_not_native
from llm_op_guard.benching.operators import Operator, operators

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

NAMES = ["RoPE", "RMSNorm", "attention", "embedding", "cache update"]


@pytest.fixture(scope="module")
def found() -> dict[str, Operator]:
    made = [operator for operator in operators() if isinstance(operator, Operator)]
    return {operator.name: operator for operator in made}


def test_all_operators_are_found(found: dict[str, Operator]) -> None:
    assert list(found) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_function_that_does_nothing_has_the_operators_parameters(found: dict[str, Operator], name: str) -> None:
    bare, real = (list(inspect.signature(f).parameters) for f in (found[name].bare, found[name].real))
    assert [parameter for parameter in bare if parameter in real] == real
    assert tried(found[name].bare, found[name]) == ([rule for rule, _ in found[name].broken], 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_native_guard_holds_every_rule(found: dict[str, Operator], name: str) -> None:
    if reason := why_not_native(found[name].contract):
        pytest.skip(reason)
    assert tried(guarded(found[name].bare, found[name].contract).function, found[name]) == ([], 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_guard_in_python_holds_every_rule(found: dict[str, Operator], name: str) -> None:
    site = guarded(found[name].bare, found[name].contract, InPython)
    checks = site.guard.checks(("A",))
    assert checks.accepting is None
    assert "_accepts" not in checks.before.__globals__
    assert tried(site.function, found[name]) == ([], 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("checks", [by_hand.checks, torch_checks.checks], ids=["by_hand", "torch_check"])
def test_checks_by_hand_hold_every_rule(found: dict[str, Operator], name: str, checks: object) -> None:
    function = checks(torch)[name]  # type: ignore[operator]
    assert tried(function, found[name]) == ([], 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_operator_itself_takes_the_call_that_is_timed(found: dict[str, Operator], name: str) -> None:
    assert not refuses(found[name].real, found[name].arguments)


@pytest.mark.parametrize("name", NAMES)
def test_a_guard_that_was_taken_away_leaves_the_code(found: dict[str, Operator], name: str) -> None:
    site = guarded(found[name].bare, found[name].contract)
    assert site.function.__code__ is not found[name].bare.__code__
    site.remove()
    assert site.function.__code__ is found[name].bare.__code__


def test_jaxtyping_knows_no_devices(found: dict[str, Operator]) -> None:
    pytest.importorskip("jaxtyping")
    pytest.importorskip("beartype")
    for name, function in peers.by_jaxtyping(torch).items():
        through, _ = tried(function, found[name])
        assert 0 < len(through) < len(found[name].broken)
        assert not refuses(function, found[name].arguments)
        assert {rule for rule, _ in found[name].broken if "device" in rule} <= set(through)


def test_dltype_knows_no_devices(found: dict[str, Operator]) -> None:
    pytest.importorskip("dltype")
    for name, function in peers.by_dltype(torch).items():
        through, _ = tried(function, found[name])
        assert 0 < len(through) < len(found[name].broken)
        assert not refuses(function, found[name].arguments)
        assert {rule for rule, _ in found[name].broken if "device" in rule} <= set(through)
