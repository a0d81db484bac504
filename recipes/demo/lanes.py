"""Reads the last steps of a run's learners, which the callback `Timeline` writes."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_SUFFIX = ".timeline.csv"


class Step(NamedTuple):
    """One step of one learner.

    Attributes:
        begin: Seconds since 1970.
        end: Seconds since 1970.
        waited: Seconds in between for which it waited for others.
        peers: Learners that it exchanged with in between.
    """

    begin: float
    end: float
    waited: float
    peers: tuple[int, ...]


def read_lanes(folder: Path) -> list[list[Step]]:
    """The steps of each learner, from learner 0 on.

    Raises:
        ValueError: A line is not a step; the message has file and line.
    """
    paths = sorted(
        folder.glob(f"*{_SUFFIX}"), key=lambda path: int(path.name[: -len(_SUFFIX)])
    )
    return [_read(path) for path in paths]


def _read(path: Path) -> list[Step]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = enumerate(csv.DictReader(file), 2)
        return [_step(path, line, row) for line, row in rows if not row["event"]]


def _step(path: Path, line: int, row: dict[str, str]) -> Step:
    try:
        begin, end, waited = (float(row[n]) for n in ("begin", "end", "waited"))
        return Step(begin, end, waited, tuple(map(int, row["peers"].split())))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {line}: expected a step: {error}") from error


def window_of(lanes: Sequence[Sequence[Step]], seconds: float) -> tuple[float, float]:
    """Begin and end of the last seconds in which all learners were at work."""
    end = min((steps[-1].end for steps in lanes if steps), default=seconds)
    begin = max((steps[0].begin for steps in lanes if steps), default=0.0)
    return max(begin, end - seconds), end
