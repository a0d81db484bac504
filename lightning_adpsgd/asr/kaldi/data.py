"""Data directories of Kaldi's, as utterances: `wav.scp`, `text`, `utt2spk`, `segments`.

Recordings are files that this machine can open. Commands in `wav.scp` are not run:
their utterances are left out and counted. Without `segments` a recording is one
utterance.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.corpora.corpus import Skipped, Utterance, utterance_id
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.names import read_lines

_COMMAND = "write the path of the recording in place of the command"


class _Line(NamedTuple):
    """A line of a table: its first word, the others, and its place."""

    name: str
    rest: list[str]
    where: str


class _Cut(NamedTuple):
    """A recording, and the seconds of it that an utterance takes; None: to its end."""

    recording: str
    start_s: float
    end_s: float | None


def read_data(
    folder: Path, length_of: Callable[[Path], float], skipped: Skipped
) -> list[Utterance]:
    """The utterances of a data directory, in the order of `text`.

    An id begins with Kaldi's name of the utterance, and words are in lower case.

    Args:
        folder: Data directory, such as `data/train`.
        length_of: Seconds of a recording; raises ValueError where it cannot be used.
        skipped: Counts the utterances that are left out, with the reason.

    Raises:
        KaldiError: A file is missing or damaged, or no utterance can be used.
    """
    sounds = {line.name: line for line in _table(folder / "wav.scp")}
    cuts = _cuts(folder / "segments")
    speakers = dict(_speakers(folder / "utt2spk"))
    channels = _channels(folder / "reco2file_and_channel")
    found = []
    for line in _table(folder / "text"):
        cut = cuts.get(line.name) if cuts is not None else _Cut(line.name, 0.0, None)
        sound = sounds.get(cut.recording) if cut is not None else None
        if cut is None or sound is None:
            skipped.add("text without a recording", line.where)
            continue
        path = _path(sound, skipped)
        seconds = None if path is None else _length(path, length_of, skipped)
        if path is None or seconds is None:
            continue
        channel = channels.get(cut.recording, 0)
        speaker = speakers.get(line.name, line.name)
        found.append(_utterance(line, path, channel, cut, seconds, speaker))
    if not found:
        reasons = "; ".join(skipped.report()) or "`text` is empty"
        raise KaldiError(f"{folder}: no utterance can be used: {reasons}")
    return found


def _utterance(
    line: _Line, path: Path, channel: int, cut: _Cut, seconds: float, speaker: str
) -> Utterance:
    end_s = seconds if cut.end_s is None else min(cut.end_s, seconds)
    return Utterance(
        id=utterance_id(line.name, channel, cut.start_s, end_s),
        recording=path,
        channel=channel,
        start_s=cut.start_s,
        end_s=end_s,
        words=tuple(word.lower() for word in line.rest),
        speaker=speaker,
        source=line.where,
    )


def _path(sound: _Line, skipped: Skipped) -> Path | None:
    if sound.rest[-1] == "|":
        skipped.add("command in wav.scp", sound.where, remedy=_COMMAND)
        return None
    return Path(" ".join(sound.rest))


def _length(
    path: Path, length_of: Callable[[Path], float], skipped: Skipped
) -> float | None:
    try:
        return length_of(path)
    except ValueError as error:
        skipped.add("unusable sound", str(error), remedy="its utterances are left out")
        return None


def _cuts(path: Path) -> Mapping[str, _Cut] | None:
    """The stretches by utterance; None where there is no `segments`."""
    if not path.exists():
        return None
    cuts = {}
    for name, rest, where in _table(path):
        try:
            recording, start, end = rest
            cuts[name] = _Cut(recording, float(start), float(end))
        except ValueError as error:
            problem = f"expected `utterance recording start end`, got {rest}"
            raise KaldiError(f"{where}: {problem}") from error
        if not 0 <= cuts[name].start_s < float(end):  # NaN is refused here too
            raise KaldiError(f"{where}: expected 0 <= start < end, got {start} {end}")
    return cuts


def _speakers(path: Path) -> Iterator[tuple[str, str]]:
    for name, rest, where in _table(path):
        if len(rest) != 1:
            raise KaldiError(f"{where}: expected `utterance speaker`, got {rest}")
        yield name, rest[0]


def _channels(path: Path) -> dict[str, int]:
    if not path.exists():
        return {}
    found = {}
    for name, rest, where in _table(path):
        if len(rest) != 2 or rest[1].upper() not in tuple("AB12"):
            raise KaldiError(f"{where}: expected `recording file A`, got {rest}")
        found[name] = "AB12".index(rest[1].upper()) % 2
    return found


def _table(path: Path) -> Iterator[_Line]:
    for where, line in read_lines(path):
        name, *rest = line.split() or [""]
        if not rest:
            raise KaldiError(f"{where}: expected a name and more, got {line[:60]!r}")
        yield _Line(name, rest, where)
