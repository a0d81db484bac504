"""The file of a checkpoint: an ordinary torch file that carries its own checksum.

`torch.save` writes a zip archive. The archive's comment, at its very end, holds the
SHA-256 of everything before it. The checksum travels with the file, and any reader of
torch's archives can read it. For checkpoints without this comment, the CRC-32 of each
record is checked, which torch writes but does not read. torch's format before 1.6 is
refused. Only what torch's `weights_only` allows is unpickled, unless the caller says
otherwise.
"""

import hashlib
import os
import pickle
import zipfile
from typing import Any, BinaryIO, Protocol

import torch
from typing_extensions import override

_MARK = b"lightning_adpsgd sha256 "
_SUM_LENGTH = 64  # hexadecimal digits
_COMMENT_LENGTH = len(_MARK) + _SUM_LENGTH
_LENGTH = _COMMENT_LENGTH.to_bytes(2, "little")
_ARCHIVE, _END = b"PK\x03\x04", b"PK\x05\x06"
_FOLDER_OF_DOS = 0x10
_END_LENGTH = 22  # bytes of the record that ends an archive without a comment
_BLOCK = 1 << 20
_RECORD = "/data.pkl"  # of an archive of torch's: all but the numbers of its tensors


class DamagedCheckpoint(RuntimeError):
    """The file of a checkpoint is damaged: it is not what was written."""

    @classmethod
    def of(cls, name: object, what: str) -> "DamagedCheckpoint":
        """Makes the error, with what is wrong with a checkpoint and the remedy."""
        remedy = '`ckpt_path="last"` finds the last that is whole'
        return cls(f"checkpoint {name} {what}: resume from another one ({remedy})")


class UnsafeCheckpoint(pickle.UnpicklingError):
    """A checkpoint holds objects whose loading can run code."""


class _Sink(Protocol):
    def write(self, data: Any, /) -> int: ...


def write_checkpoint(checkpoint: Any, file: _Sink) -> None:
    """Writes a `torch.save` archive with a checksum; the file need not be seekable."""
    writer = _SummingWriter(file)
    try:
        torch.save(checkpoint, writer)  # pyright: ignore[reportArgumentType]
    except RuntimeError:
        # After an error of `write` torch tries to end the archive and fails once more.
        if writer.error is not None:
            raise writer.error from None
        raise
    writer.finish()


def check_checkpoint(file: BinaryIO, name: str) -> None:
    """Reads a whole checkpoint and verifies its checksum; the file must be seekable.

    Raises:
        DamagedCheckpoint: Names the file and what is wrong with it.
    """
    size = file.seek(0, os.SEEK_END)
    end = _read_from(file, max(0, size - _END_LENGTH - _COMMENT_LENGTH))
    if end[-_COMMENT_LENGTH:].startswith(_MARK):
        _check_sum(file, end[-_COMMENT_LENGTH - len(_LENGTH) :], size, name)
    elif _read_from(file, 0, len(_ARCHIVE)) == _ARCHIVE or _END in end:
        _check_archive(file, end, size, name)
    else:
        begin = _read_from(file, 0, 24)
        what = f"begins with {begin!r}" if begin.strip(b"\0") else "holds nothing"
        raise DamagedCheckpoint.of(name, f"is not a file of `torch.save`: it {what}")


