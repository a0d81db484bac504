"""What exchanges read and change of a learner's weights, chunk by chunk.

    training side        w   changed by the optimizer and, at step boundaries, by merges
    communication side   x   w + d: what an exchange reads
                         d   the sum of what exchanges changed since the last merge

    merge of i           w_i += d_i;  d_i = 0

x is not stored: an exchange reads w where it lies, at any time, so that nobody takes
snapshots for exchanges that may never come. In the middle of an optimizer step it reads
some elements before and some after their update; each is a weight that the learner has
had, and both ends of an exchange use what they read, so that no sum changes by it.

A chunk is what one message is about; its parts are what is worked on at once, small
enough for a core's cache (on a GPU a chunk is one part). The work of a step boundary
follows the traffic: what was not exchanged costs nothing. Where w is in half precision,
what the rounding of ``w + d`` leaves out stays in d, so that no number of merges loses
it. Nothing here communicates.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_adpsgd.weights.streams import Guard, has_streams

# Elements of a part: three of them, in float32, fit into a core's cache.
PART_ELEMENTS = 1 << 17

# For a copy of one moment: between two of these an optimizer may well have ended.
_TRIES, _PAUSE_S = 50, 0.002


class Part:
    """A stretch of w and d; the engine's lock guards all of it but the optimizer's w.

    Attributes:
        place: Number of the part, the same in the counterparts of all super-learners.
        changed: Whether an exchange changed it since the last merge.
        dtype: In which averages are taken.
    """

    def __init__(self, place: int, weights: Tensor, change: Tensor) -> None:
        self.place, self.changed = place, False
        self.dtype = change.dtype
        self._weights, self._change = weights, change
        self._length = change.numel()  # asked for more often than it is cheap
        self._shown, self._taken = weights, None
        # Half precision rounds away most of what one exchange changes.
        self._keeps_rest = weights.dtype != change.dtype

    def __len__(self) -> int:
        return self._length

    @property
    def is_plain(self) -> bool:
        """Whether x is w as it lies."""
        return not (self.changed or self._keeps_rest) and self._taken is None

    @property
    def plain(self) -> Tensor | None:
        """x where it lies, if it is w as it lies; not to be written to."""
        return self._shown if self.is_plain else None

    @property
    def room(self) -> Tensor | None:
        """The memory of d, while d counts as zero, whatever a merge has left in it."""
        return None if self.changed or self._keeps_rest else self._change

    @property
    def pending(self) -> Tensor | None:
        """d, unless it counts as zero."""
        return self._change if self.room is None else None

    def restore(self, pending: Tensor, changed: bool) -> None:
        """Puts back what `pending` was, and whether an exchange had changed it."""
        self._change.copy_(pending)
        self.changed = changed

    def add_awaiting(self, into: Tensor, begin: int) -> None:
        """Turns a stretch of w, from an element of this part on, into that of x."""
        end = begin + len(into)
        if self.changed or self._keeps_rest:
            into.add_(self._change[begin:end])
        if self._taken is not None:
            into.add_(self._taken[begin:end])

    def show(self, weights: Tensor) -> None:
        """What to read in the place of w."""
        self._shown = weights

    def read(self, into: Tensor) -> None:
        """x = w + d, and what was taken from d and is not merged yet."""
        if self._keeps_rest:
            into.copy_(self._shown).add_(self._change)
        elif self.changed:
            torch.add(self._shown, self._change, out=into)
        else:
            into.copy_(self._shown)
        if self._taken is not None:
            into.add_(self._taken)

    def add(self, change: Tensor, weight: float) -> None:
        """d += weight * change: what an exchange does at this end."""
        if self.room is None:
            self._change.add_(change, alpha=weight)
        else:
            torch.mul(change, weight, out=self._change)
        self.changed = True

    def merge(self, room: Tensor) -> None:
        """w += d; d = 0, but for what the rounding of a w in half precision leaves."""
        if self._keeps_rest:
            old = room[: len(self)].copy_(self._weights)
            self._weights.add_(self._change)
            self._change.add_(old.sub_(self._weights))  # old - new is what d gave away
        else:
            self._weights.add_(self._change)
        self.changed = False

    def put(self, weights: Tensor) -> None:
        """w = weights; d = 0."""
        self._weights.copy_(weights)
        self._change.zero_()
        self._taken, self.changed = None, False

    def take(self, into: Tensor) -> None:
        """Moves d to another place, to be merged from there; x does not change."""
        into.copy_(self._change)
        if self._keeps_rest:
            self._change.zero_()
        self._taken, self.changed = into, False

    def keep(self, rest: Tensor) -> None:
        """What was taken is merged, but for this much."""
        if self._keeps_rest:
            self._change.add_(rest)
        self._taken = None


class Chunk:
    """What one message is about.

    Args:
        weights: w.
        parts: In order, all but the last of the same length.

    Attributes:
        parts: As given.
    """

    def __init__(self, weights: Tensor, parts: list[Part]) -> None:
        self.parts = parts
        self._shown = weights

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def dtype(self) -> torch.dtype:
        """In which averages of it are taken."""
        return self.parts[0].dtype

    def read(self, into: Tensor) -> None:
        """x = w + d of all its parts, in one pass where nothing is changed."""
        if all(part.is_plain for part in self.parts):
            into.copy_(self._shown)
            return
        for part, place in zip(self.parts, self.split(into), strict=True):
            part.read(place)

    def show(self, weights: Tensor) -> None:
        """What to read in the place of w."""
        self._shown = weights
        for part, stretch in zip(self.parts, self.split(weights), strict=True):
            part.show(stretch)

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """A tensor as long as the chunk, by its parts."""
        return tensor.split(len(self.parts[0]))

    @property
    def changed(self) -> bool:
        """Whether an exchange changed any of its parts since the last merge."""
        return any(part.changed for part in self.parts)


class Replica:
    """The communication side of one learner's shards of the weights, in chunks.

    `state` is the engine's lock. It is held for one part at a time, for operations in
    memory. `wait_seconds`, the time for which the training thread waited for it, and
    `step` are written by the training thread alone, and so is `updating`. In `merge` it
    does not even wait for that: a part that an exchange is working on is merged at the
    next boundary.

    Args:
        shards: w: this learner's part of each flat vector, of real numbers, all on one
            device.
        chunk_elements: Elements of a chunk.
        state: Guards d.

    Attributes:
        chunks: In order, over all shards.
        device: Where w and d are.
        part_elements: Elements of the longest part.
        guard: Over d; `state`, and on a GPU the order of the streams.
        step: Optimizer steps that w has seen.
        updating: Whether an optimizer is at work on w.
    """

    def __init__(
        self, shards: Sequence[Tensor], chunk_elements: int, state: threading.Condition
    ) -> None:
        self._chunk_elements = chunk_elements
        self.device = shards[0].device if shards else torch.device("cpu")
        # The launch of a kernel costs more than a cache could save.
        whole = has_streams(self.device)
        self.part_elements = chunk_elements if whole else PART_ELEMENTS
        self.guard = Guard(state, self.device)
        self._room: dict[torch.dtype, Tensor] = {}
        self.chunks: list[Chunk] = []
        self.step, self.updating = 0, False
        self.wait_seconds = 0.0
        for shard in shards:
            self._cut(shard)

    def show(self, shards: Sequence[Tensor]) -> None:
        """What exchanges read in the place of w, until it is called with w again."""
        stretches = (s for shard in shards for s in shard.split(self._chunk_elements))
        for chunk, stretch in zip(self.chunks, stretches, strict=True):
            with self.guard:
                chunk.show(stretch)

    def snapshot(self) -> list[Tensor]:
        """x of all chunks as it is now, on the host; for a thread that may wait.

        It is of one moment between two steps, unless an optimizer is at work nearly all
        the time: then some elements may have seen one step more than others.
        """
        for _ in range(_TRIES):
            begin = self.step
            copies = [self._copy_of(chunk) for chunk in self.chunks]
            if not self.updating and begin == self.step:
                return copies
            time.sleep(_PAUSE_S)
        return [self._copy_of(chunk) for chunk in self.chunks]

    @torch.no_grad()
    def spread(self, values: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Writes what `snapshot` gave, or a mean of such, into shards of w's shape."""
        stretches = (s for shard in into for s in shard.split(self._chunk_elements))
        for value, stretch in zip(values, stretches, strict=True):
            stretch.copy_(value)

    @torch.no_grad()
    def put(self, values: Sequence[Tensor]) -> None:
        """w = values, d = 0: other weights, chunk by chunk, as `snapshot` gives them.

        What exchanges have changed and no merge has brought in yet goes with the old
        weights.
        """
        for chunk, value in zip(self.chunks, values, strict=True):
            for part, new in zip(chunk.parts, chunk.split(value), strict=True):
                with self._timed_guard():
                    part.put(new)

    def merge(self) -> bool:
        """w += d, where an exchange changed d and is not just doing so; if anywhere."""
        has_merged = False
        for part in self._changed_parts():
            if self.guard.try_enter():
                try:
                    part.merge(self._room[part.dtype])
                finally:
                    self.guard.leave()
                has_merged = True
        return has_merged

    def merge_all(self) -> None:
        """w += d, without exception; no exchange is under way."""
        for part in self._changed_parts():
            with self._timed_guard():
                part.merge(self._room[part.dtype])

    def take(self, into: Sequence[Tensor]) -> list[int]:
        """Moves d of changed chunks away, to be merged from there.

        Args:
            into: One tensor for each chunk, of zeros.

        Returns:
            Numbers of the chunks whose d was moved.
        """
        changed = [n for n, chunk in enumerate(self.chunks) if chunk.changed]
        for number in changed:
            chunk, places = self.chunks[number], self.chunks[number].split(into[number])
            for part, place in zip(chunk.parts, places, strict=True):
                with self._timed_guard():
                    if part.changed:
                        part.take(place)
        return changed

    def keep(self, number: int, rest: Tensor) -> None:
        """Gives back what the rounding of a merge of chunk `number` has left out."""
        chunk = self.chunks[number]
        for part, left in zip(chunk.parts, chunk.split(rest), strict=True):
            with self._timed_guard():
                part.keep(left)

    def _copy_of(self, chunk: Chunk) -> Tensor:
        copy = torch.empty(len(chunk), dtype=chunk.dtype, device=self.device)
        with self.guard:
            chunk.read(copy)
        return copy.cpu()

    def _changed_parts(self) -> Iterator[Part]:
        return (p for chunk in self.chunks for p in chunk.parts if p.changed)

    @contextmanager
    def _timed_guard(self) -> Iterator[None]:
        begin = time.perf_counter()
        with self.guard:
            self.wait_seconds += time.perf_counter() - begin
            yield

    def _cut(self, shard: Tensor) -> None:
        dtype, device = averaging_dtype(shard.dtype), self.device
        change = torch.zeros(len(shard), dtype=dtype, device=device)
        room = torch.empty(self.part_elements, dtype=dtype, device=device)
        self._room.setdefault(dtype, room)
        place = sum(len(chunk.parts) for chunk in self.chunks)
        chunks = (t.split(self._chunk_elements) for t in (shard, change))
        for pair in zip(*chunks, strict=True):
            stretches = zip(*(t.split(self.part_elements) for t in pair), strict=True)
            parts = [Part(place + n, *both) for n, both in enumerate(stretches)]
            place += len(parts)
            self.chunks.append(Chunk(pair[0], parts))


def as_real(vector: Tensor) -> Tensor:
    """The vector, or of a complex one the view of its real and imaginary numbers."""
    return torch.view_as_real(vector).flatten() if vector.is_complex() else vector


def averaging_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which averages are taken: at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def to_averaging_dtype(tensor: Tensor) -> Tensor:
    """A copy in the precision in which averages are taken."""
    return tensor.detach().to(averaging_dtype(tensor.dtype), copy=True)
