"""Reading of NIST SPHERE files: one channel as float samples.

Telephone corpora keep a conversation in one file, a speaker per channel, 8 kHz mu-law.
The header is checked before any sample is used, since a copy that was cut short still
opens and would lose speech silently. Files compressed with "shorten" go through the
external program sph2pipe. Nothing is resampled.
"""

import io
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

from lightning_adpsgd.asr.sound.byte_order import is_swapped

SAMPLE_RATE = 8000
MAGIC = b"NIST_1A\n"
_SWAPPED = (
    "noise, but speech once the two bytes of each sample are swapped: its header names "
    "the wrong byte order; change `sample_byte_format` there from 10 to 01, or from 01 "
    "to 10"
)
# Beyond these a header is damaged, and its sizes would ask for more than the memory.
_MOST_HEADER_BYTES = 1 << 20
_MOST_SECONDS = 7 * 24 * 3600.0
_MOST_CHANNELS = 256
_CODINGS = ("pcm", "ulaw", "mu-law", "alaw")


class SphereError(ValueError):
    """A SPHERE file cannot be used; the message has the path and the problem."""


class NoSph2pipeError(SphereError):
    """The program that reads compressed files is not on the PATH."""


class SphereHeader(NamedTuple):
    """The contents of a SPHERE file's header.

    Attributes:
        num_samples: Number of samples per channel.
        num_channels: Number of channels: 1, or 2 for a conversation.
        sample_rate: Sample rate in Hz.
        coding: Coding such as "ulaw" or "pcm", followed by the compression if any.
        sample_bytes: Number of bytes of one sample of one channel.
        header_bytes: Offset of the first sample.
    """

    num_samples: int
    num_channels: int
    sample_rate: int
    coding: str
    sample_bytes: int
    header_bytes: int

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.num_samples / self.sample_rate

    @property
    def is_shortened(self) -> bool:
        """Whether the samples are compressed with shorten."""
        return "shorten" in self.coding


