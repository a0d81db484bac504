"""Rounds of all super-learners of one process, on rows of weights.

The arithmetic is the engine's: `mixing.average` and `mixing.keep_change`. All rows are
in one memory, so there is no transport.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lightning_adpsgd.mixing.averages import all_finite, average, keep_change
from lightning_adpsgd.mixing.statistics import Tally
from lightning_adpsgd.topology.matrices import identity, with_gain
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.virtual.timeline import parts_of
from lightning_adpsgd.weights.replica import averaging_dtype
from lightning_adpsgd.weights.streams import has_streams

# Elements: the most in the stretches of all rows, with room for results; the least in
# the stretch of one row.
_CACHED, _LEAST_STRETCH = 1 << 17, 1 << 12
_MOST_ROWS = 128  # a product of matrices takes S operations for each weight


class RowMixer:
    """Applies rounds of a schedule to all rows at once; a `mixing.Mixer`.

    `mix` directly follows `take_snapshot`, so the rows cannot change in between and
    need no copy. Rows are processed in stretches that together fit into a core's cache.

    Args:
        matrices: weights [S, P] for each dtype.
        hidden: whether a round runs beside the next gradients. If so, `take_in` adds
            the change of one row after `finish`; otherwise `mix` adds all changes.

    Attributes:
        round: number of the next round.
        tally: summed counters of all rows; staleness is counted in rounds.
        refused: number of refused changes of all rows, a tensor [] on their device.
    """

    def __init__(
        self, matrices: Sequence[Tensor], schedule: Schedule, hidden: bool
    ) -> None:
        self._matrices, self._schedule, self._hidden = matrices, schedule, hidden
        self.device = matrices[0].device
        self._length = stretch_length(schedule.num_super_learners, self.device)
        if has_streams(self.device):  # many launches cost more than a cache saves
            self._length = max(matrix.shape[1] for matrix in matrices)
        self._changes = [self._room(matrix) for matrix in matrices]
        self.round, self._waiting = 0, set[int]()
        size = schedule.num_super_learners
        self._refused = torch.zeros(size, dtype=torch.bool, device=self.device)
        self.refused = torch.zeros((), dtype=torch.int64, device=self.device)
        self.tally = Tally()

    def take_snapshot(self) -> None:
        """Does nothing, because the rows do not change until `mix`."""

    @torch.no_grad()
    def mix(self) -> None:
        """Computes ``gamma (sum_j T[j, i] w_j - w_i)`` of each row."""
        self._refused.zero_()
        for matrix, changes in zip(self._matrices, self._changes, strict=True):
            mixing = None
            if not self._schedule.is_mean(self.round) and _multiplies_well(changes):
                mixing = _changing(self._schedule, self.round).to(changes)
            for start in range(0, matrix.shape[1], self._length):
                stretch = matrix[:, start : start + self._length]
                begin = start if self._hidden else 0
                change = changes[:, begin : begin + stretch.shape[1]]
                self._mix(stretch.to(change.dtype), mixing, change)
                if not self._hidden:
                    stretch.add_(change)
            row_bytes = matrix.shape[1] * changes.dtype.itemsize
            self.tally.bytes_sent += self._bytes_of(row_bytes)
        self.round += 1
        self.refused += self._refused.sum()
        self.tally.exchanges += self._schedule.num_super_learners

    def finish(self) -> None:
        """Makes the changes of a hidden round available to `take_in`."""
        if self._hidden:
            self._waiting = set(range(self._schedule.num_super_learners))
        self.tally.merges += self._schedule.num_super_learners

    @torch.no_grad()
    def take_in(self, row: int) -> None:
        """Adds the change of a hidden round to a row; does nothing the second time."""
        if row in self._waiting:
            self._waiting.remove(row)
            for matrix, change in zip(self._matrices, self._changes, strict=True):
                matrix[row].add_(change[row])

    def _room(self, matrix: Tensor) -> Tensor:
        length = matrix.shape[1] if self._hidden else self._length
        dtype = averaging_dtype(matrix.dtype)
        return torch.zeros(len(matrix), length, dtype=dtype, device=matrix.device)

    def _mix(self, rows: Tensor, mixing: Tensor | None, into: Tensor) -> None:
        if self._schedule.is_mean(self.round):
            into.copy_(rows.mean(0))
            if not _has_diverged(into[0]):
                self._refused |= keep_change(into, rows, self._schedule.gain)
                return
            self._refused.fill_(True)
            finite = [i for i, row in enumerate(rows) if all_finite([row])]
            into.copy_(rows[finite].mean(0))
        elif mixing is not None and all_finite([torch.mm(mixing, rows, out=into)]):
            return
        else:  # row for row: a product spreads NaN from one row to all
            self._average(list(rows), into)
        for i, (change, own) in enumerate(zip(into, rows, strict=True)):
            self._refused[i] |= keep_change(change, own, self._schedule.gain)

    def _average(self, rows: list[Tensor], into: Tensor) -> None:
        parts = parts_of(self._schedule, self.round)
        for part, mixed in zip(parts, into, strict=True):
            average(rows, part.takes, mixed)
        if not _has_diverged(into):
            return
        finite = [all_finite([row]) for row in rows]
        for i, (part, mixed) in enumerate(zip(parts, into, strict=True)):
            if not all_finite([mixed]):
                self._refused[i] = True
                # Row i replaces the rows that are not finite, as in `RoundMixer`.
                kept = [rows[j if ok else i] for j, ok in enumerate(finite)]
                average(kept, part.takes, mixed)

    def _bytes_of(self, row_bytes: int) -> int:
        """The bytes that all rows together send in a round."""
        if self._schedule.is_mean(self.round):  # by a ring all-reduce
            return 2 * row_bytes * (self._schedule.num_super_learners - 1)
        parts = parts_of(self._schedule, self.round)
        others = (len({*part.gives} - {i}) for i, part in enumerate(parts))
        return row_bytes * sum(others)


def _has_diverged(mixed: Tensor) -> bool:
    # Asking a GPU would block the thread.
    return mixed.device.type == "cpu" and not all_finite([mixed])


def stretch_length(num_rows: int, device: torch.device) -> int:
    """The length at which the stretches of all rows together fit into a core's cache.

    It is a power of two. So a stretch that begins at a multiple of it lies within one
    part of a `CommunicationSide`.
    """
    if has_streams(device):
        return 1 << 20
    fitting = 1 << ((_CACHED // num_rows).bit_length() - 1)
    return max(_LEAST_STRETCH, fitting)


@lru_cache(maxsize=32)
def _changing(schedule: Schedule, round: int) -> Tensor:
    """``(T_gamma - 1)^T`` of a round."""
    if (first := schedule.first_like(round)) < round:
        return _changing(schedule, first)
    mixing = with_gain(schedule.mixing(round), schedule.gain)
    return (mixing - identity(len(mixing))).T


def _multiplies_well(rows: Tensor) -> bool:
    # On accelerators and in lower precisions, a product may have fewer bits.
    full = torch.get_float32_matmul_precision() == "highest"
    return rows.device.type == "cpu" and full and len(rows) <= _MOST_ROWS
