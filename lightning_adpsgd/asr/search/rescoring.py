"""Alternatives of a search, weighed anew with a larger language model.

The graph holds a small n-gram. The score of a word sequence W with the larger one is

    score(W) = -cost(W) + λ [ln p_large(W) - ln p_small(W)] - penalty · |W|

with the cost of the search, in which the small model stands fully: λ = 0 leaves the
order as it is, λ = 1 puts the larger model in place of the small one.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_adpsgd.asr.language.ngram import NgramModel
from lightning_adpsgd.asr.search.decoding import Alternative, Hypothesis, Lister
from lightning_adpsgd.asr.search.nbest import NBestOptions

_IMPOSSIBLE = -99.0  # as ARPA files write log10(0)


class Weighed(NamedTuple):
    """One word sequence of an utterance, with what its score is made of.

    Attributes:
        hypothesis: The words and their times.
        cost: Cost in the search.
        gain: ln p_large - ln p_small of its words.
    """

    hypothesis: Hypothesis
    cost: float
    gain: float


class Weights(NamedTuple):
    """λ and the penalty of a word, to be chosen on development data."""

    large: float = 1.0
    word_penalty: float = 0.0


def weigh(
    alternatives: Sequence[Alternative], small: NgramModel, large: NgramModel
) -> list[Weighed]:
    """Weighs every alternative with both language models.

    Args:
        alternatives: Alternatives of one utterance.
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


class RescoringDecoder:
    """Finds the words that two language models together find best.

    Args:
        decoder: Its graph is made of the small model.
        options: Number of alternatives that are weighed.
        small: The model of the graph.
        large: The model to score with.

    Attributes:
        weights: Weights of the larger model and of a word.
    """

    def __init__(
        self,
        decoder: Lister,
        options: NBestOptions,
        small: NgramModel,
        large: NgramModel,
    ) -> None:
        self.weights = Weights()
        self._decoder, self._options = decoder, options
        self._small, self._large = small, large

    def weighed(
        self, log_likelihoods: np.ndarray, acoustic_scale: float
    ) -> list[Weighed]:
        """The alternatives, as of `Lister.alternatives`."""
        found = self._decoder.alternatives(
            log_likelihoods, acoustic_scale, self._options
        )
        return weigh(found, self._small, self._large)

    def decode(self, log_likelihoods: np.ndarray, acoustic_scale: float) -> Hypothesis:
        """The best words, as of `Search.decode`."""
        return best(self.weighed(log_likelihoods, acoustic_scale), self.weights)


def _log(model: NgramModel, words: Sequence[str]) -> float:
    try:
        log10 = model.log10_of_sentence(words)
    except KeyError:
        log10 = _IMPOSSIBLE
    return log10 * math.log(10)
