"""What super-learners step with: gradients taken together, or one after the other."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_adpsgd.virtual.batched import Ahead, BatchedGradients, Turn
from lightning_adpsgd.virtual.fleet import Fleet
from lightning_adpsgd.virtual.objective import Loss, Objective
from lightning_adpsgd.virtual.together import FirstGradient, rows_at_once, why_not

_log = logging.getLogger(__name__)


class Turns:
    """Gives each super-learner, when its turn has come, its batches and its gradient.

    Args:
        objective: The module and its loss.
        loss: As the user gave it, if at all.
        optimizer: Of a super-learner.
        fleet: The weights, and whose turn it is.
        next_batches: Gives those of a super-learner's next step.
        vectorize: Whether gradients are taken together; none: `together` decides.

    Raises:
        ValueError: They are to be, and cannot.

    Attributes:
        in_a_loop: Why they are taken one after the other; empty if they are not, none
            before the first one has decided it.
    """

    in_a_loop: str | None

    def __init__(
        self,
        objective: Objective,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer,
        fleet: Fleet,
        next_batches: Callable[[int], list[Any]],
        vectorize: bool | None,
    ) -> None:
        self._objective, self._fleet = objective, fleet
        self._optimizer, self._next_batches = optimizer, next_batches
        self._first = FirstGradient(objective.module, loss)
        self._ahead: Ahead | None = None
        if vectorize is None:
            reason = why_not(objective.module, optimizer, self._size, self._row_bytes)
            self.in_a_loop = reason or None
        else:
            self.in_a_loop = "" if vectorize else "`vectorize` is False"
            self._ahead = self._make_ahead() if vectorize else None

    def take(self, index: int) -> Turn:
        """What a super-learner steps with; its gradient only if it was taken before."""
        if self._ahead is None:
            return Turn(self._next_batches(index))
        turn = self._ahead.take(index, self._fleet.settled)
        if self._ahead.refused:
            self._stay_in_a_loop(self._ahead.refused)
        return turn

    def watching(self) -> AbstractContextManager[None]:
        """Around each loss of the loop: of the first it is seen what it leaves."""
        return self._first.watching() if self.in_a_loop is None else nullcontext()

    def stepped(self) -> None:
        """A super-learner has made its step; the first decides about the others."""
        if self.in_a_loop is not None:
            return
        if reason := self._first.why_not():
            self._stay_in_a_loop(reason)
            return
        module = self._objective.module
        unused = [weight for weight in module.parameters() if weight.grad is None]
        self._ahead, self.in_a_loop = self._make_ahead(unused), ""

    def forget(self, index: int) -> None:
        """The super-learner has other weights."""
        if self._ahead is not None:
            self._ahead.forget(index)

    def leave(self) -> None:
        """Others may change weights until `come_back`."""
        if self._ahead is not None:
            self._ahead.leave()

    def come_back(self) -> None:
        """Goes on, whatever has become of the weights."""
        if self._ahead is not None:
            self._ahead.come_back()

    @property
    def _size(self) -> int:
        return len(self._fleet.steps)

    @property
    def _row_bytes(self) -> int:
        return sum(vector.nbytes for vector in self._fleet.rows.vectors(0))

    def _stay_in_a_loop(self, reason: str) -> None:
        if self.in_a_loop != reason:
            self.in_a_loop = reason
            _log.info("gradients are taken one after the other: %s", reason)

    def _make_ahead(self, unused: list[torch.nn.Parameter] | None = None) -> Ahead:
        """Checked by a first gradient, which left some weights out; or as asked for."""
        if isinstance(self._optimizer, torch.optim.LBFGS):
            raise ValueError(
                "`vectorize` must be False with LBFGS, which asks for several "
                "gradients in one step, got True"
            )
        rows, size, checked = self._fleet.rows, self._size, unused is not None
        gradients = BatchedGradients(
            self._objective, rows, size, unused or (), draws=not checked
        )
        weights = [matrix[:size] for matrix in rows.matrices]
        at_once = rows_at_once(size, self._row_bytes)
        return Ahead(gradients, weights, at_once, self._next_turn, falls_back=checked)

    def _next_turn(self, index: int) -> tuple[list[Any], int]:
        return self._next_batches(index), self._fleet.steps[index]
