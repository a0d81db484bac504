"""Stage `score`: the word error rate of a training run, by the rules of Hub5."""

from pathlib import Path

from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.recognition.scoring import score_decoded


def score(settings: Settings, output: Path) -> None:
    """Counts the errors of `settings.run` on every test set."""
    score_decoded(settings, settings.directory("decode"), output, settings.run)
