"""From log-likelihoods of pdfs to words with times, through a graph of Kaldi."""

import numpy as np
from typing_extensions import override

from lightning_adpsgd.asr.kaldi.graph import PdfGraph
from lightning_adpsgd.asr.kaldi.language import Boundaries
from lightning_adpsgd.asr.kaldi.model import Transitions
from lightning_adpsgd.asr.search.decoding import BestPath, GraphDecoder, SearchOptions
from lightning_adpsgd.asr.search.lattice import Lattice
from lightning_adpsgd.asr.search.nbest import WordPath
from lightning_adpsgd.asr.search.words import (
    Hypothesis,
    TimedWord,
    even_spans,
    timed_word,
)


class KaldiDecoder(GraphDecoder):
    """Finds the words of log-likelihoods over the pdfs.

    Args:
        graph: Graph from `graph.over_pdfs`.
        transitions: Transitions of the model that belongs to it.
        words: Spelling of each word label.
        boundaries: Rules by which phones make words.
        options: Width of the search.
    """

    def __init__(
        self,
        graph: PdfGraph,
        transitions: Transitions,
        words: dict[int, str],
        boundaries: Boundaries,
        options: SearchOptions | None = None,
    ) -> None:
        words_of = graph.pairs[:, 1].tolist()
        super().__init__(graph.fst, transitions.num_pdfs, options, words_of)
        self._pairs, self._transitions = graph.pairs, transitions
        self._words, self._boundaries = words, boundaries

    @override
    def _hypothesis(self, path: BestPath | WordPath) -> Hypothesis:
        # The graph's output labels; a `WordPath` has them as its inputs.
        numbers = path.inputs if isinstance(path, WordPath) else path.outputs
        pairs = self._pairs[numbers]
        ids = pairs[pairs[:, 0] > 0, 0]
        words = pairs[pairs[:, 1] > 0, 1].tolist()
        return Hypothesis(self._timed(ids, words), path.is_complete)

    @override
    def link_labels(self, lattice: Lattice) -> tuple[np.ndarray, np.ndarray]:
        """Transition-ids and words of a lattice's links."""
        numbers, words = super().link_labels(lattice)
        return self._pairs[numbers, 0], words

    @override
    def _spelling(self, label: int) -> str:
        return self._words.get(label, f"#{label}")

    def _timed(self, ids: np.ndarray, words: list[int]) -> tuple[TimedWord, ...]:
        phones, edges = split_phones(ids, self._transitions)
        places = self._boundaries.spans(phones, words)
        if places is None:
            spans = even_spans(len(ids), len(words))
        else:
            spans = [(edges[first], edges[after]) for first, after in places]
        spelled = map(self._spelling, words)
        return tuple(map(timed_word, spelled, spans))


def split_phones(
    ids: np.ndarray, transitions: Transitions
) -> tuple[list[int], list[int]]:
    """The phones along a path, and the frames at which they begin, with the end added.

    Args:
        ids: Transition-id of each frame, [time].
        transitions: Transitions of the model.
    """
    is_loop, is_final = transitions.is_loop[ids], transitions.is_final[ids]
    ends = np.flatnonzero(is_final)
    if len(ends) and _loops_follow(ids, transitions):
        # A state's loops come after the arc that leaves it: they belong before the end.
        following = np.flatnonzero(~is_loop)
        after = np.searchsorted(following, ends, side="right")
        ends = np.append(following, len(ids))[after] - 1
    starts = [0, *(ends + 1).tolist()]
    edges = starts if starts[-1] == len(ids) else [*starts, len(ids)]
    phones = transitions.phone[ids[edges[:-1]]] if len(ids) else np.zeros(0, int)
    return phones.tolist(), edges


def _loops_follow(ids: np.ndarray, transitions: Transitions) -> bool:
    """Whether the loops of a state follow the arc that leaves it, as Kaldi can do."""
    states, is_loop = transitions.state[ids], transitions.is_loop[ids]
    changes = np.flatnonzero(states[1:] != states[:-1])
    before, after = is_loop[changes], is_loop[changes + 1]
    told = np.flatnonzero(before | after)
    if len(told):
        return bool(before[told[0]])
    return bool(len(ids) and is_loop[-1] and not is_loop[0])
