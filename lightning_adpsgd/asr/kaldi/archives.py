"""Readers for Kaldi's archives, a sequence of utterances with an array each.

They read vectors of integers (alignments) and matrices (features, fMLLR, i-vectors),
binary, compressed or text, from archives (also gzipped) or through a table (scp). The
readable part of a truncated or damaged archive is yielded first; then an error says
where reading stopped.
"""

import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from lightning_adpsgd.asr.corpora.utf8 import utf8_lines
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.parsing import parse_rows

_MOST_VALUES = 1 << 28
_MOST_BYTES = 1 << 32  # of a line or matrix in text
_BLOCK = 1 << 16
_MOST_AT_ONCE = 1 << 24
_WIDTHS = {"FM ": "<f4", "DM ": "<f8", "FV ": "<f4", "DV ": "<f8"}
_SIZED_INTEGER = np.dtype([("width", "u1"), ("value", "<i4")])
_COMPRESSED = {"CM ": 1, "CM2 ": 2, "CM3 ": 3}

Array = TypeVar("Array")


class _Damage(ValueError):
    """The problem at the place where reading stopped."""


class _Stream:
    """The bytes of an archive, with the place in them, counted after decompression."""

    def __init__(self, file: io.BufferedIOBase, at: int = 0) -> None:
        self.at = at
        self._file = file
        self._buffer = b""
        self._used = 0

    def ahead(self, size: int) -> bytes:
        """The next bytes, without consuming them; fewer at the end."""
        if len(self._buffer) - self._used < size:
            parts, have = [self._buffer[self._used :]], len(self._buffer) - self._used
            while have < size and (part := self._file.read(_step(size - have))):
                parts.append(part)
                have += len(part)
            self._buffer, self._used = b"".join(parts), 0
        return self._buffer[self._used : self._used + size]

    def read(self, size: int) -> bytes:
        data = self.ahead(size)
        self._used += len(data)
        self.at += len(data)
        if len(data) < size:
            raise _Damage(f"the archive ends {size - len(data)} bytes too soon")
        return data

    def up_to(self, ends: bytes, most: int) -> bytes:
        """The bytes before the first of the bytes `ends`, which is skipped."""
        size = 64
        while (found := _first(self.ahead(size), ends)) < 0:
            if size > most or len(self.ahead(size)) < size:
                raise _Damage(f"expected {ends!r}, found {self.ahead(40)!r}")
            size *= 2
        return self.read(found + 1)[:-1]

    def is_at_end(self) -> bool:
        return not self.ahead(1)


def _first(data: bytes, ends: bytes) -> int:
    places = (data.find(end) for end in ends)
    return min((place for place in places if place >= 0), default=-1)


def _step(missing: int) -> int:
    # A damaged size may exceed the file, and reading would reserve memory for it first.
    return min(max(_BLOCK, missing), _MOST_AT_ONCE)


def read_alignments(path: str | Path) -> Iterator[tuple[str, np.ndarray]]:
    """The utterances of an archive of transition-ids (`ali.1.gz`), int32 [frames].

    Raises:
        KaldiError: The archive is cut short, damaged, or of another kind.
        OSError: It cannot be read.
    """
    return _entries(Path(path), _integers)


def read_archive(path: str | Path) -> Iterator[tuple[str, np.ndarray]]:
    """The utterances of an archive of matrices, float32 [frames, values].

    A vector is a matrix of one row.

    Raises:
        KaldiError: The archive is truncated, damaged, or of another kind.
    """
    return _entries(Path(path), _matrix)


def _entries(
    path: Path, parse: Callable[[_Stream], Array]
) -> Iterator[tuple[str, Array]]:
    last = ""
    with _opened(path) as file:
        stream = _Stream(file)
        while True:
            try:
                if stream.is_at_end():
                    return
                name = _name(stream)
                value = parse(stream)
            except (_Damage, EOFError, OSError, zlib.error) as error:
                raise _failure(path, stream.at, last, error) from error
            yield name, value
            last = name


def _opened(path: Path) -> io.BufferedIOBase:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.GzipFile(path) if is_gzip else path.open("rb")


def _failure(path: Path, at: int, last: str, error: Exception) -> KaldiError:
    where = f"after the utterance {last}" if last else "in the first utterance"
    return KaldiError(
        f"{path}: byte {at} (uncompressed), {where}: {error}; copy the archive again, "
        "or let Kaldi write it again"
    )


def _name(stream: _Stream) -> str:
    name = stream.up_to(b" \t", 1 << 16).decode("utf-8", "replace").lstrip()
    if not name or "\n" in name or "\0" in name:
        raise _Damage(f"expected the name of an utterance, found {name[:40]!r}")
    return name


def _integers(stream: _Stream) -> np.ndarray:
    if stream.ahead(2) != b"\0B":
        return _text_integers(stream)
    stream.read(2)
    kind = stream.ahead(1)
    if kind != b"\x04":
        found = stream.ahead(4)
        raise _Damage(f"expected whole numbers, found an archive of {found!r}")
    stream.read(1)
    # Unlike a vector in a model, every number has its width before it.
    values = np.frombuffer(stream.read(5 * _count(stream)), _SIZED_INTEGER)
    if (values["width"] != 4).any():
        raise _Damage("expected whole numbers of 4 bytes each")
    return values["value"].astype(np.int32)


def _text_integers(stream: _Stream) -> np.ndarray:
    line = stream.up_to(b"\n", _MOST_BYTES)
    try:
        return np.array([int(field) for field in line.split()], np.int32)
    except (ValueError, OverflowError) as error:
        raise _Damage(f"expected whole numbers, found {line[:40]!r}") from error


