"""Valid calls of a contract: sketched from its types, then mended until `explain` finds nothing wrong.

A sketch takes sizes and dtypes for the symbols, one branch and one alternative for each type, and guesses the rest from
the numbers that the contract speaks of. What is broken then is changed, one thing at a time, as long as less is broken
afterwards. All of it comes from one seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from llm_op_guard.contract.expressions import names_in
from llm_op_guard.contract.model import (
    AnySize,
    Clause,
    Contract,
    Declare,
    DeviceType,
    DtypeOf,
    DtypeSymbol,
    Like,
    ListType,
    LiteralType,
    NoneType,
    Rest,
    RestOf,
    ScalarType,
    Size,
    SizeOneOf,
    TensorType,
    TupleType,
    Type,
)
from llm_op_guard.contract.path import Path
from llm_op_guard.contract.validate import clauses_of
from llm_op_guard.faults.answers import LENGTHS, identities, with_answer
from llm_op_guard.faults.coverage import untried_dtypes
from llm_op_guard.faults.edits import an_edit_at, resized, transposed
from llm_op_guard.faults.ingredients import (
    SMALL_NUMBERS,
    Ingredient,
    Ingredients,
    dtypes_of,
)
from llm_op_guard.faults.judge import Judgement, judge
from llm_op_guard.guard.call import (
    Call,
    MappingSpec,
    ObjectSpec,
    SequenceSpec,
    Spec,
    TensorSpec,
    TextSpec,
    row_order,
)
from llm_op_guard.guard.evaluate import Values
from llm_op_guard.guard.reading import INAPPLICABLE, UNSET, Broken

# Sizes that symbols are given: none, the least, odd ones, primes, powers of two and their neighbours.
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
# About where 32 bits end: sizes of tensors without contents.
HUGE_SIZES = ((1 << 31) - 1, 1 << 31, (1 << 31) + 1)
_USUAL = (1, 2, 3, 4, 6, 8)
_USUAL_DTYPES = ("float32", "bfloat16", "float16", "int64", "bool")
_CHANGES = 60
_FEW_CHANGES = 12
_MOST_ELEMENTS = 1 << 16
_STARTS = 12
_MOST_HINTS = 10


def valid_calls(made_of: Ingredients, seed: int, wanted: int, *, attempts: int | None = None) -> list[Judgement]:
    """So many different valid calls, or as many as are found; those first that reach most of the contract.

    Every statement of the contract is reached by one if any attempt reached it, and every dtype where not only `usual`
    calls are made: for that there are more, if need be.
    """
    random_of = random.Random(seed)
    found: dict[Call, Judgement] = {}
    reached: dict[int, int] = {}
    tried: Counter[tuple[str, Any]] = Counter()
    for attempt in range(attempts if attempts is not None else 12 * wanted + 60):
        if attempt % 3 and found:
            judgement = _beside(made_of, random_of.choice(list(found.values())), random_of, tried)
        else:
            judgement = _mended(made_of, sketch(made_of, random_of, attempt, tried), random_of)
        if judgement is None or judgement.call in found:
            continue
        found[judgement.call] = judgement
        for number in judgement.applied():
            reached[number] = reached.get(number, 0) + 1
        if len(found) >= wanted:
            break
    for number, clause in enumerate(made_of.contract.clauses):
        if number not in reached and not clause.after_call:
            judgement = _reaching(made_of, clause, list(found.values()), random_of)
            if judgement is not None:
                found[judgement.call] = judgement
                for other in judgement.applied():
                    reached[other] = reached.get(other, 0) + 1
    for clause, path, dtype in () if made_of.usual else untried_dtypes(made_of.contract, list(found.values())):
        reaching = [judgement for judgement in found.values() if judgement.bindings.applies(clause)]
        judgement = _of_dtype(made_of, path, dtype, reaching, random_of)
        if judgement is not None:
            found[judgement.call] = judgement
    return sorted(
        found.values(), key=lambda j: -sum(1 / reached[number] for number in set(j.applied()) if number in reached)
    )


def _of_dtype(
    made_of: Ingredients, path: Path, dtype: str, valid: list[Judgement], random_of: random.Random
) -> Judgement | None:
    """A valid call in which the tensor at a path has a dtype, by itself or with those that had its dtype before."""
    holding = [(j.call, spec) for j in valid if isinstance(spec := j.call.get(path), TensorSpec)]
    for attempt in range(_STARTS if holding else 0):
        call, before = random_of.choice(holding)
        for other, spec in call.tensors():
            if other == path or (attempt % 2 and spec.dtype == before.dtype):
                call = call.put(other, replace(spec, dtype=dtype, at=()))
        judgement = _mended(made_of, call, random_of, changes=_FEW_CHANGES)
        found = judgement.call.get(path) if judgement is not None else None
        if isinstance(found, TensorSpec) and found.dtype == dtype:
            return judgement
    return None


def _beside(
    made_of: Ingredients, valid: Judgement, random_of: random.Random, tried: Counter[tuple[str, Any]]
) -> Judgement | None:
    """A call that is valid, too, and differs in one thing, or in a size and what has to go with it."""
    sizes = [size for _, spec in valid.call.tensors() for size in spec.shape]
    if not sizes or random_of.random() < 0.4:
        call = changed(made_of, valid, random_of.choice(made_of.choices), random_of, tried)
        return _mended(made_of, call, random_of, changes=0) if call is not None else None
    huge = not made_of.usual and random_of.random() < 0.1
    other = _Sketch(made_of, random_of, {}, tried).pick("size", HUGE_SIZES if huge else SIZES)
    call = resized(valid.call, random_of.choice(sizes), other)
    if huge:
        for path, spec in call.tensors():
            call = call.put(path, replace(spec, device="meta"))
    # All of these calls are kept: several sizes that are large would add up.
    if any(spec.device != "meta" and spec.elements > _MOST_ELEMENTS for _, spec in call.tensors()):
        return None
    return _mended(made_of, call, random_of, changes=_FEW_CHANGES)


def _mended(made_of: Ingredients, call: Call, random_of: random.Random, *, changes: int = _CHANGES) -> Judgement | None:
    judgement = judge(made_of.contract, call)
    for _ in range(changes):
        if judgement is None:
            return None
        if not judgement.broken:
            return judgement
        options = _to_blame(made_of, judgement, random_of)
        if not options:
            return None
        chosen = random_of.choice(options)
        call_of = changed(made_of, judgement, chosen, random_of)
        if call_of is None:
            continue
        new = judge(made_of.contract, call_of)
        if new is not None and len(new.broken) <= len(judgement.broken):
            judgement = new
    return judgement if judgement is not None and not judgement.broken else None


def _reaching(
    made_of: Ingredients, clause: Clause, valid: list[Judgement], random_of: random.Random
) -> Judgement | None:
    """A valid call about which a statement has something to say, or None."""
    for attempt in range(_STARTS):
        start = judge(made_of.contract, sketch(made_of, random_of, attempt))
        now = random_of.choice(valid) if valid and (attempt % 2 or start is None) else start
        if now is None:
            continue
        for _ in range(_CHANGES):
            away = now.away_from(clause)
            if away == 0 and not now.broken:
                return now
            unmet = now.first_unmet(clause)
            if unmet is not None:
                options = made_of.read_by([unmet.test.node])
            elif away:
                options = made_of.mentioned(clause)
            else:
                options = _to_blame(made_of, now, random_of)
            if not options:
                break
            call = changed(made_of, now, random_of.choice(options), random_of)
            new = judge(made_of.contract, call) if call is not None else None
            if new is not None and (new.away_from(clause), len(new.broken)) <= (away, len(now.broken)):
                now = new
    return None


def _to_blame(made_of: Ingredients, now: Judgement, random_of: random.Random) -> list[Ingredient]:
    """What one of the broken rules of a call depends on."""
    clauses = clauses_of(made_of.contract, random_of.choice(now.broken))
    # Of a test that could not be made (`if first(x) > 1`) there is no statement.
    if not clauses:
        return list(made_of.choices)
    return [choice for clause in clauses if now.bindings.applies(clause) for choice in made_of.mentioned(clause)]


def changed(
    made_of: Ingredients,
    now: Judgement,
    chosen: Ingredient,
    random_of: random.Random,
    tried: Counter[tuple[str, Any]] | None = None,
) -> Call | None:
    """One thing of a call made otherwise: anew from its type and the symbols of the call, or by an edit."""
    sketcher = _Sketch(made_of, random_of, dict(now.bindings.values.symbols), {} if tried is None else tried)
    if chosen.kind == "answer":
        return sketcher.answered(now.call, chosen)
    if chosen.types and random_of.random() < 0.6:
        spec = sketcher.of_type(random_of.choice(chosen.types), now.call)
        return now.call.put(chosen.path, spec)
    if chosen.kind == "plain" and random_of.random() < 0.5:
        return now.call.put(chosen.path, sketcher.guess())
    edit = an_edit_at(now.call, chosen, made_of, hints_of(now), random_of)
    return edit.call if edit is not None else None


def hints_of(judgement: Judgement) -> tuple[int, ...]:
    """Whole numbers of a call: those that symbols and assigned names stand for, and that are given in it or told."""
    values = judgement.bindings.values
    given = [value for _, spec in judgement.call.arguments for value in _numbers_in(spec)]
    numbers = [*values.symbols.values(), *values.assigned.values(), *given]
    return tuple(dict.fromkeys(value for value in numbers if type(value) is int and value >= 0))[:_MOST_HINTS]


def _numbers_in(spec: Spec) -> Iterator[Any]:
    match spec:
        case int():
            yield spec
        case ObjectSpec(attributes=attributes, answers=answers):
            for _, part in (*attributes, *answers):
                yield from _numbers_in(part)
        case MappingSpec(items=pairs):
            for _, part in pairs:
                yield from _numbers_in(part)
        case SequenceSpec(items=items):
            for part in items:
                yield from _numbers_in(part)


def sketch(
    made_of: Ingredients, random_of: random.Random, attempt: int = 0, tried: Counter[tuple[str, Any]] | None = None
) -> Call:
    """A call that its types allow, as far as they say; `tried` counts what sketches were made of, to try the rest."""
    sketcher = _Sketch(made_of, random_of, {}, {} if tried is None else tried)
    # One size of a call is unusual at most: all of them would make tensors that take seconds.
    if attempt % 24 == 21 and not made_of.usual:
        sketcher.unusual, sketcher.device = HUGE_SIZES, "meta"
    elif attempt % 2 == 0:
        sketcher.unusual = SIZES
    return sketcher.call()


class _Sketch:
    def __init__(
        self, made_of: Ingredients, random_of: random.Random, symbols: dict[str, Any], tried: dict[tuple[str, Any], int]
    ) -> None:
        self.made_of = made_of
        self.contract: Contract = made_of.contract
        self.random = random_of
        self.values = Values({}, made_of.contract.constants)
        self.values.symbols = dict(symbols)
        self.tried = tried
        self.unusual: tuple[int, ...] = ()
        # What stands for `...`: mostly the same in all tensors of a call, which have one rank and one batch.
        self._others: tuple[int, ...] | None = None
        self.device = "cpu"

    def call(self) -> Call:
        call = Call(tuple((name, None) for name in self.contract.parameters), self.random.randrange(1 << 16))
        truths: dict[str, bool] = {}
        chosen: dict[Path, Type] = {}
        for clause in self.contract.clauses:
            taken = all(
                truths.setdefault(c.test.text, self.random.random() < 0.5) is c.wanted for c in clause.conditions
            )
            if isinstance(clause.statement, Declare) and not clause.after_call and taken:
                chosen.setdefault(clause.statement.path, clause.statement.type)
        for choice in self.made_of.choices:
            if choice.path not in chosen:
                call = self._undeclared(call, choice)
        # Those that speak of another's dtype or shape come after it.
        for _ in range(2):
            for path, declared in chosen.items():
                call = call.put(path, self.of_type(declared, call))
        for choice in self.made_of.choices:
            if choice.kind == "answer":
                call = self.answered(call, choice)
        return call

    def _some_size(self) -> int:
        if self.unusual and self.random.random() < 0.4:
            size = int(self.pick("size", self.unusual))
            self.unusual = ()
            return size
        return self.random.choice(_USUAL)

    def pick(self, what: str, options: Sequence[Any]) -> Any:
        """One of several: every other time one that was tried least."""
        if self.random.random() < 0.5:
            least = min(self.tried.get((what, option), 0) for option in options)
            options = [option for option in options if self.tried.get((what, option), 0) == least]
        chosen = self.random.choice(options)
        self.tried[what, chosen] = self.tried.get((what, chosen), 0) + 1
        return chosen

    def _undeclared(self, call: Call, choice: Ingredient) -> Call:
        if choice.kind == "answer" or call.get(choice.path) not in (None, UNSET):
            return call
        if choice.types and choice.kind != "object":
            return call.put(choice.path, self.of_type(self.random.choice(choice.types), call))
        if choice.kind == "tensor":
            return call if self.random.random() < 0.2 else call.put(choice.path, self._any_tensor())
        if choice.kind == "object":
            return call if isinstance(call.get(choice.path), ObjectSpec) else call.put(choice.path, self._empty(choice))
        return call.put(choice.path, self.guess()) if self.random.random() < 0.85 else call

    def _empty(self, choice: Ingredient) -> Spec:
        """What holds other paths: an object, a dict or a sequence, as they are read."""
        depth = len(choice.path.steps)
        steps = [
            other.path.steps[depth]
            for other in self.made_of.choices
            if other.path.root == choice.path.root and len(other.path.steps) > depth
        ]
        if choice.path in self.made_of.named or any(
            isinstance(step, tuple) and isinstance(step[0], str) for step in steps
        ):
            return MappingSpec(())
        return SequenceSpec("tuple", ()) if steps and isinstance(steps[0], tuple) else ObjectSpec("object")

    # ------------------------------------------------------------ values

    def guess(self) -> Spec:
        """A number, truth, text or nothing."""
        numbers = [*self.made_of.numbers, *SMALL_NUMBERS, *(v for v in self.values.symbols.values() if type(v) is int)]
        options: list[Spec] = [self.random.choice(numbers), self.random.choice((True, False)), None]
        if self.made_of.texts:
            options.append(self.random.choice(self.made_of.texts))
        weights = [6, 2, 1, 2][: len(options)]
        return self.random.choices(options, weights)[0]

    def answered(self, call: Call, choice: Ingredient) -> Call:
        """The call with another answer to a question about an object, or with none."""
        options = identities(choice) or [*self.made_of.numbers, *SMALL_NUMBERS, *LENGTHS, True, False]
        answer = None if self.random.random() < 0.25 else self.random.choice(options)
        return with_answer(call, choice, answer, self.contract)

    def of_type(self, declared: Type, call: Call) -> Spec:
        """A value of one of the alternatives of a type."""
        alternative = self.pick(declared.text, declared.alternatives)
        match alternative:
            case NoneType():
                return None
            case LiteralType():
                return alternative.value
            case ScalarType(text=text):
                return self._scalar(text)
            case Like(path=path):
                other = call.get(path)
                return other if isinstance(other, TensorSpec) else self._any_tensor()
            case TupleType(items=items):
                return SequenceSpec("tuple", tuple(self.of_type(item, call) for item in items))
            case ListType(item=item):
                return SequenceSpec(
                    "list", tuple(self.of_type(item, call) for _ in range(self.random.choice((0, 1, 2, 3))))
                )
        return self._tensor(alternative, call)

    def _scalar(self, text: str) -> Spec:
        numbers = [*SMALL_NUMBERS, *(v for v in self.made_of.numbers if type(v) is int)]
        match text:
            case "int":
                return self.random.choice(numbers)
            case "float":
                return self.random.choice([0.0, 0.5, 1.0, 2.0, *(float(v) for v in self.made_of.numbers)])
            case "bool":
                return self.random.random() < 0.5
            case "str":
                texts: list[Spec] = [*self.made_of.texts, TextSpec(3)]
                return self.random.choice(texts)
            case "dict":
                return MappingSpec(())
        return ObjectSpec("object")

    def _any_tensor(self) -> TensorSpec:
        rank = self.random.choice((1, 2, 2, 3, 4, 4))
        dtype = self.random.choice(["float32", "float32", "int64", "bool", *self.made_of.dtypes])
        return TensorSpec(dtype, tuple(self._some_size() for _ in range(rank)), self.device, fill=self._fill(dtype))

    def _fill(self, dtype: str) -> tuple[int | float | bool, ...] | None:
        if dtype.startswith(("float", "bfloat", "complex")):
            return self.random.choice((None, None, None, (0.0,), (1.0,)))
        bounds = [v for v in self.values.symbols.values() if type(v) is int and v > 0]
        last = self.random.choice(bounds) - 1 if bounds else 1
        return self.random.choice(((0,), (1,), (0, 1), (1, 0), None, (0, 1, 2), (1, 2, 3), (last, 0)))

    def _tensor(self, tensor: TensorType, call: Call) -> TensorSpec:
        dtype = self._dtype(tensor, call)
        shape: list[int] = []
        if tensor.dims is None:
            shape = [self._some_size() for _ in range(self.random.choice((0, 1, 2, 3, 4)))]
        for dim in tensor.dims or ():
            match dim:
                case Rest(name=name):
                    group = self.values.symbols.get(name) if name is not None else self._others
                    if not isinstance(group, tuple) or (name is None and self.random.random() < 0.3):
                        group = tuple(self._some_size() for _ in range(self.random.choice((0, 1, 1, 2, 3))))
                        self._others = self._others or group
                    if name is not None:
                        self.values.symbols[name] = group
                    shape += group
                case RestOf(path=path):
                    other = call.get(path)
                    shape += other.shape if isinstance(other, TensorSpec) else ()
                case AnySize():
                    shape.append(self._some_size())
                case SizeOneOf(options=options):
                    shape.append(self._size(self.random.choice(options)))
                case Size(expr=expr):
                    shape.append(self._size(expr))
        device = next((d.name for d in tensor.devices or () if isinstance(d, DeviceType)), self.device)
        made = TensorSpec(dtype, tuple(shape), device, fill=self._fill(dtype))
        if made.elements and self.random.random() < 0.1:  # not contiguous: every other element, or axes exchanged
            apart = tuple(2 * stride for stride in row_order(made.shape))
            return replace(made, strides=self.random.choice([apart, transposed(made.shape)] if shape[1:] else [apart]))
        return made

    def _dtype(self, tensor: TensorType, call: Call) -> str:
        for dtype in tensor.dtypes:
            if isinstance(dtype, DtypeOf) and isinstance(other := call.get(dtype.path), TensorSpec):
                return other.dtype
        symbol = tensor.dtype_symbol
        known = self.values.symbols.get(symbol) if symbol is not None else None
        if known is not None:
            return str(known).removeprefix("torch.")
        found = str(self.pick(tensor.text, self._usual_first(dtypes_of(tensor, {}))))
        if symbol is not None and len(tensor.dtypes) == 1 and isinstance(tensor.dtypes[0], DtypeSymbol):
            self.values.symbols[symbol] = found
        return found

    def _size(self, expr: Any) -> int:
        symbol = expr.symbol
        if symbol is not None and symbol in self.contract.symbols:
            if type(self.values.symbols.get(symbol)) is not int:
                self.values.symbols[symbol] = self._some_size()
            return int(self.values.symbols[symbol])
        for name in self._unknown(expr):
            self.values.symbols[name] = self._some_size()
        try:
            value = self.values.evaluate(expr)
        except (*INAPPLICABLE, Broken, KeyError):
            value = None
        return value if type(value) is int and 0 <= value < 4096 else self._some_size()

    def _unknown(self, expr: Any) -> Iterator[str]:
        for name in names_in(expr.node):
            if self.contract.symbols.get(name) == "size" and name not in self.values.symbols:
                yield name

    def _usual_first(self, found: list[str]) -> list[str]:
        """Mostly those dtypes that operators are mostly called with."""
        usual = [name for name in found if name in _USUAL_DTYPES]
        return usual if usual and (self.made_of.usual or self.random.random() < 0.7) else found
