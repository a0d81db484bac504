"""One lane to a peer: words, and pipelined exchanges of all parts.

A lane is one direction of asking between two peers: one end always asks, the other
always answers. While message k crosses the wire, both ways at once, message k - 1 is
judged. Each part of a message is a separate exchange, ``d += a (theirs - mine)``, with
the same a at both ends (`exchange_weight`).

A part is averaged only if both ends accept it, so that the sum of the two is
preserved::

    message k     parts, and this end's verdicts on those of message k - 2
    it arrives    the changes of message k - 2 are added where both ends agree;
                  those of message k are computed, judged, and wait
    at the end    the verdicts on the last messages cross by themselves

An end refuses a part that is damaged, non-finite or too far away (`quarantine`).

Weights on a GPU are read, encoded and averaged there, on the stream of the calling
thread; only messages come to the host, into pinned memory.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_adpsgd.gossip.codecs import Codec, WireChoice
from lightning_adpsgd.gossip.forms import FormChoice, forms_of
from lightning_adpsgd.gossip.protocol import Outcome, Position, Pulled, exchange_weight
from lightning_adpsgd.gossip.quarantine import Disagreement
from lightning_adpsgd.gossip.wire import (
    DAMAGED,
    FAR,
    FINE,
    NOT_FINITE,
    Buffers,
    Loan,
    Message,
    Parts,
    as_message,
    checksum,
    payload_bytes,
    read_seal,
    write_seal,
)
from lightning_adpsgd.transport.base import (
    PeerLost,
    Pending,
    Transport,
    lane_of,
    one_behind,
)
from lightning_adpsgd.weights.look_ahead import LookAhead
from lightning_adpsgd.weights.replica import Chunk, Part, Replica
from lightning_adpsgd.weights.streams import to_device, to_host

ASK, ALIVE, LEAVE, GRANT, PULL = 1, 2, 3, 4, 5
REQUEST, ADMIT, DECLINE = 12, 13, 14
ASKS = (ASK, 11, 15, 16)
"""The words of a lane: the asked end says `GRANT` and `ADMIT`, the asker the others.
An asked end that ends before an exchange that it has agreed on says `LEAVE`.

