"""The credentials with which members of a job recognise one another.

The token is a secret that all members of a job share. It never crosses a link: each end
proves that it has the token (see `handshake`). With optional certificates, TLS encrypts
the connection.
"""

import hmac
import os
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_adpsgd.transport.network_interfaces import is_loopback

TOKEN, TOKEN_FILE = "LIGHTNING_ADPSGD_TOKEN", "LIGHTNING_ADPSGD_TOKEN_FILE"
CERTIFICATE = "LIGHTNING_ADPSGD_TLS_CERTIFICATE"
KEY = "LIGHTNING_ADPSGD_TLS_KEY"
AUTHORITY = "LIGHTNING_ADPSGD_TLS_AUTHORITY"
UNPROTECTED = "LIGHTNING_ADPSGD_UNPROTECTED"
FOLDER = "LIGHTNING_ADPSGD_CREDENTIALS"
"""The variable that names a folder with all of these, as `issuing` makes it."""

TOKEN_NAME, AUTHORITY_FILE = "token", "authority.pem"
CERTIFICATE_FILE, KEY_FILE = "member.pem", "member.key"

_SHORTEST, _LONGEST = 16, 4096
_HOW = "make one with `python -c 'import secrets; print(secrets.token_hex(32))'`"


class BadCredentials(ValueError):
    """A token or certificate cannot be used; the message gives the remedy."""


@dataclass(frozen=True)
class Credentials:
    """What a member proves to others, and demands of them.

    Args:
        token: secret that all members share; empty: any connection is admitted.
        tls: certificate files; None: connections are not encrypted.
        unprotected: whether links may leave the host without token and TLS.

    Raises:
        BadCredentials: The token is too short or too long.
    """

    token: bytes = field(default=b"", repr=False)
    tls: "Certificates | None" = None
    unprotected: bool = False

    def __post_init__(self) -> None:
        if self.token and not _SHORTEST <= len(self.token) <= _LONGEST:
            raise BadCredentials(
                f"a token must have {_SHORTEST} to {_LONGEST} bytes, got "
                f"{len(self.token)}; {_HOW}"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Credentials":
        """Reads environment variables; see docs/security.md.

        Raises:
            BadCredentials: A value is malformed, unreadable or open to others.
        """
        for name in (FOLDER, TOKEN, TOKEN_FILE):
            if environment.get(name) == "":
                raise BadCredentials(f"{name} is set and empty; unset it")
        environment = {**environment, **_files_of_folder(environment)}
        return cls(
            _token_of(environment),
            _certificates_of(environment),
            environment.get(UNPROTECTED) == "1",
        )

    def check_address(self, host: str) -> None:
        """Raises `BadCredentials` if these do not protect the links of an address.

        A link beyond this host needs TLS too. A token alone proves who is there when a
        connection is made, but not who sends the data that follow. Certificates that
        cannot be used are refused on any link.
        """
        if self.tls is not None:
            self.tls.context(server_side=True)
        if (self.token and self.tls) or self.unprotected or is_loopback(host):
            return
        absent = "are no TLS certificates" if self.token else "is no token"
        raise BadCredentials(
            f"there {absent} and {host} is not a loopback "
            "address, so others could read and change the weights on their way. "
            "Make both with `python -m lightning_adpsgd credentials --out FOLDER`, "
            f"copy the folder to all islands and name it in {FOLDER}; or set "
            f"{UNPROTECTED}=1 on a network that only trusted users reach"
        )

    def proof(self, *parts: bytes) -> bytes:
        """The HMAC-SHA256 of the parts; all but the last must have a fixed length."""
        return hmac.digest(self.token, b"".join(parts), "sha256")

    def accepts(self, proof: bytes, *parts: bytes) -> bool:
        """Whether this is the correct proof, compared in constant time."""
        return hmac.compare_digest(proof, self.proof(*parts))


@dataclass(frozen=True)
class Certificates:
    """The TLS files in PEM format; each end demands a certificate of the authority.

    Args:
        authority: certificate of the authority that signs for members only.
    """

    certificate: Path
    key: Path
    authority: Path

    def context(self, server_side: bool) -> ssl.SSLContext:
        """Makes a TLS context; reads the files again, as they may have been renewed.

        Raises:
            BadCredentials: A file cannot be read or used.
        """
        side = ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The authority is the job's own, so that addresses may change.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        if server_side:
            # A connection that is closed with an unread ticket would be reset.
            context.num_tickets = 0
        try:
            context.load_verify_locations(self.authority)
            context.load_cert_chain(self.certificate, self.key, password="")
        except OSError as error:
            raise BadCredentials(
                f"cannot use certificate {self.certificate} with key {self.key} and "
                f"authority {self.authority}: {error}"
            ) from error
        return context


def _files_of_folder(environment: Mapping[str, str]) -> dict[str, str]:
    if (folder := environment.get(FOLDER)) is None:
        return {}
    names = {
        TOKEN_FILE: TOKEN_NAME,
        CERTIFICATE: CERTIFICATE_FILE,
        KEY: KEY_FILE,
        AUTHORITY: AUTHORITY_FILE,
    }
    if given := [name for name in (TOKEN, *names) if environment.get(name)]:
        raise BadCredentials(f"set {FOLDER} or {', '.join(given)}, not both")
    return {name: str(Path(folder, file)) for name, file in names.items()}


def _token_of(environment: Mapping[str, str]) -> bytes:
    token, path = environment.get(TOKEN), environment.get(TOKEN_FILE)
    if token is not None and path is not None:
        raise BadCredentials(f"set one of {TOKEN} and {TOKEN_FILE}, not both")
    if path is not None:
        return read_token(Path(path))
    return (token or "").encode()


def read_token(path: Path) -> bytes:
    """Reads the token from a file, without surrounding white space.

    Raises:
        BadCredentials: The file is absent, readable by others, empty or too long.
    """
    try:
        with path.open("rb") as file:
            # The mode of the opened file, whatever its name means by now.
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_LONGEST + 1)
    except OSError as error:
        raise BadCredentials(f"cannot read the token: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadCredentials(
            f"{path} holds a secret but is open to users other than its owner (mode "
            f"{stat.S_IMODE(mode):04o}): chmod 600 it, and make a new token"
        )
    if not content.strip():
        raise BadCredentials(f"{path} is empty; {_HOW}")
    return content.strip() if len(content) <= _LONGEST else content


def _certificates_of(environment: Mapping[str, str]) -> Certificates | None:
    names = (CERTIFICATE, KEY, AUTHORITY)
    given = [name for name in names if environment.get(name)]
    if not given:
        return None
    if len(given) < len(names):
        absent = ", ".join(name for name in names if name not in given)
        raise BadCredentials(f"TLS needs {absent} beside {', '.join(given)}")
    # They are read at each connection, when the working folder may have changed.
    return Certificates(*(Path(environment[name]).absolute() for name in names))
