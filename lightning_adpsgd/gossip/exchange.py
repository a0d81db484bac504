"""One lane to a peer: words, and exchanges of all chunks in a pipeline.

While chunk k crosses the wire, both ways at once, chunk k - 1 is averaged. Each part of
a chunk is an exchange of its own::

    d += a (theirs - mine)

with the same a at both ends: ``a = gain / (1 + max(n_i, n_j))`` for ends that have n_i
and n_j exchanges under way, this one counted (the weights of Metropolis). Two ends that
meet alone take their mean, a = 1/2; exchanges that overlap would overshoot it together,
and these weights make the sum of them an average again: 1/3 for two, as in the ring of
the papers. Who meets whom is decided in `gossip`.

Each message carries checksums of its parts (`messages`), and each end's verdict on what
it received follows two messages later, or in a closing word. A part that one end could
not take, because it arrived damaged, is not finite or too far away, the other end takes
back, so that the sum of the two stays what it was.

Weights on a GPU are read, encoded and averaged there, on the stream of the calling
thread; only messages come to the host, into pinned memory.
"""

import itertools
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_adpsgd.gossip.disagreement import Disagreement
from lightning_adpsgd.gossip.messages import (
    DAMAGED,
    FAR,
    FINE,
    NOT_FINITE,
    Damaged,
    Message,
    as_message,
    checksum,
    codecs_of,
    longest_message,
    read_seal,
    write_seal,
)
from lightning_adpsgd.gossip.pacing import Pacer
from lightning_adpsgd.gossip.protocol import exchange_weight
from lightning_adpsgd.gossip.wire import Codec
from lightning_adpsgd.transport.base import PeerLost, Pending, Transport, one_behind
from lightning_adpsgd.weights.replica import Chunk, Part, Replica
from lightning_adpsgd.weights.streams import Mirrored, mirrored, to_device, to_host

ASK, ALIVE, LEAVE, GRANT, PULL = 1, 2, 3, 4, 5
"""What an end says on a lane: the asked one `GRANT`, the asker the others."""

_WIDEST = 8  # bytes of the widest number
# Messages of one chunk that is read, one that crosses, and two whose verdicts do.
_PAIRS = 4


