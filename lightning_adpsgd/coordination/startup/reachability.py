"""Whether learners can reach one another at the addresses that Gloo will use.

Every learner listens at an address of its own (`Doorbell`) and rings at those of some
others (`ring`). Gloo's listeners have ports that the system chooses, so this one's has
too. `explain` turns what a learner met into a cause and a remedy.
"""

import errno
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from lightning_adpsgd.transport.network_interfaces import (
    VARIABLE,
    Interface,
    is_loopback,
    port_range,
)

_GREETING = "lightning_adpsgd learner "
_FAR_AWAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


class Endpoint(NamedTuple):
    """Where a learner listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Place:
    """A learner, seen by the others.

    Attributes:
        rank: The learner.
        host: The name of its host.
        machine: Equal for learners of one host alone, whatever hosts are called.
        endpoints: Where it listens.
        interfaces: Those of its host.
        chosen: The value of `GLOO_SOCKET_IFNAME` there; empty without one.
    """

    rank: int
    host: str
    machine: str
    endpoints: Sequence[Endpoint]
    interfaces: Sequence[Interface]
    chosen: str

    def __str__(self) -> str:
        return f"learner {self.rank} on host {self.host}"

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Place":
        """A place from what `dataclasses.asdict` and JSON have made of it."""
        lists = {
            "endpoints": [Endpoint(*end) for end in fields["endpoints"]],
            "interfaces": [Interface(*one) for one in fields["interfaces"]],
        }
        return cls(**{**fields, **lists})


class Doorbell:
    """Answers everybody who connects with the rank of its learner, until closed.

    Args:
        rank: The learner.
        addresses: Where to listen; an address that cannot be bound is left out.
    """

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        self._answer = f"{_GREETING}{rank}\n".encode()
        self._closed = threading.Event()
        listeners = [s for s in map(_listen, addresses) if s is not None]
        names = [listener.getsockname() for listener in listeners]
        self.endpoints = [Endpoint(name[0], name[1]) for name in names]
        self._threads = [
            threading.Thread(target=self._serve, args=(listener,), daemon=True)
            for listener in listeners
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops to listen."""
        self._closed.set()
        for endpoint in self.endpoints:
            # `accept` does not notice that its socket is closed; it notices a visit.
            with suppress(OSError):
                socket.create_connection(endpoint, 1).close()
        for thread in self._threads:
            thread.join(2)

    def _serve(self, listener: socket.socket) -> None:
        with listener:
            while not self._closed.is_set():
                # A visitor that has gone is none of our business.
                with suppress(ConnectionError):
                    visitor, _ = listener.accept()
                    with visitor:
                        visitor.sendall(self._answer)


def ring(endpoint: Endpoint, rank: int, timeout: timedelta) -> str:
    """What is wrong with the way to a learner's endpoint; empty if nothing is."""
    seconds = timeout.total_seconds()
    try:
        with socket.create_connection(endpoint, seconds) as visit:
            visit.settimeout(seconds)
            answer = visit.makefile("rb").readline(len(_GREETING) + 20).decode()
    except TimeoutError:
        return "timed out"
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        return "no route" if error.errno in _FAR_AWAY else "not as itself"
    return "" if answer == f"{_GREETING}{rank}\n" else "not as itself"


def ring_all(
    places: Sequence[Place], timeout: timedelta
) -> list[tuple[int, Endpoint, str]]:
    """Rings everywhere at once: rank, endpoint and what was wrong, where it was."""
    doors = [(place.rank, end) for place in places for end in place.endpoints]
    if not doors:
        return []
    with ThreadPoolExecutor(len(doors)) as pool:
        outcomes = pool.map(lambda door: ring(door[1], door[0], timeout), doors)
        met = zip(doors, outcomes, strict=True)
        return [(rank, end, wrong) for (rank, end), wrong in met if wrong]


