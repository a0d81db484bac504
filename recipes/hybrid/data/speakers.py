"""Conversation sides as speakers, with frames in the form of the mixtures' input.

A side is the unit of adaptation: a speaker's statistics come from all utterances of one
side, and apply to all of them. Copies of a training side at another speed form a
separate side.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_adpsgd.asr.frames.front_end import FrontEnd
from lightning_adpsgd.asr.frames.store import FrameStore
from recipes.hybrid.data.splits import with_copies
from recipes.hybrid.pipeline.settings import Settings


class Speaker(NamedTuple):
    """One conversation side.

    Attributes:
        name: recording and channel, and the speed of copies.
        positions: positions of its utterances in the store, in the order of time.
    """

    name: str
    positions: list[int]


class Speakers(NamedTuple):
    """All sides of one split.

    Attributes:
        store: log-mel frames of all sides.
        sides: sides in the order of their first utterances.
        front_end: transform from log-mel frames to what the mixtures see.
    """

    store: FrameStore
    sides: list[Speaker]
    front_end: FrontEnd

    @classmethod
    def of(cls, settings: Settings, split: str, labels: Path | None) -> "Speakers":
        """The sides of a split that have frames."""
        store = FrameStore(settings.directory("features") / split, labels)
        spoken: dict[str, list[tuple[float, int]]] = {}
        for utterance in with_copies(settings, split):
            if utterance.id in store:
                begin = utterance.start_s, store.position(utterance.id)
                spoken.setdefault(utterance.side, []).append(begin)
        sides = [
            Speaker(name, [position for _, position in sorted(begins)])
            for name, begins in spoken.items()
        ]
        front_end = FrontEnd.load(settings.directory("mixtures") / "front_end.npz")
        return cls(store, sides, front_end)

    def log_mel(self, position: int) -> np.ndarray:
        """The frames of an utterance, [time, mel]."""
        return self.store.frames(position).numpy()

    def frames(self, position: int) -> np.ndarray:
        """The frames of an utterance as the mixtures see them, [time, dims]."""
        return self.front_end(self.log_mel(position))

    @property
    def lengths(self) -> np.ndarray:
        """Frames of each utterance of the store, int64 [utterances]."""
        spans = np.asarray(self.store.spans)
        return spans[:, 1] - spans[:, 0]