def _count(stream: _Stream) -> int:
    count = int.from_bytes(stream.read(4), "little", signed=True)
    if not 0 <= count < _MOST_VALUES:
        raise _Damage(f"an array cannot have {count} values")
    return count


def _sized(stream: _Stream) -> int:
    """A number with its width before it."""
    if stream.read(1) != b"\x04":
        raise _Damage("expected a size of 4 bytes")
    return _count(stream)


def _check_size(rows: int, columns: int) -> None:
    if rows * columns >= _MOST_VALUES:
        raise _Damage(f"a matrix cannot have {rows} rows and {columns} columns")


def _matrix(stream: _Stream) -> np.ndarray:
    if stream.ahead(2) != b"\0B":
        return _text_matrix(stream)
    stream.read(2)
    if stream.ahead(1) == b"\x04":
        raise _Damage("expected a matrix, found whole numbers (an alignment?)")
    kind = stream.up_to(b" ", 8).decode("ascii", "replace") + " "
    if kind in _COMPRESSED:
        return _compressed(stream, _COMPRESSED[kind])
    if kind not in _WIDTHS:
        raise _Damage(f"expected a matrix, found {kind!r}")
    rows = _sized(stream) if kind[1] == "M" else 1
    columns = _sized(stream)
    _check_size(rows, columns)
    width = np.dtype(_WIDTHS[kind])
    values = np.frombuffer(stream.read(rows * columns * width.itemsize), width)
    return values.reshape(rows, columns).astype(np.float32)


def _text_matrix(stream: _Stream) -> np.ndarray:
    opening = stream.up_to(b"[", 1 << 16)
    if opening.strip():
        raise _Damage(f"expected a matrix in brackets, found {opening[:40]!r}")
    rows = parse_rows(stream.up_to(b"]", _MOST_BYTES))
    if rows is None:
        raise _Damage("expected rows of numbers, of one length")
    stream.up_to(b"\n", _MOST_BYTES)
    return rows.astype(np.float32)


def _compressed(stream: _Stream, method: int) -> np.ndarray:
    """Reads a matrix of bytes or half-words, linear between minimum and maximum.

    In method 1, each column has its own scale, linear in three pieces between the
    column's minimum, quartiles and maximum.
    """
    header = np.frombuffer(stream.read(8), "<f4").astype(np.float32)
    least, extent = header
    rows, columns = _count(stream), _count(stream)
    _check_size(rows, columns)
    if method == 2:
        words = np.frombuffer(stream.read(2 * rows * columns), "<u2")
        return _linear(words, least, extent, 65535).reshape(rows, columns)
    if method == 3:
        octets = np.frombuffer(stream.read(rows * columns), "u1")
        return _linear(octets, least, extent, 255).reshape(rows, columns)
    knots = np.frombuffer(stream.read(8 * columns), "<u2").reshape(columns, 4)
    octets = np.frombuffer(stream.read(rows * columns), "u1").reshape(columns, rows)
    levels = _linear(knots, least, extent, 65535)
    pieces = [
        np.interp(o, (0, 64, 192, 255), k) for o, k in zip(octets, levels, strict=True)
    ]
    return np.array(pieces, np.float32).reshape(columns, rows).T.copy()


def _linear(codes: np.ndarray, least: float, extent: float, most: int) -> np.ndarray:
    step = np.float32(extent) * np.float32(1 / most)
    return (np.float32(least) + step * codes).astype(np.float32)


class _Place(NamedTuple):
    name: str
    path: Path
    offset: int


def read_table(path: str | Path) -> Iterator[tuple[str, np.ndarray]]:
    """The matrices that a table (`feats.scp`) lists: lines `utterance file[:byte]`.

    Relative paths are tried from here, then from the folder of the table.

    Raises:
        KaldiError: A line cannot be used, or an archive is damaged where it points.
    """
    path = Path(path)
    for number, line in utf8_lines(path, KaldiError):
        if line.strip():
            place = _place(line, path, f"{path}:{number}")
            yield place.name, _matrix_at(place)


def _place(line: str, table: Path, where: str) -> _Place:
    match = re.fullmatch(r"(\S+)\s+(\S.*?)(?::(\d+))?", line.strip())
    if match is None or match[2].endswith(("|", "]")):
        raise KaldiError(
            f"{where}: expected `utterance file[:byte]`, got {line[:80]!r}; commands "
            "and ranges are not run here, `copy-feats` writes a plain archive"
        )
    path = Path(match[2])
    beside = table.parent / path
    if not path.exists() and beside.exists():
        path = beside
    if not path.exists():
        raise KaldiError(
            f"{where}: the file {path} does not exist; if the experiment was moved, "
            "change the beginning of the paths in its tables"
        )
    return _Place(match[1], path, int(match[3] or 0))


def _matrix_at(place: _Place) -> np.ndarray:
    with _opened(place.path) as file:
        file.seek(place.offset)
        stream = _Stream(file, place.offset)
        try:
            return _matrix(stream)
        except (_Damage, EOFError, OSError, zlib.error) as error:
            where = f"{place.path}: byte {stream.at}"
            raise KaldiError(f"{where}, utterance {place.name}: {error}") from error


def read_matrices(source: str | Path) -> Iterator[tuple[str, np.ndarray]]:
    """The matrices of a table (if the name ends in `.scp`) or an archive.

    Kaldi's notation, `scp:feats.scp` or `ark:feats.ark`, works too.
    """
    kind, colon, path = str(source).partition(":")
    if not colon or kind not in ("scp", "ark"):
        kind, path = ("scp" if str(source).endswith(".scp") else "ark"), str(source)
    return read_table(path) if kind == "scp" else read_archive(path)
