"""The phonetic decision tree: which phones in context share an HMM state.

Each pair of a phone and a position in its chain is the root of a tree of its own. An
inner node asks whether the phone before, or the phone after, is in a set of phones; the
leaves are the HMM states. So every context has a state, even one that never occurred.
Without any split the roots are the states: monophones. What lies outside the utterance
counts as phone 0, the optional silence. `growing` makes trees from statistics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

LEFT, RIGHT = 0, 1  # sides of a phone: what comes before it, what comes after


@dataclass(frozen=True, eq=False)
class DecisionTree:
    """Trees of all roots, as the list of splits that made them.

    Nodes 0 .. num_roots - 1 are the roots. Split i turns a leaf into an inner node and
    makes two leaves: node num_roots + 2 · i for yes and the one after it for no.

    Attributes:
        num_roots: Phones times positions; root = phone · positions + position.
        questions: bool [questions, phones], the sets that may be asked for.
        splits: int64 [splits, 3]: node, side (`LEFT` or `RIGHT`), question.
        ties: int64 [ties, 2]: a leaf, and the leaf of the same root whose state it
            shares.

    Raises:
        ValueError: A split or tie names a node that is not a leaf at that point,
            another root's leaf, or a side or question that does not exist.
    """

    num_roots: int
    questions: np.ndarray
    splits: np.ndarray
    ties: np.ndarray

    def __post_init__(self) -> None:
        if self.num_roots < 1:
            raise ValueError(f"`num_roots` must be at least 1, got {self.num_roots}")
        _check_splits(self.num_roots, self.questions, self.splits)
        _check_ties(self._root, self._split, self.ties)

    @classmethod
    def of(
        cls,
        num_roots: int,
        questions: np.ndarray,
        splits: Sequence[Sequence[int]],
        ties: Sequence[Sequence[int]] = (),
    ) -> "DecisionTree":
        """The tree of lists of splits and ties, either of which may be empty."""
        return cls(num_roots, questions, _rows(splits, 3), _rows(ties, 2))

    @classmethod
    def without_context(cls, num_roots: int, num_phones: int) -> "DecisionTree":
        """The tree that asks nothing: a state for each root."""
        return cls.of(num_roots, np.zeros((0, num_phones), bool), ())

    @property
    def num_states(self) -> int:
        """Number of states: leaves that share no other's state."""
        return len(self.root_of_state)

    @cached_property
    def root_of_state(self) -> np.ndarray:
        """The root below which each state lies, int64 [states], ascending."""
        return self._root[self.leaves]

    def find(
        self, roots: np.ndarray, left: np.ndarray, right: np.ndarray
    ) -> np.ndarray:
        """The states of phones in context.

        Args:
            roots: Phone and position, int [contexts].
            left: The phones before, int [contexts].
            right: The phones after, int [contexts].

        Returns:
            int64 [contexts].
        """
        node = np.array(roots, np.int64)
        beside = np.stack([left, right])
        inner = np.flatnonzero(self._split[node] >= 0)
        while len(inner):
            split = self._split[node[inner]]
            _, side, question = self.splits[split].T
            no = ~self.questions[question, beside[side, inner]]
            node[inner] = self.num_roots + 2 * split + no
            inner = inner[self._split[node[inner]] >= 0]
        return self._state[node]

    @cached_property
    def _split(self) -> np.ndarray:
        """The split of each node, -1 for a leaf."""
        split = np.full(self.num_roots + 2 * len(self.splits), -1)
        split[self.splits[:, 0]] = np.arange(len(self.splits))
        return split

    @cached_property
    def _root(self) -> np.ndarray:
        root = np.arange(self.num_roots + 2 * len(self.splits))
        for number, node in enumerate(self.splits[:, 0]):
            first = self.num_roots + 2 * number
            root[first : first + 2] = root[node]
        return root

    @cached_property
    def _holder(self) -> np.ndarray:
        """The leaf whose state each node takes: itself unless it is tied."""
        holder = np.arange(len(self._split))
        for leaf, other in self.ties[::-1]:  # a tie's other leaf may be tied later
            holder[leaf] = holder[other]
        return holder

    @cached_property
    def leaves(self) -> np.ndarray:
        """The leaf that holds each state: int64 [states]."""
        is_holder = (self._split < 0) & (self._holder == np.arange(len(self._split)))
        leaves = np.flatnonzero(is_holder)
        return leaves[np.argsort(self._root[leaves], kind="stable")]

    @cached_property
    def _state(self) -> np.ndarray:
        """The state of each node, meaningless for inner ones."""
        state = np.full(len(self._split), -1)
        state[self.leaves] = np.arange(len(self.leaves))
        return state[self._holder]


def _rows(values: Sequence[Sequence[int]], width: int) -> np.ndarray:
    return np.array(values, np.int64).reshape(-1, width)


def _check_splits(num_roots: int, questions: np.ndarray, splits: np.ndarray) -> None:
    numbers = np.arange(len(splits))
    node, side, question = splits.T
    wrong = (node < 0) | (node >= num_roots + 2 * numbers)
    wrong |= (side != LEFT) & (side != RIGHT)
    wrong |= (question < 0) | (question >= len(questions))
    first_use = np.zeros(len(splits), bool)
    first_use[np.unique(node, return_index=True)[1]] = True
    wrong |= ~first_use
    if wrong.any():
        number = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"`splits`[{number}] must be a leaf below {num_roots + 2 * number} that is "
            f"not yet split, side 0 or 1 and a question below {len(questions)}, got "
            f"{splits[number].tolist()}"
        )


def _check_ties(root: np.ndarray, split: np.ndarray, ties: np.ndarray) -> None:
    tied: set[int] = set()
    for number, (leaf, other) in enumerate(ties.tolist()):
        known = min(leaf, other) >= 0 and max(leaf, other) < len(root)
        if (
            not known
            or leaf == other
            or root[leaf] != root[other]
            or max(split[leaf], split[other]) >= 0
            or tied & {leaf, other}
        ):
            raise ValueError(
                f"`ties`[{number}] must be two leaves of one root that still have "
                f"their own states, got {[leaf, other]}"
            )
        tied.add(leaf)
