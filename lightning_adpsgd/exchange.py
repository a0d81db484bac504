"""One lane to a peer: words, and exchanges of all chunks in a pipeline.

While chunk k crosses the wire, both ways at once, chunk k - 1 is averaged. Each part of
a chunk is an exchange of its own::

    d += a (theirs - mine)

with the same a at both ends: ``a = gain / (1 + max(n_i, n_j))`` for ends that have n_i
and n_j exchanges under way, this one counted (the weights of Metropolis). Two ends that
meet alone take their mean, a = 1/2; exchanges that overlap would overshoot it together,
and these weights make the sum of them an average again: 1/3 for two, as in the ring of
the papers. Who meets whom is decided in `gossip`.
"""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_adpsgd.pacing import Pacer
from lightning_adpsgd.replica import PART_ELEMENTS, Chunk, Part, Replica
from lightning_adpsgd.transport import Pending, Transport, one_behind
from lightning_adpsgd.wire import Codec, make_codec

ASK, ALIVE, LEAVE, GRANT = 1, 2, 3, 4
"""What an end says on a lane: the asker one of the first three, the asked the last."""

_WIDEST = 8  # bytes of the widest number


class Outcome(NamedTuple):
    """What an exchange did.

    Attributes:
        finite: Whether all that crossed was finite; what was not is left out.
        bytes_sent: Payload of this end.
        first_step: Optimizer steps that the weights had seen which were read first.
    """

    finite: bool
    bytes_sent: int
    first_step: int


class Buffers:
    """Memory of exchanges, lent to one at a time and used again by the next.

    `_free` is guarded by `_lock`. There are as many as exchanges ever ran at once.

    Args:
        message_bytes: Of the longest message.
    """

    def __init__(self, message_bytes: int) -> None:
        self._message_bytes = message_bytes
        self._lock = threading.Lock()
        self._free: list[list[Tensor]] = []

    @contextmanager
    def lent(self) -> Iterator[list[Tensor]]:
        """Two pairs of messages, going and coming, and room for one part: bytes."""
        with self._lock:
            buffers = self._free.pop() if self._free else self._make()
        yield buffers
        # Not after an error: a message may still be under way.
        with self._lock:
            self._free.append(buffers)

    def _make(self) -> list[Tensor]:
        sizes = [self._message_bytes] * 4 + [PART_ELEMENTS * _WIDEST]
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]


