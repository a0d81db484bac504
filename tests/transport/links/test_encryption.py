"""TLS around a link, with certificates that are made on the spot."""

import shutil
import socket
import ssl
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_adpsgd.__main__ import main
from lightning_adpsgd.transport.base import PeerLost
from lightning_adpsgd.transport.links.credentials import (
    AUTHORITY,
    CERTIFICATE,
    FOLDER,
    KEY,
    TOKEN_FILE,
    BadCredentials,
    Certificates,
    Credentials,
)
from lightning_adpsgd.transport.links.handshake import Refused
from lightning_adpsgd.transport.links.issuing import issue
from lightning_adpsgd.transport.links.transport import LinkTransport
from tests.helpers import PATIENCE, PATIENCE_S, together, until
from tests.transport.links.ends import LOOPBACK, TOKEN, info, linked, tcp_pair

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl makes the certificates"
)


def openssl(folder: Path, command: str) -> None:
    subprocess.run(
        ["openssl", *command.split()], cwd=folder, check=True, capture_output=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a member's certificate by it, and one that signed itself."""
    path = tmp_path_factory.mktemp("certificates")
    new = "req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 2"
    openssl(path, f"{new} -keyout ca.key -out ca.pem -subj /CN=job")
    openssl(path, f"{new} -keyout alien.key -out alien.pem -subj /CN=alien")
    request = "req -nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256"
    openssl(path, f"{request} -keyout member.key -out member.csr -subj /CN=member")
    openssl(
        path,
        "x509 -req -in member.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
        "-out member.pem",
    )
    return path


def certificates(folder: Path, name: str = "member") -> Certificates:
    return Certificates(
        folder / f"{name}.pem", folder / f"{name}.key", folder / "ca.pem"
    )


def with_tls(folder: Path, name: str = "member") -> Credentials:
    return replace(TOKEN, tls=certificates(folder, name))


def test_messages_cross_both_ways_and_are_not_to_be_read(folder: Path) -> None:
    rows = torch.randn(2, 1 << 20)

    def cross(transport: LinkTransport) -> torch.Tensor:
        into = torch.empty(1 << 20)
        peer = 1 - transport.index
        receive = transport.post_receive(peer, 0, into)
        transport.post_send(peer, 0, rows[transport.index]).wait(PATIENCE)
        receive.wait(PATIENCE)
        return into

    with linked(2, [with_tls(folder)]) as transports:
        got = together([lambda t=t: cross(t) for t in transports])
    assert torch.equal(torch.stack(got), rows.flip(0))


@pytest.mark.parametrize("old_side", ["dialer", "listener"])
def test_an_end_that_offers_an_older_tls_is_refused(
    folder: Path, old_side: str
) -> None:
    sides = {"dialer": False, "listener": True}
    contexts = {name: certificates(folder).context(sides[name]) for name in sides}
    contexts[old_side].minimum_version = ssl.TLSVersion.TLSv1_2
    contexts[old_side].maximum_version = ssl.TLSVersion.TLSv1_2

    def refused(name: str, sock: socket.socket) -> None:
        wrapped = contexts[name].wrap_socket(
            sock, server_side=sides[name], do_handshake_on_connect=False
        )
        with wrapped, pytest.raises(ssl.SSLError):
            wrapped.do_handshake()

    with tcp_pair() as (first, second):
        together(
            [lambda: refused("dialer", first), lambda: refused("listener", second)]
        )


def test_an_end_that_goes_is_noticed_through_tls(folder: Path) -> None:
    with linked(2, [with_tls(folder)]) as (first, second):
        receive = first.post_receive(1, 0, torch.zeros(1))
        second.close()
        with pytest.raises(PeerLost, match="lost super-learner 1"):
            receive.wait(PATIENCE)


def test_what_was_sent_before_the_end_arrives_through_tls(folder: Path) -> None:
    into = torch.zeros(1)
    with linked(2, [with_tls(folder)]) as (first, second):
        second.post_send(0, 1, torch.ones(1)).wait(PATIENCE)
        second.close()
        first.post_receive(1, 1, into).wait(PATIENCE)
    assert into.item() == 1


@pytest.mark.parametrize(
    ("dialer", "listener"),
    [("alien", "member"), ("member", "alien"), (None, "member"), ("member", None)],
)
def test_an_end_without_a_certificate_of_the_authority_is_turned_away(
    folder: Path, dialer: str | None, listener: str | None
) -> None:
    """It has the token, which alone is not enough."""
    ends = [with_tls(folder, name) if name else TOKEN for name in (dialer, listener)]
    second = LinkTransport(info(1), ends[1])
    door = second.listen(LOOPBACK, lambda number: None)
    first = LinkTransport(info(0), ends[0])
    with pytest.raises(PeerLost):
        first.connect(1, door.address)
    until(lambda: sum(door.turned_away.values()) == 1, "its own notice")
    door.close()


def test_the_token_never_crosses_and_nothing_else_in_the_clear(folder: Path) -> None:
    """An ear on the wire hears neither the token nor, with TLS, what the ends are."""
    for credentials, hears_info in ((TOKEN, True), (with_tls(folder), False)):
        heard = overheard(credentials)
        assert TOKEN.token not in heard
        assert (b"a job" in heard) is hears_info


def overheard(credentials: Credentials) -> bytes:
    second = LinkTransport(info(1), credentials)
    door = second.listen(LOOPBACK, lambda number: None)
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def relay() -> None:
            near, _ = server.accept()
            far = socket.create_connection(door.address)
            with near, far:
                together(
                    [
                        lambda: pass_on(near, far, heard),
                        lambda: pass_on(far, near, heard),
                    ]
                )

        def dial() -> None:
            first = LinkTransport(info(0), credentials)
            host, port = server.getsockname()
            with pytest.raises(Refused, match="a relay is between the two"):
                first.connect(1, type(LOOPBACK)(host, port))
            first.close()
            second.close()

        together([relay, dial])
    door.close()
    return bytes(heard)


def pass_on(source: socket.socket, target: socket.socket, heard: bytearray) -> None:
    source.settimeout(PATIENCE_S)
    while data := source.recv(1 << 16):
        heard += data
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


def test_certificates_come_from_the_environment(folder: Path) -> None:
    path = folder / "token"
    path.write_bytes(TOKEN.token)
    path.chmod(0o600)
    own = certificates(folder)
    environment = {
        TOKEN_FILE: str(path),
        CERTIFICATE: str(own.certificate),
        KEY: str(own.key),
        AUTHORITY: str(own.authority),
    }
    assert Credentials.from_environment(environment) == with_tls(folder)


def test_certificates_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    transport = LinkTransport(info(0), replace(TOKEN, tls=certificates(tmp_path)))
    with pytest.raises(BadCredentials, match=r"cannot use .*ca\.pem"):
        transport.listen(LOOPBACK, lambda number: None)


def test_one_command_makes_all_that_links_beyond_the_host_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "credentials"
    assert main(["credentials", "--out", str(made)]) == 0
    assert FOLDER in capsys.readouterr().out
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()}
    assert set(modes) == {"token", "authority.pem", "member.pem", "member.key"}
    assert (modes["token"], modes["member.key"]) == (0o600, 0o600)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert len((made / "token").read_text().split()[0]) == 64  # 256 bits
    ours = Credentials.from_environment({FOLDER: str(made)})
    with linked(2, (ours,)) as (first, second):
        sent, came = torch.randn(1000), torch.zeros(1000)
        arrives = second.post_receive(0, 0, came)
        first.post_send(1, 0, sent).wait(PATIENCE)
        arrives.wait(PATIENCE)
        assert torch.equal(sent, came)
    # What is there stays: others may be using it.
    assert main(["credentials", "--out", str(made)]) == 2
    assert "exists" in capsys.readouterr().err


def test_credentials_that_cannot_be_made_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadCredentials, match="`openssl` is not installed here"):
        issue(tmp_path / "credentials", days=2)
    with pytest.raises(BadCredentials, match="`days` must be at least 1, got 0"):
        issue(tmp_path / "credentials", days=0)
    assert list(tmp_path.iterdir()) == []


def test_what_openssl_says_of_its_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, folder = tmp_path / "programs", tmp_path / "here"
    programs.mkdir()
    folder.mkdir()
    broken = programs / "openssl"
    broken.write_text("#!/bin/sh\necho no entropy >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    with pytest.raises(BadCredentials, match=r"`openssl req .* failed: no entropy"):
        issue(folder / "credentials", days=2)
    assert list(folder.iterdir()) == []


def test_a_folder_of_credentials_goes_with_none_of_the_others() -> None:
    with pytest.raises(BadCredentials, match=f"set {FOLDER} or {TOKEN_FILE}, not both"):
        Credentials.from_environment({FOLDER: "here", TOKEN_FILE: "there"})
