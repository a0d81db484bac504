"""One channel of a sound file of any kind, at the rate of telephone speech.

`sphere.py` reads SPHERE files, and libsndfile all others (WAV, FLAC, Ogg). torchaudio
resamples a higher rate. A lower rate is refused, because the missing band cannot be
restored.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import torch
from torchaudio.functional import resample

from lightning_adpsgd.asr.sound import mpeg, sphere
from lightning_adpsgd.asr.sound.rates import odd_rate
from lightning_adpsgd.asr.sound.sphere import SAMPLE_RATE
from lightning_adpsgd.asr.sound.truncation import (
    NO_LENGTH,
    SEVERAL_STREAMS,
    WITHOUT_LENGTH,
    cut_short,
    has_several_streams,
)

_BLOCK = 1 << 20  # samples of each channel that are read at a time


class ChannelError(ValueError):
    """A sound file cannot be used; the message has the path and the problem."""


class SoundFacts(NamedTuple):
    """The contents of a sound file's header.

    Attributes:
        seconds: Length in seconds.
        num_channels: Number of channels.
        sample_rate: Sample rate in Hz.
    """

    seconds: float
    num_channels: int
    sample_rate: int


def read_facts(path: Path, sample_rate: int = SAMPLE_RATE) -> SoundFacts:
    """Reads length, channels and rate, without decoding the samples.

    Raises:
        ChannelError: The file cannot be read, is not sound, is empty, was cut short, is
            longer than it says, or has a rate below `sample_rate` or in no simple ratio
            to it. Or it is SPHERE and compressed, without a program that reads it. What
            of a FLAC or MP3 file is missing shows only when it is read.
    """
    found = _sphere_facts(path) if is_sphere(path) else _facts(path)
    if found.sample_rate < sample_rate:
        raise ChannelError(
            f"{path}: expected at least {sample_rate} Hz, got {found.sample_rate}; "
            "record it again, because part of the speech band is missing"
        )
    if problem := odd_rate(found.sample_rate, sample_rate):
        raise ChannelError(f"{path}: {problem}")
    return found


def _sphere_facts(path: Path) -> SoundFacts:
    try:
        header = sphere.read_header(path, sample_rate=None)
        if header.is_shortened:
            sphere.find_sph2pipe(path, header)
    except sphere.SphereError as error:
        raise ChannelError(str(error)) from error
    return SoundFacts(header.duration_s, header.num_channels, header.sample_rate)


def _facts(path: Path) -> SoundFacts:
    try:
        missing, has_several = cut_short(path), has_several_streams(path)
        found = soundfile.info(sphere.name_of(path))
        is_more = found.format == "MP3" and mpeg.is_longer(path, found.frames)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}; correct its path or permissions"
        raise ChannelError(f"{path}: {problem}") from error
    except soundfile.LibsndfileError as error:
        reason = error.error_string.rstrip(".")
        problem = f"cannot be read: {reason}; copy it again"
        raise ChannelError(f"{path}: {problem}") from error
    if missing:
        raise ChannelError(f"{path}: {missing}; copy it again")
    if has_several:
        raise ChannelError(f"{path}: {SEVERAL_STREAMS}")
    if found.frames == NO_LENGTH:
        raise ChannelError(f"{path}: {WITHOUT_LENGTH}")
    if is_more:
        raise ChannelError(f"{path}: {mpeg.WRONG_LENGTH}")
    if found.frames <= 0:
        raise ChannelError(f"{path}: contains no sound; copy it again")
    seconds = found.frames / found.samplerate
    return SoundFacts(seconds, found.channels, found.samplerate)


def read_channel(
    path: Path, channel: int, sample_rate: int = SAMPLE_RATE
) -> np.ndarray:
    """One whole channel as float32 [samples] in [-1, 1], at `sample_rate`.

    Raises:
        ValueError: An error of `read_facts`; or the channel does not exist, or there
            are fewer samples than the header says.
    """
    facts = read_facts(path, sample_rate)
    if not 0 <= channel < facts.num_channels:
        raise ChannelError(
            f"{path}: `channel` must be below {facts.num_channels}, got {channel}"
        )
    samples = _read(path, channel, facts)
    if facts.sample_rate == sample_rate:
        return np.ascontiguousarray(samples)
    return resample(torch.tensor(samples), facts.sample_rate, sample_rate).numpy()


def is_sphere(path: Path) -> bool:
    """Whether a file begins as NIST's SPHERE files do; false if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(sphere.MAGIC)) == sphere.MAGIC
    except OSError:
        return False


def _read(path: Path, channel: int, facts: SoundFacts) -> np.ndarray:
    """One channel, float32 [samples], at the rate of the file."""
    if is_sphere(path):
        return sphere.read_channel(path, channel, sample_rate=facts.sample_rate)
    try:
        samples = np.concatenate([np.zeros(0, np.float32), *_blocks(path, channel)])
    except soundfile.LibsndfileError as error:
        raise ChannelError(f"{path}: {error}; copy it again") from error
    expected = round(facts.seconds * facts.sample_rate)
    if len(samples) < expected:
        raise ChannelError(
            f"{path}: truncated: its header says {expected} samples, it has "
            f"{len(samples)}; copy it again"
        )
    return samples


def _blocks(path: Path, channel: int) -> Iterator[np.ndarray]:
    """The samples that there are, whatever length a damaged header says."""
    with soundfile.SoundFile(sphere.name_of(path)) as file:
        while len(some := file.read(_BLOCK, "float32", always_2d=True)):
            yield some[:, channel].copy()
