"""Exchanges between super-learners of one process, on rows of weights.

The arithmetic is the engine's: `replica`, `wire`, `super_learner`. Both ends of an
exchange are in the same memory, so there are neither a transport nor threads.
`timeline` decides when an exchange happens.
"""

import math
import threading
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_adpsgd.gossip.codecs import Codec
from lightning_adpsgd.gossip.wire import codecs_of, payload_bytes
from lightning_adpsgd.mixing.statistics import Tally
from lightning_adpsgd.mixing.super_learner import (
    MergeAlone,
    ShardGather,
    SuperLearnerGroup,
    Votes,
)
from lightning_adpsgd.mixing.synchronous import Order
from lightning_adpsgd.virtual.timeline import SimulatedExchange
from lightning_adpsgd.weights.look_ahead import LookAhead
from lightning_adpsgd.weights.replica import CHUNK_ELEMENTS, Replica
from lightning_adpsgd.weights.worker import InlineWorker

_NO_WAIT = timedelta()  # no peer is in another process


class CommunicationSide:
    """The changes to one super-learner's row, which it merges at its step boundaries.

    With several learners per super-learner, a change is merged one step later, because
    the learners gather it while they compute the next step.

    Attributes:
        replica: weights of the row, and the changes that await a merge.
        parts: parts of all chunks of the replica, in order.
        ahead: how far ahead an exchange reads them (`LookAhead.factors`).
    """

    def __init__(
        self,
        vectors: list[Tensor],
        order: Order,
        num_learners: int = 1,
        looks_ahead: bool = False,
    ) -> None:
        self._order = order
        # Each vector is a section of its own, so that no chunk spans two vectors.
        sections = [[vector] for vector in vectors]
        self.replica = Replica(sections, CHUNK_ELEMENTS, threading.Condition())
        kind = ShardGather if num_learners > 1 else MergeAlone
        self._merger = kind(
            vectors, self.replica, SuperLearnerGroup(), _NO_WAIT, InlineWorker()
        )
        self._parts_of = [
            [part for chunk in section for part in chunk.parts]
            for section in self.replica.sections
        ]
        self.parts = [*chain.from_iterable(self._parts_of)]
        self._look_ahead = (
            LookAhead(self.replica, most_of_step=math.inf) if looks_ahead else None
        )
        self.ahead: Sequence[float] = ()
        self.tally = Tally()
        self._first_steps = list[int]()

    def before_update(self) -> None:
        """Merges before the update if the order requires it."""
        if self._order == "average_then_step":
            self._merge()
        if self._look_ahead:
            self._look_ahead.begin_update()

    def after_update(self) -> None:
        """Counts the step, and merges if the order requires it."""
        if self._look_ahead:
            self._look_ahead.end_update()
            self.ahead = self._look_ahead.factors()
        self.replica.step += 1
        if self._order == "step_then_average":
            self._merge()

    def merge_at_once(self) -> None:
        """Merges an exchange within the step boundary at which it is made."""
        self._merger.merge_all()
        self.tally.merged_all(self._first_steps, self.replica.step)

    def message_bytes(self, wire_dtype: torch.dtype | None) -> int:
        """The bytes that this end sends in an exchange."""
        parts = (chunk.parts for chunk in self.replica.chunks)
        return payload_bytes(codecs_of(self.replica, wire_dtype), parts)

    def ended(self, first_step: int, num_bytes: int, finite: bool) -> None:
        """Counts an exchange, which has read the weights after `first_step` steps."""
        self.tally.bytes_sent += num_bytes
        self.tally.exchanges += finite
        self.tally.refused += not finite
        self._first_steps.append(first_step)

    def add_awaiting(self, into: Tensor, number: int, begin: int) -> None:
        """Adds d to a stretch of w; the stretch must lie within one part."""
        place, within = divmod(begin, self.replica.part_elements)
        self._parts_of[number][place].add_awaiting(into, within)

    def _merge(self) -> None:
        self._merger.merge(Votes())
        step = self.replica.step + self._merger.steps_late
        self.tally.merged_all(self._first_steps, step)


class _Read(NamedTuple):
    messages: Sequence[Tensor]
    step: int


