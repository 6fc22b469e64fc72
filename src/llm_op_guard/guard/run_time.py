"""Value rules in a compiled program: an operator of torch's own that judges them each time the program runs.

Dynamo puts `llm_op_guard::judge` into the graph where the check of a guard is traced. It returns nothing and is known
to matter, so that no pass leaves it out; it has nothing to differentiate, and under vmap it says nothing. A program
that is loaded from a cache finds its guards by name; where they are not there, nothing is judged.
"""

from __future__ import annotations

import ast
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Protocol

from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.path import path_of
from llm_op_guard.contract.vocabulary import FUNCTIONS
from llm_op_guard.errors import GuardWarning
from llm_op_guard.guard.deferred import Asked, Deferred
from llm_op_guard.guard.describe import describe_rule
from llm_op_guard.guard.evaluate import Values, text_of
from llm_op_guard.guard.functions import IMPLEMENTATIONS, StandIn
from llm_op_guard.guard.names import Names
from llm_op_guard.guard.reading import INAPPLICABLE, Broken, NotApplicable, is_tensor, path_value, plain
from llm_op_guard.guard.traced import Local, asking, constant
from llm_op_guard.guard.violation import Violation

LIBRARY = "llm_op_guard"

# What a judge is called in graphs → the judge, for as long as its guard lives.
_judges: weakref.WeakValueDictionary[str, Judge] = weakref.WeakValueDictionary()


class Late(Protocol):
    """The rules whose verdict need not be waited for (`guard.late`, which comes after this)."""

    def told(self) -> Exception | None:
        """The error to raise for what was found of calls before, if any."""

    def takes(self, taken: list[Any], number: int, tensors: Sequence[Any], facts: Sequence[Any]) -> bool:
        """Whether a rule need not be judged now; it is put to `taken`."""

    def send(self, taken: list[Any]) -> None:
        """Ask for what was taken."""


class Judge:
    """The deferred rules of one check, by number; `told` acts on violations and gives the error to raise, if any.

    `failed` is told of a fault of our own; the program goes on. `late` is asked first whether a verdict need not be
    waited for.
    """

    def __init__(
        self,
        name: str,
        contract: Contract,
        rules: Sequence[Deferred],
        told: Callable[[list[Violation], Mapping[str, Any]], Exception | None],
        failed: Callable[[Exception], None],
        late: Late,
    ) -> None:
        self._contract = contract
        self._rules = rules
        self._plainly = [_plainly(rule) for rule in rules]
        self._told = told
        self._failed = failed
        self._late = late
        _judges[name] = self

    def error(self, number: int, tensors: list[Any], facts: list[Any], owners: Sequence[int] = ()) -> Exception | None:
        """The error to raise for a rule that these tensors and facts break; None where they keep it.

        `owners` are the objects of which an integration was asked for facts (`owner_number`).
        """
        try:
            rule = self._rules[number]
            taken: list[Any] = []
            if (error := self._late.told()) is not None:
                return error
            if self._late.takes(taken, number, tensors, facts):
                if _still_so(rule, facts, owners):
                    self._late.send(taken)
                return None
            if taken:
                self._late.send(taken)
            plainly = self._plainly[number]
            if plainly is not None and plainly(tensors, facts):
                return None
            found = self._violation(rule, tensors, facts)
            return None if found is None or not _still_so(rule, facts, owners) else self._told(*found)
        except GuardWarning:
            raise  # warnings are errors here, and this one is the user's
        except Exception as error:
            self._failed(error)
            return None

    def _violation(
        self, rule: Deferred, tensors: list[Any], facts: list[Any]
    ) -> tuple[list[Violation], Mapping[str, Any]] | None:
        values = Handed(rule, tensors, facts, self._contract.constants)
        expr = rule.rule.expr
        try:
            if values.evaluate(expr):
                return None
            observed, expected, argument = describe_rule(expr, values)
        except INAPPLICABLE:
            return None
        except Broken as broken:
            observed, expected, argument = str(broken), expr.text, None
        return [violation_of(self._contract, rule, values, observed, expected, argument)], values.arguments


