"""Stage `kaldi`: the labels of an experiment that Kaldi has prepared.

It takes the place of the alignments and leaves `transitions.npz` (what each
transition-id stands for), `states.json` (the pdfs and how often each occurs), and
`train/labels.npy` and `dev/labels.npy` from Kaldi's alignments.
"""

from pathlib import Path

from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.kaldi.alignments import Imported, import_labels
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.experiment import Experiment
from lightning_adpsgd.asr.kaldi.model import Transitions
from lightning_adpsgd.files import write_json
from recipes.hybrid.data.kaldi import find_kaldi, names_of
from recipes.hybrid.data.labels import ALIGNED_SPLITS
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError


def kaldi(settings: Settings, output: Path) -> None:
    """Takes the labels of every frame from Kaldi's alignments.

    Raises:
        StageError: Files are missing or damaged, or do not fit the utterances.
    """
    found, transitions = find_kaldi(settings)
    try:
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
        imported = import_labels(
            found.alignments,
            transitions,
            store,
            path,
            names=names_of(settings, store),
            least_coverage=settings.kaldi.least_coverage,
        )
    except KaldiError as error:
        remedy = "kaldi.more_alignments=DIR names folders with further alignments"
        raise KaldiError(f"{split}: {error}; {remedy}") from error
    print(f"  {split}: {imported.num_labelled} frames labelled, {imported.coverage}")
    for line in imported.skipped.report():
        print(f"  WARNING: {split}: {line}", flush=True)
    return imported
