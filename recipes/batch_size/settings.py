"""What a sweep varies, and what all its runs have in common."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lightning_adpsgd.strategy.names import NAMES

BASELINE = "ssgd"
HIERARCHICAL = "hadpsgd"
CLIPPED = "+clip"
"""At the end of a name: the largest norm of a gradient is searched beside the rate."""
ALGORITHMS = (
    BASELINE,
    "sdpsgd",
    "sdpsgd_random",
    "adpsgd",
    "adpsgd_random",
    "d1psgd",
    HIERARCHICAL,
)
# Beside the papers' own: rings and pairs drawn anew in each round, with waiting or not,
# and SSGD whose learners each clip their own gradient, not its mean.
EXTRA: dict[str, dict[str, Any]] = {
    "sdpsgd_complete": {"topology": "complete", "communication": "sync"},
    "sdpsgd_random": {"topology": "random_ring", "communication": "sync"},
    "sdpsgd_pairs": {"topology": "random_pairs", "communication": "sync"},
    "adpsgd_pairs": {"topology": "random_pairs", "communication": "async"},
}


def without_clip(algorithm: str) -> str:
    """The name of the strategy."""
    return algorithm.removesuffix(CLIPPED)


class Cell(NamedTuple):
    """An algorithm at a global batch: what has a best learning rate of its own."""

    algorithm: str
    batch: int

    @property
    def is_clipped(self) -> bool:
        """Whether it has a best norm too."""
        return self.algorithm.endswith(CLIPPED)

    @property
    def control(self) -> str:
        """Name of the baseline that it is compared with: clipped as it is itself."""
        return BASELINE + CLIPPED * self.is_clipped


class Setting(NamedTuple):
    """A point of the grid that a cell is searched on.

    Attributes:
        step: the peak learning rate is 2^(step / 2).
        clip: the largest norm of a gradient is 2^clip; None: any.
    """

    step: int
    clip: int | None = None

    @property
    def rate(self) -> float:
        """Peak learning rate, for the global batch."""
        return 2 ** (self.step / 2)

    @property
    def norm(self) -> float | None:
        """Largest norm of a super-learner's gradient."""
        return None if self.clip is None else 2.0**self.clip


