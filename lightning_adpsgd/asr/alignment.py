"""Which HMM state each frame belongs to, from transcripts alone: the flat start.

Frames are first shared out equally over the states of their transcript. Then two steps
take turns: Gaussian mixtures are estimated from the states of the frames, and the most
likely states are found anew with the mixtures (Viterbi training), while the mixtures
grow. The caller drives: `train_mixtures` yields after each turn.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import kaldi_decoder
import kaldifst
import numpy as np

from lightning_adpsgd.asr.cepstra import cepstra
from lightning_adpsgd.asr.gmm import (
    GaussianMixtures,
    Statistics,
    accumulate,
    flat,
    mix_up,
    update,
)
from lightning_adpsgd.asr.graphs import TrainingGraphs
from lightning_adpsgd.asr.parallel import fork_map

_SHARD = 16  # utterances that a process takes at a time
_ENOUGH_FRAMES = 200_000  # for the mean and the variance of all frames


class AlignmentUtterance(NamedTuple):
    """What is to be aligned: log-mel frames [time, mel] and the words said."""

    id: str
    words: Sequence[str]
    log_mel: np.ndarray


@dataclass(frozen=True, kw_only=True)
class AlignmentOptions:
    """How the flat start proceeds.

    Attributes:
        num_iterations: Realignments after the equal alignment.
        num_gaussians: Gaussians of all states at the end.
        acoustic_scale: Factor on log-likelihoods against pronunciation costs.
        beam: Of the Viterbi search, in scaled log-likelihood.
        retry_beam: Tried when no path survives `beam`.
        max_training_utterances: The mixtures are trained on at most this many
            utterances, evenly taken; what is to be aligned in the end is not bounded.
        num_cepstra: Cepstra per frame, before slopes.
        num_processes: Processes that align at the same time.
        seed: Of the equal alignment and of the splitting of Gaussians.
    """

    num_iterations: int = 12
    num_gaussians: int = 1000
    acoustic_scale: float = 0.1
    beam: float = 8.0
    retry_beam: float = 40.0
    max_training_utterances: int = 6000
    num_cepstra: int = 13
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
    """The states of one utterance, or why there are none.

    `states` is int32 [time], or None with the reason in `failure`.
    `log_likelihood` is the sum over the frames.
    """

    states: np.ndarray | None
    log_likelihood: float
    failure: str


class AlignmentStep(NamedTuple):
    """Where the flat start stands after an iteration.

    `log_likelihood` is per frame, of the alignment under the mixtures that made it
    (NaN for iteration 0, the equal alignment); `changed` is the fraction of frames
    whose state differs from the iteration before; `failures` tells for each utterance
    that could not be aligned why; `mixtures` are estimated from this alignment.
    """

    iteration: int
    log_likelihood: float
    changed: float
    num_gaussians: int
    failures: dict[str, str]
    mixtures: GaussianMixtures


class _Shard(NamedTuple):
    aligned: list[Aligned]
    sums: Statistics


def train_mixtures(
    utterances: Sequence[AlignmentUtterance],
    graphs: TrainingGraphs,
    options: AlignmentOptions,
) -> Iterator[AlignmentStep]:
    """Trains monophone mixtures from a flat start; yields after every iteration.

    Raises:
        ValueError: No utterance can be aligned.
    """
    chosen = _evenly(utterances, options.max_training_utterances)
    compiled = [_compiled(utterance, graphs) for utterance in chosen]
    num_states = graphs.topology.num_states
    mixtures = _flat(chosen, compiled, num_states, options)
    aligned = [
        _equal(utterance, graph, options.seed + index)
        for index, (utterance, graph) in enumerate(zip(chosen, compiled, strict=True))
    ]
    sums = _gather(chosen, aligned, mixtures, options)
    for iteration in range(options.num_iterations + 1):
        before = aligned
        if iteration > 0:
            aligned, sums = _realigned(chosen, compiled, mixtures, options)
        mixtures = _grown(chosen, aligned, update(mixtures, sums), iteration, options)
        yield _step(iteration, chosen, before, aligned, mixtures)


def align(
    utterances: Sequence[AlignmentUtterance],
    graphs: TrainingGraphs,
    mixtures: GaussianMixtures,
    options: AlignmentOptions,
) -> Iterator[tuple[int, Aligned]]:
    """Aligns utterances with trained mixtures; yields (index, result) as they come."""
    scorer = mixtures.scorer()

    def work(utterance: AlignmentUtterance) -> Aligned:
        graph = _compiled(utterance, graphs)
        frames = cepstra(utterance.log_mel, options.num_cepstra)
        return _viterbi(graph, frames, scorer, options)

    yield from fork_map(work, utterances, options.num_processes)


def _evenly(utterances: Sequence, most: int) -> list:
    if len(utterances) <= most:
        return list(utterances)
    return [utterances[index * len(utterances) // most] for index in range(most)]


def _compiled(
    utterance: AlignmentUtterance, graphs: TrainingGraphs
) -> kaldifst.StdVectorFst | str:
    """The graph of an utterance, or why it cannot be aligned."""
    if not np.isfinite(utterance.log_mel).all():
        return "its frames hold values that are not finite"
    try:
        least = graphs.least_frames(utterance.words)
        if len(utterance.log_mel) < least:
            return f"{len(utterance.log_mel)} frames, its words need at least {least}"
        return graphs.graph(utterance.words)
    except ValueError as error:
        return str(error)


def _flat(
    utterances: Sequence[AlignmentUtterance],
    compiled: Sequence[kaldifst.StdVectorFst | str],
    num_states: int,
    options: AlignmentOptions,
) -> GaussianMixtures:
    parts, num_frames = [], 0
    for utterance, graph in zip(utterances, compiled, strict=True):
        if not isinstance(graph, str) and num_frames < _ENOUGH_FRAMES:
            parts.append(cepstra(utterance.log_mel, options.num_cepstra))
            num_frames += len(parts[-1])
    if not parts:
        reasons = [graph for graph in compiled if isinstance(graph, str)]
        raise ValueError(
            f"none of {len(utterances)} utterances can be aligned"
            + (f"; the first: {reasons[0]}" if reasons else "")
        )
    frames = np.concatenate(parts)
    return flat(frames.mean(axis=0), frames.var(axis=0), num_states)


def _equal(
    utterance: AlignmentUtterance, graph: kaldifst.StdVectorFst | str, seed: int
) -> Aligned:
    if isinstance(graph, str):
        return Aligned(None, 0.0, graph)
    found, path = kaldifst.equal_align(graph, len(utterance.log_mel), seed)
    if not found:
        return Aligned(None, 0.0, "too few frames for its words")
    labels = kaldifst.get_linear_symbol_sequence(path)[1]
    return Aligned(np.array(labels, np.int32) - 1, 0.0, "")


def _viterbi(
    graph: kaldifst.StdVectorFst | str,
    frames: np.ndarray,
    scorer: Callable[[np.ndarray], np.ndarray],
    options: AlignmentOptions,
) -> Aligned:
    if isinstance(graph, str):
        return Aligned(None, 0.0, graph)
    likelihoods = scorer(frames)
    scaled = likelihoods * options.acoustic_scale  # must outlive the decodable
    for beam in (options.beam, options.retry_beam):
        search = kaldi_decoder.FasterDecoderOptions(beam=beam)
        decoder = kaldi_decoder.FasterDecoder(graph, search)
        decoder.decode(kaldi_decoder.DecodableCtc(scaled))
        if decoder.reached_final():
            labels = kaldifst.get_linear_symbol_sequence(decoder.get_best_path()[1])[1]
            states = np.array(labels, np.int32) - 1
            total = likelihoods[np.arange(len(states)), states].sum(dtype=float)
            return Aligned(states, float(total), "")
    return Aligned(None, 0.0, f"no path within the beam of {options.retry_beam:g}")


def _shards(count: int) -> list[range]:
    return [range(at, min(at + _SHARD, count)) for at in range(0, count, _SHARD)]


def _summed(
    frames: Sequence[np.ndarray],
    aligned: Sequence[Aligned],
    mixtures: GaussianMixtures,
) -> Statistics:
    """Statistics of the utterances that have an alignment."""
    pairs = [
        (frame, result.states)
        for frame, result in zip(frames, aligned, strict=True)
        if result.states is not None
    ]
    if not pairs:
        empty = np.zeros((0, mixtures.mean.shape[1]))
        return accumulate(mixtures, empty, np.zeros(0, np.int32))
    together = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return accumulate(mixtures, *together)


def _realigned(
    utterances: Sequence[AlignmentUtterance],
    compiled: Sequence[kaldifst.StdVectorFst | str],
    mixtures: GaussianMixtures,
    options: AlignmentOptions,
) -> tuple[list[Aligned], Statistics]:
    scorer = mixtures.scorer()

    def work(shard: range) -> _Shard:
        frames = [cepstra(utterances[i].log_mel, options.num_cepstra) for i in shard]
        aligned = [
            _viterbi(compiled[index], frame, scorer, options)
            for index, frame in zip(shard, frames, strict=True)
        ]
        return _Shard(aligned, _summed(frames, aligned, mixtures))

    shards = dict(fork_map(work, _shards(len(utterances)), options.num_processes))
    inorder = [shards[index] for index in range(len(shards))]
    aligned = [result for shard in inorder for result in shard.aligned]
    return aligned, _total(shard.sums for shard in inorder)


def _gather(
    utterances: Sequence[AlignmentUtterance],
    aligned: Sequence[Aligned],
    mixtures: GaussianMixtures,
    options: AlignmentOptions,
) -> Statistics:
    """Statistics of an alignment that is there."""

    def work(shard: range) -> Statistics:
        frames = [cepstra(utterances[i].log_mel, options.num_cepstra) for i in shard]
        return _summed(frames, [aligned[i] for i in shard], mixtures)

    sums = dict(fork_map(work, _shards(len(utterances)), options.num_processes))
    # added in the order of the utterances, so that the result is always the same
    return _total(sums[index] for index in range(len(sums)))


def _total(sums: Iterable[Statistics]) -> Statistics:
    first, *rest = sums
    for other in rest:
        first = first + other
    return first


def _grown(
    utterances: Sequence[AlignmentUtterance],
    aligned: Sequence[Aligned],
    mixtures: GaussianMixtures,
    iteration: int,
    options: AlignmentOptions,
) -> GaussianMixtures:
    """Mixtures grown to this iteration's share of Gaussians and estimated again."""
    states = [result.states for result in aligned if result.states is not None]
    if not states:
        raise ValueError(
            f"none of {len(utterances)} utterances could be aligned; the first: "
            f"{utterances[0].id}: {aligned[0].failure}"
        )
    # all of them are there two iterations before the end, to settle
    growth = min(1.0, iteration / max(1, options.num_iterations - 2))
    target = round(
        mixtures.num_states + growth * (options.num_gaussians - mixtures.num_states)
    )
    counts = np.bincount(np.concatenate(states), minlength=mixtures.num_states)
    if target > mixtures.num_gaussians:
        seed = options.seed + iteration
        mixtures = mix_up(mixtures, counts, target, seed=seed)
    return update(mixtures, _gather(utterances, aligned, mixtures, options))


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
