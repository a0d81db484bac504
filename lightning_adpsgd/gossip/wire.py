"""The messages of an exchange: their layout, their seals and their memory.

A message about some parts has them encoded, followed by a seal::

    payload    the parts, one after the other, padded to whole words of 8 bytes
    seal       a checksum of each part, XXH3 of 64 bits
               the verdicts on the parts of a message that came before
               a CRC-32 of both

XXH3 runs at the speed of memory, and misses one error in 2^64. It does not protect
against deliberate changes; TLS does. Nothing here communicates.
"""

import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from lightning_adpsgd.gossip.codecs import Codec, WireChoice, make_codec, wire_dtypes
from lightning_adpsgd.weights.replica import JOINED_ELEMENTS, Chunk, Part, Replica
from lightning_adpsgd.weights.streams import Mirrored, mirrored

Parts = Sequence[Part | Chunk]
"""The parts that one message is about, in one dtype."""

FINE, DAMAGED, NOT_FINITE, FAR = 0, 1, 2, 3
"""The verdicts on a received part; only a part with the first is averaged."""

_WORD = 8  # bytes
_WIDEST = 8  # bytes of the widest number
IN_FLIGHT = 2
"""The number of messages in memory: one is read while another crosses. The changes of
as many await verdicts."""


class Message(NamedTuple):
    """The memory of one message.

    Attributes:
        wire: whole message on the host, as bytes.
        host: payload on the host.
        here: payload on the device of the weights.
        by_part: parts, with their payloads on the device of the weights.
        parts_on_host: payloads of the parts on the host.
        seal: seal on the host, int64.
    """

    wire: Tensor
    host: Tensor
    here: Tensor
    by_part: list[tuple[Part | Chunk, Tensor]]
    parts_on_host: Sequence[Tensor]
    seal: Tensor


def as_message(
    codec: Codec, parts: Parts, num_verdicts: int, buffer: Mirrored
) -> Message:
    """Lays out the message about these parts in a sufficiently long buffer."""
    payload_bytes = _bytes_of(codec, parts)
    begin = _padded(payload_bytes)
    end = begin + _WORD * _seal_words(parts, num_verdicts)
    lengths = [codec.length(len(part)) for part in parts]
    host = here = buffer.host[:payload_bytes].view(codec.dtype)
    on_host = on_here = torch.split_with_sizes(host, lengths)
    if buffer.here is not buffer.host:
        here = buffer.here[:payload_bytes].view(codec.dtype)
        on_here = torch.split_with_sizes(here, lengths)
    return Message(
        buffer.host[:end],
        host,
        here,
        list(zip(parts, on_here, strict=True)),
        on_host,
        buffer.host[begin:end].view(torch.int64),
    )


def longest_message(replica: Replica, wire_dtype: torch.dtype | None) -> int:
    """The bytes of the longest message about a chunk of a replica."""
    codecs = codecs_of(replica, wire_dtype)
    most_verdicts = max((len(c.parts) for c in replica.chunks), default=0)
    lengths = [
        _padded(_bytes_of(codecs[chunk.dtype], chunk.parts))
        + _WORD * _seal_words(chunk.parts, most_verdicts)
        for chunk in replica.chunks
    ]
    return max(lengths, default=0)


def codecs_of(
    replica: Replica, wire_dtype: torch.dtype | None
) -> dict[torch.dtype, Codec]:
    """A codec for each dtype in which averages are taken."""
    dtypes = {chunk.dtype for chunk in replica.chunks}
    return {dtype: make_codec(wire_dtype, dtype) for dtype in dtypes}


def payload_bytes(
    codecs: Mapping[torch.dtype, Codec], messages: Iterable[Parts]
) -> int:
    """The bytes that an exchange in these messages sends, without their seals."""
    return sum(_bytes_of(codecs[parts[0].dtype], parts) for parts in messages)


def checksum(payload: Tensor) -> int:
    """The XXH3 hash of a contiguous payload on the host, as an int64."""
    # Not `xxh3_64_intdigest`, which before xxhash 4 holds the interpreter's lock: the
    # training thread would wait for it.
    digest = xxhash.xxh3_64()
    digest.update(payload.view(torch.uint8).numpy().data)
    found = digest.intdigest()
    return found - (found >> 63 << 64)


def write_seal(seal: Tensor, words: Sequence[int]) -> None:
    """Writes words and their CRC into a seal, int64 [n + 1]."""
    seal.copy_(torch.tensor([*words, _crc(words)], dtype=torch.int64, device="cpu"))


def read_seal(seal: Tensor) -> list[int] | None:
    """The words of a received seal, [n]; None if they do not match their CRC."""
    *words, crc = seal.tolist()
    return words if crc == _crc(words) else None


def _crc(words: Sequence[int]) -> int:
    return zlib.crc32(struct.pack(f"{len(words)}q", *words))


def _seal_words(parts: Parts, num_verdicts: int) -> int:
    return len(parts) + num_verdicts + 1


def _bytes_of(codec: Codec, parts: Parts) -> int:
    return codec.dtype.itemsize * sum(codec.length(len(part)) for part in parts)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _WORD) * _WORD


class Loan(NamedTuple):
    """The memory of one exchange; all of it has bytes.

    Attributes:
        pairs: pairs of an outgoing and an incoming message.
        changes: buffers for the changes of one chunk, on the device of the weights.
        room: scratch memory for one part, on the device of the weights.
    """

    pairs: list[tuple[Mirrored, Mirrored]]
    changes: list[Tensor]
    room: Tensor


class Buffers:
    """Reusable memory for exchanges, each lent to one exchange at a time.

    `_lock` guards `_free`, which grows to the largest number of concurrent exchanges.
    """

    def __init__(self, replica: Replica, choice: WireChoice) -> None:
        self._device = replica.device
        self._num_parts = sum(len(chunk.parts) for chunk in replica.chunks)
        longest = (longest_message(replica, dtype) for dtype in wire_dtypes(choice))
        self._message_bytes = max(longest)
        chunks = replica.chunks
        longest_joined = min(JOINED_ELEMENTS, max(map(len, chunks), default=0))
        self._room_bytes = max(replica.part_elements, longest_joined) * _WIDEST
        lengths = (len(chunk) * chunk.dtype.itemsize for chunk in chunks)
        self._change_bytes = max(lengths, default=0)
        self._lock = threading.Lock()
        self._free: list[Loan] = []

    @contextmanager
    def lent(self) -> Iterator[Loan]:
        """Lends the memory for one exchange."""
        with self._lock:
            loan = self._free.pop() if self._free else self._make()
        yield loan
        # Not after an error: a message may still be under way.
        with self._lock:
            self._free.append(loan)

    def _make(self) -> Loan:
        places = range(min(IN_FLIGHT, self._num_parts))
        pairs = [(self._message(), self._message()) for _ in places]
        changes = [self._bytes(self._change_bytes) for _ in places]
        return Loan(pairs, changes, self._bytes(self._room_bytes))

    def _message(self) -> Mirrored:
        return mirrored(self._bytes(self._message_bytes))

    def _bytes(self, number: int) -> Tensor:
        return torch.empty(number, dtype=torch.uint8, device=self._device)
