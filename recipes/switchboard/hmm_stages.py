"""Stages `align` and `graph`: what stands between frames and words.

`align` leaves `gmm.npz`, `states.json` (numbering of the HMM states and how often each
occurs in training), `train/labels.npy` and `dev/labels.npy` beside the stored frames,
and `log.json`. `graph` leaves `HCLG.fst` and `words.txt`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lightning_adpsgd.asr.alignment import (
    AlignmentOptions,
    AlignmentStep,
    AlignmentUtterance,
    train_mixtures,
)
from lightning_adpsgd.asr.alignment import (
    align as align_utterances,
)
from lightning_adpsgd.asr.corpus import Skipped, Utterance, read_utterances
from lightning_adpsgd.asr.decoding import write_graph
from lightning_adpsgd.asr.gmm import GaussianMixtures
from lightning_adpsgd.asr.graphs import (
    Topology,
    TrainingGraphs,
    decoding_graph,
    symbols_of,
)
from lightning_adpsgd.asr.lexicon import Lexicon, read_lexicon
from lightning_adpsgd.asr.store import FrameStore, write_labels
from lightning_adpsgd.files import write_json
from recipes.switchboard.pipeline import StageError
from recipes.switchboard.settings import Settings

ALIGNED_SPLITS = ("train", "dev")


def stored_utterances(
    settings: Settings, split: str
) -> list[tuple[Utterance, np.ndarray]]:
    """The utterances of a split that have frames, each with a view of them."""
    store = FrameStore(settings.directory("features") / split)
    utterances = read_utterances(settings.directory("prepare") / f"{split}.jsonl")
    return [
        (utterance, store.frames(store.position(utterance.id)).numpy())
        for utterance in utterances
        if utterance.id in store
    ]


def align(settings: Settings, output: Path) -> None:
    """Trains monophone Gaussian mixtures from a flat start and labels every frame.

    Interrupted after the training, it goes on with the labels.

    Raises:
        StageError: No utterance can be aligned.
    """
    lexicon = read_lexicon(settings.directory("lexicon"))
    topology = Topology.of(lexicon)
    chosen = settings.align
    graphs = TrainingGraphs(lexicon, topology, chosen.silence_probability)
    options = AlignmentOptions(
        num_iterations=chosen.num_iterations,
        num_gaussians=chosen.num_gaussians,
        acoustic_scale=chosen.acoustic_scale,
        beam=chosen.beam,
        retry_beam=chosen.retry_beam,
        max_training_utterances=chosen.max_training_utterances,
        num_processes=settings.cores,
        seed=settings.seed,
    )
    if not (output / "gmm.npz").exists():
        _train(settings, output, lexicon, graphs, options)
    mixtures = GaussianMixtures.load(output / "gmm.npz")
    counts = {
        split: _label(settings, output, split, lexicon, graphs, mixtures, options)
        for split in ALIGNED_SPLITS
    }
    write_json(output / "states.json", _describe_states(topology, counts["train"]))


def _to_align(
    settings: Settings, split: str, lexicon: Lexicon
) -> Iterator[AlignmentUtterance]:
    for utterance, frames in stored_utterances(settings, split):
        words = lexicon.known(utterance.words)
        yield AlignmentUtterance(utterance.id, words, frames)


def _train(
    settings: Settings,
    output: Path,
    lexicon: Lexicon,
    graphs: TrainingGraphs,
    options: AlignmentOptions,
) -> None:
    utterances = list(_to_align(settings, "train", lexicon))
    bar = tqdm(
        train_mixtures(utterances, graphs, options),
        desc="flat start",
        total=options.num_iterations + 1,
        unit="iteration",
    )
    log: list[AlignmentStep] = []
    try:
        for step in bar:
            log.append(step)
            bar.set_postfix_str(_progress(step))
    except ValueError as error:
        raise StageError(f"the flat start failed: {error}") from error
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
    if step.iteration == 0:  # of equal parts, which no model has scored
        return f"equal parts, {step.num_gaussians} Gaussians"
    return (
        f"log-likelihood {step.log_likelihood:.2f} a frame, "
        f"{step.changed:.1%} of frames changed, {step.num_gaussians} Gaussians"
    )


def _label(
    settings: Settings,
    output: Path,
    split: str,
    lexicon: Lexicon,
    graphs: TrainingGraphs,
    mixtures: GaussianMixtures,
    options: AlignmentOptions,
) -> np.ndarray:
    """Writes the labels of a split; returns how often each state occurs."""
    spoken = [utterance for utterance, _ in stored_utterances(settings, split)]
    utterances = list(_to_align(settings, split, lexicon))
    counts = np.zeros(graphs.topology.num_states, np.int64)
    skipped = Skipped()

    def labels() -> Iterator[tuple[str, np.ndarray]]:
        results = align_utterances(utterances, graphs, mixtures, options)
        bar = tqdm(results, desc=f"{split} labels", total=len(utterances), unit="utt")
        for index, result in bar:
            if result.states is None:
                where = f"{spoken[index].source}: {result.failure}"
                skipped.add("not aligned", where, spoken[index].duration_s)
            else:
                counts[:] += np.bincount(result.states, minlength=len(counts))
                yield utterances[index].id, result.states

    (output / split).mkdir(exist_ok=True)
    store = FrameStore(settings.directory("features") / split)
    num_frames = write_labels(output / split / "labels.npy", store, labels())
    _say(split, num_frames, counts, skipped, graphs.topology)
    if num_frames == 0:
        raise StageError(f"no utterance of {split} could be aligned, reasons above")
    return counts


def _say(
    split: str,
    num_frames: int,
    counts: np.ndarray,
    skipped: Skipped,
    topology: Topology,
) -> None:
    silence = counts[: topology.states_per_phone].sum() / max(1, num_frames)
    print(f"  {split}: {num_frames} frames labelled, {silence:.0%} of them silence")
    for line in skipped.report():
        print(f"  WARNING: {split}: {line}", flush=True)


def _describe_states(topology: Topology, counts: np.ndarray) -> dict[str, Any]:
    return {
        "num_states": topology.num_states,
        "states_per_phone": topology.states_per_phone,
        "phones": list(topology.phones),
        "names": list(topology.state_names),
        "counts": counts.tolist(),
    }


def graph(settings: Settings, output: Path) -> None:
    """Composes HMM states, pronunciations and n-grams into one search graph.

    Raises:
        StageError: The language model or the lexicon cannot be used.
    """
    lexicon = read_lexicon(settings.directory("lexicon"))
    topology = Topology.of(lexicon)
    try:
        hclg = decoding_graph(
            lexicon,
            topology,
            settings.directory("lm") / "lm.arpa",
            silence_probability=settings.graph.silence_probability,
        )
    except (ValueError, OSError) as error:
        raise StageError(str(error)) from error
    words = symbols_of(lexicon, topology).words
    table = "".join(f"{word} {label}\n" for word, label in words.items())
    (output / "words.txt").write_text(table, encoding="utf-8")
    write_graph(hclg, output / "HCLG.fst")
    print(f"  {hclg.num_states} states", flush=True)
