"""The best word sequences of an utterance, each once, with its cost and its best path.

Kaldi's lattice decoder keeps all paths that come near the best one; the lattice is
determinized on words alone, in the tropical semiring, so that every word sequence has
the cost of its best path, and the cheapest of them are listed. For each, its path of
HMM states is found again in the lattice.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import kaldi_decoder
import kaldifst
import numpy as np


@dataclass(frozen=True, kw_only=True)
class NBestOptions:
    """The number of word sequences, and their greatest distance from the best.

    Attributes:
        most: Maximum number of word sequences of an utterance.
        beam: Distance of the search from the best path, in scaled log-likelihood. The
            lattice decoder has no other limit on the surviving states.
        lattice_beam: Distance from the best path beyond which paths are left out.
        max_states: Maximum number of lattice states after determinization; above it,
            only the best word sequence is listed.
    """

    most: int = 50
    beam: float = 11.0
    lattice_beam: float = 6.0
    max_states: int = 20_000

    def __post_init__(self):
        if self.most < 1:
            raise ValueError(f"`most` must be at least 1, got {self.most}")
        if not 0 < self.lattice_beam <= self.beam:
            raise ValueError(
                f"`lattice_beam` must lie in (0, `beam` {self.beam}], got "
                f"{self.lattice_beam}"
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


def word_paths(
    graph: kaldifst.StdFst,
    scaled: np.ndarray,
    options: NBestOptions,
    words_of: Sequence[int] | None = None,
) -> list[WordPath]:
    """The best word sequences, the best first; none if nothing survives the beam.

    Args:
        graph: Graph that reads input label i + 1 for column i.
        scaled: Log-likelihoods times acoustic scale, [time, columns] float32 and
            contiguous.
        options: Limits of the list.
        words_of: The word of each output label, 0 for none, where labels tell more
            than words. The inputs of a path are its output labels then.
    """
    if not len(scaled):
        return []
    config = kaldi_decoder.LatticeSimpleDecoderConfig(
        beam=options.beam, lattice_beam=options.lattice_beam
    )
    decoder = kaldi_decoder.LatticeSimpleDecoder(graph, config)
    decoder.decode(kaldi_decoder.DecodableCtc(scaled))
    is_complete = bool(np.isfinite(decoder.final_relative_cost()))
    found, lattice = decoder.get_raw_lattice()
    if not found:
        return []
    rows = _rows(lattice)
    if words_of is not None:
        rows = [_relabelled(row, words_of) for row in rows]
    paths = _transducer(rows)
    kaldifst.arcsort(paths, "olabel")
    return [
        WordPath(_inputs(paths, words), words, cost, is_complete)
        for words, cost in _cheapest(rows, options)
    ]


def _rows(lattice: kaldifst.Lattice) -> list[list[str]]:
    """From, to, state, word and cost of each arc; state and cost of final ones."""
    rows = []
    for line in lattice.to_str(show_weight_one=True).splitlines():
        *fields, weight = line.split()
        graph_and_acoustic = map(float, weight.split(","))
        rows.append([*fields, str(sum(graph_and_acoustic))])
    return rows


def _relabelled(row: list[str], words_of: Sequence[int]) -> list[str]:
    """The output label as input, and its word as output."""
    is_arc = len(row) > 2
    return [*row[:2], row[3], str(words_of[int(row[3])]), row[4]] if is_arc else row


def _transducer(rows: Iterable[list[str]]) -> kaldifst.StdVectorFst:
    return kaldifst.compile("".join(f"{' '.join(row)}\n" for row in rows))


def _cheapest(
    rows: list[list[str]], options: NBestOptions
) -> Iterator[tuple[list[int], float]]:
    words, most = _transducer(map(_of_words, rows)), options.most
    try:
        kaldifst.determinize_star(words, max_states=options.max_states)
    except RuntimeError:  # too many states; the best one is that of the lattice as well
        words, most = _transducer(map(_of_words, rows)), 1
    best = kaldifst.shortest_path(words, n=most)
    # of a single path without arcs, no words, kaldifst's list has no cost
    paths = [best] if most == 1 else kaldifst.convert_nbest_to_vector(best)
    for path in paths:
        _, labels, _, weight = kaldifst.get_linear_symbol_sequence(path)
        yield labels, weight.value


def _of_words(row: list[str]) -> list[str]:
    is_arc = len(row) > 2
    return [*row[:2], row[3], *row[3:]] if is_arc else row


def _inputs(paths: kaldifst.StdVectorFst, words: list[int]) -> list[int]:
    """The input labels of the best path with these words."""
    wanted = kaldifst.make_linear_acceptor(words)
    path = kaldifst.shortest_path(kaldifst.compose(paths, wanted))
    _, labels, _, _ = kaldifst.get_linear_symbol_sequence(path)
    return labels
