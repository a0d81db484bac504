"""What shows that a holder of the token wrote a text in the rendezvous.

The rendezvous lets in anyone who reaches it. So members sign what they write there, and
leave out what is not signed. A text is bound to the job and to what it is about. That
an old text is written again, its reader must see from a number in it.
"""

import json
from typing import NamedTuple

from lightning_adpsgd.transport.links.credentials import Credentials

_LABEL = b"a text  "


class Signatures(NamedTuple):
    """Signs and checks texts of one job; without a token all are taken as they are."""

    credentials: Credentials
    job: str

    def of(self, kind: str, *words: object) -> str:
        """The proof for what the words say; empty without a token."""
        if not self.credentials.token:
            return ""
        return self.credentials.proof(_LABEL, self._content(kind, words)).hex()

    def holds(self, proof: str, kind: str, *words: object) -> bool:
        """Whether this is the proof for these words."""
        if not self.credentials.token:
            return True
        try:
            given = bytes.fromhex(proof)
        except ValueError:
            return False
        return self.credentials.accepts(given, _LABEL, self._content(kind, words))

    def sign(self, text: str, kind: str) -> str:
        """The text with its proof behind it."""
        proof = self.of(kind, text)
        return f"{text} {proof}" if proof else text

    def read(self, signed: str, kind: str) -> str | None:
        """The text that `sign` was given; None if the proof does not hold."""
        if not self.credentials.token:
            return signed
        text, _, proof = signed.rpartition(" ")
        return text if self.holds(proof, kind, text) else None

    def _content(self, kind: str, words: tuple[object, ...]) -> bytes:
        return json.dumps([self.job, kind, *words]).encode()
