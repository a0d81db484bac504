"""One round of averaging among processes: one application of the mixing matrix.

On the host, the others leave a super-learner with non-finite weights out of a round and
go on averaging with each other. Its own weights stay as they are.
"""

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_adpsgd.mixing.averages import (
    all_finite,
    average,
    finite_shares,
    keep_change,
)
from lightning_adpsgd.mixing.statistics import Statistics, Tally
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.topology.topology import Part
from lightning_adpsgd.transport.base import (
    SYNCHRONOUS_LANE,
    Pending,
    Transport,
    one_behind,
)
from lightning_adpsgd.weights.replica import (
    as_real,
    averaging_dtype,
    places_in,
    runs_of_one_dtype,
)
from lightning_adpsgd.weights.streams import Mark, host_memory, to_device, to_host

_log = logging.getLogger(__name__)


class Mixer(Protocol):
    """Applies rounds of a schedule to weights, in three steps."""

    tally: Tally
    device: torch.device
    round: int

    def statistics(self) -> Statistics:
        """What was done so far."""
        ...

    def take_snapshot(self) -> None:
        """Copies the weights; what follows works on the copy."""

    def mix(self) -> None:
        """Computes ``sum_j T[j, i] w_j - w_i`` of the copy, for the next round."""

    def finish(self) -> None:
        """Adds the computed change to the weights as they are by then."""


