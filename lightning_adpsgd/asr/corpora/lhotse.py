"""Utterances as manifests of lhotse: `recordings.jsonl.gz`, `supervisions.jsonl.gz`.

They are written without lhotse, in the form in which its `RecordingSet.from_file` and
`SupervisionSet.from_file` read them. Recordings are named by their present paths.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_adpsgd.asr.corpora.corpus import Skipped, Utterance
from lightning_adpsgd.asr.sound.channels import is_sphere, read_facts
from lightning_adpsgd.asr.sound.sphere import read_header
from lightning_adpsgd.files import bytes_written_whole


def write_manifests(
    folder: Path, utterances: Sequence[Utterance], skipped: Skipped
) -> None:
    """Writes both manifests.

    Args:
        folder: Folder for both files; created if missing.
        utterances: Utterances, without copies at other speeds.
        skipped: Counter of recordings with an unreadable header, which are left out.
    """
    recordings = {one["id"]: one for one in _recordings(utterances, skipped)}
    kept = [u for u in utterances if u.conversation in recordings]
    _write(folder / "recordings.jsonl.gz", recordings.values())
    _write(folder / "supervisions.jsonl.gz", map(_supervision, kept))


def _recordings(
    utterances: Iterable[Utterance], skipped: Skipped
) -> Iterator[dict[str, Any]]:
    for name, path in {u.conversation: u.recording for u in utterances}.items():
        try:
            num_samples, rate, num_channels = _size(path)
        except ValueError as error:
            skipped.add("recording without a manifest", str(error))
            continue
        channels = list(range(num_channels))
        source = {"type": "file", "channels": channels, "source": str(path.absolute())}
        yield {
            "id": name,
            "sources": [source],
            "sampling_rate": rate,
            "num_samples": num_samples,
            "duration": num_samples / rate,
            "channel_ids": channels,
        }


def _size(path: Path) -> tuple[int, int, int]:
    """Samples, rate and channels; compressed SPHERE files tell them too."""
    if is_sphere(path):
        header = read_header(path)
        return header.num_samples, header.sample_rate, header.num_channels
    facts = read_facts(path)
    samples = round(facts.seconds * facts.sample_rate)
    return samples, facts.sample_rate, facts.num_channels


def _supervision(utterance: Utterance) -> dict[str, Any]:
    return {
        "id": utterance.id,
        "recording_id": utterance.conversation,
        "start": round(utterance.start_s, 4),
        "duration": round(utterance.end_s - utterance.start_s, 4),
        "channel": utterance.channel,
        "text": " ".join(utterance.words),
        "language": "English",
        "speaker": utterance.speaker,
    }


def _write(path: Path, objects: Iterable[dict[str, Any]]) -> None:
    with (
        bytes_written_whole(path) as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
    ):
        for one in objects:
            packed.write(json.dumps(one).encode() + b"\n")
