"""Who is to blame: the first call of a module whose inputs were finite and whose output is not.

A call is judged when it ends, so those inside it first. Where its inputs were not finite, the blame is for whoever made
them: another module, judged before, or the code of the calling module, judged after. It is told when the outermost
module returns: what has become finite until then (a softmax over a row that is masked out, whose NaN a `where` takes
away) is only suspect.

-inf is another matter, since masks hold it:

- In what goes in it is no fault where it masks: a name with mask, bias or alibi, zeros otherwise, what is put into a
  softmax, and what has as many columns and was made of these. NaN is always one, and +inf.
- In what comes out it is one where a layer of torch.nn that only computes made it of finite inputs. Any other module
  may have masked on purpose: it is to blame once NaN or +inf come of it.
"""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from llm_op_guard.errors import GuardInternalWarning
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.readable import plain_tensors
from llm_op_guard.guard.violation import CallSite
from llm_op_guard.nonfinite import tensors
from llm_op_guard.nonfinite.finding import Kind, NonFinite, Place
from llm_op_guard.nonfinite.gradients import Gradients
from llm_op_guard.nonfinite.tensors import BELOW, FINITE, NAN

# Files of torch.nn whose modules never mask.
_COMPUTING = {
    f"torch.nn.modules.{name}" for name in ("linear", "conv", "normalization", "batchnorm", "instancenorm", "rnn")
}
_SOFTMAX = ("Softmax", "LogSoftmax", "Softmin", "Softmax2d")
_TABLES: tuple[tuple[str, Kind], ...] = (("_parameters", "parameter"), ("_buffers", "buffer"))


@frozen
class _Below:
    """Of a tensor that holds -inf: whether it masks, and the module that made it of finite inputs."""

    masks: bool
    source: NonFinite | None = None


_UNKNOWN = _Below(masks=False)


@dataclass(eq=False)
class _Call:
    """A call of a module that has begun."""

    module: Any
    parent: _Call | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int = 1
    root: Any = None  # the outermost module that it is part of
    name: str = ""  # its qualified name there
    since: int | None = None  # the sequence number of autograd; None while it records nothing
    bad: int = FINITE  # what went in that is not finite, and does not mask
    masks: set[int] = field(default_factory=set)  # the last sizes of what went in that masks
    source: NonFinite | None = None  # which module had made it
    inside: NonFinite | None = None  # what a call inside this one is to blame for
    given: Place | None = None  # of the outermost call: where its inputs are not finite
    surfaced: str | None = None
    called: list[Any] = field(default_factory=list)  # the modules that it called
    older: list[Any] = field(default_factory=list)  # nodes that these were given

    def whose(self) -> tuple[str, str, str, int]:
        """Name, class, class of the outermost module and number: who it is, in a finding."""
        return self.name, type(self.module).__name__, type(self.root).__name__, self.number


