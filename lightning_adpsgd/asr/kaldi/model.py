"""A model of Kaldi: HMM topology, transitions, and diagonal Gaussian mixtures.

A transition-id, counted from 1, is a way out of a state of a phone: Kaldi's alignments
and graphs are made of them. Each belongs to a pdf, the class that a network is trained
to predict. In `final.mdl` the transitions stand first, whatever model follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.parsing import ObjectReader

_PARTS = {"<GCONSTS>", "<WEIGHTS>", "<MEANS_INVVARS>", "<INV_VARS>"}


class HmmState(NamedTuple):
    """A state of a topology.

    `targets` are the states to which its arcs lead, in their order.
    """

    targets: tuple[int, ...]


@dataclass(frozen=True)
class Transitions:
    """The meaning of each transition-id; position 0 of every array is unused.

    Attributes:
        pdf: Pdf of each transition-id, int32 [ids + 1].
        phone: Its phone.
        state: The tuple of phone, HMM state and pdfs it leaves, from 1.
        is_loop: Whether it stays in its state.
        is_final: Whether it leaves the phone.
        log_prob: Its log probability.
    """

    pdf: np.ndarray
    phone: np.ndarray
    state: np.ndarray
    is_loop: np.ndarray
    is_final: np.ndarray
    log_prob: np.ndarray

    @property
    def num_ids(self) -> int:
        """Number of transition-ids."""
        return len(self.pdf) - 1

    @property
    def num_pdfs(self) -> int:
        """Number of pdfs: the size of an acoustic model's output."""
        return int(self.pdf[1:].max()) + 1

    def pdfs_of(self, ids: np.ndarray) -> np.ndarray:
        """The pdfs of transition-ids, int32 of the same shape.

        Raises:
            KaldiError: One is not in this model.
        """
        if len(ids) and not 1 <= ids.min() <= ids.max() <= self.num_ids:
            raise KaldiError(
                f"transition-ids from {ids.min()} to {ids.max()} do not belong to this "
                f"model, which has 1 to {self.num_ids}; did it make the alignment?"
            )
        return self.pdf[ids]

    def save(self, path: Path) -> None:
        """Writes them in numpy's format."""
        np.savez(path, **vars(self))

    @classmethod
    def load(cls, path: Path) -> "Transitions":
        """Reads what `save` wrote.

        Raises:
            KaldiError: The file is missing, truncated or not written by `save`.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return cls(**arrays)
        except Exception as error:
            raise KaldiError(f"{path} holds no transitions: {error}") from error


class GaussianMixtures(NamedTuple):
    """Mixtures of Gaussians with diagonal covariances, one for each pdf.

    Kaldi's form: log p(x) = log sum_i exp(g_i + m_i x - v_i x² / 2), with the constant
    g, means times inverse variances m, and inverse variances v.
    """

    constants: tuple[np.ndarray, ...]
    means_inverse: tuple[np.ndarray, ...]
    inverse_variances: tuple[np.ndarray, ...]

    def log_likelihoods(self, frames: np.ndarray) -> np.ndarray:
        """Log-likelihoods of frames [time, feature], float32 [time, pdfs]."""
        frames = frames.astype(float)
        squares = frames * frames
        columns = [
            np.logaddexp.reduce(g + frames @ m.T - 0.5 * squares @ v.T, axis=1)
            for g, m, v in zip(*self, strict=True)
        ]
        return np.stack(columns, axis=1).astype(np.float32)


def read_transitions(path: str | Path) -> Transitions:
    """The transitions of a `final.mdl`, binary or text, of a GMM or a network.

    Raises:
        KaldiError: The file holds no model, or is cut short.
        OSError: It cannot be read.
    """
    return _transitions(ObjectReader(path), Path(path))


def read_gmm(path: str | Path) -> tuple[Transitions, GaussianMixtures]:
    """Transitions and mixtures of a GMM's `final.mdl`.

    Raises:
        KaldiError: As `read_transitions`, or the model is a network.
    """
    reader = ObjectReader(path)
    transitions = _transitions(reader, Path(path))
    reader.expect("<DIMENSION>")
    reader.integer()
    reader.expect("<NUMPDFS>")
    count = reader.integer()
    if count != transitions.num_pdfs:
        raise KaldiError(
            f"{path}: {count} mixtures and {transitions.num_pdfs} pdfs of transitions"
        )
    mixtures = [_mixture(reader) for _ in range(count)]
    return transitions, GaussianMixtures(*zip(*mixtures, strict=True))


def _mixture(reader: ObjectReader) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    reader.expect("<DiagGMM>", "<DiagGMMBegin>")
    fields: dict[str, np.ndarray] = {}
    while (token := reader.token()) not in ("</DiagGMM>", "<DiagGMMEnd>"):
        is_vector = token in ("<GCONSTS>", "<WEIGHTS>")
        fields[token] = reader.vector() if is_vector else reader.matrix()
    if not fields.keys() >= _PARTS:
        raise reader.fail("constants, weights, means and variances before it")
    return fields["<GCONSTS>"], fields["<MEANS_INVVARS>"], fields["<INV_VARS>"]


def _transitions(reader: ObjectReader, path: Path) -> Transitions:
    reader.expect("<TransitionModel>")
    topology = _topology(reader)
    kind = reader.expect("<Triples>", "<Tuples>")
    width = 3 if kind == "<Triples>" else 4
    rows = [[reader.integer() for _ in range(width)] for _ in range(reader.integer())]
    reader.expect(kind.replace("<", "</"))
    reader.expect("<LogProbs>")
    log_probs = reader.vector()
    reader.expect("</LogProbs>")
    reader.expect("</TransitionModel>")
    return _numbered(rows, topology, log_probs, path)


def _numbered(
    rows: Sequence[Sequence[int]],
    topology: dict[int, list[HmmState]],
    log_probs: np.ndarray,
    path: Path,
) -> Transitions:
    """Numbers the arcs of the states of all tuples, in order, as transition-ids."""
    ids: list[tuple[int, int, int, bool, bool]] = [(-1, 0, 0, False, False)]
    for number, (phone, state, *pdfs) in enumerate(rows, start=1):
        if phone not in topology or not 0 <= state < len(topology[phone]):
            raise KaldiError(f"{path}: no topology for state {state} of phone {phone}")
        final = len(topology[phone]) - 1
        for target in topology[phone][state].targets:
            # in the topology of chain models, the self-loop may have another pdf
            pdf = pdfs[-1] if target == state else pdfs[0]
            ids.append((pdf, phone, number, target == state, target == final))
    if len(ids) != len(log_probs):
        raise KaldiError(
            f"{path}: {len(ids) - 1} transition-ids by the topology, but "
            f"{len(log_probs) - 1} log probabilities"
        )
    columns = list(zip(*ids, strict=True))
    pdf, phone, number = (np.array(column, np.int32) for column in columns[:3])
    is_loop, is_final = (np.array(column, bool) for column in columns[3:])
    return Transitions(pdf, phone, number, is_loop, is_final, log_probs)


def _topology(reader: ObjectReader) -> dict[int, list[HmmState]]:
    """The states of each phone."""
    reader.expect("<Topology>")
    if reader.is_binary:
        topology = _binary_topology(reader)
        reader.expect("</Topology>")
        return topology
    topology = {}
    while reader.expect("<TopologyEntry>", "</Topology>") == "<TopologyEntry>":
        reader.expect("<ForPhones>")
        phones = reader.integers("</ForPhones>")
        reader.expect("</ForPhones>")
        states = _text_states(reader)
        topology.update((int(phone), states) for phone in phones)
    return topology


def _binary_topology(reader: ObjectReader) -> dict[int, list[HmmState]]:
    phones, entry_of = reader.integers(), reader.integers()
    count = reader.integer()
    has_loop_pdfs = count == -1  # the extended format announces itself so
    if has_loop_pdfs:
        count = reader.integer()
    entries = [
        [_binary_state(reader, has_loop_pdfs) for _ in range(reader.integer())]
        for _ in range(count)
    ]
    try:
        return {int(phone): entries[entry_of[phone]] for phone in phones}
    except IndexError as error:
        raise reader.fail("an entry for each phone before it") from error


def _binary_state(reader: ObjectReader, has_loop_pdfs: bool) -> HmmState:
    for _ in range(2 if has_loop_pdfs else 1):
        reader.integer()
    targets = []
    for _ in range(reader.integer()):
        targets.append(reader.integer())
        reader.real()
    return HmmState(tuple(targets))


def _text_states(reader: ObjectReader) -> list[HmmState]:
    states: list[HmmState] = []
    while reader.expect("<State>", "</TopologyEntry>") == "<State>":
        reader.integer()
        targets = []
        while (token := reader.token()) != "</State>":
            if token == "<Transition>":
                targets.append(reader.integer())
                reader.real()
            elif token in ("<PdfClass>", "<ForwardPdfClass>", "<SelfLoopPdfClass>"):
                reader.integer()
            else:
                raise reader.fail("a part of a <State> before it")
        states.append(HmmState(tuple(targets)))
    return states
