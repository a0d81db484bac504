"""Links: authenticated TCP connections between super-learners that come and go."""

from lightning_adpsgd.transport.links.credentials import (
    BadCredentials,
    Certificates,
    Credentials,
)
from lightning_adpsgd.transport.links.handshake import Malformed, Refused
from lightning_adpsgd.transport.links.listener import Listener
from lightning_adpsgd.transport.links.peer_info import PeerInfo
from lightning_adpsgd.transport.links.sockets import Address, evidence_of, probe
from lightning_adpsgd.transport.links.transport import LinkTransport

__all__ = [
    "Address",
    "BadCredentials",
    "Certificates",
    "Credentials",
    "LinkTransport",
    "Listener",
    "Malformed",
    "PeerInfo",
    "Refused",
    "evidence_of",
    "probe",
]