class Watch:
    """An observer of calls that keeps what it found first.

    `found` is certain, `suspect` is not. With `thread`, calls of other threads are let pass. `line` says from where the
    program made the call. `on_found` is called once, with `found` and whether it may raise. `calls` counts those of
    outermost modules; `overflowed` says whether gradients did so under a GradScaler.
    """

    def __init__(
        self,
        *,
        thread: int | None = None,
        line: Callable[[], CallSite | None] = lambda: None,
        on_found: Callable[[NonFinite, bool], None] = lambda _, __: None,
    ) -> None:
        from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary  # noqa: PLC0415

        self.found: NonFinite | None = None
        self.suspect: NonFinite | None = None
        self.calls = 0
        self.overflowed = False
        self._parameter: NonFinite | None = None  # one that holds NaN, whatever comes of it
        self.is_on = True
        self._thread, self._line, self._on_found = thread, line, on_found
        self._stack = threading.local()
        self._numbers: Any = WeakIdKeyDictionary()  # how often each module was called
        self._places: Any = WeakIdKeyDictionary()  # module → the outermost one (weakly), and its name there
        self._read: Any = WeakTensorKeyDictionary()  # tensor → its version when it was read, and what it holds
        self._below: Any = WeakTensorKeyDictionary()  # tensor with -inf → _Below
        self._scaler: Callable[[], Any] = lambda: None
        self.gradients = Gradients(
            self._kinds, self._tell_gradient, self._listens, self._safely, removable=thread is not None
        )

    def _listens(self) -> bool:
        return self.is_on and self.found is None

    # ------------------------------------------------------------ the observer

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """Look at what goes in, and at the parameters."""
        if not self._listens():
            return None
        if self._thread is not None and threading.get_ident() != self._thread:
            return None
        call = _Call(module, getattr(self._stack, "top", None), args, kwargs)
        self._stack.top = call
        self._safely(self._begin, call)
        return call

    def _begin(self, call: _Call) -> None:
        module, parent = call.module, call.parent
        call.number = self._numbers[module] = self._numbers.get(module, 0) + 1
        call.root, call.name = self._place(module, None if parent is None else parent.root)
        call.since = _sequence_number()
        if parent is None:
            self.calls += 1
        else:
            parent.called.append(module)
        self._judge_inputs(call)

    def _place(self, module: Any, root: Any) -> tuple[Any, str]:
        """The outermost module that a module is part of, and its name there."""
        root_ref, name = self._places.get(module) or (lambda: None, "")
        if (known := root_ref()) is not None and (root is None or known is root):
            return known, name  # without a root: a checkpoint, say, that calls it again in the backward pass
        root = module if root is None else root
        self.place_all(root)
        if module not in self._places or self._places[module][0]() is not root:
            self._places[module] = weakref.ref(root), f"<a {type(module).__name__} that is no submodule>"
        return root, self._places[module][1]

    def place_all(self, root: Any) -> None:
        """Note the names of all modules below an outermost one."""
        for name, module in _modules(root):
            self._places[module] = weakref.ref(root), name

    def leave(self, call: _Call, result: Any) -> None:
        """Look at what came out."""
        self._stack.top = call.parent
        if self._listens():
            self._safely(self._judge_outputs, call, result)

    def raised(self, call: _Call, error: BaseException) -> None:  # noqa: ARG002
        """Nothing came out: what was found until then may be why."""
        self._stack.top = call.parent
        if call.parent is not None:
            call.parent.inside = call.parent.inside or call.inside
        elif self._listens() and (finding := call.inside or self._parameter) is not None:
            self._tell(finding, may_raise=False)

    def _safely(self, judge: Callable[..., None], *arguments: Any) -> None:
        """An error of ours ends the watch and not the program."""
        try:
            judge(*arguments)
        except Exception as error:
            self.is_on = False
            message = f"llm-op-guard watches no longer for NaN: {type(error).__name__}: {error}"
            warnings.warn(GuardInternalWarning(message), stacklevel=4)

    def _tell(self, finding: NonFinite, *, may_raise: bool = True) -> None:
        if self.found is None:
            self.found = replace(finding, call_site=self._line())
            self._on_found(self.found, may_raise)

    def _doubt(self, finding: NonFinite) -> None:
        if self.suspect is None:
            self.suspect = replace(finding, certain=False, call_site=self._line())

    # ------------------------------------------------------------ what goes in

    def _judge_inputs(self, call: _Call) -> None:
        for name, parameter in _own(call.module, "_parameters"):
            before = self._read.get(parameter)
            if self._kinds(parameter) == NAN and self._parameter is None:
                finding = self._of_parameter(call, call.module, name, "parameter")
                if before is not None and before[1] == FINITE:
                    cause = "it was finite in the call before: what writes parameters (an optimizer's step) came since"
                    finding = replace(finding, cause=cause)
                self._parameter = finding
        for label, x in tensors.arguments_of(call.module, call.args, call.kwargs):
            if (kinds := self._kinds(x)) == FINITE:
                continue
            known = self._below.get(x, _UNKNOWN)
            if kinds == BELOW and self._masks(call, x, label):
                call.masks.add(_last_size(x))
                self._below[x] = replace(known, masks=True)
                continue
            call.bad |= kinds
            call.source = call.source or known.source
            if call.parent is None:
                call.given = call.given or tensors.place(x, label)
            elif call.parent.bad == FINITE and call.parent.surfaced is None and call.source is None:
                whom = f"{call.name} ({type(call.module).__name__})"
                call.parent.surfaced = (
                    f"it came up between calls: {whom} was given {label} with {tensors.place(x, label)}"
                )

    def _masks(self, call: _Call, x: Any, label: str) -> bool:
        """Whether -inf in an argument masks."""
        if type(call.module).__module__ in _COMPUTING:
            return False
        if x in self._below:
            return bool(self._below[x].masks)
        if type(call.module).__name__ in _SOFTMAX or tensors.is_mask(x, label):
            return True
        # Scores, say, to which the caller has added a mask.
        return call.parent is not None and _last_size(x) in call.parent.masks

    # ------------------------------------------------------------ what comes out

    def _judge_outputs(self, call: _Call, result: Any) -> None:
        found = list(tensors.tensors_in(result, "output"))
        bad = [(label, x) for label, x in found if self._kinds(x) & ~BELOW]
        below = [(label, x) for label, x in found if self._kinds(x) == BELOW and not self._is_masked(call, label, x)]
        blamed = None
        if bad:
            blamed = call.inside or self._blame(call, *bad[0])
            if blamed is not None and self._parameter is not None and blamed.name == self._parameter.name:
                blamed = self._parameter  # which tells more
        elif below:
            blamed = call.inside
            if blamed is None and call.bad == FINITE and type(call.module).__module__ in _COMPUTING:
                blamed = self._broken_parameter(call) or self._of_output(call, *below[0])
        elif call.inside is not None:
            self._doubt(call.inside)
        if call.since is not None and not bad:
            self._claim(call, found)
        if call.parent is not None:
            call.parent.inside = call.parent.inside or blamed
        elif (finding := blamed or self._parameter) is not None:
            self._tell(finding)
        elif below:
            self._doubt(self._below.get(below[0][1], _UNKNOWN).source or self._of_output(call, *below[0]))

    def _blame(self, call: _Call, label: str, x: Any) -> NonFinite | None:
        """Who made NaN or +inf in an output; None where that is still to be seen."""
        if call.source is not None:
            return call.source
        if call.bad == FINITE:
            return self._broken_parameter(call) or self._of_output(call, label, x)
        if call.parent is None and call.given is not None:
            return NonFinite("input", *call.whose(), call.given)
        return None

    def _is_masked(self, call: _Call, label: str, x: Any) -> bool:
        """Whether -inf in an output masks, or was made of what does; where it need not, who made it is noted."""
        if x not in self._below and _last_size(x) in call.masks:
            self._below[x] = _Below(masks=True)
        elif x not in self._below and call.bad == FINITE:
            cls = type(call.module)
            masks = cls.__module__ not in _COMPUTING and tensors.is_mask(x, label, call.name, cls.__name__)
            self._below[x] = _Below(masks, self._of_output(call, label, x))
        return bool(self._below.get(x, _UNKNOWN).masks)

    def _claim(self, call: _Call, found: list[tuple[str, Any]]) -> None:
        nodes = [*(x.grad_fn for _, x in found if x.grad_fn is not None), *call.older]
        if not nodes:
            return
        older = self.gradients.claim(nodes, call.since or 0, _Backward(call.whose(), call.root))
        if call.parent is not None:
            call.parent.older += older
        else:
            self.gradients.border(older)

    def _tell_gradient(self, finding: NonFinite) -> None:
        """Tell of it unless a GradScaler is at work: it skips such steps, and scales the loss less, down to 1."""
        scaler = self._scaler()
        if scaler is None or not _may_lower(scaler):
            scaler = _scaler()
            self._scaler = (lambda: None) if scaler is None else weakref.ref(scaler)
        if scaler is None:
            self._tell(finding)
        else:
            self.overflowed = True

    # ------------------------------------------------------------ findings

    def _of_output(self, call: _Call, label: str, x: Any) -> NonFinite:
        given = list(tensors.arguments_of(call.module, call.args, call.kwargs))
        where = tensors.place(x, label, below_allowed=bool(call.masks))
        if where is None:
            raise RuntimeError(f"{label} was not finite, and is now")
        cause = tensors.dead_row(given) if where.value != where.value else None
        if where.is_overflow and where.dtype == "float16":
            cause = "float16 holds no more than 65504: compute this in bfloat16 or float32"
        return NonFinite(
            "output",
            *call.whose(),
            where,
            surfaced=call.surfaced,
            inputs=tensors.operands(given),
            cause=cause,
        )

    def _broken_parameter(self, call: _Call) -> NonFinite | None:
        """A parameter or buffer of the module that is not finite, or of one below it that it used without a call."""
        called = {id(module) for module in call.called}
        for _, module in _modules(call.module):
            if module is not call.module and id(module) in called:
                continue
            for table, kind in _TABLES:
                for name, x in _own(module, table):
                    if _is_broken(x, name, kind):
                        return self._of_parameter(call, module, name, kind)
        return None

    def _of_parameter(self, call: _Call, module: Any, name: str, kind: Kind) -> NonFinite:
        where = tensors.place(dict(_own(module, f"_{kind}s"))[name], name)
        if where is None:
            raise RuntimeError(f"{name} was not finite, and is now")
        prefix = self._place(module, call.root)[1]
        return NonFinite(
            kind,
            f"{prefix}.{name}" if prefix else name,
            type(module).__name__,
            type(call.root).__name__,
            call.number,
            where,
        )

    # ------------------------------------------------------------ reading

    def _kinds(self, x: Any) -> int:
        """As `tensors.kinds`, of which each tensor is asked once, until it is changed in place."""
        if type(x) not in plain_tensors() or not (x.dtype.is_floating_point or x.dtype.is_complex):
            return FINITE
        if x.is_inference():  # no changes are counted
            return tensors.kinds(x) or FINITE
        version = x._version
        known = self._read.get(x)
        if known is not None and known[0] == version:
            return int(known[1])
        found = tensors.kinds(x)
        if found is None:  # it may be read another time
            return FINITE
        self._read[x] = version, found
        return int(found)


