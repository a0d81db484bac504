"""What an error of the disk says of a file that is written whole or not at all."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_adpsgd import files
from lightning_adpsgd.files import bytes_written_whole, write_json, written_whole


def raise_full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_name_may_be_as_long_as_the_disk_allows(tmp_path: Path) -> None:
    path = tmp_path / f"{'é' * 120}-{'x' * 14}"
    assert len(os.fsencode(path.name)) == 255
    write_json(path, 1)
    assert [*tmp_path.iterdir()] == [path]


def test_an_error_of_the_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.os, "fsync", raise_full_disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*/a\.json'"):
        write_json(tmp_path / "a.json", 1)
    assert not list(tmp_path.iterdir())


def test_an_error_of_a_write_names_the_file(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*/a'"),
        bytes_written_whole(tmp_path / "a"),
    ):
        raise_full_disk()


def test_an_error_of_another_file_keeps_its_name(tmp_path: Path) -> None:
    other = tmp_path / "other"
    with (
        pytest.raises(FileNotFoundError, match=r"/other'$"),
        bytes_written_whole(tmp_path / "a"),
    ):
        other.read_bytes()


def test_an_error_in_words_of_its_own_keeps_them(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"^not that kind of file$"),
        written_whole(tmp_path / "a"),
    ):
        raise OSError("not that kind of file")


def test_a_disk_that_refuses_to_remove_a_file_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "unlink", raise_full_disk)
    with (
        pytest.raises(ValueError, match="the cause"),
        bytes_written_whole(tmp_path / "a"),
    ):
        raise ValueError("the cause")
