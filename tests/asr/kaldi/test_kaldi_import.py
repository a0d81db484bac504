"""Alignments as labels, and decoding with a graph of Kaldi."""

import shlex
from pathlib import Path

import kaldi_decoder
import kaldifst
import numpy as np
import pytest

from lightning_adpsgd.asr.frames.store import IGNORE, FrameStore
from lightning_adpsgd.asr.frames.writing import FrameWriter
from lightning_adpsgd.asr.kaldi.alignments import (
    alignment_files,
    fit_frames,
    import_labels,
)
from lightning_adpsgd.asr.kaldi.decoding import KaldiDecoder, split_phones
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.experiment import check_experiment, find_experiment
from lightning_adpsgd.asr.kaldi.export import latgen_command, write_likelihoods
from lightning_adpsgd.asr.kaldi.graph import load, over_pdfs, read_hclg, save
from lightning_adpsgd.asr.kaldi.language import read_boundaries, read_words
from lightning_adpsgd.asr.kaldi.model import Transitions, read_transitions
from lightning_adpsgd.asr.parallel import fork_map, in_order
from lightning_adpsgd.asr.search.decoding import SearchOptions
from lightning_adpsgd.asr.search.lattice import SearchGraph
from lightning_adpsgd.asr.search.nbest import NBestOptions, list_words
from lightning_adpsgd.asr.search.words import Hypothesis
from lightning_adpsgd.asr.sound.features import num_frames
from tests.asr.kaldi_files import (
    NUM_PDFS,
    PDFS,
    WORDS,
    binary_model,
    hclg,
    read_by_kaldi_native_io,
    write_alignments,
    write_experiment,
    write_graph,
)
from tests.asr.small_disk import on_a_small_disk

# silence, a, b, silence; loops after the arc out of their state
SAID = [2, 1, 1, 4, 3, 6, 5, 5, 8, 10, 9, 2, 1]


@pytest.fixture
def transitions(tmp_path: Path) -> Transitions:
    (tmp_path / "final.mdl").write_bytes(binary_model())
    return read_transitions(tmp_path / "final.mdl")


def make_store(folder: Path, lengths: dict[str, int]) -> FrameStore:
    writer = FrameWriter(folder, list(lengths), list(lengths.values()), 2)
    writer.create()
    for position, length in enumerate(lengths.values()):
        writer.put(position, np.zeros((length, 2), np.float16))
    writer.finish()
    return FrameStore(folder)


def test_files_come_in_the_order_of_their_numbers(tmp_path):
    for number in range(1, 12):
        write_alignments(tmp_path / f"ali.{number}.gz", {})
    names = [path.name for path in alignment_files(tmp_path)]
    assert names == [f"ali.{number}.gz" for number in range(1, 12)]


def test_a_missing_file_of_alignments_is_named(tmp_path):
    for number in (1, 3):
        write_alignments(tmp_path / f"ali.{number}.gz", {})
    with pytest.raises(KaldiError, match=r"ali\.2\.gz is missing"):
        alignment_files(tmp_path)
    write_alignments(tmp_path / "ali.2.gz", {})
    (tmp_path / "num_jobs").write_text("4\n")
    with pytest.raises(KaldiError, match="num_jobs says 4 files"):
        alignment_files(tmp_path)


