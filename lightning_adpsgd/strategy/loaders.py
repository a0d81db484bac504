"""What becomes of a Trainer's training loader: the one owner of its preparation.

Lightning prepares each loader, which puts a `DistributedSampler` into it. For those of
the training, two things may want another batch sampler: epochs that learners share,
which replace Lightning's preparation, and a place in the epoch that a resume goes back
to, which comes after it. A shared epoch keeps its own account of what is left, so with
both the first alone applies. Loaders of an evaluation are Lightning's business.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage

from lightning_adpsgd.strategy.checkpoints.mid_epoch import PlaceInEpoch
from lightning_adpsgd.strategy.overrides import Overrides
from lightning_adpsgd.strategy.work_sharing import WorkSharing


def prepare_training_loaders(
    trainer: pl.Trainer,
    work_sharing: WorkSharing | None,
    place: PlaceInEpoch | None,
    overrides: Overrides,
) -> None:
    """Takes Lightning's preparation of loaders over, if there is a reason to."""
    if work_sharing is None and place is None:
        return
    connector = trainer._data_connector
    own = partial(type(connector)._prepare_dataloader, connector)
    prepare = partial(_prepare, own, work_sharing, place)
    overrides.replace("loaders", connector, "_prepare_dataloader", prepare)


def _prepare(
    lightnings: Callable[..., Any],
    work_sharing: WorkSharing | None,
    place: PlaceInEpoch | None,
    dataloader: Any,
    shuffle: bool,
    mode: RunningStage,
) -> Any:
    trains = mode == RunningStage.TRAINING
    if trains and work_sharing is not None:
        return work_sharing.prepare(dataloader)
    loader = lightnings(dataloader, shuffle, mode)
    return place.prepare(loader) if trains and place is not None else loader
