"""One round of averaging among processes: one application of the mixing matrix.

On the host, the others leave a super-learner with non-finite weights out of a round and
average with each other. Its own weights stay unchanged.
"""

import logging
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_adpsgd.mixing.averages import all_finite, average, keep_change
from lightning_adpsgd.mixing.statistics import Tally
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup, gather_shards
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.topology.topology import RoundPart
from lightning_adpsgd.transport.base import (
    SYNCHRONOUS_LANE,
    PeerLost,
    Pending,
    Transport,
    one_behind,
)
from lightning_adpsgd.weights.replica import (
    CHUNK_ELEMENTS,
    as_real,
    averaging_dtype,
    places_in,
    runs_of_one_dtype,
)
from lightning_adpsgd.weights.streams import Mark, host_memory, to_device, to_host

_log = logging.getLogger(__name__)


class Mixer(Protocol):
    """The three steps of a round of averaging, and its counters.

    Attributes:
        round: number of the next round.
        refused: number of averages of which a part was left out, a tensor [] on their
            device, where it is counted without waiting.
    """

    tally: Tally
    device: torch.device
    round: int
    refused: Tensor

    def take_snapshot(self) -> None:
        """Copies the weights; `mix` works on the copy."""

    def mix(self) -> None:
        """Computes ``gamma (sum_j T[j, i] w_j - w_i)`` of the copy, for a round."""

    def finish(self) -> None:
        """Adds the computed change to the weights as they are by then."""


