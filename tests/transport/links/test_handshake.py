"""Both ends prove that they have the token, and then say who they are."""

import json
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

import pytest

from lightning_adpsgd.transport.links import handshake
from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.links.handshake import (
    LONGEST_INFO,
    Malformed,
    Refused,
    greet_dialer,
    greet_listener,
)
from lightning_adpsgd.transport.links.peer_info import PROTOCOL, PeerInfo, Wanted
from lightning_adpsgd.transport.links.sockets import Deadline
from tests.helpers import PATIENCE_S, together
from tests.transport.links.ends import TOKEN, info, tcp_pair

HELLO = struct.Struct("!8sH32s")
OTHER_TOKEN = Credentials(b"another token!!!")


def greet(
    dialer: PeerInfo,
    listener: PeerInfo,
    wanted: int = 1,
    credentials: tuple[Credentials, Credentials] = (TOKEN, TOKEN),
) -> list[PeerInfo | str]:
    """Whom each end has met, or why it does not want to."""

    def told(action: Callable[[], PeerInfo]) -> PeerInfo | str:
        try:
            return action()
        except Refused as error:
            return str(error)

    with tcp_pair() as (first, second):
        return together(
            [
                lambda: told(
                    lambda: greet_listener(
                        first,
                        Deadline(PATIENCE_S),
                        credentials[0],
                        dialer,
                        Wanted(wanted),
                    )
                ),
                lambda: told(
                    lambda: greet_dialer(
                        second, Deadline(PATIENCE_S), credentials[1], listener
                    )
                ),
            ]
        )


def test_both_ends_learn_who_the_other_is() -> None:
    assert greet(info(0), info(1)) == [info(1), info(0)]


def test_ends_without_a_token_meet_as_well() -> None:
    both = (Credentials(), Credentials())
    assert greet(info(0), info(1), credentials=both) == [info(1), info(0)]


@pytest.mark.parametrize(
    "credentials",
    [(TOKEN, OTHER_TOKEN), (TOKEN, Credentials()), (Credentials(), TOKEN)],
)
def test_another_token_is_refused_at_both_ends(
    credentials: tuple[Credentials, Credentials],
) -> None:
    for said in greet(info(0), info(1), credentials=credentials):
        assert isinstance(said, str)
        assert "its token differs from ours" in said


def test_a_difference_is_told_to_both_ends_with_what_both_have() -> None:
    for said in greet(info(0, job="speech"), info(1, job="vision")):
        assert isinstance(said, str)
        assert "`job` is 'speech' here and 'vision' there" in said


@pytest.mark.parametrize("swapped", [False, True])
def test_another_version_is_told_to_both_ends(swapped: bool) -> None:
    ours, theirs = info(1, version="1.0"), info(0, version="99.0")
    if swapped:
        ours, theirs = info(1, version="99.0"), info(0, version="1.0")
    for said in greet(theirs, ours):
        assert isinstance(said, str)
        assert "'1.0'" in said
        assert "'99.0'" in said


def test_a_model_whose_layout_cannot_be_read_is_refused() -> None:
    for said in greet(info(0, model="nonsense"), info(1)):
        assert isinstance(said, str)
        assert "models differ" in said


def test_a_listener_that_is_another_member_is_refused() -> None:
    for said in greet(info(0), info(2), wanted=1):
        assert isinstance(said, str)
        assert "listens where super-learner 1 was expected" in said


def dialer_says(*pieces: bytes) -> str:
    """What a listener makes of a dialer that says this and closes."""
    with tcp_pair() as (first, second):
        for piece in pieces:
            first.sendall(piece)
        first.shutdown(socket.SHUT_WR)
        with pytest.raises((Refused, Malformed, OSError)) as caught:
            greet_dialer(second, Deadline(PATIENCE_S), TOKEN, info(1))
        return str(caught.value)


def good_hello(protocol: int = PROTOCOL) -> bytes:
    return HELLO.pack(b"\xadPSGDlnk", protocol, bytes(32))


def test_what_is_no_handshake_gets_no_answer() -> None:
    with tcp_pair() as (first, second):
        first.sendall(b"GET / HTTP/1.1\r\nHost: gossip.example\r\n\r\n" * 2)
        with pytest.raises(Malformed, match="begins with b'GET / HT'"):
            greet_dialer(second, Deadline(PATIENCE_S), TOKEN, info(1))
        second.shutdown(socket.SHUT_WR)
        assert first.recv(1) == b""


def test_another_protocol_is_refused_at_both_ends_by_number() -> None:
    assert f"protocol 7 and ours {PROTOCOL}" in dialer_says(good_hello(protocol=7))
    with tcp_pair() as (first, second):
        second.sendall(good_hello(protocol=7))
        with pytest.raises(Refused, match=f"protocol 7 and ours {PROTOCOL}"):
            greet_listener(first, Deadline(PATIENCE_S), TOKEN, info(0), Wanted(1))


def test_a_hello_that_ends_early_is_a_loss() -> None:
    assert "has closed the connection" in dialer_says(good_hello()[:20])


def test_no_nonce_is_used_twice_by_either_end() -> None:
    """Or a proof that was overheard once would be valid again."""
    dialers, listeners = (
        {nonce_of(greet) for _ in range(3)}
        for greet in (
            lambda sock: greet_listener(
                sock, Deadline(PATIENCE_S), TOKEN, info(0), Wanted(1)
            ),
            lambda sock: greet_dialer(sock, Deadline(PATIENCE_S), TOKEN, info(1)),
        )
    )
    assert len(dialers | listeners) == 6


