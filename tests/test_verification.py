"""`og.verify`: a contract held against arguments, every rule of every class, and nothing called."""

from __future__ import annotations

import functools
import gc
import logging
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_stubs
from llm_op_guard.guard import asked
from llm_op_guard.policy import parse_environment, reset

ASKED: list[tuple[Any, ...]] = []


@og.predicate
def fits(*arguments: Any) -> Any:
    """Whether the first argument is small; remembers what it was asked."""
    ASKED.append(arguments)
    first = arguments[0]
    if isinstance(first, Exception):
        raise first
    if isinstance(first, torch.Tensor):
        return False
    return first.answer if hasattr(first, "answer") else first < 10


@pytest.fixture(autouse=True)
def nothing_asked() -> None:
    ASKED.clear()


def contract(body: str, parameters: str = "x, y=None", head: str = f"from {__name__} import fits\n") -> og.Contract:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return parse_stubs(f"{head}def operator({parameters}):\n{lines}\n", "shop.contract")["operator"]


def answering(answer: Any) -> Any:
    return SimpleNamespace(answer=answer)


def broken(target: Any, *args: Any, **kwargs: Any) -> list[str]:
    """The ids of the rules that are broken; no warning may be given."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            og.verify(target, *args, **kwargs)
        except og.GuardError as error:
            found = [violation.rule_id for violation in error.violations]
    ours = (og.GuardWarning, og.GuardInternalWarning)
    assert [str(warning.message) for warning in caught if issubclass(warning.category, ours)] == []
    return found


# ---------------------------------------------------------------- what is judged


@pytest.mark.parametrize(
    ("body", "kept", "against"),
    [
        ("require(fits(x), id='a')", (9,), (10,)),
        ("require(not fits(x), id='a')", (10,), (9,)),
        ("require(fits(x.n), id='a')", (SimpleNamespace(n=9),), (SimpleNamespace(n=10),)),
        ("require(fits(x + 1), id='a')", (8,), (9,)),
        ("require(fits(y[x]), id='a')", (0, [9, 10]), (1, [9, 10])),
        ("require(all(fits(i) for i in x), id='a')", ([1, 9],), ([1, 10],)),
        ("n = fits(x)\nrequire(n == y, id='a')", (9, True), (9, False)),
        ("if fits(x):\n    require(y > 1, id='a')", (9, 2), (9, 1)),
        ("if fits(x):\n    pass\nelse:\n    require(y > 1, id='a')", (10, 2), (10, 1)),
        ("require(fits(x) or y > 1, id='a')", (10, 2), (10, 1)),
        ("require(fits(x) > y, id='a')", (answering(3), 2), (answering(3), 3)),
        ("require(fits(x) == 'left', id='a')", (answering("left"),), (answering("right"),)),
        ("m, n = fits(x)\nrequire(m < n, id='a')", (answering((1, 2)),), (answering([2, 1]),)),
    ],
)
def test_rules_of_class_c_are_kept_and_broken(body: str, kept: tuple[Any, ...], against: tuple[Any, ...]) -> None:
    rules = contract(body)
    assert broken(rules, *kept) == []
    assert broken(rules, *against) == ["a"]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("if fits(x):\n    require(y > 1, id='a')", (10, 0)),
        ("require(fits(y), id='a')", (1, None)),  # an argument that is None is as good as absent
        ("require(fits(y[x]), id='a')", (0, [None])),
        ("require(fits(y[x]), id='a')", (1, [9])),
        ("require(fits(x.n), id='a')", (object(),)),
        ("require(fits(x), id='a')", (answering(None),)),  # it has nothing to say
        ("n = fits(x)\nrequire(n > 3, id='a')", (answering(None),)),
    ],
)
def test_where_a_rule_does_not_apply(body: str, arguments: tuple[Any, ...]) -> None:
    assert broken(contract(body), *arguments) == []


def test_all_classes_are_judged_and_all_broken_rules_are_told_together() -> None:
    rules = contract(
        "x: floating[B, D]\ny: int64[N]\nrequire(B == 2, id='a')\nrequire(within(y, 0, D), id='b')\n"
        "require(fits(N), id='c', because='ten at most', hint=f'{N} were given')"
    )
    assert broken(rules, torch.ones(2, 3), torch.zeros(9, dtype=torch.int64)) == []
    with pytest.raises(og.GuardError) as caught:
        og.verify(rules, torch.ones(4, 3), torch.full((10,), 3))
    found = [(v.rule_id, v.cost_class, v.site, v.operator) for v in caught.value.violations]
    place = ("shop.contract:operator", "operator")
    assert found == [("a", "A", *place), ("b", "B", *place), ("c", "C", *place)]
    text = str(caught.value).splitlines()
    assert text[0] == "operator: 3 rules are broken"
    assert text[5:9] == [
        "  3. N = 10, expected fits(N)",
        "     N = 10 from y.shape[0]",
        "     because ten at most",
        "     likely cause: 10 were given",
    ]
    assert any(line.split() == ["rule", "3", "c", "(class", "C,", "certain)"] for line in text)
    assert any(line.split()[:3] == ["x", "float32[4,", "3]"] for line in text)
    assert f"{Path(__file__).name}" in next(line for line in text if "called from" in line)
    assert pickle.loads(pickle.dumps(caught.value)).violations == caught.value.violations


def test_the_message_shows_what_was_compared() -> None:
    with pytest.raises(og.GuardError) as caught:
        og.verify(contract("require(fits(x) < y, id='a')"), answering(7), 7)
    (violation,) = caught.value.violations
    assert (violation.observed, violation.expected) == ("fits(x) = 7, y = 7", "fits(x) < y")
    with pytest.raises(og.GuardError) as caught:
        og.verify(contract("require(fits(x) == 'left', id='a')"), answering("secret"))
    assert "secret" not in str(caught.value)
    assert caught.value.violations[0].observed == "fits(x) = a text of 6 characters"


def test_the_consequence_of_a_broken_declaration_is_not_told() -> None:
    rules = contract("x: floating[3]\nrequire(fits(x, y), id='a')")
    assert broken(rules, torch.ones(4), 0) == ["x.shape"]


def test_what_waits_for_the_result_is_not_judged() -> None:
    rules = contract("x: int\nrequire(fits(x), id='a')\nensure(result > x)\nreturns: int")
    assert broken(rules, 9) == []
    assert broken(rules, 10) == ["a"]


def test_suspect_rules_warn_each_time() -> None:
    rules = contract("require(fits(x), id='a', certain=False)\nrequire(y > 1, id='b', certain=False)")
    for _ in range(2):
        with pytest.warns(og.GuardWarning, match="operator: 2 rules are broken") as caught:
            og.verify(rules, 10, 1)
        assert [warning.filename for warning in caught] == [__file__]
    assert og.record.counts == {("shop.contract:operator", "a"): 2, ("shop.contract:operator", "b"): 2}


def test_a_certain_rule_raises_whatever_policies_say() -> None:
    rules = contract("require(x > 1, id='a')\nrequire(fits(x), id='c')")
    for settings in ({"A": "off", "B": "off"}, {"A": "record"}, {"A": "warn"}, {"default": "record"}):
        with og.policy(**settings):
            assert broken(rules, 1) == ["a"]
            assert broken(rules, 10) == ["c"]


def test_what_is_broken_is_recorded(tmp_path: Path) -> None:
    og.record_to(tmp_path / "guards.jsonl")
    assert broken(contract("require(fits(x), id='a')"), 10) == ["a"]
    og.record_to(None)
    assert [(v.rule_id, v.cost_class) for v in og.record.violations] == [("a", "C")]
    assert '"class": "C"' in (tmp_path / "guards.jsonl").read_text()


def test_a_waiver_holds() -> None:
    rules = contract("require(fits(x), id='a')\nrequire(y > 1, id='b')")
    with og.waive("a", site="shop.contract:operator", reason="ticket 7"):
        assert broken(rules, 10, 2) == []
        assert og.record.violations[-1].waived == "ticket 7"
        assert broken(rules, 10, 1) == ["b"]
    assert broken(rules, 10, 2) == ["a"]


def test_nothing_is_judged_while_guards_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = contract("require(x > 10, id='a')\nrequire(fits(x), id='c')")
    og.disable()
    assert broken(rules, 10) == []
    og.enable()
    assert broken(rules, 10) == ["a", "c"]
    ASKED.clear()
    monkeypatch.setenv("LLM_OP_GUARD", "off")
    reset()
    assert broken(rules, 10) == []
    assert ASKED == []


# ---------------------------------------------------------------- what is verified


def double(x: int, *, y: int = 2) -> int:
    return x * y


def rule_c(name: str = "x") -> str:
    return f"from {__name__} import fits\n{name}: int\nrequire(fits({name}), id='c')"


def test_a_guarded_function_is_verified_and_not_called() -> None:
    calls = []

    @og.guard(rule_c() + "\nrequire(y > 1, id='a')")
    def operator(x: int, *, y: int = 2) -> int:
        calls.append(x)
        return x * y

    assert broken(operator, 9) == []
    assert broken(operator, x=10) == ["c"]
    assert broken(operator, 10, y=1) == ["c", "a"]
    assert calls == []
    assert og.record.violations[-1].site == f"{__name__}.{operator.__qualname__}"
    assert operator(10) == 20  # in a call no predicate is asked
    with pytest.raises(TypeError, match="operator: missing a required argument: 'x'"):
        og.verify(operator)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'z'"):
        og.verify(operator, 1, z=2)


class Shop:
    limit = 3

    @og.guard(rule_c() + "\nrequire(x < self.limit, id='a')")
    def method(self, x: int) -> int:
        return x

    @staticmethod
    @og.guard(rule_c())
    def static(x: int) -> int:
        return x

    @classmethod
    @og.guard(rule_c())
    def of_class(cls, x: int) -> int:
        return x


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return around


def callables() -> Iterator[tuple[str, Any]]:
    yield "bound method", Shop().method
    yield "staticmethod", Shop.static
    yield "classmethod", Shop.of_class
    yield "decorated", og.guard(rule_c())(logged(double))
    yield "builtin", og.guard(contract("x: int\nrequire(fits(x), id='c')", "x, /"))(abs)

    class Layer(torch.nn.Module):
        def forward(self, x: int) -> int:
            return x

    yield "module", og.guard(rule_c())(Layer())
    yield "module class", og.guard(rule_c())(Layer)()

    class Callable_:
        def __call__(self, x: int) -> int:
            return x

    yield "callable object", og.guard(rule_c())(Callable_())


@pytest.mark.parametrize("target", [pytest.param(target, id=name) for name, target in callables()])
def test_whatever_is_guarded_can_be_verified(target: Any) -> None:
    assert broken(target, 1) == []
    assert broken(target, 10)[0] == "c"
    target(1)


def test_a_method_is_verified_with_its_object() -> None:
    assert broken(Shop().method, 3) == ["a"]
    assert broken(Shop.method, Shop(), 3) == ["a"]


def test_an_operator_of_a_library_is_verified(tiny: Any) -> None:
    transformers = pytest.importorskip("transformers")
    tiny()
    og.install("transformers")
    rotate = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    q, k, cos = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8), torch.ones(1, 3, 8)
    assert broken(rotate, q, k, cos, cos) == []
    assert "cos.shape" in broken(rotate, q, k, torch.ones(1, 3, 4), torch.ones(1, 3, 4))


@pytest.mark.parametrize("target", [double, len, 3, None, "require(x > 1)", Shop, torch.nn.Linear(2, 2)])
def test_what_has_no_contract_cannot_be_verified(target: Any) -> None:
    with pytest.raises(TypeError, match=r"og\.verify takes a contract that og\.load has read, or something guarded"):
        og.verify(target, 1)


def test_a_contract_is_called_by_its_stub() -> None:
    rules = contract("require(y == 2, id='a')\nrequire(len(rest) == 0, id='b')\nrequire(k == 3, id='k')",
                     "x, /, y=2, *rest, k=3, **more")  # fmt: skip
    assert broken(rules, 1) == []
    assert broken(rules, 1, 3, 4, 5, k=1, z=2) == ["a", "b", "k"]
    with pytest.raises(TypeError, match="operator: missing a required argument: 'x'"):
        og.verify(rules)
    with pytest.raises(og.ContractError, match="a default in its stub has to be a literal"):
        og.verify(contract("require(x > 1)", "x=f()"))


# ---------------------------------------------------------------- predicates


def test_a_predicate_is_asked_once_for_the_same_arguments() -> None:
    rules = contract(
        "n = fits(x, y)\nrequire(fits(x, y), id='a', hint=f'{fits(x, y)}')\nrequire(n or fits(x, y) > 3, id='b')\n"
        "if fits(x, y):\n    require(y == 1, id='d')\nrequire(fits(x, 1 + 1) or True)"
    )
    model = answering(0)
    assert broken(rules, model, 1) == ["a", "b"]
    assert [(model, 1), (model, 2)] == ASKED
    og.verify(contract("require(fits(x, (1, y)) == fits(x, (True, y)))"), answering(1), 1)
    assert ASKED[2:] == [(ASKED[2][0], (1, 1)), (ASKED[2][0], (True, 1))]


def test_arguments_are_handed_over_as_they_are() -> None:
    x, y = torch.ones(2), {"a": answering(1)}
    assert broken(contract("require(fits(y['a'], x, y, 'text', x.shape, -1))"), x, y) == []
    ((one, two, three, *rest),) = ASKED
    assert one is y["a"] and two is x and three is y
    assert rest == ["text", (2,), -1]


def test_nothing_is_kept_alive() -> None:
    class Big:
        answer = True

    big = Big()
    og.verify(contract("require(fits(x))"), big)
    ASKED.clear()
    kept = weakref.ref(big)
    del big
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    ("answer", "how"),
    [
        (KeyError("secret"), "raised KeyError"),
        (RecursionError("secret"), "raised RecursionError"),
        (answering(torch.ones(1)), "returned a Tensor, which is no truth, number, text or tuple of these"),
        (answering({"secret"}), "returned a set, which is no truth, number, text or tuple of these"),
        (answering(object()), "returned a object, which is no truth, number, text or tuple of these"),
    ],
)
def test_a_predicate_that_gives_no_answer_is_a_warning(answer: Any, how: str, caplog: pytest.LogCaptureFixture) -> None:
    rules = contract("require(fits(x), id='a')\nn = fits(x)\nrequire(n > 3, id='b')\nrequire(y == 1, id='d')")
    with pytest.warns(og.GuardInternalWarning) as caught, pytest.raises(og.GuardError) as error:
        og.verify(rules, answer, 2)
    assert [violation.rule_id for violation in error.value.violations] == ["d"]
    assert [str(warning.message) for warning in caught] == [
        f"the predicate {__name__}.fits, which shop.contract:operator asks, {how}, "
        f"so these are not judged: a, n = fits(x)"
    ]
    assert "secret" not in caplog.text
    with caplog.at_level(logging.DEBUG), pytest.warns(og.GuardInternalWarning):
        og.verify(rules, answer, 1)
    assert len(ASKED) == 2


def test_where_warnings_are_errors_a_predicate_that_raises_still_stops_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        og.verify(contract("require(fits(x), id='a')"), KeyError())


def test_a_hint_that_gets_no_answer_is_left_out() -> None:
    rules = contract("require(fits(x), id='a', hint='big' if fits(y) else 'small')")
    told = pytest.warns(og.GuardInternalWarning, match="raised OSError, so a hint is left out")
    with told, pytest.raises(og.GuardError) as caught:
        og.verify(rules, 10, OSError())
    assert caught.value.violations[0].hint is None


def test_numpy_truths_are_truths() -> None:
    assert broken(contract("require(fits(x), id='a')"), answering(np.bool_(False))) == ["a"]
    assert broken(contract("require(fits(x), id='a')"), answering(np.bool_(True))) == []
    assert broken(contract("require(fits(x) == 3, id='a')"), answering(np.int64(4))) == ["a"]
    assert broken(contract("require(fits(x) == 1, id='a')"), answering(np.float32(1))) == []
    assert broken(contract("require(fits(x) < 1.5, id='a')"), answering(np.float16(2))) == ["a"]


@pytest.mark.parametrize("name", ["system", "fitz"])
def test_a_predicate_that_nobody_registered(name: str) -> None:
    rules = contract(f"require({name}(x))\nrequire(x > 1)", head=f"from {__name__} import {name}\n")
    near = "; did you mean 'fits'?" if name == "fitz" else ""
    with pytest.raises(og.PredicateError) as caught:
        og.verify(rules, 1)
    assert str(caught.value) == (
        f"the contract shop.contract:operator asks {__name__}.{name}, which nobody registered{near}; "
        f"import {__name__} first, and decorate the function with @og.predicate"
    )
    assert isinstance(caught.value, og.LlmOpGuardError)


def test_an_error_inside_goes_through_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("llm_op_guard.verification.explain", fail)
    with pytest.warns(og.GuardInternalWarning, match="failed while verifying shop.* .ZeroDivisionError"):
        og.verify(contract("require(x > 1)"), 0)


def test_what_is_beyond_the_language_is_not_judged() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert broken(contract("x: floating[3]\nrequire(fits(x))"), nested) == []
    assert ASKED == []


# ---------------------------------------------------------------- never in a call


@pytest.mark.parametrize("list_type", ["", "\nz: list[int]"])
def test_a_guarded_call_asks_no_predicate(list_type: str) -> None:
    text = (
        f"from {__name__} import fits\nx: int\nn = fits(x)\nif fits(y):\n    require(x == 2, id='a')\n"
        f"require(fits(x) and n, id='b')\nrequire(x > 0, id='d', because='positive')\nensure(result == x)"
    )

    @og.guard(text + list_type)
    def operator(x: int, y: int, z: Any = ()) -> int:
        return x

    assert operator(10, 1) == 10
    with pytest.raises(og.GuardError) as caught:
        operator(0, 1)
    assert [violation.rule_id for violation in caught.value.violations] == ["d"]
    assert ASKED == []
    with pytest.raises(og.GuardError) as caught:
        og.verify(operator, 10, 1)
    assert [violation.rule_id for violation in caught.value.violations] == ["a", "b"]


def test_a_contract_of_which_nothing_runs_in_a_call_is_refused() -> None:
    rules = contract("require(fits(x), id='a')\nif fits(y):\n    require(x > 1)")
    with pytest.raises(og.ContractError) as caught:
        og.guard(rules)(double)
    assert str(caught.value).startswith(
        "shop.contract:2:1: nothing of this contract runs in a call of double: every rule asks an imported predicate "
        "(class C); use og.verify"
    )
    og.guard(contract("require(fits(x), id='a')\nremember(y, seen=x)"))(lambda x, y=None: x)(1)  # something runs
    with pytest.raises(og.ContractError, match=r"use og\.verify"):
        og.guard(f"from {__name__} import fits\nrequire(fits(x))")(double)


def test_policies_know_no_class_c() -> None:
    said = "never run in a call, so there is nothing to set; og.verify and og.ingress judge them"
    with pytest.raises(og.PolicyError, match=said):
        og.set_policy(C="raise")
    with pytest.raises(og.PolicyError, match=said):
        og.policy(C="warn", A="warn")
    with pytest.raises(og.PolicyError, match=f"LLM_OP_GUARD: rules of class C.*{said}"):
        parse_environment("C=raise")


def test_statements_of_class_c_that_need_each_other_in_a_circle(tmp_path: Path) -> None:
    file = tmp_path / "circle.contract"
    file.write_text(f"from {__name__} import fits\ndef f(x):\n    a = fits(b)\n    b = fits(a)\n    require(a > x)\n")
    with pytest.raises(og.ContractError, match="cannot be put in order"):
        og.load(file)


def test_registered_predicates_are_known_by_module_and_name() -> None:
    assert f"{__name__}.fits" in asked.registered()
