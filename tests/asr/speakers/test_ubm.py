import numpy as np
import pytest

from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.speakers import ubm

CENTRES = np.array([[-4.0, 0.0, 1.0], [4.0, 1.0, -1.0], [0.0, 6.0, 0.0]])


def _frames(num: int = 3000, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    noise = random.normal(0, 0.7, (num, 3))
    return (CENTRES[random.integers(3, size=num)] + noise).astype(np.float32)


def _trained(num_gaussians: int = 3, num_processes: int = 1) -> list[ubm.UbmStep]:
    steps = ubm.train_ubm(
        _frames(), num_gaussians, num_iterations=8, num_processes=num_processes
    )
    return list(steps)


def test_no_iteration_at_one_size_lowers_the_likelihood():
    steps = _trained(8)
    assert len(steps) == ubm.num_steps(8, 8)
    for size in range(0, len(steps), 8):
        values = [step.log_likelihood for step in steps[size : size + 8]]
        assert np.all(np.diff(values) > -1e-5)
    assert steps[-1].log_likelihood > steps[0].log_likelihood + 1


def test_the_gaussians_that_made_the_frames_are_found():
    found = _trained()[-1].ubm
    order = np.argsort(found.mean[:, 0])
    np.testing.assert_allclose(found.mean[order], CENTRES[[0, 2, 1]], atol=0.1)
    np.testing.assert_allclose(found.variance, 0.49, atol=0.08)
    np.testing.assert_allclose(found.weight, 1 / 3, atol=0.03)


def test_the_number_of_processes_changes_nothing():
    alone, together = _trained()[-1].ubm, _trained(num_processes=2)[-1].ubm
    np.testing.assert_allclose(alone.mean, together.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(alone.variance, together.variance, rtol=1e-4)


def test_occupancy_is_that_of_bayes_rule():
    mixture = _trained()[-1].ubm
    frames = _frames(50, seed=1).astype(float)
    gaps = (frames[:, None] - mixture.mean) / np.sqrt(mixture.variance)
    volume = np.prod(mixture.variance, axis=1) ** -0.5
    joint = mixture.weight * volume * np.exp(-0.5 * (gaps**2).sum(axis=2))
    shares = joint / joint.sum(axis=1, keepdims=True)
    found = ubm.occupancy(mixture, frames)
    np.testing.assert_allclose(found.counts, shares.sum(axis=0), rtol=1e-4)
    expected = np.einsum("tc,tcd->cd", shares, gaps)
    np.testing.assert_allclose(found.deviations, expected, rtol=1e-3, atol=1e-3)


def test_nothing_heard_occupies_nothing():
    mixture: GaussianMixtures = _trained()[-1].ubm
    found = ubm.occupancy(mixture, np.zeros((0, 3), np.float32))
    assert not found.counts.any()
    assert not found.deviations.any()


@pytest.mark.parametrize("num_gaussians", [0, 3000 // 20 + 1])
def test_more_gaussians_than_the_frames_bear_are_refused(num_gaussians: int):
    with pytest.raises(ValueError, match=rf"`num_gaussians`.*got {num_gaussians}"):
        next(ubm.train_ubm(_frames(), num_gaussians))
