"""What functions of contracts say of the objects in a call: `cache_length(cache)`."""

from __future__ import annotations

import ast
from dataclasses import replace

from llm_op_guard.contract.model import Contract
from llm_op_guard.faults.build import build
from llm_op_guard.faults.ingredients import Ingredient
from llm_op_guard.guard.bind import Bindings
from llm_op_guard.guard.call import Call, IdentitySpec, ObjectSpec, Spec, answer_key

# Lengths and numbers of rows, which are asked for, are mostly larger than the sizes of small tensors: one that few of
# those have, and one beyond nearly all of them.
LENGTHS = (7, 96)


def identities(asked: Ingredient) -> list[Spec]:
    """The answers to a question that is compared with an identity: that one, and another; none for other questions."""
    return [] if asked.identity_of is None else [IdentitySpec(str(asked.identity_of)), IdentitySpec()]


def with_answer(call: Call, asked: Ingredient, answer: Spec, contract: Contract) -> Call:
    """The call in which a question about an object has an answer; with None it does not apply."""
    node = asked.question
    if node is None or not isinstance(node.func, ast.Name):
        return call
    owner = call.get(asked.path)
    if not isinstance(owner, ObjectSpec):
        if answer is None:
            return call
        owner = ObjectSpec("object")
    try:
        bindings = Bindings(contract, [c for c in contract.clauses if not c.after_call], build(call), {}, False)
        bindings.collect()
        given = [bindings.values.value_of(argument) for argument in node.args[1:]]
    except Exception:  # what is asked for is not known in this call
        return call
    told = dict(owner.answers)
    key = answer_key(node.func.id, tuple(given))
    if answer is None:
        told.pop(key, None)
    else:
        told[key] = answer
    return call.put(asked.path, replace(owner, answers=tuple(told.items())))
