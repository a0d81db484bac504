"""Decoding: from log-likelihoods of HMM states to words with times, through HCLG.

The search for the best path, `Decoder.decode`, is Kaldi's beam search. `lattice.py` has
the search for lattices. A recogniser takes its words from the lattice's best path, with
confidences (`ConfidentSearch`). `words.py` adds times to the words on a path.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import kaldi_decoder
import kaldifst
import numpy as np
from typing_extensions import override

from lightning_adpsgd.asr.hmm.states import Topology, phone_runs
from lightning_adpsgd.asr.language.lexicon import Lexicon
from lightning_adpsgd.asr.search.graphs import symbols_of
from lightning_adpsgd.asr.search.lattice import (
    Lattice,
    LatticeOptions,
    LatticeSearch,
    SearchGraph,
)
from lightning_adpsgd.asr.search.nbest import (
    NBestOptions,
    WordPath,
    columns_of,
    link_labels,
    list_words,
    path_of,
)
from lightning_adpsgd.asr.search.posteriors import confidences
from lightning_adpsgd.asr.search.words import (
    FRAME_SHIFT_S,
    Alternative,
    Hypothesis,
    TimedWord,
    even_spans,
    place_words,
    timed_word,
)

_LATTICE_BEAM = 6.0


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The width of a search.

    Attributes:
        beam: Distance from the best path, in scaled log-likelihood.
        max_active: Maximum number of graph states that survive a frame.

    Raises:
        ValueError: `beam` is not positive, or `max_active` below 2.
    """

    beam: float = 13.0
    max_active: int = 7000

    def __post_init__(self):
        if self.beam <= 0 or self.max_active < 2:
            raise ValueError(
                "`beam` must be positive and `max_active` at least 2, got "
                f"{self.beam} and {self.max_active}"
            )

    def for_decoder(self) -> kaldi_decoder.FasterDecoderOptions:
        """The options for kaldi_decoder."""
        return kaldi_decoder.FasterDecoderOptions(
            beam=self.beam,
            max_active=self.max_active,
            min_active=min(20, self.max_active - 1),
        )


class Search(Protocol):
    """A search for words: a `GraphDecoder`, or a search built upon one."""

    def decode(self, log_likelihoods: np.ndarray, acoustic_scale: float) -> Hypothesis:
        """The most likely words of log-likelihoods [time, states]."""
        ...


class Lister(Search, Protocol):
    """A search that can list alternatives, such as a `GraphDecoder`."""

    def alternatives(
        self, log_likelihoods: np.ndarray, acoustic_scale: float, options: NBestOptions
    ) -> list[Alternative]:
        """The most likely word sequences, each once, the best first."""
        ...


