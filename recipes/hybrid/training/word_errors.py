"""The word error rate of a few held-out utterances, while training continues."""

from itertools import accumulate

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_adpsgd.asr.corpora.corpus import Utterance
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.monitor import HeldOut, WordErrorMonitor
from lightning_adpsgd.asr.search.alignment import evenly
from lightning_adpsgd.asr.search.decoding import Search
from recipes.hybrid.data.inputs import Inputs, Load, spoken_inputs
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.planning.costs import SEARCH, read_costs
from recipes.hybrid.recognition.decoder import make_decoder
from recipes.hybrid.recognition.scoring import read_rules

NAME = "wer"
MOST_SECONDS = 120.0


def word_error_monitor(settings: Settings) -> WordErrorMonitor | None:
    """Decodes `train.wer_utterances` of `dev` after each validation; none if 0."""
    most = settings.train.wer_utterances
    if most == 0:
        return None
    inputs = [(one, load()) for one, load in chosen(settings, most)]
    return WordErrorMonitor(
        {one.id: HeldOut(_as_one(found), one.words) for one, found in inputs},
        _Decode(settings),
        log_likelihoods=_Listen(inputs[0][1]),
        glm=read_rules(settings),
        name=NAME,
    )


def chosen(settings: Settings, most: int) -> list[tuple[Utterance, Load]]:
    """Utterances of `dev`, the same for every run, of at most `MOST_SECONDS` together.

    One at least is taken, however long it is.
    """
    spoken = [pair for pair in spoken_inputs(settings, "dev") if pair[0].words]
    some = evenly(spoken, most)
    ends = accumulate(one.duration_s for one, _ in some)
    fit = sum(end <= MOST_SECONDS for end in ends)
    return some[: max(1, fit)]


def announced(settings: Settings) -> str:
    """What recognising them will cost, for the screen."""
    spoken = chosen(settings, settings.train.wer_utterances)
    seconds = sum(one.duration_s for one, _ in spoken)
    costs, _ = read_costs()
    core = 100 * seconds / costs[SEARCH].per_second
    return (
        f"WER after each validation: {len(spoken)} utterances of dev, {seconds:.0f} s "
        f"of speech, at low priority beside the training; about {core:.0f} s of one "
        "core each time with the papers' graph, less with a small one"
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
