"""Utterances as a Kaldi data directory: `wav.scp`, `segments`, `text` and so on.

Names are those of the utterances here. A speaker is a conversation side, as in Kaldi's
recipe for Switchboard, so that the names of speakers begin those of utterances and both
sort alike. Nothing is copied: `wav.scp` has a command for each side.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lightning_adpsgd.asr.corpora.corpus import Utterance
from lightning_adpsgd.asr.corpora.discs import plain_name
from lightning_adpsgd.files import bytes_written_whole

_SPHERE = (".sph", ".wv1")


def write_directory(folder: Path, utterances: Sequence[Utterance]) -> None:
    """Writes the files, each sorted as `LC_ALL=C sort` does it.

    Args:
        folder: Folder to write, made if absent.
        utterances: Utterances, without copies at other speeds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "wav.scp": {f"{side_name(u)} {_command(u)}" for u in utterances},
        "reco2file_and_channel": {
            f"{side_name(u)} {u.conversation} {_channel(u)}" for u in utterances
        },
        "segments": [
            f"{u.id} {side_name(u)} {u.start_s:.3f} {u.end_s:.3f}" for u in utterances
        ],
        "utt2spk": [f"{u.id} {side_name(u)}" for u in utterances],
        "spk2utt": _by_speaker(utterances),
        "text": [" ".join((u.id, *u.words)) for u in utterances],
    }
    for name, lines in tables.items():
        _write(folder / name, lines)


def side_name(utterance: Utterance) -> str:
    """Name of the conversation side, as recording and as speaker: `sw02001-A`."""
    return f"{utterance.conversation}-{_channel(utterance)}"


def _channel(utterance: Utterance) -> str:
    return "AB"[utterance.channel]


def _by_speaker(utterances: Iterable[Utterance]) -> Iterator[str]:
    spoken: dict[str, list[str]] = {}
    for utterance in utterances:
        spoken.setdefault(side_name(utterance), []).append(utterance.id)
    for speaker, names in spoken.items():
        yield " ".join((speaker, *sorted(names, key=os.fsencode)))


def _command(utterance: Utterance) -> str:
    """The command that writes one side as a WAV file to its output."""
    path = shlex.quote(str(utterance.recording.absolute()))
    number = utterance.channel + 1
    if plain_name(utterance.recording.name).endswith(_SPHERE):
        return f"sph2pipe -f wav -p -c {number} {path} |"
    return f"sox {path} -r 8000 -b 16 -t wav - remix {number} |"


def _write(path: Path, lines: Iterable[str]) -> None:
    # Bytes, because the path of a recording may not be valid text.
    with bytes_written_whole(path) as file:
        file.writelines(line + b"\n" for line in sorted(map(os.fsencode, lines)))
