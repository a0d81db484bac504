"""Speech is found by its level; long stretches are cut where they are quiet."""

import itertools

import numpy as np
import pytest

from lightning_adpsgd.asr.sound.segments import find_segments


def level(*stretches: tuple[int, float]) -> np.ndarray:
    return np.concatenate([np.full(frames, value) for frames, value in stretches])


def test_speech_is_found_with_a_margin_and_silence_is_left_out():
    found = find_segments(level((400, 2.0), (200, 12.0), (400, 2.0)), margin=25)
    [(first, last)] = found
    assert 360 <= first < 375
    assert 625 < last <= 640


def test_pauses_shorter_than_the_margins_do_not_part_speech():
    silence, speech = (300, 2.0), (200, 12.0)
    close = level(silence, speech, (30, 2.0), speech, silence)
    apart = level(silence, speech, (200, 2.0), speech, silence)
    assert [len(find_segments(x)) for x in (close, apart)] == [1, 2]


def test_a_level_without_contrast_is_all_kept():
    assert find_segments(np.full(500, 7.0)) == [(0, 500)]


@pytest.mark.parametrize("frames", [1, 5, 10, 11, 30, 50, 51])
def test_segments_of_a_short_channel_end_with_it(frames: int):
    found = find_segments(np.linspace(2.0, 12.0, frames))
    assert all(0 <= first < last <= frames for first, last in found)


def test_no_frames_have_no_segments():
    assert find_segments(np.zeros(0)) == []


@pytest.mark.parametrize("seed", range(3))
def test_long_speech_is_cut_at_quiet_frames_without_loss(seed: int):
    values = np.random.default_rng(seed).uniform(10, 12, 5000)
    quiet = (1400, 2900, 4100)
    values[list(quiet)] = 9.0
    found = find_segments(values, longest=2000)
    assert [first for first, _ in found] == [0, *(frame + 1 for frame in quiet)]
    assert found[-1][1] == 5000
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))


def test_digital_silence_is_no_speech():
    assert find_segments(np.zeros(20_000)) == []


def test_a_word_in_a_long_digital_silence_is_found():
    found = find_segments(level((30_000, 0.0), (60, 12.0), (30_000, 0.0)), margin=25)
    assert len(found) == 1
    first, last = found[0]
    assert 29_960 <= first < 30_000
    assert 30_060 < last <= 30_100
