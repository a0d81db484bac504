"""How a vector reaches a peer between threads of one process.

`Transport` promises the same between processes and between hosts; `test_base.py` and
`test_transport.py` hold all of them to it.
"""

import queue
import threading
from datetime import timedelta

import torch
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.transport.base import PeerLost, Pending, Transport


class ThreadTransport(Transport):
    """Messages between super-learners that are threads."""

    def __init__(self, index: int, mailboxes: "_Mailboxes") -> None:
        self.index = index
        self.size = mailboxes.size
        self._mailboxes = mailboxes

    @classmethod
    def connect(cls, size: int) -> "list[ThreadTransport]":
        """One transport for each of `size` super-learners."""
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
            raise PeerLost(
                None, "averaging over all", f"not all came in {timeout}"
            ) from error
