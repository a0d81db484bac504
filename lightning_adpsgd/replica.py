"""The communication side of a learner: what exchanges read and change, chunk by chunk.

    training side        w   changed by the optimizer and, at step boundaries, by merges
    communication side   x   a snapshot of w, changed by every exchange
                         d   the sum of what exchanges changed since the last merge

    merge of i           w_i += d_i;  d_i = 0;  x_i = w_i

A chunk is what one message is about; its parts are what is worked on at once, small
enough for a core's cache. The work of a step boundary follows the traffic: a chunk that
was not exchanged, and is not about to be, costs nothing. What the rounding of ``w + d``
leaves out stays in d, so that ``w + d`` is exact over any number of merges, also where
w is in half precision. Nothing here communicates.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

# Elements of a part: three of them, in float32, fit into a core's cache.
PART_ELEMENTS = 1 << 17


class Part:
    """A stretch of w, x and d; the engine's lock guards x, d and the two marks.

    Attributes:
        place: Number of the part, the same in the counterparts of all super-learners.
        snapshot: x, in the precision in which averages are taken.
        step: Optimizer step of which x is a snapshot.
    """

    def __init__(
        self, place: int, weights: Tensor, snapshot: Tensor, change: Tensor
    ) -> None:
        self.place, self.snapshot = place, snapshot
        self.step = 0
        self._weights, self._change = weights, change
        self._changed = False

    def __len__(self) -> int:
        return len(self.snapshot)

    @property
    def changed(self) -> bool:
        """Whether an exchange changed it since the last merge."""
        return self._changed

    def add(self, change: Tensor) -> None:
        """What an exchange does at this end: x += c, d += c."""
        self.snapshot.add_(change)
        self._change.add_(change)
        self._changed = True

    def merge(self, step: int) -> None:
        """w += d; x = w; what the rounding of w leaves out stays in d."""
        if self._changed:
            self.snapshot.copy_(self._weights)
            self._weights.add_(self._change)
            # x holds the old w for a moment: old - new is what d has given away.
            self._change.add_(self.snapshot.sub_(self._weights))
        self.snapshot.copy_(self._weights)
        self._changed, self.step = False, step

    def refresh(self, step: int) -> None:
        """x = w + d: a snapshot before d is merged."""
        torch.add(self._weights, self._change, out=self.snapshot)
        self.step = step

    def keep(self, residue: Tensor) -> None:
        """d += what was not merged after all; too little to be a change."""
        self._change.add_(residue)

    def take(self, into: Tensor) -> None:
        """Moves d to another place."""
        into.copy_(self._change)
        self._change.zero_()
        self._changed = False


class Chunk:
    """What one message is about.

    Attributes:
        parts: In order.
        wanted: Set by an exchange that is going to read the chunk: its snapshot should
            be of the next step boundary. Read and cleared by the training thread.
    """

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.wanted = True

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def dtype(self) -> torch.dtype:
        """In which averages of it are taken."""
        return self.parts[0].snapshot.dtype

    @property
    def changed(self) -> bool:
        """Whether an exchange changed any of its parts since the last merge."""
        return any(part.changed for part in self.parts)

    def begin_boundary(self) -> bool:
        """Whether the chunk has work at this step boundary; clears `wanted`."""
        wanted, self.wanted = self.wanted, False
        return wanted or self.changed


class Replica:
    """x and d of one learner's shards of the weights, in chunks.

    `state` is the engine's lock. It is held for one part at a time, for operations in
    memory. `wait_seconds`, the time for which the training thread waited for it, is
    written by the training thread alone.

    Args:
        shards: w: this learner's part of each flat vector.
        chunk_elements: Elements of a chunk.
        state: Guards x and d.
    """

    def __init__(
        self, shards: Sequence[Tensor], chunk_elements: int, state: threading.Condition
    ) -> None:
        self._state = state
        self.chunks: list[Chunk] = []
        self.wait_seconds = 0.0
        for shard in shards:
            self._cut(as_real(shard), chunk_elements)

    def merge(self, step: int) -> None:
        """w += d; x = w where an exchange changed d or is about to read x."""
        for part in self._due_parts():
            with self._timed_state():
                part.merge(step)

    def refresh(self, step: int) -> None:
        """x = w + d of everything, whether or not it was exchanged."""
        for chunk in self.chunks:
            chunk.wanted = False
            for part in chunk.parts:
                with self._timed_state():
                    part.refresh(step)

    def take(self, step: int, into: Sequence[Tensor]) -> list[int]:
        """Moves d of changed chunks away, to be merged from there; x = w + d before.

        Args:
            into: One tensor for each chunk.

        Returns:
            Numbers of the chunks whose d was moved.
        """
        due = [n for n, chunk in enumerate(self.chunks) if chunk.begin_boundary()]
        return [n for n in due if self._take_chunk(self.chunks[n], step, into[n])]

    def expect_reading(self, number: int) -> None:
        """Tells the training thread which chunk an exchange reads next."""
        if number < len(self.chunks):
            self.chunks[number].wanted = True

    def keep(self, number: int, residue: Tensor) -> None:
        """Gives back what the rounding of a merge of chunk `number` has left out."""
        parts = self.chunks[number].parts
        for part, left in zip(parts, residue.split(PART_ELEMENTS), strict=True):
            with self._timed_state():
                part.keep(left)

    def expect_reading_all(self) -> None:
        """The same of all chunks."""
        for chunk in self.chunks:
            chunk.wanted = True

    def _take_chunk(self, chunk: Chunk, step: int, into: Tensor) -> bool:
        changed = False
        for part, place in zip(chunk.parts, into.split(PART_ELEMENTS), strict=True):
            with self._timed_state():
                part.refresh(step)
                if part.changed:
                    part.take(place)
                    changed = True
        return changed

    def _due_parts(self) -> Iterator[Part]:
        for chunk in self.chunks:
            if chunk.begin_boundary():
                yield from chunk.parts

    @contextmanager
    def _timed_state(self) -> Iterator[None]:
        begin = time.perf_counter()
        with self._state:
            self.wait_seconds += time.perf_counter() - begin
            yield

    def _cut(self, shard: Tensor, chunk_elements: int) -> None:
        snapshot = to_averaging_dtype(shard)
        change = torch.zeros_like(snapshot)
        place = sum(len(chunk.parts) for chunk in self.chunks)
        for triple in zip(
            *(t.split(chunk_elements) for t in (shard, snapshot, change)), strict=True
        ):
            stretches = zip(*(t.split(PART_ELEMENTS) for t in triple), strict=True)
            parts = [
                Part(place + number, *three) for number, three in enumerate(stretches)
            ]
            place += len(parts)
            self.chunks.append(Chunk(parts))


def as_real(vector: Tensor) -> Tensor:
    """The vector, or of a complex one the view of its real and imaginary numbers."""
    return torch.view_as_real(vector).flatten() if vector.is_complex() else vector


def to_averaging_dtype(tensor: Tensor) -> Tensor:
    """A copy in the precision in which averages are taken: at least float32."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().to(torch.float32 if half else tensor.dtype, copy=True)
