"""Requests for exchanges in a simulated cluster, by the engine's rules (`UnderWay`)."""

import math
from collections.abc import Callable, Sequence

from lightning_adpsgd.gossip.protocol import UnderWay
from lightning_adpsgd.virtual.clock import ASKING, Agenda


class Requests:
    """The requests of all super-learners for exchanges.

    Args:
        latency: seconds until a message arrives.
        under_ways: exchanges of each super-learner.
        begin: function of the asker and the asked one that begins an exchange.

    Attributes:
        hurried: super-learners whose training waits for an exchange; they begin one
            without a request.
    """

    def __init__(
        self,
        agenda: Agenda,
        latency: float,
        under_ways: Sequence[UnderWay],
        begin: Callable[[int, int], None],
    ) -> None:
        self._agenda, self._latency = agenda, latency
        self._under_ways, self._begin = under_ways, begin
        self.hurried = set[int]()
        # Pairs (asker, asked) until their exchange ends; those that then ask again.
        self._asking, self._due = set[tuple[int, int]](), set[tuple[int, int]]()
        # The time at which each super-learner next serves those who wait.
        self._serves_at = dict[int, float]()

    def call(self, index: int, peer: int) -> None:
        """Asks for an exchange, or for another after the one already asked for."""
        under_way = self._under_ways[index]
        if (index, peer) not in self._asking:
            self._asking.add((index, peer))
            self._agenda.enter(self._agenda.now, ASKING, self._ask, index, peer)
        # The exchange asked for before has begun, or is about to begin.
        elif peer not in under_way.in_line or under_way.has_been_met(peer):
            self._due.add((index, peer))

    def end(self, index: int, peer: int) -> None:
        """Ends a request whose exchange is done, and repeats it if called meanwhile."""
        self._asking.discard((index, peer))
        if (index, peer) in self._due:
            self._due.discard((index, peer))
            self.call(index, peer)

    def serve(self, *indices: int) -> None:
        """Admits the peers whose turn it is, and then requests those in line."""
        admissions = [self._admissions(index) for index in indices]
        for index, wait_s in zip(indices, admissions, strict=True):
            now = self._agenda.now
            at = now + min(wait_s, self._requests(index))
            if now < at < math.inf and at != self._serves_at.get(index):
                self._serves_at[index] = at
                self._agenda.enter(at, ASKING, self.serve, index)

    def _admissions(self, index: int) -> float:
        requests = self._under_ways[index].requests
        return min((self._wait_to_admit(index, p) for p in requests), default=math.inf)

    def _requests(self, index: int) -> float:
        line = self._under_ways[index].in_line
        return min((self._wait_to_request(index, p) for p in line), default=math.inf)

    def _ask(self, index: int, peer: int) -> None:
        if index in self.hurried:
            self._begin(index, peer)
            return
        self._under_ways[index].line_up(peer)
        self.serve(index)

    def _wait_to_request(self, index: int, peer: int) -> float:
        """Requests an exchange, or returns the seconds until it may."""
        under_way, now = self._under_ways[index], self._agenda.now
        if under_way.has_been_met(peer):  # the peer has asked meanwhile
            under_way.step_out(peer)
            self.end(index, peer)
        elif wait_s := under_way.wait_s(peer, now):
            return wait_s
        else:
            under_way.step_out(peer)
            under_way.request(peer, now)
            self._send(self._requested, index, peer)
        return math.inf

    def _wait_to_admit(self, index: int, peer: int) -> float:
        """Admits a peer, or returns the seconds until it may."""
        under_way, now = self._under_ways[index], self._agenda.now
        if wait_s := under_way.admission_wait_s(peer, now):
            return wait_s
        under_way.admit(peer, now)
        self._send(self._admitted, peer, index)
        return math.inf

    def _send(self, arrive: Callable[[int, int], None], asker: int, asked: int) -> None:
        seconds = self._agenda.now + self._latency
        self._agenda.enter(seconds, ASKING, arrive, asker, asked)

    def _requested(self, asker: int, asked: int) -> None:
        self._under_ways[asked].requested_by(asker)
        self.serve(asked)

    def _admitted(self, asker: int, asked: int) -> None:
        under_way = self._under_ways[asker]
        may_begin = under_way.may_begin(asked, self._agenda.now)
        under_way.answered_by(asked)
        if may_begin:
            self._begin(asker, asked)
        else:
            self._decline(asker, asked)
        self.serve(asker)

    def _decline(self, asker: int, asked: int) -> None:
        self._send(self._declined, asker, asked)
        if self._under_ways[asker].has_been_met(asked):
            self.end(asker, asked)
        else:
            self._under_ways[asker].line_up(asked)

    def _declined(self, asker: int, asked: int) -> None:
        self._under_ways[asked].declined_by(asker)
        self.serve(asked)
