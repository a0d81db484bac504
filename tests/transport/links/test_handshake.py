"""Both ends prove that they have the token, and then say who they are."""

import json
import socket
import struct
from collections.abc import Callable

import pytest

from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.links.facts import Facts
from lightning_adpsgd.transport.links.handshake import (
    LONGEST_LETTER,
    Malformed,
    Refused,
    greet_dialer,
    greet_listener,
)
from lightning_adpsgd.transport.links.sockets import Deadline
from tests.helpers import PATIENCE_S, together
from tests.transport.links.ends import TOKEN, facts, tcp_pair

HELLO = struct.Struct("!8sH32s")
OTHER_TOKEN = Credentials(b"another token!!!")


def greet(
    dialer: Facts,
    listener: Facts,
    wanted: int = 1,
    credentials: tuple[Credentials, Credentials] = (TOKEN, TOKEN),
    admit: Callable[[Facts], str] = lambda facts: "",
) -> list[Facts | str]:
    """Whom each end has met, or why it does not want to."""

    def told(action: Callable[[], Facts]) -> Facts | str:
        try:
            return action()
        except Refused as error:
            return str(error)

    with tcp_pair() as (first, second):
        return together(
            [
                lambda: told(
                    lambda: greet_listener(
                        first, Deadline(PATIENCE_S), credentials[0], dialer, wanted
                    )
                ),
                lambda: told(
                    lambda: greet_dialer(
                        second, Deadline(PATIENCE_S), credentials[1], listener, admit
                    )
                ),
            ]
        )


def test_both_ends_learn_who_the_other_is() -> None:
    assert greet(facts(0), facts(1)) == [facts(1), facts(0)]


def test_ends_without_a_token_meet_as_well() -> None:
    both = (Credentials(), Credentials())
    assert greet(facts(0), facts(1), credentials=both) == [facts(1), facts(0)]


@pytest.mark.parametrize(
    "credentials",
    [(TOKEN, OTHER_TOKEN), (TOKEN, Credentials()), (Credentials(), TOKEN)],
)
def test_another_token_is_refused_at_both_ends(
    credentials: tuple[Credentials, Credentials],
) -> None:
    for said in greet(facts(0), facts(1), credentials=credentials):
        assert isinstance(said, str)
        assert "its token is another one than ours" in said


def test_a_difference_is_told_to_both_ends_with_both_facts() -> None:
    for said in greet(facts(0, job="speech"), facts(1, job="vision")):
        assert isinstance(said, str)
        assert "`job` is 'speech' here and 'vision' there" in said


def test_a_model_whose_layout_cannot_be_read_is_refused() -> None:
    for said in greet(facts(0, model="nonsense"), facts(1)):
        assert isinstance(said, str)
        assert "models differ" in said


def test_a_listener_that_is_another_member_is_refused() -> None:
    for said in greet(facts(0), facts(2), wanted=1):
        assert isinstance(said, str)
        assert "listens where super-learner 1 was expected" in said


def test_whoever_knows_the_members_may_refuse_one() -> None:
    said = greet(facts(0), facts(1), admit=lambda theirs: f"{theirs} has left")
    for reason in said:
        assert isinstance(reason, str)
        assert "super-learner 0 (incarnation 'start 0') has left" in reason


def dialer_says(*pieces: bytes) -> str:
    """What a listener makes of a dialer that says this and closes."""
    with tcp_pair() as (first, second):
        for piece in pieces:
            first.sendall(piece)
        first.shutdown(socket.SHUT_WR)
        with pytest.raises((Refused, Malformed, OSError)) as caught:
            greet_dialer(second, Deadline(PATIENCE_S), TOKEN, facts(1), lambda _: "")
        return str(caught.value)


def good_hello(protocol: int = 1) -> bytes:
    return HELLO.pack(b"\xadPSGDlnk", protocol, bytes(32))


def test_what_is_no_handshake_gets_no_answer() -> None:
    with tcp_pair() as (first, second):
        first.sendall(b"GET / HTTP/1.1\r\nHost: gossip.example\r\n\r\n" * 2)
        with pytest.raises(Malformed, match="begins with b'GET / HT'"):
            greet_dialer(second, Deadline(PATIENCE_S), TOKEN, facts(1), lambda _: "")
        second.shutdown(socket.SHUT_WR)
        assert first.recv(1) == b""


def test_another_protocol_is_refused_at_both_ends_by_number() -> None:
    assert "protocol 7 and ours 1" in dialer_says(good_hello(protocol=7))
    with tcp_pair() as (first, second):
        second.sendall(good_hello(protocol=7))
        with pytest.raises(Refused, match="protocol 7 and ours 1"):
            greet_listener(first, Deadline(PATIENCE_S), TOKEN, facts(0), 1)


def test_a_hello_that_ends_early_is_a_loss() -> None:
    assert "has closed the connection" in dialer_says(good_hello()[:20])


def test_a_proof_out_of_an_earlier_handshake_is_of_no_use() -> None:
    """Whoever listens on the wire and repeats what the dialer said is refused."""
    with tcp_pair() as (first, second):
        first.sendall(good_hello())
        session = second.recv(100)
        second.sendall(good_hello())
        nonces = session[-32:] + first.recv(100)[-32:]
    replayed = TOKEN.proof(b"dialer  ", nonces)
    assert "token is another one" in dialer_says(good_hello(), replayed)


def test_a_dialers_own_proof_sent_back_is_not_a_listeners() -> None:
    with tcp_pair() as (first, second):

        def mirror() -> None:
            hello = second.recv(HELLO.size, socket.MSG_WAITALL)
            second.sendall(hello)
            second.sendall(b"\1" + second.recv(32, socket.MSG_WAITALL))

        def dial() -> None:
            with pytest.raises(Refused, match="could not prove"):
                greet_listener(first, Deadline(PATIENCE_S), TOKEN, facts(0), 1)

        together([mirror, dial])


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
                greet_dialer(
                    second, Deadline(PATIENCE_S), TOKEN, facts(1), lambda _: ""
                )
            return str(caught.value)

        return str(together([dial, listen])[1])


def letter(text: bytes) -> Callable[[Callable[..., bytes]], bytes]:
    return lambda proof: struct.pack("!I", len(text)) + text + proof(b"letter d", text)


def test_a_letter_may_not_be_of_any_length() -> None:
    said = proved_dialer_says(lambda proof: struct.pack("!I", 0xFFFFFFFF))
    assert f"a letter of {0xFFFFFFFF} bytes, more than {LONGEST_LETTER}" in said


def test_a_letter_that_was_changed_on_its_way_is_refused() -> None:
    text = json.dumps({"facts": facts(0).to_dict(), "wanted": 1}).encode()
    said = proved_dialer_says(
        lambda proof: struct.pack("!I", len(text)) + text + proof(b"letter d", b"?")
    )
    assert "changed on its way" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[1]", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"{}", "must have the fields"),
        (b'{"facts": {}}', "must have the fields"),
    ],
)
def test_a_letter_of_no_sense_is_refused(text: bytes, message: str) -> None:
    assert message in proved_dialer_says(letter(text))
