"""The bounded search against all paths there are, and against Kaldi's search."""

import itertools
import math

import kaldifst
import numpy as np
import pytest

from lightning_adpsgd.asr.search.decoding import Decoder, SearchOptions
from lightning_adpsgd.asr.search.graphs import decoding_graph
from lightning_adpsgd.asr.search.lattice import (
    Lattice,
    LatticeOptions,
    LatticeSearch,
    SearchGraph,
)
from lightning_adpsgd.asr.search.nbest import NBestOptions, list_words
from lightning_adpsgd.asr.search.posteriors import confidences, link_posteriors
from tests.asr import digits

WIDE = LatticeOptions(beam=1000.0, lattice_beam=999.0)
# source, target, input label, word, cost; a loop, silent arcs two deep, two ways to end
ARCS = (
    (0, 1, 1, 7, 0.5),
    (0, 0, 2, 0, 0.1),
    (0, 2, 0, 0, 0.7),
    (2, 3, 0, 9, 0.2),
    (3, 1, 2, 0, 0.3),
    (1, 1, 1, 0, 0.4),
    (1, 2, 2, 8, 0.6),
    (2, 1, 1, 7, 0.9),
)
FINALS = {1: 0.25, 3: 0.5}


@pytest.fixture(scope="module")
def graph() -> SearchGraph:
    lines = [" ".join(map(str, arc)) for arc in ARCS]
    lines += [f"{state} {cost}" for state, cost in FINALS.items()]
    return SearchGraph(kaldifst.compile("\n".join([*lines, ""])))


def scaled(frames: int) -> np.ndarray:
    return np.random.default_rng(frames).normal(size=(frames, 2)).astype(np.float32)


def all_paths(likelihoods: np.ndarray, finals: dict[int, float]):
    """Arcs and cost of every path that reads all frames and ends."""
    found = []

    def walk(state: int, frame: int, path: tuple[int, ...], cost: float) -> None:
        if frame == len(likelihoods) and state in finals:
            found.append((path, cost + finals[state]))
        for number, (source, target, label, _, weight) in enumerate(ARCS):
            if source != state or (label and frame == len(likelihoods)):
                continue
            acoustic = -float(likelihoods[frame, label - 1]) if label else 0.0
            onward = frame + (label > 0)
            walk(target, onward, (*path, number), cost + weight + acoustic)

    walk(0, 0, (), 0.0)
    return found


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_posteriors_are_those_of_all_paths(graph, frames):
    likelihoods = scaled(frames)
    lattice = LatticeSearch(graph, WIDE).lattice(likelihoods)
    assert lattice is not None
    paths = all_paths(likelihoods, FINALS)
    total = sum(math.exp(-cost) for _, cost in paths)
    expected: dict[tuple[int, int], float] = {}
    for path, cost in paths:
        frame = 0
        for number in path:
            key = frame, number
            expected[key] = expected.get(key, 0.0) + math.exp(-cost) / total
            frame += ARCS[number][2] > 0
    kinds = {(label, word, round(weight, 3)): n for n, (*_, label, word, weight) in
             enumerate(ARCS)}  # fmt: skip
    found: dict[tuple[int, int], float] = {}
    posteriors = link_posteriors(lattice)
    for arc, frame, posterior in zip(
        lattice.arc, lattice.frame, posteriors, strict=True
    ):
        weight = round(float(graph.weights[arc]), 3)
        kind = kinds[int(graph.inputs[arc]), int(graph.outputs[arc]), weight]
        found[int(frame), kind] = float(posterior)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("frames", [1, 3, 6])
def test_the_best_path_is_the_cheapest_of_all(graph, frames):
    likelihoods = scaled(frames)
    lattice = LatticeSearch(graph, WIDE).lattice(likelihoods)
    assert lattice is not None
    links = lattice.best()
    cost = lattice.cost[links].sum() + lattice.finals[lattice.target[links[-1]]]
    assert cost == pytest.approx(min(c for _, c in all_paths(likelihoods, FINALS)))
    assert lattice.reads[links].sum() == frames
    assert (lattice.target[links[:-1]] == lattice.source[links[1:]]).all()


def test_only_paths_near_the_best_are_kept(graph):
    likelihoods = scaled(5)
    narrow = LatticeOptions(beam=1000.0, lattice_beam=1.5)
    lattice = LatticeSearch(graph, narrow).lattice(likelihoods)
    wide = LatticeSearch(graph, WIDE).lattice(likelihoods)
    assert lattice is not None
    assert wide is not None
    assert len(lattice.arc) == (wide.excess <= 1.5).sum() < len(wide.arc)
    assert wide.near(1.5, 10**6).sum() == len(lattice.arc)
    assert wide.near(1.5, 3).sum() < len(lattice.arc)
    assert wide.near(1.5, 3)[wide.best()].all()


def test_without_an_end_the_best_unfinished_path_is_taken():
    fst = kaldifst.compile("0 1 1 7 0.5\n1 0 1 8 0.5\n1 0.0\n")
    search = LatticeSearch(SearchGraph(fst), WIDE)
    for frames, complete in ((3, True), (2, False)):
        lattice = search.lattice(np.zeros((frames, 1), np.float32))
        assert lattice is not None
        assert lattice.is_complete == complete
        assert len(lattice.best()) == frames


