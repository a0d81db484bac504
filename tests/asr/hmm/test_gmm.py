import math

import numpy as np
import pytest

from lightning_adpsgd.asr.frames.cepstra import cepstra
from lightning_adpsgd.asr.hmm import gmm


def two_states() -> gmm.GaussianMixtures:
    """State 0 has two Gaussians, state 1 has one."""
    return gmm.GaussianMixtures(
        state=np.array([0, 0, 1]),
        weight=np.array([0.25, 0.75, 1.0]),
        mean=np.array([[0.0, 1.0], [2.0, -1.0], [5.0, 5.0]]),
        variance=np.array([[1.0, 2.0], [0.5, 1.0], [3.0, 1.0]]),
        floor=np.full(2, 1e-3),
    )


def density(x: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> float:
    scale = np.prod(2 * math.pi * variance) ** -0.5
    return float(scale * np.exp(-0.5 * ((x - mean) ** 2 / variance).sum()))


def test_log_likelihood_is_that_of_the_weighted_densities():
    mixtures = two_states()
    x = np.array([0.3, 0.7])
    densities = [
        density(x, mean, variance)
        for mean, variance in zip(mixtures.mean, mixtures.variance, strict=True)
    ]
    expected = [0.25 * densities[0] + 0.75 * densities[1], densities[2]]
    assert mixtures.scorer()(x[None]) == pytest.approx(np.log([expected]), rel=1e-5)


def test_far_frames_have_finite_log_likelihoods():
    frames = np.full((1, 2), 1e4, np.float32)
    assert np.isfinite(two_states().scorer()(frames)).all()


def test_counts_of_a_state_are_its_frames():
    frames = np.random.default_rng(0).normal(size=(50, 2))
    states = np.repeat([0, 1, -1], [30, 15, 5])
    sums = gmm.accumulate(two_states(), frames, states)
    assert sums.frames[:2].sum() == pytest.approx(30, rel=1e-5)
    assert sums.frames[2] == pytest.approx(15, rel=1e-5)


def test_statistics_of_parts_add_up_to_those_of_the_whole():
    frames = np.random.default_rng(0).normal(size=(40, 2))
    states = np.arange(40) % 2
    whole = gmm.accumulate(two_states(), frames, states)
    parts = [gmm.accumulate(two_states(), frames[i::2], states[i::2]) for i in (0, 1)]
    for total, expected in zip(parts[0] + parts[1], whole, strict=True):
        np.testing.assert_allclose(total, expected, rtol=1e-5)


def test_one_gaussian_becomes_the_mean_and_variance_of_its_frames():
    frames = np.random.default_rng(0).normal(3.0, 2.0, size=(500, 2))
    start = gmm.flat(np.zeros(2), np.ones(2), num_states=1)
    states = np.zeros(500, int)
    result = gmm.update(start, gmm.accumulate(start, frames, states))
    np.testing.assert_allclose(result.mean[0], frames.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(result.variance[0], frames.var(axis=0), rtol=1e-3)


def test_every_update_raises_the_likelihood():
    random = np.random.default_rng(0)
    centres = np.array([[-3.0, 0.0], [3.0, 1.0], [0.0, 4.0]])
    frames = centres[random.integers(3, size=600)] + random.normal(size=(600, 2))
    states = np.zeros(600, int)
    mixtures = gmm.flat(frames.mean(axis=0), frames.var(axis=0), num_states=1)
    mixtures = gmm.mix_up(mixtures, np.array([600]), 3)
    totals = []
    for _ in range(12):
        totals.append(mixtures.scorer()(frames).sum(dtype=float))
        sums = gmm.accumulate(mixtures, frames, states)
        mixtures = gmm.update(mixtures, sums)
    assert np.all(np.diff(totals) > -1e-2)
    assert totals[-1] > totals[0] + 50


def test_variances_never_fall_below_the_floor():
    start = gmm.flat(np.zeros(2), np.ones(2), num_states=1)
    frames = np.full((100, 2), 0.5)
    sums = gmm.accumulate(start, frames, np.zeros(100, int))
    assert np.all(gmm.update(start, sums).variance == start.floor)


def test_a_state_without_frames_stays_as_it_is():
    mixtures = two_states()
    frames = np.random.default_rng(0).normal(size=(50, 2))
    sums = gmm.accumulate(mixtures, frames, np.zeros(50, int))
    result = gmm.update(mixtures, sums)
    np.testing.assert_array_equal(result.mean[-1], mixtures.mean[-1])
    assert result.num_states == 2


def test_a_gaussian_without_frames_is_dropped_and_weights_sum_to_one():
    mixtures = two_states()
    near_first = np.random.default_rng(0).normal([-20.0, 20.0], 0.1, size=(50, 2))
    sums = gmm.accumulate(mixtures, near_first, np.zeros(50, int))
    result = gmm.update(mixtures, sums)
    assert result.state.tolist() == [0, 1]
    assert result.weight.tolist() == [1.0, 1.0]


def test_mixing_up_gives_frequent_states_more_gaussians():
    start = gmm.flat(np.zeros(2), np.ones(2), num_states=3)
    result = gmm.mix_up(start, np.array([100_000, 1_000, 30]), 20)
    sizes = np.bincount(result.state)
    assert sizes.sum() == 20
    assert sizes[0] > sizes[1] > sizes[2] == 1  # 30 frames do for one Gaussian only


def test_mixing_up_keeps_mean_and_weight_of_each_state():
    mixtures = two_states()
    result = gmm.mix_up(mixtures, np.array([1000, 1000]), 9)
    for state in (0, 1):
        before, after = mixtures.state == state, result.state == state
        assert result.weight[after].sum() == pytest.approx(1.0)
        expected = mixtures.weight[before] @ mixtures.mean[before]
        np.testing.assert_allclose(result.weight[after] @ result.mean[after], expected)


def test_saved_mixtures_come_back_equal(tmp_path):
    mixtures = two_states()
    mixtures.save(tmp_path / "gmm.npz")
    loaded = gmm.GaussianMixtures.load(tmp_path / "gmm.npz")
    for name, value in vars(mixtures).items():
        np.testing.assert_array_equal(getattr(loaded, name), value)
    assert [path.name for path in tmp_path.iterdir()] == ["gmm.npz"]


def test_a_truncated_file_is_refused_by_name(tmp_path):
    path = tmp_path / "gmm.npz"
    two_states().save(path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"gmm\.npz"):
        gmm.GaussianMixtures.load(path)


def test_cepstra_of_a_ramp_have_the_slope_of_the_ramp():
    ramp = np.arange(20)[:, None] * np.ones(40)
    result = cepstra(ramp, 13)
    assert result.shape == (20, 39)
    inner = slice(4, -4)
    # order 0 is the mean times sqrt(40), the other orders of a constant vanish
    np.testing.assert_allclose(result[inner, 13], math.sqrt(40), rtol=1e-5)
    np.testing.assert_allclose(result[inner, 1:13], 0, atol=1e-3)
    np.testing.assert_allclose(result[inner, 26:], 0, atol=1e-3)


def test_all_cepstra_together_keep_the_norm_of_a_frame():
    frames = np.random.default_rng(0).normal(size=(5, 40))
    static = cepstra(frames, 40)[:, :40]
    expected = np.linalg.norm(frames, axis=1)
    np.testing.assert_allclose(np.linalg.norm(static, axis=1), expected, rtol=1e-5)


def many_states(num_states: int = 40, seed: int = 0) -> gmm.GaussianMixtures:
    random = np.random.default_rng(seed)
    state = np.repeat(np.arange(num_states), random.integers(1, 6, num_states))
    weight = random.uniform(0.5, 1.5, len(state))
    return gmm.GaussianMixtures(
        state,
        weight / np.bincount(state, weight)[state],
        random.normal(size=(len(state), 3)),
        random.uniform(0.5, 2.0, size=(len(state), 3)),
        np.full(3, 1e-3),
    )


def test_some_states_are_scored_as_among_all():
    scorer = many_states().scorer()
    frames = np.random.default_rng(1).normal(size=(50, 3))
    states = np.array([0, 3, 17, 39])
    expected = scorer(frames)[:, states]
    np.testing.assert_allclose(scorer.of(frames, states), expected, rtol=1e-5)


def test_frames_scored_a_few_at_a_time_score_the_same(monkeypatch):
    scorer = many_states().scorer()
    frames = np.random.default_rng(1).normal(size=(50, 3))
    expected = scorer(frames)
    monkeypatch.setattr(gmm, "_MOST_TERMS", 7 * many_states().num_gaussians)
    np.testing.assert_allclose(scorer(frames), expected, rtol=1e-5)


def test_the_state_with_the_largest_share_missing_grows_first():
    mixtures = many_states()
    frames = np.random.default_rng(2).integers(1, 400, 40)
    sizes = np.bincount(mixtures.state)
    while sizes.sum() < mixtures.num_gaussians + 60:
        may_grow = (sizes + 1) * 20 <= frames
        sizes[np.argmax(np.where(may_grow, frames**0.2 / sizes, -1.0))] += 1
    grown = gmm.mix_up(mixtures, frames, mixtures.num_gaussians + 60)
    assert np.bincount(grown.state).tolist() == sizes.tolist()
