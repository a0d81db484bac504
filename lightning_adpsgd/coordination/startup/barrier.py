"""The barrier at start-up: each learner sends learner 0 a message and gets an answer.

It uses the job's key-value store, which exists before any process group. If a learner
does not come, learner 0 and then all others get an error that names it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store

T = TypeVar("T")
_log = logging.getLogger(__name__)
NOTICE_S = 30.0
"""The seconds after which a waiting learner names those it waits for."""

_MOST_NAMES = 8
# How much longer the others wait for an answer than learner 0 waits for them.
_GRACE = timedelta(seconds=10)
# How long learner 0 lets the others read its answer before it ends; they may stall.
_HEARING_S = 10.0


class StartUpError(RuntimeError):
    """The job cannot start; the message gives the host, the reason and the remedy."""


def wait_while(
    trouble: Callable[[], T],
    patience: timedelta,
    describe: Callable[[T, float], str],
    longest_pause_s: float = 0.05,
    warns: bool = True,
) -> None:
    """Waits until `trouble` returns nothing; warns once after `NOTICE_S`.

    Args:
        trouble: function that returns a reason to wait, or a false value.
        longest_pause_s: longest pause between two checks; the first pauses are shorter.
        warns: False where another learner warns of the same wait.

    Raises:
        StartUpError: `patience` is over.
    """
    begin, noticed, pause_s = time.monotonic(), not warns, 0.001
    while wrong := trouble():
        waited_s = time.monotonic() - begin
        if waited_s > patience.total_seconds():
            raise StartUpError(describe(wrong, waited_s))
        if waited_s > NOTICE_S and not noticed:
            noticed = True
            _log.warning("%s; still waiting", describe(wrong, waited_s))
        time.sleep(pause_s)
        pause_s = min(longest_pause_s, 1.5 * pause_s)


class StartupBarrier:
    """Lets learner 0 read a message from every learner and give all one answer.

    Args:
        store: store of the job, with a prefix that nothing else uses.
        patience: longest wait of learner 0 for the others.
        names: names of the learners in messages; by default their ranks.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        patience: timedelta,
        names: Sequence[str] = (),
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._patience = patience
        self.names = names or [f"learner {other}" for other in range(world_size)]

    def ask(self, topic: str, word: str, judge: Callable[[list[str]], str]) -> str:
        """Returns the result of `judge` on all messages, which runs in learner 0.

        Raises:
            StartUpError: A learner did not come within `patience`, or `judge` raised
                this error; the message is the same in all learners.
        """
        self._store.set(f"{topic}/{self._rank}", word)
        self._store.add(f"{topic}/come", 1)
        if self._rank == 0:
            self._answer(topic, judge)
        verdict, _, text = self._hear_answer(topic).partition(" ")
        if verdict != "fine":
            self._linger(topic)
            raise StartUpError(text)
        return text

    def _answer(self, topic: str, judge: Callable[[list[str]], str]) -> None:
        try:
            wait_while(
                lambda: self._store.add(f"{topic}/come", 0) < self._world_size,
                self._patience,
                lambda _, waited_s: self._absent(topic, waited_s),
            )
            keys = [f"{topic}/{rank}" for rank in range(self._world_size)]
            words = [word.decode() for word in self._store.multi_get(keys)]
            answer = f"fine {judge(words)}"
        except StartUpError as error:
            answer = f"wrong {error}"
        self._store.set(f"{topic}/answer", answer)

    def _hear_answer(self, topic: str) -> str:
        key = f"{topic}/answer"
        # Longer than learner 0 waits, so that its answer comes first.
        patience = self._patience + _GRACE
        try:
            wait_while(
                lambda: not self._store.check([key]),  # Ctrl-C ends no `Store.wait`
                patience,
                lambda *_: f"waited for {patience.total_seconds():.0f} s",
                longest_pause_s=1.0,  # all ask the one store
                warns=False,
            )
            return self._store.get(key).decode()
        except RuntimeError as error:
            raise StartUpError(
                f"{self.names[0]} did not answer {self.names[self._rank]} at start-up "
                f"({topic}): {str(error).splitlines()[0]}. Check what it printed last, "
                "and whether it runs the same version of lightning_adpsgd"
            ) from error

    def _absent(self, topic: str, waited_s: float) -> str:
        ranks = range(self._world_size)
        missing = [r for r in ranks if not self._store.check([f"{topic}/{r}"])]
        named = ", ".join(self.names[rank] for rank in missing[:_MOST_NAMES])
        return (
            f"{len(missing)} of {self._world_size} learners have not arrived at "
            f"start-up after {waited_s:.0f} s: {named}"
            f"{', ...' if len(missing) > _MOST_NAMES else ''}. On a busy machine they "
            "may still be importing. Otherwise check what they print, whether the "
            "launcher was started on each host, and whether all were given the same "
            "MASTER_ADDR and MASTER_PORT"
        )

    def _linger(self, topic: str) -> None:
        # The process of learner 0 may hold the store, which is gone when it ends.
        heard = self._store.add(f"{topic}/heard", 1)
        come = self._store.add(f"{topic}/come", 0)
        deadline = time.monotonic() + _HEARING_S
        while self._rank == 0 and heard < come and time.monotonic() < deadline:
            time.sleep(0.01)
            heard = self._store.add(f"{topic}/heard", 0)
