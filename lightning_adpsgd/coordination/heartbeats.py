"""Signs of life of the learners of a job, for those that wait for others.

Each learner counts up in the store, from a thread that trains nothing. Who waits for
others reads the counts now and then. A wait for a learner that is slow, or that
evaluates for hours, has no limit; one for a learner that has died ends.
"""

import math
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

# A learner is lost if so many looks in a row find the same count. They are counted, and
# not timed, because this process may be stopped between two of them.
_LOOKS = 3
_SHORTEST_PERIOD_S = 2.0


class Heartbeats:
    """The signs of life of all learners, as one of them sees them.

    Args:
        timeout: time without a sign of life after which a learner is lost.

    Attributes:
        silence_s: the same in seconds, at least 6.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        self._store, self._rank = store, rank
        self._others = [one for one in range(world_size) if one != rank]
        self._period_s = max(timeout.total_seconds() / _LOOKS, _SHORTEST_PERIOD_S)
        self.silence_s = _LOOKS * self._period_s
        self._next_beat = self._next_look = 0.0
        self._last_call = -math.inf
        self._counts: dict[int, int] = {}
        self._same = dict.fromkeys(self._others, 0)

    def beat(self, store: Store) -> None:
        """Gives a sign of life, if one is due, over a connection; for one thread."""
        if (now := time.monotonic()) >= self._next_beat:
            store.add(_key(self._rank), 1)
            self._next_beat = now + self._period_s / 4

    def lost(self) -> list[int]:
        """The learners that have given no sign of life for so long; for one thread.

        A wait calls it often. It takes a round trip for each learner, so it begins to
        look only when a wait lasts.
        """
        if (now := time.monotonic()) - self._last_call > self._period_s:
            # Another wait than before, or this process was stopped.
            self._next_look = now + self._period_s
            self._same = dict.fromkeys(self._others, 0)
        if now >= self._next_look:
            self._next_look = now + self._period_s
            self._look()
        self._last_call = time.monotonic()
        return [one for one in self._others if self._same[one] >= _LOOKS]

    def _look(self) -> None:
        for one in self._others:
            count = self._store.add(_key(one), 0)
            same = count == self._counts.get(one)
            self._same[one] = self._same[one] + 1 if same else 0
            self._counts[one] = count


def _key(rank: int) -> str:
    return f"alive/{rank}"
