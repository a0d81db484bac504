"""Stage `score`: the word error rate of a training run, by the rules of Hub5.

Where Weights & Biases is installed, the rates by part, their intervals and every
utterance go into the run of the training too.
"""

from pathlib import Path

from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.recognition.scoring import score_decoded
from recipes.hybrid.training.saving import BEST


def score(settings: Settings, output: Path) -> None:
    """Counts the errors of `settings.run` on every test set; there may be none."""
    decoded = settings.directory("decode")
    score_decoded(settings, decoded, output, settings.run)
    if (decoded / BEST).exists():
        (output / BEST).mkdir(exist_ok=True)
        epoch = "lowest held-out loss"
        score_decoded(settings, decoded / BEST, output / BEST, settings.run, epoch)
    if (output / "score.json").exists():
        _track(settings, output)


def _track(settings: Settings, output: Path) -> None:
    from lightning_adpsgd.callbacks.loggers import is_available
    from recipes.hybrid.training.tracking import log_later
    from recipes.hybrid.training.word_tables import figures_of

    if not is_available():
        return
    try:
        log_later(settings, output, figures_of(settings, output))
    except Exception as error:  # whatever it is, the score is there
        print(f"  WARNING: nothing went to Weights & Biases: {error}", flush=True)
