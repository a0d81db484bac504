"""The map of a speaker: against dense Gaussians, finite differences, a known answer."""

import math

import numpy as np
import pytest

from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.speakers import fmllr

DIMS = 4


def _mixtures(num_states: int = 6, per_state: int = 2) -> GaussianMixtures:
    random = np.random.default_rng(1)
    num = num_states * per_state
    return GaussianMixtures(
        state=np.repeat(np.arange(num_states), per_state),
        weight=np.tile([0.3, 0.7], num_states) if per_state == 2 else np.ones(num),
        mean=random.normal(0, 3, (num, DIMS)),
        variance=random.uniform(0.2, 0.8, (num, DIMS)),
        floor=np.full(DIMS, 1e-3),
    )


def _drawn(
    mixtures: GaussianMixtures, num_frames: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Frames drawn from the mixtures, and their states."""
    random = np.random.default_rng(seed)
    rows = random.choice(
        mixtures.num_gaussians, num_frames, p=mixtures.weight / mixtures.weight.sum()
    )
    noise = random.normal(size=(num_frames, DIMS))
    frames = mixtures.mean[rows] + np.sqrt(mixtures.variance[rows]) * noise
    return frames, mixtures.state[rows]


def _voice(seed: int = 5) -> np.ndarray:
    """A map [A b] that is neither small nor nearly singular."""
    random = np.random.default_rng(seed)
    matrix = np.eye(DIMS) + 0.25 * random.normal(size=(DIMS, DIMS))
    return np.hstack([matrix, random.normal(0, 2, (DIMS, 1))])


def _spoken(
    transform: np.ndarray, mixtures: GaussianMixtures, num_frames: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """What must be said so that `transform` moves it onto draws of the mixtures."""
    frames, states = _drawn(mixtures, num_frames, seed)
    back = np.linalg.inv(transform[:, :-1])
    return (frames - transform[:, -1]) @ back.T, states


def _auxiliary(transform: np.ndarray, sums: fmllr.Statistics) -> float:
    """Q(W): grows by no more than the log-likelihood does."""
    curved = np.einsum("ij,ijk,ik->", transform, sums.quadratic, transform)
    straight = (transform * sums.linear).sum()
    volume = sums.frames * fmllr.log_determinant(transform)
    return float(volume - 0.5 * curved + straight)


def test_no_sweep_over_the_rows_lowers_the_auxiliary_function():
    mixtures = _mixtures()
    frames, states = _spoken(_voice(), mixtures, 800)
    transform = fmllr.identity(DIMS)
    sums = fmllr.accumulate(mixtures, frames, states, transform)
    values = []
    for _ in range(8):
        values.append(_auxiliary(transform, sums))
        transform = fmllr.improved(transform, sums, num_sweeps=1)
    assert np.all(np.diff(values) >= -1e-9 * abs(values[-1]))
    assert values[-1] > values[0] + 100


def test_the_auxiliary_function_is_flat_at_the_best_map():
    mixtures = _mixtures()
    frames, states = _spoken(_voice(), mixtures, 800)
    sums = fmllr.accumulate(mixtures, frames, states, fmllr.identity(DIMS))
    best = fmllr.improved(fmllr.identity(DIMS), sums, num_sweeps=100)
    steps = 1e-5 * np.eye(best.size).reshape(-1, *best.shape)
    slopes = [
        (_auxiliary(best + s, sums) - _auxiliary(best - s, sums)) / 2e-5 for s in steps
    ]
    np.testing.assert_allclose(np.array(slopes) / 800, 0, atol=1e-5)


def test_sums_are_those_of_their_definition():
    mixtures = _mixtures(per_state=1)  # all of a frame belongs to one Gaussian
    frames, states = _spoken(_voice(), mixtures, 50)
    sums = fmllr.accumulate(mixtures, frames, states, fmllr.identity(DIMS))
    extended = np.hstack([frames, np.ones((50, 1))])
    precision = 1 / mixtures.variance[states]
    quadratic = np.einsum("ti,tj,tk->ijk", precision, extended, extended)
    linear = np.einsum("ti,tj->ij", precision * mixtures.mean[states], extended)
    np.testing.assert_allclose(sums.quadratic, quadratic, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(sums.linear, linear, rtol=1e-4, atol=1e-2)


def test_sums_of_parts_add_up_to_those_of_the_whole():
    mixtures, start = _mixtures(), _voice()
    frames, states = _drawn(mixtures, 60)
    states[:7] = -1
    whole = fmllr.accumulate(mixtures, frames, states, start)
    first = fmllr.accumulate(mixtures, frames[:20], states[:20], start)
    rest = fmllr.accumulate(mixtures, frames[20:], states[20:], start)
    for total, expected in zip(first + rest, whole, strict=True):
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-3)
    assert whole.frames == 53


def test_the_likelihood_with_the_volume_is_that_of_gaussians_mapped_back():
    """A x + b under N(μ, diag σ²) is x under N(A⁻¹(μ − b), A⁻¹ diag σ² A⁻ᵀ)."""
    mixtures, transform = _mixtures(per_state=1), _voice()
    frames, states = _spoken(transform, mixtures, 40)
    back = np.linalg.inv(transform[:, :-1])
    expected = 0.0
    for frame, state in zip(frames, states, strict=True):
        gap = frame - back @ (mixtures.mean[state] - transform[:, -1])
        spread = back @ np.diag(mixtures.variance[state]) @ back.T
        volume = np.linalg.slogdet(2 * math.pi * spread)[1]
        expected -= 0.5 * (volume + gap @ np.linalg.solve(spread, gap))
    found = fmllr.accumulate(mixtures, frames, states, transform).log_likelihood
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_map_that_was_undone_is_found_again():
    mixtures, voice = _mixtures(), _voice()
    spoken = _spoken(voice, mixtures, 20_000)
    options = fmllr.FmllrOptions(num_passes=12, num_sweeps=20)
    found = fmllr.estimate(mixtures, [spoken], options)
    assert found.kind == "full"
    np.testing.assert_allclose(found.transform, voice, atol=0.05)


def test_speech_of_nobody_in_particular_needs_no_map():
    mixtures = _mixtures()
    found = fmllr.estimate(
        mixtures, [_drawn(mixtures, 20_000)], fmllr.FmllrOptions(num_passes=2)
    )
    np.testing.assert_allclose(found.transform, fmllr.identity(DIMS), atol=0.05)


def test_no_pass_lowers_the_likelihood():
    mixtures = _mixtures()
    spoken = _spoken(_voice(), mixtures, 700)
    totals = [
        fmllr.estimate(mixtures, [spoken], fmllr.FmllrOptions(num_passes=n)).after
        for n in range(1, 5)
    ]
    before = fmllr.estimate(mixtures, [spoken], fmllr.FmllrOptions()).before
    assert np.all(np.diff([before, *totals]) > -1e-2)
    assert totals[-1] > before + 500


def test_a_speaker_of_few_frames_gets_the_best_offset():
    mixtures = _mixtures(per_state=1)
    shift = np.hstack([np.eye(DIMS), np.array([[1.0], [-2.0], [0.5], [3.0]])])
    frames, states = _spoken(shift, mixtures, 300)
    found = fmllr.estimate(mixtures, [(frames, states)], fmllr.FmllrOptions())
    assert (found.kind, found.frames) == ("offset", 300)
    np.testing.assert_array_equal(found.transform[:, :-1], np.eye(DIMS))
    # least squares, weighted by the precisions
    weight = 1 / mixtures.variance[states]
    gaps = mixtures.mean[states] - frames
    expected = (weight * gaps).sum(axis=0) / weight.sum(axis=0)
    np.testing.assert_allclose(found.transform[:, -1], expected, rtol=1e-3)


@pytest.mark.parametrize("num_frames", [0, 99])
def test_a_speaker_of_hardly_any_frames_is_left_alone(num_frames: int):
    mixtures = _mixtures()
    frames, states = _drawn(mixtures, num_frames)
    frames = np.vstack([frames, np.full((500, DIMS), 9.0)])
    states = np.append(states, np.full(500, -1))  # of which no state is known
    found = fmllr.estimate(mixtures, [(frames, states)], fmllr.FmllrOptions())
    assert (found.kind, found.frames) == ("identity", num_frames)
    np.testing.assert_array_equal(found.transform, fmllr.identity(DIMS))
    assert found.after == found.before


def test_a_speaker_without_utterances_is_left_alone():
    found = fmllr.estimate(_mixtures(), [], fmllr.FmllrOptions())
    assert (found.kind, found.frames, found.after) == ("identity", 0, 0.0)


def test_frames_that_do_not_vary_get_an_offset_instead_of_a_singular_map():
    mixtures = _mixtures()
    frames = np.tile([1.0, 2.0, 3.0, 4.0], (600, 1))
    states = np.arange(600) % 6
    found = fmllr.estimate(mixtures, [(frames, states)], fmllr.FmllrOptions())
    assert found.kind == "offset"
    assert np.isfinite(found.transform).all()


def test_frames_are_moved_by_matrix_and_offset():
    frames = np.random.default_rng(0).normal(size=(7, DIMS))
    transform = _voice()
    expected = frames @ transform[:, :-1].T + transform[:, -1]
    np.testing.assert_allclose(
        fmllr.transformed(transform, frames), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    "wrong", [{"num_passes": 0}, {"num_sweeps": 0}, {"min_offset_frames": 501}]
)
def test_options_out_of_bounds_are_refused_by_name(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        fmllr.FmllrOptions(**wrong)
