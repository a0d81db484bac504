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
ever waits for a third learner, so no topology can deadlock. What they say is in
`exchange`, the two copies are in `replica`. Peers are all there from the start to the
end, and the loss of one is the failure of the learner; or, with `on_lost`, they come
and go, and the loss of one ends its two threads and nothing else. This module decides
nothing about optimizers and knows nothing of Lightning.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.circle import Circle
from lightning_adpsgd.coordination import LearnerFailed
from lightning_adpsgd.exchange import (
    ALIVE,
    ASK,
    LEAVE,
    PULL,
    Buffers,
    Lane,
    Outcome,
    Position,
    Pulled,
)
from lightning_adpsgd.health import Health, SickLearner
from lightning_adpsgd.mixing import Communication, Order, Schedule, Statistics, Tally
from lightning_adpsgd.node import Node, ShardMerge
from lightning_adpsgd.pacing import CoreShare, Pacer
from lightning_adpsgd.parameters import shard
from lightning_adpsgd.protocol import UnderWay, due_round
from lightning_adpsgd.replica import Replica, as_real
from lightning_adpsgd.streams import side_stream
from lightning_adpsgd.transport import PeerLost, Transport, lane_of

_log = logging.getLogger(__name__)


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


class _Asking:
    """What the thread that asks a peer is told; `pulls` is guarded by the engine.

    Attributes:
        called: There is something to do, or to end.
        due: An exchange is to be asked for.
        gone: The peer is not to be asked any more.
        ended: The thread has said its last.
        pulls: To be answered with the peer's weights.
    """

    def __init__(self) -> None:
        self.called, self.due = threading.Event(), threading.Event()
        self.gone, self.ended = threading.Event(), threading.Event()
        self.pulls: deque[Future[Pulled]] = deque()

    def call(self) -> None:
        """An exchange is due."""
        self.due.set()
        self.called.set()


