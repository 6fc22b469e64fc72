"""Specimens: what is laid over real arguments and what of them stays, and that each shipped one runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm_op_guard import api
from llm_op_guard.catalogue import shipped
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.contract.path import Path
from llm_op_guard.faults.build import build
from llm_op_guard.faults.injection import inject
from llm_op_guard.faults.judge import judge
from llm_op_guard.faults.operators import Operator, operators_of
from llm_op_guard.faults.outcome import Trial, alone, outcomes
from llm_op_guard.faults.specimen import Specimen, Unmade
from llm_op_guard.guard import functions
from llm_op_guard.guard.call import Call, MappingSpec, ObjectSpec, SequenceSpec, TensorSpec
from llm_op_guard.guard.reading import UNSET

BODY = """
self.weight: floating[D]
x: floating[..., D]
require(self.groups > 0)
require(len(self.layers) >= index)
require(options['size'] > 0)
"""
PARAMETERS = ("self", "x", "index", "options")


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.groups = 2
        self.layers = [SimpleNamespace(name="first")]
        self.unspoken = object()


def arguments() -> dict[str, Any]:
    return {"self": Norm(), "x": torch.randn(2, 8), "index": 1, "options": {"size": 4, "color": "red"}, "scale": 0.5}


def nothing(_owner: Any, _wanted: Mapping[str, Any]) -> Iterator[None]:
    yield from ()


SPECIMEN = Specimen(parse_body(BODY, "operator", PARAMETERS), arguments, nothing)


def laid(path: Path, spec: Any) -> dict[str, Any]:
    call = SPECIMEN.call
    return SPECIMEN.arguments(call.without(path) if spec is UNSET else call.put(path, spec))


SELF = Path("self")


def of_self(name: str) -> Path:
    return Path("self", (name,))


def test_the_specimen_as_data_is_a_valid_call() -> None:
    call = SPECIMEN.call
    assert call.get(Path("x")) == TensorSpec("float32", (2, 8))
    assert call.get(of_self("weight")) == TensorSpec("float32", (8,), fill=(1.0,))
    judgement = judge(SPECIMEN.contract, call)
    assert judgement is not None and not judgement.broken


def test_tensors_are_those_that_were_judged_and_the_rest_is_real() -> None:
    judged, given = build(SPECIMEN.call), SPECIMEN.arguments(SPECIMEN.call)
    assert torch.equal(given["x"], judged["x"])
    assert torch.equal(given["self"].weight, judged["self"].weight)
    assert isinstance(given["self"], Norm) and isinstance(given["self"].weight, torch.nn.Parameter)
    assert type(given["self"].unspoken) is object and given["scale"] == 0.5
    assert given["options"] == {"size": 4, "color": "red"}


@pytest.mark.parametrize(
    ("path", "spec", "found"),
    [
        (Path("index"), 3, lambda given: given["index"] == 3),
        (Path("index"), None, lambda given: given["index"] is None),
        (SELF, None, lambda given: given["self"] is None),
        (of_self("groups"), 5, lambda given: given["self"].groups == 5),
        (of_self("groups"), UNSET, lambda given: not hasattr(given["self"], "groups")),
        (of_self("weight"), TensorSpec("int64", (3,)), lambda given: given["self"].weight.shape == (3,)),
        (of_self("weight"), None, lambda given: given["self"].weight is None),
        (of_self("weight"), 3, lambda given: given["self"].weight == 3),
        (of_self("layers"), SequenceSpec("list", ()), lambda given: given["self"].layers == []),
        (
            of_self("layers"),
            SequenceSpec("list", (ObjectSpec("x"), ObjectSpec("x"))),
            lambda given: [layer.name for layer in given["self"].layers] == ["first", "first"],
        ),
        (Path("options").item("size"), 7, lambda given: given["options"]["size"] == 7),
        (Path("options"), MappingSpec(()), lambda given: "size" not in given["options"]),
    ],
)
def test_what_a_call_says_is_laid_over(path: Path, spec: Any, found: Any) -> None:
    assert found(laid(path, spec))


def test_what_is_laid_over_is_gone_with_the_next_call() -> None:
    laid(of_self("groups"), 5)["self"].unspoken = None
    given = SPECIMEN.arguments(SPECIMEN.call)
    assert given["self"].groups == 2 and given["self"].unspoken is not None


def test_what_a_contract_reads_nothing_of_stays_real() -> None:
    specimen = Specimen(parse_body("x: floating[...]", "operator", ("self", "x")), arguments, nothing)
    assert isinstance(specimen.arguments(Call((("self", 3), ("x", TensorSpec("float32", (1,))))))["self"], Norm)


def test_an_object_is_changed_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(functions.IMPLEMENTATIONS, "cache_length", lambda cache: cache.length)

    def variants(owner: Any, _wanted: Mapping[str, Any]) -> Iterator[None]:
        for owner.length in (3, 4, 5):
            yield

    contract = parse_body("require(cache_length(cache) > 0)", "operator", ("cache",))
    specimen = Specimen(contract, lambda: {"cache": SimpleNamespace(length=1)}, variants)
    asked = [Call((("cache", ObjectSpec("object", answers=(("cache_length()", n),))),)) for n in (1, 4, 9)]
    assert [specimen.arguments(call)["cache"].length for call in asked[:2]] == [1, 4]
    with pytest.raises(Unmade, match=r"no real SimpleNamespace is made of which cache_length\(\) is 9, as of cache"):
        specimen.arguments(asked[2])
    operator = Operator("operator", lambda cache: cache.length, contract, specimen)
    assert alone(operator, asked[2]).kind == "not run"


def test_numbers_hang_on_the_place_of_a_tensor_alone() -> None:
    one, other = (
        build(Call((("q", TensorSpec("float32", (size, 4))), ("k", TensorSpec("float32", (2, 4)))), 3))
        for size in (2, 5)
    )
    assert torch.equal(one["k"], other["k"]) and not torch.equal(one["q"], one["k"])


def test_none_is_the_default_where_it_is_so_in_the_valid_call() -> None:
    def operator(x: torch.Tensor, axis: int = -1) -> torch.Tensor:
        return x.sum(dim=axis - 0)

    without, given = (Call((("x", TensorSpec("float32", (2, 3))), ("axis", axis))) for axis in (None, 0))
    trials = [Trial(without, without), Trial(without, given, ("axis",))]
    assert [outcome.kind for outcome in outcomes(Operator("operator", operator), trials)] == [
        "harmless",
        "obscure error",
    ]


# ---------------------------------------------------------------- those of the library

SAMPLE = [
    "torch/functional:scaled_dot_product_attention",
    "torch/functional:cross_entropy",
    "transformers/attention:sdpa_attention_forward",
    "transformers/cache:static_layer_update",
    "transformers/entry:forward",
    "transformers/entry:learned_positions",
    "transformers/logits:sequence_bias",
    "transformers/logits:unconditional_logits",
    "transformers/mask:create_causal_mask",
    "transformers/moe:router",
    "transformers/norm:rms_norm",
]


@pytest.fixture(scope="module")
def operators() -> dict[str, Operator]:
    pytest.importorskip("transformers", minversion="5.24")
    return operators_of(api.integrations(), set(SAMPLE))


@pytest.mark.parametrize("name", SAMPLE)
def test_the_specimen_is_valid_and_runs(name: str, operators: dict[str, Operator]) -> None:
    operator = operators[name]
    call, why = operator.specimen_call()
    assert call is not None, why
    judgement = judge(operator.contract or shipped()[name], call)
    assert judgement is not None and not judgement.broken
    assert alone(operator, call).kind == "silent"


def test_mutants_of_a_method_run(operators: dict[str, Operator]) -> None:
    operator = operators["transformers/norm:rms_norm"]
    assert operator.contract is not None
    result = inject("norm", operator.contract, operator, valid=10)
    assert result.cases and not [case for case in result.cases if case.unguarded.kind == "not run"]
    assert "silent" in {case.unguarded.kind for case in result.cases if case.rule == "weight_fits"}
