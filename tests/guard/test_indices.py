"""Items of lists, tuples, dicts, shapes and modules, read at an index that is itself read."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_body, parse_stubs
from llm_op_guard.guard.explain import explain

pytestmark = pytest.mark.usefixtures("no_alarm")

LINEARS = (nn.Linear(2, 3), nn.Linear(2, 4), nn.Linear(2, 5))


def observed(body: str, **arguments: Any) -> list[str]:
    """What is said of a call; the compiled check says so too."""
    contract = parse_body(body, "operator", tuple(arguments))
    said = [violation.observed for violation in explain(contract, arguments)]

    def operator() -> None: ...

    namespace: dict[str, Any] = {}
    exec(f"def operator({', '.join(arguments)}): ...", namespace)
    guarded = og.guard(body)(namespace["operator"])
    if said:
        with pytest.raises(og.GuardError) as caught:
            guarded(**arguments)
        assert [violation.observed for violation in caught.value.violations] == said
    else:
        guarded(**arguments)
    return said


@pytest.mark.parametrize("i", [1, -2, True, np.int64(1)])
def test_lists_and_tuples_at_an_index(i: Any) -> None:
    for xs in ([3, 4, 5], (3, 4, 5), torch.Size((3, 4, 5)), torch.zeros(3, 4, 5).shape):
        assert observed("require(xs[i] == 4)", xs=xs, i=i) == []
        assert observed("require(xs[i] == 5)", xs=xs, i=i) == ["xs[i] = 4"]
        assert observed("i: int\nrequire(xs[i] == 5 and has(xs[i]))", xs=xs, i=i) == ["xs[i] = 4"]
    assert observed("i: int\nrequire(has(xs[i]))", xs=[3, 4], i=i) == []


@pytest.mark.parametrize(
    "i", [3, -4, 1.0, None, "1", torch.tensor(1), torch.tensor([0, 1]), object(), (1,), np.array(1), slice(1)]
)
def test_what_is_no_index_or_out_of_range_does_not_apply(i: Any) -> None:
    for xs in ([3, 4, 5], (3, 4, 5), nn.ModuleList(LINEARS), nn.ParameterList([torch.ones(1)] * 3), None, 7, "abc"):
        assert observed("require(xs[i] == 9)", xs=xs, i=i) == []
        # What is no index at all is not the same as nothing at an index.
        plain = not isinstance(i, torch.Tensor | np.ndarray | slice) and type(i) is not object
        assert observed("require(has(xs[i]))", xs=xs, i=i) == (["the condition is false"] if plain else [])
        assert observed("require(xs[i].x == 9)", xs=xs, i=i) == []


def test_the_bounds_of_a_list() -> None:
    for i, expected in ((-4, []), (-3, ["xs[i] = 7"]), (2, ["xs[i] = 9"]), (3, [])):
        assert observed("require(xs[i] == 0)", xs=[7, 8, 9], i=i) == expected


def test_any_expression_is_an_index() -> None:
    assert observed("require(sizes[n - 1] == sizes[-n])", sizes=[1, 2, 3], n=1) == ["sizes[n - 1] = 1, sizes[-n] = 3"]
    assert observed("require(xs[ys[n]] == 1)", xs=[0, 1], ys=[1, 0], n=0) == []
    assert observed("require(xs[n > 1] == 1)", xs=[1, 0], n=2) == ["xs[n > 1] = 0"]
    assert observed("require(xs[len(xs) - 1] == 1)", xs=[1, 0]) == ["xs[len(xs) - 1] = 0"]
    assert observed("require((3, 4)[n] == 3)", n=1) == ["(3, 4)[n] = 4"]
    assert observed("require(xs[n / 2] == 3)", xs=[1, 3], n=2) == []
    assert observed("require(xs[n / 2] == 3)", xs=[1, 3], n=3) == ["3 / 2 is not a whole number"]
    assert observed("i = n + 1\nrequire(xs[i] == 3)", xs=[1, 2], n=0) == ["xs[i] = 2"]
    assert observed("x: any[B, L]\nrequire(xs[B] == L)", x=torch.ones(1, 2), xs=[0, 3]) == ["xs[B] = 3, L = 2"]
    assert observed("require(version('torch')[n] < 0)", n=0) != []


def test_sizes_by_an_index() -> None:
    assert observed("x: any[sizes[n]]", x=torch.ones(3), sizes=(2, 3), n=1) == []
    assert observed("x: any[sizes[n]]", x=torch.ones(3), sizes=(2, 3), n=0) == ["x.shape[0] = 3"]
    assert observed("x: any[sizes[n]]", x=torch.ones(3), sizes=(2, 3), n=2) == []
    assert observed("require(x.shape[n] == 2)", x=torch.ones(2, 3), n=-1) == ["x.shape[n] = 3"]


class Kind(str, Enum):  # noqa: UP042 - as libraries have them
    SLIDING = "sliding"


class Place(IntEnum):
    FIRST = 0


class Loud(str):
    def __hash__(self) -> int:
        raise AssertionError("code of an argument was run")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("code of an argument was run")


def test_dicts_at_a_key() -> None:
    table = {"sliding": 1, 0: 2, (1, "a"): 3, torch.int8: 4, None: 5, torch.device("cpu"): 6}
    for key, value in ((Kind.SLIDING, 1), ("sliding", 1), (Place.FIRST, 2), (False, 2), (0.0, 2), ((1, "a"), 3),
                       (torch.int8, 4), (None, 5), (torch.device("cpu"), 6)):  # fmt: skip
        assert observed("require(table[key] == 9)", table=table, key=key) == [f"table[key] = {value}"], key
        assert observed("require(table[key] == 9)", table=OrderedDict(table), key=key) != []
    for key in ("other", 1, (1,), object(), [1], torch.tensor(0), Loud("sliding"), (Loud("sliding"), 1), {"a": 1}):
        assert observed("require(table[key] == 9)", table=table, key=key) == []
        assert observed("require(table[key] == 9)", table=defaultdict(int, table), key=key) == []
    # Whether it is there is not known of a key whose class would have a say in that.
    for key in (object(), (object(),), Loud("sliding"), (Loud("sliding"), 1)):
        assert observed("require(has(table[key]))", table=table, key=key) == []
        assert observed("require(get(table[key], 1) == 2)", table=table, key=key) == []
    assert observed("require(has(table[key]))", table=table, key="other") != []


def test_a_default_is_never_made() -> None:
    table: dict[str, int] = defaultdict(int)
    assert observed("require(table[key] == 9)", table=table, key="a") == []
    assert dict(table) == {}


def test_parts_of_what_stands_at_an_index() -> None:
    base = {"a": torch.ones(2, 3), "b": torch.ones(4)}
    state = {"a": torch.ones(2, 3), "b": torch.ones(5), "c": torch.ones(1)}
    same = "for name, w in items(state):\n    require(w.shape == base[name].shape, id='r')"
    assert observed(same, base=base, state=base) == []
    (said,) = observed(same, base=base, state=state)
    assert said == "w.shape = (5,), base[name].shape = (4,) at item 1 of items(state)"
    assert observed("require(all(has(base[name]) for name in state))", base=base, state=state) == [
        "the condition is false at item 2 of state"
    ]
    assert observed("require(get(base[name], 1) == 2)", base={"a": None}, name="a") == ["get(base[name], 1) = 1"]
    assert observed("require(all(t > 1 for t in xs[i]))", xs=([1], [2]), i=0) == ["t = 1 at item 0 of xs[i]"]
    assert observed("require(all(t > 1 for _, t in items(xs[i])))", xs=({"a": 2}, {"a": 1}), i=1) != []


def test_value_functions_of_what_stands_at_an_index() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, float("nan")])
    assert observed("require(finite(xs[i]))", xs=[bad, good], i=1) == []
    (said,) = observed("require(finite(xs[i]))", xs=[bad, good], i=0)
    assert said == "xs[i][1] = nan (of 2, 1 element is wrong)"
    assert observed("require(finite(xs[i][1:]))", xs=[bad, good], i=0) != []
    assert observed("require(finite(xs[i][:1]))", xs=[bad, good], i=0) == []
    assert observed("require(finite(layers[i].weight))", layers=nn.ModuleList(LINEARS), i=0) == []
    # Of a tensor, the same is a part of it; a literal index is one as any other.
    assert observed("require(finite(x[i]))", x=bad, i=0) == []
    assert observed("require(finite(x[i]))", x=bad, i=1) != []
    assert observed("require(finite(x[1]))", x=bad) != []
    assert observed("require(finite(x[i]))", x=bad, i=2) == []


CONTAINERS = {
    "list": nn.ModuleList(LINEARS),
    "sequential": nn.Sequential(*LINEARS),
    "named": nn.Sequential(OrderedDict(zip("abc", LINEARS, strict=True))),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_modules_at_an_index(container: str) -> None:
    for i in (0, 1, 2, -1, -3):
        layers: Any = CONTAINERS[container]
        assert observed("require(layers[i].out_features == n)", layers=layers, i=i, n=layers[i].out_features) == []
        assert observed("require(layers[i].out_features == 9)", layers=layers, i=i) != []
    assert observed("require(layers[i].out_features == 9)", layers=CONTAINERS[container], i="a") == []


def test_the_other_containers_of_torch() -> None:
    modules = nn.ModuleDict({"q": LINEARS[0], "k": LINEARS[1]})
    assert observed("require(m[name].out_features == 3)", m=modules, name="q") == []
    assert observed("require(m[name].out_features == 3)", m=modules, name="k") == ["m[name].out_features = 4"]
    assert observed("require(m[name].out_features == 3)", m=modules, name=1) == []
    parameters = nn.ParameterList([torch.ones(1), torch.ones(2), 7])
    assert observed("require(p[i].shape[0] == 1)", p=parameters, i=0) == []
    assert observed("require(p[i].shape[0] == 1)", p=parameters, i=-2) == ["p[i].shape[0] = 2"]
    assert observed("require(p[i] == 1)", p=parameters, i=2) == ["p[i] = 7"]
    named = nn.ParameterDict({"training": torch.ones(1), "k": torch.ones(2)})
    assert observed("require(p[name].shape[0] == 1)", p=named, name="k") == ["p[name].shape[0] = 2"]
    for name in ("_size", "weight", 0):
        assert observed("require(p[name].shape[0] == 1)", p=named, name=name) == []
    assert observed("require(p[name].out_features == 9)", p=LINEARS[0], name=0) == []


def boom(*_: Any) -> Any:
    raise AssertionError("code of an argument was run")


class Shifted(nn.ModuleList):
    __getitem__ = boom


class Odd(list):  # type: ignore[type-arg]
    __getitem__ = boom


class OddLength(tuple):  # type: ignore[type-arg]
    __len__ = boom


class OnDemand:
    __getitem__ = __getattr__ = boom


class Pair(NamedTuple):
    a: int
    b: int


def test_a_getitem_of_a_class_is_never_called() -> None:
    odd = (Shifted(LINEARS), Odd([1, 2]), OddLength((1, 2)), OnDemand(), iter([1]), np.array([1, 2]), "ab", range(3))
    for xs in odd:
        assert observed("require(xs[i] == 9)", xs=xs, i=0) == []
        assert observed("require(xs[0] == 9)", xs=xs) == []
        assert observed("require(xs[i].out_features == 9)", xs=xs, i=0) == []
    assert observed("require(xs[i] == 9)", xs=Pair(1, 2), i=1) == ["xs[i] = 2"]


def test_constants_at_an_index_within_an_index() -> None:
    text = "LIMITS = {'a': (1, 2), ('b', 1): 3}\ndef f(x, k, n):\n    require(x <= LIMITS[k][n])\n"
    text += "    require(x != LIMITS['b', (0, 1)[n]])\n    require(len(LIMITS) == 2)\n"
    guarded = og.guard(parse_stubs(text)["f"])(lambda x, k, n: x)
    assert guarded(2, "a", 1) == 2
    for x, k, n in ((9, "c", 0), (9, "a", 2)):
        assert guarded(x, k, n) == 9
    for x, k, n in ((2, "a", 0), (3, "c", 1)):
        with pytest.raises(og.GuardError):
            guarded(x, k, n)


def test_an_index_costs_what_it_reads() -> None:
    for body, cost in (("require(xs[n] == 1)", "A"), ("require(xs[highest(y)] == 1)", "B")):
        assert [rule.cost_class for rule in parse_body(body, "operator", ("xs", "n", "y")).rules] == [cost]
    assert observed("require(xs[highest(y)] == 1)", xs=[1, 2], y=torch.tensor([0, 1])) == ["xs[highest(y)] = 2"]


def test_a_layer_of_a_module() -> None:
    @og.guard("layer = self.layers[layer_idx]\nlayer.weight: any[O, I]\nrequire(x.shape[-1] == I)")
    def run(self: Any, x: Any, layer_idx: int) -> Any:
        return self.layers[layer_idx](x)

    model = SimpleNamespace(layers=nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 4)]))
    assert run(model, torch.ones(1, 3), 1).shape == (1, 4)
    with pytest.raises(og.GuardError, match=r"x\.shape\[-1\] = 2, I = 3"):
        run(model, torch.ones(1, 2), 1)
    with pytest.raises(IndexError):
        run(model, torch.ones(1, 2), 2)
