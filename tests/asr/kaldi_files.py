"""Files in Kaldi's published formats, written without the package that reads them.

A small language: silence (phone 1) with one emitting state, and the phones 2 and 3 with
two each. Every state has a loop and a way on, so that transition-ids are, in pairs,
(loop, on): phone 1: 1 2; phone 2: 3 4, 5 6; phone 3: 7 8, 9 10.
"""

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kaldi_native_io
import kaldifst
import numpy as np

# phone, HMM state, pdf; the first states of 2 and 3 share a pdf
TUPLES = ((1, 0, 0), (2, 0, 1), (2, 1, 2), (3, 0, 1), (3, 1, 3))
PDFS = (0, 0, 1, 1, 2, 2, 1, 1, 3, 3)  # of the transition-ids, from 1
NUM_PDFS = 4
LOG_PROBS = [0.0] + [-0.25, -1.5] * 5
MEANS = np.array([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0], [3.0, 3.0]])


def integer(value: int) -> bytes:
    return b"\x04" + struct.pack("<i", value)


def real(value: float) -> bytes:
    return b"\x04" + struct.pack("<f", value)


def integers(values: list[int]) -> bytes:
    return b"\x04" + struct.pack(f"<i{len(values)}i", len(values), *values)


def vector(values) -> bytes:
    return b"FV " + integer(len(values)) + np.asarray(values, "<f4").tobytes()


def matrix(values) -> bytes:
    rows, columns = np.shape(values)
    size = integer(rows) + integer(columns)
    return b"FM " + size + np.asarray(values, "<f4").tobytes()


def _binary_entry(num_states: int, chain: bool) -> bytes:
    """States with a loop and a way on, and a last one without either."""
    parts = [integer(num_states + 1)]
    for state in range(num_states):
        parts += [integer(state), integer(state)] if chain else [integer(state)]
        parts += [integer(2), integer(state), real(0.75), integer(state + 1)]
        parts.append(real(0.25))
    last = [integer(-1)] * (2 if chain else 1)
    return b"".join([*parts, *last, integer(0)])


def binary_model(*, chain: bool = False, mixtures: bool = True) -> bytes:
    """A `final.mdl`; `chain` has the pdfs of loops apart, one higher."""
    kind = b"Tuples" if chain else b"Triples"
    parts = [b"\0B<TransitionModel> <Topology> ", integers([1, 2, 3])]
    parts += [integers([-1, 0, 1, 1]), integer(-1) if chain else b"", integer(2)]
    parts += [_binary_entry(1, chain), _binary_entry(2, chain), b"</Topology> "]
    parts += [b"<" + kind + b"> ", integer(len(TUPLES))]
    for phone, state, pdf in TUPLES:
        parts += [integer(phone), integer(state), integer(pdf)]
        parts += [integer(pdf + NUM_PDFS)] if chain else []
    parts += [b"</" + kind + b"> <LogProbs> ", vector(LOG_PROBS)]
    parts.append(b"</LogProbs> </TransitionModel> ")
    return b"".join(parts) + (_binary_mixtures() if mixtures else b"<Nnet3> ")


def _binary_mixtures() -> bytes:
    parts = [b"<DIMENSION> ", integer(2), b"<NUMPDFS> ", integer(NUM_PDFS)]
    for weights, constants, means, variances in gaussians():
        parts += [b"<DiagGMM> <GCONSTS> ", vector(constants)]
        parts += [b"<WEIGHTS> ", vector(weights)]
        parts += [b"<MEANS_INVVARS> ", matrix(means / variances)]
        parts += [b"<INV_VARS> ", matrix(1 / variances), b"</DiagGMM> "]
    return b"".join(parts)


def gaussians():
    """Of each pdf weights, constants, means and variances of two Gaussians."""
    for mean in MEANS:
        means = np.stack([mean, mean + 0.5])
        variances = np.array([[1.0, 2.0], [0.5, 1.0]])
        weights = np.array([0.25, 0.75])
        exponents = (means**2 / variances + np.log(2 * np.pi * variances)).sum(axis=1)
        yield weights, np.log(weights) - exponents / 2, means, variances


TEXT_TOPOLOGY = """<TransitionModel> <Topology>
<TopologyEntry>
<ForPhones>
1
</ForPhones>
<State> 0 <PdfClass> 0 <Transition> 0 0.75 <Transition> 1 0.25 </State>
<State> 1 </State>
</TopologyEntry>
<TopologyEntry>
<ForPhones>
2 3
</ForPhones>
<State> 0 <PdfClass> 0 <Transition> 0 0.75 <Transition> 1 0.25 </State>
<State> 1 <PdfClass> 1 <Transition> 1 0.75 <Transition> 2 0.25 </State>
<State> 2 </State>
</TopologyEntry>
</Topology>
"""


