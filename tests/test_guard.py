"""`og.guard` as a user meets it: carriers, what is left unchanged, what is refused, what an error carries."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import linecache
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.guard.guard import Guard
from llm_op_guard.install.operation import GUARDED
from llm_op_guard.install.patch import sweep
from llm_op_guard.install.site import LivingSites


@og.guard
def clinical_entity_linker(input_ids: Any, attention_mask: Any, table: Any, *, scale: float = 1.0) -> Any:
    """Look up an embedding for every recognised entity.

    Contract:
        input_ids: int64[B, L]
        attention_mask: integer[B, L] | boolean[B, L]
        table: floating[V, E]
        require(within(input_ids, 0, V), error=IndexError, hint="uncleaned Unicode control characters upstream?")
    """
    return table[input_ids] * scale


IDS = torch.tensor([[1, 2], [3, 4]])
MASK = torch.ones(2, 2, dtype=torch.bool)
TABLE = torch.ones(5, 3)


def test_a_valid_call_goes_through_unchanged() -> None:
    assert torch.equal(clinical_entity_linker(IDS, MASK, TABLE, scale=2.0), TABLE[IDS] * 2)
    assert torch.equal(clinical_entity_linker(table=TABLE, input_ids=IDS, attention_mask=MASK.int()), TABLE[IDS])


def test_a_broken_call_does_not_reach_the_function() -> None:
    reached = []

    @og.guard("x: floating[N]")
    def operator(x: Any) -> None:
        reached.append(x)

    with pytest.raises(og.GuardError):
        operator(torch.ones(2, 2))
    assert reached == []


def test_the_error_named_by_the_rule_can_be_caught() -> None:
    with pytest.raises(IndexError) as caught:
        clinical_entity_linker(IDS + 1, MASK, TABLE)
    error = caught.value
    assert isinstance(error, og.GuardError) and isinstance(error, ValueError)
    (violation,) = error.violations
    assert violation.operator == "clinical_entity_linker"
    assert violation.rule_id == "within(input_ids, 0, V)"
    assert (violation.cost_class, violation.certain, violation.argument) == ("B", True, "input_ids")
    assert violation.hint == "uncleaned Unicode control characters upstream?"
    assert violation.call_site is not None
    assert violation.call_site.file == __file__
    assert violation.call_site.function == "test_the_error_named_by_the_rule_can_be_caught"
    assert [t.name for t in violation.tensors] == ["input_ids", "attention_mask", "table"]
    assert violation.contract_id == "test_guard.py:clinical_entity_linker"
    assert len(violation.contract_hash) == 12


def test_a_declaration_names_its_error_too() -> None:
    @og.guard("x: floating[B, D] = why(error=RuntimeError)\ny: floating[B] = why(error=TypeError, certain=False)")
    def operator(x: Any, y: Any) -> Any:
        return x

    operator(torch.ones(2, 3), torch.ones(2))
    for wrong in (torch.ones(2), torch.ones(2, 3).long(), 3):
        with pytest.raises(RuntimeError) as caught:
            operator(wrong, torch.ones(2))
        assert isinstance(caught.value, og.GuardError)
        assert not isinstance(caught.value, TypeError)
    with pytest.warns(og.GuardWarning):
        operator(torch.ones(2, 3), torch.ones(2).long())


def test_an_error_for_clients_of_the_openai_api() -> None:
    with pytest.raises(og.GuardError) as caught:
        clinical_entity_linker(IDS + 1, MASK, TABLE)
    assert json.loads(json.dumps(caught.value.to_dict(style="openai"))) == {
        "error": {
            "message": "clinical_entity_linker: input_ids[1, 1] = 5 (of 4, 1 element is wrong), "
            "expected 0 <= input_ids < 5 (V)",
            "type": "invalid_request_error",
            "param": "input_ids",
            "code": "within(input_ids, 0, V)",
        }
    }


def test_a_client_is_told_of_every_rule_and_of_no_file() -> None:
    with pytest.raises(og.GuardError) as caught:
        clinical_entity_linker(IDS + 1, MASK.float(), TABLE)
    error = caught.value.to_dict(style="openai")["error"]
    assert "attention_mask" in error["message"] and "input_ids" in error["message"]
    assert __file__ not in error["message"]
    assert og.GuardError("text").to_dict(style="openai") == {
        "error": {"message": "text", "type": "invalid_request_error", "param": None, "code": None}
    }


def test_an_unknown_style_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown style 'anthropic' of GuardError\.to_dict; known: 'openai', or none"):
        og.GuardError("text").to_dict(style="anthropic")


def test_errors_survive_pickling_and_become_json() -> None:
    with pytest.raises(og.GuardError) as caught:
        clinical_entity_linker(IDS + 1, MASK[:1], TABLE)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is type(caught.value)
    assert str(copy) == str(caught.value)
    assert copy.violations == caught.value.violations
    data = json.loads(json.dumps(caught.value.to_dict()))
    assert data["error"] == "INPUT_VALIDATION_FAILED"
    assert data["details"].startswith("clinical_entity_linker: attention_mask.shape[0] = 1, expected B = 2; ")
    assert data["suggestion"] == "uncleaned Unicode control characters upstream?"
    assert [v["rule_id"] for v in data["violations"]] == ["attention_mask.shape", "within(input_ids, 0, V)"]
    assert data["violations"][0]["tensors"][2] == {
        "name": "table",
        "dtype": "float32",
        "shape": [5, 3],
        "device": "cpu",
    }


def test_what_inspect_and_pickle_see_is_unchanged() -> None:
    assert clinical_entity_linker.__name__ == "clinical_entity_linker"
    assert list(inspect.signature(clinical_entity_linker).parameters) == [
        "input_ids",
        "attention_mask",
        "table",
        "scale",
    ]
    assert clinical_entity_linker.__doc__ is not None and "Contract:" in clinical_entity_linker.__doc__
    assert "return table[input_ids] * scale" in inspect.getsource(clinical_entity_linker)
    assert pickle.loads(pickle.dumps(clinical_entity_linker)) is clinical_entity_linker


def test_the_function_handed_in_is_left_as_it_is() -> None:
    def operator(x: Any) -> Any:
        return x

    code = operator.__code__
    guarded = og.guard("x: floating[N]")(operator)
    assert operator.__code__ is code
    assert operator(3) == 3
    with pytest.raises(og.GuardError):
        guarded(3)


def test_off_is_the_functions_own_code() -> None:
    def operator(x: Any) -> Any:
        return x

    guarded = og.guard("x: floating[N]")(operator)
    assert guarded.__code__ is not operator.__code__
    og.set_policy(A="off", B="off")
    assert guarded.__code__ is operator.__code__
    assert guarded(3) == 3
    og.set_policy(A="raise")
    with pytest.raises(og.GuardError):
        guarded(3)


def test_contract_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.contract"
    file.write_text('def linker(x, w):\n    """Mine."""\n    x: any[B, D]\n    w: any[D]\n')
    contract = og.load(file)["linker"]

    @og.guard(contract)
    def linker(w: Any, x: Any, free: Any = None) -> int:
        return 1

    assert linker(torch.ones(3), torch.ones(2, 3)) == 1
    with pytest.raises(og.GuardError, match=r"w\.shape\[0\] = 4, expected D = 3|x\.shape"):
        linker(torch.ones(4), torch.ones(2, 3))
    with pytest.raises(og.ContractError, match=r"the contract linker has a parameter 'w' that .*other lacks"):

        @og.guard(contract)
        def other(x: Any) -> None: ...


def test_methods_and_keyword_arguments() -> None:
    class Layer:
        heads = 4

        @og.guard("x: any[B, D]\nrequire(D % self.heads == 0, id='whole_heads')")
        def forward(self, x: Any, *rest: Any, **options: Any) -> tuple[Any, ...]:
            return x, rest, options

    x = torch.ones(2, 8)
    assert Layer().forward(x, 1, 2, k=3) == (x, (1, 2), {"k": 3})
    with pytest.raises(og.GuardError) as caught:
        Layer().forward(torch.ones(2, 6))
    assert (
        caught.value.violations[0].operator
        == "test_methods_and_keyword_arguments.<locals>.Layer.forward".rpartition("<locals>.")[2]
    )


def test_async_functions() -> None:
    @og.guard("n: int\nrequire(n > 0, id='positive')")
    async def operator(n: int) -> int:
        return n

    assert asyncio.run(operator(2)) == 2
    with pytest.raises(og.GuardError):
        asyncio.run(operator(0))


def test_promises_of_the_result() -> None:
    @og.guard("x: T[B, D] @ dev\nreturns: T[B, 2 * D] @ dev\nrequire(result.shape[1] < 9, id='narrow')")
    def widen(x: Any, times: int = 2) -> Any:
        return torch.cat([x] * times, dim=1)

    assert widen(torch.ones(2, 3)).shape == (2, 6)
    with pytest.raises(og.GuardError) as caught:
        widen(torch.ones(2, 3), times=3)
    assert [(v.rule_id, v.observed, v.expected) for v in caught.value.violations] == [
        ("result.shape", "result.shape[1] = 9", "2 * D = 6"),
    ]
    with pytest.raises(og.GuardError) as caught:
        widen(torch.ones(2, 5))
    assert [v.rule_id for v in caught.value.violations] == ["narrow"]


def test_like_is_the_argument_as_it_was_at_entry() -> None:
    @og.guard("x: any[...]\nreturns: like(x)")
    def operator(x: Any, grow: bool) -> Any:
        result = x.clone()
        if grow:
            x.unsqueeze_(0)
        return result

    assert operator(torch.ones(2), False).shape == (2,)
    assert operator(torch.ones(2), True).shape == (2,)


def test_suspect_rules_warn_once_and_are_counted() -> None:
    @og.guard("x: any[N]\nrequire(N < 3, id='short', certain=False)\nrequire(N < 9, id='limit')")
    def operator(x: Any) -> int:
        return len(x)

    og.record.clear()
    with pytest.warns(og.GuardWarning, match="operator: N = 5, expected N < 3") as caught:
        assert operator(torch.ones(5)) == 5
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [operator(torch.ones(n)) for n in (2, 4, 5)] == [2, 4, 5]
    (site,) = {site for site, _ in og.record.counts}
    assert og.record.counts == {(site, "short"): 3}
    with pytest.raises(og.GuardError) as raised:
        operator(torch.ones(9))
    assert [v.rule_id for v in raised.value.violations] == ["short", "limit"]


def test_no_contract_is_an_error() -> None:
    with pytest.raises(og.ContractError, match="no contract found for undocumented: it has no docstring"):

        @og.guard
        def undocumented(x: Any) -> None: ...

    with pytest.raises(og.ContractError, match="its docstring has no `Contract:` section"):

        @og.guard
        def documented(x: Any) -> None:
            """Says nothing."""


def test_several_sections_and_sections_on_one_line_are_refused() -> None:
    with pytest.raises(og.ContractError, match="operator: a docstring has one `Contract:` section"):

        @og.guard
        def operator(x: Any) -> None:
            """Does.

            Contract:
                x: floating[B]

            Contract:
                require(B > 100)
            """

    with pytest.raises(og.ContractError, match="`Contract:` stands alone on its line"):

        @og.guard
        def one_line(x: Any) -> None:
            """Contract: x: floating[B]"""


def test_a_decorator_below_that_hides_the_parameters() -> None:
    @og.guard
    @torch.no_grad()
    def operator(x: Any) -> Any:
        """Does.

        Contract:
            x: floating[B]
        """
        return x * torch.ones(1, requires_grad=True)

    @torch.no_grad()
    @og.guard("x: floating[B]")
    def other(x: Any) -> Any:
        return x * torch.ones(1, requires_grad=True)

    for guarded in (operator, other):
        assert list(inspect.signature(guarded).parameters) == ["x"]
        assert not guarded(torch.ones(2)).requires_grad
        with pytest.raises(og.GuardError):
            guarded(x=1)


def test_two_guards_on_one_function_are_refused() -> None:
    with pytest.raises(TypeError, match="operator is guarded already; put both contracts into one"):

        @og.guard("require(n > 0)")
        @og.guard("require(n < 10)")
        def operator(n: Any) -> None: ...


def test_an_error_in_a_string_names_file_and_line() -> None:
    with pytest.raises(og.ContractError) as caught:

        @og.guard("""
            n: int
            require(m > 1)
        """)
        def operator(n: Any) -> None: ...

    line = inspect.getsource(sys.modules[__name__]).splitlines()[caught.value.line - 1]
    assert (caught.value.file, line.strip()) == (__file__, "require(m > 1)")
    assert line[caught.value.column - 1 :] == "m > 1)"


def test_guards_are_collected_with_their_functions() -> None:
    def make() -> weakref.ref[Guard]:
        @og.guard("n: int\nrequire(n > 0)")
        def soon_forgotten(n: Any) -> Any:
            return n

        soon_forgotten(1)
        return weakref.ref(getattr(soon_forgotten, GUARDED).guard)

    guards = [make() for _ in range(20)]
    gc.collect()
    sweep()
    gc.collect()
    assert [guard() for guard in guards] == [None] * 20
    assert [file for file in linecache.cache if "soon_forgotten" in file] == []


def test_without_torch() -> None:
    program = """
