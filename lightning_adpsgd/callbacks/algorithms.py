"""The name and settings of a Trainer's algorithm, for the summary row of a run."""

from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_adpsgd.strategy.names import NAMES


class Algorithm(NamedTuple):
    """The fields of `runs.Run` that a strategy decides; N is 0 if sizes differ."""

    algorithm: str
    topology: str
    communication: str
    num_super_learners: int
    super_learner_size: int


def algorithm_of(trainer: Trainer) -> Algorithm:
    """The name and settings of the algorithm of a Trainer's strategy.

    Algorithms of the papers have their names; others are named after communication
    and topology. An island counts as the only super-learner. Under Lightning's own
    strategies, all learners are one super-learner.
    """
    strategy: Any = trainer.strategy
    if is_island(trainer) or getattr(strategy, "num_super_learners", 1) > 1:
        return _gossiping(strategy)
    # All learners of a simulated super-learner share one process.
    num_learners = max(trainer.world_size, getattr(strategy, "super_learner_size", 1))
    if num_learners == 1:
        return Algorithm("sgd", "none", "none", 1, 1)
    name = getattr(strategy, "strategy_name", type(strategy).__name__)
    if isinstance(strategy, DDPStrategy):
        name = "ddp"
    return Algorithm(name, "complete", "allreduce", 1, num_learners)


def is_island(trainer: Trainer) -> bool:
    """Whether the learners of this job are an island among others."""
    dials = getattr(trainer.strategy, "dials", None)
    return getattr(dials, "islands", None) is not None


def batches_per_step(trainer: Trainer) -> int:
    """The number of loader batches in one step of all learners together.

    Each learner takes one batch. Learners that share layers take one batch together,
    and so do the learners of a simulated super-learner.
    """
    num_super_learners = getattr(trainer.strategy, "num_super_learners", 1)
    return max(trainer.world_size // learners_per_reader(trainer), num_super_learners)


def learners_per_reader(trainer: Trainer) -> int:
    """T, the number of learners that read the same batches."""
    dials = getattr(trainer.strategy, "dials", None)
    return getattr(dials, "tensor_parallel_size", 1)


def _gossiping(strategy: Any) -> Algorithm:
    dials = strategy.dials
    size = 0 if dials.has_sizes else strategy.super_learner_size
    topology, communication = dials.topology.name, dials.communication
    settings = {
        "topology": topology,
        "communication": communication,
        "super_learner_size": 1 if size == 1 else "node",
    }
    known = (name for name, named in NAMES.items() if named == settings)
    name = next(known, f"{communication}-{topology}")
    return Algorithm(name, topology, communication, strategy.num_super_learners, size)