def text_model() -> str:
    lines = [TEXT_TOPOLOGY + f"<Triples> {len(TUPLES)} "]
    lines += [f"{phone} {state} {pdf} " for phone, state, pdf in TUPLES]
    lines += ["</Triples> ", "<LogProbs> ", f" [ {_row(LOG_PROBS)} ]"]
    lines += ["</LogProbs> ", "</TransitionModel> "]
    lines.append(f"<DIMENSION> 2 <NUMPDFS> {NUM_PDFS} ")
    for weights, constants, means, variances in gaussians():
        lines += ["<DiagGMM> ", f"<GCONSTS>  [ {_row(constants)} ]"]
        lines += [f"<WEIGHTS>  [ {_row(weights)} ]"]
        lines += [f"<MEANS_INVVARS>  [\n  {_rows(means / variances)} ]"]
        lines += [f"<INV_VARS>  [\n  {_rows(1 / variances)} ]", "</DiagGMM> "]
    return "\n".join(lines) + "\n"


def _row(values) -> str:
    return " ".join(f"{value:.9g}" for value in values)


def _rows(values) -> str:
    return " \n  ".join(_row(row) for row in values)


def binary_alignment(name: str, ids: Sequence[int]) -> bytes:
    body = b"".join(integer(value) for value in ids)
    return name.encode() + b" \0B" + integer(len(ids)) + body


def text_alignment(name: str, ids: list[int]) -> bytes:
    return f"{name} {' '.join(map(str, ids))} \n".encode()


def write_alignments(
    path: Path, alignments: dict[str, list[int]], *, text: bool = False
) -> None:
    entry = text_alignment if text else binary_alignment
    data = b"".join(entry(name, ids) for name, ids in alignments.items())
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


WORDS = {"<eps>": 0, "a": 1, "b": 2, "#0": 3}


def hclg() -> kaldifst.StdVectorFst:
    """Any words a (phone 2) and b (phone 3), with or without silence around them.

    As Kaldi orders it, a state's loop follows the arc out of it.
    """
    # of each word, state by state, the arc out of it and its loop
    chains = {0: ((2, 1),), 1: ((4, 3), (6, 5)), 2: ((8, 7), (10, 9))}
    lines, free = [], 1
    for word, states in chains.items():
        at = 0
        for on, loop in states:
            output, cost = (word, 0.7 if word == 0 else 1.1) if at == 0 else (0, 0.2)
            lines.append(f"{at} {free} {on} {output} {cost}")
            lines.append(f"{free} {free} {loop} 0 0.3")
            at, free = free, free + 1
        lines.append(f"{at} 0 0 0 0.1")
    return kaldifst.compile("\n".join([*lines, "0 0.0", ""]))


def write_graph(folder: Path, *, constant: bool = True) -> None:
    """A folder as Kaldi's mkgraph.sh leaves it."""
    (folder / "phones").mkdir(parents=True)
    graph = hclg()
    written = kaldifst.StdConstFst(graph) if constant else graph
    written.write(str(folder / "HCLG.fst"))
    (folder / "words.txt").write_text(
        "".join(f"{word} {label}\n" for word, label in WORDS.items())
    )
    (folder / "num_pdfs").write_text(f"{NUM_PDFS}\n")
    (folder / "phones" / "word_boundary.int").write_text(
        "1 nonword\n2 singleton\n3 singleton\n"
    )


def write_experiment(folder: Path, alignments: dict[str, list[int]]) -> None:
    """A folder with a model, alignments in two files, and a graph."""
    folder.mkdir(parents=True)
    (folder / "final.mdl").write_bytes(binary_model())
    (folder / "num_jobs").write_text("2\n")
    names = sorted(alignments)
    for job in (1, 2):
        part = {name: alignments[name] for name in names[job - 1 :: 2]}
        write_alignments(folder / f"ali.{job}.gz", part)
    write_graph(folder / "graph")


def read_by_kaldi_native_io(source: str) -> dict[str, np.ndarray]:
    """The matrices that another reader finds; the package's stubs lack its iterator."""
    reader: Any = kaldi_native_io.SequentialFloatMatrixReader(source)
    with reader as entries:
        return {name: np.array(values) for name, values in entries}
