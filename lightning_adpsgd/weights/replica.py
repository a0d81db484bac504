"""The communication side of a learner's weights, which exchanges read and change.

    training side        w   changed by the optimizer and, at step boundaries, by merges
    communication side   x   w + d: what an exchange reads
                         d   the sum of what exchanges changed since the last merge

docs/concepts.md, "The asynchronous engine", says why x is not stored, and why the sum
over all learners stays the same.

The units, from large to small: a vector holds all weights of one dtype. A shard is the
1/N of it that one of N learners exchanges, in one tensor or several. A chunk is the
most that one message carries. A part lies in one tensor and fits into a core's cache
(on a GPU it may be as long as a chunk). A part that was not exchanged costs a step
boundary nothing. If w is in half precision, the rounding error of ``w + d`` stays in d,
so that merges never lose it. Nothing here communicates.
"""

import itertools
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_adpsgd.weights.streams import Guard, has_streams

PART_ELEMENTS = 1 << 18
"""The most elements of a part: the lock is held for one at a time."""
JOINED_ELEMENTS = 1 << 19
"""The most elements of joined parts: each part of a message has a fixed cost."""
CHUNK_ELEMENTS = 1 << 20
"""The most elements of a chunk, and so of a message."""


class Part:
    """A part of w and d; the engine's lock guards all but the optimizer's writes to w.

    Attributes:
        place: number of the part, the same in the counterparts of all super-learners.
        changed: whether an exchange changed it since the last merge.
        dtype: precision in which averages are taken.
    """

    def __init__(self, place: int, weights: Tensor, change: Tensor) -> None:
        self.place, self.changed = place, False
        self.dtype = change.dtype
        self._weights, self._change = weights, change
        self._length = change.numel()  # read too often to ask the tensor each time
        self._shown, self._taken = weights, None
        self._update: Tensor | None = None  # u, unless it is being found
        self._update_age = 0
        # Half precision rounds away most of what one exchange changes.
        self._keeps_rest = weights.dtype != change.dtype

    def __len__(self) -> int:
        return self._length

    @property
    def plain(self) -> Tensor | None:
        """The memory of w, if x is w; not to be written to."""
        added = self._taken is not None or self._update is not None
        return None if added or self.changed or self._keeps_rest else self._shown

    def runs(self, num: int, length: int) -> Sequence[Tensor]:
        """Views of runs of elements of w, evenly spread; one view if it is short."""
        if len(self) <= num * length:
            return [self._weights]
        apart = len(self) // num
        return [run[:length] for run in self._weights.split(apart)]

    def add_awaiting(self, into: Tensor, begin: int) -> None:
        """Turns a copy of a slice of w, which starts at `begin`, into one of x."""
        end = begin + len(into)
        if self.changed or self._keeps_rest:
            into.add_(self._change[begin:end])
        if self._taken is not None:
            into.add_(self._taken[begin:end])

    def show(self, weights: Tensor) -> None:
        """Makes exchanges read other weights instead of w, and no u until the next."""
        self._shown, self._update_age = weights, sys.maxsize

    def show_unmerged(self, weights: Tensor) -> None:
        """Makes exchanges read `weights`, and adds w - weights to d, so x stays."""
        more = self._weights.to(self.dtype) - weights
        if self.changed or self._keeps_rest:
            self._change.add_(more)
        else:
            self._change.copy_(more)
        self._shown, self.changed = weights, True

    def hide_update(self) -> None:
        """Lets no exchange read u, until `show_update`."""
        self._update = None

    def begin_update(self, memory: Tensor) -> None:
        """Keeps w in `memory`, before the optimizer step; needs no lock."""
        memory.copy_(self._weights)
        self._update_age = -1

    def end_update(self, memory: Tensor) -> None:
        """u = w - `memory`, after the optimizer step and `step_on`; needs no lock."""
        torch.sub(self._weights, memory, out=memory)

    def show_update(self, memory: Tensor) -> None:
        """Lets exchanges read the u that `end_update` has left in `memory`."""
        self._update = memory

    def step_on(self) -> None:
        """Counts a step since `begin_update`."""
        self._update_age += 1

    def read(self, into: Tensor, ahead: Sequence[float] = ()) -> None:
        """Reads x = w + d, including changes that were taken but not merged yet.

        Args:
            ahead: multiples of u to add, by the number of steps since u was found.
        """
        if self._keeps_rest:
            into.copy_(self._shown).add_(self._change)
        elif self.changed:
            torch.add(self._shown, self._change, out=into)
        else:
            into.copy_(self._shown)
        if self._taken is not None:
            into.add_(self._taken)
        age = self._update_age  # the training thread counts on meanwhile
        if self._update is not None and age < len(ahead) and ahead[age]:
            # Not by zero: the u of weights that were not finite is not, either.
            into.add_(self._update, alpha=ahead[age])

    def add(self, change: Tensor, weight: float) -> None:
        """Adds an exchange at this end: d += weight * change."""
        if self.changed or self._keeps_rest:
            self._change.add_(change, alpha=weight)
        else:  # d counts as zero, whatever its memory holds after a merge
            torch.mul(change, weight, out=self._change)
        self.changed = True

    def merge(self, scratch: Tensor) -> None:
        """Merges: w += d; d = 0, or the rounding error of a w in half precision."""
        if self._keeps_rest:
            old = scratch[: len(self)].copy_(self._weights)
            self._weights.add_(self._change)
            self._change.add_(old.sub_(self._weights))  # old - new is what d gave away
        else:
            self._weights.add_(self._change)
        self.changed = False

    def put(self, weights: Tensor) -> None:
        """w = weights; d = 0."""
        self._weights.copy_(weights)
        self._change.zero_()
        self._taken, self._update_age, self.changed = None, sys.maxsize, False

    def take(self, into: Tensor) -> None:
        """Moves d to other memory, from which it is merged; x does not change."""
        into.copy_(self._change)
        if self._keeps_rest:
            self._change.zero_()
        self._taken, self.changed = into, False

    def merge_taken(self, taken: Tensor) -> None:
        """Merges what `take` moved, and zeros if it moved nothing; x does not change.

        The rounding error of a w in half precision goes back to d.
        """
        if self._keeps_rest:
            before = self._weights.to(taken.dtype, copy=True)
            self._weights.add_(taken)
            self._change.add_(before.sub_(self._weights).add_(taken))
        else:
            self._weights.add_(taken)
        self._taken = None


