"""The columns of the race: the speed of the links, and the fault of one host."""

from dataclasses import dataclass

from benchmarks.hosts import BURST
from benchmarks.racing.problems import WHOLE_BYTES, Problem

NUM_HOSTS = 4
"""And learners: each has a host, or two of them share one."""
TIMES_SLOWER = 5
STEPS_OF_SHARDS = 4
"""The nominal steps that a step takes where learners share hosts, because gathering
shards keeps the cores of this machine busy for long."""
SMALLEST_BURST = 32_000
SLOW_MOTION = 4
"""The times by which all is slower where hosts have cores of their own: steps, links
and the race. So what four hosts compute at once keeps two cores busy for a sixth of the
time, and a step takes as long whatever exchanges compute beside it."""


@dataclass(frozen=True)
class Column:
    """The circumstances of a column.

    Args:
        title: Names the links of a model of 34 MB. A smaller model has slower ones, so
            that an exchange takes as many steps.
        bits_per_s: Rate of that link.
        has_slow_host: Whether one host takes five times as long for a step.
        kills: Whether one host is killed half-way.
        per_host: Learners of a host; two of them hold a model in shards, and their
            steps are longer.
        delay_s: Seconds from one host to another.
        slow_motion: Times by which all of this is slower.
    """

    title: str
    bits_per_s: float
    has_slow_host: bool = False
    kills: bool = False
    per_host: int = 1
    delay_s: float = 0.0
    slow_motion: int = 1

    def rate(self, problem: Problem) -> str:
        """The rate of the emulated links, as `tc` writes it."""
        bits_per_s = self._scale(problem) * self.bits_per_s / self.slow_motion
        return f"{bits_per_s / 1e3:.0f}kbit"

    def burst(self, problem: Problem) -> int:
        """Bytes that a link lets pass at once."""
        return max(SMALLEST_BURST, round(self._scale(problem) * BURST))

    @property
    def times_slower(self) -> tuple[int, ...]:
        """The length of each learner's steps, in nominal steps."""
        slow = self.per_host if self.has_slow_host else 0
        slower = [1] * (NUM_HOSTS - slow) + [TIMES_SLOWER] * slow
        return tuple(self._usual * times for times in slower)

    def victim(self, seed: int) -> int | None:
        """The host that is killed: never the first, at which jobs meet."""
        return 1 + seed % (NUM_HOSTS - 1) if self.kills else None

    @property
    def share_of_samples(self) -> float:
        """The samples that all hosts can take, relative to four equal ones."""
        speeds = sum(self._usual / slower for slower in self.times_slower)
        return (speeds - 0.5 * self.kills) / NUM_HOSTS

    @property
    def is_sharded(self) -> bool:
        """Whether the learners of a host hold one model together."""
        return self.per_host > 1

    @property
    def _usual(self) -> int:
        return self.slow_motion * (STEPS_OF_SHARDS if self.is_sharded else 1)

    def _scale(self, problem: Problem) -> float:
        return problem.num_bytes / WHOLE_BYTES


def without_fault(name: str) -> str:
    """The column of equal hosts and fast links that is as slow in its motion."""
    return OWN_FAST if COLUMNS[name].slow_motion > 1 else FAST


FAST, SLOW, STRAGGLER, KILL = "fast", "slow", "straggler", "kill"
FAR = "far"
SHARDS, SHARDS_STRAGGLER = "shards", "shards_straggler"
OWN_FAST, OWN_SLOW, OWN_STRAGGLER = "own_fast", "own_slow", "own_straggler"
OWN = ", own cores"
COLUMNS = {
    FAST: Column("1 Gbit/s", 1e9),
    SLOW: Column("200 Mbit/s", 2e8),
    STRAGGLER: Column("1 Gbit/s and one 5 times slower", 1e9, has_slow_host=True),
    KILL: Column("1 Gbit/s and one killed", 1e9, kills=True),
    FAR: Column("200 Mbit/s and round trips of 100 ms", 2e8, delay_s=0.05),
    # As many steps to a model's transfer as at 1 Gbit/s above, since steps are longer.
    SHARDS: Column("shards, 250 Mbit/s", 2.5e8, per_host=2),
    SHARDS_STRAGGLER: Column(
        "shards, 250 Mbit/s and one pair 5 times slower", 2.5e8, True, per_host=2
    ),
    OWN_FAST: Column(f"1 Gbit/s{OWN}", 1e9, slow_motion=SLOW_MOTION),
    OWN_SLOW: Column(f"200 Mbit/s{OWN}", 2e8, slow_motion=SLOW_MOTION),
    OWN_STRAGGLER: Column(
        f"1 Gbit/s and one 5 times slower{OWN}", 1e9, True, slow_motion=SLOW_MOTION
    ),
}