class Lane:
    """One end of a lane; used by a single thread.

    Args:
        transport: To the peers.
        peer: The other end.
        number: Of the lane.
        replica: What is exchanged; its parts are touched under `state`.
        state: The engine's lock.
        buffers: Shared by all lanes of a learner.
        wire_dtype: What travels; none: the weights as they are.
        gain: gamma.
        timeout: Of each message.
    """

    def __init__(
        self,
        transport: Transport,
        peer: int,
        number: int,
        replica: Replica,
        state: threading.Condition,
        buffers: Buffers,
        wire_dtype: torch.dtype | None,
        gain: float,
        timeout: timedelta,
    ) -> None:
        self._transport, self._peer, self._number = transport, peer, number
        self._replica, self._state, self._buffers = replica, state, buffers
        self._gain, self._timeout = gain, timeout
        self._codecs = _codecs(replica, wire_dtype)
        self._mine, self._theirs = (torch.zeros(2, dtype=torch.int64) for _ in range(2))

    def say(self, word: int, num_under_way: int = 0) -> None:
        """Sends a word and the number of exchanges under way here."""
        self._post_word(word, num_under_way).wait(self._timeout)

    def hear(self) -> int:
        """Receives a word; the peer's number of exchanges is kept for what follows."""
        self._receive_word().wait(self._timeout)
        return int(self._theirs[0])

    def ask(self, num_under_way: int, pacer: Pacer, ended: threading.Event) -> Outcome:
        """Asks for an exchange and makes it, as fast as the pacer allows.

        Args:
            num_under_way: Exchanges of this learner, this one counted.
            ended: Set when nothing is worth waiting for any more.
        """
        greeting = [self._receive_word(), self._post_word(ASK, num_under_way)]
        return self._exchange(greeting, pacer, ended)

    def answer(self, num_under_way: int, pacer: Pacer) -> Outcome:
        """Makes the exchange that the peer, just heard, has asked for."""
        greeting = [self._post_word(GRANT, num_under_way)]
        return self._exchange(greeting, pacer, None)

    def _exchange(
        self, greeting: list[Pending], pacer: Pacer, ended: threading.Event | None
    ) -> Outcome:
        with self._buffers.lent() as (*messages, room):
            pairs = itertools.cycle((messages[2:], messages[:2]))
            posted = (
                self._post(chunk, pair, room, pacer, ended)
                for chunk, pair in zip(self._replica.chunks, pairs, strict=False)
            )
            outcomes = [self._land(c, greeting, room) for c in one_behind(posted)]
        for pending in greeting:  # nobody has, where there are no weights
            pending.wait(self._timeout)
        return _total(outcomes)

    def _post(
        self,
        chunk: Chunk,
        pair: list[Tensor],
        room: Tensor,
        pacer: Pacer,
        ended: threading.Event | None,
    ) -> "_Crossing":
        codec = self._codecs[chunk.dtype]
        going, coming = (_as_messages(codec, chunk, buffer) for buffer in pair)
        delay = pacer.charge(going.whole.nbytes)
        if ended is not None and delay > 0:
            ended.wait(delay)
        step = self._replica.step
        self._encode(codec, chunk, going, room)
        # Receives before sends: Gloo's notice that a receive is ready would otherwise
        # queue behind the payload and halve the bandwidth.
        pending = [
            self._transport.post_receive(self._peer, self._number, coming.whole),
            self._transport.post_send(self._peer, self._number, going.whole),
        ]
        return _Crossing(codec, going, coming, pending, step)

    def _encode(
        self, codec: Codec, chunk: Chunk, going: "_Messages", room: Tensor
    ) -> None:
        if going.whole.dtype == chunk.dtype:  # it travels as it is
            with self._state:
                chunk.read(going.whole)
            return
        for part, message in going.by_part:
            weights = _room_for(part, room)
            with self._state:
                part.read(weights)
            codec.encode(weights, message, part.place)

    def _land(
        self, crossing: "_Crossing", greeting: list[Pending], room: Tensor
    ) -> Outcome:
        for pending in (*greeting, *crossing.pending):
            pending.wait(self._timeout)
        greeting.clear()
        weight = self._gain / (1 + int(max(self._mine[1], self._theirs[1])))
        finite = True
        for (part, mine), (_, theirs) in zip(
            crossing.going.by_part, crossing.coming.by_part, strict=True
        ):
            change = _room_for(part, room)
            if crossing.codec.change(mine, theirs, change, part.place):
                with self._state:
                    part.add(change, weight)
            else:
                finite = False
        return Outcome(finite, crossing.going.whole.nbytes, crossing.step)

    def _post_word(self, word: int, num_under_way: int) -> Pending:
        self._mine[0], self._mine[1] = word, num_under_way
        return self._transport.post_send(self._peer, self._number, self._mine)

    def _receive_word(self) -> Pending:
        return self._transport.post_receive(self._peer, self._number, self._theirs)


class _Messages(NamedTuple):
    whole: Tensor
    by_part: list[tuple[Part, Tensor]]


class _Crossing(NamedTuple):
    codec: Codec
    going: _Messages
    coming: _Messages
    pending: list[Pending]
    step: int


def longest_message(replica: Replica, wire_dtype: torch.dtype | None) -> int:
    """Bytes of the longest message about a chunk."""
    codecs = _codecs(replica, wire_dtype)
    lengths = [_length(codecs[c.dtype], c) for c in replica.chunks]
    return max(lengths, default=0)


def _codecs(
    replica: Replica, wire_dtype: torch.dtype | None
) -> dict[torch.dtype, Codec]:
    dtypes = {chunk.dtype for chunk in replica.chunks}
    return {dtype: make_codec(wire_dtype, dtype) for dtype in dtypes}


def _length(codec: Codec, chunk: Chunk) -> int:
    return codec.dtype.itemsize * sum(codec.length(len(p)) for p in chunk.parts)


def _as_messages(codec: Codec, chunk: Chunk, buffer: Tensor) -> _Messages:
    whole = buffer[: _length(codec, chunk)].view(codec.dtype)
    lengths = [codec.length(len(part)) for part in chunk.parts]
    return _Messages(whole, list(zip(chunk.parts, whole.split(lengths), strict=True)))


def _room_for(part: Part, room: Tensor) -> Tensor:
    return room.view(part.dtype)[: len(part)]


def _total(outcomes: list[Outcome]) -> Outcome:
    return Outcome(
        all(o.finite for o in outcomes),
        sum(o.bytes_sent for o in outcomes),
        min((o.first_step for o in outcomes), default=0),
    )
