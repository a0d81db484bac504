"""A learner whose weights went astray goes on from those of a peer, or ends."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor

from lightning_adpsgd.account import Account
from lightning_adpsgd.exchange import Pulled
from lightning_adpsgd.health import SickLearner
from lightning_adpsgd.replica import Replica
from lightning_adpsgd.threads import Threads
from lightning_adpsgd.transport import PeerLost

_log = logging.getLogger(__name__)


class Recovery:
    """Looks after one learner at its step boundaries; for the training thread.

    Args:
        index: Of the super-learner.
        replica: Its weights.
        account: Knows whether they are ill, and how often they were taken from a peer.
        threads: Whose error ends the search for a peer.
        pull: Asks a peer for its weights.
        max_reloads: How often; none: never, and it is left out by its peers.
        timeout: For which a peer is waited for.
        on_reload: Called after each.
    """

    def __init__(
        self,
        index: int,
        replica: Replica,
        account: Account,
        threads: Threads,
        pull: Callable[[int], "Future[Pulled]"],
        max_reloads: int | None,
        timeout: timedelta,
        on_reload: Callable[[], None],
    ) -> None:
        self._index, self._replica, self._account = index, replica, account
        self._threads, self._pull, self._timeout = threads, pull, timeout
        self._max_reloads, self._on_reload = max_reloads, on_reload

    def recover_if_ill(self) -> None:
        """Takes a peer's weights in the place of weights that went astray.

        Raises:
            SickLearner: That was done too often, or no peer has finite weights.
        """
        illness, limit = self._account.illness, self._max_reloads
        if illness is not None and limit is not None:
            self._recover(
                f"the weights of super-learner {self._index} {illness}", limit
            )

    def _recover(self, what: str, limit: int) -> None:
        step, done = self._replica.step, self._account.num_reloads
        if done == limit:
            raise SickLearner(
                f"{what} at its step {step}, after {done} reloads from its peers "
                f"(`max_reloads={limit}`): look at its data and its device, or lower "
                "the learning rate"
            )
        peer, values = self._healthy_weights(what)
        self._replica.put(values)
        self._account.reloaded()
        _log.warning(
            "%s at its step %d: it goes on from those of super-learner %d and with a "
            "fresh optimizer (reload %d of %d)",
            *(what, step, peer, done + 1, limit),
        )
        self._on_reload()

    def _healthy_weights(self, what: str) -> tuple[int, list[Tensor]]:
        """Of the first peer that has any; the one last heard of is asked first."""
        peers = self._account.peers_by_age()
        for peer in peers:
            with suppress(PeerLost, TimeoutError):
                pulled = self._pull(peer).result(self._timeout.total_seconds())
                if all(bool(torch.isfinite(value).all()) for value in pulled.values):
                    return peer, pulled.values
            self._threads.raise_if_failed()
        raise SickLearner(
            f"{what} at its step {self._replica.step}, and none of its peers {peers} "
            "has finite ones: training has diverged; lower the learning rate or "
            "lengthen its warm-up"
        )
