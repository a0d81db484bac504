"""Which iterators over a training loader are those of Lightning's training loop.

A program may iterate over `trainer.train_dataloader` in any hook, to look at a batch or
to fill a memory bank. What a loader keeps of the epoch must not move then: the batches
that a learner claims, the place to which it returns, and the persistent workers, of
which a loader has one set.
"""

from collections.abc import Callable
from typing import Any, final

import lightning.pytorch as pl

from lightning_adpsgd.strategy.overrides import Overrides


@final
class LoopIterators:
    """Knows when the training loop makes an iterator."""

    def __init__(self) -> None:
        self._are_made = False
        self._persistent: list[Any] = []

    def are_made(self) -> bool:
        """Whether the loop makes one at present."""
        return self._are_made

    def follow(self, trainer: pl.Trainer, overrides: Overrides) -> None:
        """Notes the two places of Lightning's loops that make an iterator."""
        overrides.wrap(trainer.fit_loop, "setup_data", self._end)
        overrides.wrap(trainer.fit_loop.epoch_loop, "on_run_start", self.make)

    def expect(self, loader: Any) -> Any:
        """Notes a new loader, over which `setup_data` makes an iterator."""
        if not self._are_made:
            self._persistent = []
        if getattr(loader, "persistent_workers", False):
            self._persistent.append(loader)
        self._are_made = True
        return loader

    def make(self, makes: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function that makes an iterator for the loop."""
        self._set(True)
        return self._end(makes, *arguments)

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
