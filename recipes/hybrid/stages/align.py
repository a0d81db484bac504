"""Stage `align`: the HMM state of every frame, from a flat start.

It leaves the monophones' mixtures (`gmm.npz`), their front end (`front_end.npz`), the
states and labels (see `data/labels.py`), and `log.json`.
"""

from pathlib import Path

from lightning_adpsgd.asr.frames.front_end import FrontEnd
from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.hmm.states import Topology
from lightning_adpsgd.asr.language.lexicon import read_lexicon
from lightning_adpsgd.asr.search.alignment import mixture_scorer, train_mixtures
from lightning_adpsgd.asr.search.graphs import TrainingGraphs
from recipes.hybrid.data.labels import (
    alignment_options,
    await_training,
    label_splits,
    log_training,
    training_utterances,
)
from recipes.hybrid.pipeline.settings import Settings


def align(settings: Settings, output: Path) -> None:
    """Trains monophone Gaussian mixtures from a flat start and labels every frame.

    Interrupted after the training, it continues with the labels.

    Raises:
        StageError: No utterance can be aligned.
    """
    lexicon = read_lexicon(settings.directory("lexicon"))
    chosen = settings.align
    graphs = TrainingGraphs(lexicon, Topology.of(lexicon), chosen.silence_probability)
    options = alignment_options(
        settings,
        num_iterations=chosen.num_iterations,
        num_gaussians=chosen.num_gaussians,
    )
    if not settings.crew.leads:
        await_training(settings, output)
    elif not (output / "gmm.npz").exists():
        steps = train_mixtures(training_utterances(settings, lexicon), graphs, options)
        FrontEnd().save(output / "front_end.npz")
        log_training(output, steps, options.num_iterations + 1)
    scorer = mixture_scorer(
        GaussianMixtures.load(output / "gmm.npz"),
        FrontEnd.load(output / "front_end.npz"),
    )
    label_splits(settings, output, lexicon, graphs, scorer, options)
