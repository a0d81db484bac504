"""The step boundary at which a super-learner pairs with another at its own boundary.

`pairing` has the rules, and `peers` the threads that carry words and exchanges. Here
the training thread waits for a partner, for an answer, and for the end of the exchange.
"""

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from lightning_adpsgd.gossip.account import Account
from lightning_adpsgd.gossip.pairing import Pair, Pairing, Word
from lightning_adpsgd.gossip.peers import Peers, Threads
from lightning_adpsgd.gossip.protocol import Patience
from lightning_adpsgd.gossip.waiting import Waiting
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup

_log = logging.getLogger(__name__)
# Boundaries without a partner, or meetings with the same few, until a warning.
_MANY = 50


class Boundary:
    """One learner at its step boundaries; for the training thread.

    The first learner of a super-learner finds the partner, and the others follow it:
    all of them exchange with their counterparts, or none does.

    Args:
        pairing: rules, and what was agreed on; guarded by the engine's lock.
        timeout: half of the longest wait for the first learner's decision.
    """

    def __init__(
        self,
        pairing: Pairing,
        group: SuperLearnerGroup,
        peers_by_section: Sequence[Peers],
        account: Account,
        threads: Threads,
        patience: Patience,
        timeout: timedelta,
        waiting: Waiting,
    ) -> None:
        self._pairing, self._group = pairing, group
        self._peers_by_section = peers_by_section
        # The first section is that of the first learner of each super-learner.
        self._peers = peers_by_section[0]
        self._account, self._threads, self._state = account, threads, threads.state
        self._patience, self._timeout, self._waiting = patience, timeout, waiting
        # None before the first step and after a meeting: what comes next is no step.
        self._left_at: float | None = None
        self._has_warned = False

    def leave(self) -> None:
        """Leaves the boundary for the next step."""
        self._left_at = time.perf_counter()

    def meet(self) -> bool:
        """Exchanges with a peer that is ready in time; returns whether one was."""
        if not self._pairing.peers:
            return False
        begin = time.perf_counter()
        seconds = None if self._left_at is None else begin - self._left_at
        pair = self._agreed(self._find(seconds) if self._group.index == 0 else Pair())
        waited = time.perf_counter() - begin
        if pair.partner is not None:
            self._exchange(pair.partner, pair.asks)
        self._account.was_at_boundary(pair, waited, time.perf_counter() - begin)
        return pair.partner is not None

    def rest(self) -> None:
        """Tells the peers that this learner goes to a meeting of all."""
        self._left_at = None
        if self._group.index == 0:
            with self._state:
                self._peers.say(self._pairing.rest())

    def _find(self, of_step: float | None) -> Pair:
        """Waits for a partner; `of_step` is the duration of the last step."""
        pairing, patience = self._pairing, self._patience
        for_others, for_anyone = patience.waits(of_step)
        self._say_and_wait(lambda: pairing.arrive(patience.avoided), for_others)
        self._say_and_wait(pairing.relent, for_anyone - for_others)
        self._say_and_wait(pairing.give_up, 0.0)
        self._waiting.until(
            lambda: pairing.is_decided,
            f"super-learner {pairing.pair.partner} to answer its offer of an exchange",
        )
        self._remember(pairing.pair.partner, for_anyone)
        return pairing.pair

    def _say_and_wait(self, act: Callable[[], list[Word]], seconds: float) -> None:
        with self._state:
            self._peers.say(act())
        self._threads.wait_for(lambda: self._pairing.is_decided, seconds)

    def _remember(self, partner: int | None, waited: float) -> None:
        if partner is None and not self._pairing.may_come:
            return  # all others are at a meeting, which says nothing of the waits
        patience, own = self._patience, self._pairing.own
        patience.met(partner, not self._pairing.may_come - patience.avoided)
        if patience.in_vain >= _MANY and waited:
            self._warn(
                f"super-learner {own} has met no partner at its last "
                f"{patience.in_vain} step boundaries, so its weights were not averaged "
                "with anyone's: no peer reached its own boundary within "
                f"{waited:.3g} s"
            )
        elif patience.repeats >= _MANY:
            self._warn(
                f"super-learner {own} has met only {sorted(patience.avoided)} at its "
                f"last {patience.repeats} meetings: the steps of its other peers end "
                "at other times, or take much longer"
            )

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                '%s; raise `max_wait` of `ReadyPairs`, or use `communication="async"`',
                what,
            )

    def _agreed(self, pair: Pair) -> Pair:
        """The first learner's decision, in all learners of the super-learner."""
        number = -1 if pair.partner is None else pair.partner
        number, asks = self._group.agree([number, pair.asks], 2 * self._timeout)
        return Pair(None if number < 0 else number, bool(asks))

    def _exchange(self, partner: int, asks: bool) -> None:
        with self._state:
            all_ended = self._account.num_ended + len(self._peers_by_section)
            # From here on, this end answers the partner.
            self._pairing.partner = partner
            self._state.notify_all()
        for peers in self._peers_by_section if asks else ():
            peers.call([partner])
        self._waiting.until(
            lambda: self._account.num_ended >= all_ended,
            f"its exchange with super-learner {partner} to end",
        )
        with self._state:
            self._pairing.leave()
