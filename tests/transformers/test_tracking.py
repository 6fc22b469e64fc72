"""`og.track()` in a model: rotary tables have a maker, layers are told, nothing else changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import llm_op_guard as og
from llm_op_guard import api
from llm_op_guard.install.recognise import innermost

pytestmark = pytest.mark.usefixtures("no_alarm")

Make = Callable[..., Any]
Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def tracked() -> None:
    og.install("transformers")
    og.track()


def ids() -> torch.Tensor:
    return torch.arange(3, 10)[None]


@pytest.fixture
def changing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Change], None]:
    """Has one layer of Llama change the rotary table before it uses it."""
    original = LlamaDecoderLayer.forward

    def change(layer: int, how: Change) -> None:
        def forward(self: Any, hidden_states: Any, *args: Any, position_embeddings: Any, **kwargs: Any) -> Any:
            if self.self_attn.layer_idx == layer:
                position_embeddings = tuple(how(table) for table in position_embeddings)
            return original(self, hidden_states, *args, position_embeddings=position_embeddings, **kwargs)

        monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)

    return change


def broken(model: Any) -> og.Violation:
    with pytest.raises(og.GuardError) as caught:
        model(ids())
    (violation,) = caught.value.violations
    return violation


def test_the_first_layer_blames_the_maker(tiny: Make, changing: Any) -> None:
    changing(0, lambda table: table[..., :1])
    violation = broken(tiny())
    assert violation.argument == "cos"
    assert str(violation.last_seen) == (
        "a view of what was last seen leaving LlamaRotaryEmbedding.forward, 2 guarded calls ago"
    )
    assert violation.last_seen is not None
    assert violation.last_seen.site == "transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.forward"
    assert violation.last_seen.module_class == "LlamaRotaryEmbedding"


def test_a_later_layer_blames_what_came_after_the_layer_before(tiny: Make, changing: Any) -> None:
    changing(1, lambda table: table[..., :1])
    assert str(broken(tiny()).last_seen).startswith(
        "a view of what was last valid entering apply_rotary_pos_emb as cos, "
    )


def test_a_copy_has_no_past(tiny: Make, changing: Any) -> None:
    changing(0, lambda table: table[..., :1].clone())
    assert broken(tiny()).last_seen is None


def test_a_layer_is_told(tiny: Make) -> None:
    model = tiny(attn="eager")

    @og.guard("x: floating[7]")
    def strict(x: Any) -> None: ...

    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, given: strict(*given))
    found = broken(model).last_seen
    assert str(found) == (
        "a view of what was last seen leaving eager_attention_forward of LlamaAttention, layer 1, 1 guarded call ago"
    )
    assert found is not None and found.layer_idx == 1


def test_the_same_result(tiny: Make) -> None:
    model = tiny()
    with torch.no_grad():
        with_it = model(ids()).logits
        og.track(on=False)
        guarded = model(ids()).logits
        og.uninstall()
        assert torch.equal(with_it, guarded)
        assert torch.equal(with_it, model(ids()).logits)


def test_makers_have_their_own_code_but_while_tracked() -> None:
    function: Any = innermost(LlamaRotaryEmbedding.forward)
    changed = function.__code__
    og.track(on=False)
    own = function.__code__
    assert own is not changed
    og.track()
    assert function.__code__ is changed
    og.disable()
    assert function.__code__ is own
    og.enable()
    assert function.__code__ is changed
    og.uninstall()
    assert function.__code__ is own
    og.install("transformers")
    assert function.__code__ is not own


def test_makers_are_no_guards() -> None:
    name = "transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.forward"
    assert name not in og.status().guarded
    assert name not in [refusal.site for refusal in og.status().refused]
    assert name in [producer.name for producer in api._installers["transformers"]._producers]


def test_a_maker_that_somebody_else_changed(caplog: pytest.LogCaptureFixture) -> None:
    function: Any = innermost(LlamaRotaryEmbedding.forward)
    og.track(on=False)
    own = function.__code__

    def forward(self: Any, x: Any, position_ids: Any) -> Any:
        return x, x

    function.__code__ = forward.__code__
    try:
        with caplog.at_level(logging.WARNING, logger="llm_op_guard"):
            og.track()
        assert function.__code__ is forward.__code__
        assert "does not track transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.forward" in caplog.text
        assert [r.site for r in og.uninstall() if "Rotary" in r.site] == [
            "transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.forward"
        ]
    finally:
        function.__code__ = own


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("nothing_compiled")
def test_compiled(tiny: Make) -> None:
    model = tiny(num_hidden_layers=1)
    counts = []
    with torch.no_grad():
        for on in (False, True):
            og.track(on=on)
            torch._dynamo.reset()
            counter = CompileCounter()
            program = torch.compile(model, backend=counter, fullgraph=True)
            for length in (5, 7, 9):
                program(torch.arange(3, 3 + length)[None], use_cache=False)
            counts.append((counter.frame_count, counter.op_count))
    assert counts[0] == counts[1]
