"""Contracts by language feature, sequences of calls, and how many compilations more a guard costs, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.testing import CompileCounter

import llm_op_guard as og


class Attention(torch.nn.Module):
    """What the contracts are about: scores of queries against a cache."""

    groups = 2
    sizes = (4, 2)

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.operator: Callable[..., Any] = scores

    def forward(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return self.operator(self, q, k, mask)


def scores(self: Any, q: Any, k: Any, mask: Any = None) -> Any:
    found = q @ k.transpose(-1, -2) * self.scale.to(q.dtype)
    return found if mask is None else found + mask


def call(
    batch: int, length: int, keys: int, *, mask: bool | int = False, dtype: Any = torch.float32, width: int = 8
) -> Any:
    return (
        torch.ones(batch, 4, length, width, dtype=dtype),
        torch.ones(batch, 4, keys, width, dtype=dtype),
        torch.zeros(int(mask), 1, length, keys, dtype=dtype) if mask else None,
    )


SEQUENCES: dict[str, list[Any]] = {
    "lengths": [call(2, n, n) for n in (5, 7, 9, 12)],
    "batches": [call(n, 5, 5) for n in (2, 3, 1, 4)],
    "decode": [call(2, 6, 6), *(call(2, 1, n) for n in (7, 8, 9, 10))],
    "masks": [call(2, n, n, mask=mask) for n, mask in ((5, False), (5, True), (7, False), (7, True), (9, True))],
    "mask batches": [call(2, n, n, mask=m) for n, m in ((5, 1), (6, 2), (7, 1), (8, 2))],
    "chunks": [call(2, n, m) for n, m in ((3, 6), (4, 10), (9, 9), (2, 12), (10, 15))],
    "dtypes": [call(2, n, n, dtype=d) for n, d in ((5, torch.float32), (5, torch.bfloat16), (7, torch.float32))],
    "widths": [call(2, 5, 5, width=n) for n in (8, 16, 32, 64)],
}

BASE = "q: T[B, H, L, D] @ dev\nk: T[B, H, S, D] @ dev"


@dataclass(frozen=True)
class Feature:
    """`extra`: by sequence, how many compilations more than without the guard; zero where it says nothing."""

    name: str
    rule: str
    extra: dict[str, int] = field(default_factory=dict)
    why: str = ""
    base: str = BASE

    @property
    def contract(self) -> str:
        return f"{self.base}\n{self.rule}" if self.base else self.rule

    def line(self) -> str:
        rule = "; ".join(line.strip() for line in self.rule.splitlines()).replace("|", "\\|").replace(":;", ":")
        cost = ", ".join(f"{n} more ({sequence})" for sequence, n in self.extra.items()) or "none"
        return f"| {self.name} | `{rule}` | {cost} | {self.why} |"


FEATURES = [
    Feature("symbols", BASE, base=""),
    Feature("`B | 1`", "mask: None | floating[B | 1, 1, L, S] @ dev"),
    Feature("division", "k: T[B, H, S, 2 * (D / 2)] @ dev\nrequire(D % 2 == 0)", base="q: T[B, H, L, D] @ dev"),
    Feature("told by an expression", "q: T[B, H, M + 1, D]\nk: T[B, H, S, D]\nrequire(M < S)", base=""),
    Feature("union", "q: T[B, H, L, D] | T[B, L, D]\nk: T[B, H, S, D] | T[B, S, D]", base=""),
    Feature("`*lead`", "q: T[*lead, L, D]\nk: T[*lead, S, D]", base=""),
    Feature("optional", "mask: optional[floating[_, 1, L, S] @ dev]"),
    Feature("`if` on an argument", "if mask is None:\n    require(L <= S)\nelse:\n    mask: floating[_, 1, L, S]"),
    Feature("`if` on 0 or 1", "if L == 1:\n    require(S > 0)\nelse:\n    require(L > 0)"),
    Feature("`if` on a size", "if L > 8:\n    require(S > 8)",
            {"lengths": 1, "masks": 1, "chunks": 1}, "each side of the branch is a program of its own"),
    Feature("`if` on two sizes", "if L == S:\n    require(H > 0)",
            {"chunks": 1}, "each side of the branch is a program of its own"),
    Feature("assignment", "past = S - L\nrequire(past >= 0)"),
    Feature("attribute of self", "self.scale: floating[1] @ dev\nrequire(H % self.groups == 0)"),
    Feature("item at an index", "require(H % self.sizes[self.groups - 1] == 0)\nrequire(q.shape[self.groups] == L)"),
    Feature("bound on a size", "require(L < 1000)"),
    Feature("comparison of sizes", "require(L <= S)"),
    Feature("function of sizes", "require(max(L, S) == S)"),
    Feature("strides", "require(dense(q) and dense(k))"),
    Feature("alignment", "require(aligned(q, 16))",
            why="where the operator runs uncompiled; traced tensors have no address"),
    Feature("broadcast", "require(broadcasts((B, 1, L, S), (B, H, L, S)))"),
    Feature("type of device", "require(dev != meta)\nrequire(self.scale.device in (cpu, cuda))"),
    Feature("dtype rule", "require(T in floating)"),
    Feature("value rule", "require(finite(q))", why="it is judged when the program runs"),
    Feature("result", "returns: floating[B, H, L, S] @ dev"),
    Feature("suspect rule, kept", "require(L < 100, certain=False)"),
    Feature("suspect rule, broken", "require(L > 100, certain=False)", why="it is judged, and not told of"),
    Feature("suspect rule, sometimes broken", "require(L <= 8, certain=False)",
            {"lengths": 1, "masks": 1, "chunks": 1}, "it is judged, and not told of"),
]  # fmt: skip

# What hangs together, at once.
TOGETHER = Feature(
    "together",
    """
self.scale: floating[1] @ dev
mask: None | floating[B | 1, 1, L, S] @ dev
past = S - L
require(past >= 0, id="keys_of_all_queries")
if mask is None:
    require(H % self.groups == 0, id="groups")
require(dense(q), certain=False)
require(finite(q))
returns: T[B, H, L, S] @ dev
""",
)


def table() -> str:
    """The features as the page shows them."""
    head = ["| feature | rule | compilations | why |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *(feature.line() for feature in FEATURES)])


def compilations(operator: Callable[..., Any], sequence: str, **options: Any) -> int:
    """How often one whole graph is compiled for a sequence of calls."""
    torch._dynamo.reset()
    counter = CompileCounter()
    module = Attention()
    module.operator = operator
    run = torch.compile(module, fullgraph=True, backend=counter, **options)
    for arguments in SEQUENCES[sequence]:
        run(*arguments)
    return counter.frame_count


def guarded(feature: Feature) -> Callable[..., Any]:
    operator: Callable[..., Any] = og.guard(feature.contract)(scores)
    return operator


def measured(feature: Feature, sequence: str, **options: Any) -> tuple[int, int]:
    """Compilations without and with the guard."""
    return compilations(scores, sequence, **options), compilations(guarded(feature), sequence, **options)
