"""The forms of an exchange: what a weight is sent as, and how long messages are.

Both ends of a lane know the same forms by number. The asking end chooses one for each
exchange, from how long earlier ones took. No form changes what an exchange means.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from lightning_adpsgd.gossip.codecs import Codec, WireChoice, wire_dtypes
from lightning_adpsgd.gossip.wire import IN_FLIGHT, Parts, codecs_of
from lightning_adpsgd.weights.replica import JOINED_ELEMENTS, Chunk, Part, Replica

# An exchange of fewer bytes takes mostly latency, which no form reduces.
WORTH_BYTES = 1 << 18
# In steps: an exchange that would take longer uses fewer bits, or short messages. These
# take more of a core: less than a step suffices if nobody waits for one.
LONG, _LONGER, _LONGER_IF_IDLE = 0.5, 1.0, 0.25
# One exchange in this many is a form wider, to find out whether the link is faster.
_TRY_EVERY = 64
# Short messages of an exchange, of which three are in flight or await verdicts.
_SHORT_MESSAGES = 8


class Form(NamedTuple):
    """How an exchange travels: what a weight is sent as, and what messages carry."""

    codecs: dict[torch.dtype, Codec]
    messages: Sequence[Parts]


def forms_of(
    replica: Replica, chunks: Sequence[Chunk], choice: WireChoice
) -> list[Form]:
    """The forms of a lane: by wire dtype, the widest first, and in short messages.

    Short messages average fresher weights, where an exchange takes many steps. Long
    ones cost less.
    """
    dtypes = wire_dtypes(choice)
    long = [[*joined(chunk.parts)] for chunk in chunks]
    shorter = -(-sum(map(len, chunks)) // _SHORT_MESSAGES)
    short = [parts for chunk in chunks for parts in grouped(chunk.parts, shorter)]
    forms = [Form(codecs_of(replica, dtype), long) for dtype in dtypes]
    return [*forms, Form(codecs_of(replica, dtypes[-1]), short)]


def joined(parts: Iterable[Part]) -> Iterator[Part | Chunk]:
    """The same parts joined into few large ones, because each has a fixed cost."""
    for several in grouped(parts, JOINED_ELEMENTS):
        yield Chunk(several) if len(several) > 1 else several[0]


def grouped(parts: Iterable[Part], most: int) -> Iterator[list[Part]]:
    """Groups of parts with at most `most` elements, or of a single larger part."""
    group, length = list[Part](), 0
    for part in parts:
        if group and length + len(part) > most:
            yield group
            group, length = [], 0
        group.append(part)
        length += len(part)
    if group:
        yield group


class FormChoice:
    """Chooses the form of each exchange of a lane.

    docs/concepts.md, "What travels", has the rules. The time of an exchange grows at
    most in proportion to its bytes, so a quick one shows that a wider form is fast
    enough. Short messages add round trips.

    Args:
        sizes: bytes of an exchange in each form, the largest first.
        num_messages: number of messages in each form; by default, few.
    """

    def __init__(self, sizes: Sequence[int], num_messages: Sequence[int] = ()) -> None:
        self._sizes, self._calls, self._round_trip = sizes, 0, 0.0
        round_trips = [max(1.0, num / IN_FLIGHT) for num in num_messages]
        self._round_trips = round_trips or [1.0] * len(sizes)
        # For each form: an upper bound on the seconds of an exchange, and what the last
        # one took, or before the first, what the link alone would take.
        self._seconds = [math.inf] * len(sizes)
        self._guesses = [math.inf] * len(sizes)
        self._taken = set[int]()

    def choose(self, step_seconds: float, cores_idle: bool = False) -> int:
        """The number of the next exchange's form; to be called once for each."""
        if self._sizes[0] < WORTH_BYTES:
            return 0
        self._calls += 1
        long_s = max(LONG * step_seconds, self._round_trip)
        longer = _LONGER_IF_IDLE if cores_idle else _LONGER
        longer_s = max(longer * step_seconds, 2 * self._round_trip)
        # The last form has no limit: it is for everything longer.
        limits = [long_s] * (len(self._sizes) - 2) + [longer_s]
        form = _widest(self._seconds, limits)
        # Also the second, fourth, eighth and so on, because little is known at first.
        of_few = self._calls > 1 and self._calls.bit_count() == 1
        if not of_few and self._calls % _TRY_EVERY != 0:
            return form
        next_one = form if form == len(limits) else max(0, form - 1)
        return min(next_one, _widest(self._guesses, limits))

    def took(
        self,
        form: int,
        seconds: float,
        processor: float = 0.0,
        round_trip: float = 0.0,
    ) -> None:
        """Notes the duration of an exchange in a form, and the processor's part.

        Args:
            round_trip: seconds of the quickest answer of the peer.
        """
        self._round_trip = round_trip
        beyond = max(0.0, seconds - round_trip)
        self._seconds[form] = self._guesses[form] = beyond
        self._taken.add(form)
        latency = self._round_trips[form] * round_trip
        link = max(0.0, seconds - processor - latency)
        for wider, size in enumerate(self._sizes[:form]):
            times = size / self._sizes[form]
            self._seconds[wider] = min(self._seconds[wider], beyond * times)
            if wider not in self._taken:
                self._guesses[wider] = link * times


def _widest(seconds: Sequence[float], limits: Sequence[float]) -> int:
    """The widest form that takes few enough seconds."""
    for form, limit in enumerate(limits):
        if seconds[form] < limit:
            return form
    return len(limits)
