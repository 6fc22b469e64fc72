"""What an expression is used as, and what it can be there: refused at load is what no call could ever judge."""

from __future__ import annotations

import re

import pytest

import llm_op_guard as og
from llm_op_guard.contract.parse import parse_body, parse_stubs
from llm_op_guard.contract.vocabulary import FUNCTIONS

DECLARED = """\
    table: int32[S, P]
    lens: int32[S]
    n: int
    mode: str
    options: dict
    pair: (int, any[2])
    many: list[T[S]]
    maybe: None | int | any[S]
    owner.weight: any[S, 4] @ dev
"""
PARAMETERS = "table, lens, n, mode, options, pair, many, maybe, owner, free"


def load(body: str, declared: str = DECLARED) -> og.Contract:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return parse_stubs(f"def operator({PARAMETERS}):\n{declared}{lines}", "f.contract")["operator"]


LOOP = "a loop goes over sequences, and {0} is a tensor; write `for i in range({1})`, and {0}[i] in value functions"

NEVER_JUDGED = {
    # loops
    "for row in table:\n    require(n > 1)": LOOP.format("table", "S"),
    "for row in owner.weight:\n    require(n > 1)": LOOP.format("owner.weight", "S"),
    "for row, m in zip(table, lens):\n    require(n > 1)": LOOP.format("table", "S"),
    "for i, row in enumerate(table):\n    require(n > i)": LOOP.format("table", "S"),
    "require(all(n > 1 for row in table))": LOOP.format("table", "S"),
    "require(any(n > 1 for row in lens))": LOOP.format("lens", "S"),
    "require(sum(n for row in lens) > 1)": LOOP.format("lens", "S"),
    "for t in many:\n    require(all(n > 1 for s in t))": LOOP.format("t", "S"),
    "rows = table\nfor row in rows:\n    require(n > 1)": LOOP.format("rows", "S"),
    "rows = taken(table, lens)\nfor row in rows:\n    require(n > 1)": LOOP.format("rows", "rows.shape[0]"),
    "for i in n:\n    require(i > 1)": "a loop goes over sequences, and n is a number; write range(n)",
    "for i in S:\n    require(n > i)": "a loop goes over sequences, and S is a number; write range(S)",
    "for c in mode:\n    require(n > 1)": "a loop goes over sequences, and mode is a text",
    "for i in range(lens):\n    require(n > i)": "range takes a number; lens is a tensor: first(lens)",
    "for i in range(table.shape):\n    require(n > i)": "range takes a number; table.shape is a tuple",
    "for i in range(lens[0]):\n    require(n > i)": "lens is a tensor, whose items only value functions read, such as "
    "first(lens[0])",
    "for k, v in items(table):\n    require(n > 1)": "items takes a dict; table is a tensor",
    "for k, v in items(many):\n    require(n > 1)": "items takes a dict; many is a tuple",
    "for a, b in range(n):\n    require(a > b)": "a number has no parts",
    "for a, b, c in enumerate(many):\n    require(a > n)": "2 parts for 3 names",
    # functions
    "require(min(lens) > 1)": "min takes numbers; lens is a tensor: lowest(lens)",
    "require(max(lens) > 1)": "max takes numbers; lens is a tensor: highest(lens)",
    "require(max(n, lens) > 1)": "max takes numbers; lens is a tensor: highest(lens)",
    "require(abs(lens) > 1)": "abs takes a number; lens is a tensor: absmax(lens)",
    "require(ceildiv(lens, 2) > 1)": "ceildiv takes a number; lens is a tensor: first(lens)",
    "require(ceildiv(n, owner.weight) > 1)": "ceildiv takes a number; owner.weight is a tensor: first(owner.weight)",
    "require(n in divisors(lens))": "divisors takes a number; lens is a tensor: first(lens)",
    "require(within(table, 0, lens))": "within takes a number; lens is a tensor: first(lens)",
    "require(within(table, 0, n, allow=lens))": "within takes numbers for allow; lens is a tensor",
    "require(count(table, lens) > 1)": "count takes a number; lens is a tensor: first(lens)",
    "require(only(table, n, lens))": "only takes a number; lens is a tensor: first(lens)",
    "require(stride(table, lens) > 1)": "stride takes a number; lens is a tensor: first(lens)",
    "require(abs(mode) > 1)": "abs takes a number; mode is a text",
    "require(abs(T) > 1)": "abs takes a number; T is a dtype",
    "require(abs(table.shape) > 1)": "abs takes a number; table.shape is a tuple",
    "require(ceildiv(n, options) > 1)": "ceildiv takes a number; options is a dict",
    "require(len(lens) > 1)": "len takes a sequence; lens is a tensor: lens.shape",
    "require(len(n) > 1)": "len takes a sequence; n is a number",
    "require(len(S) > 1)": "len takes a sequence; S is a number",
    "require(finite(mode))": "finite takes a tensor; mode is a text",
    "require(finite(S))": "finite takes a tensor; S is a number",
    "require(finite(many))": "finite takes a tensor; many is a tuple",
    "require(finite(table.shape))": "finite takes a tensor; table.shape is a tuple",
    "require(broadcasts(n, table.shape))": "broadcasts takes a shape; n is a number",
    "require(largest(n) > 1)": "largest takes a dtype; n is a number",
    "require(largest(table) > 1)": "largest takes a dtype; table is a tensor: table.dtype",
    "require(arch(table) > (8, 0))": "arch takes a device; table is a tensor: table.device",
    "require(misspelt(mode, 'window') is None)": "misspelt takes a dict; mode is a text",
    "require(recall(n, 'rows') == 1)": "recall takes an object; n is a number",
    "require(recall(S, 'rows') == 1)": "recall takes an object; S is a number",
    # indices and slices
    "require(finite(table[lens]))": "an index is a number; lens is a tensor: first(lens)",
    "require(all(finite(table[s, lens[s]:]) for s in range(S)))": "lens is a tensor, whose items only value functions "
    "read, such as first(lens[s])",
    "require(finite(table[n, :lens]))": "an index is a number; lens is a tensor: first(lens)",
    "require(finite(table[n, mode]))": "an index is a number; mode is a text",
    "require(many[lens].shape[0] > 1)": "an index is a number or a text; lens is a tensor: first(lens)",
    "require(n[0] > 1)": "n is a number, which has no items",
    "require(mode[0] == 'a')": "mode is a text, which has no items",
    "require(table.shape[2] > 1)": "table has 2 dimensions",
    "require(table.shape[-3] > 1)": "table has 2 dimensions",
    "require(pair[2] > 1)": "pair has 2 items",
    "require(stride(table, 2) > 1)": "table has 2 dimensions",
    # attributes
    "require(n.shape[0] > 1)": "'shape' is not read from a number",
    "require(mode.dtype == float32)": "'dtype' is not read from a text",
    "require(S.device == cpu)": "'device' is not read from a number",
    "require(T.dtype == float32)": "'dtype' is not read from a dtype",
    # comparisons
    "require(T != 3)": "T is a dtype and 3 a number: never equal",
    "require(T == 3)": "T is a dtype and 3 a number: never equal",
    "require(table.dtype != 3)": "table.dtype is a dtype and 3 a number: never equal",
    "require(table.dtype != 'float32')": "table.dtype is a dtype and 'float32' a text: never equal",
    "require(dev != 'cuda')": "dev is a device and 'cuda' a text: never equal",
    "require(S == 'left')": "S is a number and 'left' a text: never equal",
    "require(n != 'left')": "n is a number and 'left' a text: never equal",
    "require(n != mode)": "n is a number and mode a text: never equal",
    "require(table.shape != 3)": "table.shape is a tuple and 3 a number: never equal",
    "require(S != (3, 4))": "S is a number and (3, 4) a tuple: never equal",
    "require(dev != T)": "dev is a device and T a dtype: never equal",
    "require(n > mode)": "n is a number and mode a text: never in an order",
    "require(table.dtype > 3)": "table.dtype is a dtype, which has no order",
    "require(T > int32)": "T is a dtype, which has no order",
    "require(table.shape > 3)": "table.shape is a tuple and 3 a number: never in an order",
    "require(options == 3)": "options is a dict, which is not compared",
    "require(3 in n)": "nothing is in a number: `in` takes a tuple, a shape or a text",
    "require(3 in options)": "nothing is in a dict: has(options[3]) asks for a key; `in` takes a tuple, a shape",
    "require(n in floating)": "n is a number; only a dtype is in floating",
    "require(table.shape not in floating)": "table.shape is a tuple; only a dtype is in floating",
    "require(T not in (3, 4))": "T is a dtype, and none of (3, 4) is one",
    "require(n not in ('left', 'right'))": "n is a number, and none of ('left', 'right') is one",
    "require(T not in table.shape)": "T is a dtype, and no item of table.shape is one",
    "require(n not in mode)": "n is a number; only a text is in a text",
    "if T == 3:\n    require(n > 1)": "T is a dtype and 3 a number: never equal",
    # truth
    "require(not T)": "T is a dtype, which is neither true nor false",
    "require(table.device or n)": "table.device is a device, which is neither true nor false",
    "require(options)": "options is a dict, which is neither true nor false",
    "require(n == 64 or 128)": "128 alone is always true; write each comparison out, or n in (64, 128)",
    "require(mode == 'a' or 'b')": "'b' alone is always true; write each comparison out, or mode in ('a', 'b')",
    # arithmetic
    "require(n + T > 1)": "arithmetic is for numbers; T is a dtype",
    "require(n * mode > 1)": "arithmetic is for numbers; mode is a text",
    "require(-table.shape > 1)": "arithmetic is for numbers; table.shape is a tuple",
    "require(n + table.shape > 1)": "n is a number and table.shape a tuple: no sum",
    "require(n + lens > 1)": "lens is a tensor, which has no truth and no order",
    # names
    "a, b = lens\nrequire(a > b)": "a tensor has no parts",
    "a, b = n\nrequire(a > b)": "a number has no parts",
    "a, b = pair\nc, d, e = pair\nrequire(a > b)": "2 parts for 3 names",
    "a, b, c = table.shape\nrequire(a > b)": "table has 2 dimensions",
    # types
    "free: any[lens]": "a size is a number; lens is a tensor: first(lens)",
    "free: any[mode]": "a size is a number; mode is a text",
    "free: any[table.shape]": "a size is a number; table.shape is a tuple",
    "free: like(n)": "like takes a tensor; n is a number",
    "free: n.dtype[S]": "n is a number, which has no dtype",
    "free: any[*n.shape]": "n is a number, which has no shape",
    "free: any[S] @ mode.device": "mode is a text, which has no device",
    # texts
    "require(n > 1, hint=f'{lens}')": "a text shows plain values; lens is a tensor: lens.shape",
    "remember(owner, rows=lens)": "lens is a tensor, which has no truth and no order",
    "remember(n, rows=S)": "remember takes an object; n is a number",
}


