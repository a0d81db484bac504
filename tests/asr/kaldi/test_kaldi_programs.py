"""What this package reads and writes beside what Kaldi's own programs make of it.

Skipped where the programs are not on the PATH.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_adpsgd.asr.kaldi.alignments import alignment_files
from lightning_adpsgd.asr.kaldi.archives import (
    read_alignments,
    read_archive,
    read_matrices,
)
from lightning_adpsgd.asr.kaldi.decoding import KaldiDecoder, split_phones
from lightning_adpsgd.asr.kaldi.experiment import check_experiment, find_experiment
from lightning_adpsgd.asr.kaldi.export import latgen_command, write_likelihoods
from lightning_adpsgd.asr.kaldi.graph import over_pdfs, read_hclg
from lightning_adpsgd.asr.kaldi.language import read_boundaries, read_words
from lightning_adpsgd.asr.kaldi.model import read_gmm, read_transitions
from lightning_adpsgd.asr.search.decoding import SearchOptions
from lightning_adpsgd.asr.search.nbest import NBestOptions
from tests.asr.kaldi_programs import (
    KINDS,
    PHONES,
    PROGRAMS,
    WORDS,
    are_installed,
    make_experiment,
    run,
    said,
    text_matrices,
    utterances,
)

pytestmark = [
    pytest.mark.skipif(
        not are_installed(), reason=f"not all of Kaldi's programs are here: {PROGRAMS}"
    ),
    pytest.mark.timeout(300),
]

SCALE = 0.5
NOISE = 1.5  # of utterances that are hard to understand
BEAM = 200.0  # wide enough that neither search leaves out anything


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The experiment of a kind, made once."""
    root = tmp_path_factory.mktemp("kaldi")

    def experiment(kind: str) -> Path:
        if not (root / kind).exists():
            make_experiment(root / kind, KINDS[kind])
        return root / kind

    return experiment


@pytest.fixture(params=KINDS)
def experiment(request: pytest.FixtureRequest, made: Callable[[str], Path]) -> Path:
    return made(request.param)


def shown_transitions(experiment: Path) -> list[tuple[int, int, bool, float]]:
    """Phone, pdf, whether it is a loop, and probability, as `show-transitions` says."""
    rows, phone, pdfs = [], 0, []
    for line in run(experiment, "show-transitions phones.txt final.mdl").splitlines():
        if state := re.match(r"Transition-state \d+: phone = (\S+) .*", line):
            phone = PHONES[state[1]]
            pdfs = [int(pdf) for pdf in re.findall(r"pdf = (\d+)", line)]
        elif found := re.match(r" Transition-id = (\d+) p = (\S+) (.*)", line):
            is_loop = found[3] == "[self-loop]"
            assert int(found[1]) == len(rows) + 1
            rows.append((phone, pdfs[-1 if is_loop else 0], is_loop, float(found[2])))
    return rows


@pytest.mark.parametrize("name", ["final.mdl", "text.mdl"])
def test_transitions_are_those_that_kaldi_shows(experiment: Path, name: str):
    found = read_transitions(experiment / name)
    phones, pdfs, loops, probabilities = zip(
        *shown_transitions(experiment), strict=True
    )
    assert found.phone[1:].tolist() == list(phones)
    assert found.pdf[1:].tolist() == list(pdfs)
    assert found.is_loop[1:].tolist() == list(loops)
    assert np.exp(found.log_prob[1:]) == pytest.approx(probabilities, rel=1e-4)


def test_a_transition_model_alone_is_read(experiment: Path):
    for binary in ("true", "false"):
        run(experiment, f"copy-transition-model --binary={binary} final.mdl alone.mdl")
        alone = read_transitions(experiment / "alone.mdl")
        whole = read_transitions(experiment / "final.mdl")
        assert np.array_equal(alone.pdf, whole.pdf)
        assert np.array_equal(alone.phone, whole.phone)


def alignments(experiment: Path) -> dict[str, np.ndarray]:
    return {
        name: ids
        for path in alignment_files(experiment)
        for name, ids in read_alignments(path)
    }


def test_labels_are_what_ali_to_pdf_says(experiment: Path):
    transitions = read_transitions(experiment / "final.mdl")
    lines = run(experiment, "ali-to-pdf final.mdl ark:ali.txt ark,t:-").splitlines()
    expected = {name: [int(p) for p in pdfs] for name, *pdfs in map(str.split, lines)}
    found = alignments(experiment)
    assert len(expected) == 40
    assert found.keys() == expected.keys()
    for name, ids in found.items():
        assert transitions.pdfs_of(ids).tolist() == expected[name]


def test_phones_last_as_long_as_ali_to_phones_says(experiment: Path):
    transitions = read_transitions(experiment / "final.mdl")
    command = "ali-to-phones --ctm-output --frame-shift=1 final.mdl ark:ali.txt -"
    expected: dict[str, list[tuple[int, int]]] = {}
    for line in run(experiment, command).splitlines():
        name, _, start, _, phone = line.split()
        expected.setdefault(name, []).append((int(phone), round(float(start))))
    for name, ids in alignments(experiment).items():
        phones, edges = split_phones(ids, transitions)
        assert list(zip(phones, edges[:-1], strict=True)) == expected[name]
        assert edges[-1] == len(ids)


