"""Steps, exchanges and rounds of super-learners, on a simulated clock.

The rules are those of the engine. The schedule says whom a super-learner asks in which
round; `protocol` says who may ask, and with what weight two ends average. Here the
rules run in simulated time, without model weights.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from random import Random
from typing import NamedTuple

from typing_extensions import override

from lightning_adpsgd.dials import check_count
from lightning_adpsgd.gossip.protocol import (
    Patience,
    UnderWay,
    due_round,
    exchange_weight,
)
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.topology.topology import RoundPart, Topology
from lightning_adpsgd.virtual.clock import (
    ASKING,
    LANDING,
    SKIPPING,
    STEPPING,
    Agenda,
    Compute,
    Link,
    Network,
    StepTimes,
    overlapped,
)
from lightning_adpsgd.virtual.requests import Requests


@dataclass(frozen=True)
class Scenario:
    """The super-learners that take part, and their speeds.

    `VirtualCluster` documents the arguments that it has, too. Learner n of
    super-learner i has the number i N + n.

    Args:
        backward: share of a step in which gradients become ready, during which the
            all-reduce inside a super-learner runs.
        gradient_seconds: extra seconds of a super-learner's mean gradient.

    Raises:
        TypeError: A number is not whole.
        ValueError: A number is below 1; the topology does not exist for this number of
            super-learners; or a slow learner does not exist.
    """

    topology: Topology
    num_super_learners: int
    super_learner_size: int = 1
    mixing_gain: float = 1.0
    gossip_every: int = 1
    compute: Compute = field(default_factory=Compute)
    link: Link = field(default_factory=Link)
    inner_link: Link = field(default_factory=Link)
    seed: int = 0
    backward: float = 0.0
    gradient_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_super_learners", "super_learner_size", "gossip_every"):
            check_count(name, getattr(self, name))
        numbers = range(self.num_learners)
        if others := [number for number in self.compute.slow if number not in numbers]:
            raise ValueError(
                f"`slow` must have numbers of learners, from 0 to {numbers[-1]}, got "
                f"{others[0]!r}"
            )
        self.schedule()

    @property
    def num_learners(self) -> int:
        """The number of all learners."""
        return self.num_super_learners * self.super_learner_size

    def schedule(self) -> Schedule:
        """The mixing matrices."""
        size = self.num_super_learners
        return Schedule(self.topology, size, self.mixing_gain, self.seed)

    def gradient_end(
        self, times: StepTimes, index: int, begin: float, gradient_bytes: float
    ) -> float:
        """The time at which a super-learner has the mean of its learners' gradients."""
        size = self.super_learner_size
        if size == 1:
            return times.end(index, begin)
        slowest = max(times.end(index * size + n, begin) for n in range(size))
        allreduce = self.inner_link.allreduce_seconds(gradient_bytes, size)
        backward = self.backward * (slowest - begin)
        waited = overlapped(allreduce, backward, gradient_bytes)
        return slowest + waited + self.gradient_seconds


@lru_cache(maxsize=32)
def parts_of(schedule: Schedule, round: int) -> tuple[RoundPart, ...]:
    """The shares that each super-learner takes and gives in a round, checked."""
    if (first := schedule.first_like(round)) < round:
        return parts_of(schedule, first)
    return tuple(schedule.part(i, round) for i in range(schedule.num_super_learners))


# --- in lockstep


