"""Stages `kaldi` and `graph` of an experiment that Kaldi has prepared.

`kaldi` takes the place of the alignments: it leaves `transitions.npz` (what each
transition-id stands for), `states.json` (the pdfs and how often each occurs), and
`train/labels.npy` and `dev/labels.npy` from Kaldi's alignments. `graph` leaves Kaldi's
search graph over pdfs, `HCLG.fst` and `pairs.npy`, its `words.txt` and its `phones`.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.kaldi import graph as graphs
from lightning_adpsgd.asr.kaldi.alignments import Imported, import_labels
from lightning_adpsgd.asr.kaldi.decoding import KaldiDecoder
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.experiment import (
    Experiment,
    check_experiment,
    find_experiment,
)
from lightning_adpsgd.asr.kaldi.export import latgen_command, write_likelihoods
from lightning_adpsgd.asr.kaldi.language import read_boundaries, read_words
from lightning_adpsgd.asr.kaldi.model import Transitions
from lightning_adpsgd.asr.search.decoding import SearchOptions
from lightning_adpsgd.files import write_json
from recipes.switchboard.labels import ALIGNED_SPLITS
from recipes.switchboard.pipeline import StageError
from recipes.switchboard.settings import Settings


def check(settings: Settings) -> Experiment:
    """Looks whether all files of the experiment are there and belong together.

    Raises:
        StageError: They are not; everything that is missing is named.
    """
    chosen = settings.kaldi
    try:
        found = find_experiment(
            chosen.folder, chosen.graph, tuple(chosen.more_alignments)
        )
        transitions = check_experiment(found)
    except (KaldiError, OSError) as error:
        raise StageError(f"kaldi.experiment: {error}") from error
    if chosen.arpa is not None and not chosen.arpa.is_file():
        raise StageError(f"kaldi.arpa: {chosen.arpa} is no file; unpack the model")
    print(
        f"  Kaldi: {found.model}, {transitions.num_pdfs} pdfs, "
        f"{transitions.num_ids} transition-ids; {len(found.alignments)} files of "
        f"alignments; {found.graph / 'HCLG.fst'}",
        flush=True,
    )
    return found


def labels(settings: Settings, output: Path) -> None:
    """Takes the labels of every frame from Kaldi's alignments.

    Raises:
        StageError: Files are missing or damaged, or do not fit the utterances.
    """
    found = check(settings)
    try:
        transitions = check_experiment(found)
        imported = {
            split: _import(settings, output, split, found, transitions)
            for split in ALIGNED_SPLITS
        }
    except (KaldiError, OSError) as error:
        raise StageError(str(error)) from error
    transitions.save(output / "transitions.npz")
    states = {
        "num_states": transitions.num_pdfs,
        "names": [f"pdf{pdf}" for pdf in range(transitions.num_pdfs)],
        "counts": imported["train"].counts.tolist(),
    }
    write_json(output / "states.json", states)


def _import(
    settings: Settings,
    output: Path,
    split: str,
    found: Experiment,
    transitions: Transitions,
) -> Imported:
    (output / split).mkdir(exist_ok=True)
    store = FrameStore(settings.directory("features") / split)
    path = output / split / "labels.npy"
    try:
        imported = import_labels(found.alignments, transitions, store, path)
    except KaldiError as error:
        remedy = "kaldi.more_alignments=DIR names folders with further alignments"
        raise KaldiError(f"{split}: {error}; {remedy}") from error
    print(f"  {split}: {imported.num_labelled} frames labelled")
    for line in imported.skipped.report():
        print(f"  WARNING: {split}: {line}", flush=True)
    return imported


def graph(settings: Settings, output: Path) -> None:
    """Reads Kaldi's search graph as one over pdfs.

    Raises:
        StageError: It is damaged, or does not belong to the model.
    """
    folder = check(settings).graph
    transitions = Transitions.load(settings.directory("mixtures") / "transitions.npz")
    try:
        hclg = graphs.read_hclg(folder / "HCLG.fst")
        over_pdfs = graphs.over_pdfs(hclg, transitions, folder / "HCLG.fst")
    except (KaldiError, ValueError) as error:
        raise StageError(str(error)) from error
    graphs.save(over_pdfs, output)
    shutil.copyfile(folder / "words.txt", output / "words.txt")
    (output / "phones").mkdir(exist_ok=True)
    for name in ("word_boundary.int", "align_lexicon.int"):
        if (folder / "phones" / name).exists():
            shutil.copyfile(folder / "phones" / name, output / "phones" / name)
    print(f"  {over_pdfs.fst.num_states} states", flush=True)


def decoder(settings: Settings, options: SearchOptions) -> KaldiDecoder:
    """The search through the graph that stage `graph` left."""
    folder = settings.directory("graph")
    return KaldiDecoder(
        graphs.load(folder),
        Transitions.load(settings.directory("mixtures") / "transitions.npz"),
        read_words(folder / "words.txt"),
        read_boundaries(folder / "phones"),
        options,
    )


def export(
    settings: Settings,
    output: Path,
    split: str,
    utterances: Iterable[tuple[str, np.ndarray]],
    acoustic_scale: float,
) -> None:
    """Writes log-likelihoods for Kaldi and says with which command it decodes them.

    Raises:
        StageError: They do not fit the model.
    """
    found = check(settings)
    transitions = Transitions.load(settings.directory("mixtures") / "transitions.npz")
    # Kaldi's table names the archive, which lies elsewhere once the stage is finished.
    archive = output / f"{split}.loglikes.ark"
    try:
        table = write_likelihoods(archive, utterances, transitions.num_pdfs)
    except KaldiError as error:
        raise StageError(str(error)) from error
    final = settings.directory("decode").resolve()
    text = table.read_text().replace(str(output.resolve()), str(final))
    table.write_text(text)
    command = latgen_command(
        found.model.resolve(),
        found.graph.resolve(),
        final / table.name,
        acoustic_scale=acoustic_scale,
        beam=settings.decode.beam,
        max_active=settings.decode.max_active,
    )
    (output / f"{split}.latgen.sh").write_text(f"#!/bin/sh\n{command}\n")
    print(f"  {split}, for Kaldi:\n{command}", flush=True)
