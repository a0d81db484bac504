import tempfile
from typing import Any

import kaldifst
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_adpsgd.asr.hmm.states import Topology
from lightning_adpsgd.asr.language.lexicon import Lexicon
from lightning_adpsgd.asr.search.arcs import Arcs, arcs_of, fst_of
from lightning_adpsgd.asr.search.graphs import (
    TrainingGraphs,
    decoding_graph,
    grammar_from_arpa,
    symbols_of,
    with_self_loops,
)
from tests.asr import digits
from tests.asr.small_disk import on_a_small_disk


def accepts(graph: kaldifst.StdVectorFst, states: list[int]) -> list[int] | None:
    """Word labels of the best path that reads `states`, None if there is none."""
    linear = kaldifst.make_linear_acceptor([state + 1 for state in states])
    kaldifst.arcsort(graph, "ilabel")
    path = kaldifst.shortest_path(kaldifst.compose(linear, graph))
    if path.num_states == 0:
        return None
    return kaldifst.get_linear_symbol_sequence(path)[2]


def spell(topology: Topology, phones: str, repeats: int = 1) -> list[int]:
    labels = [1 + topology.phones.index(phone) for phone in phones.split()]
    return [
        s for label in labels for s in topology.chain([label]) for _ in range(repeats)
    ]


def test_arcs_survive_the_way_through_numpy():
    text = "0 1 1 2 0.5\n0 1 0 0 0.25\n1 0 3 0 1\n1 2\n"
    fst = kaldifst.compile(text)
    assert fst_of(arcs_of(fst)).to_str() == _sorted(fst).to_str()


def _line(num_arcs: int) -> Arcs:
    """One path of arcs."""
    ends = np.arange(num_arcs + 1)
    finals = np.where(ends == num_arcs, 0, np.inf).astype(np.float32)
    ones = np.ones(num_arcs, np.int64)
    return Arcs(0, finals, ends[:-1], ones, ones, ones.astype(np.float32), ends[1:])


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_full_folder_of_temporary_files_is_named(
    tmp_path, monkeypatch: pytest.MonkeyPatch, way: str
):
    arcs = _line(10_000)
    fst = fst_of(arcs)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    action = {"there": lambda: fst_of(arcs), "back": lambda: arcs_of(fst)}[way]
    error = on_a_small_disk(tmp_path, action).error
    assert f"OSError: {tmp_path}/" in error
    assert "a graph needs room in the folder of temporary files, which TMPDIR" in error


def _sorted(fst: kaldifst.StdVectorFst) -> kaldifst.StdVectorFst:
    kaldifst.arcsort(fst, "ilabel")
    return fst


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))))
@settings(max_examples=30, deadline=None)
def test_all_arcs_into_a_state_with_self_loop_read_the_label_of_the_loop(triples):
    table = np.array([(0, 1, 1), *triples], np.int64)
    zeros = np.zeros(len(table), np.int64)
    arcs = Arcs(
        0, np.zeros(4), table[:, 0], table[:, 1], zeros, zeros * 0.5, table[:, 2]
    )
    looped = with_self_loops(arcs)
    for state in range(looped.num_states):
        entering = set(looped.ilabel[looped.target == state])
        assert len(entering) <= 1
        is_loop = (looped.source == state) & (looped.target == state)
        assert entering <= {0} or is_loop.any()


def test_training_graph_reads_its_words_with_any_duration():
    lexicon = digits.lexicon()
    graphs = TrainingGraphs(lexicon, Topology.of(lexicon))
    graph = graphs.graph(["two", "one"])
    for phones in ("t uw w ah n", "sil t uw sil w ah n sil", "t uw w ah n sil"):
        for repeats in (1, 3):
            labels = accepts(graph, spell(graphs.topology, phones, repeats))
            assert labels == [graphs.symbols.words[word] for word in ("two", "one")]


def test_training_graph_reads_no_other_words():
    lexicon = digits.lexicon()
    graphs = TrainingGraphs(lexicon, Topology.of(lexicon))
    graph = graphs.graph(["two", "one"])
    for phones in ("t uw", "w ah n t uw", "t uw sil sil w ah n"):
        assert accepts(graph, spell(graphs.topology, phones)) is None


def test_a_phone_lasts_at_least_as_many_frames_as_it_has_states():
    lexicon = digits.lexicon()
    graphs = TrainingGraphs(lexicon, Topology.of(lexicon))
    states = spell(graphs.topology, "t uw")
    assert accepts(graphs.graph(["two"]), states) is not None
    assert accepts(graphs.graph(["two"]), states[:-1]) is None
    assert graphs.least_frames(["two"]) == len(states)


