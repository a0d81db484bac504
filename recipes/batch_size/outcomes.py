"""The outcomes of runs: one file for each, written whole, and one table."""

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_adpsgd.files import written_whole
from recipes.batch_size.settings import Cell, Run, Setting


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        algorithm: name of the algorithm.
        batch: global batch.
        step: step of the grid of learning rates.
        seed: seed of the run.
        rate: peak learning rate.
        loss: held-out loss of the final consensus model; infinite after divergence.
        choice: the same on the samples by which settings are chosen.
        clip: step of the grid of norms; None: gradients are not clipped.
        diverged: reason why the run counts as diverged; empty otherwise.
        staleness: mean staleness of the merges, in optimizer steps.
        distance: largest relative consensus distance on the curve.
        simulated_seconds: duration in units of the mean time of a learner's step.
        wall_seconds: duration on the machine that computed the run.
        samples: samples of all learners at each point of the curve.
        losses: held-out loss at each point of the curve.
    """

    algorithm: str
    batch: int
    step: int
    seed: int
    rate: float
    loss: float
    choice: float
    clip: int | None = None
    diverged: str = ""
    staleness: float = math.nan
    distance: float = math.nan
    simulated_seconds: float = math.nan
    wall_seconds: float = math.nan
    samples: tuple[int, ...] = ()
    losses: tuple[float, ...] = field(default=(), repr=False)

    @property
    def run(self) -> Run:
        """The run that had this outcome."""
        cell, setting = Cell(self.algorithm, self.batch), Setting(self.step, self.clip)
        return Run(cell, setting, self.seed)


def save(folder: Path, outcome: Outcome) -> None:
    """Writes one file into the folder, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{outcome.run.key}.json", json.dumps(asdict(outcome)))


def load(folder: Path) -> list[Outcome]:
    """All that are in the folder, in the order of batch, algorithm, rate, seed."""
    outcomes = [_from_json(path) for path in folder.glob("*.json")]
    return sorted(
        outcomes, key=lambda o: (o.batch, o.algorithm, o.clip or 0, o.step, o.seed)
    )


def write_table(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Writes them as CSV; curves are numbers between spaces."""
    with written_whole(path, newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Outcome)])
        writer.writeheader()
        writer.writerows(_as_text(outcome) for outcome in outcomes)


def read_table(path: Path) -> list[Outcome]:
    """The outcomes that `write_table` has written."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_from_text(row) for row in csv.DictReader(file)]


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is never seen half written."""
    with written_whole(path) as file:
        file.write(text)


def _from_json(path: Path) -> Outcome:
    values = json.loads(path.read_text(encoding="utf-8"))
    curves = {name: tuple(values[name]) for name in ("samples", "losses")}
    return Outcome(**{**values, **curves})


def _as_text(outcome: Outcome) -> dict[str, Any]:
    return {name: _in_csv(value) for name, value in asdict(outcome).items()}


def _in_csv(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, map(_in_csv, value)))
    return f"{value:.8g}" if isinstance(value, float) else value


def _from_text(row: dict[str, str]) -> Outcome:
    values: dict[str, Any] = {
        "algorithm": row["algorithm"],
        "diverged": row["diverged"],
    }
    for name in ("batch", "step", "seed"):
        values[name] = int(row[name])
    for name in ("rate", "loss", "staleness", "distance"):
        values[name] = float(row[name])
    for name in ("simulated_seconds", "wall_seconds"):
        values[name] = float(row[name])
    # Sweeps of before chose by the samples that they reported, and did not clip.
    values["choice"] = float(row.get("choice", row["loss"]))
    values["clip"] = int(row["clip"]) if row.get("clip") else None
    values["samples"] = tuple(map(int, row["samples"].split()))
    values["losses"] = tuple(map(float, row["losses"].split()))
    return Outcome(**values)
