"""Viterbi training: finds the HMM state of each frame from transcripts.

Frames are first assigned evenly to the states of their transcript (the flat start), or
take the states of an earlier alignment. Then two steps alternate: Gaussian mixtures are
estimated from the states of the frames, and the mixtures, which grow, give new most
likely states. `train_mixtures` yields after each iteration. Only the states in an
utterance's graph are scored, so the time per frame does not grow with the number of
states.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import kaldi_decoder
import kaldifst
import numpy as np

from lightning_adpsgd.asr.frames.front_end import FrontEnd
from lightning_adpsgd.asr.hmm.gmm import (
    GaussianMixtures,
    Statistics,
    accumulate,
    flat,
    mix_up,
    update,
)
from lightning_adpsgd.asr.parallel import fork_map, in_order
from lightning_adpsgd.asr.search.arcs import fst_of
from lightning_adpsgd.asr.search.graphs import TrainingGraphs

_SHARD = 16  # utterances that a process takes at a time
_ENOUGH_FRAMES = 200_000  # for the mean and the variance of all frames

Item = TypeVar("Item")
Result = TypeVar("Result")
StateScorer = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From log-mel frames [time, mel] and states [n] to log-likelihoods [time, n]."""


class AlignmentUtterance(NamedTuple):
    """An utterance to align: log-mel frames [time, mel] and the words said."""

    id: str
    words: Sequence[str]
    log_mel: np.ndarray


@dataclass(frozen=True, kw_only=True)
class AlignmentOptions:
    """Options for the training of mixtures.

    Attributes:
        num_iterations: Number of realignments after the first alignment.
        num_gaussians: Total number of Gaussians at the end.
        acoustic_scale: Factor on log-likelihoods against pronunciation costs.
        beam: Beam of the Viterbi search, in scaled log-likelihood.
        retry_beam: Beam to try when no path survives `beam`.
        max_training_utterances: Largest number of utterances, evenly spaced, for
            training the mixtures; the final alignment is not limited.
        num_processes: Number of processes that align in parallel.
        seed: Seed of the equal alignment and of the splitting of Gaussians.

    Raises:
        ValueError: `num_iterations` is below 1, or `beam` not in (0, `retry_beam`].
    """

    num_iterations: int = 12
    num_gaussians: int = 1000
    acoustic_scale: float = 0.1
    beam: float = 8.0
    retry_beam: float = 40.0
    max_training_utterances: int = 6000
    num_processes: int = 1
    seed: int = 0

    def __post_init__(self):
        if self.num_iterations < 1:
            raise ValueError(
                f"`num_iterations` must be at least 1, got {self.num_iterations}"
            )
        if not 0 < self.beam <= self.retry_beam:
            raise ValueError(
                "`beam` must be positive and at most `retry_beam`, got "
                f"{self.beam} and {self.retry_beam}"
            )


class Aligned(NamedTuple):
    """The states of one utterance, or the reason why there are none.

    `states` is int32 [time], or None with the reason in `failure`.
    `log_likelihood` is the sum over the frames.
    """

    states: np.ndarray | None
    log_likelihood: float
    failure: str


class AlignmentStep(NamedTuple):
    """The state of the training after an iteration.

    Attributes:
        log_likelihood: Log-likelihood per frame, of the alignment under the mixtures
            that made it; NaN for iteration 0, the first alignment.
        changed: Fraction of frames whose state differs from the iteration before.
        failures: Reason for each utterance that could not be aligned.
        mixtures: Mixtures estimated from this alignment.
    """

    iteration: int
    log_likelihood: float
    changed: float
    num_gaussians: int
    failures: dict[str, str]
    mixtures: GaussianMixtures


class _Graph(NamedTuple):
    """A training graph whose labels count the states that occur in it from 1.

    `states` are these states, ascending: label i reads `states[i - 1]`.
    """

    fst: kaldifst.StdVectorFst
    states: np.ndarray


