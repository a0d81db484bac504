"""The gradients of several super-learners in one pass, where the module allows it.

`torch.func.vmap` runs the module once over stacked weights and stacked batches: one
call for S small ones. It needs a module without buffers, and a loss whose computation
does not depend on the values of tensors. A recurrent layer is taken apart there into
its steps, which is slower than a loop over the super-learners.

Between two turns of its own nothing changes the weights of a super-learner: what it
exchanges meanwhile is merged when its turn ends. So its gradient may be taken at any
time between them, and also without lockstep many of them together.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from lightning_adpsgd.virtual.objective import Objective
from lightning_adpsgd.virtual.rows import Rows, stacked

Stacked = tuple[dict[nn.Parameter, Tensor], Tensor]
"""Gradients and losses, [row, ...]."""


class Turn(NamedTuple):
    """What a super-learner steps with.

    Attributes:
        batches: One for each of its learners.
        gradient: Its mean over them and the mean loss, if they were taken before.
    """

    batches: list[Any]
    gradient: tuple[dict[nn.Parameter, Tensor], Tensor] | None = None


_Named = dict[str, Tensor]
_PREFIX = "module."


class _LossOf(nn.Module):
    """A module whose forward is the loss of a batch."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.module, self._objective = objective.module, objective

    @override
    def forward(self, batch: Any) -> Tensor:
        return self._objective.loss(batch)


class BatchedGradients:
    """Gradients at each of the first rows, each on a batch of its own.

    Args:
        objective: The module and its loss.
        rows: The weights.
        num_rows: How many are trained.

    Raises:
        ValueError: The module has buffers.
    """

    def __init__(self, objective: Objective, rows: Rows, num_rows: int) -> None:
        for name, buffer in objective.module.named_buffers():
            raise ValueError(
                "`vectorize` must be False for a module with buffers, whose statistics "
                f"a pass over stacked weights cannot keep, got `{name}` of shape "
                f"{tuple(buffer.shape)}"
            )
        self._loss, self._matrices = _LossOf(objective), rows.first(num_rows)
        # Memory that was used is used again: the system takes its time to give any.
        self._room: list[Tensor] = []
        of_name = dict(objective.module.named_parameters())
        trained = {p: of_name[p.name].requires_grad for p in rows.places}
        self._trained = [place for place, is_so in trained.items() if is_so]
        self._fixed = [place for place, is_so in trained.items() if not is_so]
        self._parameters = {_PREFIX + p.name: of_name[p.name] for p in self._trained}
        self._gradients = vmap(grad_and_value(self._loss_at), randomness="different")

    def __call__(
        self, rows: Sequence[int], batches: Sequence[Sequence[Any]]
    ) -> Stacked | None:
        """Mean gradients and mean losses, [row, ...], over each row's batches.

        Args:
            rows: Whose, in ascending order.
            batches: As many for each row.

        Returns:
            None where the batches have different shapes and cannot be stacked.

        Raises:
            ValueError: The module cannot run over stacked weights.
        """
        stacks = [_stacked(turn) for turn in zip(*batches, strict=True)]
        if None in stacks:
            return None
        weights = self._weights(rows)
        turns = [self._of(weights, stack) for stack in stacks]
        gradients, losses = self._mean(turns)
        return {self._parameters[n]: g for n, g in gradients.items()}, losses

    def _weights(self, rows: Sequence[int]) -> tuple[_Named, _Named]:
        """Of some rows, those that are trained and the others."""
        matrices = self._chosen(rows)
        trained, fixed = (
            {_PREFIX + place.name: stacked(place, matrices) for place in places}
            for places in (self._trained, self._fixed)
        )
        return trained, fixed

    def _chosen(self, rows: Sequence[int]) -> list[Tensor]:
        """The matrices themselves if these are all of their rows, else copies."""
        if len(rows) == len(self._matrices[0]):
            return self._matrices
        device = self._matrices[0].device
        where = torch.tensor(rows, device=device)
        if not self._room:
            self._room = [torch.empty_like(matrix) for matrix in self._matrices]
        pairs = zip(self._matrices, self._room, strict=True)
        return [torch.index_select(m, 0, where, out=r[: len(rows)]) for m, r in pairs]

    def _of(self, weights: tuple[_Named, _Named], batch: Any) -> tuple[_Named, Tensor]:
        leaves, structure = batch
        trained, fixed = weights
        try:
            return self._gradients(trained, fixed, tree_unflatten(leaves, structure))
        except RuntimeError as error:
            raise ValueError(
                f"`vectorize` must be False for this module: {error}"
            ) from error

    def _mean(
        self, turns: list[tuple[dict[str, Tensor], Tensor]]
    ) -> tuple[dict[str, Tensor], Tensor]:
        (gradients, losses), *others = turns
        for more, more_losses in others:
            losses = losses + more_losses
            for name, gradient in more.items():
                gradients[name] += gradient
        if others:
            gradients = {n: g / len(turns) for n, g in gradients.items()}
        return gradients, losses / len(turns)

    def _loss_at(
        self, trained: dict[str, Tensor], fixed: dict[str, Tensor], batch: Any
    ) -> Tensor:
        return functional_call(self._loss, {**trained, **fixed}, (batch,))


class Ahead:
    """Takes the gradients of turns to come together with the one that is asked for.

    Args:
        gradients: Of several rows at once.
        next_batches: Gives those of a super-learner's next step.
    """

    def __init__(
        self, gradients: BatchedGradients, next_batches: Callable[[int], list[Any]]
    ) -> None:
        self._gradients, self._next_batches = gradients, next_batches
        self._ready: dict[int, Turn] = {}

    def take(self, index: int, members: Sequence[int]) -> Turn:
        """What a super-learner steps with; its weights are those of its last turn.

        Args:
            index: Whose turn it is.
            members: All that take part, in ascending order.
        """
        if index not in self._ready:
            self._fill([i for i in members if i not in self._ready])
        return self._ready.pop(index)

    def forget(self, index: int) -> None:
        """The super-learner has other weights; its batches are still the next ones."""
        if index in self._ready:
            self._ready[index] = Turn(self._ready[index].batches)

    def _fill(self, rows: list[int]) -> None:
        batches = [self._next_batches(row) for row in rows]
        found = self._gradients(rows, batches)
        for place, (row, own) in enumerate(zip(rows, batches, strict=True)):
            self._ready[row] = Turn(own, found and _at(found, place))


def _at(found: Stacked, place: int) -> Stacked:
    gradients, losses = found
    return {parameter: g[place] for parameter, g in gradients.items()}, losses[place]


def _stacked(batches: Sequence[Any]) -> tuple[list[Tensor], Any] | None:
    """The tensors of as many batches, stacked; none if they are not of one shape."""
    flat = [tree_flatten(batch) for batch in batches]
    leaves = [leaves for leaves, _ in flat]
    if any(not isinstance(leaf, Tensor) for leaf in leaves[0]):
        return None
    shapes = {tuple(leaf.shape for leaf in each) for each in leaves}
    if len(shapes) > 1:
        return None
    return [torch.stack(same) for same in zip(*leaves, strict=True)], flat[0][1]
