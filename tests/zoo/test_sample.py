"""Twenty types of the zoo, chosen for their contracts; `make zoo` runs all."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import child
import pytest
import scenarios
import torch
from animals import TASKS, Breeder, all_animals
from child import Outcome, _compared
from compare import difference, leaves
from scenarios import NotSupported, Specimen, token_ids
from shrink import VOCABULARY, Shrinker
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llm_op_guard import api
from llm_op_guard.contract.parse import parse_stubs
from llm_op_guard.integrations.transformers import known
from zoo import _chosen

HERE = Path(__file__).parent
# Each but RoBERTa, which is there for its task, has a contract that those before it have not.
SAMPLE = [
    "causal LM:llama", "causal LM:gptj", "causal LM:gpt_neo", "causal LM:gpt_neox", "causal LM:gpt_oss",
    "causal LM:deepseek_v2", "causal LM:deepseek_v4", "causal LM:llama4_text", "causal LM:gemma3n_text",
    "causal LM:mamba2", "causal LM:falcon_h1", "causal LM:stablelm", "causal LM:cohere2", "causal LM:zaya",
    "causal LM:minimax_m3_vl_text", "sequence classification:roberta", "seq2seq LM:t5", "seq2seq LM:seamless_m4t",
    "vision-language:qwen3_5_moe", "masked LM:squeezebert",
]  # fmt: skip


def run(*arguments: str, json_file: Path) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "zoo.py"), "--json", str(json_file), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(json_file.read_text())
    return found


def test_a_sample_of_the_zoo(tmp_path: Path) -> None:
    found = run("--types", ",".join(SAMPLE), "--jobs", "2", json_file=tmp_path / "zoo.json")
    totals = found["summary"]
    assert (totals["alarms"], totals["differences"], totals["died"]) == (0, 0, 0)
    by_type = {report["type"]: report for report in found["types"]}
    assert len(by_type) == len(SAMPLE)
    for report in by_type.values():
        same = {name for name, one in report["scenarios"].items() if one["outcome"] == "same"}
        assert {"eager/build", "eager/prefill", "eager/left-padded", "eager/backward"} <= same, report
    llama = by_type["llama"]
    everything = {name for name in llama["scenarios"] if "quanto" not in name}
    assert {name for name in everything if llama["scenarios"][name]["outcome"] != "same"} == set()
    assert min(llama["scenarios"][name]["checks"] for name in everything if "build" not in name) > 0
    assert by_type["qwen3_5_moe"]["scenarios"]["sdpa/images"]["outcome"] == "same"
    assert "transformers.models.llama.modeling_llama.apply_rotary_pos_emb" in llama["guarded"]
    assert by_type["gptj"]["guarded"]


def test_the_comparison_sees_every_bit() -> None:
    one = leaves({"logits": torch.tensor([0.0, math.nan]), "n": 3})
    assert difference(one, leaves({"logits": torch.tensor([0.0, math.nan]), "n": 3})) is None
    assert difference(one, leaves({"logits": torch.tensor([-0.0, math.nan]), "n": 3})) is not None
    assert difference(one, leaves({"logits": torch.tensor([0.0, math.nan]), "n": 4})) == ".n: '3' against '4'"
    assert difference(one, leaves({"logits": torch.tensor([0.0, math.nan])})) is not None
    assert difference(one, leaves({"logits": torch.tensor([0.0, math.nan]).double(), "n": 3})) is not None


def test_caches_are_compared_and_copied() -> None:
    def cache(value: float) -> DynamicCache:
        filled = DynamicCache()
        filled.update(torch.full((1, 1, 2, 4), value), torch.zeros(1, 1, 2, 4), 0)
        return filled

    first = cache(1.0)
    before = leaves(first)
    assert difference(before, leaves(cache(1.0))) is None
    assert difference(before, leaves(cache(2.0))) is not None
    first.layers[0].keys.add_(1)
    assert difference(before, leaves(cache(1.0))) is None


@pytest.mark.parametrize(
    ("plain", "guarded", "outcome"),
    [
        (Outcome(), Outcome(), "same"),
        (Outcome(failure="ValueError: no"), Outcome(failure="ValueError: no"), "not supported"),
        (Outcome(failure="ValueError: no"), Outcome(failure="TypeError: no"), "difference"),
        (Outcome(), Outcome(failure="ValueError: no"), "difference"),
        (Outcome(leaves(torch.zeros(1))), Outcome(leaves(torch.ones(1))), "difference"),
        (Outcome(), Outcome(alarms=["q is wrong"]), "alarm"),
        (Outcome(failure="ValueError: no"), Outcome(failure="GuardError: no", alarms=["q is wrong"]), "diagnosed"),
    ],
)
def test_outcomes(plain: Outcome, guarded: Outcome, outcome: str) -> None:
    assert _compared({"prefill": plain}, {"prefill": guarded})["prefill"]["outcome"] == outcome


def test_another_cache_that_holds_other_tokens_is_not_supported() -> None:
    def model(held: dict[str, int | None]) -> Any:
        def generate(cache_implementation: str = "dynamic", **_: Any) -> dict[str, Any]:
            return {"cache": SimpleNamespace(get_seq_length=lambda: held[cache_implementation])}

        return SimpleNamespace(config=SimpleNamespace(model_type="made up"), generate=generate)

    def generated(held: dict[str, int | None], *names: str) -> Any:
        specimen = Specimen("causal LM", model(held), lambda: None, "no images")
        return [scenarios.SCENARIOS[name](specimen) for name in names][-1]

    held: dict[str, int | None] = {"dynamic": 13, "static": 13, "quantized": 81}
    assert generated(held, "greedy", "static cache")["cache"].get_seq_length() == 13
    assert generated({**held, "static": None}, "greedy", "static cache")["cache"].get_seq_length() is None
    assert generated({**held, "dynamic": None}, "greedy", "static cache")["cache"].get_seq_length() == 13
    with pytest.raises(NotSupported, match="such a cache holds 81 tokens where a dynamic one holds 13"):
        generated(held, "greedy", "quantised cache")


def test_a_model_that_drafts_generates_with_the_one_that_it_drafts_for() -> None:
    breeder = Breeder(next(a for a in all_animals() if a.name == "causal LM:gemma4_assistant"))
    main = breeder.other().model("sdpa", 1)
    assert type(main).__name__ == "Gemma4ForCausalLM"
    specimen = Specimen("causal LM", breeder.model("sdpa", 0), lambda: main, "no images")
    assert scenarios.prefill(specimen).logits.shape == (2, 1, VOCABULARY)
    alone = main.generate(token_ids()[:1], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert scenarios.SCENARIOS["assisted"](specimen).sequences.tolist() == alone.tolist()
    with pytest.raises(NotSupported, match="it drafts for another model"):
        scenarios.SCENARIOS["greedy"](specimen)


def test_a_seed_of_the_machine_is_the_same_every_time() -> None:
    outcomes = [child._observed(lambda: (torch.seed(), torch.rand(3))) for _ in range(2)]
    assert difference(outcomes[0].result, outcomes[1].result) is None


def test_a_false_alarm_and_a_changed_bit_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    never = parse_stubs("def rms_norm(hidden_states):\n    require(hidden_states.shape[0] == 99, id='never')", "never")
    monkeypatch.setattr(known, "contract_named", lambda _: never["rms_norm"])
    monkeypatch.setattr(api.tally, "counting", False)  # put back afterwards
    monkeypatch.setattr(child, "ATTENTIONS", ("eager",))
    monkeypatch.setattr(scenarios, "SCENARIOS", {"prefill": scenarios.prefill, "draw": lambda _: drawn()})
    draws = iter([0.0, 1.0, 0.0])  # without guards, with them, and without again

    def drawn() -> torch.Tensor:
        return torch.full((1,), next(draws))

    found = child.examine(next(animal for animal in all_animals() if animal.name == "causal LM:llama"))["scenarios"]
    assert {name: one["outcome"] for name, one in found.items()} == {
        "eager/build": "same", "eager/prefill": "alarm", "eager/draw": "difference"
    }  # fmt: skip
    assert "hidden_states.shape[0] == 99" in found["eager/prefill"]["reason"]


def test_small_configurations_keep_every_kind_of_layer() -> None:
    shrinker = Shrinker({})
    config = shrinker.config(CONFIG_MAPPING["qwen3_next"])
    assert config.layer_types == ["linear_attention", "full_attention"]
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 2, VOCABULARY)


def test_a_token_id_is_the_same_in_every_part_of_a_configuration() -> None:
    config = Shrinker({}).config(CONFIG_MAPPING["qwen2_vl"])
    tokens = [config.image_token_id, config.video_token_id]
    assert len(set(tokens)) == 2
    assert all(90 <= token < VOCABULARY for token in tokens)


def test_the_same_seed_makes_the_same_model() -> None:
    breeder = Breeder(next(a for a in all_animals() if a.name == "causal LM:llama"))
    first, second, other = (breeder.model("sdpa", seed).state_dict() for seed in (0, 0, 1))
    assert difference(leaves(first), leaves(second)) is None
    assert difference(leaves(first), leaves(other)) is not None


def test_a_sample_is_the_same_every_time() -> None:
    animals = all_animals()
    assert {animal.task for animal in animals} == set(TASKS)
    chosen = _chosen(animals, None, 12)
    assert len(chosen) == 12
    assert chosen == _chosen(animals, None, 12)
    with pytest.raises(SystemExit, match="no such type in this Transformers: lama"):
        _chosen(animals, "lama", None)
