"""The last steps of each learner of a run, from the files of `Timeline`."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_adpsgd.report.reading import number_in, read_table

SUFFIX = ".timeline.csv"
"""The suffix of the files, after the name of the learner."""

_NUMBERS = ("begin", "end", "waited", "exchanges", "lost")


def read_lanes(paths: Iterable[Path]) -> dict[str, Any]:
    """The lanes of the learners of one run, in the order of their names.

    A step is (begin, end, waited, exchanges, peers, lost), and an event (begin, end,
    text). Times are seconds since `start`, the whole second of the first step; of a
    learner without a step, its first event counts.

    Raises:
        ValueError: A cell is no number, or a file is incomplete.
    """
    learners = [_read(path) for path in sorted(paths, key=_order)]
    firsts = (
        entry for one in learners for entry in (one["steps"] or one["events"])[:1]
    )
    start = math.floor(min((begin for begin, *_ in firsts), default=0.0))
    for learner in learners:
        for entries in (learner["steps"], learner["events"]):
            entries[:] = [_since(start, entry) for entry in entries]
    return {"start": start, "learners": learners}


def _order(path: Path) -> tuple[bool, int, str]:
    name = path.name.removesuffix(SUFFIX)
    return not name.isdigit(), int(name) if name.isdigit() else 0, name


def _since(start: float, entry: Sequence[Any]) -> list[Any]:
    begin, end, *others = entry
    return [round(begin - start, 4), round(end - start, 4), *others]


def _read(path: Path) -> dict[str, Any]:
    steps: list[list[Any]] = []
    events: list[list[Any]] = []
    for where, cells in read_table(path):
        if missing := [name for name in _NUMBERS[:2] if name not in cells]:
            raise ValueError(f"{where}: `{missing[0]}` is missing")
        numbers = (number_in(where, n, cells.get(n, "0")) for n in _NUMBERS)
        begin, end, waited, exchanges, lost = numbers
        if event := cells.get("event"):
            events.append([begin, end, event])
        else:
            peers = cells.get("peers", "").split()
            steps.append([begin, end, waited, exchanges, peers, lost])
    return {"name": path.name.removesuffix(SUFFIX), "steps": steps, "events": events}
