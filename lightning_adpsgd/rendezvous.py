"""Where islands find one another: a key-value store that may come and go.

The store is torch's own, served by a small process of its own (`serve`). It holds who
is there and signs of life, and nothing that training needs: it can be killed and
started again, empty, at any time. A client of torch's raises on every use once its
server has gone, so that `Rendezvous` makes a new one then. Nothing here decides who is
alive.
"""

import re
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

T = TypeVar("T")

ENVIRONMENT_VARIABLE = "LIGHTNING_ADPSGD_ISLANDS"
"""Stands for `islands=` where that is not given."""

_KNOCK_S = 1.0
_PATIENCE = timedelta(seconds=2)
_JOB = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RendezvousAway(Exception):
    """The store cannot be reached at present."""


class Place(NamedTuple):
    """Where the store is, and the job whose islands meet there.

    Attributes:
        host: Name or address.
        port: Of TCP.
        job: Islands of one name form a job.
    """

    host: str
    port: int
    job: str

    @classmethod
    def parse(cls, url: str) -> "Place":
        """Reads ``tcp://host:port`` or ``tcp://host:port/job``.

        Raises:
            ValueError: It is something else.
        """
        parts = urlsplit(url)
        with suppress(ValueError):
            job = parts.path.strip("/") or "job"
            plain = not (parts.query or parts.fragment or parts.username)
            is_url = parts.scheme == "tcp" and plain and _JOB.fullmatch(job)
            if is_url and parts.hostname and parts.port:
                return cls(parts.hostname, parts.port, job)
        raise ValueError(
            "`islands` must be tcp://host:port or tcp://host:port/job, with a job of "
            f"at most 64 letters, digits and . _ -, got {url!r}"
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}/{self.job}"


class Rendezvous:
    """A client of the store that finds a server again; for one thread at a time.

    Args:
        place: Where it is.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._store: Store | None = None
        self._line: socket.socket | None = None

    def ask(self, action: Callable[[Store], T]) -> T:
        """What an action on the store of this job gives.

        Raises:
            RendezvousAway: The server cannot be reached, or is another one than the
                last time; the next call begins anew.
        """
        try:
            store = self._connected()
            return action(store)
        except (OSError, DistError) as error:
            self.close()
            raise RendezvousAway(str(error).partition("\n")[0]) from error

    def close(self) -> None:
        """Lets go of the connection; the next use makes a new one."""
        if self._line is not None:
            self._line.close()
        self._store = self._line = None

    def _connected(self) -> Store:
        # torch writes a trace to stderr when it meets a closed connection, so that a
        # second one is looked at first: it ends when the server does.
        if self._line is not None and select.select([self._line], [], [], 0)[0]:
            raise ConnectionError("the server has closed the connection")
        if self._store is None:
            address = (self.place.host, self.place.port)
            self._line = socket.create_connection(address, _KNOCK_S)
            self._line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            plain = TCPStore(
                *address, timeout=_PATIENCE, is_master=False, wait_for_workers=False
            )
            self._store = PrefixStore(f"islands/{self.place.job}", plain)
        return self._store


def serve(host: str, port: int, stop: threading.Event) -> None:
    """Serves the store until it is told to stop; holds nothing but memory.

    Args:
        host: Name or address of an interface of this machine; empty: of all.
        port: Of TCP.
        stop: Ends it.

    Raises:
        OSError: The address is not one of this machine, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        # The store takes over the socket, and closes it in the end.
        store = TCPStore(
            host or "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_PATIENCE,
            master_listen_fd=listener.detach(),
        )
    stop.wait()
    del store