class Chunk:
    """Parts in order: the unit of a copy, and the content of the longest messages.

    A shorter message carries fewer parts, joined into one such chunk with one part.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts, self.place, self.dtype = parts, parts[0].place, parts[0].dtype
        self._lengths = [len(part) for part in parts]
        self._length = sum(self._lengths)

    def __len__(self) -> int:
        return self._length

    def read(self, into: Tensor, ahead: Sequence[float] = ()) -> None:
        """Reads x = w + d, as `Part.read`."""
        for part, piece in zip(self.parts, self.split(into), strict=True):
            part.read(piece, ahead)

    def add(self, change: Tensor, weight: float) -> None:
        """Adds an exchange at this end, as `Part.add`."""
        for part, piece in zip(self.parts, self.split(change), strict=True):
            part.add(piece, weight)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Splits a tensor of the chunk's length into views, one for each part."""
        return torch.split_with_sizes(tensor, self._lengths)


class Replica:
    """The communication side (x and d) of one learner's shards, in chunks.

    `state` is the engine's lock, held for one part at a time, for memory operations.
    Only the training thread writes `step` and `wait_seconds`, the time for which it
    waited for the lock. `merge` does not wait for the lock: a part that finds it busy
    is merged at the next boundary.

    Args:
        shards: w, this learner's shards of the flat vectors, real and on one device, by
            section (`sections`). Consecutive ones of one dtype share chunks.
        part_elements: most elements of a part; on a GPU, a part is a chunk.

    Attributes:
        chunks: chunks of all shards, in order.
        sections: chunks of each section.
        part_elements: number of elements of the longest part.
        guard: `state` and, on a GPU, the order of the streams.
        step: number of optimizer steps that w has seen.
        landed_at: time of the last message of an exchange, by `time.monotonic`.
    """

    def __init__(
        self,
        shards: Sequence[Sequence[Tensor]],
        chunk_elements: int,
        state: threading.Condition,
        part_elements: int = PART_ELEMENTS,
    ) -> None:
        self.chunk_elements = chunk_elements
        vectors = [vector for section in shards for vector in section]
        self.device = vectors[0].device if vectors else torch.device("cpu")
        # Launching a kernel costs more than a cache could save.
        whole = has_streams(self.device)
        longest = chunk_elements if whole else part_elements
        self.part_elements = min(longest, chunk_elements)
        self.guard = Guard(state, self.device)
        self._scratch: dict[torch.dtype, Tensor] = {}
        self.step, self.wait_seconds, self.landed_at = 0, 0.0, 0.0
        self.sections = [[*self._cut(section)] for section in shards]
        self.chunks = [*itertools.chain.from_iterable(self.sections)]

    def show(self, shards: Sequence[Sequence[Tensor]], unmerged: bool = False) -> None:
        """Makes exchanges read these weights, until called with w again.

        Args:
            unmerged: whether these are w from before the last merge. The merge is
                undone: its change goes back into d.
        """
        for chunk, views in zip(self.chunks, self._views(shards), strict=True):
            with self.guard:
                for part, shown in zip(chunk.parts, views, strict=True):
                    (part.show_unmerged if unmerged else part.show)(shown)

    def snapshot(self, chunks: Sequence[Chunk] | None = None) -> list[Tensor]:
        """Copies x of some or all chunks to the host.

        As in an exchange, some elements may have seen one more step than others.
        """
        found = list[Tensor]()
        for chunk in self.chunks if chunks is None else chunks:
            copy = torch.empty(len(chunk), dtype=chunk.dtype, device=self.device)
            with self.guard:
                chunk.read(copy)
            found.append(copy.cpu())
        return found

    @torch.no_grad()
    def spread(
        self, values: Sequence[Tensor], into: Sequence[Sequence[Tensor]]
    ) -> None:
        """Writes a snapshot, or a mean of snapshots, into shards shaped like w."""
        places = zip(self.chunks, values, self._views(into), strict=True)
        for chunk, value, parts in places:
            for part, its_own in zip(parts, chunk.split(value), strict=True):
                part.copy_(its_own)

    @torch.no_grad()
    def put(self, values: Sequence[Tensor]) -> None:
        """Adopts other weights, in the form of a snapshot: w = values, d = 0.

        Changes that are not merged yet are lost with the old weights.
        """
        for chunk, value in zip(self.chunks, values, strict=True):
            for part, new in zip(chunk.parts, chunk.split(value), strict=True):
                with self._timed_guard():
                    part.put(new)

    def merge(self) -> bool:
        """Merges changed parts while the lock is free; returns whether any were."""
        has_merged = False
        for part in self._changed_parts():
            if self.guard.try_enter():
                try:
                    part.merge(self._scratch[part.dtype])
                finally:
                    self.guard.leave()
                has_merged = True
        return has_merged

    def merge_all(self) -> None:
        """Merges all parts; no exchange may be under way."""
        for part in self._changed_parts():
            with self._timed_guard():
                part.merge(self._scratch[part.dtype])

    def take(self, into: Sequence[Tensor]) -> list[int]:
        """Moves d of changed chunks to other memory, from which it is merged.

        Args:
            into: zeros, one tensor for each chunk.

        Returns:
            The numbers of the chunks whose d was moved.
        """
        changed = list[int]()
        for number, chunk in enumerate(self.chunks):
            if not any(part.changed for part in chunk.parts):
                continue
            changed.append(number)
            for part, taken in zip(chunk.parts, chunk.split(into[number]), strict=True):
                with self._timed_guard():
                    if part.changed:
                        part.take(taken)
        return changed

    def merge_taken(self, number: int, taken: Tensor) -> None:
        """Merges what `take` moved from a chunk."""
        chunk = self.chunks[number]
        for part, of_part in zip(chunk.parts, chunk.split(taken), strict=True):
            with self._timed_guard():
                part.merge_taken(of_part)

    def _changed_parts(self) -> Iterator[Part]:
        return (p for chunk in self.chunks for p in chunk.parts if p.changed)

    @contextmanager
    def _timed_guard(self) -> Iterator[None]:
        begin = time.perf_counter()
        with self.guard:
            self.wait_seconds += time.perf_counter() - begin
            yield

    def _views(self, shards: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Yields the views of each chunk, one per part, into shards shaped like w."""
        for section in shards:
            for run in runs_of_one_dtype(section):
                for pieces in in_chunks(run, self.chunk_elements):
                    parts = [piece.split(self.part_elements) for piece in pieces]
                    yield [*itertools.chain.from_iterable(parts)]

    def _cut(self, section: Sequence[Tensor]) -> Iterator[Chunk]:
        # The other end may have further sections: places count within one.
        places = itertools.count()
        for run in runs_of_one_dtype(section):
            yield from self._cut_run(run, places)

    def _cut_run(self, run: Sequence[Tensor], places: Iterator[int]) -> Iterator[Chunk]:
        dtype, device = averaging_dtype(run[0].dtype), self.device
        change = torch.zeros(sum(map(len, run)), dtype=dtype, device=device)
        scratch = torch.empty(self.part_elements, dtype=dtype, device=device)
        self._scratch.setdefault(dtype, scratch)
        for weights in self._views([run]):
            lengths = [len(piece) for piece in weights]
            changes = change[: sum(lengths)].split(lengths)
            change = change[sum(lengths) :]
            both = zip(weights, changes, strict=True)
            yield Chunk([Part(next(places), *w_and_d) for w_and_d in both])


def runs_of_one_dtype(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of consecutive vectors of one dtype, without empty vectors."""
    filled = (tensor for tensor in tensors if len(tensor))
    for _, run in itertools.groupby(filled, key=lambda tensor: tensor.dtype):
        yield list(run)


def places_in(
    packed: Iterable[Tensor], vectors: Iterable[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each vector, with its place in memory packed by dtype."""
    for memory, run in zip(packed, runs_of_one_dtype(vectors), strict=True):
        lengths = [len(vector) for vector in run]
        yield from zip(run, memory.split(lengths), strict=True)


def in_chunks(tensors: Iterable[Tensor], length: int) -> Iterator[list[Tensor]]:
    """Cuts tensors, one after another, into chunks of at most `length` elements."""
    pieces, room = list[Tensor](), length
    for tensor in tensors:
        while len(tensor):
            pieces.append(tensor[:room])
            tensor = tensor[room:]
            room -= len(pieces[-1])
            if not room:
                yield pieces
                pieces, room = [], length
    if pieces:
        yield pieces


def as_real(vector: Tensor) -> Tensor:
    """A real vector unchanged; a complex one as a view of real and imaginary parts."""
    return torch.view_as_real(vector).flatten() if vector.is_complex() else vector


def averaging_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which averages are taken: at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