class _Sums(NamedTuple):
    """Statistics of the Gaussians `rows`; the others had no frames."""

    rows: np.ndarray
    sums: Statistics


class _Training(NamedTuple):
    """The inputs that stay the same in all iterations."""

    utterances: Sequence[AlignmentUtterance]
    graphs: Sequence[_Graph | str]
    front_end: FrontEnd
    options: AlignmentOptions


def train_mixtures(
    utterances: Sequence[AlignmentUtterance],
    graphs: TrainingGraphs,
    options: AlignmentOptions,
    *,
    front_end: FrontEnd | None = None,
    start: Callable[[str], np.ndarray | None] | None = None,
) -> Iterator[AlignmentStep]:
    """Trains the mixtures of all states; yields after every iteration.

    Args:
        utterances: Utterances, with their words and frames.
        graphs: Training graphs over the states of the mixtures.
        options: Options of the training.
        front_end: Function from frames to the mixtures' input; None: cepstra, slopes.
        start: Function from an utterance's id to its initial states, [time], or None.
            Without it, frames are assigned evenly.

    Raises:
        ValueError: No utterance can be aligned.
    """
    chosen = evenly(utterances, options.max_training_utterances)
    compiled = [_compiled(utterance, graphs) for utterance in chosen]
    training = _Training(chosen, compiled, front_end or FrontEnd(), options)
    mixtures = _flat(training, graphs.topology.num_states)
    aligned = _first(training, start)
    sums = _gather(training, aligned, mixtures)
    for iteration in range(options.num_iterations + 1):
        before = aligned
        if iteration > 0:
            aligned, sums = _realigned(training, mixtures)
        mixtures = _grown(training, aligned, update(mixtures, sums), iteration)
        yield _step(iteration, chosen, before, aligned, mixtures)


def mixture_scorer(mixtures: GaussianMixtures, front_end: FrontEnd) -> StateScorer:
    """The log-likelihoods that trained mixtures give, for `align`."""
    scorer = mixtures.scorer()
    return lambda log_mel, states: scorer.of(front_end(log_mel), states)


