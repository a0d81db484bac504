"""One island: a super-learner that is a job of its own, joined to others by gossip.

Where it has several learners, each carries a shard of the weights to its counterparts,
over connections of its own; the first one keeps the island's place on the roll.

    rendezvous   where islands find one another       (`rendezvous`)
    roll         who is there                         (`membership`)
    edges        who is connected with whom           (`edges`)
    engine       exchanges, merges                    (`gossip`, over `links`)

An island begins with the weights of those who are there, or with its own if nobody is.
From then on its training thread waits for no other island: not when one dies, joins or
cannot be reached, nor for the rendezvous. The mean that is validated and saved is that
of the islands which answer within a short time.
"""

import logging
import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store
from typing_extensions import override

from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.exchange import BEGINNING, Position, Pulled
from lightning_adpsgd.islands.edges import Edges
from lightning_adpsgd.islands.following import Follower, Members, Teller
from lightning_adpsgd.islands.mean import (
    Mean,
    Total,
    all_finite,
    consensus_of,
    mean_of,
)
from lightning_adpsgd.islands.membership import Member, Membership, Pace, Roll
from lightning_adpsgd.islands.rendezvous import Place, Rendezvous
from lightning_adpsgd.mixing.communication import Communication
from lightning_adpsgd.mixing.consensus import Consensus
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.mixing.super_learner import Node, gather_shards
from lightning_adpsgd.topology.live import Circle
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.links import (
    Address,
    Credentials,
    Facts,
    LinkTransport,
    Listener,
    Refused,
)
from lightning_adpsgd.transport.network_interfaces import VARIABLE, gloo_addresses

_log = logging.getLogger(__name__)

# A joiner takes the mean of no more than so many of its neighbours.
_MOST_NEIGHBOURS = 4
_GOODBYE_S, _DRAIN_S = 2.0, 5.0
_LOOK_S = 0.5


_PACE = Pace()


@dataclass(frozen=True)
class Patience:
    """For how long an island waits, and for what.

    Args:
        start: At its start, for the rendezvous and for weights of the others.
        pull: For the weights of one island; a joiner's and a validation's.
        mean: For all islands together, when their mean is taken.
        pace: Of signs of life.
    """

    start: timedelta = timedelta(minutes=30)
    pull: timedelta = timedelta(seconds=20)
    mean: timedelta = timedelta(seconds=60)
    pace: Pace = _PACE


_PATIENCE = Patience()


