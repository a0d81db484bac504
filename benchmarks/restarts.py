"""Which learners get in, with which weights, if a rendezvous restarts empty amid churn.

Each time the rendezvous is killed, one or two learners are killed soon after it, and
all come back about the same time, in any order. So a learner may begin on an empty list
before any member has restored it. The members keep the list, so that it outlives its
server. The findings of the histories are counted over all restarts.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import history, soak, soaked, step_journal
from benchmarks.fault_injection import SPARED, World
from benchmarks.history import Average, Step
from benchmarks.timing import print_row

LEARNERS, TIMES, TIMES_QUICK, SEED = 6, 50, 3, 0
KILLED_S, BACK_S, BEGINS_S = (0.0, 1.5), (0.5, 3.0), (-1.0, 1.5)
GIVEN_UP_S, LANES_S, LOOK_S = 60.0, 20.0, 0.5


class Restart(NamedTuple):
    """One restart of an empty rendezvous.

    Attributes:
        begin: when the rendezvous was back.
        whole: when all knew of all; None: they did not within a minute.
        missing: learners that were not in by then.
        broken: neighbours on the ring that had not exchanged 20 s later.
    """

    begin: float
    whole: float | None
    missing: list[int]
    broken: int = 0


def measure(quick: bool = False) -> dict[str, Any]:
    """Restarts one after another; reports on members, weights and lanes."""
    torch.set_num_threads(1)
    times = TIMES_QUICK if quick else TIMES
    with tempfile.TemporaryDirectory() as name:
        restarts, found = observe(times, LEARNERS, SEED, Path(name))
    print_row("empty restarts", f"{len(restarts)}", f"never in {found['never got in']}")
    return {
        "question": f"{LEARNERS} super-learners, of which one or two are killed and "
        f"come back while the rendezvous does, empty, {times} times; seed {SEED}.",
        **found,
    }


def observe(
    times: int, learners: int, seed: int, folder: Path
) -> tuple[list[Restart], dict[str, Any]]:
    """Makes the restarts; returns them and the findings of the histories."""
    with soak.world(folder, seed, 1e6, learners) as world:
        begun = settle(world, time.monotonic(), range(learners))
        if begun.whole is None:
            raise TimeoutError(f"learners {begun.missing} did not begin")
        restarts = [restart(world) for _ in range(times)]
    found = history.read(folder)
    verdict = history.check(found, world.events, soaked.UNITS)
    seconds = [r.whole - r.begin for r in restarts if r.whole is not None]
    return restarts, {
        "restarts": len(restarts),
        "learners killed and started again": len(found) - learners,
        "never got in": sum(len(r.missing) for r in restarts),
        "averages before any weights were taken": verdict.untrained,
        "averages of weights of two trainings": verdict.of_two_origins,
        "lanes broken": sum(r.broken for r in restarts),
        "averages at one end, explained": verdict.one_sided,
        "of these by a connection that broke without a fault of ours": verdict.of_lost,
        "findings that no fault explains": len(verdict.unexplained),
        "learners that ended in an error": len(soaked.trouble(folder)),
        "seconds until all knew of all, median": sorted(seconds)[len(seconds) // 2],
        "seconds until all knew of all, largest": max(seconds),
        "series": {"unexplained": verdict.unexplained[:20]},
    }


def restart(world: World) -> Restart:
    """Kills the rendezvous and some learners, and brings all of them back."""
    dice, spared = world.dice, range(SPARED + 1, world.first.num_learners)
    victims = dice.sample(spared, dice.randint(1, min(2, len(spared))))
    back_s = dice.uniform(*KILLED_S) + dice.uniform(*BACK_S)
    world.kill_rendezvous()
    world.later(back_s, world.start_rendezvous)
    last = back_s
    for victim in victims:
        world.later(dice.uniform(*KILLED_S), lambda v=victim: world.crowd.kill(v))
        begins_s = max(KILLED_S[1], back_s + dice.uniform(*BEGINS_S))
        world.later(begins_s, lambda v=victim: world.crowd.start(v))
        last = max(last, begins_s)
    begin = time.monotonic()
    world.note("restart of the rendezvous", victims, last, lambda: None)
    wait(world, begin + last)
    found = settle(world, begin + back_s, range(world.first.num_learners))
    return found._replace(broken=0 if found.missing else broken_lanes(world))


def wait(world: World, until: float) -> None:
    while time.monotonic() < until:
        world.pass_time()


def settle(world: World, begin: float, learners: Sequence[int]) -> Restart:
    """Waits until all learners have reported, at a step, that they know of all."""
    missing = list(learners)
    while missing and time.monotonic() < begin + GIVEN_UP_S:
        world.pass_time()
        missing = [one for one in missing if not _knows_all(world, one, begin)]
    return Restart(begin, None if missing else time.monotonic(), missing)


def _knows_all(world: World, learner: int, begin: float) -> bool:
    last = step_journal.last(world.first.folder, learner)
    if last is None or last.time < begin:
        return False
    return last.members == world.first.num_learners


def broken_lanes(world: World) -> int:
    """The neighbours on the ring that do not exchange although all are in."""
    begin = time.monotonic()
    broken = 1
    while broken and time.monotonic() < begin + LANES_S:
        wait(world, time.monotonic() + LOOK_S)
        broken = _strangers(world, begin)
    return broken


def _strangers(world: World, begin: float) -> int:
    """The neighbours that have not exchanged since a time."""
    met, present = set[tuple[int, int]](), set[int]()
    for learner in range(world.first.num_learners):
        records = history.tail(world.first.folder, learner)
        last = next((r for r in reversed(records) if isinstance(r, Step)), None)
        if last is not None:
            present.add(last.member)
            new = (r for r in records if isinstance(r, Average) and r.time > begin)
            met |= {(last.member, average.member) for average in new}
    ring = sorted(present)
    pairs = zip(ring, [*ring[1:], *ring[:1]], strict=True)
    return sum((a, b) not in met and (b, a) not in met for a, b in pairs)
