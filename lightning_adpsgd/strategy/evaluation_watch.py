"""Notices an evaluation in Fabric of one learner's local weights.

Nothing in the figure would show that.
"""

from functools import partial
from typing import Any, final

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_adpsgd.strategy.job import Job


@final
class EvaluationWatch:
    """Warns once when a module in training is evaluated outside of `consensus`.

    It takes `module.eval()` together with disabled gradients for an evaluation, because
    training may do either alone.
    """

    def __init__(self, module: nn.Module, job: Job) -> None:
        self._job = job
        self._handle = module.register_forward_pre_hook(self)

    def end(self) -> None:
        """Removes the hook, with which TorchScript cannot compile the module."""
        self._handle.remove()

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Checks one forward pass."""
        if torch.compiler.is_compiling():  # a warning would break the graph
            return
        if module.training or torch.is_grad_enabled():
            return
        if not self._job.running or self._job.in_consensus:
            return
        self._handle.remove()
        rank_zero_warn(
            f"`{type(module).__name__}` is evaluated with this learner's own weights, "
            "which no other learner has: evaluate it within `with "
            "fabric.strategy.consensus():`. This warning appears once."
        )

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Makes the watch do nothing in a copy of the module or its file."""
        return partial, (_look_away,)


def _look_away(module: nn.Module, inputs: Any) -> None:
    """The hook of a copy, which does nothing."""
