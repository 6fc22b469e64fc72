"""What the syntax tree of a `forward` shows for certain of its arguments: where they go, and that they go unchanged.

Hardly two models have the same forward, so a fingerprint would know none of them. Each question here is of a function
that does what is asked in plain sight; "no" means that it cannot be told.

What is asked for stands as a template (`templates`), where every call comes to it: no `return` before it, and no
condition but what is None. An argument goes unchanged where neither it nor what may share its memory is changed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FunctionType

from llm_op_guard.install.recognise import Refused, function_syntax, once_for_code
from llm_op_guard.integrations.transformers.templates import filled, fits

# What forwards call the cache that they are given; Transformers 4 has the second name alone.
NAMES_OF_CACHE = ("cache", "past_key_values")

Definition = ast.FunctionDef | ast.AsyncFunctionDef

# What may be asked before: what is None, and in Zamba2 whether there is a rotary embedding.
_TESTS = ("NAME is None", "NAME is not None", "self.config.use_mem_rope")
_LAYERS = "self.layers[:self.config.num_hidden_layers]"
_LOGITS = (
    "logits",
    "self.MODULE(...)",
    "self.MODULES[INDEX](...)",
    "torch.tanh(LOGITS)",
    "nn.functional.tanh(LOGITS)",
    "soft_cap(LOGITS, CAP)",
    "LOGITS.float()",
    "LOGITS.contiguous()",
    "LOGITS * SCALE",
    "LOGITS / SCALE",
)


@once_for_code
def table_of_ids(function: FunctionType) -> str | None:
    """The path of the embedding in `self.<path>(input_ids)`, where ids are looked up just as they came in.

    That is so when every call of a module on ids alone is of that one, and `input_ids` is never changed, but for a
    `view` of itself. Then an id outside the table fails, or reads foreign memory, for certain.
    """
    definition = _syntax(function)
    if definition is None or _is_changed("input_ids", definition):
        return None
    if not {"self", "input_ids", "inputs_embeds"} <= {argument.arg for argument in definition.args.args}:
        return None
    look_ups = list(_look_ups(definition))
    tables = {ast.unparse(node.func) for node in look_ups}
    if len(tables) != 1 or not any(_comes_to(node, definition) for node in look_ups):
        return None
    return _path(tables.pop())


@once_for_code
def module_asked_for_table(function: FunctionType) -> tuple[str, ...] | None:
    """The path of the module whose `get_input_embeddings()` looks ids up as they came in; `()` is the model itself.

    That is so in `if inputs_embeds is None: inputs_embeds = self.get_input_embeddings()(input_ids)`, a statement of the
    forward itself, where there is no other look-up. Models of text and pictures are written so.
    """
    definition = _syntax(function)
    if definition is None or _is_changed("input_ids", definition):
        return None
    look_ups = list(_look_ups(definition))
    if len(look_ups) != 1 or not _comes_to(look_ups[0], definition):
        return None
    for block in definition.body:
        if isinstance(block, ast.If) and fits("inputs_embeds is None", block.test):
            for statement in block.body:
                asked = filled("inputs_embeds = MODULE.get_input_embeddings()(input_ids)", statement)
                if asked is not None and asked["MODULE"] == "self":
                    return ()
                if asked is not None and (path := _path(asked["MODULE"])) is not None:
                    return tuple(path.split("."))
    return None


@once_for_code
def asks_for_table_of(function: FunctionType) -> str | None:
    """The child whose table a `get_input_embeddings` returns: `return self.<child>.get_input_embeddings()`."""
    definition = _syntax(function)
    if definition is None or len(definition.body) != 1:
        return None
    return (filled("return self.CHILD.get_input_embeddings()", definition.body[0]) or {}).get("CHILD")


@once_for_code
def look_up_of_ids(function: FunctionType) -> str | None:
    """The look-up of token ids in a forward, as it is written: a call on `input_ids` and nothing else."""
    definition = _syntax(function)
    return None if definition is None else next((ast.unparse(call) for call in _look_ups(definition)), None)


@once_for_code
def hands_ids_on(function: FunctionType, inner: str) -> bool:
    """Whether a forward does `self.<inner>(input_ids=input_ids, …)`, or with ids in front, just as they came in."""
    definition = _syntax(function)
    if definition is None or _is_changed("input_ids", definition):
        return False
    calls = list(_calls(definition, f"self.{inner}"))
    return any(_comes_to(call, definition) for call in calls) and all(
        _argument(call, "input_ids", 0) == "input_ids" for call in calls
    )


@once_for_code
def embeds_as_given(function: FunctionType) -> bool:
    """Whether embeddings of the caller go where those of the table would.

    They are made only where none are given, then scaled at most, and taken for the hidden states as they are.
    """
    definition = _syntax(function)
    if definition is None or not _is_default("inputs_embeds", definition, "inputs_embeds * self.SCALE"):
        return False
    return any(
        fits("hidden_states = inputs_embeds", node) and _comes_to(node, definition) for node in ast.walk(definition)
    )


@once_for_code
def rotates_positions(function: FunctionType) -> bool:
    """Whether `position_ids` of the caller go to `self.rotary_emb` just as they came in."""
    definition = _syntax(function)
    return definition is not None and _goes_to("self.rotary_emb", "position_ids", 1, definition)


@once_for_code
def looks_positions_up(function: FunctionType) -> bool:
    """Whether `position_ids` of the caller go to the table `self.wpe` just as they came in, and count up without.

    In Transformers 4 `cache_position` stands for them where they are missing, and counts up where it is missing too.
    """
    definition = _syntax(function)
    if definition is None or not _goes_to("self.wpe", "position_ids", 0, definition):
        return False
    if _is_made("position_ids", definition, ("cache_position.unsqueeze(0)",)):
        start, end = "past_seen_tokens", "past_seen_tokens + inputs_embeds.shape[1]"
        count = f"torch.arange({start}, {end}, device=inputs_embeds.device)"
        if not _is_made("cache_position", definition, (count,)) or not _is_default("cache_position", definition):
            return False
    else:
        counts = tuple(
            f"torch.arange({length}, device=DEVICE) + past_seen_tokens"
            for length in ("inputs_embeds.shape[1]", "input_shape[-1]")
        )
        if not _is_made("position_ids", definition, (*counts, "position_ids.unsqueeze(0)")):
            return False
    past = tuple(f"{name}.get_seq_length() if {name} is not None else 0" for name in NAMES_OF_CACHE)
    sizes = ("input_ids.size()", "inputs_embeds.size()[:-1]")
    return _is_made("past_seen_tokens", definition, past) and _is_made("input_shape", definition, sizes, missing=True)


@once_for_code
def runs_every_layer(function: FunctionType) -> bool:
    """Whether a forward hands its cache on to each of `self.layers`, as many as the config has, one after the other."""
    definition = _syntax(function)
    if definition is None:
        return False
    loops = [loop for loop in definition.body if isinstance(loop, ast.For) and _comes_to(loop, definition)]
    return any(
        any(
            fits(f"{layer}(..., {name}={name})", statement.value)
            for name in NAMES_OF_CACHE
            if _is_default(name, definition)
        )
        for loop in loops
        if (layer := _layer_of(loop)) is not None
        for statement in loop.body
        if isinstance(statement, ast.Assign)
    )


@once_for_code
def hands_cache_on(function: FunctionType) -> bool:
    """Whether a layer always calls `self.self_attn`, and hands its cache on to it just as it came in."""
    definition = _syntax(function)
    if definition is None:
        return False
    for statement in definition.body:
        if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            return False
        match statement:
            case ast.Assign(value=ast.Call() as call) if fits("self.self_attn", call.func):
                return any(
                    _argument(call, name, len(call.args)) == name and not _is_changed(name, definition)
                    for name in NAMES_OF_CACHE
                )
    return False


@once_for_code
def fills_its_layer(function: FunctionType) -> bool:
    """Whether an attention updates the layer `self.layer_idx` of any cache that it is given.

    Or it returns what the forward that it overrides does, of which the same is to be asked.
    """
    definition = _syntax(function)
    if definition is None:
        return False
    return any(
        fits(f"{name} is not None", block.test)
        and any(
            fits(f"KEY, VALUE = {name}.update(NEW_KEY, NEW_VALUE, self.layer_idx, ...)", inner) for inner in block.body
        )
        and _comes_to(block, definition, unless="return super().forward(...)")
        and all(fits(f"{name} = {name}.self_attention_cache", node) for node in _bindings(name, definition))
        for block in definition.body
        if isinstance(block, ast.If)
        for name in NAMES_OF_CACHE
    )


@once_for_code
def fails_without_tokens(function: FunctionType) -> bool:
    """Whether an attention leaves the number of heads to `view`, which cannot be told where there are no tokens."""
    definition = _syntax(function)
    if definition is None or _is_changed("hidden_states", definition):
        return False
    made = {"input_shape": "hidden_states.shape[:-1]", "hidden_shape": "(*input_shape, -1, self.head_dim)"}
    return all(_is_made(name, definition, (template,)) for name, template in made.items()) and any(
        fits("self.q_proj(hidden_states).view(hidden_shape)", node) and _comes_to(node, definition)
        for node in ast.walk(definition)
    )


@once_for_code
def learns_next_tokens(function: FunctionType) -> bool:
    """Whether a forward hands `labels` of the caller to `self.loss_function`, for classes as many as its vocabulary.

    The logits beside them are those that a module made, scaled at most.
    """
    definition = _syntax(function)
    if definition is None or _is_changed("labels", definition) or not _is_made("logits", definition, _LOGITS):
        return False
    losses = list(_calls(definition, "self.loss_function"))
    return len(losses) == 1 and all(
        _argument(call, "logits", 0) == "logits"
        and _argument(call, "labels", 1) == "labels"
        and _argument(call, "vocab_size", 2) in ("self.config.vocab_size", "self.vocab_size")
        and not any(keyword.arg == "shift_labels" for keyword in call.keywords)
        and _comes_to(call, definition)
        for call in losses
    )


@once_for_code
def hands_on_to_super(function: FunctionType) -> bool:
    """Whether a forward of one argument does nothing with it but hand it to the forward that it overrides."""
    definition = _syntax(function)
    if definition is None or len(definition.args.args) != 2:
        return False
    name = definition.args.args[1].arg
    uses = [node for node in ast.walk(definition) if isinstance(node, ast.Name) and node.id == name]
    return len(uses) == 1 and any(
        fits(f"super().forward({name})", node) and _comes_to(node, definition) for node in ast.walk(definition)
    )


# ---------------------------------------------------------------- where it stands


def _syntax(function: FunctionType) -> Definition | None:
    definition = function_syntax(function)
    return None if isinstance(definition, Refused) else definition


def _calls(definition: ast.AST, function: str) -> Iterator[ast.Call]:
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and fits(function, node.func):
            yield node


def _layer_of(loop: ast.For) -> str | None:
    """What a loop over all of `self.layers` calls each of them, where it goes to its end and changes none of them."""
    found = filled(_LAYERS, loop.iter) is not None and filled("LAYER", loop.target)
    if not found and fits(f"enumerate({_LAYERS})", loop.iter) and isinstance(loop.target, ast.Tuple):
        found = filled("(INDEX, LAYER)", loop.target)
    layer = found["LAYER"] if found else ""
    inside = [node for statement in loop.body for node in ast.walk(statement)]
    ends = any(isinstance(node, ast.Break | ast.Continue | ast.Return) for node in inside)
    changed = any(
        isinstance(node, ast.Name) and node.id == layer and not isinstance(node.ctx, ast.Load) for node in inside
    )
    return None if not layer or ends or changed else layer


def _path(written: str) -> str | None:
    """What stands behind `self.` where that is a path of attributes."""
    first, _, path = written.partition(".")
    return path if first == "self" and path and all(name.isidentifier() for name in path.split(".")) else None


def _look_ups(definition: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(definition):
        match node:
            case ast.Call(func=ast.Attribute() | ast.Call(), args=[ast.Name(id="input_ids")], keywords=[]):
                if _shared(node.func) == {"self"}:
                    yield node


def _argument(call: ast.Call, name: str, place: int) -> str | None:
    """What a call hands over, by name or at a place, as it is written."""
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if named is None and place < len(call.args):
        named = call.args[place]
    return None if named is None else ast.unparse(named)


def _comes_to(node: ast.AST, definition: Definition, unless: str = "") -> bool:
    """Whether a call comes to a place in a function, unless something is None or it fails before.

    Or returns before as the template `unless` says.
    """
    inside = [node]
    parents = {id(child): parent for parent in ast.walk(definition) for child in ast.iter_child_nodes(parent)}
    while inside[-1] is not definition:
        inside.append(parents[id(inside[-1])])
    for outer in inside[1:-1]:
        match outer:
            case ast.If(test=test) | ast.IfExp(test=test) if _asks_for_none(test):
                pass
            case ast.If() | ast.IfExp() | ast.While() | ast.Try() | ast.BoolOp() | ast.Match():
                return False
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() | ast.ClassDef() | ast.comprehension():
                return False
    line = getattr(node, "lineno", 0)
    return not any(
        isinstance(other, ast.Return)
        and other.lineno < line
        and not any(other is outer for outer in inside)
        and not (unless and fits(unless, other))
        for other in ast.walk(definition)
    )


def _asks_for_none(test: ast.expr) -> bool:
    match test:
        case ast.BoolOp(values=values):
            return all(_asks_for_none(value) for value in values)
    return any(fits(template, test) for template in _TESTS)


def _goes_to(function: str, name: str, place: int, definition: Definition) -> bool:
    """Whether every call of a function gets the argument as the caller gave it, and there is one."""
    calls = list(_calls(definition, function))
    return (
        all(_argument(call, name, place) == name for call in calls)
        and any(_comes_to(call, definition) for call in calls)
        and _is_default(name, definition)
    )


# ---------------------------------------------------------------- what is changed


def _is_made(name: str, definition: Definition, templates: tuple[str, ...], *, missing: bool = False) -> bool:
    """Whether a name is bound to what one of these templates says and to nothing else; `missing`: or never."""
    bound = list(_bindings(name, definition))
    return (bool(bound) or missing) and all(
        isinstance(node, ast.Assign) and any(fits(template, node.value) for template in templates) for node in bound
    )


def _bindings(name: str, definition: Definition) -> Iterator[ast.AST]:
    """Where a name is bound: the assignment to it alone, or the name itself where that is done in another way."""
    assigned = {
        id(node.targets[0]): node
        for node in ast.walk(definition)
        if isinstance(node, ast.Assign) and len(node.targets) == 1
    }
    for node in ast.walk(definition):
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            yield assigned.get(id(node), node)


def _is_changed(name: str, definition: Definition) -> bool:
    """Whether an argument, or what may share its memory, is changed; a `view` of it in its place is none."""
    views = {
        id(node.targets[0])
        for node in ast.walk(definition)
        if isinstance(node, ast.Assign) and fits(f"{name} = {name}.view(-1, input_shape[-1])", node)
    }
    return any(id(node) not in views for node in _changes(name, definition))


def _is_default(name: str, definition: Definition, *multiples: str) -> bool:
    """Whether an argument is changed only where it is None, but for a multiple of itself in its place."""
    allowed: set[int] = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.If) and _is_none(name, node.test):
            allowed |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
        elif isinstance(node, ast.Assign) and any(fits(f"{name} = {multiple}", node) for multiple in multiples):
            allowed.add(id(node.targets[0]))
    return all(id(node) in allowed for node in _changes(name, definition))


def _is_none(name: str, test: ast.expr) -> bool:
    """Whether a test holds only where an argument is None."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return any(_is_none(name, value) for value in values)
    return fits(f"{name} is None", test)


