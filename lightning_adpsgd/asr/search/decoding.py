"""From a matrix of log-likelihoods of HMM states to words with times, through HCLG.

The search is Kaldi's beam search. Word times come from the HMM states along the best
path, which spell the phones of the words; the graph's own output labels have been moved
by determinization.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import kaldi_decoder
import kaldifst
import numpy as np

from lightning_adpsgd.asr.hmm.states import Topology, phone_runs
from lightning_adpsgd.asr.language.lexicon import Lexicon
from lightning_adpsgd.asr.parallel import fork_map
from lightning_adpsgd.asr.search.graphs import symbols_of
from lightning_adpsgd.asr.search.nbest import NBestOptions, WordPath, word_paths

FRAME_SHIFT_S = 0.01

Item = TypeVar("Item")


class TimedWord(NamedTuple):
    """A word and where it was said, in seconds from the start of the utterance."""

    word: str
    start_s: float
    duration_s: float


class Hypothesis(NamedTuple):
    """What was recognised.

    `is_complete` is False when no sentence of the grammar ends with the last frame
    inside the beam: the words are those of the best path so far.
    """

    words: tuple[TimedWord, ...]
    is_complete: bool

    @property
    def text(self) -> tuple[str, ...]:
        """The words without their times."""
        return tuple(timed.word for timed in self.words)


class Alternative(NamedTuple):
    """One of several hypotheses, with its cost, acoustic scale included."""

    hypothesis: Hypothesis
    cost: float


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How wide the search is.

    Attributes:
        beam: In scaled log-likelihood below the best path.
        max_active: Most graph states that are alive after a frame.
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
        """The same for kaldi_decoder."""
        return kaldi_decoder.FasterDecoderOptions(
            beam=self.beam,
            max_active=self.max_active,
            min_active=min(20, self.max_active - 1),
        )


class Search(Protocol):
    """Finds words: `Decoder`, that of a graph of Kaldi, or what is built upon one."""

    def decode(self, log_likelihoods: np.ndarray, acoustic_scale: float) -> Hypothesis:
        """The most likely words of log-likelihoods [time, states]."""
        ...


class Lister(Search, Protocol):
    """A search that can list alternatives: `Decoder`, or that of a graph of Kaldi."""

    def alternatives(
        self, log_likelihoods: np.ndarray, acoustic_scale: float, options: NBestOptions
    ) -> list[Alternative]:
        """The most likely word sequences, each once, the best first."""
        ...


class Decoder:
    """Finds the words of log-likelihoods over the HMM states.

    Args:
        graph: HCLG from `graphs.decoding_graph` of the same lexicon and topology.
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
        options = options or SearchOptions()
        symbols = symbols_of(lexicon, topology)
        self._graph = graph
        self._topology = topology
        self._spellings = symbols.spellings
        self._silence = symbols.phones[lexicon.silence_phones[0]] - 1
        self._pronunciations = {
            word: [
                [symbols.phones[phone] - 1 for phone in phones] for phones in several
            ]
            for word, several in lexicon.pronunciations.items()
        }
        self._options = options.for_decoder()

    def decode(self, log_likelihoods: np.ndarray, acoustic_scale: float) -> Hypothesis:
        """The most likely words.

        Args:
            log_likelihoods: [time, num_states]: of a mixture, or log-posterior minus
                log-prior of a network. No frames give no words.
            acoustic_scale: Factor that sets them against the language model.

        Raises:
            ValueError: Another shape, or a value that is not finite.
        """
        check_likelihoods(log_likelihoods, self._topology.num_states)
        path = best_path(self._graph, log_likelihoods, acoustic_scale, self._options)
        return Hypothesis((), False) if path is None else self._hypothesis(path)

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
        check_likelihoods(log_likelihoods, self._topology.num_states)
        scaled = np.ascontiguousarray(log_likelihoods * acoustic_scale, np.float32)
        return [
            Alternative(self._hypothesis(path), path.cost)
            for path in word_paths(self._graph, scaled, options)
        ]

    def states(self, log_likelihoods: np.ndarray, acoustic_scale: float) -> np.ndarray:
        """The HMM states of the most likely words: what a speaker is adapted with.

        Args:
            log_likelihoods: As of `decode`.
            acoustic_scale: As of `decode`.

        Returns:
            int64 [time]; all -1 where nothing was found.
        """
        check_likelihoods(log_likelihoods, self._topology.num_states)
        path = best_path(self._graph, log_likelihoods, acoustic_scale, self._options)
        if path is None:
            return np.full(len(log_likelihoods), -1)
        return np.array(path.inputs) - 1

    def _hypothesis(self, path: "BestPath | WordPath") -> Hypothesis:
        words = [self._spellings[label] for label in path.outputs]
        spans = self._spans(np.array(path.inputs) - 1, words)
        return Hypothesis(tuple(map(timed_word, words, spans)), path.is_complete)

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
    """The best path of log-likelihoods [time, labels], or None if nothing survives.

    No frames have no path.
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
    """Refuses log-likelihoods that are not finite or not [time, expected].

    Raises:
        ValueError: They are not.
    """
    if log_likelihoods.ndim != 2 or log_likelihoods.shape[1] != expected:
        raise ValueError(
            f"`log_likelihoods` must have shape [time, {expected}], got "
            f"{list(log_likelihoods.shape)}"
        )
    if not np.isfinite(log_likelihoods).all():
        raise ValueError("`log_likelihoods` holds a value that is not finite")


def even_spans(num_frames: int, num_words: int) -> list[tuple[int, int]]:
    """Words of an unfinished path, the last of which is not all said, spread evenly."""
    even = np.linspace(0, num_frames, num_words + 1).astype(int)
    return list(zip(even[:-1].tolist(), even[1:].tolist(), strict=True))


def timed_word(word: str, span: tuple[int, int]) -> TimedWord:
    """A word and its frames, as times."""
    start, end = span
    return TimedWord(word, start * FRAME_SHIFT_S, (end - start) * FRAME_SHIFT_S)


def place_words(
    phones: list[int], words: Sequence[list[list[int]]], silence: int
) -> list[tuple[int, int]] | None:
    """Which phones each word covers, or None where the words do not spell `phones`.

    Args:
        phones: Phones along the path.
        words: For each word, its pronunciations.
        silence: The phone that may come before, between and after words.

    Returns:
        For each word the index of its first phone and that after its last one.
    """
    # position after the words so far -> ((..., first phone), position)
    reached: dict[int, tuple] = {0: ()}
    for pronunciations in words:
        following: dict[int, tuple] = {}
        for at, path in reached.items():
            for first in _skips(phones, at, silence):
                for pronunciation in pronunciations:
                    after = first + len(pronunciation)
                    if phones[first:after] == pronunciation:
                        following.setdefault(after, (path, (first, after)))
        reached = following
    for at, path in reached.items():
        if len(phones) in _skips(phones, at, silence):
            return _unlinked(path)
    return None


def _skips(phones: list[int], at: int, silence: int) -> list[int]:
    is_silence = at < len(phones) and phones[at] == silence
    return [at, at + 1] if is_silence else [at]


def _unlinked(path: tuple) -> list[tuple[int, int]]:
    spans = []
    while path:
        path, span = path
        spans.append(span)
    return spans[::-1]


def decode_all(
    items: Sequence[Item],
    log_likelihoods: Callable[[Item], np.ndarray],
    decoder: Search,
    acoustic_scales: Sequence[float],
    num_processes: int = 1,
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Decodes items in processes; yields (index, one hypothesis per acoustic scale).

    Args:
        items: What `log_likelihoods` takes, one for each utterance.
        log_likelihoods: Called in the processes, once for each item.
        decoder: The search.
        acoustic_scales: Every item is decoded with each of them.
        num_processes: How many at the same time.
    """

    def work(item: Item) -> list[Hypothesis]:
        matrix = log_likelihoods(item)
        return [decoder.decode(matrix, scale) for scale in acoustic_scales]

    yield from fork_map(work, items, num_processes)


def write_graph(graph: kaldifst.StdVectorFst, path: str | Path) -> None:
    """Writes a graph in OpenFst's constant format, whole or not at all."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    if not kaldifst.StdConstFst(graph).write(str(partial)):
        raise OSError(f"{path} could not be written")
    os.replace(partial, path)


def read_graph(path: str | Path) -> kaldifst.StdFst:
    """Reads what `write_graph` wrote; also Kaldi's own constant graphs.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no constant transducer, or is truncated.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"decoding graph {path} does not exist")
    graph = kaldifst.StdConstFst.read(str(path))
    if graph is None:
        raise ValueError(f"{path} is no constant transducer of OpenFst")
    return graph
