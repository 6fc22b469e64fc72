"""The JSON Schema of the JSON form, made from the tables that `json_form` reads by."""

from __future__ import annotations

import keyword
from typing import Any

from llm_op_guard.contract.json_form import (
    ARGUMENT_KEYS,
    CONTRACT_KEYS,
    FILE_KEYS,
    RULE_KEYS,
    STATEMENTS,
)
from llm_op_guard.errors import GUARD_ERRORS

_TEXT = {"type": "string"}
_BODY = {"type": "array", "items": {"$ref": "#/$defs/statement"}}
_EXPRESSION = {"$ref": "#/$defs/expression"}
_WRITTEN = {"type": "string", "pattern": "\\S"}
_NAME = {"$ref": "#/$defs/name"}
_MODULE = "[^\\W\\d]\\w*(\\.[^\\W\\d]\\w*)*"

# What stands behind each key, wherever it is used.
_VALUES: dict[str, Any] = {
    "$schema": _TEXT,
    "imports": {
        "description": "predicates by name: the modules that they are imported from",
        "type": "object",
        "propertyNames": {"allOf": [_NAME, {"pattern": "^(?!__)"}]},
        "additionalProperties": {"type": "string", "pattern": f"^(__main__|(?!__)(?!.*\\.__){_MODULE})$"},
    },
    "constants": {
        "description": "values by name: Python literals as texts",
        "type": "object",
        "propertyNames": {"pattern": "^(?=.*[A-Z])[A-Z_][A-Z0-9_]{2,}$"},
        "additionalProperties": _WRITTEN,
    },
    "contracts": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/contract"}},
    "name": _NAME,
    "signature": {"description": "the parameters, as between the brackets of a def", **_TEXT},
    "doc": _TEXT,
    "body": _BODY,
    "declare": {"description": "a parameter, what can be read from one, or returns", **_EXPRESSION},
    "type": {"$ref": "#/$defs/type"},
    "assign": {"anyOf": [_NAME, {"type": "array", "minItems": 1, "items": _NAME}]},
    "value": _EXPRESSION,
    "require": _EXPRESSION,
    "ensure": _EXPRESSION,
    "remember": {"description": "the parameter, or what can be read from one, that facts are kept of", **_EXPRESSION},
    "facts": {"type": "object", "minProperties": 1, "propertyNames": _NAME, "additionalProperties": _EXPRESSION},
    "if": _EXPRESSION,
    "then": _BODY,
    "else": _BODY,
    "for": {"description": "the name, or names, that the loop gives", **_EXPRESSION},
    "in": _EXPRESSION,
    "do": _BODY,
    "id": {
        "description": "one line that can be printed",
        "type": "string",
        "maxLength": 100,
        "pattern": "^(?=.*\\S)[^\\u0000-\\u001f\\u007f-\\u00a0\\u2028\\u2029]*$",
    },
    "because": {"$ref": "#/$defs/text"},
    "hint": {"$ref": "#/$defs/text"},
    "certain": {"type": "boolean"},
    "error": {"enum": list(GUARD_ERRORS)},
    "dtype": {"anyOf": [_WRITTEN, {"type": "array", "minItems": 1, "items": _WRITTEN}]},
    "shape": {"type": "array", "items": {"anyOf": [_WRITTEN, {"type": "integer", "minimum": 0}]}},
    "device": {"anyOf": [_WRITTEN, {"type": "array", "minItems": 1, "items": _WRITTEN}]},
    "optional": {"type": "boolean"},
}


_BEYOND = (
    "What a schema cannot say, and loading a file refuses: keys that stand twice, numbers without end and halves of "
    "characters; texts that are no expression or type of the language, or a target that is no path; names that have a "
    "meaning in the language, or two meanings, and a second contract or parameter of one name; a contract without a "
    "signature whose inputs name no parameter; rules that say nothing or that no call can keep; texts beyond the "
    "limits of size."
)


def json_schema() -> dict[str, Any]:
    """The schema, draft 2020-12, of a file of contracts or a single contract."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:llm-op-guard:contract",
        "title": "Contracts of operators",
        "description": _BEYOND,
        "anyOf": [_object(FILE_KEYS, ("contracts",)), {"$ref": "#/$defs/contract"}],
        "$defs": {
            "name": {
                "description": "a name of Python that is no word of it",
                "type": "string",
                "pattern": "^[^\\W\\d]\\w*$",
                "not": {"enum": keyword.kwlist},
            },
            "expression": {"description": "an expression of the contract language", **_WRITTEN},
            "type": {"description": "a type of the contract language: floating[B, D] @ dev", **_WRITTEN},
            "text": {"anyOf": [_TEXT, {"type": "object", **_keys({"expression": _EXPRESSION}, ("expression",))}]},
            "contract": _object(CONTRACT_KEYS, ("name", "body")),
            "statement": {"oneOf": [_statement(kind) for kind in STATEMENTS]},
            "input": _argument("require", ("name",)),
            "output": _argument("ensure", ()),
        },
    }


def _statement(kind: str) -> dict[str, Any]:
    needed, optional = STATEMENTS[kind]
    if kind in ("input", "output"):
        return {"type": "object", **_keys({kind: {"$ref": f"#/$defs/{kind}"}}, (kind,))}
    return _object((kind, *needed, *optional), (kind, *needed))


def _argument(rule: str, needed: tuple[str, ...]) -> dict[str, Any]:
    """The long form of a declaration: its type whole or in parts, and rules about it."""
    condition = {"anyOf": [_EXPRESSION, _object((rule, *RULE_KEYS), (rule,))]}
    names = [key for key in ARGUMENT_KEYS if key != "constraint"]
    values = {key: _VALUES[key] for key in (*needed, *names)}
    values["constraint"] = {"anyOf": [condition, {"type": "array", "minItems": 1, "items": condition}]}
    said = [{"required": [key]} for key in ("type", "dtype", "shape", "device", "constraint")]
    parts = {"anyOf": [{"required": [key]} for key in ("dtype", "shape", "device")]}
    return {
        "type": "object",
        **_keys({**values, "name": _EXPRESSION} if needed else values, needed),
        "anyOf": said,
        "not": {"required": ["type"], **parts},
    }


def _object(keys: tuple[str, ...], needed: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "object", **_keys({key: _VALUES[key] for key in keys}, needed)}


def _keys(values: dict[str, Any], needed: tuple[str, ...]) -> dict[str, Any]:
    return {"properties": values, "required": list(needed), "additionalProperties": False}
