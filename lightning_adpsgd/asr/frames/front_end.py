"""The input of the Gaussian mixtures, not of the network, from log-mel frames.

It is either cepstra with their slopes, or the cepstra of several adjacent frames,
projected onto the directions that separate the states (`lda`).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_adpsgd.asr.frames.cepstra import cepstra
from lightning_adpsgd.asr.parallel import product
from lightning_adpsgd.files import bytes_written_whole


@dataclass(frozen=True, eq=False)
class FrontEnd:
    """Maps log-mel frames [time, mel] to the mixtures' input [time, dimension].

    Attributes:
        num_cepstra: Number of cepstra per frame.
        reach: Number of frames on each side that are spliced to a frame; used with a
            projection.
        projection: float64 [(2 · reach + 1) · num_cepstra, dimension], or None for the
            cepstra of the frame with their slopes.

    Raises:
        ValueError: `projection` has not one row for each cepstrum of each spliced
            frame.
    """

    num_cepstra: int = 13
    reach: int = 0
    projection: np.ndarray | None = None

    def __post_init__(self) -> None:
        expected = (2 * self.reach + 1) * self.num_cepstra
        if self.projection is not None and len(self.projection) != expected:
            raise ValueError(
                f"`projection` must have {expected} rows, {self.num_cepstra} cepstra "
                f"of {2 * self.reach + 1} frames, got {len(self.projection)}"
            )

    def __call__(self, log_mel: np.ndarray) -> np.ndarray:
        """Maps log-mel frames of any floating type to float32 [time, dimension]."""
        if self.projection is None:
            return cepstra(log_mel, self.num_cepstra)
        beside = spliced(log_mel, self.num_cepstra, self.reach)
        return product(beside, self.projection.astype(np.float32))

    def save(self, path: Path) -> None:
        """Writes an .npz file, whole or not at all."""
        matrix = np.zeros((0, 0)) if self.projection is None else self.projection
        sizes = np.array([self.num_cepstra, self.reach])
        with bytes_written_whole(path) as file:
            np.savez(file, sizes=sizes, projection=matrix)

    @classmethod
    def load(cls, path: Path) -> "FrontEnd":
        """Reads a file of `save`.

        Raises:
            ValueError: The file is missing, truncated or not written by `save`.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                num_cepstra, reach = (int(size) for size in arrays["sizes"])
                matrix = arrays["projection"]
            return cls(num_cepstra, reach, matrix if matrix.size else None)
        except Exception as error:
            raise ValueError(f"{path} is not a front end: {error}") from error


def spliced(log_mel: np.ndarray, num_cepstra: int, reach: int) -> np.ndarray:
    """The cepstra of each frame and of `reach` frames on each side, the ends repeated.

    Returns:
        float32 [time, (2 · reach + 1) · num_cepstra], the earliest frame first.
    """
    static = cepstra(log_mel, num_cepstra)[:, :num_cepstra]
    offsets = np.arange(-reach, reach + 1)
    places = np.clip(np.arange(len(static))[:, None] + offsets, 0, len(static) - 1)
    return static[places].reshape(len(static), -1)
