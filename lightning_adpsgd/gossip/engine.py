"""Asynchronous gossip: averaging with peers in the background, without waiting.

The weights have two sides: training changes w, and exchanges read x = w + d, which is
not stored (see `weights.replica`). This is AD-PSGD (arXiv 1710.06952), with the merge
written as a difference so that no local step is lost::

    exchange of i and j  c = a (x_j - x_i);  d_i += c;  d_j -= c
    merge of i           w_i += d_i;  d_i = 0

Both ends of an exchange compute c from the same pair of messages. So only gradients
change ``sum_i (w_i + d_i)``, whatever the delays and the order of events.

This module is the training thread's side. It decides nothing about optimizers and knows
nothing of Lightning. `Gossip.after_update` wakes the thread of the `Asker` (peers) of
each peer that is due. That thread makes the exchange over a `Lane` (exchange), which
adds to d. A lane is one direction of asking between two peers. The other files are::

    members      the super-learners that take part
    peers        the two threads of each peer
    exchange     words and exchanges over a lane
    forms        what an exchange is sent as, and in how many messages
    codecs       what a weight is sent as
    wire         messages
    pairing      how two ends agree to meet at their step boundaries
    boundary     the wait for a partner, and the exchange with it
    waiting      waits of the training thread, and warnings of silent peers
    pacing       which exchange may begin, and when
    quarantine   refused parts, and the recovery of a diverged learner
    account      the counters
    protocol     the rules that the simulated cluster shares
"""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import product

from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.coordination.store import LearnerFailed
from lightning_adpsgd.gossip.account import Account
from lightning_adpsgd.gossip.boundary import Boundary
from lightning_adpsgd.gossip.codecs import WireChoice
from lightning_adpsgd.gossip.exchange import Lanes
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.gossip.pacing import Traffic
from lightning_adpsgd.gossip.pairing import Pairing
from lightning_adpsgd.gossip.peers import Peers, Threads
from lightning_adpsgd.gossip.protocol import Patience, Pulled, due_round
from lightning_adpsgd.gossip.quarantine import Quarantine
from lightning_adpsgd.gossip.waiting import Waiting
from lightning_adpsgd.gossip.wire import Buffers
from lightning_adpsgd.mixing.communication import Communication
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.mixing.super_learner import (
    SuperLearnerGroup,
    Votes,
    merge_together,
)
from lightning_adpsgd.mixing.synchronous import Order
from lightning_adpsgd.transport.base import PeerLost, Transport
from lightning_adpsgd.weights.look_ahead import LookAhead
from lightning_adpsgd.weights.replica import (
    CHUNK_ELEMENTS,
    PART_ELEMENTS,
    Replica,
    as_real,
)
from lightning_adpsgd.weights.streams import has_streams

_log = logging.getLogger(__name__)
_ABORT_S = 5.0


@dataclass(frozen=True)
class GossipOptions:
    """The options of the engine.

    `strategy.options.HADPSGDOptions` documents those that are not listed here.

    Args:
        every: number of optimizer steps from one round of asking to the next.
        chunk_elements: most elements of a message.
        part_elements: most elements that are averaged at once.
        look_ahead: whether exchanges read where the next update is expected to take
            weights (`weights.look_ahead`); not for `in_pairs`, which averages at once.
        in_pairs: whether a learner waits at a step boundary for a peer at its own
            boundary, and exchanges only with that one; requires "step_then_average".
        max_wait: longest such wait, in seconds; None: as for `dials.ReadyPairs`.
    """

    order: Order = "step_then_average"
    every: int = 1
    wire_dtype: WireChoice = None
    max_staleness: int | None = None
    timeout: timedelta = timedelta(minutes=5)
    cpu_share: float = 1.0
    chunk_elements: int = CHUNK_ELEMENTS
    part_elements: int = PART_ELEMENTS
    look_ahead: bool = False
    in_pairs: bool = False
    max_wait: float | None = None


