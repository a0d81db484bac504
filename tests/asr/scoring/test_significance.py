"""Intervals that hold what they promise, and the test of matched pairs by hand."""

import math

import numpy as np
import pytest

from lightning_adpsgd.asr.scoring import Errors, ScoringError
from lightning_adpsgd.asr.scoring.significance import compare, interval


def of(words: int, wrong: int) -> Errors:
    return Errors(num_words=words, substitutions=wrong, num_segments=1)


def test_the_interval_holds_the_rate_as_often_as_it_says():
    dice = np.random.default_rng(0)
    inside = 0
    for trial in range(200):
        groups = [of(50, int(dice.binomial(50, 0.2))) for _ in range(30)]
        low, high = interval(groups, share=0.9, draws=400, seed=trial)
        inside += low <= 0.2 <= high
    # Binomial with p = 0.9: 180 with a deviation of 4; the bootstrap is a bit narrow.
    assert 160 <= inside <= 195


def test_speakers_that_differ_make_it_wide():
    alike = interval([of(100, 20)] * 10)
    apart = interval([of(100, 0), of(100, 40)] * 5)
    assert alike.low == alike.high == pytest.approx(0.2)
    assert apart.high - apart.low > 0.1
    assert interval([of(100, 0), of(100, 40)] * 5) == apart


@pytest.mark.parametrize("groups", [[], [of(10, 1)], [of(10, 1), of(0, 0)]])
def test_of_one_speaker_there_is_none(groups):
    assert all(map(math.isnan, interval(groups)))


def test_without_reference_words_there_is_neither_interval_nor_difference():
    inserted = Errors(insertions=2, num_segments=1, wrong_segments=1)
    assert all(map(math.isnan, interval([inserted, inserted])))
    found = compare({"a": inserted, "b": Errors()}, {"a": Errors(), "b": Errors()})
    assert math.isnan(found.difference)
    assert found.z == pytest.approx(-1)


def test_matched_pairs_by_hand():
    first = {"a": of(10, 1), "b": of(10, 2), "c": of(10, 3), "d": of(10, 0)}
    second = {"a": of(10, 3), "b": of(10, 2), "c": of(10, 4), "d": of(10, 1)}
    found = compare(first, second)
    differences = np.array([2, 0, 1, 1])
    z = differences.mean() * 2 / differences.std(ddof=1)
    assert found.z == pytest.approx(z)
    assert found.p == pytest.approx(math.erfc(z / math.sqrt(2)))
    assert found.difference == pytest.approx(4 / 40)
    assert compare(second, first).z == pytest.approx(-z)


def test_equal_systems_tell_nothing():
    found = compare({"a": of(10, 1), "b": of(5, 0)}, {"a": of(10, 1), "b": of(5, 0)})
    assert found.difference == 0
    assert math.isnan(found.p)


def test_other_segments_are_refused():
    with pytest.raises(ScoringError, match="2 are of one alone, the first: a"):
        compare({"a": of(1, 0)}, {"b": of(1, 0)})
    with pytest.raises(ScoringError, match="no segment"):
        compare({}, {})
