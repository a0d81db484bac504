"""Lattices as Kaldi text archives, which `lattice-copy ark,t:` and others read.

An utterance is its name, a line `from to label word graph,acoustic` for each link, a
line `node graph,acoustic` for each end, and an empty line. Acoustic costs are without
the acoustic scale, as Kaldi keeps them. Labels are transition-ids with a graph of
Kaldi, and states counted from 1 with a graph of this package.
"""

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_adpsgd.asr.search.decoding import GraphDecoder
from lightning_adpsgd.asr.search.lattice import Lattice
from lightning_adpsgd.files import bytes_written_whole


class LabelledLattice(NamedTuple):
    """A lattice with what its links read and write.

    Attributes:
        lattice: Links, whose costs hold scaled acoustics.
        labels: Input label of each link, 0 for none.
        words: Word of each link, 0 for none.
        graph_costs: Part of each link's cost that is the graph's.
        acoustic_scale: Scale of the rest.
    """

    lattice: Lattice
    labels: np.ndarray
    words: np.ndarray
    graph_costs: np.ndarray
    acoustic_scale: float


def labelled_lattice(
    decoder: GraphDecoder, log_likelihoods: np.ndarray, acoustic_scale: float
) -> LabelledLattice | None:
    """The lattice that a search finds; None if it finds none.

    Args:
        decoder: The search.
        log_likelihoods: As for `GraphDecoder.decode`.
        acoustic_scale: As for `GraphDecoder.decode`.
    """
    lattice = decoder.lattice(log_likelihoods, acoustic_scale)
    if lattice is None:
        return None
    labels, words = decoder.link_labels(lattice)
    costs = decoder.search_graph.weights[lattice.arc].astype(float)
    return LabelledLattice(lattice, labels, words, costs, acoustic_scale)


def lattice_text(name: str, labelled: LabelledLattice) -> str:
    """The text of one utterance."""
    lattice = labelled.lattice
    acoustic = (lattice.cost - labelled.graph_costs) / labelled.acoustic_scale
    order = np.argsort(lattice.source, kind="stable")
    columns = (
        lattice.source,
        lattice.target,
        labelled.labels,
        labelled.words,
        labelled.graph_costs,
        acoustic,
    )
    rows = zip(*(column[order].tolist() for column in columns), strict=True)
    lines = [f"{a} {b} {i} {o} {g:.7g},{c:.7g}" for a, b, i, o, g, c in rows]
    for node in np.flatnonzero(np.isfinite(lattice.finals)).tolist():
        lines.append(f"{node} {lattice.finals[node]:.7g},0")
    return "\n".join([name, *lines, "", ""])


def write_lattices(path: Path, texts: Iterable[str]) -> None:
    """Writes texts of `lattice_text` as a gzipped archive, whole or not at all."""
    with (
        bytes_written_whole(path) as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed,
    ):
        for text in texts:
            packed.write(text.encode())
