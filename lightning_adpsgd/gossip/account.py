"""What the exchanges of one learner have come to: counters, ages, whose health."""

import logging
import threading

from lightning_adpsgd.gossip.exchange import Outcome
from lightning_adpsgd.gossip.health import Health
from lightning_adpsgd.mixing.statistics import Statistics, Tally
from lightning_adpsgd.weights.replica import Replica

_log = logging.getLogger(__name__)


class Account:
    """Written by all threads of a learner, under the engine's lock.

    Args:
        index: Of the super-learner.
        replica: Tells the step, and for how long the training thread waited for it.
        state: The engine's lock.
    """

    def __init__(
        self, index: int, replica: Replica, state: threading.Condition
    ) -> None:
        self._index, self._replica, self._state = index, replica, state
        self._tally, self._ages = Tally(), list[int]()
        self._last_exchange_step = 0
        self._last_steps: dict[int, int] = {}
        self._health, self._refusing = Health(), set[int]()

    def go_on_from(self, step: int) -> None:
        """Counts on as if the last exchange had been at this step."""
        self._last_exchange_step = step

    def open(self, peer: int) -> None:
        """Counts the steps since the last exchange with a peer, from here on."""
        with self._state:
            self._last_steps[peer] = self._replica.step

    def close(self, peer: int) -> None:
        """Counts them no more."""
        with self._state:
            self._last_steps.pop(peer, None)

    def exchanged(self, peer: int, outcome: Outcome) -> None:
        """Counts an exchange that has ended."""
        with self._state:
            self._count(outcome)
            self._health.note(outcome)
            self._warn_once(peer, outcome)
            self._last_exchange_step = self._replica.step
            if peer in self._last_steps:
                self._last_steps[peer] = self._replica.step

    def merged(self, steps_late: int) -> None:
        """Counts a merge, so many steps after what it took; the next one, if busy."""
        if not self._ages or not self._state.acquire(blocking=False):
            return
        try:
            for step in self._ages:
                self._tally.merged(self._replica.step - step + steps_late)
            self._tally.merges += 1
            self._ages.clear()
        finally:
            self._state.release()

    def reloaded(self) -> None:
        """Counts weights taken from a peer, with which the learner is healthy again."""
        with self._state:
            self._health = Health(self._replica.step)
            self._tally.reloads += 1

    @property
    def illness(self) -> str | None:
        """What is wrong with the own weights; none as long as nothing is."""
        return self._health.illness

    @property
    def num_reloads(self) -> int:
        """How often weights were taken from a peer."""
        return self._tally.reloads

    @property
    def steps_alone(self) -> int:
        """Optimizer steps since the last exchange with anybody."""
        return self._replica.step - self._last_exchange_step

    def peers_by_age(self) -> list[int]:
        """All that are asked; first the one last heard of."""
        with self._state:
            return sorted(self._last_steps, key=self._last_steps.__getitem__)[::-1]

    def statistics(self, merge_seconds: float) -> Statistics:
        """What was done so far.

        Args:
            merge_seconds: For which the training thread waited for others to merge.
        """
        waited = self._replica.wait_seconds + merge_seconds
        with self._state:
            exposed = self._tally.exposed_seconds + waited
            step, last_steps = self._replica.step, self._last_steps
            ages = {peer: step - last for peer, last in last_steps.items()}
            return self._tally.snapshot()._replace(
                exposed_seconds=exposed, peer_ages=ages
            )

    def _count(self, outcome: Outcome) -> None:
        self._tally.bytes_sent += outcome.bytes_sent
        self._tally.exchanges += outcome.merged
        self._tally.refused += not outcome.merged
        self._tally.far += not outcome.near
        self._tally.damaged += outcome.damaged
        self._ages.append(outcome.first_step)

    def _warn_once(self, peer: int, outcome: Outcome) -> None:
        if outcome.merged:
            self._refusing.discard(peer)
        elif not outcome.mine and peer not in self._refusing:
            self._refusing.add(peer)
            _log.warning(
                "super-learner %d leaves out what super-learner %d sends: its weights "
                "are %s",
                self._index,
                peer,
                "far too large" if outcome.finite else "infinite or not a number",
            )