def test_training_graph_offers_all_pronunciations_of_a_word():
    lexicon = Lexicon({"a": (("ah",), ("ey",))}, ("sil",), ("ah", "ey"))
    graphs = TrainingGraphs(lexicon, Topology.of(lexicon))
    for phones in ("ah", "ey"):
        states = spell(graphs.topology, phones)
        assert accepts(graphs.graph(["a"]), states) == [graphs.symbols.words["a"]]


def test_an_unknown_word_is_named():
    lexicon = digits.lexicon()
    graphs = TrainingGraphs(lexicon, Topology.of(lexicon))
    with pytest.raises(ValueError, match="eleven"):
        graphs.graph(["two", "eleven"])


def test_hclg_reads_every_sentence_of_the_grammar(tmp_path):
    lexicon = digits.lexicon()
    topology = Topology.of(lexicon)
    arpa = digits.loop_arpa(tmp_path / "lm.arpa", list(digits.SPELLED))
    graph = decoding_graph(lexicon, topology, arpa)
    speaker = digits.Speaker(lexicon)
    for length in (1, 2, 5):
        words = speaker.sentence(length)
        labels = accepts(graph, speaker.states(words).tolist())
        assert labels == [symbols_of(lexicon, topology).words[word] for word in words]


def test_homophones_and_prefixes_are_told_apart_by_the_grammar(tmp_path):
    lexicon = digits.lexicon({"to": "t uw", "two": "t uw", "tooth": "t uw th"})
    topology = Topology.of(lexicon)
    arpa = tmp_path / "lm.arpa"
    lines = ["\\data\\", "ngram 1=5", "", "\\1-grams:", "-99 <s>", "-1 </s>"]
    lines += ["-0.2 two", "-2 to", "-1 tooth", "", "\\end\\", ""]
    arpa.write_text("\n".join(lines))
    graph = decoding_graph(lexicon, topology, arpa)
    states = spell(topology, "t uw t uw th")
    labels = symbols_of(lexicon, topology).words
    assert accepts(graph, states) == [labels["two"], labels["tooth"]]


def test_path_cost_is_that_of_the_n_gram_and_the_silences(tmp_path):
    lexicon = digits.lexicon({"a": "ah", "b": "b"})
    topology = Topology.of(lexicon)
    arpa = digits.loop_arpa(tmp_path / "lm.arpa", ["a", "b"])
    graph = decoding_graph(lexicon, topology, arpa, silence_probability=0.25)
    states = [state + 1 for state in spell(topology, "ah sil b")]
    path = kaldifst.shortest_path(
        kaldifst.compose(kaldifst.make_linear_acceptor(states), graph)
    )
    cost = kaldifst.get_linear_symbol_sequence(path)[3].value
    # two words and the end of the sentence; no silence first and last, one between
    expected = 3 * np.log(3) - 2 * np.log(0.75) - np.log(0.25)
    assert cost == pytest.approx(expected, abs=0.01)


def test_n_grams_over_unknown_words_are_left_out(tmp_path):
    lexicon = digits.lexicon({"a": "ah"})
    symbols = symbols_of(lexicon, Topology.of(lexicon))
    arpa = digits.loop_arpa(tmp_path / "lm.arpa", ["a", "zebra"])
    labels = set(arcs_of(grammar_from_arpa(arpa, symbols)).olabel.tolist())
    assert symbols.words["a"] in labels
    assert max(labels) < len(symbols.words)


def test_words_beyond_ascii_are_in_the_graph_whatever_the_locale(tmp_path, monkeypatch):
    opened = tempfile.NamedTemporaryFile

    def in_latin_1(mode: str, encoding: str = "latin-1", **others: Any) -> Any:
        return opened(mode, encoding=encoding, **others)

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", in_latin_1)
    lexicon = digits.lexicon({"grün": "g r", "rot": "r o"})
    symbols = symbols_of(lexicon, Topology.of(lexicon))
    arpa = tmp_path / "lm.arpa"
    text = digits.loop_arpa(arpa, ["grun", "rot"]).read_text().replace("grun", "grün")
    arpa.write_text(text, encoding="utf-8")
    labels = set(arcs_of(grammar_from_arpa(arpa, symbols)).olabel.tolist())
    assert {symbols.words["grün"], symbols.words["rot"]} <= labels


@pytest.mark.parametrize("text", ["", "hello\n", "\\data\\\nngram 1=1\n"])
def test_a_file_that_is_no_n_gram_is_refused_by_name(tmp_path, text):
    lexicon = digits.lexicon()
    arpa = tmp_path / "broken.arpa"
    arpa.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.arpa"):
        decoding_graph(lexicon, Topology.of(lexicon), arpa)
