"""A mixture of models is a distribution, and its weights are found on held-out text."""

import itertools
import math

import pytest

from lightning_adpsgd.asr.language.interpolation import (
    in_nfc,
    interpolate,
    likeliest_weights,
    probability,
    restricted,
)
from lightning_adpsgd.asr.language.ngram import BEGIN, END, NgramModel, estimate

WORDS = ["a", "b", "c", "d"]
ONE = estimate([["a", "b"], ["a", "c", "b"], ["a", "b", "b"]], 3, WORDS)
OTHER = estimate([["d", "c"], ["c", "d", "a"], ["d"]], 2, WORDS)


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.9, 0.1)])
def test_a_mixture_sums_to_one_after_every_history(weights: tuple[float, float]):
    mixed = interpolate([ONE, OTHER], weights)
    assert mixed.order == 3
    for length in range(3):
        for history in itertools.product(["<s>", *WORDS], repeat=length):
            total = sum(
                10 ** mixed.log10_probability(word, history)
                for word in [*WORDS, "</s>"]
            )
            assert total == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("certain", [1.0, 1.0000001])
def test_after_a_history_that_leaves_nothing_no_other_word_is_probable(certain: float):
    """Models from elsewhere are rounded, so what they leave may be below zero."""
    words = {("a",): 0.3, ("b",): 0.3, (END,): 0.4, ("a", "b"): certain}
    logs = {ngram: math.log10(p) for ngram, p in words.items()}
    model = NgramModel(2, {**logs, (BEGIN,): -99.0}, {("a",): -99.0})
    mixture = interpolate([model, model], [0.5, 0.5])
    following = [10 ** mixture.log10_probability(w, ("a",)) for w in ("a", "b", END)]
    assert sum(following) == pytest.approx(1, abs=1e-6)


def test_an_ngram_of_one_model_has_the_weighted_sum_of_both():
    mixed = interpolate([ONE, OTHER], (0.75, 0.25))
    ngram = ("<s>", "a", "b")
    expected = 0.75 * probability(ONE, ngram) + 0.25 * probability(OTHER, ngram)
    assert probability(mixed, ngram) == pytest.approx(expected)
    assert len(mixed.log10_probabilities) >= len(ONE.log10_probabilities)


def test_words_that_one_model_lacks_come_from_the_other():
    small = estimate([["a", "b"]], 2)
    mixed = interpolate([small, OTHER], (0.5, 0.5))
    half = 0.5 * probability(OTHER, ("d",))
    assert probability(mixed, ("d",)) == pytest.approx(half)
    total = math.fsum(probability(mixed, (w,)) for w in [*WORDS, "</s>"])
    assert total == pytest.approx(1)


def test_a_restricted_model_has_the_words_of_the_vocabulary_alone():
    kept = restricted(ONE, ["a", "c"])
    words = {word for ngram in kept.log10_probabilities for word in ngram}
    assert words == {"a", "c", "<s>", "</s>"}
    with pytest.raises(ValueError, match="no word of the vocabulary"):
        restricted(ONE, ["x"])


def test_a_model_in_nfd_is_that_of_the_same_words():
    joined, apart = "é", "e\u0301"
    text = [["a", joined], [joined, "b"]]
    model = estimate([[w.replace(joined, apart) for w in one] for one in text], 2)
    assert in_nfc(model) == estimate(text, 2)
    assert in_nfc(ONE) is ONE


def test_forms_of_a_word_that_nobody_needs_are_no_error():
    both = estimate([["a", "é", "e\u0301", "N\u0303"]], 2)
    with pytest.raises(ValueError, match=r"words .+ and .+ differ in their Unicode"):
        in_nfc(both)
    with pytest.raises(ValueError, match=r"words .+ and .+ differ in their Unicode"):
        in_nfc(both, {"a", "é"})
    kept = in_nfc(both, {"a", "ñ"})
    assert kept == estimate([["a", "é", "e\u0301", "Ñ"]], 2)


def test_the_weights_are_those_of_the_models_that_say_what_was_said():
    like_one = [["a", "b"], ["a", "c", "b"]] * 3
    first, second = likeliest_weights([ONE, OTHER], like_one)
    assert first > 0.8
    assert first + second == pytest.approx(1)
    assert likeliest_weights([ONE, OTHER], []) == [0.5, 0.5]

    def likelihood(model: NgramModel) -> float:
        return sum(model.log10_of_sentence(words) for words in like_one)

    best = interpolate([ONE, OTHER], (first, second))
    assert likelihood(best) > likelihood(interpolate([ONE, OTHER], (0.5, 0.5)))


def test_no_model_is_left_out_for_good_by_what_was_held_out():
    unlike_all = NgramModel(1, {("x",): 0.0, ("</s>",): -99.0}, {})
    assert min(likeliest_weights([ONE, unlike_all], [["a", "b"]] * 3)) > 0.9e-4


@pytest.mark.parametrize(
    ("weights", "problem"),
    [((0.5,), "must be 2 numbers"), ((1, 0), "above 0"), ((0.5, 0.4), "sum to 1")],
)
def test_weights_that_do_not_fit_are_refused(weights: tuple[float, ...], problem: str):
    with pytest.raises(ValueError, match=problem):
        interpolate([ONE, OTHER], weights)
