"""Signatures that prove that a holder of the token wrote a text in the rendezvous.

The rendezvous admits anyone who reaches it. So members sign the texts that they write
there, and ignore unsigned ones. A signature binds a text to the job and to its subject.
A reader must detect a replayed text by a number in it.
"""

import json
from typing import NamedTuple

from lightning_adpsgd.transport.links.credentials import Credentials

_LABEL = b"a text  "


class Signatures(NamedTuple):
    """Signs and verifies the texts of one job; accepts all texts without a token."""

    credentials: Credentials
    job: str

    def of(self, kind: str, *words: object) -> str:
        """The signature of some words; empty without a token."""
        if not self.credentials.token:
            return ""
        return self.credentials.proof(_LABEL, self._content(kind, words)).hex()

    def holds(self, proof: str, kind: str, *words: object) -> bool:
        """Whether this is the signature of these words."""
        if not self.credentials.token:
            return True
        try:
            given = bytes.fromhex(proof)
        except ValueError:
            return False
        return self.credentials.accepts(given, _LABEL, self._content(kind, words))

    def sign(self, text: str, kind: str) -> str:
        """The text followed by its signature."""
        proof = self.of(kind, text)
        return f"{text} {proof}" if proof else text

    def read(self, signed: str, kind: str) -> str | None:
        """The text that was signed; None if the signature is wrong."""
        if not self.credentials.token:
            return signed
        text, _, proof = signed.rpartition(" ")
        return text if self.holds(proof, kind, text) else None

    def _content(self, kind: str, words: tuple[object, ...]) -> bytes:
        return json.dumps([self.job, kind, *words]).encode()
