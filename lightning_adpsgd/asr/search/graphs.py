"""Weighted transducers from HMM states to words: training graphs and HCLG.

A graph reads one HMM state per frame (input label = state + 1, label 0 = epsilon) and
writes words:

    HCLG = self-loops(min(det(H o C o min(det(L o G)))))      decoding
    HCL  = self-loops(H o C o L o words)                      training

L is the lexicon with optional silence, G the n-gram, C the phone context and H the
chain of HMM states. Every phone is a chain of `states_per_phone` states, each with a
self-loop. Transition probabilities are not modelled: leaving and staying cost the
same, so they add a constant per frame. C puts each phone into a window of
`Topology.context_width` phones, which for monophones is the phone itself.
"""

import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import kaldifst
import kaldilm
import numpy as np

from lightning_adpsgd.asr.hmm.states import Topology
from lightning_adpsgd.asr.language.arpa import check_arpa
from lightning_adpsgd.asr.language.lexicon import Lexicon
from lightning_adpsgd.asr.search.arcs import Arcs, arcs_of, fst_of

BACKOFF = "#0"


class Symbols(NamedTuple):
    """Integer labels of words and phones, and the disambiguation symbols after them.

    `phones` maps a phone to its label (1 upwards), `disambiguations` lists the labels
    of #0, #1 ... on the phone side.
    """

    words: dict[str, int]
    phones: dict[str, int]
    disambiguations: list[int]

    @property
    def spellings(self) -> list[str]:
        """The word of each word label."""
        return list(self.words)


def symbols_of(lexicon: Lexicon, topology: Topology) -> Symbols:
    """Numbers the words, phones and disambiguation symbols of a lexicon.

    Raises:
        ValueError: A word has the name of a symbol, such as `<eps>`.
    """
    words = ["<eps>", *sorted(lexicon.pronunciations), BACKOFF, "<s>", "</s>"]
    if len(set(words)) != len(words):
        raise ValueError("the lexicon must not hold <eps>, #0, <s> or </s> as a word")
    num_phones = len(topology.phones)
    # #0 for back-off, #1 after optional silence, #2 upwards for homophones
    num_disambiguations = 2 + max(_disambiguated(lexicon).values(), default=0)
    return Symbols(
        {word: label for label, word in enumerate(words)},
        {phone: label for label, phone in enumerate(topology.phones, start=1)},
        list(range(num_phones + 1, num_phones + 1 + num_disambiguations)),
    )


def _disambiguated(lexicon: Lexicon) -> dict[tuple[str, tuple[str, ...]], int]:
    """Number (1 upwards) of the symbol that ends each ambiguous pronunciation."""
    entries = list(_entries(lexicon))
    counts: dict[tuple[str, ...], int] = {}
    prefixes = {phones[:end] for _, phones in entries for end in range(1, len(phones))}
    for _, phones in entries:
        counts[phones] = counts.get(phones, 0) + 1
    used: dict[tuple[str, ...], int] = {}
    symbols = {}
    for word, phones in entries:
        if counts[phones] > 1 or phones in prefixes:
            used[phones] = used.get(phones, 0) + 1
            symbols[word, phones] = used[phones]
    return symbols


def _entries(lexicon: Lexicon) -> Iterable[tuple[str, tuple[str, ...]]]:
    for word in sorted(lexicon.pronunciations):
        for phones in lexicon.pronunciations[word]:
            if not phones:
                raise ValueError(
                    f"word {word!r} of the lexicon must have phones, got none; give it "
                    "a pronunciation, or remove it"
                )
            yield word, tuple(phones)


def lexicon_transducer(
    lexicon: Lexicon,
    symbols: Symbols,
    *,
    disambiguate: bool,
    silence_probability: float = 0.5,
) -> kaldifst.StdVectorFst:
    """L: phones in, words out, optional silence at the start and after each word.

    Args:
        lexicon: Its first silence phone is the optional silence.
        symbols: Symbols from `symbols_of` with the same lexicon.
        disambiguate: Whether to end ambiguous pronunciations with #1, #2 ... and to
            let #0 pass, as determinization of L o G needs; False for training graphs.
        silence_probability: Probability of a silence between two words, in (0, 1).

    Raises:
        ValueError: `silence_probability` is not in (0, 1), or a word has no phones.
    """
    if not 0 < silence_probability < 1:
        raise ValueError(
            f"`silence_probability` must be in (0, 1), got {silence_probability}"
        )
    endings = _disambiguated(lexicon) if disambiguate else {}
    lines = _silence_lines(symbols, lexicon, silence_probability, disambiguate)
    with_silence = -math.log(silence_probability)
    without = -math.log1p(-silence_probability)
    free = 4
    for word, phones in _entries(lexicon):
        labels = [symbols.phones[phone] for phone in phones]
        if (word, phones) in endings:
            labels.append(symbols.disambiguations[1 + endings[word, phones]])
        output, at = symbols.words[word], 1
        for label in labels[:-1]:
            lines.append(f"{at} {free} {label} {output}")
            output, at, free = 0, free, free + 1
        lines.append(f"{at} 1 {labels[-1]} {output} {without}")
        lines.append(f"{at} 2 {labels[-1]} {output} {with_silence}")
    fst = kaldifst.compile("\n".join([*lines, "1", ""]))
    if disambiguate:
        backoff = [symbols.disambiguations[0]], [symbols.words[BACKOFF]]
        kaldifst.add_self_loops(fst, *backoff)
    kaldifst.arcsort(fst, "olabel")
    return fst


