"""Stages `check`, `prepare`, `lexicon` for data directories of Kaldi's.

`CORPUS/train` is trained on, `CORPUS/test` is tested, `CORPUS/dev` is `dev` if it is
there; otherwise the last speakers of the training are held out.
"""

import functools
from pathlib import Path

from lightning_adpsgd.asr.corpora.corpus import Skipped, Utterance
from lightning_adpsgd.asr.kaldi.data import read_data
from lightning_adpsgd.asr.kaldi.errors import KaldiError
from lightning_adpsgd.asr.sound.channels import read_facts
from lightning_adpsgd.files import write_json
from recipes.hybrid.data.discs import REPORT
from recipes.hybrid.data.kaldi import find_kaldi
from recipes.hybrid.data.selection import distinct, hold_out
from recipes.hybrid.data.splits import say_splits, write_splits
from recipes.hybrid.pipeline.runner import StageError, say
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.stages.lexicon import complete_lexicon

Splits = dict[str, list[Utterance]]


def check(settings: Settings, output: Path) -> None:
    """Report the hours of each directory, and what cannot be used.

    Raises:
        StageError: A file is missing or damaged, of the data or of the experiment.
    """
    if settings.uses_kaldi:
        find_kaldi(settings)
    skipped = Skipped()
    lines = [
        f"{settings.corpus / split}: {len(spoken)} utterances, "
        f"{sum(one.duration_s for one in spoken) / 3600:.2f} h"
        for split, spoken in _splits(settings, skipped).items()
    ]
    lines += [f"WARNING: left out: {line}" for line in skipped.report()]
    say(lines)
    write_json(output / REPORT, {"report": lines})


def prepare(settings: Settings, output: Path) -> None:
    """Write one list of utterances per split.

    Raises:
        StageError: No usable utterance, or too few speakers to hold some out.
    """
    skipped = Skipped()
    splits = _splits(settings, skipped)
    if "dev" not in splits:
        train, dev = hold_out(splits["train"], settings.prepare)
        splits = {**splits, "train": train, "dev": dev}
    write_splits(output, splits)
    say_splits(output, splits, skipped)


def lexicon(settings: Settings, output: Path) -> None:
    """Write the words of the training with pronunciations.

    They come from `lexicon.cmudict`, by default `CORPUS/local/dict/lexicon.txt`.

    Raises:
        StageError: The dictionary holds nothing.
    """
    default = settings.corpus / "local" / "dict" / "lexicon.txt"
    path = default if default.exists() else None
    complete_lexicon(settings, output, {}, Skipped(), default=path)


def _splits(settings: Settings, skipped: Skipped) -> Splits:
    names = ["train", *(n for n in ("dev", "test") if _is_there(settings, n))]
    facts_of = functools.cache(read_facts)
    bounds = settings.prepare.clip_s, settings.prepare.min_utterance_s
    try:
        found = {
            name: read_data(settings.corpus / name, facts_of, skipped, *bounds)
            for name in names
        }
    except KaldiError as error:
        raise StageError(f"--corpus: {error}") from error
    return {name: [*distinct(spoken, skipped)] for name, spoken in found.items()}


def _is_there(settings: Settings, name: str) -> bool:
    return (settings.corpus / name / "text").exists()
