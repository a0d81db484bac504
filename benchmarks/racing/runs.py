"""One training of all learners, and its file, so that no training is run twice."""

import json
import math
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from benchmarks import learners
from benchmarks.hosts import Hosts
from benchmarks.learners import LearnersFailed, Place
from benchmarks.meeting_place import meeting_place
from benchmarks.racing import entrants
from benchmarks.racing.columns import (
    COLUMNS,
    FAST,
    KILL,
    NUM_HOSTS,
    without_fault,
)
from benchmarks.racing.course import Finish, Heat
from benchmarks.racing.entrants import (
    AT_THE_END,
    ENTRANTS,
    FLOOR,
    ISLANDS_PORT,
    SHORTEST_PERIOD,
)
from benchmarks.racing.problems import PROBLEMS, STEP_S, TO_CHOOSE_BY, TO_REPORT
from lightning_adpsgd.files import write_json

Role = Literal["calibrate", "choose", "report"]
Result = dict[str, Any]
_Value = TypeVar("_Value")
PATIENCE_S = 90.0
"""The time besides the race itself: start, slow first steps, the end."""
CALIBRATION_S = 8.0
FAR_FROM_ITS_TIME, ATTEMPTS = 0.1, 2


@dataclass(frozen=True)
class Cell:
    """A method in a column, for one model, each by name."""

    problem: str
    column: str
    method: str

    @property
    def entrant(self) -> entrants.Entrant:
        """The method."""
        return ENTRANTS[self.method]


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        cell: Cell that it belongs to.
        seconds: Length of the run, where nothing is in slow motion.
        rate: Peak learning rate.
        option: The method's own setting; 0 where it has none.
        seed: Seed of first weights, data and the learner to kill.
        role: Purpose of the run; for a report, weights are kept during it.
    """

    cell: Cell
    seconds: float
    rate: float
    option: float
    seed: int
    role: Role

    @property
    def name(self) -> str:
        """The name of its file."""
        cell = self.cell
        words = [cell.problem, cell.column, cell.method, f"{self.option:g}"]
        words += [f"{self.rate:g}", str(self.seed), f"{self.seconds:g}s", self.role]
        return re.sub(r"[^\w.]+", "-", "_".join(words))

    @property
    def duration_s(self) -> float:
        """The time that the learners have."""
        return self.seconds * COLUMNS[self.cell.column].slow_motion

    def heat(self, steps: Sequence[int]) -> Heat:
        """The heat for the learners; without steps, a calibration."""
        column = COLUMNS[self.cell.column]
        return Heat(
            self.cell.problem,
            self.duration_s,
            self.rate,
            self.seed,
            self.option,
            tuple(steps),
            column.times_slower,
            self.cell.entrant.own_pace,
            column.victim(self.seed) if steps else None,
            self.role == "report",
        )


NOT_RUN = "not been run"
"""How the reason ends."""


class NotRun(RuntimeError):
    """A run that is asked for has not been made."""


class Track:
    """Makes the runs that have no file yet.

    Args:
        hosts: Emulated hosts; None: nothing is run, and only existing files are found.
        folder: Folder of one file for each run, and of the measured speeds.
    """

    def __init__(self, hosts: Hosts | None, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        folder.mkdir(parents=True, exist_ok=True)

    def result(self, run: Run) -> Result:
        """The result of a run, which is made if it has no file.

        Raises:
            NotRun: The run has no file, and there are no hosts.
        """
        path = self._folder / f"{run.name}.json"
        if not path.exists() and self._hosts is None:
            raise NotRun(f"{run.name} has {NOT_RUN}")
        if not path.exists():
            found = self._perform(run)
            write_json(path, found)
            print(f"{run.name}: {_said(found)}", flush=True)
        return json.loads(path.read_text())

    def speeds(self, run: Run) -> list[float]:
        """The steps per second of each learner, as last measured with this setting."""
        path = self._speed_file(run)
        if path.exists():
            return json.loads(path.read_text())
        if run.cell.column == KILL:
            cell = replace(run.cell, column=FAST)
            return self.speeds(replace(run, cell=cell))
        if run.cell.entrant.has_period:
            return self._speeds_with_period(run)
        return self._calibrated(run)

    def keep_speeds(self, run: Run, speeds: Sequence[float]) -> None:
        """Keeps speeds for the next run of this setting, with any rate and seed."""
        write_json(self._speed_file(run), list(speeds))

    def _speed_file(self, run: Run) -> Path:
        setting = replace(run, rate=0, seed=0, seconds=0, role="calibrate")
        return self._folder / f"{setting.name}.speed.json"

    def _speeds_with_period(self, run: Run) -> list[float]:
        """The speeds from the time of a step, plus that of an average over its period.

        A calibration over hundreds of steps would take as long as the race.
        """
        often = self._calibrated(replace(run, option=SHORTEST_PERIOD))
        cell = replace(run.cell, method=AT_THE_END)
        alone = in_step(self._calibrated(replace(run, cell=cell, option=0)), run)
        share = SHORTEST_PERIOD / run.option
        return [
            1 / (1 / own + share * max(0, 1 / paused - 1 / own))
            for own, paused in zip(alone, often, strict=True)
        ]

    def _calibrated(self, run: Run) -> list[float]:
        run = replace(run, seconds=CALIBRATION_S, seed=0, role="calibrate")
        run = replace(run, rate=PROBLEMS[run.cell.problem].rate / 10)
        found = self.result(run)
        if "failed" in found:
            raise LearnersFailed(f"{run.name}: {found['failed']}")
        return found["speeds"]

    def _perform(self, run: Run) -> Result:
        if run.cell.method == FLOOR:
            return self._floor(run)
        try:
            finishes = self._timed(run)
        except LearnersFailed as error:
            return {"failed": str(error)[-600:]}
        return _result(run, finishes)

    def _timed(self, run: Run) -> list[Finish | None]:
        """Repeats a run that missed its time by far, with the speed that it showed."""
        if run.role == "calibrate":
            return self._train(run, run.heat(()))
        finishes: list[Finish | None] = []
        for _ in range(ATTEMPTS):
            speeds = in_step(self.speeds(run), run)
            steps = [max(2, round(run.duration_s * speed)) for speed in speeds]
            finishes = self._train(run, run.heat(steps))
            self.keep_speeds(run, _speeds(finishes))
            took = max(finish.seconds for finish in finishes if finish is not None)
            if abs(took / run.duration_s - 1) <= FAR_FROM_ITS_TIME:
                break
        return finishes

    def _train(self, run: Run, heat: Heat) -> list[Finish | None]:
        column, problem = COLUMNS[run.cell.column], PROBLEMS[run.cell.problem]
        assert self._hosts is not None
        self._hosts.shape(column.rate(problem), column.burst(problem))

        def program(place: Place) -> Finish | None:
            return entrants.run(run.cell.entrant, place, heat)

        limit_s = 2 * run.duration_s + PATIENCE_S
        # Where one is killed, learners of this package are islands.
        are_islands = heat.victim is not None and run.cell.entrant.is_ours
        meeting = meeting_place(self._hosts, ISLANDS_PORT)
        with meeting if are_islands else nullcontext():
            return learners.run(
                program, NUM_HOSTS, limit_s, self._hosts, column.per_host
            )

    def _floor(self, run: Run) -> Result:
        """Trains the floor, with the samples that all hosts together can take."""
        column = COLUMNS[run.cell.column]
        cell = Cell(run.cell.problem, without_fault(run.cell.column), AT_THE_END)
        alone = fmean(self.speeds(replace(run, cell=cell, option=0)))
        num_steps = round(run.duration_s * alone * column.share_of_samples)
        limit_s = 4 * num_steps * STEP_S * NUM_HOSTS + PATIENCE_S
        heat = run.heat([num_steps])
        program = run.cell.entrant.program
        return _result(run, learners.run(lambda p: program(p, heat), 1, limit_s))


def in_step(speeds: Sequence[float], run: Run) -> list[float]:
    """The learners that must make equally many steps: all, or those of a host."""
    has_own = run.cell.entrant.own_pace
    size = COLUMNS[run.cell.column].per_host if has_own else len(speeds)
    return [s for same in _by(size, speeds) for s in [min(same)] * len(same)]


def _speeds(finishes: Sequence[Finish | None]) -> list[float]:
    known = [finish.speed for finish in finishes if finish is not None]
    return [fmean(known) if f is None else f.speed for f in finishes]


def _result(run: Run, finishes: Sequence[Finish | None]) -> Result:
    found = [finish for finish in finishes if finish is not None]
    steps = sum(finish.steps for finish in found)
    weights = _mean(run, [finish.weights for finish in found])
    problem = PROBLEMS[run.cell.problem]
    return {
        "method": run.cell.method,
        "rate": run.rate,
        "option": run.option,
        "seed": run.seed,
        "steps": [finish.steps for finish in found],
        "seconds": round(max(finish.seconds for finish in found), 2),
        "speeds": _speeds(finishes),
        "MB a step": sum(finish.sent_bytes for finish in found) / steps / 1e6,
        "exchanges a step": sum(finish.exchanges for finish in found) / steps,
        "loss to choose by": _finite(problem.held_out_loss(weights, TO_CHOOSE_BY)),
        "loss": _finite(problem.held_out_loss(weights, TO_REPORT)),
        "curve": _curve(run, found),
        "finished": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def _curve(run: Run, finishes: Sequence[Finish]) -> list[tuple[float, float | None]]:
    """The held-out losses of the mean of all, during the run."""
    problem = PROBLEMS[run.cell.problem]
    points = []
    for together in zip(*(finish.curve for finish in finishes), strict=False):
        weights = _mean(run, [kept for _, kept in together])
        loss = _finite(problem.held_out_loss(weights, TO_REPORT))
        points.append((fmean(second for second, _ in together), loss))
    return points


def _by(size: int, values: Sequence[_Value]) -> list[Sequence[_Value]]:
    return [values[n : n + size] for n in range(0, len(values), size)]


def _mean(run: Run, parts: Sequence[Tensor]) -> Tensor:
    """The mean of all super-learners, each of which may be in parts."""
    size = COLUMNS[run.cell.column].per_host
    if size > 1:
        parts = [*map(PROBLEMS[run.cell.problem].joined, _by(size, parts))]
    return torch.stack([*parts]).mean(0)


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _said(found: Result) -> str:
    if "failed" in found:
        return f"failed: {found['failed'].strip().splitlines()[-1]}"
    figures = (f"{key} {found.get(key)}" for key in ("loss", "steps", "seconds"))
    return ", ".join(figures)
