import numpy as np
import pytest

from lightning_adpsgd.asr.frames.lda import class_covariances, scatter_sums
from lightning_adpsgd.asr.frames.mllt import diagonalising


def rotated(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Covariances that are diagonal on common axes, these axes, and frames."""
    random = np.random.default_rng(seed)
    axes = random.normal(size=(4, 4))
    back = np.linalg.inv(axes)
    variances = random.uniform(0.2, 5.0, size=(6, 4))
    covariances = np.array([back @ np.diag(v) @ back.T for v in variances])
    return covariances, axes, random.integers(50, 500, 6).astype(float)


def likelihood(axes: np.ndarray, covariances: np.ndarray, frames: np.ndarray) -> float:
    """L(A) of the module, written out."""
    total = 0.0
    for count, covariance in zip(frames, covariances, strict=True):
        variances = np.diag(axes @ covariance @ axes.T)
        determinant = np.linalg.slogdet(axes)[1]
        total += count * (determinant - 0.5 * np.log(variances).sum())
    return total


def test_common_axes_are_found():
    covariances, _, frames = rotated()
    found = diagonalising(covariances, frames, num_sweeps=200)
    turned = found @ covariances @ found.T
    scale = np.sqrt(np.einsum("cii->ci", turned))
    correlations = turned / (scale[:, :, None] * scale[:, None, :])
    np.testing.assert_allclose(
        correlations, np.broadcast_to(np.eye(4), (6, 4, 4)), atol=1e-3
    )


def test_likelihood_rises_with_every_sweep_and_reaches_that_of_the_true_axes():
    covariances, axes, frames = rotated(1)
    reached = [
        likelihood(diagonalising(covariances, frames, sweeps), covariances, frames)
        for sweeps in (0, 1, 2, 5, 200)
    ]
    assert reached == sorted(reached)
    assert reached[0] == pytest.approx(likelihood(np.eye(4), covariances, frames))
    assert reached[-1] == pytest.approx(likelihood(axes, covariances, frames))


def test_no_other_axes_nearby_are_better():
    random = np.random.default_rng(2)
    factors = random.normal(size=(5, 4, 6))
    covariances = factors @ factors.transpose(0, 2, 1)  # no common axes
    frames = np.full(5, 100.0)
    found = diagonalising(covariances, frames, 200)
    best = likelihood(found, covariances, frames)
    for _ in range(20):
        other = found + 1e-3 * random.normal(size=(4, 4))
        assert likelihood(other, covariances, frames) <= best + 1e-6


def test_classes_without_frames_play_no_part():
    covariances, _, frames = rotated()
    padded = np.concatenate([covariances, np.zeros((1, 4, 4))])
    found = diagonalising(padded, np.append(frames, 0.0))
    np.testing.assert_allclose(found, diagonalising(covariances, frames))


def test_a_direction_that_never_varies_is_refused():
    covariances = np.array([np.diag([1.0, 0.0])])
    with pytest.raises(ValueError, match="direction"):
        diagonalising(covariances, np.array([10.0]))


def test_covariances_of_classes_are_those_of_their_projected_frames():
    random = np.random.default_rng(0)
    frames, classes = random.normal(size=(400, 5)), random.integers(0, 3, 400)
    projection = random.normal(size=(5, 2))
    found = class_covariances(scatter_sums(frames, classes, 4), projection)
    for label in range(3):
        own = frames[classes == label] @ projection
        np.testing.assert_allclose(found[label], np.cov(own.T, bias=True))
    assert not found[3].any()
