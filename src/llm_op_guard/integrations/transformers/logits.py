"""Logits processors: `__call__` of those of Transformers, and of their list.

Stopping criteria have no contracts: they look at the length, at the last ids, or at text.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

from llm_op_guard.install.installer import Candidate
from llm_op_guard.integrations.transformers.known import Code, Family, known

_BOTH = ("4.57.6", "5.24.0")

FAMILIES = (
    Family("logits:processors", {"25c835341f35c44c": Code("LogitsProcessorList", versions=_BOTH)}),
    Family(
        "logits:of_floats",
        {
            "f5cdbcc56b9a35b8": Code("MinPLogitsWarper"),
            "c233630f515d5757": Code("EpsilonLogitsWarper", versions=_BOTH),
            "63e6babf59cbb491": Code("EtaLogitsWarper", versions=_BOTH),
            "24535e1a476fb0ca": Code("LogitNormalization", versions=_BOTH),
        },
    ),
    Family(
        "logits:of_rows",
        {
            "4f27565009aaf4c6": Code("TopPLogitsWarper", versions=_BOTH),
            "58dfb553c74a0c54": Code("MinPLogitsWarper: it sorts", versions=("4.57.6",)),
            "ac5b2e803db958fd": Code("TypicalLogitsWarper", versions=_BOTH),
            "60f8f6cd8c0d1472": Code("TopHLogitsWarper"),
        },
    ),
    Family("logits:repetition_penalty", {"589bbf3952fefa26": Code("RepetitionPenaltyLogitsProcessor")}),
    Family(
        "logits:repetition_penalty_in_vocabulary",
        {"1f7127c9218196eb": Code("RepetitionPenaltyLogitsProcessor", versions=("4.57.6",))},
    ),
    Family("logits:encoder_repetition_penalty", {"d50b9ec5f67a290a": Code("EncoderRepetitionPenaltyLogitsProcessor")}),
    Family(
        "logits:encoder_repetition_penalty_unrepeated",
        {"6265785fc777560d": Code("EncoderRepetitionPenaltyLogitsProcessor", versions=("4.57.6",))},
    ),
    Family("logits:no_repeat_ngram", {"3e5a29670c0a6469": Code("NoRepeatNGramLogitsProcessor")}),
    Family(
        "logits:no_repeat_ngram_of_each_row",
        {"befd06ad2cc798cb": Code("NoRepeatNGramLogitsProcessor", versions=("4.57.6",))},
    ),
    Family(
        "logits:encoder_no_repeat_ngram",
        {"f08597f249d77f83": Code("EncoderNoRepeatNGramLogitsProcessor", versions=_BOTH)},
    ),
    Family(
        "logits:sequence_bias",
        {
            "584af7fdd04d494b": Code("SequenceBiasLogitsProcessor, and with it NoBadWordsLogitsProcessor"),
            "3ec8b956fcf52468": Code("the same, one sequence after another", versions=("4.57.6",)),
        },
    ),
    Family(
        "logits:prefix_constrained",
        {
            "0f3fe6e2bd1c1a82": Code("PrefixConstrainedLogitsProcessor"),
            "994e9c64e7dbe027": Code("PrefixConstrainedLogitsProcessor", versions=("4.57.6",)),
        },
    ),
    Family("logits:forced_first_token", {"371244f9bae95f98": Code("ForcedBOSTokenLogitsProcessor", versions=_BOTH)}),
    Family("logits:forced_last_token", {"6f6695de8f6fb6de": Code("ForcedEOSTokenLogitsProcessor", versions=_BOTH)}),
    Family(
        "logits:exponential_decay",
        {
            "db34e0536b479914": Code("ExponentialDecayLengthPenalty"),
            "d64fb3789cb9febf": Code("the same, infinite scores too", versions=("4.57.6",)),
        },
    ),
    Family("logits:early_end", {"df94f524aeb7c8cf": Code("BarkEosPrioritizerLogitsProcessor", versions=_BOTH)}),
    Family(
        "logits:whisper_timestamps",
        {
            "fc9d95f52e349b72": Code("WhisperTimeStampLogitsProcessor"),
            "4ba963fa06976d12": Code("the same, one sequence after another", versions=("4.57.6",)),
        },
    ),
    Family("logits:whisper_no_speech", {"1fdd47683905b828": Code("WhisperNoSpeechDetection", versions=_BOTH)}),
    Family(
        "logits:alternating_codebooks",
        {"bdb155e2b8528a29": Code("AlternatingCodebooksLogitsProcessor", versions=_BOTH)},
    ),
    Family(
        "logits:unconditional_logits",
        {
            "94e085ab17041b68": Code("UnbatchedClassifierFreeGuidanceLogitsProcessor"),
            "d0ca44b0eab860e6": Code("the same, its cache by another name", versions=("4.57.6",)),
        },
    ),
    Family("logits:watermark", {"8609a4b8bc8f0331": Code("WatermarkLogitsProcessor", versions=_BOTH)}),
    Family(
        "logits:synth_id",
        {
            "bfc4fc0894475330": Code("SynthIDTextWatermarkLogitsProcessor"),
            "b4ee9d2ea2bc3a59": Code("SynthIDTextWatermarkLogitsProcessor", versions=("4.57.6",)),
        },
    ),
    Family(
        "logits:dia_guidance", {"a4fc35a3941ba086": Code("DiaClassifierFreeGuidanceLogitsProcessor", versions=_BOTH)}
    ),
    Family("logits:dia_end_filter", {"0bc2cbd49af2d2ed": Code("DiaEOSChannelFilterLogitsProcessor", versions=_BOTH)}),
    Family("logits:dia_delay", {"3356e7698b9054a6": Code("DiaEOSDelayPatternLogitsProcessor", versions=_BOTH)}),
)

PROCESSORS_MODULE = "transformers.generation.logits_process"

# Code that was read and has no contract.
_LENGTH = "of the ids it takes the length, and tokens that are not in the vocabulary change nothing"
LEFT_OUT = {
    "e5c60acdcc1ca168": Code("LogitsProcessor.__call__", reason="it is abstract", versions=("4.57.6", "5.24.0")),
    "15cc934d53188d7e": Code(
        "TemperatureLogitsWarper.__call__", reason="it takes scores of any shape", versions=("4.57.6", "5.24.0")
    ),
    "1ee4855c895fb3ff": Code(
        "TopKLogitsWarper.__call__",
        reason="it takes scores of any shape, and as many as there are where top_k is more",
        versions=("4.57.6", "5.24.0"),
    ),
    "3bb8da15cbc945be": Code(
        "InfNanRemoveLogitsProcessor.__call__",
        reason="it takes scores of any shape, and is for those that are not finite",
        versions=("4.57.6", "5.24.0"),
    ),
    "a1bf9ee657b3f9de": Code("MinLengthLogitsProcessor.__call__", reason=_LENGTH),
    "856988a1b927a223": Code("MinLengthLogitsProcessor.__call__", reason=_LENGTH, versions=("4.57.6",)),
    "acdba5a29f7517dd": Code("MinNewTokensLengthLogitsProcessor.__call__", reason=_LENGTH),
    "58cbb8b78870c88a": Code("MinNewTokensLengthLogitsProcessor.__call__", reason=_LENGTH, versions=("4.57.6",)),
    "18f0a7a973245459": Code("SuppressTokensAtBeginLogitsProcessor.__call__", reason=_LENGTH),
    "80eaf3de285777f0": Code("SuppressTokensAtBeginLogitsProcessor.__call__", reason=_LENGTH, versions=("4.57.6",)),
    "9dd22ec17d33a304": Code("SuppressTokensLogitsProcessor.__call__", reason=_LENGTH),
    "3aba2e7372b054f0": Code("SuppressTokensLogitsProcessor.__call__", reason=_LENGTH, versions=("4.57.6",)),
    "1bae53a45c01da01": Code(
        "ClassifierFreeGuidanceLogitsProcessor.__call__",
        reason="it tests the rows itself",
        versions=("4.57.6", "5.24.0"),
    ),
    "70b9956a7e38f1f1": Code(
        "UnbatchedClassifierFreeGuidanceLogitsProcessor.__call__",
        reason="its get_unconditional_logits is guarded by itself",
        versions=("4.57.6", "5.24.0"),
    ),
    "ee357f7ea7eadff4": Code(
        "HammingDiversityLogitsProcessor.__call__",
        reason="it is deprecated, and generate does not use it",
        versions=("4.57.6",),
    ),
}


def candidates(module: ModuleType) -> Iterator[Candidate]:
    """The processors of the module that defines them."""
    if module.__name__ != PROCESSORS_MODULE:
        return
    for cls in list(module.__dict__.values()):
        if inspect.isclass(cls) and cls.__module__ == module.__name__:
            for name in ("__call__", "get_unconditional_logits"):
                if name in cls.__dict__:
                    yield _method_of(cls, name)


def _method_of(cls: type, name: str) -> Candidate:
    site, operator = f"{cls.__module__}.{cls.__name__}.{name}", f"{cls.__name__}.{name}"
    return known(site, operator, cls.__dict__[name], *FAMILIES, left_out=LEFT_OUT)