def test_labels_are_the_pdfs_of_the_alignment(tmp_path, transitions):
    lengths = {"u1": 3, "u2": 4, "u3": 2, "u4": 6, "u5": 5}
    store = make_store(tmp_path / "store", lengths)
    first, second = tmp_path / "ali.1.gz", tmp_path / "ali.2.gz"
    write_alignments(first, {"u2": [2, 1, 4, 3, 6, 5], "other": [1]}, text=True)
    write_alignments(second, {"u1": [2, 1, 8], "u3": [2] * 5, "u4": [2, 8, 10, 9]})
    labels = tmp_path / "labels.npy"
    imported = import_labels(
        [first, second], transitions, store, labels, least_coverage=0.6
    )
    found = np.load(labels).tolist()
    assert found[0:3] == [0, 0, 1]
    assert found[3:7] == [0, 0, 1, 1]  # two labels too many are cut
    assert found[7:9] == [IGNORE] * 2  # three too many are refused
    assert found[9:15] == [0, 0, 1, 3, 3, 3]  # two too few: one at either end
    assert found[15:20] == [IGNORE] * 5
    assert imported.num_labelled == 13
    assert imported.coverage == "3 of 5 utterances (60.0%) have labels"
    assert imported.counts.tolist() == [6, 4, 0, 3]
    skipped = imported.skipped
    assert skipped.counts == {
        "alignment cut or padded": 1,
        "alignment of another length, refused": 1,
        "without an alignment": 1,
    }
    assert skipped.seconds["without an alignment"] == 0.05
    refused = skipped.examples["alignment of another length, refused"]
    assert refused == [f"u3 (5 labels for 2 frames, in {second})"]


def windows_inside(num_samples: int) -> int:
    """Frames of 25 ms every 10 ms that lie inside an utterance at 8 kHz."""
    return 1 + (num_samples - 200) // 80


def test_frames_of_kaldi_go_to_those_nearest_in_time():
    for num_samples in range(8000, 8080):
        count = num_frames(num_samples)
        centres_ms = 10 * np.arange(windows_inside(num_samples)) + 12.5
        found = fit_frames(centres_ms, count)
        assert found is not None
        here_ms = 10 * np.arange(count) + 5
        assert np.abs(found - here_ms)[1:-1].max() == 2.5


def test_frames_of_rounded_times_fit():
    random = np.random.default_rng(0)
    for start_s, length_s in random.uniform((0, 1), (600, 15), (2000, 2)):
        end_s = start_s + length_s
        rounded = round(100 * end_s) - round(100 * start_s)  # by Kaldi's recipe
        values = np.zeros((windows_inside(80 * rounded), 3))
        count = num_frames(round(8000 * length_s))
        found = fit_frames(values, count)
        assert found is not None
        assert found.shape == (count, 3)


@pytest.mark.parametrize(("count", "fits"), [(7, 0), (8, 1), (14, 1), (15, 0)])
def test_frames_of_other_lengths_do_not_fit(count, fits):
    assert (fit_frames(np.arange(10), count) is not None) == fits
    assert fit_frames(np.zeros(0), 1) is None


def test_alignments_of_another_model_are_refused_with_their_utterance(
    tmp_path, transitions
):
    store = make_store(tmp_path / "store", {"u1": 2})
    write_alignments(tmp_path / "ali.1", {"u1": [1, 99]})
    with pytest.raises(KaldiError, match=r"ali\.1, utterance u1: .*1 to 10"):
        import_labels([tmp_path / "ali.1"], transitions, store, tmp_path / "l.npy")
    assert not (tmp_path / "l.npy").exists()


def test_an_utterance_that_two_archives_have_counts_once_as_in_the_first(
    tmp_path, transitions
):
    store = make_store(tmp_path / "store", {"u1": 3})
    first, second = tmp_path / "ali.1", tmp_path / "ali.2"
    write_alignments(first, {"u1": [2, 1, 8]})
    write_alignments(second, {"u1": [10, 10, 10]})
    labels = tmp_path / "labels.npy"
    imported = import_labels([first, second], transitions, store, labels)
    assert np.load(labels).tolist() == [0, 0, 1]
    assert imported.counts.tolist() == [2, 1, 0, 0]


def test_alignments_of_other_utterances_are_refused(tmp_path, transitions):
    store = make_store(tmp_path / "store", {"u1": 2})
    write_alignments(tmp_path / "ali.1", {"other": [1, 2]})
    with pytest.raises(KaldiError, match="no utterance could be labelled: without"):
        import_labels([tmp_path / "ali.1"], transitions, store, tmp_path / "l.npy")