def likelihoods(experiment: Path) -> dict[str, np.ndarray]:
    """Of utterances that are hard to understand, by the experiment's mixtures."""
    _, mixtures = read_gmm(experiment / "final.mdl")
    _, frames = utterances(15, seed=2, noise=NOISE)
    return {name: mixtures.log_likelihoods(own) for name, own in frames.items()}


def test_mixtures_have_the_likelihoods_that_kaldi_computes(experiment: Path):
    _, frames = utterances(15, seed=2, noise=NOISE)
    (experiment / "hard").write_text(text_matrices(frames))
    run(experiment, "gmm-compute-likes final.mdl ark:hard ark:likes")
    expected = dict(read_archive(experiment / "likes"))
    for name, found in likelihoods(experiment).items():
        assert found == pytest.approx(expected[name], rel=1e-4, abs=1e-3)


def our_decoder(experiment: Path) -> KaldiDecoder:
    files = find_experiment(experiment)
    transitions = check_experiment(files)
    graph = over_pdfs(
        read_hclg(files.graph / "HCLG.fst"), transitions, files.graph / "HCLG.fst"
    )
    words = read_words(files.graph / "words.txt")
    boundaries = read_boundaries(files.graph / "phones")
    options = SearchOptions(beam=BEAM, max_active=100_000)
    return KaldiDecoder(graph, transitions, words, boundaries, options)


def kaldis_lattices(experiment: Path, matrices: dict[str, np.ndarray]) -> str:
    """Runs the command that comes with exported likelihoods; where its lattices are."""
    transitions = read_transitions(experiment / "final.mdl")
    archive = experiment / "test.ark"
    table = write_likelihoods(archive, matrices.items(), transitions.num_pdfs)
    command = latgen_command(
        experiment / "final.mdl",
        experiment / "graph",
        table,
        acoustic_scale=SCALE,
        beam=BEAM,
        max_active=100_000,
    )
    run(experiment, command)
    return '"ark:gunzip -c test.lat.gz |"'


def costs_by_kaldi(experiment: Path, lattices: str) -> dict[str, float]:
    command = f"lattice-best-path --acoustic-scale={SCALE} {lattices} ark:/dev/null"
    found = re.findall(
        r"For utterance (\S+), best cost .* = (\S+) over", said(experiment, command)
    )
    return {name: float(cost) for name, cost in found}


def times_by_kaldi(
    experiment: Path, lattices: str
) -> dict[str, list[tuple[str, int, int]]]:
    """Words with the frame where each begins and how many it lasts."""
    lines = run(
        experiment,
        f"lattice-1best --acoustic-scale={SCALE} {lattices} ark:- | "
        "lattice-align-words graph/phones/word_boundary.int final.mdl ark:- ark:- | "
        "nbest-to-ctm --frame-shift=1 ark:- -",
    ).splitlines()
    spelled = {label: word for word, label in WORDS.items()}
    times: dict[str, list[tuple[str, int, int]]] = {}
    for name, _, start, duration, word in map(str.split, lines):
        span = round(float(start)), round(float(duration))
        times.setdefault(name, []).append((spelled[int(word)], *span))
    return times


def test_words_and_times_are_those_of_latgen_faster_mapped(experiment: Path):
    matrices = likelihoods(experiment)
    expected = times_by_kaldi(experiment, kaldis_lattices(experiment, matrices))
    assert len(expected) > 10  # utterances with words
    decoder = our_decoder(experiment)
    for name, matrix in matrices.items():
        hypothesis = decoder.decode(matrix, SCALE)
        found = [
            (word, round(start_s * 100), round(duration_s * 100))
            for word, start_s, duration_s, _ in hypothesis.words
        ]
        assert hypothesis.is_complete
        assert found == expected.get(name, [])


def test_costs_are_those_of_latgen_faster_mapped(experiment: Path):
    matrices = likelihoods(experiment)
    expected = costs_by_kaldi(experiment, kaldis_lattices(experiment, matrices))
    decoder = our_decoder(experiment)
    options = NBestOptions(most=1, beam=BEAM, lattice_beam=1.0)
    assert expected.keys() == matrices.keys()
    for name, matrix in matrices.items():
        best, *_ = decoder.alternatives(matrix, SCALE, options)
        assert best.cost == pytest.approx(expected[name], rel=1e-4)


@pytest.mark.parametrize("method", range(1, 8))
def test_compressed_matrices_are_as_copy_feats_unpacks_them(
    tmp_path: Path, method: int
):
    _, frames = utterances(6, seed=3, noise=1.0)
    frames["short"] = frames["u300"][:5]  # too short for scales of its columns
    (tmp_path / "feats").write_text(text_matrices(frames))
    packed = f"--compress=true --compression-method={method}"
    run(tmp_path, f"copy-feats {packed} ark:feats ark,scp:packed.ark,packed.scp")
    run(tmp_path, "copy-feats ark:packed.ark ark:plain.ark")
    expected = dict(read_archive(tmp_path / "plain.ark"))
    assert expected.keys() == frames.keys()
    for source in ("packed.ark", "packed.scp"):
        found = dict(read_matrices(tmp_path / source))
        assert found.keys() == expected.keys()
        for name, rows in found.items():
            assert rows == pytest.approx(expected[name], rel=1e-6, abs=1e-6)
