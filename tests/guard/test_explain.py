"""The definition of right: what is a violation, who is blamed, what is left out."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_body
from llm_op_guard.guard.explain import explain
from llm_op_guard.guard.violation import Violation


def broken(body: str, **arguments: Any) -> list[Violation]:
    return explain(parse_body(body, "operator", tuple(arguments)), arguments)


def said(body: str, **arguments: Any) -> list[tuple[str, str, str]]:
    return [(v.rule_id, v.observed, v.expected) for v in broken(body, **arguments)]


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


ROPE = """q: T[B, H, L, D] @ dev
k: T[B, G, L, D] @ dev
cos: floating[B | 1, L, D] @ dev
sin: like(cos)
require(D % 2 == 0, id="even_head_dim")"""


def rope(q: Any, k: Any, cos: Any, sin: Any) -> list[tuple[str, str, str]]:
    return said(ROPE, q=q, k=k, cos=cos, sin=sin)


def test_a_valid_call_has_no_violation() -> None:
    assert rope(t(2, 4, 7, 16), t(2, 2, 7, 16), t(1, 7, 16), t(1, 7, 16)) == []
    assert rope(t(2, 4, 7, 16), t(2, 2, 7, 16), t(2, 7, 16), t(2, 7, 16)) == []
    assert rope(t(0, 4, 7, 16), t(0, 2, 7, 16), t(1, 7, 16), t(1, 7, 16)) == []
    assert rope(t(1, 1, 1, 2), t(1, 1, 1, 2), t(1, 1, 2), t(1, 1, 2)) == []


def test_a_width_of_one_is_blamed_on_the_table_that_has_it() -> None:
    assert rope(t(2, 4, 7, 16), t(2, 2, 7, 16), t(1, 7, 1), t(1, 7, 1)) == [("cos.shape", "cos.shape[2] = 1", "D = 16")]


def test_the_reference_is_not_one_then_the_majority_then_the_first() -> None:
    body = "a: any[N]\nb: any[N]\nc: any[N]"
    assert said(body, a=t(1), b=t(1), c=t(5)) == [
        ("a.shape", "a.shape[0] = 1", "N = 5"),
        ("b.shape", "b.shape[0] = 1", "N = 5"),
    ]
    assert said(body, a=t(4), b=t(5), c=t(5)) == [("a.shape", "a.shape[0] = 4", "N = 5")]
    assert said(body, a=t(4), b=t(5), c=t(6)) == [
        ("b.shape", "b.shape[0] = 5", "N = 4"),
        ("c.shape", "c.shape[0] = 6", "N = 4"),
    ]


def test_a_tensor_without_contents_is_blamed_rather_than_one_with() -> None:
    body = "a: any[N] @ dev\nb: any[N] @ dev"
    for a, b, blamed in ((t(2, device="meta"), t(2), "a"), (t(2), t(2, device="meta"), "b")):
        assert [(v.argument, v.expected) for v in broken(body, a=a, b=b)] == [(blamed, "dev = cpu")]
    assert broken(body, a=t(2, device="meta"), b=t(2, device="meta")) == []


def test_a_suspect_declaration_never_outvotes_a_certain_one() -> None:
    body = "a: any[N]\nb: any[N] = why(certain=False)\nc: any[N] = why(certain=False)"
    found = broken(body, a=t(4), b=t(5), c=t(5))
    assert [(v.argument, v.certain) for v in found] == [("b", False), ("c", False)]


def test_all_broken_rules_are_reported_together_with_provenance() -> None:
    found = broken(ROPE, q=t(2, 4, 7, 15), k=t(2, 2, 7, 15), cos=t(1, 1, 15), sin=t(1, 1, 15))
    assert [v.rule_id for v in found] == ["cos.shape", "even_head_dim"]
    assert [str(b) for b in found[0].bindings] == ["L = 7"]
    assert found[0].bindings[0].sources == ("q.shape[2]", "k.shape[2]")
    assert found[1].observed == "D % 2 = 1"
    assert found[1].argument == "q"
    assert found[1].bindings[0].sources == ("q.shape[3]", "k.shape[3]", "cos.shape[2]")


def test_consequences_of_a_broken_declaration_are_left_out() -> None:
    # sin is right and unlike cos only because cos is wrong
    assert rope(t(2, 4, 7, 16), t(2, 2, 7, 16), t(1, 7, 8), t(1, 7, 16)) == [
        ("cos.shape", "cos.shape[2] = 8", "D = 16")
    ]
    body = "x: any[N, D]\nrequire(x.shape[1] == 3)\nrequire(x.dtype == int64)"
    assert [v.rule_id for v in broken(body, x=t(2, 3, 4))] == ["x.shape", "x.dtype == int64"]


def test_rank_dtype_device_and_kind() -> None:
    assert said("x: any[N, D]", x=t(2, 3, 4)) == [("x.shape", "x.shape = (2, 3, 4), rank 3", "rank 2, [N, D]")]
    assert said("x: any[..., D]", x=t()) == [("x.shape", "x.shape = (), rank 0", "rank 1 or more, [..., D]")]
    assert said("x: floating[N]", x=t(2, dtype=torch.int64)) == [("x.dtype", "x.dtype = int64", "floating")]
    assert said("x: any[N] @ cpu", x=t(2, device="meta")) == [("x.device", "x.device = meta", "cpu")]
    assert said("x: any[N] @ d\ny: any[N] @ d", x=t(2), y=t(2, device="meta")) == [
        ("y.device", "y.device = meta", "d = cpu")
    ]
    assert said("x: any[N]", x=None) == [("x.type", "x is None", "any[N]")]
    assert said("x: any[N]", x=np.zeros(3)) == [("x.type", "x is a numpy.ndarray", "any[N]")]
    assert said("x: any[N]", x=[1, 2]) == [("x.type", "x is a list of 2", "any[N]")]
    assert said("x: int", x=t(1)) == [("x.type", "x is a tensor", "int")]
    assert said("x: T[N]\ny: T[N]", x=t(2), y=t(2, dtype=torch.bfloat16)) == [
        ("y.dtype", "y.dtype = bfloat16", "T = float32")
    ]


def test_no_alternative_fits() -> None:
    body = "x: None | int64[B, L] | floating[B, L, D]"
    assert said(body, x=t(2, 3)) == [("x.dtype", "x.dtype = float32", "int64")]
    assert said(body, x=t(2)) == [("x.shape", "x.shape = (2,), rank 1", "rank 3, [B, L, D]")]
    assert said(body, x="left") == [("x.type", "x is a str", "None | int64[B, L] | floating[B, L, D]")]
    assert said(body, x=None) == []


@pytest.mark.parametrize(
    ("kind", "accepted", "rejected"),
    [
        ("int", (0, True, np.int64(3)), (1.5, None, "1", torch.tensor(1))),
        ("float", (0, 1.5, np.float32(1)), (None, "1", torch.tensor(1.0))),
        ("bool", (True, np.bool_(False)), (1, None)),
        ("str", ("", "a"), (1, b"a")),
        ("dict", ({},), ([], None)),
        ("callable", (len, torch.nn.Identity()), (1, None)),
        ("object", (None, 1, torch.tensor(1)), ()),
        ("'left' | 3", ("left", 3), ("right", 3.0, None)),
        ("(int, floating[N])", ((1, t(2)), [1, t(2)]), ((1,), (t(2), 1), None)),
    ],
)
def test_plain_types(kind: str, accepted: tuple[Any, ...], rejected: tuple[Any, ...]) -> None:
    assert [value for value in accepted if broken(f"x: {kind}", x=value)] == []
    assert [value for value in rejected if not broken(f"x: {kind}", x=value)] == []


def test_exact_division_is_a_rule_of_its_own() -> None:
    assert said("x: any[D]\ny: any[D / 2]", x=t(16), y=t(8)) == []
    assert said("x: any[D]\ny: any[D / 2]", x=t(129), y=t(64)) == [
        ("y.shape", "y.shape[0] = 64", "D / 2 (129 / 2 is not a whole number)")
    ]
    assert said("require(n / 2 == 3)", n=7) == [("n / 2 == 3", "7 / 2 is not a whole number", "n / 2 == 3")]
    assert said("require(n / 2.0 == 3.5)", n=7) == []
    assert said("require(n % m == 0)", n=7, m=0) == [("n % m == 0", "7 % 0 divides by zero", "n % m == 0")]


@pytest.mark.parametrize(
    ("expression", "size", "right", "wrong"),
    [
        ("B + 1", 4, 3, 4),
        ("2 * B", 6, 3, 6),
        ("B - 1", 2, 3, 2),
        ("12 / B", 4, 3, 4),
        ("6 - B", 3, 3, 2),
        ("B / 2", 3, 6, 5),
    ],
)
def test_one_unknown_is_solved_in_any_order(expression: str, size: int, right: int, wrong: int) -> None:
    for body in (f"x: any[{expression}]\nrequire(n == B, id='n')", f"require(n == B, id='n')\nx: any[{expression}]"):
        assert broken(body, x=t(size), n=right) == []
        assert [v.rule_id for v in broken(body, x=t(size), n=wrong)] == ["n"]


def test_a_size_that_no_whole_number_solves() -> None:
    assert said("x: any[2 * K]", x=t(7)) == [
        ("x.shape", "x.shape[0] = 7", "2 * K for a whole K (7 / 2 is not a whole number)")
    ]
    assert said("x: any[B]\ny: any[B * K]", x=t(0), y=t(0)) == []
    assert said("x: any[B]\ny: any[B * K]", x=t(0), y=t(5)) == [
        ("y.shape", "y.shape[0] = 5", "B * K for a whole K (5 is no multiple of 0)")
    ]


def test_a_size_that_an_expression_tells_is_a_size() -> None:
    assert said("x: any[K + 5]", x=t(5)) == []
    assert said("x: any[K + 5]", x=t(2)) == [
        ("x.shape", "x.shape[0] = 2", "K + 5 for a whole K (it would be -3, and no size is negative)")
    ]
    assert said("x: any[3 - K]", x=t(3)) == []
    assert [v.observed for v in broken("x: any[3 - K]", x=t(4))] == ["x.shape[0] = 4"]
    assert said("x: any[K - n]", x=t(2), n=0.5) == [
        ("x.shape", "x.shape[0] = 2", "K - n for a whole K (it would be 2.5)")
    ]
    assert said("x: any[K - n]\nrequire(K == 2)", x=t(2), n=0.0) == []
    assert said("x: any[K - n]", x=t(2), n=-2) == []
    assert [v.rule_id for v in broken("x: any[K - n]", x=t(2), n=-3)] == ["x.shape"]
    # Where another tensor shows it, that is what is compared with.
    assert said("x: any[K + 5]\ny: any[K]", x=t(2), y=t(1)) == [("x.shape", "x.shape[0] = 2", "K + 5 = 6")]


def test_a_size_that_an_expression_tells_has_a_vote() -> None:
    body = "page_table: int32[S, P]\nkv_lens: int32[S]\nq_start_loc: int32[{}]"
    table, lens = t(2, 4, dtype=torch.int32), t(3, dtype=torch.int32)
    for size, rows in (("S + 1", 4), ("2 * S", 6), ("S / n", 1), ("n - S", 0)):
        start = t(rows, dtype=torch.int32)
        assert said(body.format(size), page_table=table, kv_lens=lens, q_start_loc=start, n=3) == [
            ("page_table.shape", "page_table.shape[0] = 2", "S = 3")
        ], size
    # It is one vote, and none for what no argument shows.
    others = t(9, dtype=torch.int32)
    assert [v.argument for v in broken(body.format("S + 1"), page_table=table, kv_lens=lens, q_start_loc=others)] == [
        "kv_lens", "q_start_loc",
    ]  # fmt: skip
    more = f"{body.format('S + 1')}\nx: any[S]"
    found = broken(more, page_table=table, kv_lens=lens, q_start_loc=t(4, dtype=torch.int32), x=t(2))
    assert [v.argument for v in found] == ["kv_lens", "q_start_loc"]
    # A suspect one has none against what is certain.
    suspect = f"{body.format('S + 1')} = why(certain=False)"
    found = broken(suspect, page_table=table, kv_lens=lens, q_start_loc=t(4, dtype=torch.int32))
    assert [v.argument for v in found if v.certain] == ["kv_lens"]


def test_a_value_that_is_none_of_those_declared_is_shown() -> None:
    def seen(declared: str, value: Any) -> list[str]:
        return [v.observed for v in broken(f"page_size: {declared}", page_size=value)]

    assert seen("16 | 32 | 64", 8) == ["page_size = 8"]
    assert seen("16 | 32 | 64", True) == ["page_size = True"]
    assert seen("16 | 32 | 64", 16.0) == ["page_size = 16.0"]
    assert seen("16 | 32 | 64", None) == ["page_size = None"]
    assert seen("'left' | 'right'", "center") == ["page_size = a text of 6 characters"]
    assert seen("16 | 32", [1, 2]) == ["page_size is a list of 2"]
    assert seen("16 | any[D]", t()) == ["page_size.shape = (), rank 0"]
    assert seen("str", 8) == ["page_size is an int"]
    assert seen("str", None) == ["page_size is None"]
    assert seen("str", t(2)) == ["page_size is a tensor"]
    assert seen("int", "8") == ["page_size is a str"]


def test_what_a_broken_argument_gives_is_not_told_of_others() -> None:
    body = "k_pages: any[N, page_size]\npage_size: 16 | 32\nv_pages: any[N, page_size]"
    assert said(body, k_pages=t(4, 16), v_pages=t(4, 16), page_size=True) == [
        ("page_size.type", "page_size = True", "16 | 32")
    ]
    # What has nothing to do with it is.
    found = said(body, k_pages=t(4, 16), v_pages=t(5, 16), page_size=True)
    assert ("v_pages.shape", "v_pages.shape[0] = 5", "N = 4") in found
    assert len(found) == 2
    assert said(body, k_pages=t(4, 16), v_pages=t(4, 32), page_size=16) == [
        ("v_pages.shape", "v_pages.shape[1] = 32", "page_size = 16")
    ]
    suspect = "x: any[n]\nn: 16 = why(certain=False)"
    assert {v.rule_id for v in broken(suspect, x=t(3), n=2)} == {"x.shape", "n.type"}


def test_strides_are_shown() -> None:
    q = t(2, 4, 8).transpose(1, 2)
    assert said("require(dense(q))", q=q) == [("dense(q)", "q.stride() = (32, 1, 8)", "dense(q)")]
    words = torch.ones(64)[3:]
    assert said("require(aligned(x, 8))", x=words) == [("aligned(x, 8)", "x.data_ptr() % 8 = 4", "aligned(x, 8)")]
    assert said("require(dense(q[:, :2]) or n)", q=q, n=0) == [
        ("dense(q[:, :2]) or n", "q[:, :2].stride() = (32, 1, 8), n = 0", "dense(q[:, :2]) or n")
    ]


def test_sets_of_dtypes_among_others() -> None:
    for dtype, holds in ((torch.float16, True), (torch.bfloat16, True), (torch.float32, True), (torch.float64, False)):
        assert (said("x: T[N]\nrequire(T in (half, float32))", x=t(1, dtype=dtype)) == []) is holds
        assert (said("x: T[N]\nrequire(T not in [float32, half])", x=t(1, dtype=dtype)) == []) is not holds
        assert (said("require(x.dtype in (half, *n))", x=t(1, dtype=dtype), n=(torch.float32,)) == []) is holds
    assert said("x: T[N]\nrequire(T in (half, float32))", x=t(1, dtype=torch.float64)) == [
        ("T in (half, float32)", "T = float64", "T in (half, float32)")
    ]
    for body in (
        "x: T[N]\nrequire(T == (half, float32))",
        "x: T[N]\nrequire(half in (T, half))",
        "require(x in ((half,), 1))",
    ):
        with pytest.raises(og.ContractError, match="half is a set of dtypes"):
            parse_body(body, "operator", ("x",))
    with pytest.raises(og.ContractError, match="no call can keep this"):
        parse_body("x: int32[N]\nrequire(x.dtype in (half, float32))", "operator", ("x",))


def test_open_groups_bind_and_compare() -> None:
    body = "x: any[*lead, D]\nw: any[D]\ny: any[*lead]"
    assert said(body, x=t(2, 3, 4), w=t(4), y=t(2, 3)) == []
    assert said(body, x=t(4), w=t(4), y=t()) == []
    assert said(body, x=t(2, 3, 4), w=t(4), y=t(3, 2)) == [("y.shape", "y.shape = (3, 2)", "lead = (2, 3)")]
    assert said("x: any[*y.shape, 1]\ny: any", x=t(2, 3, 1), y=t(2, 4)) == [
        ("x.shape", "x.shape = (2, 3)", "y.shape = (2, 4)")
    ]


@pytest.mark.parametrize("text", ["50%", "%999999999d", "left", ""])
def test_a_text_is_never_formatted(text: str) -> None:
    @og.guard("require(x / 2 == y, id='a')\nrequire(x % 2 == y, id='b')\nrequire(x * 2 == y, id='d')")
    def operator(x: Any, y: Any) -> int:
        return 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert operator(text, 1) == 1
    assert caught == []


def test_a_number_without_end_is_told_by_its_length() -> None:
    contract = parse_body("n: int\nrequire(n * n < 3, id='a')", "f", ("n",))
    (violation,) = explain(contract, {"n": 10**4000})
    assert violation.observed == "n * n = an integer of 26576 bits"
    (violation,) = explain(contract, {"n": 2**64})
    assert violation.observed == f"n * n = {2**128}"


def test_not_applicable_is_no_violation() -> None:
    absent = SimpleNamespace()
    assert broken("require(x.shape[0] == 3)", x=None) == []
    assert broken("require(x.shape[5] == 3)", x=t(2)) == []
    assert broken("require(x.config.heads == 3)", x=absent) == []
    assert broken("x.weight: any[N]", x=absent) == []
    assert broken("require(x > 0)", x=torch.tensor(-1)) == []
    assert broken("if x.missing == 1:\n    require(n == 2)\nelse:\n    require(n == 3)", x=absent, n=9) == []
    assert broken("y: None | any[N]\nrequire(N == 3)", y=None) == []
    assert broken("require(x is None or x.shape[0] == 3)", x=None) == []
    assert [v.rule_id for v in broken("require(n == 1 and x.shape[0] == 3)", n=2, x=None)] == [
        "n == 1 and x.shape[0] == 3"
    ]
    assert broken("require(n == 2 and x.shape[0] == 3)", n=2, x=None) == []


class Module(torch.nn.Module):
    kind = "class attribute"

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.table = torch.nn.Buffer(torch.zeros(4))
        self.inner = torch.nn.ModuleList([torch.nn.Linear(2, 5)])
        self.heads = 2

    @property
    def costly(self) -> int:
        raise AssertionError("a property was run")

    def __getattr__(self, name: str) -> Any:
        if name in ("made_up",):
            raise AssertionError("__getattr__ was run")
        return super().__getattr__(name)


def test_attributes_are_read_without_running_code() -> None:
    module = Module()
    body = """m.weight: any[W]