def test_phones_are_found_in_either_order_of_loops(transitions):
    phones, edges = split_phones(np.array(SAID), transitions)
    assert (phones, edges) == ([1, 2, 3, 1], [0, 3, 8, 11, 13])
    loops_first = [1, 1, 2, 3, 4, 5, 5, 6, 8, 9, 10, 1, 2]
    phones, edges = split_phones(np.array(loops_first), transitions)
    assert (phones, edges) == ([1, 2, 3, 1], [0, 3, 8, 11, 13])
    assert split_phones(np.zeros(0, int), transitions) == ([], [0])


@pytest.fixture
def graph_folder(tmp_path: Path) -> Path:
    write_graph(tmp_path / "graph")
    return tmp_path / "graph"


def decoder_of(folder: Path, transitions: Transitions) -> KaldiDecoder:
    graph = over_pdfs(read_hclg(folder / "HCLG.fst"), transitions, folder)
    words, boundaries = (
        read_words(folder / "words.txt"),
        read_boundaries(folder / "phones"),
    )
    return KaldiDecoder(graph, transitions, words, boundaries)


def likelihoods_of(ids: list[int]) -> np.ndarray:
    matrix = np.full((len(ids), NUM_PDFS), -20.0, np.float32)
    matrix[np.arange(len(ids)), [PDFS[i - 1] for i in ids]] = 0.0
    return matrix


def spans(hypothesis: Hypothesis) -> list[tuple[str, int, int]]:
    return [
        (w.word, round(w.start_s * 100), round(w.duration_s * 100))
        for w in hypothesis.words
    ]


def test_words_have_the_times_of_their_phones(graph_folder, transitions):
    hypothesis = decoder_of(graph_folder, transitions).decode(likelihoods_of(SAID), 1.0)
    assert spans(hypothesis) == [("a", 3, 5), ("b", 8, 3)]
    assert hypothesis.is_complete


def test_words_have_the_same_times_by_the_lexicon(graph_folder, transitions):
    (graph_folder / "phones" / "word_boundary.int").unlink()
    (graph_folder / "phones" / "align_lexicon.int").write_text(
        "0 0 1\n1 1 2\n2 2 3\n2 2 3 3\n"
    )
    hypothesis = decoder_of(graph_folder, transitions).decode(likelihoods_of(SAID), 1.0)
    assert spans(hypothesis) == [("a", 3, 5), ("b", 8, 3)]


def searched_by_ids(matrix: np.ndarray, transitions: Transitions) -> list[int]:
    """Words of the untouched graph, the matrix spread over all transition-ids."""
    graph = hclg()  # must outlive the decoder, as the matrix must
    spread = np.ascontiguousarray(matrix[:, transitions.pdf[1:]], np.float32)
    options = kaldi_decoder.FasterDecoderOptions(beam=100.0, max_active=7000)
    decoder = kaldi_decoder.FasterDecoder(graph, options)
    decoder.decode(kaldi_decoder.DecodableCtc(spread))
    return kaldifst.get_linear_symbol_sequence(decoder.get_best_path()[1])[2]


@pytest.mark.parametrize("seed", range(8))
def test_a_graph_over_pdfs_finds_what_the_graph_over_ids_does(
    graph_folder, transitions, seed
):
    matrix = np.random.default_rng(seed).normal(size=(40, NUM_PDFS)).astype("f4") * 3
    decoder = decoder_of(graph_folder, transitions)
    labels = {label: word for word, label in WORDS.items()}
    expected = [labels[label] for label in searched_by_ids(matrix, transitions)]
    assert len(expected) > 2
    assert list(decoder.decode(matrix, 1.0).text) == expected


