"""The speed of one core at each stage, measured on runs and kept in `costs.json`.

The sizes of the real corpora are here too: a projection needs both.
"""

import json
from pathlib import Path
from typing import NamedTuple

from lightning_adpsgd.asr.frames.store import stored_frames
from lightning_adpsgd.asr.frames.writing import is_stored
from lightning_adpsgd.files import write_json

KEPT = Path(__file__).with_name("costs.json")
FRAMES_PER_HOUR = 360_000
UNITS = {
    "check": "recordings",
    "prepare": "utterances",
    "features": "frames",
    "align": "frames",
}

# Parts of stages; `python -m benchmarks tree` measures the first two and `graph`.
STATISTICS, LEAVES_GROWN = "triphone: statistics", "triphone: tree"
ALIGNING = "triphone: a realignment"
FMLLR, IVECTORS = "adapt: a round of fMLLR", "adapt: an iteration of i-vectors"
OCCUPANCY = "adapt: 2,048 Gaussians"
LANGUAGE = "lm: two models of order 4, one pruned"
NETWORK, SEARCH = "decode: the papers' network", "decode: search"


class Corpus(NamedTuple):
    """Sizes of a corpus.

    Attributes:
        name: name of its recipe.
        hours: hours of training speech.
        recordings: number of files.
        utterances: number of training utterances.
        disc_hours: hours of recordings on the discs; both sides of a call are one.
    """

    name: str
    hours: float
    recordings: int
    utterances: int
    disc_hours: float

    @property
    def sides(self) -> int:
        """Conversation sides."""
        return 2 * self.recordings

    @property
    def frames(self) -> float:
        """Frames of 10 ms."""
        return self.hours * FRAMES_PER_HOUR


# Hours and utterances after capping repeats, from Kaldi's s5c; 1,975 h of the papers.
CORPORA = (
    Corpus("swb300", 286, 2438, 256_000, 260),
    Corpus("swb2000", 1975, 2438 + 11_699 + 120, 2_100_000, 260 + 1960 + 60),
)


class Cost(NamedTuple):
    """The speed of one core at a stage, or at a part of one.

    Attributes:
        unit: "recordings", "utterances", "frames" and so on.
        per_second: units that one core does in a second.
    """

    unit: str
    per_second: float


def measured(exp: Path, stage: str, cores: int, iterations: int) -> Cost:
    """Cost of a stage of a run.

    Args:
        exp: folder of the stages.
        stage: stage, one of `UNITS`.
        cores: number of processes that it used; `prepare` uses one.
        iterations: number of realignments of its flat start (`align.num_iterations`).
    """
    passes = iterations + 2  # and the equal parts, and the labels
    count = {
        "check": lambda: _num_recordings(exp / "check/report.json"),
        "prepare": lambda: _num_lines(exp / "prepare/train.jsonl"),
        "features": lambda: _frames(exp / "features"),
        "align": lambda: _frames(exp / "features") * passes,
    }[stage]
    used = 1 if stage == "prepare" else cores
    return Cost(UNITS[stage], count() / (_seconds(exp / stage) * used))


def _num_recordings(report: Path) -> int:
    found = json.loads(report.read_text())
    return len(found.get("recordings") or found["seconds"])


def _num_lines(path: Path) -> int:
    with path.open() as file:
        return sum(1 for _ in file)


def _seconds(stage: Path) -> float:
    return json.loads((stage / ".done").read_text())["seconds"]


def _frames(features: Path) -> int:
    return sum(stored_frames(split) for split in features.iterdir() if is_stored(split))


def read_costs() -> tuple[dict[str, Cost], str]:
    """The kept costs, and where they were measured."""
    values = json.loads(KEPT.read_text())
    return {name: Cost(*cost) for name, cost in values["costs"].items()}, values["from"]


def keep_costs(costs: dict[str, Cost], machine: str) -> None:
    """Adds costs to the kept ones, and where they were measured."""
    kept, source = read_costs()
    told = "; ".join(part for part in (source, machine) if part)
    write_json(KEPT, {"from": told, "costs": kept | costs})