class Gossip(Communication):
    """The asynchronous engine of one learner.

    Threads and what they share, all of it under `_state`, a condition that is held for
    memory operations and never for a wait on the network:

    - d, in `_replica`: written by asking and answering threads, one part at a
      time, and by the training thread in a merge.
    - `_tally`, `_ages`, `_under_way`, `_paused`, `_last_exchange_step`,
      `_last_steps` (by peer): counters.
    - `_health`; `_refusing`: peers whose weights are being left out.
    - `_asking`, `_answering`: by peer, what the thread that asks it, and the one that
      answers it, is told; `_threads`: all that run.
    - `_error`: written by the first thread that fails, read by the training thread.
    - `_adoption`: weights to go on from, left by any thread for the training thread.

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
        self._options, self._on_error = options, on_error
        self._on_lost, self._on_left = on_lost, on_left
        self._state = threading.Condition()
        vectors = [as_real(vector) for vector in vectors]
        self._shards = self._shards_of(vectors)
        self._replica = Replica(self._shards, options.chunk_elements, self._state)
        self._merger = (
            ShardMerge(vectors, self._replica, node, options.timeout)
            if node.size > 1
            else None
        )
        self._buffers = Buffers(self._replica, options.wire_dtype)
        self._pacer = Pacer(options.link_budget)
        self._cores = CoreShare(options.cpu_share)
        numbers = range(schedule.num_super_learners) if on_lost is None else ()
        self.circle = Circle.of(schedule, numbers, transport.index)
        self.position: Callable[[], Position] = lambda: Position(self._step)
        self._asking: dict[int, _Asking] = {}
        self._answering: dict[int, threading.Event] = {}
        self._threads: list[threading.Thread] = []
        self._tally, self._ages = Tally(), list[int]()
        self._step = self._last_exchange_step = 0
        self._last_steps: dict[int, int] = {}
        self._adoption: tuple[Sequence[Tensor], threading.Event] | None = None
        self._under_way, self._paused = UnderWay(), False
        self._hurry, self._leaving = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._health, self._refusing = Health(), set[int]()

    @override
    def start(self) -> None:
        self._cores.watch_this_thread()
        # What this thread has queued on the weights so far comes before any exchange.
        self._replica.show(self._shards)
        for peer in self.circle.peers():
            self.add_peer(peer)
            self.answer_peer(peer)

    def add_peer(self, peer: int) -> None:
        """Begins to ask a peer when its turn is; nothing if it is asked already."""
        with self._state:
            if peer in self._asking:
                return
            asking = self._asking[peer] = _Asking()
            self._last_steps[peer] = self._step
        self._start_thread(lambda peer: self._ask_peer(peer, asking), peer, "ask")

    def answer_peer(self, peer: int) -> None:
        """Begins to answer a peer, whoever it is, until it leaves or is lost."""
        with self._state:
            gone = self._answering[peer] = threading.Event()
        self._start_thread(lambda peer: self._answer_peer(peer, gone), peer, "answer")

    def drop_peer(self, peer: int) -> threading.Event:
        """Asks a peer no more; an exchange under way is made to its end if it can.

        Returns:
            Set when that has come.
        """
        with self._state:
            asking = self._asking.pop(peer, None)
            self._last_steps.pop(peer, None)
            if asking is not None:
                asking.gone.set()
                self._state.notify_all()
        if asking is None:
            (ended := threading.Event()).set()
            return ended
        asking.called.set()
        return asking.ended

    def forget_peer(self, peer: int) -> None:
        """Neither asks a peer any more nor says that it was lost, when it is."""
        with self._state:
            if (gone := self._answering.pop(peer, None)) is not None:
                gone.set()
        self.drop_peer(peer)

    def pull(self, peer: int) -> "Future[Pulled]":
        """Asks a peer that was added for its weights; nobody's weights change.

        Returns:
            A future of them, or of the `PeerLost` that came in the way.
        """
        future: Future[Pulled] = Future()
        with self._state:
            asking = self._asking.get(peer)
            if asking is not None:
                asking.pulls.append(future)
                self._state.notify_all()
        if asking is None:
            future.set_exception(PeerLost(peer, "pulling its weights", "not connected"))
        else:
            asking.called.set()
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

    @torch.no_grad()
    def merge_all(self) -> None:
        """Merges all that was averaged; for the training thread, after `drain`."""
        self._merge_all()
        self._count_merge()

    def finish_merge(self) -> None:
        """Ends a merge that the learners of a node have begun together."""
        if self._merger is not None:
            self._merger.finish()

    def snapshot(self) -> list[Tensor]:
        """What a peer would pull; for the training thread."""
        return self._replica.snapshot()

    def write(self, values: Sequence[Tensor]) -> None:
        """Writes what is like a snapshot in the place of w, and nothing else."""
        self._replica.spread(values, self._shards)

    @property
    @override
    def step_and_round(self) -> tuple[int, int]:
        return self._step, self._step // self._options.every

    @override
    def go_on_from(self, step: int, round: int) -> None:
        self._step = self._last_exchange_step = self._replica.step = step

    @override
    def before_update(self) -> None:
        self._replica.updating = True
        if self._options.order == "average_then_step":
            self._merge()

    @override
    def after_update(self) -> None:
        self._step += 1
        self._replica.step = self._step
        if self._options.order == "step_then_average":
            self._merge()
        self._take_up()
        self._replica.updating = False
        if self._health.illness is not None:
            self._recover(self._health.illness)
        self._wait_if_too_stale()
        if (round := due_round(self._step, self._options.every)) is not None:
            self._call_round(round)

    @override
    def pause(self) -> None:
        with self._state:
            self._paused = True
        self._hurry_on()
        self._wait_until(self._is_idle, "exchanges in flight to end")

    def drain(self, seconds: float) -> bool:
        """Begins no exchange any more; returns whether those under way have ended."""
        with self._state:
            self._paused = True
        self._hurry_on()
        with self._state:
            return self._state.wait_for(self._is_idle, seconds)

    @override
    def settle(self) -> None:
        # Whoever asked has its answer; this end may still be adding the last chunk.
        self._wait_until(self._is_idle, "answers in flight to end")
        self._merge_all()
        self._count_merge()

    @override
    def set_aside(self, vectors: Sequence[Tensor]) -> None:
        # A peer that has resumed earlier asks at any time.
        self._replica.show(self._shards_of([as_real(vector) for vector in vectors]))

    @override
    def resume(self) -> None:
        self._replica.show(self._shards)
        self._hurry.clear()
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

    def say_goodbye(self, seconds: float) -> None:
        """Tells those who are asked that this end leaves; waits that long at most."""
        self._leave()
        self._join(seconds)

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
        waited = self._replica.wait_seconds
        waited += self._merger.seconds if self._merger is not None else 0.0
        with self._state:
            exposed = self._tally.exposed_seconds + waited
            ages = {peer: self._step - last for peer, last in self._last_steps.items()}
            return self._tally.snapshot()._replace(
                exposed_seconds=exposed, peer_ages=ages
            )

    def _shards_of(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        return [shard(v, self._node.index, self._node.size) for v in vectors]

    # --- the training thread

    def _take_up(self) -> None:
        adoption, self._adoption = self._adoption, None
        if adoption is not None:
            values, adopted = adoption
            self._replica.put(values)
            adopted.set()

    @torch.no_grad()
    def _merge(self) -> None:
        self.raise_if_failed()
        if self._merger is None:
            self._replica.merge()
        else:
            # All learners of the node must merge the same change at the same step, so
            # it is gathered while the next step computes, and merged at its end.
            self._merger.finish()
            self._merger.begin()
        self._count_merge()

    @torch.no_grad()
    def _merge_all(self) -> None:
        if self._merger is None:
            self._replica.merge_all()
        else:
            self._merger.finish()
            self._merger.begin()
            self._merger.finish()

    def _count_merge(self) -> None:
        late = 0 if self._merger is None else 1
        if not self._ages or not self._state.acquire(blocking=False):
            return
        try:
            for step in self._ages:
                self._tally.merged(self._step - step + late)
            self._tally.merges += 1
            self._ages.clear()
        finally:
            self._state.release()

    def _recover(self, illness: str) -> None:
        limit, done = self._options.max_reloads, self._tally.reloads
        # The learners of a larger super-learner would have to agree on the step.
        if limit is None or self._node.size > 1:
            return
        me = f"the weights of super-learner {self._transport.index} {illness}"
        if done == limit:
            raise SickLearner(
                f"{me} at its step {self._step}, after {done} reloads from its peers "
                f"(`max_reloads={limit}`): look at its data and its device, or lower "
                "the learning rate"
            )
        peer, values = self._healthy_weights(me)
        self._replica.put(values)
        with self._state:
            self._health = Health(self._step)
            self._tally.reloads += 1
        _log.warning(
            "%s at its step %d: it goes on from those of super-learner %d and with a "
            "fresh optimizer (reload %d of %d)",
            *(me, self._step, peer, done + 1, limit),
        )
        self._options.on_reload()

    def _healthy_weights(self, what: str) -> tuple[int, list[Tensor]]:
        """Of the first peer that has any; the one last heard of is asked first."""
        with self._state:
            peers = sorted(self._last_steps, key=self._last_steps.__getitem__)[::-1]
        for peer in peers:
            with suppress(PeerLost, TimeoutError):
                pulled = self.pull(peer).result(self._options.timeout.total_seconds())
                if all(bool(torch.isfinite(value).all()) for value in pulled.values):
                    return peer, pulled.values
            self.raise_if_failed()
        raise SickLearner(
            f"{what} at its step {self._step}, and none of its peers {peers} has "
            "finite ones: training has diverged; lower the learning rate or lengthen "
            "its warm-up"
        )

    def _call_round(self, round: int) -> None:
        for peer in self.circle.asks(round):
            if (asking := self._asking.get(peer)) is not None:
                asking.call()

    def _wait_if_too_stale(self) -> None:
        limit = self._options.max_staleness
        if limit is None or self._step - self._last_exchange_step <= limit:
            return
        step = self._step
        # All of them, and whosever turn it is: two stale ends must not wait for each
        # other's question, nor one for a straggler's.
        self._call_all()
        # Nobody who is waited for rests to spare a link or the cores.
        self._hurry_on()
        self._wait_until(
            lambda: step - self._last_exchange_step <= limit,
            f"an exchange, as `max_staleness={limit}` asks",
        )
        self._hurry.clear()

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
        with self._state:
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)
            # Whoever ends this engine joins all of these at any time.
            thread.start()

    @torch.no_grad()
    def _guard(self, work: Callable[[int], None], peer: int) -> None:
        try:
            with side_stream(self._replica.device):
                work(peer)
        except PeerLost as error:
            if self._on_lost is None:
                self.fail(error)
            elif not self._leaving.is_set():
                self._on_lost(peer, error)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the learner with an error of a communication thread."""
        with self._state:
            first = self._error is None and not self._leaving.is_set()
            if first:
                self._error = error
            self._state.notify_all()
        if first:
            self._on_error(str(error))

    def _ask_peer(self, peer: int, asking: _Asking) -> None:
        lane = self._lane(peer, lane_of(self._transport.index, peer))
        try:
            while self._asks(asking):
                self._wait_and_ask(peer, asking, lane)
            lane.say(LEAVE, int(self._leaving.is_set()))
        except PeerLost:
            # Of one that was dropped everybody knows.
            if not asking.gone.is_set():
                raise
        finally:
            self._give_up(peer, asking)

    def _asks(self, asking: _Asking) -> bool:
        over = self._leaving.is_set() or asking.gone.is_set()
        return not over and self._error is None

    def _wait_and_ask(self, peer: int, asking: _Asking, lane: Lane) -> None:
        pause_s = min(10.0, self._options.timeout.total_seconds() / 4)
        if called := asking.called.wait(pause_s):
            asking.called.clear()
        self._pull_all(asking, lane)
        # Cleared only if seen, or a call at the end of the pause would be lost.
        if due := asking.due.is_set():
            self._spare_the_cores(asking)
            asking.due.clear()
        if not self._asks(asking):
            return
        if not called:
            lane.say(ALIVE)
        elif due and (number := self._enter(peer)):
            with self._under_way_with(peer) as done, self._timed():
                done(lane.ask(number, self._pacer, self._hurry))

    def _spare_the_cores(self, asking: _Asking) -> None:
        """Rests, unless somebody waits for this end or the peer is asked no more."""
        with self._state:
            self._state.wait_for(
                lambda: (
                    self._hurry.is_set() or asking.gone.is_set() or bool(asking.pulls)
                ),
                self._cores.pause_s(),
            )

    def _hurry_on(self) -> None:
        """Ends all rests, until `_hurry` is cleared."""
        with self._state:
            self._hurry.set()
            self._state.notify_all()

    def _pull_all(self, asking: _Asking, lane: Lane) -> None:
        while asking.pulls and self._asks(asking):
            # It stays in the queue meanwhile, from which it is told of a loss.
            asking.pulls[0].set_result(lane.pull())
            asking.pulls.popleft()

    def _give_up(self, peer: int, asking: _Asking) -> None:
        lost = PeerLost(peer, "pulling its weights", "the connection has ended")
        with self._state:
            if self._asking.get(peer) is asking:
                del self._asking[peer]
            pulls, asking.pulls = asking.pulls, deque()
        for future in pulls:
            future.set_exception(lost)
        asking.ended.set()

    def _answer_peer(self, peer: int, gone: threading.Event) -> None:
        lane = self._lane(peer, lane_of(peer, self._transport.index))
        try:
            while (word := lane.hear()) != LEAVE:
                self._answer(word, peer, lane)
        except PeerLost:
            if not gone.is_set():
                raise
        else:
            self._on_left(peer, lane.heard_number > 0)

    def _answer(self, word: int, peer: int, lane: Lane) -> None:
        if word == PULL:
            lane.give(self.position())
        elif word == ASK:
            number = self._enter(peer, asked=True)
            with self._under_way_with(peer) as done, self._timed():
                done(lane.answer(number, self._pacer))

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

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self._cores.spent(time.thread_time() - begin)

    def _enter(self, peer: int, asked: bool = False) -> int:
        """Begins an exchange; returns how many are under way, or 0 if it must not.

        Who is paused does not ask; for the rest see `UnderWay`.
        """
        with self._state:
            if self._paused and not asked:
                return 0
            return self._under_way.enter(peer, asked)

    @contextmanager
    def _under_way_with(self, peer: int) -> Iterator[Callable[[Outcome], None]]:
        """Ends an exchange that was begun; yields what to call with its outcome."""
        outcomes: list[Outcome] = []
        try:
            yield outcomes.append
        finally:
            with self._state:
                self._under_way.leave(peer)
                for outcome in outcomes:
                    self._count_exchange(peer, outcome)
                self._state.notify_all()

    def _count_exchange(self, peer: int, outcome: Outcome) -> None:
        self._tally.bytes_sent += outcome.bytes_sent
        self._tally.exchanges += outcome.merged
        self._tally.refused += not outcome.merged
        self._tally.far += not outcome.near
        self._health.note(outcome)
        self._warn_once(peer, outcome)
        self._tally.damaged += outcome.damaged
        self._last_exchange_step = self._step
        if peer in self._last_steps:
            self._last_steps[peer] = self._step
        self._ages.append(outcome.first_step)

    def _warn_once(self, peer: int, outcome: Outcome) -> None:
        if outcome.merged:
            self._refusing.discard(peer)
        elif not outcome.mine and peer not in self._refusing:
            self._refusing.add(peer)
            _log.warning(
                "super-learner %d leaves out what super-learner %d sends: its weights "
                "are %s",
                self._transport.index,
                peer,
                "far too large" if outcome.finite else "infinite or not a number",
            )

    def _is_idle(self) -> bool:
        return not self._under_way.total()

    def _leave(self) -> None:
        self._leaving.set()
        self._hurry_on()
        self._call_all()

    def _call_all(self) -> None:
        with self._state:
            asked = list(self._asking.values())
        for asking in asked:
            asking.call()

    def _join(self, seconds: float) -> None:
        deadline = time.perf_counter() + seconds
        with self._state:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.perf_counter()))
        if self._merger is not None:
            self._merger.stop(max(0.0, deadline - time.perf_counter()))
