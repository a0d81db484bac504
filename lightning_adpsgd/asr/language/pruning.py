"""Pruning of n-gram models by relative entropy.

Words R that are left out after a history h are backed off to: p'(w|h) = α' p(w|h'),
with the back-off weight α' that makes all words after h sum to one again. The
divergence of the two models (Stolcke 1998, "Entropy-based pruning of backoff language
models", there for one word)

    D(R) = p(h) { Σ p(w|h) ln [p(w|h) / p(w|h')]  +  β ln α  -  (β + P) ln α' }

    β  = 1 - Σ p(v|h)  over all v that have been seen after h;  P = Σ p(w|h)
    α' = (β + P) / (1 - Σ p(v|h') + Σ p(w|h'));                 sums over w: those in R

makes the perplexity grow by the factor exp(D). Words are tried in the order of their
individual costs. One is removed if, with those removed before it, it makes the
perplexity grow by less than the threshold. p(h) is the frequency of the history in the
training text, not that in the model: the lower orders of Kneser-Ney models are not
frequencies, and pruning by them removes the wrong n-grams (Chelba and others 2010).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lightning_adpsgd.asr.language.ngram import (
    BEGIN,
    END,
    IMPOSSIBLE,
    Ngram,
    NgramModel,
)


def prune(
    model: NgramModel, threshold: float, sentences: Iterable[Sequence[str]]
) -> NgramModel:
    """Removes n-grams whose loss changes the perplexity little.

    Histories of n-grams that stay are kept, as are all words.

    Args:
        model: Model whose probabilities sum to one after every history.
        threshold: Relative growth of the perplexity; 1e-8 is usual for Switchboard.
        sentences: Sentences from which the model was estimated.

    Raises:
        ValueError: `threshold` is negative.
    """
    if threshold < 0:
        raise ValueError(f"`threshold` must not be negative, got {threshold}")
    frequencies = _Frequencies(model, sentences)
    kept = dict(model.log10_probabilities)
    for length in range(model.order, 1, -1):
        needed = {ngram[:-1] for ngram in kept if len(ngram) == length + 1}
        for history, words in _by_history(kept, length).items():
            may_go = [word for word in words if (*history, word) not in needed]
            costs = _Costs(model, history, words, frequencies(history))
            for word in costs.cheap(may_go, threshold):
                del kept[(*history, word)]
    return normalised(model.order, kept)


class Pruned(NamedTuple):
    """A pruned model.

    Attributes:
        model: The model.
        threshold: Threshold that `prune` was called with; 0 if nothing had to go.
    """

    model: NgramModel
    threshold: float


def prune_to(
    model: NgramModel,
    most: int,
    sentences: Sequence[Sequence[str]],
    threshold: float = 0.0,
) -> Pruned:
    """Prunes a model to at most `most` n-grams; words always stay.

    The first threshold is the cost of the costliest n-gram that has to go, each taken
    alone. It is raised if that leaves too many, because costs add up and histories of
    remaining n-grams are kept.

    Args:
        model: Model whose probabilities sum to one after every history.
        most: Largest number of n-grams.
        sentences: Sentences from which the model was estimated.
        threshold: Least threshold.
    """
    most = max(most, sum(len(ngram) == 1 for ngram in model.log10_probabilities))
    threshold = max(threshold, _threshold_for(model, most, sentences))
    pruned = prune(model, threshold, sentences) if threshold else model
    while (number := len(pruned.log10_probabilities)) > most:
        threshold *= max(1.25, number / most)
        pruned = prune(model, threshold, sentences)
    return Pruned(pruned, threshold)


def _threshold_for(
    model: NgramModel, most: int, sentences: Iterable[Sequence[str]]
) -> float:
    surplus = len(model.log10_probabilities) - most
    if surplus <= 0:
        return 0.0
    frequencies = _Frequencies(model, sentences)
    costs: list[float] = []
    for length in range(2, model.order + 1):
        ngrams = _by_history(model.log10_probabilities, length)
        for history, words in ngrams.items():
            alone = _Costs(model, history, words, frequencies(history))
            costs += (math.expm1(alone.divergence([word])) for word in words)
    return max(1e-12, sorted(costs)[min(surplus, len(costs)) - 1])


class _Frequencies:
    """The share of each history in a text, or in the model where no text has it."""

    def __init__(self, model: NgramModel, sentences: Iterable[Sequence[str]]) -> None:
        self._model, self._counted = model, _frequencies(sentences, model.order)

    def __call__(self, history: Ngram) -> float:
        return self._counted[history] or self._of_model(history)

    def _of_model(self, history: Ngram) -> float:
        """By the model's word probabilities, with one word in ten as <s>."""
        known = self._model.log10_probabilities
        logs = [
            -1.0 if word == BEGIN else self._model.log10_probability(word, history[:at])
            for at, word in enumerate(history)
            if (word,) in known
        ]
        return 10 ** math.fsum(logs)


