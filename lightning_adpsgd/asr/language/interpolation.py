"""The interpolation of n-gram models: a weighted sum of their probabilities.

    p(w|h) = Σ_i λ_i p_i(w|h)

The mixture has every n-gram that one of the models has, and its back-off weights make
all words after a history sum to one. Beyond its own n-grams it backs off within itself,
and not within each model: that is the usual static interpolation. The weights can be
those with which held-out sentences are likeliest, by expectation maximisation.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from lightning_adpsgd.asr.corpora.utf8 import composed, in_one_form
from lightning_adpsgd.asr.language.ngram import BEGIN, END, Ngram, NgramModel
from lightning_adpsgd.asr.language.pruning import normalised

_ITERATIONS = 30
_NEVER = -99.0


def restricted(model: NgramModel, vocabulary: Iterable[str]) -> NgramModel:
    """The n-grams of a model whose words are all in a vocabulary.

    Raises:
        ValueError: No word of the vocabulary is left.
    """
    known = {*vocabulary, BEGIN, END}
    kept = {
        ngram: value
        for ngram, value in model.log10_probabilities.items()
        if known.issuperset(ngram)
    }
    if not {ngram[0] for ngram in kept if len(ngram) == 1} - {BEGIN, END}:
        raise ValueError("the model has no word of the vocabulary")
    weights = {h: v for h, v in model.log10_backoffs.items() if known.issuperset(h)}
    return NgramModel(model.order, kept, weights)


def in_lower_case(model: NgramModel) -> NgramModel:
    """The model with its words in lower case.

    Raises:
        ValueError: Words differ in their case alone.
    """
    return _folded(model, str.lower, "case")


def in_nfc(model: NgramModel, vocabulary: Collection[str] | None = None) -> NgramModel:
    """The model with its words in NFC.

    Args:
        model: The model.
        vocabulary: Words in NFC and lower case; others of the model stay as they are.
            None: all words are in it.

    Raises:
        ValueError: Words of the vocabulary differ in their Unicode form alone.
    """

    def fold(word: str) -> str:
        is_in = vocabulary is None or in_one_form(word) in vocabulary
        return composed(word) if is_in else word

    words = (ngram[0] for ngram in model.log10_probabilities if len(ngram) == 1)
    if all(word == fold(word) for word in words):
        return model
    return _folded(model, fold, "their Unicode form (NFC, NFD)")


def _folded(model: NgramModel, fold: Callable[[str], str], what: str) -> NgramModel:
    known: dict[str, str] = {}
    for (word,) in filter(lambda ngram: len(ngram) == 1, model.log10_probabilities):
        if (other := known.setdefault(fold(word), word)) != word:
            raise ValueError(f"its words {other} and {word} differ in {what} alone")

    def folded(values: Mapping[Ngram, float]) -> dict[Ngram, float]:
        return {tuple(map(fold, ngram)): v for ngram, v in values.items()}

    probabilities = folded(model.log10_probabilities)
    return NgramModel(model.order, probabilities, folded(model.log10_backoffs))


def interpolate(models: Sequence[NgramModel], weights: Sequence[float]) -> NgramModel:
    """Interpolates models.

    Args:
        models: Models over one vocabulary; a word that a model lacks has probability 0
            in it.
        weights: Positive weights of the models, with sum 1.

    Raises:
        ValueError: The weights are invalid.
    """
    if len(models) != len(weights) or min(weights) <= 0:
        raise ValueError(
            f"`weights` must be {len(models)} numbers above 0, got {[*weights]}"
        )
    if not math.isclose(sum(weights), 1, abs_tol=1e-6):
        raise ValueError(f"`weights` must sum to 1, got {sum(weights):g}")
    mixed: dict[Ngram, float] = {}
    for ngram in sorted({n for model in models for n in model.log10_probabilities}):
        pairs = zip(weights, models, strict=True)
        total = math.fsum(weight * probability(model, ngram) for weight, model in pairs)
        mixed[ngram] = math.log10(total) if total > 0 else _NEVER
    order = max(model.order for model in models)
    return normalised(order, _summing_to_one(mixed))


def _summing_to_one(logs: dict[Ngram, float]) -> dict[Ngram, float]:
    """Gives words the probability that the models gave to words left out."""
    words = [n for n in logs if len(n) == 1 and n != (BEGIN,)]
    rest = math.log10(math.fsum(10 ** logs[word] for word in words))
    return logs | {word: logs[word] - rest for word in words}


def probability(model: NgramModel, ngram: Ngram) -> float:
    """Probability of the last word after the others; 0 if the model lacks the word."""
    *history, word = ngram
    if (word,) not in model.log10_probabilities:
        return 0.0
    return 10 ** model.log10_probability(word, tuple(history))


def likeliest_weights(
    models: Sequence[NgramModel], sentences: Iterable[Sequence[str]]
) -> list[float]:
    """The weights that maximise the likelihood of held-out sentences.

    Args:
        models: Models; words that none of them has are ignored.
        sentences: Held-out sentences.
    """
    rows = [row for row in _probabilities(models, sentences) if sum(row) > 0]
    weights = [1 / len(models)] * len(models)
    for _ in range(_ITERATIONS if rows else 0):
        shares = [0.0] * len(models)
        for row in rows:
            parts = [w * p for w, p in zip(weights, row, strict=True)]
            total = sum(parts)
            shares = [s + part / total for s, part in zip(shares, parts, strict=True)]
        # A weight of zero would exclude a model for good.
        raised = [max(share / len(rows), 1e-4) for share in shares]
        weights = [share / sum(raised) for share in raised]
    return weights


def _probabilities(
    models: Sequence[NgramModel], sentences: Iterable[Sequence[str]]
) -> Iterator[list[float]]:
    longest = max(model.order for model in models) - 1
    for sentence in sentences:
        words = (BEGIN, *sentence, END)
        for end in range(1, len(words)):
            ngram = words[max(0, end - longest) : end + 1]
            yield [probability(model, ngram) for model in models]
