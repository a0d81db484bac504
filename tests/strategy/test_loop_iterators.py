"""Iterators over a training loader: those of the training loop, and a program's."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_adpsgd.strategy.loop_iterators import LoopIterators
from lightning_adpsgd.strategy.overrides import Overrides


class Loop:
    """Asks at each call whether an iterator is the loop's, and may fail."""

    def __init__(self, iterators: LoopIterators) -> None:
        self._iterators, self.found, self.fails = iterators, list[bool](), False
        self.restarting, self.batch_progress = False, SimpleNamespace(total=None)

    def setup_data(self) -> None:
        self.found.append(self._iterators.are_made())
        if self.fails:
            raise ValueError("of a data set")

    def on_run_start(self, data_fetcher: Any) -> None:
        self.fetcher = iter(data_fetcher)
        self.setup_data()


def followed() -> tuple[LoopIterators, Any, Any]:
    iterators = LoopIterators()
    loop: Any = Loop(iterators)
    loop.epoch_loop = Loop(iterators)
    iterators.follow(SimpleNamespace(fit_loop=loop), Overrides())  # pyright: ignore
    return iterators, loop, loop.epoch_loop


def test_the_loop_iterates_after_a_new_loader_and_as_an_epoch_starts() -> None:
    iterators, loop, epoch_loop = followed()
    loop.setup_data()  # as in each epoch; the loader stays
    iterators.expect([])
    loop.setup_data()
    loop.setup_data()
    assert loop.found == [False, True, False]
    epoch_loop.on_run_start([])
    assert epoch_loop.found == [True]
    assert not iterators.are_made()


def test_a_failed_iterator_is_made_no_longer() -> None:
    iterators, loop, _ = followed()
    iterators.expect([])
    loop.fails = True
    with pytest.raises(ValueError, match="of a data set"):
        loop.setup_data()
    assert not iterators.are_made()


def test_a_program_gets_other_workers_than_the_loop() -> None:
    iterators, loop, epoch_loop = followed()
    made: DataLoader[Any] = DataLoader(
        range(4),  # pyright: ignore
        num_workers=1,
        persistent_workers=True,
    )
    iterators.expect(made)
    of_loop = iter(made)
    loop.setup_data()
    own = iter(made)
    assert own is not of_loop
    assert len(list(own)) == 4
    epoch_loop.on_run_start(made)
    assert epoch_loop.fetcher is of_loop
    assert len(list(of_loop)) == 4
