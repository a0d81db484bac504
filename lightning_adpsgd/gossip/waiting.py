"""The waits of the training thread for its peers, and warnings of silent peers."""

import logging
import time
from collections.abc import Callable
from datetime import timedelta

from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.gossip.peers import Peers, Threads, silence_s
from lightning_adpsgd.weights.replica import Replica

_log = logging.getLogger(__name__)
# How often a training thread that waits looks for silent peers.
_LOOK_S = 1.0


class Waiting:
    """The waits of one learner; for its training thread.

    Args:
        peers: peers whose silence this learner reports; None: it reports none.
        timeout: longest wait for a message.
        replica: weights, which know when one has landed.
    """

    def __init__(
        self,
        members: Members,
        threads: Threads,
        peers: Peers | None,
        timeout: timedelta,
        replica: Replica,
    ) -> None:
        self._members, self._threads, self._peers = members, threads, peers
        self._timeout, self._silent, self._replica = timeout, set[int](), replica

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for a condition that other threads bring about.

        Raises:
            RuntimeError: For twice the timeout it did not hold, and no message landed.
        """
        # A message that takes longer than one timeout has ended the job before.
        limit = 2 * self._timeout.total_seconds()
        begin = time.monotonic()
        while not self._threads.wait_for(condition, min(_LOOK_S, limit)):
            self.warn_of_silence()
            if time.monotonic() >= max(begin, self._replica.landed_at) + limit:
                raise RuntimeError(
                    f"super-learner {self._members.live_schedule.own} waited {limit:g} "
                    f"s for {what}; raise `timeout` if the network is that slow"
                )

    def warn_of_silence(self) -> None:
        """Warns once of each peer that is silent for longer than a live one ever is.

        The loss of a peer whose host is cut off is known only after the timeout.
        """
        if self._peers is None:
            return
        now, longest_s = time.monotonic(), 2 * silence_s(self._timeout)
        found = self._peers.awaited_since().items()
        silent = {peer for peer, since in found if now - since > longest_s}
        for peer in sorted(silent - self._silent):
            _log.warning(
                "nothing has come from super-learner %d for %.0f s: its host may be "
                "stopped or cut off. Training ends if nothing comes for %g s "
                "(`timeout`)",
                *(peer, longest_s, self._timeout.total_seconds()),
            )
        self._silent = silent
