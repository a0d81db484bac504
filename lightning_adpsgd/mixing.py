"""Synchronous averaging: one application of the mixing matrix, waited for or hidden.

`AtBoundary` takes the average at the step boundary, after the step (SD-PSGD);
`BehindGradient` computes it behind the gradient of the next step and joins it at the
last moment, before the update (delay-by-one, arXiv 2110.11199):
``w_i <- sum_j T[j, i] w_j(k) - lr g_i(w_i(k))``. Both keep to the interface
`Communication`, as the asynchronous engine in `gossip` does.

On the host, a super-learner whose weights are not finite is left out of a round, and
goes on from the average of those which it would have averaged with.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.background import AtOnce, Worker
from lightning_adpsgd.matrices import check_mixing
from lightning_adpsgd.node import Node
from lightning_adpsgd.parameters import shard
from lightning_adpsgd.replica import as_real, averaging_dtype
from lightning_adpsgd.shares import Part, Shares, check_part, equal_shares
from lightning_adpsgd.sickness import healthy_shares, is_finite, once_too_often
from lightning_adpsgd.streams import Mark, host_memory, to_device, to_host
from lightning_adpsgd.topology import Topology
from lightning_adpsgd.transport import (
    SYNCHRONOUS_LANE,
    Pending,
    Transport,
    one_behind,
)

_log = logging.getLogger(__name__)

Order = Literal["step_then_average", "average_then_step"]


@dataclass(frozen=True)
class Schedule:
    """Which mixing matrix applies in which round.

    Args:
        topology: The sequence of matrices.
        num_super_learners: S.
        gain: gamma in T_gamma = (1 - gamma) I + gamma T, 0 < gamma <= 1.
        seed: For topologies that are drawn at random.
    """

    topology: Topology
    num_super_learners: int
    gain: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.topology.check_size(self.num_super_learners)

    def mixing(self, round: int) -> Tensor:
        """The matrix of this round before the gain is applied, checked."""
        matrix = self.topology.matrix(self.num_super_learners, round, self.seed)
        check_mixing(matrix)
        return matrix

    def part(self, index: int, round: int) -> Part:
        """What `index` takes and gives before the gain is applied, checked."""
        part = self.topology.part(index, self.num_super_learners, round, self.seed)
        check_part(part)
        return part

    def asks(self, index: int, round: int) -> list[int]:
        """Whom `index` asks in its own round of this number (`Topology.asks`)."""
        return self.topology.asks(index, self.num_super_learners, round, self.seed)

    def is_mean(self, round: int) -> bool:
        """Whether all take the exact mean, for which one all-reduce serves."""
        period = self.topology.period(self.num_super_learners)
        return _is_mean(
            self.topology,
            self.num_super_learners,
            round % period if period else round,
            self.seed,
        )


@lru_cache(maxsize=64)
def _is_mean(topology: Topology, size: int, round: int, seed: int) -> bool:
    # Of all of them: who posts an all-reduce must know that the others do.
    mean = equal_shares(range(size))
    return all(topology.takes(i, size, round, seed) == mean for i in range(size))


class Statistics(NamedTuple):
    """What a learner's communication has done so far.

    Attributes:
        exchanges: Averages completed with a peer (or rounds, in the synchronous modes).
        merges: Times that the training side took in what was averaged.
        bytes_sent: Payload sent to other super-learners by this learner.
        exposed_seconds: Time that the training thread waited for communication.
        staleness: Optimizer steps between snapshot and merge, and how often.
        refused: Averages from which something was left out, because it was not finite
            or too far away.
        damaged: Parts of vectors left out because they arrived damaged.
        peer_ages: For each super-learner that this one exchanges with asynchronously,
            optimizer steps since the last completed exchange, or since the start.
        members: Super-learners that are there, this one counted; 0 where their number
            never changes.
        joined: Super-learners that have come since this one did.
        lost: Super-learners that have gone without a word since then.
    """

    exchanges: int
    merges: int
    bytes_sent: int
    exposed_seconds: float
    staleness: dict[int, int]
    refused: int
    peer_ages: dict[int, int]
    far: int = 0
    reloads: int = 0
    members: int = 0
    joined: int = 0
    lost: int = 0
    damaged: int = 0


@dataclass
class Tally:
    """The counters behind `Statistics`; whoever shares it guards it."""

    exchanges: int = 0
    merges: int = 0
    bytes_sent: int = 0
    exposed_seconds: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)
    refused: int = 0
    peer_ages: dict[int, int] = field(default_factory=dict)
    far: int = 0
    reloads: int = 0
    damaged: int = 0

    def snapshot(self) -> Statistics:
        """An immutable copy."""
        copies = {
            "staleness": dict(self.staleness),
            "peer_ages": dict(self.peer_ages),
        }
        return Statistics(**{**vars(self), **copies})

    def merged(self, staleness: int) -> None:
        """Counts one merged exchange of this age in optimizer steps."""
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1


class Communication(ABC):
    """How a super-learner averages with others; driven by the training thread alone."""

    @abstractmethod
    def start(self) -> None:
        """Begins to communicate; the weights are equal in all super-learners."""

    @property
    @abstractmethod
    def step_and_round(self) -> tuple[int, int]:
        """Optimizer steps, and rounds of the schedule begun: what comes next."""

    @abstractmethod
    def go_on_from(self, step: int, round: int) -> None:
        """Counts on from another's `step_and_round`; before the start."""

    @abstractmethod
    def before_update(self) -> None:
        """Called when a gradient is ready and before the optimizer changes weights."""

    @abstractmethod
    def after_update(self) -> None:
        """Called when the optimizer has changed the weights."""

    @abstractmethod
    def pause(self) -> None:
        """Begins no exchange any more, and returns when those begun here have ended."""

    @abstractmethod
    def settle(self) -> None:
        """Merges all that was averaged; every super-learner has paused before."""

    @abstractmethod
    def set_aside(self, vectors: Sequence[Tensor]) -> None:
        """What peers see after `settle`, while others stand in the weights' place."""

    @abstractmethod
    def resume(self) -> None:
        """Goes on after `settle`, from the weights as they are."""

    @abstractmethod
    def stop(self) -> None:
        """Ends cleanly after `settle`: peers are told, threads joined."""

    @abstractmethod
    def abort(self) -> None:
        """Ends after a failure, within seconds and without a peer's help."""

    @abstractmethod
    def release(self) -> None:
        """Lets go of peers that wait for this end; called by any thread on a failure.

        The training thread may be in the middle of a long step.
        """

    @abstractmethod
    def statistics(self) -> Statistics:
        """What was done so far."""