class RowExchanges:
    """The exchanges under way between super-learners.

    An exchange reads the weights of both ends when it begins, and changes them when it
    ends. (The engine reads chunk by chunk during an exchange, so each of its chunks is
    an exchange in this sense.) Weights are copied only if they are encoded, or if an
    end changes before the exchange has ended. Otherwise they are used in place.

    Args:
        sides: side of each super-learner. The caller calls `before_change` before it
            changes one.
        wire_dtype: dtype on the wire; None: that of the weights.
    """

    def __init__(
        self, sides: Sequence[CommunicationSide], wire_dtype: torch.dtype | None
    ) -> None:
        self._sides, self._wire_dtype = sides, wire_dtype
        # What was read, by end; a missing end has not changed since the beginning.
        self._read: dict[SimulatedExchange, dict[int, _Read]] = {}
        self._codecs: dict[tuple[int, int, int], dict[torch.dtype, Codec]] = {}
        # By super-learner and peer: its step when they last began an exchange.
        self._last_steps = dict[tuple[int, int], int]()

    def begin(self, exchange: SimulatedExchange) -> None:
        """Begins an exchange: both ends count as read from now on."""
        self._read[exchange] = {}
        if self._wire_dtype is not None:
            self._begin_codecs(exchange)
            # An encoder may depend on earlier inputs and their order.
            for end in exchange.ends:
                self._read_end(exchange, end)

    def before_change(self, super_learner: int) -> None:
        """Copies weights that are about to change, for the exchanges under way."""
        for exchange, read in self._read.items():
            if super_learner in exchange.ends and super_learner not in read:
                self._read_end(exchange, super_learner)

    def end(self, exchange: SimulatedExchange) -> None:
        """Changes both ends by what was read: ``d += a (theirs - mine)``."""
        read = self._read.pop(exchange)
        for end in exchange.ends:
            self.before_change(end)
        finite, num_bytes = True, 0
        for number in range(len(self._sides[exchange.asker].parts)):
            mine, theirs = (
                read[end].messages[number]
                if end in read
                else self._look_at(exchange, end, number)
                for end in exchange.ends
            )
            num_bytes += mine.nbytes
            finite &= self._change(exchange, number, mine, theirs)
        for end in exchange.ends:
            side = self._sides[end]
            step = read[end].step if end in read else side.replica.step
            side.ended(step, num_bytes, finite)

    def _begin_codecs(self, exchange: SimulatedExchange) -> None:
        asker, asked = (self._sides[end].replica.step for end in exchange.ends)
        steps = asker - self._last_steps.get(exchange.ends, 0)
        for end in exchange.ends:
            for codec in self._codecs_of(exchange, end).values():
                codec.begin(steps)
        both = {exchange.ends: asker, exchange.ends[::-1]: asked}
        self._last_steps.update(both)

    def _read_end(self, exchange: SimulatedExchange, end: int) -> None:
        side = self._sides[end]
        numbers = range(len(side.parts))
        messages = [self._read_part(exchange, end, number) for number in numbers]
        self._read[exchange][end] = _Read(messages, side.replica.step)

    def _look_at(self, exchange: SimulatedExchange, end: int, number: int) -> Tensor:
        """The message about a part, which is not encoded: if it can be, in place."""
        plain = self._sides[end].parts[number].plain
        return self._read_part(exchange, end, number) if plain is None else plain

    def _read_part(self, exchange: SimulatedExchange, end: int, number: int) -> Tensor:
        part = self._sides[end].parts[number]
        device = self._sides[end].replica.device
        codec = self._codecs_of(exchange, end)[part.dtype]
        weights = torch.empty(len(part), dtype=part.dtype, device=device)
        part.read(weights, self._sides[end].ahead)
        if codec.dtype == part.dtype:
            return weights
        length = codec.length(len(part))
        message = torch.empty(length, dtype=codec.dtype, device=device)
        codec.encode(weights, message, number)
        return message

    def _change(
        self, exchange: SimulatedExchange, number: int, mine: Tensor, theirs: Tensor
    ) -> bool:
        """Adds opposite changes to a part at both ends, unless they are non-finite."""
        parts = [self._sides[end].parts[number] for end in exchange.ends]
        dtype = parts[0].dtype
        asker, asked = (self._codecs_of(exchange, e)[dtype] for e in exchange.ends)
        # The asker's codec may overwrite `theirs`.
        kept = theirs.clone() if asked.remembers else theirs
        change = torch.empty(len(parts[0]), dtype=dtype, device=mine.device)
        finite = math.isfinite(asker.change(mine, theirs, change, number))
        if finite:
            parts[0].add(change, exchange.weight)
            parts[1].add(change, -exchange.weight)
        if asked.remembers:
            asked.change(kept, mine, change, number)
        return finite

    def _codecs_of(
        self, exchange: SimulatedExchange, end: int
    ) -> dict[torch.dtype, Codec]:
        lane = (exchange.asker, exchange.asked, end)
        if lane not in self._codecs:
            replica = self._sides[end].replica
            self._codecs[lane] = codecs_of(replica, self._wire_dtype)
        return self._codecs[lane]
