"""Rules that no call can break: which are told, with which reason, and which are not."""

from __future__ import annotations

import pytest

from llm_op_guard.contract.parse import parse_body
from llm_op_guard.contract.unbreakable import unbreakable


def told(body: str, *parameters: str) -> dict[str, str]:
    return unbreakable(parse_body(body, "operator", parameters))


@pytest.mark.parametrize(
    ("body", "rule", "reason"),
    [
        (
            "if n > 4:\n    require(n > 2, id='some')",
            "some",
            "n > 2 is never false in line 2, while the branch of line 1 is for n > 4",
        ),
        (
            "if x is None:\n    if x is not None:\n        n: int",
            "n.type",
            "no call comes to the branch of line 2: x is not None is never true, "
            "while the branch of line 1 is for x is None",
        ),
        (
            "if x.ndim == 2:\n    x: any[N, M]\n    require(N == M)",
            "x.shape",
            "every tensor that comes to line 2 has the shape of any[N, M], "
            "while the branch of line 1 is for x.ndim == 2; nothing else shows N, M",
        ),
        (
            "if x.dtype in floating:\n    x: floating[..., 4]",
            "x.dtype",
            "every tensor that comes to line 2 has the dtype of floating[..., 4], "
            "while the branch of line 1 is for x.dtype in floating",
        ),
        ("x: T[4]\nrequire(T in floating)", "x.dtype", "every tensor that comes to line 1 has the dtype of T[4]"),
        ("x: any[4] @ dev\nrequire(dev == cpu)", "x.device", "every tensor that comes to line 1 has the device of"),
        (
            "if x.ndim == 2:\n    x: None | any[4, _]",
            "x.type",
            "tensors alone come to line 2, while the branch of line 1 is for x.ndim == 2",
        ),
        ("if numel(x) > 0:\n    x: any[4, _]", "x.type", "tensors alone come to line 2"),
        ("if x.shape[-2] > n:\n    x: any[..., _, _]", "x.shape", "every tensor that comes to line 2 has the shape of"),
        ("if not x.ndim != 2:\n    x: any[4, _]", "x.type", "tensors alone come to line 2"),
    ],
)
def test_told(body: str, rule: str, reason: str) -> None:
    assert told(body, "x", "n")[rule].startswith(reason)


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("if n > 4:\n    require(n > 5, id='some')", "some"),
        # Broken together with another rule is broken.
        ("require(n > 4)\nrequire(n > 2, id='some')", "some"),
        # Another branch has the same rule, and there it can be broken.
        ("if n > 4:\n    require(n > 2, id='some')\nelse:\n    require(n > 2, id='some')", "some"),
        ("if n > 4:\n    require(m / n > 0, id='whole')", "whole"),
        ("if x.ndim == 2:\n    x: any[N, M]\n    y: any[N]", "x.shape"),
        ("if x.ndim == 2:\n    x: any[N, N]", "x.shape"),
        ("if x.shape[-1] > n:\n    x: any[..., _, _]", "x.shape"),
        ("if x.shape[-2] > n:\n    x: any[_, _]", "x.shape"),
        ("if has(x.ndim) == True:\n    x: any[4, _]", "x.type"),
        ("if x.ndim >= 2:\n    x: any[_, _]", "x.shape"),
        ("if x.ndim == 2:\n    x: any[_, 4]", "x.shape"),
        ("if x.dtype in (half, int64):\n    x: half[...]", "x.dtype"),
        ("x: T[4]\ny: T[4]", "y.dtype"),
        # Two dtypes, two ranks: a vector has to be whole.
        ("if x.dtype in (half, int64):\n    x: half[_, _] | int64[_]", "x.dtype"),
        ("if n > 2:\n    x: any[4]", "x.type"),
        ("if x.ndim == 2:\n    x: any[4, _] | int", "x.type"),
        ("if n == 2 or x.ndim == 2:\n    x: any[4, _]", "x.type"),
        ("if has(x.ndim):\n    x: any[4, _]", "x.type"),
        ("if self.x.ndim == 2:\n    self.x: any[4, _]", "self.x.type"),
    ],
)
def test_not_told(body: str, rule: str) -> None:
    contract = parse_body(body, "operator", ("self", "x", "y", "n", "m"))
    assert rule in {known.id for known in contract.rules}
    assert rule not in unbreakable(contract)


@pytest.mark.parametrize(
    ("body", "rules"),
    [
        ("m = n\nrequire(m > 2)", ["m > 2"]),
        ("m = n / 2\nrequire(m > 2)", ["m = n / 2", "m > 2"]),
        ("x: any[...]", ["x.type"]),
        ("x: floating[..., _]", ["x.type", "x.dtype", "x.shape"]),
        ("x: object", []),
    ],
)
def test_what_says_nothing_is_no_rule(body: str, rules: list[str]) -> None:
    assert [rule.id for rule in parse_body(body, "operator", ("x", "n")).rules] == rules
