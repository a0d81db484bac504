"""Conversation sides as speakers: their frames, and what the mixtures see of them.

A side is the unit of adaptation: what is known of a speaker comes from all utterances
of one side, and holds for all of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_adpsgd.asr.cepstra import cepstra
from lightning_adpsgd.asr.corpus import read_utterances
from lightning_adpsgd.asr.store import FrameStore
from recipes.switchboard.feature_stage import sides_of
from recipes.switchboard.settings import Settings

FrontEnd = Callable[[np.ndarray], np.ndarray]
"""From log-mel frames [time, mel] to what the mixtures model, [time, dims]."""


def front_end(settings: Settings) -> FrontEnd:
    """What the mixtures of the alignment see of a frame."""
    return cepstra


class Speaker(NamedTuple):
    """One conversation side.

    Attributes:
        name: Recording and channel.
        positions: Of its utterances in the store, in the order of time.
    """

    name: str
    positions: list[int]


class Speakers(NamedTuple):
    """All sides of one split.

    Attributes:
        store: Their log-mel frames.
        sides: In the order of their first utterances.
        front_end: What the mixtures see of them.
    """

    store: FrameStore
    sides: list[Speaker]
    front_end: FrontEnd

    @classmethod
    def of(cls, settings: Settings, split: str, labels: Path | None) -> "Speakers":
        """The sides of a split that have frames."""
        store = FrameStore(settings.directory("features") / split, labels)
        path = settings.directory("prepare") / f"{split}.jsonl"
        spoken = [u for u in read_utterances(path) if u.id in store]
        sides = [
            Speaker(
                side.name,
                [
                    store.position(utterance.id)
                    for utterance in sorted(side.spoken, key=lambda u: u.start_s)
                ],
            )
            for side in sides_of(spoken)
        ]
        return cls(store, sides, front_end(settings))

    def log_mel(self, position: int) -> np.ndarray:
        """The frames of an utterance, [time, mel]."""
        return self.store.frames(position).numpy()

    def frames(self, position: int) -> np.ndarray:
        """What the mixtures see of an utterance, [time, dims]."""
        return self.front_end(self.log_mel(position))

    @property
    def lengths(self) -> np.ndarray:
        """Frames of each utterance of the store, int64 [utterances]."""
        spans = np.asarray(self.store.spans)
        return spans[:, 1] - spans[:, 0]
