"""Contracts for LLM operators: checked at the call, explained when broken."""

import logging

from llm_op_guard.api import guard, install, installed, load, record, status, uninstall
from llm_op_guard.contract.model import Contract
from llm_op_guard.errors import (
    ContractError,
    GuardError,
    GuardInternalWarning,
    GuardWarning,
    InstallError,
    LlmOpGuardError,
    PolicyError,
)
from llm_op_guard.guard.violation import Violation
from llm_op_guard.policy import disable, enable, policy, set_policy

# A library leaves it to the program whether and where its log is written.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.1.0"

__all__ = [
    "Contract",
    "ContractError",
    "GuardError",
    "GuardInternalWarning",
    "GuardWarning",
    "InstallError",
    "LlmOpGuardError",
    "PolicyError",
    "Violation",
    "__version__",
    "disable",
    "enable",
    "guard",
    "install",
    "installed",
    "load",
    "policy",
    "record",
    "set_policy",
    "status",
    "uninstall",
]
