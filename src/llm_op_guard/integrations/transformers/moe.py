"""Mixtures of experts: the routers of the modeling files."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType

from llm_op_guard.install.installer import Candidate
from llm_op_guard.install.recognise import digest_of, innermost
from llm_op_guard.integrations.transformers.known import Code, Family, KnownCode, known

FAMILIES = (
    Family(
        "moe:router",
        {
            "d576507acb58136b": Code("AXK1, BailingHybrid, DeepseekV3 and 15 others"),
            "b2f7fee8eef49863": Code("FlexOlmo, Mellum, Olmoe and 6 others"),
            "910e879c3af4dc86": Code("GraniteMoe, GraniteMoeSWA, GraniteMoeHybrid and 1 other"),
            "bda61f9ab65086db": Code("DeepseekOcr2Text, DeepseekV2, UnlimitedOcrText"),
            "ccf8d7e09a697c86": Code("Qwen3_5Moe, Qwen3OmniMoeText, Qwen3VLMoeText"),
            "9dc54d153c388200": Code("Dots3NoteVision, HYV3"),
            "0c7aef6f78aa72a3": Code("Ernie4_5_Moe, Ernie4_5_VLMoeMoe"),
            "0ca2e208c010779f": Code("Inkling2, Inkling2Loop"),
            "292d64d6391d7179": Code("MiniMax, Mixtral"),
            "e7a944dd69d31369": Code("MiniMaxM3VL, Step3p7"),
            "7b1925494283e691": Code("AriaText"),
            "ac6a08eaa98ca535": Code("AXK2"),
            "4bf0b33101bc1759": Code("Beam"),
            "13511b0812b24607": Code("Cohere2Moe"),
            "6cb3e0bddbe1e42f": Code("DeepseekV4"),
            "33799d6c4955d4a6": Code("Flint"),
            "8805c7a21144a848": Code("GptOss"),
            "0359ace30dac6cdf": Code("GptOss", versions=("4.57.6",)),
            "e580f6e2b981e167": Code("DeepseekV3, Dots1, Glm4Moe, Glm4vMoeText", versions=("4.57.6",)),
            "1d8583e1f3274f49": Code("Jamba"),
            "90b8b427e9ad8efd": Code("Kolibri1"),
            "2f991deaeb945075": Code("Laguna"),
            "8a267028783393b2": Code("LaraMini"),
            "fdc42aaf9d9bb6b9": Code("Lfm2Moe"),
            "e3aaddbfc38ce45c": Code("MiniMaxM2"),
            "8caabdbb6fba09bc": Code("Mistral4"),
            "2688faa2bd6e457b": Code("MistralLarge4Text"),
            "20e205a121f1262c": Code("MuseSpark"),
            "ae963f3004d13b35": Code("OpenAIPrivacyFilter"),
        },
    ),
)  # fmt: skip

# What a forward of Transformers 4 calls on itself, where it takes `top_k` of as many experts as `weight` has rows.
_CHOICE = {"f55fd0765b68ad10": Code("DeepseekV3, Dots1, Glm4Moe, Glm4vMoeText", versions=("4.57.6",))}
KNOWN = (KnownCode("moe: get_topk_indices", r"transformers\.models\..*TopkRouter\.get_topk_indices", _CHOICE),)


def candidates(module: ModuleType) -> Iterator[Candidate]:
    """The `forward` of every class that a modeling file calls TopKRouter, or TopkRouter."""
    for cls in list(module.__dict__.values()):
        if (
            inspect.isclass(cls)
            and cls.__module__ == module.__name__
            and "topkrouter" in cls.__name__.lower()
            and "forward" in cls.__dict__
        ):
            yield _forward_of(cls)


def _forward_of(cls: type) -> Candidate:
    site, operator = f"{cls.__module__}.{cls.__name__}.forward", f"{cls.__name__}.forward"
    candidate = known(site, operator, cls.__dict__["forward"], *FAMILIES)
    choice = innermost(cls.__dict__.get("get_topk_indices"))
    if candidate.function is not None and isinstance(choice, FunctionType) and digest_of(choice) not in _CHOICE:
        return Candidate(site, operator, reason="its get_topk_indices is not one that is known")
    return candidate
