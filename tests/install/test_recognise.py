"""Recognising code by what it says and by what it calls."""

from __future__ import annotations

import functools
import gc
import importlib
import linecache
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from llm_op_guard.install.patch import Patch, copy_function
from llm_op_guard.install.recognise import Fingerprint, Refused, digest_of, fingerprint, innermost, once_for_code

ROPE = """
import math
LIMIT = 3

class Helper:
    pass

def rotate_half(x):
    return -x

def unrelated(x):
    return x

def rope(q, k, scale=1):
    return q * LIMIT + rotate_half(q) * scale, Helper, math.pi
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., types.ModuleType]]:
    """Makes a module of a source text; a dotted name makes its package too."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    made = 0

    def make(source: str, name: str | None = None) -> types.ModuleType:
        nonlocal made
        made += 1
        name = name or f"recognised_{made}"
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    for name in set(sys.modules) - before:
        if name.startswith(("recognised", "pkg", "elsewhere")):
            del sys.modules[name]


def digest(function: object) -> str:
    found = fingerprint(function)
    assert isinstance(found, Fingerprint), found
    return found.digest


def reason(answer: object) -> str:
    assert isinstance(answer, Refused), answer
    return answer.reason


# ------------------------------------------------------------------------------------------------- what does not count


def test_layout_comments_docstrings_annotations_and_decorators_do_not_count(home: Callable[..., Any]) -> None:
    plain = home("def f(a, b=1, *c, d, **e):\n    x = a + b\n    def g(y):\n        return y\n    return g(x)\n")
    dressed = home(
        "import functools\n"
        "def keep(f): return f\n"
        "@keep\n"
        "@functools.partial(lambda f, n: f, n=1)\n"
        "def f(\n    a: int,  # a comment\n    b: int = 1,\n    *c: str, d: 'float', **e: dict) -> int:\n"
        '    """Says\nwhat it does."""\n'
        "    x: int = (a\n        + b)\n"
        "    @keep\n"
        "    def g(y: int) -> int:\n"
        '        """Inner."""\n'
        "        return y\n"
        "\n"
        "    return g(x)  # done\n"
    )
    assert digest(plain.f) == digest(dressed.f)


def test_a_method_and_a_function_with_the_same_text(home: Callable[..., Any]) -> None:
    module = home(
        "def f(self, x):\n    return x\n"
        'class C:\n    def f(self, x):\n        """At the\nfirst column."""\n        return x\n'
    )
    assert digest(module.f) == digest(module.C.f)


def test_a_body_of_only_a_docstring_or_a_declaration(home: Callable[..., Any]) -> None:
    module = home("def f():\n    '''Only this.'''\n")
    other = home("def f():\n    pass\n")
    declared = home("def f():\n    x: int\n")
    assert digest(module.f) == digest(other.f) == digest(declared.f)


def test_classes_modules_constants_and_unused_functions_do_not_count(home: Callable[..., Any]) -> None:
    module = home(ROPE)
    before = fingerprint(module.rope)
    module.LIMIT, module.Helper, module.math = 4, int, sys
    module.unrelated = lambda x: 1
    assert fingerprint(module.rope) == before


def test_defaults_changed_on_the_object_do_not_count(home: Callable[..., Any]) -> None:
    module = home(ROPE)
    before = digest(module.rope)
    module.rope.__defaults__ = (7,)
    assert digest(module.rope) == before


# --------------------------------------------------------------------------------------------------------- what counts


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("* scale", "+ scale"),
        ("scale=1", "scale=2"),
        ("rope(q, k,", "rope(k, q,"),
        ("rope(q, k,", "rope(q, k, /,"),
        ("return -x", "return x"),
        ("LIMIT +", "4 +"),
    ],
)
def test_a_change_counts(home: Callable[..., Any], old: str, new: str) -> None:
    assert digest(home(ROPE).rope) != digest(home(ROPE.replace(old, new)).rope)


def test_the_same_text_in_another_module_is_the_same(home: Callable[..., Any]) -> None:
    assert fingerprint(home(ROPE).rope) == fingerprint(home("# moved\n\n" + ROPE).rope)


def test_digest_is_stable(home: Callable[..., Any]) -> None:
    # Integrations ship these numbers: a change of the method must be deliberate.
    found = fingerprint(home(ROPE).rope)
    assert found == Fingerprint("2d333b49aa634b0d", ("rotate_half=adca52c31146a76d",))


