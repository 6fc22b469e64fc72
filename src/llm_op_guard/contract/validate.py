"""What a contract's statements mean together: symbols, branches, rules, cost classes; and what is refused at load."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from llm_op_guard.contract.costs import check_costs, classified
from llm_op_guard.contract.expressions import names_in, steps_of, suggestion
from llm_op_guard.contract.implied import may_break
from llm_op_guard.contract.loops import unrolled, written_out
from llm_op_guard.contract.model import (
    Alternative,
    Assign,
    Clause,
    Condition,
    Contract,
    Declare,
    DeviceSymbol,
    Dtype,
    DtypeOf,
    DtypeSet,
    DtypeSymbol,
    Expr,
    For,
    If,
    Leaf,
    Like,
    ListType,
    LiteralType,
    NoneType,
    Remember,
    Require,
    Rest,
    Rule,
    ScalarType,
    Statement,
    SymbolKind,
    TensorType,
    TupleType,
    Type,
)
from llm_op_guard.contract.satisfiable import check_satisfiable
from llm_op_guard.contract.solve import inverse
from llm_op_guard.contract.source import Place, Source
from llm_op_guard.contract.uses import Uses
from llm_op_guard.contract.vocabulary import DEVICE_TYPES, DTYPE_NAMES, DTYPE_SETS, FUNCTIONS, KEYWORDS, dtype_names
from llm_op_guard.contract.walk import (
    binders,
    declared_paths,
    items_of,
    paths_in_type,
    solvable,
    tensor_types,
    tensors_declared,
)

# Far above any real contract; what is done for one is not always linear in these.
MAX_CLAUSES = 2000
MAX_WRITTEN = 200_000

# Names that an expression may use for what they are: dtypes and sets of them.
_CONSTANTS = frozenset({*DTYPE_NAMES, *DTYPE_SETS})


def validated(contract: Contract, *, proven: bool = False) -> Contract:
    """The same contract with its symbols, clauses and rules filled in; raises ContractError for what is refused.

    Of one that is `proven` it is known that some call can keep its rules: to find out takes as long as all else.
    """
    clauses = _limited(_flatten(contract.body, (), contract.source), contract.source)
    contract = replace(contract, clauses=clauses)
    symbols = _symbols(contract)
    contract = replace(contract, symbols=symbols)
    contract = replace(contract, clauses=classified(contract))
    contract = replace(contract, tensors=tensors_declared(contract))
    uses, names = Uses(contract), _Names(contract)
    for clause in contract.clauses:
        _check_names(clause, contract, names)
        uses.check(clause)
        if isinstance(clause.statement, Declare):
            _check_type(clause.statement.type, clause.statement, contract)
    _check_assignments(contract)
    _check_spelling(contract)
    _check_binders(contract)
    check_costs(contract)
    _check_memory(contract)
    rules = tuple(rule for clause in contract.clauses for rule in rules_of(clause))
    _check_repeated(rules, contract)
    if not proven:
        check_satisfiable(contract)
    # One rule may stand in several branches.
    return replace(contract, rules=tuple({rule.id: rule for rule in reversed(rules)}.values())[::-1])


# ---------------------------------------------------------------- structure


def _flatten(body: Iterable[Statement], conditions: tuple[Condition, ...], source: Source) -> Iterator[Clause]:
    for statement in body:
        match statement:
            case If(test=test, place=place):
                test = written_out(test, source)
                yield from _flatten(statement.body, (*conditions, Condition(test, True, place)), source)
                yield from _flatten(statement.orelse, (*conditions, Condition(test, False, place)), source)
            case For():
                yield from _flatten(unrolled(statement, source), conditions, source)
            case Declare():
                yield Clause(statement, conditions)
            case Assign(expr=expr) | Require(expr=expr):
                yield Clause(replace(statement, expr=written_out(expr, source)), conditions)
            case Remember(facts=facts):
                written = tuple((name, written_out(expr, source)) for name, expr in facts)
                yield Clause(replace(statement, facts=written), conditions)


def _limited(clauses: Iterator[Clause], source: Source) -> tuple[Clause, ...]:
    """All the clauses; raises ContractError where they are too many, or too long with the tests they stand behind."""
    found: list[Clause] = []
    characters = 0
    for clause in clauses:
        found.append(clause)
        characters += written_length(clause)
        if len(found) > MAX_CLAUSES:
            problem = f"the contract has more than {MAX_CLAUSES} statements, loops written out"
            raise source.error(problem, clause.statement.place)
        if characters > MAX_WRITTEN:
            problem = f"written out, the contract has more than {MAX_WRITTEN} characters"
            raise source.error(problem, clause.statement.place)
    return tuple(found)


def written_length(clause: Clause) -> int:
    """How many characters the expressions of a clause have, with the tests of the branches that it stands in."""
    tests = (condition.test for condition in clause.conditions)
    return sum(len(expr.text) for expr in (*tests, *_expressions(clause.statement)))


def exclusive(a: Iterable[Condition], b: Iterable[Condition]) -> bool:
    """Whether two branches can never both be taken: one wants a test true that the other wants false."""
    wanted = {condition.test: condition.wanted for condition in a}
    return any(wanted.get(condition.test, condition.wanted) != condition.wanted for condition in b)


# ---------------------------------------------------------------- names


def _one(kind: SymbolKind) -> str:
    return "several sizes" if kind == "sizes" else f"a {kind}"


def _symbols(contract: Contract) -> dict[str, SymbolKind]:
    """The names that types use and that are neither parameters nor assigned, with what they stand for."""
    taken = {*contract.parameters, *contract.assigned, *contract.constants}
    kinds: dict[str, SymbolKind] = {}

    def add(name: str, kind: SymbolKind, node: ast.AST | Place) -> None:
        if name in taken:
            if kind == "size":
                return
            raise contract.source.error(
                f"{name!r} is a parameter or assigned name, so it cannot stand for {_one(kind)}", node
            )
        if name in {*FUNCTIONS, *KEYWORDS, *_CONSTANTS, *DEVICE_TYPES, *contract.imports, "result"}:
            raise contract.source.error(f"{name!r} has a meaning in the language; choose another symbol", node)
        if kinds.setdefault(name, kind) != kind:
            raise contract.source.error(
                f"{name!r} stands for {_one(kinds[name])} elsewhere and for {_one(kind)} here", node
            )

    for clause in contract.clauses:
        if not isinstance(clause.statement, Declare):
            continue
        for tensor in tensor_types(clause.statement.type):
            node = clause.statement.place
            for dtype in tensor.dtypes:
                if isinstance(dtype, DtypeSymbol):
                    add(dtype.name, "dtype", node)
            for expr in tensor.sizes:
                for name, place in names_in(expr.node).items():
                    add(name, "size", place)
            for dim in tensor.dims or ():
                if isinstance(dim, Rest) and dim.name is not None:
                    add(dim.name, "sizes", node)
            for device in tensor.devices or ():
                if isinstance(device, DeviceSymbol):
                    add(device.name, "device", node)
    return kinds


def _expressions(statement: Leaf) -> Iterator[Expr]:
    if isinstance(statement, Assign | Require):
        yield statement.expr
    if isinstance(statement, Remember):
        yield from (expr for _, expr in statement.facts)
    if isinstance(statement, Declare):
        for tensor in tensor_types(statement.type):
            yield from tensor.sizes
    if isinstance(statement, Declare | Require):
        yield from (text for text in (statement.reason.because, statement.reason.hint) if text is not None)


class _Names:
    """The names that expressions of a contract may use (`known`), and those that its paths may begin with (`roots`)."""

    def __init__(self, contract: Contract) -> None:
        self.roots = frozenset({*contract.parameters, *contract.assigned, "result"})
        named = {*self.roots, *contract.symbols, *contract.constants}
        self.known = frozenset({*named, *_CONSTANTS, *DEVICE_TYPES})


def _check_names(clause: Clause, contract: Contract, names: _Names) -> None:
    known, roots = names.known, names.roots
    statement = clause.statement
    for expr in (*_expressions(statement), *(condition.test for condition in clause.conditions)):
        for name, place in names_in(expr.node).items():
            if name in contract.imports:
                raise contract.source.error(f"{name!r} is imported to be called: {name}(…)", place)
            if name not in known:
                raise contract.source.error(f"unknown name {name!r}{suggestion(name, known)}", place)
    if isinstance(statement, Declare | Remember):
        others = paths_in_type(statement.type) if isinstance(statement, Declare) else ()
        for path in (statement.path, *others):
            if path.root not in roots:
                raise contract.source.error(
                    f"{path.root!r} is not a parameter of {contract.name}{suggestion(path.root, roots)}",
                    statement.place,
                )
    for expr in (*_expressions(statement), *(condition.test for condition in clause.conditions)):
        _check_get(expr, contract)


def _check_get(expr: Expr, contract: Contract) -> None:
    """`has` and `get` ask whether something exists; a symbol always does, once it is bound."""
    for call in ast.walk(expr.node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("has", "get"):
            name = steps_of(call.args[0])[0].id
            if name in contract.symbols:
                raise contract.source.error(f"{name!r} is a symbol; {call.func.id} takes an argument", call)


def _check_assignments(contract: Contract) -> None:
    seen: list[tuple[str, Clause]] = []
    for clause in contract.clauses:
        if not isinstance(clause.statement, Assign):
            continue
        for name in clause.statement.names:
            if name in contract.parameters or name in contract.constants:
                what = "a parameter" if name in contract.parameters else "a constant"
                raise contract.source.error(f"{name!r} is {what}; choose another name", clause.statement.place)
            for other, earlier in seen:
                if other == name and not exclusive(clause.conditions, earlier.conditions):
                    raise contract.source.error(f"{name!r} is assigned twice on one path", clause.statement.place)
            seen.append((name, clause))


def _check_memory(contract: Contract) -> None:
    for clause in contract.clauses:
        statement = clause.statement
        if isinstance(statement, Remember) and statement.path.root in contract.assigned:
            problem = f"remember takes a parameter, or what can be read from one; {statement.path.root!r} is a name"
            raise contract.source.error(problem, statement.place)
        for expr in _expressions(statement) if clause.after_call else ():
            for call in ast.walk(expr.node):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "recall":
                    problem = "after the call nothing of before is recalled: name it first, before = recall(…)"
                    raise contract.source.error(problem, call)


# ---------------------------------------------------------------- types


def _check_type(declared: Type, statement: Declare, contract: Contract) -> None:
    alternatives = declared.alternatives
    for index, later in enumerate(alternatives):
        for earlier in alternatives[:index]:
            if _overlap(earlier, later):
                raise contract.source.error(
                    f"{earlier.text} and {later.text} cannot be told apart by None, type, rank or dtype",
                    statement.place,
                )
    for path in paths_in_type(declared):
        if path == statement.path:
            raise contract.source.error(f"{path} is declared by itself", statement.place)
    for alternative in alternatives:
        for item in items_of(alternative):
            _check_type(item, statement, contract)


def _overlap(a: Alternative, b: Alternative) -> bool:
    match a, b:
        case TensorType(), TensorType():
            return _ranks_meet(a, b) and _dtypes_meet(a.dtypes, b.dtypes)
        case (TensorType(), Like()) | (Like(), TensorType()) | (Like(), Like()):
            return True
        case NoneType(), NoneType():
            return True
        case ScalarType(text=first), ScalarType(text=second):
            return first == second or "object" in (first, second)
        case LiteralType(value=first), LiteralType(value=second):
            return type(first) is type(second) and first == second
        case TupleType(items=first), TupleType(items=second):
            return len(first) == len(second)
        case (ListType(), ListType() | TupleType()) | (TupleType(), ListType()):
            return True
    return False


def _ranks_meet(a: TensorType, b: TensorType) -> bool:
    ranks = range(max(len(a.dims or ()), len(b.dims or ())) + 2)
    return any(a.accepts_rank(rank) and b.accepts_rank(rank) for rank in ranks)


def _dtypes_meet(a: Iterable[Dtype], b: Iterable[Dtype]) -> bool:
    return any(_dtype_meets(x, y) for x in a for y in b)


def _dtype_meets(a: Dtype, b: Dtype) -> bool:
    if isinstance(a, DtypeSymbol | DtypeOf) or isinstance(b, DtypeSymbol | DtypeOf):
        return True
    return bool(dtype_names(a) & dtype_names(b))


# ---------------------------------------------------------------- binding


def _check_binders(contract: Contract) -> None:
    known = {symbol for symbol, _ in binders(contract)}
    # What each expression waits for, and which expressions wait for a symbol.
    missing: dict[int, set[str]] = {}
    waiting: dict[str, list[int]] = {}
    exprs = [expr for expr, _ in solvable(contract)]
    for number, expr in enumerate(exprs):
        missing[number] = {name for name in names_in(expr.node) if name in contract.symbols and name not in known}
        for name in missing[number]:
            waiting.setdefault(name, []).append(number)
    ready = [number for number, names in missing.items() if len(names) == 1]
    while ready:
        number = ready.pop()
        for name in missing[number] - known:  # one, or none any more
            if inverse(exprs[number].node, name) is not None:
                known.add(name)
                for other in waiting[name]:
                    missing[other].discard(name)
                    if len(missing[other]) == 1:
                        ready.append(other)
    for name, kind in contract.symbols.items():
        if name not in known:
            raise contract.source.error(
                f"{name!r} is never bound: no argument is declared with it as a plain {_WHAT[kind]}, so nothing that "
                f"uses it could be checked",
                _first_use(name, contract),
            )


_WHAT: dict[SymbolKind, str] = {
    "size": "dimension",
    "sizes": "group of dimensions",
    "dtype": "dtype",
    "device": "device",
}


def _first_use(name: str, contract: Contract) -> Place | None:
    for clause in contract.clauses:
        if re.search(rf"\b{name}\b", clause.statement.text):
            return contract.source.within(clause.statement.place, name)
    return None


def _check_spelling(contract: Contract) -> None:
    """Refuse a size that stands once and is a parameter misspelt: it would take any value."""
    for name, kind in contract.symbols.items():
        near = [p for p in contract.parameters if _is_misspelt(name, p)] if kind == "size" and name.islower() else []
        if near and _occurrences(name, contract) == 1:
            problem = f"{name!r} stands here only and says nothing; did you mean {near[0]!r}?"
            raise contract.source.error(problem, _first_use(name, contract))


def _is_misspelt(name: str, meant: str) -> bool:
    """Whether a name is another but for underscores, or for one letter of one word, left out or swapped with the next.

    Another letter (`q_len`, `k_len`) and an s at the end (`block_size`, `block_sizes`) make another name.
    """
    if name.replace("_", "") == meant.replace("_", ""):
        return name != meant
    words, others = name.split("_"), meant.split("_")
    differing = [pair for pair in zip(words, others, strict=False) if pair[0] != pair[1]]
    if len(words) != len(others) or len(differing) != 1:
        return False
    short, long = sorted(differing[0], key=len)
    if len(long) < _SHORTEST_MISSPELT or f"{short}s" == long:
        return False
    left_out = {long[:i] + long[i + 1 :] for i in range(len(long))}
    swapped = {long[:i] + long[i + 1] + long[i] + long[i + 2 :] for i in range(len(long) - 1)}
    return short in left_out | swapped


# Of shorter words one may well be another.
_SHORTEST_MISSPELT = 4


def _occurrences(name: str, contract: Contract) -> int:
    conditions = (condition.test.text for clause in contract.clauses for condition in clause.conditions)
    texts = (*conditions, *(clause.statement.text for clause in contract.clauses))
    return sum(len(re.findall(rf"\b{name}\b", text)) for text in texts)


# ---------------------------------------------------------------- rules


def rules_of(clause: Clause) -> Iterator[Rule]:
    """What a call can break of a statement; a name for a value that every call has is no rule."""
    statement = clause.statement
    match statement:
        case Require():
            yield Rule(statement.id, clause.cost_class, statement.reason.certain, statement)
        case Assign(expr=expr) if may_break(expr.node):
            yield Rule(statement.text, clause.cost_class, True, statement)
        case Declare():
            for path, declared in declared_paths(statement.path, statement.type):
                for aspect in _aspects(declared):
                    yield Rule(f"{path}.{aspect}", clause.cost_class, statement.reason.certain, statement)


def clauses_of(contract: Contract, rule: str) -> list[Clause]:
    """The statements that stand for a rule: one of each branch that has it."""
    return [clause for clause in contract.clauses if any(said.id == rule for said in rules_of(clause))]


def _aspects(declared: Type) -> Iterator[str]:
    """What can be wrong with a declared value: its type; of a tensor, also what the type says of it."""
    if not any(a == ScalarType("object") for a in declared.alternatives):
        yield "type"
    tensors = [a for a in declared.alternatives if isinstance(a, TensorType)]
    likes = any(isinstance(a, Like) for a in declared.alternatives)
    if likes or any(DtypeSet("any") not in tensor.dtypes for tensor in tensors):
        yield "dtype"
    if likes or any(tensor.dims not in (None, (Rest(None),)) for tensor in tensors):
        yield "shape"
    if likes or any(tensor.devices is not None for tensor in tensors):
        yield "device"


def _check_repeated(rules: tuple[Rule, ...], contract: Contract) -> None:
    clause_of = {id(clause.statement): clause for clause in contract.clauses}
    seen: dict[str, list[Rule]] = {}
    for rule in rules:
        for earlier in seen.setdefault(rule.id, []):
            mine, other = clause_of[id(rule.statement)], clause_of[id(earlier.statement)]
            if rule.statement is not earlier.statement and not exclusive(mine.conditions, other.conditions):
                what = (
                    f"{rule.statement.path} is declared twice on one path"
                    if isinstance(rule.statement, Declare)
                    else f"the rule {rule.id!r} stands here a second time"
                )
                raise contract.source.error(what, rule.statement.place)
        seen[rule.id].append(rule)