def _silence_lines(
    symbols: Symbols, lexicon: Lexicon, probability: float, disambiguate: bool
) -> list[str]:
    """States 0 start, 1 between words, 2 before a silence, 3 after it."""
    silence = symbols.phones[lexicon.silence_phones[0]]
    after = symbols.disambiguations[1] if disambiguate else 0
    return [
        f"0 1 0 0 {-math.log1p(-probability)}",
        f"0 2 0 0 {-math.log(probability)}",
        f"2 3 {silence} 0",
        f"3 1 {after} 0",
    ]


def grammar_from_arpa(arpa: str | Path, symbols: Symbols) -> kaldifst.StdVectorFst:
    """G: the n-gram of an ARPA file; back-off arcs read #0.

    N-grams with a word that the lexicon lacks are left out.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no ARPA n-gram, or holds no word of the lexicon.
    """
    check_arpa(arpa)
    table = _write_table(symbols)
    try:
        with _without_stderr():
            text = kaldilm.arpa2fst(
                str(arpa),
                disambig_symbol=BACKOFF,
                read_symbol_table=str(table),
                max_arpa_warnings=0,
            )
    finally:
        table.unlink()
    fst = kaldifst.compile(text)
    if fst.start < 0 or fst.num_states == 0:
        raise ValueError(f"{arpa} has no n-gram over the words of the lexicon")
    kaldifst.arcsort(fst, "ilabel")
    return fst


