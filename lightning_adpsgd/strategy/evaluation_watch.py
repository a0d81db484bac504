"""Notices an evaluation in Fabric of weights that no other learner has.

Fabric has no hook for an evaluation. A program that has not read of `consensus` would
get a figure of this learner's own weights, and nothing in it would show that.
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

    It runs before each forward pass until it has warned. An evaluation is known by
    `module.eval()` and switched-off gradients together: training may do one of both.
    """

    def __init__(self, module: nn.Module, job: Job) -> None:
        self._module, self._job = module, job
        self._handle = module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Looks at one forward pass."""
        if torch.compiler.is_compiling():  # a warning would break the graph
            return
        if module.training or torch.is_grad_enabled() or module is not self._module:
            return
        if not self._job.running or self._job.in_consensus:
            return
        self._handle.remove()
        rank_zero_warn(
            f"`{type(module).__name__}` is evaluated with this learner's own weights, "
            "which no other learner has: evaluate the model of all learners within "
            "`with fabric.strategy.consensus():`, to which all learners come. This is "
            "said once."
        )

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module, or its file, is of no job: there it does nothing."""
        return partial, (_look_away,)


def _look_away(module: nn.Module, inputs: Any) -> None:
    """What a copy does before its forward pass."""
