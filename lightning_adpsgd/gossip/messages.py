"""A message about a chunk: its parts as they travel, and a seal at the end of it.

    payload    the parts, one after the other, padded to whole words of 8 bytes
    seal       the checksum of each part, XXH3 of 64 bits
               the verdicts on the parts of a chunk that came before
               a CRC-32 of the two

XXH3 runs at the speed of memory, and an error escapes it once in 2^64. (A sum of words
costs two thirds of it, but of errors in two bits it misses one in 128.) It is no
protection from somebody who changes bits on purpose; that is TLS's. Nothing here
communicates.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from lightning_adpsgd.gossip.wire import Codec, make_codec
from lightning_adpsgd.weights.replica import Chunk, Part, Replica
from lightning_adpsgd.weights.streams import Mirrored

FINE, DAMAGED, NOT_FINITE, FAR = 0, 1, 2, 3
"""What an end makes of a part that came: only the first is taken."""

_WORD = 8  # bytes


class Damaged(RuntimeError):
    """What came is not what was sent, and it cannot be said which part of it."""


class Message(NamedTuple):
    """Memory of one message.

    Attributes:
        wire: All of it, as bytes on the host: what travels.
        host: The payload, on the host.
        here: The payload, where the weights are.
        by_part: The parts of the chunk with their payload where the weights are.
        parts_on_host: The same payloads on the host.
        seal: Of int64, on the host.
    """

    wire: Tensor
    host: Tensor
    here: Tensor
    by_part: list[tuple[Part, Tensor]]
    parts_on_host: Sequence[Tensor]
    seal: Tensor


def as_message(
    codec: Codec, chunk: Chunk, num_verdicts: int, buffer: Mirrored
) -> Message:
    """A message about a chunk in a buffer that is long enough."""
    payload_bytes = _payload_bytes(codec, chunk)
    begin = _padded(payload_bytes)
    end = begin + _WORD * _seal_words(chunk, num_verdicts)
    host = here = buffer.host[:payload_bytes].view(codec.dtype)
    if buffer.here is not buffer.host:
        here = buffer.here[:payload_bytes].view(codec.dtype)
    lengths = [codec.length(len(part)) for part in chunk.parts]
    return Message(
        buffer.host[:end],
        host,
        here,
        list(zip(chunk.parts, here.split(lengths), strict=True)),
        host.split(lengths),
        buffer.host[begin:end].view(torch.int64),
    )


def longest_message(replica: Replica, wire_dtype: torch.dtype | None) -> int:
    """Bytes of the longest message about a chunk of a replica."""
    codecs = codecs_of(replica, wire_dtype)
    most_verdicts = max((len(c.parts) for c in replica.chunks), default=0)
    lengths = [
        _padded(_payload_bytes(codecs[chunk.dtype], chunk))
        + _WORD * _seal_words(chunk, most_verdicts)
        for chunk in replica.chunks
    ]
    return max(lengths, default=0)


def codecs_of(
    replica: Replica, wire_dtype: torch.dtype | None
) -> dict[torch.dtype, Codec]:
    """A codec for each dtype in which averages are taken."""
    dtypes = {chunk.dtype for chunk in replica.chunks}
    return {dtype: make_codec(wire_dtype, dtype) for dtype in dtypes}


def checksum(payload: Tensor) -> int:
    """XXH3 of a contiguous payload on the host, as a number of int64."""
    found = xxhash.xxh3_64_intdigest(payload.view(torch.uint8).numpy().data)
    return found - (found >> 63 << 64)


def write_seal(seal: Tensor, words: Sequence[int]) -> None:
    """Writes words and what guards them, [n + 1]."""
    seal.copy_(torch.tensor([*words, _crc(words)], dtype=torch.int64, device="cpu"))


def read_seal(seal: Tensor) -> list[int]:
    """The words of a seal, [n], that came.

    Raises:
        Damaged: They are not what was written.
    """
    *words, crc = seal.tolist()
    if crc != _crc(words):
        raise Damaged("a message arrived damaged")
    return words


def _crc(words: Sequence[int]) -> int:
    return zlib.crc32(struct.pack(f"{len(words)}q", *words))


def _seal_words(chunk: Chunk, num_verdicts: int) -> int:
    return len(chunk.parts) + num_verdicts + 1


def _payload_bytes(codec: Codec, chunk: Chunk) -> int:
    return codec.dtype.itemsize * sum(codec.length(len(p)) for p in chunk.parts)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _WORD) * _WORD
