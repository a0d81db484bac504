"""How super-learners average that share one process: rounds and exchanges of rows.

The arithmetic is the engine's: `mixing.average` and `mixing.keep_change` in a round;
`replica`, `wire` and `node` in an exchange. What is missing is transport and threads:
the two ends of an exchange lie in the same memory, and when it happens is said from
outside (`timeline`).
"""

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_adpsgd.background import InlineWorker
from lightning_adpsgd.gossip.wire import Codec, make_codec
from lightning_adpsgd.matrices import identity, with_gain
from lightning_adpsgd.mixing.averages import (
    average,
    keep_change,
    leave_out_if_not_finite,
)
from lightning_adpsgd.mixing.schedule import Schedule
from lightning_adpsgd.mixing.statistics import Statistics, Tally
from lightning_adpsgd.mixing.synchronous import Order
from lightning_adpsgd.node import ShardGather, SuperLearnerGroup
from lightning_adpsgd.replica import (
    PART_ELEMENTS,
    Part,
    Replica,
    averaging_dtype,
    to_averaging_dtype,
)
from lightning_adpsgd.streams import has_streams
from lightning_adpsgd.virtual.timeline import Exchange, parts_of

_CHUNK_ELEMENTS = 1 << 20
# Elements: of all rows together, to leave room for results beside them; of one row.
_CACHED, _LEAST_STRETCH = 1 << 17, 1 << 12
_MOST_ROWS = 128  # a product takes S times as many operations as there are weights
_NO_WAIT = timedelta()  # nothing is waited for


class RowMixer:
    """Applies rounds of a schedule to all rows at once; a `mixing.Mixer`.

    Rows do not change between `take_snapshot` and `mix`, which follows at once, so that
    there is no copy of them. They are worked on in stretches, of which those of all
    rows fit into a core's cache.

    Args:
        matrices: [S, P] for each dtype.
        schedule: The mixing matrices.
        hidden: Whether a round is joined later, after other gradients: its changes are
            then kept, `finish` hands them out, and `take_in` adds that of a row, which
            may need a gradient at its weights before. Otherwise `mix` adds them.

    Attributes:
        tally: Of all rows together; its staleness counts rounds.
    """

    def __init__(
        self, matrices: Sequence[Tensor], schedule: Schedule, hidden: bool
    ) -> None:
        self._matrices, self._schedule, self._hidden = matrices, schedule, hidden
        self.device = matrices[0].device
        self._length = stretch_length(schedule.num_super_learners, self.device)
        if has_streams(self.device):  # no cache is worth as many launches
            self._length = max(matrix.shape[1] for matrix in matrices)
        self._changes = [self._room(matrix) for matrix in matrices]
        self.round, self._waiting = 0, set[int]()
        size = schedule.num_super_learners
        self._refused = torch.zeros(size, dtype=torch.bool, device=self.device)
        self._num_refused = torch.zeros((), dtype=torch.int64, device=self.device)
        self.tally = Tally()

    def take_snapshot(self) -> None:
        """The rows stay as they are until `mix`."""

    @torch.no_grad()
    def mix(self) -> None:
        """Computes ``gamma (sum_j T[j, i] w_j - w_i)`` of each row."""
        self._refused.zero_()
        for matrix, changes in zip(self._matrices, self._changes, strict=True):
            mixing = self._mixing(changes)
            for place in range(0, matrix.shape[1], self._length):
                stretch = matrix[:, place : place + self._length]
                begin = place if self._hidden else 0
                change = changes[:, begin : begin + stretch.shape[1]]
                self._mix(stretch.to(change.dtype), mixing, change)
                if not self._hidden:
                    stretch.add_(change)
            row_bytes = matrix.shape[1] * changes.dtype.itemsize
            self.tally.bytes_sent += self._bytes_of(row_bytes)
        self.round += 1
        self._num_refused += self._refused.sum()
        self.tally.exchanges += self._schedule.num_super_learners

    def finish(self) -> None:
        """Hands out the changes."""
        if self._hidden:
            self._waiting = set(range(self._schedule.num_super_learners))
        self.tally.merges += self._schedule.num_super_learners

    @torch.no_grad()
    def take_in(self, row: int) -> None:
        """Adds what was handed to a row, once, whatever the row has become."""
        if row in self._waiting:
            self._waiting.remove(row)
            for matrix, change in zip(self._matrices, self._changes, strict=True):
                matrix[row].add_(change[row])

    def statistics(self) -> Statistics:
        """What was done so far; a GPU is awaited for that."""
        return self.tally.snapshot()._replace(refused=int(self._num_refused))

    def refused_before(self, num: int) -> None:
        """Counts on from so many refused changes."""
        self._num_refused.fill_(num)

    def _room(self, matrix: Tensor) -> Tensor:
        length = matrix.shape[1] if self._hidden else self._length
        dtype = averaging_dtype(matrix.dtype)
        return torch.zeros(len(matrix), length, dtype=dtype, device=matrix.device)

    def _mixing(self, like: Tensor) -> Tensor | None:
        """What to multiply all rows with, where that is exact and faster than sums."""
        if self._schedule.is_mean(self.round) or not _multiplies_well(like):
            return None
        return _changing(self._schedule, self.round).to(like)

    def _mix(self, rows: Tensor, mixing: Tensor | None, into: Tensor) -> None:
        if self._schedule.is_mean(self.round):
            torch.sub(rows.mean(0), rows, out=into).mul_(self._schedule.gain)
            self._refused |= leave_out_if_not_finite(into)
            return
        if mixing is not None:
            torch.mm(mixing, rows, out=into)
            if math.isfinite(into.sum().item()):
                return
        # Row for row: in a product, what is not a number becomes everybody's.
        parts, own = parts_of(self._schedule, self.round), list(rows)
        for i, (part, change) in enumerate(zip(parts, into, strict=True)):
            average(own, part.takes, change)
            self._refused[i] |= keep_change(change, own[i], self._schedule.gain)

    def _bytes_of(self, row_bytes: int) -> int:
        """What all rows send in this round."""
        if self._schedule.is_mean(self.round):  # a ring all-reduce
            return 2 * row_bytes * (self._schedule.num_super_learners - 1)
        parts = parts_of(self._schedule, self.round)
        others = (len({*part.gives} - {i}) for i, part in enumerate(parts))
        return row_bytes * sum(others)


