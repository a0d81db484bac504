"""The learners of one super-learner, and how they merge the same change at one step.

docs/concepts.md, "Inside a super-learner", says what they share. `ShardGather` shares
the changes of all shards while one step computes, and every learner merges them at the
end of that step. `Votes` travel with them, and all learners count them together.

If each learner holds only 1/N of the weights, `ShardMerge` merges its changes at once,
and only the votes are shared.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.coordination.failures import SuperLearnerBroken
from lightning_adpsgd.weights.replica import (
    CHUNK_ELEMENTS,
    Replica,
    as_real,
    averaging_dtype,
    in_chunks,
    runs_of_one_dtype,
)
from lightning_adpsgd.weights.sections import Section
from lightning_adpsgd.weights.streams import (
    Mark,
    Mirrored,
    mirrored,
    to_device,
    to_host,
    wait_for_stream,
)
from lightning_adpsgd.weights.worker import BackgroundWorker, InlineWorker

T = TypeVar("T")


class SuperLearnerGroup:
    """The learners of one super-learner, and which weights each of them exchanges.

    A collective raises `SuperLearnerBroken` if a learner does not join within its
    timeout.

    Args:
        group: process group that nothing else uses; None if there is one learner.
        holds_all: whether each learner holds all weights rather than its own shard.
        sections: for each learner, the sections that it exchanges of its vectors; None:
            its shard, with the learner in the same place of each other super-learner.
        replicated: learners that hold some of the same weights although none holds all,
            and the part of these weights that each exchanges.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        holds_all: bool = True,
        sections: Sequence[Sequence[Section]] | None = None,
        replicated: "SuperLearnerGroup | None" = None,
    ) -> None:
        self._group, self.holds_all, self._sections = group, holds_all, sections
        self._replicated = replicated
        self.index = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    @property
    def holders(self) -> "SuperLearnerGroup | None":
        """The learners that hold the weights which no single learner owns, if any."""
        return self if self.holds_all else self._replicated

    def own(self, vectors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Views of the parts that this learner exchanges, by section."""
        return self.exchanged_by(self.index, vectors)

    def exchanged_by(
        self, learner: int, vectors: Sequence[Tensor]
    ) -> list[list[Tensor]]:
        """Views of the parts of vectors that a learner exchanges, by section."""
        if self._sections is not None:
            real = [as_real(vector) for vector in vectors]
            return [one.views(real) for one in self._sections[learner]]
        if not self.holds_all:
            return [list(vectors)]
        return [self.shards(vectors, learner)]

    def shards(self, vectors: Sequence[Tensor], learner: int) -> list[Tensor]:
        """Views of the equal part of each vector that a learner exchanges."""
        return [vector.tensor_split(self.size)[learner] for vector in vectors]

    def agree(self, numbers: Sequence[int], timeout: timedelta) -> list[int]:
        """The largest of each number over the learners."""
        found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if self._group is not None:
            self._complete(timeout, dist.all_reduce, found, op=dist.ReduceOp.MAX)
        return found.tolist()

    def gather(self, part: Tensor, into: list[Tensor], timeout: timedelta) -> None:
        """Gathers a tensor from each learner."""
        if self._group is None:
            into[0].copy_(part)
        else:
            self._complete(timeout, dist.all_gather, into, part)

    def share(self, part: Tensor, owner: int, timeout: timedelta) -> None:
        """Broadcasts a tensor from its owner to all learners."""
        if self._group is not None:
            self._complete(timeout, dist.broadcast, part, group_src=owner)

    def _complete(
        self,
        timeout: timedelta,
        collective: Callable[..., dist.Work | None],
        *tensors: Tensor | list[Tensor],
        **options: Any,
    ) -> None:
        try:
            work = collective(*tensors, group=self._group, async_op=True, **options)
            assert work is not None
            work.wait(timeout)
        except RuntimeError as error:
            raise SuperLearnerBroken(
                f"a learner of this super-learner did not answer within {timeout}, or "
                f"is lost: {error}. Check whether all its processes run; if one is "
                "only slow, raise `timeout`"
            ) from error


class Votes(NamedTuple):
    """One learner's votes for actions of its super-learner at a step boundary.

    Attributes:
        recover: whether to reload a peer's weights, because its own have diverged.
        leave: whether to leave with a goodbye.
    """

    recover: bool = False
    leave: bool = False


_NOTHING = Votes()
_Changed = tuple[int, int]  # the number of a chunk, and the index of its owner


@torch.no_grad()
def gather_shards(
    vectors: Sequence[Tensor], group: SuperLearnerGroup, timeout: timedelta
) -> None:
    """Sends exchanged weights from their owners to all learners that hold them."""
    if (holders := group.holders) is None or holders.size == 1:
        return
    vectors = [as_real(vector) for vector in vectors]
    for owner in range(holders.size):
        sections = holders.exchanged_by(owner, vectors)
        for run in runs_of_one_dtype(chain.from_iterable(sections)):
            for pieces in in_chunks(run, CHUNK_ELEMENTS):
                _share(pieces, owner, holders, timeout)


def _share(
    pieces: Sequence[Tensor], owner: int, holders: SuperLearnerGroup, timeout: timedelta
) -> None:
    packed = torch.cat([*pieces]).cpu()
    holders.share(packed, owner, timeout)
    if owner != holders.index:
        parts = packed.split([len(piece) for piece in pieces])
        for piece, values in zip(pieces, parts, strict=True):
            piece.copy_(values)


class MergeTogether(ABC, Generic[T]):
    """How a super-learner merges, ``w += d``, and what its learners share for that.

    All methods belong to the training thread. The collectives of the super-learner run
    in a thread of their own, in the same order in all its learners. They are Gloo's, on
    the host: a second communicator of NCCL beside that of the gradients may deadlock.

    Args:
        vectors: w, all real vectors that this learner holds.
        replica: x and d of this learner's shards.
        worker: thread for the collectives; None: a new thread.

    Attributes:
        steps_late: number of steps from taking a change to merging it.
        seconds: seconds for which the training thread waited for the collectives.
        agreed: any learner's votes when the last finished merge began; equal in all.
    """

    steps_late: int

    def __init__(
        self,
        vectors: Sequence[Tensor],
        replica: Replica,
        group: SuperLearnerGroup,
        timeout: timedelta,
        worker: BackgroundWorker | InlineWorker | None = None,
    ) -> None:
        self._vectors, self._replica = vectors, replica
        self._group, self._timeout = group, timeout
        self.seconds, self.agreed = 0.0, _NOTHING
        self._worker = worker or BackgroundWorker("adpsgd-group", replica.device)
        self._sharing: Future[T] | None = None

    @abstractmethod
    def begin(self, votes: Votes = _NOTHING) -> None:
        """Starts to share changes and votes."""

    @abstractmethod
    def finish(self) -> bool:
        """Waits for what `begin` started, and merges; returns whether it changed w."""

    @torch.no_grad()
    def merge(self, votes: Votes) -> bool:
        """Merges what is there, waiting for no exchange; returns whether any was."""
        has_merged = self.finish()
        # The action that this merge has agreed on must not be voted for again.
        self.begin(votes._replace(recover=votes.recover and not self.agreed.recover))
        return has_merged

    @torch.no_grad()
    def merge_all(self, votes: Votes = _NOTHING) -> None:
        """Merges all changes in all learners; no exchange may be under way."""
        self.finish()
        self.begin(votes)
        self.finish()

    def begin_anew(self) -> None:
        """Finishes what is under way and drops votes, before other weights come."""
        self.finish()
        self.agreed = _NOTHING

    def stop(self, seconds: float) -> None:
        """Ends the thread, or abandons it after `seconds`."""
        self._worker.stop(seconds)

    def _shared(self) -> T | None:
        """The result of `begin`; None if it was not called."""
        if self._sharing is None:
            return None
        begin = time.perf_counter()
        shared = self._sharing.result()
        self.seconds += time.perf_counter() - begin
        self._sharing = None
        return shared


class MergeAlone(MergeTogether[None]):
    """Merges at once, in a super-learner of one."""

    steps_late = 0

    @override
    def begin(self, votes: Votes = _NOTHING) -> None:
        self.agreed = votes

    @override
    def finish(self) -> bool:
        return False

    @override
    @torch.no_grad()
    def merge(self, votes: Votes) -> bool:
        self.agreed = votes
        return self._replica.merge()

    @override
    @torch.no_grad()
    def merge_all(self, votes: Votes = _NOTHING) -> None:
        self.agreed = votes
        self._replica.merge_all()


class ShardGather(MergeTogether[tuple[list[_Changed], Votes]]):
    """Takes the changes of shards, and merges them later in all learners.

    The arguments are as for `MergeTogether`; the vectors are whole.
    """

    steps_late = 1

    def __init__(
        self,
        vectors: Sequence[Tensor],
        replica: Replica,
        group: SuperLearnerGroup,
        timeout: timedelta,
        worker: BackgroundWorker | InlineWorker | None = None,
    ) -> None:
        super().__init__(vectors, replica, group, timeout, worker)
        self._taken, self._arrived = Mark(replica.device), Mark(replica.device)
        of_shards = (
            [
                chunk
                for section in group.exchanged_by(n, vectors)
                for view in section
                for chunk in view.split(replica.chunk_elements)
            ]
            for n in range(group.size)
        )
        # For each learner and chunk of its shard: the weights, and its changes of them.
        self._weights = list(of_shards)
        self._changes = [[*map(_zeros_like, chunks)] for chunks in self._weights]

    @override
    def begin(self, votes: Votes = _NOTHING) -> None:
        """Takes d of the changed chunks, and starts to share it."""
        mine = self._changes[self._group.index]
        taken = self._replica.take([change.here for change in mine])
        self._taken.set()
        self._sharing = self._worker.submit(lambda: self._share_all(taken, votes))

    @override
    def finish(self) -> bool:
        if (shared := self._shared()) is None:
            return False
        changed, self.agreed = shared
        self._arrived.follow()
        for number, owner in changed:
            self._add(number, owner)
        return bool(changed)

    def _share_all(
        self, taken: list[int], votes: Votes
    ) -> tuple[list[_Changed], Votes]:
        size, num_votes = self._group.size, len(votes)
        flags = [0] * (max(map(len, self._weights)) * size)
        for number in taken:
            flags[number * size + self._group.index] = 1
        agreed = self._group.agree([*votes, *flags], self._timeout)
        # What came before leaves the host's memory before the network writes there.
        wait_for_stream(self._replica.device)
        self._taken.follow()
        flagged = (place for place, flag in enumerate(agreed[num_votes:]) if flag)
        changed = [divmod(place, size) for place in flagged]
        for number, owner in changed:
            self._share(self._changes[owner][number], owner)
        self._arrived.set()
        return changed, Votes(*map(bool, agreed[:num_votes]))

    def _share(self, change: Mirrored, owner: int) -> None:
        if owner == self._group.index:
            to_host(change.here, change.host)
        self._group.share(change.host, owner, self._timeout)
        if owner != self._group.index:
            to_device(change.host, change.here)

    def _add(self, number: int, owner: int) -> None:
        change = self._changes[owner][number].here
        if owner == self._group.index:
            self._replica.merge_taken(number, change)
            change.zero_()
        else:
            self._weights[owner][number].add_(change)


class ShardMerge(MergeTogether[Votes]):
    """Merges the changes of a learner's shards, and counts all votes.

    A learner that holds no other shards merges its own at once, and the next forward
    gathers them. If several learners hold a weight, the others copy what its owner
    has merged before they continue, so that their copies stay equal.
    """

    steps_late = 0

    @override
    def begin(self, votes: Votes = _NOTHING) -> None:
        self._sharing = self._worker.submit(lambda: self._count(votes))

    @override
    def finish(self) -> bool:
        self.agreed = self._shared() or self.agreed
        has_merged = self._replica.merge()
        self._give_replicated(has_merged)
        return has_merged

    @override
    def merge_all(self, votes: Votes = _NOTHING) -> None:
        super().merge_all(votes)
        self._replica.merge_all()
        self._give_replicated(True)

    def _give_replicated(self, has_merged: bool) -> None:
        if (holders := self._group.holders) is None:
            return
        begin = time.perf_counter()
        (any_has,) = holders.agree([has_merged], self._timeout)
        if any_has:
            gather_shards(self._vectors, self._group, self._timeout)
        self.seconds += time.perf_counter() - begin

    def _count(self, votes: Votes) -> Votes:
        return Votes(*map(bool, self._group.agree(votes, self._timeout)))


def merge_together(
    vectors: Sequence[Tensor],
    replica: Replica,
    group: SuperLearnerGroup,
    timeout: timedelta,
) -> MergeAlone | ShardGather | ShardMerge:
    """Chooses how the learners of a super-learner merge; a single one merges alone."""
    together = ShardGather if group.holds_all else ShardMerge
    merging = MergeAlone if group.size == 1 else together
    return merging(vectors, replica, group, timeout)


def _zeros_like(chunk: Tensor) -> Mirrored:
    return mirrored(torch.zeros_like(chunk, dtype=averaging_dtype(chunk.dtype)))
