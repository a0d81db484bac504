"""The interface that carries vectors between peers, and its form within one process.

A transport connects the super-learners of one job; its `index` is this super-learner's.
If a super-learner has N learners, there are N separate transports, each for one of N
shards. Between two super-learners there are two lanes, one for each asking side, so
that two exchanges of the same pair never receive each other's messages. What is
exchanged, and when, is not decided here.
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

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
            'answer, raise `timeout`. Under "sync" and "delay_by_one", give all '
            "learners equally many batches"
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
        size: number of super-learners.
        on_device: whether it takes only GPU tensors; otherwise it takes only host
            tensors.
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
AVERAGING = "averaging over all super-learners"


class ThreadTransport(Transport):
    """A transport between threads of one process, for tests and notebooks."""

    def __init__(self, index: int, mailboxes: "_Mailboxes") -> None:
        self.index = index
        self.size = mailboxes.size
        self._mailboxes = mailboxes

    @classmethod
    def connect(cls, size: int) -> "list[ThreadTransport]":
        """Makes one transport for each of `size` super-learners."""
        mailboxes = _Mailboxes(size)
        return [cls(index, mailboxes) for index in range(size)]

    @override
    def post_receive(self, peer: int, lane: int, into: Tensor) -> Pending:
        return _Receipt(self._mailboxes.box(peer, self.index, lane), peer, into)

    @override
    def post_send(self, peer: int, lane: int, tensor: Tensor) -> Pending:
        self._mailboxes.box(self.index, peer, lane).put(tensor.clone())
        return _Sent()

    @override
    def post_mean(self, vector: Tensor) -> Pending:
        return _Mean(self._mailboxes, self.index, vector)


class _Mean:
    def __init__(self, mailboxes: "_Mailboxes", index: int, vector: Tensor) -> None:
        self._mailboxes, self._index, self._vector = mailboxes, index, vector

    def wait(self, timeout: timedelta) -> None:
        self._mailboxes.average(self._index, self._vector, timeout)


class _Sent:
    def wait(self, timeout: timedelta) -> None:
        """A mailbox takes a message at once."""


class _Receipt:
    def __init__(self, box: "queue.Queue[Tensor]", peer: int, into: Tensor) -> None:
        self._box, self._peer, self._into = box, peer, into

    def wait(self, timeout: timedelta) -> None:
        try:
            self._into.copy_(self._box.get(timeout=timeout.total_seconds()))
        except queue.Empty:
            seconds = timeout.total_seconds()
            reason = f"no message within {seconds:g} s"
            raise PeerLost(self._peer, "receiving from it", reason) from None


class _Mailboxes:
    """Shared by all `ThreadTransport`s of one job; `_lock` guards both dictionaries."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._boxes: dict[tuple[int, int, int], queue.Queue[Tensor]] = {}
        self._barrier = threading.Barrier(size)
        self._parts: dict[int, Tensor] = {}

    def box(self, source: int, target: int, lane: int) -> "queue.Queue[Tensor]":
        with self._lock:
            return self._boxes.setdefault((source, target, lane), queue.Queue())

    def average(self, index: int, vector: Tensor, timeout: timedelta) -> None:
        self._parts[index] = vector
        self._wait(timeout)
        total = torch.stack([self._parts[i] for i in range(self.size)]).sum(0)
        self._wait(timeout)
        vector.copy_(total.div_(self.size))
        self._wait(timeout)

    def _wait(self, timeout: timedelta) -> None:
        try:
            self._barrier.wait(timeout.total_seconds())
        except threading.BrokenBarrierError as error:
            raise PeerLost(None, AVERAGING, f"not all came in {timeout}") from error
