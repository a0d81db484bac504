"""Files of search graphs, in OpenFst's constant format."""

import os
from pathlib import Path

import kaldifst


def write_graph(graph: kaldifst.StdVectorFst, path: str | Path) -> None:
    """Writes a graph in OpenFst's constant format, whole or not at all.

    Raises:
        OSError: The file could not be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    if not kaldifst.StdConstFst(graph).write(str(partial)):
        raise OSError(f"{path} could not be written")
    os.replace(partial, path)


def read_graph(path: str | Path) -> kaldifst.StdFst:
    """Reads a file of `write_graph`, or a constant graph from Kaldi.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is no constant transducer, or is truncated.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"decoding graph {path} does not exist")
    graph = kaldifst.StdConstFst.read(str(path))
    if graph is None:
        raise ValueError(f"{path} is not a constant transducer of OpenFst")
    return graph
