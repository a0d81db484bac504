"""The batches of each virtual learner: from a function, or its share of a data set."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from lightning_adpsgd.dials import check_count

BatchesOf = Callable[[int], Iterable[Any]]


class Source:
    """The batches of one learner over all epochs.

    Attributes:
        epochs: number of finished epochs.
        batches: number of batches taken in the current epoch.
    """

    def __init__(self, batches_of: BatchesOf, learner: int) -> None:
        self._batches_of, self._learner = batches_of, learner
        self._batches: Iterator[Any] = iter(batches_of(learner))
        self.epochs = self.batches = 0

    def next(self) -> Any:
        """The next batch; starts the next epoch at the end of one."""
        self.batches += 1
        for batch in self._batches:
            return batch
        self.epochs, self.batches = self.epochs + 1, 1
        self._batches = iter(self._batches_of(self._learner))
        for batch in self._batches:
            return batch
        raise ValueError(
            f"`data` must give each learner a batch in every epoch, but learner "
            f"{self._learner} got no batches"
        )


def shares_of(
    data: DataLoader[Any] | Dataset[Any],
    batch_size: int | None,
    num_learners: int,
    seed: int,
) -> BatchesOf:
    """Deals the samples of a data set to the learners, in a new order in each epoch.

    The shares are those of torch's `DistributedSampler` with the same seed, and so of
    Lightning's training with as many processes. If they would be unequal, it repeats a
    few samples. Of a loader the data set, `collate_fn` and `drop_last` are used, and
    its `batch_size` unless another is given.

    Raises:
        TypeError: `batch_size` is no whole number.
        ValueError: It is missing or below 1, or `data` too short or with own samplers.
    """
    loading: dict[str, Any] = {}
    dataset: Any = data.dataset if isinstance(data, DataLoader) else data
    _check_length(dataset, num_learners)
    if isinstance(data, DataLoader):
        _check_order(data, len(dataset))
        batch_size = data.batch_size if batch_size is None else batch_size
        loading = {"collate_fn": data.collate_fn, "drop_last": data.drop_last}
    if batch_size is None:
        raise ValueError(
            "`local_batch_size` is needed with a data set, or with a loader that has "
            "no `batch_size`; got None"
        )
    check_count("local_batch_size", batch_size)
    epochs = [0] * num_learners

    def batches_of(learner: int) -> Iterable[Any]:
        of_epoch = seed + epochs[learner]
        epochs[learner] += 1
        share = DistributedSampler(dataset, num_learners, learner, seed=of_epoch)
        return DataLoader(dataset, batch_size, sampler=share, **loading)

    return batches_of


def _check_length(dataset: Any, num_learners: int) -> None:
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"`data` must have a length to be dealt, got a {type(dataset).__name__}; "
            "give a function from the number of a learner to its batches"
        )
    if len(dataset) < num_learners:
        raise ValueError(
            f"`data` must have a sample for each of {num_learners} learners, got "
            f"{len(dataset)}"
        )


def _check_order(loader: DataLoader[Any], num_samples: int) -> None:
    own: Any = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:
        own = loader.batch_sampler
    is_plain = type(own) in (RandomSampler, SequentialSampler)
    if not is_plain or getattr(own, "replacement", False) or len(own) != num_samples:
        raise ValueError(
            "`data` must be a loader with a `batch_size` that takes each sample once, "
            f"got one with a {type(own).__name__}, whose choice is lost when the "
            "samples are dealt to learners; give `Subset(dataset, indices)`, or a "
            "function from the number of a learner to its batches"
        )