class _Backward:
    """Describes a gradient; holds the outermost module weakly, as the graph outlives the call."""

    def __init__(self, names: tuple[str, str, str, int], root: Any) -> None:
        self._names, self._root = names, weakref.ref(root)

    def __call__(self, x: Any, tensor: str, operation: str | None, parameter: Any) -> NonFinite:
        name, cls, model, number = self._names
        if parameter is not None:
            known = _parameter_name(self._root(), parameter)
            tensor = f"gradient of {known}" if known else "gradient of an input"
        where = tensors.place(x, tensor)
        if where is None:
            raise RuntimeError("a gradient was not finite, and is now")
        if operation is None:
            name, cls = "", model
        return NonFinite("gradient", name, cls, model, number, where, operation=operation)


# ---------------------------------------------------------------- modules


def _last_size(x: Any) -> int:
    """What a mask and the scores that it is added to have in common: the number of keys."""
    return int(x.shape[-1]) if x.ndim else 1


def _own(module: Any, table: str) -> list[tuple[str, Any]]:
    """The parameters or buffers of a module itself; of a scripted one, which keeps them otherwise, too."""
    entries = module.__dict__.get(table)
    if not isinstance(entries, dict) and type(entries).__name__ != "OrderedDictWrapper":
        return []
    return [(name, x) for name, x in entries.items() if x is not None]


