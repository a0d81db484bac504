"""A checkpoint's file: what `torch.save` writes, checked before it is read.

That is a zip archive with a CRC-32 of each record, which torch writes but never checks.
torch's format before 1.6 is refused. Nothing is unpickled here that torch's
`weights_only` does not allow, unless the caller says so.
"""

import pickle
import zipfile
from typing import Any, BinaryIO

import torch
from typing_extensions import override

_ARCHIVE = b"PK\x03\x04"
_FOLDER_OF_DOS = 0x10
_RECORD = "/data.pkl"  # in torch's archives: all but the values of tensors


class DamagedCheckpoint(RuntimeError):
    """The file of a checkpoint is damaged: it is not what was written."""

    @classmethod
    def of(cls, name: object, what: str) -> "DamagedCheckpoint":
        """Makes the error from what is wrong with a checkpoint; adds the remedy."""
        remedy = '`ckpt_path="last"` finds the last intact one'
        return cls(f"checkpoint {name} {what}: resume from another one ({remedy})")


def write_checkpoint(checkpoint: Any, file: BinaryIO) -> None:
    """Writes what `torch.save` writes; raises an error of the file unchanged."""
    computes = torch.serialization.get_crc32_options()
    # A user may have switched them off for speed; without them no file passes a check.
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        # After an error of `write` torch tries to end the archive and fails once more.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    finally:
        torch.serialization.set_crc32_options(computes)


def named(error: BaseException, path: object, done: str = "written") -> OSError:
    """The error with the checkpoint that it is about in its message."""
    number, reason = getattr(error, "errno", None), getattr(error, "strerror", None)
    message = f"checkpoint {path} could not be {done} ({reason or error})"
    if done == "written":
        message += "; an earlier one at this path, if any, is intact"
    return OSError(number, message) if number else OSError(message)


def check_checkpoint(file: BinaryIO, name: str) -> None:
    """Reads a file, which can seek, to its end and compares its records' checksums.

    Raises:
        DamagedCheckpoint: The file is damaged; the message says how.
    """
    file.seek(0)
    begin = file.read(24)
    if not begin.startswith(_ARCHIVE):
        what = f"begins with {begin!r}" if begin.strip(b"\0") else "holds nothing"
        raise DamagedCheckpoint.of(name, f"is not a `torch.save` file: it {what}")
    try:
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            bad, records = archive.testzip(), archive.infolist()
    except Exception as error:  # a damaged archive may raise anything
        raise _unreadable(name, error) from error
    if bad is not None:
        what = f"the CRC-32 of record {bad} does not match"
        raise DamagedCheckpoint.of(name, f"is damaged: {what}")
    # torch 2.6 leaves the memory of such a record as it was; no sum covers the mark.
    if folders := [r.filename for r in records if r.external_attr & _FOLDER_OF_DOS]:
        what = f"its record {folders[0]} is marked as a folder"
        raise DamagedCheckpoint.of(name, f"is damaged: {what}")
    if not any(one.filename.endswith(_RECORD) for one in records):
        raise DamagedCheckpoint.of(name, "is an archive not written by `torch.save`")


def read_checkpoint(
    file: BinaryIO,
    name: str,
    map_location: Any = None,
    weights_only: bool | None = None,
) -> Any:
    """Checks a file and loads it; arguments as for `check_checkpoint` and `torch.load`.

    Raises:
        DamagedCheckpoint: The file is damaged, or torch cannot read it.
        UnpicklingError: The file holds objects that can run code, and is not trusted by
            `weights_only` or torch's variable; the message names their classes.
    """
    check_checkpoint(file, name)
    file.seek(0)
    try:
        return torch.load(file, map_location=map_location, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if str(error).startswith("Weights only load failed"):  # a variable may decide
            refuse_unsafe(file, f"checkpoint {name}", error)
        raise _unreadable(name, error) from error
    except (EOFError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise _unreadable(name, error) from error


def outline_of(file: BinaryIO) -> dict[Any, Any]:
    """The plain values of a checkpoint; objects of other classes stand empty.

    No tensor is read. Classes that the file names are not imported, so no code from the
    file can run. A content that is not a dict counts as empty.

    Raises:
        Exception: The file is damaged; the type depends on the damage.
    """
    with zipfile.ZipFile(file) as archive:
        (record,) = (one for one in archive.namelist() if one.endswith(_RECORD))
        with archive.open(record) as pickled:
            content = _OutlineReader(pickled).load()
    return content if isinstance(content, dict) else {}


class _Anything(dict[Any, Any]):
    """Stands for an object of any class, and for any function."""

    __hash__ = object.__hash__  # pyright: ignore

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()

    def __call__(self, *arguments: Any, **options: Any) -> "_Anything":
        return self

    def __setstate__(self, state: Any) -> None: ...

    def extend(self, items: Any) -> None:
        """Like `list.extend`."""


class _OutlineReader(pickle.Unpickler):
    """Reads plain values alone: imports no class, and reads no tensor."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        # torch's pickles name a class within another by a call of `getattr`.
        return (lambda *_: _Anything) if name == "getattr" else _Anything

    @override
    def persistent_load(self, pid: Any) -> Any:
        return None


def refuse_unsafe(file: BinaryIO, name: str, cause: Exception) -> None:
    """Raises an error that names the objects in a file that can run code, if any."""
    file.seek(0)
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(
            file  # pyright: ignore[reportArgumentType]
        )
    except Exception:  # of a file that no unpickler understands
        return
    if unsafe:
        raise pickle.UnpicklingError(
            f"{name} holds objects of {', '.join(sorted(unsafe))}, and to "
            "load these can run code; if you trust the file, allow them with "
            "`torch.serialization.add_safe_globals([...])`, or all of it with "
            "`weights_only=False` (the command `export` has `--trust`; before "
            "Lightning 2.6, which has no such argument, one file is read by the "
            "Trainer's `plugins=[TorchCheckpointIO()]`)"
        ) from cause


def _unreadable(name: str, error: Exception) -> DamagedCheckpoint:
    first = str(error).strip().partition("\n")[0]
    what = f"{type(error).__name__}: {first}".removesuffix(": ")
    is_cut = isinstance(error, zipfile.BadZipFile)
    said = "is truncated or damaged" if is_cut else "cannot be read"
    return DamagedCheckpoint.of(name, f"{said} ({what})")
