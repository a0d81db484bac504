"""The agreement of two super-learners at a step boundary to exchange, without a server.

docs/concepts.md, "Pairs that are ready", has the words and the rules. An offer is
answered at once, and no other offer is accepted meanwhile; two that cross answer each
other. So both ends of a pair agree, however late words arrive, and no super-learner is
in two pairs. Words from one end arrive in the order in which they were sent.

The rules are pure, without threads, networks or clocks.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

READY, GONE, OFFER, YES, NO, REST = 6, 7, 8, 9, 10, 17
WORDS = frozenset((READY, GONE, OFFER, YES, NO, REST))
"""Words of a lane, beside those of `exchange`."""

Choice = Callable[[Sequence[int]], int]
"""The choice of one of several peers."""

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
        pair: the boundary's outcome; before it is decided, a peer with an offer.
        partner: peer with which all learners of this super-learner exchange now.
    """

    def __init__(self, own: int, peers: Iterable[int], choose: Choice) -> None:
        self.own, self.peers, self._choose = own, tuple(peers), choose
        self._state: _State = "away"
        self._ready, self._told = set[int](), set[int]()
        self._in_hurry, self._avoided = False, frozenset[int]()
        # A peer that has gone to more meetings than this super-learner rests. These are
        # counted, because a word at a meeting's end could come too late for the first
        # boundary after it.
        self._meetings, self._meetings_of = 0, Counter[int]()
        self.pair = Pair()
        self.partner: int | None = None

    @property
    def is_decided(self) -> bool:
        """Whether the outcome in `pair` is decided."""
        return self._state in ("away", "paired")

    @property
    def may_come(self) -> set[int]:
        """The peers that may come to a boundary."""
        gone_to = self._meetings_of
        return {peer for peer in self.peers if gone_to[peer] <= self._meetings}

    def arrive(self, avoided: frozenset[int] = frozenset()) -> list[Word]:
        """Arrives at a step boundary.

        Args:
            avoided: peers to which this super-learner does not offer before `relent`,
                unless no other can come.
        """
        self._in_hurry, self._avoided, self.pair = False, avoided, Pair()
        return self._offer_or_wait()

    def relent(self) -> list[Word]:
        """Stops avoiding peers."""
        self._avoided = frozenset()
        return self._reconsider()

    def give_up(self) -> list[Word]:
        """Stops waiting for peers, except for the answer to an offer."""
        self._in_hurry = True
        return self._end("away", Pair()) if self._state == "ready" else []

    def rest(self) -> list[Word]:
        """Goes to the next meeting of all."""
        self._meetings += 1
        return [Word(peer, REST) for peer in self.peers]

    def leave(self) -> None:
        """Leaves the boundary after the exchange."""
        self._state, self.partner = "away", None

    def hear(self, peer: int, word: int) -> list[Word]:
        """Processes a word from a peer."""
        if word == OFFER:
            return self._answer(peer)
        if word == READY:
            self._ready.add(peer)
            # If both wait, the one with the smaller number offers.
            offers = self._state == "ready" and self.own < peer
            is_avoided = peer in self._avoided
            return self._offer_to(peer) if offers and not is_avoided else []
        self._ready.discard(peer)
        if word == REST:
            self._meetings_of[peer] += 1
            return self._reconsider()
        if word == YES:
            return self._end("paired", Pair(peer, asks=True))
        if word == NO and self._in_hurry:
            return self._end("away", Pair())
        return self._offer_or_wait() if word == NO else []

    def _answer(self, peer: int) -> list[Word]:
        if self._state == "ready":
            return [Word(peer, YES), *self._end("paired", Pair(peer, asks=False))]
        if self._state == "offering" and self.pair.partner == peer:
            return self._end("paired", Pair(peer, asks=self.own < peer))
        self._told.discard(peer)  # for that peer, a refusal means the same as GONE
        return [Word(peer, NO)]

    def _reconsider(self) -> list[Word]:
        return self._offer_or_wait() if self._state == "ready" else []

    def _offer_or_wait(self) -> list[Word]:
        if self.may_come <= self._avoided:
            self._avoided = frozenset()
        if ready := sorted(self._ready - self._avoided):
            return self._offer_to(self._choose(ready))
        if not self.may_come:
            return self._end("away", Pair())
        self._state, self.pair = "ready", Pair()
        untold = [peer for peer in self.peers if peer not in self._told]
        self._told.update(untold)
        return [Word(peer, READY) for peer in untold]

    def _offer_to(self, peer: int) -> list[Word]:
        self._state, self.pair = "offering", Pair(peer)
        return [Word(peer, OFFER)]

    def _end(self, state: _State, pair: Pair) -> list[Word]:
        """Decides the boundary, and says GONE to the others that heard READY."""
        self._state, self.pair = state, pair
        told = sorted(self._told - {pair.partner})
        self._told.clear()
        if pair.partner is not None:
            self._ready.discard(pair.partner)
        return [Word(peer, GONE) for peer in told]