def read_header(path: Path, sample_rate: int | None = SAMPLE_RATE) -> SphereHeader:
    """Reads and checks the header, without touching the samples.

    Args:
        path: SPHERE file.
        sample_rate: Expected sample rate in Hz; None for any.

    Raises:
        SphereError: The file is missing, not SPHERE, at a different rate, or shorter
            than its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = _parse_header(path, file)
    except OSError as error:
        raise SphereError(
            f"{path}: cannot be read: {error.strerror}; see its permissions"
        ) from error
    if sample_rate is not None and header.sample_rate != sample_rate:
        raise SphereError(
            f"{path}: expected {sample_rate} Hz, the header says {header.sample_rate}; "
            "resample it, or check whether this is the right disc"
        )
    _check_complete(path, header, size)
    return header


def _parse_header(path: Path, file: io.BufferedReader) -> SphereHeader:
    if not (start := file.read(len(MAGIC))):
        raise SphereError(f"{path}: an empty file; copy it again")
    if start != MAGIC:
        raise SphereError(
            f"{path}: not a SPHERE file: expected it to begin with {MAGIC!r}, "
            f"it begins with {start!r}; copy it again"
        )
    try:
        header_bytes = int(file.readline(16))
        if not 0 < header_bytes <= _MOST_HEADER_BYTES:
            raise ValueError(
                f"its size must be from 1 to {_MOST_HEADER_BYTES} bytes, got "
                f"{header_bytes}"
            )
        fields = _fields(file.read(max(0, header_bytes - file.tell())))
        header = SphereHeader(
            num_samples=int(fields["sample_count"]),
            num_channels=int(fields.get("channel_count", "1")),
            sample_rate=int(fields["sample_rate"]),
            coding=fields.get("sample_coding", "pcm"),
            sample_bytes=int(fields.get("sample_n_bytes", "2")),
            header_bytes=header_bytes,
        )
        return _plausible(header)
    except (KeyError, ValueError) as error:
        raise SphereError(
            f"{path}: broken SPHERE header: {error!r}; copy it again"
        ) from error


def _plausible(header: SphereHeader) -> SphereHeader:
    positive = ("num_samples", "num_channels", "sample_rate", "sample_bytes")
    for name in positive:
        if getattr(header, name) <= 0:
            raise ValueError(f"`{name}` must be positive, got {getattr(header, name)}")
    if header.duration_s > _MOST_SECONDS:
        raise ValueError(
            f"`sample_count` must be at most {_MOST_SECONDS / 3600:g} hours, got "
            f"{header.num_samples} samples at {header.sample_rate} Hz"
        )
    if header.num_channels > _MOST_CHANNELS:
        raise ValueError(
            f"`channel_count` must be at most {_MOST_CHANNELS}, got "
            f"{header.num_channels}"
        )
    if header.coding.split(",")[0] not in _CODINGS:
        raise ValueError(
            f"`sample_coding` must be of {_CODINGS}, got {header.coding!r}"
        )
    return header


def _fields(text: bytes) -> dict[str, str]:
    lines = text.decode("latin-1").split("end_head")[0].splitlines()
    parts = (line.split(maxsplit=2) for line in lines)
    return {part[0]: part[2].strip() for part in parts if len(part) == 3}


def _check_complete(path: Path, header: SphereHeader, size: int) -> None:
    if header.is_shortened and size > header.header_bytes:
        return  # the size on disk says nothing about the number of samples
    sample_bytes = header.num_channels * header.sample_bytes
    found = max(0, size - header.header_bytes) // sample_bytes
    if found < header.num_samples:
        first = ""
        if header.num_samples == header.num_channels * found:
            # Said of the first release in the README of LDC97S62.
            first = (
                ", or get the second release: in the first, headers count both sides"
            )
        raise SphereError(
            f"{path}: truncated: the header says {header.num_samples} samples per "
            f"channel, the file holds {found}; copy it again{first}"
        )


def wrong_samples(path: Path) -> str:
    """The reason why the samples of an unshortened file are unusable; may be empty.

    libsndfile knows fewer codings and byte orders than a header can name, and trusts
    the order that it names.
    """
    try:
        swapped = is_swapped(path)
    except (OSError, soundfile.LibsndfileError) as error:
        return str(getattr(error, "error_string", error))
    return _SWAPPED if swapped else ""


def read_channel(
    path: Path, channel: int, sample_rate: int = SAMPLE_RATE
) -> np.ndarray:
    """One whole channel as float32 [samples] in [-1, 1).

    Args:
        path: SPHERE file.
        channel: Channel: 0 for A, 1 for B.
        sample_rate: Expected sample rate in Hz.

    Raises:
        SphereError: An error of `read_header`; or the channel does not exist, or its
            samples cannot be read.
    """
    header = read_header(path, sample_rate)
    if not 0 <= channel < header.num_channels:
        raise SphereError(
            f"{path}: `channel` must be below {header.num_channels}, got {channel}"
        )
    read = _read_shortened if header.is_shortened else _read_plain
    samples = read(path, channel, header)[: header.num_samples]
    if len(samples) < header.num_samples:
        raise SphereError(
            f"{path}: expected {header.num_samples} samples, got {len(samples)}"
        )
    return samples


def name_of(path: Path) -> Any:
    """A path as libsndfile accepts it: bytes, which need not be valid text."""
    return os.fsencode(path)


def _read_plain(path: Path, channel: int, header: SphereHeader) -> np.ndarray:
    try:
        samples, _ = soundfile.read(
            name_of(path), header.num_samples, dtype="float32", always_2d=True
        )
    except soundfile.LibsndfileError as error:
        raise SphereError(f"{path}: {error}") from error
    return np.ascontiguousarray(samples[:, channel])


def find_sph2pipe(path: Path, header: SphereHeader) -> str:
    """The program that reads a compressed file.

    Raises:
        NoSph2pipeError: It is not there.
    """
    program = shutil.which("sph2pipe")
    if program is None:
        raise NoSph2pipeError(
            f"{path}: compressed ({header.coding}), which needs the program sph2pipe "
            "on PATH: download its source from the LDC, build it with a C compiler "
            "and put it on PATH"
        )
    return program


def _read_shortened(path: Path, channel: int, header: SphereHeader) -> np.ndarray:
    program = find_sph2pipe(path, header)
    command = [program, "-f", "wav", "-p", "-c", str(channel + 1), str(path)]
    run = subprocess.run(command, capture_output=True, check=False)
    if run.returncode != 0:
        message = run.stderr.decode(errors="replace").strip()
        raise SphereError(f"{path}: sph2pipe failed ({run.returncode}): {message}")
    try:
        samples, _ = soundfile.read(io.BytesIO(run.stdout), dtype="float32")
    except soundfile.LibsndfileError as error:
        raise SphereError(f"{path}: sph2pipe wrote no usable audio: {error}") from error
    return samples
