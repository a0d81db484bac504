"""Alternatives against all word sequences there are, and their choice by hand."""

import itertools
import math

import kaldifst
import numpy as np
import pytest

from lightning_adpsgd.asr.language.ngram import NgramModel, estimate
from lightning_adpsgd.asr.search.decoding import Decoder, SearchOptions
from lightning_adpsgd.asr.search.graphs import decoding_graph
from lightning_adpsgd.asr.search.lattice import SearchGraph
from lightning_adpsgd.asr.search.nbest import NBestOptions, list_words
from lightning_adpsgd.asr.search.rescoring import (
    RescoringDecoder,
    Weighed,
    Weights,
    best,
    confidences,
    weigh,
)
from lightning_adpsgd.asr.search.words import Alternative, Hypothesis, TimedWord
from tests.asr import digits

WORDS = ["one", "two", "nine"]
SCALE = 0.05
WIDE = NBestOptions(most=1000, beam=200.0, lattice_beam=100.0)


@pytest.fixture(scope="module")
def speaker() -> digits.Speaker:
    return digits.Speaker(digits.lexicon(), noise=2.0)


def decoder_of(speaker: digits.Speaker, words: list[str], folder) -> Decoder:
    arpa = digits.loop_arpa(folder / "lm.arpa", words)
    graph = decoding_graph(speaker.lexicon, speaker.topology, arpa)
    options = SearchOptions(beam=200.0)
    return Decoder(graph, speaker.lexicon, speaker.topology, options)


@pytest.fixture(scope="module")
def decoder(speaker, tmp_path_factory) -> Decoder:
    return decoder_of(speaker, WORDS, tmp_path_factory.mktemp("lm"))


@pytest.fixture(scope="module")
def likelihoods(speaker) -> np.ndarray:
    states = speaker.states(["two", "nine"])
    return speaker.log_likelihoods(speaker.frames(states))


def test_the_first_is_what_a_search_for_the_best_finds(decoder, likelihoods):
    first = decoder.alternatives(likelihoods, SCALE, NBestOptions())[0]
    assert first.timed() == decoder.decode(likelihoods, SCALE)


def test_word_sequences_differ_and_become_dearer(decoder, likelihoods):
    found = decoder.alternatives(likelihoods, SCALE, WIDE)
    texts = [one.text for one in found]
    assert len(set(texts)) == len(texts) > 10
    costs = [one.cost for one in found]
    assert costs == sorted(costs)


def test_each_has_the_cost_and_the_times_of_the_best_path_of_its_words(
    speaker, decoder, likelihoods, tmp_path
):
    found = decoder.alternatives(likelihoods, SCALE, WIDE)
    uniform = math.log(len(WORDS) + 1)  # of each word and of the end
    by_words = {one.text: one for one in found}
    for word in WORDS:
        alone = decoder_of(speaker, [word], tmp_path)
        # With one word in the grammar only its number is open.
        for one in alone.alternatives(likelihoods, SCALE, WIDE):
            both = by_words.get(one.text)
            if both is not None:
                assert both.timed() == one.timed()
                more = (uniform - math.log(2)) * (1 + len(one.text))
                assert both.cost == pytest.approx(one.cost + more, abs=1e-2)
    singles = [text for text in by_words if len(set(text)) == 1]
    assert len(singles) >= 3


def test_there_are_no_more_than_asked_for(decoder, likelihoods):
    options = NBestOptions(most=3, beam=200.0, lattice_beam=100.0)
    assert len(decoder.alternatives(likelihoods, SCALE, options)) == 3


def test_of_a_lattice_too_large_there_is_the_best_alone(decoder, likelihoods):
    options = NBestOptions(beam=200.0, lattice_beam=100.0, max_states=3)
    [only] = decoder.alternatives(likelihoods, SCALE, options)
    assert only.timed() == decoder.decode(likelihoods, SCALE)


@pytest.mark.parametrize("most", [1, 2])
def test_no_words_have_the_cost_of_their_path(most):
    silence = kaldifst.compile("0 1 1 0 0.5\n1 0.25\n")
    scaled = np.array([[-2.0]], np.float32)
    found = list_words(SearchGraph(silence), scaled, NBestOptions(most=most))
    assert found is not None
    [(words, cost)] = found.entries
    assert words == []
    assert cost == pytest.approx(0.5 + 2.0 + 0.25)
    assert found.path(0).inputs == [1]


def test_no_frames_have_no_alternatives(speaker, decoder):
    empty = np.zeros((0, speaker.topology.num_states), np.float32)
    assert decoder.alternatives(empty, 1.0, NBestOptions()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"most": 0}, "`most` must be at least 1, got 0"),
        ({"beam": 5.0}, r"`lattice_beam` must lie in \(0, `beam` 5.0\], got 6.0"),
    ],
)
def test_options_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        NBestOptions(**arguments)


# --- rescoring


def said(text: str, cost: float) -> Alternative:
    words = tuple(TimedWord(word, 0.0, 0.1) for word in text.split())
    return Alternative(tuple(text.split()), cost, lambda: Hypothesis(words, True))


def models() -> tuple[NgramModel, NgramModel]:
    sentences = [["a", "b", "a"], ["b", "b"], ["a", "b", "a", "b"]]
    return estimate(sentences, 1), estimate(sentences, 3)


