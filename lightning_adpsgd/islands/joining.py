"""The start of an island: as the first of a job, or with the weights of the others."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from torch import Tensor
from torch._C._distributed_c10d import Store

from lightning_adpsgd.gossip.protocol import BEGINNING, Position, Pulled
from lightning_adpsgd.islands.connections import Connections
from lightning_adpsgd.islands.mean import mean_of
from lightning_adpsgd.islands.member_list import (
    Heartbeat,
    Member,
    MemberList,
    ahead_of,
    furthest_origin,
)
from lightning_adpsgd.islands.membership_reader import MembershipReader, MembershipView
from lightning_adpsgd.islands.rendezvous import RendezvousAddress
from lightning_adpsgd.islands.waiting import Wait
from lightning_adpsgd.mixing.averages import all_finite
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup, gather_shards
from lightning_adpsgd.topology.schedule import LiveSchedule
from lightning_adpsgd.transport.links.handshake import Refused
from lightning_adpsgd.transport.links.sockets import Address, connect
from lightning_adpsgd.transport.network_interfaces import (
    VARIABLE,
    gloo_addresses,
    is_loopback,
)

_log = logging.getLogger(__name__)

# The largest number of neighbours whose mean a joining island takes.
_MOST_NEIGHBOURS = 4
_MOST_NAMED = 4
_LOOK_S, _GLANCE_S = 0.5, 0.01
_HEARTBEAT = Heartbeat()


@dataclass(frozen=True)
class Timeouts:
    """The time limits of an island.

    Args:
        start: time for the rendezvous and the others' weights at the start.
        pull: time for the weights of one island in a validation. For an island that
            joins or comes back, it is the longest time without progress.
        mean: time for the weights of all islands together in a validation.
        heartbeat: interval of heartbeats, and the silence after which an island counts
            as dead.
    """

    start: timedelta = timedelta(minutes=30)
    pull: timedelta = timedelta(seconds=20)
    mean: timedelta = timedelta(seconds=60)
    heartbeat: Heartbeat = _HEARTBEAT


class Joining:
    """How an island joins: it begins the job, or takes the weights of the others.

    The training thread uses it until the island has joined. From then on, the thread of
    its connections calls `knows_all`, `leads` and `weights_of_neighbours`.

    Args:
        vectors: all weights of this super-learner.
        timeout: longest wait for the other learners of this island.
        shares_epochs: as for `Island`.

    Attributes:
        origin: origin of the weights that it last asked for, as in `Member`.
    """

    def __init__(
        self,
        vectors: Sequence[Tensor],
        address: RendezvousAddress,
        membership: MembershipView,
        connections: Connections,
        group: SuperLearnerGroup,
        store: Store,
        timeouts: Timeouts,
        timeout: timedelta,
        shares_epochs: bool = False,
    ) -> None:
        self._vectors, self._address = vectors, address
        self._membership, self._connections = membership, connections
        self._engine, self._group, self._store = connections.engine, group, store
        self._timeouts, self._timeout = timeouts, timeout
        self._refusal: Refused | None = None
        self._refused_since = math.inf
        self._num_looks, self.origin = 0, ""
        self._on_progress: Callable[[str], None] = lambda what: None
        self._pull_until, self._num_in_vain = math.inf, 0
        self._shares_epochs = shares_epochs

    def await_number(self) -> None:
        """Waits until the rendezvous has assigned this island a number."""
        wait = self._new_wait(
            f"the rendezvous at {self._address}",
            f"start it with `python -m lightning_adpsgd rendezvous --port "
            f"{self._address.port}` on {self._address.host}, open that port in its "
            "firewall, and see that it listens at this address and that no other "
            "program has the port",
        )
        while self._membership.member.number < 0:
            wait.go_on(self._membership.outage)
            self._membership.refresh(1.0)

    def _new_wait(self, whom: str, remedy: str) -> Wait:
        seconds = self._timeouts.start.total_seconds()
        return Wait(whom, remedy, seconds, self._engine.threads.raise_if_failed)

    def published(self, key: str) -> str:
        """Waits for a value from a learner of this island; signals can end the wait."""
        limit = self._timeout.total_seconds()
        remedy = "see what the other learners of this island print"
        check = self._engine.threads.raise_if_failed
        # The first learner of the first island waits for the list to stay empty.
        usual_s = self._timeouts.heartbeat.empty_s
        wait = Wait("the other learners of this island", remedy, limit, check, usual_s)
        while not self._store.check([key]):
            wait.go_on(f"{key!r} is missing")
            time.sleep(_GLANCE_S)
        return self._store.get(key).decode()

    def own_address(self) -> str:
        """The address of the chosen interface, or of that towards the rendezvous."""
        if os.environ.get(VARIABLE) and (addresses := gloo_addresses()):
            return addresses[0]
        wait = self._new_wait(
            f"a connection to the rendezvous at {self._address}",
            f"check whether it still runs, or choose an interface with {VARIABLE}",
        )
        while True:
            try:
                with connect(Address(self._address.host, self._address.port)) as probe:
                    return str(probe.getsockname()[0])
            except OSError as error:
                wait.go_on(str(error))
                time.sleep(_LOOK_S)

    def take_up_weights(self) -> Position | None:
        """Continues from the weights of the others, or begins the job as the first.

        Returns:
            The position of the weights that it took; None if it keeps its own.

        Raises:
            Refused: The others keep refusing a learner of this island.
        """
        wait = self._new_wait(
            f"the weights of islands on the member list of {self._address}",
            "check whether this machine can reach their addresses, and what they print",
        )
        while True:
            self._on_progress = wait.go_on
            self._membership.refresh(self._timeouts.pull.total_seconds())
            self._connections.take_number()
            if self._is_first():
                return None
            listed = self._membership.members.by_number
            if listed and (found := self._weights_for_all()) is not None:
                return self._go_on_from(found)
            wait.go_on(self._membership.outage or self._why_none())

    def _why_none(self) -> str:
        """The known reasons why no member gave its weights."""
        listed, here = self._membership.members.by_number, self._membership.member.host
        if not listed:
            return "the member list is empty"
        asked = [listed[number] for number in sorted(listed)]
        named = [f"{one} at {_first_address(one)}" for one in asked[:_MOST_NAMED]]
        more = [f"{len(asked) - _MOST_NAMED} more"] * (len(asked) > _MOST_NAMED)
        traps = [_loopback_trap(one) for one in asked if one.host != here]
        why = self._connections.why_none
        said = [
            f"{one}: {why[one.incarnation]}" for one in asked if one.incarnation in why
        ]
        reasons = [f"none of {', '.join([*named, *more])} gave them", *traps, *said]
        return "; ".join([*filter(None, reasons)][: 1 + _MOST_NAMED])

    def _is_first(self) -> bool:
        """Whether this island begins the job, as its first learner decides.

        Afterwards all of its learners know the same members and origin of the weights.
        """
        self._num_looks += 1
        key, membership = f"others/{self._num_looks}", self._membership
        if isinstance(membership, MembershipReader):
            is_first, members, self.origin = json.loads(self.published(key))
            membership.members = MemberList.from_json(members)
            return bool(is_first)
        empty, timeouts = not membership.members.by_number, self._timeouts
        # Far from the rendezvous, the thread needs seconds beside those of the wait.
        seconds = timeouts.heartbeat.empty_s + timeouts.pull.total_seconds()
        first = empty and membership.begin_list(seconds)
        members, self.origin = membership.members, self._furthest_origin()
        self._store.set(key, json.dumps([first, members.to_json(), self.origin]))
        return first

    def _furthest_origin(self) -> str:
        return furthest_origin(self._membership.members, self._membership.steps_of)

    def _weights_for_all(self) -> Pulled | None:
        """The weights of this learner's shard; None unless all learners have theirs."""
        self._refusal = None
        found = self._weights_of_origin()
        position = found.position if found is not None else BEGINNING
        news = [found is None, self._is_refused_for_long(), *position]
        misses, is_refused, *furthest = self._group.agree(news, self._timeout)
        if misses and is_refused:
            raise Refused(self.published("refusal")) from self._refusal
        if found is None or misses:
            return None
        return found._replace(position=Position(*furthest))

    def _is_refused_for_long(self) -> bool:
        """Whether a refusal persists, and if so, publishes it.

        A refusal may be temporary. A dead member may still be on the list while another
        process has its port, or two members may briefly have the same number.
        """
        if self._refusal is None:
            self._refused_since = math.inf
            return False
        now = time.monotonic()
        self._refused_since = min(self._refused_since, now)
        if now - self._refused_since <= 2 * self._timeouts.heartbeat.silence_s:
            return False
        self._store.set("refusal", str(self._refusal))
        return True

    def _go_on_from(self, found: Pulled) -> Position | None:
        self._membership.describe(origin=self.origin)
        own, shared = self._engine.members.position, self._shares_epochs
        if found.position.rank(shared) < own.rank(shared):
            _log.info("this island is ahead of the others, and keeps its weights")
            return None
        self._engine.replica.put(found.values)
        gather_shards(self._vectors, self._group, self._timeout)
        self._engine.members.position = found.position
        return found.position

    def knows_all(self) -> bool:
        """Whether each member has sent a heartbeat, and with it its number of steps."""
        own, steps_of = self._membership.member.incarnation, self._membership.steps_of
        members = self._membership.members.by_number.values()
        return all(one.incarnation in (own, *steps_of) for one in members)

    def leads(self) -> bool:
        """Whether all other members belong to trainings that are behind this island."""
        members, own = self._membership.members, self._membership.member
        others = [one for n, one in members.by_number.items() if n != own.number]
        foreign = bool(others) and all(one.is_foreign_to(own) for one in others)
        steps, steps_of = self._engine.members.position.steps, self._membership.steps_of
        return foreign and ahead_of(own, steps, members, steps_of) is None

    def weights_of_neighbours(self) -> Pulled | None:
        """The mean over those of this island's future neighbours that answer.

        If none answers, it is the weights of another island, the furthest first; None
        if no island answers.
        """
        self.origin = self._furthest_origin()
        self._on_progress = lambda what: None
        found = self._weights_of_origin()
        listed = self._membership.members.by_number
        self._num_in_vain = self._num_in_vain + 1 if listed and not found else 0
        if self._num_in_vain.bit_count() == 1:  # 1, 2, 4, ...: a long cut fills no disk
            _log.warning(
                "this island needs the weights of the others to exchange with them "
                "again, and %s (asked %d times). It trains alone, and asks again",
                self._why_none(),
                self._num_in_vain,
            )
        return found

    def _weights_of_origin(self) -> Pulled | None:
        members, own = self._membership.members, self._membership.member.number
        steps_of = self._membership.steps_of
        origins, after = ("", self.origin), members.after(own)
        same = [n for n in after if members.by_number[n].origin in origins]
        steps = {n: steps_of.get(members.by_number[n].incarnation, 0) for n in same}
        others = sorted(same, key=lambda n: (-steps[n], n))
        schedule = self._engine.members.live_schedule.schedule
        peers = LiveSchedule.of(schedule, others, own).peers()
        near = [n for n in others if n in peers][:_MOST_NEIGHBOURS]
        rest = (number for number in others if number not in near)
        # The other learners of this island wait for these weights.
        wait_s = self._timeout.total_seconds() / 2 if self._group.size > 1 else math.inf
        self._pull_until = time.monotonic() + wait_s
        found = mean_of(self._pull_from(near), self._shares_epochs)
        return found or next(filter(None, map(self._pull_finite, rest)), None)

    def _pull_from(self, near: Iterable[int]) -> Iterator[Pulled]:
        """Those that answer; after the first one, little time is left."""
        for number in near:
            if (pulled := self._pull_finite(number)) is not None:
                yield pulled
                soon = time.monotonic() + self._timeouts.pull.total_seconds()
                self._pull_until = min(self._pull_until, soon)
                # The start has what it needs, so its time limit no longer applies.
                self._on_progress = lambda what: None

    def _pull_finite(self, number: int) -> Pulled | None:
        seconds = self._timeouts.pull.total_seconds()
        try:
            watch = partial(self._watch, number)
            pulled = self._connections.pull(number, seconds, watch)
        except Refused as error:
            self._refusal = error
            return None
        return pulled if pulled is not None and all_finite(pulled.values) else None

    def _watch(self, number: int, share: float) -> None:
        self._on_progress(f"{share:.0%} of the weights of island {number} came")
        if time.monotonic() > self._pull_until:
            raise TimeoutError(f"{share:.0%} of the weights came in time")


def _first_address(member: Member) -> str:
    return next(iter(member.addresses), "no address")


def _loopback_trap(member: Member) -> str:
    """A reason why no other host can reach a member; empty if there is none."""
    with suppress(ValueError):  # not an address, or a name
        host = Address.parse(_first_address(member)).host
        if is_loopback(host):
            return (
                f"{member} listens at {host}, a loopback address, which no other host "
                f"can reach. Set {VARIABLE} on host {member.host} to the interface of "
                "the job's network, or name the rendezvous there by an address of it"
            )
    return ""
