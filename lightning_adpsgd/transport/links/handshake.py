"""The handshake of a link: both ends prove their token, then tell who they are.

    dialer -> listener   hello: mark, protocol, nonce a (32 random bytes)
    listener -> dialer   hello: mark, protocol, nonce b
    dialer -> listener   HMAC(token, "dialer" a b)
    listener -> dialer   a byte, and HMAC(token, "listener" a b)
    dialer -> listener   info: length, JSON, HMAC(token, "dialer's info" a b JSON)
    listener -> dialer   info, in the same way, with a refusal or without

The token never crosses. A proof is valid in one handshake, for one role. Before it has
proved that it has the token, a dialer may send 74 bytes of a fixed form, and nothing is
allocated for it. After that its info message may have up to `LONGEST_INFO` bytes.
"""

import json
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.links.peer_info import (
    PROTOCOL,
    PeerInfo,
    Wanted,
    differences,
)
from lightning_adpsgd.transport.links.sockets import Deadline, receive_all, send_all

LONGEST_INFO = 16 << 20
"""Bytes; the names and shapes of a model of 100,000 tensors take less."""

_HELLO, _LENGTH, _PROOF_BYTES = struct.Struct("!8sH32s"), struct.Struct("!I"), 32
_MARK = b"\xadPSGDlnk"
_ACCEPTED, _WRONG_TOKEN = b"\1", b"\0"
_DIALER, _LISTENER = b"dialer  ", b"listener"
_DIALERS_INFO, _LISTENERS_INFO = b"letter d", b"letter l"
_OTHER_TOKEN = "its token differs from ours, or only one of us has a token"


class Refused(RuntimeError):
    """One end refuses this link, with a reason; trying again does not help."""


class Malformed(RuntimeError):
    """The received bytes are not the handshake of a link."""


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

    def send_info(self, label: bytes, mine: PeerInfo, **others: Any) -> None:
        text = json.dumps({"facts": asdict(mine), **others}).encode()
        if len(text) > LONGEST_INFO:
            raise Refused(f"our info takes {len(text)} bytes, more than {LONGEST_INFO}")
        self.send(_LENGTH.pack(len(text)) + text + self.proof(label, text))

    def receive_info(self, label: bytes) -> tuple[PeerInfo, dict[str, Any]]:
        (length,) = _LENGTH.unpack(self.receive(_LENGTH.size))
        if length > LONGEST_INFO:
            raise Malformed(
                f"an info message of {length} bytes, more than {LONGEST_INFO}"
            )
        text = self.receive(length)
        if not self.accepts_proof(label, text):
            raise Malformed("an info message was changed on its way")
        try:
            message = dict(json.loads(text))
            return PeerInfo.from_dict(message.get("facts")), message
        except (ValueError, TypeError, RecursionError) as error:
            remedy = "install the same version of lightning_adpsgd everywhere"
            raise Malformed(f"an invalid info message: {error}; {remedy}") from error


def greet_listener(
    sock: socket.socket,
    deadline: Deadline,
    credentials: Credentials,
    mine: PeerInfo,
    wanted: Wanted,
) -> PeerInfo:
    """Performs the dialer's part; returns the listener's info.

    Raises:
        Refused: The ends do not fit together; the message says in what.
        Malformed: The listener does not speak this protocol.
        OSError: The connection broke, or the time ran out.
    """
    nonce = secrets.token_bytes(32)
    send_all(sock, _HELLO.pack(_MARK, PROTOCOL, nonce), deadline)
    nonces = nonce + _receive_hello(sock, deadline)
    session = _Session(sock, deadline, credentials, nonces)
    session.send(session.proof(_DIALER))
    if session.receive(1) != _ACCEPTED:
        raise Refused(_OTHER_TOKEN)
    if not session.accepts_proof(_LISTENER):
        raise Refused("it could not prove that it has our token")
    session.send_info(_DIALERS_INFO, mine, wanted=wanted)
    theirs, message = session.receive_info(_LISTENERS_INFO)
    refusal = str(message.get("refusal", ""))
    if reason := refusal or _objection(mine, theirs, wanted):
        raise Refused(reason)
    return theirs


def greet_dialer(
    sock: socket.socket,
    deadline: Deadline,
    credentials: Credentials,
    mine: PeerInfo,
    address: str = "",
    objection: Callable[[PeerInfo], str] = lambda dialer: "",
) -> PeerInfo:
    """Performs the listener's part, with the same errors; returns the dialer's info.

    Args:
        address: address at which the listener listens; empty: any.
        objection: gives a further reason to refuse a dialer, or an empty text.
    """
    nonce = secrets.token_bytes(32)
    # The dialer speaks first: a scanner of open ports learns nothing.
    nonces = _receive_hello(sock, deadline, answer=nonce) + nonce
    session = _Session(sock, deadline, credentials, nonces)
    if not session.accepts_proof(_DIALER):
        session.send(_WRONG_TOKEN)
        raise Refused(_OTHER_TOKEN)
    session.send(_ACCEPTED + session.proof(_LISTENER))
    theirs, message = session.receive_info(_DIALERS_INFO)
    wanted = Wanted.from_row(message.get("wanted"))
    reason = _objection(theirs, mine, wanted, address) or objection(theirs)
    session.send_info(_LISTENERS_INFO, mine, refusal=reason)
    if reason:
        raise Refused(f"{theirs}: {reason}")
    return theirs


def _receive_hello(
    sock: socket.socket, deadline: Deadline, answer: bytes = b""
) -> bytes:
    hello = receive_all(sock, _HELLO.size, deadline)
    mark, protocol, nonce = _HELLO.unpack(hello)
    if mark != _MARK:
        raise Malformed(f"it begins with {mark!r}, which is not our protocol")
    if answer:
        send_all(sock, _HELLO.pack(_MARK, PROTOCOL, answer), deadline)
    if protocol != PROTOCOL:
        raise Refused(
            f"its links speak protocol {protocol} and ours {PROTOCOL}: install the "
            "same version of lightning_adpsgd everywhere"
        )
    return nonce


def _objection(
    dialer: PeerInfo, listener: PeerInfo, wanted: Wanted, address: str = ""
) -> str:
    """The dialer's reason why the two ends do not match; empty if they do."""
    try:
        found = differences(dialer, listener)
    except ValueError:
        return "models differ, and the layout of one cannot be read"
    found.append(wanted.objection(listener, address))
    return "; ".join(filter(None, found))