`ASKS` ask for an exchange in one of the lane's forms. A `REQUEST` comes before, if
there is time: `ADMIT` answers it when the asked end is free, and `DECLINE` says that
the asker no longer is. The numbers between are the words of `pairing`.
"""

# The number of round trips that are remembered, and from which one is known.
_ROUND_TRIPS, _FEWEST_ROUND_TRIPS = 16, 4
# The most elements of one message of a pull: by each, the asking end sees that weights
# still come.
_PIECE_ELEMENTS = 1 << 17


@dataclass
class Channel:
    """The connection of one lane; `timeout` applies to each message.

    Attributes:
        bound: the transport, which hangs up the connection of this lane alone.
        waits_since: time since which it waits for a message, by `time.monotonic`;
            infinite while it does not. The lane's thread writes it, others read it.
    """

    transport: Transport
    peer: int
    lane: int
    timeout: timedelta
    waits_since: float = math.inf

    def __post_init__(self) -> None:
        self.bound = self.transport.bound(self.peer, self.lane)

    def post_send(self, tensor: Tensor) -> Pending:
        """Posts a send; the tensor must not change before its wait returns."""
        return self.bound.post_send(self.peer, self.lane, tensor)

    def post_receive(self, into: Tensor) -> Pending:
        """Posts a receive."""
        return self.bound.post_receive(self.peer, self.lane, into)

    def wait(self, posted: Iterable[Pending]) -> None:
        """Waits until all posted operations are done."""
        try:
            for pending in posted:
                self.waits_since = time.monotonic()
                pending.wait(self.timeout)
        finally:
            self.waits_since = math.inf

    def receive(self, into: Tensor) -> None:
        """Receives a message."""
        self.wait([self.post_receive(into)])

    def open(self, seal: Tensor) -> list[int]:
        """The words of a received seal.

        Raises:
            PeerLost: The seal arrived damaged.
        """
        if (words := read_seal(seal)) is None:
            raise PeerLost(self.peer, "exchanging", "a message arrived damaged")
        return words


@dataclass(frozen=True)
class Lanes:
    """What the lanes of one learner share, for one section of its weights.

    Args:
        transport: connection to the owners of the section.
        chunks: what is exchanged of the replica.
        buffers: memory of exchanges, which the lanes of all sections share.
        look_ahead: how far ahead exchanges read weights; None: as they are.
        last_steps: step of the last exchange with each peer, on either lane of the
            pair: both average the same.
    """

    transport: Transport
    replica: Replica
    chunks: Sequence[Chunk]
    buffers: Buffers
    wire_dtype: WireChoice
    gain: float
    timeout: timedelta
    look_ahead: LookAhead | None = None
    last_steps: dict[int, int] = field(default_factory=dict[int, int])

    def asking(self, peer: int) -> "Lane":
        """The lane on which this learner asks a peer."""
        return Lane(self, peer, lane_of(self.transport.index, peer))

    def answering(self, peer: int) -> "Lane":
        """The lane on which a peer asks this learner."""
        return Lane(self, peer, lane_of(peer, self.transport.index))

    def go_on_from(self, step: int) -> None:
        """Continues counting as if the last exchanges had been at this step."""
        self.last_steps.update(dict.fromkeys(self.last_steps, step))


class Lane:
    """One end of a lane; used by a single thread.

    Attributes:
        said_at: time of the last word of this end, by `time.monotonic`.
    """

    def __init__(self, shared: Lanes, peer: int, number: int) -> None:
        self.channel = Channel(shared.transport, peer, number, shared.timeout)
        self._replica, self._chunks = shared.replica, shared.chunks
        self._buffers, self._gain = shared.buffers, shared.gain
        self._look_ahead = shared.look_ahead
        self._forms = forms_of(shared.replica, shared.chunks, shared.wire_dtype)
        self._choice = FormChoice(
            [payload_bytes(*form) for form in self._forms],
            [len(form.messages) for form in self._forms],
        )
        # In seconds. Some wait for a busy thread; the quickest is that of the link.
        self._round_trips = deque[float](maxlen=_ROUND_TRIPS)
        self._disagreement = Disagreement()
        self._last_steps = shared.last_steps
        self._last_steps[peer] = self._replica.step
        # Four int64 of each end: the word, its two numbers, and their CRC.
        self._mine, self._theirs = torch.zeros(2, 4, dtype=torch.int64, device="cpu")
        self.said_at, self._answer_s = time.monotonic(), 0.0

    def say(self, word: int, num_under_way: int = 0) -> None:
        """Sends a word, and the number of exchanges under way at this end.

        With `LEAVE` the number is 1 if this end leaves all peers for good, otherwise 0.
        """
        self.channel.wait([self._post_word(word, num_under_way)])

    def hear(self) -> int:
        """Receives a word; keeps the number that comes with it in `heard_number`."""
        self.channel.wait([self._post_hearing()])
        self.channel.open(self._theirs)
        return int(self._theirs[0])

    @property
    def heard_number(self) -> int:
        """The number that came with the last word."""
        return int(self._theirs[1])

    def request(self) -> None:
        """Requests an exchange, and waits until the peer is free for it."""
        self.channel.wait([self._post_hearing(), self._post_word(REQUEST, 0)])
        self.channel.open(self._theirs)

    def ask(
        self,
        num_under_way: int,
        step_seconds: float = math.inf,
        cores_idle: bool = False,
    ) -> Outcome:
        """Asks for an exchange and makes it.

        Args:
            num_under_way: number of exchanges under way at this end, with this one.
            step_seconds: duration of a step; an exchange that would be long beside it
                takes another form.
            cores_idle: whether no thread of this machine waits for a core.
        """
        form = self._choice.choose(step_seconds, cores_idle)
        begin, worked = time.monotonic(), time.thread_time()
        steps = self._replica.step - self._last_steps[self.channel.peer]
        word = self._post_word(ASKS[form], num_under_way, steps)
        outcome = self._exchange([self._post_hearing(), word], form, steps)
        seconds, processor = time.monotonic() - begin, time.thread_time() - worked
        # Not of the request, which may wait for a whole exchange with another peer.
        self._round_trips.append(self._answer_s)
        is_known = len(self._round_trips) >= _FEWEST_ROUND_TRIPS
        round_trip = min(self._round_trips) if is_known else 0.0
        self._choice.took(form, seconds, processor, round_trip)
        return outcome

    def answer(self, num_under_way: int) -> Outcome:
        """Makes the exchange that the peer has just asked for."""
        form, steps = ASKS.index(int(self._theirs[0])), int(self._theirs[2])
        return self._exchange([self._post_word(GRANT, num_under_way)], form, steps)

    def pull(self, on_piece: Callable[[float], None] = lambda share: None) -> Pulled:
        """Asks for the peer's weights in full precision.

        It changes no weights, and thus no mean.

        Args:
            on_piece: function called with the share of the weights that has come.
        """
        self.channel.wait([self._post_hearing(), self._post_word(PULL, 0)])
        position = torch.zeros(len(Position._fields), dtype=torch.int64, device="cpu")
        self.channel.receive(position)
        values = [
            torch.empty(len(chunk), dtype=chunk.dtype, device="cpu")
            for chunk in self._chunks
        ]
        pieces = _pieces_of(values)
        for number, piece in enumerate(pieces, 1):
            self.channel.receive(piece)
            on_piece(number / len(pieces))
        sums = torch.zeros(len(values) + 2, dtype=torch.int64, device="cpu")
        self.channel.receive(sums)
        doing, came = "pulling its weights", [position, *values]
        if self.channel.open(sums) != [checksum(tensor) for tensor in came]:
            raise PeerLost(self.channel.peer, doing, "they arrived damaged")
        try:
            return Pulled(Position.of(position.tolist()), values)
        except ValueError as error:
            raise PeerLost(self.channel.peer, doing, str(error)) from error

    def give(self, position: Position) -> None:
        """Sends the weights that the peer has just asked for."""
        values = self._replica.snapshot(self._chunks)
        self.say(GRANT)
        numbers = torch.tensor(position, dtype=torch.int64, device="cpu")
        sums = torch.zeros(len(values) + 2, dtype=torch.int64, device="cpu")
        write_seal(sums, [checksum(tensor) for tensor in (numbers, *values)])
        for tensor in (numbers, *_pieces_of(values), sums):
            self.channel.wait([self.channel.post_send(tensor)])

    def _exchange(self, greeting: list[Pending], form: int, steps: int) -> Outcome:
        codecs, messages = self._forms[form]
        self._last_steps[self.channel.peer] = self._replica.step
        for codec in codecs.values():
            codec.begin(steps)
        with self._buffers.lent() as loan:
            exchange = _Exchange(
                *(self.channel, self._replica, loan, codecs),
                *(self._disagreement, self._look_ahead),
            )
            posted = (exchange.post(n, parts) for n, parts in enumerate(messages))
            for crossing in one_behind(posted):
                exchange.land(crossing, self._end_greeting(greeting))
            exchange.close(self._end_greeting(greeting))
        self._disagreement.end()
        return exchange.outcome()

    def _end_greeting(self, greeting: list[Pending]) -> float:
        """Waits once for the words of both ends; returns the agreed weight a."""
        if greeting:
            begin = time.monotonic()  # encoding the first message may have taken long
            self.channel.wait(greeting)
            self._answer_s = time.monotonic() - begin
            self.channel.open(self._theirs)
            if int(self._theirs[0]) == LEAVE:
                reason = "it ends before the exchange that it has agreed on"
                raise PeerLost(self.channel.peer, "exchanging", reason)
            greeting.clear()
        return exchange_weight(self._gain, int(self._mine[1]), self.heard_number)

    def _post_word(self, word: int, num_under_way: int, steps: int = 0) -> Pending:
        write_seal(self._mine, (word, num_under_way, steps))
        self.said_at = time.monotonic()
        return self.channel.post_send(self._mine)

    def _post_hearing(self) -> Pending:
        return self.channel.post_receive(self._theirs)


def _pieces_of(values: Iterable[Tensor]) -> list[Tensor]:
    return [piece for value in values for piece in value.split(_PIECE_ELEMENTS)]


class _Crossing(NamedTuple):
    """A message of each end, on its way to the other."""

    number: int
    codec: Codec
    going: Message
    coming: Message
    pending: list[Pending]


class _Waiting(NamedTuple):
    """The changes of a message, with this end's verdicts; they await the other's."""

    changes: list[tuple[Part | Chunk, Tensor]]
    verdicts: list[int]


class _Exchange:
    """One end of an exchange: sends messages, judges those that come, and averages."""

    def __init__(
        self,
        channel: Channel,
        replica: Replica,
        loan: Loan,
        codecs: dict[torch.dtype, Codec],
        disagreement: Disagreement,
        look_ahead: LookAhead | None,
    ) -> None:
        self._channel, self._replica, self._look_ahead = channel, replica, look_ahead
        self._loan, self._codecs = loan, codecs
        self._disagreement, self._is_to_blame = disagreement, False
        self._waiting = deque[_Waiting]()
        self._verdicts = list[int]()
        self._bytes_sent, self._first_step = 0, 0

    def post(self, number: int, parts: Parts) -> _Crossing:
        codec = self._codecs[parts[0].dtype]
        # On the message before the last: the last one is still crossing.
        verdicts = self._waiting[-1].verdicts if self._waiting else []
        pair = self._loan.pairs[number % len(self._loan.pairs)]
        going, coming = (as_message(codec, parts, len(verdicts), b) for b in pair)
        if number == 0:
            self._first_step = self._replica.step
        write_seal(going.seal, [*self._encode(codec, going), *verdicts])
        self._bytes_sent += going.host.nbytes
        # Receives before sends: Gloo's notice that a receive is ready would otherwise
        # queue behind the payload and halve the bandwidth.
        pending = [
            self._channel.post_receive(coming.wire),
            self._channel.post_send(going.wire),
        ]
        return _Crossing(number, codec, going, coming, pending)

    def land(self, crossing: _Crossing, weight: float) -> None:
        """Judges a received message, and averages what its verdicts concern."""
        self._channel.wait(crossing.pending)
        self._replica.landed_at = time.monotonic()
        words = self._channel.open(crossing.coming.seal)
        num_parts = len(crossing.coming.by_part)
        sums, verdicts = words[:num_parts], words[num_parts:]
        if verdicts:
            self._average(self._waiting.popleft(), verdicts, weight)
        to_device(crossing.coming.host, crossing.coming.here)
        changes = self._room_for_changes(crossing)
        judged = [self._judge(crossing, n, s, changes) for n, s in enumerate(sums)]
        self._waiting.append(_Waiting(changes, judged))

    def close(self, weight: float) -> None:
        """Averages the last messages, whose verdicts no later message carried."""
        mine = [verdict for one in self._waiting for verdict in one.verdicts]
        if not mine:
            return
        going, coming = torch.zeros(2, len(mine) + 1, dtype=torch.int64, device="cpu")
        write_seal(going, mine)
        posted = [self._channel.post_receive(coming), self._channel.post_send(going)]
        self._channel.wait(posted)
        theirs = iter(self._channel.open(coming))
        for one in self._waiting:
            num_parts = len(one.verdicts)
            self._average(one, list(itertools.islice(theirs, num_parts)), weight)

    def outcome(self) -> Outcome:
        return Outcome(
            NOT_FINITE not in self._verdicts,
            self._bytes_sent,
            self._first_step,
            self._verdicts.count(DAMAGED),
            FAR not in self._verdicts,
            self._is_to_blame,
            any(codec.dtype.itemsize == 1 for codec in self._codecs.values()),
        )

    def _encode(self, codec: Codec, going: Message) -> list[int]:
        """Writes the payload; returns the checksums of its parts."""
        sums, ahead = [], self._look_ahead.factors() if self._look_ahead else ()
        for part, message in going.by_part:
            self._encode_part(codec, part, message, ahead)
            if going.here is going.host:  # the part is still in the core's cache
                sums.append(checksum(message))
        to_host(going.here, going.host)
        return sums or [checksum(message) for message in going.parts_on_host]

    def _encode_part(
        self, codec: Codec, part: Part | Chunk, message: Tensor, ahead: Sequence[float]
    ) -> None:
        travels_as_it_is = message.dtype == part.dtype
        room = self._loan.room.view(part.dtype)[: len(part)]
        weights = message if travels_as_it_is else room
        with self._replica.guard:
            part.read(weights, ahead)
        if not travels_as_it_is:
            codec.encode(weights, message, part.place)

    def _room_for_changes(
        self, crossing: _Crossing
    ) -> list[tuple[Part | Chunk, Tensor]]:
        parts = [part for part, _ in crossing.going.by_part]
        changes = self._loan.changes[crossing.number % len(self._loan.changes)]
        lengths = [len(part) for part in parts]
        num_bytes = sum(lengths) * parts[0].dtype.itemsize
        # Cut first: the memory is long enough for another dtype, too.
        values = changes[:num_bytes].view(parts[0].dtype)
        return list(zip(parts, torch.split_with_sizes(values, lengths), strict=True))

    def _judge(
        self,
        crossing: _Crossing,
        number: int,
        sum: int,
        changes: list[tuple[Part | Chunk, Tensor]],
    ) -> int:
        """Writes the change ``theirs - mine``; returns the verdict on it."""
        _, coming = crossing.coming.by_part[number]
        if checksum(crossing.coming.parts_on_host[number]) != sum:
            return DAMAGED
        part, going = crossing.going.by_part[number]
        change = changes[number][1]
        # This waits for the change, so that a GPU no longer reads the coming message.
        square = crossing.codec.change(going, coming, change, part.place)
        is_finite, distance = math.isfinite(square), math.sqrt(abs(square))
        if is_finite and not self._disagreement.is_unusual(distance):
            return FINE
        mine, theirs = crossing.codec.norm(going), crossing.codec.norm(coming)
        if is_finite and not self._disagreement.is_far(distance, mine, theirs):
            return FINE
        # The larger weights are to blame also if finite ones have infinite squares.
        if mine > theirs or not math.isfinite(mine):
            self._is_to_blame = True
        return FAR if is_finite else NOT_FINITE

    def _average(self, one: _Waiting, theirs: Sequence[int], weight: float) -> None:
        """Adds ``d += a (theirs - mine)`` unless an end has refused the part."""
        verdicts = [max(pair) for pair in zip(one.verdicts, theirs, strict=True)]
        for (part, change), verdict in zip(one.changes, verdicts, strict=True):
            if verdict == FINE:
                with self._replica.guard:
                    part.add(change, weight)
        self._verdicts += verdicts