@pytest.mark.parametrize("body", NEVER_JUDGED)
def test_what_no_call_could_judge_is_refused(body: str) -> None:
    with pytest.raises(og.ContractError, match=re.escape(NEVER_JUDGED[body])):
        load(body)


MAY_BE_JUDGED = [
    # a union may be what is asked for
    "require(maybe > 3)",
    "require(min(maybe, n) > 1)",
    "require(lowest(maybe) > 1)",
    "require(maybe == n)",
    "if maybe is None:\n    require(n > 1)",
    "require(maybe.shape[0] > 1)",
    "require(free > 3)\nrequire(len(free) > 1)\nrequire(finite(free))\nrequire(free.shape[7] > 1)",
    "for row in free:\n    require(row > 1)",
    "for t in many:\n    require(finite(t))\n    require(t.shape[0] == n)",
    "for i, t in enumerate(many):\n    require(t.shape[0] > i)",
    "for size in table.shape:\n    require(size > 1)",
    "for a, b in zip(table.shape, lens.shape):\n    require(a >= b)",
    "for k in options:\n    require(k != 'windw')",
    "for k, v in items(options):\n    require(v > 1)",
    "for k, v in options:\n    require(v > 1)",
    "for s in range(S):\n    require(within(table[s, :n], 0, 9))",
    "for s in range(S):\n    require(within(table[s, first(lens[s]):], 0, 9))",
    "for t in many:\n    require(t.dtype == T)",
    "require(min(table.shape) > 1)",
    "require(max(table.shape) > 1)",
    "require(pair[0] > 1)\nrequire(finite(pair[1]))\nrequire(pair[-1].shape[0] == 2)",
    "require(table.shape[-2] > 1)\nrequire(stride(table, -1) == 1)",
    "require(table.shape == (n, 4))\nrequire(table.shape[0] in (n, 4))",
    "require(mode == 'left')\nrequire(mode in ('left', n))\nrequire('eft' in mode)\nrequire(len(mode) > 1)",
    "require(T in floating)\nrequire(T in (int32, 3))\nrequire(table.dtype != T)\nrequire(table.device == dev)",
    "require(dev == cpu)\nrequire(dev in (cpu, cuda))",
    "require(n and S)\nrequire(not mode)\nrequire((n or 4) > 3)\nrequire(n > 3 if mode else S)",
    "require(arch(dev) >= (8, 0))\nrequire(arch(dev)[0] > 8)\nrequire(version('torch') >= (2, 1))",
    "require(get(options, 3) == 3)\nrequire(options['a'].b > 3)\nrequire(options[n] == 3)",
    "require(recall(owner, 'a') == 3)\nrequire(recall(owner, 'a') in floating)\nrequire(recall(table, 'a') == 1)",
    "a, b = table.shape\nc, d = pair\nrequire(a * b > c)\nrequire(finite(d))",
    "rows = table.shape[0]\nrequire(rows == S)",
    "free: any[n, pair[0], table.shape[0], _, 2 * n]",
    "free: like(maybe)\nrequire(n > 1, hint=f'{n} {table.shape} {maybe}')",
    "require(n ** 2 > 0.5)\nrequire(table.shape + (1,) == (1, 2, 1))",
    "require(broadcasts(table, lens.shape))\nrequire(broadcasts((1, 2), many))",
    "require(largest(table.dtype) > n)\nrequire(largest(T) > n)",
    "require(misspelt(options, 'window') is None)",
    "require(sum(t.shape[0] for t in many) == n)\nrequire(n is True)",
    "require(has(options['a']) == True)\nrequire(has(maybe) + has(free) == 1)",
]


