"""I-vectors: against dense Gaussians, and speakers drawn from a known model."""

import numpy as np
import pytest

from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.speakers.ivectors import (
    ExtractorStep,
    IVectorExtractor,
    train_extractor,
)
from lightning_adpsgd.asr.speakers.ubm import occupancy

NUM_GAUSSIANS, DIMS, SIZE = 5, 3, 2


def _extractor(frame_weight: float = 1.0, seed: int = 0) -> IVectorExtractor:
    random = np.random.default_rng(seed)
    shift = 0.3 * random.standard_normal((NUM_GAUSSIANS, DIMS))
    loadings = 0.5 * random.standard_normal((NUM_GAUSSIANS, DIMS, SIZE))
    return IVectorExtractor(shift, loadings, frame_weight)


def _speakers(
    model: IVectorExtractor, num_speakers: int, frames_each: float = 200.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts, deviations and w of speakers drawn from a model."""
    random = np.random.default_rng(3)
    latent = random.standard_normal((num_speakers, model.size))
    counts = random.uniform(0.5, 1.5, (num_speakers, NUM_GAUSSIANS)) * frames_each
    means = model.shift + np.einsum("cdr,sr->scd", model.loadings, latent)
    noise = random.standard_normal(means.shape)
    heard = counts[:, :, None]
    return counts, heard * means + np.sqrt(heard) * noise, latent


def _trained(num_iterations: int = 12, **changes) -> list[ExtractorStep]:
    counts, deviations, _ = _speakers(_extractor(), 300)
    options = {"frame_weight": 1.0, "num_iterations": num_iterations} | changes
    return list(train_extractor(counts, deviations, SIZE, **options))


def _canonical_correlations(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    bases = [np.linalg.qr(side - side.mean(axis=0))[0] for side in (left, right)]
    return np.linalg.svd(bases[0].T @ bases[1])[1]


@pytest.mark.parametrize("frame_weight", [1.0, 0.1])
def test_an_ivector_is_the_conditional_mean_of_one_large_gaussian(frame_weight):
    """F/N is δ + W w + noise of covariance 1/N: w given F/N by conditioning."""
    model = _extractor(frame_weight)
    counts, deviations, _ = _speakers(model, 4, frames_each=20)
    matrix = model.loadings.reshape(-1, SIZE)
    for n, f in zip(counts, deviations, strict=True):
        gap = (f / n[:, None] - model.shift).ravel()
        noise = np.diag(np.repeat(1 / (frame_weight * n), DIMS))
        expected = matrix.T @ np.linalg.solve(matrix @ matrix.T + noise, gap)
        found = model.posterior(n[None], f[None]).mean[0]
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_the_gain_is_the_ratio_of_two_large_gaussians():
    model = _extractor()
    counts, deviations, _ = _speakers(model, 3, frames_each=20)
    matrix = model.loadings.reshape(-1, SIZE)

    def log_density(gap: np.ndarray, covariance: np.ndarray) -> float:
        volume = np.linalg.slogdet(covariance)[1]
        return -0.5 * (volume + gap @ np.linalg.solve(covariance, gap))

    for n, f in zip(counts, deviations, strict=True):
        gap = (f / n[:, None] - model.shift).ravel()
        noise = np.diag(np.repeat(1 / n, DIMS))
        spread = matrix @ matrix.T + noise
        expected = log_density(gap, spread) - log_density(gap, noise)
        assert model.posterior(n[None], f[None]).gain[0] == pytest.approx(expected)


def test_no_iteration_lowers_the_likelihood():
    gains = [step.gain for step in _trained(15)]
    assert np.all(np.diff(gains) >= -1e-10)
    assert gains[-1] > gains[0] + 0.1


def test_speakers_of_a_known_model_are_found_up_to_a_rotation():
    counts, deviations, latent = _speakers(_extractor(), 300)
    model = _trained(25)[-1].extractor
    found = model.posterior(counts, deviations).mean
    assert _canonical_correlations(found, latent).min() > 0.99
    true = _extractor().loadings.reshape(-1, SIZE)
    spans = [np.linalg.qr(m)[0] for m in (true, model.loadings.reshape(-1, SIZE))]
    assert np.linalg.svd(spans[0].T @ spans[1])[1].min() > 0.99


def test_training_leaves_the_speakers_with_mean_zero_and_covariance_one():
    counts, deviations, _ = _speakers(_extractor(), 300)
    known = _trained(40)[-1].extractor.posterior(counts, deviations)
    np.testing.assert_allclose(known.mean.mean(axis=0), 0, atol=0.02)
    moments = known.second_moments().mean(axis=0)
    np.testing.assert_allclose(moments, np.eye(SIZE), atol=0.02)


def test_the_seed_decides_the_result_and_the_number_of_processes_does_not():
    alone, together, other = (
        _trained(3, **changes)[-1].extractor.loadings
        for changes in ({}, {"num_processes": 2}, {"seed": 1})
    )
    np.testing.assert_allclose(together, alone, rtol=1e-9, atol=1e-12)
    assert np.abs(other - alone).max() > 1e-3


def test_nothing_heard_gives_the_average_speaker():
    model = _extractor()
    counts = np.zeros((2, NUM_GAUSSIANS))
    known = model.posterior(counts, np.zeros((2, NUM_GAUSSIANS, DIMS)))
    np.testing.assert_array_equal(known.mean, np.zeros((2, SIZE)))
    np.testing.assert_array_equal(known.factor, np.tile(np.eye(SIZE), (2, 1, 1)))


def test_a_gaussian_that_nobody_used_and_a_silent_speaker_do_no_harm():
    counts, deviations, _ = _speakers(_extractor(), 30)
    counts[:, 2], deviations[:, 2] = 0, 0
    counts[7], deviations[7] = 0, 0
    steps = list(train_extractor(counts, deviations, SIZE, num_iterations=5))
    assert all(np.isfinite(step.gain) for step in steps)
    assert np.isfinite(steps[-1].extractor.loadings).all()
    assert np.isfinite(steps[-1].extractor.posterior(counts, deviations).mean).all()


def test_more_dimensions_than_speakers_are_borne():
    counts, deviations, _ = _speakers(_extractor(), 4)
    *_, last = train_extractor(counts, deviations, 6, num_iterations=8)
    assert np.isfinite(last.extractor.loadings).all()


def test_the_more_is_heard_the_less_the_prior_counts():
    model = _extractor()
    counts, deviations, latent = _speakers(model, 200)
    errors = [
        np.square(model.posterior(counts * k, deviations * k).mean - latent).mean()
        for k in (1e-4, 1e-2, 1)
    ]
    assert errors[0] > errors[1] > errors[2]


def _ubm() -> GaussianMixtures:
    random = np.random.default_rng(8)
    return GaussianMixtures(
        state=np.zeros(NUM_GAUSSIANS, int),
        weight=np.full(NUM_GAUSSIANS, 1 / NUM_GAUSSIANS),
        mean=random.normal(0, 2, (NUM_GAUSSIANS, DIMS)),
        variance=random.uniform(0.5, 1.5, (NUM_GAUSSIANS, DIMS)),
        floor=np.full(DIMS, 1e-3),
    )


def _expected_online(
    model: IVectorExtractor, frames: np.ndarray, until: int
) -> np.ndarray:
    counts, deviations = occupancy(_ubm(), frames[:until])
    return model.posterior(counts[None], deviations[None]).mean[0]


@pytest.mark.parametrize("period", [1, 10])
def test_an_online_ivector_is_that_of_all_frames_before_it(period: int):
    """Over 2 utterances, long enough for several blocks at a period of 1."""
    model = _extractor(0.1)
    frames = np.random.default_rng(0).normal(0, 2, (145, DIMS)).astype(np.float32)
    first, heard = model.online(_ubm(), frames[:75], period, model.nothing_heard())
    second, _ = model.online(_ubm(), frames[75:], period, heard)
    assert len(first) == -(-75 // period)
    np.testing.assert_array_equal(first[0], np.zeros(SIZE))
    for rows, start in ((first, 0), (second, 75)):
        for k in range(0, len(rows), 3):
            expected = _expected_online(model, frames, start + k * period)
            np.testing.assert_allclose(rows[k], expected, rtol=1e-3, atol=1e-4)


def test_what_comes_later_changes_no_online_ivector():
    model, random = _extractor(0.1), np.random.default_rng(0)
    frames = random.normal(0, 2, (60, DIMS)).astype(np.float32)
    other = frames.copy()
    other[40:] = 9.0
    rows, altered = (
        model.online(_ubm(), f, 10, model.nothing_heard())[0] for f in (frames, other)
    )
    np.testing.assert_array_equal(rows[:5], altered[:5])
    assert np.abs(rows[5] - altered[5]).max() > 1e-3


def test_an_utterance_without_frames_changes_nothing():
    model = _extractor()
    rows, heard = model.online(_ubm(), np.zeros((0, DIMS)), 10, model.nothing_heard())
    assert rows.shape == (0, SIZE)
    assert not heard.counts.any()


def test_a_saved_extractor_comes_back_equal(tmp_path):
    model = _extractor(0.25)
    model.save(tmp_path / "ivectors.npz")
    loaded = IVectorExtractor.load(tmp_path / "ivectors.npz")
    np.testing.assert_array_equal(loaded.shift, model.shift)
    np.testing.assert_array_equal(loaded.loadings, model.loadings)
    assert loaded.frame_weight == 0.25
    assert [path.name for path in tmp_path.iterdir()] == ["ivectors.npz"]


def test_a_truncated_extractor_is_refused_by_name(tmp_path):
    path = tmp_path / "ivectors.npz"
    _extractor().save(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"ivectors\.npz"):
        IVectorExtractor.load(path)


@pytest.mark.parametrize("weight", [0.0, 1.5])
def test_a_frame_weight_out_of_bounds_is_refused(weight: float):
    with pytest.raises(ValueError, match=f"`frame_weight`.*got {weight}"):
        _extractor(weight)


def test_training_on_nobody_is_refused():
    empty = np.zeros((0, NUM_GAUSSIANS)), np.zeros((0, NUM_GAUSSIANS, DIMS))
    with pytest.raises(ValueError, match="`counts` must hold a speaker"):
        next(train_extractor(*empty, SIZE))