def align(
    utterances: Sequence[AlignmentUtterance],
    graphs: TrainingGraphs,
    scorer: StateScorer,
    options: AlignmentOptions,
) -> Iterator[tuple[int, Aligned]]:
    """Aligns utterances; yields (index, result) as they come.

    Args:
        utterances: Utterances, with their words and frames.
        graphs: Graphs over the states to find.
        scorer: Scorer of mixtures (`mixture_scorer`) or of a network.
        options: Options of the search.
    """

    def work(utterance: AlignmentUtterance) -> Aligned:
        graph = _compiled(utterance, graphs)
        if isinstance(graph, str):
            return Aligned(None, 0.0, graph)
        return _viterbi(graph, scorer(utterance.log_mel, graph.states), options)

    yield from fork_map(work, utterances, options.num_processes)


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` items, evenly spaced from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[index * len(items) // most] for index in range(most)]


def _compiled(utterance: AlignmentUtterance, graphs: TrainingGraphs) -> _Graph | str:
    """The graph of an utterance, or the reason why it cannot be aligned."""
    if not np.isfinite(utterance.log_mel).all():
        return "its frames hold values that are not finite"
    try:
        least = graphs.least_frames(utterance.words)
        if len(utterance.log_mel) < least:
            return f"{len(utterance.log_mel)} frames, its words need at least {least}"
        arcs = graphs.arcs(utterance.words)
    except ValueError as error:
        return str(error)
    labels = np.union1d(arcs.ilabel, [0])
    own = np.searchsorted(labels, arcs.ilabel)
    return _Graph(fst_of(arcs._replace(ilabel=own)), labels[1:] - 1)


def _flat(training: _Training, num_states: int) -> GaussianMixtures:
    parts, num_frames = [], 0
    for utterance, graph in zip(training.utterances, training.graphs, strict=True):
        if not isinstance(graph, str) and num_frames < _ENOUGH_FRAMES:
            parts.append(training.front_end(utterance.log_mel))
            num_frames += len(parts[-1])
    if not parts:
        reasons = [graph for graph in training.graphs if isinstance(graph, str)]
        raise ValueError(
            f"none of {len(training.utterances)} utterances can be aligned"
            + (f"; the first: {reasons[0]}" if reasons else "")
        )
    frames = np.concatenate(parts)
    return flat(frames.mean(axis=0), frames.var(axis=0), num_states)


def _first(
    training: _Training, start: Callable[[str], np.ndarray | None] | None
) -> list[Aligned]:
    """The alignment that training starts from."""
    pairs = zip(training.utterances, training.graphs, strict=True)
    if start is None:
        return [
            _equal(utterance, graph, training.options.seed + index)
            for index, (utterance, graph) in enumerate(pairs)
        ]
    return [
        Aligned(None, 0.0, graph)
        if isinstance(graph, str)
        else _given(utterance, start(utterance.id))
        for utterance, graph in pairs
    ]


def _given(utterance: AlignmentUtterance, states: np.ndarray | None) -> Aligned:
    if states is None:
        return Aligned(None, 0.0, "it has no alignment to start from")
    if len(states) != len(utterance.log_mel):
        raise ValueError(
            f"`start` must give a state for each of {len(utterance.log_mel)} frames of "
            f"{utterance.id}, got {len(states)}"
        )
    return Aligned(states, 0.0, "")


def _equal(utterance: AlignmentUtterance, graph: _Graph | str, seed: int) -> Aligned:
    if isinstance(graph, str):
        return Aligned(None, 0.0, graph)
    found, path = kaldifst.equal_align(graph.fst, len(utterance.log_mel), seed)
    if not found:
        return Aligned(None, 0.0, "too few frames for its words")
    return Aligned(graph.states[_path_labels(path) - 1].astype(np.int32), 0.0, "")


def _path_labels(path: kaldifst.StdVectorFst) -> np.ndarray:
    return np.array(kaldifst.get_linear_symbol_sequence(path)[1], np.int64)


def _viterbi(
    graph: _Graph, likelihoods: np.ndarray, options: AlignmentOptions
) -> Aligned:
    """The best path of log-likelihoods [time, states of the graph]."""
    # must outlive the decodable, which does not copy it
    scaled = np.ascontiguousarray(likelihoods * options.acoustic_scale, np.float32)
    for beam in (options.beam, options.retry_beam):
        search = kaldi_decoder.FasterDecoderOptions(beam=beam)
        decoder = kaldi_decoder.FasterDecoder(graph.fst, search)
        decoder.decode(kaldi_decoder.DecodableCtc(scaled))
        if decoder.reached_final():
            places = _path_labels(decoder.get_best_path()[1]) - 1
            total = likelihoods[np.arange(len(places)), places].sum(dtype=float)
            return Aligned(graph.states[places].astype(np.int32), float(total), "")
    return Aligned(None, 0.0, f"no path within the beam of {options.retry_beam:g}")


def _shards(count: int) -> list[range]:
    return [range(at, min(at + _SHARD, count)) for at in range(0, count, _SHARD)]


def _summed(
    frames: Sequence[np.ndarray],
    aligned: Sequence[Aligned],
    mixtures: GaussianMixtures,
) -> _Sums:
    """Statistics of the utterances that have an alignment."""
    pairs = [
        (frame, result.states)
        for frame, result in zip(frames, aligned, strict=True)
        if result.states is not None
    ]
    if not pairs:
        nothing = np.zeros((0, mixtures.mean.shape[1]))
        return _Sums(np.zeros(0, int), Statistics(np.zeros(0), nothing, nothing))
    together = (np.concatenate(column) for column in zip(*pairs, strict=True))
    sums = accumulate(mixtures, *together)
    rows = np.flatnonzero(sums.frames)
    return _Sums(rows, Statistics(*(part[rows] for part in sums)))


def _realigned(
    training: _Training, mixtures: GaussianMixtures
) -> tuple[list[Aligned], Statistics]:
    scorer = mixtures.scorer()
    aligned: list[Aligned] = []

    def one(index: int, frames: np.ndarray) -> Aligned:
        graph = training.graphs[index]
        if isinstance(graph, str):
            return Aligned(None, 0.0, graph)
        return _viterbi(graph, scorer.of(frames, graph.states), training.options)

    def work(shard: range) -> tuple[list[Aligned], _Sums]:
        frames = [training.front_end(training.utterances[i].log_mel) for i in shard]
        found = [one(i, frame) for i, frame in zip(shard, frames, strict=True)]
        return found, _summed(frames, found, mixtures)

    def sums() -> Iterator[_Sums]:
        for found, part in _over_shards(work, training):
            aligned.extend(found)
            yield part

    total = _total(sums(), mixtures)
    return aligned, total


def _gather(
    training: _Training, aligned: Sequence[Aligned], mixtures: GaussianMixtures
) -> Statistics:
    """The statistics of an existing alignment."""

    def work(shard: range) -> _Sums:
        frames = [training.front_end(training.utterances[i].log_mel) for i in shard]
        return _summed(frames, [aligned[i] for i in shard], mixtures)

    return _total(_over_shards(work, training), mixtures)


def _over_shards(
    work: Callable[[range], Result], training: _Training
) -> Iterator[Result]:
    """The results of all shards in the order of the utterances.

    Sums are added in the same order, so the result is deterministic.
    """
    shards = _shards(len(training.utterances))
    return in_order(fork_map(work, shards, training.options.num_processes))


def _total(parts: Iterable[_Sums], mixtures: GaussianMixtures) -> Statistics:
    shape = mixtures.mean.shape
    total = Statistics(np.zeros(shape[0]), np.zeros(shape), np.zeros(shape))
    for rows, sums in parts:
        for whole, part in zip(total, sums, strict=True):
            whole[rows] += part
    return total


def _grown(
    training: _Training,
    aligned: Sequence[Aligned],
    mixtures: GaussianMixtures,
    iteration: int,
) -> GaussianMixtures:
    """Mixtures grown to this iteration's share of Gaussians and estimated again."""
    options = training.options
    states = [result.states for result in aligned if result.states is not None]
    if not states:
        raise ValueError(
            f"none of {len(training.utterances)} utterances could be aligned; the "
            f"first: {training.utterances[0].id}: {aligned[0].failure}"
        )
    # all of them exist two iterations before the end, to settle
    growth = min(1.0, iteration / max(1, options.num_iterations - 2))
    target = round(
        mixtures.num_states + growth * (options.num_gaussians - mixtures.num_states)
    )
    counts = np.bincount(np.concatenate(states), minlength=mixtures.num_states)
    if target > mixtures.num_gaussians:
        seed = options.seed + iteration
        mixtures = mix_up(mixtures, counts, target, seed=seed)
    return update(mixtures, _gather(training, aligned, mixtures))


def _step(
    iteration: int,
    utterances: Sequence[AlignmentUtterance],
    before: Sequence[Aligned],
    aligned: Sequence[Aligned],
    mixtures: GaussianMixtures,
) -> AlignmentStep:
    done = [result for result in aligned if result.states is not None]
    num_frames = sum(len(result.states) for result in done if result.states is not None)
    changed = sum(map(_num_changed, before, aligned))
    total = sum(result.log_likelihood for result in done)
    return AlignmentStep(
        iteration,
        total / num_frames if iteration else float("nan"),
        changed / num_frames if iteration else 1.0,
        mixtures.num_gaussians,
        {
            utterance.id: result.failure
            for utterance, result in zip(utterances, aligned, strict=True)
            if result.states is None
        },
        mixtures,
    )


def _num_changed(before: Aligned, after: Aligned) -> int:
    if after.states is None:
        return 0
    if before.states is None:
        return len(after.states)
    return int((before.states != after.states).sum())