@pytest.mark.parametrize("frames", [2, 3, 9])
def test_where_all_paths_have_ended_before_the_sound_there_is_no_lattice(frames):
    """As with a graph of one word, or where a narrow beam keeps what cannot go on."""
    fst = kaldifst.compile("0 1 1 7 0.5\n0 0 1 0 3.0\n1 0.0\n0 0.0\n")
    graph, zeros = SearchGraph(fst), np.zeros((frames, 1), np.float32)
    narrow = LatticeSearch(graph, LatticeOptions(beam=1.0, lattice_beam=1.0))
    assert narrow.lattice(zeros) is None
    assert list_words(graph, zeros, NBestOptions(beam=1.0, lattice_beam=1.0)) is None
    assert narrow.lattice(zeros[:1]) is not None  # nothing is left of the frames before
    assert LatticeSearch(graph, WIDE).lattice(zeros) is not None


def test_no_frames_have_no_lattice(graph):
    assert LatticeSearch(graph, WIDE).lattice(np.zeros((0, 2), np.float32)) is None


# --- with words


@pytest.fixture(scope="module")
def speaker() -> digits.Speaker:
    return digits.Speaker(digits.lexicon(), noise=2.0)


@pytest.fixture(scope="module")
def decoder(speaker, tmp_path_factory) -> Decoder:
    arpa = digits.loop_arpa(
        tmp_path_factory.mktemp("lm") / "lm.arpa", list(digits.SPELLED)
    )
    graph = decoding_graph(speaker.lexicon, speaker.topology, arpa)
    return Decoder(graph, speaker.lexicon, speaker.topology, SearchOptions())


def said(speaker: digits.Speaker, length: int) -> np.ndarray:
    states = speaker.states(speaker.sentence(length))
    return speaker.log_likelihoods(speaker.frames(states))


def test_it_finds_the_words_and_times_of_kaldis_search(speaker, decoder):
    for length in range(1, 8):
        likelihoods = said(speaker, length)
        for scale in (0.02, 0.1):
            best = decoder.decode(likelihoods, scale)
            sure = decoder.decode_confidently(likelihoods, scale)
            assert sure.is_complete == best.is_complete
            without = [word._replace(confidence=1.0) for word in sure.words]
            assert tuple(without) == best.words


def test_confidence_falls_with_what_the_sound_tells(speaker, decoder):
    likelihoods = said(speaker, 6)

    def mean(scale: float) -> float:
        words = decoder.decode_confidently(likelihoods, scale).words
        assert all(0 <= word.confidence <= 1 for word in words)
        return float(np.mean([word.confidence for word in words]))

    assert mean(0.3) > 0.99
    assert mean(0.3) > mean(0.03) > mean(0.01)


def test_the_width_is_bounded(speaker, decoder):
    likelihoods = said(speaker, 4) * 0.001  # next to nothing is told
    for most in (10, 40):
        options = LatticeOptions(beam=100.0, max_active=most, lattice_beam=50.0)
        lattice = LatticeSearch(decoder.search_graph, options).lattice(likelihoods)
        assert lattice is not None
        per_frame = nodes_by_frame(lattice)
        assert max(per_frame) <= most
        assert sum(per_frame) > len(per_frame)


def nodes_by_frame(lattice: Lattice) -> list[int]:
    read = lattice.reads
    ends = zip(lattice.frame[read].tolist(), lattice.target[read].tolist(), strict=True)
    return [
        len({node for _, node in several})
        for _, several in itertools.groupby(sorted(ends), key=lambda end: end[0])
    ]


def test_a_list_too_large_is_narrowed_and_not_given_up(speaker, decoder):
    likelihoods = said(speaker, 5)
    most, scale = 20, 0.05
    options = NBestOptions(most=most, beam=60.0, lattice_beam=48.0, max_states=500)
    found = decoder.alternatives(likelihoods, scale, options)
    assert len(found) == most
    assert found[0].text == decoder.decode(likelihoods, scale).text


def test_the_same_word_twice_is_counted_for_each(graph):
    lattice = LatticeSearch(graph, WIDE).lattice(scaled(5))
    assert lattice is not None
    words = graph.outputs[lattice.arc]
    sure = confidences(lattice, words, lattice.best())
    assert len(sure) == (words[lattice.best()] > 0).sum()
    assert all(0 < one <= 1 for one in sure)


def test_a_word_said_twice_is_as_sure_each_time_as_its_own_paths():
    """In each of two frames the words 1 and 2 are equally likely."""
    lattice = Lattice(
        source=np.array([0, 0, 1, 1]),
        target=np.array([1, 1, 2, 2]),
        arc=np.arange(4),
        cost=np.zeros(4),
        frame=np.array([0, 0, 1, 1]),
        reads=np.ones(4, bool),
        excess=np.zeros(4),
        finals=np.array([np.inf, np.inf, 0.0]),
        is_complete=True,
    )
    sure = confidences(lattice, np.array([1, 2, 1, 2]), np.array([0, 2]))
    assert sure == pytest.approx([0.5, 0.5])
