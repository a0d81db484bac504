"""Sound files of any length, format and rate as log-mel frames, in bounded memory.

A file is read in blocks of whole seconds, which begin at the same instants at its own
rate and at 8 kHz. Every block is read with an extra second on both sides, so that
resampling filters and frame windows do not see its ends. The frames equal those of the
whole file.
"""

import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import soundfile
import torch
from torchaudio.functional import resample

from lightning_adpsgd.asr.sound.byte_order import is_swapped
from lightning_adpsgd.asr.sound.features import log_mel
from lightning_adpsgd.asr.sound.mpeg import WRONG_LENGTH, is_longer
from lightning_adpsgd.asr.sound.rates import odd_rate
from lightning_adpsgd.asr.sound.sphere import (
    MAGIC,
    SAMPLE_RATE,
    SphereError,
    name_of,
    read_header,
)
from lightning_adpsgd.asr.sound.truncation import (
    NO_LENGTH,
    SEVERAL_STREAMS,
    WITHOUT_LENGTH,
    cut_short,
    has_several_streams,
)

BLOCK_S = 30
_MARGIN_S = 1
_FRAMES_PER_S = 100
_SHORTEST_S = 0.025


class AudioError(ValueError):
    """A sound file cannot be used; the message has the path and the problem."""


class SoundFile:
    """A sound file whose header has been checked.

    Args:
        path: Sound file in any format that libsndfile reads, at 8 kHz or more.

    Raises:
        AudioError: The file is missing, not sound, empty, truncated, longer than it
            says, at a lower or odd rate, or has a byte order that differs from its
            header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            info = soundfile.info(name_of(path))
        except (OSError, soundfile.LibsndfileError) as error:
            raise AudioError(self._unreadable(error)) from error
        self.sample_rate: int = info.samplerate
        self.num_samples: int = info.frames
        self.num_channels: int = info.channels
        self._check(info.format)

    def _unreadable(self, error: Exception) -> str:
        if self.path.is_dir():
            return f"{self.path}: a folder; name the sound files in it"
        if not self.path.is_file():
            return f"{self.path}: the file does not exist"
        if self.path.stat().st_size == 0:
            return f"{self.path}: the file is empty"
        with suppress(SphereError):
            if read_header(self.path, sample_rate=None).is_shortened:
                unpack = f"sph2pipe -f wav {shlex.quote(str(self.path))} new.wav"
                return f"{self.path}: compressed by shorten; unpack it: `{unpack}`"
        return f"{self.path}: no sound in a format that libsndfile reads: {error}"

    def _check(self, form: str) -> None:
        if self.sample_rate < SAMPLE_RATE:
            raise AudioError(
                f"{self.path}: expected {SAMPLE_RATE} Hz or more, found "
                f"{self.sample_rate}; a lower rate cannot be restored: leave it out"
            )
        if problem := odd_rate(self.sample_rate, SAMPLE_RATE):
            raise AudioError(f"{self.path}: {problem}")
        self._check_length(form)
        if self.duration_s < _SHORTEST_S:
            raise AudioError(
                f"{self.path}: expected at least {_SHORTEST_S} s, found "
                f"{min(self.duration_s, _SHORTEST_S - 0.001):.3f} s; leave it out"
            )
        if is_swapped(self.path):
            raise AudioError(
                f"{self.path}: noise, but speech once the two bytes of each sample are "
                "swapped; rewrite it in the byte order that its header names"
            )

    def _check_length(self, form: str) -> None:
        with self.path.open("rb") as file:
            is_sphere = file.read(len(MAGIC)) == MAGIC
        if is_sphere:
            try:
                read_header(self.path, self.sample_rate)
            except SphereError as error:
                raise AudioError(str(error)) from error
        if problem := cut_short(self.path):
            raise AudioError(f"{self.path}: {problem}")
        if has_several_streams(self.path):
            raise AudioError(f"{self.path}: {SEVERAL_STREAMS}")
        if self.num_samples == NO_LENGTH:
            raise AudioError(f"{self.path}: {WITHOUT_LENGTH}")
        if form == "MP3" and is_longer(self.path, self.num_samples):
            raise AudioError(f"{self.path}: {WRONG_LENGTH}")

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.num_samples / self.sample_rate

    def log_mel(
        self, channel: int, num_mels: int, block_s: int = BLOCK_S
    ) -> Iterator[np.ndarray]:
        """The frames of one channel, block by block, float32 [frames, num_mels].

        Raises:
            AudioError: A sample is non-finite or missing.
        """
        for start in range(
            0, max(1, -(-self.num_samples // self.sample_rate)), block_s
        ):
            first = max(start - _MARGIN_S, 0)
            samples = self.samples(channel, first, start + block_s + _MARGIN_S)
            frames = log_mel(samples, num_mels).numpy()
            skipped = (start - first) * _FRAMES_PER_S
            yield frames[skipped : skipped + block_s * _FRAMES_PER_S]

    def samples(self, channel: int, first_s: int, last_s: int) -> np.ndarray:
        """The samples between two times in seconds, float32 [samples] at 8 kHz.

        Raises:
            AudioError: A sample is non-finite or missing.
        """
        begin = first_s * self.sample_rate
        wanted = min(last_s * self.sample_rate, self.num_samples) - begin
        try:
            found, _ = soundfile.read(
                name_of(self.path), wanted, begin, dtype="float32", always_2d=True
            )
        except soundfile.LibsndfileError as error:
            raise AudioError(
                f"{self.path}: broken after {first_s} s: {error}; copy it again from "
                "its source, or leave it out"
            ) from error
        if len(found) < wanted:
            ends = (begin + len(found)) / self.sample_rate
            raise AudioError(
                f"{self.path}: cut short: the sound ends at {ends:.2f} s, and by its "
                f"header at {self.duration_s:.2f} s; copy it again from its source, or "
                "leave it out"
            )
        samples = found[:, channel]
        self._check_finite(samples, begin)
        if self.sample_rate == SAMPLE_RATE:
            return samples
        return resample(
            torch.from_numpy(samples.copy()), self.sample_rate, SAMPLE_RATE
        ).numpy()

    def _check_finite(self, samples: np.ndarray, begin: int) -> None:
        if not np.isfinite(samples).all():
            at = begin + int(np.flatnonzero(~np.isfinite(samples))[0])
            raise AudioError(
                f"{self.path}: sample {at} ({at / self.sample_rate:.2f} s) "
                f"is non-finite, got {samples[at - begin]}; convert the file to 16-bit "
                "samples, or leave it out"
            )