@pytest.mark.parametrize("body", MAY_BE_JUDGED)
def test_what_some_call_could_judge_is_not(body: str) -> None:
    load(body)


def test_a_declaration_speaks_of_its_own_branch() -> None:
    """Elsewhere the argument is free, and what a suspect declaration says need not be so."""
    load("if n > 1:\n    free: any[S]\nelse:\n    require(free > 1)\nrequire(min(free, 2) > 1)")
    load("free: any[S] = why(certain=False)\nrequire(free > 1)")
    for body in (
        "if n > 1:\n    free: any[S]\n    require(min(free) > 1)",
        "free: any[S]\nif n:\n    require(free > 1)",
    ):
        with pytest.raises(og.ContractError, match="free is a tensor"):
            load(body)


def test_a_size_that_is_nearly_a_parameter() -> None:
    def read(body: str) -> None:
        parse_stubs(f"def f(x, page_size, num_heads, block_sizes, y):\n    {body}\n", "f.contract")

    for size in ("pagesize", "page_szie", "pge_size"):
        with pytest.raises(og.ContractError) as caught:
            read(f"x: any[B, {size}]")
        assert caught.value.problem == f"{size!r} stands here only and says nothing; did you mean 'page_size'?"
        assert (caught.value.line, caught.value.column) == (2, 15)
    read("x: any[B, page_size]\n    page_size: int")
    read("x: any[pagesize]\n    require(pagesize > 1)")  # it stands twice
    read("x: any[pagesize]\n    y: any[pagesize]")
    read("x: any[block_size]")  # of a list that is named after it
    read("x: any[page, size, heads, num, PAGESIZE, page_side, num_tokens, num_beads]")


