"""Scorers: the log-likelihoods of an utterance from a network or Gaussian mixtures."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from lightning_adpsgd.asr.frames.front_end import FrontEnd
from lightning_adpsgd.asr.hmm.gmm import GaussianMixtures
from lightning_adpsgd.asr.model import AcousticModel
from recipes.hybrid.data.inputs import Inputs
from recipes.hybrid.pipeline.stage import StageError

Scorer = Callable[[Inputs], np.ndarray]
"""Maps the inputs of an utterance to log-likelihoods [time, num_states]."""


def mixtures(folder: Path) -> Scorer:
    """A scorer with the mixtures that a stage left in `folder`."""
    scorer = GaussianMixtures.load(folder / "gmm.npz").scorer()
    front_end = FrontEnd.load(folder / "front_end.npz")
    return lambda inputs: scorer(front_end(inputs.log_mel.numpy()))


def adapted_mixtures(path: Path) -> Scorer:
    """A scorer with the mixtures over fMLLR frames."""
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


class NetworkScorer:
    """A scorer with a trained network, on the network's device.

    Args:
        model: Trained network.
        device: "cpu" or "cuda". On a GPU its layers compute in bfloat16.
    """

    def __init__(self, model: AcousticModel, device: str = "cpu") -> None:
        self._model = model.to(device).eval()
        self._device = torch.device(device)

    @property
    def needs_this_process(self) -> bool:
        """Whether forked processes cannot score, as a GPU belongs to one process."""
        return self._device.type != "cpu"

    def __call__(self, inputs: Inputs) -> np.ndarray:
        """Log-likelihoods [time, num_states] of an utterance."""
        there = (part.to(self._device) for part in inputs)
        is_gpu = self._device.type != "cpu"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=is_gpu):
            return self._model.log_likelihoods(*there).cpu().numpy()


def network(path: Path) -> NetworkScorer:
    """A scorer with a trained network, on a GPU if there is one.

    Raises:
        StageError: There is no network at `path`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return NetworkScorer(read_network(path), device)
