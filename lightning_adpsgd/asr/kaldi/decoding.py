"""From log-likelihoods of pdfs to words with times, through a graph of Kaldi."""

import numpy as np

from lightning_adpsgd.asr.kaldi.graph import PdfGraph
from lightning_adpsgd.asr.kaldi.language import Boundaries
from lightning_adpsgd.asr.kaldi.model import Transitions
from lightning_adpsgd.asr.search.decoding import (
    Alternative,
    Hypothesis,
    SearchOptions,
    TimedWord,
    best_path,
    check_likelihoods,
    even_spans,
    timed_word,
)
from lightning_adpsgd.asr.search.nbest import NBestOptions, word_paths


class KaldiDecoder:
    """Finds the words of log-likelihoods over the pdfs.

    Args:
        graph: From `graph.over_pdfs`.
        transitions: Of the model that belongs to it.
        words: The word of each label.
        boundaries: How phones make words.
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
        self._graph, self._transitions = graph, transitions
        self._words, self._boundaries = words, boundaries
        self._options = (options or SearchOptions()).for_decoder()

    def decode(self, log_likelihoods: np.ndarray, acoustic_scale: float) -> Hypothesis:
        """The most likely words.

        Args:
            log_likelihoods: [time, pdfs]; no frames give no words.
            acoustic_scale: Factor that sets them against the language model.

        Raises:
            ValueError: Another shape, or a value that is not finite.
        """
        check_likelihoods(log_likelihoods, self._transitions.num_pdfs)
        path = best_path(
            self._graph.fst, log_likelihoods, acoustic_scale, self._options
        )
        if path is None:
            return Hypothesis((), False)
        return self._hypothesis(path.outputs, path.is_complete)

    def alternatives(
        self, log_likelihoods: np.ndarray, acoustic_scale: float, options: NBestOptions
    ) -> list[Alternative]:
        """The most likely word sequences, each once, the best first.

        Args:
            log_likelihoods: As of `decode`.
            acoustic_scale: As of `decode`.
            options: How many, and how far they may be from the best.

        Raises:
            ValueError: Another shape, or a value that is not finite.
        """
        check_likelihoods(log_likelihoods, self._transitions.num_pdfs)
        scaled = np.ascontiguousarray(log_likelihoods * acoustic_scale, np.float32)
        words_of = self._graph.pairs[:, 1].tolist()
        return [
            Alternative(self._hypothesis(path.inputs, path.is_complete), path.cost)
            for path in word_paths(self._graph.fst, scaled, options, words_of)
        ]

    def _hypothesis(self, numbers: list[int], is_complete: bool) -> Hypothesis:
        """Of the numbers of pairs along a path."""
        pairs = self._graph.pairs[numbers]
        ids = pairs[pairs[:, 0] > 0, 0]
        words = pairs[pairs[:, 1] > 0, 1].tolist()
        return Hypothesis(self._timed(ids, words), is_complete)

    def _timed(self, ids: np.ndarray, words: list[int]) -> tuple[TimedWord, ...]:
        phones, edges = split_phones(ids, self._transitions)
        places = self._boundaries.spans(phones, words)
        if places is None:
            spans = even_spans(len(ids), len(words))
        else:
            spans = [(edges[first], edges[after]) for first, after in places]
        spelled = [self._words.get(word, f"#{word}") for word in words]
        return tuple(map(timed_word, spelled, spans))


def split_phones(
    ids: np.ndarray, transitions: Transitions
) -> tuple[list[int], list[int]]:
    """The phones along a path and the frames at which they begin, with the end added.

    Args:
        ids: Transition-id of each frame, [time].
        transitions: Of the model.
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
    """Whether the loops of a state follow the arc out of it, as Kaldi reorders them."""
    states, is_loop = transitions.state[ids], transitions.is_loop[ids]
    changes = np.flatnonzero(states[1:] != states[:-1])
    before, after = is_loop[changes], is_loop[changes + 1]
    told = np.flatnonzero(before | after)
    if len(told):
        return bool(before[told[0]])
    return bool(len(ids) and is_loop[-1] and not is_loop[0])
