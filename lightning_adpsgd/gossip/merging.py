"""Merging what exchanges have changed: alone at once, in a node together and later."""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from lightning_adpsgd.gossip.account import Account
from lightning_adpsgd.mixing.super_learner import Node, ShardMerge, Votes
from lightning_adpsgd.weights.replica import Replica


class Merging:
    """``w += d``; for the training thread.

    Args:
        vectors: w, whole, of real numbers.
        replica: x and d of this learner's shards.
        node: The learners of this super-learner.
        timeout: For each wait of theirs for one another.
        account: Merges are counted there.
    """

    def __init__(
        self,
        vectors: Sequence[Tensor],
        replica: Replica,
        node: Node,
        timeout: timedelta,
        account: Account,
    ) -> None:
        self._replica, self._account = replica, account
        self._together = (
            ShardMerge(vectors, replica, node, timeout) if node.size > 1 else None
        )

    @property
    def seconds(self) -> float:
        """Time that the training thread waited for the other learners of the node."""
        return 0.0 if self._together is None else self._together.seconds

    @property
    def agreed(self) -> Votes:
        """What all learners of a node do at this step, as any of them has voted."""
        return Votes() if self._together is None else self._together.agreed

    @torch.no_grad()
    def merge(self, votes: Votes) -> float:
        """Merges what is there, at a step boundary, and waits for no exchange.

        Args:
            votes: Of this learner, where it has others in its node.

        Returns:
            Seconds that it took; 0 where nothing was merged.
        """
        begin = time.perf_counter()
        if self._together is None:
            has_merged = self._replica.merge()
        else:
            # All learners of the node must merge the same change at the same step, so
            # it is gathered while the next step computes, and merged at its end.
            has_merged = self._together.finish()
            # What was voted for twice is done once.
            recover = votes.recover and not self._together.agreed.recover
            self._together.begin(votes._replace(recover=recover))
        self._count()
        return time.perf_counter() - begin if has_merged else 0.0

    @torch.no_grad()
    def merge_all(self) -> None:
        """Merges all that was averaged; no exchange is under way."""
        if self._together is None:
            self._replica.merge_all()
        else:
            self._together.finish()
            self._together.begin()
            self._together.finish()
        self._count()

    def finish(self) -> None:
        """Ends a merge that the learners of a node have begun together."""
        if self._together is not None:
            self._together.finish()

    def begin_anew(self) -> None:
        """Before other weights come: nothing is under way, and nothing is agreed on."""
        if self._together is not None:
            self._together.finish()
            self._together.agreed = Votes()

    def stop(self, seconds: float) -> None:
        """Ends the thread that gathers, or leaves it behind after that long."""
        if self._together is not None:
            self._together.stop(seconds)

    def _count(self) -> None:
        self._account.merged(steps_late=0 if self._together is None else 1)
