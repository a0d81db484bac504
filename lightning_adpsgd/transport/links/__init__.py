"""Links: authenticated TCP connections between super-learners that come and go."""

from lightning_adpsgd.transport.links.credentials import (
    BadCredentials,
    Certificates,
    Credentials,
)
from lightning_adpsgd.transport.links.facts import Facts
from lightning_adpsgd.transport.links.handshake import Malformed, Refused
from lightning_adpsgd.transport.links.listener import Bounds, Listener
from lightning_adpsgd.transport.links.sockets import Address, evidence_of, knock
from lightning_adpsgd.transport.links.transport import LinkTransport

__all__ = [
    "Address",
    "BadCredentials",
    "Bounds",
    "Certificates",
    "Credentials",
    "Facts",
    "LinkTransport",
    "Listener",
    "Malformed",
    "Refused",
    "evidence_of",
    "knock",
]
