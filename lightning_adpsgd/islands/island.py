"""One island: a super-learner that is started by itself and gossips with others.

An island may have several learners. Each exchanges a shard of the weights with its
counterparts, over its own connections. The first learner keeps it on the member list.

An island starts with the weights of the islands that are present, or with its own if
there are none. From then on, its training thread never waits for the rendezvous or for
another island, whether that dies, joins or cannot be reached. What is validated and
saved is the mean over the islands that answer within a short time.
"""

import logging
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from lightning_adpsgd.coordination.startup.signals import ended_by_sigterm
from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.gossip.protocol import BEGINNING, Position, furthest
from lightning_adpsgd.islands.connections import Connections
from lightning_adpsgd.islands.joining import Joining, Timeouts
from lightning_adpsgd.islands.mean import Mean, Total, consensus_over_shards
from lightning_adpsgd.islands.member_list import Member
from lightning_adpsgd.islands.membership import Membership
from lightning_adpsgd.islands.membership_reader import (
    MembershipReader,
    MembershipView,
    publish,
)
from lightning_adpsgd.islands.rendezvous import Rendezvous, RendezvousAddress
from lightning_adpsgd.mixing.consensus import Consensus
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup, gather_shards
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.links.handshake import Refused
from lightning_adpsgd.transport.links.listener import Listener
from lightning_adpsgd.transport.links.peer_info import PeerInfo
from lightning_adpsgd.transport.links.sockets import Address
from lightning_adpsgd.transport.links.transport import LinkTransport

_log = logging.getLogger(__name__)

_GOODBYE_S, _DRAIN_S, _LOOK_S = 2.0, 5.0, 0.5
_TIMEOUTS = Timeouts()


class Sections(NamedTuple):
    """The sections of a learner where islands may differ in size (`weights.sections`).

    Attributes:
        own: indices of the learner's sections; each has its own listener.
        number: total number of sections; an island has an address for each.
        sizes: sizes that islands may have, the same in all; empty if all have one size.
    """

    own: tuple[int, ...]
    number: int
    sizes: tuple[int, ...] = ()


