"""The gradients of all super-learners in one pass, where the module allows it.

`torch.func.vmap` runs the module once over stacked weights and stacked batches: one
call for S small ones. It needs a module without buffers, and a loss whose computation
does not depend on the values of tensors. A recurrent layer is taken apart there into
its steps, which is slower than a loop over the super-learners.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from lightning_adpsgd.virtual.objective import Objective
from lightning_adpsgd.virtual.rows import Rows

Stacked = tuple[dict[nn.Parameter, Tensor], Tensor]
"""Gradients and losses, [row, ...]."""

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
        self._loss, self._parameters = _LossOf(objective), dict[str, nn.Parameter]()
        trained, fixed = dict[str, Tensor](), dict[str, Tensor]()
        of_name = dict(objective.module.named_parameters())
        for place in rows.places:
            stacked = rows.stacked(place, num_rows)
            parameter = of_name[place.name]
            kind = trained if parameter.requires_grad else fixed
            kind[_PREFIX + place.name] = stacked
            if parameter.requires_grad:
                self._parameters[_PREFIX + place.name] = parameter
        self._trained, self._fixed = trained, fixed
        self._gradients = vmap(grad_and_value(self._loss_at), randomness="different")

    def __call__(self, batches: Sequence[Sequence[Any]]) -> Stacked | None:
        """Mean gradients and mean losses, [row, ...], over each row's batches.

        Args:
            batches: As many for each row.

        Returns:
            None where the batches have different shapes and cannot be stacked.

        Raises:
            ValueError: The module cannot run over stacked weights.
        """
        stacks = [_stacked(turn) for turn in zip(*batches, strict=True)]
        if None in stacks:
            return None
        gradients, losses = self._mean([self._of(stack) for stack in stacks])
        return {self._parameters[n]: g for n, g in gradients.items()}, losses

    def _of(self, batch: Any) -> tuple[dict[str, Tensor], Tensor]:
        leaves, structure = batch
        try:
            return self._gradients(
                self._trained, self._fixed, tree_unflatten(leaves, structure)
            )
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