def test_after_the_call_arguments_may_have_changed() -> None:
    """In place: what is in them, and their shapes; not what they are."""
    for body in (
        "ensure(table.shape[2] == 1)",
        "ensure(pair[2] == 1)\nensure(finite(pair[0]))",
        "ensure(owner.weight > 1)",
        "before = owner.weight\nensure(before.shape[2] == result.shape[0])",
        "require(result.shape[0] == table.shape[2])",
        "ensure(all(item > 1 for item in many))",
    ):
        load(body)
    for body, problem in {
        "ensure(table > 1)": "table is a tensor, which has no truth",
        "ensure(all(row > 1 for row in table))": "a loop goes over sequences, and table is a tensor",
        "returns: any[S]\nensure(result.shape[1] == 1)": "result has 1 dimension",
        "returns: list[any[S]]\nensure(all(item > 1 for item in result))": "item is a tensor",
        "require(owner.weight > 1)": "owner.weight is a tensor",
        "m = table.shape[2]\nensure(m > 1)": "table has 2 dimensions",
    }.items():
        with pytest.raises(og.ContractError, match=problem):
            load(body)


def test_a_loop_s_name_is_not_the_parameter() -> None:
    load("require(all(len(lens) > 1 for lens in free))\nrequire(all(n.shape[0] > 1 for n in many))")


def test_the_error_points_to_the_tensor() -> None:
    with pytest.raises(og.ContractError) as caught:
        load("require(n > 1)\nfor row in table:\n    require(n > 2)")
    assert (caught.value.line, caught.value.column) == (12, 16)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_has_a_kind_that_is_never_judged(name: str) -> None:
    """No argument takes anything."""
    function = FUNCTIONS[name]
    texts = {"text": "'rows'", "path": "free", "owner": "free"}
    for index, (_, kind) in enumerate(function.arguments):
        if kind in ("path", "text") or (name, index) == ("get", 1):
            continue
        refused = 0
        for wrong in ("n", "mode", "T", "S", "options", "many"):
            given = [texts.get(k, "free") for _, k in function.arguments[: max(function.least, index + 1)]]
            given[index] = wrong
            call = f"{name}({', '.join(given)})"
            try:
                load(f"a = {call}\nrequire(n > 1)")
            except og.ContractError as error:
                assert "takes" in str(error), (call, error)
                refused = True
        assert refused, (name, index)


@pytest.mark.parametrize("lines", [("x: str", "x: object"), ("x: object", "x: str")])
def test_of_several_declarations_the_narrower_counts_wherever_it_stands(lines: tuple[str, str]) -> None:
    with pytest.raises(og.ContractError, match="x is a text and 0 a number: never equal"):
        parse_body("\n".join([*lines, "require(x == 0)"]), "f", ("x",))
