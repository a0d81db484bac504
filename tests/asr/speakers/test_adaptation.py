"""A speaker is heard in a first pass; what is told of it in the second is its own."""

from functools import partial

import numpy as np
import pytest

from lightning_adpsgd.asr.frames.front_end import FrontEnd
from lightning_adpsgd.asr.hmm.gmm import flat
from lightning_adpsgd.asr.speakers.adaptation import (
    Adapter,
    DecodedMaps,
    spoken_states,
)
from lightning_adpsgd.asr.speakers.fmllr import Estimate, FmllrOptions, identity

DIMS = 39


def _utterances(count: int, length: int = 30) -> list[np.ndarray]:
    dice = np.random.default_rng(0)
    return [dice.standard_normal((length, 40)).astype(np.float32) for _ in range(count)]


def test_silent_and_unknown_states_are_left_out():
    silent = np.array([True, False, False, True])
    found = spoken_states(np.array([0, 1, -1, 2, 3, -5]), silent)
    assert found.tolist() == [-1, 1, -1, 2, -1, -1]


def test_a_map_is_of_the_first_speech_and_moves_all(monkeypatch):
    seen: list[int] = []
    doubled = 2 * identity(DIMS)

    def maps(frames) -> Estimate:
        seen.extend(map(len, frames))
        return Estimate(doubled, "full", 60, 0.0, 0.0)

    monkeypatch.setattr("lightning_adpsgd.asr.speakers.adaptation.MOST_FRAMES", 50)
    spoken = _utterances(4)
    voice = Adapter(FrontEnd(), maps, None).adapt_to(partial(iter, spoken))
    assert seen == [30, 30]
    for own in spoken:
        fmllr, ivectors = voice.streams(own)
        np.testing.assert_allclose(fmllr, 2 * FrontEnd()(own), rtol=1e-4, atol=1e-5)
        assert ivectors.shape == (30, 0)


class _Decodes:
    """In place of a decoder: notes what it was asked, and finds what it is told."""

    def __init__(self, state: int) -> None:
        self.state = state
        self.asked: list[np.ndarray] = []

    def states(self, log_likelihoods: np.ndarray, acoustic_scale: float) -> np.ndarray:
        assert acoustic_scale == 0.25
        self.asked.append(log_likelihoods)
        return np.full(len(log_likelihoods), self.state)


def _maps(decoder: _Decodes, decodings: int) -> DecodedMaps:
    plain = flat(np.zeros(DIMS), np.ones(DIMS), 2)
    adapted = flat(np.ones(DIMS), np.full(DIMS, 2.0), 2)
    options = FmllrOptions(min_offset_frames=10)
    silent = np.array([True, False])
    return DecodedMaps(
        decoder,
        silent,
        plain,
        adapted,
        options,
        decodings=decodings,
        acoustic_scale=0.25,
    )


@pytest.mark.parametrize("state", [0, -1])
def test_a_speaker_who_says_nothing_is_left_as_it_is(state: int):
    found = _maps(_Decodes(state), 2)([np.ones((40, DIMS), np.float32)])
    assert found.kind == "identity"
    np.testing.assert_array_equal(found.transform, identity(DIMS))


def test_an_offset_brings_the_frames_to_where_the_adapted_mixtures_are():
    decoder = _Decodes(1)
    frames = np.random.default_rng(0).normal(-3, 1, (40, DIMS)).astype(np.float32)
    found = _maps(decoder, 2)([frames, frames[:20]])
    together = np.concatenate([frames, frames[:20]])
    assert found.kind == "offset"
    np.testing.assert_allclose(
        found.transform[:, -1], 1 - together.mean(axis=0), atol=1e-4
    )
    # the first decoding is of the frames as they are, by the plain mixtures
    expected = -0.5 * (DIMS * np.log(2 * np.pi) + (frames**2).sum(axis=1))
    np.testing.assert_allclose(decoder.asked[0][:, 1], expected, rtol=1e-4)
    moved = frames + found.transform[:, -1]
    squares = ((moved - 1) ** 2 / 2).sum(axis=1)
    expected = -0.5 * (DIMS * np.log(4 * np.pi) + squares)
    np.testing.assert_allclose(decoder.asked[2][:, 1], expected, rtol=1e-4)
    assert len(decoder.asked) == 4
