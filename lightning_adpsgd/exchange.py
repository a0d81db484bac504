"""One lane to a peer: words, and exchanges of all chunks in a pipeline.

While chunk k crosses the wire, both ways at once, chunk k - 1 is averaged. Each part of
a chunk is an exchange of its own::

    d += a (theirs - mine)

with the same a at both ends: ``a = gain / (1 + max(n_i, n_j))`` for ends that have n_i
and n_j exchanges under way, this one counted (the weights of Metropolis). Two ends that
meet alone take their mean, a = 1/2; exchanges that overlap would overshoot it together,
and these weights make the sum of them an average again: 1/3 for two, as in the ring of
the papers. Who meets whom is decided in `gossip`.

Weights on a GPU are read, encoded and averaged there, on the stream of the calling
thread; only messages come to the host, into pinned memory.
"""

import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_adpsgd.disagreement import Disagreement
from lightning_adpsgd.pacing import Pacer
from lightning_adpsgd.protocol import exchange_weight
from lightning_adpsgd.replica import Chunk, Part, Replica
from lightning_adpsgd.streams import Mirrored, mirrored, to_device, to_host
from lightning_adpsgd.transport import Pending, Transport, one_behind
from lightning_adpsgd.wire import Codec, make_codec

ASK, ALIVE, LEAVE, GRANT, PULL = 1, 2, 3, 4, 5
"""What an end says on a lane: the asked one `GRANT`, the asker the others."""

_WIDEST = 8  # bytes of the widest number


class Outcome(NamedTuple):
    """What an exchange did.

    Attributes:
        finite: Whether all that crossed was finite; what was not is left out.
        bytes_sent: Payload of this end.
        first_step: Optimizer steps that the weights had seen which were read first.
        near: Whether the two ends were as near as they usually are (`disagreement`);
            what was not is left out.
        mine: Whether it was this end's weights that were not finite, or that were the
            larger ones of two that were too far apart.
    """

    finite: bool
    bytes_sent: int
    first_step: int
    near: bool = True
    mine: bool = False

    @property
    def merged(self) -> bool:
        """Whether nothing was left out."""
        return self.finite and self.near


class Position(NamedTuple):
    """How far a learner has come.

    Attributes:
        steps: Optimizer steps that its weights have seen.
        samples: Samples that all learners had trained on, as far as it knows.
        epochs: Epochs that it has completed.
    """

    steps: int = 0
    samples: int = 0
    epochs: int = 0


BEGINNING = Position()


class Pulled(NamedTuple):
    """What a pull brings.

    Attributes:
        position: Of the learner that was asked.
        values: Its x, one tensor for each chunk, on the host.
    """

    position: Position
    values: list[Tensor]


class Loan(NamedTuple):
    """The memory of one exchange.

    Attributes:
        pairs: Two of them, each of a message that goes and one that comes.
        room: For one part, bytes, where the weights are.
    """

    pairs: list[tuple[Mirrored, Mirrored]]
    room: Tensor


class Buffers:
    """Memory of exchanges, lent to one at a time and used again by the next.

    `_free` is guarded by `_lock`. There are as many as exchanges ever ran at once.

    Args:
        replica: What is exchanged.
        wire_dtype: What travels; none: the weights as they are.
    """

    def __init__(self, replica: Replica, wire_dtype: torch.dtype | None) -> None:
        self._device = replica.device
        self._message_bytes = _longest_message(replica, wire_dtype)
        self._room_bytes = replica.part_elements * _WIDEST
        self._lock = threading.Lock()
        self._free: list[Loan] = []

    @contextmanager
    def lent(self) -> Iterator[Loan]:
        """The memory of an exchange."""
        with self._lock:
            loan = self._free.pop() if self._free else self._make()
        yield loan
        # Not after an error: a message may still be under way.
        with self._lock:
            self._free.append(loan)

    def _make(self) -> Loan:
        pairs = [(self._make_buffer(), self._make_buffer()) for _ in range(2)]
        return Loan(pairs, self._bytes(self._room_bytes))

    def _make_buffer(self) -> Mirrored:
        return mirrored(self._bytes(self._message_bytes))

    def _bytes(self, number: int) -> Tensor:
        return torch.empty(number, dtype=torch.uint8, device=self._device)


