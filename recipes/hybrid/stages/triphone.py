"""Stage `triphone`: the HMM state of every frame, for phones in context.

All labelled frames are counted by context, and a decision tree says which contexts
share a state. The mixtures of these states are trained from these labels on. The labels
are those of the monophones, or with `triphone.start` those of another experiment's
network, whose realignment so changes the states. The stage leaves the same files as
`align`.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from lightning_adpsgd.asr.frames.front_end import FrontEnd, spliced
from lightning_adpsgd.asr.frames.lda import (
    ScatterSums,
    class_covariances,
    discriminants,
    scatter_sums,
    total,
)
from lightning_adpsgd.asr.frames.mllt import diagonalising
from lightning_adpsgd.asr.frames.store import FrameStore, StoreError, write_labels
from lightning_adpsgd.asr.hmm.contexts import (
    ContextStatistics,
    context_statistics,
    contexts_of,
)
from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.hmm.growing import TreeOptions, grow
from lightning_adpsgd.asr.hmm.states import Topology, read_topology, write_topology
from lightning_adpsgd.asr.language.lexicon import Lexicon, read_lexicon
from lightning_adpsgd.asr.parallel import fork_map, in_order
from lightning_adpsgd.asr.search.alignment import evenly, mixture_scorer, train_mixtures
from lightning_adpsgd.asr.search.graphs import TrainingGraphs
from recipes.hybrid.data.labels import (
    ALIGNED_SPLITS,
    alignment_options,
    await_training,
    label_splits,
    log_training,
    training_utterances,
    write_states,
)
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError

_SHARD = 256  # utterances whose frames are in a process's memory at a time


class _Labelled(NamedTuple):
    """The labelled frames of a split, as states of phones without their contexts.

    Attributes:
        store: frames, with labels of any tree of these phones.
        state: state without context of each state of that tree, int32 [states].
        phones: numbering of the states without contexts.
    """

    store: FrameStore
    state: np.ndarray
    phones: Topology

    @classmethod
    def of(cls, settings: Settings, split: str, folder: Path) -> "_Labelled":
        """The labels that a stage has left in `folder`.

        Raises:
            ValueError: They are missing, of other phones, or of other frames.
        """
        phones = read_topology(settings.directory("align") / "tree.json")
        found = read_topology(folder / "tree.json")
        if found.phones != phones.phones:
            raise ValueError(
                f"{folder / 'tree.json'}: expected the {len(phones.phones)} phones of "
                f"{settings.directory('lexicon')}, found {len(found.phones)} others"
            )
        plain = phones.chains(np.arange(1, len(phones.phones) + 1)[:, None])
        state = plain[found.phone_of_state, found.position_of_state].astype(np.int32)
        labels = folder / split / "labels.npy"
        store = FrameStore(settings.directory("features") / split, labels)
        return cls(store, state, phones)

    @property
    def positions(self) -> list[int]:
        """Positions of the labelled utterances."""
        return np.flatnonzero(self.store.labelled).tolist()

    def states(self, position: int) -> np.ndarray:
        """The states of an utterance, [time]."""
        return self.state[self.store.labels(position).numpy()]

    def in_context(self, position: int, topology: Topology) -> np.ndarray:
        """The states of an utterance in the numbering of `topology`, int32 [time]."""
        contexts = contexts_of(self.states(position), self.phones)
        return topology.in_context(*contexts).astype(np.int32)

    def renamed(
        self, topology: Topology, counts: np.ndarray
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The utterances with their states in `topology`, which `counts` counts."""
        for position in self.positions:
            states = self.in_context(position, topology)
            counts += np.bincount(states, minlength=len(counts))
            yield str(self.store.ids[position]), states


def triphone(settings: Settings, output: Path) -> None:
    """Grows the tree, trains the mixtures of its leaves and labels every frame.

    Interrupted, it continues after the tree or after the training.

    Raises:
        StageError: The settings allow no tree, `triphone.start` has no labels of these
            frames, or no utterance can be aligned.
    """
    if settings.triphone.keep_labels and not settings.crew.leads:
        return  # there is nothing to share
    lexicon = read_lexicon(settings.directory("lexicon"))
    start = settings.triphone.start or settings.directory("align")
    last = settings.triphone.rounds
    for number in range(1, last):
        folder = output / f"round-{number}"
        folder.mkdir(exist_ok=True)
        _say_round(settings, number)
        if not (folder / "states.json").exists():
            _round(settings, folder, lexicon, start)
        start = folder
    if last > 1:
        _say_round(settings, last)
    _round(settings, output, lexicon, start)
    if settings.crew.leads:
        for folder in output.glob("round-*"):
            shutil.rmtree(folder)


def _say_round(settings: Settings, number: int) -> None:
    if settings.crew.leads:
        print(f"  tree {number} of {settings.triphone.rounds}", flush=True)


