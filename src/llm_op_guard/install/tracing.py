"""Makes native checks possible once PyTorch is there, and known to Dynamo once that is.

Importing either for that would take seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

from llm_op_guard.install.watch import ModuleWatch
from llm_op_guard.log import log
from llm_op_guard.native import extension

_TORCH, _DYNAMO = "torch", "torch._dynamo"


class Follower:
    """Follows the imports that native checks wait for. `adjust` puts native checks where there are Python ones."""

    def __init__(self, adjust: Callable[[], None]) -> None:
        self._adjust = adjust
        self._torch = ModuleWatch(_TORCH.__eq__, self._torch_is_there, _failed)
        self._dynamo = ModuleWatch(_DYNAMO.__eq__, self._dynamo_is_there, _failed)
        extension.when_awaited.append(self.expect_torch)
        extension.when_connected.append(self._follow_dynamo)

    def expect_torch(self) -> None:
        """Wait for PyTorch, unless its import has begun: then that is not seen any more."""
        if _TORCH not in sys.modules:
            self._torch.start()

    def _torch_is_there(self, _: ModuleType) -> None:
        self._torch.stop()
        extension.note_loaded(_TORCH)
        self._adjust()

    def _follow_dynamo(self) -> None:
        if extension.is_loaded(_DYNAMO):
            extension.let_dynamo_pass()
        else:
            self._dynamo.start()

    def _dynamo_is_there(self, _: ModuleType) -> None:
        self._dynamo.stop()
        extension.let_dynamo_pass()


def _failed(name: str, error: BaseException) -> None:
    log().warning("llm-op-guard could not prepare native checks for %s", name, exc_info=error)