import sys
class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import llm_op_guard as og
@og.guard("x: floating[B] | None\\nn: int\\nrequire(n > 0, id='positive')\\nrequire(T in floating)\\nw: T[B] | None")
def operator(n, x=None, w=None): return n
print(operator(3))
for bad in ({"n": 0}, {"n": 1, "x": [1.0]}):
    try: operator(**bad)
    except og.GuardError as error: print(error.violations[0].rule_id)
print("torch" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.stdout.split(), ran.stderr) == (["3", "positive", "x.type", "False"], "")


def test_a_guard_may_be_made_before_torch_is_imported() -> None:
    program = """
import sys, llm_op_guard as og
@og.guard("x: T[B]\\ny: T[B]\\nrequire(finite(x))")
def operator(x, y): return "ran"
import torch
print(operator(torch.ones(2), torch.ones(2)))
for bad in ((torch.ones(2), torch.ones(3)), (torch.ones(2) / 0, torch.ones(2)), (torch.ones(2), [1, 2])):
    try: operator(*bad)
    except og.GuardError as error: print(error.violations[0].rule_id)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.stdout.split("\n")[:-1], ran.stderr) == (["ran", "y.shape", "finite(x)", "y.type"], "")


def test_an_error_in_a_docstring_names_file_and_line() -> None:
    with pytest.raises(og.ContractError) as caught:

        @og.guard
        def operator(x: Any) -> None:
            """Does.

            Contract:
                x: floating[B]
                require(C > 1)
            """

    line = inspect.getsource(sys.modules[__name__]).splitlines()[caught.value.line - 1]
    assert caught.value.file == __file__
    assert line[caught.value.column - 1 :] == "C > 1)"
    assert line.strip() == "require(C > 1)"


@pytest.mark.parametrize("target", [3, None, [], object()])
def test_what_cannot_be_called_is_a_type_error(target: Any) -> None:
    for guard in (og.guard, og.guard("x: any")):
        with pytest.raises(TypeError, match="it takes a callable, a contract as text, or a loaded contract"):
            guard(target)


def test_docstrings_removed_by_OO() -> None:  # noqa: N802 - the name of the option
    program = """
