"""Where islands find one another: a key-value store that may come and go.

The store is torch's own, served by a small process of its own (`serve`). It holds who
is there and signs of life, and nothing that training needs: it can be killed and
started again, empty, at any time. A client of torch's raises on every use once its
server has gone, so that `Rendezvous` makes a new one then; where a server answers
nothing, it waits for ever, and so uses it in a thread of its own. Nothing here decides
who is alive.
"""

import ipaddress
import os
import re
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from lightning_adpsgd.islands.errands import Errands, Late
from lightning_adpsgd.transport.links.sockets import Address, connect, tune

T = TypeVar("T")

ENVIRONMENT_VARIABLE = "LIGHTNING_ADPSGD_ISLANDS"
"""Stands for `islands=` where that is not given."""

# Less than the silence after which a member counts as dead.
_ANSWER_S = 2.0
# A client that cannot be made tries no more when that has passed.
_PATIENCE = timedelta(seconds=1)
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

    Nothing takes longer than some seconds. While a request is late the server is away;
    it is still there when the answer comes. A second connection, on which nothing is
    said, tells a server that hangs from one that is gone: it ends when its process
    does, and soon after the link was cut.

    Args:
        place: Where it is.
        answer_s: For how long an answer may take.
    """

    def __init__(self, place: Place, answer_s: float = _ANSWER_S) -> None:
        self.place, self._answer_s = place, answer_s
        self._store: Store | None = None
        self._line: socket.socket | None = None
        self._errands = Errands("adpsgd-rendezvous")
        self._deadline = 0.0
        self._server: tuple[str, int] | None = None

    def ask(self, action: Callable[[Store], T]) -> T:
        """What an action on the store of this job gives.

        Raises:
            RendezvousAway: The server cannot be reached, is another one than the last
                time, or does not answer in time; the next call tries again.
        """
        self._deadline = time.monotonic() + self._answer_s
        try:
            store = self._connected()
            return action(store)
        except Late as error:
            raise RendezvousAway(f"no answer within {self._answer_s:g} s") from error
        except (OSError, DistError) as error:
            self.close()
            raise RendezvousAway(str(error).partition("\n")[0]) from error

    def close(self) -> None:
        """Lets go of the connection; the next use makes a new one."""
        if self._line is not None:
            if not self._errands.await_last(0.0):
                _hang_up_on(self._server)
            self._line.close()
        self._errands.stop()
        self._store = self._line = None

    def _connected(self) -> Store:
        # torch writes a trace to stderr when it meets a closed connection, so that this
        # one is looked at first.
        if self._line is not None and select.select([self._line], [], [], 0)[0]:
            raise ConnectionError("the server has closed the connection")
        if self._line is None:
            self._line = connect(Address(self.place.host, self.place.port))
            tune(self._line)
            self._server = _plain(self._line.getpeername())
        if self._store is None:
            self._store = cast(Store, _InTime(self._in_time(self._make_store), self))
        return self._store

    def _make_store(self) -> Store:
        plain = TCPStore(
            self.place.host,
            self.place.port,
            timeout=_PATIENCE,
            is_master=False,
            wait_for_workers=False,
        )
        return PrefixStore(f"islands/{self.place.job}", plain)

    def _in_time(self, action: Callable[[], T]) -> T:
        return self._errands.run(action, self._deadline - time.monotonic())


class _InTime:
    """A store each of whose operations is done in time, or `Late`."""

    def __init__(self, store: Store, rendezvous: Rendezvous) -> None:
        self._store, self._rendezvous = store, rendezvous

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)
        return lambda *words: self._rendezvous._in_time(partial(method, *words))


def _hang_up_on(server: tuple[str, int] | None) -> None:
    """Ends all connections of this process with a server.

    torch's client has no other way to make it stop waiting.
    """
    for name in os.listdir("/dev/fd"):
        with suppress(OSError), _copy_of_socket(int(name)) as sock:
            if _plain(sock.getpeername()) == server:
                sock.shutdown(socket.SHUT_RDWR)


def _copy_of_socket(number: int) -> socket.socket:
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError("not a socket")
    return socket.socket(fileno=os.dup(number))


def _plain(name: Any) -> tuple[str, int] | None:
    """An address and a port, whether IPv4 is written as itself or within IPv6."""
    if not isinstance(name, tuple):
        return None
    address = ipaddress.ip_address(name[0].partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address), name[1]


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
