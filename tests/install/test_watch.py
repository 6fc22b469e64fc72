"""Hearing of later imports without leaving a trace in them."""

from __future__ import annotations

import copy
import importlib
import importlib.resources
import importlib.util
import inspect
import pickle
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from llm_op_guard.install.watch import ModuleWatch

Make = Callable[[str, str], None]


class Log:
    """Everything that a watch said."""

    def __init__(self) -> None:
        self.loaded: list[types.ModuleType] = []
        self.failed: list[tuple[str, BaseException]] = []

    def fail(self, name: str, error: BaseException) -> None:
        self.failed.append((name, error))

    @property
    def names(self) -> list[str]:
        return [module.__name__ for module in self.loaded]


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Writes an importable module; a dotted name in a package."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, source: str) -> None:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.startswith("watched")]:
        del sys.modules[name]


@pytest.fixture
def watch(log: Log) -> Iterator[ModuleWatch]:
    watch = ModuleWatch(lambda name: name.startswith("watched"), log.loaded.append, log.fail)
    before = list(sys.meta_path)
    watch.start()
    yield watch
    watch.stop()
    assert sys.meta_path == before


def test_an_import_is_reported_once_and_complete(make: Make, watch: ModuleWatch, log: Log) -> None:
    make("watched_a", "x = 1\n")
    module = importlib.import_module("watched_a")
    importlib.import_module("watched_a")
    assert log.loaded == [module] and module.x == 1
    assert log.failed == []


def test_only_what_is_wanted_is_reported(make: Make, log: Log) -> None:
    make("watched_a", "")
    make("watched_b", "")
    watch = ModuleWatch(lambda name: name == "watched_b", log.loaded.append, log.fail)
    watch.start()
    importlib.import_module("watched_a")
    importlib.import_module("watched_b")
    watch.stop()
    assert log.names == ["watched_b"]


def test_what_is_there_already_is_not_reported(make: Make, log: Log) -> None:
    make("watched_a", "")
    importlib.import_module("watched_a")
    watch = ModuleWatch(lambda name: True, log.loaded.append, log.fail)
    watch.start()
    importlib.import_module("watched_a")
    watch.stop()
    assert log.loaded == []


def test_no_trace_is_left_in_the_module(make: Make, watch: ModuleWatch, log: Log, tmp_path: Path) -> None:
    body = "loader_while_running = __loader__, __spec__.loader\nclass C: pass\ndef f():\n    return 1\n"
    make("watched_pkg.__init__", "")
    make("watched_pkg.mod", body)
    (tmp_path / "watched_pkg" / "data.txt").write_text("data")
    module = importlib.import_module("watched_pkg.mod")
    for loader in (module.__loader__, module.__spec__.loader, *module.loader_while_running):
        assert type(loader) is SourceFileLoader
    assert module.__loader__ is module.__spec__.loader
    assert log.names == ["watched_pkg", "watched_pkg.mod"]
    assert inspect.getsource(module) == body
    assert inspect.getsource(module.f) == "def f():\n    return 1\n"
    assert importlib.resources.files("watched_pkg").joinpath("data.txt").read_text() == "data"
    assert isinstance(pickle.loads(pickle.dumps(module.C())), module.C)
    assert module.__cached__ == importlib.util.cache_from_source(module.__file__)

    watch.stop()
    del sys.modules["watched_pkg.mod"]
    unwatched = importlib.import_module("watched_pkg.mod")
    watch.start()
    assert vars(module).keys() == vars(unwatched).keys()
    assert vars(module.__spec__).keys() == vars(unwatched.__spec__).keys()


def test_a_spec_without_an_import_answers_like_the_real_one(make: Make, watch: ModuleWatch, log: Log) -> None:
    make("watched_a", "x = 1\n")
    spec = importlib.util.find_spec("watched_a")
    assert spec is not None and spec.loader is not None
    loader: Any = spec.loader
    assert loader.get_source("watched_a") == "x = 1\n"
    assert loader.is_package("watched_a") is False
    assert not hasattr(loader, "no_such_thing")
    assert copy.copy(loader).path == loader.path
    assert log.loaded == []


