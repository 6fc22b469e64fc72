"""The body of a request → the arguments that a contract describes, or an error that says why not.

Nothing that a client sent stands in a message: no text, no name of a field, only lengths, kinds and places.
"""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any, NamedTuple, NoReturn

from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.parse import stub_signature
from llm_op_guard.guard.describe import kind_text
from llm_op_guard.guard.reading import is_a
from llm_op_guard.guard.violation import Violation
from llm_op_guard.report.dispatch import Dispatcher
from llm_op_guard.verification import Verification

# Far above any request, and far below where Python gives up.
MAX_NESTING = 100
# The largest whole number that any dtype holds; more is no count, id or seed.
_MAX_BITS = 64

Body = bytes | bytearray | memoryview | str | dict[str, Any]


class Ingress:
    """What `og.ingress` returns: called with the body of a request, it returns the arguments or raises GuardError."""

    def __init__(self, contract: Contract, max_bytes: int, dispatcher: Dispatcher) -> None:
        signature = stub_signature(contract) if isinstance(contract, Contract) else None
        if signature is None:
            raise TypeError("og.ingress takes a contract that og.load has read")
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise ValueError(f"max_bytes= is the size of the largest body, in bytes, at least 1; got {max_bytes!r}")
        for parameter in signature.parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise TypeError(f"{contract.name}: a request has names only, so {parameter.name} could not be given")
        self.contract = contract
        self.max_bytes = max_bytes
        self._parameters = tuple(signature.parameters.values())
        self._verification = Verification(contract, operator=contract.name, site=contract.id, dispatcher=dispatcher)

    def __deepcopy__(self, memo: object) -> Ingress:
        return self  # it has no state that a copy could have for itself

    def __reduce__(self) -> NoReturn:
        raise TypeError("what og.ingress returns belongs to its process: pickle the path of the contract, and load it")

    def __call__(self, body: Body) -> dict[str, Any]:
        """The fields of the body, defaults of the stub filled in; raises GuardError and nothing else, whatever it is.

        A body that is too large is refused before it is decoded; a dict has been decoded already, by whoever has its
        size to answer for. Fields that the stub does not name are left as they are.
        """
        decoded = _decoded(body, self.max_bytes)
        if isinstance(decoded, _Fault):
            violation = self._violation(decoded.rule, None, decoded.observed, decoded.expected)
            raise self._verification.dispatcher.refused(self._verification, violation)
        fields = decoded
        arguments, missing = self._arguments(fields)
        absent = tuple(self._violation(f"{name}.missing", name, f"{name} is missing", "a value") for name in missing)
        if (error := self._verification.broken(arguments, absent)) is not None:
            raise error
        return fields

    def _arguments(self, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """What the contract is held against, and the parameters that are missing; fills in defaults."""
        arguments: dict[str, Any] = {}
        missing = []
        named = {p.name for p in self._parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
        for parameter in self._parameters:
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments[parameter.name] = {name: value for name, value in fields.items() if name not in named}
            elif parameter.name in fields:
                arguments[parameter.name] = fields[parameter.name]
            elif parameter.default is not parameter.empty:
                # A copy: the caller may change what it is given.
                arguments[parameter.name] = fields[parameter.name] = copy.deepcopy(parameter.default)
            else:
                missing.append(parameter.name)
        return arguments, missing

    def _violation(self, rule: str, argument: str | None, observed: str, expected: str) -> Violation:
        return Violation(
            operator=self.contract.name,
            rule_id=rule,
            cost_class="A",
            certain=True,
            argument=argument,
            observed=observed,
            expected=expected,
            contract_id=self.contract.id,
            contract_hash=self.contract.hash,
        )


class _Fault(NamedTuple):
    """Why a body cannot be read: the rule, what is there, what should be."""

    rule: str
    observed: str
    expected: str


class _Refused(Exception):  # noqa: N818 - says where a body is refused, and is raised no further
    pass


_JSON = "JSON in UTF-8"
_NUMBERS = f"numbers of at most {_MAX_BITS} bits"


def _decoded(body: Any, max_bytes: int) -> dict[str, Any] | _Fault:
    """The fields of a body. What is wrong is returned, not raised: an error of Python's own would hold the body."""
    import json  # noqa: PLC0415 - few need it

    found = body = _plainly(body)
    if is_a(body, str | bytes | bytearray | memoryview):
        try:
            size = body.nbytes if isinstance(body, memoryview) else len(body)
            if isinstance(body, str) and size <= max_bytes:  # no fewer bytes than characters
                size = len(body.encode("utf-8", "surrogatepass"))
            if size > max_bytes:
                return _Fault("max_bytes", f"the body has {size} bytes", f"at most {max_bytes}")
            text = body if isinstance(body, str) else bytes(body).decode()
            found = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
        except UnicodeDecodeError as error:
            return _Fault("json", f"the body is not UTF-8 from byte {error.start} on", _JSON)
        except json.JSONDecodeError as error:
            return _Fault("json", f"the body is not JSON from character {error.pos} on", _JSON)
        except _Refused as refused:
            return _Fault("json", str(refused), _JSON)
        except RecursionError:
            return _TOO_DEEP
        except ValueError:
            return _Fault("json", "the body cannot be read: a number has too many digits, or its buffer is gone", _JSON)
    if not is_a(found, dict):
        kind = "null" if found is None else kind_text(found)
        return _Fault("json_object", f"the body is {kind}", "an object with named fields")
    return _wrong_within(found) or {_plainly(name): value for name, value in dict.items(found)}


def _plainly(body: Any) -> Any:
    """A text or bytes without what a class of the server's may make of them: none of its methods is called."""
    for kind in (str, bytes, bytearray):
        if is_a(body, kind):
            return kind.__getitem__(body, slice(None)) if type(body) is not kind else body
    return body


_TOO_DEEP = _Fault("json", "the body is nested too deeply", f"at most {MAX_NESTING} levels")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):  # parsers differ in which one counts
        raise _Refused("one object of the body has two fields of one name")
    return fields


def _no_constant(name: str) -> Any:
    raise _Refused(f"a number in the body is {name}")  # NaN, Infinity or -Infinity


def _wrong_within(fields: dict[str, Any]) -> _Fault | None:
    """What JSON can spell and nobody can use: half characters, numbers without end, nesting without end."""
    level: list[Any] = [fields]
    seen = {id(fields)}  # a dict that somebody made may hold one part many times, or itself
    for _ in range(MAX_NESTING):
        below: list[Any] = []
        for holder in level:
            is_object = is_a(holder, dict)
            if is_object and not all(is_a(name, str) for name in dict.keys(holder)):  # of a dict that somebody made
                return _Fault("json", "an object of the body has a field whose name is no text", _JSON)
            for part in (*dict.keys(holder), *dict.values(holder)) if is_object else list.__iter__(holder):
                if is_a(part, dict | list):
                    if id(part) not in seen:
                        seen.add(id(part))
                        below.append(part)
                elif is_a(part, str):
                    if not str.isascii(part) and not _is_text(part):
                        return _Fault("json", "a text in the body has half of a surrogate pair", "texts of Unicode")
                elif is_a(part, float):
                    if not math.isfinite(part):
                        return _Fault("json", "a number in the body is too large", _NUMBERS)
                elif is_a(part, int) and int.bit_length(part) > _MAX_BITS:
                    return _Fault("json", "a number in the body is too large", _NUMBERS)
        if not below:
            return None
        level = below
    return _TOO_DEEP


def _is_text(part: str) -> bool:
    try:
        str.encode(part)
    except UnicodeEncodeError:
        return False
    return True
