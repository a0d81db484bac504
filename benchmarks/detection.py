"""How soon all islands know that one has died or that half of them are unreachable.

Two emulated hosts with three islands each; the rendezvous is on the first of them, so
that the other half can only infer it from silence. In turn one island is killed and
started again, and the cable is pulled out and put in again. The ring is closed when
every survivor has reported at a step that it knows exactly the others that are left.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from benchmarks import hosts, killed_methods, soaked, step_journal
from benchmarks.hosts import Hosts
from benchmarks.killable import Crowd, Killable
from benchmarks.meeting_place import meeting_place
from benchmarks.results import Report, Row, Target
from benchmarks.timing import print_row, spread

LEARNERS, PORT = 6, 29_800
HALVES = range(3), range(3, LEARNERS)  # islands of the first host, and of the second
TIMES, TIMES_QUICK = 8, 2
BOUND_S, LIMIT_S = 5.0, 60.0

KILLED, NEAR, FAR = "killed", "cut off, with the rendezvous", "cut off, without it"
REJOINED, HEALED = "started again", "the cable back"


def measure(quick: bool = False) -> Report:
    """Kills and cuts in turn; times how soon every survivor's ring is closed."""
    torch.set_num_threads(1)
    report = Report(
        f"{LEARNERS} islands on 2 hosts, steps of {1e3 * soaked.STEP_S:.0f} ms: "
        "seconds until all who are left know.",
        limit=f"the bound of {BOUND_S:.0f} s",
        notes=[
            "An island says at each step how many it knows of, so that a figure is up "
            "to a step too large. The last two are the way back to one ring of all: "
            "from the start of the process, and from the cable."
        ],
    )
    if hosts.are_missing(report):
        return report
    found = observe(TIMES_QUICK if quick else TIMES)
    report.rows += [row(what, seconds) for what, seconds in found.items()]
    report.targets += [target(what, found[what]) for what in (KILLED, NEAR, FAR)]
    return report


def row(what: str, seconds: Sequence[float]) -> Row:
    value, longest = spread(seconds), max(seconds)
    print_row(what, f"{value:.2f} s", f"longest {longest:.2f}")
    details = {"longest, s": longest, "times": float(len(seconds))}
    ratio = value.median / BOUND_S
    return Row({"what": what}, value, "s", ratio, details=details)


def target(what: str, seconds: Sequence[float]) -> Target:
    claim = f"seconds to a closed ring, {what}: the longest of {len(seconds)}"
    return Target(claim, BOUND_S, max(seconds), at_least=False)


def observe(times: int) -> dict[str, list[float]]:
    """The seconds of each kind of event, repeated in turn."""
    found: dict[str, list[float]] = {
        what: [] for what in (KILLED, NEAR, FAR, REJOINED, HEALED)
    }
    with islands() as all_of_them:
        for turn in range(times):
            kill_and_return(all_of_them, turn % LEARNERS, found)
            cut_and_heal(all_of_them, found)
    return found


class Archipelago:
    """The islands, the cable between their hosts, and their journals.

    Args:
        crowd: Processes of the islands.
        cable: Function that plugs the cable in, or unplugs it.
        folder: Folder of the journals.
    """

    def __init__(
        self, crowd: Crowd, cable: Callable[[bool], None], folder: Path
    ) -> None:
        self.crowd, self.cable, self._folder = crowd, cable, folder

    def seconds_until(self, who: Sequence[int], members: int, since: float) -> float:
        """The seconds until the last of these islands reports that it knows of so many.

        Raises:
            TimeoutError: One of them did not report that in time.
        """
        times: dict[int, float] = {}
        while len(times) < len(who):
            if time.monotonic() > since + LIMIT_S:
                raise TimeoutError(
                    f"after {LIMIT_S:.0f} s the islands {sorted({*who} - {*times})} "
                    f"have not said that they know of {members}"
                )
            time.sleep(0.05)
            for number in {*who} - {*times}:
                times.update(self._first_time(number, members, since))
        return max(times.values()) - since

    def _first_time(self, number: int, members: int, since: float) -> dict[int, float]:
        """When its present life first said so after that time, if it has."""
        lives = step_journal.read(self._folder, number)
        entries = (entry for entry in lives[-1] if entry.time > since) if lives else ()
        said = (entry.time for entry in entries if entry.members == members)
        return {number: first} if (first := next(said, None)) is not None else {}


def kill_and_return(
    islands: Archipelago, victim: int, found: dict[str, list[float]]
) -> None:
    """Kills an island, and starts it again when all have noticed."""
    others = [number for number in range(LEARNERS) if number != victim]
    begin = time.monotonic()
    islands.crowd.kill(victim)
    found[KILLED].append(islands.seconds_until(others, LEARNERS - 1, begin))
    begin = time.monotonic()
    islands.crowd.start(victim)
    found[REJOINED].append(islands.seconds_until(range(LEARNERS), LEARNERS, begin))


def cut_and_heal(islands: Archipelago, found: dict[str, list[float]]) -> None:
    """Unplugs the cable, and plugs it in again when both halves are rings."""
    begin = time.monotonic()
    islands.cable(False)
    for what, half in zip((NEAR, FAR), HALVES, strict=True):
        found[what].append(islands.seconds_until(half, len(half), begin))
    begin = time.monotonic()
    islands.cable(True)
    found[HEALED].append(islands.seconds_until(range(LEARNERS), LEARNERS, begin))


@contextmanager
def islands() -> Iterator[Archipelago]:
    """Starts all islands on one ring, and ends them on exit."""
    with hosts.emulated(2) as two, tempfile.TemporaryDirectory() as name:
        begin, folder = time.monotonic(), Path(name)
        with meeting_place(two, PORT):
            first = Killable(0, LEARNERS, 0, PORT, folder, begin + 1e6)
            crowd = Crowd(partial(live, two), first)
            try:
                made = Archipelago(crowd, partial(two.plug, 1), folder)
                made.seconds_until(range(LEARNERS), LEARNERS, begin)
                yield made
            finally:
                crowd.kill_all()


def live(two: Hosts, life: Killable) -> None:
    """One life of an island, on the host of its half."""
    two.enter(int(life.number in HALVES[1]))
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    killed_methods.train_island(soaked.Journaled(life), two.addresses[0])