def test_the_lazy_loader(make: Make, watch: ModuleWatch, log: Log) -> None:
    make("watched_a", "x = 1\n")
    spec = importlib.util.find_spec("watched_a")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["watched_a"] = module
    spec.loader.exec_module(module)
    assert log.loaded == []
    assert module.x == 1
    assert log.loaded == [module]
    assert type(module.__loader__) is SourceFileLoader


def test_runpy(make: Make, watch: ModuleWatch) -> None:
    import runpy

    make("watched_main", "value = __name__\n")
    assert runpy.run_module("watched_main")["value"] == "watched_main"


def test_a_reload_is_reported_again(make: Make, watch: ModuleWatch, log: Log) -> None:
    make("watched_a", "x = 1\n")
    module = importlib.import_module("watched_a")
    assert importlib.reload(module) is module
    assert log.loaded == [module, module]
    assert type(module.__spec__.loader) is type(module.__loader__) is SourceFileLoader


def test_nested_and_circular_imports(make: Make, watch: ModuleWatch, log: Log) -> None:
    make("watched_a", "import watched_b\nx = 1\n")
    make("watched_b", "import watched_a\nimport watched_c\n")
    make("watched_c", "")
    importlib.import_module("watched_a")
    assert log.names == ["watched_c", "watched_b", "watched_a"]


def test_a_namespace_package(make: Make, watch: ModuleWatch, log: Log) -> None:
    make("watched_space.mod", "")
    importlib.import_module("watched_space.mod")
    assert log.names == ["watched_space.mod"]


def test_a_module_that_replaces_itself(make: Make, watch: ModuleWatch, log: Log) -> None:
    make("watched_a", "import sys, types\nsys.modules[__name__] = types.ModuleType('watched_new')\n")
    make("watched_b", "import sys\nsys.modules[__name__] = 'no module'\n")
    assert importlib.import_module("watched_a") is log.loaded[0]
    assert log.names == ["watched_new"]
    importlib.import_module("watched_b")
    assert log.names == ["watched_new", "watched_b"]


