"""Features are Kaldi's: against kaldi-native-fbank, and against the written formula."""

import kaldi_native_fbank
import numpy as np
import pytest
import torch
import torchaudio

from lightning_adpsgd.asr.sound.features import (
    CONTEXT,
    Normalisation,
    add_differences,
    log_mel,
    normalise_side,
    num_frames,
    with_differences,
)
from tests.asr.tiny import noise


def _reference_log_mel(samples: np.ndarray, num_mels: int) -> np.ndarray:
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.samp_freq = 8000
    options.frame_opts.dither = 0
    options.frame_opts.snip_edges = False
    options.mel_opts.num_bins = num_mels
    bank = kaldi_native_fbank.OnlineFbank(options)
    bank.accept_waveform(8000, (samples * 32768).tolist())
    bank.input_finished()
    return np.stack([bank.get_frame(i) for i in range(bank.num_frames_ready)])


@pytest.mark.parametrize("num_mels", [23, 40])
def test_log_mel_is_that_of_kaldi_native_fbank(num_mels: int):
    samples = noise(1.237, channels=1)[:, 0].astype(np.float32)
    expected = _reference_log_mel(samples, num_mels)
    found = log_mel(samples, num_mels)
    assert found.shape == expected.shape == (124, num_mels)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-3)


@pytest.mark.parametrize("samples", [200, 201, 279, 280, 8000, 8039, 8040])
def test_the_number_of_frames_is_known_beforehand(samples: int):
    sound = noise(1.1, channels=1)[:samples, 0].astype(np.float32)
    assert len(log_mel(sound)) == num_frames(samples) == (samples + 40) // 80


def test_digital_silence_stays_at_the_floor():
    silence = np.zeros(800, np.float32)
    assert (log_mel(silence, floor=1.5) == 1.5).all()


def test_the_same_samples_give_the_same_bits():
    samples = noise(0.5, channels=1)[:, 0].astype(np.float32)
    assert torch.equal(log_mel(samples), log_mel(samples))


@pytest.mark.parametrize("shape", [(0,), (199,), (800, 2)])
def test_empty_or_two_channel_audio_is_refused(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"`samples` must be one channel of at least"):
        log_mel(np.zeros(shape, np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_sample_that_is_not_finite_is_named(value: float):
    samples = np.zeros(800, np.float32)
    samples[123] = value
    with pytest.raises(ValueError, match="must be finite, sample 123"):
        log_mel(samples)


def _reference_differences(frames: np.ndarray) -> np.ndarray:
    """Kaldi's definition: both filters on the frames, indices held at the ends."""
    first = {k: k / 10 for k in range(-2, 3)}
    second: dict[int, float] = {}
    for i, a in first.items():
        for j, b in first.items():
            second[i + j] = second.get(i + j, 0.0) + a * b
    rows = []
    for t in range(len(frames)):
        at = [frames[np.clip(t + k, 0, len(frames) - 1)] for k in range(-4, 5)]
        parts = [sum(w * at[k + 4] for k, w in f.items()) for f in (first, second)]
        rows.append(np.concatenate([frames[t], *parts]))
    return np.stack(rows)


@pytest.mark.parametrize("length", [1, 3, 30])
def test_differences_follow_kaldis_definition(length: int):
    frames = torch.randn(length, 5, dtype=torch.float64)
    expected = _reference_differences(frames.numpy())
    np.testing.assert_allclose(with_differences(frames).numpy(), expected, atol=1e-12)


def test_the_first_difference_is_torchaudios():
    frames = torch.randn(30, 5)
    expected = torchaudio.functional.compute_deltas(frames.T, win_length=5).T
    torch.testing.assert_close(with_differences(frames)[:, 5:10], expected)


def test_differences_of_a_batch_are_those_of_its_members():
    batch = torch.randn(3, 21 + 2 * CONTEXT, 4)
    whole = add_differences(batch)
    assert whole.shape == (3, 21, 12)
    torch.testing.assert_close(whole[1], add_differences(batch[1]))


def test_a_straight_line_has_its_slope_and_no_curvature():
    line = torch.arange(20.0)[:, None] * 0.25
    _, slope, curvature = add_differences(line).T
    torch.testing.assert_close(slope, torch.full((12,), 0.25))
    torch.testing.assert_close(curvature, torch.zeros(12))


def test_too_few_frames_for_the_context_are_refused():
    with pytest.raises(ValueError, match="must have more than 8 frames"):
        add_differences(torch.zeros(2, 8, 4))


def test_a_side_has_mean_zero_and_deviation_one():
    utterances = [torch.randn(50, 4) * 3 + 7, torch.randn(200, 4) - 2]
    frames = torch.cat(normalise_side(utterances)).double()
    torch.testing.assert_close(
        frames.mean(0), torch.zeros(4).double(), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(
        frames.std(0, correction=0), torch.ones(4).double(), atol=1e-5, rtol=0
    )


def test_the_order_of_loudness_within_a_side_stays():
    quiet, loud = normalise_side([torch.ones(10, 1), torch.full((10, 1), 2.0)])
    assert quiet.max() < loud.min()


def test_a_constant_side_becomes_zero_rather_than_nan():
    (frames,) = normalise_side([torch.full((10, 3), 4.0)])
    assert torch.equal(frames, torch.zeros(10, 3))


def test_the_statistics_of_parts_are_those_of_the_whole():
    dice = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 5, generator=dice) * 9 + 40 for n in (3, 200, 1)]
    whole = torch.cat(parts).double()
    found = Normalisation.of(parts)
    assert torch.allclose(found.mean, whole.mean(dim=0), rtol=1e-12)
    assert torch.allclose(found.deviation, whole.std(dim=0, correction=0), rtol=1e-12)


def test_no_frames_have_no_statistics():
    with pytest.raises(ValueError, match="must have at least one frame"):
        Normalisation.of([torch.zeros(0, 4)])


def test_digital_silence_moves_no_statistics():
    sound = noise(1.5, channels=1)[:, 0].astype(np.float32)
    gated = np.concatenate([np.zeros(8000, np.float32), sound])
    frames = log_mel(gated)
    assert not frames[:98].any()  # frame 98 reaches into the sound
    found, expected = Normalisation.of([frames]), Normalisation.of([frames[98:]])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    # An utterance of nothing else does not either.
    more = Normalisation.of([torch.zeros(70, 40), frames])
    torch.testing.assert_close(more, expected, rtol=0, atol=0)


def test_a_side_of_digital_silence_alone_becomes_zero():
    (frames,) = normalise_side([log_mel(np.zeros(8000, np.float32))])
    assert torch.equal(frames, torch.zeros(100, 40))
