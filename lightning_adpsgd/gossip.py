"""Asynchronous gossip: averaging with peers in the background, for which nobody waits.

A super-learner has two copies of its weights (AD-PSGD, arXiv 1710.06952, with the merge
written as a difference so that no local step is lost)::

    training side        w      changed by the optimizer and, at step boundaries, merges
    communication side   x      a snapshot of w, changed by every exchange
                         d      the sum of what exchanges changed since the last merge

    exchange of i and j  c = a (x_j - x_i);  x_i += c, d_i += c;  x_j -= c, d_j -= c
    merge of i           w_i += d_i;  d_i = 0;  x_i = w_i

Both ends of an exchange compute c from the same pair of vectors, so that
``sum_i (w_i + d_i)`` is changed by gradients alone, whatever the delays and the order.
An exchange goes chunk by chunk: each chunk is an exchange of its own in this sense.

For each peer there are two threads. One asks, when the schedule says so; the other
waits to be asked and answers at once, whatever the training thread is doing. Neither
ever waits for a third learner, so no topology can deadlock. This module decides nothing
about optimizers and knows nothing of Lightning.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.coordination import LearnerFailed
from lightning_adpsgd.mixing import (
    Communication,
    Order,
    Schedule,
    Statistics,
    Tally,
    to_averaging_dtype,
)
from lightning_adpsgd.parameters import shard
from lightning_adpsgd.topology import asks
from lightning_adpsgd.transport import (
    Gathering,
    Node,
    Swap,
    Transport,
    lane_of,
    swap,
)

# What an asker says before anything else on its lane.
_ASK, _ALIVE, _LEAVE = 1, 2, 3
# Elements that a merge takes at once: three such parts fit into a core's cache.
_MERGE_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class GossipOptions:
    """How the engine exchanges.

    Args:
        order: "step_then_average" merges after the optimizer step, "average_then_step"
            between the gradient and the step.
        every: Optimizer steps per round of asking.
        wire_dtype: What travels; the average is taken in float32 or better.
        max_staleness: Steps that a learner may go without a completed exchange before
            its training thread waits for one; none: it never waits.
        timeout: For how long a peer may say nothing before it counts as lost.
        chunk_elements: Elements per message.
    """

    order: Order = "step_then_average"
    every: int = 1
    wire_dtype: torch.dtype | None = None
    max_staleness: int | None = None
    timeout: timedelta = timedelta(minutes=5)
    chunk_elements: int = 1 << 20


class _Chunk(NamedTuple):
    snapshot: Tensor
    change: Tensor


class Gossip(Communication):
    """The asynchronous engine of one learner.

    Threads and what they share, all of it under `_state`, a condition that is held for
    memory operations and never for a wait on the network:

    - `_snapshots` (x), `_changes` (d): written by asking and answering threads, one
      chunk at a time, and by the training thread in a merge.
    - `_tally`, `_ages`, `_active`, `_paused`, `_last_exchange_step`: counters.
    - `_error`: written by the first thread that fails, read by the training thread.

    The flat vectors (w) are touched by the training thread alone.

    Args:
        vectors: The flat weights.
        transport: To the counterparts in the other super-learners.
        node: The learners of this super-learner.
        schedule: Who asks whom; a pair exchange uses a = gain / 2.
        options: How.
        on_error: Called once, by the thread that lost a peer.
    """

    def __init__(
        self,
        vectors: Sequence[Tensor],
        transport: Transport,
        node: Node,
        schedule: Schedule,
        options: GossipOptions,
        on_error: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._vectors, self._transport, self._node = vectors, transport, node
        self._schedule, self._options, self._on_error = schedule, options, on_error
        self._state = threading.Condition()
        self._shards = [shard(v, node.index, node.size) for v in vectors]
        self._snapshots = [to_averaging_dtype(part) for part in self._shards]
        self._changes = [torch.zeros_like(x) for x in self._snapshots]
        self._chunks = _chunks(self._snapshots, self._changes, options.chunk_elements)
        self._gatherer = _Gatherer(vectors, self._snapshots, node, options.timeout)
        self._peers = schedule.topology.peers(transport.index, transport.size)
        self._due = {peer: threading.Event() for peer in self._peers}
        self._threads: list[threading.Thread] = []
        self._tally, self._ages = Tally(), list[int]()
        self._step = self._snapshot_step = self._last_exchange_step = 0
        self._active, self._paused, self._leaving = 0, False, threading.Event()
        self._error: BaseException | None = None

    @override
    def start(self) -> None:
        self._take_snapshot()
        for peer in self._peers:
            self._start_thread(self._ask_peer, peer, "ask")
            self._start_thread(self._answer_peer, peer, "answer")

    @override
    def before_update(self) -> None:
        if self._options.order == "average_then_step":
            self._merge()

    @override
    def after_update(self) -> None:
        self._step += 1
        if self._options.order == "step_then_average":
            self._merge()
        self._wait_if_too_stale()
        if self._step % self._options.every == 0:
            self._call_round(self._step // self._options.every)

    @override
    def pause(self) -> None:
        with self._state:
            self._paused = True
        self._wait_until(lambda: self._active == 0, "exchanges in flight to end")

    @override
    def settle(self) -> None:
        # Whoever asked has its answer; this end may still be adding the last chunk.
        self._wait_until(lambda: self._active == 0, "answers in flight to end")
        self._gatherer.finish_into(self._vectors)
        with self._state:
            self._gatherer.take(self._changes)
        self._gatherer.begin()
        self._gatherer.finish_into(self._vectors)
        self._take_snapshot()
        self._count_merge()

    @override
    def resume(self) -> None:
        self._take_snapshot()
        with self._state:
            self._paused = False

    @override
    def stop(self) -> None:
        self._leave()
        self._join(self._options.timeout.total_seconds())
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:
            raise RuntimeError(
                f"threads {left} of learner {self._transport.index} did not end within "
                f"{self._options.timeout}: their peers have not said goodbye"
            )

    @override
    def release(self) -> None:
        with self._state:
            self._error = self._error or LearnerFailed("a learner of the job failed")
            self._state.notify_all()
        self._leave()

    @override
    def abort(self) -> None:
        self.release()
        # A peer that lives lets go as soon as it knows; one that does not is not waited
        # for: its threads are daemons.
        self._join(5.0)

    @override
    def statistics(self) -> Statistics:
        with self._state:
            exposed = self._tally.exposed_seconds + self._gatherer.seconds
            return self._tally.snapshot()._replace(exposed_seconds=exposed)

    # --- the training thread

    def _merge(self) -> None:
        self.raise_if_failed()
        self._gatherer.finish_into(self._vectors)
        if self._node.size == 1:
            self._merge_at_once()
        else:
            self._merge_through_node()

    @torch.no_grad()
    def _merge_at_once(self) -> None:
        vectors = zip(self._vectors, self._snapshots, self._changes, strict=True)
        for vector, snapshot, change in vectors:
            for part, x, d in zip(
                vector.split(_MERGE_ELEMENTS),
                snapshot.split(_MERGE_ELEMENTS),
                change.split(_MERGE_ELEMENTS),
                strict=True,
            ):
                with self._exposed_state():
                    part.add_(d)
                    d.zero_()
                    x.copy_(part)
        self._count_merge()

    @torch.no_grad()
    def _merge_through_node(self) -> None:
        # All learners of the node must merge the same change at the same step, so it is
        # gathered while the next step computes, and merged at its end.
        with self._exposed_state():
            self._refresh_snapshots()
            self._gatherer.take(self._changes)
        self._gatherer.begin()
        self._count_merge()

    @contextmanager
    def _exposed_state(self) -> Iterator[None]:
        begin = time.perf_counter()
        with self._state:
            self._tally.exposed_seconds += time.perf_counter() - begin
            yield

    def _count_merge(self) -> None:
        late = 0 if self._node.size == 1 else 1
        with self._state:
            for step in self._ages:
                self._tally.merged(self._step - step + late)
            self._tally.merges += bool(self._ages)
            self._ages.clear()
            self._snapshot_step = self._step

    @torch.no_grad()
    def _take_snapshot(self) -> None:
        with self._state:
            self._refresh_snapshots()
            self._snapshot_step = self._step

    def _refresh_snapshots(self) -> None:
        """x = w + d, with `_state` held: d is not merged yet."""
        pairs = zip(self._snapshots, self._shards, self._changes, strict=True)
        for snapshot, part, change in pairs:
            torch.add(part, change, out=snapshot)

    def _call_round(self, round: int) -> None:
        mixing = self._schedule.mixing(round)
        for peer in asks(mixing, round, self._transport.index):
            self._due[peer].set()

    def _wait_if_too_stale(self) -> None:
        limit = self._options.max_staleness
        if limit is None or self._step - self._last_exchange_step <= limit:
            return
        step = self._step
        # All of them, and whosever turn it is: two stale ends must not wait for each
        # other's question, nor one for a straggler's.
        for due in self._due.values():
            due.set()
        self._wait_until(
            lambda: step - self._last_exchange_step <= limit,
            f"an exchange, as `max_staleness={limit}` asks",
        )

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        # Exchanges time out by themselves, so that this ends within two timeouts.
        limit = 2 * self._options.timeout.total_seconds()
        with self._state:
            done = self._state.wait_for(
                lambda: condition() or self._error is not None, limit
            )
        self.raise_if_failed()
        if not done:
            raise RuntimeError(
                f"learner {self._transport.index} waited {limit:g} s for {what}; raise "
                "`timeout` if the network is that slow"
            )

    def raise_if_failed(self) -> None:
        """Raises what a communication thread met, in the thread that calls."""
        if self._error is not None:
            raise self._error

    # --- the communication threads

    def _start_thread(self, work: Callable[[int], None], peer: int, verb: str) -> None:
        thread = threading.Thread(target=self._guard, args=(work, peer), daemon=True)
        thread.name = f"adpsgd-{verb}-{peer}"
        self._threads.append(thread)
        thread.start()

    def _guard(self, work: Callable[[int], None], peer: int) -> None:
        try:
            work(peer)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._state:
            first = self._error is None and not self._leaving.is_set()
            if first:
                self._error = error
            self._state.notify_all()
        if first:
            self._on_error(str(error))

    def _ask_peer(self, peer: int) -> None:
        exchange = _Exchange(self, peer, lane_of(self._transport.index, peer))
        pause_s = min(10.0, self._options.timeout.total_seconds() / 4)
        while not self._leaving.is_set():
            # Cleared only if seen, or a call at the end of the pause would be lost.
            if due := self._due[peer].wait(pause_s):
                self._due[peer].clear()
            if self._leaving.is_set() or self._error is not None:
                break
            if due and self._enter():
                exchange.say(_ASK)
                exchange.run()
                self._exit()
            else:
                exchange.say(_ALIVE)
        exchange.say(_LEAVE)

    def _answer_peer(self, peer: int) -> None:
        exchange = _Exchange(self, peer, lane_of(peer, self._transport.index))
        while (word := exchange.hear()) != _LEAVE:
            if word == _ASK:
                with self._state:
                    self._active += 1
                exchange.run()
                self._exit()

    def _enter(self) -> bool:
        with self._state:
            self._active += not self._paused
            return not self._paused

    def _exit(self) -> None:
        with self._state:
            self._active -= 1
            self._state.notify_all()

    def _leave(self) -> None:
        self._leaving.set()
        for due in self._due.values():
            due.set()

    def _join(self, seconds: float) -> None:
        deadline = time.perf_counter() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.perf_counter()))


class _Exchange:
    """Pair averages with one peer on one lane; used by a single thread.

    It owns two buffers of one chunk and writes the engine's copies under its lock.
    """

    def __init__(self, engine: Gossip, peer: int, lane: int) -> None:
        self._engine, self._peer, self._lane = engine, peer, lane
        self._timeout = engine._options.timeout
        self._word = torch.zeros(1, dtype=torch.int64)
        self._buffers: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def say(self, word: int) -> None:
        """Sends one word on this lane."""
        message = Swap(self._peer, self._word.fill_(word), None)
        swap(self._engine._transport, self._lane, [message], self._timeout)

    def hear(self) -> int:
        """Receives one word from this lane."""
        message = Swap(self._peer, None, self._word)
        swap(self._engine._transport, self._lane, [message], self._timeout)
        return int(self._word)

    @torch.no_grad()
    def run(self) -> None:
        """Averages all chunks with the peer, who does the same at the other end."""
        engine = self._engine
        step, finite, sent = engine._snapshot_step, True, 0
        for chunk in engine._chunks:
            outgoing, incoming = self._buffers_for(chunk)
            with engine._state:
                outgoing.copy_(chunk.snapshot)
            crossing = Swap(self._peer, outgoing, incoming)
            swap(engine._transport, self._lane, [crossing], self._timeout)
            sent += outgoing.numel() * outgoing.element_size()
            finite &= self._apply(chunk, outgoing, incoming)
        self._count(step, finite, sent)

    def _apply(self, chunk: _Chunk, outgoing: Tensor, incoming: Tensor) -> bool:
        # Both ends see the same two vectors as they travelled, rounding included, and
        # so compute the same change with opposite signs.
        if incoming.dtype == chunk.change.dtype:
            change = incoming.sub_(outgoing)  # no allocation where none is needed
        else:
            change = incoming.to(chunk.change.dtype).sub_(outgoing)
        change.mul_(self._engine._schedule.gain / 2)
        if not torch.isfinite(change.sum()):
            return False
        with self._engine._state:
            chunk.snapshot.add_(change)
            chunk.change.add_(change)
        return True

    def _count(self, step: int, finite: bool, sent: int) -> None:
        engine = self._engine
        with engine._state:
            engine._tally.bytes_sent += sent
            engine._tally.exchanges += finite
            engine._tally.refused += not finite
            engine._last_exchange_step = engine._step
            engine._ages.append(step)

    def _buffers_for(self, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        dtype = self._engine._options.wire_dtype or chunk.snapshot.dtype
        if dtype not in self._buffers:
            size = self._engine._options.chunk_elements
            self._buffers[dtype] = (
                torch.empty(size, dtype=dtype),
                torch.empty(size, dtype=dtype),
            )
        outgoing, incoming = self._buffers[dtype]
        length = chunk.snapshot.numel()
        return outgoing[:length], incoming[:length]


class _Gatherer:
    """Collects the shards of a change inside the node, one merge ahead of its use."""

    def __init__(
        self,
        vectors: Sequence[Tensor],
        snapshots: Sequence[Tensor],
        node: Node,
        timeout: timedelta,
    ) -> None:
        self._node, self._timeout = node, timeout
        self._gathering: Gathering | None = None
        self._parts = [torch.zeros_like(x) for x in snapshots]
        self._gathered = [
            torch.zeros(v.numel(), dtype=x.dtype)
            for v, x in zip(vectors, snapshots, strict=True)
        ]
        self.seconds = 0.0

    def take(self, changes: Sequence[Tensor]) -> None:
        """Moves the changes of this learner's shards here, leaving zeros."""
        for part, change in zip(self._parts, changes, strict=True):
            part.copy_(change)
            change.zero_()

    def begin(self) -> None:
        """Starts the gather of this learner's parts with those of its node."""
        self._gathering = self._node.start_gather(self._parts, self._gathered)

    @torch.no_grad()
    def finish_into(self, vectors: Sequence[Tensor]) -> None:
        """Waits for the started gather, if any, and adds it to the weights."""
        if self._gathering is None:
            return
        self.seconds += self._gathering.wait(self._timeout)
        self._gathering = None
        for vector, change in zip(vectors, self._gathered, strict=True):
            vector.add_(change)


def _chunks(
    snapshots: Sequence[Tensor], changes: Sequence[Tensor], size: int
) -> list[_Chunk]:
    return [
        _Chunk(x, d)
        for snapshot, change in zip(snapshots, changes, strict=True)
        for x, d in zip(snapshot.split(size), change.split(size), strict=True)
    ]
