"""The report of a run on a virtual cluster: a curve and counters."""

import csv
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from lightning_adpsgd.files import written_whole
from lightning_adpsgd.mixing.statistics import Statistics


@dataclass(frozen=True)
class Point:
    """The state of a run at one moment.

    Attributes:
        samples: number of samples that all learners together have seen.
        steps: number of optimizer steps, mean over the super-learners.
        seconds: simulated time.
        loss: mean training loss over all steps since the last point; NaN at the start.
        held_out_loss: score of the consensus model from `evaluate`; NaN without it.
        consensus_distance: ``sqrt(mean_i |w_i - mean w|^2)``.
        relative_distance: `consensus_distance` over ``|mean w|``.
        local_min: smallest score by `evaluate` of a super-learner's own weights; NaN
            without `local_losses`, as are `local_mean` and `local_max`.
        learning_rate: learning rate of the last step, in the first parameter group.
        wall_seconds: real seconds since `fit` began; `==` ignores it, because it alone
            differs from run to run.
    """

    samples: int
    steps: float
    seconds: float
    loss: float
    held_out_loss: float
    consensus_distance: float
    relative_distance: float
    local_min: float
    local_mean: float
    local_max: float
    learning_rate: float
    wall_seconds: float = field(compare=False)


@dataclass(frozen=True)
class Report:
    """The results of a run.

    Attributes:
        points: curve from the start to the end.
        samples: number of samples that all learners have seen.
        seconds: simulated time.
        steps: number of optimizer steps of each super-learner.
        totals: summed counters of all super-learners.
        diverged: reason for an early end, such as a non-finite loss; empty otherwise.
    """

    points: list[Point]
    samples: int
    seconds: float
    steps: list[int]
    totals: Statistics
    diverged: str = ""

    @property
    def samples_per_second(self) -> float:
        """Samples per simulated second; NaN if no time has passed."""
        return self.samples / self.seconds if self.seconds else math.nan

    def column(self, name: str) -> list[float]:
        """One field of all points, for example ``report.column("loss")``."""
        return [getattr(point, name) for point in self.points]

    def to_csv(self, path: str | Path) -> Path:
        """Writes a row per point, whole or not at all, and returns the path."""
        path = Path(path)
        with written_whole(path, newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Point)])
            writer.writeheader()
            writer.writerows(asdict(point) for point in self.points)
        return path
