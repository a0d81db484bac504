"""Lattices in Kaldi's form have the costs of the search, acoustics unscaled."""

import gzip

import kaldifst
import numpy as np
import pytest

from lightning_adpsgd.asr.kaldi.lattices import (
    labelled_lattice,
    lattice_text,
    write_lattices,
)
from lightning_adpsgd.asr.search.decoding import Decoder
from lightning_adpsgd.asr.search.graphs import decoding_graph
from lightning_adpsgd.asr.search.nbest import NBestOptions
from tests.asr import digits


@pytest.fixture(scope="module")
def speaker() -> digits.Speaker:
    return digits.Speaker(digits.lexicon(), noise=2.0)


@pytest.fixture(scope="module")
def decoder(speaker, tmp_path_factory) -> Decoder:
    folder = tmp_path_factory.mktemp("lm")
    arpa = digits.loop_arpa(folder / "lm.arpa", ["one", "two", "nine"])
    graph = decoding_graph(speaker.lexicon, speaker.topology, arpa)
    return Decoder(graph, speaker.lexicon, speaker.topology)


def test_the_best_path_of_the_text_is_that_of_the_search(speaker, decoder, tmp_path):
    scale = 0.05
    matrix = speaker.log_likelihoods(speaker.frames(speaker.states(["two", "one"])))
    labelled = labelled_lattice(decoder, matrix, scale)
    assert labelled is not None
    write_lattices(tmp_path / "swb.lat.gz", [lattice_text("u1", labelled)] * 2)
    text = gzip.decompress((tmp_path / "swb.lat.gz").read_bytes()).decode()
    first, second, rest = text.split("\n\n")
    assert (first, rest) == (second, "")
    name, _, links = first.partition("\n")
    assert name == "u1"
    rows = []
    for line in links.split("\n"):
        *fields, costs = line.split()
        graph, acoustic = map(float, costs.split(","))
        rows.append(" ".join((*fields, str(graph + scale * acoustic))))
    best = kaldifst.shortest_path(kaldifst.compile("\n".join([*rows, ""])))
    _, labels, words, weight = kaldifst.get_linear_symbol_sequence(best)
    [one] = decoder.alternatives(matrix, scale, NBestOptions(most=1))
    assert weight.value == pytest.approx(one.cost, abs=1e-2)
    assert len(words) == len(one.text)
    states = np.array(labels) - 1
    assert (states == decoder.states(matrix, scale)).all()


def test_no_frames_have_no_lattice(speaker, decoder):
    empty = np.zeros((0, speaker.topology.num_states), np.float32)
    assert labelled_lattice(decoder, empty, 1.0) is None
