"""Every test begins and ends without guards, with the default policy and an empty record."""

from __future__ import annotations

import functools
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import llm_op_guard as og
from llm_op_guard import catalogue
from llm_op_guard.api import forget_surroundings
from llm_op_guard.policy import ENVIRONMENT_VARIABLE, INSTALL_VARIABLE, RECORD_VARIABLE, TRACK_VARIABLE, reset

# The two cores that the suite is made for: more threads only wait for each other on tensors this small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
for _variable in (ENVIRONMENT_VARIABLE, INSTALL_VARIABLE, RECORD_VARIABLE, TRACK_VARIABLE):
    os.environ.pop(_variable, None)

TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def pytest_collection_finish() -> None:
    """What the tests' modules and PyTorch have made stays: no collection of garbage looks through it, 0.3 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def shipped_once() -> Iterator[None]:
    """Commands that look through all shipped contracts read them once, not 0.4 s each time."""
    shipped = functools.cache(catalogue.shipped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "shipped", lambda: dict(shipped()))
        yield


@pytest.fixture(autouse=True, scope="session")
def clean_start() -> None:
    """What the environment of the run said when the library was imported is forgotten."""
    _forget()


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Whatever a test leaves behind is taken away: guards, policies, what is on record."""
    yield
    _forget()


def _forget() -> None:
    og.uninstall()
    reset()
    forget_surroundings()
    og.record.clear()


@pytest.fixture
def tiny() -> Callable[..., Any]:
    """Makes a random causal LM, small and always the same: `tiny("qwen2", attn="eager", dtype=..., **config)`."""

    def make(model_type: str = "llama", *, attn: str = "sdpa", seed: int = 0, dtype: Any = None, **changes: Any) -> Any:
        import torch
        import transformers

        config = transformers.AutoConfig.for_model(model_type, **{**TINY, **changes})
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attn)
        return model.to(dtype or torch.float32).eval()

    return make


@pytest.fixture
def no_alarm() -> Iterator[None]:
    """A warning of ours, of the kind that reports a fault inside the guard too, is an error while the test runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [str(w.message) for w in caught if issubclass(w.category, og.GuardWarning | og.GuardInternalWarning)]
    assert not ours, ours
