"""Islands in the threads of one process, over real connections, and their rendezvous.

Their heartbeat is faster than the default, so that waiting for a silence is short.
"""

import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from lightning_adpsgd.gossip.engine import GossipOptions
from lightning_adpsgd.gossip.protocol import Position
from lightning_adpsgd.islands.island import Island, Sections, Timeouts
from lightning_adpsgd.islands.member_list import Heartbeat, MemberList
from lightning_adpsgd.islands.membership import Membership
from lightning_adpsgd.islands.membership_reader import MembershipReader, MembershipView
from lightning_adpsgd.islands.rendezvous import RendezvousAddress, serve
from lightning_adpsgd.mixing.consensus import Consensus
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.links.credentials import Credentials
from tests import helpers
from tests.helpers import PATIENCE_S, free_port, until

HEARTBEAT = Heartbeat(interval_s=0.05, silence_s=0.6, empty_s=0.1)
PATIENCE = Timeouts(helpers.PATIENCE, helpers.PATIENCE, 2 * helpers.PATIENCE, HEARTBEAT)


class Server:
    """A rendezvous that can be stopped and started again at the same port."""

    def __init__(self) -> None:
        self.address = RendezvousAddress("127.0.0.1", free_port(), "job")
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stop = threading.Event()
        arguments = (self.address.host, self.address.port, self._stop)
        self._thread = threading.Thread(target=serve, args=arguments, daemon=True)
        self._thread.start()
        until(self._listens, "the rendezvous")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self.address.host, self.address.port)) == 0

    def stop(self) -> None:
        if self._stop is not None and self._thread is not None:
            self._stop.set()
            self._thread.join(PATIENCE_S)


@contextmanager
def rendezvous() -> Iterator[Server]:
    server = Server()
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _fail(error: BaseException) -> None:
    raise error


NOBODY_LISTENS: dict[str, Any] = {
    "on_change": lambda: None,
    "on_left_behind": lambda: None,
    "on_turn": lambda: None,
    "fail": _fail,
}
"""What a membership calls, where a test looks at none of it."""


def fall_silent(membership: MembershipView) -> None:
    """It stays on the list when it ends, and does not add itself again."""
    if isinstance(membership, Membership):  # the first learner of its island
        membership._say_goodbye = membership._rendezvous.close
        membership._take_place = lambda store: None


def is_awaited(event: Any) -> bool:
    """Whether a thread waits for it. One that has just been woken is at work."""
    with event._cond:
        return not event.is_set() and bool(event._cond._waiters)


def are_idle(trained: Sequence["Trained"]) -> bool:
    """Whether nobody asks any more, and what was under way has ended at both ends.

    At the second look no asker has anything to do. So nothing begins at one of them
    while another is looked at, and what is still under way at the asked end is seen.
    """
    return all(one.is_idle for one in trained) and all(one.is_idle for one in trained)