class Lane:
    """One end of a lane; used by a single thread.

    Args:
        transport: To the peers.
        peer: The other end.
        number: Of the lane.
        replica: What is exchanged.
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
        buffers: Buffers,
        wire_dtype: torch.dtype | None,
        gain: float,
        timeout: timedelta,
    ) -> None:
        self._transport, self._peer, self._number = transport, peer, number
        self._replica, self._buffers = replica, buffers
        self._gain, self._timeout = gain, timeout
        self._codecs = _codecs(replica, wire_dtype)
        self._disagreement = Disagreement()
        words = (torch.zeros(2, dtype=torch.int64, device="cpu") for _ in range(2))
        self._mine, self._theirs = words

    def say(self, word: int, num_under_way: int = 0) -> None:
        """Sends a word and the number of exchanges under way here."""
        self._post_word(word, num_under_way).wait(self._timeout)

    def hear(self) -> int:
        """Receives a word; the peer's number of exchanges is kept for what follows."""
        self._receive_word().wait(self._timeout)
        return int(self._theirs[0])

    @property
    def heard_number(self) -> int:
        """What came with the word that was heard last."""
        return int(self._theirs[1])

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

    def pull(self) -> Pulled:
        """Asks for the peer's weights, as they are and in full precision.

        Nobody's weights change by it, and so no mean.
        """
        greeting = [self._receive_word(), self._post_word(PULL, 0)]
        for pending in greeting:
            pending.wait(self._timeout)
        position = torch.zeros(len(Position._fields), dtype=torch.int64, device="cpu")
        self._receive(position)
        values = [
            torch.empty(len(chunk), dtype=chunk.dtype, device="cpu")
            for chunk in self._replica.chunks
        ]
        for value in values:
            self._receive(value)
        return Pulled(Position(*position.tolist()), values)

    def give(self, position: Position) -> None:
        """Sends the weights for which the peer, just heard, has asked."""
        values = self._replica.snapshot()
        numbers = torch.tensor(position, dtype=torch.int64, device="cpu")
        self._post_word(GRANT, 0).wait(self._timeout)
        for tensor in (numbers, *values):
            self._transport.post_send(self._peer, self._number, tensor).wait(
                self._timeout
            )

    def _receive(self, into: Tensor) -> None:
        self._transport.post_receive(self._peer, self._number, into).wait(self._timeout)

    def _exchange(
        self, greeting: list[Pending], pacer: Pacer, ended: threading.Event | None
    ) -> Outcome:
        with self._buffers.lent() as (pairs, room):
            turns = zip(self._replica.chunks, itertools.cycle(pairs), strict=False)
            posted = (
                self._post(chunk, pair, room, pacer, ended) for chunk, pair in turns
            )
            outcomes = [self._land(c, greeting, room) for c in one_behind(posted)]
        for pending in greeting:  # nobody has, where there are no weights
            pending.wait(self._timeout)
        self._disagreement.end()
        return _total(outcomes)

    def _post(
        self,
        chunk: Chunk,
        pair: tuple[Mirrored, Mirrored],
        room: Tensor,
        pacer: Pacer,
        ended: threading.Event | None,
    ) -> "_Crossing":
        codec = self._codecs[chunk.dtype]
        going, coming = (_as_message(codec, chunk, buffer) for buffer in pair)
        delay = pacer.charge(going.host.nbytes)
        if ended is not None and delay > 0:
            ended.wait(delay)
        step = self._replica.step
        self._encode(codec, chunk, going, room)
        to_host(going.here, going.host)
        # Receives before sends: Gloo's notice that a receive is ready would otherwise
        # queue behind the payload and halve the bandwidth.
        pending = [
            self._transport.post_receive(self._peer, self._number, coming.host),
            self._transport.post_send(self._peer, self._number, going.host),
        ]
        return _Crossing(codec, going, coming, pending, step)

    def _encode(
        self, codec: Codec, chunk: Chunk, going: "_Message", room: Tensor
    ) -> None:
        if going.here.dtype == chunk.dtype:  # it travels as it is
            with self._replica.guard:
                chunk.read(going.here)
            return
        for part, message in going.by_part:
            weights = _room_for(part, room)
            with self._replica.guard:
                part.read(weights)
            codec.encode(weights, message, part.place)

    def _land(
        self, crossing: "_Crossing", greeting: list[Pending], room: Tensor
    ) -> Outcome:
        for pending in (*greeting, *crossing.pending):
            pending.wait(self._timeout)
        greeting.clear()
        to_device(crossing.coming.host, crossing.coming.here)
        numbers = int(self._mine[1]), int(self._theirs[1])
        weight = exchange_weight(self._gain, *numbers)
        verdicts = [_MERGED]
        for (part, mine), (_, theirs) in zip(
            crossing.going.by_part, crossing.coming.by_part, strict=True
        ):
            change = _room_for(part, room)
            # It looks at the change, so that on a GPU the coming message is free now.
            is_finite = crossing.codec.change(mine, theirs, change, part.place)
            verdict = self._judge(crossing.codec, is_finite, change, mine, theirs)
            if verdict is _MERGED:
                with self._replica.guard:
                    part.add(change, weight)
            else:
                verdicts.append(verdict)
        return Outcome(
            all(verdict.finite for verdict in verdicts),
            crossing.going.host.nbytes,
            crossing.step,
            all(verdict.near for verdict in verdicts),
            any(verdict.mine for verdict in verdicts),
        )

    def _judge(
        self,
        codec: Codec,
        is_finite: bool,
        change: Tensor,
        mine: Tensor,
        theirs: Tensor,
    ) -> "_Verdict":
        """Both ends come to the same verdict, but for whose weights are to blame."""
        if not is_finite:
            return _Verdict(False, True, not math.isfinite(codec.norm(mine)))
        distance = torch.linalg.vector_norm(change).item()
        if not self._disagreement.is_unusual(distance):
            return _MERGED
        norm, other_norm = codec.norm(mine), codec.norm(theirs)
        if not self._disagreement.is_far(distance, norm, other_norm):
            return _MERGED
        return _Verdict(True, False, norm > other_norm)

    def _post_word(self, word: int, num_under_way: int) -> Pending:
        self._mine[0], self._mine[1] = word, num_under_way
        return self._transport.post_send(self._peer, self._number, self._mine)

    def _receive_word(self) -> Pending:
        return self._transport.post_receive(self._peer, self._number, self._theirs)


