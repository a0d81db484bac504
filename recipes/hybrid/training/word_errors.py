"""The word error rate of a few held-out utterances, while training goes on."""

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.monitor import HeldOut, WordErrorMonitor
from lightning_adpsgd.asr.search.decoding import Search
from recipes.hybrid.data.inputs import Inputs, evenly, spoken_inputs
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.recognition.decoder import make_decoder
from recipes.hybrid.recognition.scoring import read_rules

NAME = "wer"


def word_error_monitor(settings: Settings) -> WordErrorMonitor | None:
    """Decodes `train.wer_utterances` of `dev` after each validation; none if 0."""
    most = settings.train.wer_utterances
    if most == 0:
        return None
    spoken = [pair for pair in spoken_inputs(settings, "dev") if pair[0].words]
    inputs = [(one, load()) for one, load in evenly(spoken, most)]
    return WordErrorMonitor(
        {one.id: HeldOut(_as_one(found), one.words) for one, found in inputs},
        _Decode(settings),
        log_likelihoods=_Listen(inputs[0][1]),
        glm=read_rules(settings),
        name=NAME,
    )


def _as_one(inputs: Inputs) -> Tensor:
    """Frames and streams side by side, as the monitor takes them."""
    return torch.cat([part.float() for part in inputs], dim=1)


class _Listen:
    """Log-likelihoods of frames and streams that stand side by side."""

    def __init__(self, like: Inputs) -> None:
        self._dims = [part.shape[1] for part in like]

    def __call__(self, module: LightningModule, frames: Tensor) -> Tensor:
        assert isinstance(module, AcousticModel)
        return module.log_likelihoods(*frames.split(self._dims, dim=1))


class _Decode:
    """Words of log-likelihoods; reads the graph where it is first called.

    That is in the process that decodes: learners have no use for a graph.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._decoder = settings, list[Search]()

    def __call__(self, log_likelihoods: np.ndarray) -> tuple[str, ...]:
        if not self._decoder:
            self._decoder.append(make_decoder(self._settings))
        scale = self._settings.train.wer_scale
        return self._decoder[0].decode(log_likelihoods, scale).text
