"""Warping the frequency axis, against functions that can be warped by hand."""

import pytest
import torch

from lightning_adpsgd.asr.augmentation import random_warp, warp_frequencies


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