class GraphDecoder(ABC):
    """A search in a graph; a subclass turns its paths into words with times.

    Args:
        graph: Transducer from labels of frames to words.
        num_labels: Number of labels of a frame; log-likelihoods are [time, num_labels].
        options: Width of the search.
        words_of: Word label of each output label; None if they are the same.
    """

    def __init__(
        self,
        graph: kaldifst.StdFst,
        num_labels: int,
        options: SearchOptions | None,
        words_of: Sequence[int] | None = None,
    ) -> None:
        self._graph, self._num_labels, self._words_of = graph, num_labels, words_of
        self._width = options or SearchOptions()
        self._options = self._width.for_decoder()

    @cached_property
    def search_graph(self) -> SearchGraph:
        """The graph for lattices; made at first use, best before processes fork."""
        return SearchGraph(self._graph)

    @abstractmethod
    def _hypothesis(self, path: "BestPath | WordPath") -> Hypothesis:
        """The words along a path."""

    @abstractmethod
    def _spelling(self, label: int) -> str:
        """The word of a label."""

    def decode(self, log_likelihoods: np.ndarray, acoustic_scale: float) -> Hypothesis:
        """The most likely words.

        Args:
            log_likelihoods: Log-likelihoods of mixtures, or log-posteriors minus
                log-priors of a network, [time, num_labels]. Zero frames give no words.
            acoustic_scale: Weight of the log-likelihoods relative to the language
                model.

        Raises:
            ValueError: The shape is wrong, or a value is non-finite.
        """
        path = self._best_path(log_likelihoods, acoustic_scale)
        return Hypothesis((), False) if path is None else self._hypothesis(path)

    def _best_path(
        self, log_likelihoods: np.ndarray, acoustic_scale: float
    ) -> "BestPath | None":
        check_likelihoods(log_likelihoods, self._num_labels)
        return best_path(self._graph, log_likelihoods, acoustic_scale, self._options)

    def alternatives(
        self, log_likelihoods: np.ndarray, acoustic_scale: float, options: NBestOptions
    ) -> list[Alternative]:
        """The most likely word sequences, each once, the best first.

        Args:
            log_likelihoods: As for `decode`.
            acoustic_scale: As for `decode`.
            options: Number of sequences, and their distance from the best.

        Raises:
            ValueError: The shape is wrong, or a value is non-finite.
        """
        check_likelihoods(log_likelihoods, self._num_labels)
        scaled = log_likelihoods * acoustic_scale
        found = list_words(self.search_graph, scaled, options, self._words_of)
        if found is None:
            return []

        def timed(position: int) -> Hypothesis:
            return self._hypothesis(found.path(position))

        return [
            Alternative(tuple(map(self._spelling, words)), cost, partial(timed, place))
            for place, (words, cost) in enumerate(found.entries)
        ]

    def lattice(
        self, log_likelihoods: np.ndarray, acoustic_scale: float
    ) -> Lattice | None:
        """The paths near the best one; None if there are no frames, or none survives.

        Args:
            log_likelihoods: As for `decode`.
            acoustic_scale: As for `decode`.

        Raises:
            ValueError: The shape is wrong, or a value is non-finite.
        """
        check_likelihoods(log_likelihoods, self._num_labels)
        width = LatticeOptions(
            beam=self._width.beam,
            max_active=self._width.max_active,
            lattice_beam=min(_LATTICE_BEAM, self._width.beam),
        )
        search = LatticeSearch(self.search_graph, width)
        return search.lattice(log_likelihoods, acoustic_scale)

    def link_labels(self, lattice: Lattice) -> tuple[np.ndarray, np.ndarray]:
        """Input labels and words of a lattice's links, both [links], 0 for none."""
        return link_labels(self.search_graph, lattice, self._words_of)

    def decode_confidently(
        self, log_likelihoods: np.ndarray, acoustic_scale: float
    ) -> Hypothesis:
        """The most likely words, each with its confidence (`posteriors.py`).

        It costs about three times as much as `decode`. The two may differ in words at
        the edge of the beam.

        `fit` is the mean, over the frames of the words, of the log-likelihood of the
        path's state minus that of the frame's best state. It is at most 0. Noise may
        yield words that the language model considers likely, but with a poor fit.

        Args:
            log_likelihoods: As for `decode`.
            acoustic_scale: As for `decode`.

        Raises:
            ValueError: The shape is wrong, or a value is non-finite.
        """
        lattice = self.lattice(log_likelihoods, acoustic_scale)
        if lattice is None:
            return Hypothesis((), False)
        graph, best = self.search_graph, lattice.best()
        _, words = self.link_labels(lattice)
        hypothesis = self._hypothesis(path_of(graph, lattice, best, self._words_of))
        sure = confidences(lattice, words, best)
        timed = zip(hypothesis.words, sure, strict=True)
        scored = tuple(word._replace(confidence=one) for word, one in timed)
        fit = _fit(log_likelihoods, columns_of(graph, lattice, best), scored)
        return hypothesis._replace(words=scored, fit=fit)


class Decoder(GraphDecoder):
    """Finds the words of log-likelihoods over the HMM states.

    Args:
        graph: HCLG from `graphs.decoding_graph` with the same lexicon and topology.
        lexicon: Words and pronunciations.
        topology: Numbering of the HMM states.
        options: Width of the search.
    """

    def __init__(
        self,
        graph: kaldifst.StdFst,
        lexicon: Lexicon,
        topology: Topology,
        options: SearchOptions | None = None,
    ):
        super().__init__(graph, topology.num_states, options)
        symbols = symbols_of(lexicon, topology)
        self._topology = topology
        self._spellings = symbols.spellings
        self._silence = symbols.phones[lexicon.silence_phones[0]] - 1
        self._pronunciations = {
            word: [
                [symbols.phones[phone] - 1 for phone in phones] for phones in several
            ]
            for word, several in lexicon.pronunciations.items()
        }

    def states(self, log_likelihoods: np.ndarray, acoustic_scale: float) -> np.ndarray:
        """The HMM states of the most likely words, for the adaptation to a speaker.

        Args:
            log_likelihoods: As for `decode`.
            acoustic_scale: As for `decode`.

        Returns:
            State of each frame, int64 [time]; all -1 where nothing was found.
        """
        path = self._best_path(log_likelihoods, acoustic_scale)
        if path is None:
            return np.full(len(log_likelihoods), -1)
        return np.array(path.inputs) - 1

    @override
    def _hypothesis(self, path: "BestPath | WordPath") -> Hypothesis:
        words = [self._spellings[label] for label in path.outputs]
        spans = self._spans(np.array(path.inputs) - 1, words)
        return Hypothesis(tuple(map(timed_word, words, spans)), path.is_complete)

    @override
    def _spelling(self, label: int) -> str:
        return self._spellings[label]

    def _spans(self, states: np.ndarray, words: list[str]) -> list[tuple[int, int]]:
        phones, edges = phone_runs(states, self._topology)
        several = [self._pronunciations[word] for word in words]
        found = place_words(phones, several, self._silence)
        if found is None:  # an unfinished path: its last words are not all said
            return even_spans(len(states), len(words))
        return [(edges[first], edges[last]) for first, last in found]


