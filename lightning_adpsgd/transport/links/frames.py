"""Frames: what goes over a link before each message, so that its size is agreed first.

    4 bytes   a mark, by which a stream that is out of step is noticed
    8 bytes   bytes of the message, in network order

Whoever receives has posted a tensor for the message, and a frame of any other size is
refused before a byte of the message is read: nothing is allocated because of a frame.
"""

import struct

HEADER = struct.Struct("!4sQ")
_MARK = b"\xadpsg"


class BadFrame(RuntimeError):
    """What came is not the message that is due."""


def make_header(num_bytes: int) -> bytes:
    """What goes before a message of so many bytes."""
    return HEADER.pack(_MARK, num_bytes)


def check_header(header: bytes | bytearray, num_bytes: int) -> None:
    """Accepts the header of a message of so many bytes and nothing else.

    Raises:
        BadFrame: With both sizes.
    """
    mark, announced = HEADER.unpack(header)
    if mark != _MARK:
        raise BadFrame(f"its stream is out of step: a message begins with {mark!r}")
    if announced != num_bytes:
        raise BadFrame(
            f"it announces a message of {announced} bytes where one of {num_bytes} is "
            "due; its model or its options differ from ours"
        )
