"""Gives a Trainer's training loader the batches that its learner claims.

Lightning would put a `DistributedSampler` into the loader of each learner: equal
shares, whatever the speed. While a `WorkSharing` is installed, the loader of the
training is a copy of the user's whose batch sampler is `SharedBatches`; loaders of an
evaluation are Lightning's business as before.

A learner does not know how many batches it will get, so the copy has no length, and
Lightning asks it for one batch ahead to know which is the last.

Among islands the batches are those of `IslandBatches`, once the island has joined the
others.
"""

import copy
import os
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage
from torch._C._distributed_c10d import PrefixStore
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_adpsgd.epochs.batches import IslandBatches, IslandEpoch
from lightning_adpsgd.epochs.block_sampler import BlockSampler
from lightning_adpsgd.epochs.claims import (
    EpochState,
    EpochUnderWay,
    Place,
    SharedBatches,
)
from lightning_adpsgd.epochs.pool import IslandPool
from lightning_adpsgd.islands.rendezvous import Place as RendezvousPlace
from lightning_adpsgd.islands.rendezvous import Rendezvous
from lightning_adpsgd.strategy.job import Job

_GOODBYE_S = 2.0


class WorkSharing:
    """One learner's part in sharing the epochs of a training.

    Args:
        trainer: Of this learner.
        job: Whose learners share.
        place: Of this learner in the job.
        checkpoint: What `state` gave to the checkpoint that is resumed; none at a fresh
            start.
        islands: The URL of their rendezvous; none where all learners are in one job.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        job: Job,
        place: Place,
        checkpoint: Mapping[str, Any] | None = None,
        islands: str | None = None,
    ) -> None:
        self._trainer, self._job, self._place = trainer, job, place
        self._islands, self._pool = islands, None
        self._loaded = EpochState(**checkpoint) if checkpoint else None
        self._batches: SharedBatches | IslandBatches | None = None
        self._num_occasions, self._num_loaders = 0, 0

    # --- from set-up to end

    def install(self) -> None:
        """Training loaders are copied from here on, until `remove`."""
        vars(self._trainer._data_connector)["_prepare_dataloader"] = self._prepare

    def remove(self) -> None:
        """Brings Lightning's own preparation of loaders back."""
        vars(self._trainer._data_connector).pop("_prepare_dataloader", None)
        self.leave()

    def begin(self) -> None:
        """The island has joined the others, and is where they are; it may draw."""
        if self._islands is None or self._job.island is None:
            return
        if self._place.learner == 0:
            self._pool = IslandPool(
                Rendezvous(RendezvousPlace.parse(self._islands)),
                self._job.island.membership,
                self._job.raise_if_failed,
            )
            self._pool.start()
        assert isinstance(self._batches, IslandBatches)
        self._batches.begin(self._pool)

    def leave(self) -> None:
        """Other islands go on with what this one has not trained on."""
        if isinstance(self._batches, IslandBatches):
            self._batches.leave(_GOODBYE_S)

    def check_loaders(self) -> None:
        """Refuses what is known only when Lightning has all loaders.

        Raises:
            ValueError: There are several training loaders.
        """
        combined = self._trainer.fit_loop._combined_loader
        if combined is not None and len(combined.flattened) > 1:
            raise ValueError(
                "`work_sharing` needs a single training loader, got "
                f"{len(combined.flattened)}: learners would come to the ends of their "
                "pools at different times; make one data set of them, with "
                "torch.utils.data.ConcatDataset or StackDataset"
            )

    # --- the epoch

    @property
    def under_way(self) -> EpochUnderWay | IslandEpoch | None:
        """The epoch that is being shared; none before the first."""
        return self._batches.under_way if self._batches is not None else None

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning when an epoch begins, as with a distributed sampler."""
        assert self._batches is not None
        if isinstance(self._batches, IslandBatches):
            self._batches.start_epoch(epoch)
        self._batches.epoch = epoch
        stale = self.under_way is None or self.under_way.number != epoch
        if stale and not self._lightning_iterates():
            iter(self._trainer.fit_loop._data_fetcher)  # pyright: ignore

    def begin_batch(self) -> None:
        """Training on the next batch begins."""
        if self._batches is not None:
            self._batches.begin_batch()
        if isinstance(self._batches, IslandBatches):
            # One that was stopped and has rejoined the others is in their epoch.
            self._batches.epoch = self._trainer.current_epoch

    def all_go_on(self, at_last_batch: bool) -> bool:
        """Whether no learner is at its last batch of the epoch; all learners come."""
        store = self._next_occasion()
        store.add("ended", int(at_last_batch))
        self._job.meet("a point within the epoch")
        return store.add("ended", 0) == 0

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of the epoch, in learner 0; all learners come."""
        if isinstance(self._batches, IslandBatches):
            state = self._batches.state()
        elif self._batches is not None and self._batches.under_way is not None:
            occasion = self._next_occasion()
            state = self._batches.under_way.gather(occasion, self._job.meet)
        else:
            state = None
        return state._asdict() if state is not None else None

    # --- private

    def _prepare(self, dataloader: Any, shuffle: bool, mode: RunningStage) -> Any:
        connector = self._trainer._data_connector
        if mode != RunningStage.TRAINING:
            return type(connector)._prepare_dataloader(
                connector, dataloader, shuffle, mode
            )
        _refuse_loader(dataloader)
        if self._islands is None:
            self._batches = self._of_one_job(dataloader.batch_sampler)
        else:
            self._batches = self._of_islands(dataloader)
        progress: Any = self._trainer.fit_loop.epoch_progress.current
        self._batches.epoch = progress.processed
        if self._loaded is not None:
            self._batches.load(self._loaded)
        return self._copy(dataloader, self._batches)

    def _of_one_job(self, batches: Any) -> SharedBatches:
        return SharedBatches(
            batches,
            self._place,
            _seed(),
            lambda epoch: PrefixStore(f"epoch/{epoch}", self._job.store),
            self._job.raise_if_failed,
        )

    def _of_islands(self, loader: DataLoader[Any]) -> IslandBatches:
        before, self._num_loaders = self._batches, self._num_loaders + 1
        made = IslandBatches(
            loader.batch_sampler,
            self._place,
            before.seed if isinstance(before, IslandBatches) else _seed(),
            PrefixStore(f"loader/{self._num_loaders}", self._job.store),
            self._job.raise_if_failed,
            self._is_training,
            reads_ahead=loader.num_workers > 0,
        )
        if self._job.island is not None:
            made.begin(self._pool)
        return made

    def _is_training(self) -> bool:
        """Whether a batch is being trained on; asked by another thread as well."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.ready != progress.completed

    def _copy(
        self, loader: DataLoader[Any], batches: SharedBatches | IslandBatches
    ) -> Any:
        # Not made anew: a subclass need not take a batch sampler. Not by assignment:
        # torch forbids it, lest iterators under way go on with the old one.
        copied = copy.copy(loader)
        vars(copied).update(batch_sampler=batches, sampler=self, _iterator=None)
        return copied

    def _lightning_iterates(self) -> bool:
        """Whether Lightning makes a new iterator for the epoch that begins.

        It does not for the first one of a run, for which it has one since set-up.
        """
        loop = self._trainer.fit_loop
        resumes = loop.is_resuming or loop.epoch_loop.restarting
        return self._trainer.current_epoch > 0 and not resumes

    def _next_occasion(self) -> PrefixStore:
        self._num_occasions += 1
        return PrefixStore(f"occasion/{self._num_occasions}", self._job.store)


def _seed() -> int:
    """As Lightning seeds its distributed sampler: by `seed_everything`."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def _refuse_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ValueError(
            "`work_sharing` needs a torch.utils.data.DataLoader to train from, got "
            f"{type(loader).__name__}"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "`work_sharing` needs a data set with indices, got the iterable "
            f"{type(loader.dataset).__name__}: there is nothing to hand out; give "
            "every learner a stream of its own, with `work_sharing=False`"
        )
    if loader.batch_sampler is None:
        raise ValueError(
            "`work_sharing` needs a loader that makes batches, got `batch_size=None`: "
            "pass a `batch_size`, or a `batch_sampler` that yields lists of indices"
        )
    sampler = getattr(loader.batch_sampler, "sampler", None)
    whole = isinstance(sampler, BlockSampler)  # knows the order of all samples
    if isinstance(sampler, DistributedSampler) and not whole:
        raise ValueError(
            "`work_sharing` chooses the samples of each learner itself, got a loader "
            "with a DistributedSampler: leave it out"
        )
