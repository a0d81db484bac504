"""The agreement of two super-learners at a step boundary to exchange, without a server.

A super-learner that reaches its boundary offers an exchange to a peer that it knows to
be ready. If it knows of none, it tells all peers that it is ready, and waits::

    READY    I wait at my boundary: a peer that arrives may offer
    GONE     I do no longer
    OFFER    you are ready, so let us exchange
    YES, NO  the answer, which comes at once

A super-learner that has made an offer decides nothing else until the answer arrives,
and refuses all other offers meanwhile. Two offers that cross answer each other. So both
ends of a pair agree, however late words arrive, and no super-learner is in two pairs.
Words from one end arrive in the order in which they were sent.

The rules are pure, without threads, networks or clocks.
"""

import random
from collections.abc import Iterable
from typing import Literal, NamedTuple

READY, GONE, OFFER, YES, NO = 6, 7, 8, 9, 10
WORDS = frozenset((READY, GONE, OFFER, YES, NO))
"""Words of a lane, beside those of `exchange`."""

_State = Literal["away", "ready", "offering", "paired"]


class Word(NamedTuple):
    """A word to send to a peer."""

    peer: int
    word: int


class Pair(NamedTuple):
    """The outcome of a boundary.

    Attributes:
        partner: number of the peer to exchange with; None if none came in time.
        asks: whether this end asks for the exchange and the partner answers.
    """

    partner: int | None = None
    asks: bool = False


class Pairing:
    """One super-learner's side of the agreement; the caller must hold a lock.

    Each method returns the words to send, in order.

    Attributes:
        pair: outcome of the boundary, once decided.
        partner: peer with which all learners of this super-learner are exchanging.
    """

    def __init__(self, own: int, peers: Iterable[int], draw: random.Random) -> None:
        self.own, self._peers, self._draw = own, tuple(peers), draw
        self._state: _State = "away"
        self._ready, self._told = set[int](), set[int]()
        self._in_hurry = False
        self.pair = Pair()
        self.partner: int | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there are no peers to pair with."""
        return not self._peers

    @property
    def is_decided(self) -> bool:
        """Whether the outcome in `pair` is decided."""
        return self._state in ("away", "paired")

    def arrive(self) -> list[Word]:
        """Arrives at a step boundary."""
        self._in_hurry, self.pair = False, Pair()
        return self._offer_or_wait()

    def give_up(self) -> list[Word]:
        """Stops waiting for peers, except for the answer to an offer."""
        self._in_hurry = True
        return self._end("away", Pair()) if self._state == "ready" else []

    def leave(self) -> None:
        """Leaves the boundary after the exchange."""
        self._state, self.partner = "away", None

    def hear(self, peer: int, word: int) -> list[Word]:
        """Processes a word from a peer."""
        if word == OFFER:
            return self._answer(peer)
        if word == READY:
            self._ready.add(peer)
            # Both may wait: then one of the two offers.
            waits = self._state == "ready" and self.own < peer
            return self._offer_to(peer) if waits else []
        self._ready.discard(peer)
        if word == YES:
            return self._end("paired", Pair(peer, asks=True))
        return self._refused() if word == NO else []

    def _answer(self, peer: int) -> list[Word]:
        if self._state == "ready":
            return [Word(peer, YES), *self._end("paired", Pair(peer, asks=False))]
        if self._state == "offering" and self.pair.partner == peer:
            return self._end("paired", Pair(peer, asks=self.own < peer))
        self._told.discard(peer)  # for that peer, a refusal means the same as GONE
        return [Word(peer, NO)]

    def _refused(self) -> list[Word]:
        if self._in_hurry:
            return self._end("away", Pair())
        return self._offer_or_wait()

    def _offer_or_wait(self) -> list[Word]:
        if self._ready:
            return self._offer_to(self._draw.choice(sorted(self._ready)))
        self._state, self.pair = "ready", Pair()
        untold = [peer for peer in self._peers if peer not in self._told]
        self._told.update(untold)
        return [Word(peer, READY) for peer in untold]

    def _offer_to(self, peer: int) -> list[Word]:
        self._state, self.pair = "offering", Pair(peer)
        return [Word(peer, OFFER)]

    def _end(self, state: _State, pair: Pair) -> list[Word]:
        """Decides the boundary, and tells peers that heard READY."""
        self._state, self.pair = state, pair
        told = sorted(self._told - {pair.partner})
        self._told.clear()
        if pair.partner is not None:
            self._ready.discard(pair.partner)
        return [Word(peer, GONE) for peer in told]