class Island:
    """One learner's part in an island.

    The training thread calls everything, with these exceptions. The thread of
    `Connections` calls `_rejoin`, and that of `Membership` sets `_is_left_behind`.
    Listener threads call `_objection`. A signal handler calls `ask_to_leave`.

    Args:
        schedule: topology, gain and seed; its number of super-learners is ignored.
        layout: result of `FlatParameters.layout()`; must be equal in all islands.
        store: store that the learners of this island share; None if it has only one.
        sections: sections that this learner exchanges; None: all islands have one size,
            and a learner exchanges its shard with the learners of the same index.
        shares_epochs: whether islands share epochs. If so, the island in the latest
            epoch is the furthest; otherwise the one with the most steps.

    Attributes:
        started_from: position of the weights that it took at its start; None if it kept
            its own.
    """

    def __init__(
        self,
        vectors: Sequence[Tensor],
        address: RendezvousAddress,
        schedule: Schedule,
        options: GossipOptions,
        layout: str,
        credentials: Credentials,
        group: SuperLearnerGroup | None = None,
        store: Store | None = None,
        timeouts: Timeouts = _TIMEOUTS,
        sections: Sections | None = None,
        shares_epochs: bool = False,
    ) -> None:
        self._vectors, self._address, self._schedule = vectors, address, schedule
        self._options, self._layout, self._timeouts = options, layout, timeouts
        self._credentials, self._group = credentials, group or SuperLearnerGroup()
        self._store, self._shares_epochs = store or HashStore(), shares_epochs
        self._sections = sections or Sections((self._group.index,), self._group.size)
        self.started_from: Position | None = None
        shards = self._sections.own
        self._transports = [self._make_transport(shard) for shard in shards]
        self._is_left_behind, self._ended, self._origin = False, False, ""
        self.engine = self._make_engine()
        self.membership = self._make_membership()
        self._connections = Connections(
            self._transports, self.membership, self.engine, self._rejoin, shards
        )
        self._listeners: list[Listener] = []
        self._rejoined_at: Position | None = None
        self._joining = Joining(
            vectors,
            address,
            self.membership,
            self._connections,
            self._group,
            self._store,
            timeouts,
            options.timeout,
            shares_epochs,
        )

    def _make_membership(self) -> MembershipView:
        heartbeat, store = self._timeouts.heartbeat, self._store
        fail, wake = self.engine.threads.fail, lambda: self._connections.wake()
        if self._group.index > 0:
            return MembershipReader(store, heartbeat, wake, fail)
        membership = Membership(
            Rendezvous(self._address, credentials=self._credentials),
            Member(-1, uuid.uuid4().hex, socket.gethostname(), ()),
            lambda: self.position.steps,
            heartbeat,
            wake,
            self._on_left_behind,
            lambda: publish(membership, store) if self._group.size > 1 else None,
            fail,
        )
        return membership

    @property
    def position(self) -> Position:
        """The progress of this island."""
        return self.engine.members.position

    # --- from start to end

    def start(self, position: Position = BEGINNING) -> None:
        """Joins the others with their weights; the first island keeps its own.

        Raises:
            RuntimeError: The rendezvous or the others' weights did not come in time.
            Refused: This island and the others do not match.
            SystemExit: SIGTERM arrived during the wait.
        """
        self.engine.members.position = position
        with ended_by_sigterm():
            self.membership.start()
            self._joining.await_number()
            self.engine.start()
            self._listen()
            self.started_from = self._joining.take_up_weights()
            self._enter()
        self._connections.start()

    def _enter(self) -> None:
        deadline = time.monotonic() + self._timeouts.pull.total_seconds()
        self.membership.enter()
        while not self.membership.is_in and time.monotonic() < deadline:
            self.engine.threads.raise_if_failed()
            self.membership.refresh(_LOOK_S)
        if not self.membership.is_in:
            _log.warning(
                "this island is not on the member list yet (%s): it trains, and "
                "exchanges with no other until it is",
                self.membership.outage or "no answer yet",
            )

    def depart(self) -> None:
        """Merges all exchanges into the weights, then stops.

        All learners of the island must call it, at the step that they have agreed on.
        """
        self.engine.drain(_DRAIN_S)
        if self._group.size == 1 or self.engine.leaves:
            self.engine.merge_all()
        self.stop()

    def ask_to_leave(self) -> None:
        """Makes all learners of this island leave at one step; for a signal handler."""
        self.engine.members.wants_to_leave = True

    @property
    def name(self) -> str:
        """A name that is unique among islands, and short enough for a file name."""
        member = self.membership.member
        return f"{member.number}-{member.incarnation[:8]}"

    def stop(self) -> None:
        """Ends exchanges, leaves the member list and says goodbye; takes seconds."""
        self._connections.stop(_GOODBYE_S)
        self.engine.drain(_DRAIN_S)
        self.membership.stop(_GOODBYE_S)
        self.engine.say_goodbye(_GOODBYE_S)
        self.abort()

    def abort(self) -> None:
        """Ends within seconds, whatever the peers do."""
        self._ended = True
        self.engine.release()
        self.membership.stop(_GOODBYE_S)
        self._connections.stop(_GOODBYE_S)
        for one in (*self._listeners, *self._transports):
            one.close()
        self.engine.abort()

    # --- the mean of all

    @torch.no_grad()
    def mean(self) -> Mean:
        """The mean over this island and all that answer in time; changes no weights."""
        deadline = time.monotonic() + self._timeouts.mean.total_seconds()
        total = Total(self.engine.replica.snapshot())
        members, own = self.membership.members, self.membership.member
        own = own._replace(origin=own.origin or self._origin)
        for number in members.after(own.number):
            left = deadline - time.monotonic()
            if left > 0 and not members.by_number[number].is_foreign_to(own):
                self._add(number, min(left, self._timeouts.pull.total_seconds()), total)
        return total.mean()

    def _add(self, number: int, seconds: float, total: Total) -> None:
        # The weights of one island are released before the next is asked.
        with suppress(Refused):
            if (pulled := self._connections.pull(number, seconds)) is not None:
                total.add(pulled.values)

    def average(self) -> Consensus:
        """Replaces the weights here by the mean over the islands that answer."""
        mean = self.mean()
        self.engine.write(mean.values)
        gather_shards(self._vectors, self._group, self._options.timeout)
        mine = torch.tensor(mean[1:], dtype=torch.float64, device="cpu")
        all_of_them = [torch.zeros_like(mine) for _ in range(self._group.size)]
        self._group.gather(mine, all_of_them, self._options.timeout)
        return consensus_over_shards([shares.tolist() for shares in all_of_them])

    def note(self, samples: int, epochs: int) -> Position | None:
        """Records that training on a batch begins.

        All islands' samples are an estimate: each counts as if it trained on as many.

        Args:
            samples: number of samples in the batch.
            epochs: number of completed epochs.

        Returns:
            The position of the others, if this island has taken their weights since the
            last call; otherwise None.
        """
        found, self._rejoined_at = self._rejoined_at, None
        if found is not None:
            both = found, self.position
            self.engine.members.position = furthest(both, self._shares_epochs)
            return found
        members = self.engine.members
        steps, before, _ = members.position
        samples = before + samples * len(members.live_schedule.numbers)
        members.position = Position(steps, samples, epochs)
        return None

    def statistics(self) -> Statistics:
        """The counters so far, including islands that joined and left."""
        return replace(
            self.engine.statistics(),
            members=len(self.engine.members.live_schedule.numbers),
            joined=self._connections.joined,
            lost=self._connections.lost,
        )

    # --- joining the others

    def _make_transport(self, shard: int) -> LinkTransport:
        sizes = self._sections.sizes
        info = PeerInfo(
            member=-1,
            incarnation="",
            job=self._address.job,
            model=self._layout,
            super_learner_size=self._sections.number,
            shard=shard,
            settings={
                **({"sizes of islands": str(sizes)} if sizes else {}),
                # Learners of equal numbers hold other parts of the same weights.
                "inside": "ddp" if self._group.holds_all else "model_parallel",
                "wire_dtype": str(self._options.wire_dtype),
                "mixing_gain": str(self._schedule.gain),
            },
        )
        return LinkTransport(info, self._credentials)

    def _make_engine(self) -> Gossip:
        # Its connections are made later, and use it.
        members = Members(
            *(self._schedule, (), -1),
            on_lost=lambda *lost: self._connections.on_lost(*lost),
            on_left=lambda *left: self._connections.on_left(*left),
        )
        transport, *further = self._transports
        given = transport, self._group, members, self._options
        return Gossip(self._vectors, *given, further=further)

    def _listen(self) -> None:
        here = Address(self._joining.own_address(), 0)
        for section, transport in enumerate(self._transports):
            on_lane = partial(self._connections.on_lane, section)
            listener = transport.listen(here, on_lane, self._objection)
            self._listeners.append(listener)
            key = f"address/{self._sections.own[section]}"
            self._store.set(key, str(listener.address))
        if self._group.index == 0:
            keys = [f"address/{number}" for number in range(self._sections.number)]
            addresses = tuple(map(self._joining.published, keys))
            self.membership.describe(addresses=addresses)

    def _objection(self, dialer: PeerInfo) -> str:
        if self._is_left_behind and dialer.origin:
            # Until then it has no origin, so it would pass for one of theirs. A dialer
            # without an origin only takes weights.
            return "this island has yet to take the weights of the others"
        return self.membership.members.objection(dialer.member, dialer.incarnation)

    # --- what other threads call

    def _on_left_behind(self) -> None:
        self._is_left_behind = True

    def _rejoin(self) -> None:
        """After `_on_left_behind`, returns to the list with the furthest weights."""
        # A member that is ahead must not pass for one that has just begun.
        if not (self._is_left_behind and self._joining.knows_all()):
            return
        self._origin = self.membership.member.origin or self._origin
        self.membership.describe(origin=self._origin)  # an error may have hidden it
        if not self.membership.members.by_number or self._joining.leads():
            self._come_back()
            return
        if self._group.size > 1:
            # Raised, it would count as an unexpected error, and be tried again.
            self.engine.threads.fail(
                RuntimeError(
                    f"the others went on without this island of {self._group.size} "
                    "learners: it was stopped for too long, or a call held Python's "
                    "interpreter lock for so long, or its weights come from another "
                    "training. Start it again (with `torchrun --max-restarts`, say): "
                    "it then begins with theirs"
                )
            )
            return
        # Without an origin, it is not refused the weights of another training.
        self.membership.describe(origin="")
        self._connections.take_number()
        found = self._joining.weights_of_neighbours()
        if found is not None:
            adopted = self.engine.adopt(found.values)
            while not (adopted.wait(_LOOK_S) or self._ended):
                pass
            self._origin = self._joining.origin
        self.membership.describe(origin=self._origin)
        if found is not None:
            self._rejoined_at = found.position
            self._come_back()

    def _come_back(self) -> None:
        self._connections.take_number()  # with the origin, before others dial
        self._is_left_behind = False
        self.membership.enter()
