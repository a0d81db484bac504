"""Graphs whose states depend on the phones before and after."""

import kaldifst
import numpy as np
import pytest

from lightning_adpsgd.asr.hmm.states import Topology
from lightning_adpsgd.asr.hmm.tree import LEFT, RIGHT, DecisionTree
from lightning_adpsgd.asr.search.decoding import Decoder
from lightning_adpsgd.asr.search.graphs import TrainingGraphs, decoding_graph
from tests.asr import digits
from tests.asr.search.test_graphs import accepts


def in_context(topology: Topology) -> Topology:
    """Three states for each of the phones but silence: by left, and then by right."""
    size = len(topology.phones)
    roots = range(3, topology.num_states)
    question = (np.arange(size) % 3 == 0)[None]
    splits = [(root, LEFT, 0) for root in roots]
    splits += [(topology.num_states + 2 * i, RIGHT, 0) for i in range(len(roots))]
    tree = DecisionTree.of(topology.num_states, question, splits)
    return Topology(topology.phones, 3, tree)


@pytest.fixture(scope="module")
def topology() -> Topology:
    return in_context(Topology.of(digits.lexicon()))


def spell(topology: Topology, phones: str, repeats: int = 1) -> list[int]:
    labels = [0, *(1 + topology.phones.index(phone) for phone in phones.split()), 0]
    windows = np.lib.stride_tricks.sliding_window_view(np.array(labels), 3)
    return np.repeat(topology.chains(windows).ravel(), repeats).tolist()


def test_the_tree_of_this_test_tells_contexts_apart(topology):
    first, second = np.array(spell(topology, "sil n n sil")).reshape(4, 3)[1:3]
    assert (first != second).all()
    assert topology.num_states == 3 + 3 * 3 * (len(topology.phones) - 1)


def test_training_graph_reads_its_words_in_every_context(topology):
    graphs = TrainingGraphs(digits.lexicon(), topology)
    graph = graphs.graph(["two", "one", "nine"])
    expected = [graphs.symbols.words[word] for word in ("two", "one", "nine")]
    for phones in ("t uw w ah n n ay n", "sil t uw sil w ah n sil n ay n sil"):
        for repeats in (1, 3):
            assert accepts(graph, spell(topology, phones, repeats)) == expected


def test_training_graph_reads_no_states_of_another_context(topology):
    graph = TrainingGraphs(digits.lexicon(), topology).graph(["two", "one"])
    pieces = spell(topology, "t uw sil")[:6] + spell(topology, "sil w ah n")[3:]
    assert accepts(graph, spell(topology, "t uw w ah n")) is not None
    assert pieces != spell(topology, "t uw w ah n")
    assert accepts(graph, pieces) is None


@pytest.fixture(scope="module")
def hclg(topology, tmp_path_factory) -> kaldifst.StdVectorFst:
    arpa = tmp_path_factory.mktemp("lm") / "lm.arpa"
    digits.loop_arpa(arpa, list(digits.SPELLED))
    return decoding_graph(digits.lexicon(), topology, arpa)


def test_hclg_reads_every_sentence_of_the_grammar(topology, hclg):
    speaker = digits.Speaker(digits.lexicon(), topology=topology)
    words = TrainingGraphs(digits.lexicon(), topology).symbols.words
    for length in (1, 2, 5):
        sentence = speaker.sentence(length)
        labels = accepts(hclg, speaker.states(sentence).tolist())
        assert labels == [words[word] for word in sentence]


def test_a_path_costs_what_it_costs_without_context(topology, hclg, tmp_path):
    lexicon = digits.lexicon()
    monophones = Topology.of(lexicon)
    arpa = digits.loop_arpa(tmp_path / "lm.arpa", list(digits.SPELLED))
    plain = decoding_graph(lexicon, monophones, arpa)
    phones = "sil t uw sil w ah n n ay n"
    labels = [monophones.phones.index(phone) + 1 for phone in phones.split()]
    chains = monophones.chains(np.array(labels)[:, None]).ravel().tolist()
    assert cost(hclg, spell(topology, phones)) == pytest.approx(
        cost(plain, chains), abs=1e-3
    )


def cost(graph: kaldifst.StdVectorFst, states: list[int]) -> float:
    linear = kaldifst.make_linear_acceptor([state + 1 for state in states])
    path = kaldifst.shortest_path(kaldifst.compose(linear, graph))
    return kaldifst.get_linear_symbol_sequence(path)[3].value


def test_words_are_recognised_with_their_times(topology, hclg):
    speaker = digits.Speaker(digits.lexicon(), noise=0.5, topology=topology)
    decoder = Decoder(hclg, digits.lexicon(), topology)
    sentence = speaker.sentence(5)
    states = speaker.states(sentence)
    found = decoder.decode(speaker.log_likelihoods(speaker.frames(states)), 1.0)
    assert found.text == tuple(sentence)
    assert found.is_complete
    ends = [word.start_s + word.duration_s for word in found.words]
    starts = [word.start_s for word in found.words]
    assert all(e <= s + 1e-9 for e, s in zip(ends, starts[1:], strict=False))
    silence = np.isin(states, topology.chain([0, 1, 0])).sum() / 100
    assert sum(word.duration_s for word in found.words) == pytest.approx(
        len(states) / 100 - silence
    )
