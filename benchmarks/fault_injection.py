"""Faults among learners that train, drawn from a seed, and what undoes them.

They are killed, alone and two at once, stopped for shorter and for longer than the
others wait, told to end, filled with NaN, and their rendezvous is killed; each comes
back after a while. One of them is spared.
"""

import heapq
import itertools
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks import killable, step_journal
from benchmarks.killable import Killable
from benchmarks.killed_methods import start_rendezvous

SPARED = 0
CALM_S = (5.0, 13.0)
SHORT_S, LONG_S, RENDEZVOUS_S, LEAVING_S = 1.0, 6.0, 3.0, 8.0
ABSENT_S = (2.0, 12.0)
FEWEST_STEPS = 30  # of a life that may suffer
FALL_ILL = signal.SIGUSR1


class Event(NamedTuple):
    """A fault.

    Attributes:
        kind: Name of the function that brings it about.
        learners: Whom it met.
        begin: On the machine's monotonic clock.
        end: When it was undone.
    """

    kind: str
    learners: tuple[int, ...]
    begin: float
    end: float


class World:
    """The learners, their rendezvous, and what is to be undone, by time.

    Args:
        first: A learner as it is at the beginning.
        seed: Of all that happens.
        live: What a learner's process does.
    """

    def __init__(
        self, first: Killable, seed: int, live: Callable[[Killable], None]
    ) -> None:
        self.first, self.dice = first, random.Random(seed)
        self.rendezvous = start_rendezvous(first.port)
        self.crowd = killable.Crowd(live, first)
        self.events: list[Event] = []
        self.memory: list[list[float]] = [[]]
        self.late = 0
        self._busy = set[int]()
        self._cures: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def well(self) -> list[int]:
        """Those who train and are not suffering from anything."""
        alive = set(self.crowd.alive()) - self._busy - {SPARED}
        lives = {
            number: step_journal.read(self.first.folder, number) for number in alive
        }
        return sorted(
            n for n, own in lives.items() if own and len(own[-1]) >= FEWEST_STEPS
        )

    def note(
        self, kind: str, learners: Sequence[int], seconds: float, cure: Callable
    ) -> None:
        """A fault has begun, and is undone after so many seconds."""
        now = time.monotonic()
        self.events.append(Event(kind, tuple(learners), now, now + seconds))
        self._busy.update(learners)

        def undo() -> None:
            cure()
            self._busy.difference_update(learners)

        heapq.heappush(self._cures, (now + seconds, next(self._order), undo))

    def run(self, until: float) -> None:
        """Faults until then, in a while drawn after each; then what is left undone."""
        due = time.monotonic() + 2 * CALM_S[1]
        while (now := time.monotonic()) < until or self._cures:
            if now >= due and now < until:
                strike(self)
                due = now + self.dice.uniform(*CALM_S)
            while self._cures and now >= self._cures[0][0]:
                heapq.heappop(self._cures)[2]()
            self._look_at_the_rendezvous()
            time.sleep(0.05)

    def _look_at_the_rendezvous(self) -> None:
        if self.rendezvous.poll() is None:
            self.memory[-1].append(step_journal.memory_of(str(self.rendezvous.pid)))

    def close(self) -> None:
        """Ends all processes."""
        self.crowd.kill_all()
        self.rendezvous.kill()
        self.rendezvous.wait()


def strike(world: World) -> None:
    """One fault, if anybody is there to suffer it."""
    kinds = [kind for kind, weight in FAULTS.items() for _ in range(weight)]
    fault = world.dice.choice(kinds)
    if world.well():
        fault(world)


def kill(world: World) -> None:
    """One is killed."""
    kill_some(world, 1)


def kill_two(world: World) -> None:
    """Two are killed at once."""
    kill_some(world, 2)


def kill_some(world: World, num: int) -> None:
    """And come back as new processes."""
    well = world.well()
    victims = world.dice.sample(well, min(num, len(well)))
    kind = "kill" if len(victims) == 1 else "kill_two"
    seconds = world.dice.uniform(*ABSENT_S)
    # Noted first: neighbours know of the first one before the second is dead.
    world.note(kind, victims, seconds, lambda: start_all(world, victims))
    for victim in victims:
        world.crowd.kill(victim)


def start_all(world: World, victims: Sequence[int]) -> None:
    for victim in victims:
        world.crowd.start(victim)


def stop_short(world: World) -> None:
    """One is stopped for less than the others wait."""
    stop(world, "stop_short", SHORT_S)


def stop_long(world: World) -> None:
    """One is stopped for longer than the others wait."""
    stop(world, "stop_long", LONG_S)


def stop(world: World, kind: str, seconds: float) -> None:
    """And goes on."""
    victim = world.dice.choice(world.well())
    world.crowd.signal(victim, signal.SIGSTOP)
    go_on = signal.SIGCONT
    world.note(kind, [victim], seconds, lambda: world.crowd.signal(victim, go_on))


def terminate(world: World) -> None:
    """One is told to end, does so, and comes back."""
    victim = world.dice.choice(world.well())
    world.crowd.signal(victim, signal.SIGTERM)

    def come_back() -> None:
        world.late += victim in world.crowd.alive()
        world.crowd.kill(victim)
        world.crowd.start(victim)

    world.note("terminate", [victim], LEAVING_S, come_back)


def fall_ill(world: World) -> None:
    """The weights of one become NaN."""
    victim = world.dice.choice(world.well())
    world.crowd.signal(victim, FALL_ILL)
    world.note("fall_ill", [victim], LONG_S, lambda: None)


def kill_rendezvous(world: World) -> None:
    """It comes back empty."""
    world.rendezvous.kill()
    world.rendezvous.wait()

    def come_back() -> None:
        world.rendezvous = start_rendezvous(world.first.port)
        world.memory.append([])

    world.note("kill_rendezvous", [], RENDEZVOUS_S, come_back)


# How often each comes, in proportion.
FAULTS: dict[Callable[[World], None], int] = {
    kill: 12,
    kill_two: 2,
    stop_short: 2,
    stop_long: 2,
    terminate: 2,
    fall_ill: 2,
    kill_rendezvous: 1,
}
