"""Kaldi's search graph for this package's decoder.

HCLG reads transition-ids, several of which belong to each pdf. If it reads pdfs
instead, a matrix of log-likelihoods [time, pdfs] can be searched without spreading it
over all transition-ids. Every arc outputs the number of its pair of transition-id and
word, so that a path still determines phones and words.
"""

from pathlib import Path
from typing import NamedTuple

import kaldifst
import numpy as np

from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.model import Transitions
from lightning_adpsgd.asr.search.arcs import arcs_of, fst_of
from lightning_adpsgd.asr.search.graph_files import write_graph

_MAGIC = b"\xd6\xfd\xb2\x7e"  # of every file of OpenFst


class PdfGraph(NamedTuple):
    """A search graph over pdfs.

    Attributes:
        fst: Reads pdf + 1 a frame, and writes positions in `pairs`, of which 0 is none.
        pairs: Transition-id and word of arcs, 0 for none, int32 [pairs, 2].
    """

    fst: kaldifst.StdFst
    pairs: np.ndarray


def read_hclg(path: str | Path) -> kaldifst.StdFst:
    """A graph of Kaldi, constant or vector.

    Raises:
        KaldiError: The file is not a transducer of these types, or is truncated.
        OSError: The file cannot be read.
    """
    path = Path(path)
    with path.open("rb") as file:
        header = file.read(64)
    if not header.startswith(_MAGIC):
        raise KaldiError(f"{path}: byte 0: expected a transducer of OpenFst")
    length = int.from_bytes(header[4:8], "little")
    kind = header[8 : 8 + length]
    readers = {b"const": kaldifst.StdConstFst, b"vector": kaldifst.StdVectorFst}
    if kind not in readers:
        raise KaldiError(
            f"{path}: expected a constant or vector transducer, got {kind[:20]!r}; "
            "fstconvert --fst_type=const makes one"
        )
    fst = readers[kind].read(str(path))
    if fst is None or fst.start < 0:
        raise KaldiError(f"{path}: the transducer is cut short, damaged or empty")
    return fst


def over_pdfs(hclg: kaldifst.StdFst, transitions: Transitions, path: Path) -> PdfGraph:
    """The graph that reads pdfs.

    Args:
        hclg: Graph that reads transition-ids.
        transitions: Transitions of the model with which the graph was made.
        path: Path of the graph, for messages.

    Raises:
        KaldiError: The graph has transition-ids that the model lacks.
    """
    arcs = arcs_of(hclg)
    if (most := int(arcs.ilabel.max(initial=0))) > transitions.num_ids:
        raise KaldiError(
            f"{path}: reads the transition-id {most}, but the model has "
            f"{transitions.num_ids}; graph and final.mdl do not belong together"
        )
    words = int(arcs.olabel.max(initial=0)) + 1
    keys = arcs.ilabel * words + arcs.olabel
    found, position = np.unique(np.append(keys, 0), return_inverse=True)
    pairs = np.stack([found // words, found % words], axis=1).astype(np.int32)
    pdfs = np.where(arcs.ilabel > 0, transitions.pdf[arcs.ilabel] + 1, 0)
    relabelled = arcs._replace(
        ilabel=pdfs.astype(np.int64), olabel=position[:-1].astype(np.int64)
    )
    return PdfGraph(fst_of(relabelled), pairs)


def save(graph: PdfGraph, folder: Path) -> None:
    """Writes `HCLG.fst` and `pairs.npy`."""
    np.save(folder / "pairs.npy", graph.pairs)
    write_graph(kaldifst.StdVectorFst(graph.fst), folder / "HCLG.fst")


def load(folder: Path) -> PdfGraph:
    """Reads what `save` wrote."""
    return PdfGraph(read_hclg(folder / "HCLG.fst"), np.load(folder / "pairs.npy"))