def nonce_of(greet: Callable[[socket.socket], PeerInfo]) -> bytes:
    """What an end says in its hello to one that says no more."""
    with tcp_pair() as (first, second):
        second.sendall(good_hello())
        second.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError):
            greet(first)
        return second.recv(HELLO.size, socket.MSG_WAITALL)[-32:]


def test_a_proof_out_of_an_earlier_handshake_is_of_no_use() -> None:
    """A listener on the wire that repeats what the dialer said is refused."""
    with tcp_pair() as (first, second):
        first.sendall(good_hello())
        session = second.recv(100)
        second.sendall(good_hello())
        nonces = session[-32:] + first.recv(100)[-32:]
    replayed = TOKEN.proof(b"dialer  ", nonces)
    assert "its token differs" in dialer_says(good_hello(), replayed)


def test_a_dialers_own_proof_sent_back_is_not_a_listeners() -> None:
    with tcp_pair() as (first, second):

        def mirror() -> None:
            hello = second.recv(HELLO.size, socket.MSG_WAITALL)
            second.sendall(hello)
            second.sendall(b"\1" + second.recv(32, socket.MSG_WAITALL))

        def dial() -> None:
            with pytest.raises(Refused, match="could not prove"):
                greet_listener(first, Deadline(PATIENCE_S), TOKEN, info(0), Wanted(1))

        together([mirror, dial])


@pytest.mark.parametrize("answer", [b"\0", b"\2", b"\xff"])
def test_only_one_byte_says_that_the_dialers_proof_was_accepted(answer: bytes) -> None:
    with tcp_pair() as (first, second):

        def listen() -> None:
            nonces = second.recv(HELLO.size, socket.MSG_WAITALL)[-32:] + bytes(32)
            second.sendall(good_hello())
            second.recv(32, socket.MSG_WAITALL)
            second.sendall(answer + TOKEN.proof(b"listener", nonces))
            second.shutdown(socket.SHUT_WR)

        def dial() -> None:
            with pytest.raises(Refused, match="its token differs"):
                greet_listener(first, Deadline(PATIENCE_S), TOKEN, info(0), Wanted(1))

        together([listen, dial])


def proved_dialer_says(*pieces: Callable[[Callable[..., bytes]], bytes]) -> str:
    """The same of a dialer that has the token; pieces are made with its proofs."""
    with tcp_pair() as (first, second):

        def dial() -> None:
            first.sendall(good_hello())
            nonce = first.recv(HELLO.size, socket.MSG_WAITALL)[-32:]

            def proof(label: bytes, content: bytes = b"") -> bytes:
                return TOKEN.proof(label, bytes(32), nonce, content)

            first.sendall(proof(b"dialer  "))
            for piece in pieces:
                first.sendall(piece(proof))
            first.shutdown(socket.SHUT_WR)

        def listen() -> str:
            with pytest.raises((Refused, Malformed, OSError)) as caught:
                greet_dialer(second, Deadline(PATIENCE_S), TOKEN, info(1))
            return str(caught.value)

        return str(together([dial, listen])[1])


def info_message(text: bytes) -> Callable[[Callable[..., bytes]], bytes]:
    return lambda proof: struct.pack("!I", len(text)) + text + proof(b"letter d", text)


def test_an_info_message_is_of_bounded_length() -> None:
    said = proved_dialer_says(lambda proof: struct.pack("!I", 0xFFFFFFFF))
    assert f"an info message of {0xFFFFFFFF} bytes, more than {LONGEST_INFO}" in said


@pytest.mark.parametrize("shorter_by", [0, 1])
def test_no_end_says_more_than_the_other_would_read(
    monkeypatch: pytest.MonkeyPatch, shorter_by: int
) -> None:
    facts = {"facts": asdict(info(0)), "wanted": [1, "", ""]}
    longest = len(json.dumps(facts)) - shorter_by
    monkeypatch.setattr(handshake, "LONGEST_INFO", longest)
    with tcp_pair() as (first, second):

        def dial() -> str:
            try:
                greet_listener(first, Deadline(PATIENCE_S), TOKEN, info(0), Wanted(1))
            except Refused as error:
                first.shutdown(socket.SHUT_WR)
                return str(error)
            return ""

        def listen() -> None:
            with suppress(ConnectionResetError):
                greet_dialer(second, Deadline(PATIENCE_S), TOKEN, info(1))

        said = together([dial, listen])[0]
    expected = f"our info takes {longest + 1} bytes, more than {longest}"
    assert said == (expected if shorter_by else "")


def test_an_info_message_that_was_changed_on_its_way_is_refused() -> None:
    text = json.dumps({"facts": asdict(info(0)), "wanted": [1, "", ""]}).encode()
    said = proved_dialer_says(
        lambda proof: struct.pack("!I", len(text)) + text + proof(b"letter d", b"?")
    )
    assert "changed on its way" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "an invalid info message"),
        (b"\xff\xfe", "an invalid info message"),
        (b"[1]", "an invalid info message"),
        (b"[" * 100_000, "an invalid info message"),
        (b"{}", "must have the fields"),
        (b'{"facts": {}}', "must have the fields"),
    ],
)
def test_an_info_message_without_sense_is_refused(text: bytes, message: str) -> None:
    assert message in proved_dialer_says(info_message(text))
