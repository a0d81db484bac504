"""Which exchanges of one learner may begin, how fast, and when it rests in between."""

import threading
from collections.abc import Callable

from lightning_adpsgd.gossip.account import Account
from lightning_adpsgd.gossip.pacing import CoreShare, Pacer
from lightning_adpsgd.gossip.protocol import Outcome, UnderWay


class Traffic:
    """All exchanges of one learner, whoever asked for them.

    `_under_way` and `_paused` are guarded by `_state`, which is notified when an
    exchange has ended and when rests end.

    Args:
        account: What comes of them is written there.
        state: The engine's lock.
        link_budget: Bytes per second, on average; none is no bound.
        cpu_share: Of the processor time, where cores are short; 1 is no bound.
        num_bytes: Of the weights.
        overhead: All that an exchange costs, by what its own thread takes.

    Attributes:
        pacer: Spreads bytes over time.
        hurry: Set while somebody waits, and nobody is to be spared.
    """

    def __init__(
        self,
        account: Account,
        state: threading.Condition,
        link_budget: float | None,
        cpu_share: float,
        num_bytes: int,
        overhead: float,
    ) -> None:
        self._account, self._state = account, state
        self._cores = CoreShare(cpu_share, num_bytes, overhead)
        self._under_way, self._paused = UnderWay(), False
        self.pacer, self.hurry = Pacer(link_budget), threading.Event()

    def spare_this_thread(self) -> None:
        """Makes the calling thread the one whose cores are spared."""
        self._cores.watch_this_thread()

    def merged(self, seconds: float) -> None:
        """What a merge took of the training thread, which exchanges make up for."""
        self._cores.merged(seconds)

    def pause(self) -> None:
        """Asks for no exchange any more, until `resume`; who is asked answers."""
        with self._state:
            self._paused = True
        self.hurry_on()

    def resume(self) -> None:
        """Asks again."""
        self.hurry.clear()
        with self._state:
            self._paused = False

    def hurry_on(self) -> None:
        """Ends all rests, until `hurry` is cleared."""
        with self._state:
            self.hurry.set()
            self._state.notify_all()

    def rest(self, unless: Callable[[], bool]) -> None:
        """Spares the cores, unless there is hurry or something else to do."""
        with self._state:
            while pause_s := self._cores.pause_s():
                if self._state.wait_for(
                    lambda: self.hurry.is_set() or unless(), pause_s
                ):
                    return

    def is_idle(self) -> bool:
        """Whether no exchange is under way; under the engine's lock."""
        return not self._under_way.total()

    def make(
        self, peer: int, exchange: Callable[[int], Outcome], asked: bool = False
    ) -> None:
        """Makes an exchange with a peer, if it may begin, and notes what came of it.

        Args:
            peer: The other end.
            exchange: Makes it, given how many are under way, this one counted.
            asked: Whether the peer has asked: then it may (`UnderWay`).
        """
        number = self._enter(peer, asked)
        if not number:
            return
        outcome = None
        try:
            with self._cores.exchange():
                outcome = exchange(number)
        finally:
            self._leave(peer, outcome)

    def _enter(self, peer: int, asked: bool) -> int:
        with self._state:
            if self._paused and not asked:
                return 0
            return self._under_way.enter(peer, asked)

    def _leave(self, peer: int, outcome: Outcome | None) -> None:
        with self._state:
            self._under_way.leave(peer)
            if outcome is not None:
                self._account.exchanged(peer, outcome)
            self._state.notify_all()