class Lockstep(Iterator[list[float]]):
    """The end times of step k of all super-learners, for k = 1, 2, ...; endless.

    In a round, a super-learner waits for the peers that it takes from or gives to. In a
    round of exact means, which is an all-reduce, it waits for all. After an error, such
    as Ctrl-C, it goes on, as no generator does.

    Args:
        num_bytes: bytes of the weights as they travel.
        hidden: whether a round runs beside the gradient of the next step and is joined
            before its update; otherwise it comes after the update.
        from_start: whether a hidden round runs beside the first gradient.
        boundary_seconds: seconds of a step boundary, which hide nothing.
    """

    def __init__(
        self,
        scenario: Scenario,
        num_bytes: float,
        hidden: bool,
        from_start: bool = False,
        boundary_seconds: float = 0.0,
    ) -> None:
        self._scenario, self._num_bytes, self._hidden = scenario, num_bytes, hidden
        self._boundary_seconds = boundary_seconds
        self._times = StepTimes(scenario.compute, scenario.seed)
        self._ends, self._round = [0.0] * scenario.num_super_learners, 0
        # The number of steps made when a round begins, as the engine counts them.
        self._step = int(from_start) if hidden else 1

    @override
    def __next__(self) -> list[float]:
        given, num_bytes = self._scenario, self._num_bytes
        ready = [
            given.gradient_end(self._times, i, begin, num_bytes)
            for i, begin in enumerate(self._ends)
        ]
        step, every = self._step, given.gossip_every
        is_due = step > 0 and due_round(step, every) is not None
        if is_due and given.num_super_learners > 1:
            begins = self._ends if self._hidden else ready
            averaged = _averaged_at(given, self._round, begins, num_bytes)
            ready = [max(pair) for pair in zip(ready, averaged, strict=True)]
            self._round += 1
        self._step += 1
        self._ends = [end + self._boundary_seconds for end in ready]
        return self._ends


def _averaged_at(
    scenario: Scenario, round: int, begins: list[float], num_bytes: float
) -> list[float]:
    """The times at which each has its average of weights ready at these times."""
    schedule = scenario.schedule()
    size, shard = scenario.super_learner_size, num_bytes / scenario.super_learner_size
    gather = scenario.inner_link.allgather_seconds(num_bytes, size)
    if schedule.is_mean(round):
        num = schedule.num_super_learners
        end = max(begins) + scenario.link.allreduce_seconds(shard, num) + gather
        return [end] * len(begins)
    seconds = [scenario.link.seconds(n * shard) + gather for n in range(len(begins))]
    return [
        max([begins[j] for j in met]) + (seconds[count] if count else gather)
        for met, count in _meetings(schedule, schedule.first_like(round))
    ]


@lru_cache(maxsize=32)
def _meetings(schedule: Schedule, round: int) -> list[tuple[list[int], int]]:
    """For each member, the members it waits for and its number of messages one way."""
    return [
        (
            sorted({i, *part.takes, *part.gives}),
            max(len({*part.takes} - {i}), len({*part.gives} - {i})),
        )
        for i, part in enumerate(parts_of(schedule, round))
    ]


# --- asynchronously


class SimulatedExchange:
    """An exchange of two super-learners: ``d += weight (theirs - mine)`` at both."""

    def __init__(self, asker: int, asked: int, weight: float) -> None:
        self.asker, self.asked, self.weight = asker, asked, weight
        self.ends = asker, asked

    def other(self, end: int) -> int:
        """The other end of the exchange."""
        return self.asked if end == self.asker else self.asker


class Stepped(NamedTuple):
    """A super-learner has its gradient, and now updates its weights and merges."""

    seconds: float
    super_learner: int


class Begun(NamedTuple):
    """An exchange begins: the weights of both ends are read."""

    seconds: float
    exchange: SimulatedExchange


class Ended(NamedTuple):
    """An exchange ends: both ends apply the change."""

    seconds: float
    exchange: SimulatedExchange


class Waited(NamedTuple):
    """A super-learner stops waiting for a partner at its step boundary."""

    seconds: float
    super_learner: int
    waited: float
    met: bool


Event = Stepped | Begun | Ended | Waited


class _State:
    def __init__(self, index: int, patience: Patience) -> None:
        self.under_way, self.patience = UnderWay(lambda: index), patience
        # When it began to compute, and when it arrived at its step boundary.
        self.began = self.arrived = 0.0
        self.avoided = frozenset[int]()  # peers that it does not yet take
        self.steps = self.last_exchange_step = 0


