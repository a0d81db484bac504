"""Optimizers as they were before their first step."""

import copy
from typing import Any

from torch.optim import Optimizer


class FreshState:
    """The state of an optimizer at the beginning, to return to.

    Momentum belongs to weights that are gone, and is not finite where they were not.
    Most optimizers begin without any state, so that this costs no memory.

    Args:
        optimizer: Before its first step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state: dict[Any, Any] = copy.deepcopy(optimizer.state_dict()["state"])

    def restore(self) -> None:
        """Begins anew; learning rates and other options stay as they are."""
        groups = self._optimizer.state_dict()["param_groups"]
        state = copy.deepcopy(self._state)  # which the next steps change
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