def average(
    rows: Mapping[int, Tensor] | Sequence[Tensor], takes: Shares, into: Tensor
) -> None:
    """``sum_j T[j, i] w_j``, of what `i` takes from whom."""
    # In the order of the index, so that all writings round alike.
    (first, share), *others = sorted(takes.items())
    torch.mul(rows[first], share, out=into)
    for j, share in others:
        into.add_(rows[j], alpha=share)


def keep_change(average: Tensor, own: Tensor, gain: float) -> Tensor:
    """Turns an average into what it changes: ``gamma (sum_j T[j, i] w_j - w_i)``.

    Returns:
        Whether it was refused, as a tensor of one truth.
    """
    return leave_out_if_not_finite(average.sub_(own).mul_(gain))


def leave_out_if_not_finite(change: Tensor) -> Tensor:
    """Makes a change zero that is not finite, and says whether, as a tensor.

    A diverged super-learner must not take the others with it. A GPU is not asked
    whether one has: that would stop the thread until it comes to it.
    """
    refused = ~torch.isfinite(change.sum())
    if change.device.type != "cpu" or refused:
        change.masked_fill_(refused, 0.0)
    return refused


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


class AtBoundary(Communication):
    """The average after the step, at the step boundary: everyone waits.

    Args:
        mixer: Applies a round.
        every: Optimizer steps per round.
    """

    def __init__(self, mixer: Mixer, every: int = 1) -> None:
        self._mixer, self._every = mixer, every
        self._step = 0

    @override
    def start(self) -> None:
        """There is nothing to start: averaging happens in the training thread."""

    @property
    @override
    def step_and_round(self) -> tuple[int, int]:
        return self._step, self._mixer.round

    @override
    def go_on_from(self, step: int, round: int) -> None:
        self._step, self._mixer.round = step, round

    @override
    def before_update(self) -> None:
        """The average comes after the update."""

    @override
    def after_update(self) -> None:
        self._step += 1
        if self._step % self._every:
            return
        begin = time.perf_counter()
        self._mixer.take_snapshot()
        self._mixer.mix()
        self._mixer.tally.exposed_seconds += time.perf_counter() - begin
        self._mixer.finish()
        self._mixer.tally.merged(staleness=0)

    @override
    def pause(self) -> None:
        """Nothing runs between two boundaries."""

    @override
    def settle(self) -> None:
        """Nothing is ever pending."""

    @override
    def set_aside(self, vectors: Sequence[Tensor]) -> None:
        """Peers see nothing before the next round."""

    @override
    def resume(self) -> None:
        """Nothing was interrupted."""

    @override
    def stop(self) -> None:
        """No thread was started."""

    @override
    def abort(self) -> None:
        """No thread was started."""

    @override
    def release(self) -> None:
        """Peers wait for this learner's rounds alone, and see its end."""

    @override
    def statistics(self) -> Statistics:
        return self._mixer.statistics()


