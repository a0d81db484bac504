"""How a vector reaches a peer: the interface.

A transport connects the super-learners of one job; its `index` is this super-learner's.
If a super-learner has N learners, there are N separate transports, each for one of N
shards. Between two super-learners there are two lanes, one for each asking side, so
that two exchanges of the same pair never receive each other's messages. What is
exchanged, and when, is not decided here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Literal, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")
Evidence = Literal["", "refusal", "silence"]


class PeerLost(RuntimeError):
    """A peer did not take part in an operation within the timeout, or has gone.

    Args:
        peer: index of the super-learner at the other end; None if it is unknown.
        operation: phrase for the operation, such as "receiving from it".
        reason: message from the layer below.
        evidence: "refusal": the peer's host reports that no process listens at its
            port. "silence": nothing has arrived from the peer for a long time.
            Otherwise empty.

    Attributes:
        detail: operation and reason, without advice.
    """

    def __init__(
        self, peer: int | None, operation: str, reason: str, evidence: Evidence = ""
    ) -> None:
        whom = "a super-learner" if peer is None else f"super-learner {peer}"
        super().__init__(
            f"lost {whom} while {operation}: {reason}. Check whether its "
            "process still runs and what it printed last. If it is only slow to "
            "answer, raise `timeout`"
        )
        self.peer, self.detail = peer, f"{operation}: {reason}"
        self.evidence: Evidence = evidence


class Pending(Protocol):
    """A posted operation."""

    def wait(self, timeout: timedelta) -> None:
        """Returns once the operation is done; raises `PeerLost` after the timeout."""
        ...


class Transport(ABC):
    """Messages between super-learners; safe to use from several threads at once.

    Attributes:
        index: this super-learner, 0 <= index < size.
        on_device: whether it takes GPU tensors alone, or host tensors alone.
    """

    index: int
    size: int
    on_device = False

    @abstractmethod
    def post_receive(self, peer: int, lane: int, into: Tensor) -> Pending:
        """Posts a receive; messages of one peer and lane arrive in sending order."""

    @abstractmethod
    def post_send(self, peer: int, lane: int, tensor: Tensor) -> Pending:
        """Posts a send; the tensor must not change before its wait returns."""

    def post_all(
        self, lane: int, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]
    ) -> list[Pending]:
        """Posts the receives and sends of a round, by number of the peer.

        Every peer must post its own part of the round, in the same order of rounds.
        """
        return [
            *(self.post_receive(peer, lane, into) for peer, into in receives.items()),
            *(self.post_send(peer, lane, tensor) for peer, tensor in sends.items()),
        ]

    def bound(self, peer: int, lane: int) -> "Transport":
        """This transport, for whom the lane ends with the connection that it has."""
        return self

    def hang_up(self) -> None:
        """Ends the connection to which it is bound, where lanes have their own."""
        return

    @abstractmethod
    def post_mean(self, vector: Tensor) -> Pending:
        """Posts the mean over all super-learners, which all post in the same order.

        The mean overwrites the vector by the time the wait returns.
        """


def one_behind(posted: Iterable[T]) -> Iterator[T]:
    """Yields each item once the next one is posted, so that the wire is never idle."""
    held: list[T] = []
    for item in posted:
        yield from held
        held = [item]
    yield from held


def lane_of(asker: int, answerer: int) -> int:
    """The lane of exchanges that `asker` begins; lane 2 is for synchronous rounds."""
    return 0 if asker < answerer else 1


SYNCHRONOUS_LANE = 2