class BestPath(NamedTuple):
    """The best path through a graph: its labels without epsilons."""

    inputs: list[int]
    outputs: list[int]
    is_complete: bool


def best_path(
    graph: kaldifst.StdFst,
    log_likelihoods: np.ndarray,
    acoustic_scale: float,
    options: kaldi_decoder.FasterDecoderOptions,
) -> BestPath | None:
    """The best path for log-likelihoods [time, labels]; None if no path survives.

    Zero frames have no path.
    """
    if len(log_likelihoods) == 0:
        return None
    # must outlive the decodable, which does not copy it
    scaled = np.ascontiguousarray(log_likelihoods * acoustic_scale, np.float32)
    decoder = kaldi_decoder.FasterDecoder(graph, options)
    decoder.decode(kaldi_decoder.DecodableCtc(scaled))
    found, path = decoder.get_best_path()
    if not found:
        return None
    _, inputs, outputs, _ = kaldifst.get_linear_symbol_sequence(path)
    return BestPath(inputs, outputs, decoder.reached_final())


def check_likelihoods(log_likelihoods: np.ndarray, expected: int) -> None:
    """Refuses log-likelihoods that are non-finite or not [time, expected].

    Raises:
        ValueError: The shape is wrong, or a value is non-finite.
    """
    if log_likelihoods.ndim != 2 or log_likelihoods.shape[1] != expected:
        raise ValueError(
            f"`log_likelihoods` must have shape [time, {expected}], got "
            f"{list(log_likelihoods.shape)}"
        )
    if not np.isfinite(log_likelihoods).all():
        raise ValueError("`log_likelihoods` must be finite, but has a non-finite value")


def _fit(
    log_likelihoods: np.ndarray, columns: np.ndarray, words: Sequence[TimedWord]
) -> float:
    """The fit of the words' frames to the states of a path; see `Hypothesis`."""
    gaps = log_likelihoods[np.arange(len(columns)), columns]
    gaps = gaps - log_likelihoods.max(axis=1)
    spans = ((word.start_s, word.start_s + word.duration_s) for word in words)
    edges = [(round(a / FRAME_SHIFT_S), round(b / FRAME_SHIFT_S)) for a, b in spans]
    spoken = np.concatenate([gaps[:0], *(gaps[a:b] for a, b in edges)])
    return float(spoken.mean()) if len(spoken) else 0.0


def decode_at_scales(
    log_likelihoods: np.ndarray, decoder: Search, acoustic_scales: Sequence[float]
) -> list[Hypothesis]:
    """Decodes log-likelihoods [time, labels] once for each acoustic scale."""
    return [decoder.decode(log_likelihoods, scale) for scale in acoustic_scales]


class ConfidentSearch:
    """A search that adds confidences to words and a fit to hypotheses.

    Args:
        decoder: Underlying search.
        least_fit: Fit below which the words of a hypothesis are dropped.

    Attributes:
        num_poor: Number of hypotheses whose words were dropped.
    """

    def __init__(self, decoder: GraphDecoder, least_fit: float = float("-inf")) -> None:
        self._decoder, self.least_fit = decoder, least_fit
        self.num_poor = 0

    def decode(self, log_likelihoods: np.ndarray, acoustic_scale: float) -> Hypothesis:
        """The most likely words, as from `Search.decode`."""
        found = self._decoder.decode_confidently(log_likelihoods, acoustic_scale)
        if found.fit is None or found.fit >= self.least_fit:
            return found
        self.num_poor += bool(found.words)
        return found._replace(words=())