class Asynchronous(Iterator[Event]):
    """The asynchronous timeline, an endless iterator of events.

    A super-learner steps as fast as it computes. After a step it asks the peers that
    its schedule names. An exchange takes four latencies (request, admission, question
    and answer), and the time of its bytes on the shared links. No step waits for it.

    With `in_pairs`, a super-learner waits after its step for a peer that waits, too.
    Both continue when their exchange has ended. The two latencies of request and
    admission then stand for an offer and its answer.

    `gossip.engine.GossipOptions` documents the last three options, in simulated time.

    Args:
        weight_bytes: bytes of the weights in their own dtype, and of a gradient.
        message_bytes: bytes of the weights as they travel in an exchange, one way.
    """

    def __init__(
        self,
        scenario: Scenario,
        weight_bytes: float,
        message_bytes: float,
        max_staleness: int | None = None,
        in_pairs: bool = False,
        max_wait: float | None = None,
    ) -> None:
        self._scenario, self._weight_bytes = scenario, weight_bytes
        self._schedule, self._size = scenario.schedule(), scenario.num_super_learners
        # Each learner sends its shard over its own link.
        self._shard_bytes = message_bytes / scenario.super_learner_size
        self._max_staleness = max_staleness
        self._agenda = Agenda()
        self._network = Network(scenario.link.bandwidth, self._agenda)
        self._times = StepTimes(scenario.compute, scenario.seed)
        self._in_pairs = in_pairs
        self._ready = set[int]()  # those that wait for a partner
        self._states = [
            _State(i, self._patience_of(i, max_wait)) for i in range(self._size)
        ]
        under_ways = [state.under_way for state in self._states]
        latency = scenario.link.latency
        self._requests = Requests(self._agenda, latency, under_ways, self._enter)
        self._events = deque[Event]()
        for index in range(self._size):
            self._compute(index, begin=0.0)

    @override
    def __next__(self) -> Event:
        while not self._events:
            self._agenda.happen()
        return self._events.popleft()

    # --- steps

    def _compute(self, index: int, begin: float) -> None:
        self._states[index].began = begin
        end = self._scenario.gradient_end(self._times, index, begin, self._weight_bytes)
        self._agenda.enter(end, STEPPING, self._step, index)

    def _step(self, index: int) -> None:
        self._states[index].steps += 1
        self._events.append(Stepped(self._agenda.now, index))
        self._wait_or_go_on(index)

    def _wait_or_go_on(self, index: int) -> None:
        state, peers = self._states[index], self._peers_if_stale(index)
        waiting = self._requests.hurried
        (waiting.add if peers else waiting.discard)(index)
        for peer in peers:
            self._requests.call(index, peer)
        if not peers:
            self._go_on(index, state)

    def _peers_if_stale(self, index: int) -> list[int]:
        state, limit = self._states[index], self._max_staleness
        if limit is None or state.steps - state.last_exchange_step <= limit:
            return []
        return self._peers(index)

    def _peers(self, index: int) -> list[int]:
        return self._schedule.topology.peers(index, self._size)

    def _go_on(self, index: int, state: _State) -> None:
        round = due_round(state.steps, self._scenario.gossip_every)
        if round is not None and self._in_pairs and self._peers(index):
            self._arrive(index, state)
            return
        if round is not None:
            for peer in self._schedule.asks(index, round):
                self._requests.call(index, peer)
        self._compute(index, self._agenda.now)

    # --- pairs at step boundaries

    def _patience_of(self, index: int, max_wait: float | None) -> Patience:
        draw = Random(f"{self._scenario.seed} pairs {index}")
        return Patience(max_wait, draw, len(self._peers(index)))

    def _arrive(self, index: int, state: _State) -> None:
        now = state.arrived = self._agenda.now
        self._ready.add(index)
        for_others, for_anyone = state.patience.waits(now - state.began)
        state.avoided = state.patience.avoided
        # After all steps that end at this time, so that all who have arrived may be
        # drawn as a partner.
        self._agenda.enter(now, ASKING, self._pair, index, state.steps)
        relents = now + for_others
        self._agenda.enter(relents, ASKING, self._relent, index, state.steps)
        ends = now + for_anyone
        self._agenda.enter(ends, SKIPPING, self._skip, index, state.steps)

    def _relent(self, index: int, steps: int) -> None:
        if self._waits(index, steps):
            self._states[index].avoided = frozenset()
            self._pair(index, steps)

    def _pair(self, index: int, steps: int) -> None:
        ready = [peer for peer in self._peers(index) if self._would_pair(index, peer)]
        if ready and self._waits(index, steps):
            self._meet(index, self._states[index].patience.choose(ready))

    def _would_pair(self, index: int, peer: int) -> bool:
        # It makes an offer to the peer, or the peer, whose number is smaller, to it.
        offers = peer not in self._states[index].avoided
        is_offered = peer < index and index not in self._states[peer].avoided
        return peer in self._ready and (offers or is_offered)

    def _waits(self, index: int, steps: int) -> bool:
        return index in self._ready and self._states[index].steps == steps

    def _meet(self, asker: int, asked: int) -> None:
        self._ready -= {asker, asked}
        weight = exchange_weight(self._scenario.mixing_gain, 1, 1)
        exchange = SimulatedExchange(asker, asked, weight)
        for end in exchange.ends:
            peer, now = exchange.other(end), self._agenda.now
            self._states[end].under_way.enter(peer, now=now)
            self._end_wait(end, peer)
        seconds = self._agenda.now + 2 * self._scenario.link.latency
        self._agenda.enter(seconds, ASKING, self._begin, exchange)

    def _skip(self, index: int, steps: int) -> None:
        if self._waits(index, steps):
            self._ready.remove(index)
            self._end_wait(index, None)
            self._compute(index, self._agenda.now)

    def _end_wait(self, index: int, partner: int | None) -> None:
        now, state = self._agenda.now, self._states[index]
        state.patience.met(partner)
        waited, met = now - state.arrived, partner is not None
        self._events.append(Waited(now, index, waited, met))

    def _leave(self, index: int) -> None:
        size, link = self._scenario.super_learner_size, self._scenario.inner_link
        gather = link.allgather_seconds(self._weight_bytes, size)
        self._compute(index, self._agenda.now + gather)

    # --- exchanges

    def _enter(self, index: int, peer: int) -> None:
        now = self._agenda.now
        mine = self._states[index].under_way.enter(peer, now=now)
        if not mine:  # one with that peer is already under way
            self._requests.end(index, peer)
            return
        theirs = self._states[peer].under_way.enter(index, asked=True, now=now)
        weight = exchange_weight(self._scenario.mixing_gain, mine, theirs)
        exchange = SimulatedExchange(index, peer, weight)
        self._agenda.enter(self._agenda.now, ASKING, self._begin, exchange)

    def _begin(self, exchange: SimulatedExchange) -> None:
        self._events.append(Begun(self._agenda.now, exchange))
        crossed = partial(self._crossed, exchange)
        self._network.begin(exchange.ends, self._shard_bytes, crossed)

    def _crossed(self, exchange: SimulatedExchange) -> None:
        # One latency is that of the question, one that of the answer's last byte.
        seconds = self._agenda.now + 2 * self._scenario.link.latency
        self._agenda.enter(seconds, LANDING, self._end, exchange)

    def _end(self, exchange: SimulatedExchange) -> None:
        for end in exchange.ends:
            state = self._states[end]
            state.under_way.leave(exchange.other(end), self._agenda.now)
            state.last_exchange_step = state.steps
        self._events.append(Ended(self._agenda.now, exchange))
        self._requests.end(exchange.asker, exchange.asked)
        self._requests.serve(*exchange.ends)
        for end in exchange.ends:
            if self._in_pairs:
                self._leave(end)
            elif end in self._requests.hurried:
                self._wait_or_go_on(end)
