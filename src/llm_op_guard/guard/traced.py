"""What a check does while Dynamo traces it: it reads, changes nothing, and says what is broken.

Where Dynamo may break the graph, a broken rule makes it do so, and the call is explained when the program runs. Where
one whole graph is wanted there is no such time: the call is explained while it is traced, on the fake tensors that
Dynamo has, and the error is both ours and one that Dynamo hands on as its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from llm_op_guard.errors import GuardError
from llm_op_guard.guard.reading import NotApplicable, Snapshot

# Gives the value of a local variable of the check; raises NotApplicable where Dynamo does not know it.
Local = Callable[[str], Any]


def comptime() -> Any:
    """Dynamo's way to run plain Python while it traces; elsewhere what does nothing."""
    module = sys.modules.get("torch._dynamo.comptime")
    return _elsewhere if module is None else module.comptime


def _elsewhere(function: Any) -> None:
    del function


def constant(function: Callable[[], Any]) -> Callable[[], Any]:
    """The same function, which Dynamo calls while it traces and takes the answer of; without importing torch."""

    def answer() -> Any:
        return function()

    answer._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return answer


def may_break_graph() -> bool:
    """Whether Dynamo is at work and a graph break is no error."""
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    if convert is None:
        return False
    try:
        return not _wants_whole_graph(convert.InstructionTranslator.current_tx())
    except Exception:  # it is not at work
        return False


def is_whole_program() -> bool:
    """Whether Dynamo is at work on a program that will run here: one that is exported runs where no guards are.

    To be asked as a `constant`: Dynamo guards what it traces, and each of its guards is tested before every run.
    """
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    if convert is None:
        return False
    try:
        return not (convert.InstructionTranslator.current_tx().export or sys.modules["torch"].compiler.is_exporting())
    except Exception:  # it is not at work, or these parts of it have changed
        return False


def teller(error_of: Callable[[Local], GuardError | None], reason: str) -> Callable[[Any], None]:
    """What `comptime` calls on a broken rule: fails the whole graph with the error, if there is one.

    Without, Dynamo's error has the reason that stands at the function which it is about to refuse. Where it may break
    the graph, it does so for that reason, and leaves the check to Python. It must not compile one half of it: in that
    of a long check it loses its place (`fix_extended_args` of torch 2.13 forgets offsets), and fails.
    """

    def tell(context: Any) -> None:
        try:
            translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
            dynamos: Any = sys.modules["torch._dynamo.exc"].Unsupported
            if _wants_whole_graph(translator):
                error = error_of(lambda name: _value(context.get_local(name), translator))
                if error is None:
                    return
                ours: Any = type(error)
                handed_on = _both(ours, dynamos)(error.message, error.violations)
            else:
                handed_on = dynamos(reason)
                handed_on.skip_frame = True
        except Exception:  # these parts of Dynamo are its own business and may change
            return
        raise handed_on

    return tell


def asking(question: Callable[[Local, bool], Any]) -> tuple[Callable[[Any], None], Callable[[], Any]]:
    """What `comptime` calls to have a question answered in plain Python, on the objects themselves; and the answer.

    It is a constant to Dynamo, which sees nothing of what was read for it: None where there is no answer. The question
    is told whether what is traced becomes one graph, with all that Dynamo guards of it.
    """
    answers: list[Any] = [None]

    def ask(context: Any) -> None:
        answers[0] = None
        try:
            translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
            answers[0] = question(lambda name: _value(context.get_local(name), translator), _is_one(translator))
        except Exception:  # the question does not apply, or these parts of Dynamo have changed
            return

    return ask, constant(lambda: answers[0])


@cache
def _both(ours: type[GuardError], dynamos: Any) -> Any:
    """A class of errors that Dynamo takes for its own; it wraps all others."""

    def __init__(self: Any, message: str, violations: Any = ()) -> None:  # noqa: N807 - of the class below
        dynamos.__init__(self, message)
        ours.__init__(self, message, violations)

    def __reduce__(self: Any) -> Any:  # noqa: N807 - another process may have no Dynamo
        return ours, (self.message, self.violations)

    body = {"__init__": __init__, "__reduce__": __reduce__, "__module__": ours.__module__, "__doc__": ours.__doc__}
    return type(ours.__name__, (ours, dynamos), body)


def _wants_whole_graph(translator: Any) -> bool:
    return bool(translator.one_graph or getattr(translator, "error_on_graph_break", False))


def _is_one(translator: Any) -> bool:
    """Whether a program becomes one graph, which is made anew where a parameter has another shape."""
    return _wants_whole_graph(translator) and sys.modules["torch._dynamo"].config.force_parameter_static_shapes is True


def _value(variable: Any, translator: Any) -> Any:
    """What a variable of Dynamo stands for: tensors are fake, sizes may be symbols."""
    tracker = variable._i_will_not_complain_if_bc_breaks_VariableTracker()
    return _known(tracker, translator)


def _known(tracker: Any, translator: Any) -> Any:
    tracker = tracker.realize()
    if tracker.is_python_constant():
        return tracker.as_python_constant()
    kind = tracker.python_type()
    items = getattr(tracker, "items", None)
    if isinstance(items, list | tuple):
        found = [_known(item, translator) for item in items]
        if kind is Snapshot:
            return Snapshot(*found)
        return found if kind is list else tuple(found)
    if isinstance(items, dict) and kind is dict:
        return {key.vt.as_python_constant(): _known(item, translator) for key, item in items.items()}
    if hasattr(tracker, "module_key"):
        return translator.output.get_submodule(tracker.module_key)
    proxy = getattr(tracker, "proxy", None)
    if proxy is not None:
        return proxy.node.meta["example_value"]
    if hasattr(tracker, "sym_num"):
        return tracker.sym_num
    if hasattr(tracker, "value"):
        return tracker.value
    raise NotApplicable
