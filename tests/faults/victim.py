"""An island in a process of its own, killed at a chosen moment of an exchange."""

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_adpsgd.gossip.exchange import Channel, Lane, _Exchange
from lightning_adpsgd.islands.rendezvous import RendezvousAddress
from lightning_adpsgd.weights.replica import Part
from tests.helpers import PATIENCE_S, until
from tests.islands.archipelago import Server, Trained

Moment = Callable[["Victim"], None]


class Victim:
    """A forked process that holds one island; made before the process has threads.

    Its weights lie in memory that it shares with this process, which may write them and
    reads what they were, with all that exchanges had brought, when it was killed.

    Args:
        length: Of its weights.
        options: Of its engine.
    """

    def __init__(self, length: int, **options: Any) -> None:
        self.vector = torch.zeros(length, dtype=torch.float64).share_memory_()
        self.at_death = torch.zeros_like(self.vector).share_memory_()
        self._options = options
        context = multiprocessing.get_context("fork")
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(target=self._live)
        self._process.start()
        self._theirs.close()

    # --- for the test

    def join(self, address: RendezvousAddress) -> None:
        """It joins those who are there."""
        assert self._do("join", address)

    def try_to_join(self, address: RendezvousAddress) -> None:
        """The same; it may die meanwhile."""
        self._do("join", address)

    def arm(self, moment: str) -> None:
        """It will die at a moment of `MOMENTS`."""
        assert self._do("arm", moment)

    def step(self) -> None:
        """One step, in which nothing is learned; it may not survive it."""
        self._do("step")

    def has_died(self) -> bool:
        """Whether it was killed."""
        return self._process.exitcode == -signal.SIGKILL

    def close(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE_S)
        self._pipe.close()

    def _do(self, word: str, what: object = None) -> bool:
        """Whether it has done so, and did not die instead."""
        try:
            self._pipe.send((word, what))
            assert self._pipe.poll(PATIENCE_S), f"no answer to {word!r}"
            return self._pipe.recv() == "done"
        except (EOFError, OSError):
            self._process.join(PATIENCE_S)
            return False

    # --- in the process

    def _live(self) -> None:
        self._pipe.close()
        torch.set_num_threads(1)
        while True:
            word, what = self._theirs.recv()
            if word == "join":
                self._join(what)
            elif word == "arm":
                MOMENTS[what](self)
            else:
                self._step()
            self._theirs.send("done")

    def _join(self, address: RendezvousAddress) -> None:
        server = Server()
        server.address = address
        # Not a copy: the vector that the test sees.
        options = {**self._options, "in_place": True}
        self._trained = Trained(server, self.vector, **options)
        self._trained.island.start()

    def _step(self) -> None:
        """And the exchanges that it begins, to their end."""
        engine, begun = self._trained.island.engine, self._trained.exchanges
        begun += len(engine.members.live_schedule.asks(engine.step_and_round[1] + 1))
        self._trained.step()
        until(lambda: self._trained.exchanges >= begun, "the exchanges of a step")

    def die(self) -> None:
        """Notes its weights, with all that exchanges have brought, and is killed."""
        self.at_death.copy_(torch.cat(self._trained.island.engine.replica.snapshot()))
        os.kill(os.getpid(), signal.SIGKILL)


# --- moments


def before(owner: type, name: str, call: int = 1) -> Moment:
    """Where a function is about to be called for the n-th time."""
    return _around(owner, name, lambda num, has_run: num == call and not has_run)


def after(owner: type, name: str, call: int = 1) -> Moment:
    """Where a function has been called for the n-th time."""
    return _around(owner, name, lambda num, has_run: num == call and has_run)


def _around(owner: type, name: str, is_time: Callable[[int, bool], bool]) -> Moment:
    def arm(victim: Victim) -> None:
        function, num = getattr(owner, name), itertools.count(1)

        def run_or_die(*arguments: Any, **options: Any) -> Any:
            call = next(num)
            if is_time(call, False):
                victim.die()
            found = function(*arguments, **options)
            if is_time(call, True):
                victim.die()
            return found

        setattr(owner, name, run_or_die)

    return arm


MOMENTS: dict[str, Moment] = {
    "before it asks": before(Lane, "ask"),
    "asks, and is not granted yet": before(Lane, "_end_greeting"),
    "is asked, and has not granted yet": before(Lane, "answer"),
    "between two chunks": before(_Exchange, "land", 5),
    "a chunk has come and is not averaged": before(_Exchange, "_average", 5),
    "a chunk is averaged at this end": after(_Exchange, "_average", 5),
    "the last verdicts are not sent": before(_Exchange, "close"),
    "the exchange is over": after(Lane, "_exchange"),
    "before a part is merged": before(Part, "merge"),
    "a part is merged": after(Part, "merge"),
    "gives its weights": before(Lane, "give"),
    "takes the weights of another": before(Channel, "receive", 2),
}
"""When a victim dies, in its own words."""


@contextmanager
def victim(length: int, **options: Any) -> Iterator[Victim]:
    made = Victim(length, **options)
    try:
        yield made
    finally:
        made.close()