def read_checkpoint(
    file: BinaryIO, name: str, map_location: Any = None, weights_only: bool = True
) -> Any:
    """Loads a checkpoint; raises an error with the file's name if it is unusable."""
    check_checkpoint(file, name)
    file.seek(0)
    try:
        return torch.load(file, map_location=map_location, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        _refuse_unsafe(file, name, error)
        raise _unreadable(name, error) from error
    except (EOFError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise _unreadable(name, error) from error


def global_step_of(file: BinaryIO) -> int | None:
    """The number of optimizer steps before a checkpoint, without loading its tensors.

    Classes that the file names are not imported, so no code from the file can run.

    Returns:
        None if no training can resume from it, because it has no optimizer state.

    Raises:
        Exception: The file is damaged; the type depends on the damage.
    """
    with zipfile.ZipFile(file) as archive:
        (record,) = (one for one in archive.namelist() if one.endswith(_RECORD))
        with archive.open(record) as pickled:
            content = _OutlineReader(pickled).load()
    # A folder of shards keeps the state elsewhere, and the schedules here.
    is_dict, marks = isinstance(content, dict), {"optimizer_states", "lr_schedulers"}
    step = content.get("global_step") if is_dict and marks & content.keys() else None
    return step if isinstance(step, int) else None


class _Anything(dict[Any, Any]):
    """Stands for an object of any class, and for any function."""

    __hash__ = object.__hash__  # pyright: ignore

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()

    def __call__(self, *arguments: Any, **options: Any) -> "_Anything":
        return self

    def __setstate__(self, state: Any) -> None: ...

    def append(self, item: Any) -> None:
        """As of a list."""

    def extend(self, items: Any) -> None:
        """As of a list."""


class _OutlineReader(pickle.Unpickler):
    """Reads plain values alone: no name is looked up, no tensor is read."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        return _Anything

    @override
    def persistent_load(self, pid: Any) -> Any:
        return None


class _SummingWriter:
    """Sums what goes through; holds the two bytes back that tell a comment's length."""

    def __init__(self, file: _Sink) -> None:
        self._file, self._sum, self._held = file, hashlib.sha256(), b""
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self._sum.update(data)
        kept = max(0, len(data) - len(_LENGTH))
        try:
            if kept:
                self._file.write(self._held)
                self._file.write(data[:kept])
                self._held = b""
            self._held += bytes(data[kept:])
        except OSError as error:
            self.error = self.error or error
            raise
        return len(data)

    def flush(self) -> None:
        """Torch asks for it; what is held back cannot go yet."""

    def finish(self) -> None:
        body, length = self._held[: -len(_LENGTH)], self._held[-len(_LENGTH) :]
        if length != b"\0\0":  # no archive of torch's: its `save` was replaced
            self._file.write(self._held)
            return
        comment = _MARK + self._sum.hexdigest().encode()
        self._file.write(body + _LENGTH + comment)


def _read_from(file: BinaryIO, place: int, length: int = -1) -> bytes:
    file.seek(place)
    return file.read(length)


def _check_sum(file: BinaryIO, end: bytes, size: int, name: str) -> None:
    digest = hashlib.sha256()
    file.seek(0)
    left = size - len(end)
    while block := file.read(min(_BLOCK, left)):
        digest.update(block)
        left -= len(block)
    digest.update(b"\0\0")
    length, stored = end[: len(_LENGTH)], end[-_SUM_LENGTH:]
    if length != _LENGTH or digest.hexdigest().encode() != stored:
        raise DamagedCheckpoint.of(
            name,
            f"is damaged: the SHA-256 of its {size} bytes is "
            f"{digest.hexdigest()[:16]}... and was {stored[:16].decode('latin')}... "
            "when it was written",
        )


def _check_archive(file: BinaryIO, end: bytes, size: int, name: str) -> None:
    # Archives of torch have no comment; part of one of ours would be one.
    last = end[-_END_LENGTH:]
    if not (last.startswith(_END) and last.endswith(b"\0\0")):
        what = f"the end of the archive is missing or altered ({size} bytes)"
        raise DamagedCheckpoint.of(name, f"is truncated or damaged: {what}")
    try:
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
            is_torchs = any(one.endswith(_RECORD) for one in archive.namelist())
            folders = [o.filename for o in archive.infolist() if _is_folder(o)]
    except Exception as error:  # a damaged archive raises whatever comes of it
        raise _unreadable(name, error) from error
    if bad is not None:
        what = f"the CRC-32 of its record {bad} is another than when it was written"
        raise DamagedCheckpoint.of(name, f"is damaged: {what}")
    if folders:
        what = f"its record {folders[0]} is marked as a folder"
        raise DamagedCheckpoint.of(name, f"is damaged: {what}")
    if not is_torchs:
        raise DamagedCheckpoint.of(name, "is an archive, but not one of `torch.save`")


def _is_folder(record: zipfile.ZipInfo) -> bool:
    # torch 2.6 leaves the memory of such a record as it was; no sum covers the mark.
    return bool(record.external_attr & _FOLDER_OF_DOS)


def _refuse_unsafe(file: BinaryIO, name: str, cause: Exception) -> None:
    file.seek(0)
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(
            file  # pyright: ignore[reportArgumentType]
        )
    except Exception:  # of a file that no unpickler understands
        return
    if unsafe:
        raise UnsafeCheckpoint(
            f"checkpoint {name} holds objects of {', '.join(sorted(unsafe))}, and to "
            "load these can run code; if you trust the file, allow them with "
            "`torch.serialization.add_safe_globals([...])`, or all of it with "
            "`weights_only=False`; before Lightning 2.6, which has no such argument, "
            "with the Trainer's `plugins=[TorchCheckpointIO()]`"
        ) from cause


def _unreadable(name: str, error: Exception) -> DamagedCheckpoint:
    first = str(error).strip().partition("\n")[0]
    what = f"{type(error).__name__}: {first}".removesuffix(": ")
    return DamagedCheckpoint.of(name, f"cannot be read ({what})")
