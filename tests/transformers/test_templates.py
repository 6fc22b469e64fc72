"""Templates of syntax: what fits, what does not, and what fills the holes."""

from __future__ import annotations

import ast

import pytest

from llm_op_guard.integrations.transformers.templates import filled, fits


def syntax(text: str) -> ast.AST:
    (statement,) = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


@pytest.mark.parametrize(
    ("template", "text", "holes"),
    [
        ("x * self.SCALE", "x * self.scale", {"SCALE": "scale"}),
        ("x * self.SCALE", "x * self.scale + 1", None),
        ("x * self.SCALE", "x * self.config.scale", None),
        ("x * self.SCALE", "y * self.scale", None),
        ("x * MODULE.SCALE", "x * self.config.scale", {"MODULE": "self.config", "SCALE": "scale"}),
        ("x = x * SCALE", "x = x * (a + b)", {"SCALE": "a + b"}),
        ("x = x * SCALE", "x *= a", None),
        ("x = x * SCALE", "x = y = x * a", None),
        ("NAME is None", "x is None", {"NAME": "x"}),
        ("NAME is None", "x is not None", None),
        ("NAME is None", "x is y is None", None),
        ("(ONE, OTHER)", "(a, b)", {"ONE": "a", "OTHER": "b"}),
        ("(ONE, OTHER)", "(a, b, c)", None),
        ("NAME + NAME", "a.b + a.b", {"NAME": "a.b"}),
        ("NAME + NAME", "a + b", None),
        ("f(x)", "f(x, y)", None),
        ("f(x)", "f(x, y=1)", None),
        ("f(...)", "f(x, *y, z=1, **kwargs)", {}),
        ("f(...)", "g(x)", None),
        ("f(x, ...)", "f(x, 1)", {}),
        ("f(x, ...)", "f(1, x)", None),
        ("f(x, ...)", "f()", None),
        ("f(..., cache=cache)", "f(x, mask=mask, cache=cache, **kwargs)", {}),
        ("f(..., cache=cache)", "f(x, cache=None)", None),
        ("f(..., cache=cache)", "f(x, cache)", None),
        ("f(..., cache=cache)", "x", None),
        ("x[:, 1]", "x[:, 1]", {}),
        ("x[:, 1]", "x[:, True]", None),
        ("x[:-1]", "x[:1]", None),
        ("x == 'NAME'", "x == 'other'", None),
        ("return self.CHILD", "return self.child", {"CHILD": "child"}),
        ("return self.CHILD", "self.child", None),
    ],
)
def test_templates(template: str, text: str, holes: dict[str, str] | None) -> None:
    assert filled(template, syntax(text)) == holes
    assert fits(template, syntax(text)) is (holes is not None)


def test_a_name_that_is_bound_fits_one_that_is_read() -> None:
    assert fits("x", syntax("x = 1").targets[0])  # type: ignore[attr-defined]


def test_nothing_fits_no_node() -> None:
    assert not fits("NAME", None)
