"""The journal that learners of a long run write in each step, and its analysis."""

import itertools
import os
import statistics
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_ENTRY = struct.Struct("4d")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LONGEST_DETECTION_S = 15.0
# A learner that joins as another dies leaves the number of members unchanged.
_JOINING_S = (1.0, 6.0)
FIRST = 3  # steps of a life that do not count


class Entry(NamedTuple):
    """A step.

    Attributes:
        time: Time of its end, on the machine's monotonic clock.
        members: Number of super-learners that the learner knew of, including itself.
        loss: Loss of the batch.
        memory: Bytes of memory of the process.
    """

    time: float
    members: float
    loss: float
    memory: float


Life = list[Entry]


class Journal:
    """One life; each entry is in the file at once, so that a kill loses none."""

    def __init__(self, folder: Path, number: int, life: int) -> None:
        path = folder / f"{number}.{life}.journal"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, entry: Entry) -> None:
        """Adds an entry."""
        os.write(self._file, _ENTRY.pack(*entry))


def memory_of(process: int | str = "self") -> float:
    """The resident bytes of a process."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE_BYTES


def read(folder: Path, number: int) -> list[Life]:
    """Reads all lives of a learner, in their order."""
    paths = sorted(folder.glob(f"{number}.*.journal"), key=_life_of)
    return [_read(path) for path in paths]


def last(folder: Path, number: int) -> Entry | None:
    """The last entry of a learner's present life, without reading all before it."""
    path = max(folder.glob(f"{number}.*.journal"), key=_life_of, default=None)
    if path is None or (num := path.stat().st_size // _ENTRY.size) == 0:
        return None
    with path.open("rb") as file:
        file.seek((num - 1) * _ENTRY.size)
        return Entry(*_ENTRY.unpack(file.read(_ENTRY.size)))


def _life_of(path: Path) -> int:
    return int(path.suffixes[0][1:])


def _read(path: Path) -> Life:
    text = path.read_bytes()
    whole = len(text) - len(text) % _ENTRY.size
    return [Entry(*row) for row in _ENTRY.iter_unpack(text[:whole])]


def gaps(life: Life, faults: Sequence[tuple[float, float]]) -> Iterator[float]:
    """The seconds between steps, without those in which the learner had a fault.

    Args:
        life: Entries of a life, whose first steps do not count.
        faults: Beginning and end of each fault of this learner.
    """
    for before, after in itertools.pairwise(life[FIRST:]):
        hit = any(begin < after.time and before.time < end for begin, end in faults)
        if not hit:
            yield after.time - before.time


def detection(
    lives: Sequence[Sequence[Life]], dead: Sequence[int], time: float
) -> float | None:
    """The seconds until all survivors knew of the smaller number of members.

    None if steps do not show it, for example if another learner joined meanwhile.

    Args:
        lives: Lives by learner.
        dead: Learners that died.
        time: Time of their death.
    """
    found = []
    if any(_begins(life, time) for own in lives for life in own):
        return None
    for number, own in enumerate(lives):
        life = next((e for e in own if _spans(e, time)), None)
        if number in dead or life is None:
            continue
        before = [entry for entry in life if entry.time <= time][-1].members
        until = time + _LONGEST_DETECTION_S
        noticed = (
            entry.time - time
            for entry in life
            if time < entry.time < until and entry.members <= before - len(dead)
        )
        found.append(next(noticed, None))
    known = [seconds for seconds in found if seconds is not None]
    return max(known) if known and len(known) == len(found) else None


def _begins(life: Life, time: float) -> bool:
    """Whether a life begins about that time."""
    before, after = _JOINING_S
    return bool(life) and time - before < life[0].time < time + after


def _spans(life: Life, time: float) -> bool:
    """Whether a life had begun well before and went on well after."""
    started = len(life) > FIRST and life[FIRST].time < time
    return started and life[-1].time > time + _LONGEST_DETECTION_S / 3


def growth(life: Life, settled_s: float = 60.0) -> float | None:
    """The growth of a life's memory in bytes, from a while after its start."""
    if not life or life[-1].time - life[0].time < 2 * settled_s:
        return None
    early = [e.memory for e in life if e.time < life[0].time + settled_s]
    late = [e.memory for e in life if e.time > life[-1].time - settled_s]
    return statistics.median(late) - statistics.median(early[len(early) // 2 :])


def members_over_time(life: Life, every_s: float = 10.0) -> list[int]:
    """The number of members that a life knew of, at intervals."""
    times = itertools.count(life[0].time, every_s)
    seen, due = [], next(times)
    for entry in life:
        if entry.time >= due:
            seen.append(int(entry.members))
            due = next(times)
    return seen


def loss_by_minute(lives: Sequence[Life]) -> list[float]:
    """The mean loss over the batches of each minute since the first step."""
    entries = [entry for life in lives for entry in life]
    if not entries:
        return []
    begin = entries[0].time
    by_minute = itertools.groupby(entries, lambda e: int((e.time - begin) // 60))
    return [statistics.fmean(e.loss for e in group) for _, group in by_minute]
