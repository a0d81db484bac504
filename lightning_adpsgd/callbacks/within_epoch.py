"""Checkpoints within an epoch that learners share.

Learners that share an epoch make different numbers of steps, so they cannot meet after
a given number of steps. The claimed part of the epoch is the same for all.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_adpsgd.dials import check_count

if TYPE_CHECKING:
    from lightning_adpsgd.strategy.work_sharing import WorkSharing


class SaveWithinEpoch(Callback):
    """Writes a checkpoint each time the learners have together claimed N more batches.

    `trainer.fit(ckpt_path=path)` continues with the remaining samples of the epoch,
    with any number of learners. All learners meet at a checkpoint, so fast ones wait
    for up to two steps of the slowest one. Once one learner has its last batch of an
    epoch, nothing is written until the next epoch. If learners get equal shares of the
    epochs, it writes nothing and warns.

    Args:
        path: Path of the checkpoint; each one replaces the last.
        every_n_batches: N, the batches of all learners from one checkpoint to the next.

    Raises:
        TypeError: `every_n_batches` is no whole number.
        ValueError: `every_n_batches` is below 1.
    """

    def __init__(self, path: Path | str, every_n_batches: int) -> None:
        check_count("every_n_batches", every_n_batches)
        # Not a `Path`, which would make one slash of the two in a URL.
        self._path, self._every_n_batches = path, every_n_batches
        self._epoch, self._num_points = -1, 0

    @override
    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        # At the end of the list, so that all others have seen the batch before a save.
        others = [one for one in trainer.callbacks if one is not self]
        trainer.callbacks = [*others, self]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A resumed epoch counts its claims from 0, and so does that of another fit.
        self._epoch, self._num_points = -1, 0
        if getattr(trainer.strategy, "work_sharing", None) is None:
            rank_zero_warn(
                "`SaveWithinEpoch` writes nothing here, because learners get equal "
                "shares; use `ModelCheckpoint(every_n_train_steps=...)`"
            )

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        strategy: Any = trainer.strategy
        sharing: WorkSharing | None = getattr(strategy, "work_sharing", None)
        if sharing is None or sharing.under_way is None:
            return
        if self._epoch != sharing.under_way.number:
            self._epoch, self._num_points = sharing.under_way.number, 0
        at_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        every = max(1, self._every_n_batches // strategy.super_learner_size)
        # At its last batch a learner comes to all remaining checkpoints, as the others
        # will do.
        while self._num_points < _num_due(sharing, every, at_last):
            self._num_points += 1
            if sharing.all_go_on(at_last):
                trainer.save_checkpoint(self._path)


def _num_due(sharing: "WorkSharing", every: int, at_last: bool) -> int:
    """The number of checkpoints due so far in the epoch, equal for all learners."""
    assert sharing.under_way is not None
    in_epoch = (len(sharing.under_way.units) - 1) // every
    if at_last:
        return in_epoch
    return min(in_epoch, sharing.under_way.last_claim.num_claimed // every)
