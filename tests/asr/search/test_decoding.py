import numpy as np
import pytest

from lightning_adpsgd.asr.hmm.states import Topology, phone_runs
from lightning_adpsgd.asr.parallel import fork_map
from lightning_adpsgd.asr.search.decoding import (
    Decoder,
    SearchOptions,
    decode_at_scales,
)
from lightning_adpsgd.asr.search.graph_files import read_graph, write_graph
from lightning_adpsgd.asr.search.graphs import decoding_graph
from lightning_adpsgd.asr.search.words import place_words
from tests.asr import digits


@pytest.fixture(scope="module")
def speaker() -> digits.Speaker:
    return digits.Speaker(digits.lexicon(), noise=1.0)


@pytest.fixture(scope="module")
def graph(speaker, tmp_path_factory):
    arpa = tmp_path_factory.mktemp("lm") / "lm.arpa"
    digits.loop_arpa(arpa, list(digits.SPELLED))
    return decoding_graph(speaker.lexicon, speaker.topology, arpa)


@pytest.fixture(scope="module")
def decoder(speaker, graph) -> Decoder:
    return Decoder(graph, speaker.lexicon, speaker.topology)


def test_words_that_were_said_are_recognised(speaker, decoder):
    for length in (1, 3, 6):
        words = speaker.sentence(length)
        frames = speaker.frames(speaker.states(words))
        hypothesis = decoder.decode(speaker.log_likelihoods(frames), 1.0)
        assert hypothesis.text == tuple(words)
        assert hypothesis.is_complete


def test_a_sentence_cut_short_gives_its_words_so_far_and_says_so(speaker, tmp_path):
    arpa = digits.loop_arpa(tmp_path / "lm.arpa", ["seven"])
    graph = decoding_graph(speaker.lexicon, speaker.topology, arpa)
    decoder = Decoder(graph, speaker.lexicon, speaker.topology)
    states = _said(speaker, "seven", 1)[:2]  # nothing is said in two frames
    frames = speaker.log_likelihoods(speaker.frames(states))
    hypothesis = decoder.decode(frames, 1.0)
    assert not hypothesis.is_complete
    assert hypothesis.text == ("seven",)
    assert hypothesis.words[0].duration_s == pytest.approx(0.02)


def test_words_have_the_times_at_which_they_were_said(speaker, decoder):
    states = np.concatenate([np.repeat([0, 1, 2], 4), _said(speaker, "two", 3)])
    states = np.concatenate([states, np.repeat([0, 1, 2], 2), _said(speaker, "six", 2)])
    frames = speaker.log_likelihoods(speaker.frames(states))
    two, six = decoder.decode(frames, 1.0).words
    assert (two.word, six.word) == ("two", "six")
    assert two.start_s == pytest.approx(0.12)
    assert two.duration_s == pytest.approx(2 * 3 * 3 * 0.01)
    assert six.start_s == pytest.approx(0.12 + 0.18 + 0.06)
    assert six.duration_s == pytest.approx(4 * 3 * 2 * 0.01)


def _said(speaker: digits.Speaker, word: str, repeats: int) -> np.ndarray:
    phones = speaker.lexicon.pronunciations[word][0]
    labels = [1 + speaker.topology.phones.index(phone) for phone in phones]
    chain = [s for label in labels for s in speaker.topology.chain([label])]
    return np.repeat(chain, repeats)


def test_a_repeated_phone_counts_twice():
    states = np.array([3, 4, 5, 3, 3, 4, 5])
    assert phone_runs(states, Topology(("sil", "a"))) == ([1, 1], [0, 3, 7])


def test_words_are_placed_around_silences():
    phones = [0, 5, 6, 0, 5, 0]
    words = [[[5]], [[5, 6], [6]], [[5]]]
    assert place_words(phones, words, silence=0) == [(1, 2), (2, 3), (4, 5)]


def test_a_word_that_is_silence_itself_is_placed():
    assert place_words([0, 0, 5], [[[0]], [[5]]], silence=0) == [(0, 1), (2, 3)]


def test_words_that_do_not_spell_the_phones_have_no_place():
    assert place_words([5, 6], [[[5]]], silence=0) is None


def test_several_scales_and_processes_give_each_item_its_hypotheses(speaker, decoder):
    sentences = [speaker.sentence(2) for _ in range(5)]
    frames = [speaker.frames(speaker.states(words)) for words in sentences]

    def work(item):
        return decode_at_scales(speaker.log_likelihoods(item), decoder, (0.5, 1.0))

    for index, hypotheses in fork_map(work, frames, 2):
        texts = [list(hypothesis.text) for hypothesis in hypotheses]
        assert texts == [sentences[index]] * 2


def test_without_acoustics_the_language_model_decides(speaker, tmp_path):
    arpa = tmp_path / "lm.arpa"
    lines = ["\\data\\", "ngram 1=4", "", "\\1-grams:", "-99 <s>", "-0.1 </s>"]
    arpa.write_text("\n".join([*lines, "-0.2 two", "-3 six", "", "\\end\\", ""]))
    graph = decoding_graph(speaker.lexicon, speaker.topology, arpa)
    decoder = Decoder(graph, speaker.lexicon, speaker.topology)
    matrix = np.zeros((12, speaker.topology.num_states), np.float32)
    matrix[:, :3] = -50.0  # no silence
    assert decoder.decode(matrix, 1.0).text in (("two",), ("two", "two"))


def test_no_frames_give_no_words(speaker, decoder):
    empty = np.zeros((0, speaker.topology.num_states), np.float32)
    assert decoder.decode(empty, 1.0).words == ()


def test_a_matrix_of_another_width_is_refused(decoder):
    with pytest.raises(ValueError, match=r"\[10, 7\]"):
        decoder.decode(np.zeros((10, 7), np.float32), 1.0)


def test_values_that_are_not_finite_are_refused(speaker, decoder):
    matrix = np.zeros((10, speaker.topology.num_states), np.float32)
    matrix[4, 4] = np.nan
    with pytest.raises(ValueError, match="must be finite"):
        decoder.decode(matrix, 1.0)


def test_a_graph_survives_being_written(speaker, graph, tmp_path):
    write_graph(graph, tmp_path / "HCLG.fst")
    decoder = Decoder(
        read_graph(tmp_path / "HCLG.fst"), speaker.lexicon, speaker.topology
    )
    words = speaker.sentence(3)
    frames = speaker.frames(speaker.states(words))
    assert decoder.decode(speaker.log_likelihoods(frames), 1.0).text == tuple(words)
    assert [path.name for path in tmp_path.iterdir()] == ["HCLG.fst"]


@pytest.mark.parametrize("kept", [0, 30, 200])
def test_a_truncated_graph_is_refused_by_name(graph, tmp_path, kept):
    path = tmp_path / "HCLG.fst"
    write_graph(graph, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"HCLG\.fst"):
        read_graph(path)


def test_options_outside_their_range_are_refused():
    with pytest.raises(ValueError, match="beam"):
        SearchOptions(beam=0.0)
    with pytest.raises(ValueError, match="max_active"):
        SearchOptions(max_active=1)


def test_the_smallest_search_that_is_allowed_runs(speaker, graph):
    options = SearchOptions(beam=13.0, max_active=2)
    decoder = Decoder(graph, speaker.lexicon, speaker.topology, options)
    frames = speaker.log_likelihoods(speaker.frames(_said(speaker, "six", 4)))
    assert len(decoder.decode(frames, 1.0).words) > 0
