"""Answering one peer at once, whatever the training thread is doing."""

import threading
from collections.abc import Callable

from lightning_adpsgd.gossip.exchange import ASK, LEAVE, PULL, Lane, Position
from lightning_adpsgd.gossip.traffic import Traffic
from lightning_adpsgd.transport.base import PeerLost


class Answerer:
    """What the thread that answers a peer does.

    Args:
        peer: Who asks.
        traffic: Of which each answer is a part.
        position: How far this learner has come, for a peer that pulls its weights.
        on_left: Called when the peer asks no more, with its number, and whether it
            leaves the others altogether.
    """

    def __init__(
        self,
        peer: int,
        traffic: Traffic,
        position: Callable[[], Position],
        on_left: Callable[[int, bool], None],
    ) -> None:
        self._peer, self._traffic = peer, traffic
        self._position, self._on_left = position, on_left
        self._forgotten = threading.Event()

    def forget(self) -> None:
        """Its loss is no news from here on; for any thread."""
        self._forgotten.set()

    def run(self, lane: Lane) -> None:
        """Answers, until the peer leaves or is lost.

        Raises:
            PeerLost: It was, without having been forgotten.
        """
        try:
            while (word := lane.hear()) != LEAVE:
                self._answer(word, lane)
        except PeerLost:
            if not self._forgotten.is_set():
                raise
        else:
            self._on_left(self._peer, lane.heard_number > 0)

    def _answer(self, word: int, lane: Lane) -> None:
        if word == PULL:
            lane.give(self._position())
        elif word == ASK:
            pacer = self._traffic.pacer
            self._traffic.make(
                self._peer, lambda number: lane.answer(number, pacer), asked=True
            )
