"""Kaldi data directories as utterances: `wav.scp`, `text`, `utt2spk`, `segments`.

Recordings are files that this machine can open. Commands in `wav.scp` are not run. Of
one that only unpacks a file (`commands`), the file is read; the utterances of others
are left out and counted. Without `segments` a recording is one
utterance.

To Kaldi an entry of `wav.scp` is one channel, and `reco2file_and_channel` tells which
side of a conversation it is when words are scored. So its letter picks a channel only
if the file has several. Without one the utterances of such a file are left out, because
nothing tells whose speech is in which channel.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.corpora.corpus import (
    Skipped,
    Utterance,
    misfit,
    utterance_id,
)
from lightning_adpsgd.asr.corpora.utf8 import in_one_form
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.tables import (
    Cut,
    Row,
    file_of,
    read_channels,
    read_named,
    read_segments,
    read_speakers,
)
from lightning_adpsgd.asr.sound.channels import SoundFacts

_COMMAND = "write the path of the recording in place of the command"
_NO_SIDE = (
    "write `recording file A` or `recording file B` into reco2file_and_channel, for "
    "each recording in wav.scp"
)
_NO_TEXT = "write `utterance words` into text, with the same name of the utterance"
_NO_SPEAKER = "write `utterance speaker` into utt2spk"


class _Sound(NamedTuple):
    """A recording, and the channel of it that is read."""

    path: Path
    channel: int
    seconds: float


def read_data(
    folder: Path,
    facts_of: Callable[[Path], SoundFacts],
    skipped: Skipped,
    clip_s: float = 0.5,
    shortest_s: float = 0.1,
) -> list[Utterance]:
    """The utterances of a data directory, in the order of `text`.

    An id begins with Kaldi's name of the utterance, and words are in lower case and
    NFC. The bounds of times are those of Kaldi's `extract-segments`, if no others are
    given.

    Args:
        folder: Data directory, such as `data/train`.
        facts_of: Function for the facts of a recording; raises ValueError if unusable.
        skipped: Counter of the utterances that are left out, with the reason.
        clip_s: Seconds by which a segment may end after its recording. It is clipped;
            beyond that it is left out.
        shortest_s: Seconds below which an utterance is left out.

    Raises:
        KaldiError: A file is missing or damaged, or no utterance can be used.
    """
    rows = read_named(folder / "wav.scp", form="recording path")
    cuts = read_segments(folder) if (folder / "segments").exists() else None
    speakers, channels = read_speakers(folder), read_channels(folder)
    found = []
    text = read_named(folder / "text", form="utterance words", names_alone=True)
    for line in text.values():
        if not line.rest:
            skipped.add("utterance without words", line.where)
            continue
        whole = Cut(line.name, 0.0, None, line.where)
        cut = whole if cuts is None else cuts.get(line.name)
        row = rows.get(cut.recording) if cut is not None else None
        if cut is None or row is None:
            skipped.add("text without a recording", line.where)
            continue
        if line.name not in speakers:
            skipped.add("utterance without a speaker", line.where, remedy=_NO_SPEAKER)
            continue
        _, side = channels.get(cut.recording, ("", None))
        sound = _sound(row, side, facts_of, skipped)
        if sound is None or not _fits(line, cut, sound, clip_s, shortest_s, skipped):
            continue
        found.append(_utterance(line, cut, sound, speakers[line.name]))
    _count_without_text(rows if cuts is None else cuts, text.keys(), skipped)
    if not found:
        reasons = "; ".join(skipped.report()) or "`text` is empty"
        raise KaldiError(f"{folder}: no utterance can be used: {reasons}")
    return found


def _count_without_text(
    spans: Mapping[str, Row | Cut], named: Collection[str], skipped: Skipped
) -> None:
    for name, span in spans.items():
        if name not in named:
            seconds = 0.0
            if isinstance(span, Cut) and span.end_s is not None:
                seconds = span.end_s - span.start_s
            skipped.add("recording without a text", span.where, seconds, _NO_TEXT)


def _sound(
    row: Row, side: int | None, facts_of: Callable[[Path], SoundFacts], skipped: Skipped
) -> _Sound | None:
    """The recording of a row of `wav.scp`; nothing, and a count, if it is unusable."""
    found = file_of(row)
    if found is None:
        skipped.add("command in wav.scp", row.where, remedy=_COMMAND)
        return None
    # Absolute for stages that run in another folder.
    path, channel = found.path.absolute(), found.channel
    try:
        facts = facts_of(path)
    except ValueError as error:
        where, remedy = f"{row.where}: {error}", "its utterances are left out"
        skipped.add("unusable sound", where, remedy=remedy)
        return None
    if channel is None:
        channel = 0 if facts.num_channels == 1 else side
    if channel is None:
        skipped.add("recording of unknown channel", row.where, remedy=_NO_SIDE)
        return None
    if channel >= facts.num_channels:
        where = f"{row.where}: {path} has {facts.num_channels}"
        skipped.add("command for a channel that is not there", where)
        return None
    return _Sound(path, channel, facts.seconds)


def _fits(
    line: Row,
    cut: Cut,
    sound: _Sound,
    clip_s: float,
    shortest_s: float,
    skipped: Skipped,
) -> bool:
    """Whether an utterance lies in its recording; it is counted if it does not."""
    end_s = sound.seconds if cut.end_s is None else cut.end_s
    reason = misfit(cut.start_s, end_s, sound.seconds, clip_s, shortest_s)
    if reason:
        where = f"{cut.where}: {line.name} in {sound.seconds:.2f} s of {sound.path}"
        skipped.add(reason, where, end_s - cut.start_s)
    return not reason


def _utterance(line: Row, cut: Cut, sound: _Sound, speaker: str) -> Utterance:
    end_s = sound.seconds if cut.end_s is None else min(cut.end_s, sound.seconds)
    return Utterance(
        id=utterance_id(line.name, sound.channel, cut.start_s, end_s),
        recording=sound.path,
        channel=sound.channel,
        start_s=cut.start_s,
        end_s=end_s,
        words=tuple(map(in_one_form, line.rest)),
        speaker=speaker,
        source=line.where,
    )
