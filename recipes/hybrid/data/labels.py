"""The output of every stage that aligns: numbered states, and labels.

`tree.json` has the decision tree that numbers the HMM states, `states.json` their names
and how often each occurs in training, `train/labels.npy` and `dev/labels.npy` the state
of every frame. Utterances are read and aligned in blocks, so that memory does not grow
with the corpus.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from lightning_adpsgd.asr.corpora.corpus import Skipped, Utterance
from lightning_adpsgd.asr.frames.store import FrameStore, write_labels
from lightning_adpsgd.asr.hmm.states import Topology, write_topology
from lightning_adpsgd.asr.language.lexicon import Lexicon
from lightning_adpsgd.asr.search.alignment import (
    AlignmentOptions,
    AlignmentStep,
    AlignmentUtterance,
    StateScorer,
    align,
    evenly,
)
from lightning_adpsgd.asr.search.graphs import TrainingGraphs
from lightning_adpsgd.files import write_json
from recipes.hybrid.data.splits import with_copies
from recipes.hybrid.pipeline.crew import finished, shared
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError

ALIGNED_SPLITS = ("train", "dev")
_BLOCK = 4096  # utterances that are in memory at a time

Stored = tuple[Utterance, np.ndarray]
"""An utterance and the features that its states are found from, [time, dims]."""

Reader = Callable[[Settings, str], Iterator[Stored]]
"""Reads the utterances of a split that have frames."""


def stored_utterances(settings: Settings, split: str) -> Iterator[Stored]:
    """The utterances of a split that have frames, each with a view of them."""
    store = FrameStore(settings.directory("features") / split)
    for utterance in with_copies(settings, split):
        if utterance.id in store:
            yield utterance, store.frames(store.position(utterance.id)).numpy()


def alignment_options(settings: Settings, **others: Any) -> AlignmentOptions:
    """The bounds of the search, from the group `align` except for `others`."""
    chosen = settings.align
    options = AlignmentOptions(
        acoustic_scale=chosen.acoustic_scale,
        beam=chosen.beam,
        retry_beam=chosen.retry_beam,
        max_training_utterances=chosen.max_training_utterances,
        num_processes=settings.cores,
        seed=settings.seed,
    )
    return dataclasses.replace(options, **others)


def training_utterances(
    settings: Settings, lexicon: Lexicon
) -> list[AlignmentUtterance]:
    """Training utterances, evenly taken, at most `align.max_training_utterances`."""
    count = sum(1 for _ in stored_utterances(settings, "train"))
    most = settings.align.max_training_utterances
    chosen = set(evenly(range(count), most))
    return [
        _to_align(stored, lexicon)
        for place, stored in enumerate(stored_utterances(settings, "train"))
        if place in chosen
    ]


def _to_align(stored: Stored, lexicon: Lexicon) -> AlignmentUtterance:
    utterance, frames = stored
    return AlignmentUtterance(utterance.id, lexicon.known(utterance.words), frames)


def await_training(settings: Settings, output: Path) -> None:
    """Waits, in a process that does not lead, for the mixtures that the leader trains.

    Raises:
        CrewError: They do not come.
        FinishedError: The stage was finished without this process.
    """
    mixtures = output / "gmm.npz"
    about = f"process 0 to train {mixtures}"
    settings.crew.await_until(mixtures.exists, about, finished(output))


def log_training(output: Path, steps: Iterator[AlignmentStep], total: int) -> None:
    """Trains mixtures to the end: `gmm.npz`, and `log.json` of the iterations."""
    bar = tqdm(steps, desc="mixtures", total=total, unit="iteration")
    log: list[AlignmentStep] = []
    try:
        for step in bar:
            log.append(step)
            bar.set_postfix_str(_progress(step))
    except ValueError as error:
        raise StageError(f"the mixtures cannot be trained: {error}") from error
    iterations = [_logged(step) for step in log]
    failures = log[-1].failures
    write_json(output / "log.json", {"iterations": iterations, "failures": failures})
    log[-1].mixtures.save(output / "gmm.npz")


def _logged(step: AlignmentStep) -> dict[str, Any]:
    return {
        "iteration": step.iteration,
        "log_likelihood": None if step.iteration == 0 else step.log_likelihood,
        "changed": step.changed,
        "num_gaussians": step.num_gaussians,
        "num_failures": len(step.failures),
    }


def _progress(step: AlignmentStep) -> str:
    if step.iteration == 0:  # of an alignment that no model has scored
        return f"at the start, {step.num_gaussians} Gaussians"
    return (
        f"log-likelihood {step.log_likelihood:.2f} a frame, "
        f"{step.changed:.1%} of frames changed, {step.num_gaussians} Gaussians"
    )


def label_splits(
    settings: Settings,
    output: Path,
    lexicon: Lexicon,
    graphs: TrainingGraphs,
    scorer: StateScorer,
    options: AlignmentOptions,
    read: Reader = stored_utterances,
    block: int = _BLOCK,
) -> None:
    """Aligns `train` and `dev`; writes labels and the numbering of the states.

    Args:
        settings: settings of the experiment.
        output: folder that gets a folder for each split.
        lexicon: words and pronunciations.
        graphs: graphs of the words of utterances.
        scorer: log-likelihoods of states, for what `read` has read.
        options: bounds of the search.
        read: reader of the utterances of a split.
        block: number of utterances that are in memory at a time.

    Raises:
        StageError: No utterance of a split can be aligned.
    """
    counts = {}
    for split in ALIGNED_SPLITS:
        found = _Split(settings, split, lexicon, (graphs, scorer, options))
        counts[split] = found.write(output / split, read(settings, split), block)
    if settings.crew.leads:
        write_states(output, graphs.topology, counts["train"])


def write_states(output: Path, topology: Topology, counts: np.ndarray) -> None:
    """Writes the numbering of the states, and how often each occurs in training."""
    write_topology(output / "tree.json", topology)
    write_json(output / "states.json", _described(topology, counts))


def _described(topology: Topology, counts: np.ndarray) -> dict[str, Any]:
    return {
        "num_states": topology.num_states,
        "states_per_phone": topology.states_per_phone,
        "phones": list(topology.phones),
        "names": list(topology.state_names),
        "counts": counts.tolist(),
    }


class _Found(NamedTuple):
    """An utterance with its states, or why it has none."""

    utterance: Utterance
    states: np.ndarray | None
    failure: str


class _Split:
    """The labels of one split, and the report on them."""

    def __init__(
        self,
        settings: Settings,
        split: str,
        lexicon: Lexicon,
        search: tuple[TrainingGraphs, StateScorer, AlignmentOptions],
    ) -> None:
        self._settings = settings
        self._name = split
        self._lexicon = lexicon
        self._search = search
        self._topology = search[0].topology
        self._counts = np.zeros(self._topology.num_states, np.int64)
        self._skipped = Skipped()

    def write(self, folder: Path, stored: Iterator[Stored], block: int) -> np.ndarray:
        """Writes the labels; returns how often each state occurs.

        In a process that does not lead, it leaves a share of them and returns nothing
        counted.
        """
        store = FrameStore(self._settings.directory("features") / self._name)
        crew = self._settings.crew
        work = partial(self._found, block=block, total=len(store) // crew.num_nodes)
        found = shared(crew, folder.parent, f"labels-{self._name}", stored, work)
        labels = self._noted(found)
        if not crew.leads:
            deque(labels, maxlen=0)
            return self._counts
        folder.mkdir(exist_ok=True)
        num_frames = write_labels(folder / "labels.npy", store, labels)
        self._say(num_frames)
        if num_frames == 0:
            raise StageError(
                f"no utterance of {self._name} could be aligned; see the WARNING lines "
                "above. Most often words and sound do not belong together, or "
                "`align.retry_beam` is too small"
            )
        return self._counts

    def _found(
        self, stored: Iterator[Stored], block: int, total: int
    ) -> Iterator["_Found"]:
        with tqdm(desc=f"{self._name} labels", total=total, unit="utt") as bar:
            while some := list(itertools.islice(stored, block)):
                utterances = [_to_align(stored, self._lexicon) for stored in some]
                for index, result in align(utterances, *self._search):
                    bar.update()
                    yield _Found(some[index][0], result.states, result.failure)

    def _noted(self, found: Iterator["_Found"]) -> Iterator[tuple[str, np.ndarray]]:
        """Utterances and labels; those without are noted with the reason."""
        for spoken, states, failure in found:
            if states is None:
                where = f"{spoken.source}: {failure}"
                self._skipped.add("not aligned", where, spoken.duration_s)
            else:
                self._counts += np.bincount(states, minlength=len(self._counts))
                yield spoken.id, states

    def _say(self, num_frames: int) -> None:
        is_silence = self._topology.phone_of_state == 0
        silence = self._counts[is_silence].sum() / max(1, num_frames)
        name = self._name
        print(f"  {name}: {num_frames} frames labelled, {silence:.0%} of them silence")
        for line in self._skipped.report():
            print(f"  WARNING: {name}: {line}", flush=True)
