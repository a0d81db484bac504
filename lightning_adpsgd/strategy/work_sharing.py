"""The training loader of a Trainer whose learners share each epoch.

Lightning would put a `DistributedSampler` into the loader of each learner, which deals
equal shares whatever the speed. A `WorkSharing` instead makes a copy of the user's
training loader, with `SharedBatches` for a batch sampler. Loaders of an evaluation stay
as Lightning makes them.

A learner does not know in advance how many batches it gets. So the copy has no length,
and Lightning fetches one batch ahead to find out which is the last.
"""

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import RunningStage
from torch._C._distributed_c10d import PrefixStore, Store
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_adpsgd.coordination.store import near_store, serve_near
from lightning_adpsgd.epochs.batches import EpochUnderWay, Pool, SharedBatches
from lightning_adpsgd.epochs.claims import ClaimCounter, LeaderBroadcast, LearnerIndex
from lightning_adpsgd.epochs.pool import IslandPool
from lightning_adpsgd.epochs.work_units import EpochState
from lightning_adpsgd.islands.rendezvous import Rendezvous, RendezvousAddress
from lightning_adpsgd.strategy.checkpoints.mid_epoch import PlaceInEpoch, copy_with
from lightning_adpsgd.strategy.compatibility import callbacks_of
from lightning_adpsgd.strategy.default_sharing import (
    DefaultSharing,
    problems_with_loader,
    refuse_for,
)
from lightning_adpsgd.strategy.job import Job
from lightning_adpsgd.strategy.loop_iterators import LoopIterators
from lightning_adpsgd.strategy.overrides import Overrides
from lightning_adpsgd.transport.links.credentials import Credentials
from lightning_adpsgd.transport.network_interfaces import gloo_addresses

_GOODBYE_S = 2.0
# To connect to a store on the same machine. No call there waits for a key.
_NEAR = timedelta(seconds=30)