import llm_op_guard as og
@og.guard("n: int")
def fine(n): return n
try:
    fine("x")
except og.GuardError: print("string contracts work")
try:
    @og.guard
    def operator(n):
        '''Contract:
            n: int
        '''
except og.ContractError as error: print(error.problem)
"""
    ran = subprocess.run([sys.executable, "-OO", "-c", program], capture_output=True, text=True, check=True)
    first, second = ran.stdout.splitlines()
    assert first == "string contracts work"
    assert second.startswith(
        "operator has no docstring because python -OO removes docstrings, and its contract with it"
    )


def test_a_guard_that_fails_inside_lets_the_call_through(monkeypatch: pytest.MonkeyPatch) -> None:
    @og.guard("n: int")
    def operator(n: Any) -> Any:
        return n

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(sys.modules["llm_op_guard.guard.guard"], "explain", fail)
    with pytest.warns(og.GuardInternalWarning, match="failed while checking .*operator"):
        assert operator("x") == "x"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert operator("x") == "x"


class Odd:
    """Raises whatever is asked of it."""

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __bool__(self) -> bool:
        raise RuntimeError("bool")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "make",
    [
        Odd,
        lambda: float("nan"),
        lambda: 10**400,
        lambda: {"a": torch.ones(2)},
        lambda: [[]],
        lambda: type,
        lambda: b"\xff",
    ],
)
def test_the_message_builder_never_raises(make: Any) -> None:
    odd = make()

    @og.guard("x: floating[N]\nrequire(x.shape[0] == other, id='r')")
    def operator(x: Any, other: Any) -> None: ...

    with pytest.raises(og.GuardError):
        operator(odd, odd)
    with pytest.raises(og.GuardError):
        operator(torch.ones(2, 2), odd)


def test_many_threads_share_a_guard() -> None:
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                clinical_entity_linker(IDS, MASK, TABLE)
                with pytest.raises(og.GuardError):
                    clinical_entity_linker(IDS, MASK[:1], TABLE)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_compiled_functions_keep_their_guard() -> None:
    @og.guard("x: T[B, D]\nw: T[D]\nrequire(D % 2 == 0, id='even')")
    def operator(x: Any, w: Any) -> Any:
        return x * w

    compiled = torch.compile(lambda x, w: operator(x, w) + 1, backend="eager")
    assert compiled(torch.ones(2, 4), torch.ones(4)).shape == (2, 4)
    with pytest.raises(Exception, match="expected D = 4"):
        compiled(torch.ones(2, 4), torch.ones(1))


def test_the_site_is_kept_on_the_function() -> None:
    assert getattr(clinical_entity_linker, GUARDED).name == f"{__name__}.clinical_entity_linker"


def test_a_check_that_could_not_be_made_is_made_at_the_next_change(monkeypatch: pytest.MonkeyPatch) -> None:
    @og.guard("x: any[B, D]\nrequire(D > 1)")
    def wide(x: Any) -> Any:
        return x

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    og.set_policy(A="off", B="off")
    monkeypatch.setattr(getattr(wide, GUARDED).guard, "checks", fail)
    with pytest.raises(MemoryError):
        og.set_policy(A="raise")
    monkeypatch.undo()
    og.set_policy(B="raise")
    with pytest.raises(og.GuardError):
        wide(torch.ones(2, 1))


def test_a_site_may_come_while_others_are_gone_through() -> None:
    """As where one thread changes the policy, and another guards a function."""
    functions = [og.guard("n: int")(lambda n: n) for _ in range(3)]
    first, *more = (getattr(function, GUARDED) for function in functions)
    sites = LivingSites()
    sites.add(first)
    for _ in sites:
        for site in more:
            sites.add(site)
    assert set(sites) == {first, *more}