def _sequence_number() -> int | None:
    """That of the next node of autograd; None where there is none, or others are at work on the graph."""
    torch: Any = sys.modules["torch"]
    if not torch.is_grad_enabled() or torch._C._get_tracing_state() is not None:
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    return int(torch.autograd._get_sequence_nr())


def _modules(root: Any) -> list[tuple[str, Any]]:
    from torch.nn import Module  # noqa: PLC0415

    return list(Module.named_modules(root))


def parameters_of(root: Any) -> Iterator[tuple[str, Any]]:
    """The parameters of a module and of those below it, with their names; calls no method of theirs."""
    for prefix, module in _modules(root):
        for name, x in _own(module, "_parameters"):
            yield f"{prefix}.{name}" if prefix else name, x


def _parameter_name(root: Any, parameter: Any) -> str | None:
    named = parameters_of(root) if root is not None else ()
    return next((name for name, x in named if x is parameter), None)


def _is_broken(x: Any, name: str, kind: Kind) -> bool:
    kinds = tensors.kinds(x) if type(x) in plain_tensors() else None
    if not kinds:
        return False
    if kind == "buffer" and kinds != NAN and x.ndim == 0:
        return False  # a bound that is none: clamp(max=inf)
    return kinds != BELOW or not tensors.is_mask(x, name if kind == "buffer" else "")


def _scaler() -> Any:
    """A GradScaler that is at work, if there is one."""
    amp = sys.modules.get("torch.amp.grad_scaler")
    if amp is None:
        return None
    scalers = (each for each in gc.get_objects() if issubclass(type(each), amp.GradScaler))
    return next((scaler for scaler in scalers if _may_lower(scaler)), None)


def _may_lower(scaler: Any) -> bool:
    own = vars(scaler)
    return bool(own.get("_enabled")) and own.get("_scale") is not None and float(own["_scale"]) > 1
