"""Folders as trainings leave them, with figures that are easy to foretell."""

import csv
import json
import wave
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A CSV file of rows that have different columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def metrics(shift: float = 0.0, gossips: bool = True) -> list[dict[str, float]]:
    """Ten validations, a hundred steps apart; the held-out loss falls as 4 / epoch."""
    rows = []
    for epoch in range(1, 11):
        last = 100 * epoch - 1
        rows.append({"step": last, "val_loss": 4 / epoch + shift})
        rows.append({"step": last - 50, "curve/loss": 3.9 / epoch})
        rows.append(
            {
                "step": last,
                "learners/global_samples": 6400 * epoch,
                "learners/train_seconds": 5 * epoch,
                "learners/steps_per_second_0": 20,
                "learners/steps_per_second_1": 5,
            }
        )
        if gossips:
            rows[-1] |= {
                "gossip/relative_consensus_distance": 0.01 / epoch,
                "gossip/exchanges_per_step": 0.9,
                "gossip/bytes_sent": 1e6 * epoch,
                "gossip/staleness_1": 9 * epoch,
                "gossip/staleness_3": epoch,
            }
    return rows


def write_run(
    folder: Path, name: str, seed: int = 1, **more: Any
) -> list[dict[str, float]]:
    """A run with its figures, and its row beside them."""
    rows = metrics(**more)
    write_rows(folder / "metrics.csv", rows)
    settings = {"algorithm": "adpsgd", "num_super_learners": 2, "super_learner_size": 1}
    row = {
        "name": name,
        **settings,
        "lr": 0.1,
        "seed": seed,
        "samples_per_second": 1280,
    }
    write_rows(folder / f"{name}.run.csv", [row])
    return rows


def write_lane(
    path: Path, steps: Iterable[Mapping[str, Any]], event: str = "end"
) -> None:
    """The lane of a learner, from what differs from a step without a wait."""
    plain = {"waited": 0, "exchanges": 0, "peers": "", "members": 0, "lost": 0}
    rows = [{**plain, **step, "event": ""} for step in steps]
    last = rows[-1]["end"]
    rows.append({"begin": last, "end": last, **plain, "event": event})
    write_rows(path, rows)


def write_lanes(folder: Path, begin: float = 1.7e9) -> None:
    """Learner 0 steps in 0.1 s, meets 1 in every fifth step; 1 is five times slower."""
    quick = [
        {
            "begin": begin + k / 10,
            "end": begin + (k + 1) / 10,
            "waited": 0.02,
            "exchanges": int(k % 5 == 4),
            "peers": "1" if k % 5 == 4 else "",
        }
        for k in range(100)
    ]
    slow = [
        {
            "begin": begin + k / 2,
            "end": begin + (k + 1) / 2,
            "exchanges": 1,
            "peers": "0",
        }
        for k in range(16)
    ]
    slow[-1]["lost"] = 1
    write_lane(folder / "0.timeline.csv", quick)
    write_lane(folder / "1.timeline.csv", slow, "RuntimeError: <b>gone</b>")


def write_score(folder: Path, name: str, wer: float, other: str | None = None) -> None:
    """The score of a run, with one utterance that can be heard."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"num_words": 200, "substitutions": 3, "deletions": 2, "insertions": 1}
    part = {**counts, "wer": wer, "wer_low": wer / 2, "wer_high": 2 * wer}
    test = {"num_segments": 20, "difference": -0.01, "z": -2.5, "p": 0.0124}
    score = {"name": name, "parts": {"SWB": part, "total": part}}
    score |= {"compared": {other: test} if other else {}}
    (folder / "score.json").write_text(json.dumps(score))
    write_sound(folder / "worst" / "0.wav")
    pairs = [["C", "i", "i", 0.99], ["S", "mean", "meme", 0.4], ["D", "it", "", None]]
    about = {"file": "sw_1", "channel": "a", "begin": 1.0, "end": 2.5, "part": "SWB"}
    one = {**about, "words": 3, "errors": 2, "pairs": pairs, "audio": "worst/0.wav"}
    (folder / "utterances.json").write_text(json.dumps([one]))


def write_sound(path: Path) -> None:
    """A tenth of a second of silence."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(1600))
