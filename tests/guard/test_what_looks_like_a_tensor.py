"""Objects with a shape, a dtype or a rank of their own: read where nothing says that a tensor stands there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.guard.explain import explain

ARRAY = SimpleNamespace(shape=(1, 2, 3, 4), ndim=4, dtype=torch.float16, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("body", "broken"),
    [
        # A module has a dtype, and the rule behind the test is one of every call that meets it.
        ("if owner.dtype == float16:\n    require(x.ndim == 3)", ["x.ndim == 3"]),
        ("if owner.ndim == 4 and owner.dtype == float16:\n    require(x.ndim == 3)", ["x.ndim == 3"]),
        ("if owner.dtype == float32:\n    require(x.ndim == 3)", []),
        ("if owner.ndim != 4:\n    require(x.ndim == 3)\nelse:\n    require(x.ndim == 1)", ["x.ndim == 1"]),
        ("require(owner.dtype == x.dtype)", ["owner.dtype == x.dtype"]),
        # What is declared as a tensor is read as one.
        ("if owner.ndim == 4:\n    owner: any[_, _, _, D]\n    require(x.ndim == 3)", []),
        ("owner: None | any[_, _, _, D]\nrequire(owner.ndim == 2)", ["owner.type"]),
        ("if x.ndim == 3:\n    owner: any[...]\nrequire(owner.ndim == 2)", []),
        ("if x.ndim == 3:\n    owner: any[...]\nrequire(owner.shape[0] == 7)", []),
        ("if owner.ndim == 4:\n    owner: any[2] | int", ["owner.type"]),
    ],
)
def test_the_check_and_explain_read_the_same(body: str, broken: list[str]) -> None:
    x = torch.ones(2, 3)
    contract = parse_body(body, "operator", ("owner", "x"))
    assert [violation.rule_id for violation in explain(contract, {"owner": ARRAY, "x": x})] == broken

    @og.guard(body)
    def operator(owner: Any, x: Any) -> Any:
        return x

    if broken:
        with pytest.raises(og.GuardError) as caught:
            operator(ARRAY, x)
        assert [violation.rule_id for violation in caught.value.violations] == broken
    else:
        operator(ARRAY, x)


def test_no_property_is_run() -> None:
    class Loud:
        @property
        def ndim(self) -> int:
            raise AssertionError("a property was run")

    @og.guard("if owner.ndim == 4:\n    require(x.ndim == 3)")
    def operator(owner: Any, x: Any) -> Any:
        return x

    operator(Loud(), torch.ones(2))
