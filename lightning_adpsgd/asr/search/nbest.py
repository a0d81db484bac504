"""The best word sequences of an utterance, each once, with its cost and its best path.

The search keeps the paths that come near the best one, as a lattice (`lattice.py`). It
is determinized on words alone, in the tropical semiring, so that every word sequence
has the cost of its best path, and the cheapest of them are listed. For each, its path
of HMM states is found again in the lattice. A lattice that becomes too large is
narrowed until it does not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import kaldifst
import numpy as np

from lightning_adpsgd.asr.search.arcs import Arcs, fst_of
from lightning_adpsgd.asr.search.lattice import (
    Lattice,
    LatticeOptions,
    LatticeSearch,
    SearchGraph,
)

_NARROWINGS = 6


@dataclass(frozen=True, kw_only=True)
class NBestOptions:
    """The number of word sequences, and their greatest distance from the best.

    Attributes:
        most: Maximum number of word sequences of an utterance.
        beam: Distance of the search from the best path, in scaled log-likelihood.
        lattice_beam: Distance from the best path beyond which paths are left out.
        max_active: Maximum number of graph states that survive a frame.
        max_links: Maximum number of links, to which a lattice is narrowed.
        max_states: Maximum number of lattice states after determinization. Above it,
            half the lattice beam is tried, then a quarter, and so on.

    Raises:
        ValueError: `most` is below 1.
    """

    most: int = 50
    beam: float = 11.0
    lattice_beam: float = 6.0
    max_active: int = 1000
    max_links: int = 100_000
    max_states: int = 5_000

    def __post_init__(self):
        if self.most < 1:
            raise ValueError(f"`most` must be at least 1, got {self.most}")
        self.search.__post_init__()

    @property
    def search(self) -> LatticeOptions:
        """The width of the search."""
        return LatticeOptions(
            beam=self.beam,
            max_active=self.max_active,
            lattice_beam=self.lattice_beam,
        )


class WordPath(NamedTuple):
    """One word sequence.

    Attributes:
        inputs: Input labels along its best path, one per frame; with `words_of`, the
            graph's output labels.
        outputs: Labels of the words.
        cost: Cost of that path: scaled acoustic and graph cost together.
        is_complete: Whether the path ends in a final state of the graph.
    """

    inputs: list[int]
    outputs: list[int]
    cost: float
    is_complete: bool


class WordList:
    """The best word sequences of a lattice, the best first.

    Args:
        graph: Graph that the lattice is a part of.
        lattice: The lattice.
        options: Limits of the list.
        words_of: The word of each output label, 0 for none, where labels tell more
            than words. The inputs of a path are its output labels then.

    Attributes:
        entries: Labels of the words and cost of each.
    """

    def __init__(
        self,
        graph: SearchGraph,
        lattice: Lattice,
        options: NBestOptions,
        words_of: Sequence[int] | None = None,
    ) -> None:
        inputs, words = link_labels(graph, lattice, words_of)
        kept, self.entries = _listed(lattice, words, options)
        self._paths = _transducer(lattice, kept, inputs, words)
        self._is_complete = lattice.is_complete
        kaldifst.arcsort(self._paths, "olabel")

    def path(self, position: int) -> WordPath:
        """The best path with the words of one entry, which takes a search for it."""
        words, cost = self.entries[position]
        found = kaldifst.shortest_path(
            kaldifst.compose(self._paths, kaldifst.make_linear_acceptor(words))
        )
        _, inputs, _, _ = kaldifst.get_linear_symbol_sequence(found)
        return WordPath(inputs, words, cost, self._is_complete)


def list_words(
    graph: SearchGraph,
    scaled: np.ndarray,
    options: NBestOptions,
    words_of: Sequence[int] | None = None,
) -> WordList | None:
    """The best word sequences of an utterance; None if it has no frames or no path.

    Args:
        graph: Graph that reads input label i + 1 for column i.
        scaled: Log-likelihoods times acoustic scale, [time, columns].
        options: Limits of the list.
        words_of: As for `WordList`.
    """
    lattice = LatticeSearch(graph, options.search).lattice(scaled)
    return None if lattice is None else WordList(graph, lattice, options, words_of)


def link_labels(
    graph: SearchGraph, lattice: Lattice, words_of: Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Input labels and words of a lattice's links, both [links]; see `WordList`."""
    outputs = graph.outputs[lattice.arc]
    if words_of is None:
        return graph.inputs[lattice.arc], outputs
    return outputs, np.asarray(words_of)[outputs]


def path_of(
    graph: SearchGraph,
    lattice: Lattice,
    links: np.ndarray,
    words_of: Sequence[int] | None = None,
) -> WordPath:
    """The path of a lattice along these links, for example `lattice.best()`."""
    inputs, words = link_labels(graph, lattice, words_of)
    last = int(lattice.target[links[-1]])
    cost = float(lattice.cost[links].sum() + lattice.finals[last])
    said = words[links][words[links] > 0].tolist()
    read = inputs[links][inputs[links] > 0].tolist()
    return WordPath(read, said, cost, lattice.is_complete)


def columns_of(graph: SearchGraph, lattice: Lattice, links: np.ndarray) -> np.ndarray:
    """The column of the likelihoods that a path reads at each frame, [time]."""
    return graph.inputs[lattice.arc[links[lattice.reads[links]]]] - 1


_Listed = list[tuple[list[int], float]]
"""Words and cost of each path."""


def _listed(
    lattice: Lattice, words: np.ndarray, options: NBestOptions
) -> tuple[np.ndarray, _Listed]:
    """The links that were kept, and the cheapest word sequences over them."""
    beam = options.lattice_beam
    for _ in range(_NARROWINGS):
        kept = lattice.near(beam, options.max_links)
        said = _transducer(lattice, kept, words, words)
        try:
            kaldifst.determinize_star(said, max_states=options.max_states)
        except RuntimeError:  # too many states
            beam /= 2
        else:
            return kept, list(_cheapest(said, options.most))
    kept = lattice.near(beam, options.max_links)
    # The best one is that of the lattice as well.
    return kept, list(_cheapest(_transducer(lattice, kept, words, words), 1))


def _transducer(
    lattice: Lattice, kept: np.ndarray, inputs: np.ndarray, outputs: np.ndarray
) -> kaldifst.StdVectorFst:
    return fst_of(
        Arcs(
            0,
            lattice.finals.astype(np.float32),
            lattice.source[kept],
            inputs[kept],
            outputs[kept],
            lattice.cost[kept].astype(np.float32),
            lattice.target[kept],
        )
    )


def _cheapest(
    words: kaldifst.StdVectorFst, most: int
) -> Iterator[tuple[list[int], float]]:
    best = kaldifst.shortest_path(words, n=most)
    # of a single path without arcs, no words, kaldifst's list has no cost
    paths = [best] if most == 1 else kaldifst.convert_nbest_to_vector(best)
    for path in paths:
        _, labels, _, weight = kaldifst.get_linear_symbol_sequence(path)
        yield labels, weight.value
