"""Stretching frequency and time, against functions that can be stretched by hand."""

import pytest
import torch

from lightning_adpsgd.asr.frames.augmentation import (
    random_masks,
    random_warp,
    stretch_labels,
    stretch_time,
    warp_frequencies,
)
from lightning_adpsgd.asr.frames.store import IGNORE


def test_a_factor_of_one_changes_nothing():
    frames = torch.randn(3, 5, 40)
    torch.testing.assert_close(warp_frequencies(frames, torch.ones(3)), frames)


def test_a_straight_line_is_stretched_exactly_up_to_the_last_band():
    line = torch.arange(40.0).expand(2, 5, 40)
    factors = torch.tensor([0.9, 1.1])
    expected = (line * factors[:, None, None]).clamp(max=39)
    torch.testing.assert_close(warp_frequencies(line, factors), expected)


def test_each_chunk_has_a_factor_of_its_own():
    line = torch.arange(40.0).expand(50, 1, 40)
    warped = random_warp(line, 0.1)[:, 0, 20] / 20
    assert 0.9 <= warped.min() < 0.95 < 1.05 < warped.max() <= 1.1


@pytest.mark.parametrize("num_bands", [1, 2])
def test_few_bands_can_be_warped_too(num_bands):
    frames = torch.ones(2, 3, num_bands)
    torch.testing.assert_close(random_warp(frames, 0.3), frames)


def test_a_straight_line_in_time_gets_another_slope_around_its_middle():
    line = torch.arange(9.0)[None, :, None].expand(2, 9, 3)
    found = stretch_time(line, torch.tensor([0.5, 1.5]))
    expected = 4 + torch.tensor([[0.5], [1.5]]) * torch.arange(-4.0, 5.0)
    torch.testing.assert_close(found[:, :, 0], expected.clamp(0, 8))


def test_time_at_its_own_speed_stays_as_it_is():
    frames, labels = torch.randn(2, 9, 3), torch.randint(5, (2, 5))
    torch.testing.assert_close(stretch_time(frames, torch.ones(2)), frames)
    assert torch.equal(stretch_labels(labels, torch.ones(2)), labels)


def test_labels_move_with_their_frames():
    # A label is the number of its frame, and so is what the frame holds.
    frames = torch.arange(29.0)[None, :, None].expand(2, 29, 1)
    labels = torch.arange(4, 25).expand(2, 21)
    factors = torch.tensor([0.8, 1.2])
    moved = stretch_labels(labels, factors)
    heard = stretch_time(frames, factors)[:, 4:25, 0]
    counted = moved != IGNORE
    assert counted[0].all()
    assert counted[1].sum() == 17  # ±10 frames at 1.2 are within ±10.4: ±8
    assert ((moved - heard).abs() <= 0.5)[counted].all()


@pytest.mark.parametrize("num_frames", [1, 2])
def test_few_frames_can_be_stretched_too(num_frames):
    frames = torch.ones(2, num_frames, 3)
    torch.testing.assert_close(stretch_time(frames, torch.tensor([0.7, 1.3])), frames)


def test_masks_are_stretches_of_each_chunk_within_their_widths():
    masked = random_masks(torch.ones(400, 21, 40), bands=8, length=4)
    bands = (masked == 0).all(1).sum(1)  # of each chunk: those that are 0 in all frames
    frames = (masked == 0).all(2).sum(1)
    assert set(bands.tolist()) == set(range(9))
    assert set(frames.tolist()) == set(range(5))
    # Each mask is one stretch: at most one run of zeros begins.
    begins = ((masked == 0).all(1).int().diff(dim=1) == 1).sum(1)
    assert begins.max() == 1


def test_no_masks_leave_the_frames_as_they_are():
    frames = torch.randn(3, 5, 40)
    assert torch.equal(random_masks(frames, 0, 0), frames)
