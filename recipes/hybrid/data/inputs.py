"""The inputs of a stored utterance: its frames and its streams."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_adpsgd.asr.corpora.corpus import Utterance, read_utterances
from lightning_adpsgd.asr.frames.store import FrameStore
from lightning_adpsgd.asr.frames.streams import Streams
from recipes.hybrid.pipeline.settings import Settings


class Inputs(NamedTuple):
    """The inputs of one utterance; a missing stream has 0 dims.

    Attributes:
        log_mel: log-mel frames, [time, mel].
        fmllr: fMLLR frames, [time, dims].
        ivectors: i-vectors, [time, dims].
    """

    log_mel: Tensor
    fmllr: Tensor
    ivectors: Tensor

    @classmethod
    def of(cls, log_mel: np.ndarray) -> "Inputs":
        """Frames without streams."""
        none = torch.zeros(len(log_mel), 0)
        return cls(torch.from_numpy(log_mel), none, none)


class StoredInputs:
    """The inputs of a split, by the positions of its utterances.

    Args:
        settings: settings that name the folders and the streams.
        split: "train", "dev" or a test set.
        labels: file of the frames' labels, or None.
        adapted: whether streams are read, if there are any.
    """

    def __init__(
        self,
        settings: Settings,
        split: str,
        labels: Path | None = None,
        adapted: bool = True,
    ) -> None:
        self.store = FrameStore(settings.directory("features") / split, labels)
        folder = settings.streams if adapted else None
        self._streams = None if folder is None else Streams(folder / split, self.store)

    def __call__(self, position: int) -> Inputs:
        """The inputs of one utterance."""
        frames = self.store.frames(position)
        if self._streams is None:
            return Inputs.of(frames.numpy())
        return Inputs(frames, *self._streams.utterance(position))


Load = Callable[[], Inputs]
"""Reads the inputs of one utterance, in the process that needs them."""


def spoken_inputs(settings: Settings, split: str) -> list[tuple[Utterance, Load]]:
    """The utterances of a split that have frames, each with a reader of its inputs."""
    inputs = StoredInputs(settings, split)
    utterances = read_utterances(settings.directory("prepare") / f"{split}.jsonl")
    return [
        (utterance, partial(inputs, inputs.store.position(utterance.id)))
        for utterance in utterances
        if utterance.id in inputs.store
    ]
