"""The backward pass, node by node: which module's made a gradient that is not finite of one that was.

When a call of a module ends, the nodes of autograd that were made in it are claimed for it, those of the modules that
it called before. A node's hook is given the gradients that came in and those that go out; it changes neither. What a
node makes of a finite gradient is told once it has come to a leaf, or out of the outermost module: a `where` may put
zeros in its place before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from llm_op_guard.nonfinite.finding import NonFinite
from llm_op_guard.nonfinite.tensors import FINITE

# In the dictionary that autograd keeps with each node.
_CLAIM, _MADE = "llm_op_guard.claim", "llm_op_guard.made"
_LEAF = "AccumulateGrad"


# Makes the finding: of a gradient, what it is called, the node that made it (None where it came in), and its leaf.
Describe = Callable[[Any, str, str | None, Any], NonFinite]


class Gradients:
    """Claims nodes, and tells of the first gradient that is not finite.

    `kinds` says what of a tensor is not finite, `tell` is called with the finding, `is_on` says whether anybody
    listens; `run` calls a function with arguments, and deals with what it raises. Hooks that are not `removable` go
    with the graphs that they are in.
    """

    def __init__(
        self,
        kinds: Callable[[Any], int],
        tell: Callable[[NonFinite], None],
        is_on: Callable[[], bool],
        run: Callable[..., None],
        *,
        removable: bool,
    ) -> None:
        self._kinds, self._tell, self._is_on, self._run = kinds, tell, is_on, run
        self._handles: list[Any] | None = [] if removable else None

    def claim(self, nodes: list[Any], since: int, describe: Describe) -> list[Any]:
        """Claim the nodes made since then that lead to these; the older ones behind them, which others may claim."""
        older, pending = [], list(nodes)
        while pending:
            node = pending.pop()
            if type(node).__name__ == _LEAF or _CLAIM in node.metadata:
                continue
            if node._sequence_nr() < since:
                older.append(node)
                continue
            node.metadata[_CLAIM] = True
            following = [following for following, _ in node.next_functions]
            self._add(node, self._hook(node, following, describe))
            pending += [node for node in following if node is not None]
        # Several ways lead to one node; as long as we hold them, they are told apart by identity.
        return list({id(node): node for node in older}.values())

    def border(self, nodes: list[Any]) -> None:
        """Tell, too, of what leaves the outermost module for these nodes, which are nobody's."""
        for node in nodes:
            if _CLAIM not in node.metadata:
                node.metadata[_CLAIM] = True
                self._add(node, self._at_border(node.metadata))

    def _at_border(self, own: dict[str, Any]) -> Callable[[Any, Any], None]:
        def judge(_: tuple[Any, ...], coming: tuple[Any, ...]) -> None:
            made = own.pop(_MADE, None)
            if made is not None and any(x is not None and self._kinds(x) != FINITE for x in coming):
                self._tell(made)

        return self._safely(judge)

    def _safely(self, judge: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def hook(going: tuple[Any, ...], coming: tuple[Any, ...]) -> None:
            if self._is_on():
                self._run(judge, going, coming)

        return hook

    def _add(self, node: Any, hook: Callable[[Any, Any], None]) -> None:
        handle = node.register_hook(hook)
        if self._handles is not None:
            self._handles.append(handle)

    def release(self) -> None:
        """Take all hooks away."""
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, node: Any, following: list[Any], describe: Describe) -> Callable[[Any, Any], None]:
        name, own = type(node).__name__, node.metadata
        # Dictionaries, not nodes: nothing that a node has saved is kept alive.
        ends = [None if each is None else _end(each) for each in following]

        def judge(going: tuple[Any, ...], coming: tuple[Any, ...]) -> None:
            made = own.pop(_MADE, None)
            bad = next((x for x in coming if x is not None and self._kinds(x) != FINITE), None)
            if bad is None:
                made = None
            elif made is None:
                made = describe(bad, f"gradient entering {name}", None, None)
            for x, end in zip(going, ends, strict=False):
                if x is None or end is None or self._kinds(x) == FINITE:
                    continue
                if not isinstance(end, dict):
                    self._tell(made or describe(x, "gradient", name, end()))
                    return
                end.setdefault(_MADE, made or describe(x, f"gradient leaving {name}", name, None))

        return self._safely(judge)


def _end(node: Any) -> Any:
    """Where a gradient goes: a leaf, held weakly, or the dictionary of another node."""
    return weakref.ref(node.variable) if type(node).__name__ == _LEAF else node.metadata
