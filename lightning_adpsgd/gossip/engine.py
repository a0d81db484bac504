"""Asynchronous gossip: averaging with peers in the background, for which nobody waits.

A super-learner has two copies of its weights (AD-PSGD, arXiv 1710.06952, with the merge
written as a difference so that no local step is lost)::

    training side        w      changed by the optimizer and, at step boundaries, merges
    communication side   x      w + d: what an exchange reads
                         d      the sum of what exchanges changed since the last merge

    exchange of i and j  c = a (x_j - x_i);  d_i += c;  d_j -= c
    merge of i           w_i += d_i;  d_i = 0

Both ends of an exchange compute c from the same pair of messages, so that
``sum_i (w_i + d_i)`` is changed by gradients alone, whatever the delays and the order.

For each peer there are two threads. One asks, when the schedule says so; the other
waits to be asked and answers at once, whatever the training thread is doing. Neither
ever waits for a third learner, so no topology can deadlock. Peers are all there from
the start to the end, and the loss of one is the failure of the learner; or, with
`on_lost`, they come and go, and the loss of one ends its two threads and nothing else.
This module decides nothing about optimizers and knows nothing of Lightning. It is the
training thread's side; the rest is in ::

    replica, merging       the two copies, and how d comes into w
    exchange               what the two ends of a lane say and do
    asking, answering      what the two threads of a peer do
    traffic                which exchange may begin, and when
    threads                who runs, and the error that ends the learner
    account, recovery      what came of it; what a sick learner does
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.coordination.store import LearnerFailed
from lightning_adpsgd.gossip.account import Account
from lightning_adpsgd.gossip.answering import Answerer
from lightning_adpsgd.gossip.asking import Asker
from lightning_adpsgd.gossip.exchange import Buffers, Lane, Position, Pulled
from lightning_adpsgd.gossip.merging import Merging
from lightning_adpsgd.gossip.protocol import due_round
from lightning_adpsgd.gossip.recovery import Recovery
from lightning_adpsgd.gossip.threads import Threads
from lightning_adpsgd.gossip.traffic import Traffic
from lightning_adpsgd.mixing.communication import Communication
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.mixing.super_learner import Node, Votes
from lightning_adpsgd.mixing.synchronous import Order
from lightning_adpsgd.topology.live import Circle
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.base import PeerLost, Transport, lane_of
from lightning_adpsgd.weights.flat import shard
from lightning_adpsgd.weights.replica import Replica, as_real


@dataclass(frozen=True)
class GossipOptions:
    """How the engine exchanges.

    Args:
        order: "step_then_average" merges after the optimizer step, "average_then_step"
            between the gradient and the step.
        every: Optimizer steps per round of asking.
        wire_dtype: What travels: a floating-point type, or int8 for one byte a number
            on a lattice; the average is taken in float32 or better.
        max_staleness: Steps that a learner may go without a completed exchange before
            its training thread waits for one; none: it never waits.
        timeout: For how long a peer may say nothing before it counts as lost.
        link_budget: Bytes per second that a learner sends, on average; none: as many as
            the link takes.
        cpu_share: Of a learner's processor time, what exchanges may take where the
            training thread has to queue for a core; 1: whatever they need.
        chunk_elements: Elements per message.
        max_reloads: How often a learner whose weights went astray may go on from those
            of a peer; none: it never does, and is left out.
        on_reload: Called by the training thread when it has done so.
    """

    order: Order = "step_then_average"
    every: int = 1
    wire_dtype: torch.dtype | None = None
    max_staleness: int | None = None
    timeout: timedelta = timedelta(minutes=5)
    link_budget: float | None = None
    cpu_share: float = 1.0
    chunk_elements: int = 1 << 20
    max_reloads: int | None = 3
    on_reload: Callable[[], None] = lambda: None


class Gossip(Communication):
    """The asynchronous engine of one learner.

    `_state`, a condition, is the lock of all that threads share here and in the parts
    that it is given to. It is held for memory operations and never for a wait on the
    network. Under it are, by peer, `_askers` and `_answerers`, which tell the two
    threads of a peer what to do.

    `_adoption`, weights to go on from, is left by any thread for the training thread.
    `circle` is replaced as a whole, by the thread that knows who is there, and read by
    the training thread. The flat vectors (w) are written by the training thread alone.

    Args:
        vectors: The flat weights.
        transport: To the counterparts in the other super-learners.
        node: The learners of this super-learner.
        schedule: Who asks whom; an exchange of two that meet alone uses a = gain / 2.
        options: How.
        on_error: Called once, by the thread that lost a peer.
        on_lost: Called by a thread that lost a peer, with its number and the error,
            where peers come and go; none: they do not.
        on_left: Called by a thread that answered a peer which now asks no more, with
            its number, and whether it leaves the others altogether.

    Attributes:
        circle: Who is asked in which round.
        position: How far this learner has come, for those who pull its weights.
        wants_to_leave: Whether all learners of the node are to end at one step; set by
            any thread of any of them.
    """

    def __init__(
        self,
        vectors: Sequence[Tensor],
        transport: Transport,
        node: Node,
        schedule: Schedule,
        options: GossipOptions,
        on_error: Callable[[str], None] = lambda message: None,
        on_lost: Callable[[int, PeerLost], None] | None = None,
        on_left: Callable[[int, bool], None] = lambda peer, for_good: None,
    ) -> None:
        self._transport, self._node, self._gain = transport, node, schedule.gain
        self._options, self._on_left = options, on_left
        index, timeout = transport.index, options.timeout
        self._state = state = threading.Condition()
        vectors = [as_real(vector) for vector in vectors]
        self._shards = self._shards_of(vectors)
        self._replica = Replica(self._shards, options.chunk_elements, state)
        self._buffers = Buffers(self._replica, options.wire_dtype)
        self._account = Account(index, self._replica, state)
        self._merging = Merging(vectors, self._replica, node, timeout, self._account)
        self._traffic = Traffic(
            self._account,
            state,
            options.link_budget,
            options.cpu_share,
            sum(vector.nbytes for vector in self._shards),
            transport.overhead,
        )
        self._threads = Threads(self._replica.device, state, on_error, on_lost)
        self._recovery = Recovery(
            index,
            vectors,
            node,
            self._merging,
            self._replica,
            self._account,
            self._threads,
            self.pull,
            options.max_reloads,
            timeout,
            options.on_reload,
        )
        numbers = range(schedule.num_super_learners) if on_lost is None else ()
        self.circle = Circle.of(schedule, numbers, index)
        self.position: Callable[[], Position] = lambda: Position(self._replica.step)
        self.wants_to_leave = False
        self._askers: dict[int, Asker] = {}
        self._answerers: dict[int, Answerer] = {}
        self._adoption: tuple[Sequence[Tensor], threading.Event] | None = None

    @override
    def start(self) -> None:
        self._traffic.spare_this_thread()
        # What this thread has queued on the weights so far comes before any exchange.
        self._replica.show(self._shards)
        for peer in self.circle.peers():
            self.add_peer(peer)
            self.answer_peer(peer)

    def add_peer(self, peer: int) -> None:
        """Begins to ask a peer when its turn is; nothing if it is asked already."""
        with self._state:
            if peer in self._askers:
                return
            asker = self._askers[peer] = Asker(
                peer, self._traffic, self._threads, self._state, self._options.timeout
            )
            self._account.open(peer)
        self._threads.start("ask", peer, lambda: self._ask(peer, asker))

    def answer_peer(self, peer: int) -> None:
        """Begins to answer a peer, whoever it is, until it leaves or is lost."""
        answerer = Answerer(peer, self._traffic, lambda: self.position(), self._on_left)
        with self._state:
            self._answerers[peer] = answerer
        self._threads.start("answer", peer, lambda: self._answer(peer, answerer))

    def drop_peer(self, peer: int) -> threading.Event:
        """Asks a peer no more; an exchange under way is made to its end if it can.

        Returns:
            Set when that has come.
        """
        with self._state:
            self._account.close(peer)
            if (asker := self._askers.pop(peer, None)) is not None:
                asker.drop()
                return asker.ended
        (ended := threading.Event()).set()
        return ended

    def forget_peer(self, peer: int) -> None:
        """Neither asks a peer any more nor says that it was lost, when it is."""
        with self._state:
            if (answerer := self._answerers.pop(peer, None)) is not None:
                answerer.forget()
        self.drop_peer(peer)

    def pull(self, peer: int) -> "Future[Pulled]":
        """Asks a peer that was added for its weights; nobody's weights change.

        Returns:
            A future of them, or of the `PeerLost` that came in the way.
        """
        with self._state:
            if (asker := self._askers.get(peer)) is not None:
                return asker.pull()
        future: Future[Pulled] = Future()
        future.set_exception(PeerLost(peer, "pulling its weights", "not connected"))
        return future

    def adopt(self, values: Sequence[Tensor]) -> threading.Event:
        """Goes on from other weights at the next step boundary; for any thread.

        Returns:
            Set when the training thread has taken them up.
        """
        adopted = threading.Event()
        self._adoption = values, adopted
        return adopted

    def put(self, values: Sequence[Tensor]) -> None:
        """Goes on from other weights at once; for the training thread."""
        self._replica.put(values)

    @property
    def leaves(self) -> bool:
        """Whether all learners of the node have come to the step at which they end."""
        alone = self._node.size == 1
        return self.wants_to_leave if alone else self._merging.agreed.leave

    def merge_all(self) -> None:
        """Merges all that was averaged; for the training thread, after `drain`."""
        self._merging.merge_all()

    def finish_merge(self) -> None:
        """Ends a merge that the learners of a node have begun together."""
        self._merging.finish()

    def snapshot(self) -> list[Tensor]:
        """What a peer would pull; for the training thread."""
        return self._replica.snapshot()

    def write(self, values: Sequence[Tensor]) -> None:
        """Writes what is like a snapshot in the place of w, and nothing else."""
        self._replica.spread(values, self._shards)

    @property
    @override
    def step_and_round(self) -> tuple[int, int]:
        return self._replica.step, self._replica.step // self._options.every

    @override
    def go_on_from(self, step: int, round: int) -> None:
        self._replica.step = step
        self._account.go_on_from(step)

    @override
    def before_update(self) -> None:
        self._replica.updating = True
        if self._options.order == "average_then_step":
            self._merge()

    @override
    def after_update(self) -> None:
        self._replica.step += 1
        if self._options.order == "step_then_average":
            self._merge()
        self._take_up()
        self._replica.updating = False
        self._recovery.recover_if_ill()
        self._wait_if_too_stale()
        round = due_round(self._replica.step, self._options.every)
        if round is not None:
            self._call_round(round)

    @override
    def pause(self) -> None:
        self._traffic.pause()
        self._wait_until(self._traffic.is_idle, "exchanges in flight to end")

    def drain(self, seconds: float) -> bool:
        """Begins no exchange any more; returns whether those under way have ended."""
        self._traffic.pause()
        with self._state:
            return self._state.wait_for(self._traffic.is_idle, seconds)

    @override
    def settle(self) -> None:
        # Whoever asked has its answer; this end may still be adding the last chunk.
        self._wait_until(self._traffic.is_idle, "answers in flight to end")
        self._merging.merge_all()

    @override
    def set_aside(self, vectors: Sequence[Tensor]) -> None:
        # A peer that has resumed earlier asks at any time.
        self._replica.show(self._shards_of([as_real(vector) for vector in vectors]))

    @override
    def resume(self) -> None:
        self._replica.show(self._shards)
        self._traffic.resume()

    @override
    def stop(self) -> None:
        self._leave()
        left = self._join(self._options.timeout.total_seconds())
        if left:
            raise RuntimeError(
                f"threads {left} of learner {self._transport.index} did not end within "
                f"{self._options.timeout}: their peers have not said goodbye"
            )

    def say_goodbye(self, seconds: float) -> None:
        """Tells those who are asked that this end leaves; waits that long at most."""
        self._leave()
        self._join(seconds)

    @override
    def release(self) -> None:
        self._threads.end_with(LearnerFailed("a learner of the job failed"))
        self._leave()

    @override
    def abort(self) -> None:
        self.release()
        # A peer that lives lets go as soon as it knows; one that does not is not waited
        # for: its threads are daemons.
        self._join(5.0)

    @override
    def statistics(self) -> Statistics:
        return self._account.statistics(self._merging.seconds)

    def fail(self, error: BaseException) -> None:
        """Ends the learner with an error of a communication thread."""
        self._threads.fail(error)

    def raise_if_failed(self) -> None:
        """Raises what a communication thread met, in the thread that calls."""
        self._threads.raise_if_failed()

    def _shards_of(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        return [shard(v, self._node.index, self._node.size) for v in vectors]

    def _take_up(self) -> None:
        adoption, self._adoption = self._adoption, None
        if adoption is not None:
            values, adopted = adoption
            self._replica.put(values)
            adopted.set()

    def _merge(self) -> None:
        self.raise_if_failed()
        votes = Votes(self._recovery.is_wanted, self.wants_to_leave)
        if seconds := self._merging.merge(votes):
            self._traffic.merged(seconds)

    def _call_round(self, round: int) -> None:
        for peer in self.circle.asks(round):
            if (asker := self._askers.get(peer)) is not None:
                asker.call()

    def _wait_if_too_stale(self) -> None:
        limit = self._options.max_staleness
        if limit is None or self._account.steps_alone <= limit:
            return
        # All of them, and whosever turn it is: two stale ends must not wait for each
        # other's question, nor one for a straggler's.
        self._call_all()
        # Nobody who is waited for rests to spare a link or the cores.
        self._traffic.hurry_on()
        self._wait_until(
            lambda: self._account.steps_alone <= limit,
            f"an exchange, as `max_staleness={limit}` asks",
        )
        self._traffic.hurry.clear()

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        # Exchanges time out by themselves, so that this ends within two timeouts.
        limit = 2 * self._options.timeout.total_seconds()
        with self._state:
            done = self._state.wait_for(
                lambda: condition() or self._threads.has_failed, limit
            )
        self.raise_if_failed()
        if not done:
            raise RuntimeError(
                f"learner {self._transport.index} waited {limit:g} s for {what}; raise "
                "`timeout` if the network is that slow"
            )

    def _ask(self, peer: int, asker: Asker) -> None:
        try:
            asker.run(self._lane(peer, lane_of(self._transport.index, peer)))
        finally:
            with self._state:
                if self._askers.get(peer) is asker:
                    del self._askers[peer]
            asker.give_up()

    def _answer(self, peer: int, answerer: Answerer) -> None:
        answerer.run(self._lane(peer, lane_of(peer, self._transport.index)))

    def _lane(self, peer: int, number: int) -> Lane:
        return Lane(
            self._transport,
            peer,
            number,
            self._replica,
            self._buffers,
            self._options.wire_dtype,
            self._gain,
            self._options.timeout,
        )

    def _leave(self) -> None:
        self._threads.leaving.set()
        self._traffic.hurry_on()
        self._call_all()

    def _call_all(self) -> None:
        with self._state:
            asked = list(self._askers.values())
        for asker in asked:
            asker.call()

    def _join(self, seconds: float) -> list[str]:
        """Waits for the threads; names those that have not ended in time."""
        deadline = time.perf_counter() + seconds
        left = self._threads.join(deadline)
        self._merging.stop(max(0.0, deadline - time.perf_counter()))
        return left
