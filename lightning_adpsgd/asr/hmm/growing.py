"""Growing a decision tree: best-first splits by the likelihood that they gain.

A leaf is described by one Gaussian (`clustering.log_likelihood`). Each step makes the
split, of any leaf of any root, with the largest gain

    gain = L(yes) + L(no) - L(yes + no)

until there are `num_leaves`, or no split gains enough and leaves enough frames on both
sides. Roots are grown separately, in processes, each further than its share. Their
sequences of splits are then merged by gain, which gives the same tree as one queue for
all. Questions are sets of phones found by clustering (`clustering.questions`): those
about the phone before by how phones end, those about the phone after by how they begin.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightning_adpsgd.asr.hmm.clustering import joined, log_likelihood, questions
from lightning_adpsgd.asr.hmm.contexts import ContextStatistics
from lightning_adpsgd.asr.hmm.gmm import Statistics
from lightning_adpsgd.asr.hmm.states import Topology
from lightning_adpsgd.asr.hmm.tree import LEFT, RIGHT, DecisionTree
from lightning_adpsgd.asr.parallel import fork_map, in_order, product

_FLOOR_OF_VARIANCE = 0.01  # times the variance of all frames
_FIRST_SHARE = 2.0  # a root first grows to so many times the mean number of splits
_GROWTH_OF_SHARE = 4  # and, if all of these were used, further by this factor


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """Limits of the tree's growth.

    Attributes:
        num_leaves: Largest number of leaves, including those of phones without context.
        min_frames: Smallest number of frames of a new leaf.
        min_gain: Smallest gain of a split, in log-likelihood over all its frames.
        tie: Whether leaves of a root share a state at the end if separating them gains
            less than any split did.
        num_processes: Number of processes that grow roots in parallel.

    Raises:
        ValueError: A number of leaves, frames or gain is out of its bounds.
    """

    num_leaves: int = 600
    min_frames: float = 100.0
    min_gain: float = 0.0
    tie: bool = True
    num_processes: int = 1

    def __post_init__(self) -> None:
        if self.num_leaves < 1 or self.min_frames <= 0 or self.min_gain < 0:
            raise ValueError(
                "`num_leaves` must be at least 1, `min_frames` positive and `min_gain` "
                f"not negative, got {self.num_leaves}, {self.min_frames} and "
                f"{self.min_gain}"
            )


class _Split(NamedTuple):
    """A split of the tree of one root, whose node 0 is the root itself.

    Split i of a root makes nodes 1 + 2 · i (yes) and 2 + 2 · i (no).
    """

    node: int
    side: int
    question: int
    gain: float


class _Grown(NamedTuple):
    """The splits of a root, best first; `is_complete` if there are no others."""

    splits: list[_Split]
    is_complete: bool


def grow(
    statistics: ContextStatistics,
    topology: Topology,
    num_unsplit: int,
    options: TreeOptions,
) -> DecisionTree:
    """Grows the tree of all phones; the same whatever the number of processes.

    Args:
        statistics: Statistics of the phones in context.
        topology: Phones and positions; its own tree, if any, is ignored.
        num_unsplit: Number of first phones (silence and noise) that keep one state per
            position in all contexts.
        options: Limits of the growth.

    Raises:
        ValueError: `num_leaves` is less than the number of roots.
    """
    length = topology.states_per_phone
    num_phones = len(topology.phones)
    num_roots = num_phones * length
    if options.num_leaves < num_roots:
        raise ValueError(
            f"`num_leaves` must be at least {num_roots}, one for each of {num_phones} "
            f"phones and {length} positions, got {options.num_leaves}"
        )
    floor = variance_floor(statistics.sums)
    asked = _questions(statistics, num_phones, length, floor)
    growers = [
        _Root(statistics, root, asked, floor, options)
        for root in range(num_unsplit * length, num_roots)
    ]
    chosen = _grow_all(growers, options.num_leaves - num_roots, options)
    first = num_unsplit * length
    splits = _renumbered(chosen, first, num_roots)
    tree = DecisionTree.of(num_roots, np.concatenate(asked), splits)
    least = min((split.gain for _, split in chosen), default=0.0)
    ties = _ties(tree, statistics, floor, least, options) if options.tie else []
    return DecisionTree.of(num_roots, tree.questions, splits, ties)


def variance_floor(sums: Statistics) -> np.ndarray:
    """The least variance of a cluster: a hundredth of that of all frames."""
    count = sums.frames.sum()
    mean = sums.first.sum(axis=0) / count
    return _FLOOR_OF_VARIANCE * (sums.second.sum(axis=0) / count - mean**2)


def _table(sums: Statistics) -> np.ndarray:
    """One row per cluster: [clusters, 1 + 2 · dimension]."""
    return np.column_stack(sums)


def _sums(table: np.ndarray) -> Statistics:
    dimension = table.shape[1] // 2
    second = table[:, 1 + dimension :]
    return Statistics(table[:, 0], table[:, 1 : 1 + dimension], second)


def _by(groups: np.ndarray, table: np.ndarray, size: int) -> np.ndarray:
    """The sum of the rows of each group, [size, columns]."""
    order = np.argsort(groups, kind="stable")
    found, first = np.unique(groups[order], return_index=True)
    total = np.zeros((size, table.shape[1]))
    if len(found):
        total[found] = np.add.reduceat(table[order], first)
    return total


def _questions(
    statistics: ContextStatistics, num_phones: int, length: int, floor: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sets to ask for on the left and on the right, each bool [questions, phones]."""
    size = num_phones * length
    by_root = _by(statistics.root, _table(statistics.sums), size)
    ends, begins = by_root[length - 1 :: length], by_root[::length]
    return questions(_sums(ends), floor), questions(_sums(begins), floor)


