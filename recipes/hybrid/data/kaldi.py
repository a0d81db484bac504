"""The experiment of Kaldi that takes the place of alignments and graph."""

from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.kaldi.experiment import (
    Experiment,
    check_experiment,
    find_experiment,
)
from lightning_adpsgd.asr.kaldi.model import Transitions
from lightning_adpsgd.asr.kaldi.names import Names, read_spans
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError


def find_kaldi(settings: Settings) -> tuple[Experiment, Transitions]:
    """The experiment and its transitions, if all files are there and fit together.

    Raises:
        StageError: They are not; the message names everything that is missing.
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
        raise StageError(f"kaldi.arpa: {chosen.arpa} is not a file; unpack the model")
    print(
        f"  Kaldi: {found.model}, {transitions.num_pdfs} pdfs, "
        f"{transitions.num_ids} transition-ids; {len(found.alignments)} files of "
        f"alignments; {found.graph / 'HCLG.fst'}",
        flush=True,
    )
    return found, transitions


def names_of(settings: Settings, store: FrameStore) -> Names:
    """What Kaldi calls the utterances of a store, with the help of `kaldi.data`.

    Raises:
        KaldiError: A data directory cannot be read.
    """
    folders = map(read_spans, settings.kaldi.data)
    return Names(
        store.ids, {name: span for spans in folders for name, span in spans.items()}
    )