class Gossip(Communication):
    """The asynchronous engine of one learner, for "async" and "ready_pairs".

    `_state`, a condition, guards everything that threads share here and in the parts
    that receive it. It is held for memory operations, never for a wait on the network.
    Any thread may append to `_adoptions` weights to continue from, with the event to
    set once that is done. Only the training thread writes the flat vectors (w).

    Args:
        transport: connection to the counterparts in the other super-learners; with
            several sections, to those of the first section.
        members: super-learners to exchange with; two that meet alone use a = gain / 2.
        on_error: function called once, by the communication thread whose error ends the
            learner, with a description of the error.
        further: transports for this learner's other sections, one each; empty unless
            super-learners differ in size.

    Attributes:
        threads: all communication threads of this learner.
        replica: weights as exchanges read and change them.
    """

    has_exchanges = True

    def __init__(
        self,
        vectors: Sequence[Tensor],
        transport: Transport,
        group: SuperLearnerGroup,
        members: Members,
        options: GossipOptions,
        on_error: Callable[[str], None] = lambda message: None,
        further: Sequence[Transport] = (),
    ) -> None:
        self._group, self._options = group, options
        self.members, timeout = members, options.timeout
        self._state = state = threading.Condition()
        vectors = [as_real(vector) for vector in vectors]
        self._shards = group.own(vectors)
        self.replica = replica = Replica(
            self._shards, options.chunk_elements, state, options.part_elements
        )
        self._quarantine = Quarantine(members, vectors, group, replica, timeout)
        self._account = Account(members, replica, self._quarantine, state)
        self._merging = merge_together(vectors, replica, group, timeout)
        self._look_ahead = LookAhead(replica) if options.look_ahead else None
        self._traffic = Traffic(
            *(self._account, state, options.cpu_share),
            lambda: members.live_schedule.own,
            on_gpu=has_streams(replica.device),
            steps_alone=group.size == 1,
        )
        self.threads = Threads(replica.device, state, on_error, not options.in_pairs)
        live = members.live_schedule
        draw = random.Random(f"{live.schedule.seed} {live.own}")
        patience = Patience(options.max_wait, draw, len(live.peers()))
        pairing = (
            Pairing(live.own, live.peers(), patience.choose)
            if options.in_pairs
            else None
        )
        buffers, wire_dtype = Buffers(replica, options.wire_dtype), options.wire_dtype
        gain, self.peers_by_section = live.schedule.gain, list[Peers]()
        sections = zip((transport, *further), replica.sections, strict=True)
        for section, (carrier, chunks) in enumerate(sections):
            lanes = Lanes(
                *(carrier, replica, chunks, buffers, wire_dtype, gain, timeout),
                self._look_ahead,
            )
            shared = members, lanes, self._traffic, self._account, self.threads
            self.peers_by_section.append(Peers(*shared, pairing, section))
        # The first learner speaks for its super-learner. An island takes a silent peer
        # off its list within seconds.
        tells = group.index == 0 and members.are_fixed
        asked = self.peers_by_section[0] if tells else None
        self._waiting = Waiting(members, self.threads, asked, timeout, replica)
        self._boundary = pairing and Boundary(
            *(pairing, group, self.peers_by_section, self._account, self.threads),
            *(patience, timeout, self._waiting),
        )
        self._adoptions = deque[tuple[Sequence[Tensor], threading.Event]]()

    # --- from start to end

    @override
    def start(self) -> None:
        # Work that this thread has queued on the weights precedes every exchange.
        self.replica.show(self._shards)
        for peer, peers in product(
            self.members.live_schedule.peers(), self.peers_by_section
        ):
            peers.add(peer)
            peers.answer(peer)

    @property
    @override
    def step_and_round(self) -> tuple[int, int]:
        return self.replica.step, self.replica.step // self._options.every

    @override
    def go_on_from(self, step: int, round: int) -> None:
        self.replica.step = step
        self._account.go_on_from(step)
        for peers in self.peers_by_section:
            peers.go_on_from(step)
        self._quarantine.begin_anew()

    @override
    def stop(self) -> None:
        left = self.say_goodbye(self._options.timeout.total_seconds())
        if left:
            raise RuntimeError(
                f"super-learner {self.members.live_schedule.own} could not end cleanly:"
                f" its threads {left} still wait for the peers in their names after "
                f"{self._options.timeout}. See what those printed; raise `timeout` if "
                "the network is slow"
            )

    def say_goodbye(self, seconds: float) -> list[str]:
        """Tells the peers that this end leaves, and ends its threads.

        Returns:
            The names of the threads that have not ended within `seconds`.
        """
        self._leave()
        deadline = time.perf_counter() + seconds
        left = self.threads.join(deadline)
        self._merging.stop(max(0.0, deadline - time.perf_counter()))
        return left

    @override
    def release(self) -> None:
        self.threads.end_with(LearnerFailed("a learner of the job failed"))
        self._leave()

    @override
    def abort(self) -> None:
        self.release()
        # A live peer lets go as soon as it knows. A dead one is not waited for: the
        # threads of its lanes are daemons.
        self.say_goodbye(_ABORT_S)

    @override
    def statistics(self) -> Statistics:
        return self._account.statistics(self._merging.seconds)

    # --- the step

    @override
    def before_update(self) -> None:
        if self._options.order == "average_then_step":
            self._merge()
        if self._look_ahead:
            self._look_ahead.begin_update()

    @override
    def after_update(self) -> None:
        if self._look_ahead:
            self._look_ahead.end_update()
        self.replica.step += 1
        self._traffic.stepped()
        position = self.members.position
        self.members.position = position._replace(steps=position.steps + 1)
        round = due_round(self.replica.step, self._options.every)
        if self._boundary is None:
            self._merge_and_ask(round)
        else:
            self._meet_and_merge(self._boundary, is_due=round is not None)
        self._waiting.warn_of_silence()

    @property
    @override
    def num_reloads(self) -> int:
        return self._quarantine.num_reloads

    @property
    def leaves(self) -> bool:
        """Whether all learners of the super-learner end at this step."""
        return self._merging.agreed.leave

    # --- meetings of all learners

    @override
    def pause(self) -> None:
        """Pauses exchanges, unless members come and go: islands keep exchanging."""
        if self.members.are_fixed:
            if self._boundary is not None:
                self._boundary.rest()
            self._traffic.pause()
            self._waiting.until(self._traffic.is_idle, "running exchanges to end")

    @override
    def settle(self) -> None:
        if not self.members.are_fixed:
            self._merging.finish()
            return
        # The asking end has its answer; this end may still be adding the last chunk.
        self._waiting.until(self._traffic.is_idle, "running exchanges to end")
        self.sends_few_bits = self._account.sends_few_bits
        self.merge_all()

    @override
    def set_aside(self, vectors: Sequence[Tensor], unmerged: bool = False) -> None:
        # A peer that has resumed earlier asks at any time.
        shown = self._group.own([as_real(vector) for vector in vectors])
        self.replica.show(shown, unmerged)

    @override
    def resume(self) -> None:
        self.replica.show(self._shards)
        self._traffic.resume()

    def drain(self, seconds: float) -> None:
        """Begins no more exchanges, and waits up to `seconds` for those under way."""
        # Peers are still admitted one by one, or some exchange may always be under way.
        self._traffic.pause(hurries=False)
        with self._state:
            is_done = self._state.wait_for(self._traffic.is_idle, seconds)
        if not is_done:
            _log.warning("the rest of an exchange that took over %g s is lost", seconds)

    def merge_all(self) -> None:
        """Merges all exchanges; for the training thread, after `drain`."""
        self._merging.merge_all()
        self._account.merged(self._merging.steps_late)

    # --- weights as a whole, in the chunks that `Replica.snapshot` gives

    def pull(
        self, peer: int, seconds: float, watch: Callable[[float], None] | None = None
    ) -> Pulled:
        """Returns the weights of a peer that is asked, with the peer's position.

        Its sections come one by one; the position is the furthest of theirs.

        Args:
            seconds: longest time for all; with a `watch`, longest without any progress.
            watch: as for `Pull.result_while_it_moves`.

        Raises:
            PeerLost, TimeoutError: They did not come in time.
        """
        deadline = time.monotonic() + seconds
        pulls = [peers.pull(peer) for peers in self.peers_by_section]
        try:
            found = [
                one.result(max(0.0, deadline - time.monotonic()))
                if watch is None
                else one.result_while_it_moves(seconds, watch)
                for one in pulls
            ]
        finally:
            # What is not under way need not cross a link that is too slow for it.
            for one in pulls:
                one.cancel()
        values = [value for pulled in found for value in pulled.values]
        return Pulled(max(pulled.position for pulled in found), values)

    def write(self, values: Sequence[Tensor]) -> None:
        """Writes values in the place of w, and changes nothing else."""
        self.replica.spread(values, self._shards)

    def adopt(self, values: Sequence[Tensor]) -> threading.Event:
        """Continues from other weights at the next step boundary; for any thread.

        Returns:
            An event that is set when the training thread has adopted them.
        """
        adopted = threading.Event()
        self._adoptions.append((values, adopted))
        return adopted

    # --- private

    def _merge_and_ask(self, round: int | None) -> None:
        if self._options.order == "step_then_average":
            self._merge()
        while self._adoptions:
            values, adopted = self._adoptions.popleft()
            self._merging.begin_anew()
            self._quarantine.adopt(values)
            adopted.set()
        self._reload_if_diverged()
        self._wait_if_too_stale()
        if round is not None:
            asked = self.members.live_schedule.asks(round)
            for peers in self.peers_by_section:
                peers.call(asked)
        live = self.members.live_schedule
        if self._group.index == 0 and live.own == live.numbers[0]:
            self._traffic.report_rate()

    def _meet_and_merge(self, boundary: Boundary, is_due: bool) -> None:
        self.threads.raise_if_failed()
        with self.replica.guard:
            pass  # work queued on a GPU precedes every exchange
        if is_due and boundary.meet():
            self._merging.merge_all(Votes(self._quarantine.wants_reload))
            self._account.merged(steps_late=0, waits=True)
            self._reload_if_diverged()
        boundary.leave()

    def _merge(self) -> None:
        self.threads.raise_if_failed()
        votes = Votes(self._quarantine.wants_reload, self.members.wants_to_leave)
        begin = time.perf_counter()
        has_merged = self._merging.merge(votes)
        self._account.merged(self._merging.steps_late)
        if has_merged:
            self._traffic.cores.merged(time.perf_counter() - begin)

    def _reload_if_diverged(self) -> None:
        if self._merging.agreed.recover:
            # The group looks for a peer by collectives, beside which none may be under
            # way.
            self._merging.begin_anew()
            self._quarantine.reload(self._account.peers_by_age(), self._weights_of)

    def _weights_of(self, peer: int, seconds: float) -> list[Tensor] | None:
        self.threads.raise_if_failed()
        with suppress(PeerLost, TimeoutError):
            return self.pull(peer, seconds).values
        return None

    def _wait_if_too_stale(self) -> None:
        limit = self._options.max_staleness
        has_peers = len(self.members.live_schedule.numbers) > 1
        if limit is None or not has_peers or self._account.steps_alone <= limit:
            return
        # All of them, in turn or not: two stale ends must not wait for each other to
        # ask, nor one of them for a straggler.
        for peers in self.peers_by_section:
            peers.call_all()
        # An exchange that training waits for does not rest, whatever it costs.
        self._traffic.hurry_on()
        self._waiting.until(
            lambda: self._account.steps_alone <= limit,
            f"an exchange, as `max_staleness={limit}` asks",
        )
        self._traffic.hurry.clear()

    def _leave(self) -> None:
        self.threads.leaving.set()
        self._traffic.hurry_on()
        for peers in self.peers_by_section:
            peers.call_all()
