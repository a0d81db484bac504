"""The tables of a Kaldi data directory: each line has a name and its values."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.corpora.utf8 import utf8_lines
from lightning_adpsgd.asr.kaldi.commands import Unpacked, unpacked
from lightning_adpsgd.asr.kaldi.errors import KaldiError

_CHANNELS = "AB12"
_TO_THE_END = -1.0  # as an end in `segments`


class Row(NamedTuple):
    """A line of a table.

    Attributes:
        name: Its first word.
        rest: Its other words.
        where: Its place.
        written: All after the first word, with its blanks: a path may have several.
    """

    name: str
    rest: list[str]
    where: str
    written: str


class Cut(NamedTuple):
    """The span of an utterance in a recording, in seconds; end None: to the end."""

    recording: str
    start_s: float
    end_s: float | None
    where: str


def read_lines(path: Path, form: str = "") -> Iterator[tuple[str, str]]:
    """Place and text of each line of a Kaldi file.

    Args:
        path: The file.
        form: What its lines hold, for the message if there is no such file.

    Raises:
        KaldiError: There is no such file, or a line is not UTF-8.
    """
    try:
        for number, line in utf8_lines(path, KaldiError):
            yield f"{path}:{number}", line
    except OSError as error:
        lines = f" with lines `{form}`" if form else ""
        problem = f"{error.strerror}; expected a Kaldi file{lines}"
        raise KaldiError(f"{path}: {problem}") from error


def read_rows(
    path: Path, columns: str = "", *, form: str = "", names_alone: bool = False
) -> Iterator[Row]:
    """The rows of a table.

    Args:
        path: The file.
        columns: Names of its columns; without them each row has a name and more.
        form: Names of what stands in a row, where the number of columns is free.
        names_alone: Whether a row may have a name and nothing more.

    Raises:
        KaldiError: There is no such file, or a line has other columns.
    """
    for where, line in read_lines(path, columns or form):
        name, *rest = line.split() or [""]
        has_more = bool(rest) or (names_alone and bool(name))
        more = len(rest) + 1 - len(columns.split())
        fits = more == 0 if columns else has_more
        if not fits:
            expected = f"`{columns}`" if columns else "a name and more"
            remedy = "; names have no spaces" if columns and more > 0 else ""
            got = f"got {line[:60]!r}{remedy}"
            raise KaldiError(f"{where}: expected {expected}, {got}")
        written = line.split(maxsplit=1)[1].rstrip() if rest else ""
        yield Row(name, rest, where, written)


def read_named(
    path: Path, columns: str = "", *, form: str = "", names_alone: bool = False
) -> dict[str, Row]:
    """The rows of a table by name; equal rows of one name are accepted.

    Args:
        path: The file.
        columns: Names of its columns; without them each row has a name and more.
        form: Names of what stands in a row, where the number of columns is free.
        names_alone: Whether a row may have a name and nothing more.

    Raises:
        KaldiError: An error of `read_rows`; or two rows of one name differ.
    """
    rows: dict[str, Row] = {}
    for row in read_rows(path, columns, form=form, names_alone=names_alone):
        first = rows.setdefault(row.name, row)
        if first.rest != row.rest:
            raise KaldiError(
                f"{row.where}: {row.name!r} is {' '.join(row.rest)[:60]!r} here and "
                f"{' '.join(first.rest)[:60]!r} in {first.where}; delete the wrong line"
            )
    return rows


def recordings_of(folder: Path) -> list[Path]:
    """The files of sound that `wav.scp` names; none where it cannot be read."""
    try:
        rows = read_named(folder / "wav.scp").values()
    except KaldiError:  # which the reader of the folder tells
        return []
    found = (file_of(row) for row in rows)
    return [one.path.absolute() for one in found if one is not None]


def file_of(row: Row) -> Unpacked | None:
    """The file that a row of `wav.scp` names; none if its command may do more."""
    written = row.written
    return unpacked(written) if written.endswith("|") else Unpacked(Path(written), None)


def read_segments(folder: Path) -> dict[str, Cut]:
    """The stretches in `segments`, by utterance.

    Raises:
        KaldiError: There is no such file; a line is malformed or contradicts another.
    """
    path = folder / "segments"
    rows = read_named(path, "utterance recording start end")
    return {name: _cut(row) for name, row in rows.items()}


def _cut(row: Row) -> Cut:
    recording, start, end = row.rest
    try:
        start_s, end_s = float(start), float(end)
    except ValueError as error:
        problem = f"expected two times, got {start} {end}"
        raise KaldiError(f"{row.where}: {problem}") from error
    if not 0 <= start_s < (float("inf") if end_s == _TO_THE_END else end_s):
        # NaN is refused here too.
        raise KaldiError(f"{row.where}: expected 0 <= start < end, got {start} {end}")
    return Cut(recording, start_s, None if end_s == _TO_THE_END else end_s, row.where)


def read_channels(folder: Path) -> dict[str, tuple[str, int]]:
    """File and channel of each recording in `reco2file_and_channel`, from 0.

    Empty where there is no such file.

    Raises:
        KaldiError: A line is malformed or contradicts another.
    """
    path, found = folder / "reco2file_and_channel", {}
    if path.exists():
        rows = read_named(path, "recording file channel")
        for name, (file, channel), where, _ in rows.values():
            if channel.upper() not in tuple(_CHANNELS):
                problem = f"expected channel A or B, got {channel!r}"
                raise KaldiError(f"{where}: {problem}")
            found[name] = file, channel_of(channel)
    return found


def channel_of(written: str) -> int:
    """The channel that A, B, 1 or 2 means, from 0."""
    return _CHANNELS.index(written.upper()) % 2


def read_speakers(folder: Path) -> dict[str, str]:
    """The speaker of each utterance in `utt2spk`.

    Raises:
        KaldiError: There is no such file; a line is malformed or contradicts another.
    """
    rows = read_named(folder / "utt2spk", "utterance speaker")
    return {name: row.rest[0] for name, row in rows.items()}
