"""The network address that Gloo will use on this host, and the other interfaces.

Gloo uses the interfaces that `GLOO_SOCKET_IFNAME` names. Without it, it uses the
address that the host's own name resolves to, or the loopback if that is no address of
this host. This module follows torch's `ProcessGroupGloo`. Interfaces are listed only on
Linux, and for IPv4; elsewhere none is known, and no message mentions them.
"""

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Interface(NamedTuple):
    """A network interface and its IPv4 address with the length of its prefix."""

    name: str
    address: str

    @property
    def host(self) -> str:
        """The address alone."""
        return self.address.partition("/")[0]

    def __str__(self) -> str:
        return f"{self.name} {self.address}"

    def holds(self, host: str) -> bool:
        """Whether an address belongs to the network of this interface."""
        return ipaddress.ip_address(host) in _network(self.address)


class NoSuchInterface(ValueError):
    """`GLOO_SOCKET_IFNAME` names an interface that this host does not have."""


def interfaces() -> list[Interface]:
    """The interfaces of this host that have an IPv4 address."""
    found = [(name, _address_of(name)) for _, name in socket.if_nameindex()]
    return [Interface(name, address) for name, address in found if address]


def gloo_addresses() -> list[str]:
    """The addresses at which Gloo will listen; empty if they are unknown.

    Raises:
        NoSuchInterface: The variable names an interface that does not exist.
    """
    names = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    if not names:
        return [_address_of_host_name()]
    present = {name for _, name in socket.if_nameindex()}
    for name in names:
        if name not in present:
            raise NoSuchInterface(
                f"{VARIABLE}={os.environ[VARIABLE]} names {name!r}, an interface that "
                "does not exist there"
            )
    addresses = [_address_of(name) for name in names]
    return [address.partition("/")[0] for address in addresses if address]


def is_loopback(host: str) -> bool:
    """Whether an address leads back to the host that uses it."""
    return ip_address(host).is_loopback


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address without its zone; an IPv4-mapped one as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 or IPv4, whichever an address in numbers belongs to."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def port_range() -> str:
    """The range of ports that the system assigns to listeners, as "low-high"."""
    with suppress(OSError):
        return "-".join(_PORT_RANGE.read_text().split())
    return "1024-65535"


def _address_of_host_name() -> str:
    with suppress(socket.gaierror):
        for *kind, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(*kind) as probe:
                probe.bind(address)
                return str(address[0])
    return "127.0.0.1"


def _address_of(interface: str) -> str | None:
    """An address with prefix length, such as "10.0.0.3/24"; None without IPv4."""
    request = struct.pack("256s", interface.encode()[:15])
    codes = _SIOCGIFADDR, _SIOCGIFNETMASK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            answers = [fcntl.ioctl(asker, code, request)[20:24] for code in codes]
        except OSError:
            return None
    host, mask = map(socket.inet_ntoa, answers)
    return f"{host}/{_network(f'{host}/{mask}').prefixlen}"


def _network(address: str) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Interface(address).network
