"""Checks that learners can reach one another at the addresses that Gloo will use.

Every learner runs a `ReachabilityServer` at its own address and connects to those of
some others (`visit`). As for Gloo's listeners, the system chooses the ports. `explain`
turns a failed connection into a cause and a remedy.
"""

import errno
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning_adpsgd.transport.links.sockets import Address
from lightning_adpsgd.transport.network_interfaces import (
    VARIABLE,
    Interface,
    family_of,
    is_loopback,
    port_range,
)

_GREETING = "lightning_adpsgd learner "
_FAR_AWAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
_MOST_VISITED = 16  # up to this many other hosts, all are visited
_PAUSE_S = 0.05  # after an error of a server


@dataclass(frozen=True)
class LearnerLocation:
    """The network location of a learner.

    Attributes:
        machine: identifier of its host, equal only for learners of one host.
        endpoints: addresses at which it listens.
        chosen: value of `GLOO_SOCKET_IFNAME` there; empty if unset.
    """

    rank: int
    host: str
    machine: str
    endpoints: Sequence[Address]
    interfaces: Sequence[Interface]
    chosen: str

    def __str__(self) -> str:
        return f"learner {self.rank} on host {self.host}"

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "LearnerLocation":
        """Reads a location that was written by `dataclasses.asdict` and JSON.

        It ignores fields that another version of this package adds.
        """
        lists = {
            "endpoints": [Address(*end) for end in fields["endpoints"]],
            "interfaces": [Interface(*one) for one in fields["interfaces"]],
        }
        own = {name: fields[name] for name in cls.__dataclass_fields__}
        return cls(**{**own, **lists})


class ReachabilityServer:
    """A server that answers each connection with the rank of its learner.

    It leaves out addresses that cannot be bound.
    """

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        self._answer = f"{_GREETING}{rank}\n".encode()
        self._closed = threading.Event()
        listeners = [s for s in map(_listen, addresses) if s is not None]
        names = [listener.getsockname() for listener in listeners]
        self.endpoints = [Address(name[0], name[1]) for name in names]
        self._threads = [
            threading.Thread(target=self._serve, args=(listener,), daemon=True)
            for listener in listeners
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._closed.set()
        for endpoint in self.endpoints:
            # `accept` does not notice a closed socket, but wakes for a connection.
            with suppress(OSError):
                socket.create_connection(endpoint, 1).close()
        for thread in self._threads:
            thread.join(2)

    def _serve(self, listener: socket.socket) -> None:
        with listener:
            while not self._closed.is_set():
                try:
                    visitor, _ = listener.accept()
                    with visitor:
                        visitor.sendall(self._answer)
                except OSError:
                    # The other end may be gone already; too many open files may pass.
                    self._closed.wait(_PAUSE_S)


def visit(endpoint: Address, rank: int, timeout: timedelta) -> str:
    """The problem with the path to a learner's endpoint; empty if there is none."""
    seconds = timeout.total_seconds()
    try:
        with socket.create_connection(endpoint, seconds) as sock:
            sock.settimeout(seconds)
            answer = sock.makefile("rb").readline(len(_GREETING) + 20)
    except TimeoutError:
        return "timed out"
    except ConnectionRefusedError:
        return "refused"
    except OSError as error:
        return "no route" if error.errno in _FAR_AWAY else "not as itself"
    return "" if answer == f"{_GREETING}{rank}\n".encode() else "not as itself"


def visit_all(
    locations: Sequence[LearnerLocation], timeout: timedelta
) -> list[tuple[int, Address, str]]:
    """Visits all endpoints at once; returns rank, endpoint and trouble of failures."""
    targets = [(one.rank, end) for one in locations for end in one.endpoints]
    if not targets:
        return []
    with ThreadPoolExecutor(len(targets)) as pool:
        outcomes = pool.map(lambda each: visit(each[1], each[0], timeout), targets)
        met = zip(targets, outcomes, strict=True)
        return [(rank, end, wrong) for (rank, end), wrong in met if wrong]


def neighbours(rank: int, machines: Sequence[str]) -> list[int]:
    """The learners that a learner visits, at most one of each other host.

    It visits all other hosts, or about 2 log2 of their number if there are many. On
    another host it visits the learner in the same place, on its own the next one.

    Args:
        machines: the host of every learner, by rank.
    """
    on: dict[str, list[int]] = {}
    for other, machine in enumerate(machines):
        on.setdefault(machine, []).append(other)
    hosts, own = list(on), on[machines[rank]]
    place, here = own.index(rank), hosts.index(machines[rank])
    strides = range(1, len(hosts))
    if len(strides) > _MOST_VISITED:
        strides = [1 << k for k in range((len(hosts) // 2).bit_length())]
        strides += [-stride for stride in strides]
    others = {hosts[(here + stride) % len(hosts)] for stride in strides}
    chosen = {on[host][place % len(on[host])] for host in others}
    return sorted((chosen | {own[(place + 1) % len(own)]}) - {rank})


def loopback_traps(locations: Sequence[LearnerLocation]) -> list[str]:
    """The learners of a multi-host job that listen where no other host can connect."""
    if len({location.machine for location in locations}) == 1:
        return []
    first_of_each_host = {one.machine: one for one in reversed(locations)}
    return [
        f"{location} would listen at {end.host}, a loopback address, which no other "
        f"host can reach: {_why_loopback(location)}. {_choose_interface(location)}"
        for location in reversed(first_of_each_host.values())
        for end in location.endpoints
        if is_loopback(end.host)
    ]


def explain(
    source: LearnerLocation, target: LearnerLocation, endpoint: Address, wrong: str
) -> str:
    """The problem with the path to one endpoint, with its cause and remedy."""
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


def _cause(
    source: LearnerLocation, target: LearnerLocation, endpoint: Address, wrong: str
) -> str:
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
    is_seen = any(own.holds(endpoint.host) for own in source.interfaces)
    if _interface_of(target, endpoint) and shared and not is_seen:
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


def _why_loopback(location: LearnerLocation) -> str:
    if location.chosen:
        return f"{VARIABLE}={location.chosen} is set there"
    return (
        f"the name {location.host!r} resolves to it there, most likely in /etc/hosts, "
        f"and {VARIABLE} is not set"
    )


def _choose_interface(location: LearnerLocation) -> str:
    others = (str(i) for i in location.interfaces if not is_loopback(i.host))
    listed = ", ".join(others) or "none with an IPv4 address"
    return (
        f"Set {VARIABLE} on host {location.host} to the interface of the job's "
        f"network; it has {listed}"
    )


def _shared_networks(
    source: LearnerLocation, target: LearnerLocation
) -> list[Interface]:
    return [
        theirs
        for theirs in target.interfaces
        if not is_loopback(theirs.host)
        and any(own.holds(theirs.host) for own in source.interfaces)
    ]


def _interface_of(location: LearnerLocation, endpoint: Address) -> Interface | None:
    return next((i for i in location.interfaces if i.host == endpoint.host), None)


def _listen(address: str) -> socket.socket | None:
    with suppress(OSError):
        listener = socket.create_server((address, 0), family=family_of(address))
        listener.settimeout(None)  # whatever the program's default for sockets is
        return listener
    return None