def test_a_callee_replaced_at_run_time_counts(home: Callable[..., Any]) -> None:
    module = home(ROPE)
    before = digest(module.rope)
    original = module.rotate_half

    def rotate_half(x):
        return -x

    module.rotate_half = rotate_half  # the same text, from another package
    found = fingerprint(module.rope)
    assert isinstance(found, Fingerprint) and found.digest != before
    assert found.reaches[0].startswith(f"rotate_half={__name__}:") and found.reaches[0].endswith("rotate_half")

    module.rotate_half = functools.wraps(original)(lambda x: x)  # says that it is the original
    assert digest(module.rope) not in (before, found.digest)
    for not_a_function in (functools.partial(original), abs, mock.Mock()):
        module.rotate_half = not_a_function
        assert digest(module.rope) != before
    del module.rotate_half
    assert digest(module.rope) != before
    module.rotate_half = original
    assert digest(module.rope) == before


def test_callees_of_callees_and_other_modules_of_the_package(home: Callable[..., Any]) -> None:
    home("def deep(x):\n    return x\n", "pkg_a.low")
    middle = home("from pkg_a.low import deep\ndef mid(x):\n    return deep(x)\n", "pkg_a.mid")
    top = home("from pkg_a.mid import mid\ndef top(x):\n    return mid(x)\n", "pkg_a.top")
    before = fingerprint(top.top)
    assert isinstance(before, Fingerprint)
    assert [entry.partition("=")[0] for entry in before.reaches] == ["deep", "mid"]
    middle.deep = home("def deep(x):\n    return x + 1\n", "pkg_a.low2").deep
    assert digest(top.top) != before.digest


def test_functions_of_other_packages_count_by_name_only(home: Callable[..., Any]) -> None:
    elsewhere = home("def helper(x):\n    return x\n", "elsewhere.mod")
    module = home("from elsewhere.mod import helper\ndef f(x):\n    return helper(x)\n", "pkg_b.mod")
    before = fingerprint(module.f)
    assert isinstance(before, Fingerprint) and before.reaches == ("helper=elsewhere.mod:helper",)
    elsewhere.helper.__code__ = (lambda x: 1).__code__.replace(co_qualname="helper")
    assert fingerprint(module.f) == before


def test_cycles_end(home: Callable[..., Any]) -> None:
    source = "def even(n):\n    return n == 0 or odd(n - 1)\ndef odd(n):\n    return n != 0 and even(n - 1)\n"
    module, changed = home(source), home(source.replace("n != 0", "n != 1"))
    assert digest(module.even) != digest(module.odd)
    assert digest(module.even) != digest(changed.even)


def test_references_that_are_not_calls_and_in_nested_scopes(home: Callable[..., Any]) -> None:
    module = home(
        "def one(x): return x\ndef two(x): return x\ndef three(x): return x\ndef four(x): return x\n"
        "def f(x, three):\n"
        "    def inner(y): return [two(i) for i in y]\n"
        "    return map(one, x), inner(x), three, x.four\n"
    )
    found = fingerprint(module.f)
    assert isinstance(found, Fingerprint)
    assert [entry.partition("=")[0] for entry in found.reaches] == ["one", "two"]


def test_functions_in_a_closure_count(home: Callable[..., Any]) -> None:
    module = home(
        "def make(fn):\n    def inner(x):\n        return fn(x)\n    return inner\n"
        "def a(x): return x\ndef b(x): return 1\n"
    )
    first, second, same = module.make(module.a), module.make(module.b), module.make(module.a)
    assert first.__code__ is second.__code__
    assert digest(first) == digest(same) != digest(second)


def test_an_unassigned_cell(home: Callable[..., Any]) -> None:
    module = home("def make():\n    def f():\n        return late()\n    yield f\n    late = f\n")
    digest(next(module.make()))


def test_armed_functions_are_recognised_as_what_they_were(home: Callable[..., Any]) -> None:
    module = home(ROPE)
    before = fingerprint(module.rope)
    patches = [Patch(module.rope, ["q"]), Patch(module.rotate_half, ["x"])]
    for patch in patches:
        patch.arm(lambda *_: None)
    assert fingerprint(module.rope) == before
    assert fingerprint(copy_function(module.rope)) == before
    for patch in patches:
        patch.disarm()


# ------------------------------------------------------------------------------------------------------------ refusals


