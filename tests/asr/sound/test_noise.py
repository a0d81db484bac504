"""Noise has the power that was asked for, and is the same in a second attempt."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from lightning_adpsgd.asr.corpora.corpus import Utterance
from lightning_adpsgd.asr.frames.writing import FrameWriter
from lightning_adpsgd.asr.sound.audio import AudioError
from lightning_adpsgd.asr.sound.noise import add_noise, dice_of, noise_files
from recipes.hybrid.pipeline.groups import FeatureSettings
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.stages.features import Noise, Side, SideTask, _work, write_side

SPEECH = np.random.default_rng(0).normal(0, 0.1, 20_000).astype(np.float32)


def power(samples: np.ndarray) -> float:
    return float(np.mean(np.square(samples, dtype=np.float64)))


@pytest.mark.parametrize("decibels", [0.0, 10.0, 25.0])
def test_noise_is_so_many_decibels_below_the_speech(decibels: float):
    noisy = add_noise(SPEECH, [], (decibels, decibels), dice_of(0, "a"))
    ratio = power(SPEECH) / power(noisy - SPEECH)
    assert 10 * np.log10(ratio) == pytest.approx(decibels, abs=0.01)
    assert noisy.dtype == np.float32


@pytest.mark.parametrize("seconds", [0.5, 20.0])
def test_recorded_noise_is_a_stretch_of_its_file(tmp_path: Path, seconds: float):
    hum = np.sin(np.arange(round(seconds * 8000)) * 2 * np.pi * 440 / 8000)
    soundfile.write(str(tmp_path / "hum.wav"), hum * 0.3, 8000, subtype="FLOAT")
    files = noise_files(tmp_path)
    noise = add_noise(SPEECH, files, (5.0, 5.0), dice_of(0, "a")) - SPEECH
    spectrum = np.abs(np.fft.rfft(noise))
    at = np.argmax(spectrum) * 8000 / len(noise)
    assert at == pytest.approx(440, abs=1)


def test_equal_seeds_and_names_draw_alike_and_others_do_not():
    def noisy(seed: int, name: str) -> list[float]:
        return add_noise(SPEECH, [], (0.0, 20.0), dice_of(seed, name)).tolist()

    assert noisy(0, "a") == noisy(0, "a")
    assert noisy(0, "a") != noisy(0, "b")
    assert noisy(0, "a") != noisy(1, "a")


def test_silence_stays_silent():
    silence = np.zeros(1000, np.float32)
    assert add_noise(silence, [], (0.0, 0.0), dice_of(0, "a")) is silence


@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_every_stretch_of_recorded_noise_lies_in_its_file(
    tmp_path: Path, seconds: float
):
    hum = np.full(round(seconds * 8000), 0.3)
    soundfile.write(str(tmp_path / "hum.wav"), hum, 8000, subtype="FLOAT")
    for seed in range(12):
        noisy = add_noise(SPEECH, noise_files(tmp_path), (5.0, 5.0), dice_of(seed, "a"))
        assert noisy is not SPEECH
        assert np.isfinite(noisy).all()


def test_a_silent_recording_of_noise_adds_nothing(tmp_path: Path):
    soundfile.write(str(tmp_path / "a.wav"), np.zeros(40_000), 8000)
    dice = dice_of(0, "a")
    assert add_noise(SPEECH, noise_files(tmp_path), (5.0, 5.0), dice) is SPEECH


def test_a_folder_without_noise_is_named(tmp_path: Path):
    with pytest.raises(AudioError, match=f"{tmp_path}: expected .wav"):
        noise_files(tmp_path)


def test_the_share_of_sides_gets_noise():
    noise = Noise([], 0.3, (10.0, 10.0), seed=0)
    cut = SPEECH[:100]
    changed = [
        noise.added_to([cut], f"side {number}")[0] is not cut for number in range(300)
    ]
    assert 60 < sum(changed) < 120  # 90 and four standard deviations


def test_a_corpus_that_was_moved_gets_the_same_noise(tmp_path: Path):
    def frames(path: Path) -> np.ndarray:
        soundfile.write(str(path), SPEECH, 8000)
        spoken = Utterance("call-A_000000-000200", path, 0, 0.0, 2.0, (), "call-A")
        noise, kept = Noise([], 1.0, (5.0, 15.0), seed=0), list[np.ndarray]()
        place: Any = SimpleNamespace(put=kept.append)
        assert write_side(SideTask(Side([spoken], [0]), [place], 40, noise)) is None
        return kept[0]

    (tmp_path / "moved").mkdir()
    here, moved = tmp_path / "call.wav", tmp_path / "moved" / "call.wav"
    np.testing.assert_array_equal(frames(here), frames(moved))


def test_without_a_share_there_is_no_noise():
    assert Noise.of(FeatureSettings()) is None


def test_a_share_beyond_all_sides_is_refused():
    with pytest.raises(ValueError, match=r"`noise_share` must lie in \[0, 1\], got 2"):
        FeatureSettings(noise_share=2)


def test_noise_is_for_training_sides_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module, seen = sys.modules[write_side.__module__], []
    monkeypatch.setattr(module, "write_side", lambda task: seen.append(task.noise))
    chosen = FeatureSettings(noise_share=1.0)
    settings = Settings(corpus=tmp_path, out=tmp_path, cores=1, features=chosen)
    spoken = Utterance("call-A_000000-000200", Path("a"), 0, 0.0, 2.0, (), "call-A")
    for split in ("train", "dev", "test"):
        (tmp_path / split).mkdir()
        writer = FrameWriter(tmp_path / split, [spoken.id], [200], 40)
        writer.create()
        assert list(_work(settings, split, writer, iter([Side([spoken], [0])])))
    assert [noise is not None for noise in seen] == [True, False, False]