class RoundMixer:
    """Applies one round of a schedule to vectors, together with all super-learners.

    Each learner of a super-learner mixes its shard. Then the super-learner gathers the
    shards, unless each learner holds its own alone. A round goes chunk by chunk: while
    one is averaged, the next one crosses.

    Weights on a GPU are mixed there if the transport takes tensors of a GPU, as NCCL
    does, and on the host otherwise, by way of one staging copy on the GPU, so that the
    training stream never waits for the bus.

    Args:
        vectors: the weights that this learner holds; `finish` writes them. Those of one
            dtype that follow one another cross in common chunks.
        transport: connection to the counterparts in the other super-learners.
        node: learners of this super-learner.
        schedule: mixing matrices.
        timeout: longest wait for each message.
        chunk_elements: number of elements of a message.
    """

    def __init__(
        self,
        vectors: Sequence[Tensor],
        transport: Transport,
        node: SuperLearnerGroup,
        schedule: Schedule,
        timeout: timedelta,
        chunk_elements: int = 1 << 20,
    ) -> None:
        self._vectors = [as_real(vector) for vector in vectors]
        self._transport, self._node = transport, node
        self._schedule, self._timeout = schedule, timeout
        self._shards = node.own(self._vectors)
        self.device = self._vectors[0].device if vectors else torch.device("cpu")
        self._where = self.device if transport.on_device else torch.device("cpu")
        self._snapshots = self._packed(self._shards)
        self._mixed = self._packed(self._shards)
        self._chunks = [
            _Chunk(*pair)
            for both in zip(self._snapshots, self._mixed, strict=True)
            for pair in zip(*(v.split(chunk_elements) for v in both), strict=True)
        ]
        self._gathers = node.size > 1 and node.holds_all
        self._whole = self._packed(self._vectors) if self._gathers else self._mixed
        self._staged = self._whole if self._where == self.device else self._stage()
        self._taken, self._mixed_mark = Mark(self.device), Mark(self.device)
        self._buffers: dict[tuple[torch.dtype, int, int], Tensor] = {}
        self.round = 0
        self._refused = torch.zeros((), dtype=torch.int64, device=self._where)
        self.tally, self._has_warned = Tally(), False

    def take_snapshot(self) -> None:
        """Copies the weights; what follows works on the copy."""
        for own, copy in places_in(self._first_copies(), self._shards):
            copy.copy_(own)
        self._taken.set()

    @torch.no_grad()
    def mix(self) -> None:
        """Computes ``sum_j T[j, i] w_j - w_i`` of the snapshots, for this round.

        On a GPU the result is ready when the stream of the calling thread gets there.
        """
        self._taken.follow()
        for copy, snapshot in zip(self._first_copies(), self._snapshots, strict=True):
            to_host(copy, snapshot)
        part = self._schedule.part(self._transport.index, self.round)
        post = self._post_mean if self._schedule.is_mean(self.round) else self._post
        self.round += 1
        posted = (post(n, chunk, part) for n, chunk in enumerate(self._chunks))
        landed = [self._land(crossing, part) for crossing in one_behind(posted)]
        self.tally.exchanges += 1
        self._refused += torch.stack(landed).any() if landed else 0
        self._gather()
        for change, staged in zip(self._whole, self._staged, strict=True):
            to_device(change, staged)
        self._mixed_mark.set()

    def finish(self) -> None:
        """Adds the computed change to the weights as they are by then."""
        self._mixed_mark.follow()
        for vector, change in places_in(self._staged, self._vectors):
            vector.add_(change)
        self.tally.merges += 1

    def statistics(self) -> Statistics:
        """What was done so far; waits for a GPU."""
        return self.tally.snapshot()._replace(refused=int(self._refused))

    def _first_copies(self) -> list[Tensor]:
        """The memory to which each shard is copied first, on its own device."""
        if self._staged is self._whole:
            return self._snapshots
        return self._node.own(self._staged)

    def _post_mean(self, number: int, chunk: "_Chunk", part: Part) -> "_Crossing":
        chunk.mixed.copy_(chunk.snapshot)
        # A ring all-reduce sends each element twice, but for those of its own share.
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
        """Computes the change of one chunk; returns whether it was refused."""
        for pending in crossing.pending:
            pending.wait(self._timeout)
        chunk, me = crossing.chunk, self._transport.index
        if crossing.incoming or len(part.takes) == 1:
            rows = {**crossing.incoming, me: chunk.snapshot}
            average(rows, part.takes, chunk.mixed)
        # To ask a GPU would stop the thread.
        if self._where.type == "cpu" and not all_finite([chunk.mixed]):
            return self._land_without_the_diverged(crossing, part)
        return keep_change(chunk.mixed, chunk.snapshot, self._schedule.gain)

    def _land_without_the_diverged(self, crossing: "_Crossing", part: Part) -> Tensor:
        """Does the same where some weights are non-finite; it counts as refused."""
        chunk, me = crossing.chunk, self._transport.index
        if not crossing.incoming and len(part.takes) > 1:
            self._average_the_finite(chunk)
        elif all_finite([chunk.snapshot]):
            rows = {**crossing.incoming, me: chunk.snapshot}
            average(rows, finite_shares(rows, part.takes, me), chunk.mixed)
        keep_change(chunk.mixed, chunk.snapshot, self._schedule.gain)
        self._warn_once(chunk)
        return torch.ones((), dtype=torch.bool, device=self._where)

    def _average_the_finite(self, chunk: "_Chunk") -> None:
        """Takes a second mean; all come, for all have seen that the first is NaN."""
        counted = torch.nn.functional.pad(torch.zeros_like(chunk.snapshot), (0, 1))
        if all_finite([chunk.snapshot]):
            counted[:-1], counted[-1] = chunk.snapshot, 1.0
        self._transport.post_mean(counted).wait(self._timeout)
        torch.div(counted[:-1], counted[-1], out=chunk.mixed)

    def _warn_once(self, chunk: "_Chunk") -> None:
        if self._has_warned or all_finite([chunk.snapshot]):
            return
        self._has_warned = True
        _log.warning(
            "the weights of super-learner %d are infinite or NaN in its round %d: the "
            "others leave it out; lower the learning rate or lengthen its warm-up",
            *(self._transport.index, self.round),
        )

    def _gather(self) -> None:
        if self._gathers:
            for mixed, whole in zip(self._mixed, self._whole, strict=True):
                into = list(whole.chunk(self._node.size))
                self._node.gather(mixed, into, self._timeout)

    def _packed(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Memory for these vectors, those of one dtype one after another."""
        return [
            self._memory(sum(map(len, run)), averaging_dtype(run[0].dtype))
            for run in runs_of_one_dtype(vectors)
        ]

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


class _Chunk(NamedTuple):
    snapshot: Tensor
    mixed: Tensor


class _Crossing(NamedTuple):
    chunk: _Chunk
    incoming: dict[int, Tensor]
    pending: list[Pending]
