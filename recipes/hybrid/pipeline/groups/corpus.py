"""What is read: utterances, pronunciations, word sequences and sound."""

import math
from dataclasses import dataclass
from pathlib import Path

from recipes.hybrid.pipeline.bounds import above_zero, at_least, one_of, within

SPEEDS = (0.5, 2.0)
_LEAST_S = 0.06


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """Which utterances are used, and for what.

    Attributes:
        dev_utterances: number of utterances, the first by id, that are held out as
            `dev`, as in Kaldi's recipe. Their speakers may be in `train` as well. With
            0, whole speakers are held out instead, and none of them is in `train`.
        dev_fraction: share of the training speakers held out as `dev`, the last ones
            by name. Only used if `dev_utterances` is 0.
        min_dev_sides: fewest conversation sides in `dev`; only used with
            `dev_fraction`.
        max_repeats: number of utterances kept in `train`, approximately, of a text
            that is heard more often. Without it "uh-huh" takes over. 0 keeps all.
        extend_s: seconds by which test segments begin earlier and end later, unless
            they would reach into another segment; 0.1 in Kaldi's recipe.
        clip_s: seconds by which a transcript may end after its audio. It is clipped;
            beyond that the utterance is skipped and counted.
        min_utterance_s: seconds below which an utterance is skipped and counted, at
            least 0.06: at twice the speed a frame of 25 ms must fit.
    """

    dev_utterances: int = 0
    dev_fraction: float = 0.08
    min_dev_sides: int = 2
    max_repeats: int = 300
    extend_s: float = 0.0
    clip_s: float = 0.1
    min_utterance_s: float = 0.1

    def __post_init__(self) -> None:
        if not self.dev_utterances:
            at_least(self, 1, "min_dev_sides")
        at_least(self, 0, "dev_utterances", "max_repeats")
        at_least(self, 0, "extend_s", "clip_s")
        at_least(self, _LEAST_S, "min_utterance_s")
        within(self, 0, 1, "dev_fraction")


@dataclass(frozen=True, kw_only=True)
class LexiconSettings:
    """Where pronunciations come from.

    Attributes:
        repair: whether the patches of Kaldi's recipe are applied to the MS-State
            dictionary.
        cmudict: dictionary in CMUdict's form, for training words that the MS-State
            dictionary lacks, or in place of the corpus's lexicon; none by default.
        synthesise: whether eSpeak pronounces words that no dictionary has.
        min_count: occurrences in training below which eSpeak is not asked for a word.
    """

    repair: bool = False
    cmudict: Path | None = None
    synthesise: bool = False
    min_count: int = 2


@dataclass(frozen=True, kw_only=True)
class LmSettings:
    """The n-gram language models of the training transcripts.

    Attributes:
        order: number of words in the longest n-grams of the search graph.
        prune: relative growth of the model's perplexity below which an n-gram is left
            out; 0 keeps all n-grams. A word sequence that occurs once in n words costs
            some 1 / n or more.
        max_ngrams: largest number of n-grams of the search graph; more are pruned away
            as `prune` does. 0 is no bound.
        large_order: order of a second model, which is not pruned, for `decode.nbest`;
            0 for none.
        text: file of further sentences, one a line, whose audio need not be there.
        arpa: ARPA file of a model from elsewhere, unpacked.
        weights: weights of the transcripts' model, that of `text` and that of `arpa`,
            of those that there are; none: those with which `dev` is likeliest.
    """

    order: int = 3
    prune: float = 0.0
    max_ngrams: int = 0
    large_order: int = 0
    text: Path | None = None
    arpa: Path | None = None
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        at_least(self, 1, "order")
        at_least(self, 0, "prune", "large_order", "max_ngrams")
        number = 1 + (self.text is not None) + (self.arpa is not None)
        if self.weights is not None:
            above_zero(self, "weights")
            if len(self.weights) != number or abs(sum(self.weights) - 1) > 1e-6:
                raise ValueError(
                    f"`weights` must be {number} numbers that sum to 1, got "
                    f"{','.join(map(str, self.weights))}"
                )


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """What is stored for each 10 ms frame.

    Attributes:
        num_mels: number of log-mel coefficients per frame. Without Kaldi's labels 13
            or more: that many cepstra are computed of them.
        dtype: type on disk, "float16" or "float32".
        noise_share: share of the training sides to which noise is added.
        noise_decibels: lowest and highest signal-to-noise ratio that is drawn.
        noise_files: folder of recorded noise; white noise if none.
        noise_seed: seed of everything drawn for the noise.
        speeds: speeds of further copies of every training utterance, for instance 0.9
            and 1.1. Each copy has a speaker of its own.
    """

    num_mels: int = 40
    dtype: str = "float16"
    noise_share: float = 0.0
    noise_decibels: tuple[float, float] = (10.0, 25.0)
    noise_files: Path | None = None
    noise_seed: int = 0
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        at_least(self, 1, "num_mels")
        at_least(self, 0, "noise_seed")
        one_of(self, "dtype", ("float16", "float32"))
        _check_speeds(self.speeds)
        _check_decibels(self.noise_decibels)
        if not 0 <= self.noise_share <= 1:
            raise ValueError(
                f"`noise_share` must lie in [0, 1], got {self.noise_share}"
            )


def _check_decibels(decibels: tuple[float, ...]) -> None:
    is_range = all(map(math.isfinite, decibels)) and sorted(decibels) == [*decibels]
    if len(decibels) != 2 or not is_range:
        raise ValueError(
            "`noise_decibels` must be two finite numbers, the lower one first, got "
            f"{','.join(map(str, decibels))}"
        )


def _check_speeds(speeds: tuple[float, ...]) -> None:
    slowest, fastest = SPEEDS
    for speed in speeds:
        # NaN is refused here too.
        if not slowest <= speed <= fastest or speed != round(speed, 2):
            raise ValueError(
                f"`speeds` must be from {slowest} to {fastest} in steps of 0.01, got "
                f"{speed}; 0.9,1.1 is usual"
            )
    if 1 in speeds or len(set(speeds)) < len(speeds):
        raise ValueError(
            "`speeds` names each copy's speed once, without the recorded speed 1, got "
            f"{','.join(map(str, speeds))}"
        )
