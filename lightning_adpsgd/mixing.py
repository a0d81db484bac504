"""Synchronous averaging: one application of the mixing matrix, waited for or hidden.

`Synchronous` takes the average at the step boundary (SD-PSGD); `DelayByOne` computes it
behind the gradient of the same step and joins it at its end (arXiv 2110.11199):
``w_i <- sum_j T[j, i] w_j(k) - lr g_i(w_i(k))``. Both keep to the interface
`Communication`, as the asynchronous engine in `gossip` does.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.parameters import shard
from lightning_adpsgd.topology import Topology, check_mixing, complete
from lightning_adpsgd.transport import (
    SYNCHRONOUS_LANE,
    Node,
    Swap,
    Transport,
    swap,
)

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

    def mixing(self, round: int) -> Tensor:
        """The matrix of this round before the gain is applied, checked."""
        matrix = self.topology.matrix(self.num_super_learners, round, self.seed)
        check_mixing(matrix)
        return matrix

    def is_mean(self, mixing: Tensor) -> bool:
        """Whether a matrix takes the exact mean, for which one all-reduce serves."""
        return torch.equal(mixing, complete(self.num_super_learners))


class Statistics(NamedTuple):
    """What a learner's communication has done so far.

    Attributes:
        exchanges: Averages completed with a peer (or rounds, in the synchronous modes).
        merges: Times that the training side took in what was averaged.
        bytes_sent: Payload sent to other super-learners by this learner.
        exposed_seconds: Time that the training thread waited for communication.
        staleness: Optimizer steps between snapshot and merge, and how often.
        refused: Received vectors that were not finite and therefore left out.
    """

    exchanges: int
    merges: int
    bytes_sent: int
    exposed_seconds: float
    staleness: dict[int, int]
    refused: int


@dataclass
class Tally:
    """The counters behind `Statistics`; whoever shares it guards it."""

    exchanges: int = 0
    merges: int = 0
    bytes_sent: int = 0
    exposed_seconds: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)
    refused: int = 0

    def snapshot(self) -> Statistics:
        """An immutable copy."""
        return Statistics(**{**vars(self), "staleness": dict(self.staleness)})

    def merged(self, staleness: int) -> None:
        """Counts one merged exchange of this age in optimizer steps."""
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1


class Communication(ABC):
    """How a super-learner averages with others; driven by the training thread alone."""

    @abstractmethod
    def start(self) -> None:
        """Begins to communicate; the weights are equal in all super-learners."""

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


def to_averaging_dtype(tensor: Tensor) -> Tensor:
    """A copy in the precision in which averages are taken: at least float32."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().to(torch.float32 if half else tensor.dtype, copy=True)


class RoundMixer:
    """Applies one round of a schedule to vectors, together with all super-learners.

    Each learner of a super-learner mixes its shard; the shards are gathered inside the
    node.

    Args:
        vectors: The flat weights; read, and written by `finish`.
        transport: To the counterparts in the other super-learners.
        node: The learners of this super-learner.
        schedule: The matrices.
        timeout: For each wait.
    """

    def __init__(
        self,
        vectors: Sequence[Tensor],
        transport: Transport,
        node: Node,
        schedule: Schedule,
        timeout: timedelta,
    ) -> None:
        self._vectors, self._transport, self._node = vectors, transport, node
        self._schedule, self._timeout = schedule, timeout
        self._shards = [shard(v, node.index, node.size) for v in vectors]
        self._snapshots = [to_averaging_dtype(part) for part in self._shards]
        self._mixed = [torch.zeros_like(part) for part in self._snapshots]
        self._changes = [torch.zeros_like(to_averaging_dtype(v)) for v in vectors]
        self._incoming: dict[tuple[int, int], Tensor] = {}
        self._round = 0
        self.tally = Tally()

    def take_snapshot(self) -> None:
        """Copies the weights as they are; what follows works on the copy."""
        for snapshot, part in zip(self._snapshots, self._shards, strict=True):
            snapshot.copy_(part)

    def mix(self) -> None:
        """Computes ``sum_j T[j, i] w_j - w_i`` of the snapshots, for this round."""
        mixing = self._schedule.mixing(self._round)
        self._round += 1
        for place in range(len(self._snapshots)):
            self._mix_vector(place, mixing)
        self.tally.exchanges += 1
        self._node.start_gather(self._mixed, self._changes).wait(self._timeout)

    def finish(self) -> None:
        """Adds the computed change to the weights, whatever they have become."""
        for vector, change in zip(self._vectors, self._changes, strict=True):
            vector.add_(change)
        self.tally.merges += 1

    def _mix_vector(self, place: int, mixing: Tensor) -> None:
        snapshot, mixed = self._snapshots[place], self._mixed[place]
        self.tally.bytes_sent += self._bytes_sent(snapshot, mixing)
        if self._schedule.is_mean(mixing):
            mixed.copy_(snapshot)
            self._transport.average(mixed, self._timeout)
        else:
            self._mix_neighbours(place, mixing)
        change = mixed.sub_(snapshot).mul_(self._schedule.gain)
        if not torch.isfinite(change.sum()):
            # A diverged super-learner must not take the others with it.
            change.zero_()
            self.tally.refused += 1

    def _mix_neighbours(self, place: int, mixing: Tensor) -> None:
        me, snapshot = self._transport.index, self._snapshots[place]
        takes, gives = mixing[:, me].tolist(), mixing[me].tolist()
        others = [j for j in range(len(mixing)) if j != me]
        incoming = {j: self._buffer(place, j) for j in others if takes[j] > 0}
        swaps = [
            Swap(j, snapshot if gives[j] > 0 else None, incoming.get(j))
            for j in others
            if gives[j] > 0 or j in incoming
        ]
        swap(self._transport, SYNCHRONOUS_LANE, swaps, self._timeout)
        mixed = self._mixed[place].zero_()
        # In the order of the index, so that all writings round alike.
        for j in range(len(mixing)):
            if takes[j] > 0:
                mixed.add_(snapshot if j == me else incoming[j], alpha=takes[j])

    def _bytes_sent(self, snapshot: Tensor, mixing: Tensor) -> int:
        size = snapshot.numel() * snapshot.element_size()
        if self._schedule.is_mean(mixing):
            # A ring all-reduce passes each element on twice but for its own part.
            return 2 * size * (len(mixing) - 1) // len(mixing)
        me = self._transport.index
        return size * (int((mixing[me] > 0).sum()) - int(mixing[me, me] > 0))

    def _buffer(self, place: int, peer: int) -> Tensor:
        key = (place, peer)
        if key not in self._incoming:
            self._incoming[key] = torch.empty_like(self._snapshots[place])
        return self._incoming[key]


