"""The discs of an experiment, and which of their recordings can be used."""

import json
from pathlib import Path

from lightning_adpsgd.asr.corpora.corpus import CorpusError, Skipped
from lightning_adpsgd.asr.corpora.sources import TRAINING, Discs, find_discs
from recipes.hybrid.data.inspection import Recording
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import StageError

REPORT = "report.json"


def discs_of(settings: Settings, problems: Skipped) -> Discs:
    """The discs below the folders of the settings.

    Raises:
        StageError: One is not a folder, or a source is unknown or named twice.
    """
    for name in settings.sources:
        if name not in TRAINING:
            known = ", ".join(TRAINING)
            raise StageError(f"`sources` must be of {known}, got {name!r}")
    if len(set(settings.sources)) < len(settings.sources):
        # The second copy would hold what is held out of the first.
        named = ",".join(settings.sources)
        raise StageError(f"`sources` must name each source once, got {named}")
    try:
        return find_discs(settings.roots, problems)
    except CorpusError as error:
        raise StageError(f"--corpus: {error}") from error


def read_recordings(settings: Settings) -> dict[str, Recording]:
    """The usable recordings by stem, as `check` found them."""
    report = json.loads((settings.directory("check") / REPORT).read_text())
    return {
        stem: Recording(Path(path), seconds, num_channels)
        for stem, (path, seconds, num_channels) in report["recordings"].items()
    }
