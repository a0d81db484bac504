"""A pruned model is a distribution, and what goes makes the least difference."""

import itertools
import math
import random
from pathlib import Path

import kaldilm
import pytest

from lightning_adpsgd.asr.language.ngram import (
    NgramModel,
    estimate,
    read_arpa,
    write_arpa,
)
from lightning_adpsgd.asr.language.pruning import (
    _Costs,
    _frequencies,
    normalised,
    prune,
    prune_to,
)

WORDS = ["a", "b", "c", "d", "e"]


def text(number: int = 200) -> list[list[str]]:
    """Sentences in which a word depends on the two before it."""
    draw = random.Random(0)
    sentences = []
    for _ in range(number):
        words = ["a", draw.choice(WORDS)]
        while draw.random() < 0.8:
            follows = WORDS.index(words[-2]) + 2 * WORDS.index(words[-1])
            is_rule = draw.random() < 0.7
            words.append(WORDS[follows % 5] if is_rule else draw.choice(WORDS))
        sentences.append(words)
    return sentences


def perplexity(model: NgramModel, sentences: list[list[str]]) -> float:
    total = sum(len(words) + 1 for words in sentences)
    logs = math.fsum(model.log10_of_sentence(words) for words in sentences)
    return 10 ** (-logs / total)


@pytest.mark.parametrize("most", [40, 80, 120])
def test_as_many_ngrams_stay_as_may(most: int):
    model = estimate(text(), 4, WORDS)
    pruned, threshold = prune_to(model, most, text())
    assert 0.5 * most <= len(pruned.log10_probabilities) <= most
    again = prune(model, threshold, text())
    assert again.log10_probabilities == pruned.log10_probabilities


def test_a_model_that_is_small_enough_stays_as_it_is():
    model = estimate(text(), 4, WORDS)
    kept = prune_to(model, len(model.log10_probabilities), text())
    assert kept.model is model
    assert kept.threshold == 0
    assert len(prune_to(model, 0, text()).model.log10_probabilities) == 7


@pytest.mark.parametrize("threshold", [0.0, 1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("order", [2, 3, 4])
def test_a_pruned_model_sums_to_one_after_every_history(order: int, threshold: float):
    model = prune(estimate(text(), order, [*WORDS, "never"]), threshold, text())
    for length in range(order):
        for history in itertools.product(["<s>", "a", "c", "never"], repeat=length):
            words = [*WORDS, "never", "</s>"]
            total = sum(10 ** model.log10_probability(w, history) for w in words)
            assert total == pytest.approx(1.0, abs=1e-9)


def test_the_cost_is_the_divergence_of_the_models():
    sentences = text()
    model = estimate(sentences, 3, [*WORDS, "never"])
    history = ("a", "b")
    frequency = _frequencies(sentences, 3)[history]
    words = [n[-1] for n in model.log10_probabilities if n[:-1] == history]
    costs = _Costs(model, history, words, frequency)
    for gone in (words[:1], words[1:2], words[:3], words):
        rest = dict(model.log10_probabilities)
        for word in gone:
            del rest[(*history, word)]
        without = normalised(3, rest)
        divergence = sum(
            10**p * (p - without.log10_probability(v, history)) * math.log(10)
            for v in [*WORDS, "never", "</s>"]
            for p in [model.log10_probability(v, history)]
        )
        assert costs.divergence(gone) == pytest.approx(frequency * divergence)


def test_frequencies_are_those_of_the_words_that_follow():
    frequencies = _frequencies([["a", "b"], ["a"]], 3)
    assert frequencies[("<s>",)] == 2 / 5
    assert frequencies[("a",)] == 2 / 5
    assert frequencies[("<s>", "a")] == 2 / 5
    assert frequencies[("a", "b")] == 1 / 5
    assert frequencies[("b", "</s>")] == 0


def test_a_threshold_of_nothing_changes_no_probability():
    model = estimate(text(), 3, WORDS)
    pruned = prune(model, 0.0, text())
    for ngram in model.log10_probabilities:
        found = pruned.log10_probability(ngram[-1], ngram[:-1])
        assert found == pytest.approx(model.log10_probabilities[ngram], abs=1e-9)


def test_fewer_ngrams_cost_little_where_little_is_lost():
    sentences = text()
    model = estimate(sentences, 4, WORDS)
    sizes, costs = [], []
    for threshold in (0.0, 1e-5, 1e-4, 1e-3, 1e-2):
        pruned = prune(model, threshold, sentences)
        sizes.append(len(pruned.log10_probabilities))
        costs.append(perplexity(pruned, sentences))
    assert sizes == sorted(sizes, reverse=True)
    assert costs == sorted(costs)
    assert sizes[2] < 0.8 * sizes[0]
    assert costs[2] < 1.05 * costs[0]


def test_the_history_of_every_ngram_that_stays_is_there():
    model = prune(estimate(text(), 4, WORDS), 1e-4, text())
    for ngram in model.log10_probabilities:
        assert len(ngram) == 1 or ngram[:-1] in model.log10_probabilities


def test_a_pruned_model_survives_its_file_and_becomes_a_graph(tmp_path: Path):
    model = prune(estimate(text(), 4, WORDS), 1e-4, text())
    write_arpa(tmp_path / "lm.arpa", model)
    read = read_arpa(tmp_path / "lm.arpa")
    assert read.order == 4
    assert read.log10_probabilities == pytest.approx(
        model.log10_probabilities, abs=1e-6
    )
    assert read.log10_backoffs == pytest.approx(model.log10_backoffs, abs=1e-6)
    graph = kaldilm.arpa2fst(
        str(tmp_path / "lm.arpa"), disambig_symbol="#0", max_arpa_warnings=0
    )
    assert graph.count("\n") > 10


def test_a_negative_threshold_is_refused():
    with pytest.raises(ValueError, match="`threshold` must not be negative, got -1"):
        prune(estimate(text(), 2), -1, text())


def test_the_probability_of_a_sentence_is_that_of_its_words_and_its_end():
    model = estimate([["a", "b"], ["a"]], order=2)
    expected = (
        model.log10_probability("a", ("<s>",))
        + model.log10_probability("b", ("a",))
        + model.log10_probability("</s>", ("b",))
    )
    assert model.log10_of_sentence(["a", "b"]) == pytest.approx(expected)
