"""Logits processors: what each takes, and what becomes of it unguarded where it takes it in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from outcomes import diagnosed, suspected
from torch import Tensor
from transformers import WatermarkingConfig
from transformers.generation import logits_process as lp

import llm_op_guard as og

IS_4 = transformers.__version__.startswith("4.")
Make = Callable[..., Any]
V = 48
LIST = "LogitsProcessorList.__call__"
IDS = torch.tensor([[5, 9, 14, 9], [44, 7, 20, 8]])
FEW, MANY = torch.randn(1, V), torch.randn(4, V)
TWICE = torch.cat([IDS, IDS])


@pytest.fixture(autouse=True)
def fixed_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def scores(rows: int = 2, vocabulary: int = V) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows + vocabulary))


def repetition(**options: Any) -> Any:
    return lp.RepetitionPenaltyLogitsProcessor(1.3, **options)


def encoder_repetition(ids: Tensor = IDS) -> Any:
    return lp.EncoderRepetitionPenaltyLogitsProcessor(1.3, ids)


def bias(vocabulary: int | None = None) -> Any:
    """Biases of a token and of two in a row; `vocabulary`: of the scores that it has seen before."""
    made = lp.SequenceBiasLogitsProcessor({(3,): 2.0, (9, 14): -1.0})
    if vocabulary is not None:
        made(IDS, scores(vocabulary=vocabulary))
    return made


def prefix(beams: int) -> Any:
    return lp.PrefixConstrainedLogitsProcessor(lambda batch, sequence: [1, 2], beams)


def whisper(token: int) -> Any:
    config = SimpleNamespace(
        no_timestamps_token_id=token, eos_token_id=2, bos_token_id=1, max_initial_timestamp_index=9
    )
    return lp.WhisperTimeStampLogitsProcessor(config, 2)


def no_speech(token: int, begin: int, offset: int = 1) -> Any:
    made = lp.WhisperNoSpeechDetection(token, offset)
    made.set_begin_index(begin)
    return made


def watermark(vocabulary: int, context: int = 1) -> Any:
    return lp.WatermarkLogitsProcessor(vocabulary, "cpu", greenlist_ratio=0.9, context_width=context)


def synth_id(batch: int | None = None) -> Any:
    """`batch`: of a text that it has seen the beginning of."""
    made = lp.SynthIDTextWatermarkLogitsProcessor(3, [1, 2], 16, 0, 8, torch.device("cpu"))
    if batch is not None:
        made(IDS[:1].expand(batch, -1), scores(batch))
    return made


def listed(*processors: Any) -> Any:
    return lp.LogitsProcessorList(processors)


class Guidance(lp.UnbatchedClassifierFreeGuidanceLogitsProcessor):
    """With a model that counts."""

    def __init__(self, prompts: Tensor | None, **options: Any) -> None:
        super().__init__(1.5, self.answer, prompts, **options)

    @staticmethod
    def answer(ids: Tensor, **_: Any) -> Any:
        logits = torch.arange(float(V)).expand(*ids.shape, V)
        return type("Output", (dict,), {"logits": logits})()


FLOATS: dict[str, Callable[[], Any]] = {
    "min_p": lambda: lp.MinPLogitsWarper(0.1),
    "epsilon": lambda: lp.EpsilonLogitsWarper(0.1),
    "eta": lambda: lp.EtaLogitsWarper(0.1),
    "normalization": lp.LogitNormalization,
    "top_p": lambda: lp.TopPLogitsWarper(0.9),
    "typical": lambda: lp.TypicalLogitsWarper(0.9),
}
if not IS_4:
    FLOATS["top_h"] = lambda: lp.TopHLogitsWarper(0.9)
ROWS = {"top_p", "typical", "top_h"} | ({"min_p"} if IS_4 else set())
ANY_SHAPE: dict[str, Callable[[], Any]] = {
    "temperature": lambda: lp.TemperatureLogitsWarper(0.7),
    "top_k": lambda: lp.TopKLogitsWarper(1000),
    "finite": lp.InfNanRemoveLogitsProcessor,
}


def operator(processor: Any) -> str:
    own = next(cls for cls in type(processor).__mro__ if "__call__" in vars(cls))
    return f"{own.__name__}.__call__"


Given = tuple[Tensor, Tensor]


def assert_right(make: Callable[[], Any], *calls: Given) -> None:
    """Values looked at, no call with these ids and scores is told of, and guarded it gives what it gives unguarded."""

    def result(ids: Tensor, given: Tensor) -> Tensor:
        torch.manual_seed(0)
        found: Tensor = make()(ids.clone(), given.clone())
        return found

    told = og.record.total
    plain = [result(*call) for call in calls]
    with og.policy(B="raise"), og.installed("transformers"), warnings.catch_warnings():
        warnings.simplefilter("error", og.GuardWarning)
        warnings.simplefilter("error", og.GuardInternalWarning)
        for call, before in zip(calls, plain, strict=True):
            assert torch.equal(before, result(*call)), call
    assert og.record.total == told


# ---------------------------------------------------------------- scores


@pytest.mark.parametrize("name", FLOATS)
def test_the_softmax_of_floats(name: str) -> None:
    make = FLOATS[name]
    calls = [scores(), scores(1), scores(3, 129), scores(2, 1), scores().half(), scores().bfloat16()]
    none = [] if name in ("eta", "top_h") else [(IDS[:0], scores(0))]  # torch's Categorical takes none
    assert_right(make, *((IDS, given) for given in calls), *none)
    whole = scores().long()
    with pytest.raises((RuntimeError, NotImplementedError)):
        make()(IDS, whole)
    rule_id = "scores.dtype"
    violation = diagnosed(lambda: make()(IDS, whole), operator(make()), rule_id)
    assert violation.hint == "ids and scores exchanged"


@pytest.mark.parametrize("name", FLOATS)
def test_the_softmax_of_rows(name: str) -> None:
    make = FLOATS[name]
    odd = {"scores of one sequence": scores()[0], "scores of all tokens": scores()[None]}
    if name not in ROWS:
        assert_right(make, *((IDS, given) for given in odd.values()))
        return
    for hint, given in odd.items():
        with pytest.raises((IndexError, RuntimeError, ValueError)):
            make()(IDS, given)
        violation = diagnosed(lambda given=given: make()(IDS, given), operator(make()), "scores.shape")
        assert violation.hint is not None and violation.hint.startswith(hint)


def test_top_p_along_the_wrong_dimension() -> None:
    given = torch.randn(1, 2 * V, V)
    top_p = lp.TopPLogitsWarper(0.5)
    wrong = top_p(IDS, given)[0]
    assert not torch.equal(wrong.isneginf(), top_p(IDS, given[0]).isneginf()), "in silence"
    diagnosed(lambda: top_p(IDS, given), operator(top_p), "scores.shape")


@pytest.mark.parametrize("name", ANY_SHAPE)
def test_scores_of_any_shape(name: str) -> None:
    shapes = (scores(), scores()[0], scores()[None], scores(0), scores(2, 1))
    assert_right(ANY_SHAPE[name], *((IDS, given) for given in shapes))


# ---------------------------------------------------------------- rows and sequences


def test_repetition_of_fewer_sequences() -> None:
    given = MANY
    penalised = repetition()(IDS, MANY[:2])
    one = repetition()(IDS[:1], MANY)
    assert torch.equal(one[0], penalised[0]) and torch.equal(one[1:], given[1:]), "the others go without"
    violation = diagnosed(lambda: repetition()(IDS[:1], MANY), operator(repetition()), "a_row_for_each_sequence")
    assert violation.hint == "ids were not repeated for beams or returned sequences"
    with pytest.raises(RuntimeError, match="Size does not match"):
        repetition()(IDS, FEW)
    violation = diagnosed(lambda: repetition()(IDS, FEW), operator(repetition()), "a_row_for_each_sequence")
    assert violation.hint == "ids of another batch"


@pytest.mark.parametrize("token", [-1, V])
def test_repetition_of_ids_outside(token: int) -> None:
    outside = torch.where(IDS == 9, token, IDS)
    if token == V and not IS_4:
        assert_right(repetition, (outside, scores()))  # dropped since Transformers 5
        return
    with pytest.raises(RuntimeError, match="out of bounds"):
        repetition()(outside, scores())
    rule_id = "ids_in_vocabulary" if IS_4 else "ids_not_negative"
    diagnosed(lambda: repetition()(outside, scores()), operator(repetition()), rule_id, cost_class="B")
    # None of the ids that are looked up.
    assert_right(lambda: repetition(prompt_ignore_length=4), (outside, scores()))


def test_repetition_that_is_right() -> None:
    assert_right(
        repetition,
        (IDS, scores()),
        (TWICE, MANY),
        (IDS, MANY),  # the second half is that of guidance
        (IDS[:1, :1], FEW),
        (IDS[:0], scores(0)),
        (IDS[:1, :0], MANY),
        (IDS[:, 0], scores()),  # a token of each sequence
        (IDS, scores()[:, None]),
        (IDS.int(), scores()),
        (IDS % 2, scores(2, 2)),
    )
    if not IS_4:
        assert_right(lambda: repetition(prompt_ignore_length=torch.tensor([1, 0])), (IDS, scores()))


@pytest.mark.skipif(IS_4, reason="in Transformers 4 ids of the encoder are not repeated")
def test_encoder_repetition_of_another_batch() -> None:
    given = scores(3)
    odd = encoder_repetition()(IDS, given)
    assert torch.equal(odd[2], given[2]), "the last row goes without"
    diagnosed(lambda: encoder_repetition()(IDS, scores(3)), operator(encoder_repetition()), "rows_for_each_input")
    assert_right(encoder_repetition, (TWICE, MANY))


@pytest.mark.skipif(not IS_4, reason="in Transformers 5 ids of the encoder are repeated")
def test_encoder_repetition_with_beams() -> None:
    given = scores(4)
    beams = encoder_repetition()(TWICE, given)
    assert torch.equal(beams[2:], given[2:]), "the other beams go without"
    suspected(lambda: encoder_repetition()(TWICE, given), operator(encoder_repetition()), "go without the penalty")


def test_encoder_repetition() -> None:
    with pytest.raises(RuntimeError, match="Size does not match"):
        encoder_repetition()(IDS[:1], FEW)
    diagnosed(lambda: encoder_repetition()(IDS[:1], FEW), operator(encoder_repetition()), "rows_for_each_input")
    for token in (-1, V):
        outside = torch.where(IDS == 9, token, IDS)
        with pytest.raises(RuntimeError, match="out of bounds"):
            encoder_repetition(outside)(IDS, scores())
        diagnosed(
            lambda outside=outside: encoder_repetition(outside)(IDS, scores()),
            operator(encoder_repetition()),
            "encoder_ids_in_vocabulary",
            cost_class="B",
        )
    assert_right(encoder_repetition, (IDS[:, :1], scores()))
    assert_right(lambda: encoder_repetition(IDS[:0]), (IDS[:0], scores(0)))
    assert_right(lambda: encoder_repetition(IDS[:, :0]), (IDS, scores()))


# Of each: the processor, ids and scores; the rule; what is raised unguarded, None where nothing is.
Broken = tuple[Callable[[], Any], Tensor, Tensor, str, type[Exception] | None]
NGRAM = lp.NoRepeatNGramLogitsProcessor
ALTERNATING = lp.AlternatingCodebooksLogitsProcessor
BROKEN: dict[str, Broken] = {
    "encoder n-grams, another batch": (
        lambda: lp.EncoderNoRepeatNGramLogitsProcessor(2, IDS),
        IDS.repeat(2, 1),
        scores(3),
        "rows_for_each_input",
        IndexError,
    ),
    "encoder n-grams, fewer": (
        lambda: lp.EncoderNoRepeatNGramLogitsProcessor(2, IDS),
        IDS[:1],
        FEW,
        "rows_for_each_input",
        ZeroDivisionError,
    ),
    "encoder n-grams, ids of fewer": (
        lambda: lp.EncoderNoRepeatNGramLogitsProcessor(2, IDS),
        IDS[:1],
        scores(),
        "a_sequence_for_each_row",
        IndexError,
    ),
    "biases for a larger vocabulary": (lambda: bias(V + 1), IDS, scores(), "scores.shape", RuntimeError),
    "biases for a smaller vocabulary": (lambda: bias(V - 1), IDS, scores(), "scores.shape", RuntimeError),
    "a prefix for fewer beams": (
        lambda: prefix(4),
        torch.cat([TWICE, IDS]),
        scores(6),
        "whole_groups_of_beams",
        None if IS_4 else RuntimeError,
    ),
    "a prefix for more beams": (
        lambda: prefix(4),
        IDS,
        scores(),
        "whole_groups_of_beams",
        None if IS_4 else RuntimeError,
    ),
    "a prefix of one sequence": (lambda: prefix(1), IDS[:1], scores(), "a_row_for_each_sequence", None),
    "a prefix of more sequences": (lambda: prefix(1), IDS, FEW, "a_row_for_each_sequence", IndexError),
    "a first token outside": (
        lambda: lp.ForcedBOSTokenLogitsProcessor(V),
        IDS[:, :1],
        scores(),
        "token_in_vocabulary",
        IndexError,
    ),
    "no first token": (
        lambda: lp.ForcedBOSTokenLogitsProcessor(None),
        IDS[:, :1],
        scores(),
        "a_token_to_force",
        None,
    ),
    "timestamps outside": (lambda: whisper(V), IDS, scores(), "token_in_vocabulary", IndexError),
    "timestamps of one sequence": (lambda: whisper(30), IDS[:1], scores(), "a_row_for_each_sequence", None),
    "timestamps of more sequences": (
        lambda: whisper(30),
        IDS,
        FEW,
        "a_row_for_each_sequence",
        IndexError if IS_4 else RuntimeError,
    ),
    "no speech outside": (lambda: no_speech(V, 4), IDS, scores(), "token_in_vocabulary", IndexError),
    "no first codebook": (lambda: ALTERNATING(0, V, 4), IDS, scores(), "first_codebook_in_vocabulary", None),
    "no second codebook": (lambda: ALTERNATING(1, V - 4, 4), IDS, scores(), "second_codebook_in_vocabulary", None),
    "a watermark of one sequence": (lambda: watermark(V), IDS[:1], scores(3), "a_row_for_each_sequence", None),
    "a watermark of more sequences": (lambda: watermark(V), IDS, FEW, "a_row_for_each_sequence", IndexError),
    "SynthID after one": (lambda: synth_id(1), IDS, scores(), "batch_of_this_text", RuntimeError),
    "SynthID after more": (lambda: synth_id(4), IDS, scores(), "batch_of_this_text", RuntimeError),
    "Dia, too many to keep": (
        lambda: lp.DiaClassifierFreeGuidanceLogitsProcessor(2.0, V + 1),
        IDS,
        MANY,
        "guidance_top_k",
        RuntimeError,
    ),
    "Dia, channels": (
        lambda: lp.DiaEOSChannelFilterLogitsProcessor(2, 40),
        IDS,
        scores(3),
        "rows_of_all_channels",
        RuntimeError,
    ),
    "Dia, the end outside": (
        lambda: lp.DiaEOSChannelFilterLogitsProcessor(2, V),
        IDS,
        scores(),
        "token_in_vocabulary",
        IndexError,
    ),
    "Dia, channels in turn": (
        lambda: lp.DiaEOSDelayPatternLogitsProcessor([0, 1], 40, 20),
        IDS,
        scores(3),
        "rows_of_all_channels",
        RuntimeError,
    ),
    "Dia, the end in turn outside": (
        lambda: lp.DiaEOSDelayPatternLogitsProcessor([0, 1], V, 20),
        IDS,
        scores(),
        "token_in_vocabulary",
        IndexError,
    ),
}
if IS_4:
    BROKEN["n-grams, fewer"] = (lambda: NGRAM(2), IDS[:1], scores(), "a_sequence_for_each_row", IndexError)
    BROKEN["n-grams, as long"] = (lambda: NGRAM(5), IDS[:1], scores(), "a_sequence_for_each_row", IndexError)
else:
    BROKEN["n-grams, fewer"] = (lambda: NGRAM(1), IDS[:1], scores(3), "a_row_for_each_sequence", None)
    BROKEN["n-grams, more"] = (lambda: NGRAM(1), IDS, FEW, "a_row_for_each_sequence", RuntimeError)
    BROKEN["n-grams, scores alone"] = (lambda: NGRAM(1), IDS, scores()[0], "scores_in_batch", None)
    BROKEN["n-grams, ids alone"] = (lambda: NGRAM(1), IDS[0], scores(), "ids_in_batch", IndexError)


@pytest.mark.parametrize("case", BROKEN)
def test_what_a_processor_does_not_take(case: str) -> None:
    make, ids, given, rule_id, error = BROKEN[case]
    if error is None:
        make()(ids, given.clone())
    else:
        with pytest.raises(error) as caught:
            make()(ids, given.clone())
        assert not isinstance(caught.value, og.GuardError)
    processor = make()
    diagnosed(lambda: processor(ids, given.clone()), operator(processor), rule_id)


def test_what_is_wrong_in_silence() -> None:
    assert prefix(1)(IDS[:1], scores())[1].isneginf().all(), "no token is left"
    assert ALTERNATING(0, V, 4)(IDS, scores()).isneginf().all()
    assert ALTERNATING(1, V - 4, 4)(IDS, scores()).isneginf().all()
    assert not lp.ForcedBOSTokenLogitsProcessor(None)(IDS[:, :1], scores()).any(), "all are equally likely"
    given = scores()
    assert torch.equal(watermark(V)(IDS[:1], given)[1], given[1]), "not marked"
    if IS_4:
        assert prefix(4)(IDS, scores()).isneginf().all()
    else:
        given = scores(3)
        assert torch.equal(NGRAM(1)(IDS[:1], given)[1:], given[1:]), "nothing is forbidden"


RIGHT: dict[str, tuple[Callable[[], Any], Tensor, Tensor]] = {
    "min_length": (lambda: lp.MinLengthLogitsProcessor(9, [2, 1000]), IDS[:1], MANY),
    "min_new_tokens": (lambda: lp.MinNewTokensLengthLogitsProcessor(2, 9, [2, 1000]), IDS[:1], MANY),
    "suppressed": (lambda: lp.SuppressTokensLogitsProcessor([3, 1000]), IDS, MANY),
    "suppressed at first": (lambda: lp.SuppressTokensAtBeginLogitsProcessor([3, 1000], 4), IDS, MANY),
    "n-grams": (lambda: NGRAM(1), IDS, scores()),
    "n-grams of one token": (lambda: NGRAM(2), IDS[:, :1], scores()),
    "n-grams of one sequence": (lambda: NGRAM(6), IDS[:1], scores()),
    "n-grams of none": (lambda: NGRAM(2), IDS[:0], scores(0)),
    "encoder n-grams": (lambda: lp.EncoderNoRepeatNGramLogitsProcessor(2, IDS), TWICE, MANY),
    "encoder n-grams, one": (lambda: lp.EncoderNoRepeatNGramLogitsProcessor(2, IDS[0]), IDS[:1, :1], FEW),
    "encoder n-grams, more ids": (lambda: lp.EncoderNoRepeatNGramLogitsProcessor(2, IDS), TWICE, scores()),
    "encoder n-grams, none": (lambda: lp.EncoderNoRepeatNGramLogitsProcessor(2, IDS), IDS[:0], scores(0)),
    "biases": (bias, IDS, scores()),
    "biases again": (lambda: bias(V), IDS[:1, :1], FEW),
    "biases of none": (lambda: bias(V), IDS[:0], scores(0)),
    "bad words": (lambda: lp.NoBadWordsLogitsProcessor([[3], [9, 14]], 2), IDS, scores()),
    "a prefix": (lambda: prefix(2), TWICE, MANY),
    "a prefix of one": (lambda: prefix(1), IDS[:1, :1], FEW),
    "a first token": (lambda: lp.ForcedBOSTokenLogitsProcessor(V - 1), IDS[:, :1], scores()),
    "a first token of two": (lambda: lp.ForcedBOSTokenLogitsProcessor([1, 2]), IDS[:, :1], scores()),
    "a first token, later": (lambda: lp.ForcedBOSTokenLogitsProcessor(V), IDS, scores()),
    "a last token": (lambda: lp.ForcedEOSTokenLogitsProcessor(5, [2, V - 1]), IDS, scores()),
    "a last token, earlier": (lambda: lp.ForcedEOSTokenLogitsProcessor(9, V), IDS, scores()),
    "a last token of none": (lambda: lp.ForcedEOSTokenLogitsProcessor(5, V), IDS[:0], scores(0)),
    "decay": (lambda: lp.ExponentialDecayLengthPenalty((1, 1.1), [2, V - 1], 2), IDS, scores()),
    "decay, earlier": (lambda: lp.ExponentialDecayLengthPenalty((2, 1.1), V, 2), IDS, scores()),
    "an early end": (lambda: lp.BarkEosPrioritizerLogitsProcessor(V - 1, 0.2), IDS, scores()),
    "no early end": (lambda: lp.BarkEosPrioritizerLogitsProcessor(V, None), IDS, scores()),
    "timestamps": (lambda: whisper(V - 2), IDS, scores()),
    "timestamps of one": (lambda: whisper(30), IDS[:1, :2], FEW),
    "no speech": (lambda: no_speech(V - 1, 4), IDS, scores()),
    "no speech, later": (lambda: no_speech(V, 3), IDS, scores()),
    "codebooks, the first": (lambda: ALTERNATING(0, V - 1, 4), IDS, scores()),
    "codebooks, the second": (lambda: ALTERNATING(1, V - 5, 4), IDS, scores()),
    "guidance": (lambda: lp.ClassifierFreeGuidanceLogitsProcessor(2.0), IDS, MANY),
    "guidance of each": (lambda: Guidance(IDS[:, :2]), IDS, scores()),
    "guidance of one": (lambda: Guidance(IDS[:1, :2]), IDS[:1], FEW),
    "guidance by the last token": (lambda: Guidance(None), IDS, scores()),
    "a watermark": (lambda: watermark(V), IDS, scores()),
    "a watermark of a part": (lambda: watermark(V - 1), IDS, MANY),
    "a watermark of a longer text": (lambda: watermark(V, 9), IDS[:1], MANY),
    "SynthID": (lambda: synth_id(2), IDS, scores()),
    "SynthID at first": (synth_id, IDS[:1], scores()),
    "Dia, as many to keep": (lambda: lp.DiaClassifierFreeGuidanceLogitsProcessor(2.0, V), IDS, MANY),
    "Dia, none to keep": (lambda: lp.DiaClassifierFreeGuidanceLogitsProcessor(2.0), IDS, MANY),
    "Dia, channels": (lambda: lp.DiaEOSChannelFilterLogitsProcessor(2, V - 1), IDS, MANY),
    "Dia, channels in turn": (lambda: lp.DiaEOSDelayPatternLogitsProcessor([0, 1], V - 1, 20), IDS, MANY),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_a_processor_takes(case: str) -> None:
    make, ids, given = RIGHT[case]
    assert_right(make, (ids, given))


@pytest.mark.parametrize(
    "make",
    [
        lambda end: lp.ForcedEOSTokenLogitsProcessor(5, [2, end]),
        lambda end: lp.ExponentialDecayLengthPenalty((1, 1.1), [2, end], 2),
        lambda end: lp.BarkEosPrioritizerLogitsProcessor([2, end], 0.2),
    ],
    ids=["forced", "decay", "bark"],
)
def test_ends_that_the_vocabulary_does_not_have(make: Callable[[int], Any]) -> None:
    with pytest.raises(IndexError, match="index 48 is out of bounds"):
        make(V)(IDS, scores())
    violation = diagnosed(lambda: make(V)(IDS, scores()), operator(make(V)), "tokens_in_vocabulary", cost_class="B")
    assert violation.observed == "highest(self.eos_token_id) = 48 at self.eos_token_id[1], scores.shape[-1] = 48"


def test_a_first_token_from_the_end_is_suspect() -> None:
    forced = lp.ForcedBOSTokenLogitsProcessor(-1)
    assert forced(IDS[:, :1], scores()).argmax(-1).tolist() == [V - 1, V - 1]
    suspected(lambda: forced(IDS[:, :1], scores()), operator(forced), "counts from the end")


def test_a_watermark_of_another_vocabulary_is_suspect() -> None:
    with pytest.raises(IndexError):
        watermark(9 * V)(IDS, scores())
    warned = pytest.warns(og.GuardWarning, match="drawn from that many")
    with og.installed("transformers"), warned, pytest.raises(IndexError):
        watermark(9 * V)(IDS, scores())


# ---------------------------------------------------------------- guidance

UNCONDITIONAL = "UnbatchedClassifierFreeGuidanceLogitsProcessor.get_unconditional_logits"


def test_negative_prompts_of_another_batch() -> None:
    for prompts, ids, hint in ((TWICE, IDS, "of another batch"), (IDS, TWICE, "not repeated for beams")):
        given = scores(len(ids))
        with pytest.raises(RuntimeError, match="size of tensor"):
            Guidance(prompts)(ids, given)
        violation = diagnosed(
            lambda prompts=prompts, ids=ids, given=given: Guidance(prompts)(ids, given),
            UNCONDITIONAL,
            "negative_prompts",
        )
        assert violation.hint is not None and hint in violation.hint
    assert Guidance(IDS)(IDS[:1], FEW).shape == (2, V), "a sequence became two"
    diagnosed(lambda: Guidance(IDS)(IDS[:1], FEW), UNCONDITIONAL, "negative_prompts")


def test_one_negative_prompt_for_several() -> None:
    guidance = Guidance(IDS[:1])
    suspected(lambda: guidance(IDS, scores()), UNCONDITIONAL, "the second one fails")
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        guidance(IDS, scores())
    diagnosed(lambda: guidance(IDS, scores()), UNCONDITIONAL, "negative_prompt_for_each")


# ---------------------------------------------------------------- rows to choose from


def test_rows_without_a_choice_are_suspect() -> None:
    nothing = torch.cat([scores(1), torch.full((1, V), -torch.inf)])
    nan, infinite = scores().index_fill(1, torch.tensor([3]), torch.nan), scores()
    infinite[1, 4] = torch.inf
    for given, hint in (
        (nothing, "each token of a row is forbidden"),
        (nan, "NaN or infinite logits"),
        (infinite, "NaN or infinite logits"),
    ):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            torch.multinomial(listed()(IDS, given).softmax(-1), 1)
        text = suspected(lambda given=given: listed()(IDS, given), LIST, "torch.multinomial")
        assert hint in text
    assert_right(lambda: listed(lp.InfNanRemoveLogitsProcessor()), (IDS, nothing), (IDS, nan), (IDS, infinite))
    assert listed()(IDS, nothing)[1].argmax() == 0, "greedy search goes on with token 0"


def test_rows_with_a_choice() -> None:
    one = torch.full((2, V), -torch.inf)
    one[:, 7] = 0
    lowest = torch.full((1, V), torch.finfo(torch.float32).min)
    given = (one, lowest, scores(0), scores(2, 1), scores().half(), scores()[None], scores()[0])
    assert_right(listed, *((IDS, rows) for rows in given))
    assert_right(lambda: listed(repetition(), NGRAM(2), lp.TopPLogitsWarper(0.5)), (IDS, scores()))


# ---------------------------------------------------------------- generate

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[3], [9, 14]]},
    "ends": {"min_new_tokens": 2, "eos_token_id": [2, 71], "exponential_decay_length_penalty": (1, 1.1)},
    "forced": {"forced_eos_token_id": 2, "suppress_tokens": [5], "begin_suppress_tokens": [9]},
    "sampling": {"do_sample": True, "top_k": 1000, "top_p": 0.9, "temperature": 0.7, "typical_p": 0.9},
    "sequences": {"do_sample": True, "num_return_sequences": 3, "min_p": 0.05, "repetition_penalty": 1.2},
    "cutoffs": {"do_sample": True, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "renormalize_logits": True},
    "beams": {"num_beams": 3, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "sequence_bias": {(9, 14): 1.0}},
    "prefixes": {"num_beams": 2, "prefix_allowed_tokens_fn": lambda batch, sequence: [4, 5, 6]},
    "sampled beams": {"do_sample": True, "num_beams": 2, "top_p": 0.8, "num_return_sequences": 2},
    "guidance": {"guidance_scale": 1.5, "negative_prompt_ids": IDS[:, :2]},
    "a watermark": {"watermarking_config": WatermarkingConfig(bias=2.5)},
    "finite": {"remove_invalid_values": True, "do_sample": True},
}


@pytest.mark.usefixtures("no_alarm")
@pytest.mark.parametrize("case", OPTIONS)
def test_generation_is_the_same(tiny: Make, case: str) -> None:
    model = tiny()
    options = {"do_sample": False, **OPTIONS[case]}
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])

    def generated() -> Tensor:
        torch.manual_seed(0)
        result: Tensor = model.generate(IDS, attention_mask=mask, max_new_tokens=4, **options)
        return result

    plain = generated()
    with og.policy(B="raise"), og.installed("transformers"):
        assert torch.equal(plain, generated())
    assert og.record.total == 0


def test_a_weight_of_nan(tiny: Make) -> None:
    model = tiny()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    greedy = {"max_new_tokens": 2, "do_sample": False}
    assert model.generate(IDS, **greedy)[:, 4:].tolist() == [[0, 0], [0, 0]], "token 0 for ever"
    text = suspected(lambda: model.generate(IDS, **greedy), LIST, "greedy search takes its first NaN")
    assert "highest(result[i]) = nan at result[0, 0]" in text
