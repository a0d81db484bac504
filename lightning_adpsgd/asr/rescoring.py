"""Alternatives of a search, weighed anew with a larger language model.

The graph holds a small n-gram. The score of a word sequence W with the larger one is

    score(W) = -cost(W) + λ [ln p_large(W) - ln p_small(W)] - penalty · |W|

with the cost of the search, in which the small model stands fully: λ = 0 leaves the
order as it is, λ = 1 puts the larger model in place of the small one.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_adpsgd.asr.decoding import Alternative, Hypothesis
from lightning_adpsgd.asr.ngram import NgramModel

_IMPOSSIBLE = -99.0  # as ARPA files write log10(0)


class Weighed(NamedTuple):
    """One word sequence of an utterance, with what its score is made of.

    Attributes:
        hypothesis: The words and their times.
        cost: Of the search.
        gain: ln p_large - ln p_small of its words.
    """

    hypothesis: Hypothesis
    cost: float
    gain: float


class Weights(NamedTuple):
    """λ and the penalty of a word, to be chosen on development data."""

    large: float
    word_penalty: float


def weigh(
    alternatives: Sequence[Alternative], small: NgramModel, large: NgramModel
) -> list[Weighed]:
    """What both language models say of every alternative.

    Args:
        alternatives: Of one utterance.
        small: The model that the graph was made of.
        large: The model to score with. A word that it lacks is impossible.
    """
    return [
        Weighed(
            hypothesis,
            cost,
            _log(large, hypothesis.text) - _log(small, hypothesis.text),
        )
        for hypothesis, cost in alternatives
    ]


def best(alternatives: Sequence[Weighed], weights: Weights) -> Hypothesis:
    """The one with the highest score; of no alternatives, nothing that was said."""

    def score(one: Weighed) -> float:
        penalty = weights.word_penalty * len(one.hypothesis.words)
        return -one.cost + weights.large * one.gain - penalty

    if not alternatives:
        return Hypothesis((), False)
    return max(alternatives, key=score).hypothesis


def _log(model: NgramModel, words: Sequence[str]) -> float:
    try:
        log10 = model.log10_of_sentence(words)
    except KeyError:
        log10 = _IMPOSSIBLE
    return log10 * math.log(10)
