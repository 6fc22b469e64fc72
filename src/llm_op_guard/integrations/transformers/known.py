"""Code of Transformers that was read: which contract holds for it, by its fingerprint."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Mapping
from functools import cache

from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.stubs import Stubs
from llm_op_guard.frozen import frozen
from llm_op_guard.install.installer import Candidate
from llm_op_guard.install.recognise import Fingerprint, Refused, fingerprint, innermost
from llm_op_guard.policy import Action, Policy, Setting

LIBRARY = "transformers"

# Shipped contracts check metadata; their value rules wait for the user's policy.
METADATA = Policy(A=Setting(Action.RAISE), B=Setting(Action.OFF))
# But for token ids at the entry: the commonest crash of all, and small.
TOKEN_IDS = Policy(A=Setting(Action.RAISE), B=Setting(Action.RAISE))


@frozen
class Code:
    """A body of code that was read: where it stands, and the Transformers versions that have it.

    `reason` says why it has no contract.
    """

    where: str
    versions: tuple[str, ...] = ("5.24.0",)
    reason: str = ""


@frozen
class Family:
    """Functions that compute the same: their contract (`file:name`), and their code by fingerprint."""

    contract: str
    code: Mapping[str, Code]
    defaults: Policy = METADATA


@frozen
class KnownCode:
    """Code that no contract is for, and that something is told by, by fingerprint: what it is for, and where it stands.

    `site` is a regular expression of `module.qualified name`. `module` is one that has no operators and is to be looked
    through for this code.
    """

    name: str
    site: str
    code: Mapping[str, Code]
    module: str = ""


def contract_named(name: str, name_of_cache: str = "cache") -> Contract:
    """A shipped contract by `file:name`, for example `rope:apply_rotary_pos_emb`.

    `name_of_cache` is what the operator calls the argument and the part of its result that the contract calls `cache`:
    in Transformers 4 it is `past_key_values`.
    """
    file, _, operator = name.partition(":")
    return _contracts(file, name_of_cache)[operator]


@cache
def _contracts(file: str, name_of_cache: str) -> Stubs:
    from importlib import resources  # noqa: PLC0415 - few need it

    path = resources.files("llm_op_guard") / "contracts" / LIBRARY / f"{file}.contract"
    text = _renamed(path.read_text(encoding="utf-8"), "cache", name_of_cache)
    return Stubs(text, f"{LIBRARY}/{file}.contract")


def _renamed(text: str, name: str, other: str) -> str:
    """A contract text with another name for a name; what stands in its texts stays."""
    if name == other:
        return text
    lines = text.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        if token.type == tokenize.NAME and token.string == name:
            (row, start), (_, end) = token.start, token.end
            lines[row - 1] = lines[row - 1][:start] + other + lines[row - 1][end:]
    return "".join(lines)


def known(
    site: str, operator: str, found: object, *families: Family, left_out: Mapping[str, Code] | None = None
) -> Candidate:
    """A candidate whose code must be that of one of these families.

    `left_out` is other code that was read, with the reasons why it has no contract.
    """
    function = innermost(found)
    if isinstance(function, Refused):
        return Candidate(site, operator, reason=function.reason)
    code = fingerprint(function)
    if isinstance(code, Refused):
        return Candidate(site, operator, reason=code.reason)
    for family in families:
        if code.digest in family.code:
            return Candidate(site, operator, function, contract_named(family.contract), family.defaults)
    other = (left_out or {}).get(code.digest)
    return Candidate(site, operator, reason=_unknown(code) if other is None else other.reason)


def _unknown(code: Fingerprint) -> str:
    return f"its code is not one that a contract was written for (fingerprint {code.digest})"