def _frequencies(sentences: Iterable[Sequence[str]], order: int) -> Counter[Ngram]:
    """Relative frequency of each history among all words and ends of sentences."""
    counts: Counter[Ngram] = Counter()
    total = 0
    for sentence in sentences:
        words = (BEGIN, *sentence, END)
        total += len(words) - 1
        for length in range(1, order):
            ends = range(length, len(words))
            counts.update(words[end - length : end] for end in ends)
    return Counter({history: count / total for history, count in counts.items()})  # pyright: ignore[reportArgumentType]


def _by_history(ngrams: Iterable[Ngram], length: int) -> dict[Ngram, list[str]]:
    words: defaultdict[Ngram, list[str]] = defaultdict(list)
    for ngram in ngrams:
        if len(ngram) == length:
            words[ngram[:-1]].append(ngram[-1])
    return words


class _Costs:
    """The cost of leaving out words after one history."""

    def __init__(
        self, model: NgramModel, history: Ngram, words: Sequence[str], frequency: float
    ) -> None:
        self._frequency = frequency
        self._here = {w: 10 ** model.log10_probabilities[(*history, w)] for w in words}
        self._below = {w: 10 ** model.log10_probability(w, history[1:]) for w in words}
        self._rest = max(1 - math.fsum(self._here.values()), 0.0)
        self._rest_below = max(1 - math.fsum(self._below.values()), 0.0)

    def divergence(self, words: Iterable[str]) -> float:
        """Divergence of the model without all of these words."""
        gone = _NOTHING
        for word in words:
            gone = self._with(gone, word)
        return self._of(gone)

    def cheap(self, words: Iterable[str], threshold: float) -> Iterator[str]:
        """The words that can be left out below the threshold."""
        gone, cost = _NOTHING, 0.0
        for word in sorted(words, key=lambda word: self.divergence([word])):
            more = self._with(gone, word)
            if math.expm1(self._of(more) - cost) <= threshold:
                gone, cost = more, self._of(more)
                yield word

    def _with(self, gone: "_Gone", word: str) -> "_Gone":
        p, q = self._here[word], self._below[word]
        return _Gone(gone.here + p, gone.below + q, gone.lost + p * math.log(p / q))

    def _of(self, gone: "_Gone") -> float:
        before = _weighted(self._rest, self._rest_below)
        after = _weighted(self._rest + gone.here, self._rest_below + gone.below)
        return self._frequency * (gone.lost + before - after)


class _Gone(NamedTuple):
    """Sums over the words that are left out: p(w|h), p(w|h') and p(w|h) ln of both."""

    here: float
    below: float
    lost: float


_NOTHING = _Gone(0.0, 0.0, 0.0)


def _weighted(rest: float, rest_below: float) -> float:
    return rest * math.log(rest / rest_below) if rest > 0 and rest_below > 0 else 0.0


def normalised(order: int, probabilities: dict[Ngram, float]) -> NgramModel:
    """A model with the back-off weights that belong to these probabilities."""
    backoffs: dict[Ngram, float] = {}
    model = NgramModel(order, probabilities, backoffs)
    for length in range(2, order + 1):  # a weight needs those of shorter histories
        for history, words in _by_history(probabilities, length).items():
            here = (10 ** probabilities[(*history, word)] for word in words)
            below = (10 ** model.log10_probability(word, history[1:]) for word in words)
            rest, rest_below = 1 - math.fsum(here), 1 - math.fsum(below)
            if rest_below > 0:  # without a weight, other words would keep all of theirs
                share = rest / rest_below
                backoffs[history] = math.log10(share) if share > 0 else IMPOSSIBLE
    return model
