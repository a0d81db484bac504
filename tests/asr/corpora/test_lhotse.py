"""Manifests have the fields that lhotse's own have."""

import gzip
import json
from pathlib import Path

from lightning_adpsgd.asr.corpora.corpus import Skipped, Utterance
from lightning_adpsgd.asr.corpora.lhotse import write_manifests
from tests.asr.tiny import noise, write_sphere


def read(path: Path) -> list[dict]:
    return [
        json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()
    ]


def test_recordings_and_supervisions_are_written(tmp_path: Path):
    call = write_sphere(tmp_path / "sw02001.sph", noise(2.0))
    broken = tmp_path / "sw02002.sph"
    broken.write_bytes(b"")
    spoken = [
        Utterance(
            f"{path.stem}-B_000050-000150", path, 1, 0.5, 1.5, ("yes", "no"), "1005"
        )
        for path in (call, broken)
    ]
    skipped = Skipped()
    write_manifests(tmp_path / "out", spoken, skipped)
    [recording] = read(tmp_path / "out" / "recordings.jsonl.gz")
    source = {"type": "file", "channels": [0, 1], "source": str(call)}
    assert recording == {
        "id": "sw02001",
        "sources": [source],
        "sampling_rate": 8000,
        "num_samples": 16_000,
        "duration": 2.0,
        "channel_ids": [0, 1],
    }
    [supervision] = read(tmp_path / "out" / "supervisions.jsonl.gz")
    assert supervision == {
        "id": "sw02001-B_000050-000150",
        "recording_id": "sw02001",
        "start": 0.5,
        "duration": 1.0,
        "channel": 1,
        "text": "yes no",
        "language": "English",
        "speaker": "1005",
    }
    assert skipped.counts == {"recording without a manifest": 1}


def test_the_same_manifest_is_the_same_file(tmp_path: Path):
    call = write_sphere(tmp_path / "sw02001.sph", noise(2.0))
    name = "sw02001-B_000050-000150"
    spoken = [Utterance(name, call, 1, 0.5, 1.5, ("yes",), "1005")]
    written = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        write_manifests(folder, spoken, Skipped())
        written.append((folder / "supervisions.jsonl.gz").read_bytes())
    assert written[0] == written[1]
    assert b"supervisions" not in written[0]  # nor the name of a hidden file
