"""Statistics of phones in context, from which a decision tree is grown.

For each phone, position in its chain, phone before and phone after: the number of
frames, their sum and the sum of their squares. One parallel pass over the labelled
frames computes them. Memory holds the sums of the contexts that occur (some 300,000 for
46 phones) and the frames of one shard per process, however long the corpus is.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from lightning_adpsgd.asr.hmm.gmm import Statistics
from lightning_adpsgd.asr.hmm.states import Topology, phone_runs
from lightning_adpsgd.asr.parallel import fork_map, in_order

Shard = TypeVar("Shard")


class ContextStatistics(NamedTuple):
    """Sums over the frames of each context, in the order of root, left and right.

    `root` is phone · positions + position; `left` and `right` are indices of phones;
    all int64 [contexts].
    """

    root: np.ndarray
    left: np.ndarray
    right: np.ndarray
    sums: Statistics


def context_statistics(
    shards: Sequence[Shard],
    load: Callable[[Shard], Iterable[tuple[np.ndarray, np.ndarray]]],
    topology: Topology,
    num_processes: int = 1,
    on_shard: Callable[[], object] = lambda: None,
) -> ContextStatistics:
    """Accumulates the statistics of all labelled frames.

    The result does not depend on the number of processes.

    Args:
        shards: Parts of the corpus, the frames of each of which must fit into memory.
        load: Function for the frames [time, dimension] and HMM states [time] of a
            shard's utterances; called in the processes.
        topology: Numbering of these states.
        num_processes: Number of processes.
        on_shard: Function called after every shard, to show progress.

    Raises:
        ValueError: No shard holds a frame.
    """

    def work(shard: Shard) -> tuple[np.ndarray, np.ndarray]:
        return _summed(load(shard), topology)

    table = _Table()
    for keys, rows in in_order(fork_map(work, shards, num_processes)):
        if len(keys):
            table.add(keys, rows)
        on_shard()
    return _split(*table.sorted(), len(topology.phones))


def context_keys(states: np.ndarray, topology: Topology) -> np.ndarray:
    """The context of each frame as one number: (root · phones + left) · phones + right.

    Args:
        states: HMM states of an utterance, [time], of any numbering.
        topology: The numbering.
    """
    phones, edges = phone_runs(states, topology)
    run = np.repeat(np.arange(len(phones)), np.diff(edges))
    outside = np.array([0, *phones, 0])  # silence before and after the utterance
    positions = topology.position_of_state[states]
    root = outside[1 + run] * topology.states_per_phone + positions
    size = len(topology.phones)
    return (root * size + outside[run]) * size + outside[2 + run]


def contexts_of(
    states: np.ndarray, topology: Topology
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Root, left and right phone of each frame of an utterance."""
    return _parts(context_keys(states, topology), len(topology.phones))


def _parts(keys: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return keys // size**2, keys // size % size, keys % size


def _summed(
    utterances: Iterable[tuple[np.ndarray, np.ndarray]], topology: Topology
) -> tuple[np.ndarray, np.ndarray]:
    """The keys of a shard's contexts, ascending, and their sums [1 + 2 · dimension]."""
    pairs = [
        (frames, context_keys(states, topology))
        for frames, states in utterances
        if len(frames)
    ]
    if not pairs:
        return np.zeros(0, np.int64), np.zeros((0, 1))
    frames, keys = (np.concatenate(column) for column in zip(*pairs, strict=True))
    order = np.argsort(keys, kind="stable")
    found, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
    frames = frames[order].astype(float)
    parts = [np.add.reduceat(values, first) for values in (frames, frames**2)]
    return found, np.hstack([counts[:, None], *parts])


class _Table:
    """Sums by key, which are updated in place."""

    def __init__(self) -> None:
        self._keys = np.zeros(0, np.int64)  # ascending
        self._places = np.zeros(0, np.int64)  # the row of each key
        self._rows = np.zeros((0, 0))  # more than there are keys, as room to grow

    def add(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Adds the rows of distinct keys."""
        self._admit(np.setdiff1d(keys, self._keys, assume_unique=True), rows.shape[1])
        self._rows[self._places[np.searchsorted(self._keys, keys)]] += rows

    def _admit(self, keys: np.ndarray, width: int) -> None:
        size = len(self._keys)
        if size + len(keys) > len(self._rows):
            larger = np.zeros((2 * (size + len(keys)), width))
            larger[:size] = self._rows[:size] if size else 0.0
            self._rows = larger
        at = np.searchsorted(self._keys, keys)
        self._keys = np.insert(self._keys, at, keys)
        self._places = np.insert(self._places, at, np.arange(size, size + len(keys)))

    def sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys, ascending, and their rows."""
        return self._keys, self._rows[self._places]


def _split(keys: np.ndarray, rows: np.ndarray, size: int) -> ContextStatistics:
    if not len(keys):
        raise ValueError(
            "there are no labelled frames for the statistics; give the labels of the "
            "utterances whose frames these are"
        )
    dimension = rows.shape[1] // 2
    sums = Statistics(rows[:, 0], rows[:, 1 : 1 + dimension], rows[:, 1 + dimension :])
    return ContextStatistics(*_parts(keys, size), sums)
