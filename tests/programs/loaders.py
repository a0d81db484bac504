"""What programs read: rows with their places, and the ways in which they come."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    get_worker_info,
)
from typing_extensions import override

from tests.programs.faults import with_fault
from tests.programs.program import Arguments, Program

NUM_HELD_OUT = 7
ROWS = {str(number): number for number in (24, 5, 9, 16, 33, 47)}
_FORKED: Arguments = {"multiprocessing_context": "fork"}
_LASTING: Arguments = {"num_workers": 2, "persistent_workers": True}
LOADER: dict[str, dict[str, Arguments]] = {
    "batch": {str(number): {"batch_size": number} for number in (2, 1, 4, 5)},
    "workers": {
        "none": {},
        "1": {"num_workers": 1, **_FORKED},
        "2": {"num_workers": 2, **_FORKED},
        "2 that last": {**_LASTING, **_FORKED},
    },
}
# Of the loader of training rows alone.
ORDER: dict[str, dict[str, Arguments]] = {
    "order": {"shuffled": {"shuffle": True}, "fixed": {}},
    "last batch": {"kept": {}, "dropped": {"drop_last": True}},
}


class Rows(Dataset[Any]):
    """Seeded random rows; each is its numbers, its class and its place."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.randn(length, 6, generator=generator)
        self.classes = torch.randint(0, 3, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.classes[index], index


class NamedRows(Dataset[Any]):
    """The same as dictionaries."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(zip(("row", "class", "place"), self._rows[index], strict=True))


class Stream(IterableDataset[Any]):
    """Deals rows to learners and workers itself, as many to each."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @override
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, within = (info.num_workers, info.id) if info else (1, 0)
        size = int(os.environ["WORLD_SIZE"]) * number
        first = int(os.environ["RANK"]) * number + within
        end = len(self._rows) - len(self._rows) % size
        return (self._rows[place] for place in range(first, end, size))


class OwnSampler(Sampler[int]):
    """Shuffles by the epoch, of which `set_epoch` tells it."""

    def __init__(self, length: int) -> None:
        self._length, self._epoch = length, 0

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    @override
    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._epoch)
        return iter(torch.randperm(self._length, generator=generator).tolist())


def unpack(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, classes and places of a batch, or of the first of several."""
    if isinstance(batch, dict):
        if "row" in batch:
            return batch["row"], batch["class"], batch["place"]
        return unpack(next(iter(batch.values())))
    return batch if isinstance(batch[0], Tensor) else unpack(batch[0])


def rows_of(program: Program) -> Rows:
    """The training rows, whose `__getitem__` may raise."""
    kind = with_fault(Rows, program, int(os.environ["RANK"]))
    return kind(program.pick("rows", ROWS))


def _loader(program: Program, rows: Any = None, **options: Any) -> DataLoader[Any]:
    rows = rows if rows is not None else rows_of(program)
    merged = {**program.merged(LOADER), **program.merged(ORDER), **options}
    return DataLoader(rows, **{k: v for k, v in merged.items() if v is not None})


def _sampled(program: Program, sampler: Sampler[int]) -> DataLoader[Any]:
    return _loader(program, sampler=sampler, shuffle=None)


def _stream(program: Program) -> DataLoader[Any]:
    return _loader(program, Stream(rows_of(program)), shuffle=None, drop_last=None)


def _own_sampler(program: Program) -> DataLoader[Any]:
    return _sampled(program, OwnSampler(program.pick("rows", ROWS)))


def _distributed_sampler(program: Program) -> DataLoader[Any]:
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    return _sampled(program, DistributedSampler(rows_of(program), size, rank))


def _subset(program: Program) -> DataLoader[Any]:
    rows = rows_of(program)
    return _loader(program, Subset(rows, range(len(rows))))


def _combined(program: Program) -> CombinedLoader:
    loaders = {"first": _loader(program), "second": _loader(program, Rows(8))}
    return CombinedLoader(loaders, "min_size")


def _cycled(program: Program) -> CombinedLoader:
    loaders = {"first": _loader(program), "second": _loader(program, Rows(8))}
    return CombinedLoader(loaders, "max_size_cycle")


def held_out(program: Program, length: int = NUM_HELD_OUT) -> DataLoader[Any]:
    """A loader for evaluations."""
    rows = Rows(length)
    is_named = program.choices.get("data") == "dictionaries"
    return DataLoader(NamedRows(rows) if is_named else rows, **program.merged(LOADER))


class Data(pl.LightningDataModule):
    """Makes each loader when Lightning asks for it."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return _loader(self._program)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return held_out(self._program)

    test_dataloader = predict_dataloader = val_dataloader


DATA: dict[str, Callable[[Program], Any]] = {
    "loader": _loader,
    "data module": Data,
    "dictionaries": lambda program: _loader(program, NamedRows(rows_of(program))),
    "stream": _stream,
    "own sampler": _own_sampler,
    "distributed sampler": _distributed_sampler,
    "subset": _subset,
    "combined": _combined,
    "cycled": _cycled,
    "list": lambda program: [_loader(program), _loader(program, Rows(8))],
}
# What validation reads, by the lengths of its loaders.
HELD_OUT: dict[str, tuple[int, ...]] = {"one": (7,), "two": (7, 5)}


def fit_arguments(program: Program) -> Arguments:
    """What `fit` is given beside the module."""
    data = program.pick("data", DATA)(program)
    if isinstance(data, pl.LightningDataModule):
        return {"datamodule": data}
    lengths = program.pick("held-out loaders", HELD_OUT)
    loaders = [held_out(program, length) for length in lengths]
    return {"train_dataloaders": data, "val_dataloaders": loaders}


def evaluation_arguments(program: Program, fitted: Arguments) -> Arguments:
    """What `validate`, `test` and `predict` are given beside the module."""
    return fitted if "datamodule" in fitted else {"dataloaders": held_out(program)}