def _round(settings: Settings, output: Path, lexicon: Lexicon, start: Path) -> None:
    """Grows a tree on the labels in `start`, and labels every frame again."""
    if not settings.crew.leads:
        await_training(settings, output)
    try:
        labelled = _Labelled.of(settings, "train", start)
        if not (output / "tree.json").exists():
            _grow(settings, output, lexicon, labelled)
        topology = read_topology(output / "tree.json")
        front_end = FrontEnd.load(output / "front_end.npz")
    except (StoreError, ValueError) as error:
        raise StageError(str(error)) from error
    graphs = TrainingGraphs(lexicon, topology, settings.align.silence_probability)
    options = alignment_options(
        settings,
        num_iterations=settings.triphone.num_iterations,
        num_gaussians=num_gaussians(settings, labelled.store),
    )
    if not (output / "gmm.npz").exists():
        steps = train_mixtures(
            training_utterances(settings, lexicon),
            graphs,
            options,
            front_end=front_end,
            start=_in_context(labelled, topology),
        )
        log_training(output, steps, options.num_iterations + 1)
    if settings.triphone.keep_labels:
        _keep_labels(settings, output, start, topology)
        return
    scorer = mixture_scorer(GaussianMixtures.load(output / "gmm.npz"), front_end)
    label_splits(settings, output, lexicon, graphs, scorer, options)


def _keep_labels(
    settings: Settings, output: Path, start: Path, topology: Topology
) -> None:
    """Writes the labels of `start` in the numbering of the tree grown on them."""
    counts = {
        split: np.zeros(topology.num_states, np.int64) for split in ALIGNED_SPLITS
    }
    for split in ALIGNED_SPLITS:
        labelled = _Labelled.of(settings, split, start)
        labels = labelled.renamed(topology, counts[split])
        (output / split).mkdir(exist_ok=True)
        write_labels(output / split / "labels.npy", labelled.store, labels)
    write_states(output, topology, counts["train"])


def num_gaussians(settings: Settings, store: FrameStore) -> int:
    """The number of Gaussians: as many as asked for, if there is speech for them.

    Args:
        settings: settings with the largest number, and the frames for each.
        store: training frames, of which the mixtures may see a part only.
    """
    share = min(1.0, settings.align.max_training_utterances / len(store))
    enough = round(share * store.num_frames / settings.triphone.frames_per_gaussian)
    return min(settings.triphone.num_gaussians, enough)


def _grow(
    settings: Settings, output: Path, lexicon: Lexicon, labelled: _Labelled
) -> None:
    """Writes `front_end.npz` and `tree.json`."""
    front_end = _front_end(settings, labelled)
    front_end.save(output / "front_end.npz")
    statistics = _statistics(settings, labelled, front_end)
    chosen, start = settings.triphone, time.monotonic()
    options = TreeOptions(
        num_leaves=chosen.num_leaves,
        min_frames=chosen.min_frames,
        min_gain=chosen.min_gain,
        tie=chosen.tie,
        num_processes=settings.cores,
    )
    phones = labelled.phones
    tree = grow(statistics, phones, len(lexicon.silence_phones), options)
    topology = Topology(phones.phones, phones.states_per_phone, tree)
    write_topology(output / "tree.json", topology)
    print(
        f"  {len(statistics.root)} contexts, {topology.num_states} states, tree grown "
        f"in {time.monotonic() - start:.1f} s",
        flush=True,
    )


def _shards(positions: list[int]) -> list[list[int]]:
    return [positions[at : at + _SHARD] for at in range(0, len(positions), _SHARD)]


def _statistics(
    settings: Settings, labelled: _Labelled, front_end: FrontEnd
) -> ContextStatistics:
    """The sums of all labelled frames by context."""

    def load(shard: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for position in shard:
            frames = front_end(labelled.store.frames(position).numpy())
            yield frames, labelled.states(position)

    shards, phones = _shards(labelled.positions), labelled.phones
    with tqdm(desc="contexts", total=len(shards), unit="shard") as bar:
        return context_statistics(shards, load, phones, settings.cores, bar.update)


def _front_end(settings: Settings, labelled: _Labelled) -> FrontEnd:
    """Cepstra with slopes, or the directions that tell the monophones' states apart."""
    chosen = settings.triphone
    if not chosen.lda:
        return FrontEnd()
    plain = FrontEnd()
    reach = chosen.lda_reach

    def work(shard: list[int]) -> ScatterSums:
        frames, labels = [], []
        for position in shard:
            log_mel = labelled.store.frames(position).numpy()
            frames.append(spliced(log_mel, plain.num_cepstra, reach))
            labels.append(labelled.states(position))
        together = np.concatenate(frames), np.concatenate(labels)
        return scatter_sums(*together, labelled.phones.num_states)

    some = evenly(labelled.positions, settings.align.max_training_utterances)
    sums = total(in_order(fork_map(work, _shards(some), settings.cores)))
    projection = discriminants(sums, chosen.lda_dimension)
    if chosen.mllt:
        covariances = class_covariances(sums, projection)
        projection = projection @ diagonalising(covariances, sums.frames).T
    return FrontEnd(plain.num_cepstra, reach, projection)


def _in_context(
    labelled: _Labelled, topology: Topology
) -> Callable[[str], np.ndarray | None]:
    """The labels of an utterance in the numbering of `topology`."""

    def states(utterance: str) -> np.ndarray | None:
        position = labelled.store.position(utterance)
        if not labelled.store.labelled[position]:
            return None
        return labelled.in_context(position, topology)

    return states