@pytest.mark.parametrize("seed", range(4))
def test_alternatives_are_those_of_the_graph_over_ids(graph_folder, transitions, seed):
    matrix = np.random.default_rng(seed).normal(size=(12, NUM_PDFS)).astype("f4") * 3
    wide = NBestOptions(most=1000, beam=200.0, lattice_beam=100.0)
    decoder = decoder_of(graph_folder, transitions)
    found = decoder.alternatives(matrix, 0.5, wide)
    spread = np.ascontiguousarray(matrix[:, transitions.pdf[1:]] * np.float32(0.5))
    labels = {label: word for word, label in WORDS.items()}
    listed = list_words(SearchGraph(hclg()), spread, wide)
    assert listed is not None
    expected = {
        tuple(labels[label] for label in words): cost for words, cost in listed.entries
    }
    assert len(found) == len(expected) > 3
    for one in found:
        assert one.cost == pytest.approx(expected[one.text], abs=1e-3)
        timed = one.timed()
        assert timed.text == one.text
        end = max((w.start_s + w.duration_s for w in timed.words), default=0.0)
        assert end <= 0.12 + 1e-9
    assert found[0].timed() == decoder.decode(matrix, 0.5)
    sure = decoder.decode_confidently(matrix, 0.5)
    assert sure.text == found[0].text
    assert all(0 < word.confidence <= 1 for word in sure.words)


def test_graphs_of_both_kinds_are_read(tmp_path, transitions):
    for constant in (True, False):
        folder = tmp_path / f"graph{constant}"
        write_graph(folder, constant=constant)
        decoder = decoder_of(folder, transitions)
        assert decoder.decode(likelihoods_of(SAID), 1.0).text == ("a", "b")


def test_a_saved_graph_decodes_in_processes(graph_folder, transitions, tmp_path):
    graph = over_pdfs(read_hclg(graph_folder / "HCLG.fst"), transitions, graph_folder)
    save(graph, tmp_path)
    decoder = KaldiDecoder(
        load(tmp_path),
        transitions,
        read_words(graph_folder / "words.txt"),
        read_boundaries(graph_folder / "phones"),
        SearchOptions(beam=13.0),
    )
    items = [SAID, SAID[:8], SAID[8:]]

    def text_of(item):
        return decoder.decode(likelihoods_of(item), 1.0).text

    texts = in_order(fork_map(text_of, items, 2))
    assert [*texts] == [("a", "b"), ("a",), ("b",)]


def test_likelihoods_of_another_width_are_refused(graph_folder, transitions):
    decoder = decoder_of(graph_folder, transitions)
    with pytest.raises(ValueError, match=r"\[time, 4\], got \[3, 5\]"):
        decoder.decode(np.zeros((3, 5), np.float32), 1.0)
    assert decoder.decode(np.zeros((0, 4), np.float32), 1.0) == Hypothesis((), False)


def test_a_graph_of_another_model_is_refused(graph_folder, transitions):
    hclg = read_hclg(graph_folder / "HCLG.fst")
    arrays = {name: values[:9] for name, values in vars(transitions).items()}
    with pytest.raises(KaldiError, match="reads the transition-id 10"):
        over_pdfs(hclg, Transitions(**arrays), graph_folder / "HCLG.fst")


@pytest.mark.parametrize("cut", [0, 20, 70, 300])
def test_a_graph_that_is_cut_short_is_refused(graph_folder, cut):
    path = graph_folder / "HCLG.fst"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(KaldiError, match=r"HCLG\.fst"):
        read_hclg(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("words.txt", "a one\n", r"words\.txt:1: expected `word label`"),
        ("phones/word_boundary.int", "1 middle\n", r"word_boundary\.int:1"),
    ],
)
def test_tables_with_other_lines_are_refused(
    graph_folder, transitions, name, text, message
):
    (graph_folder / name).write_text(text)
    with pytest.raises(KaldiError, match=message):
        decoder_of(graph_folder, transitions)