class Side:
    """The communication side of one row, merged at the boundaries of its steps.

    Args:
        vectors: w, one for each dtype, of real numbers.
        order: Whether merges come after the update or before it.
        num_learners: N; with several of them a change is merged a step later, because
            the learners of a node gather it while the next step computes.

    Attributes:
        replica: x and d.
        parts: Of all its chunks, in order.
        tally: What it has done.
    """

    def __init__(
        self, vectors: list[Tensor], order: Order, num_learners: int = 1
    ) -> None:
        self._order, self._vectors = order, vectors
        self.replica = Replica(vectors, _CHUNK_ELEMENTS, threading.Condition())
        self._merger = (
            ShardGather(
                vectors, self.replica, SuperLearnerGroup(), _NO_WAIT, InlineWorker()
            )
            if num_learners > 1
            else None
        )
        self.parts = [p for chunk in self.replica.chunks for p in chunk.parts]
        self._parts_of = list(_by_vector(self.parts, vectors))
        self._ages: list[int] = []
        self.tally = Tally()

    def before_update(self) -> None:
        """A gradient is ready."""
        if self._order == "average_then_step":
            self._merge()

    def after_update(self) -> None:
        """The optimizer has changed w."""
        self.replica.step += 1
        if self._order == "step_then_average":
            self._merge()

    def ended(self, first_step: int, num_bytes: int, finite: bool) -> None:
        """Counts an exchange that read the weights of a step, for the next merge."""
        self.tally.bytes_sent += num_bytes
        self.tally.exchanges += finite
        self.tally.refused += not finite
        self._ages.append(first_step)

    def state(self) -> dict[str, Any]:
        """A copy of all but w."""
        pending = {
            part.place: {"d": part.pending.clone(), "changed": part.changed}
            for part in self.parts
            if part.pending is not None
        }
        ages = list(self._ages)
        return {"step": self.replica.step, "ages": ages, "pending": pending}

    def restore(self, state: dict[str, Any]) -> None:
        """Brings back what `state` gave, where nothing has been exchanged."""
        self.replica.step, self._ages = state["step"], list(state["ages"])
        for place, kept in state["pending"].items():
            self.parts[place].restore(kept["d"], kept["changed"])

    def shown(self) -> list[Tensor]:
        """x, one vector for each of w."""
        found = [to_averaging_dtype(vector) for vector in self._vectors]
        for into, parts in zip(found, self._parts_of, strict=True):
            for part, stretch in zip(parts, into.split(len(parts[0])), strict=True):
                part.read(stretch)
        return found

    def awaits_merge(self, number: int, begin: int) -> bool:
        """Whether x is not w in the part of vector `number` that an element lies in."""
        return not self._part(number, begin).is_plain

    def add_awaiting(self, into: Tensor, number: int, begin: int) -> None:
        """Turns a stretch of w that lies in one part into that of x.

        Args:
            into: The stretch, in the precision of averages.
            number: Of the vector.
            begin: Of the stretch in the vector.
        """
        part = self._part(number, begin)
        part.add_awaiting(into, begin % self.replica.part_elements)

    def _part(self, number: int, element: int) -> Part:
        return self._parts_of[number][element // self.replica.part_elements]

    def _merge(self) -> None:
        if self._merger is None:
            self.replica.merge()
        else:
            self._merger.finish()
            self._merger.begin()
        if self._ages:
            for step in self._ages:
                late = 0 if self._merger is None else 1
                self.tally.merged(self.replica.step - step + late)
            self.tally.merges += 1
            self._ages.clear()


def _by_vector(
    parts: Sequence[Part], vectors: Sequence[Tensor]
) -> Iterator[list[Part]]:
    """The parts of each vector."""
    rest = iter(parts)
    for vector in vectors:
        left, mine = len(vector), list[Part]()
        while left:
            mine.append(part := next(rest))
            left -= len(part)
        yield mine


class _Read(NamedTuple):
    """What one end of an exchange read: a message for each part, and when."""

    messages: Sequence[Tensor]
    step: int


def _copied(read: _Read) -> dict[str, Any]:
    messages = [message.clone() for message in read.messages]
    return {"messages": messages, "step": read.step}


_Ends = list[_Read | None]
"""Of the asker and the asked; none as long as what lies there is what was read."""


class Exchanges:
    """The exchanges under way between sides, from what is read to what is changed.

    Both ends are read as they are when an exchange begins. (The engine reads chunk by
    chunk while it goes on; each of its chunks is an exchange in this sense.) A message
    is written only where an end changes before the exchange has ended, or where it is
    encoded; otherwise both are looked at where they lie, part by part in a cache.

    Args:
        sides: By the number of the super-learner; may change. Before anything else
            changes one, `before_change` must be called.
        wire_dtype: What travels; none: the weights as they are.
        device: Of the weights.
    """

    def __init__(
        self,
        sides: Mapping[int, Side],
        wire_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self._sides, self._wire_dtype = sides, wire_dtype
        self._device = device
        self._read: dict[Exchange, _Ends] = {}
        self._of_end = defaultdict[int, dict[Exchange, None]](dict)
        self._codecs: dict[tuple[int, int, int], dict[torch.dtype, Codec]] = {}
        # Memory that was used is used again: the system takes its time to give any.
        self._free = defaultdict[tuple[torch.dtype, int], list[Tensor]](list)

    def begin(self, exchange: Exchange) -> None:
        """From now on both ends count as read."""
        self._enter(exchange, [None, None])
        if self._wire_dtype is not None:
            # An encoder may remember what it saw, and in which order.
            self._read_ends(exchange, exchange.ends)

    def before_change(self, super_learner: int) -> None:
        """Reads what exchanges under way want of a side that is about to change."""
        for exchange in self._of_end[super_learner]:
            self._read_ends(exchange, (super_learner,))

    def end(self, exchange: Exchange) -> None:
        """Changes both ends by what was read: ``d += a (theirs - mine)``."""
        read = self._leave(exchange)
        for end in exchange.ends:
            self.before_change(end)
        asker, asked = sides = [self._sides[end] for end in exchange.ends]
        finite, num_bytes = True, 0
        for number, parts in enumerate(zip(asker.parts, asked.parts, strict=True)):
            mine, theirs = messages = self._messages(exchange, read, number)
            num_bytes += mine.nbytes
            # Before the change, after which no weights are plain.
            own = [m for m, p in zip(messages, parts, strict=True) if m is not p.plain]
            finite &= self._change(exchange, parts, mine, theirs)
            self._give_back(own)
        for side, of_end in zip(sides, read, strict=True):
            step = side.replica.step if of_end is None else of_end.step
            side.ended(step, num_bytes, finite)

    def drop(self, exchange: Exchange) -> None:
        """Forgets what was read."""
        for read in self._leave(exchange):
            if read is not None:
                self._give_back(read.messages)

    def state(self) -> list[list[dict[str, Any] | None]]:
        """A copy of what both ends of each exchange under way were read as."""
        return [[end and _copied(end) for end in ends] for ends in self._read.values()]

    def restore(
        self, begun: Iterable[Exchange], state: list[list[dict[str, Any] | None]]
    ) -> None:
        """Brings back what `state` gave, of the same exchanges in the same order."""
        for exchange, ends in zip(begun, state, strict=True):
            self._enter(exchange, [_Read(**end) if end else None for end in ends])

    def forget(self, super_learner: int) -> None:
        """Forgets what the lanes of a super-learner remember; it has failed."""
        for lane in [key for key in self._codecs if super_learner in key[:2]]:
            del self._codecs[lane]

    def _enter(self, exchange: Exchange, read: _Ends) -> None:
        self._read[exchange] = read
        for end in exchange.ends:
            self._of_end[end][exchange] = None

    def _leave(self, exchange: Exchange) -> _Ends:
        for end in exchange.ends:
            del self._of_end[end][exchange]
        return self._read.pop(exchange)

    def _read_ends(self, exchange: Exchange, ends: Sequence[int]) -> None:
        read = self._read[exchange]
        for place, end in enumerate(exchange.ends):
            if end in ends and read[place] is None:
                read[place] = self._read_end(exchange, end)

    def _read_end(self, exchange: Exchange, end: int) -> _Read:
        side = self._sides[end]
        numbers = range(len(side.parts))
        messages = [self._read_part(exchange, end, number) for number in numbers]
        return _Read(messages, side.replica.step)

    def _messages(
        self, exchange: Exchange, read: _Ends, number: int
    ) -> tuple[Tensor, Tensor]:
        """Of both ends about one part."""
        mine, theirs = (
            self._look_at(exchange, end, number)
            if of_end is None
            else of_end.messages[number]
            for end, of_end in zip(exchange.ends, read, strict=True)
        )
        return mine, theirs

    def _look_at(self, exchange: Exchange, end: int, number: int) -> Tensor:
        """A message, or the weights where they lie if they are what it would hold."""
        part = self._sides[end].parts[number]
        plain = part.plain if self._wire_dtype in (None, part.dtype) else None
        return self._read_part(exchange, end, number) if plain is None else plain

    def _read_part(self, exchange: Exchange, end: int, number: int) -> Tensor:
        part = self._sides[end].parts[number]
        codec = self._codecs_of(exchange, end)[part.dtype]
        message = self._memory(codec.dtype, codec.length(len(part)))
        weights = message
        if codec.dtype != part.dtype:
            weights = self._memory(part.dtype, len(part))
        part.read(weights)
        if weights is not message:
            codec.encode(weights, message, part.place)
            self._give_back([weights])
        return message

    def _change(
        self, exchange: Exchange, parts: Sequence[Part], mine: Tensor, theirs: Tensor
    ) -> bool:
        dtype, place = parts[0].dtype, parts[0].place
        asker, asked = (self._codecs_of(exchange, e)[dtype] for e in exchange.ends)
        if asked.remembers:
            return self._change_remembered(exchange, parts, mine, theirs)
        # In the place of a d that counts as zero, where there is one: less memory is
        # more of it in a cache.
        room = next((p.room for p in parts if p.room is not None), None)
        change = self._memory(dtype, len(parts[0])) if room is None else room
        finite = math.isfinite(asker.change(mine, theirs, change, place))
        if finite:
            _add_opposite(exchange.weight, parts, change)
        if room is None:
            self._give_back([change])
        return finite

    def _change_remembered(
        self, exchange: Exchange, parts: Sequence[Part], mine: Tensor, theirs: Tensor
    ) -> bool:
        """The codecs of both ends see the messages; the first may overwrite theirs."""
        dtype, place = parts[0].dtype, parts[0].place
        asker, asked = (self._codecs_of(exchange, e)[dtype] for e in exchange.ends)
        change, kept = self._memory(dtype, len(parts[0])), self._copy_of(theirs)
        finite = math.isfinite(asker.change(mine, theirs, change, place))
        if finite:
            _add_opposite(exchange.weight, parts, change)
        asked.change(kept, mine, change, place)
        self._give_back([kept, change])
        return finite

    def _codecs_of(self, exchange: Exchange, end: int) -> dict[torch.dtype, Codec]:
        lane = (exchange.asker, exchange.asked, end)
        if lane not in self._codecs:
            dtypes = {part.dtype for part in self._sides[end].parts}
            self._codecs[lane] = {d: make_codec(self._wire_dtype, d) for d in dtypes}
        return self._codecs[lane]

    def _copy_of(self, message: Tensor) -> Tensor:
        return self._memory(message.dtype, len(message)).copy_(message)

    def _memory(self, dtype: torch.dtype, length: int) -> Tensor:
        free = self._free[dtype, length]
        return (
            free.pop()
            if free
            else torch.empty(length, dtype=dtype, device=self._device)
        )

    def _give_back(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._free[tensor.dtype, tensor.numel()].append(tensor)


def _add_opposite(weight: float, parts: Sequence[Part], change: Tensor) -> None:
    """``d += a change`` of the first end, and the opposite, to the last bit.

    The change may lie where a d will; this one is last, in its own place.
    """
    mine, theirs = parts
    if change is mine.room:
        theirs.add(change, -weight)
        mine.add(change, weight)
    else:
        mine.add(change, weight)
        theirs.add(change, -weight)


def stretch_length(num_rows: int, device: torch.device) -> int:
    """Elements of a row that are worked on at once with those of all others.

    So many that they fit into a core's cache; a power of two that lies in one part of a
    `Side`, if it begins at a multiple of itself.
    """
    if has_streams(device):
        return _CHUNK_ELEMENTS
    fitting = 1 << ((_CACHED // num_rows).bit_length() - 1)
    return max(_LEAST_STRETCH, min(fitting, PART_ELEMENTS))


@lru_cache(maxsize=32)
def _changing(schedule: Schedule, round: int) -> Tensor:
    """``(T_gamma - 1)^T`` of a round."""
    period = schedule.topology.period(schedule.num_super_learners)
    if period and round >= period:
        return _changing(schedule, round % period)
    mixing = with_gain(schedule.mixing(round), schedule.gain)
    return (mixing - identity(len(mixing))).T


def _multiplies_well(rows: Tensor) -> bool:
    """Whether a product of matrices is exact to rounding, and faster than sums of rows.

    On accelerators, and where `torch.set_float32_matmul_precision` allows it, products
    are taken in fewer bits than the weights have.
    """
    full = torch.get_float32_matmul_precision() == "highest"
    return rows.device.type == "cpu" and full and len(rows) <= _MOST_ROWS


def message_bytes(side: Side, wire_dtype: torch.dtype | None) -> int:
    """Of the messages about all parts of a side, in one direction."""
    codecs = {part.dtype: make_codec(wire_dtype, part.dtype) for part in side.parts}
    return sum(
        codecs[part.dtype].dtype.itemsize * codecs[part.dtype].length(len(part))
        for part in side.parts
    )
