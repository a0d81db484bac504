"""What the algorithm of a trainer is called, and who averages with whom in it."""

from typing import NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_adpsgd.registration import NAMES
from lightning_adpsgd.strategy.trainer import HADPSGDStrategy
from lightning_adpsgd.virtual.strategy import VirtualHADPSGDStrategy

_Ours = HADPSGDStrategy | VirtualHADPSGDStrategy


class Algorithm(NamedTuple):
    """The settings of `runs.Run` that are those of a strategy."""

    name: str
    topology: str
    communication: str
    num_super_learners: int
    super_learner_size: int

    @property
    def num_learners(self) -> int:
        """L = S N."""
        return self.num_super_learners * self.super_learner_size


def algorithm_of(trainer: Trainer) -> Algorithm:
    """Named as in the papers; other dials by communication and topology.

    Under a strategy of Lightning's own, all learners are one super-learner.
    """
    strategy, num_learners = trainer.strategy, trainer.world_size
    if isinstance(strategy, _Ours) and strategy.num_super_learners > 1:
        return _gossiping(strategy)
    if isinstance(strategy, VirtualHADPSGDStrategy):
        num_learners = strategy.super_learner_size
    if num_learners == 1:
        return Algorithm("sgd", "none", "none", 1, 1)
    name = getattr(strategy, "strategy_name", type(strategy).__name__)
    if isinstance(strategy, DDPStrategy):
        name = "ddp"
    return Algorithm(name, "complete", "allreduce", 1, num_learners)


def batches_per_step(trainer: Trainer) -> int:
    """Batches of the Trainer's loader in one step of all learners.

    One of each learner, but a virtual super-learner takes one for all of its learners.
    """
    strategy = trainer.strategy
    if isinstance(strategy, VirtualHADPSGDStrategy):
        return strategy.num_super_learners
    return trainer.world_size


def _gossiping(strategy: _Ours) -> Algorithm:
    dials, size = strategy.dials, strategy.super_learner_size
    topology, communication = dials.topology.name, dials.communication
    settings = {
        "topology": topology,
        "communication": communication,
        "super_learner_size": 1 if size == 1 else "node",
    }
    known = (name for name, named in NAMES.items() if named == settings)
    name = next(known, f"{communication}-{topology}")
    return Algorithm(name, topology, communication, strategy.num_super_learners, size)
