"""What guards cost a whole model: decode steps and prefill of Llamas with random weights.

Unguarded, with class A, and with A and B, in blocks of a few steps, in turn. The guards stay installed; the policy
switches them, and where it says off every function has its own code back, which is looked at before each block.

What guards add is told in processor time: they wait for nothing, and the clock on the wall counts other work on the
machine as well. What users wait for is told by that clock.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llm_op_guard import api
from llm_op_guard.benching.clock import interleaved
from llm_op_guard.benching.estimate import Estimate, estimates, pair_ratio, quantile
from llm_op_guard.errors import LlmOpGuardError
from llm_op_guard.frozen import frozen
from llm_op_guard.policy import set_policy

UNGUARDED, A, AB = "unguarded", "A", "A+B"
_SETTINGS = {UNGUARDED: ("off", "off"), A: ("raise", "off"), AB: ("raise", "raise")}
PROMPT = 16
STEPS = 4  # a block; one more, before them, is not counted

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
TWELVE_LAYERS = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
VOCABULARY = {"tiny": 1024, "12 layers": 32000}


@frozen
class Work:
    """What is timed: `decode` or `prefill` of a model with a batch, in so many pairs of blocks."""

    model: str
    phase: str
    batch: int
    pairs: int

    def __str__(self) -> str:
        return f"{self.model}, {self.phase}, batch {self.batch}"


@dataclass
class Cost:
    """What was found of one work, under each setting: milliseconds of a step, and tokens per second, by the wall clock.

    `ratios` are to the unguarded model. `step` (processor time) and `wall` are medians over pairs of blocks of the
    ratio of their fastest steps: nothing makes one faster than it is. `p99` and `tokens_per_second` are of all steps.
    """

    work: Work
    config: dict[str, int]
    steps: int
    p50: dict[str, Estimate] = field(default_factory=dict)
    p99: dict[str, Estimate] = field(default_factory=dict)
    tokens_per_second: dict[str, Estimate] = field(default_factory=dict)
    ratios: dict[str, dict[str, Estimate]] = field(default_factory=dict)


class Step(NamedTuple):
    """The seconds of one step: by the clock on the wall, and of the processor for this process."""

    wall: float
    processor: float


Say = Callable[[str], None]
Steps = Callable[[], list[Step]]


def timed(step: Callable[[], Any]) -> Step:
    """Do it once."""
    wall, processor = time.perf_counter(), time.process_time()
    step()
    return Step(time.perf_counter() - wall, time.process_time() - processor)


def measure(works: Sequence[Work], configs: dict[str, dict[str, int]], say: Say) -> list[Cost]:
    """The cost of each work; guards are installed meanwhile. Each model is made once."""
    costs: list[Cost] = []
    made: tuple[str, Any] = ("", None)
    with api.installed("transformers"):
        for work in works:
            say(str(work))
            if made[0] != work.model:
                made = work.model, llama(VOCABULARY[work.model], configs[work.model])
            costs.append(_cost(work, configs[work.model], made[1]))
        _switch(A)
    return costs


def llama(vocabulary: int, config: dict[str, int]) -> Any:
    """A Llama with random weights, the same at each call."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocabulary, **config)).eval()


def _switch(setting: str) -> None:
    a, b = _SETTINGS[setting]
    set_policy(A=a, B=b)
    armed = sum(site.patch.armed for site in api.sites())
    if (armed == 0) != (setting == UNGUARDED):
        raise LlmOpGuardError(f"{armed} guards are on where the policy is {setting!r}: this run would measure nothing")


def _cost(work: Work, config: dict[str, int], model: Any) -> Cost:
    torch = importlib.import_module("torch")
    prompt = torch.randint(3, model.config.vocab_size, (work.batch, PROMPT))
    with torch.no_grad():
        steps = decoding(model, prompt) if work.phase == "decode" else _prefilling(model, prompt)
        rounds = interleaved({setting: _block(setting, steps) for setting in _SETTINGS}, work.pairs)
    tokens = work.batch * (1 if work.phase == "decode" else PROMPT)
    return _estimated(Cost(work, config, len(rounds[A][0]) * work.pairs), rounds, tokens)


def _block(setting: str, steps: Steps) -> Steps:
    def block() -> list[Step]:
        _switch(setting)
        return steps()

    return block


def decoding(model: Any, prompt: Any) -> Steps:
    """A function that decodes `STEPS` tokens after the prompt, one by one."""
    token = prompt[:, :1]
    output = model(prompt, use_cache=True)
    past = {name: value for name, value in output.items() if name != "logits"}  # `cache`, or what 4.x calls it
    (cache,) = past.values()

    def steps() -> list[Step]:
        taken = [timed(lambda: model(token, use_cache=True, **past)) for _ in range(STEPS + 1)]
        cache.crop(-len(taken))
        return taken[1:]

    return steps


def _prefilling(model: Any, prompt: Any) -> Steps:
    return lambda: [timed(lambda: model(prompt, use_cache=True))]


def _estimated(cost: Cost, rounds: dict[str, list[list[Step]]], tokens: int) -> Cost:
    walls = {setting: [[step.wall for step in block] for block in blocks] for setting, blocks in rounds.items()}
    fastest = {setting: [min(block) for block in blocks] for setting, blocks in walls.items()}
    least = {setting: [min(s.processor for s in block) for block in blocks] for setting, blocks in rounds.items()}

    def figures(chosen: Sequence[int]) -> dict[str, float]:
        found: dict[str, float] = {}
        for setting, blocks in walls.items():
            steps = [step for number in chosen for step in blocks[number]]
            found[f"p50 {setting}"] = quantile(steps, 0.5)
            found[f"p99 {setting}"] = quantile(steps, 0.99)
            found[f"rate {setting}"] = tokens * len(steps) / sum(steps)
        for setting in (A, AB):
            found[f"step ratio {setting}"] = pair_ratio(least, setting, UNGUARDED, chosen)
            found[f"wall ratio {setting}"] = pair_ratio(fastest, setting, UNGUARDED, chosen)
            for figure in ("p99", "rate"):
                found[f"{figure} ratio {setting}"] = found[f"{figure} {setting}"] / found[f"{figure} {UNGUARDED}"]
        return found

    estimated = estimates(cost.work.pairs, figures)
    cost.p50 = {setting: estimated[f"p50 {setting}"].scaled(1e3) for setting in rounds}
    cost.p99 = {setting: estimated[f"p99 {setting}"].scaled(1e3) for setting in rounds}
    cost.tokens_per_second = {setting: estimated[f"rate {setting}"] for setting in rounds}
    cost.ratios = {
        setting: {
            "step": estimated[f"step ratio {setting}"],
            "wall": estimated[f"wall ratio {setting}"],
            "p99": estimated[f"p99 ratio {setting}"],
            "tokens_per_second": estimated[f"rate ratio {setting}"],
        }
        for setting in (A, AB)
    }
    return cost
