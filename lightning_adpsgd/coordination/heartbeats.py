"""Signs of life of the learners of a job, for those that wait for others.

Each learner counts up in the store, from a thread that trains nothing. Who waits for
others reads the counts now and then. A wait for a learner that is slow, or that
evaluates for hours, has no limit; one for a learner that has died ends.
"""

import math
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

from lightning_adpsgd.coordination.silence import SilenceWatch

_SHORTEST_SILENCE_S, _LOOKS = 6.0, 5


class Heartbeats:
    """The signs of life of all learners, as one of them sees them.

    Args:
        timeout: time without a sign of life after which a learner is lost.

    Attributes:
        silence_s: the same in seconds, at least 6.
    """

    def __init__(self, rank: int, world_size: int, timeout: timedelta) -> None:
        self._rank = rank
        self._others = [one for one in range(world_size) if one != rank]
        self.silence_s = max(timeout.total_seconds(), _SHORTEST_SILENCE_S)
        self._period_s = self.silence_s / _LOOKS
        self._next_beat = self._next_look = 0.0
        self._last_call = -math.inf
        self._watch, self._lost = SilenceWatch[int](self.silence_s), list[int]()

    def beat(self, store: Store) -> None:
        """Gives a sign of life, if one is due, over a connection; for one thread."""
        if (now := time.monotonic()) >= self._next_beat:
            store.add(_key(self._rank), 1)
            self._next_beat = now + self._period_s / 2

    def lost(self, store: Store) -> list[int]:
        """The learners that have given no sign of life for so long; for one thread.

        A wait calls it often. It takes a round trip for each learner, so it begins to
        look only when a wait lasts.
        """
        if (now := time.monotonic()) - self._last_call > self._period_s:
            # Another wait than before, or this process was stopped.
            self._next_look, self._lost = now + self._period_s, []
        if now >= self._next_look:
            self._next_look = now + self._period_s
            counts = {one: store.add(_key(one), 0) for one in self._others}
            self._lost = self._watch.look(counts, now)
        self._last_call = time.monotonic()
        return self._lost


def _key(rank: int) -> str:
    return f"alive/{rank}"
