import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_adpsgd.asr.hmm.clustering import joined, log_likelihood, questions
from lightning_adpsgd.asr.hmm.gmm import Statistics

FLOOR = np.full(2, 1e-2)


def sums_of(clusters: list[np.ndarray]) -> Statistics:
    return Statistics(
        np.array([len(frames) for frames in clusters], float),
        np.array([frames.sum(axis=0) for frames in clusters]),
        np.array([(frames**2).sum(axis=0) for frames in clusters]),
    )


def by_hand(frames: np.ndarray) -> float:
    """Sum over the frames of the log-density of the Gaussian of all of them."""
    mean, variance = frames.mean(axis=0), np.maximum(frames.var(axis=0), FLOOR)
    squares = (frames - mean) ** 2 / variance
    return float(-0.5 * (np.log(2 * np.pi * variance) + squares).sum())


def drawn(means: list[float], size: int = 30) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.normal(mean, 1.0, size=(size, 2)) for mean in means]


def test_likelihood_is_that_of_the_frames_under_their_own_gaussian():
    clusters = [*drawn([0.0, 3.0]), np.full((5, 2), 1.5)]  # the last has no variance
    expected = [by_hand(frames) for frames in clusters]
    assert log_likelihood(sums_of(clusters), FLOOR) == pytest.approx(expected)


def test_no_frames_have_likelihood_zero():
    assert log_likelihood(sums_of([np.zeros((0, 2))]), FLOOR).tolist() == [0.0]


@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_two_gaussians_never_fit_worse_than_one(seed, num_a, num_b):
    random = np.random.default_rng(seed)
    scale = random.choice([1e-3, 1.0, 30.0])
    a, b = (scale * random.normal(size=(num, 2)) for num in (num_a, num_b))
    apart = log_likelihood(sums_of([a, b]), FLOOR).sum()
    together = log_likelihood(sums_of([np.concatenate([a, b])]), FLOOR).sum()
    assert apart >= together - 1e-6 * abs(together)


def test_each_joining_is_the_cheapest_of_all_pairs():
    clusters = drawn([0.0, 1.0, 5.0, 5.5, 20.0, 9.0])
    alive = dict(enumerate(clusters))
    for a, b in joined(sums_of(clusters), FLOOR):

        def loss(pair: tuple[int, int]) -> float:
            one, other = alive[pair[0]], alive[pair[1]]
            both = by_hand(np.concatenate([one, other]))
            return by_hand(one) + by_hand(other) - both

        assert (a, b) == min(itertools.combinations(sorted(alive), 2), key=loss)
        alive[a] = np.concatenate([alive[a], alive.pop(b)])
    assert list(alive) == [0]


def test_joining_stops_before_it_costs_too_much():
    clusters = drawn([0.0, 0.1, 50.0, 50.1])
    assert sorted(joined(sums_of(clusters), FLOOR, 20.0)) == [(0, 1), (2, 3)]


def test_questions_are_the_sets_that_arise():
    clusters = drawn([0.0, 10.0, 0.5, 10.5, 11.0])
    sets = [frozenset(np.flatnonzero(q)) for q in questions(sums_of(clusters), FLOOR)]
    assert set(sets[:5]) == {frozenset({phone}) for phone in range(5)}
    assert {frozenset({0, 2}), frozenset({1, 3, 4})} <= set(sets)
    assert len(sets) == len(set(sets)) == 2 * 5 - 2
    assert frozenset(range(5)) not in sets
