"""A learner whose weights went astray goes on from those of a peer, or ends.

The learners of one super-learner have the same weights: what is wrong with them one may
notice in its shard, and all recover at one step, each from the same peer's shard.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor

from lightning_adpsgd.gossip.account import Account
from lightning_adpsgd.gossip.exchange import Pulled
from lightning_adpsgd.gossip.merging import Merging
from lightning_adpsgd.gossip.threads import Threads
from lightning_adpsgd.mixing.sickness import SickLearner, once_too_often
from lightning_adpsgd.mixing.super_learner import Node, gather_shards
from lightning_adpsgd.transport.base import PeerLost
from lightning_adpsgd.weights.replica import Replica

_log = logging.getLogger(__name__)
_MOST_PEERS = 8


class Recovery:
    """Looks after one learner at its step boundaries; for the training thread.

    Args:
        index: Of the super-learner.
        vectors: Its weights, whole.
        node: Its learners.
        merging: Theirs.
        replica: This learner's shards.
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
        vectors: Sequence[Tensor],
        node: Node,
        merging: Merging,
        replica: Replica,
        account: Account,
        threads: Threads,
        pull: Callable[[int], "Future[Pulled]"],
        max_reloads: int | None,
        timeout: timedelta,
        on_reload: Callable[[], None],
    ) -> None:
        self._vectors, self._node, self._merging = vectors, node, merging
        self._index, self._replica, self._account = index, replica, account
        self._threads, self._pull, self._timeout = threads, pull, timeout
        self._max_reloads, self._on_reload = max_reloads, on_reload

    @property
    def is_wanted(self) -> bool:
        """Whether this learner finds its weights astray, and may take others."""
        return self._account.illness is not None and self._max_reloads is not None

    def recover_if_ill(self) -> None:
        """Takes a peer's weights in the place of weights that went astray.

        Raises:
            SickLearner: That was done too often, or no peer has finite weights; in all
                learners of the super-learner.
        """
        agreed = self._merging.agreed.recover if self._node.size > 1 else self.is_wanted
        if agreed and self._max_reloads is not None:
            illness = self._account.illness or "were found astray by another learner"
            what = f"the weights of super-learner {self._index} {illness}"
            self._recover(what, self._max_reloads)

    def _recover(self, what: str, limit: int) -> None:
        step, done = self._replica.step, self._account.num_reloads
        if done == limit:
            raise once_too_often(f"{what} at its step {step}", limit)
        # Nothing else of the node is under way while they look for a peer together.
        self._merging.begin_anew()
        peer, values = self._healthy_weights(what)
        self._replica.put(values)
        gather_shards(self._vectors, self._node, self._timeout)
        self._account.reloaded()
        if self._node.index == 0:
            _log.warning(
                "%s at its step %d: it goes on from those of super-learner %d and with "
                "a fresh optimizer (reload %d of %d)",
                *(what, step, peer, done + 1, limit),
            )
        self._on_reload()

    def _healthy_weights(self, what: str) -> tuple[int, list[Tensor]]:
        """Of the first peer that has any; the one last heard of is asked first."""
        peers = self._peers_of_all()
        for peer in peers:
            values = self._finite_weights_of(peer)
            misses = torch.tensor([values is None], dtype=torch.uint8)
            self._node.agree(misses, self._timeout)
            if values is not None and not misses.any():
                return peer, values
            self._threads.raise_if_failed()
        raise SickLearner(
            f"{what} at its step {self._replica.step}, and none of its peers {peers} "
            "has finite ones: training has diverged; lower the learning rate or "
            "lengthen its warm-up"
        )

    def _peers_of_all(self) -> list[int]:
        """Whom the first learner of the super-learner would ask, in its order."""
        peers = self._account.peers_by_age()[:_MOST_PEERS]
        mine = torch.tensor([len(peers), *peers], dtype=torch.int64)
        mine = torch.nn.functional.pad(mine, (0, _MOST_PEERS - len(peers)))
        rows = [torch.zeros_like(mine) for _ in range(self._node.size)]
        self._node.gather(mine, rows, self._timeout)
        number, *chosen = rows[0].tolist()
        return chosen[:number]

    def _finite_weights_of(self, peer: int) -> list[Tensor] | None:
        # The others wait for twice as long to hear what came of it.
        limit = self._timeout.total_seconds() / 2
        with suppress(PeerLost, TimeoutError):
            values = self._pull(peer).result(limit).values
            if all(bool(torch.isfinite(value).all()) for value in values):
                return values
        return None
