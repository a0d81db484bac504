"""The forms of an exchange: what a weight is sent as, and how long messages are.

Both ends of a lane know the same forms by number. The asking end chooses one for each
exchange, from how long earlier ones took. No form changes what an exchange means.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_adpsgd.gossip.codecs import Codec, WireChoice, wire_dtypes
from lightning_adpsgd.gossip.wire import codecs_of
from lightning_adpsgd.weights.replica import Chunk, Part, Replica

# Fewer bytes take latency, which no form saves.
_WORTH_BYTES = 1 << 18
# In steps: an exchange that would take longer goes narrower, or in short messages.
_LONG, _LONGER = 0.5, 1.0
# One in this many goes a width wider, and shows whether the link has become faster.
_TRY_EVERY = 64
# Short messages of an exchange; three are in flight or await their verdicts.
_SHORT_MESSAGES = 8


class Form(NamedTuple):
    """How an exchange travels: what a weight is sent as, and what a message carries."""

    codecs: dict[torch.dtype, Codec]
    chunks: Sequence[Chunk]


def forms_of(
    replica: Replica, chunks: Sequence[Chunk], choice: WireChoice
) -> list[Form]:
    """The forms of a lane: by wire dtype, the widest first, and in short messages.

    What the wire dtype "auto" leaves open is chosen for each exchange. Weights are read
    as their message is sent, and averaged when two more have come. So short messages
    average fresher weights, where an exchange takes many steps.
    """
    codecs = [codecs_of(replica, dtype) for dtype in wire_dtypes(choice)]
    in_short = in_messages(chunks, _SHORT_MESSAGES)
    return [*(Form(one, chunks) for one in codecs), Form(codecs[-1], in_short)]


def in_messages(chunks: Sequence[Chunk], number: int) -> list[Chunk]:
    """The same parts, in at least about so many messages."""
    most = -(-sum(map(len, chunks)) // number)
    found: list[list[Part]] = []
    for chunk in chunks:
        length = math.inf
        for part in chunk.parts:
            if length + len(part) > most:
                found.append([])
                length = 0
            found[-1].append(part)
            length += len(part)
    return [Chunk(parts) for parts in found]


class FormChoice:
    """Chooses the form of each exchange of a lane.

    It begins with the last one: over a slow link, an exchange at full width would hold
    up the others for many steps, and average weights as old. What has more bytes takes
    at most as much longer, so that forms become wider where links are fast.

    Args:
        sizes: bytes of an exchange in each form, the largest first.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self._calls = sizes, 0
        # In each form, the longest that an exchange takes as far as is known.
        self._seconds = [math.inf] * len(sizes)

    def choose(self, step_seconds: float) -> int:
        """The number of the next exchange's form; to be called once for each."""
        if self._sizes[0] < _WORTH_BYTES:
            return 0
        self._calls += 1
        *wide, narrowest, _ = self._seconds
        found = next((n for n, s in enumerate(wide) if s < _LONG * step_seconds), None)
        if found is None:
            found = len(wide)
            if not narrowest < _LONGER * step_seconds:
                return found + 1
        return max(0, found - self._is_try)

    @property
    def _is_try(self) -> bool:
        # And the second, fourth, eighth, which know little yet.
        of_few = self._calls > 1 and self._calls.bit_count() == 1
        return of_few or self._calls % _TRY_EVERY == 0

    def took(self, form: int, seconds: float) -> None:
        """Notes the duration of an exchange in a form."""
        self._seconds[form] = seconds
        for wider, size in enumerate(self._sizes[:form]):
            in_proportion = seconds * size / self._sizes[form]
            self._seconds[wider] = min(self._seconds[wider], in_proportion)
