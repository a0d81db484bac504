"""Stage `realign`: labels from the network of an earlier training run.

The states and their graph stay; only which frame belongs to which state is found anew,
with what the network of `realign.run` says in place of the mixtures. That run must be
one without streams.
"""

from pathlib import Path

import numpy as np

from lightning_adpsgd.asr.graphs import TrainingGraphs
from lightning_adpsgd.asr.lexicon import read_lexicon
from lightning_adpsgd.asr.states import read_topology
from recipes.switchboard.decode_stages import network
from recipes.switchboard.inputs import Inputs
from recipes.switchboard.labels import alignment_options, label_splits
from recipes.switchboard.settings import Settings


def realign(settings: Settings, output: Path) -> None:
    """Labels every frame by a trained network.

    Raises:
        StageError: There is no such network, or no utterance can be aligned.
    """
    lexicon = read_lexicon(settings.directory("lexicon"))
    topology = read_topology(settings.directory("mixtures") / "tree.json")
    log_likelihoods = network(settings.directory("aligner") / "model.ckpt")

    def scorer(log_mel: np.ndarray, states: np.ndarray) -> np.ndarray:
        return log_likelihoods(Inputs.of(log_mel))[:, states]

    graphs = TrainingGraphs(lexicon, topology, settings.align.silence_probability)
    scale = settings.realign.acoustic_scale
    options = alignment_options(settings, acoustic_scale=scale)
    label_splits(settings, output, lexicon, graphs, scorer, options)
