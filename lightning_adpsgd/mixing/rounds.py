"""One round of averaging among processes: one application of the mixing matrix.

On the host, a super-learner whose weights are not finite is left out of a round, and
goes on from the average of those which it would have averaged with.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_adpsgd.mixing.averages import average, keep_change
from lightning_adpsgd.mixing.sickness import healthy_shares, is_finite, once_too_often
from lightning_adpsgd.mixing.statistics import Statistics, Tally
from lightning_adpsgd.mixing.super_learner import Node
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.topology.topology import Part
from lightning_adpsgd.transport.base import (
    SYNCHRONOUS_LANE,
    Pending,
    Transport,
    one_behind,
)
from lightning_adpsgd.weights.flat import shard
from lightning_adpsgd.weights.replica import as_real, averaging_dtype
from lightning_adpsgd.weights.streams import Mark, host_memory, to_device, to_host

_log = logging.getLogger(__name__)


class Mixer(Protocol):
    """Applies rounds of a schedule to weights, in three moves."""

    tally: Tally
    device: torch.device
    round: int

    def statistics(self) -> Statistics:
        """What was done so far."""
        ...

    def take_snapshot(self) -> None:
        """Copies the weights as they are; what follows works on the copy."""

    def mix(self) -> None:
        """Computes ``sum_j T[j, i] w_j - w_i`` of the copy, for the next round."""

    def finish(self) -> None:
        """Adds the computed change to the weights, whatever they have become."""


class RoundMixer:
    """Applies one round of a schedule to vectors, together with all super-learners.

    Each learner of a super-learner mixes its shard; the shards are gathered inside the
    node. A round goes chunk by chunk: while one is averaged, the next one crosses.

    Weights on a GPU are mixed there if the transport takes tensors of a GPU, as NCCL
    does, and on the host otherwise. Then they come and go by way of one staging copy
    beside them, so that the training stream never waits for the bus.

    Args:
        vectors: The flat weights; read, and written by `finish`.
        transport: To the counterparts in the other super-learners.
        node: The learners of this super-learner, by the same means.
        schedule: The matrices.
        timeout: For each wait.
        chunk_elements: Elements per message.
        max_reloads: How often a super-learner whose weights are not finite may go on
            from the average of others; none: never, and it is left out.
        on_reload: Called by `finish` when it has done so.
    """

    def __init__(
        self,
        vectors: Sequence[Tensor],
        transport: Transport,
        node: Node,
        schedule: Schedule,
        timeout: timedelta,
        chunk_elements: int = 1 << 20,
        max_reloads: int | None = None,
        on_reload: Callable[[], None] = lambda: None,
    ) -> None:
        self._max_reloads, self._on_reload = max_reloads, on_reload
        self._replaced = False
        self._vectors = [as_real(vector) for vector in vectors]
        self._transport, self._node = transport, node
        self._schedule, self._timeout = schedule, timeout
        self._shards = [shard(v, node.index, node.size) for v in self._vectors]
        self.device = self._vectors[0].device if vectors else torch.device("cpu")
        self._where = self.device if transport.on_device else torch.device("cpu")
        self._snapshots = [self._place_for(part) for part in self._shards]
        self._mixed = [self._place_for(part) for part in self._shards]
        self._chunks = [
            _Chunk(*pair)
            for both in zip(self._snapshots, self._mixed, strict=True)
            for pair in zip(*(v.split(chunk_elements) for v in both), strict=True)
        ]
        alone = node.size == 1
        self._whole = self._mixed if alone else [*map(self._place_for, self._vectors)]
        self._staged = self._whole if self._where == self.device else self._stage()
        self._taken, self._mixed_mark = Mark(self.device), Mark(self.device)
        self._buffers: dict[tuple[torch.dtype, int, int], Tensor] = {}
        self.round = 0
        self._refused = torch.zeros((), dtype=torch.int64, device=self._where)
        self.tally = Tally()

    def take_snapshot(self) -> None:
        """Copies the weights as they are; what follows works on the copy."""
        for place, part in zip(self._first_places(), self._shards, strict=True):
            place.copy_(part)
        self._taken.set()

    @torch.no_grad()
    def mix(self) -> None:
        """Computes ``sum_j T[j, i] w_j - w_i`` of the snapshots, for this round.

        What it computes is there once the stream of the calling thread has come so far.
        """
        self._taken.follow()
        for place, snapshot in zip(self._first_places(), self._snapshots, strict=True):
            to_host(place, snapshot)
        part = self._schedule.part(self._transport.index, self.round)
        post = self._post_mean if self._schedule.is_mean(self.round) else self._post
        self.round += 1
        posted = (post(n, chunk, part) for n, chunk in enumerate(self._chunks))
        landed = [self._land(crossing, part) for crossing in one_behind(posted)]
        self.tally.exchanges += 1
        self._refused += torch.stack(landed).any() if landed else 0
        self._agree_on_replacing()
        self._gather()
        for change, staged in zip(self._whole, self._staged, strict=True):
            to_device(change, staged)
        self._mixed_mark.set()

    def finish(self) -> None:
        """Adds the computed change to the weights, whatever they have become.

        Raises:
            SickLearner: They were not finite, once too often.
        """
        self._mixed_mark.follow()
        if self._replaced:
            self._count_reload()
        for vector, change in zip(self._vectors, self._staged, strict=True):
            vector.add_(change)
        self.tally.merges += 1
        if self._replaced:
            self._replaced = False
            self._on_reload()

    def statistics(self) -> Statistics:
        """What was done so far; a GPU is awaited for that."""
        return self.tally.snapshot()._replace(refused=int(self._refused))

    def _first_places(self) -> list[Tensor]:
        """Where the weights are copied to, on their device, for each shard."""
        if self._staged is self._whole:
            return self._snapshots
        return [shard(v, self._node.index, self._node.size) for v in self._staged]

    def _post_mean(self, number: int, chunk: "_Chunk", part: Part) -> "_Crossing":
        chunk.mixed.copy_(chunk.snapshot)
        # A ring all-reduce passes each element on twice but for its own part.
        self.tally.bytes_sent += (
            2 * chunk.mixed.nbytes * (len(part.takes) - 1) // len(part.takes)
        )
        return _Crossing(chunk, {}, [self._transport.post_mean(chunk.mixed)])

    def _post(self, number: int, chunk: "_Chunk", part: Part) -> "_Crossing":
        me = self._transport.index
        sources = [j for j in part.takes if j != me]
        targets = [j for j in part.gives if j != me]
        incoming = {j: self._buffer(chunk, number % 2, j) for j in sources}
        outgoing = dict.fromkeys(targets, chunk.snapshot)
        pending = self._transport.post_all(SYNCHRONOUS_LANE, incoming, outgoing)
        self.tally.bytes_sent += chunk.snapshot.nbytes * len(targets)
        return _Crossing(chunk, incoming, pending)

    def _land(self, crossing: "_Crossing", part: Part) -> Tensor:
        """The change of one chunk; whether it was refused, as a tensor of one truth."""
        for pending in crossing.pending:
            pending.wait(self._timeout)
        chunk, me = crossing.chunk, self._transport.index
        if crossing.incoming or len(part.takes) == 1:
            rows = {**crossing.incoming, me: chunk.snapshot}
            average(rows, part.takes, chunk.mixed)
        # A GPU is not asked.
        if self._where.type == "cpu" and not is_finite(chunk.mixed):
            return self._land_without_the_sick(crossing, part)
        return keep_change(chunk.mixed, chunk.snapshot, self._schedule.gain)

    def _land_without_the_sick(self, crossing: "_Crossing", part: Part) -> Tensor:
        """The same where somebody's weights are not finite; it counts as refused."""
        chunk = crossing.chunk
        found = self._average_the_healthy(crossing, part)
        own_is_fine = is_finite(chunk.snapshot)
        if found and own_is_fine:
            keep_change(chunk.mixed, chunk.snapshot, self._schedule.gain)
        elif found and self._max_reloads is not None:
            # What is not finite in the weights is 0 when the change is added.
            self._replaced = True
            chunk.mixed.sub_(_without_what_is_not_finite(chunk.snapshot))
        else:
            chunk.mixed.zero_()
        return torch.ones((), dtype=torch.bool, device=self._where)

    def _average_the_healthy(self, crossing: "_Crossing", part: Part) -> bool:
        """Of those whom this end takes from; returns whether there is any."""
        chunk, me = crossing.chunk, self._transport.index
        if not crossing.incoming and len(part.takes) > 1:
            return self._mean_of_the_healthy(chunk)
        rows = {**crossing.incoming, me: chunk.snapshot}
        if shares := healthy_shares(rows, part.takes, me):
            average(rows, shares, chunk.mixed)
        return bool(shares)

    def _mean_of_the_healthy(self, chunk: "_Chunk") -> bool:
        """A second mean, to which all come: all have seen that the first is none."""
        counted = torch.nn.functional.pad(torch.zeros_like(chunk.snapshot), (0, 1))
        if is_finite(chunk.snapshot):
            counted[:-1], counted[-1] = chunk.snapshot, 1.0
        self._transport.post_mean(counted).wait(self._timeout)
        torch.div(counted[:-1], counted[-1], out=chunk.mixed)
        return bool(counted[-1] > 0) and is_finite(chunk.mixed)

    def _agree_on_replacing(self) -> None:
        """All learners of a node know what one of them has met in its shard."""
        if self._node.size > 1 and self._where.type == "cpu":
            replaced = torch.tensor([self._replaced], dtype=torch.uint8, device="cpu")
            self._node.agree(replaced, self._timeout)
            self._replaced = bool(replaced)

    def _count_reload(self) -> None:
        me, limit = self._transport.index, self._max_reloads
        assert limit is not None  # or nothing had been replaced
        what = f"the weights of super-learner {me} were infinite or not a number"
        if self.tally.reloads == limit:
            raise once_too_often(f"{what} in its round {self.round}", limit)
        self.tally.reloads += 1
        for vector in self._vectors:
            _without_what_is_not_finite(vector)
        if self._node.index == 0:
            _log.warning(
                "%s in its round %d: it goes on from the average of others and with a "
                "fresh optimizer (reload %d of %d)",
                *(what, self.round, self.tally.reloads, limit),
            )

    def _gather(self) -> None:
        if self._node.size > 1:
            for part, whole in zip(self._mixed, self._whole, strict=True):
                into = list(whole.chunk(self._node.size))
                self._node.gather(part, into, self._timeout)

    def _place_for(self, vector: Tensor) -> Tensor:
        """Memory for a vector or a change of it, where they are mixed."""
        return self._memory(len(vector), averaging_dtype(vector.dtype))

    def _memory(self, length: int, dtype: torch.dtype) -> Tensor:
        if self._where == self.device:
            return torch.zeros(length, dtype=dtype, device=self.device)
        return host_memory(length, dtype, self.device)

    def _stage(self) -> list[Tensor]:
        return [torch.zeros_like(v, device=self.device) for v in self._whole]

    def _buffer(self, chunk: "_Chunk", turn: int, peer: int) -> Tensor:
        key = (chunk.snapshot.dtype, turn, peer)
        if key not in self._buffers:
            longest = max(len(c.snapshot) for c in self._chunks)
            self._buffers[key] = self._memory(longest, chunk.snapshot.dtype)
        return self._buffers[key][: len(chunk.snapshot)]


def _without_what_is_not_finite(vector: Tensor) -> Tensor:
    return torch.nan_to_num_(vector, 0.0, 0.0, 0.0)


class _Chunk(NamedTuple):
    snapshot: Tensor
    mixed: Tensor


class _Crossing(NamedTuple):
    chunk: _Chunk
    incoming: dict[int, Tensor]
    pending: list[Pending]
