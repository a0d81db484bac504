"""A learner's place in its epoch: the batches begun, and how their order was drawn.

When Lightning resumes in the middle of an epoch, it repeats the first batches of the
loader. Here the batch sampler skips the batches that were trained on. It draws their
order again from the states that the random generators had when the epoch began.
Afterwards the generators continue from their saved states.

The loader needs a batch sampler. The random choices of a data set are reproduced only
if the training process reads it itself (`num_workers=0`).
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_adpsgd.epochs.work_units import generators_of
from lightning_adpsgd.strategy.checkpoints.rng_state import (
    generator_states,
    set_generator_states,
)
from lightning_adpsgd.strategy.fast_forward import batch_size


class PlacedBatches:
    """A batch sampler that records how its epoch began, and can start in the middle.

    It does so for the iterators for which `is_of_loop` says that they are the training
    loop's. A program may iterate too, over a whole epoch.
    """

    def __init__(
        self,
        batches: Any,
        device: torch.device,
        is_of_loop: Callable[[], bool] = lambda: True,
    ) -> None:
        self._batches, self._device = batches, device
        self._is_of_loop = is_of_loop
        self._begin: dict[str, Any] | None = None
        self._num_trained = self._num_drawn = 0

    @property
    def sampler(self) -> Any:
        """The sampler in which Lightning sets the number of the epoch."""
        return getattr(self._batches, "sampler", None)

    @property
    def batch_size(self) -> Any:
        """The batch size, which Lightning and loggers ask for."""
        return getattr(self._batches, "batch_size", None)

    @property
    def drop_last(self) -> Any:
        """Whether batches that are not full are dropped."""
        return getattr(self._batches, "drop_last", None)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return self._from_place() if self._is_of_loop() else iter(self._batches)

    def _from_place(self) -> Iterator[list[int]]:
        # Taken with the first batch, after the loader has drawn a number of its own.
        num_trained, num_drawn, now = self._num_trained, self._num_drawn, self._states()
        if num_drawn and self._begin is not None:
            self._set(self._begin)
        else:
            self._begin = now
        batches = iter(self._batches)
        drawn = islice(batches, num_drawn)
        again = [batch for n, batch in enumerate(drawn) if n >= num_trained]
        if num_drawn:
            set_generator_states(now["common"], self._device)
        self._num_trained = self._num_drawn = 0
        yield from again
        yield from batches

    def state(self) -> dict[str, Any] | None:
        """How the order of the epoch was drawn; None before its first batch."""
        return self._begin

    def resume(
        self, begin: dict[str, Any] | None, num_trained: int, num_drawn: int
    ) -> None:
        """Leaves out batches that were trained on, of an epoch that began in `begin`.

        It draws `num_drawn` again, before the generators go on from where they were.
        """
        self._begin = begin
        self._num_trained, self._num_drawn = num_trained, num_drawn

    def _states(self) -> dict[str, Any]:
        generators = generators_of(self._batches, self.sampler)
        own = [generator.get_state() for generator in generators]
        return {"common": generator_states(self._device), "own": own}

    def _set(self, states: Mapping[str, Any]) -> None:
        set_generator_states(states["common"], self._device)
        generators = generators_of(self._batches, self.sampler)
        for generator, state in zip(generators, states["own"], strict=False):
            generator.set_state(state.cpu())


class PlaceInEpoch:
    """One learner's place in the epochs of a Trainer, and its generators.

    With `work_sharing`, a stream, or several loaders there is no place to return to, so
    the checkpoint keeps only the generators. `saved` is what `state` gave.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        device: torch.device,
        saved: Mapping[str, Any] | None = None,
        num_samples: int = 0,
    ) -> None:
        self._trainer, self._device, self._saved = trainer, device, saved
        self._num_samples: int = saved["num_samples"] if saved else num_samples
        self._has_set, self._num_under_way = False, 0

    def begin(self) -> None:
        """Lets the generators continue from their saved states, as training starts."""
        # After a save in the validation that ends an epoch, the iterator of the set-up
        # is not read: the next epoch makes another, as it did in the job that saved.
        epochs: Any = self._trainer.fit_loop.epoch_progress.current
        if not self._has_set or epochs.processed < epochs.started:
            self._set_generators()
        self._saved = None

    def _set_generators(self) -> None:
        if self._saved is not None:
            set_generator_states(self._saved["generators"], self._device)

    def count(self, batch: Any) -> None:
        """Counts the samples of a batch that training begins; none if unknown."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's, if it guesses the size
            self._num_under_way = batch_size(batch)
        self._num_samples += self._num_under_way

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint; `num_samples` counts all runs of this learner."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        current: Any = progress.current
        placed = self._placed()
        # A batch under way is trained on again: Lightning counts it so, too.
        is_within = current.ready > current.processed or not progress.is_last_batch
        is_within = placed is not None and is_within
        has_begun = current.started > current.processed
        return {
            "generators": generator_states(self._device),
            "num_samples": self._num_samples - has_begun * self._num_under_way,
            "num_batches": current.processed if is_within else 0,
            "num_drawn": current.ready if is_within else 0,
            "begin": placed.state() if placed is not None else None,
        }

    def prepare(
        self, loader: Any, is_of_loop: Callable[[], bool] = lambda: True
    ) -> Any:
        """A copy of a training loader with `PlacedBatches`, if it can have a place."""
        if not _has_batches(loader):
            return loader
        if reads_out_of_order(loader):
            raise ValueError(
                "`in_order` of the training loader must be True with "
                "`save_learners=True`, got False: a resume would not know which "
                "batches were trained on"
            )
        batches = PlacedBatches(loader.batch_sampler, self._device, is_of_loop)
        if self._saved is not None:
            num_trained = self._saved["num_batches"]
            # Up to version 0.2 a checkpoint had but the first.
            num_drawn = self._saved.get("num_drawn", num_trained)
            batches.resume(self._saved["begin"], num_trained, num_drawn)
            # Workers read before Lightning tells the sampler.
            if callable(tell := getattr(batches.sampler, "set_epoch", None)):
                tell(self._saved["epoch"])
            if not num_drawn:
                self._set_generators()  # the epoch that begins draws from these
                self._has_set = True
        return copy_with(loader, batch_sampler=batches)

    def _placed(self) -> PlacedBatches | None:
        combined = self._trainer.fit_loop._combined_loader
        loaders = combined.flattened if combined is not None else []
        found = [getattr(loader, "batch_sampler", None) for loader in loaders]
        one = found[0] if len(found) == 1 else None
        return one if isinstance(one, PlacedBatches) else None


def reads_out_of_order(loader: DataLoader[Any]) -> bool:
    """Whether batches may come in another order than the one of the batch sampler."""
    # torch before 2.7 always keeps the order.
    return loader.num_workers > 0 and not getattr(loader, "in_order", True)


def copy_with(loader: DataLoader[Any], **samplers: Any) -> DataLoader[Any]:
    """A copy of a loader with other samplers."""
    # Not a new loader: a subclass may take no batch sampler. Not assigned: torch
    # forbids it, because running iterators would keep the old one.
    copied = copy.copy(loader)
    vars(copied).update(_iterator=None, **samplers)
    return copied


def _has_batches(loader: Any) -> bool:
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return False
    # One that keeps its own place is restored by Lightning.
    has_place = hasattr(loader, "load_state_dict")
    return not (has_place or isinstance(loader.dataset, IterableDataset))
