"""The fit below which words are taken for noise, chosen on dev."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning_adpsgd.asr.corpora.corpus import Utterance
from lightning_adpsgd.asr.search.words import Hypothesis, TimedWord
from recipes.hybrid.recognition import recognise
from recipes.hybrid.recognition.recognise import least_fit, num_right


def test_it_costs_at_most_one_right_word_in_a_hundred():
    fits = [(-9.0, 1), (-5.0, 0), (-2.0, 1), (-1.0, 98), (-0.5, 100)]
    assert least_fit(fits) == -1.0
    assert least_fit([(-9.0, 3), *fits[1:]]) == -9.0


def test_without_a_right_word_there_is_none():
    assert least_fit([]) is None
    assert least_fit([(-1.0, 0), (-2.0, 0)]) is None


def test_right_words_are_those_that_stand_in_both():
    assert num_right(("a", "b", "c"), ("a", "x", "c", "d")) == 2
    assert num_right((), ("a",)) == 0
    assert num_right(("YES", "I"), ("yes", "we")) == 1


def test_calls_may_fit_twice_as_ill_as_those_of_dev(monkeypatch):
    heard = Hypothesis((TimedWord("yes", 0.0, 1.0),), True, fit=-1.5)
    spoken = Utterance("a-A_0-1", Path("a"), 0, 0.0, 1.0, ("yes",), "a")
    monkeypatch.setattr(recognise, "_dev", lambda _: [(spoken, None)])
    found = [SimpleNamespace(several=[heard])]
    monkeypatch.setattr(recognise, "_hypotheses", lambda *_, **__: found)
    task: Any = SimpleNamespace(settings=None)
    assert recognise._fit_threshold(task, 0.1) == -3.0
