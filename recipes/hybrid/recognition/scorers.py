"""The log-likelihoods of an utterance, by a network or by Gaussian mixtures."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from lightning_adpsgd.asr.frames.front_end import FrontEnd
from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.model import AcousticModel
from recipes.hybrid.data.inputs import Inputs
from recipes.hybrid.pipeline.runner import StageError

Scorer = Callable[[Inputs], np.ndarray]
"""Maps the inputs of an utterance to log-likelihoods [time, num_states]."""


def mixtures(folder: Path) -> Scorer:
    """The log-likelihoods of the mixtures that a stage left in `folder`."""
    scorer = GaussianMixtures.load(folder / "gmm.npz").scorer()
    front_end = FrontEnd.load(folder / "front_end.npz")
    return lambda inputs: scorer(front_end(inputs.log_mel.numpy()))


def adapted_mixtures(path: Path) -> Scorer:
    """The log-likelihoods of the mixtures behind fMLLR, from its frames."""
    scorer = GaussianMixtures.load(path).scorer()
    return lambda inputs: scorer(inputs.fmllr.float().numpy())


def read_network(path: Path) -> AcousticModel:
    """A trained network, ready for inference.

    Raises:
        StageError: There is no network at `path`.
    """
    try:
        model = AcousticModel.load_from_checkpoint(path, map_location="cpu")
    except FileNotFoundError as error:
        raise StageError(f"{path} does not exist; train first") from error
    return model.eval()


def network(path: Path) -> Scorer:
    """The log-likelihoods of a trained network.

    Raises:
        StageError: There is no network at `path`.
    """
    model = read_network(path)

    def log_likelihoods(inputs: Inputs) -> np.ndarray:
        return model.log_likelihoods(*inputs).numpy()

    return log_likelihoods