class BehindGradient(Communication):
    """The average of the weights, hidden behind the gradient that is taken at them.

    It begins when a step has ended and is joined before the update of the next one.
    That is delay-by-one; and, from the first step on, also the synchronous order
    "average_then_step", ``T W - lr G(W)``, which is the same equation.

    The mixer is used by the worker thread from the launch of a round until its join,
    and by the training thread otherwise.

    Args:
        mixer: Applies a round.
        every: Optimizer steps per round.
        from_start: Whether the first gradient has a round behind it. Weights that are
            equal at the start need none.
        worker: Mixes; by default a thread of its own.
    """

    def __init__(
        self,
        mixer: Mixer,
        every: int = 1,
        from_start: bool = False,
        worker: Worker | AtOnce | None = None,
    ) -> None:
        self._mixer, self._every = mixer, every
        self._worker = worker or Worker("adpsgd-average", mixer.device)
        self._round: Future[None] | None = None
        # Steps, counted so that a round is launched whenever `every` divides them.
        self._step, self._goes_on = int(from_start), False

    @override
    def start(self) -> None:
        if self._step and not self._goes_on:
            self._launch_if_due()

    @property
    @override
    def step_and_round(self) -> tuple[int, int]:
        return self._step, self._mixer.round

    @override
    def go_on_from(self, step: int, round: int) -> None:
        # The round in flight was joined before the checkpoint was written.
        self._step, self._mixer.round, self._goes_on = step, round, True

    @override
    def before_update(self) -> None:
        self._join(staleness=1)

    @override
    def after_update(self) -> None:
        self._step += 1
        self._launch_if_due()

    @override
    def pause(self) -> None:
        """The round in flight is joined by `settle`."""

    @override
    def settle(self) -> None:
        self._join(staleness=0)

    @override
    def set_aside(self, vectors: Sequence[Tensor]) -> None:
        """Peers see nothing before the next round."""

    @override
    def resume(self) -> None:
        """The next step launches the next round."""

    @override
    def stop(self) -> None:
        self._worker.stop(None)

    @override
    def abort(self) -> None:
        self._worker.stop(2.0)

    @override
    def release(self) -> None:
        """Peers wait for this learner's rounds alone, and see its end."""

    @override
    def statistics(self) -> Statistics:
        return self._mixer.statistics()

    def _launch_if_due(self) -> None:
        if self._step % self._every == 0 and self._round is None:
            self._mixer.take_snapshot()
            self._round = self._worker.submit(self._mixer.mix)

    def _join(self, staleness: int) -> None:
        if self._round is None:
            return
        begin = time.perf_counter()
        round, self._round = self._round, None
        round.result()
        self._mixer.tally.exposed_seconds += time.perf_counter() - begin
        self._mixer.finish()
        self._mixer.tally.merged(staleness)


def synchronous(
    mixer: Mixer,
    order: Order,
    every: int = 1,
    worker: Worker | AtOnce | None = None,
) -> Communication:
    """Averaging in which everyone waits, in the given order.

    After the step the average needs the result of the step, and is exposed; before it
    the average needs the weights of the last step alone, and is hidden.
    """
    if order == "step_then_average":
        return AtBoundary(mixer, every)
    return BehindGradient(mixer, every, from_start=True, worker=worker)
