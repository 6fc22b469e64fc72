"""What `llm-op-guard run` has Python run at the start of each process that the program starts: guards are installed.

The folder of this file is the first of PYTHONPATH there. Python runs one module of this name, so the one that would
have been run without us comes first. A Python without this library, or a variable that is wrong, changes nothing.
"""

import importlib
import os
import sys

_NAME = "sitecustomize"


def _run_the_next() -> None:
    """Import the module of this name that the rest of the path has, if it has one, in our place."""
    ours = os.path.dirname(os.path.abspath(__file__))
    removed = [entry for entry in sys.path if os.path.abspath(entry) == ours]
    sys.path[:] = [entry for entry in sys.path if entry not in removed]
    this = sys.modules.pop(_NAME)
    try:
        importlib.import_module(_NAME)
    except ImportError as error:
        if error.name != _NAME:
            raise
        sys.modules[_NAME] = this
    finally:
        sys.path[:0] = removed


def _install() -> None:
    try:
        importlib.import_module("llm_op_guard")  # which reads LLM_OP_GUARD_INSTALL
    except ImportError:
        pass  # another Python, without the library
    except Exception as error:
        importlib.import_module("warnings").warn(f"llm-op-guard guards nothing in this process: {error}", stacklevel=1)


try:
    _run_the_next()
finally:
    _install()
