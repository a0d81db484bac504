"""The batches of each virtual learner: from a function, or its share of a data set."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

BatchesOf = Callable[[int], Iterable[Any]]


class Shares:
    """Deals the samples of a data set in each epoch, each sample to one learner.

    A learner's share of an epoch is that of torch's `DistributedSampler` with the same
    seed, and thus of Lightning's training with as many processes. `loading` has
    arguments of torch's `DataLoader`, such as `collate_fn`.

    Raises:
        ValueError: The data set has no length, or fewer samples than there are
            learners.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        num_learners: int,
        seed: int = 0,
        **loading: Any,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise ValueError(
                f"`data` must have a length to be dealt, got a {type(dataset).__name__}"
                "; give a function from the number of a learner to its batches"
            )
        num_samples = len(dataset)  # pyright: ignore[reportArgumentType]
        if num_samples < num_learners:
            raise ValueError(
                f"`data` must have a sample for each of {num_learners} learners, got "
                f"{num_samples}"
            )
        self._dataset, self._batch_size, self._loading = dataset, batch_size, loading
        self._seed, self._epochs = seed, [0] * num_learners

    def __call__(self, learner: int) -> Iterable[Any]:
        """The batches of a learner's next epoch."""
        seed, num_learners = self._seed + self._epochs[learner], len(self._epochs)
        self._epochs[learner] += 1
        share = DistributedSampler(self._dataset, num_learners, learner, seed=seed)
        return DataLoader(
            self._dataset, self._batch_size, sampler=share, **self._loading
        )


class Source:
    """The batches of one learner over all epochs; `epochs` counts finished ones."""

    def __init__(self, batches_of: BatchesOf, learner: int) -> None:
        self._batches_of, self._learner = batches_of, learner
        self._batches: Iterator[Any] = iter(batches_of(learner))
        self.epochs = 0

    def next(self) -> Any:
        """The next batch; starts the next epoch at the end of one.

        Raises:
            ValueError: An epoch has no batch.
        """
        for batch in self._batches:
            return batch
        self.epochs += 1
        self._batches = iter(self._batches_of(self._learner))
        for batch in self._batches:
            return batch
        raise ValueError(f"learner {self._learner} got no batches for an epoch")


def shares_of(
    data: DataLoader[Any] | Dataset[Any],
    batch_size: int | None,
    num_learners: int,
    seed: int,
) -> Shares:
    """Deals the samples of a data set, or of a loader with its own loading options.

    Raises:
        ValueError: No batch size is given.
    """
    if isinstance(data, DataLoader):
        size = batch_size or data.batch_size
        loading = {"collate_fn": data.collate_fn, "drop_last": data.drop_last}
        dataset = data.dataset
    else:
        size, loading, dataset = batch_size, {}, data
    if size is None:
        raise ValueError("`local_batch_size` is needed with a data set, got None")
    return Shares(dataset, size, num_learners, seed, **loading)
