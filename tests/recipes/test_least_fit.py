"""The fit below which words are taken for noise, chosen on dev."""

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