class _Verdict(NamedTuple):
    """On one part: see `Outcome`."""

    finite: bool
    near: bool
    mine: bool


_MERGED = _Verdict(True, True, False)


class _Message(NamedTuple):
    host: Tensor
    here: Tensor
    by_part: list[tuple[Part, Tensor]]


class _Crossing(NamedTuple):
    codec: Codec
    going: _Message
    coming: _Message
    pending: list[Pending]
    step: int


def _longest_message(replica: Replica, wire_dtype: torch.dtype | None) -> int:
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


def _as_message(codec: Codec, chunk: Chunk, buffer: Mirrored) -> _Message:
    num_bytes = _length(codec, chunk)
    host = here = buffer.host[:num_bytes].view(codec.dtype)
    if buffer.here is not buffer.host:
        here = buffer.here[:num_bytes].view(codec.dtype)
    lengths = [codec.length(len(part)) for part in chunk.parts]
    return _Message(
        host, here, list(zip(chunk.parts, here.split(lengths), strict=True))
    )


def _room_for(part: Part, room: Tensor) -> Tensor:
    return room.view(part.dtype)[: len(part)]


def _total(outcomes: list[Outcome]) -> Outcome:
    return Outcome(
        all(o.finite for o in outcomes),
        sum(o.bytes_sent for o in outcomes),
        min((o.first_step for o in outcomes), default=0),
        all(o.near for o in outcomes),
        any(o.mine for o in outcomes),
    )