def test_the_gain_is_the_difference_of_the_models():
    small, large = models()
    [one] = weigh([said("a b", 7.0)], small, large)
    expected = large.log10_of_sentence("ab") - small.log10_of_sentence("ab")
    assert one.cost == 7.0
    assert one.gain == pytest.approx(expected * math.log(10))


@pytest.mark.parametrize("text", ["", "a a", "b a b"])
def test_the_larger_model_alone_takes_the_place_of_the_small_one(text: str):
    small, large = models()
    acoustic = 3.0
    cost = acoustic - small.log10_of_sentence(text.split()) * math.log(10)
    [one] = weigh([said(text, cost)], small, large)
    expected = acoustic - large.log10_of_sentence(text.split()) * math.log(10)
    assert one.cost - one.gain == pytest.approx(expected)


def test_the_weights_decide():
    ones = [Weighed(("a",), 10.0, 0.0), Weighed(("a", "b", "c"), 11.0, 4.0)]
    short, long = ones[0].text, ones[1].text
    cases = itertools.product((0.0, 0.2, 0.3, 1.0), (-1.0, 0.0, 2.0))
    for large, penalty in cases:
        is_long = -11 + 4 * large - 3 * penalty > -10 - penalty
        assert best(ones, Weights(large, penalty)) == (long if is_long else short)


def test_a_word_that_the_larger_model_lacks_is_not_chosen():
    small, large = estimate([["a", "new"]], 1), estimate([["a"]], 2)
    found = weigh([said("new", 1.0), said("a", 9.0)], small, large)
    assert best(found, Weights(1.0, 0.0)) == ("a",)


def test_an_unknown_word_is_impossible_also_in_a_long_sentence():
    """Of 60 words the right ones have a probability below 1e-99, too."""
    words = [f"w{place}" for place in range(100)]
    small, large = estimate([[*words, "new"]], 1), estimate([words[::-1]], 1)
    right, wrong = words[:60], [*words[:59], "new"]
    assert large.log10_of_sentence(right) < -99
    costs = ((wrong, 1.0), (right, 101.0), ([*wrong[:58], "new", "new"], 1.0))
    found = weigh([said(" ".join(one), c) for one, c in costs], small, large)
    assert best(found, Weights(1.0, 0.0)) == tuple(right)
    assert [one.num_unknown for one in found] == [1, 0, 2]
    assert found[0].gain - found[2].gain > 90 * math.log(10)


def test_models_and_graph_may_differ_in_how_accents_are_written():
    text = [["é", "i", "know"], ["no", "i", "do", "not", "know"]]
    apart = estimate([[w.replace("é", "e\u0301") for w in one] for one in text], 2)
    (found,) = weigh([said("é i know", 1.0)], apart, estimate(text, 2))
    assert found.num_unknown == 0
    assert found.gain == pytest.approx(0)


def test_models_and_graph_may_differ_in_case():
    text = [["yes", "i", "know"], ["no", "i", "do", "not", "know"]]
    small = estimate([[word.upper() for word in one] for one in text], 2)
    alternatives = [said("YES I KNOW", 10.5), said("YES NO KNOW", 10.0)]
    found = weigh(alternatives, small, estimate(text, 3))
    lower = [said(" ".join(one.text).lower(), one.cost) for one in alternatives]
    expected = weigh(lower, estimate(text, 2), estimate(text, 3))
    assert [one.gain for one in found] == [one.gain for one in expected]
    assert best(found, Weights(1.0)) == ("YES", "I", "KNOW")
    assert all(one.num_unknown == 0 for one in found)


def test_a_word_that_the_small_model_lacks_gains_nothing_by_that():
    small, large = estimate([["a"]], 1), estimate([["a", "new"]], 1)
    [one] = weigh([said("new", 1.0)], small, large)
    assert one.gain < 0
    assert one.num_unknown == 1


def test_of_nothing_the_best_is_nothing():
    assert best([], Weights(1.0, 0.0)) == ()


def test_a_word_is_as_sure_as_the_lists_that_have_it():
    # Scores 0, -ln 2, -ln 4: posteriors 4/7, 2/7, 1/7.
    ones = [
        Weighed(("a", "b", "c"), 1.0, 0.0),
        Weighed(("a", "c"), 1.0 + math.log(2), 0.0),
        Weighed(("x", "b", "c"), 1.0 + math.log(4), 0.0),
    ]
    assert confidences(ones, Weights()) == pytest.approx([6 / 7, 5 / 7, 1.0])


def test_the_words_of_a_rescored_list_have_confidence_and_times(decoder, likelihoods):
    small = estimate([WORDS], 1)
    rescoring = RescoringDecoder(decoder, NBestOptions(), small, small)
    found = rescoring.decode(likelihoods, SCALE)
    best = decoder.decode(likelihoods, SCALE)
    without = [word._replace(confidence=1.0) for word in found.words]
    assert tuple(without) == best.words
    assert all(0 < word.confidence <= 1 for word in found.words)
    empty = np.zeros((0, likelihoods.shape[1]), np.float32)
    assert rescoring.decode(empty, SCALE) == Hypothesis((), False)