def _changes(name: str, definition: Definition) -> Iterator[ast.AST]:
    """Where an argument is bound anew, or something is done in place with what may share its memory."""
    names = _names_of(name, definition)
    for node in ast.walk(definition):
        match node:
            case ast.Name(id=found, ctx=ast.Store() | ast.Del()) if found == name:
                yield node
            case ast.AugAssign(target=target) if _shared(target) & names:
                yield target
            case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()) if _shared(value) & names:
                yield node
            case ast.Attribute(value=value, attr=attr) if _in_place(attr) and _shared(value) & names:
                yield node
            case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called), args=args) if _in_place(called):
                if any(_shared(argument) & names for argument in args):
                    yield node
            case ast.keyword(arg="out", value=value) if _shared(value) & names:
                yield node


def _in_place(name: str) -> bool:
    return name == "data" or (name.endswith("_") and not name.endswith("__"))


def _names_of(name: str, definition: Definition) -> set[str]:
    """The names of what may share memory with an argument, its own among them."""
    bound: list[tuple[ast.AST, set[str]]] = []
    for node in ast.walk(definition):
        match node:
            case ast.Assign(targets=targets, value=value):
                bound += [(target, _shared(value)) for target in targets]
            case ast.NamedExpr(target=target, value=value):
                bound.append((target, _shared(value)))
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                bound.append((target, _shared(value)))
    names = {name}
    while True:
        more = {
            stored.id
            for target, shared in bound
            if shared & names
            for stored in ast.walk(target)
            if isinstance(stored, ast.Name) and isinstance(stored.ctx, ast.Store)
        }
        if more <= names:
            return names
        names |= more


def _shared(node: ast.expr) -> set[str]:
    """The names whose memory a value may share: `x.view(…)`, `x[0]`, one of several. What calls do is not followed."""
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.Attribute(attr="shape" | "device" | "dtype") | ast.Call(func=ast.Attribute(attr="size")):
            return set()
        case ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Starred(value=value):
            return _shared(value)
        case ast.NamedExpr(value=value):
            return _shared(value)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=made), args=args):
            return set() if made.endswith("_like") else set().union(*(_shared(argument) for argument in args))
        case ast.Call(func=ast.Attribute(value=value)):
            return _shared(value)
        case ast.Call(func=ast.Call() as function):
            return _shared(function)
        case ast.IfExp(body=body, orelse=orelse):
            return _shared(body) | _shared(orelse)
        case ast.BoolOp(values=items) | ast.Tuple(elts=items) | ast.List(elts=items):
            return set().union(*(_shared(item) for item in items))
    return set()
