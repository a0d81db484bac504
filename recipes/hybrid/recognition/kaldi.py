"""Recognition with Kaldi's graph, and log-likelihoods for Kaldi's decoders."""

from collections.abc import Iterable

import numpy as np

from lightning_adpsgd.asr.kaldi import graph as graphs
from lightning_adpsgd.asr.kaldi.decoding import KaldiDecoder
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.export import latgen_command, write_likelihoods
from lightning_adpsgd.asr.kaldi.language import read_boundaries, read_words
from lightning_adpsgd.asr.kaldi.model import Transitions
from lightning_adpsgd.asr.search.decoding import SearchOptions
from lightning_adpsgd.files import written_whole
from recipes.hybrid.data.kaldi import find_kaldi
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.recognition.searching import Task


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
    task: Task,
    split: str,
    utterances: Iterable[tuple[str, np.ndarray]],
    acoustic_scale: float,
) -> None:
    """Writes log-likelihoods for Kaldi and says with which command it decodes them.

    Raises:
        StageError: They do not fit the model.
    """
    settings = task.settings
    found, transitions = find_kaldi(settings)
    task.folder.mkdir(exist_ok=True)
    # Kaldi's table names the archive, which lies elsewhere once the stage is finished.
    archive = task.folder / f"{split}.loglikes.ark"
    try:
        table = write_likelihoods(archive, utterances, transitions.num_pdfs)
    except KaldiError as error:
        raise StageError(str(error)) from error
    final = (settings.directory("decode") / task.within).resolve()
    text = table.read_text().replace(str(task.folder.resolve()), str(final))
    with written_whole(table) as file:
        file.write(text)
    command = latgen_command(
        found.model.resolve(),
        found.graph.resolve(),
        final / table.name,
        acoustic_scale=acoustic_scale,
        beam=settings.decode.beam,
        max_active=settings.decode.max_active,
    )
    with written_whole(task.folder / f"{split}.latgen.sh") as script:
        script.write(f"#!/bin/sh\n{command}\n")
    print(f"  {split}, for Kaldi:\n{command}", flush=True)
