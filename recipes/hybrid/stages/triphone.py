"""Stage `triphone`: the HMM state of every frame, for phones in context.

All labelled frames are counted by context, and a decision tree says which contexts
share a state. The mixtures of these states are trained from the monophones' labels on.
The stage leaves the same files as `align`.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
from lightning_adpsgd.asr.frames.store import FrameStore, write_labels
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
    alignment_options,
    await_training,
    label_splits,
    log_training,
    training_utterances,
)
from recipes.hybrid.pipeline.crew import finished
from recipes.hybrid.pipeline.runner import StageError
from recipes.hybrid.pipeline.settings import Settings

_PHONES = "phones.npy"  # a round's labels for the next one
_SHARD = 256  # utterances whose frames are in a process's memory at a time


def triphone(settings: Settings, output: Path) -> None:
    """Grows the tree, trains the mixtures of its leaves and labels every frame.

    Interrupted, it goes on after the tree or after the training.

    Raises:
        StageError: The settings allow no tree, or no utterance can be aligned.
    """
    lexicon = read_lexicon(settings.directory("lexicon"))
    labels = settings.directory("align") / "train" / "labels.npy"
    last = settings.triphone.rounds
    for number in range(1, last):
        folder = output / f"round-{number}"
        folder.mkdir(exist_ok=True)
        _say_round(settings, number)
        if not (folder / _PHONES).exists():
            _round(settings, folder, lexicon, labels)
            _write_phones(settings, folder)
        labels = folder / _PHONES
    if last > 1:
        _say_round(settings, last)
    _round(settings, output, lexicon, labels)
    if settings.crew.leads:
        for folder in output.glob("round-*"):
            shutil.rmtree(folder)


def _say_round(settings: Settings, number: int) -> None:
    if settings.crew.leads:
        print(f"  tree {number} of {settings.triphone.rounds}", flush=True)


def _round(settings: Settings, output: Path, lexicon: Lexicon, labels: Path) -> None:
    """Grows a tree on some labels, by phones, and labels every frame anew."""
    if not settings.crew.leads:
        await_training(settings, output)
    store = FrameStore(settings.directory("features") / "train", labels)
    try:
        phones = read_topology(settings.directory("align") / "tree.json")
        if not (output / "tree.json").exists():
            _grow(settings, output, lexicon, phones, store)
        topology = read_topology(output / "tree.json")
        front_end = FrontEnd.load(output / "front_end.npz")
    except ValueError as error:
        raise StageError(str(error)) from error
    graphs = TrainingGraphs(lexicon, topology, settings.align.silence_probability)
    options = alignment_options(
        settings,
        num_iterations=settings.triphone.num_iterations,
        num_gaussians=num_gaussians(settings, store),
    )
    if not (output / "gmm.npz").exists():
        steps = train_mixtures(
            training_utterances(settings, lexicon),
            graphs,
            options,
            front_end=front_end,
            start=_in_context(store, phones, topology),
        )
        log_training(output, steps, options.num_iterations + 1)
    scorer = mixture_scorer(GaussianMixtures.load(output / "gmm.npz"), front_end)
    label_splits(settings, output, lexicon, graphs, scorer, options)


def _write_phones(settings: Settings, folder: Path) -> None:
    """Writes the labels of a round as states of phones without their contexts."""
    path = folder / _PHONES
    if not settings.crew.leads:
        about = f"process 0 to write {path}"
        settings.crew.await_until(path.exists, about, finished(folder))
        return
    found = read_topology(folder / "tree.json")
    phones = read_topology(settings.directory("align") / "tree.json")
    plain = phones.chains(np.arange(1, len(phones.phones) + 1)[:, None])
    state = plain[found.phone_of_state, found.position_of_state].astype(np.int32)
    labels = folder / "train" / "labels.npy"
    store = FrameStore(settings.directory("features") / "train", labels)
    places = np.flatnonzero(store.labelled).tolist()
    names = store.ids
    write_labels(
        path, store, ((str(names[p]), state[store.labels(p).numpy()]) for p in places)
    )


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
    settings: Settings,
    output: Path,
    lexicon: Lexicon,
    phones: Topology,
    store: FrameStore,
) -> None:
    """Writes `front_end.npz` and `tree.json`."""
    front_end = _front_end(settings, store, phones)
    front_end.save(output / "front_end.npz")
    statistics = _statistics(settings, store, phones, front_end)
    chosen, start = settings.triphone, time.monotonic()
    options = TreeOptions(
        num_leaves=chosen.num_leaves,
        min_frames=chosen.min_frames,
        min_gain=chosen.min_gain,
        tie=chosen.tie,
        num_processes=settings.cores,
    )
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
    settings: Settings, store: FrameStore, phones: Topology, front_end: FrontEnd
) -> ContextStatistics:
    """The sums of all labelled frames by context."""

    def load(shard: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for position in shard:
            frames = front_end(store.frames(position).numpy())
            yield frames, store.labels(position).numpy()

    shards = _shards(np.flatnonzero(store.labelled).tolist())
    with tqdm(desc="contexts", total=len(shards), unit="shard") as bar:
        return context_statistics(shards, load, phones, settings.cores, bar.update)


def _front_end(settings: Settings, store: FrameStore, phones: Topology) -> FrontEnd:
    """Cepstra with slopes, or the directions that tell the monophones' states apart."""
    chosen = settings.triphone
    if not chosen.lda:
        return FrontEnd()
    plain = FrontEnd()
    reach = chosen.lda_reach

    def work(shard: list[int]) -> ScatterSums:
        frames, labels = [], []
        for position in shard:
            log_mel = store.frames(position).numpy()
            frames.append(spliced(log_mel, plain.num_cepstra, reach))
            labels.append(store.labels(position).numpy())
        together = np.concatenate(frames), np.concatenate(labels)
        return scatter_sums(*together, phones.num_states)

    positions = np.flatnonzero(store.labelled).tolist()
    some = evenly(positions, settings.align.max_training_utterances)
    sums = total(in_order(fork_map(work, _shards(some), settings.cores)))
    projection = discriminants(sums, chosen.lda_dimension)
    if chosen.mllt:
        covariances = class_covariances(sums, projection)
        projection = projection @ diagonalising(covariances, sums.frames).T
    return FrontEnd(plain.num_cepstra, reach, projection)


def _in_context(
    store: FrameStore, phones: Topology, topology: Topology
) -> Callable[[str], np.ndarray | None]:
    """The labels of an utterance in the numbering of `topology`."""

    def states(utterance: str) -> np.ndarray | None:
        position = store.position(utterance)
        if not store.labelled[position]:
            return None
        return topology.in_context(
            *contexts_of(store.labels(position).numpy(), phones)
        ).astype(np.int32)

    return states
