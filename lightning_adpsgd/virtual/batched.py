"""The gradients of several super-learners in one pass, where the module allows it.

`torch.func.vmap` runs the module once over stacked weights and stacked batches: one
call for S small ones. It needs a module without buffers, and a loss whose computation
does not depend on the values of tensors. A recurrent layer is taken apart there into
its steps, which is slower than a loop over the super-learners. For which modules a pass
is worth it, and safe without being asked for, is what `together` says.

Between two turns of its own nothing changes the weights of a super-learner: what it
exchanges meanwhile is merged when its turn ends. So its gradient may be taken at any
time between them, and also without lockstep many of them together.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten
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
    def forward(self, batch: Any, number: Any) -> Tensor:
        return self._objective.loss(batch, number)


class BatchedGradients:
    """Gradients at each of the first rows, each on a batch of its own.

    Args:
        objective: The module and its loss.
        rows: The weights.
        num_rows: How many are trained.
        unused: Parameters that the loss does not depend on and that get no gradient;
            by default a parameter that is not used has a gradient of zeros.
        draws: Whether a module may draw random numbers, which then differ between rows.

    Raises:
        ValueError: The module has buffers.
    """

    def __init__(
        self,
        objective: Objective,
        rows: Rows,
        num_rows: int,
        unused: Collection[nn.Parameter] = (),
        draws: bool = True,
    ) -> None:
        for name, buffer in objective.module.named_buffers():
            raise ValueError(
                "`vectorize` must be False for a module with buffers, whose statistics "
                f"a pass over stacked weights cannot keep, got `{name}` of shape "
                f"{tuple(buffer.shape)}"
            )
        self._loss, self._matrices = _LossOf(objective), rows.first(num_rows)
        self._required = _required(self._loss)
        # Memory that was used is used again: the system takes its time to give any.
        self._room: list[Tensor] = []
        of_name = dict(objective.module.named_parameters())
        trained = {place: of_name[place.name] for place in rows.places}
        skipped = {id(parameter) for parameter in unused}
        self._trained = [
            place
            for place, parameter in trained.items()
            if parameter.requires_grad and id(parameter) not in skipped
        ]
        self._fixed = [place for place in rows.places if place not in self._trained]
        self._parameters = {_PREFIX + p.name: of_name[p.name] for p in self._trained}
        self._gradients = vmap(
            grad_and_value(self._loss_at),
            randomness="different" if draws else "error",
        )

    def __call__(
        self,
        rows: Sequence[int],
        batches: Sequence[Sequence[Any]],
        numbers: Sequence[int],
    ) -> Stacked | None:
        """Mean gradients and mean losses, [row, ...], over each row's batches.

        Args:
            rows: Whose, in ascending order.
            batches: As many for each row.
            numbers: Of the step of each row, as a training step is told.

        Returns:
            None where the batches have different shapes and cannot be stacked.

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

    def trains_others(self) -> bool:
        """Whether other parameters are to be trained than when this was made."""
        return self._required != _required(self._loss)

    def _weights(self, rows: Sequence[int]) -> tuple[_Named, _Named]:
        """Of some rows, those that are trained and the others."""
        matrices = self._chosen(rows)
        trained, fixed = (
            {_PREFIX + place.name: stacked(place, matrices) for place in places}
            for places in (self._trained, self._fixed)
        )
        return trained, fixed

    def _chosen(self, rows: Sequence[int]) -> list[Tensor]:
        """The matrices themselves if these rows follow each other, else copies."""
        first, last = rows[0], rows[-1]
        if last - first + 1 == len(rows):
            return [matrix[first : last + 1] for matrix in self._matrices]
        device = self._matrices[0].device
        where = torch.tensor(rows, device=device)
        if not self._room:
            self._room = [torch.empty_like(matrix) for matrix in self._matrices]
        pairs = zip(self._matrices, self._room, strict=True)
        return [torch.index_select(m, 0, where, out=r[: len(rows)]) for m, r in pairs]

    def _of(
        self, weights: tuple[_Named, _Named], batch: Any, numbers: Tensor
    ) -> tuple[_Named, Tensor]:
        leaves, structure = batch
        trained, fixed = weights
        stacked = tree_unflatten(leaves, structure)
        try:
            return self._gradients(trained, fixed, stacked, numbers)
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
        self, trained: _Named, fixed: _Named, batch: Any, number: Tensor
    ) -> Tensor:
        return functional_call(self._loss, {**trained, **fixed}, (batch, number))


