"""What the syntax tree of a `forward` shows for certain of its arguments: where they go, and that they go unchanged.

Hardly two models have the same forward, so a fingerprint would know none of them. Each question here is of a function
that does what is asked in plain sight; "no" means that it cannot be told.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from types import FunctionType

from llm_op_guard.install.recognise import Refused, function_syntax

# What forwards call the cache that they are given; Transformers 4 has the second name alone.
NAMES_OF_CACHE = ("cache", "past_key_values")


@cache
def table_of_ids(function: FunctionType) -> str | None:
    """The name of the embedding in `self.<name>(input_ids)`, where ids are looked up just as they came in.

    That is so when it is the only such call, `input_ids` is never assigned to, in whole or in part, but for a `view`
    of itself, and no method that changes a tensor in place is called on it. Then an id outside the table fails, or
    reads foreign memory, for certain.
    """
    definition = _syntax(function)
    if definition is None or _is_changed("input_ids", definition):
        return None
    if not {"self", "input_ids", "inputs_embeds"} <= {argument.arg for argument in definition.args.args}:
        return None
    found = {node.func.attr for node in _look_ups(definition) if isinstance(node.func, ast.Attribute)}
    return found.pop() if len(found) == 1 else None


@cache
def module_asked_for_table(function: FunctionType) -> tuple[str, ...] | None:
    """The path of the module whose `get_input_embeddings()` looks ids up as they came in; `()` is the model itself.

    That is so in `if inputs_embeds is None: inputs_embeds = self.get_input_embeddings()(input_ids)`, a statement of the
    forward itself, where there is no other look-up. Models of text and pictures are written so.
    """
    definition = _syntax(function)
    if definition is None or _is_changed("input_ids", definition):
        return None
    written = [
        statement
        for block in definition.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "inputs_embeds is None"
        for statement in block.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement).startswith("inputs_embeds = self.")
    ]
    look_ups = list(_look_ups(definition))
    if len(look_ups) != 1 or not any(statement.value is look_ups[0] for statement in written):
        return None
    asked = ast.unparse(look_ups[0].func).split(".")
    return tuple(asked[1:-1]) if asked[-1] == "get_input_embeddings()" else None


@cache
def asks_for_table_of(function: FunctionType) -> str | None:
    """The child whose table a `get_input_embeddings` returns: `return self.<child>.get_input_embeddings()`."""
    definition = _syntax(function)
    if definition is None or len(definition.body) != 1:
        return None
    before, _, after = ast.unparse(definition.body[0]).partition(".get_input_embeddings()")
    child = before.removeprefix("return self.")
    return child if child.isidentifier() and child != before and not after else None


@cache
def look_up_of_ids(function: FunctionType) -> str | None:
    """The look-up of token ids in a forward, as it is written: a call on `input_ids` and nothing else."""
    definition = _syntax(function)
    return None if definition is None else next((ast.unparse(call) for call in _look_ups(definition)), None)


@cache
def hands_ids_on(function: FunctionType, inner: str) -> bool:
    """Whether a forward does `self.<inner>(input_ids=input_ids, …)`, or with ids in front, just as they came in."""
    definition = _syntax(function)
    if definition is None or _is_changed("input_ids", definition):
        return False
    return any(
        [ast.unparse(argument) for argument in call.args[:1]] == ["input_ids"]
        or any(keyword.arg == "input_ids" and ast.unparse(keyword.value) == "input_ids" for keyword in call.keywords)
        for call in _calls(definition, f"self.{inner}")
    )


@cache
def embeds_as_given(function: FunctionType) -> bool:
    """Whether embeddings of the caller go where those of the table would.

    They are made only where none are given, then scaled at most, and taken for the hidden states as they are.
    """
    definition = _syntax(function)
    if definition is None or not _is_default_or_scaled("inputs_embeds", definition):
        return False
    return any(
        isinstance(node, ast.Assign)
        and [ast.unparse(target) for target in node.targets] == ["hidden_states"]
        and ast.unparse(node.value) == "inputs_embeds"
        for node in ast.walk(definition)
    )


@cache
def rotates_positions(function: FunctionType) -> bool:
    """Whether `position_ids` of the caller go to `self.rotary_emb` just as they came in."""
    definition = _syntax(function)
    return definition is not None and _goes_to("self.rotary_emb", "position_ids", 1, definition)


@cache
def looks_positions_up(function: FunctionType) -> bool:
    """Whether `position_ids` of the caller go to the table `self.wpe` just as they came in, and count up without.

    In Transformers 4 `cache_position` stands for them where they are missing, and counts up where it is missing too.
    """
    definition = _syntax(function)
    if definition is None or not _goes_to("self.wpe", "position_ids", 0, definition):
        return False
    written = [ast.unparse(node) for node in ast.walk(definition) if isinstance(node, ast.Assign)]
    if "position_ids = cache_position.unsqueeze(0)" in written:
        start, end = "past_seen_tokens", "past_seen_tokens + inputs_embeds.shape[1]"
        counts = f"cache_position = torch.arange({start}, {end}, device=inputs_embeds.device)"
        return counts in written and _is_default_or_scaled("cache_position", definition)
    counted = ("inputs_embeds.shape[1]", "input_shape[-1]")
    return any(
        text.startswith(f"position_ids = torch.arange({length}") and text.endswith("+ past_seen_tokens")
        for text in written
        for length in counted
    )


@cache
def runs_every_layer(function: FunctionType) -> bool:
    """Whether a forward hands its cache on to each of `self.layers`, as many as the config has."""
    definition = _syntax(function)
    if definition is None:
        return False
    return any(
        isinstance(node, ast.For)
        and "self.layers[:self.config.num_hidden_layers]" in ast.unparse(node.iter)
        and any(
            keyword.arg in NAMES_OF_CACHE and ast.unparse(keyword.value) == keyword.arg
            for call in ast.walk(node)
            if isinstance(call, ast.Call)
            for keyword in call.keywords
        )
        for node in ast.walk(definition)
    )


@cache
def hands_cache_on(function: FunctionType) -> bool:
    """Whether a layer always calls `self.self_attn`, and hands its cache on to it just as it came in."""
    definition = _syntax(function)
    if definition is None:
        return False
    for statement in definition.body:
        if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            return False
        match statement:
            case ast.Assign(value=ast.Call() as call) if ast.unparse(call.func) == "self.self_attn":
                return any(
                    _argument(call, name, len(call.args)) == name and not _is_changed(name, definition)
                    for name in NAMES_OF_CACHE
                )
    return False


@cache
def fills_its_layer(function: FunctionType) -> bool:
    """Whether an attention updates the layer `self.layer_idx` of any cache that it is given."""
    definition = _syntax(function)
    if definition is None:
        return False
    return any(
        isinstance(statement, ast.If)
        and ast.unparse(statement.test) == f"{name} is not None"
        and any(
            isinstance(inner, ast.Assign)
            and isinstance(inner.value, ast.Call)
            and ast.unparse(inner.value.func) == f"{name}.update"
            and [ast.unparse(argument) for argument in inner.value.args[2:3]] == ["self.layer_idx"]
            for inner in statement.body
        )
        for statement in definition.body
        for name in NAMES_OF_CACHE
    )


@cache
def fails_without_tokens(function: FunctionType) -> bool:
    """Whether an attention leaves the number of heads to `view`, which cannot be told where there are no tokens."""
    definition = _syntax(function)
    if definition is None:
        return False
    written = {ast.unparse(node) for node in ast.walk(definition) if isinstance(node, ast.Assign)}
    return {
        "input_shape = hidden_states.shape[:-1]",
        "hidden_shape = (*input_shape, -1, self.head_dim)",
    } <= written and any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "view"
        and ast.unparse(node.func.value) == "self.q_proj(hidden_states)"
        and [ast.unparse(argument) for argument in node.args] == ["hidden_shape"]
        for node in ast.walk(definition)
    )


@cache
def learns_next_tokens(function: FunctionType) -> bool:
    """Whether a forward hands `labels` of the caller to `self.loss_function`, for classes as many as its vocabulary."""
    definition = _syntax(function)
    if definition is None or _is_changed("labels", definition):
        return False
    vocabulary = ("self.config.vocab_size", "self.vocab_size")
    losses = list(_calls(definition, "self.loss_function"))
    return len(losses) == 1 and all(
        _argument(call, "logits", 0) == "logits"
        and _argument(call, "labels", 1) == "labels"
        and _argument(call, "vocab_size", 2) in vocabulary
        and not any(keyword.arg == "shift_labels" for keyword in call.keywords)
        for call in losses
    )


@cache
def hands_on_to_super(function: FunctionType) -> bool:
    """Whether a forward of one argument does nothing with it but hand it to the forward that it overrides."""
    definition = _syntax(function)
    if definition is None or len(definition.args.args) != 2:
        return False
    name = definition.args.args[1].arg
    uses = [node for node in ast.walk(definition) if isinstance(node, ast.Name) and node.id == name]
    return len(uses) == 1 and f"super().forward({name})" in ast.unparse(definition)


# ---------------------------------------------------------------- reading a tree


def _syntax(function: FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    definition = function_syntax(function)
    return None if isinstance(definition, Refused) else definition


def _calls(definition: ast.AST, function: str) -> Iterator[ast.Call]:
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
            yield node


def _look_ups(definition: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(definition):
        match node:
            case ast.Call(func=ast.Attribute() | ast.Call(), args=[ast.Name(id="input_ids")], keywords=[]):
                if ast.unparse(node).startswith("self."):
                    yield node


def _argument(call: ast.Call, name: str, place: int) -> str | None:
    """What a call hands over, by name or at a place, as it is written."""
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if named is None and place < len(call.args):
        named = call.args[place]
    return None if named is None else ast.unparse(named)


def _goes_to(function: str, name: str, place: int, definition: ast.AST) -> bool:
    """Whether every call of a function gets the argument as the caller gave it, and there is one."""
    calls = list(_calls(definition, function))
    return (
        bool(calls)
        and all(_argument(call, name, place) == name for call in calls)
        and _is_default_or_scaled(name, definition)
    )


def _is_changed(name: str, definition: ast.AST) -> bool:
    """Whether an argument is assigned to, but for a view of itself, or something that changes a tensor is called."""
    views = {
        id(target)
        for node in ast.walk(definition)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == f"{name}.view(-1, input_shape[-1])"
        for target in node.targets
    }
    return any(id(node) not in views for node in _changes(name, definition))


def _is_default_or_scaled(name: str, definition: ast.AST) -> bool:
    """Whether an argument is assigned to only where it is None, or a multiple of itself."""
    allowed: set[int] = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.If) and ast.unparse(node.test) == f"{name} is None":
            allowed |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(f"{name} * self."):
            allowed |= {id(target) for target in node.targets}
    return all(id(node) in allowed for node in _changes(name, definition))


def _changes(name: str, definition: ast.AST) -> Iterator[ast.AST]:
    """Where an argument is assigned to, in whole or in part, or a method is called that may change a tensor."""
    for node in ast.walk(definition):
        match node:
            case ast.Name(id=found, ctx=ast.Store() | ast.Del()) if found == name:
                yield node
            case ast.Subscript(value=ast.Name(id=found), ctx=ast.Store() | ast.Del()) if found == name:
                yield node
            case ast.Attribute(value=ast.Name(id=found), attr=attr) if found == name:
                if attr.endswith("_") or attr == "data":
                    yield node
