"""Whether a sound file is shorter than it was written.

libsndfile opens a file that was cut short, and says that it is as long as what is left.
Headers of WAV (RIFF, RF64), Wave64, AIFF and AU have the number of bytes; an Ogg stream
marks its last page. FLAC and MP3 keep the whole length, which reading then does not
reach; SPHERE has its own check in `sphere.py`. Other formats are not checked.
"""

import struct
from pathlib import Path

NO_LENGTH = 2**63 - 1
"""libsndfile's number of samples where a header has none: of FLAC written to a pipe."""

WITHOUT_LENGTH = (
    "its header has no length, as of FLAC that was written to a pipe; write it into a "
    "file: `ffmpeg -i old.flac new.flac`"
)
SEVERAL_STREAMS = (
    "several streams of Ogg in a row, of which only the first would be read; write it "
    "anew by `ffmpeg -i old.ogg new.wav`"
)
_PAGE = 65_307  # bytes of the longest page of Ogg
_PAGE_HEADER = 27
_STREAM = slice(14, 18)  # the number of a page's stream
_FIRST, _LAST = 2, 4  # flags of a page
# Programs that write to a pipe leave one of these in place of the length.
_NOT_SAID = (0, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
_OF_SOX = range(0x7F000000, 0x80000100)


def cut_short(path: Path) -> str:
    """What shows that the end of a file is missing; empty if nothing does.

    Raises:
        OSError: The file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(32).ljust(32, b"\0")
        if start[:4] == b"OggS":
            file.seek(max(0, size - _PAGE))
            return _of_ogg(file.read())
    expected = _announced(start)
    # An odd number of bytes is rounded up, by some only in the header.
    if expected > size + 1:
        return f"cut short: the header says {expected} bytes, there are {size}"
    return ""


def has_several_streams(path: Path) -> bool:
    """Whether the last page of an Ogg file is of a stream that begins after the first.

    Streams that begin together, as those of a film, are no such ones.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(_PAGE)
        if not start.startswith(b"OggS"):
            return False
        file.seek(max(0, path.stat().st_size - _PAGE))
        tail = file.read()
    last = tail[tail.rfind(b"OggS") :][:_PAGE_HEADER]
    return last[_STREAM] not in _begun_together(start)


def _begun_together(start: bytes) -> set[bytes]:
    """The numbers of the streams whose first pages stand before all other pages."""
    found = set[bytes]()
    while len(start) >= _PAGE_HEADER and start[5] & _FIRST:
        found.add(start[_STREAM])
        lengths = start[_PAGE_HEADER : _PAGE_HEADER + start[26]]
        start = start[_PAGE_HEADER + len(lengths) + sum(lengths) :]
    return found


def _announced(start: bytes) -> int:
    """The bytes of the whole file by its first 32; 0 where they do not say."""
    kind = start[:4]
    if kind in (b"RF64", b"BW64") and start[12:16] == b"ds64":
        return _length(start, "<Q", 20, 8)
    if kind == b"riff":  # Wave64
        return _length(start, "<Q", 16, 0)
    if kind == b"RIFF":
        return _length(start, "<I", 4, 8)
    if kind in (b"RIFX", b"FORM"):
        return _length(start, ">I", 4, 8)
    if kind == b".snd":
        return _length(start, ">I", 8, *struct.unpack_from(">I", start, 4))
    return 0


def _length(start: bytes, form: str, place: int, before: int) -> int:
    """A number of bytes in a header, with those before what it counts."""
    [said] = struct.unpack_from(form, start, place)
    return 0 if said in _NOT_SAID or said in _OF_SOX else said + before


def _of_ogg(tail: bytes) -> str:
    page = tail[tail.rfind(b"OggS") :]
    header = page[:_PAGE_HEADER]
    if len(header) < _PAGE_HEADER or not header[5] & _LAST:
        return "cut short: its last page of Ogg does not end the stream"
    lengths = page[_PAGE_HEADER : _PAGE_HEADER + header[26]]
    if len(page) < _PAGE_HEADER + header[26] + sum(lengths):
        return "cut short: its last page of Ogg is not whole"
    return ""