def _plainly(rule: Deferred) -> Callable[[list[Any], list[Any]], bool] | None:
    """Whether a rule that is one call of a value function is kept for certain: what nearly every run comes to."""
    match rule.rule.expr.node:
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords) if name in FUNCTIONS:
            known = [_written(node) for node in (*rule.tensors, *rule.facts)]
            literals: list[Any] = []
            for node in (*arguments, *(keyword.value for keyword in keywords)):
                if _written(node) not in known:
                    try:
                        literals.append(ast.literal_eval(node))
                    except ValueError:
                        return None
                    known.append(_written(node))
            at = [known.index(_written(node)) for node in arguments]
            named = [(str(keyword.arg), known.index(_written(keyword.value))) for keyword in keywords]
        case _:
            return None

    def is_kept(tensors: list[Any], facts: list[Any]) -> bool:
        values = [*tensors, *facts, *literals]
        try:
            return IMPLEMENTATIONS[name](*[values[i] for i in at], **{key: values[i] for key, i in named}) is True
        except Exception:  # the long way says what that means
            return False

    return is_kept


# What runs is what was traced: the integration need not be asked again.
NOBODY = 0
# Objects of which an integration was asked while a program was traced, by number.
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# Never twice the same: a graph may outlive the object that it was made of, and be used for another.
_numbers = itertools.count(NOBODY + 1)


def owner_number(owner: Any) -> int:
    """What an object is called in graphs, for as long as it lives; raises TypeError for one without weak references."""
    number = next((number for number, known in _owners.items() if known is owner), None)
    if number is None:
        number = next(_numbers)
        _owners[number] = owner
    return number


def _still_so(rule: Deferred, facts: Sequence[Any], owners: Sequence[int]) -> bool:
    """Whether an integration answers now what it did when the program was traced.

    Dynamo knows nothing of what was read for it, so a graph outlives a change of that, unless it has in it what the
    rule is about; it may also come from another process, whose objects are not here. Asked where a rule is broken.
    """
    for (at, asked), number in zip(rule.asked.items(), owners, strict=True):
        if number == NOBODY:
            continue
        owner = _owners.get(number)
        try:
            if owner is None or IMPLEMENTATIONS[asked.function](owner) != facts[at]:
                return False
        except INAPPLICABLE:
            return False
    return True


def violation_of(
    contract: Contract, rule: Deferred, values: Values, observed: str, expected: str, argument: str | None
) -> Violation:
    """The violation of a rule that was judged apart from its call."""
    reason = rule.rule.reason
    return Violation(
        operator=contract.name,
        rule_id=rule.rule.id,
        cost_class=rule.clause.cost_class,
        certain=rule.clause.certain,
        argument=argument or ast.unparse(rule.tensors[0]),
        observed=observed,
        expected=expected,
        because=text_of(values, reason.because),
        hint=text_of(values, reason.hint),
        contract_id=contract.id,
        contract_hash=contract.hash,
        blames="operator" if rule.rule.promised else "caller",
        error=reason.error,
    )


class Handed(Values):
    """The values of a call as far as they were handed to a rule, each by how it is written in the rule."""

    def __init__(self, rule: Deferred, tensors: list[Any], facts: list[Any], constants: Mapping[str, Any]) -> None:
        arguments: dict[str, Any] = {}
        self._known: dict[str, Any] = {}
        for node, value in (*zip(rule.facts, facts, strict=True), *zip(rule.tensors, tensors, strict=True)):
            self._known[_written(node)] = value
            path = path_of(node)
            if path is not None and is_tensor(value):
                _put(arguments, path.root, path.steps, value)
        super().__init__(arguments, constants)

    def _handed(self, node: ast.expr) -> Any:
        return self._known.get(_written(node), self)

    def raw(self, node: ast.expr) -> Any:
        """As of a call, where it was handed on."""
        found = self._handed(node)
        return super().raw(node) if found is self else found

    def tensor(self, node: ast.expr) -> Any:
        """As of a call, where it was handed on."""
        found = self._handed(node)
        return super().tensor(node) if found is self else found

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        found = self._handed(node)
        return super()._value(node) if found is self else plain(found)


