"""Makes the credentials of the islands of a job, in one folder.

The program `openssl` makes the certificates, because Python's library cannot.
"""

import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

from lightning_adpsgd.transport.links.credentials import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    TOKEN_NAME,
    BadCredentials,
)

_OPENSSL_S = 60.0
_KEY = "-nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256"


def issue(folder: Path, days: int) -> None:
    """Makes a token, an authority and one certificate, which all members share.

    The key of the authority is discarded, so no one can sign for this job again, and
    new credentials need a new folder. The folder is created whole or not at all, and
    only its owner can access it.

    Args:
        folder: folder to make; its parent must exist.
        days: number of days for which the certificate is valid, at least 1.

    Raises:
        BadCredentials: The folder exists, or `openssl` is absent or has failed.
    """
    if days < 1:
        raise BadCredentials(f"`days` must be at least 1, got {days}")
    if folder.exists():
        raise BadCredentials(
            f"{folder} exists, and would get other credentials than those in use: "
            "name another folder, or remove it first"
        )
    # A folder of `tempfile` is its owner's alone.
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        _write(made, days)
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made)
        raise


def _write(folder: Path, days: int) -> None:
    token = folder / TOKEN_NAME
    token.touch(0o600)
    token.write_text(secrets.token_hex(32) + "\n")
    _openssl(
        folder,
        f"req -x509 {_KEY} -days {days} -keyout authority.key -out {AUTHORITY_FILE} "
        "-subj /CN=lightning-adpsgd",
    )
    _openssl(folder, f"req {_KEY} -keyout {KEY_FILE} -out request.csr -subj /CN=member")
    _openssl(
        folder,
        f"x509 -req -in request.csr -CA {AUTHORITY_FILE} -CAkey authority.key "
        f"-set_serial 1 -days {days} -out {CERTIFICATE_FILE}",
    )
    for name in ("authority.key", "request.csr"):
        (folder / name).unlink()


def _openssl(folder: Path, command: str) -> None:
    words = ["openssl", *command.split()]
    try:
        subprocess.run(
            words, cwd=folder, check=True, capture_output=True, timeout=_OPENSSL_S
        )
    except FileNotFoundError as error:
        raise BadCredentials(
            "the program `openssl` is not installed here: install it, or make the "
            "credentials on another machine and copy the folder"
        ) from error
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")
        raise BadCredentials(f"`{' '.join(words)}` failed: {said or error}") from error
