"""Stage `baseline`: words and errors of the mixtures that made the alignment."""

from pathlib import Path

from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.recognition.recognise import recognise
from recipes.hybrid.recognition.scorers import mixtures
from recipes.hybrid.recognition.scoring import score_decoded


def baseline(settings: Settings, output: Path) -> None:
    """Recognises and scores with the Gaussian mixtures that made the alignment."""
    scorer = mixtures(settings.directory("mixtures"))
    scales = settings.decode.gmm_acoustic_scales
    recognise(settings, output, scorer, scales, labels="mixtures")
    if settings.crew.leads:
        score_decoded(settings, output, output, f"{settings.states} GMM")