class _Root:
    """The contexts of one root, to be split.

    Args:
        statistics: Statistics of all roots, sorted by root.
        root: The root.
        asked: Questions about the left and about the right.
        floor: Least variance.
        options: Limits of the growth.
    """

    def __init__(
        self,
        statistics: ContextStatistics,
        root: int,
        asked: tuple[np.ndarray, np.ndarray],
        floor: np.ndarray,
        options: TreeOptions,
    ) -> None:
        start, end = np.searchsorted(statistics.root, [root, root + 1])
        self._beside = statistics.left[start:end], statistics.right[start:end]
        self._table = _table(Statistics(*(p[start:end] for p in statistics.sums)))
        self._asked = tuple(sets.astype(float) for sets in asked)
        self._first = (0, len(asked[LEFT]))  # number of a side's first question
        self._floor = floor
        self._options = options

    def grow(self, num_splits: int) -> _Grown:
        """Makes the best splits, at most `num_splits`."""
        queue: list[tuple[float, int, _Split, np.ndarray]] = []
        self._consider(queue, 0, np.arange(len(self._table)))
        made: list[_Split] = []
        while queue and len(made) < num_splits:
            _, _, split, rows = heapq.heappop(queue)
            yes = self._answers(split, rows)
            node = 1 + 2 * len(made)
            made.append(split)
            self._consider(queue, node, rows[yes])
            self._consider(queue, node + 1, rows[~yes])
        return _Grown(made, not queue)

    def _consider(self, queue: list, node: int, rows: np.ndarray) -> None:
        """Puts the best split of a leaf, if there is one, into the queue."""
        split = self._best(node, rows)
        if split is not None:
            heapq.heappush(queue, (-split.gain, node, split, rows))

    def _best(self, node: int, rows: np.ndarray) -> _Split | None:
        table = self._table[rows]
        if table[:, 0].sum() < 2 * self._options.min_frames:
            return None
        splits = [self._best_on(side, node, rows, table) for side in (LEFT, RIGHT)]
        best = max(splits, key=lambda split: split.gain)
        return best if best.gain > self._options.min_gain else None

    def _best_on(
        self, side: int, node: int, rows: np.ndarray, table: np.ndarray
    ) -> _Split:
        asked = self._asked[side]
        by_phone = _by(self._beside[side][rows], table, asked.shape[1])
        total = by_phone.sum(axis=0, keepdims=True)
        yes = product(asked, by_phone)
        parts = [_sums(yes), _sums(total - yes)]
        gain = sum(log_likelihood(part, self._floor) for part in parts)
        gain = gain - log_likelihood(_sums(total), self._floor)
        fewest = np.minimum(*(part.frames for part in parts))
        gain[fewest < self._options.min_frames] = -np.inf
        question = int(gain.argmax())
        return _Split(node, side, self._first[side] + question, float(gain[question]))

    def _answers(self, split: _Split, rows: np.ndarray) -> np.ndarray:
        sets = self._asked[split.side][split.question - self._first[split.side]]
        return sets[self._beside[split.side][rows]] > 0


