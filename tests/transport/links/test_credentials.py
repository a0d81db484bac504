"""The token: where it comes from, which ones are refused, and where none is needed."""

from pathlib import Path

import pytest

from lightning_adpsgd.transport.links.credentials import (
    AUTHORITY,
    CERTIFICATE,
    FOLDER,
    KEY,
    TOKEN,
    TOKEN_FILE,
    UNPROTECTED,
    BadCredentials,
    Certificates,
    Credentials,
    read_token,
)

SECRET = "0123456789abcdef"


def written(folder: Path, content: str, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(content)
    path.chmod(mode)
    return path


def test_a_token_comes_from_the_environment_or_from_a_file(tmp_path: Path) -> None:
    path = str(written(tmp_path, f"{SECRET}\n"))
    for environment in ({TOKEN: SECRET}, {TOKEN_FILE: path}):
        assert Credentials.from_environment(environment).token == SECRET.encode()
    assert Credentials.from_environment({}) == Credentials()


@pytest.mark.parametrize(
    ("length", "is_used"), [(15, False), (16, True), (4096, True), (4097, False)]
)
def test_a_token_has_16_to_4096_bytes(
    tmp_path: Path, length: int, is_used: bool
) -> None:
    token = "x" * length
    environments = {TOKEN: token}, {TOKEN_FILE: str(written(tmp_path, token))}
    for environment in environments:
        if is_used:
            found = Credentials.from_environment(environment)
            assert found == Credentials(token.encode())
        else:
            with pytest.raises(BadCredentials, match=f"bytes, got {length};"):
                Credentials.from_environment(environment)


def test_certificates_stay_where_they_are_if_the_program_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {CERTIFICATE: "own.pem", KEY: "own.key", AUTHORITY: "all/job.pem"}
    found = Credentials.from_environment(names).tls
    monkeypatch.chdir("/")
    assert found == Certificates(*(tmp_path / name for name in names.values()))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(BadCredentials, match=f"mode {mode:04o}.: chmod 600"):
        read_token(written(tmp_path, SECRET, mode))


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty"), (" \n", "is empty"), ("short", "got 5"), ("x" * 9999, "got")],
)
def test_a_token_of_no_use_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    path = str(written(tmp_path, content))
    with pytest.raises(BadCredentials, match=message):
        Credentials.from_environment({TOKEN_FILE: path})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({TOKEN: ""}, "TOKEN is set and empty"),
        ({TOKEN_FILE: ""}, "TOKEN_FILE is set and empty"),
        ({FOLDER: ""}, "CREDENTIALS is set and empty"),
        ({TOKEN: "short"}, "16 to 4096 bytes, got 5"),
        ({TOKEN: SECRET, TOKEN_FILE: "there"}, "not both"),
        ({TOKEN_FILE: "there"}, "cannot read the token: .*there"),
        ({CERTIFICATE: "own.pem"}, "TLS needs .*_KEY, .*_AUTHORITY beside"),
    ],
)
def test_an_environment_of_no_use_is_refused(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(BadCredentials, match=message):
        Credentials.from_environment(environment)


def test_the_token_is_not_shown() -> None:
    assert SECRET not in repr(Credentials(SECRET.encode()))


def test_a_proof_is_of_one_token_and_one_content() -> None:
    ours, others = Credentials(SECRET.encode()), Credentials(SECRET[::-1].encode())
    proof = ours.proof(b"label", b"content")
    assert ours.accepts(proof, b"label", b"content")
    assert not ours.accepts(proof, b"label", b"contend")
    assert not others.accepts(proof, b"label", b"content")
    assert not ours.accepts(b"", b"label", b"content")


def test_without_a_token_and_certificates_no_link_leaves_the_host() -> None:
    there = "192.0.2.1"
    Credentials().check_address("127.0.0.1")
    with pytest.raises(BadCredentials, match=f"192.0.2.1 .*{UNPROTECTED}=1"):
        Credentials().check_address(there)
    with pytest.raises(BadCredentials, match=r"no TLS .*adpsgd credentials --out"):
        Credentials(SECRET.encode()).check_address(there)
    Credentials.from_environment({UNPROTECTED: "1"}).check_address(there)


@pytest.mark.parametrize("value", ["0", "", "yes"])
def test_only_a_one_says_that_links_are_unprotected(value: str) -> None:
    assert not Credentials.from_environment({UNPROTECTED: value}).unprotected