class Synchronous(Communication):
    """The average at the step boundary: everyone waits.

    Args:
        mixer: Applies a round.
        order: "step_then_average" is ``T(W - lr G)``; "average_then_step" is
            ``T W - lr G(W)``.
        every: Optimizer steps per round.
    """

    def __init__(self, mixer: RoundMixer, order: Order, every: int = 1) -> None:
        self._mixer, self._order, self._every = mixer, order, every
        self._step = 0

    @override
    def start(self) -> None:
        """There is nothing to start: averaging happens in the training thread."""

    @override
    def before_update(self) -> None:
        if self._order == "average_then_step":
            self._average()

    @override
    def after_update(self) -> None:
        if self._order == "step_then_average":
            self._average()

    @override
    def pause(self) -> None:
        """Nothing runs between two boundaries."""

    @override
    def settle(self) -> None:
        """Nothing is ever pending."""

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
        return self._mixer.tally.snapshot()

    def _average(self) -> None:
        self._step += 1
        if self._step % self._every:
            return
        begin = time.perf_counter()
        self._mixer.take_snapshot()
        self._mixer.mix()
        self._mixer.tally.exposed_seconds += time.perf_counter() - begin
        self._mixer.finish()
        self._mixer.tally.merged(staleness=0)


class DelayByOne(Communication):
    """The average of the weights of step k, hidden behind the gradient of step k.

    The mixer is used by the worker thread from the launch of a round until its join,
    and by the training thread otherwise.

    Args:
        mixer: Applies a round.
        every: Optimizer steps per round.
    """

    def __init__(self, mixer: RoundMixer, every: int = 1) -> None:
        self._mixer, self._every = mixer, every
        self._rounds: queue.SimpleQueue[Future[None] | None] = queue.SimpleQueue()
        # A daemon, so that a round with a lost peer does not hold up the end.
        self._worker = threading.Thread(
            target=self._work, name="adpsgd-average", daemon=True
        )
        self._round: Future[None] | None = None
        self._step = 0

    @override
    def start(self) -> None:
        """Equal weights need no average: the first round follows the first step."""

    @override
    def before_update(self) -> None:
        self._join(staleness=1)

    @override
    def after_update(self) -> None:
        self._step += 1
        if self._step % self._every == 0 and self._round is None:
            self._launch()

    @override
    def pause(self) -> None:
        """The round in flight is joined by `settle`."""

    @override
    def settle(self) -> None:
        self._join(staleness=0)

    @override
    def resume(self) -> None:
        """The next step launches the next round."""

    @override
    def stop(self) -> None:
        self._end_worker(None)

    @override
    def abort(self) -> None:
        self._end_worker(2.0)

    @override
    def release(self) -> None:
        """Peers wait for this learner's rounds alone, and see its end."""

    @override
    def statistics(self) -> Statistics:
        return self._mixer.tally.snapshot()

    def _end_worker(self, seconds: float | None) -> None:
        self._rounds.put(None)
        if self._worker.is_alive():
            self._worker.join(seconds)

    def _launch(self) -> None:
        if self._worker.ident is None:
            self._worker.start()
        self._mixer.take_snapshot()
        self._round = Future()
        self._rounds.put(self._round)

    def _work(self) -> None:
        while (round := self._rounds.get()) is not None:
            try:
                self._mixer.mix()
            except BaseException as error:
                round.set_exception(error)
            else:
                round.set_result(None)

    def _join(self, staleness: int) -> None:
        if self._round is None:
            return
        begin = time.perf_counter()
        round, self._round = self._round, None
        round.result()
        self._mixer.tally.exposed_seconds += time.perf_counter() - begin
        self._mixer.finish()
        self._mixer.tally.merged(staleness)
