"""The numbering of HMM states: one per phone and position, or leaves of a tree.

Every phone is a chain of `states_per_phone` states. Without a tree, each of them is
shared by all occurrences of the phone (monophones); with a tree it depends on the
phones before and after (triphones). All users go through `Topology`, for which
monophones are a tree without splits.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lightning_adpsgd.asr.hmm.tree import DecisionTree
from lightning_adpsgd.asr.language.lexicon import Lexicon
from lightning_adpsgd.files import written_whole


@dataclass(frozen=True)
class Topology:
    """The chains of all phones, and their states.

    Args:
        phones: All phones; silence phones first, the optional silence at the head.
        states_per_phone: Length of each phone's left-to-right chain; also the fewest
            frames that a phone can last.
        tree: State of each position in each context; None: the same in all contexts.

    Raises:
        ValueError: There is no phone or state, or `tree` is of other phones.
    """

    phones: tuple[str, ...]
    states_per_phone: int = 3
    tree: DecisionTree | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.phones:
            raise ValueError("`phones` must name at least one phone, got none")
        if self.states_per_phone < 1:
            raise ValueError(
                f"`states_per_phone` must be at least 1, got {self.states_per_phone}"
            )
        found = self._tree.num_roots, self._tree.questions.shape[1]
        expected = len(self.phones) * self.states_per_phone, len(self.phones)
        if found != expected:
            raise ValueError(
                f"`tree` must have {expected[0]} roots and questions over "
                f"{expected[1]} phones, got {found[0]} and {found[1]}"
            )

    @classmethod
    def of(cls, lexicon: Lexicon, states_per_phone: int = 3) -> "Topology":
        """Monophones of all phones of a lexicon, silence phones first."""
        phones = (*lexicon.silence_phones, *lexicon.nonsilence_phones)
        return cls(tuple(phones), states_per_phone)

    @cached_property
    def _tree(self) -> DecisionTree:
        num_phones = len(self.phones)
        num_roots = num_phones * self.states_per_phone
        return self.tree or DecisionTree.without_context(num_roots, num_phones)

    @property
    def num_states(self) -> int:
        """Number of HMM states: the size of the acoustic model's output."""
        return self._tree.num_states

    @property
    def context_width(self) -> int:
        """The number of phones that determine a state: 1, or 3 with context."""
        return 3 if len(self._tree.splits) else 1

    @property
    def central_position(self) -> int:
        """The place of the central phone in a window of `context_width`."""
        return self.context_width // 2

    @cached_property
    def phone_of_state(self) -> np.ndarray:
        """Index of the phone that each state belongs to, int64 [states], ascending."""
        return self._tree.root_of_state // self.states_per_phone

    @cached_property
    def position_of_state(self) -> np.ndarray:
        """Place of each state in the chain of its phone, int64 [states]."""
        return self._tree.root_of_state % self.states_per_phone

    @property
    def state_names(self) -> tuple[str, ...]:
        """`phone.position`, and `.number` after it where several states share these."""
        roots = self._tree.root_of_state
        number = np.arange(len(roots)) - np.searchsorted(roots, roots)
        is_only = np.bincount(roots)[roots] == 1
        return tuple(
            f"{self.phones[phone]}.{at}" + ("" if only else f".{leaf}")
            for phone, at, leaf, only in zip(
                self.phone_of_state,
                self.position_of_state,
                number,
                is_only,
                strict=True,
            )
        )

    def chains(self, windows: np.ndarray) -> np.ndarray:
        """The HMM states of the central phones of windows.

        Args:
            windows: int [windows, context_width] of phone labels, which are the
                indices of `phones` plus 1; 0 for what lies outside the utterance.

        Returns:
            int64 [windows, states_per_phone].

        Raises:
            ValueError: `windows` are not of the tree's width.
        """
        if windows.ndim != 2 or windows.shape[1] != self.context_width:
            raise ValueError(
                f"`windows` must have shape [windows, {self.context_width}], got "
                f"{list(windows.shape)}"
            )
        phones = np.maximum(windows, 1) - 1  # outside counts as the optional silence
        length = self.states_per_phone
        roots = phones[:, self.central_position, None] * length + np.arange(length)
        left, right = (np.repeat(phones[:, side], length) for side in (0, -1))
        return self._tree.find(roots.ravel(), left, right).reshape(-1, length)

    def in_context(
        self, roots: np.ndarray, left: np.ndarray, right: np.ndarray
    ) -> np.ndarray:
        """The states of positions of phones (`DecisionTree.find`)."""
        return self._tree.find(roots, left, right)

    def chain(self, window: Sequence[int]) -> list[int]:
        """The HMM states of the central phone of one window of phone labels."""
        return self.chains(np.array([window], np.int64))[0].tolist()


def phone_runs(states: np.ndarray, topology: Topology) -> tuple[list[int], list[int]]:
    """The phones along a path and the frames at which they start, plus the end.

    Args:
        states: HMM state of each frame, [time].
        topology: Their numbering.
    """
    is_first = topology.position_of_state[states] == 0
    is_first[1:] &= states[1:] != states[:-1]
    starts = np.flatnonzero(is_first)
    phones = topology.phone_of_state[states[starts]]
    return phones.tolist(), [*starts.tolist(), len(states)]


def write_topology(path: Path, topology: Topology) -> None:
    """Writes the phones and the tree as JSON, whole or not at all."""
    tree = topology._tree
    sets = [[topology.phones[i] for i in np.flatnonzero(q)] for q in tree.questions]
    value = {
        "phones": list(topology.phones),
        "states_per_phone": topology.states_per_phone,
        "num_states": topology.num_states,
        "questions": sets,
        "splits": tree.splits.tolist(),
        "ties": tree.ties.tolist(),
    }
    with written_whole(path) as file:
        json.dump(value, file)


def read_topology(path: Path) -> Topology:
    """Reads a file of `write_topology`.

    Raises:
        ValueError: The file is missing, not JSON, or has no usable tree; the message
            names it.
    """
    try:
        return _topology(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: expected a decision tree, but the file does not exist"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        problem = f"lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not a decision tree: {problem}") from error


def _topology(value: dict[str, Any]) -> Topology:
    phones = tuple(value["phones"])
    length = int(value["states_per_phone"])
    questions = np.zeros((len(value["questions"]), len(phones)), bool)
    places = {phone: place for place, phone in enumerate(phones)}
    for row, names in zip(questions, value["questions"], strict=True):
        unknown = [name for name in names if name not in places]
        if unknown:
            raise ValueError(f"a question names the phones {unknown}, not in `phones`")
        row[[places[name] for name in names]] = True
    num_roots = len(phones) * length
    tree = DecisionTree.of(num_roots, questions, value["splits"], value["ties"])
    if tree.num_states != value["num_states"]:
        raise ValueError(
            f"`num_states` is {value['num_states']}, its splits and ties make "
            f"{tree.num_states}"
        )
    return Topology(phones, length, tree)
