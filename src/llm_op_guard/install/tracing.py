"""Makes Dynamo pass native checks, whenever it is imported; importing it for that would take seconds."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

from llm_op_guard.install.watch import ModuleWatch
from llm_op_guard.native import extension

_DYNAMO = "torch._dynamo"

logger = logging.getLogger("llm_op_guard")


def let_dynamo_pass() -> None:
    """Tell Dynamo now, or as soon as it is there, that the Python check is to be traced where a native one stands."""
    if _DYNAMO in sys.modules:
        extension.let_dynamo_pass()
    else:
        _watch.start()


def _loaded(_: ModuleType) -> None:
    _watch.stop()
    extension.let_dynamo_pass()


def _failed(name: str, error: BaseException) -> None:
    logger.warning("llm-op-guard could not tell %s of native checks: they break its graphs", name, exc_info=error)


_watch = ModuleWatch(lambda name: name == _DYNAMO, _loaded, _failed)