def neighbours(rank: int, machines: Sequence[str], limit: int = 16) -> list[int]:
    """The learners that one rings at: on all other hosts, or on 2 log2 of their number.

    Its counterparts, in the same place of their hosts; on its own host the next one.

    Args:
        rank: The learner.
        machines: The host of every learner.
        limit: Up to so many other hosts all are rung at.
    """
    on: dict[str, list[int]] = {}
    for other, machine in enumerate(machines):
        on.setdefault(machine, []).append(other)
    hosts, own = list(on), on[machines[rank]]
    seat, here = own.index(rank), hosts.index(machines[rank])
    strides = range(1, len(hosts))
    if len(strides) > limit:
        strides = [1 << k for k in range((len(hosts) // 2).bit_length())]
        strides += [-stride for stride in strides]
    others = {hosts[(here + stride) % len(hosts)] for stride in strides}
    chosen = {on[host][seat % len(on[host])] for host in others}
    return sorted((chosen | {own[(seat + 1) % len(own)]}) - {rank})


def loopback_traps(places: Sequence[Place]) -> list[str]:
    """Learners of a job on several hosts which listen where no other host can come."""
    if len({place.machine for place in places}) == 1:
        return []
    return [
        f"{place} would listen at {end.host}, a loopback address, which no other host "
        f"can reach: {_why_loopback(place)}. {_choose_interface(place)}"
        for place in _one_of_each_host(places)
        for end in place.endpoints
        if is_loopback(end.host)
    ]


def explain(source: Place, target: Place, endpoint: Endpoint, wrong: str) -> str:
    """Cause and remedy of one way that does not lead there."""
    what = {
        "timed out": "nothing answers",
        "refused": "the connection is refused",
        "no route": "there is no route",
        "not as itself": "something else answers",
    }[wrong]
    interface = _interface_of(target, endpoint)
    where = f"{endpoint} (interface {interface.name})" if interface else str(endpoint)
    head = f"{target} cannot be reached from {source} at {where}: {what}."
    return f"{head} {_cause(source, target, endpoint, wrong)}"


def _cause(source: Place, target: Place, endpoint: Endpoint, wrong: str) -> str:
    if source.machine != target.machine and any(
        end.host == endpoint.host for end in source.endpoints
    ):
        return (
            f"Both hosts have the address {endpoint.host}, as local bridges do (docker0"
            f", virbr0): it is the wrong interface. {_choose_interface(target)}"
        )
    if wrong == "not as itself":
        return (
            "A proxy between them takes connections, such as the sidecar of a service "
            "mesh (in Kubernetes: annotate the pods with sidecar.istio.io/inject: "
            '"false"), or the address belongs to another machine as well'
        )
    shared = _shared_networks(source, target)
    if _interface_of(target, endpoint) and shared and not _sees(source, endpoint):
        return (
            f"Host {source.host} has no address in that network: it is the wrong "
            f"interface. Set {VARIABLE}={shared[0].name} on host {target.host}; both "
            f"hosts are in the network of {shared[0]}"
        )
    return (
        f"Most likely a firewall {'rejects' if wrong == 'refused' else 'drops'} it: "
        f"allow TCP between the hosts of the job on ports {port_range()}, which Gloo "
        f"listens on, besides that of the store. If it is the wrong interface: "
        f"{_choose_interface(target)}"
    )


def _why_loopback(place: Place) -> str:
    if place.chosen:
        return f"{VARIABLE}={place.chosen} is set there"
    return (
        f"the name {place.host!r} stands for it there, in /etc/hosts most likely, and "
        f"{VARIABLE} is not set"
    )


def _choose_interface(place: Place) -> str:
    others = [i for i in place.interfaces if not is_loopback(i.address.split("/")[0])]
    listed = ", ".join(map(str, others)) or "none with an IPv4 address"
    return (
        f"Set {VARIABLE} on host {place.host} to the interface of the job's network; "
        f"it has {listed}"
    )


def _shared_networks(source: Place, target: Place) -> list[Interface]:
    """Interfaces of the target in a network of the source, both beyond loopback."""
    return [
        theirs
        for theirs in target.interfaces
        for host in [theirs.address.partition("/")[0]]
        if not is_loopback(host) and any(own.holds(host) for own in source.interfaces)
    ]


def _sees(source: Place, endpoint: Endpoint) -> bool:
    return any(interface.holds(endpoint.host) for interface in source.interfaces)


def _interface_of(place: Place, endpoint: Endpoint) -> Interface | None:
    found = (i for i in place.interfaces if i.address.split("/")[0] == endpoint.host)
    return next(found, None)


def _one_of_each_host(places: Sequence[Place]) -> list[Place]:
    return list({place.machine: place for place in reversed(places)}.values())[::-1]


def _listen(address: str) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen()
    except OSError:
        listener.close()
        return None
    return listener
