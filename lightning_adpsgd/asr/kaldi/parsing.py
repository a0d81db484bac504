"""Kaldi's objects as its programs write them, binary or text: tokens, numbers, arrays.

A binary file begins with a zero byte and `B`. In it a number is preceded by its size in
bytes, a vector of integers by the size of one; in text, arrays stand in brackets.
"""

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from lightning_adpsgd.asr.kaldi.errors import KaldiError

Number = TypeVar("Number", int, float)

_BINARY = b"\0B"
_MOST_VALUES = 1 << 31  # of an array; beyond it a size is garbage


class ObjectReader:
    """Reads one object from the bytes of a file, from its beginning.

    Args:
        path: The file, or the same compressed by gzip.

    Raises:
        KaldiError: The file cannot be decompressed.
        OSError: It cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._data = self._path.read_bytes()
        if self._data[:2] == b"\x1f\x8b":
            try:
                self._data = gzip.decompress(self._data)
            except (EOFError, OSError, zlib.error) as error:
                raise KaldiError(f"{path}: damaged gzip: {error}") from error
        self.is_binary = self._data.startswith(_BINARY)
        self._at = len(_BINARY) if self.is_binary else 0

    def fail(self, expected: str) -> KaldiError:
        """The error that something else was expected here."""
        found = self._data[self._at : self._at + 20]
        if not found:
            found = b"the end of the file"
        return KaldiError(
            f"{self._path}: byte {self._at}: expected {expected}, found {found!r}"
        )

    def peek(self) -> str:
        """The next token, without consuming it."""
        at = self._at
        token = self.token()
        self._at = at
        return token

    def token(self) -> str:
        """The next token, up to a blank.

        Raises:
            KaldiError: There is none.
        """
        self._skip_blanks()
        end = self._at
        while end < len(self._data) and not self._data[end : end + 1].isspace():
            end += 1
        if end == self._at or (self.is_binary and end == len(self._data)):
            raise self.fail("a token")
        token = self._data[self._at : end].decode("utf-8", "replace")
        self._at = end + (1 if self.is_binary else 0)
        return token

    def _skip_blanks(self) -> None:
        while not self.is_binary and self._data[self._at : self._at + 1].isspace():
            self._at += 1

    def expect(self, *tokens: str) -> str:
        """The next token, which must be one of `tokens`.

        Raises:
            KaldiError: It is another.
        """
        at = self._at
        token = self.token() if self._at < len(self._data) else ""
        if token not in tokens:
            self._at = at
            raise self.fail(" or ".join(tokens))
        return token

    def integer(self) -> int:
        """The next whole number.

        Raises:
            KaldiError: There is no whole number here.
        """
        if self.is_binary:
            return int(self._number("<i4"))
        return self._parsed(int, "a whole number")

    def real(self) -> float:
        """The next number.

        Raises:
            KaldiError: There is no number here.
        """
        if self.is_binary:
            size = self._data[self._at : self._at + 1]
            return float(self._number("<f8" if size == b"\x08" else "<f4"))
        return self._parsed(float, "a number")

    def _number(self, kind: str) -> np.generic:
        width = np.dtype(kind).itemsize
        if self._data[self._at : self._at + 1] != bytes([width]):
            raise self.fail(f"a number of {width} bytes")
        self._at += 1
        return self._values(kind, 1)[0]

    def _parsed(self, parse: Callable[[str], Number], expected: str) -> Number:
        at = self._at
        try:
            return parse(self.token())
        except ValueError as error:
            self._at = at
            raise self.fail(expected) from error

    def _values(self, kind: str, count: int) -> np.ndarray:
        size = np.dtype(kind).itemsize * count
        if not 0 <= count < _MOST_VALUES or self._at + size > len(self._data):
            raise self.fail(f"{count} values of the type {kind}")
        values = np.frombuffer(self._data, kind, count, self._at)
        self._at += size
        return values

    def integers(self, end: str = "") -> np.ndarray:
        """A vector of whole numbers; in text, up to the token `end`.

        Raises:
            KaldiError: There are no whole numbers of four bytes here.
        """
        if not self.is_binary:
            values = []
            while self.peek() != end:
                values.append(self.integer())
            return np.array(values, np.int32)
        if self._data[self._at : self._at + 1] != b"\x04":
            raise self.fail("whole numbers of 4 bytes")
        self._at += 1
        return self._values("<i4", int(self._values("<i4", 1)[0]))

    def vector(self) -> np.ndarray:
        """A vector, float64 [size].

        Raises:
            KaldiError: There is no vector here.
        """
        if not self.is_binary:
            return self._bracketed().reshape(-1)
        kind = {"FV": "<f4", "DV": "<f8"}[self.expect("FV", "DV")]
        return self._values(kind, self.integer()).astype(float)

    def matrix(self) -> np.ndarray:
        """A matrix, float64 [rows, columns].

        Raises:
            KaldiError: There is no matrix here.
        """
        if not self.is_binary:
            return self._bracketed()
        kind = {"FM": "<f4", "DM": "<f8"}[self.expect("FM", "DM")]
        rows, columns = self.integer(), self.integer()
        return self._values(kind, rows * columns).astype(float).reshape(rows, columns)

    def _bracketed(self) -> np.ndarray:
        self.expect("[")
        end = self._data.find(b"]", self._at)
        if end < 0:
            raise self.fail("the closing ]")
        rows = parse_rows(self._data[self._at : end])
        if rows is None:
            raise self.fail("rows of numbers, of one length")
        self._at = end + 1
        return rows


def parse_rows(text: bytes) -> np.ndarray | None:
    """The numbers between the brackets of a matrix in text, or None for other text."""
    lines = [line.split() for line in text.split(b"\n")]
    try:
        rows = np.array([line for line in lines if line], dtype=float)
    except ValueError:
        return None
    return rows if rows.ndim == 2 else np.zeros((0, 0))
