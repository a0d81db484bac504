"""Which iterators over a training loader are those of Lightning's training loop.

A program may iterate over `trainer.train_dataloader` in any hook, to look at a batch or
to fill a memory bank. What a loader keeps of the epoch must not move then. It keeps the
batches that a learner claims, the place to which it returns, and its one set of
persistent workers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, final

import lightning.pytorch as pl

from lightning_adpsgd.strategy.overrides import Overrides


@final
class LoopIterators:
    """Knows when the training loop makes an iterator.

    Lightning makes the first one at set-up. A data set may be ready only after the
    hooks at the start of an epoch, so nothing need be read before them. `is_missing`
    says whether the epoch that starts needs another iterator.

    Attributes:
        are_early: whether those of a new loader come before these hooks.
    """

    def __init__(self, is_missing: Callable[[], bool] = bool) -> None:
        self._is_missing, self._are_made = is_missing, False
        self.are_early = False
        self._persistent: list[Any] = []

    def are_made(self) -> bool:
        """Whether the loop makes one at present."""
        return self._are_made

    def follow(self, trainer: pl.Trainer, overrides: Overrides) -> None:
        """Notes the two places of Lightning's loops that make an iterator."""
        overrides.wrap(trainer.fit_loop, "setup_data", self._end)
        loop = trainer.fit_loop.epoch_loop
        overrides.wrap(loop, "on_run_start", partial(self._start, loop))

    def expect(self, loader: Any) -> Any:
        """Notes a new loader, over which `setup_data` makes an iterator."""
        if not self._are_made:
            self._persistent = []
        if getattr(loader, "persistent_workers", False):
            self._persistent.append(loader)
        self._are_made = self.are_early = True
        return loader

    def _start(self, loop: Any, starts: Callable[..., None], data_fetcher: Any) -> None:
        def begin() -> None:
            if self._is_missing():
                iter(data_fetcher)
            starts(data_fetcher)

        self.are_early = False
        self._set(True)
        self._end(begin)
        total = loop.batch_progress.total
        if loop.restarting and total.ready > total.processed:  # a batch was under way
            # Lightning would count it twice, and prepare once more the validation
            # before it, which draws a random number.
            total.reset_on_restart()
            loop.restarting = False

    def _end(self, makes: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return makes(*arguments)
        finally:
            self._set(False)

    def _set(self, are_made: bool) -> None:
        self._are_made = are_made
        for loader in self._persistent:
            # Otherwise it would give a program the iterator of the loop, begun anew.
            vars(loader).update(persistent_workers=are_made)
