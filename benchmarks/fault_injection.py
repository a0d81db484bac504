"""Faults of learners in training, drawn from a seed, and their repair.

Learners are killed, alone or two at once, stopped for shorter and for longer than the
others wait, told to end, filled with NaN, or given a slow disk. If each has a host of
its own, some are cut off, one is muted, or a cable is unplugged and plugged in again.
The rendezvous is killed and comes back empty, at times just as a learner starts. Every
fault is undone after a while. One learner is spared.
"""

import heapq
import itertools
import random
import signal
import time
from collections.abc import Callable, Sequence

from benchmarks import killable, meeting_place, step_journal
from benchmarks.history import Fault
from benchmarks.hosts import Hosts
from benchmarks.killable import Killable

SPARED = 0
CALM_S = (5.0, 13.0)
SHORT_S, LONG_S, RENDEZVOUS_S, LEAVING_S = 1.0, 6.0, 3.0, 8.0
ABSENT_S = (2.0, 12.0)
PLUGGED_S, FLAPS = 0.7, 3
FEWEST_STEPS = 30  # of a life that may suffer
FALL_ILL, SLOW_DISK = signal.SIGUSR1, signal.SIGUSR2
HERE = "127.0.0.1"


class World:
    """The learners, their rendezvous, and the repairs that are due, by time.

    Args:
        first: A learner as it is at the beginning.
        seed: Seed of everything that happens.
        live: Program of a learner's process.
        hosts: One for each learner and one for the rendezvous; none: all on this one.
    """

    def __init__(
        self,
        first: Killable,
        seed: int,
        live: Callable[[Killable], None],
        hosts: Hosts | None = None,
    ) -> None:
        self.first, self.dice, self.hosts = first, random.Random(seed), hosts
        self.events: list[Fault] = []
        self.memory: list[list[float]] = []
        self.late = 0
        self._busy = set[int]()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.start_rendezvous()
        self.crowd = killable.Crowd(live, first)

    # --- the rendezvous

    @property
    def address(self) -> str:
        """The address of the rendezvous."""
        return HERE if self.hosts is None else self.hosts.addresses[-1]

    def start_rendezvous(self) -> None:
        """Starts an empty rendezvous."""
        host = self.first.num_learners
        self._rendezvous = meeting_place.start(
            self.address, self.first.port, self.hosts, host
        )
        self.memory.append([])

    def kill_rendezvous(self) -> None:
        """Kills the rendezvous, whose contents are lost."""
        meeting_place.end(self._rendezvous)

    # --- what happens, and when

    def well(self) -> list[int]:
        """The learners that train without a fault."""
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
        """Records a fault that begins now, and is undone after so many seconds."""
        now, of_rendezvous = time.monotonic(), "rendezvous" in kind
        fault = Fault(kind, tuple(learners), now, now + seconds, of_rendezvous)
        self.events.append(fault)
        self._busy.update(learners)

        def undo() -> None:
            cure()
            self._busy.difference_update(learners)

        self.later(seconds, undo)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedules an action after so many seconds."""
        due = time.monotonic() + seconds
        heapq.heappush(self._due, (due, next(self._order), action))

    def run(self, until: float) -> None:
        """Injects faults with random pauses until a time; then undoes the rest."""
        due = time.monotonic() + 2 * CALM_S[1]
        while (now := time.monotonic()) < until or self._due:
            if now >= due and now < until:
                strike(self)
                due = now + self.dice.uniform(*CALM_S)
            self.pass_time()

    def pass_time(self) -> None:
        """Runs the actions that are due; returns soon."""
        while self._due and time.monotonic() >= self._due[0][0]:
            heapq.heappop(self._due)[2]()
        if self._rendezvous.is_alive():
            process = str(self._rendezvous.pid)
            self.memory[-1].append(step_journal.memory_of(process))
        time.sleep(0.05)

    def close(self) -> None:
        """Ends all processes."""
        self.crowd.kill_all()
        self.kill_rendezvous()


def strike(world: World) -> None:
    """Injects one fault, if any learner is there to suffer it."""
    faults = FAULTS if world.hosts is None else {**FAULTS, **FAULTS_OF_LINKS}
    kinds = [kind for kind, weight in faults.items() for _ in range(weight)]
    fault = world.dice.choice(kinds)
    if world.well():
        fault(world)


# --- processes


def kill(world: World) -> None:
    """Kills one learner."""
    kill_some(world, 1)


def kill_two(world: World) -> None:
    """Kills two learners at once."""
    kill_some(world, 2)


def kill_some(world: World, num: int) -> None:
    """Kills some learners, which come back as new processes."""
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
    """Stops one learner for less than the others wait."""
    stop(world, "stop_short", SHORT_S)


def stop_long(world: World) -> None:
    """Stops one learner for longer than the others wait."""
    stop(world, "stop_long", LONG_S)


def stop(world: World, kind: str, seconds: float) -> None:
    """Stops one learner, which then continues."""
    victim = world.dice.choice(world.well())
    world.crowd.signal(victim, signal.SIGSTOP)
    go_on = signal.SIGCONT
    world.note(kind, [victim], seconds, lambda: world.crowd.signal(victim, go_on))


def terminate(world: World) -> None:
    """Tells one learner to end; it does, and comes back."""
    victim = world.dice.choice(world.well())
    world.crowd.signal(victim, signal.SIGTERM)

    def come_back() -> None:
        world.late += victim in world.crowd.alive()
        world.crowd.kill(victim)
        world.crowd.start(victim)

    world.note("terminate", [victim], LEAVING_S, come_back)


def fall_ill(world: World) -> None:
    """Makes the weights of one learner NaN."""
    tell(world, "fall_ill", FALL_ILL)


def slow_disk(world: World) -> None:
    """Makes the writes of one learner take seconds to reach the disk."""
    tell(world, "slow_disk", SLOW_DISK)


def tell(world: World, kind: str, which: signal.Signals) -> None:
    victim = world.dice.choice(world.well())
    world.crowd.signal(victim, which)
    world.note(kind, [victim], LONG_S, lambda: None)


# --- the rendezvous


def kill_rendezvous(world: World) -> None:
    """Kills the rendezvous, which comes back empty."""
    world.kill_rendezvous()
    world.note("kill_rendezvous", [], RENDEZVOUS_S, world.start_rendezvous)


def join_empty_rendezvous(world: World) -> None:
    """Kills rendezvous and learner; it comes back empty just as the learner begins."""
    victim = world.dice.choice(world.well())
    begins = RENDEZVOUS_S + world.dice.uniform(-0.5, 1.0)
    world.kill_rendezvous()
    world.later(RENDEZVOUS_S, world.start_rendezvous)
    restart = lambda: world.crowd.start(victim)  # noqa: E731
    world.note("join_empty_rendezvous", [victim], begins, restart)
    world.crowd.kill(victim)


# --- links


def part(world: World) -> None:
    """Cuts some off from the others and from the rendezvous, in both directions."""
    well, hosts = world.well(), _hosts(world)
    half = world.dice.sample(well, world.dice.randint(1, len(well)))
    hosts.part(half, True)
    world.note("part", half, LONG_S, lambda: hosts.part(half, False))


def mute(world: World) -> None:
    """Mutes one learner, which still hears all others."""
    victim, hosts = world.dice.choice(world.well()), _hosts(world)
    hosts.mute(victim, True)
    world.note("mute", [victim], LONG_S, lambda: hosts.mute(victim, False))


def flap(world: World) -> None:
    """Unplugs the cable of one learner and plugs it in again, several times."""
    victim, hosts = world.dice.choice(world.well()), _hosts(world)
    for turn in range(FLAPS):
        world.later(2 * turn * PLUGGED_S, lambda: hosts.plug(victim, False))
        world.later((2 * turn + 1) * PLUGGED_S, lambda: hosts.plug(victim, True))
    world.note("flap", [victim], 2 * FLAPS * PLUGGED_S, lambda: None)


def _hosts(world: World) -> Hosts:
    assert world.hosts is not None
    return world.hosts


# The relative frequency of each fault.
FAULTS: dict[Callable[[World], None], int] = {
    kill: 8,
    kill_two: 2,
    stop_short: 2,
    stop_long: 3,
    terminate: 3,
    fall_ill: 2,
    slow_disk: 2,
    kill_rendezvous: 2,
    join_empty_rendezvous: 3,
}
FAULTS_OF_LINKS: dict[Callable[[World], None], int] = {part: 3, mute: 3, flap: 3}
