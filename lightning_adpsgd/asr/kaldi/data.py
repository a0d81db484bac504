"""Data directories of Kaldi's, as utterances: `wav.scp`, `text`, `utt2spk`, `segments`.

Recordings are files that this machine can open. Commands in `wav.scp` are not run:
their utterances are left out and counted. Without `segments` a recording is one
utterance.
"""

from collections.abc import Callable
from pathlib import Path

from lightning_adpsgd.asr.corpora.corpus import Skipped, Utterance, utterance_id
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.tables import (
    Cut,
    Row,
    read_channels,
    read_rows,
    read_segments,
    read_speakers,
)

_COMMAND = "write the path of the recording in place of the command"


def read_data(
    folder: Path, length_of: Callable[[Path], float], skipped: Skipped
) -> list[Utterance]:
    """The utterances of a data directory, in the order of `text`.

    An id begins with Kaldi's name of the utterance, and words are in lower case.

    Args:
        folder: Data directory, such as `data/train`.
        length_of: Function for seconds of a recording; raises ValueError if unusable.
        skipped: Counter of the utterances that are left out, with the reason.

    Raises:
        KaldiError: A file is missing or damaged, or no utterance can be used.
    """
    sounds = {row.name: row for row in read_rows(folder / "wav.scp")}
    cuts = read_segments(folder) if (folder / "segments").exists() else None
    speakers, channels = read_speakers(folder), read_channels(folder)
    found = []
    for line in read_rows(folder / "text"):
        whole = Cut(line.name, 0.0, None, line.where)
        cut = whole if cuts is None else cuts.get(line.name)
        sound = sounds.get(cut.recording) if cut is not None else None
        if cut is None or sound is None:
            skipped.add("text without a recording", line.where)
            continue
        path = _path(sound, skipped)
        seconds = None if path is None else _length(path, length_of, skipped)
        if path is None or seconds is None:
            continue
        _, channel = channels.get(cut.recording, ("", 0))
        speaker = speakers.get(line.name, line.name)
        found.append(_utterance(line, path, channel, cut, seconds, speaker))
    if not found:
        reasons = "; ".join(skipped.report()) or "`text` is empty"
        raise KaldiError(f"{folder}: no utterance can be used: {reasons}")
    return found


def _utterance(
    line: Row, path: Path, channel: int, cut: Cut, seconds: float, speaker: str
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


def _path(sound: Row, skipped: Skipped) -> Path | None:
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
