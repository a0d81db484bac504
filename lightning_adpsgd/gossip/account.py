"""The figures of one learner's exchanges: counters, and the age of each peer."""

import logging
import threading

from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.gossip.pairing import Pair
from lightning_adpsgd.gossip.protocol import Outcome
from lightning_adpsgd.gossip.quarantine import Quarantine
from lightning_adpsgd.mixing.statistics import Statistics, Tally
from lightning_adpsgd.weights.replica import Replica

_log = logging.getLogger(__name__)


class Account:
    """The counters of one learner; all threads write them under the engine's lock.

    `_refusing` alone changes without it: two threads may warn of a peer at once.

    Attributes:
        sends_few_bits: whether weights travelled in few bits in the last exchange.
    """

    def __init__(
        self,
        members: Members,
        replica: Replica,
        quarantine: Quarantine,
        state: threading.Condition,
    ) -> None:
        self._members, self._replica, self._state = members, replica, state
        self._quarantine = quarantine
        self._tally = Tally()
        self._first_steps = list[int]()  # of averages that await a merge
        self._begin = self._last_exchange_step = 0
        self._last_steps: dict[int, int] = {}
        self._refusing = set[int]()
        self.sends_few_bits = False

    def go_on_from(self, step: int) -> None:
        """Continues counting as if the last exchanges had been at this step."""
        with self._state:
            self._begin = self._last_exchange_step = step
            self._last_steps = dict.fromkeys(self._last_steps, step)
            # Their staleness is no longer known.
            self._first_steps.clear()

    def open(self, peer: int) -> None:
        """Starts to count the steps since the last exchange with a peer."""
        with self._state:
            self._last_steps[peer] = self._replica.step

    def close(self, peer: int) -> None:
        """Stops counting the steps since the last exchange with a peer."""
        with self._state:
            self._last_steps.pop(peer, None)

    def exchanged(self, peer: int, outcome: Outcome, section: int = 0) -> None:
        """Counts an exchange that has ended."""
        with self._state:
            self._count(outcome)
            # Otherwise it read the weights that a load of an earlier step replaced.
            if outcome.first_step <= self._replica.step:
                self._first_steps.append(outcome.first_step)
                self._quarantine.note(outcome, section)
            self._last_exchange_step = self._replica.step
            if peer in self._last_steps:
                self._last_steps[peer] = self._replica.step

    def warn_of(self, peer: int, outcome: Outcome) -> None:
        """Warns once of a peer whose weights are refused, until an exchange succeeds.

        The caller does not hold the lock, because a log may take long to write.
        """
        if outcome.averaged:
            self._refusing.discard(peer)
        elif not outcome.is_to_blame and peer not in self._refusing:
            self._refusing.add(peer)
            _log.warning(
                "super-learner %d ignores super-learner %d, whose weights are %s",
                self._members.live_schedule.own,
                peer,
                "far too large" if outcome.finite else "infinite or NaN",
            )

    def merged(self, steps_late: int, waits: bool = False) -> None:
        """Counts a merge of this staleness; if the lock is busy, waits or defers it."""
        if not self._first_steps or not self._state.acquire(blocking=waits):
            return
        try:
            self._tally.merged_all(self._first_steps, self._replica.step + steps_late)
        finally:
            self._state.release()

    def was_at_boundary(self, pair: Pair, waited: float, exposed: float) -> None:
        """Counts the seconds of a wait for a partner, and until training continued."""
        with self._state:
            self._tally.skipped += pair.partner is None
            self._tally.partner_seconds += waited
            self._tally.exposed_seconds += exposed

    @property
    def num_ended(self) -> int:
        """The number of ended exchanges, of any outcome; under the engine's lock."""
        return self._tally.exchanges + self._tally.refused

    @property
    def steps_alone(self) -> int:
        """The number of optimizer steps since the last exchange with any peer."""
        return self._replica.step - self._last_exchange_step

    @property
    def exchanges_per_step(self) -> float:
        """The number of exchanges per optimizer step since the start."""
        return self._tally.exchanges / max(1, self._replica.step - self._begin)

    def peers_by_age(self) -> list[int]:
        """The peers that are asked, those with the latest exchange first.

        Those whose own weights are refused come last.
        """
        with self._state:
            latest = sorted(self._last_steps, key=self._last_steps.__getitem__)[::-1]
            return sorted(latest, key=self._refusing.__contains__)

    def statistics(self, merge_seconds: float) -> Statistics:
        """The counters so far; `merge_seconds` were waited for in merges."""
        waited = self._replica.wait_seconds + merge_seconds
        with self._state:
            step, last_steps = self._replica.step, self._last_steps
            ages = {peer: step - last for peer, last in last_steps.items()}
            return self._tally.snapshot(
                exposed_seconds=self._tally.exposed_seconds + waited,
                peer_ages=ages,
                reloads=self._quarantine.num_reloads,
            )

    def _count(self, outcome: Outcome) -> None:
        self.sends_few_bits = outcome.few_bits
        self._tally.bytes_sent += outcome.bytes_sent
        self._tally.exchanges += outcome.averaged
        self._tally.refused += not outcome.averaged
        self._tally.far += not outcome.near
        self._tally.damaged += outcome.damaged
