"""A wait for all weights of a peer, and the share of them that has come."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from lightning_adpsgd.gossip.protocol import Pulled

_LOOK_S = 0.5


class Pull(Future[Pulled]):
    """A wait for the weights of one section of a peer; any thread may cancel it.

    Attributes:
        share: share of the weights that has come.
        moved_at: time of `time.monotonic` at which a piece of them came last, or the
            wait began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.share, self.moved_at = 0.0, time.monotonic()

    def result_while_it_moves(
        self, seconds: float, watch: Callable[[float], None]
    ) -> Pulled:
        """The weights, however long they take, if pieces of them keep coming.

        Args:
            seconds: longest time without a piece.
            watch: function called every half second with the share that has come; its
                exceptions end the wait.

        Raises:
            TimeoutError: No piece has come for so many seconds.
        """
        while (left := self.moved_at + seconds - time.monotonic()) > 0:
            with suppress(TimeoutError):
                return self.result(min(left, _LOOK_S))
            watch(self.share)
        return self.result(0)