def test_what_is_not_a_python_function_is_refused() -> None:
    for wrong, name in [(len, "builtin_function"), (functools.partial(reason), "partial"), (Patch, "type"), (3, "int")]:
        assert f"not a Python function but {name}" in reason(fingerprint(wrong))


def test_a_lambda_is_refused(home: Callable[..., Any]) -> None:
    module = home("act = lambda x: x\ndef f(x):\n    return act(x)\n")
    assert "lambda" in reason(fingerprint(module.act))
    assert reason(fingerprint(module.f)).startswith("act, which it calls: ")


def test_code_without_source_is_refused() -> None:
    namespace: dict[str, Any] = {}
    exec("def f(x):\n    return x\n", namespace)
    assert "no source at <string>" in reason(fingerprint(namespace["f"]))


SOURCE = "def other(a):\n    return a\n\n\ndef f(a, b):\n    return a\n"


@pytest.mark.parametrize(
    "edited",
    [
        SOURCE.replace("f(a, b)", "f(a, c)"),
        SOURCE.replace("f(a, b)", "f(a, b, c)"),
        SOURCE.replace("def f", "def g"),
        SOURCE.replace("def f(a, b):", "x = ("),
        SOURCE.replace("def f(a, b):\n    return a\n", "# nothing here\n"),
        SOURCE.replace("def f(a, b):", "if True:"),
        "\n" + SOURCE,
        "short = 1\n",
        SOURCE.replace("def f(a, b):\n", "def f(a, b): '\0'\n"),
    ],
)
def test_an_edited_file_is_refused(home: Callable[..., Any], edited: str) -> None:
    module = home(SOURCE)
    path = Path(module.__file__)
    path.write_text(edited)
    os.utime(path, (1, 1))
    assert "is not the source of the code: was the file edited?" in reason(fingerprint(module.f))


def test_a_function_longer_than_its_source_is_refused(home: Callable[..., Any]) -> None:
    module = home("def f(a):\n    b = a\n    return b\n")
    path = Path(module.__file__)
    path.write_text("def f(a):\n    return a\n")
    os.utime(path, (1, 1))
    assert "was the file edited?" in reason(fingerprint(module.f))


def test_equal_code_objects_are_told_apart(home: Callable[..., Any]) -> None:
    first, second = home("def f(a=1):\n    return a\n").f, home("def f(a=2):\n    return a\n").f
    assert first.__code__ == second.__code__
    assert digest(first) != digest(second)


def test_a_file_edited_and_loaded_again_is_read_again(home: Callable[..., Any]) -> None:
    module = home(SOURCE)
    before = digest(module.f)
    path = Path(module.__file__)
    path.write_text(SOURCE.replace("def f(a, b):\n    return a", "def f(a, b):\n    return b"))
    os.utime(path, (1, 1))
    linecache.getlines(str(path))
    importlib.reload(module)
    assert digest(module.f) != before


# ---------------------------------------------------------------------------------------------------- once for the code


def test_the_digest_is_that_of_the_fingerprint_or_nothing(home: Callable[..., Any]) -> None:
    module = home(ROPE)
    assert digest_of(module.rope) == digest(module.rope) == digest_of(copy_function(module.rope))
    assert digest_of(len) == digest_of(None) == digest_of(module.Helper) == ""


def test_changed_code_has_another_digest(home: Callable[..., Any]) -> None:
    module = home("def f(x):\n    return x\n\n\ndef g(x):\n    return -x\n")
    before = digest_of(module.f)
    code, module.f.__code__ = module.f.__code__, module.g.__code__
    assert digest_of(module.f) == digest_of(module.g) != before
    module.f.__code__ = code
    assert digest_of(module.f) == before


def test_guards_do_not_change_the_digest(home: Callable[..., Any]) -> None:
    module = home(ROPE)
    before = digest_of(module.rope)
    patch = Patch(module.rope, ["q"])
    patch.arm(lambda *_: None)
    assert digest_of(module.rope) == before
    patch.disarm()


def test_closures_of_one_code_are_told_apart(home: Callable[..., Any]) -> None:
    module = home(
        "def one(x):\n    return x\n\n\ndef two(x):\n    return -x\n\n\n"
        "def make(inner):\n    def f(x):\n        return inner(x)\n    return f\n"
    )
    one, two = module.make(module.one), module.make(module.two)
    assert one.__code__ is two.__code__
    assert digest_of(one) != digest_of(two)


