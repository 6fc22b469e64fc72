"""What the writers of one check share: the plan, the names, the steps already written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llm_op_guard.contract.model import Like
from llm_op_guard.contract.path import Path
from llm_op_guard.guard.expression_source import ExpressionWriter
from llm_op_guard.guard.names import Names
from llm_op_guard.guard.plan import Plan, never_both, sure
from llm_op_guard.guard.steps import Given, Match, Step


class Draft:
    """The state of writing one check.

    `done` are the steps written so far, `maybe` the names that may be read without having been bound (they begin as
    None), `decided` the branch tests that always come out, `tested` the arguments that are tensors where a test is
    true, `shapes` those whose shape it has kept, `doubts` whether any suspect rule is in the check.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.contract = plan.contract
        self.names = Names(plan)
        self.done: list[Step] = []
        self.maybe: set[str] = set(plan.known)
        self.decided: set[str] = set()
        self.tested: dict[str, set[Path]] = {}
        self.shapes: dict[str, set[Path]] = {}
        self.doubts = False
        self._models = {
            alternative.path
            for step in plan.steps
            if isinstance(step, Match)
            for alternative in step.type.alternatives
            if isinstance(alternative, Like)
        }

    def writer(self, step: Step) -> ExpressionWriter:
        """What writes the expressions of a step."""
        return ExpressionWriter(self.plan, self.names, self.done, step.given, self.maybe, self.sure)

    def fail(self, step: Step) -> str:
        """The statement that says a step is broken."""
        if step.certain:
            return "raise _Broken"
        self.doubts = True
        # Numbered by its statement, of which all rules are suspect.
        return f"_doubts.append({self.contract.clauses.index(step.clause)})"

    def judged(self, step: Step, broken: str, writer: ExpressionWriter) -> Iterator[str]:
        """`if broken: fail`, with whatever the expression may raise taken care of."""
        guard = " and ".join(f"{name} is not None" for name in writer.hoisted)
        test = f"{guard} and ({broken})" if guard else broken
        lines = [f"if {test}:", f"    {self.fail(step)}"]
        if not writer.fallible and (step.certain or not writer.may_break):
            yield from lines
            return
        yield "try:"
        yield from indented(lines)
        if not step.certain:
            yield "except _Broken:"
            yield f"    {self.fail(step)}"
        yield "except _inapplicable:"
        yield "    pass"

    def is_tested(self, step: Match) -> bool:
        """Whether a branch that a step stands in has asked already whether its value is a tensor."""
        return any(given.value is True and step.path in self.tested.get(given.name, ()) for given in step.given)

    def has_shape(self, step: Match) -> bool:
        """Whether a branch that a step stands in has kept the shape of its value."""
        return any(given.value is True and step.path in self.shapes.get(given.name, ()) for given in step.given)

    def keeps_aspects(self, step: Match) -> bool:
        """Whether dtype, shape and device of what a step declares are read once and kept for another to be like."""
        return step.path in self._models and step.certain and len(step.type.alternatives) == 1

    def has_aspects(self, path: Path, given: tuple[Given, ...]) -> bool:
        """Whether a step that keeps them has run wherever these facts hold."""
        return any(
            isinstance(step, Match) and step.path == path and self.keeps_aspects(step) and set(step.given) <= set(given)
            for step in self.done
        )

    def sure(self, name: str, given: tuple[Given, ...]) -> bool:
        """Whether a name has a value for certain wherever these facts hold.

        It has one too when both branches of a test that always comes out give it.
        """
        known = frozenset(self.plan.known if self.plan.after_call else ())
        if sure(name, given, self.done, known):
            return True
        here = set(given)
        return name not in known and any(
            all(
                any(name in s.surely and set(s.given) - {fact} <= here and fact in s.given for s in self.done)
                for fact in (Given(test, True), Given(test, False))
            )
            for test in self.decided
        )

    def first(self, step: Step, symbol: str) -> bool:
        """Whether no step before this one, on the same path, can have bound the symbol."""
        if self.plan.after_call and symbol in self.plan.known:
            return False
        return not any(symbol in other.gives and not never_both(other.given, step.given) for other in self.done)


def steps_source(path: Path) -> str:
    """The steps of a path as further arguments of a call."""
    return "".join(f", {step!r}" for step in path.steps)


def comment(text: str) -> str:
    """A comment of one line, whatever the text: contracts come from outside, and this is code that is run."""
    return "# " + "".join(c if c.isprintable() else " " for c in text)


def indented(lines: Iterable[str]) -> Iterator[str]:
    """Lines one level deeper."""
    return (f"    {line}" for line in lines)