def test_an_experiment_names_all_that_is_missing(tmp_path):
    write_experiment(tmp_path / "tri4", {"u1": SAID, "u2": SAID})
    found = find_experiment(tmp_path / "tri4")
    assert check_experiment(found).num_pdfs == NUM_PDFS
    assert [path.name for path in found.alignments] == ["ali.1.gz", "ali.2.gz"]
    (tmp_path / "tri4" / "final.mdl").unlink()
    (tmp_path / "tri4" / "graph" / "words.txt").unlink()
    (tmp_path / "tri4" / "ali.2.gz").unlink()
    with pytest.raises(KaldiError) as caught:
        find_experiment(tmp_path / "tri4", more=(tmp_path / "dev",))
    for what in ("final.mdl", "words.txt", "num_jobs says 2", "dev: expected align"):
        assert what in str(caught.value)


def test_a_graph_for_another_number_of_pdfs_is_refused(tmp_path):
    write_experiment(tmp_path / "tri4", {"u1": SAID, "u2": SAID})
    (tmp_path / "tri4" / "graph" / "num_pdfs").write_text("5\n")
    with pytest.raises(KaldiError, match="for 5 pdfs"):
        check_experiment(find_experiment(tmp_path / "tri4"))


def test_several_graphs_have_to_be_chosen_from(tmp_path):
    write_experiment(tmp_path / "tri4", {"u1": SAID, "u2": SAID})
    write_graph(tmp_path / "tri4" / "graph_tg")
    with pytest.raises(KaldiError, match=r"found 2; name .* kaldi\.graph=DIR"):
        find_experiment(tmp_path / "tri4")
    graph = tmp_path / "tri4" / "graph_tg"
    assert find_experiment(tmp_path / "tri4", graph).graph == graph


@pytest.mark.parametrize("frames", [[2000, 2000, 2000], [1900, 250]])
def test_a_full_disk_is_named_when_likelihoods_are_written(tmp_path, frames):
    archive = tmp_path / "disk/ll.ark"
    matrices = [(f"u{n}", np.zeros((n, 8), np.float32)) for n in frames]
    error = on_a_small_disk(
        archive.parent, lambda: write_likelihoods(archive, matrices, 8)
    ).error
    assert f"KaldiError: {archive}" in error
    assert "could not be written; see that the disk has room" in error


def test_likelihoods_are_written_for_kaldi(tmp_path):
    matrices = {"u1": likelihoods_of(SAID), "u2": likelihoods_of(SAID[:5])}
    table = write_likelihoods(tmp_path / "ll.ark", matrices.items(), NUM_PDFS)
    found = read_by_kaldi_native_io(f"scp:{table}")
    assert found.keys() == matrices.keys()
    assert all(np.array_equal(found[name], matrices[name]) for name in matrices)
    with pytest.raises(KaldiError, match=r"utterance u1: expected \[frames, 9\]"):
        write_likelihoods(tmp_path / "bad.ark", matrices.items(), 9)


def test_the_command_for_kaldi_names_the_files(tmp_path):
    command = latgen_command(
        Path("exp/final.mdl"),
        Path("exp/graph"),
        Path("out/swb.scp"),
        acoustic_scale=0.1,
        beam=13.0,
        max_active=7000,
    )
    words = shlex.split(command)
    assert words[0] == "latgen-faster-mapped"
    assert words[-4:] == [
        "exp/final.mdl",
        "exp/graph/HCLG.fst",
        "scp:out/swb.scp",
        "ark:|gzip -c > out/swb.lat.gz",
    ]
    assert "--acoustic-scale=0.1" in words


def test_a_folder_with_a_blank_in_its_name_is_one_word_in_kaldis_pipe_too():
    files = (Path("m"), Path("g"), Path("my out/swb.scp"))
    command = latgen_command(*files, acoustic_scale=0.1, beam=13.0, max_active=7000)
    assert shlex.split(command)[-1] == "ark:|gzip -c > 'my out/swb.lat.gz'"


def test_words_of_a_graph_are_read_in_nfc(tmp_path: Path):
    (tmp_path / "words.txt").write_text("<eps> 0\ncafe\u0301 1\ncaf\u00e9 2\n")
    assert read_words(tmp_path / "words.txt") == {0: "<eps>", 1: "café", 2: "café"}
