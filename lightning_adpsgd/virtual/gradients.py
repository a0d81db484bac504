"""The gradients of several super-learners in one pass, if the module allows it.

`torch.func.vmap` runs the module once over stacked weights and stacked batches: one
call for S small ones. It needs a module without buffers, and a loss whose computation
does not depend on the values of tensors. It takes a recurrent layer apart into its
steps, which is slower than a loop over the super-learners.

The weights of a super-learner do not change between two of its turns: exchanges are
merged when its turn ends. So its gradient may be computed at any time in between, and
many can be computed together even without lockstep.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_structure, tree_unflatten
from typing_extensions import override

from lightning_adpsgd.virtual.objective import Objective
from lightning_adpsgd.virtual.rows import Rows, stacked

Stacked = tuple[dict[nn.Parameter, Tensor], Tensor]
"""Gradients and losses, [row, ...]."""

# A pass costs the calls of about four gradients, however many it takes.
_FEWEST = 8
# Bytes of the gradients of one pass: for more, the system has to find new memory.
_TOGETHER_BYTES = 24 << 20


class Turn(NamedTuple):
    """One batch for each learner, with mean gradient and loss if already computed."""

    batches: list[Any]
    gradient: tuple[dict[nn.Parameter, Tensor], Tensor] | None = None


_Named = dict[str, Tensor]
_PREFIX = "module."


class _LossOf(nn.Module):
    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.module, self._objective = objective.module, objective

    @override
    def forward(self, batch: Any, number: Any) -> Tensor:
        return self._objective.loss(batch, number)


class BatchedGradients:
    """Gradients at several rows of weights, each on its own batches.

    A parameter that the loss does not use has a zero gradient. Random numbers differ
    between rows. Modules with buffers are refused.
    """

    def __init__(self, objective: Objective, rows: Rows, num_rows: int) -> None:
        for name, buffer in objective.module.named_buffers():
            raise ValueError(
                "`vectorize` must be False for a module with buffers, whose statistics "
                f"a pass over stacked weights cannot keep, got `{name}` of shape "
                f"{tuple(buffer.shape)}"
            )
        self._loss, self._matrices = _LossOf(objective), rows.first(num_rows)
        self._slots = rows.slots
        self._parameters = dict(self._loss.named_parameters())
        self._gradients = vmap(grad_and_value(self._loss_at), randomness="different")

    def __call__(
        self,
        rows: Sequence[int],
        batches: Sequence[Sequence[Any]],
        numbers: Sequence[int],
    ) -> Stacked | None:
        """Mean gradients and mean losses, [row, ...], over each row's batches.

        Args:
            rows: numbers of the rows, in ascending order.
            batches: batches of each row, the same number for each.
            numbers: `batch_idx` of each row's step.

        Returns:
            Gradients and losses; None if the batches have different shapes and cannot
            be stacked.

        Raises:
            ValueError: The module cannot run over stacked weights.
        """
        stacks = [_stacked(turn) for turn in zip(*batches, strict=True)]
        if None in stacks:
            return None
        weights = self._weights(rows)
        told = torch.tensor(numbers, device=self._matrices[0].device)
        turns = [self._of(weights, stack, told) for stack in stacks]
        gradients, losses = self._mean(turns)
        return {self._parameters[n]: g for n, g in gradients.items()}, losses

    def _weights(self, rows: Sequence[int]) -> tuple[_Named, _Named]:
        matrices = self._chosen(rows)
        trained, fixed = _Named(), _Named()
        for slot in self._slots:
            name = _PREFIX + slot.name
            into = trained if self._parameters[name].requires_grad else fixed
            into[name] = stacked(slot, matrices)
        return trained, fixed

    def _chosen(self, rows: Sequence[int]) -> list[Tensor]:
        """The rows of each matrix: views if they are consecutive, otherwise copies."""
        first, last = rows[0], rows[-1]
        if last - first + 1 == len(rows):
            return [matrix[first : last + 1] for matrix in self._matrices]
        return [matrix[list(rows)] for matrix in self._matrices]

    def _of(
        self, weights: tuple[_Named, _Named], batch: Any, numbers: Tensor
    ) -> tuple[_Named, Tensor]:
        try:
            return self._gradients(*weights, tree_unflatten(*batch), numbers)
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

    def _loss_at(self, trained: _Named, fixed: _Named, *given: Any) -> Tensor:
        return functional_call(self._loss, {**trained, **fixed}, given)


class GradientsAhead:
    """Computes the gradients of later turns together with the one that is asked for.

    `next_turn` gives the batches and the number of a super-learner's next step.
    """

    def __init__(
        self,
        gradients: BatchedGradients,
        at_once: int,
        next_turn: Callable[[int], tuple[list[Any], int]],
    ) -> None:
        self._gradients = gradients
        self._at_once, self._next_turn = at_once, next_turn
        self._ready: dict[int, Turn] = {}

    def take(self, index: int, settled: Sequence[int]) -> Turn:
        """Batches and gradient of a super-learner; see `VirtualLearners.settled`."""
        if index not in self._ready:
            missing = (i for i in settled if i not in self._ready)
            self._fill(sorted(islice(missing, self._at_once)))
        return self._ready.pop(index)

    def forget(self, index: int) -> None:
        """Discards a gradient at weights that have changed, but keeps its batches."""
        if index in self._ready:
            self._ready[index] = Turn(self._ready[index].batches)

    def forget_all(self) -> None:
        """Discards all gradients."""
        for index in self._ready:
            self.forget(index)

    def _fill(self, rows: list[int]) -> None:
        batches, numbers = zip(*map(self._next_turn, rows), strict=True)
        found = self._gradients(rows, batches, numbers)
        for position, (row, own) in enumerate(zip(rows, batches, strict=True)):
            self._ready[row] = Turn(own, found and _at(found, position))


def rows_at_once(rows: Rows, num_rows: int) -> int:
    """The number of gradients per pass."""
    row_bytes = sum(vector.nbytes for vector in rows.vectors(0))
    return min(num_rows, max(_FEWEST, _TOGETHER_BYTES // row_bytes))


def _at(found: Stacked, position: int) -> Stacked:
    gradients, losses = found
    one = {parameter: g[position] for parameter, g in gradients.items()}
    return one, losses[position]


def _stacked(batches: Sequence[Any]) -> tuple[list[Tensor], Any] | None:
    """The stacked tensors of the batches; None if their shapes differ."""
    leaves = [tree_flatten(batch)[0] for batch in batches]
    if any(not isinstance(leaf, Tensor) for leaf in leaves[0]):
        return None
    shapes = {tuple(leaf.shape for leaf in each) for each in leaves}
    if len(shapes) > 1:
        return None
    structure = tree_structure(batches[0])
    return [torch.stack(same) for same in zip(*leaves, strict=True)], structure
