"""Plan → the source of a check. Pure: the same plan gives the same text.

The text is straight-line Python that a reader can follow and a debugger can step through. It decides and nothing
else: on anything but a plain yes it hands the arguments to `_failed`, which explains.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from enum import Enum, auto
from functools import cached_property
from typing import Any

from llm_op_guard.contract.model import DtypeName, DtypeSet
from llm_op_guard.contract.path import Path
from llm_op_guard.frozen import frozen
from llm_op_guard.guard.deferred import Deferred, asks_values, deferred, is_traceable
from llm_op_guard.guard.draft import Draft, comment, indented, steps_source
from llm_op_guard.guard.expression_source import ExpressionWriter
from llm_op_guard.guard.late import LateRule, late_rule
from llm_op_guard.guard.names import Names
from llm_op_guard.guard.plan import Plan
from llm_op_guard.guard.steps import Agree, Decide, Demand, Given, Keep, Let, Match, Read, Solve, Step, Telling
from llm_op_guard.guard.type_source import TypeWriter

CHECK = "check"


class Native(Enum):
    """What the native program of its contract is to a check."""

    NONE = auto()
    DECIDES = auto()  # it is asked first, and a call that it accepts is right
    BEGINS = auto()  # it is asked first, and `_remainder` does what remains of a call that it accepts
    HAS_ACCEPTED = auto()  # the check is that remainder: it is never traced


@frozen
class CheckSource:
    """The text of a check; the sets of dtypes and the constants that it names; what it calls its variables.

    `deferred` are the rules that it leaves to the program where it is traced, by the numbers that it calls them, `late`
    those whose verdict it need not wait for.
    """

    text: str
    dtype_sets: dict[str, tuple[DtypeName | DtypeSet, ...]]
    constants: dict[str, Any]
    names: Names
    deferred: tuple[Deferred, ...] = ()
    late: tuple[LateRule, ...] = ()

    @cached_property
    def used(self) -> frozenset[str]:
        """The names in it."""
        return names_in_code(self.text)


def check_source(
    plan: Plan, *, counted: bool = False, noted: bool = False, late: bool = False, native: Native = Native.NONE
) -> CheckSource:
    """The source of the function `check` for a plan.

    Before the call it takes `plan.parameters` and returns what the check after the call needs; after the call it
    takes `(result, state)`. `counted` adds one tally for each checked call, `noted` a note of what was
    accepted, which is returned where no check comes after. `late` asks of rules that may be told late whether they can
    be, before it judges them. The names that begin with an underscore are those that `compile` puts in its namespace.
    """
    writer = _CheckWriter(plan, counted, noted, late, native)
    names = writer.draft.names
    text = writer.text()
    return CheckSource(text, names.dtype_sets, names.constants, names, tuple(writer.deferred), tuple(writer.late))


Block = tuple[tuple[Given, ...], list[str]]

_READERS = frozenset(
    {"_Tensor", "_attribute", "_attribute_or_unset", "_evaluated", "_path_value", "_snapshot", "_tensor_attribute"}
)


class _CheckWriter:
    def __init__(self, plan: Plan, counted: bool, noted: bool, late: bool, native: Native) -> None:
        self.plan = plan
        self.counted = counted
        self.noted = noted
        self.draft = Draft(plan)
        self.types = TypeWriter(self.draft)
        self.deferred: list[Deferred] = []
        self.asks_late = late
        self.native = native
        self.is_traced = native is not Native.HAS_ACCEPTED
        self.late: list[LateRule] = []

    def text(self) -> str:
        blocks: list[tuple[bool, Block]] = []
        traced: list[Block] = []
        # What only the values of tensors tell, which a program that is traced does not know.
        unknown: set[str] = set()
        for step in self.plan.steps:
            lines = list(self._step(step))
            self.draft.done.append(step)
            is_untraced = step.clause.cost_class == "B" or step.clause.eager
            if lines:
                blocks.append((is_untraced, (step.given, lines)))
            if is_untraced and self.is_traced:
                later = list(self._while_tracing(step, lines, unknown))
                if later:
                    traced.append((step.given, later))
        always = list(self._nested([block for untraced, block in blocks if not untraced]))
        untraced = list(self._nested([block for untraced, block in blocks if untraced]))
        if self.plan.read_once:
            untraced.insert(0, "_reads = {}")
        if self.plan.forgets and not self.plan.after_call:
            untraced.append(f"_tokens = {self._forgets()}")
        if self.late:
            untraced = ["_taken = []", *untraced, "_late.send(_taken)"]
        body = always + list(self._untraced(untraced))
        if self.deferred:
            body += ["elif _defers():", *indented(self._nested(traced))]
        return "\n".join([*self._head(), *indented(self._frame(body)), ""])

    def _head(self) -> Iterator[str]:
        parameters = ["result", "state"] if self.plan.after_call else map(self.draft.names.own, self.plan.parameters)
        yield f"def {CHECK}({', '.join(parameters)}):"

    def _frame(self, body: list[str]) -> Iterator[str]:
        arguments = f"({''.join(f'{self.draft.names.own(name)}, ' for name in self.plan.parameters)})"
        if self.plan.after_call:
            handed = [*self.plan.known, *(self.draft.names.snapshot(path) for path in self.plan.snapshots)]
            names = "".join(f"{self.draft.names.own(name)}, " for name in (*handed, *self.plan.parameters))
            names += "_tokens, " if self.plan.forgets else ""
            yield "if state is None:"
            yield "    return"
            if names:
                yield f"({names}) = state"
            arguments = f"(result, state, {arguments})"
        yield from self._accepting()
        state = list(self._state())
        if self.is_traced and any(map(_may_read_tensors, names_in_code("\n".join([*body, *state]) or "pass"))):
            yield "if _jit_state() is not None:"
            if self.plan.forgets and not self.plan.after_call:
                yield f"    {self._forgets()}"
            yield "    return None"
        if self.plan.forgets and not self.plan.after_call:
            if self.is_traced:
                yield "if _tracing():"
                yield "    _comptime()(_distrust)"
            yield "_tokens = ()"
        for name in sorted(self.draft.maybe - set(self.plan.known) if self.plan.after_call else self.draft.maybe):
            yield f"{self.draft.names.own(name)} = None"
        if self.draft.doubts:
            yield "_doubts = []"
        if self.counted and not self.plan.after_call:
            yield from self._untraced(["_tally()"])
        if self.late:
            yield from self._untraced(["_error = _late.told()", "if _error is not None:", "    raise _error"])
        yield "try:"
        yield from indented([*body, *state] or ["pass"])
        yield "except Exception:  # anything but a plain yes: explain decides"
        yield "    pass"
        yield "else:"
        yield from indented(self._accepted(arguments, "_state" if state else "None"))
        if self.is_traced:
            yield "if _tracing():"
            yield "    if _lets_through():"
            yield "        return None"
            yield "    _comptime()(_tell)"
        # Raised here, so that a traceback shows none of the frames that explain.
        yield f"_error = _failed({arguments})"
        yield "if _error is not None:"
        yield "    raise _error"
        if self.plan.forgets and not self.plan.after_call:
            yield self._forgets()
        yield "return None"

    def _accepting(self) -> Iterator[str]:
        """Ask the program first; Dynamo, which traces the rest, takes its answer for no."""
        own = [self.draft.names.own(name) for name in self.plan.parameters]
        accepts = f"_accepts({', '.join(['_program', *own])})"
        if self.native is Native.DECIDES:
            yield f"if {accepts}:"
            yield from ["    _tally()"] if self.counted else []
            yield "    return None"
        elif self.native is Native.BEGINS:
            # An export may run this where it traces.
            yield f"if {accepts} and not _tracing() and _jit_state() is None:"
            yield f"    return _remainder({', '.join(own)})"

    def _untraced(self, lines: list[str]) -> Iterator[str]:
        """Lines that a program which is traced leaves out."""
        if not self.is_traced or not lines:
            yield from lines
        else:
            yield "if not _tracing():"
            yield from indented(lines)

    def _accepted(self, arguments: str, returned: str) -> Iterator[str]:
        doubts = " and not _doubts" if self.draft.doubts else ""
        if doubts:
            # What is legal, if odd, must not break the graph of a program that is compiled.
            here = "_doubts and not _tracing()" if self.is_traced else "_doubts"
            yield f"_error = _noticed(_doubts, {arguments}) if {here} else None"
            yield "if _error is not None:"
            yield "    raise _error"
        if self.noted:
            own = f"{'' if self.plan.has_later else 'return '}_note({arguments})"
            note = "_note(result, None)" if self.plan.after_call else own
            yield from self._untraced(["if not _doubts:", f"    {note}"] if doubts else [note])
        # None: there is nothing to check after the call, or the call is broken already.
        yield f"return {returned}"

    def _state(self) -> Iterator[str]:
        if self.plan.after_call or not self.plan.has_later:
            return
        parts = [
            *map(self.draft.names.own, self.plan.known),
            *(f"_snapshot({self.draft.names.own(path.root)}{steps_source(path)})" for path in self.plan.snapshots),
            *map(self.draft.names.own, self.plan.hands_on),
            *(["_tokens"] if self.plan.forgets else []),
        ]
        yield f"_state = ({''.join(f'{part}, ' for part in parts)})"

    def _forgets(self) -> str:
        return f"({''.join(f'_forget({self._at(path)}, {names!r}), ' for path, names in self.plan.forgets)})"

    def _at(self, path: Path) -> str:
        root = self.draft.names.own(path.root)
        return f"_path_value({root}{steps_source(path)})" if path.steps else root

    def _nested(self, blocks: list[Block]) -> Iterator[str]:
        """Blocks under their conditions; neighbours share those that they have in common."""
        opened: list[Given] = []
        for given, lines in blocks:
            shared = sum(
                1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(opened, given, strict=False))
            )
            opened = opened[:shared]
            for fact in given[shared:]:
                yield "    " * len(opened) + f"if {self._condition(fact)}:"
                opened.append(fact)
            yield from (("    " * len(opened)) + line for line in lines)

    def _condition(self, fact: Given) -> str:
        match next(s for s in self.plan.steps if isinstance(s, Telling) and s.fact == fact.name):
            case Decide():
                case = self.draft.names.case(fact.name)
                if fact.value:
                    return case
                return f"not {case}" if fact.name in self.draft.decided else f"{case} is False"
            case Read(path=path):
                return f"{self.draft.names.path(path)} is not {'_unset' if path.steps else 'None'}"
            case Match(path=path):
                return f"{self.draft.names.kind(path)} == {fact.value}"

    def _while_tracing(self, step: Step, lines: list[str], unknown: set[str]) -> Iterator[str]:
        """What a step of a value rule comes to in a program that is traced."""
        depends = {*step.needs, *(given.name for given in step.given)} & unknown
        if depends or (isinstance(step, Decide) and not is_traceable(step.test.node)):
            parts = None
        elif isinstance(step, Read) or (isinstance(step, Decide) and not asks_values(step.test.node)):
            yield from lines
            return
        else:
            parts = deferred(step.clause) if isinstance(step, Demand) else None
        if parts is not None and parts.is_traceable:
            yield from self._deferred(step, parts)
        else:
            unknown |= {*step.gives, getattr(step, "fact", None) or ""}

    def _deferred(self, step: Step, parts: Deferred) -> Iterator[str]:
        """Hand to the program what it needs to judge a rule."""
        writer = self.draft.writer(step)
        writer.lazy = True
        number, asked = len(self.deferred), parts.asked
        tensors = ", ".join(writer.raw(node) for node in parts.tensors)
        facts = "".join(
            f"_answer_{number}_{at}(), " if at in asked else f"{writer.value(node)}, "
            for at, node in enumerate(parts.facts)
        )
        of = "".join(f", _owner_{number}_{at}()" for at in asked)
        lines = ["try:", f"    _facts, _read = ({facts}), [{tensors}]", "except _unjudged:", "    pass", "else:"]
        lines.append("    if _can_wait(_read, _facts, _Tensor):")
        lines.append(f"        _judge(_judged_as, {number}, _read, _kinds(_facts), [*_numbers(_facts){of}])")
        yield comment(step.clause.statement.text)
        if asked:
            yield from (f"_comptime()(_ask_{number}_{at})" for at in asked)
            lines = [f"if {' and '.join(f'_answer_{number}_{at}() is not None' for at in asked)}:", *indented(lines)]
        yield from lines
        self.deferred.append(parts)

    # ------------------------------------------------------------ steps

    def _step(self, step: Step) -> Iterator[str]:
        match step:
            case Decide():
                return self._decide(step)
            case Read(path=path):
                return self._read(path)
            case Match():
                return self.types.match(step)
            case Solve():
                return self.types.solve(step)
            case Agree():
                return self.types.agree(step)
            case Let():
                return self._let(step)
            case Demand():
                return self._demand(step)
            case Keep():
                return self._keep(step)

    def _decide(self, step: Decide) -> Iterator[str]:
        writer = self.draft.writer(step)
        writer.lazy = True
        # Where nothing hangs on the test being false, it may as well be false as not apply.
        only_true = not any(g.name == step.fact and g.value is False for s in self.plan.steps for g in s.given)
        code = writer.conjunction(step.test.node) if only_true else writer.value(step.test.node)
        self.draft.tested[step.fact] = writer.tested
        self.draft.shapes[step.fact] = writer.shapes
        if not _is_truth(step.test.node):
            code = f"bool({code})"
        case = self.draft.names.case(step.fact)
        if writer.fallible or writer.hoisted:
            yield from (f"{case} = None", "try:", f"    {case} = {code}", "except _inapplicable:", "    pass")
        else:
            self.draft.decided.add(step.fact)
            yield f"{case} = {code}"

    def _read(self, path: Path) -> Iterator[str]:
        if path.steps:
            one = len(path.steps) == 1 and isinstance(path.steps[0], str)
            reader = "_attribute_or_unset" if one else "_path_value"
            root = self.draft.names.own(path.root)
            yield f"{self.draft.names.path(path)} = {reader}({root}{steps_source(path)})"

    def _let(self, step: Let) -> Iterator[str]:
        statement = step.statement
        writer = self.draft.writer(step)
        writer.lazy = True
        code = writer.raw(statement.expr.node)
        self.draft.maybe |= set(statement.names)
        targets = [self.draft.names.own(name) for name in statement.names]
        target = targets[0] if len(targets) == 1 else f"({', '.join(targets)})"
        if len(statement.names) > 1:
            code = f"_parts({code}, {len(statement.names)})"
        elif self.plan.has_later and not self.plan.after_call and not _is_truth(statement.expr.node):
            code = f"_kept({code})"
        yield comment(statement.text)
        yield from ("try:", f"    {target} = {code}", "except _inapplicable:", "    pass")

    def _demand(self, step: Demand) -> Iterator[str]:
        writer = self.draft.writer(step)
        yield comment(step.statement.id)
        broken = negated(step.statement.expr.node, writer)
        if self.asks_late and (rule := late_rule(step.clause, self.draft.contract)) is not None:
            tensors = "".join(f"{writer.raw(node)}, " for node in rule.parts.tensors)
            facts = "".join(f"{writer.value(node)}, " for node in rule.parts.facts)
            broken = f"not _late.takes(_taken, {len(self.late)}, ({tensors}), ({facts})) and ({broken})"
            self.late.append(rule)
        yield from self.draft.judged(step, broken, writer)

    def _keep(self, step: Keep) -> Iterator[str]:
        yield comment(step.statement.text)
        yield "_facts = {}"
        for name, expr in step.statement.facts:
            writer = self.draft.writer(step)
            writer.lazy = True
            yield from ("try:", f"    _facts[{name!r}] = {writer.value(expr.node)}", "except _unjudged:", "    pass")
        names = tuple(name for name, _ in step.statement.facts)
        forgotten = (step.statement.path, names)
        token = f", _tokens[{self.plan.forgets.index(forgotten)}]" if forgotten in self.plan.forgets else ""
        yield f"_remember({self._at(step.statement.path)}, {names!r}, _facts{token})"


def _may_read_tensors(name: str) -> bool:
    """Whether what a check calls so may read the sizes of a tensor, declared as one or not."""
    return name in _READERS or name.startswith("_fn_")


def names_in_code(text: str) -> frozenset[str]:
    """The names in a text of Python, not what its comments and strings say."""
    return frozenset(node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name))


def _is_truth(node: ast.expr) -> bool:
    """Whether an expression is True or False by itself."""
    if isinstance(node, ast.BoolOp):
        return all(_is_truth(part) for part in node.values)
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


_NEGATED: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip


def negated(node: ast.expr, writer: ExpressionWriter) -> str:
    """The source of `not expr`, as a person would write it.

    `<` is not turned into `>=`: with NaN neither holds.
    """
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _NEGATED:
        left, right = writer.operands(node)
        return f"{left} {_NEGATED[type(node.ops[0])]} {right}"
    return f"not ({writer.value(node)})"