m.table: any[U]
m.inner[0].weight: any[O, I]
require((W, U, O, I) == (3, 4, 5, 2), id="read")
require(m.heads == 2, id="heads")
require(m.kind == "other", id="class_attribute")
require(m.costly == 1, id="property")
require(m.made_up == 1, id="made_up")
require(m.forward == 1, id="method")"""
    assert [v.rule_id for v in broken(body, m=module)] == ["class_attribute"]


def test_hints_are_chosen_and_filled_in_on_failure() -> None:
    body = 'x: any[D]\nrequire(D < 4, hint=f"{D} is wide" if D < 10 else "much too wide")'
    assert [v.hint for v in broken(body, x=t(5))] == ["5 is wide"]
    assert [v.hint for v in broken(body, x=t(50))] == ["much too wide"]
    assert [v.hint for v in broken('require(n == 1, hint=f"{m.a}")', n=2, m=None)] == [None]


def test_texts_and_contents_are_never_shown() -> None:
    found = broken("require(s == 'a', id='s', hint=f'{s}')\nrequire(len(s) < 3)", s="my secret")
    assert found[0].observed == "s = a text of 9 characters"
    assert "secret" not in repr(found)


def test_value_rules_name_index_value_and_count() -> None:
    x = torch.ones(2, 3)
    x[1, 2] = float("nan")
    assert said("require(finite(x))", x=x) == [
        ("finite(x)", "x[1, 2] = nan (of 6, 1 element is wrong)", "finite values")
    ]
    ids = torch.tensor([[5, 7], [-1, 9]])
    assert said("w: any[V, D]\nrequire(within(x, 0, V, allow=-1), id='ids')", x=ids, w=t(6, 2)) == [
        ("ids", "x[0, 1] = 7 (of 4, 2 elements are wrong, this one first)", "0 <= x < 6 (V) or -1")
    ]
    assert said("require(within(x, 0, 3))", x=torch.tensor(3)) == [
        ("within(x, 0, 3)", "x = 3 (of 1, 1 element is wrong)", "0 <= x < 3")
    ]


def test_the_first_false_part_of_a_conjunction_is_shown() -> None:
    assert said("require(n > 0 and n % 2 == 0 and n < 9, id='r')", n=3) == [("r", "n % 2 = 1", "n % 2 == 0")]


def test_assigned_names_and_sequences_taken_apart() -> None:
    body = "a, b = x.shape\nhalf_a = a / 2\nrequire(half_a == b, id='r')"
    assert said(body, x=t(6, 3)) == []
    assert said(body, x=t(6, 2)) == [("r", "half_a = 3, b = 2", "half_a == b")]
    assert [v.rule_id for v in broken(body, x=t(5, 2))] == ["half_a = a / 2"]
    assert broken(body, x=t(6, 2, 1)) == []


def test_only_the_classes_asked_for_are_judged() -> None:
    contract = parse_body("require(n == 1)\nrequire(finite(x))", "operator", ("n", "x"))
    x = torch.tensor([float("inf")])
    assert [v.cost_class for v in explain(contract, {"n": 2, "x": x})] == ["A", "B"]
    assert [v.cost_class for v in explain(contract, {"n": 2, "x": x}, classes=("A",))] == ["A"]


def test_every_operand_of_a_broken_or_is_shown() -> None:
    assert said("require(k == 0 or 1 <= k <= n, id='top_k')", k=9, n=5) == [
        ("top_k", "k = 9, n = 5", "k == 0 or 1 <= k <= n")
    ]


def test_value_functions_over_a_part_of_a_tensor_are_explained() -> None:
    mask = torch.tensor([[0, 1], [1, 1]])
    for rule in ("all_true(m[:, 0])", "equal(m[:, :1], m[:, 1:])", "any_per_row(m[:1, :1])"):
        found = broken(f"require({rule}, id='r')", m=mask)
        assert [v.rule_id for v in found] in (["r"], [])
    assert [v.rule_id for v in broken("require(all_true(m[:, 0]), id='r')", m=mask)] == ["r"]
