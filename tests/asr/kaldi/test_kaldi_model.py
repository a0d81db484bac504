from pathlib import Path

import numpy as np
import pytest

from lightning_adpsgd.asr.kaldi.decoding import split_phones
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.model import Transitions, read_gmm, read_transitions
from tests.asr.kaldi_files import (
    LOG_PROBS,
    NUM_PDFS,
    PDFS,
    binary_model,
    gaussians,
    integers,
    text_model,
)


def write(folder: Path, content: bytes | str) -> Path:
    path = folder / "final.mdl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture(params=["binary", "text"])
def model(request, tmp_path: Path) -> Path:
    content = binary_model() if request.param == "binary" else text_model()
    return write(tmp_path, content)


def test_transition_ids_go_through_the_arcs_of_the_states(model):
    transitions = read_transitions(model)
    assert transitions.num_ids == 10
    assert transitions.num_pdfs == NUM_PDFS
    assert transitions.pdf[1:].tolist() == list(PDFS)
    assert transitions.phone[1:].tolist() == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert transitions.is_loop[1:].tolist() == [True, False] * 5
    assert np.flatnonzero(transitions.is_final).tolist() == [2, 6, 10]
    assert transitions.log_prob == pytest.approx(LOG_PROBS)


SKIPPING = """<TransitionModel>
<Topology>
<TopologyEntry>
<ForPhones>
1
</ForPhones>
<State> 0 <PdfClass> 0 <Transition> 0 0.4 <Transition> 1 0.3 <Transition> 2 0.3 </State>
<State> 1 <PdfClass> 1 <Transition> 1 0.4 <Transition> 2 0.3 <Transition> 3 0.3 </State>
<State> 2 <PdfClass> 2 <Transition> 1 0.3 <Transition> 2 0.4 <Transition> 3 0.3 </State>
<State> 3 <PdfClass> 3 <Transition> 3 0.75 <Transition> 4 0.25 </State>
<State> 4 </State>
</TopologyEntry>
</Topology>
<Triples> 4
1 0 0
1 1 1
1 2 2
1 3 3
</Triples>
<LogProbs>
 [ 0 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 -1 ]
</LogProbs>
</TransitionModel>
"""


def test_a_silence_may_skip_and_go_back_inside_it(tmp_path):
    transitions = read_transitions(write(tmp_path, SKIPPING))
    assert transitions.pdf[1:].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert np.flatnonzero(transitions.is_loop).tolist() == [1, 4, 8, 10]
    assert np.flatnonzero(transitions.is_final).tolist() == [11]
    # twice the silence, its loops behind the way out of a state: 0 2 1 3, and 0 1 3
    ids = np.array([3, 1, 1, 7, 6, 4, 11, 10, 2, 6, 11, 10, 10])
    assert split_phones(ids, transitions) == ([1, 1], [0, 8, 13])


def test_mixtures_have_the_likelihood_of_their_gaussians(model):
    _, mixtures = read_gmm(model)
    frames = np.random.default_rng(0).normal(size=(5, 2))
    expected = np.zeros((5, NUM_PDFS))
    for pdf, (weights, _, means, variances) in enumerate(gaussians()):
        for weight, mean, variance in zip(weights, means, variances, strict=True):
            exponent = -((frames - mean) ** 2 / variance).sum(axis=1) / 2
            density = np.exp(exponent) / np.sqrt((2 * np.pi * variance).prod())
            expected[:, pdf] += weight * density
    found = mixtures.log_likelihoods(frames)
    assert found == pytest.approx(np.log(expected), abs=1e-4)


def test_a_network_has_transitions_but_no_mixtures(tmp_path):
    path = write(tmp_path, binary_model(mixtures=False))
    assert read_transitions(path).pdf[1:].tolist() == list(PDFS)
    with pytest.raises(KaldiError, match=r"final\.mdl: byte \d+: expected <DIMENSION>"):
        read_gmm(path)


def test_chain_models_have_pdfs_of_their_own_for_loops(tmp_path):
    path = write(tmp_path, binary_model(chain=True, mixtures=False))
    expected = [pdf + NUM_PDFS * (i % 2 == 0) for i, pdf in enumerate(PDFS)]
    assert read_transitions(path).pdf[1:].tolist() == expected


def test_transitions_survive_being_saved(tmp_path):
    path = write(tmp_path, binary_model())
    transitions = read_transitions(path)
    transitions.save(tmp_path / "transitions.npz")
    loaded = Transitions.load(tmp_path / "transitions.npz")
    for name, values in vars(transitions).items():
        assert np.array_equal(getattr(loaded, name), values), name


@pytest.mark.parametrize("content", [None, b"PK\x03\x04 cut", b"no archive"])
def test_transitions_that_cannot_be_read_are_named(tmp_path, content):
    path = tmp_path / "transitions.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KaldiError, match=r"transitions\.npz holds no transitions"):
        Transitions.load(path)


def test_ids_of_another_model_are_refused(tmp_path):
    transitions = read_transitions(write(tmp_path, binary_model()))
    assert transitions.pdfs_of(np.array([1, 10])).tolist() == [0, 3]
    with pytest.raises(KaldiError, match="1 to 10"):
        transitions.pdfs_of(np.array([1, 11]))


@pytest.mark.parametrize("cut", [5, 30, 150, 300, 420])
def test_a_model_that_is_cut_short_is_named_with_the_place(tmp_path, cut):
    path = write(tmp_path, binary_model()[:cut])
    with pytest.raises(KaldiError, match=r"final\.mdl: byte \d+: expected"):
        read_gmm(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<Triples> 5", "<Triples> 4", "expected </Triples>"),
        ("1 0 0 \n", "7 0 0 \n", "no topology for state 0 of phone 7"),
        ("0 -0.25 -1.5", "0 -1.5", "10 transition-ids by the topology, but 9 log"),
        ("<PdfClass> 0", "<PdfClass> x", "expected a whole number"),
        ("</State>", "</Stat>", "expected a part of a <State>"),
        ("<NUMPDFS> 4", "<NUMPDFS> 9", "9 mixtures and 4 pdfs"),
    ],
)
def test_a_text_model_that_contradicts_itself_is_refused(tmp_path, old, new, message):
    path = write(tmp_path, text_model().replace(old, new, 1))
    with pytest.raises(KaldiError, match=message):
        read_gmm(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"<INV_VARS> ", b"<OUT_VARS> "),
        (integers([-1, 0, 1, 1]), integers([-1, 0, 1, 7])),
    ],
    ids=["name", "entry"],
)
def test_a_binary_model_with_a_wrong_byte_is_named_with_the_place(tmp_path, old, new):
    assert old in binary_model()
    path = write(tmp_path, binary_model().replace(old, new, 1))
    with pytest.raises(
        KaldiError, match=r"final\.mdl: byte \d+: expected .* before it"
    ):
        read_gmm(path)


def test_what_is_no_model_is_refused(tmp_path):
    for content in (b"", b"\0B<Nnet> ", b"hello world\n"):
        with pytest.raises(KaldiError, match="expected <TransitionModel>"):
            read_transitions(write(tmp_path, content))