@pytest.mark.parametrize("name", ["__hello__", "xxsubtype"])
def test_frozen_and_builtin_modules(log: Log, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None or not isinstance(spec.loader, type):
        pytest.skip(f"this Python is built without {name}")
    monkeypatch.delitem(sys.modules, name, raising=False)
    watch = ModuleWatch(lambda wanted: wanted == name, log.loaded.append, log.fail)
    watch.start()
    module = importlib.import_module(name)
    watch.stop()
    assert log.loaded == [module] and log.failed == []
    assert module.__loader__ is module.__spec__.loader and isinstance(module.__loader__, type)
    monkeypatch.delitem(sys.modules, name)


# --------------------------------------------------------------------------------------------------------------- errors


def test_an_error_of_ours_does_not_break_the_import(make: Make, log: Log) -> None:
    make("watched_a", "x = 1\n")
    error = RuntimeError("ours")

    def loaded(module: types.ModuleType) -> None:
        raise error

    watch = ModuleWatch(lambda name: name == "watched_a", loaded, log.fail)
    watch.start()
    assert importlib.import_module("watched_a").x == 1
    watch.stop()
    assert log.failed == [("watched_a", error)]


def test_an_error_in_wants_does_not_break_the_import(make: Make, log: Log) -> None:
    make("watched_a", "x = 1\n")

    def wants(name: str) -> bool:
        raise KeyError(name)

    watch = ModuleWatch(wants, log.loaded.append, log.fail)
    watch.start()
    assert importlib.import_module("watched_a").x == 1
    watch.stop()
    assert log.loaded == []
    assert [(name, type(error)) for name, error in log.failed] == [("watched_a", KeyError)]


def test_an_interrupt_in_loaded_is_not_swallowed(make: Make, log: Log) -> None:
    make("watched_a", "")

    def loaded(module: types.ModuleType) -> None:
        raise KeyboardInterrupt

    watch = ModuleWatch(lambda name: name == "watched_a", loaded, log.fail)
    watch.start()
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("watched_a")
    watch.stop()
    assert log.failed == []


def test_import_errors_pass_through(make: Make, watch: ModuleWatch, log: Log) -> None:
    make("watched_a", "raise LookupError('theirs')\n")
    make("watched_b", "def (\n")
    with pytest.raises(LookupError, match="theirs"):
        importlib.import_module("watched_a")
    assert "watched_a" not in sys.modules
    with pytest.raises(SyntaxError):
        importlib.import_module("watched_b")
    with pytest.raises(ModuleNotFoundError, match="No module named 'watched_none'") as missing:
        importlib.import_module("watched_none")
    assert missing.value.name == "watched_none"
    assert log.loaded == [] and log.failed == []


# --------------------------------------------------------------------------------------------------- sys.meta_path


class Blind:
    """A finder that finds nothing and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        self.asked.append(name)


def test_start_and_stop_leave_the_finders_as_they_were(log: Log) -> None:
    before, identity = list(sys.meta_path), sys.meta_path
    watch = ModuleWatch(lambda name: True, log.loaded.append, log.fail)
    watch.stop()
    watch.start()
    watch.start()
    assert sys.meta_path == [watch, *before] and watch.started
    watch.stop()
    watch.stop()
    assert sys.meta_path == before and sys.meta_path is identity and not watch.started


def test_finders_that_others_insert_meanwhile_stay(make: Make, log: Log) -> None:
    make("watched_a", "")
    before = list(sys.meta_path)
    front, back = Blind(), Blind()
    watch = ModuleWatch(lambda name: name == "watched_a", log.loaded.append, log.fail)
    watch.start()
    sys.meta_path.insert(0, front)  # type: ignore[arg-type]
    sys.meta_path.insert(2, back)  # type: ignore[arg-type]
    try:
        importlib.import_module("watched_a")
        assert log.names == ["watched_a"]
        assert front.asked == back.asked == ["watched_a"]
        watch.stop()
        assert sys.meta_path == [front, back, *before]
    finally:
        sys.meta_path.remove(front)  # type: ignore[arg-type]
        sys.meta_path.remove(back)  # type: ignore[arg-type]


def test_two_watches(make: Make, watch: ModuleWatch, log: Log) -> None:
    make("watched_a", "")
    other = Log()
    second = ModuleWatch(lambda name: name == "watched_a", other.loaded.append, other.fail)
    second.start()
    module = importlib.import_module("watched_a")
    second.stop()
    assert log.loaded == other.loaded == [module]
    assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader


def test_stopped_during_an_import(make: Make, watch: ModuleWatch, log: Log) -> None:
    make("watched_a", "import watched_hook\nwatched_hook.watch.stop()\n")
    hook: Any = types.ModuleType("watched_hook")
    hook.watch = watch
    sys.modules["watched_hook"] = hook
    importlib.import_module("watched_a")
    assert log.loaded == []


def test_imports_in_threads(make: Make, watch: ModuleWatch, log: Log) -> None:
    names = [f"watched_t{index}" for index in range(20)]
    for name in names:
        make(name, "import time\ntime.sleep(0.001)\nready = True\n")
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for name in names:
                assert importlib.import_module(name).ready
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(log.names) == sorted(names)


# -------------------------------------------------------------------------------------------------------- transformers


def test_transformers_lazy_modules() -> None:
    pytest.importorskip("transformers")
    script = """
        import importlib, inspect, sys
        import transformers
        from llm_op_guard.install.watch import ModuleWatch

        seen, failed = [], []
        before = list(sys.meta_path)
        watch = ModuleWatch(
            lambda name: ".modeling_" in name, lambda module: seen.append(module), lambda *why: failed.append(why)
        )
        watch.start()
        from transformers.models.qwen2 import modeling_qwen2
        importlib.import_module("transformers.models.llama.modeling_llama")
        transformers.MistralForCausalLM
        watch.stop()
        names = [module.__name__.rpartition(".")[2] for module in seen]
        assert {"modeling_qwen2", "modeling_llama", "modeling_mistral"} <= set(names), names
        assert len(names) == len(set(names)), names
        assert modeling_qwen2 in seen and failed == [] and sys.meta_path == before
        assert inspect.getsource(modeling_qwen2.apply_rotary_pos_emb).startswith(("def", "@"))
        assert type(modeling_qwen2.__loader__).__module__.startswith("_frozen_importlib")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