class Ahead:
    """Takes the gradients of turns to come together with the one that is asked for.

    Args:
        gradients: Of several rows at once.
        weights: [row, P] for each dtype: what they are taken at.
        at_once: How many to take, at most.
        next_turn: Gives batches and number of a super-learner's next step.
        falls_back: Whether a module for which a pass is impossible is left to the loop.

    Attributes:
        refused: Why all turns are left to the loop; empty as long as they are not.
    """

    def __init__(
        self,
        gradients: BatchedGradients,
        weights: Sequence[Tensor],
        at_once: int,
        next_turn: Callable[[int], tuple[list[Any], int]],
        falls_back: bool,
    ) -> None:
        self._gradients, self._weights = gradients, weights
        self._at_once, self._next_turn = at_once, next_turn
        self._falls_back = falls_back
        self._ready: dict[int, Turn] = {}
        self._left: list[list[float]] = []
        self._passed, self.refused = False, ""

    def take(self, index: int, settled: Sequence[int]) -> Turn:
        """What a super-learner steps with; its weights are those of its last turn.

        Args:
            index: Whose turn it is.
            settled: Those whose next gradient is at the weights that they have now, the
                one whose turn it is first.
        """
        if index not in self._ready:
            at_once = 1 if self.refused else self._at_once
            missing = (i for i in settled if i not in self._ready)
            self._fill(sorted(islice(missing, at_once)))
        return self._ready.pop(index)

    def forget(self, index: int) -> None:
        """The super-learner has other weights; its batches are still the next ones."""
        if index in self._ready:
            self._ready[index] = Turn(self._ready[index].batches)

    def leave(self) -> None:
        """Others may look at the weights, and change them, until `come_back`."""
        self._left = self._marks()

    def come_back(self) -> None:
        """Forgets gradients at weights that somebody has changed since `leave`."""
        changed = self._gradients.trains_others()
        if changed:
            self.refused = "`requires_grad` of a weight has changed"
        # None were left before the first time, and nothing is ready then.
        for marks, left in zip(self._marks(), self._left, strict=False):
            for index, (mark, old) in enumerate(zip(marks, left, strict=True)):
                if changed or mark != old:
                    self.forget(index)

    def _marks(self) -> list[list[float]]:
        """A number for each row of each matrix, by which other weights are noticed."""
        return [matrix.sum(1).tolist() for matrix in self._weights]

    def _fill(self, rows: list[int]) -> None:
        batches, numbers = zip(*map(self._next_turn, rows), strict=True)
        found = None if self.refused else self._gradients_of(rows, batches, numbers)
        for place, (row, own) in enumerate(zip(rows, batches, strict=True)):
            self._ready[row] = Turn(own, found and _at(found, place))

    def _gradients_of(
        self,
        rows: Sequence[int],
        batches: Sequence[Sequence[Any]],
        numbers: Sequence[int],
    ) -> Stacked | None:
        if not self._falls_back:
            return self._gradients(rows, batches, numbers)
        try:
            with nullcontext() if self._passed else _slow_operations_refused():
                found = self._gradients(rows, batches, numbers)
            self._passed = True
            return found
        except Exception as error:
            # Whatever it is, the loop either meets it too, or can do without a pass.
            why = str(error.__cause__ or error).partition("\n")[0]
            self.refused = f"a pass over stacked weights is impossible: {why}"
            return None


@contextmanager
def _slow_operations_refused() -> Iterator[None]:
    """Of those that a pass would take row by row torch warns, each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "There is a performance drop")
        yield


def _required(module: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in module.parameters()]


def _at(found: Stacked, place: int) -> Stacked:
    gradients, losses = found
    return {parameter: g[place] for parameter, g in gradients.items()}, losses[place]


def _stacked(batches: Sequence[Any]) -> tuple[list[Tensor], Any] | None:
    """The tensors of as many batches, stacked; none if they are not of one shape."""
    leaves = [_leaves(batch) for batch in batches]
    if any(not isinstance(leaf, Tensor) for leaf in leaves[0]):
        return None
    shapes = {tuple(leaf.shape for leaf in each) for each in leaves}
    if len(shapes) > 1:
        return None
    structure = tree_structure(batches[0])
    return [torch.stack(same) for same in zip(*leaves, strict=True)], structure


def _leaves(batch: Any) -> list[Any]:
    # Of what most batches are, without the general walk, which takes its time.
    if isinstance(batch, tuple | list) and all(type(x) is Tensor for x in batch):
        return list(batch)
    return tree_leaves(batch)
