"""Contracts for LLM operators: checked at the call, explained when broken."""

from llm_op_guard.api import (
    guard,
    ingress,
    install,
    install_from_environment,
    installed,
    load,
    record,
    record_to,
    status,
    track,
    uninstall,
    verify,
    waive,
    waivers,
)
from llm_op_guard.contract.model import Contract
from llm_op_guard.errors import (
    ContractError,
    GuardError,
    GuardInternalWarning,
    GuardWarning,
    InstallError,
    LlmOpGuardError,
    PolicyError,
    PredicateError,
)
from llm_op_guard.guard.violation import Violation
from llm_op_guard.nonfinite.finding import NonFinite
from llm_op_guard.nonfinite.first import first_nonfinite
from llm_op_guard.policy import disable, enable, policy, set_policy
from llm_op_guard.predicates import predicate
from llm_op_guard.values.late import flush, postmortem, watch, watch_uncaught
from llm_op_guard.waivers import Waiver

__version__ = "0.1.0"

__all__ = [
    "Contract",
    "ContractError",
    "GuardError",
    "GuardInternalWarning",
    "GuardWarning",
    "InstallError",
    "LlmOpGuardError",
    "NonFinite",
    "PolicyError",
    "PredicateError",
    "Violation",
    "Waiver",
    "__version__",
    "disable",
    "enable",
    "first_nonfinite",
    "flush",
    "guard",
    "ingress",
    "install",
    "installed",
    "load",
    "policy",
    "postmortem",
    "predicate",
    "record",
    "record_to",
    "set_policy",
    "status",
    "track",
    "uninstall",
    "verify",
    "waive",
    "waivers",
    "watch",
    "watch_uncaught",
]

# LLM_OP_GUARD_INSTALL, for processes that a guarded one starts.
install_from_environment()
del install_from_environment