class RoundMixer:
    """Applies rounds of a schedule to vectors, together with all super-learners.

    Each learner of a super-learner mixes its shard. Then the super-learner gathers the
    shards, unless each learner holds only its own. A round proceeds in chunks: while
    one is averaged, the next one crosses. The change of a chunk overwrites its copy. So
    apart from the shard's copy only messages take memory.

    Weights on a GPU are mixed there if the transport accepts GPU tensors, as NCCL does.
    Otherwise they are mixed on the host, through one staging copy on the GPU, so that
    the training stream never waits for the bus.

    Args:
        vectors: weights that this learner holds, which `finish` changes. Consecutive
            vectors of one dtype share chunks.
        transport: connection to the counterparts in the other super-learners; with
            several sections, to those of the first section.
        further: connections to the counterparts of the learner's further sections
            (`weights.sections`).
    """

    def __init__(
        self,
        vectors: Sequence[Tensor],
        transport: Transport,
        group: SuperLearnerGroup,
        schedule: Schedule,
        timeout: timedelta,
        chunk_elements: int = CHUNK_ELEMENTS,
        further: Sequence[Transport] = (),
    ) -> None:
        self._vectors = [as_real(vector) for vector in vectors]
        self._transport, self._group = transport, group
        self._schedule, self._timeout = schedule, timeout
        self.device = self._vectors[0].device if vectors else torch.device("cpu")
        self._where = self.device if transport.on_device else torch.device("cpu")
        self._gathers = group.size > 1 and group.holds_all
        # First copies of the weights, then the changes of a round.
        here = self._memory_on(self._where)
        staged = here if self._where == self.device else self._memory_on(self.device)
        self._whole, self._staged = here.whole, staged.whole
        self._copies = [*zip(staged.shards(), here.shards(), strict=True)]
        self._chunks = [
            (chunk, carrier)
            for carrier, runs in zip((transport, *further), here.sections, strict=True)
            for run in runs
            for chunk in run.split(chunk_elements)
        ]
        own = zip(staged.sections, group.own(self._vectors), strict=True)
        self._places = [pair for one in own for pair in places_in(*one)]
        self._taken, self._mixed_mark = Mark(self.device), Mark(self.device)
        self._buffers: dict[tuple[torch.dtype, int, int], Tensor] = {}
        self.round = 0
        self.refused = torch.zeros((), dtype=torch.int64, device=self._where)
        self.tally, self._has_warned = Tally(), False

    def take_snapshot(self) -> None:
        """Copies the weights; `mix` works on the copy."""
        for own, copy in self._places:
            copy.copy_(own)
        self._taken.set()

    def mix(self) -> None:
        """Computes ``gamma (sum_j T[j, i] w_j - w_i)`` of the snapshots, for a round.

        On a GPU, the result is ready when the calling thread's stream gets there.
        """
        self._taken.follow()
        for copy, snapshot in self._copies:
            to_host(copy, snapshot)
        part = self._schedule.part(self._transport.index, self.round)
        post = self._post_mean if self._schedule.is_mean(self.round) else self._post
        self.round += 1
        posted = (post(n, *chunk, part) for n, chunk in enumerate(self._chunks))
        try:
            landed = [self._land(crossing, part) for crossing in one_behind(posted)]
        except PeerLost as error:
            # Exchanges, which are not waited for, do without.
            error.args = (f"{error}, and give all learners equally many batches",)
            raise
        self.tally.exchanges += 1
        self.refused += torch.stack(landed).any() if landed else 0
        self._gather()
        for change, staged in zip(self._whole, self._staged, strict=True):
            to_device(change, staged)
        self._mixed_mark.set()

    def finish(self) -> None:
        """Adds the computed change to the weights as they are by then."""
        self._mixed_mark.follow()
        whole = places_in(self._staged, self._vectors)
        for vector, change in whole if self._gathers else self._places:
            vector.add_(change)
        if not self._gathers:
            gather_shards(self._vectors, self._group, self._timeout)
        self.tally.merges += 1

    def _post_mean(
        self, number: int, chunk: Tensor, carrier: Transport, part: RoundPart
    ) -> "_Crossing":
        mixed = self._buffer(chunk, number % 2, self._transport.index).copy_(chunk)
        # A ring all-reduce sends each element twice, but for those of its own share.
        self.tally.bytes_sent += (
            2 * chunk.nbytes * (len(part.takes) - 1) // len(part.takes)
        )
        return _Crossing(chunk, mixed, {}, [carrier.post_mean(mixed)], carrier)

    def _post(
        self, number: int, chunk: Tensor, carrier: Transport, part: RoundPart
    ) -> "_Crossing":
        me = self._transport.index
        sources = [j for j in part.takes if j != me]
        targets = [j for j in part.gives if j != me]
        own, *incoming = (self._buffer(chunk, number % 2, j) for j in (me, *sources))
        received = dict(zip(sources, incoming, strict=True))
        outgoing = dict.fromkeys(targets, chunk)
        pending = carrier.post_all(SYNCHRONOUS_LANE, received, outgoing)
        self.tally.bytes_sent += chunk.nbytes * len(targets)
        return _Crossing(chunk, own, received, pending, carrier)

    def _land(self, crossing: "_Crossing", part: RoundPart) -> Tensor:
        """Writes the change of one chunk in its place; returns whether it was refused.

        The chunk's own copy may be overwritten, because it has been sent.
        """
        for pending in crossing.pending:
            pending.wait(self._timeout)
        chunk, mixed, me = crossing.chunk, crossing.mixed, self._transport.index
        if crossing.incoming or len(part.takes) == 1:
            average({**crossing.incoming, me: chunk}, part.takes, mixed)
        # Asking a GPU would block the thread.
        are_finite = self._where.type != "cpu" or all_finite([mixed])
        if not are_finite:
            self._average_without_the_diverged(crossing, part)
        refused = keep_change(mixed, chunk, self._schedule.gain)
        chunk.copy_(mixed)
        return refused if are_finite else torch.ones_like(refused)

    def _average_without_the_diverged(
        self, crossing: "_Crossing", part: RoundPart
    ) -> None:
        chunk, incoming = crossing.chunk, crossing.incoming
        self._warn_once(chunk)
        if not incoming and len(part.takes) > 1:
            self._average_the_finite(crossing)
        elif all_finite([chunk]):
            # In the place of a row that is left out, so that two learners that leave
            # each other out change nothing for a third.
            rows = {j: r if all_finite([r]) else chunk for j, r in incoming.items()}
            average({**rows, self._transport.index: chunk}, part.takes, crossing.mixed)

    def _average_the_finite(self, crossing: "_Crossing") -> None:
        """Takes a second mean; all take part, because all saw that the first is NaN."""
        chunk = crossing.chunk
        counted = torch.nn.functional.pad(torch.zeros_like(chunk), (0, 1))
        if all_finite([chunk]):
            counted[:-1], counted[-1] = chunk, 1.0
        crossing.carrier.post_mean(counted).wait(self._timeout)
        torch.div(counted[:-1], counted[-1], out=crossing.mixed)

    def _warn_once(self, chunk: Tensor) -> None:
        if self._has_warned or all_finite([chunk]):
            return
        self._has_warned = True
        _log.warning(
            "the weights of super-learner %d are infinite or NaN in its round %d: the "
            "others leave it out; lower the learning rate or lengthen its warm-up",
            *(self._transport.index, self.round),
        )

    def _gather(self) -> None:
        if self._gathers:
            for whole in self._whole:
                into = list(whole.chunk(self._group.size))
                self._group.gather(into[self._group.index], into, self._timeout)

    def _memory_on(self, where: torch.device) -> "_Memory":
        if self._gathers:
            whole = self._packed(self._vectors, where)
            return _Memory(whole, self._group.own(whole))
        sections = [self._packed(own, where) for own in self._group.own(self._vectors)]
        return _Memory([*chain.from_iterable(sections)], sections)

    def _packed(self, vectors: Sequence[Tensor], where: torch.device) -> list[Tensor]:
        return [
            self._room(sum(map(len, run)), averaging_dtype(run[0].dtype), where)
            for run in runs_of_one_dtype(vectors)
        ]

    def _room(self, length: int, dtype: torch.dtype, where: torch.device) -> Tensor:
        if where == self.device:
            return torch.zeros(length, dtype=dtype, device=where)
        return host_memory(length, dtype, self.device)

    def _buffer(self, chunk: Tensor, turn: int, peer: int) -> Tensor:
        """Memory for a peer's message or, under this learner's index, the average."""
        key = (chunk.dtype, turn, peer)
        if key not in self._buffers:
            longest = max(len(one) for one, _ in self._chunks)
            self._buffers[key] = self._room(longest, chunk.dtype, self._where)
        return self._buffers[key][: len(chunk)]


class _Crossing(NamedTuple):
    chunk: Tensor
    mixed: Tensor
    incoming: dict[int, Tensor]
    pending: list[Pending]
    carrier: Transport


class _Memory(NamedTuple):
    """Memory for what a round changes, and in it that of each section, by dtype."""

    whole: list[Tensor]
    sections: list[list[Tensor]]

    def shards(self) -> Iterator[Tensor]:
        """The memory of all sections, one after another."""
        return chain.from_iterable(self.sections)
