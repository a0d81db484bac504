"""What a checkpoint holds of learners and epochs, beside what Lightning keeps."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy

from lightning_adpsgd.coordination.gather import gather_weights_only
from lightning_adpsgd.strategy.checkpoints.mid_epoch import PlaceInEpoch
from lightning_adpsgd.strategy.job import NAMESPACE, Job
from lightning_adpsgd.strategy.learner_states import (
    by_super_learner,
    learner_of,
)

_EPOCH = f"{NAMESPACE}/epoch"
"""The key of a shared epoch."""

_SAMPLES = f"{NAMESPACE}/samples"
"""The key of the number of samples that all learners together have trained on."""

# Learners may have made different numbers of steps.
_OF_EACH_LEARNER = ("loops", "lr_schedulers")


class Resumed(NamedTuple):
    """What the checkpoint that is resumed holds for this learner.

    Attributes:
        learner: its own state; none: it starts from the consensus model.
        epoch: what is left of a shared epoch; none: the epoch was not shared.
        num_samples: samples that all learners together have trained on.
    """

    learner: Mapping[str, Any] | None = None
    epoch: Mapping[str, Any] | None = None
    num_samples: int = 0

    @property
    def place(self) -> Mapping[str, Any] | None:
        """The learner's place in its epoch."""
        return self.learner["own"].get("place") if self.learner else None


def resumed_from(
    checkpoint: dict[str, Any], rank: int, num_learners: int, super_learner_size: int
) -> Resumed:
    """Reads a checkpoint, and gives Lightning this learner's own state to restore.

    Args:
        checkpoint: what is loaded; Lightning restores its optimizers, schedules and
            loops next.
        rank: number of this learner.
        num_learners: L.
        super_learner_size: N.
    """
    saved, learner = checkpoint.get(NAMESPACE), None
    if saved:
        learner = learner_of(saved, rank, num_learners, super_learner_size)
    if learner is not None:
        checkpoint["optimizer_states"] = learner["states"]
        checkpoint.update(learner["own"].get("lightning", {}))
    return Resumed(learner, checkpoint.get(_EPOCH), checkpoint.get(_SAMPLES, 0))


def place_in_epoch(trainer: pl.Trainer, resumed: Resumed) -> PlaceInEpoch:
    """The place of a learner in its epoch, from where a checkpoint left it."""
    # With other learners no count is any learner's own; their sum stays.
    of_others = resumed.learner is None and trainer.is_global_zero
    num_samples = resumed.num_samples if of_others else 0
    device = trainer.strategy.root_device
    return PlaceInEpoch(trainer, device, resumed.place, num_samples)


def add_learners(
    checkpoint: dict[str, Any],
    place: PlaceInEpoch,
    strategy: Strategy,
    job: Job | None,
) -> None:
    """Adds the state of each learner; a collective over all.

    Args:
        checkpoint: Lightning's, of this learner; complete in learner 0.
        place: place of this learner in its epoch.
        strategy: strategy of this learner.
        job: job of this learner; none: all learners form one super-learner.
    """
    names = (*_OF_EACH_LEARNER, type(strategy.precision_plugin).__qualname__)
    lightning = {name: checkpoint[name] for name in names if name in checkpoint}
    own = {"lightning": lightning, "place": place.state()}
    states = checkpoint["optimizer_states"]
    if job is not None:
        learners = job.gather_learners(states, own)
    else:
        mine = {"states": states, "own": own}
        everyone = gather_weights_only(mine, strategy.root_device) or []
        learners = by_super_learner(everyone, len(everyone) or 1)
    checkpoint[NAMESPACE] = learners
    all_own = (one for group in learners for one in group["learners"])
    checkpoint[_SAMPLES] = sum(one["place"]["num_samples"] for one in all_own)


def add_epoch(checkpoint: dict[str, Any], state: Mapping[str, Any] | None) -> None:
    """Adds what is left of a shared epoch."""
    checkpoint[_EPOCH] = state
