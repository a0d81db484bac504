"""Interpolated modified Kneser-Ney n-gram models, written as ARPA files.

With a(hw) the adjusted count of an n-gram, h its history and h' the history without its
first word:

    p(w | h) = (a(hw) − D(a(hw))) / Σ_v a(hv)  +  γ(h) · p(w | h')
    γ(h)     = Σ_v D(a(hv)) / Σ_v a(hv)

Adjusted counts are numbers of occurrences for n-grams of the highest order and those
that begin with <s>, numbers of different words seen to the left for all others. Below
the unigrams comes the uniform distribution over the vocabulary and </s>, so every
word of it is possible. The discounts D(1), D(2), D(3 and more) of each order are Chen
and Goodman's, from the counts of counts, where the corpus is large enough for them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from lightning_adpsgd.asr.corpora.utf8 import utf8_lines
from lightning_adpsgd.asr.language.arpa import SECTION, check_arpa
from lightning_adpsgd.files import written_whole

BEGIN, END = "<s>", "</s>"
IMPOSSIBLE = -99.0
"""What ARPA files write for log10(0)."""

Ngram = tuple[str, ...]


@dataclass(frozen=True)
class NgramModel:
    """A back-off model as an ARPA file holds it.

    Attributes:
        order: Words of the longest n-grams.
        log10_probabilities: Probability of every n-gram seen, and of all words.
        log10_backoffs: Back-off weight of every history seen.
    """

    order: int
    log10_probabilities: dict[Ngram, float]
    log10_backoffs: dict[Ngram, float]

    def log10_probability(self, word: str, history: Ngram) -> float:
        """Log10 probability of `word` after `history`, backing off as a decoder does.

        Raises:
            KeyError: The word is not in the vocabulary.
        """
        history = history[-(self.order - 1) :] if self.order > 1 else ()
        ngram = (*history, word)
        if ngram in self.log10_probabilities or not history:
            return self.log10_probabilities[ngram]
        backoff = self.log10_backoffs.get(history, 0.0)
        return backoff + self.log10_probability(word, history[1:])

    def log10_of_sentence(
        self, words: Sequence[str], unknown: float | None = None
    ) -> float:
        """Log10 probability of all the words and the end after them.

        Args:
            words: The words.
            unknown: What each word that is not in the vocabulary has.

        Raises:
            KeyError: A word is not in the vocabulary, and `unknown` is None.
        """
        history = (BEGIN,)
        logs = []
        for word in (*words, END):
            if unknown is None or (word,) in self.log10_probabilities:
                logs.append(self.log10_probability(word, history))
            else:
                logs.append(unknown)
            history = (*history, word)
        return math.fsum(logs)


def estimate(
    sentences: Iterable[Sequence[str]], order: int = 3, vocabulary: Iterable[str] = ()
) -> NgramModel:
    """Estimates a model from sentences.

    Args:
        sentences: Sentences as lists of words; an empty one means a silent utterance.
        order: Order of the model, at least 1.
        vocabulary: Words that get a probability even if they do not occur.

    Raises:
        ValueError: There is no sentence, the order is below 1, or a sentence contains
            <s> or </s>.
    """
    if order < 1:
        raise ValueError(f"`order` must be at least 1, got {order}")
    counts = _adjusted(_count(sentences, order), order)
    words = {*vocabulary, END, *(w for n in counts[0] for w in n)} - {BEGIN}
    below: dict[Ngram, float] = {(): 1.0 / len(words)}
    backoffs: dict[Ngram, float] = {}
    probabilities: dict[Ngram, float] = {}
    for length, adjusted in enumerate(counts, start=1):
        if length == 1:
            adjusted = dict.fromkeys(((w,) for w in sorted(words)), 0) | adjusted
        gammas = _interpolate(adjusted, below if length == 1 else probabilities)
        probabilities |= gammas.probabilities
        backoffs |= gammas.weights
    backoffs.pop((), None)
    return _as_arpa(order, probabilities, backoffs)


def _count(sentences: Iterable[Sequence[str]], order: int) -> list[Counter[Ngram]]:
    counts: list[Counter[Ngram]] = [Counter() for _ in range(order)]
    number = 0
    for number, sentence in enumerate(sentences, start=1):
        if BEGIN in sentence or END in sentence:
            raise ValueError(f"sentence {number} must not contain {BEGIN} or {END}")
        words = (BEGIN, *sentence, END)
        for length, counter in enumerate(counts, start=1):
            ends = range(length, len(words) + 1)
            counter.update(words[end - length : end] for end in ends)
    if number == 0:
        raise ValueError("`sentences` must have at least one sentence, got none")
    return counts


def _adjusted(counts: list[Counter[Ngram]], order: int) -> list[dict[Ngram, int]]:
    adjusted: list[dict[Ngram, int]] = [{} for _ in range(order)]
    adjusted[-1] = dict(counts[-1])
    for length in range(order - 1, 0, -1):
        lefts = Counter(ngram[1:] for ngram in counts[length])
        adjusted[length - 1] = {
            ngram: count if ngram[0] == BEGIN else lefts[ngram]
            for ngram, count in counts[length - 1].items()
        }
    adjusted[0].pop((BEGIN,), None)  # a sentence begins by itself
    return adjusted


@dataclass(frozen=True)
class _Interpolated:
    probabilities: dict[Ngram, float]
    weights: dict[Ngram, float]


def _interpolate(
    adjusted: dict[Ngram, int], below: dict[Ngram, float]
) -> _Interpolated:
    discounts = _discounts(adjusted.values())
    totals: defaultdict[Ngram, int] = defaultdict(int)
    discounted: defaultdict[Ngram, float] = defaultdict(float)
    for ngram, count in adjusted.items():
        totals[ngram[:-1]] += count
        discounted[ngram[:-1]] += discounts[min(count, 3)]
    weights = {h: discounted[h] / totals[h] for h in totals}
    probabilities = {
        ngram: (count - discounts[min(count, 3)]) / totals[ngram[:-1]]
        + weights[ngram[:-1]] * (below[()] if len(ngram) == 1 else below[ngram[1:]])
        for ngram, count in adjusted.items()
    }
    return _Interpolated(probabilities, weights)


def _discounts(counts: Iterable[int]) -> tuple[float, float, float, float]:
    """D(0) = 0, D(1), D(2), D(3 and more)."""
    how_many = Counter(counts)
    n1, n2, n3, n4 = (how_many[k] for k in (1, 2, 3, 4))
    if 0 in (n1, n2, n3, n4):
        # Too few n-grams for these ratios: one discount, which keeps mass for others.
        d = n1 / (n1 + 2 * n2) if n1 and n2 else 0.5
        return 0.0, d, d, d
    y = n1 / (n1 + 2 * n2)
    raw = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    d1, d2, d3 = (
        min(max(d, 0.1), k - 0.1) for k, d in enumerate(raw, start=1)
    )  # part of the count itself must be left, and mass for the others
    return 0.0, d1, d2, d3


def _as_arpa(
    order: int, probabilities: dict[Ngram, float], backoffs: dict[Ngram, float]
) -> NgramModel:
    logs = {ngram: math.log10(p) for ngram, p in probabilities.items()}
    logs[(BEGIN,)] = IMPOSSIBLE
    return NgramModel(
        order, logs, {h: math.log10(weight) for h, weight in backoffs.items()}
    )


def write_arpa(path: Path, model: NgramModel) -> None:
    """Writes the model as an ARPA file, whole or not at all."""
    by_length: list[list[Ngram]] = [[] for _ in range(model.order)]
    for ngram in model.log10_probabilities:
        by_length[len(ngram) - 1].append(ngram)
    with written_whole(path) as file:
        file.write("\\data\\\n")
        for length, ngrams in enumerate(by_length, start=1):
            file.write(f"ngram {length}={len(ngrams)}\n")
        for length, ngrams in enumerate(by_length, start=1):
            _write_section(file, model, length, sorted(ngrams))
        file.write("\n\\end\\\n")


def read_arpa(path: Path) -> NgramModel:
    """Reads a model from an ARPA file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is malformed or missing; path and line are named.
    """
    order = max(check_arpa(path, for_kaldilm=False))
    probabilities: dict[Ngram, float] = {}
    backoffs: dict[Ngram, float] = {}
    length = 0
    for _, line in utf8_lines(path):
        if section := SECTION.fullmatch(line.strip()):
            length = int(section[1])
        elif length and line.strip() and line.strip() != "\\end\\":
            fields = line.split()
            ngram = tuple(fields[1 : length + 1])
            probabilities[ngram] = float(fields[0])
            if len(fields) > length + 1:
                backoffs[ngram] = float(fields[length + 1])
    return NgramModel(order, probabilities, backoffs)


def _write_section(
    file: TextIO, model: NgramModel, length: int, ngrams: list[Ngram]
) -> None:
    file.write(f"\n\\{length}-grams:\n")
    for ngram in ngrams:
        line = f"{model.log10_probabilities[ngram]:.6f}\t{' '.join(ngram)}"
        if ngram in model.log10_backoffs:
            line += f"\t{model.log10_backoffs[ngram]:.6f}"
        file.write(line + "\n")