def _grow_all(
    roots: Sequence[_Root], num_splits: int, options: TreeOptions
) -> list[tuple[int, _Split]]:
    """The best splits of all roots, in the order in which they are made."""
    share = math.ceil(_FIRST_SHARE * num_splits / max(1, len(roots)))
    shares = [max(1, share)] * len(roots)
    grown: dict[int, _Grown] = {}
    unfinished = list(range(len(roots)))
    chosen: list[tuple[int, _Split]] = []
    while unfinished:

        def work(index: int) -> _Grown:
            return roots[index].grow(shares[index])

        results = in_order(fork_map(work, unfinished, options.num_processes))
        grown.update(zip(unfinished, results, strict=True))
        chosen = _merged([grown[i].splits for i in range(len(roots))], num_splits)
        unfinished = _exhausted(chosen, grown)
        for index in unfinished:  # its next split might belong to the tree as well
            shares[index] *= _GROWTH_OF_SHARE
    return chosen


def _merged(
    sequences: Sequence[Sequence[_Split]], num_splits: int
) -> list[tuple[int, _Split]]:
    """(root, split), in order: each time the best of the roots' next splits."""
    heads = [(-splits[0].gain, i, 0) for i, splits in enumerate(sequences) if splits]
    heapq.heapify(heads)
    chosen: list[tuple[int, _Split]] = []
    while heads and len(chosen) < num_splits:
        _, index, at = heapq.heappop(heads)
        chosen.append((index, sequences[index][at]))
        if at + 1 < len(sequences[index]):
            gain = sequences[index][at + 1].gain
            heapq.heappush(heads, (-gain, index, at + 1))
    return chosen


def _exhausted(
    chosen: Iterable[tuple[int, _Split]], grown: dict[int, _Grown]
) -> list[int]:
    """The roots whose splits were all used, and which may have more."""
    used = [0] * len(grown)
    for index, _ in chosen:
        used[index] += 1
    return [
        index
        for index, root in sorted(grown.items())
        if not root.is_complete and used[index] == len(root.splits)
    ]


def _renumbered(
    chosen: Iterable[tuple[int, _Split]], first_root: int, num_roots: int
) -> list[tuple[int, int, int]]:
    """Splits with the nodes of the whole tree in place of those of their root."""
    nodes: dict[int, list[int]] = {}
    splits = []
    for number, (index, split) in enumerate(chosen):
        known = nodes.setdefault(index, [first_root + index])
        splits.append((known[split.node], split.side, split.question))
        known += [num_roots + 2 * number, num_roots + 2 * number + 1]
    return splits


def _ties(
    tree: DecisionTree,
    statistics: ContextStatistics,
    floor: np.ndarray,
    max_loss: float,
    options: TreeOptions,
) -> list[tuple[int, int]]:
    """Pairs of leaves of a root that differ less than `max_loss`."""
    states = tree.find(statistics.root, statistics.left, statistics.right)
    by_state = _by(states, _table(statistics.sums), tree.num_states)
    bounds = np.searchsorted(tree.root_of_state, np.arange(tree.num_roots + 1))

    def work(root: int) -> list[tuple[int, int]]:
        rows = slice(bounds[root], bounds[root + 1])
        own, leaves = _sums(by_state[rows]), tree.leaves[rows].tolist()
        return [(leaves[b], leaves[a]) for a, b in joined(own, floor, max_loss)]

    found = in_order(fork_map(work, range(tree.num_roots), options.num_processes))
    return [tie for ties in found for tie in ties]
