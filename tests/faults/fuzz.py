"""Malformed input for all that reads from a network: no crash, no hang, no growth.

    python -m tests.faults.fuzz --inputs 100000 --seed 0

Each input is something valid that was damaged, or noise. It goes to one of the readers:
both sides of the handshake, the frames of a connection, the seal and the sums of a
chunk. A reader may refuse it in the ways that it documents, or accept what happens to
be valid; anything else ends the run with the input's seed.
"""

import argparse
import faulthandler
import gc
import json
import math
import random
import resource
import secrets
import socket
import struct
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lightning_adpsgd.epochs.ledger import Ledger
from lightning_adpsgd.gossip.protocol import Position
from lightning_adpsgd.gossip.wire import checksum, read_seal, write_seal
from lightning_adpsgd.islands.member_list import Beat, MemberList
from lightning_adpsgd.transport.base import PeerLost
from lightning_adpsgd.transport.links.connection import Connection, make_header
from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.links.handshake import (
    Malformed,
    Refused,
    greet_dialer,
    greet_listener,
)
from lightning_adpsgd.transport.links.peer_info import PROTOCOL, PeerInfo, Wanted
from lightning_adpsgd.transport.links.sockets import Address, Deadline

TOKEN = Credentials(b"a token of a test")
DIALER = PeerInfo(0, "start 0", "job", "weight:(2,):torch.float32")
LISTENER = PeerInfo(1, "start 1", "job", "weight:(2,):torch.float32")
NONCE = bytes(32)
HELLO = struct.pack("!8sH32s", b"\xadPSGDlnk", PROTOCOL, NONCE)
SLOWEST_S = 10.0


class Broken(AssertionError):
    """A reader did what it must not."""


def message(label: bytes, text: bytes) -> list[bytes]:
    """As the handshake writes it, where both nonces are zeros."""
    proof = TOKEN.proof(label, NONCE + NONCE, text)
    return [struct.pack("!I", len(text)), text, proof]


def dialer_says(draw: random.Random) -> list[bytes]:
    """What a dialer says, from the first byte to the last."""
    text = json.dumps({"facts": content(draw, DIALER), "wanted": [1, "", ""]}).encode()
    return [HELLO, TOKEN.proof(b"dialer  ", NONCE + NONCE), *message(b"letter d", text)]


def listener_says(draw: random.Random) -> list[bytes]:
    """What a listener says."""
    text = json.dumps({"facts": content(draw, LISTENER), "refusal": ""}).encode()
    proof = TOKEN.proof(b"listener", NONCE + NONCE)
    return [HELLO, b"\1", proof, *message(b"letter l", text)]


def content(draw: random.Random, info: PeerInfo) -> object:
    """PeerInfo, or what a member with the token but without sense might write."""
    told = asdict(info)
    for _ in range(draw.choice((0, 0, 1, 2))):
        name = draw.choice([*told, "other"])
        told[name] = draw.choice(
            [None, -1, 1 << 70, 1.5, "", "x" * 5000, [], {"a": 1}, {"a": "b"}, True]
        )
    return draw.choice((told, told, told, None, [told], "facts", 7))


def damaged(draw: random.Random, pieces: Sequence[bytes]) -> bytes:
    """The pieces with something wrong, or at times with nothing."""
    pieces = list(pieces)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        place = draw.randrange(len(pieces))
        pieces[place] = draw.choice(DAMAGES)(draw, pieces[place])
    if draw.random() < 0.1:
        draw.shuffle(pieces)
    return b"".join(pieces)


