"""The columns of the race: how fast links are, and what befalls one of the hosts."""

import random
from dataclasses import dataclass

from benchmarks.hosts import BURST
from benchmarks.racing.problems import WHOLE_BYTES, Problem

NUM_HOSTS = 4
TIMES_SLOWER = 5
SLOW_HOST = NUM_HOSTS - 1
SMALLEST_BURST = 32_000


@dataclass(frozen=True)
class Column:
    """Circumstances.

    Args:
        title: Names the links of a model of 34 MB. A smaller model has slower ones, so
            that an exchange takes as many steps.
        bits_per_s: Of that link.
        has_slow_host: Whether one host takes five times as long for a step.
        kills: Whether one host is killed half-way.
    """

    title: str
    bits_per_s: float
    has_slow_host: bool = False
    kills: bool = False

    def rate(self, problem: Problem) -> str:
        """Of the links that are emulated, as `tc` writes it."""
        return f"{self._scale(problem) * self.bits_per_s / 1e3:.0f}kbit"

    def burst(self, problem: Problem) -> int:
        """Bytes that a link lets pass at once."""
        return max(SMALLEST_BURST, round(self._scale(problem) * BURST))

    @property
    def times_slower(self) -> tuple[int, ...]:
        """The length of each host's steps, in nominal steps."""
        slow = SLOW_HOST if self.has_slow_host else None
        return tuple(TIMES_SLOWER if n == slow else 1 for n in range(NUM_HOSTS))

    def victim(self, seed: int) -> int | None:
        """The host that is killed; never the first, where jobs meet."""
        return random.Random(seed).randrange(1, NUM_HOSTS) if self.kills else None

    @property
    def share_of_samples(self) -> float:
        """That all hosts together can take, of four equal ones that live."""
        speeds = sum(1 / slower for slower in self.times_slower)
        return (speeds - 0.5 * self.kills) / NUM_HOSTS

    def _scale(self, problem: Problem) -> float:
        return problem.num_bytes / WHOLE_BYTES


FAST, SLOW, STRAGGLER, KILL = "fast", "slow", "straggler", "kill"
COLUMNS = {
    FAST: Column("1 Gbit/s", 1e9),
    SLOW: Column("200 Mbit/s", 2e8),
    STRAGGLER: Column("1 Gbit/s and one 5 times slower", 1e9, has_slow_host=True),
    KILL: Column("1 Gbit/s and one killed", 1e9, kills=True),
}