def _write_table(symbols: Symbols) -> Path:
    with tempfile.NamedTemporaryFile(
        "w", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.writelines(f"{word} {label}\n" for word, label in symbols.words.items())
    return Path(file.name)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Mutes C++ code, which tells its progress on file descriptor 2."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class TrainingGraphs:
    """Makes the graph of all pronunciations of a given word sequence.

    Args:
        lexicon: Words, pronunciations and phones.
        topology: The numbering of the HMM states of the same phones.
        silence_probability: Probability of a silence between two words.
    """

    def __init__(
        self, lexicon: Lexicon, topology: Topology, silence_probability: float = 0.5
    ):
        self.topology = topology
        self.symbols = symbols_of(lexicon, topology)
        self._lexicon = lexicon_transducer(
            lexicon,
            self.symbols,
            disambiguate=False,
            silence_probability=silence_probability,
        )
        self._shortest = {
            word: min(map(len, choices))
            for word, choices in lexicon.pronunciations.items()
        }

    def least_frames(self, words: Sequence[str]) -> int:
        """Fewest frames in which `words` can be said.

        Raises:
            ValueError: `words` is empty or has a word that the lexicon lacks.
        """
        self._check(words)
        phones = sum(self._shortest[word] for word in words)
        return phones * self.topology.states_per_phone

    def graph(self, words: Sequence[str]) -> kaldifst.StdVectorFst:
        """H o C o L o words with self-loops.

        Raises:
            ValueError: `words` is empty or has a word that the lexicon lacks.
        """
        return fst_of(self.arcs(words))

    def arcs(self, words: Sequence[str]) -> Arcs:
        """The arcs of `graph`.

        Raises:
            ValueError: There is no word, or the lexicon lacks one.
        """
        self._check(words)
        labels = [self.symbols.words[word] for word in words]
        linear = kaldifst.make_linear_acceptor(labels)
        phones = kaldifst.compose(self._lexicon, linear)
        states = _states_of(phones, self.topology, self.symbols.disambiguations)
        return with_self_loops(_without_disambiguations(states, self.topology))

    def _check(self, words: Sequence[str]) -> None:
        if not words:
            raise ValueError("`words` must hold at least one word, got none")
        unknown = [word for word in words if word not in self._shortest]
        if unknown:
            raise ValueError(f"the lexicon lacks the words {unknown}")


def decoding_graph(
    lexicon: Lexicon,
    topology: Topology,
    arpa: str | Path,
    *,
    silence_probability: float = 0.5,
) -> kaldifst.StdVectorFst:
    """HCLG of a lexicon and an ARPA n-gram, ready for `decoding.Decoder`.

    Raises:
        ValueError: No word sequence of the n-gram can be pronounced.
    """
    symbols = symbols_of(lexicon, topology)
    lexicon_fst = lexicon_transducer(
        lexicon, symbols, disambiguate=True, silence_probability=silence_probability
    )
    words = kaldifst.compose(lexicon_fst, grammar_from_arpa(arpa, symbols))
    kaldifst.determinize_star(words, use_log=True)
    kaldifst.minimize_encoded(words)
    hclg = fst_of(_states_of(words, topology, symbols.disambiguations))
    kaldifst.determinize_star(hclg, use_log=True)
    hclg = fst_of(_without_disambiguations(arcs_of(hclg), topology))
    kaldifst.minimize_encoded(hclg)
    if hclg.num_states == 0:
        raise ValueError(f"the lexicon can pronounce no word sequence of {arpa}")
    return fst_of(with_self_loops(arcs_of(hclg)))


def _states_of(
    phones: kaldifst.StdFst, topology: Topology, disambiguations: list[int]
) -> Arcs:
    """H o C o phones: each phone arc becomes a chain of arcs, one for each HMM state.

    Disambiguation symbols keep an arc of their own; their labels follow the states'.
    """
    fst, windows = kaldifst.compose_context(
        disambiguations,
        topology.context_width,
        topology.central_position,
        kaldifst.StdVectorFst(phones),
    )
    chains, is_phone = _chains_of(windows, topology, disambiguations)
    arcs = arcs_of(fst)
    return _chained(arcs, chains, is_phone[arcs.ilabel])


def _chains_of(
    windows: list[list[int]], topology: Topology, disambiguations: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The labels of each window, [windows, states_per_phone], and whether it is phones.

    Other windows are [] for epsilon, [-symbol] for a disambiguation symbol, and [0] for
    the one that compose_context reads while the phone after is not yet known.
    """
    width = topology.context_width
    is_phone = np.array(
        [len(w) == width and w[topology.central_position] > 0 for w in windows], bool
    )
    chains = np.zeros((len(windows), topology.states_per_phone), np.int64)
    inside = [window for window, phone in zip(windows, is_phone, strict=True) if phone]
    if inside:
        chains[is_phone] = topology.chains(np.array(inside)) + 1
    numbers = {symbol: place for place, symbol in enumerate([*disambiguations, 0])}
    for label in np.flatnonzero(~is_phone):
        if windows[label]:
            number = numbers[-windows[label][0]]
            chains[label, 0] = topology.num_states + 1 + number
    return chains, is_phone


def _chained(arcs: Arcs, chains: np.ndarray, expand: np.ndarray) -> Arcs:
    """Replaces the arcs marked in `expand` by chains labelled `chains[ilabel]`."""
    length = chains.shape[1]
    num_inner = length - 1
    long = np.flatnonzero(expand)
    inner = arcs.num_states + np.arange(len(long) * num_inner).reshape(-1, num_inner)
    sources = np.column_stack([arcs.source[long], inner])
    targets = np.column_stack([inner, arcs.target[long]])
    olabels, weights = np.zeros((2, len(long), length))
    olabels[:, 0], weights[:, 0] = arcs.olabel[long], arcs.weight[long]
    short = ~expand
    join = np.concatenate
    return Arcs(
        arcs.start,
        join([arcs.finals, np.full(inner.size, np.inf, np.float32)]),
        join([arcs.source[short], sources.ravel()]),
        join([chains[arcs.ilabel[short], 0], chains[arcs.ilabel[long]].ravel()]),
        join([arcs.olabel[short], olabels.ravel().astype(np.int64)]),
        join([arcs.weight[short], weights.ravel()]).astype(np.float32),
        join([arcs.target[short], targets.ravel()]),
    )


def _without_disambiguations(arcs: Arcs, topology: Topology) -> Arcs:
    is_symbol = arcs.ilabel > topology.num_states
    return arcs._replace(ilabel=np.where(is_symbol, 0, arcs.ilabel))


def with_self_loops(arcs: Arcs) -> Arcs:
    """Lets every HMM state last any number of frames.

    A state of the graph is split by the label of the arcs that enter it, so that all
    arcs into one state read the same HMM state. That is the label of its self-loop.
    """
    num_labels = int(arcs.ilabel.max(initial=0)) + 1
    entries = arcs.target * num_labels + arcs.ilabel
    keys = np.unique(np.append(entries, arcs.start * num_labels))
    base, label = keys // num_labels, keys % num_labels
    split, arc = _copies(base, arcs.source, arcs.num_states)
    loops = np.flatnonzero(label)
    join = np.concatenate
    return Arcs(
        int(np.searchsorted(keys, arcs.start * num_labels)),
        arcs.finals[base],
        join([split, loops]),
        join([arcs.ilabel[arc], label[loops]]),
        join([arcs.olabel[arc], np.zeros(len(loops), np.int64)]),
        join([arcs.weight[arc], np.zeros(len(loops), np.float32)]),
        join([np.searchsorted(keys, entries[arc]), loops]),
    )


def _copies(
    base: np.ndarray, source: np.ndarray, num_states: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (split state, arc): every split state has all arcs of its base state."""
    order = np.argsort(source, kind="stable")
    degree = np.bincount(source, minlength=num_states)
    first = np.cumsum(degree) - degree
    count = degree[base]
    split = np.repeat(np.arange(len(base)), count)
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return split, order[first[base][split] + within]