@lru_cache(maxsize=4096)
def _written(node: ast.expr) -> str:
    """How a part of a rule is written: asked for each part of it in each run of a program."""
    return ast.unparse(node)


def _put(arguments: dict[str, Any], root: str, steps: Sequence[Any], value: Any) -> None:
    """An argument with a tensor in it, for the metadata of the diagnosis."""
    if not steps:
        arguments[root] = value
    elif len(steps) == 1 and isinstance(steps[0], str):
        owner = arguments.setdefault(root, StandIn())
        if type(owner) is StandIn:
            setattr(owner, steps[0], value)


# ---------------------------------------------------------------- while Dynamo traces


def can_wait(read: list[Any], facts: tuple[Any, ...], tensor_class: type) -> bool:
    """Whether a rule can be handed on: what it reads are tensors, and its facts are numbers, truths or None."""
    return all(isinstance(x, tensor_class) for x in read) and all(
        fact is None or isinstance(fact, int) for fact in facts
    )


def kinds_of(facts: tuple[Any, ...]) -> str:
    """One letter for each fact: nothing, a truth (which Dynamo knows), a number (which may be a symbol)."""
    kinds = ""
    for fact in facts:
        if fact is None:
            kinds += "n"
        elif isinstance(fact, bool):
            kinds += "t" if fact else "f"
        else:
            kinds += "i"
    return kinds


def numbers_of(facts: tuple[Any, ...]) -> list[Any]:
    """The numbers among the facts, in order."""
    return [fact for fact in facts if isinstance(fact, int) and not isinstance(fact, bool)]


def _facts(kinds: str, numbers: Sequence[int]) -> tuple[list[Any], list[int]]:
    """The facts of a call, and the numbers of objects behind them."""
    rest = iter(numbers)
    letters = {"n": None, "t": True, "f": False}
    return [next(rest) if kind == "i" else letters[kind] for kind in kinds], list(rest)


def answering(asked: Asked, names: Names) -> dict[str, Callable[..., Any]]:
    """What has a question answered while Dynamo traces, the answer, and the number of the object that it is about."""
    of: list[int | None] = [None]

    def question(local: Local, is_one_graph: bool) -> int:
        owner = path_value(local(names.own(asked.owner.root)), *asked.owner.steps)
        answer = IMPLEMENTATIONS[asked.function](owner)
        if type(answer) is not int:
            raise NotApplicable
        of[0] = NOBODY if is_one_graph else owner_number(owner)
        return answer

    ask, answer = asking(question)
    return {"ask": ask, "answer": answer, "owner": constant(lambda: of[0])}


def operator() -> Any:
    """`llm_op_guard::judge`, defined when the first guard with deferred rules is made."""
    import torch  # noqa: F401, PLC0415 - before the lock: who imports it may hold a lock, and come here

    with _defining:  # torch lets nobody define it twice
        return _defined()


_defining = threading.RLock()


@cache
def _defined() -> Any:
    import torch  # noqa: PLC0415 - a guard is made before its program imports torch, perhaps; not this one

    library: Any = torch.library.Library(LIBRARY, "DEF")  # type: ignore[no-untyped-call]
    library.define("judge(str name, int rule, Tensor[] tensors, str kinds, SymInt[] numbers) -> ()")
    library.impl("judge", _judge, "CompositeExplicitAutograd")
    library.impl("judge", lambda *_: None, "Meta")
    torch.library.register_vmap(f"{LIBRARY}::judge", lambda *_: (None, None), lib=library)
    judge = getattr(torch.ops, LIBRARY).judge.default
    # It has no result that anybody uses, and is not to be left out for that.
    torch.fx.node.has_side_effect(judge)
    _kept.append(library)
    return judge


_kept: list[Any] = []


def _judge(name: str, rule: int, tensors: list[Any], kinds: str, numbers: Sequence[int]) -> None:
    judge = _judges.get(name)
    if judge is None:
        return
    error = judge.error(rule, tensors, *_facts(kinds, numbers))
    if error is not None:
        raise error