class Outcome(NamedTuple):
    """What an exchange did.

    Attributes:
        finite: Whether all that crossed was finite; what was not is left out.
        bytes_sent: Payload of this end.
        first_step: Optimizer steps that the weights had seen which were read first.
        damaged: Parts left out because they arrived damaged at one end.
        near: Whether the two ends were as near as they usually are (`disagreement`);
            what was not is left out.
        mine: Whether it was this end's weights that were not finite, or that were the
            larger ones of two that were too far apart.
    """

    finite: bool
    bytes_sent: int
    first_step: int
    damaged: int = 0
    near: bool = True
    mine: bool = False

    @property
    def merged(self) -> bool:
        """Whether all was taken that arrived as it was sent."""
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
        pairs: Each of a message that goes and one that comes.
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
        self._device, self._num_chunks = replica.device, len(replica.chunks)
        self._message_bytes = longest_message(replica, wire_dtype)
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
        number = min(_PAIRS, self._num_chunks)
        pairs = [(self._make_buffer(), self._make_buffer()) for _ in range(number)]
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
        self._codecs = codecs_of(replica, wire_dtype)
        self._disagreement, self._is_to_blame = Disagreement(), False
        # A word, a number and what guards them.
        self._mine, self._theirs = torch.zeros(2, 3, dtype=torch.int64, device="cpu")

    def say(self, word: int, num_under_way: int = 0) -> None:
        """Sends a word and the number of exchanges under way here."""
        self._post_word(word, num_under_way).wait(self._timeout)

    def hear(self) -> int:
        """Receives a word; the peer's number of exchanges is kept for what follows."""
        self._receive_word().wait(self._timeout)
        self._check_words()
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
        sums = torch.zeros(len(values) + 1, dtype=torch.int64, device="cpu")
        self._receive(sums)
        if self._open(sums) != [checksum(value) for value in values]:
            reason = "they arrived damaged"
            raise PeerLost(self._peer, "pulling its weights", reason)
        return Pulled(Position(*position.tolist()), values)

    def give(self, position: Position) -> None:
        """Sends the weights for which the peer, just heard, has asked."""
        values = self._replica.snapshot()
        numbers = torch.tensor(position, dtype=torch.int64, device="cpu")
        self._post_word(GRANT, 0).wait(self._timeout)
        sums = torch.zeros(len(values) + 1, dtype=torch.int64, device="cpu")
        write_seal(sums, [checksum(value) for value in values])
        for tensor in (numbers, *values, sums):
            self._transport.post_send(self._peer, self._number, tensor).wait(
                self._timeout
            )

    def _receive(self, into: Tensor) -> None:
        self._transport.post_receive(self._peer, self._number, into).wait(self._timeout)

    def _exchange(
        self, greeting: list[Pending], pacer: Pacer, ended: threading.Event | None
    ) -> Outcome:
        self._is_to_blame = False
        with self._buffers.lent() as (pairs, room):
            landed: deque[_Landed] = deque()
            turns = zip(self._replica.chunks, itertools.cycle(pairs), strict=False)
            posted = (
                self._post(chunk, pair, room, landed, pacer, ended)
                for chunk, pair in turns
            )
            done = []
            for crossing in one_behind(posted):
                self._end_greeting(greeting)
                done += self._land(crossing, landed, room)
            self._end_greeting(greeting)  # nobody has, where there are no weights
            done += self._close(landed, room)
        self._disagreement.end()
        return _total(done, self._is_to_blame)

    def _end_greeting(self, greeting: list[Pending]) -> None:
        for pending in greeting:
            pending.wait(self._timeout)
        if greeting:
            self._check_words()
        greeting.clear()

    def _post(
        self,
        chunk: Chunk,
        pair: tuple[Mirrored, Mirrored],
        room: Tensor,
        landed: "deque[_Landed]",
        pacer: Pacer,
        ended: threading.Event | None,
    ) -> "_Crossing":
        codec = self._codecs[chunk.dtype]
        # Of the chunk before the last: the last one is still crossing.
        verdicts = landed[-1].verdicts if landed else []
        going, coming = (as_message(codec, chunk, len(verdicts), b) for b in pair)
        delay = pacer.charge(going.host.nbytes)
        if ended is not None and delay > 0:
            ended.wait(delay)
        step = self._replica.step
        sums = self._encode(codec, going, room)
        write_seal(going.seal, [*sums, *verdicts])
        # Receives before sends: Gloo's notice that a receive is ready would otherwise
        # queue behind the payload and halve the bandwidth.
        pending = [
            self._transport.post_receive(self._peer, self._number, coming.wire),
            self._transport.post_send(self._peer, self._number, going.wire),
        ]
        return _Crossing(codec, going, coming, pending, step)

    def _encode(self, codec: Codec, going: Message, room: Tensor) -> list[int]:
        """Writes the payload; returns the checksums of its parts."""
        sums = []
        for part, message in going.by_part:
            self._encode_part(codec, part, message, room)
            if going.here is going.host:  # the part is still in the core's cache
                sums.append(checksum(message))
        to_host(going.here, going.host)
        return sums or [checksum(message) for message in going.parts_on_host]

    def _encode_part(
        self, codec: Codec, part: Part, message: Tensor, room: Tensor
    ) -> None:
        travels_as_it_is = message.dtype == part.dtype
        weights = message if travels_as_it_is else _room_for(part, room)
        with self._replica.guard:
            part.read(weights)
        if not travels_as_it_is:
            codec.encode(weights, message, part.place)

    def _land(
        self, crossing: "_Crossing", landed: "deque[_Landed]", room: Tensor
    ) -> "list[_Settled]":
        """Takes in what came, as far as it is fine; settles the chunk it speaks of."""
        for pending in crossing.pending:
            pending.wait(self._timeout)
        words = self._open(crossing.coming.seal)
        num_parts = len(crossing.coming.by_part)
        sums, theirs = words[:num_parts], words[num_parts:]
        settled = [self._settle(landed.popleft(), theirs, room)] if theirs else []
        to_device(crossing.coming.host, crossing.coming.here)
        verdicts = [
            self._take_in(crossing, number, word, room)
            for number, word in enumerate(sums)
        ]
        landed.append(_Landed(crossing, verdicts))
        return settled

    def _take_in(
        self, crossing: "_Crossing", number: int, word: int, room: Tensor
    ) -> int:
        if checksum(crossing.coming.parts_on_host[number]) != word:
            return DAMAGED
        # It looks at the change, so that on a GPU the coming message is free now.
        verdict = self._judge(crossing, number, self._change(crossing, number, room))
        if verdict == FINE:
            self._add(crossing, number, 1, room)
        return verdict

    def _judge(self, crossing: "_Crossing", number: int, square: float) -> int:
        """Both ends see the same messages, and come to the same verdict."""
        is_finite, distance = math.isfinite(square), math.sqrt(abs(square))
        if is_finite and not self._disagreement.is_unusual(distance):
            return FINE
        mine, theirs = (
            crossing.codec.norm(message.by_part[number][1])
            for message in (crossing.going, crossing.coming)
        )
        if is_finite and not self._disagreement.is_far(distance, mine, theirs):
            return FINE
        # Squares overflow sooner than weights do.
        if mine > theirs or not math.isfinite(mine):
            self._is_to_blame = True
        return FAR if is_finite else NOT_FINITE

    def _change(self, crossing: "_Crossing", number: int, room: Tensor) -> float:
        """Writes what the peer has more than this end; the sum of its squares."""
        part, mine = crossing.going.by_part[number]
        theirs = crossing.coming.by_part[number][1]
        change = _room_for(part, room)
        return crossing.codec.change(mine, theirs, change, part.place)

    def _add(self, crossing: "_Crossing", number: int, sign: int, room: Tensor) -> None:
        part, _ = crossing.going.by_part[number]
        numbers = int(self._mine[1]), int(self._theirs[1])
        weight = exchange_weight(self._gain, *numbers)
        with self._replica.guard:
            part.add(_room_for(part, room), sign * weight)

    def _settle(
        self, landed: "_Landed", theirs: Sequence[int], room: Tensor
    ) -> "_Settled":
        """Takes back what the peer did not take: both ends leave it out, or none."""
        crossing, mine = landed
        for number, pair in enumerate(zip(mine, theirs, strict=True)):
            if pair[0] == FINE != pair[1]:
                part_message = crossing.going.by_part[number][1]
                crossing.codec.restore(part_message, crossing.coming.by_part[number][1])
                self._change(crossing, number, room)
                self._add(crossing, number, -1, room)
        verdicts = [max(pair) for pair in zip(mine, theirs, strict=True)]
        return _Settled(verdicts, crossing.going.host.nbytes, crossing.step)

    def _close(self, landed: "deque[_Landed]", room: Tensor) -> "list[_Settled]":
        """Verdicts on the chunks that no other chunk came after."""
        mine = [verdict for one in landed for verdict in one.verdicts]
        if not mine:
            return []
        going, coming = torch.zeros(2, len(mine) + 1, dtype=torch.int64, device="cpu")
        write_seal(going, mine)
        pending = [
            self._transport.post_receive(self._peer, self._number, coming),
            self._transport.post_send(self._peer, self._number, going),
        ]
        for operation in pending:
            operation.wait(self._timeout)
        theirs = iter(self._open(coming))
        return [
            self._settle(one, list(itertools.islice(theirs, len(one.verdicts))), room)
            for one in landed
        ]

    def _open(self, seal: Tensor) -> list[int]:
        try:
            return read_seal(seal)
        except Damaged as error:
            raise PeerLost(self._peer, "exchanging", str(error)) from error

    def _post_word(self, word: int, num_under_way: int) -> Pending:
        write_seal(self._mine, (word, num_under_way))
        return self._transport.post_send(self._peer, self._number, self._mine)

    def _check_words(self) -> None:
        self._open(self._theirs)

    def _receive_word(self) -> Pending:
        return self._transport.post_receive(self._peer, self._number, self._theirs)


class _Crossing(NamedTuple):
    codec: Codec
    going: Message
    coming: Message
    pending: list[Pending]
    step: int


class _Landed(NamedTuple):
    """A chunk of which the peer has not yet said what it has taken."""

    crossing: _Crossing
    verdicts: list[int]


class _Settled(NamedTuple):
    verdicts: list[int]
    bytes_sent: int
    step: int


def _room_for(part: Part, room: Tensor) -> Tensor:
    return room.view(part.dtype)[: len(part)]


def _total(settled: list[_Settled], is_to_blame: bool) -> Outcome:
    verdicts = [verdict for one in settled for verdict in one.verdicts]
    return Outcome(
        NOT_FINITE not in verdicts,
        sum(one.bytes_sent for one in settled),
        min((one.step for one in settled), default=0),
        verdicts.count(DAMAGED),
        FAR not in verdicts,
        is_to_blame,
    )
