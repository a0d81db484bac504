import numpy as np
import pytest

from lightning_adpsgd.asr.frames.cepstra import cepstra
from lightning_adpsgd.asr.frames.front_end import FrontEnd, spliced
from lightning_adpsgd.asr.frames.lda import (
    covariances,
    discriminants,
    scatter_sums,
    total,
)


@pytest.fixture(scope="module")
def labelled() -> tuple[np.ndarray, np.ndarray]:
    """Frames of four classes whose means differ in the last of six directions most."""
    random = np.random.default_rng(0)
    classes = random.integers(0, 4, 2000)
    mixing = random.normal(size=(6, 6))
    means = random.normal(size=(4, 6)) * [0, 0, 0, 0, 1, 3]
    return (means[classes] + random.normal(size=(2000, 6))) @ mixing, classes


def scatter_by_hand(frames, classes) -> tuple[np.ndarray, np.ndarray]:
    mean = frames.mean(axis=0)
    within = between = np.zeros((frames.shape[1],) * 2)
    for label in np.unique(classes):
        own = frames[classes == label]
        within = within + (own - own.mean(axis=0)).T @ (own - own.mean(axis=0))
        gap = own.mean(axis=0) - mean
        between = between + len(own) * np.outer(gap, gap)
    return within / len(frames), between / len(frames)


def test_covariances_are_those_of_the_frames(labelled):
    frames, classes = labelled
    found = covariances(scatter_sums(frames, classes, 5))  # class 4 never occurs
    for mine, expected in zip(found, scatter_by_hand(*labelled), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-9)


def test_projection_makes_within_the_identity_and_between_diagonal(labelled):
    frames, classes = labelled
    projection = discriminants(scatter_sums(frames, classes, 4), 3)
    within, between = scatter_by_hand(frames @ projection, classes)
    np.testing.assert_allclose(within, np.eye(3), atol=1e-9)
    np.testing.assert_allclose(between, np.diag(np.diag(between)), atol=1e-9)
    assert (np.diff(np.diag(between)) <= 0).all()


def test_ratios_are_the_eigenvalues_of_between_over_within(labelled):
    frames, classes = labelled
    within, between = scatter_by_hand(*labelled)
    expected = np.sort(np.linalg.eigvals(np.linalg.solve(within, between)).real)[::-1]
    projection = discriminants(scatter_sums(frames, classes, 4), 3)
    found = np.diag(projection.T @ between @ projection)
    np.testing.assert_allclose(found, expected[:3], rtol=1e-8)


def test_sums_of_parts_add_up(labelled):
    frames, classes = labelled
    parts = [scatter_sums(frames[i::3], classes[i::3], 4) for i in range(3)]
    for mine, whole in zip(total(parts), scatter_sums(frames, classes, 4), strict=True):
        np.testing.assert_allclose(mine, whole)


def test_more_directions_than_the_frames_have_are_refused(labelled):
    frames, classes = labelled
    flat = np.hstack([frames, frames[:, :1]])  # a direction twice
    with pytest.raises(ValueError, match="at most 6"):
        discriminants(scatter_sums(flat, classes, 4), 7)
    with pytest.raises(ValueError, match=r"1\.\.6"):
        discriminants(scatter_sums(frames, classes, 4), 7)


def test_splicing_puts_the_neighbours_beside_a_frame():
    log_mel = np.random.default_rng(0).normal(size=(9, 40)).astype(np.float32)
    static = cepstra(log_mel, 5)[:, :5]
    found = spliced(log_mel, 5, 2)
    np.testing.assert_array_equal(found[4], static[2:7].ravel())
    np.testing.assert_array_equal(found[0], static[[0, 0, 0, 1, 2]].ravel())


def test_a_front_end_projects_what_was_spliced(tmp_path):
    random = np.random.default_rng(0)
    log_mel = random.normal(size=(30, 40)).astype(np.float32)
    projection = random.normal(size=(5 * 7, 4))
    front_end = FrontEnd(7, 2, projection)
    expected = spliced(log_mel, 7, 2) @ projection
    np.testing.assert_allclose(front_end(log_mel), expected, rtol=1e-4, atol=1e-4)
    front_end.save(tmp_path / "front_end.npz")
    found = FrontEnd.load(tmp_path / "front_end.npz")(log_mel)
    np.testing.assert_array_equal(found, front_end(log_mel))


def test_a_front_end_without_projection_gives_cepstra_with_slopes(tmp_path):
    log_mel = np.random.default_rng(0).normal(size=(30, 40)).astype(np.float32)
    FrontEnd(9).save(tmp_path / "front_end.npz")
    found = FrontEnd.load(tmp_path / "front_end.npz")(log_mel)
    np.testing.assert_array_equal(found, cepstra(log_mel, 9))


def test_a_projection_of_another_size_is_refused():
    with pytest.raises(ValueError, match="35 rows"):
        FrontEnd(7, 2, np.zeros((34, 4)))


def test_a_file_that_holds_no_front_end_is_named(tmp_path):
    path = tmp_path / "front_end.npz"
    with pytest.raises(ValueError, match=r"front_end\.npz"):
        FrontEnd.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"front_end\.npz"):
        FrontEnd.load(path)
