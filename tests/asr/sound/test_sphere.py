"""SPHERE files are read exactly, and broken ones are refused with their path."""

from pathlib import Path

import numpy as np
import pytest

from lightning_adpsgd.asr.sound.sphere import SphereError, read_channel, read_header
from tests.asr.tiny import noise, write_sphere


@pytest.fixture
def call(tmp_path: Path) -> Path:
    return write_sphere(tmp_path / "sw02001.sph", noise(2.0))


def _relabel(path: Path, old: bytes, new: bytes) -> None:
    """Replace text of the header, whose length stays as it is."""
    content = path.read_bytes()
    assert old in content[:1024]
    header = content[:1024].replace(old, new)
    path.write_bytes(header.ljust(1024)[:1024] + content[1024:])


def test_each_channel_comes_back_within_the_error_of_mu_law(call: Path):
    samples = noise(2.0)
    for channel in (0, 1):
        found = read_channel(call, channel)
        assert found.dtype == np.float32
        # mu-law keeps about 6 bits of the magnitude: 1/32 of it and a small constant
        bound = np.abs(samples[:, channel]) / 30 + 1e-3
        assert (np.abs(found - samples[:, channel]) <= bound).all()


def test_the_header_says_how_long_the_file_is(call: Path):
    header = read_header(call)
    assert (header.num_samples, header.num_channels) == (16000, 2)
    assert header.duration_s == 2.0


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(SphereError, match=r"gone\.sph: cannot be read"):
        read_channel(tmp_path / "gone.sph", 0)


def test_a_truncated_file_is_refused_with_both_lengths(call: Path):
    call.write_bytes(call.read_bytes()[: 1024 + 2 * 7000])
    with pytest.raises(SphereError, match=r"sw02001.*says 16000 .* file holds 7000"):
        read_channel(call, 0)


def test_a_file_cut_inside_its_header_is_refused(call: Path):
    call.write_bytes(call.read_bytes()[:40])
    with pytest.raises(SphereError, match=r"sw02001\.sph: broken SPHERE header"):
        read_header(call)


def test_something_else_than_sphere_is_refused(tmp_path: Path):
    path = tmp_path / "sw02001.sph"
    path.write_bytes(b"RIFF" + bytes(2000))
    with pytest.raises(SphereError, match=r"not a SPHERE file.*NIST_1A.*RIFF"):
        read_channel(path, 0)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b"   1024\n", b"9999999999999\n", "its size must be from 1 to 1048576 bytes"),
        (b"   1024\n", b"  -1\n", "its size must be from 1 to 1048576 bytes, got -1"),
        (
            b"sample_count -i 16000",
            b"sample_count -i 99999999999999",
            "`sample_count` must be at most 168 hours",
        ),
        (
            b"channel_count -i 2",
            b"channel_count -i 2000000000",
            "`channel_count` must be at most 256, got 2000000000",
        ),
    ],
)
def test_a_damaged_size_is_no_reason_to_ask_for_memory(call: Path, old, new, problem):
    _relabel(call, old, new)
    with pytest.raises(SphereError, match=f"broken SPHERE header.*{problem}"):
        read_channel(call, 0)


def test_another_sampling_rate_is_refused(tmp_path: Path):
    path = write_sphere(tmp_path / "a.sph", noise(0.5), rate=16000)
    with pytest.raises(SphereError, match="expected 8000 Hz, the header says 16000"):
        read_channel(path, 0)


def test_a_channel_that_is_not_there_is_refused(tmp_path: Path):
    path = write_sphere(tmp_path / "a.sph", noise(0.5, channels=1))
    with pytest.raises(SphereError, match=r"`channel` must be below 1, got 1"):
        read_channel(path, 1)


def test_shorten_without_sph2pipe_says_what_to_do(
    call: Path, monkeypatch: pytest.MonkeyPatch
):
    _relabel(call, b"-s4 ulaw", b"-s26 ulaw,embedded-shorten-v2.00")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SphereError, match="needs the program sph2pipe on PATH"):
        read_channel(call, 0)


def test_shorten_is_read_by_sph2pipe(
    call: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = read_channel(call, 1)
    wav = write_sphere(tmp_path / "decoded.sph", whole[:, None])
    program = tmp_path / "sph2pipe"
    program.write_text(f'#!/bin/sh\ntest "$5" = 2 && cat {wav}\n')
    program.chmod(0o755)
    _relabel(call, b"-s4 ulaw", b"-s26 ulaw,embedded-shorten-v2.00")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    np.testing.assert_array_equal(read_channel(call, 1), whole)


def test_a_failure_of_sph2pipe_is_passed_on(
    call: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path / "sph2pipe"
    program.write_text("#!/bin/sh\necho bad block >&2\nexit 3\n")
    program.chmod(0o755)
    _relabel(call, b"-s4 ulaw", b"-s26 ulaw,embedded-shorten-v2.00")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SphereError, match=r"sph2pipe failed \(3\): bad block"):
        read_channel(call, 0)
