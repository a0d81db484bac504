"""The handshake of a link: both ends prove that they have the token, then who they are.

    dialer -> listener   hello: mark, protocol, nonce a (32 random bytes)
    listener -> dialer   hello: mark, protocol, nonce b
    dialer -> listener   HMAC(token, "dialer" a b)
    listener -> dialer   a byte, and HMAC(token, "listener" a b)
    dialer -> listener   letter: length, JSON, HMAC(token, "dialer's letter" a b JSON)
    listener -> dialer   letter, in the same way, with a refusal or without

The token never crosses. A proof is of use in one handshake, for one role. Before a
dialer has proved that it has the token it may send 74 bytes, of a fixed form, and
nothing is allocated for it; after that a letter may be as long as `LONGEST_LETTER`.
"""

import json
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.links.facts import PROTOCOL, Facts, differences
from lightning_adpsgd.transport.links.sockets import Deadline, receive_all, send_all

LONGEST_LETTER = 16 << 20
"""Bytes; the names and shapes of a model of 100,000 tensors take less."""

_HELLO, _LENGTH, _PROOF_BYTES = struct.Struct("!8sH32s"), struct.Struct("!I"), 32
_MARK = b"\xadPSGDlnk"
_ACCEPTED, _WRONG_TOKEN = b"\1", b"\0"
_DIALER, _LISTENER = b"dialer  ", b"listener"
_DIALERS_LETTER, _LISTENERS_LETTER = b"letter d", b"letter l"


class Refused(RuntimeError):
    """One end does not want this link, and says why; to try again is no use."""


class Malformed(RuntimeError):
    """What came is no handshake of a link."""


class _Session(NamedTuple):
    sock: socket.socket
    deadline: Deadline
    credentials: Credentials
    nonces: bytes  # the dialer's, then the listener's

    def proof(self, label: bytes, content: bytes = b"") -> bytes:
        return self.credentials.proof(label, self.nonces, content)

    def send(self, data: bytes) -> None:
        send_all(self.sock, data, self.deadline)

    def receive(self, num_bytes: int) -> bytes:
        return receive_all(self.sock, num_bytes, self.deadline)

    def accepts_proof(self, label: bytes, content: bytes = b"") -> bool:
        proof = self.receive(_PROOF_BYTES)
        return self.credentials.accepts(proof, label, self.nonces, content)

    def send_letter(self, label: bytes, letter: dict[str, Any]) -> None:
        text = json.dumps(letter).encode()
        if len(text) > LONGEST_LETTER:
            raise Refused(
                f"our facts take {len(text)} bytes, more than {LONGEST_LETTER}"
            )
        self.send(_LENGTH.pack(len(text)) + text + self.proof(label, text))

    def receive_letter(self, label: bytes) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self.receive(_LENGTH.size))
        if length > LONGEST_LETTER:
            raise Malformed(f"a letter of {length} bytes, more than {LONGEST_LETTER}")
        text = self.receive(length)
        if not self.accepts_proof(label, text):
            raise Malformed("a letter was changed on its way")
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise Malformed(f"a letter that cannot be read: {error}") from error


def greet_listener(
    sock: socket.socket,
    deadline: Deadline,
    credentials: Credentials,
    mine: Facts,
    wanted: int,
) -> Facts:
    """The dialer's part; returns who the listener is.

    Args:
        sock: Connected.
        deadline: Of the whole handshake.
        credentials: What to prove and demand.
        mine: Who dials.
        wanted: The member that is meant to listen.

    Raises:
        Refused: The ends do not fit together; with the facts of both.
        Malformed: The listener is something else.
        OSError: The connection broke, or the time is over.
    """
    nonce = secrets.token_bytes(32)
    send_all(sock, _HELLO.pack(_MARK, PROTOCOL, nonce), deadline)
    session = _Session(sock, deadline, credentials, nonce + _hear_hello(sock, deadline))
    session.send(session.proof(_DIALER))
    if session.receive(1) != _ACCEPTED:
        raise Refused("its token is another one than ours, or only one of us has one")
    if not session.accepts_proof(_LISTENER):
        raise Refused("it could not prove that it has our token")
    session.send_letter(_DIALERS_LETTER, {"facts": mine.to_dict(), "wanted": wanted})
    letter = session.receive_letter(_LISTENERS_LETTER)
    theirs = _facts_in(letter)
    if reason := str(letter.get("refusal", "")) or _objection(mine, theirs, wanted):
        raise Refused(reason)
    return theirs


def greet_dialer(
    sock: socket.socket,
    deadline: Deadline,
    credentials: Credentials,
    mine: Facts,
    admit: Callable[[Facts], str],
) -> Facts:
    """The listener's part; returns who the dialer is.

    Args:
        sock: Connected.
        deadline: Of the whole handshake.
        credentials: What to prove and demand.
        mine: Who listens.
        admit: Why the dialer is not let in though all else fits; empty if it is.

    Raises:
        Refused: The ends do not fit together; with the facts of both.
        Malformed: The dialer is something else.
        OSError: The connection broke, or the time is over.
    """
    nonce = secrets.token_bytes(32)
    # It speaks first: whoever only looks for open ports learns nothing.
    theirs_nonce = _hear_hello(sock, deadline, answer=nonce)
    session = _Session(sock, deadline, credentials, theirs_nonce + nonce)
    if not session.accepts_proof(_DIALER):
        session.send(_WRONG_TOKEN)
        raise Refused("its token is another one than ours, or only one of us has one")
    session.send(_ACCEPTED + session.proof(_LISTENER))
    letter = session.receive_letter(_DIALERS_LETTER)
    theirs, wanted = _facts_in(letter), letter.get("wanted")
    reason = _objection(theirs, mine, wanted) or admit(theirs)
    session.send_letter(_LISTENERS_LETTER, {"facts": mine.to_dict(), "refusal": reason})
    if reason:
        raise Refused(f"{theirs}: {reason}")
    return theirs


def _hear_hello(sock: socket.socket, deadline: Deadline, answer: bytes = b"") -> bytes:
    """The other end's nonce; ours is sent in return where the other spoke first."""
    hello = receive_all(sock, _HELLO.size, deadline)
    mark, protocol, nonce = _HELLO.unpack(hello)
    if mark != _MARK:
        raise Malformed(f"it begins with {mark!r}, which is no link of ours")
    if answer:
        send_all(sock, _HELLO.pack(_MARK, PROTOCOL, answer), deadline)
    if protocol != PROTOCOL:
        raise Refused(
            f"its links speak protocol {protocol} and ours {PROTOCOL}: install the "
            "same version of lightning_adpsgd everywhere"
        )
    return nonce


def _facts_in(letter: dict[str, Any]) -> Facts:
    try:
        return Facts.from_dict(letter.get("facts"))
    except ValueError as error:
        raise Malformed(str(error)) from error


def _objection(dialer: Facts, listener: Facts, wanted: object) -> str:
    """Why the two do not fit together, in the dialer's view; empty if they do."""
    try:
        found = differences(dialer, listener)
    except ValueError:
        return "models differ, and the layout of one cannot be read"
    if wanted != listener.member:
        found.append(f"{listener} listens where super-learner {wanted!r} was expected")
    return "; ".join(found)
