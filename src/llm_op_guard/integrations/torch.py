"""torch.nn.functional: attention, embeddings, norms and cross entropy, for the whole process; opt-in.

Nothing here imports torch. The Python functions are recognised by their code; attention is a builtin, whose own checks
were read in the versions of torch that are named here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, cast

from llm_op_guard.contract.model import Contract
from llm_op_guard.contract.parse import parse_stubs
from llm_op_guard.install.builtin import Replaced, underneath
from llm_op_guard.install.installer import Candidate
from llm_op_guard.install.producer import Producer
from llm_op_guard.install.recognise import Refused, fingerprint
from llm_op_guard.policy import Action, Policy, Setting

LIBRARY = "torch"
HOME = "torch.nn.functional"
# The versions with whose own checks the rules were compared.
VERSIONS = ("2.13",)
CODE = {
    "embedding": "c24d6809b10e52ba",
    "rms_norm": "21d401e946c58478",
    "layer_norm": "b60403cb0921b593",
    "cross_entropy": "d5ceaaade860d597",
}
ATTENTION = "scaled_dot_product_attention"
# Looking at ids and labels waits for the device; whoever wants that everywhere says so.
_METADATA = Policy(A=Setting(Action.RAISE), B=Setting(Action.OFF))


class TorchIntegration:
    """The operators of torch.nn.functional."""

    library = LIBRARY

    def wants(self, module: str) -> bool:
        """Whether a module of that name holds operators."""
        return module == HOME

    def candidates(self, module: ModuleType) -> Iterator[Candidate]:
        """The five operators, or why they are refused."""
        for name in (ATTENTION, *CODE):
            found = underneath(vars(module).get(name))
            reason = _unknown(name, found)
            if reason is not None:
                yield Candidate(f"{HOME}.{name}", name, reason=reason)
                continue
            place = Replaced(module, name, cast(Any, found)) if name == ATTENTION else None
            front = None if place is None else _attention(place)
            yield Candidate(
                f"{HOME}.{name}",
                name,
                front or cast(FunctionType, found),
                _contracts()[name],
                _METADATA,
                replaced=place,
            )

    def producers(self, module: ModuleType) -> Iterator[Producer]:  # noqa: ARG002 - the protocol's
        """None: what these make is known by their guards."""
        yield from ()

    def specimen(
        self,
        contract: str,
        function: Callable[..., Any],  # noqa: ARG002 - the protocol's
        owner: type | None,  # noqa: ARG002
    ) -> Callable[[], dict[str, Any]] | None:
        """What makes real arguments of an operator with which it runs."""
        return lambda: _specimen(contract.partition(":")[2])

    def variants(self, owner: Any, wanted: Mapping[str, Any]) -> Iterator[None]:  # noqa: ARG002
        """None: no contract asks anything of an object here."""
        yield from ()


def _unknown(name: str, found: object) -> str | None:
    """Why a function is not guarded; None for one that is known."""
    version = str(getattr(sys.modules.get(LIBRARY), "__version__", ""))
    if not version.startswith(tuple(f"{known}." for known in VERSIONS)):
        return f"its rules were compared with torch {', '.join(VERSIONS)}; this is {version}"
    if name == ATTENTION:
        return None if isinstance(found, BuiltinFunctionType) else f"not a builtin but {type(found).__name__}"
    code = fingerprint(found)
    if isinstance(code, Refused):
        return code.reason
    return None if code.digest == CODE[name] else f"its code is not one that is known (fingerprint {code.digest})"


def _specimen(operator: str) -> dict[str, Any]:
    torch: Any = sys.modules[LIBRARY]
    rows, columns, norm = torch.randn(2, 3, 8), torch.randn(8), {"normalized_shape": (8,)}
    query, keys = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    given: dict[str, dict[str, Any]] = {
        "scaled_dot_product_attention": {
            "query": query, "key": keys, "value": keys.clone(), "attn_mask": torch.ones(3, 5, dtype=torch.bool),
            "dropout_p": 0.0, "is_causal": False, "enable_gqa": True,
        },
        "embedding": {"input": torch.arange(6).reshape(2, 3), "weight": torch.randn(8, 4), "padding_idx": 0},
        "rms_norm": {"input": rows, **norm, "weight": columns},
        "layer_norm": {"input": rows, **norm, "weight": columns, "bias": columns.clone()},
        "cross_entropy": {
            "input": torch.randn(4, 5), "target": torch.arange(4), "weight": torch.rand(5), "ignore_index": -100,
            "label_smoothing": 0.0,
        },
    }  # fmt: skip
    return given[operator]


@cache
def _contracts() -> dict[str, Contract]:
    from importlib import resources  # noqa: PLC0415 - few need it

    path = resources.files("llm_op_guard") / "contracts" / LIBRARY / "functional.contract"
    return parse_stubs(path.read_text(encoding="utf-8"), f"{LIBRARY}/functional.contract")


def _attention(place: Replaced) -> FunctionType:
    """What calls the builtin; where an argument or a mode has a say in torch's functions, it finds the builtin there.

    `torch.nn.attention.bias.CausalBias` and others ask whether what they are handed is
    `torch.nn.functional.scaled_dot_product_attention`. While Dynamo traces nothing can be put aside, so it is handed
    the stand-in; nested tensors ask for the builtin, under another name.
    """
    torch: Any = sys.modules[LIBRARY]
    builtin = place.builtin

    def scaled_dot_product_attention(*_llm_op_guard_args: Any, **_llm_op_guard_kwargs: Any) -> Any:
        given = (*_llm_op_guard_args, *_llm_op_guard_kwargs.values())
        if not torch.overrides.has_torch_function(given) and not torch._C._is_torch_function_mode_enabled():
            return builtin(*_llm_op_guard_args, **_llm_op_guard_kwargs)
        if not torch.compiler.is_compiling():
            with place:
                return builtin(*_llm_op_guard_args, **_llm_op_guard_kwargs)
        if any(isinstance(value, torch.Tensor) and value.is_nested for value in given):
            return builtin(*_llm_op_guard_args, **_llm_op_guard_kwargs)
        return torch.overrides.handle_torch_function(place.stand_in, given, *_llm_op_guard_args, **_llm_op_guard_kwargs)

    return cast(FunctionType, scaled_dot_product_attention)
