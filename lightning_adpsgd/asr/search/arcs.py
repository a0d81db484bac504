"""The arcs of a finite-state transducer as numpy columns, there and back.

kaldifst walks arcs one Python call at a time, which takes tens of minutes for a graph
of ten million arcs. OpenFst's constant format keeps all arcs in one contiguous array,
so a graph is read and built in numpy by way of that format.
"""

import tempfile
from pathlib import Path
from typing import NamedTuple

import kaldifst
import numpy as np

_MAGIC = 2125659606
_FORMAT = b"\x05\x00\x00\x00const\x08\x00\x00\x00standard"
_HEADER = np.dtype(
    [
        ("version", "<i4"),
        ("flags", "<i4"),
        ("properties", "<u8"),
        ("start", "<i8"),
        ("num_states", "<i8"),
        ("num_arcs", "<i8"),
    ]
)
_STATE = np.dtype(
    [
        ("final", "<f4"),
        ("first_arc", "<u4"),
        ("num_arcs", "<u4"),
        ("num_input_epsilons", "<u4"),
        ("num_output_epsilons", "<u4"),
    ]
)
_ARC = np.dtype(
    [("ilabel", "<i4"), ("olabel", "<i4"), ("weight", "<f4"), ("target", "<i4")]
)
_UNALIGNED_VERSION = 2
_EXPANDED = 1  # OpenFst's only property that a constant transducer must declare


class Arcs(NamedTuple):
    """A transducer: arc columns of equal length, and the final cost of each state.

    `finals` is infinite for a state that is not final; `start` is -1 for an empty
    transducer. Label 0 is epsilon; weights are costs (negative logarithms).
    """

    start: int
    finals: np.ndarray
    source: np.ndarray
    ilabel: np.ndarray
    olabel: np.ndarray
    weight: np.ndarray
    target: np.ndarray

    @property
    def num_states(self) -> int:
        """Number of states."""
        return len(self.finals)


def arcs_of(fst: kaldifst.StdFst) -> Arcs:
    """Copies the arcs of `fst`, which stays as it is, into numpy columns.

    Raises:
        OSError: The folder of temporary files has no room for the graph.
        ValueError: `fst` carries symbol tables, or is aligned in memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.fst"
        if not kaldifst.StdConstFst(fst).write(str(path)):
            raise _no_room(path, "it could not be written")
        data = path.read_bytes()
    offset = 4 + len(_FORMAT)
    header = np.frombuffer(data, _HEADER, 1, offset)[0]
    if header["version"] != _UNALIGNED_VERSION or header["flags"] != 0:
        raise ValueError("`fst` must carry no symbol tables and no aligned layout")
    offset += _HEADER.itemsize
    states = np.frombuffer(data, _STATE, header["num_states"], offset)
    offset += states.nbytes
    arcs = np.frombuffer(data, _ARC, header["num_arcs"], offset)
    source = np.repeat(np.arange(len(states)), states["num_arcs"])
    return Arcs(
        int(header["start"]),
        states["final"].copy(),
        source,
        arcs["ilabel"].astype(np.int64),
        arcs["olabel"].astype(np.int64),
        arcs["weight"].copy(),
        arcs["target"].astype(np.int64),
    )


def fst_of(arcs: Arcs) -> kaldifst.StdVectorFst:
    """Builds a mutable transducer; arcs of a state are sorted by input label.

    Raises:
        OSError: The folder of temporary files has no room for the graph.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.fst"
        try:
            path.write_bytes(_bytes_of(arcs))
        except OSError as error:
            raise _no_room(path, str(error.strerror)) from error
        return kaldifst.StdVectorFst(kaldifst.StdConstFst.read(str(path)))


def _no_room(path: Path, problem: str) -> OSError:
    return OSError(
        f"{path}: {problem}; a graph needs room in the folder of temporary files, "
        "which TMPDIR names"
    )


def _bytes_of(arcs: Arcs) -> bytes:
    order = np.lexsort((arcs.ilabel, arcs.source))
    packed = np.zeros(len(order), _ARC)
    for name in ("ilabel", "olabel", "weight", "target"):
        packed[name] = getattr(arcs, name)[order]
    states = np.zeros(arcs.num_states, _STATE)
    states["final"] = arcs.finals
    states["num_arcs"] = np.bincount(arcs.source, minlength=arcs.num_states)
    states["first_arc"] = np.cumsum(states["num_arcs"]) - states["num_arcs"]
    for side in ("input", "output"):
        epsilons = arcs.source[getattr(arcs, f"{side[0]}label") == 0]
        counts = np.bincount(epsilons, minlength=arcs.num_states)
        states[f"num_{side}_epsilons"] = counts
    header = np.zeros(1, _HEADER)
    header["version"] = _UNALIGNED_VERSION
    header["properties"] = _EXPANDED
    header["start"] = arcs.start
    header["num_states"], header["num_arcs"] = len(states), len(packed)
    magic = np.array([_MAGIC], "<i4").tobytes()
    return b"".join(
        [magic, _FORMAT, header.tobytes(), states.tobytes(), packed.tobytes()]
    )