class WorkSharing:
    """One learner's part in sharing the epochs of a training.

    `checkpoint` is the result of `state` in the resumed checkpoint.

    Attributes:
        default: decision whether to share, if it is the default's; None: the user's.
        shares: whether the learners share their epochs; None: undecided.
        takes_turns: whether learners wait for one another in every step.
        iterators: what knows the training loop's iterators.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        job: Job,
        index: LearnerIndex,
        checkpoint: Mapping[str, Any] | None,
        islands: str | None,
        default: DefaultSharing | None,
    ) -> None:
        self._trainer, self._job, self._index = trainer, job, index
        self._islands, self.default = islands, default
        self.shares = True if default is None else None
        self.takes_turns = False
        self.iterators = LoopIterators(self._lacks_iterator)
        self._island_pool: IslandPool | None = None
        self._loaded = EpochState(**checkpoint) if checkpoint else None
        self._batches: SharedBatches | None = None
        self._near_store: Store | None = None
        self._num_occasions, self._num_shared, self._num_loaders = 0, 0, 1

    # --- from set-up to end

    def count_loaders(self, load: Callable[[], Any]) -> Any:
        """Asks Lightning for the training loaders, and counts them."""
        loaders = load()
        flattened = getattr(loaders, "flattened", None)
        self._num_loaders = len(flattened or tree_leaves(loaders))
        return loaders

    def takes(self, dataloader: Any) -> bool:
        """Whether the learners share a training loader; all learners must call it."""
        if self.shares is None and self.default is not None:
            self.shares = self.default.allows(dataloader, self._num_loaders)
        return bool(self.shares)

    def prepare(self, dataloader: Any) -> Any:
        """A copy of a training loader that yields the batches this learner claims."""
        refuse_for(problems_with_loader(dataloader, self._num_loaders))
        former, self._batches = self._batches, self._shared(dataloader)
        if former is not None:  # of the loader before a reload
            former.retire()
        progress: Any = self._trainer.fit_loop.epoch_progress.current
        self._batches.epoch = progress.processed
        # The loader of a later epoch may have other data.
        if self._loaded is not None and self._loaded.epoch >= progress.processed:
            self._batches.load(self._loaded)
        return copy_with(dataloader, batch_sampler=self._batches, sampler=self)

    def begin(self) -> None:
        """Lets an island claim batches, once it has joined the others."""
        if self._islands is None or self._job.island is None:
            return
        credentials = Credentials.from_environment(os.environ)
        address = RendezvousAddress.parse(self._islands)
        self._island_pool = IslandPool(
            Rendezvous(address, credentials=credentials),
            self._job.island.membership,
            self._job.raise_if_failed,
        )
        if self._index.learner == 0:
            self._island_pool.start()

    def leave(self) -> None:
        """Ends for good; an island gives back what it has not trained on."""
        if self._batches is not None and self._island_pool is not None:
            self._batches.close()
            self._island_pool.leave(_GOODBYE_S)
        elif self._batches is not None:
            self._batches.retire()  # the Trainer keeps its loader
            self._batches = None

    # --- the epoch

    @property
    def under_way(self) -> EpochUnderWay | None:
        """The current shared epoch; None before the first."""
        return self._batches.under_way if self._batches is not None else None

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch; Lightning calls it, as on a `DistributedSampler`."""
        assert self._batches is not None
        self._batches.start_epoch(epoch)
        # A callback does not save twice at one step. A slow learner may get too few
        # batches for a step, while the others, which made one, wait at their
        # checkpoint: it saves in this epoch even so.
        for saver in callbacks_of(self._trainer, ModelCheckpoint):
            saver._last_global_step_saved = -1

    def begin_batch(self) -> None:
        """Starts the next batch."""
        if self._batches is None:
            return
        self._batches.begin_batch()
        if self._islands is not None:
            # An island that has rejoined after a stop is in the epoch of the others.
            self._batches.epoch = self._trainer.current_epoch

    def end_step(self) -> None:
        """Ends an optimizer step."""
        if self._batches is not None:
            self._batches.end_step()

    def all_go_on(self, at_last_batch: bool) -> bool:
        """Whether no learner is at its last batch of the epoch; all must call it."""
        self._num_occasions += 1
        store = PrefixStore(f"occasion/{self._num_occasions}", self._job.store)
        store.add("ended", int(at_last_batch))
        self._job.meet("a point within the epoch")
        return store.add("ended", 0) == 0

    def state(self) -> dict[str, Any] | None:
        """The state of the epoch for a checkpoint, in learner 0; a collective."""
        state = self._batches.state() if self._batches is not None else None
        return state._asdict() if state is not None else None

    def _shared(self, loader: DataLoader[Any]) -> SharedBatches:
        self._num_shared += 1
        name = f"loader/{self._num_shared}"
        store = PrefixStore(name, self._job.store)
        return SharedBatches(
            loader.batch_sampler,
            self._index,
            self._common_seed(),
            self._broadcast_in(PrefixStore(name, self._near())),
            self._pool_of(store, loader.num_workers > 0),
            self._is_training,
            reads_ahead=loader.num_workers > 0,
            is_of_loop=self.iterators.are_made,
            is_within_batch=self._is_within_batch,
        )

    def _broadcast_in(self, store: Store) -> LeaderBroadcast:
        return LeaderBroadcast(store, self._index, self._job.raise_if_failed)

    def _near(self) -> Store:
        """A store near all learners of this super-learner, for faster claims."""
        far = self._trainer.num_nodes > 1 and self._index.num_super_learners > 1
        if self._near_store is None and far and self._index.super_learner_size > 1:
            first = self._broadcast_in(PrefixStore("near", self._job.store))
            address = first.share(self._serve_near)
            if self._index.learner > 0:
                self._near_store = near_store(address, _NEAR)
        return self._near_store or self._job.store

    def _serve_near(self) -> str:
        here, size = "127.0.0.1", self._index.super_learner_size
        is_within_machine = self._trainer.num_devices % size == 0
        host = here if is_within_machine else next(iter(gloo_addresses()), here)
        self._near_store, address = serve_near(host, _NEAR)
        return address

    def _common_seed(self) -> int:
        if self._batches is not None:
            return self._batches.seed
        if self._loaded is not None:
            return self._loaded.seed
        # The seed of `seed_everything`, as in a `DistributedSampler`. A program
        # may give each learner a seed of its own, for other augmentations.
        own = int(os.environ.get("PL_GLOBAL_SEED", 0))
        return self._trainer.strategy.broadcast(own)

    def _pool_of(self, store: PrefixStore, early: bool) -> Callable[[], Pool | None]:
        """A function for the pool; `early` if workers read as soon as they start."""
        if self._islands is not None:
            return lambda: self._island_pool
        meet, takes_turns = self._job.meet, lambda: self.takes_turns
        counter = ClaimCounter(store, self._index, meet, takes_turns)
        return lambda: None if self.iterators.are_early and not early else counter

    def _is_training(self) -> bool:
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.ready != progress.completed

    def _is_within_batch(self) -> bool:
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return progress.started > progress.processed

    def _lacks_iterator(self) -> bool:
        """Whether nothing was claimed of an epoch for which Lightning iterates not.

        It does so for all epochs but the first one of a run.
        """
        if self._batches is None:
            return False
        loop, current = self._trainer.fit_loop, self.under_way
        # Lightning 2.5.0 lacks `is_resuming`, and checks `restarting` alone.
        resumes = getattr(loop, "is_resuming", False) or loop.epoch_loop.restarting
        is_stale = current is None or current.number != self._batches.epoch
        return is_stale and (self._trainer.current_epoch == 0 or resumes)


def prepare_training_loaders(
    trainer: pl.Trainer,
    work_sharing: WorkSharing | None,
    place: PlaceInEpoch | None,
    overrides: Overrides,
) -> None:
    """Replaces Lightning's preparation of loaders, if epochs are shared or resumed.

    A shared epoch takes the place of Lightning's `DistributedSampler`. It precedes a
    resume at `place`, because it keeps its own record of the remaining batches.
    """
    if work_sharing is None and place is None:
        return
    iterators = LoopIterators()
    if work_sharing is not None:
        iterators, source = work_sharing.iterators, trainer.fit_loop._data_source
        overrides.wrap(source, "dataloader", work_sharing.count_loaders)
    iterators.follow(trainer, overrides)
    prepare = partial(_prepare, work_sharing, place, iterators)
    overrides.wrap(trainer._data_connector, "_prepare_dataloader", prepare)


def _prepare(
    work_sharing: WorkSharing | None,
    place: PlaceInEpoch | None,
    iterators: LoopIterators,
    lightnings: Callable[..., Any],
    dataloader: Any,
    shuffle: bool,
    mode: RunningStage,
) -> Any:
    trains = mode == RunningStage.TRAINING
    if trains and work_sharing is not None and work_sharing.takes(dataloader):
        return iterators.expect(work_sharing.prepare(dataloader))
    loader = lightnings(dataloader, shuffle, mode)
    if trains and place is not None:
        return iterators.expect(place.prepare(loader, iterators.are_made))
    return loader
