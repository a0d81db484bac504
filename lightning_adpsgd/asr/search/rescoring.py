"""The alternatives of a search, rescored with a larger language model.

The graph holds a small n-gram. The score of a word sequence W with the larger one is

    score(W) = -cost(W) + λ [ln p_large(W) - ln p_small(W)] - penalty · |W|

with the cost of the search, which includes the small model in full: λ = 0 keeps the
order, λ = 1 replaces the small model by the larger one. Each word that the larger model
lacks has the probability that ARPA files write for impossible ones. One that the small
model lacks was not weighed by it, and nothing of its is replaced.
"""

import math
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein

from lightning_adpsgd.asr.language.ngram import NgramModel
from lightning_adpsgd.asr.search.decoding import Lister
from lightning_adpsgd.asr.search.nbest import NBestOptions
from lightning_adpsgd.asr.search.words import Alternative, Hypothesis

_IMPOSSIBLE = -99.0  # as ARPA files write log10(0)


class Weighed(NamedTuple):
    """One word sequence of an utterance, with the terms of its score.

    Attributes:
        text: The words.
        cost: Cost in the search.
        gain: ln p_large - ln p_small of its words.
        num_unknown: Words that one of the models lacks.
    """

    text: tuple[str, ...]
    cost: float
    gain: float
    num_unknown: int = 0


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
        large: The model to score with. A word that it lacks is impossible. Each model
            is asked for the words in its own case.
    """
    return [_weighed(one, small, large) for one in alternatives]


def _weighed(one: Alternative, small: NgramModel, large: NgramModel) -> Weighed:
    before, after = _log(small, one.text, 0.0), _log(large, one.text, _IMPOSSIBLE)
    unknown = max(before.num_unknown, after.num_unknown)
    return Weighed(one.text, one.cost, after.value - before.value, unknown)


def scores(alternatives: Sequence[Weighed], weights: Weights) -> np.ndarray:
    """The score of each alternative, float64."""
    return np.array(
        [
            -one.cost + weights.large * one.gain - weights.word_penalty * len(one.text)
            for one in alternatives
        ]
    )


def best(alternatives: Sequence[Weighed], weights: Weights) -> tuple[str, ...]:
    """The words with the highest score; no words if there are no alternatives."""
    if not alternatives:
        return ()
    return alternatives[int(scores(alternatives, weights).argmax())].text


def confidences(alternatives: Sequence[Weighed], weights: Weights) -> list[float]:
    """The confidence of each word of the best alternative.

    The posterior of an alternative is the share of exp(score). The confidence of a word
    is the sum over alternatives in which it stands at the same place, by the alignment
    with the fewest changes.
    """
    several = scores(alternatives, weights)
    posteriors = np.exp(several - np.logaddexp.reduce(several))
    chosen = alternatives[int(several.argmax())].text
    sums = np.zeros(len(chosen))
    for one, posterior in zip(alternatives, posteriors, strict=True):
        for tag, first, last, _, _ in Levenshtein.opcodes(chosen, one.text):
            if tag == "equal":
                sums[first:last] += posterior
    return np.minimum(sums, 1.0).tolist()


class RescoringDecoder:
    """Finds the words with the best score from two language models.

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
        return self._weigh(self._found(log_likelihoods, acoustic_scale))

    def decode(self, log_likelihoods: np.ndarray, acoustic_scale: float) -> Hypothesis:
        """The best words and their confidence, as of `Search.decode`."""
        found = self._found(log_likelihoods, acoustic_scale)
        if not found:
            return Hypothesis((), False)
        weighed = self._weigh(found)
        chosen = int(scores(weighed, self.weights).argmax())
        hypothesis = found[chosen].timed()
        sure = confidences(weighed, self.weights)
        timed = zip(hypothesis.words, sure, strict=True)
        words = tuple(word._replace(confidence=one) for word, one in timed)
        return hypothesis._replace(words=words, num_listed=len(found))

    def _found(
        self, log_likelihoods: np.ndarray, acoustic_scale: float
    ) -> list[Alternative]:
        return self._decoder.alternatives(
            log_likelihoods, acoustic_scale, self._options
        )

    def _weigh(self, found: Sequence[Alternative]) -> list[Weighed]:
        return weigh(found, self._small, self._large)


class _Log(NamedTuple):
    """The natural logarithm of a sentence's probability, and its unknown words."""

    value: float
    num_unknown: int


def _log(model: NgramModel, words: Sequence[str], unknown: float) -> _Log:
    """The probability by a model; `unknown` is the log10 of each word that it lacks."""
    spelled = [_spelled(model, word) for word in words]
    num_unknown = sum((word,) not in model.log10_probabilities for word in spelled)
    return _Log(model.log10_of_sentence(spelled, unknown) * math.log(10), num_unknown)


def _spelled(model: NgramModel, word: str) -> str:
    """The word as the model has it: a Kaldi graph may have capitals, a model NFD."""
    cases = (word, word.lower(), word.upper())
    forms = (*cases, *(unicodedata.normalize("NFD", one) for one in cases))
    return next((one for one in forms if (one,) in model.log10_probabilities), word)