class Run(NamedTuple):
    """One training.

    Attributes:
        cell: algorithm and global batch.
        setting: learning rate and norm.
        seed: seed of start, order of samples, times and topology.
    """

    cell: Cell
    setting: Setting
    seed: int

    @property
    def key(self) -> str:
        """Name of its file."""
        step, clip = self.setting
        clipped = "" if clip is None else f"-clip{clip}"
        return f"{self.cell.algorithm}-{self.cell.batch}-{step}{clipped}-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a sweep.

    Args:
        algorithms: names of the strategies, "ssgd" (one super-learner of all) among
            them; "+clip" at the end of one searches its largest norm of a gradient.
        baseline_batch: global batch at which SSGD alone is trained: the loss that the
            others are held against.
        batches: global batches of all algorithms, from small to large.
        seeds: number of seeds, counted from 0.
        min_rate: lowest peak learning rate; the grid continues by factors of sqrt(2).
        max_rate: highest peak learning rate.
        num_learners: number of learners of every algorithm.
        super_learner_size: number of learners per super-learner of "hadpsgd"; where
            that is among the algorithms, a proper divisor of `num_learners`.
        epochs: number of passes over the training samples, for every batch.
        warmup_epochs: number of these epochs until the peak rate.
        rise: peak rate divided by the rate at the start; 1: no warm-up, the peak for
            `warmup_epochs`.
        decay: factor on the rate per epoch afterwards.
        spread: deviation of the logarithm of a learner's computing time per step.
        exchange: time in which the weights of a model cross a link, in steps.
        min_clip: lowest norm that clipped algorithms are tried at.
        max_clip: highest such norm; the grid goes by factors of 2.
        mixing_gain: share of each average that the asynchronous algorithms take.
        points: number of points of a learning curve, without the start.
        margins: parts by which a loss may exceed the baseline's at a usable batch.

    Raises:
        ValueError: A value is out of its bounds.
    """

    algorithms: tuple[str, ...] = ALGORITHMS
    baseline_batch: int = 128
    batches: tuple[int, ...] = (256, 512, 1024)
    seeds: int = 3
    min_rate: float = 0.25
    max_rate: float = 64.0
    num_learners: int = 16
    super_learner_size: int = 4
    epochs: int = 6
    warmup_epochs: float = 1.5
    rise: int = 8
    decay: float = 2**-0.5
    spread: float = 0.2
    exchange: float = 0.1
    min_clip: float = 1 / 16
    max_clip: float = 4.0
    mixing_gain: float = 0.5
    points: int = 6
    margins: tuple[float, ...] = (0.05, 0.10, 0.15, 0.20)

    def __post_init__(self) -> None:
        self._check_algorithms()
        self._check_learners()
        for batch in self.all_batches:
            if batch % self.num_learners:
                raise ValueError(
                    "`batches` must be multiples of the number of learners "
                    f"{self.num_learners}, got {batch}"
                )
        if self.seeds < 1:
            raise ValueError(f"`seeds` must be at least 1, got {self.seeds}")

    def _check_algorithms(self) -> None:
        unknown = self._strategies - {BASELINE, *NAMES, *EXTRA}
        if unknown or not set(self.controls) <= {*self.algorithms}:
            raise ValueError(
                f"`algorithms` must hold {BASELINE!r}, {BASELINE + CLIPPED!r} if one "
                f"ends in {CLIPPED!r}, and names of {[*NAMES, *EXTRA]}, got "
                f"{self.algorithms}"
            )

    def _check_learners(self) -> None:
        """One super-learner alone would be SSGD under another name."""
        num, size = self.num_learners, self.super_learner_size
        least = 2 if self._strategies - {BASELINE} else 1
        if num < least:
            raise ValueError(
                f"`num_learners` must be at least {least} for `algorithms` "
                f"{self.algorithms}, got {num}"
            )
        if HIERARCHICAL not in self._strategies:
            return
        if size < 1:
            raise ValueError(f"`super_learner_size` must be at least 1, got {size}")
        if num % size or num == size:
            raise ValueError(
                f"`num_learners` must be a multiple of `super_learner_size` {size}, "
                f"and at least twice that, where `algorithms` has {HIERARCHICAL!r}, "
                f"got {num}"
            )

    @property
    def _strategies(self) -> set[str]:
        return set(map(without_clip, self.algorithms))

    @property
    def all_batches(self) -> list[int]:
        """That of the baseline and the others, each once, from small to large."""
        return sorted({self.baseline_batch, *self.batches})

    @property
    def largest_batch(self) -> int:
        """The corpus is cut to a multiple of it, so that all see the same samples."""
        return self.all_batches[-1]

    @property
    def grid(self) -> range:
        """Steps of the learning rates."""
        return range(_step(self.min_rate), _step(self.max_rate) + 1)

    @property
    def clips(self) -> range:
        """Steps of the norms."""
        low, high = (round(math.log2(norm)) for norm in (self.min_clip, self.max_clip))
        return range(low, high + 1)

    @property
    def controls(self) -> list[str]:
        """SSGD, and clipped SSGD if any algorithm is clipped."""
        clipped = any(Cell(name, 0).is_clipped for name in self.algorithms)
        return [BASELINE, BASELINE + CLIPPED][: 1 + clipped]

    def cells(self) -> Iterator[Cell]:
        """The cells in the order of work: small batches first, SSGD before others."""
        baselines = [Cell(name, self.baseline_batch) for name in self.controls]
        yield from baselines
        order = sorted(self.algorithms, key=lambda name: name not in self.controls)
        for batch in self.batches:
            for algorithm in order:
                if (cell := Cell(algorithm, batch)) not in baselines:
                    yield cell

    def in_common(self) -> dict[str, Any]:
        """The settings that runs must share to be comparable."""
        varied = ("algorithms", "batches", "seeds", "margins")
        varied += ("min_rate", "max_rate", "min_clip", "max_clip")
        named = {k: v for k, v in asdict(self).items() if k not in varied}
        return {**named, "largest_batch": self.largest_batch}


def _step(rate: float) -> int:
    return round(2 * math.log2(rate))


SPEECH = Settings(margins=(0.05, 0.10, 0.25, 0.50))
CLASSIFIER = Settings(
    baseline_batch=256,
    batches=(1024, 2048, 4096),
    min_rate=1 / 32,
    max_rate=16.0,
    epochs=24,
    warmup_epochs=4.0,
    decay=0.84,
    points=12,
)
QUICK = Settings(
    algorithms=("ssgd", "sdpsgd", "adpsgd"),
    baseline_batch=64,
    batches=(128, 256),
    seeds=2,
    min_rate=0.25,
    max_rate=4.0,
    num_learners=4,
    epochs=2,
    warmup_epochs=0.5,
    points=4,
)