class Trained:
    """An island over one vector, and its steps."""

    def __init__(
        self,
        server: Server,
        weights: Tensor,
        topology: str = "ring",
        group: SuperLearnerGroup | None = None,
        store: Store | None = None,
        in_place: bool = False,
        sections: Sections | None = None,
        num_elements: int = 0,
        **options: Any,
    ) -> None:
        self.vector = weights if in_place else weights.clone()
        self.island = Island(
            [self.vector],
            server.address,
            Schedule(find_topology(topology), 1),
            GossipOptions(**{"timeout": helpers.PATIENCE, **options}),
            f"weight:({num_elements or len(weights)},):{weights.dtype}",
            Credentials(),
            group,
            store,
            PATIENCE,
            sections,
        )

    def step(self, update: float = 0.0) -> None:
        self.island.engine.before_update()
        self.vector.add_(update)
        self.island.engine.after_update()

    @property
    def membership(self) -> Any:
        return self.island.membership

    @property
    def listed(self) -> Collection[int]:
        """Numbers on the member list."""
        return self.membership.members.by_number

    @property
    def members(self) -> int:
        return self.island.statistics().members

    @property
    def service_errors(self) -> int:
        """Failed turns of its threads, of whatever kind."""
        services = self.membership, self.island._connections
        return sum(one.num_errors for one in services)

    @property
    def exchanges(self) -> int:
        return self.island.statistics().exchanges

    @property
    def is_idle(self) -> bool:
        engine = self.island.engine
        sections, lines = engine.peers_by_section, engine._traffic._under_way.values()
        askers = [asker for peers in sections for asker in peers._askers.values()]
        return all(is_awaited(asker.called) for asker in askers) and not any(
            o.in_line or o.requests or o._requested or o._admitted or o.total()
            for o in [*lines]
        )

    def cut_off(self) -> None:
        """Its connections break, as when its process is killed."""
        fall_silent(self.membership)
        assert self.island._listeners
        for one in (*self.island._listeners, *self.island._transports):
            one.close()

    def die(self) -> None:
        """Ends without a word, as a process that is killed."""
        self.cut_off()
        self.island.abort()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Its membership stands still, for so long that others evict it.

        It does so between two turns: one under way could still change the list.
        """
        membership = self.membership
        rest, rests, goes_on = membership._rest, threading.Event(), threading.Event()

        def rest_for_long() -> None:
            rests.set()
            assert membership._state.wait_for(goes_on.is_set, PATIENCE_S)
            rest()

        membership._rest = rest_for_long
        assert rests.wait(PATIENCE_S)
        membership._rest = rest
        with membership._state:
            yield
            goes_on.set()
            membership._state.notify_all()
        # Its training, which would be stopped too, goes on after the turn held up.
        assert membership.refresh(PATIENCE_S)

    def average(self) -> Consensus:
        """The mean, as a validation takes it: a vote under way has ended before."""
        self.island.engine.settle()
        return self.island.average()

    def until_it_has_rejoined(self, others: Sequence["Trained"] = ()) -> Position:
        """Trains, as others do, until it has taken up their weights."""
        found: list[Position] = []

        def look() -> bool:
            for one in (self, *others):
                one.step()
            position = self.island.note(0, 0)
            found.extend([position] if position is not None else [])
            return bool(found)

        until(look, "the weights of others")
        return found[0]

    def shorten_timeouts(self, seconds: float) -> None:
        short = timedelta(seconds=seconds)
        timeouts = replace(PATIENCE, start=short, pull=short, mean=2 * short)
        self.island._timeouts = self.island._joining._timeouts = timeouts


@contextmanager
def archipelago(
    server: Server, rows: Tensor, topology: str = "ring", **options: Any
) -> Iterator[list[Trained]]:
    """As many islands as rows, one started after the other; ended in the end."""
    trained = [Trained(server, row, topology, **options) for row in rows]
    with ExitStack() as stack:
        for one in trained:
            one.island.start()
            stack.callback(one.island.abort)
        yield trained


def train_until(
    trained: Sequence[Trained], condition: Callable[[], bool], what: str
) -> None:
    """Lets all take steps that change nothing, until it holds."""

    def train_and_look() -> bool:
        for one in trained:
            one.step()
        return condition()

    until(train_and_look, what)


def total(trained: Sequence[Trained]) -> Tensor:
    """The sum of all islands' weights, with what is not merged yet."""
    rows = [torch.cat(one.island.engine.replica.snapshot()) for one in trained]
    return torch.stack(rows).sum(0)


def left_at_each_list(
    cls: type[Membership | MembershipReader], monkeypatch: pytest.MonkeyPatch
) -> list[frozenset[str]]:
    """Who was known to have left when each list of members became visible."""
    seen, key = list[frozenset[str]](), "members"

    def show(view: Membership | MembershipReader, members: MemberList) -> None:
        seen.append(view.left)
        vars(view)[key] = members

    shown = property(lambda view: vars(view)[key], show)
    monkeypatch.setattr(cls, key, shown, raising=False)
    return seen


def still_clock(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Any:
    """Gives a module a `time` that stands still, at 100 s, until `now` is changed."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(module, "time", clock)
    return clock
