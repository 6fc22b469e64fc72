"""Token ids are looked at where a model or `generate` is entered: by default, and never where that could be wrong."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

import llm_op_guard as og

Model = Any
Make = Callable[..., Model]
VOCAB = 96
GOOD = [[5, 9, 14], [33, 71, 3]]
RESIZE = "a token was added to the tokenizer and the table not resized: resize_token_embeddings"
IGNORED = "-100 is a label to be ignored, not a token id"
NEGATIVE = "a negative id: a padding or placeholder value was not replaced"
OTHER = "the tokenizer belongs to another model"


@pytest.fixture
def model(tiny: Make) -> Model:
    return tiny()


@pytest.fixture
def guarded() -> Iterator[None]:
    with og.installed("transformers"):
        yield


def ids_with(bad: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    ids = torch.tensor(GOOD, dtype=dtype)
    ids[1, 2] = bad
    return ids


def only_violation(caught: Any) -> og.Violation:
    (violation,) = caught.value.violations
    assert isinstance(violation, og.Violation)
    return violation


BAD = [(VOCAB, RESIZE), (VOCAB + 500, OTHER), (-1, NEGATIVE), (-100, IGNORED)]


@pytest.mark.parametrize(("bad", "hint"), BAD)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_forward_names_the_id(model: Model, guarded: None, bad: int, hint: str, dtype: torch.dtype) -> None:
    with pytest.raises(og.GuardError) as caught:
        model(ids_with(bad, dtype))
    violation = only_violation(caught)
    assert (violation.operator, violation.rule_id) == ("LlamaModel.forward", "token_ids_in_table")
    assert (violation.cost_class, violation.argument) == ("B", "input_ids")
    assert violation.observed.startswith(f"input_ids[1, 2] = {bad} (of 6, 1 element is wrong")
    assert violation.expected == f"0 <= input_ids < {VOCAB} (embedding_rows(self))"
    assert violation.hint == hint
    assert violation.call_site is not None and violation.call_site.module_class == "LlamaForCausalLM"


@pytest.mark.parametrize(("bad", "hint"), BAD)
@pytest.mark.parametrize("how", ["inputs", "input_ids"])
def test_generate_names_the_id_before_anything_runs(
    model: Model, guarded: None, monkeypatch: pytest.MonkeyPatch, bad: int, hint: str, how: str
) -> None:
    # No hook: it might change the ids, and the guard would step aside.
    monkeypatch.setattr(torch.nn.functional, "embedding", lambda *_, **__: pytest.fail("the model was run"))
    with pytest.raises(og.GuardError) as caught:
        model.generate(**{how: ids_with(bad)}, max_new_tokens=2)
    violation = only_violation(caught)
    assert violation.operator == "GenerationMixin.generate"
    assert violation.rule_id == ("token_ids_in_table" if how == "inputs" else "input_ids_in_table")
    assert f"[1, 2] = {bad} " in violation.observed
    assert violation.hint == hint
    assert violation.call_site is not None and violation.call_site.file == __file__


def test_the_first_of_several_is_shown_and_all_are_counted(model: Model, guarded: None) -> None:
    ids = ids_with(-100)
    ids[0, 1] = VOCAB + 3
    with pytest.raises(og.GuardError) as caught:
        model(ids)
    first = f"input_ids[0, 1] = {VOCAB + 3} (of 6, 2 elements are wrong, this one first)"
    assert only_violation(caught).observed == first


def test_the_error_is_the_one_that_the_look_up_raises_anyway(model: Model) -> None:
    with pytest.raises(IndexError, match="out of range"):
        model(ids_with(VOCAB))
    with og.installed("transformers"), pytest.raises(IndexError) as caught:
        model(ids_with(VOCAB))
    assert isinstance(caught.value, og.GuardError)
    assert isinstance(caught.value, ValueError)


def test_the_record_keeps_it(model: Model, guarded: None) -> None:
    with pytest.raises(og.GuardError):
        model(ids_with(VOCAB))
    assert og.record.counts == {
        ("transformers.models.llama.modeling_llama.LlamaModel.forward", "token_ids_in_table"): 1
    }


# ---------------------------------------------------------------- policy


def test_on_without_any_policy_and_off_when_b_is_off(model: Model, guarded: None) -> None:
    with pytest.raises(og.GuardError):
        model(ids_with(VOCAB))
    og.set_policy(B="off")
    with pytest.raises(IndexError) as caught:
        model(ids_with(VOCAB))
    assert not isinstance(caught.value, og.GuardError)
    og.set_policy(B="raise")
    with pytest.raises(og.GuardError):
        model(ids_with(VOCAB))


def test_on_when_only_a_is_off(model: Model, guarded: None) -> None:
    with og.policy(A="off"), pytest.raises(og.GuardError):
        model(ids_with(VOCAB))


def test_warns_once_and_counts_when_b_warns(model: Model, guarded: None) -> None:
    with og.policy(B="warn"):
        with pytest.warns(og.GuardWarning, match="input_ids") as caught, pytest.raises(IndexError) as unguarded:
            model(ids_with(VOCAB))
        assert not isinstance(unguarded.value, og.GuardError)
        with warnings.catch_warnings():
            warnings.simplefilter("error", og.GuardWarning)
            with pytest.raises(IndexError):
                model(ids_with(VOCAB))
    assert len([w for w in caught if w.category is og.GuardWarning]) == 1
    assert og.record.total == 2


def test_only_recorded_when_b_records(model: Model, guarded: None) -> None:
    with og.policy(B="record"), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(IndexError, match="out of range"):
            model(ids_with(VOCAB))
    assert og.record.total == 1


@pytest.mark.parametrize(
    ("backend", "shapes"),
    [("eager", 3), ("aot_eager", 1), *(pytest.param(b, 3, marks=pytest.mark.slow) for b in ("aot_eager", "inductor"))],
)
def test_compiled_models_judge_ids_when_they_run(tiny: Make, backend: str, shapes: int) -> None:
    model = tiny(num_hidden_layers=1)

    def run() -> tuple[int, Any, list[torch.Tensor]]:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        given = [torch.tensor(GOOD).repeat(1, times) for times in (1, 2, 3)]
        found = [compiled(ids, use_cache=False).logits for ids in given[:shapes]]
        return counter.frame_count, compiled, found

    with torch.no_grad():
        compilations, _, plain = run()
        with og.installed("transformers"):
            compilations_guarded, compiled, guarded = run()
            assert compilations_guarded == compilations
            assert all(map(torch.equal, plain, guarded))
            with pytest.raises(og.GuardError) as caught:
                compiled(ids_with(VOCAB), use_cache=False)
            assert isinstance(caught.value, IndexError)
            violation = only_violation(caught)
            assert violation.rule_id == "token_ids_in_table"
            assert violation.expected == f"0 <= input_ids < {VOCAB} (embedding_rows(self))"
            assert violation.hint == RESIZE
    torch._dynamo.reset()


def test_a_graph_that_is_used_for_another_model(tiny: Make, guarded: None) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    with torch.no_grad():
        for _ in range(2):  # the first is gone when the second runs
            compiled = torch.compile(tiny(num_hidden_layers=1), fullgraph=True, backend=counter)
            compiled(torch.tensor(GOOD), use_cache=False)
            with pytest.raises(og.GuardError, match="embedding_rows"):
                compiled(ids_with(VOCAB), use_cache=False)
            del compiled
            gc.collect()
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_table_that_is_resized_after_compilation(tiny: Make, guarded: None, fullgraph: bool) -> None:
    model = tiny(num_hidden_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=fullgraph, backend="eager")
    with torch.no_grad():
        compiled(torch.tensor(GOOD), use_cache=False)
        model.resize_token_embeddings(VOCAB + 4)
        compiled(ids_with(VOCAB + 3), use_cache=False)
        with pytest.raises(og.GuardError, match=f"{VOCAB + 4} .embedding_rows"):
            compiled(ids_with(VOCAB + 4), use_cache=False)
    torch._dynamo.reset()


# ---------------------------------------------------------------- legal calls


@pytest.mark.usefixtures("no_alarm", "guarded")
class TestNoAlarm:
    @pytest.fixture(autouse=True)
    def nothing_recorded(self) -> Iterator[None]:
        yield
        assert og.record.total == 0

    def test_every_id_of_the_table(self, model: Model) -> None:
        model(torch.arange(VOCAB)[None])
        model(torch.arange(VOCAB, dtype=torch.int32)[None])

    def test_padding(self, model: Model) -> None:
        ids = torch.tensor([[0, 0, 7], [1, 2, 3]])
        model(ids, attention_mask=(ids != 0).long())
        model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=2)

    def test_no_ids_at_all(self, model: Model) -> None:
        # An empty prompt is what `generate` starts from when it is given embeddings.
        embeds = torch.zeros(2, 3, 64)
        model.generate(inputs_embeds=embeds, max_new_tokens=2)
        model.generate(torch.empty(2, 0, dtype=torch.int64), inputs_embeds=embeds, max_new_tokens=2)

    def test_embeddings_instead_of_ids(self, model: Model) -> None:
        model(inputs_embeds=torch.zeros(2, 3, 64))
        model.generate(inputs_embeds=torch.zeros(2, 3, 64), max_new_tokens=2)

    def test_labels_to_be_ignored(self, model: Model) -> None:
        model(torch.tensor(GOOD), labels=ids_with(-100))

    def test_a_resized_table(self, model: Model) -> None:
        model.resize_token_embeddings(VOCAB + 4)
        model(ids_with(VOCAB + 3))
        model.generate(ids_with(VOCAB + 3), max_new_tokens=2)

    def test_a_table_replaced_by_a_larger_one(self, model: Model) -> None:
        model.set_input_embeddings(torch.nn.Embedding(VOCAB + 4, 64))
        model(ids_with(VOCAB + 3))

    def test_a_larger_weight_of_which_the_module_does_not_know(self, model: Model) -> None:
        table = model.get_input_embeddings()
        table.weight = torch.nn.Parameter(torch.zeros(VOCAB + 4, 64))
        assert table.num_embeddings == VOCAB
        model(ids_with(VOCAB + 3))
        model.generate(ids_with(VOCAB + 3), max_new_tokens=2)

    def test_tied_weights(self, tiny: Make) -> None:
        model = tiny(tie_word_embeddings=True)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        model(torch.arange(VOCAB)[None])
        model.resize_token_embeddings(VOCAB + 4)
        model.generate(ids_with(VOCAB + 3), max_new_tokens=2)

    def test_a_table_of_another_kind(self, model: Model) -> None:
        class Hashed(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = torch.nn.Embedding(8, 64)

            def forward(self, ids: torch.Tensor) -> Any:
                return self.table(ids % 8)

        model.model.embed_tokens = Hashed()
        model(ids_with(10_000))
        model.generate(ids_with(10_000), max_new_tokens=2)


def test_a_resized_table_has_an_end_too(model: Model, guarded: None) -> None:
    model.resize_token_embeddings(VOCAB + 4)
    with pytest.raises(og.GuardError) as caught:
        model(ids_with(VOCAB + 4))
    assert only_violation(caught).expected == f"0 <= input_ids < {VOCAB + 4} (embedding_rows(self))"


class Clamping(LlamaModel):
    """A forward of somebody's own, which does something with the ids first."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        input_ids = input_ids.clamp(0, self.embed_tokens.num_embeddings - 1)
        return super().forward(inputs_embeds=self.embed_tokens(input_ids), **kwargs)


class ClampingForCausalLM(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Clamping(config)


@pytest.mark.usefixtures("no_alarm")
def test_a_forward_that_is_not_known_is_not_checked(model: Model) -> None:
    other = ClampingForCausalLM(model.config).eval()
    with torch.no_grad():
        plain = other(ids_with(-100)).logits
        with og.installed("transformers") as report:
            assert torch.equal(plain, other(ids_with(-100)).logits)
            other.generate(ids_with(-100), max_new_tokens=2)
    assert not any("Clamping" in site for site in report.guarded)
    assert og.record.total == 0