def test_one_code_with_other_globals_is_told_apart(home: Callable[..., Any]) -> None:
    module, other = home(ROPE), home(ROPE.replace("return -x", "return x"))
    moved = types.FunctionType(module.rope.__code__, other.__dict__)
    assert digest_of(module.rope) != digest_of(moved)


def test_what_is_known_of_code_keeps_nothing_alive(home: Callable[..., Any]) -> None:
    module = home("def f(x):\n    return x\n")
    digest_of(module.f)
    code, function = weakref.ref(module.f.__code__), weakref.ref(module.f)
    module.f = None
    gc.collect()
    assert function() is None and code() is None


def test_each_code_is_asked_for_once(home: Callable[..., Any]) -> None:
    asked = []

    @once_for_code
    def parameters(function: types.FunctionType, more: str = "") -> str:
        asked.append((function, more))
        return more.join(function.__code__.co_varnames)

    module = home("def f(x, y):\n    return x\n\n\nclass C:\n    def m(self, z):\n        return super().m(z)\n")
    assert [parameters(module.f), parameters(module.f, "-"), parameters(module.f)] == ["xy", "x-y", "xy"]
    assert [parameters(module.C.m), parameters(module.C.m)] == ["selfz", "selfz"]
    assert asked == [(module.f, ""), (module.f, "-"), (module.C.m, "")]


def test_a_guarded_function_is_asked_about_once(home: Callable[..., types.ModuleType]) -> None:
    asked = []

    @once_for_code
    def parameters(function: types.FunctionType) -> str:
        asked.append(function)
        return function.__name__

    function = home("def f(x, y):\n    return x\n").f
    patch = Patch(function, ["x"])
    for check in (lambda x: None, lambda x: x):
        assert parameters(function) == "f"
        patch.arm(check)
        assert parameters(function) == "f"
    patch.disarm()
    assert parameters(function) == "f"
    assert asked == [function]


# ----------------------------------------------------------------------------------------------------------- innermost


def test_innermost_of_decorators_and_methods() -> None:
    def function(self: Any) -> None: ...

    class Owner:
        method = function
        static = staticmethod(functools.wraps(function)(lambda *a: None))
        klass = classmethod(function)

    outer = functools.wraps(function)(lambda *a: None)
    outer = functools.wraps(outer)(lambda *a: None)
    for thing in (function, outer, Owner().method, vars(Owner)["static"], vars(Owner)["klass"], Owner.klass):
        assert innermost(thing) is function
    assert innermost(functools.lru_cache(function)) is function


def test_innermost_refuses_what_has_no_function_inside() -> None:
    assert "builtin_function" in reason(innermost(len))
    assert "partial" in reason(innermost(functools.partial(reason)))
    assert "Mock" in reason(innermost(mock.MagicMock()))
    assert "builtin_function" in reason(innermost(functools.wraps(len)(lambda *a: None)))


def test_innermost_of_a_guarded_function_is_itself() -> None:
    def function() -> None: ...

    patch = Patch(function, ())
    function.__wrapped__ = patch.call  # type: ignore[attr-defined]
    assert innermost(function) is function
    assert innermost(functools.wraps(function)(lambda *a: None)) is function


def test_innermost_of_a_loop() -> None:
    def function() -> None: ...

    function.__wrapped__ = function  # type: ignore[attr-defined]
    assert "leads back to itself" in reason(innermost(function))


# -------------------------------------------------------------------------------------------------------- transformers


def test_transformers_modules() -> None:
    pytest.importorskip("transformers")
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    qwen2 = importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    gptj = importlib.import_module("transformers.models.gptj.modeling_gptj")
    assert fingerprint(llama.apply_rotary_pos_emb) == fingerprint(qwen2.apply_rotary_pos_emb)
    assert digest(gptj.apply_rotary_pos_emb) != digest(llama.apply_rotary_pos_emb)
    assert [entry.partition("=")[0] for entry in fingerprint(llama.apply_rotary_pos_emb).reaches] == ["rotate_half"]  # type: ignore[union-attr]

    forwards = [innermost(llama.LlamaModel.forward), innermost(llama.LlamaForCausalLM.forward)]
    assert [found.__code__.co_qualname for found in forwards if not isinstance(found, Refused)] == [
        "LlamaModel.forward",
        "LlamaForCausalLM.forward",
    ]
    assert digest(forwards[0]) != digest(forwards[1])