def flip(draw: random.Random, piece: bytes) -> bytes:
    """One bit."""
    if not piece:
        return piece
    changed = bytearray(piece)
    changed[draw.randrange(len(piece))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(draw: random.Random, piece: bytes) -> bytes:
    """Ends early."""
    return piece[: draw.randrange(len(piece) + 1)]


def noise(draw: random.Random, piece: bytes) -> bytes:
    """As long, and of no meaning."""
    return draw.randbytes(len(piece))


def longer(draw: random.Random, piece: bytes) -> bytes:
    """With something after it."""
    return piece + draw.randbytes(draw.randrange(2000))


def twice(draw: random.Random, piece: bytes) -> bytes:
    """Said again."""
    return piece + piece


def extreme(draw: random.Random, piece: bytes) -> bytes:
    """Numbers as large or as small as they get."""
    return draw.choice((b"\xff", b"\0", b"\x7f", b"\x80")) * len(piece)


def nested(draw: random.Random, piece: bytes) -> bytes:
    """Brackets for a parser."""
    return draw.choice((b"[", b'{"a":', b"9")) * draw.randrange(1, 3000)


DAMAGES = (flip, cut, noise, longer, twice, extreme, nested)


@contextmanager
def said(stream: bytes):
    """A socket at which all of this has arrived, and then the end."""
    here, there = socket.socketpair()
    with here, there:
        there.setblocking(False)
        there.send(stream)
        there.shutdown(socket.SHUT_WR)
        yield here


def to_listener(draw: random.Random) -> str:
    """A dialer's words to a listener."""
    with said(damaged(draw, dialer_says(draw))) as sock:
        return judged(lambda: greet_dialer(sock, Deadline(5), TOKEN, LISTENER))


def to_dialer(draw: random.Random) -> str:
    """A listener's words to a dialer."""
    with said(damaged(draw, listener_says(draw))) as sock:
        return judged(
            lambda: greet_listener(sock, Deadline(5), TOKEN, DIALER, Wanted(1))
        )


def judged(reader: Callable[[], PeerInfo]) -> str:
    """How a reader of the handshake has ended."""
    try:
        info = reader()
    except (Refused, Malformed, OSError) as error:
        return type(error).__name__
    # One with the token may call its start and origin what it likes, and nothing else.
    if replace(info, incarnation=f"start {info.member}", origin="") not in (
        DIALER,
        LISTENER,
    ):
        raise Broken(f"admitted {info}")
    return "accepted"


def to_connection(draw: random.Random) -> str:
    """Frames to a connection that expects three messages."""
    lengths = [draw.choice((0, 1, 4, 100, 3000)) for _ in range(3)]
    payloads = [draw.randbytes(length) for length in lengths]
    pieces = [x for p in payloads for x in (make_header(len(p)), p)]
    with said(damaged(draw, pieces)) as sock:
        connection = Connection(sock, 1)
        rooms = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
        try:
            for room in rooms:
                connection.post_receive(room).wait(timedelta(seconds=5))
        except PeerLost:
            return "PeerLost"
        finally:
            connection.break_off("the input is over")
    return "accepted"


def to_chunk(draw: random.Random) -> str:
    """A message about a chunk of which some bytes are not what they were."""
    parts = torch.tensor(list(draw.randbytes(256)), dtype=torch.uint8).split(64)
    verdicts = [draw.randrange(3) for _ in range(draw.randrange(5))]
    seal = torch.zeros(len(parts) + len(verdicts) + 1, dtype=torch.int64)
    write_seal(seal, [*map(checksum, parts), *verdicts])
    pieces = [bytes(part.tolist()) for part in parts]
    came = bytearray(b"".join([*pieces, bytes(seal.view(torch.uint8).tolist())]))
    for _ in range(draw.choice((1, 1, 1, 2, 20))):
        came[draw.randrange(len(came))] ^= 1 << draw.randrange(8)
    arrived = torch.frombuffer(came, dtype=torch.uint8)
    words = read_seal(arrived[256:].view(torch.int64))
    if words is None:
        return "Damaged"
    for place, part in enumerate(arrived[:256].split(64)):
        whole = bytes(part.tolist()) == pieces[place]
        if (checksum(part) == words[place]) is not whole:
            raise Broken(f"part {place} was taken though it is not what was sent")
    return "judged by parts"


OTHERS = (None, True, -1, 1 << 70, 1e308, math.nan, math.inf, "", "x" * 999, [], {})
OTHERS += ([[]], "1.2.3.4:99999", "[::1]:7", [[3, 1]], [[0, 1 << 60]])


def nonsense(draw: random.Random, found: Any, depth: int = 0) -> Any:
    """A value of JSON, of which something at any depth is another one."""
    if draw.random() < 0.15 or not isinstance(found, list | dict) or not found:
        return draw.choice([found, *OTHERS])
    if isinstance(found, dict):
        key = draw.choice(list(found))
        return {**found, key: nonsense(draw, found[key], depth + 1)}
    place = draw.randrange(len(found))
    changed = nonsense(draw, found[place], depth + 1)
    rest = found[place + 1 :] if draw.random() < 0.9 else []
    return [*found[:place], changed, *rest]


def written(draw: random.Random, found: object) -> str:
    """What somebody might put into the rendezvous in the place of this."""
    for _ in range(draw.choice((0, 1, 1, 2, 5))):
        found = nonsense(draw, found)
    text = json.dumps(found)
    if draw.random() < 0.4:
        return damaged(draw, [text.encode()]).decode("utf-8", "replace")
    return text


ROWS = [[n, f"start {n}", "host", [f"10.0.0.{n}:4"], "start 0", ""] for n in range(3)]


def to_list(draw: random.Random) -> str:
    """A member list to a member."""
    found = MemberList.from_json(written(draw, [7, ROWS]))
    for number, member in found.by_number.items():
        if not (0 <= number == member.number < 1 << 31):
            raise Broken(f"admitted {member}")
        for address in member.addresses:
            Address.parse(address)
    if MemberList.from_json(found.to_json()) != found:
        raise Broken(f"{found} does not come back from its text")
    return "left rows out" if found.num_invalid else "accepted"


def to_beat(draw: random.Random) -> str:
    """A heartbeat to an observer."""
    text = draw.choice(["12 345", "goodbye 7", "1", "0 0", "-1 2", "1 2 3", "9" * 40])
    came = damaged(draw, [text.encode()]).decode("ascii", "replace")
    beat = Beat.parse(came)
    if beat is not None and not (beat.steps >= 0 and (beat.number or 0) >= 0):
        raise Broken(f"took {beat}")
    return "refused" if beat is None else "accepted"


def to_ledger(draw: random.Random) -> str:
    """A ledger to a pool."""
    held = {"start 0": [[0, 2]], "start 1": [[4, 5], [7, 9]]}
    whole = [
        "life",
        [3, [[0, 20]], "20"],
        [[9, 20]],
        held,
        {"start 2": []},
        ["start 0"],
        7,
    ]
    try:
        found = Ledger.from_json(written(draw, whole))
    except ValueError:
        return "refused"
    report, _ = found.report("start 1", ((4, 5),), ((7, 9),))
    again = report.without_names({"start 0"}).claim("start 1", 2)[0].to_json()
    if Ledger.from_json(again).to_json() != again:
        raise Broken(f"{again} does not come back from its text")
    return "accepted"


def to_address(draw: random.Random) -> str:
    """An address to whoever dials it."""
    text = draw.choice(
        ["10.0.0.1:80", "[fe80::1%eth0]:7", "node:1", ":", "[]:1", "a:-1"]
    )
    came = damaged(draw, [text.encode()]).decode("utf-8", "replace")
    try:
        found = Address.parse(came)
    except ValueError:
        return "refused"
    if not (found.host and 0 <= found.port < 1 << 16):
        raise Broken(f"took {found}")
    return "accepted"


def to_position(draw: random.Random) -> str:
    """How far a peer has come, to one that pulls its weights."""
    extreme = draw.choice((0, 1, -1, (1 << 63) - 1, -(1 << 63), 1 << 53))
    numbers = [draw.choice((draw.randrange(1 << 40), extreme)) for _ in range(3)]
    try:
        position = Position.of(numbers)
    except ValueError:
        return "refused"
    if list(position) != numbers or not all(0 <= n < 1 << 53 for n in numbers):
        raise Broken(f"took {position}")
    return "accepted"


READERS = (
    to_listener,
    to_dialer,
    to_connection,
    to_chunk,
    to_list,
    to_beat,
    to_ledger,
    to_address,
    to_position,
)


@contextmanager
def known_nonces():
    """So that an input can be made before the reader says anything."""
    before = secrets.token_bytes
    secrets.token_bytes = lambda number=None: bytes(number or 32)
    try:
        yield
    finally:
        secrets.token_bytes = before


def read_one(seed: int) -> tuple[str, str]:
    """One input; returns who has read it, and what became of it."""
    draw = random.Random(seed)
    reader = READERS[seed % len(READERS)]
    with known_nonces():
        return reader.__name__, reader(draw)


def memory() -> tuple[float, float]:
    """MiB of Python's objects, and of the process at its largest."""
    gc.collect()
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return tracemalloc.get_traced_memory()[0] / 2**20, peak_kib / 1024


def num_open() -> int:
    """Open files and sockets of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def run(num_inputs: int, seed: int) -> Counter[tuple[str, str]]:
    """Feeds all inputs, and prints what became of them, the slowest and the memory."""
    found: Counter[tuple[str, str]] = Counter()
    slowest = (0.0, 0)
    warmup = min(1000, num_inputs // 10)
    tracemalloc.start()
    begin, before, files = time.perf_counter(), memory(), num_open()
    for number in range(num_inputs):
        if number == warmup:
            before, files = memory(), num_open()
        # A reader that hangs is shown and ends the run.
        faulthandler.dump_traceback_later(SLOWEST_S, exit=True)
        start = time.perf_counter()
        try:
            found[read_one(seed + number)] += 1
        except BaseException:
            print(f"input {seed + number} broke its reader", file=sys.stderr)
            raise
        slowest = max(slowest, (time.perf_counter() - start, seed + number))
    faulthandler.cancel_dump_traceback_later()
    report(found, time.perf_counter() - begin, slowest, before, memory())
    print(f"open files: {files} after the first {warmup}, {num_open()} at the end")
    tracemalloc.stop()
    return found


def report(
    found: Counter[tuple[str, str]],
    seconds: float,
    slowest: tuple[float, int],
    before: tuple[float, float],
    after: tuple[float, float],
) -> None:
    """Prints a line for each reader and outcome, then time and memory."""
    for (reader, outcome), number in sorted(found.items()):
        print(f"{reader:<16}{outcome:<22}{number:>8}")
    print(f"{found.total()} inputs in {seconds:.0f} s; the slowest took", end=" ")
    print(f"{1e3 * slowest[0]:.1f} ms (input {slowest[1]})")
    for name, first, last in zip(("objects", "process"), before, after, strict=True):
        print(f"{name}: {first:.2f} MiB before, {last:.2f} MiB after")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    run(arguments.inputs, arguments.seed)


if __name__ == "__main__":
    main()