class Island(Communication):
    """One learner's part among islands.

    Everything is the training thread's own, but `_rejoin`, which the thread of `Edges`
    calls, and `_was_stopped`, which the thread of `Membership` sets.

    Args:
        vectors: The flat weights.
        place: Of the rendezvous.
        schedule: Topology, gain and seed; of any size.
        options: Of the engine.
        layout: `FlatParameters.layout()`; must be equal in all islands.
        credentials: Of the links.
        node: The learners of this island.
        store: Of this island alone; not used by a single learner.
        patience: For what comes from others.

    Attributes:
        position: How far this island has come.
        started_from: How far the others had come from whom it took its weights when it
            started; none if it was the first.
    """

    def __init__(
        self,
        vectors: Sequence[Tensor],
        place: Place,
        schedule: Schedule,
        options: GossipOptions,
        layout: str,
        credentials: Credentials,
        node: Node | None = None,
        store: Store | None = None,
        patience: Patience = _PATIENCE,
    ) -> None:
        self._vectors, self._place, self._schedule = vectors, place, schedule
        self._options, self._layout, self._patience = options, layout, patience
        self._credentials, self._node = credentials, node or Node()
        self._store = store or HashStore()
        self.position, self.started_from = Position(), None
        self.membership = self._make_membership()
        self._begun = (0, 0)
        self._gossip: Gossip | None = None
        self._edges: Edges | None = None
        self._transport: LinkTransport | None = None
        self._listener: Listener | None = None
        self._was_stopped, self._ended = False, False
        self._rejoined_at: Position | None = None
        self._refusal: Refused | None = None
        self._num_looks = 0

    def _make_membership(self) -> Members:
        pace = self._patience.pace
        if self._node.index > 0:
            return Follower(self._store, pace, self._on_roll)
        teller = Teller(self._store)
        membership = Membership(
            Rendezvous(self._place),
            Member(-1, uuid.uuid4().hex, socket.gethostname(), ()),
            lambda: self.position.steps,
            pace,
            self._on_roll,
            self._on_stopped,
            lambda: teller.tell(membership) if self._node.size > 1 else None,
        )
        return membership

    @property
    @override
    def step_and_round(self) -> tuple[int, int]:
        return self._engine.step_and_round

    @override
    def go_on_from(self, step: int, round: int) -> None:
        self._begun = (step, round)

    # --- from start to end

    @override
    def start(self) -> None:
        """Takes up the weights of the others, and enters.

        Raises:
            RuntimeError: The rendezvous, or all those on its roll, cannot be reached.
            Refused: The others train another model, or do not know the token.
        """
        self.membership.start()
        self._await_number()
        transport = self._make_transport()
        self._edges = Edges(transport, self.membership, self._node.index)
        self._gossip = Gossip(
            self._vectors,
            transport,
            self._node,
            self._schedule,
            self._options,
            on_lost=self._edges.on_lost,
            on_left=self._edges.on_left,
        )
        self._gossip.position = lambda: self.position
        self._gossip.go_on_from(*self._begun)
        self._edges.attend(self._gossip)
        self._gossip.start()
        self._listen(transport)
        self.started_from = self._take_up_weights()
        self.membership.enter(self._patience.pull.total_seconds())
        self._edges.start(self._rejoin)

    def depart(self) -> None:
        """As `stop`, with all that exchanges brought merged into the weights.

        All learners of the island come, at the step at which they have agreed to.
        """
        self._edge.stop(_GOODBYE_S)
        self._drain()
        if self._node.size == 1 or self.leaves:
            self._engine.merge_all()
        self.stop()

    def ask_to_leave(self) -> None:
        """Lets all learners of this island come to the end of one step; any thread."""
        self._engine.wants_to_leave = True

    @property
    def leaves(self) -> bool:
        """Whether all of them are at the step at which they are to `depart`."""
        return self._engine.leaves

    @property
    def name(self) -> str:
        """Of no other island, short enough for a file."""
        member = self.membership.member
        return f"{member.number}-{member.incarnation[:8]}"

    @override
    def stop(self) -> None:
        """Drains exchanges, leaves the roll, says goodbye; within seconds."""
        self._edge.stop(_GOODBYE_S)
        self._drain()
        self.membership.leave(_GOODBYE_S)
        self._engine.say_goodbye(_GOODBYE_S)
        self.abort()

    @override
    def abort(self) -> None:
        self._ended = True
        self.release()
        self.membership.leave(_GOODBYE_S)
        if self._edges is not None:
            self._edges.stop(_GOODBYE_S)
        if self._listener is not None:
            self._listener.close()
        if self._transport is not None:
            self._transport.close()
        if self._gossip is not None:
            self._gossip.abort()

    @override
    def release(self) -> None:
        if self._gossip is not None:
            self._gossip.release()

    # --- the step

    @override
    def before_update(self) -> None:
        self._engine.before_update()

    @override
    def after_update(self) -> None:
        self._engine.after_update()
        steps, samples, epochs = self.position
        self.position = Position(steps + 1, samples, epochs)

    # --- the mean of all

    @override
    def pause(self) -> None:
        """Nobody else pauses, and gossip goes on beside an evaluation."""

    @override
    def settle(self) -> None:
        """What exchanges bring waits for the next step boundary."""
        self._engine.finish_merge()

    @override
    def set_aside(self, vectors: Sequence[Tensor]) -> None:
        self._engine.set_aside(vectors)

    @override
    def resume(self) -> None:
        self._engine.resume()

    @torch.no_grad()
    def mean(self) -> Mean:
        """The mean over this island and all that answer in time; changes nothing."""
        deadline = time.monotonic() + self._patience.mean.total_seconds()
        total = Total(self._engine.snapshot())
        for number in self.membership.roll.after(self.membership.member.number):
            left = deadline - time.monotonic()
            limit = min(left, self._patience.pull.total_seconds())
            if left > 0 and (pulled := self._pull(number, limit)) is not None:
                total.add(pulled.values)
        return total.mean()

    def average(self, vectors: list[Tensor], trained: list[Tensor]) -> Consensus:
        """Puts the mean over the islands that answer in the place of the weights."""
        mean = self.mean()
        self._engine.write(mean.values)
        gather_shards(self._vectors, self._node, self._options.timeout)
        mine = torch.tensor([*mean[2:], mean.members], dtype=torch.float64)
        all_of_them = [torch.zeros_like(mine) for _ in range(self._node.size)]
        self._node.gather(mine, all_of_them, self._options.timeout)
        rows = [shares.tolist() for shares in all_of_them]
        return consensus_of([Mean([], int(row[2]), row[0], row[1]) for row in rows])

    def note(self, samples: int, epochs: int) -> Position | None:
        """Training on a batch begins.

        Samples of all islands are estimated, as if each did as much as this one.

        Args:
            samples: Of the batch.
            epochs: That are completed.

        Returns:
            How far the others have come, if this island has taken up their weights
            since the last time.
        """
        found, self._rejoined_at = self._rejoined_at, None
        if found is not None:
            self.position = max(found, self.position)
            return found
        members = len(self._engine.circle.numbers)
        steps, before, _ = self.position
        self.position = Position(steps, before + samples * members, epochs)
        return None

    @override
    def statistics(self) -> Statistics:
        return self._engine.statistics()._replace(
            members=len(self._engine.circle.numbers),
            joined=self._edge.joined,
            lost=self._edge.lost,
        )

    def _drain(self) -> None:
        if not self._engine.drain(_DRAIN_S):
            _log.warning("an exchange was still under way after %g s", _DRAIN_S)

    # --- how it comes in

    def _await_number(self) -> None:
        deadline = time.monotonic() + self._patience.start.total_seconds()
        while self.membership.member.number < 0:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the rendezvous at {self._place} could not be reached within "
                    f"{self._patience.start}: {self.membership.away}. Start it with "
                    f"`python -m lightning_adpsgd rendezvous --port "
                    f"{self._place.port}` on {self._place.host}, and let a firewall "
                    "pass the port"
                )
            self.membership.look(1.0)

    def _make_transport(self) -> LinkTransport:
        facts = Facts(
            member=self.membership.member.number,
            incarnation=self.membership.member.incarnation,
            job=self._place.job,
            model=self._layout,
            super_learner_size=self._node.size,
            shard=self._node.index,
            settings={
                "wire_dtype": str(self._options.wire_dtype),
                "mixing_gain": str(self._schedule.gain),
            },
        )
        self._transport = LinkTransport(facts, self._credentials)
        return self._transport

    def _listen(self, transport: LinkTransport) -> None:
        here = Address(_own_address(self._place), 0)
        self._listener = transport.listen(here, self._edge.on_lane)
        self._store.set(f"address/{self._node.index}", str(self._listener.address))
        if self._node.index == 0:
            keys = [f"address/{index}" for index in range(self._node.size)]
            addresses = tuple(self._store.get(key).decode() for key in keys)
            member = self.membership.member
            self.membership.member = member._replace(addresses=addresses)

    def _take_up_weights(self) -> Position | None:
        begin = time.monotonic()
        deadline = begin + self._patience.start.total_seconds()
        judged_at = begin + 2 * self._patience.pace.silence_s
        while time.monotonic() < deadline:
            self.membership.look(self._patience.pull.total_seconds())
            if not self._see_the_same_roll():
                return None
            if (found := self._weights_for_all()) is not None:
                return self._take_up(found)
            # One that has died may still be on the roll, and its port another's.
            if self._refusal is not None and time.monotonic() > judged_at:
                raise self._refusal
        raise RuntimeError(
            f"none of the super-learners {sorted(self.membership.roll.members)} on "
            f"the roll of {self._place} gave its weights within "
            f"{self._patience.start}: see whether this machine can reach their "
            "addresses, and what they print"
        )

    def _see_the_same_roll(self) -> bool:
        """Whether there are others, as the first learner of this island knows them."""
        self._num_looks += 1
        key = f"others/{self._num_looks}"
        if self._node.index == 0:
            self._store.set(key, self.membership.roll.to_json())
        else:
            self.membership.roll = Roll.from_json(self._store.get(key).decode())
        return bool(self.membership.roll.members)

    def _weights_for_all(self) -> Pulled | None:
        """What this learner's shard begins with, if the others have theirs as well."""
        found = self.weights_of_neighbours()
        position = found.position if found is not None else BEGINNING
        news = torch.tensor([found is None, *position], dtype=torch.int64)
        self._node.agree(news, self._options.timeout)
        misses, *furthest = news.tolist()
        if found is None or misses:
            return None
        return found._replace(position=Position(*furthest))

    def _take_up(self, found: Pulled) -> Position | None:
        if found.position.steps < self.position.steps:
            _log.info("this island is further than the others, and keeps its weights")
            return None
        self._engine.put(found.values)
        gather_shards(self._vectors, self._node, self._options.timeout)
        self.position = found.position
        return found.position

    def weights_of_neighbours(self) -> Pulled | None:
        """The mean of those next to whom this island will sit, as far as they answer.

        If none does, what another one gives, the furthest first; none if nobody does.
        """
        roll, own = self.membership.roll, self.membership.member.number
        others = sorted(roll.after(own), key=self._furthest_first)
        circle = Circle.of(self._schedule, others, own)
        near = [n for n in others if n in circle.peers()][:_MOST_NEIGHBOURS]
        found = [pulled for number in near if (pulled := self._pull_finite(number))]
        if not found:
            rest = (n for n in others if n not in near)
            more = (self._pull_finite(number) for number in rest)
            found = [pulled] if (pulled := next(filter(None, more), None)) else []
        return mean_of(found) if found else None

    def _furthest_first(self, number: int) -> tuple[int, int]:
        return -self.membership.steps_of.get(number, 0), number

    def _pull_finite(self, number: int) -> Pulled | None:
        pulled = self._pull(number, self._patience.pull.total_seconds())
        return pulled if pulled is not None and all_finite(pulled.values) else None

    def _pull(self, number: int, seconds: float) -> Pulled | None:
        try:
            return self._edge.pull(number, seconds)
        except Refused as error:
            self._refusal = error
            return None

    # --- what other threads call

    def _on_roll(self, roll: Roll) -> None:
        if self._edges is not None:
            self._edges.look()

    def _on_stopped(self) -> None:
        self._was_stopped = True

    def _rejoin(self) -> None:
        """After a stop of the whole process: first the others' weights, then in."""
        if not self._was_stopped:
            return
        if self._node.size > 1:
            raise RuntimeError(
                f"an island of {self._node.size} learners was stopped for so long that "
                "the others went on without it: start it again (with `torchrun "
                "--max-restarts`, say), so that it begins with their weights"
            )
        if (found := self.weights_of_neighbours()) is not None:
            adopted = self._engine.adopt(found.values)
            while not (adopted.wait(_LOOK_S) or self._ended):
                pass
            self._rejoined_at = found.position
        elif self.membership.roll.members:
            return
        self._was_stopped = False
        self.membership.enter()

    @property
    def _engine(self) -> Gossip:
        assert self._gossip is not None
        return self._gossip

    @property
    def _edge(self) -> Edges:
        assert self._edges is not None
        return self._edges


def _own_address(place: Place) -> str:
    """Of the interface that is chosen, or by which the rendezvous is reached."""
    if os.environ.get(VARIABLE) and (addresses := gloo_addresses()):
        return addresses[0]
    with socket.create_connection((place.host, place.port), 5) as probe:
        return str(probe.getsockname()[0])
