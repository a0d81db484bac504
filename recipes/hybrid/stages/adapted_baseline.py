"""Stage `adapted_baseline`: words and errors of the mixtures behind fMLLR."""

from pathlib import Path

from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.recognition.recognise import recognise
from recipes.hybrid.recognition.scorers import adapted_mixtures
from recipes.hybrid.recognition.scoring import score_decoded


def adapted_baseline(settings: Settings, output: Path) -> None:
    """Recognises and scores with mixtures and frames adapted to the speakers."""
    scorer = adapted_mixtures(settings.directory("streams") / "mixtures.npz")
    scales = settings.decode.gmm_acoustic_scales
    recognise(settings, output, scorer, scales, labels="mixtures")
    if settings.crew.leads:
        score_decoded(settings, output, output, f"{settings.states} GMM, fMLLR")
