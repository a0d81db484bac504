"""Optimizers as they were before their first step."""

import copy
from typing import Any

from torch.optim import Optimizer


class FreshState:
    """The first state of an optimizer, for a return to it.

    Momentum belongs to weights that are gone, and is not finite where they were not.
    Most optimizers begin without any state, so that this costs no memory. Lightning's
    stand-in for a module without an optimizer has none either.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._begin: dict[str, Any] = copy.deepcopy(optimizer.state_dict())

    def restore(self) -> None:
        """Begins anew; learning rates and other options stay as they are."""
        begin = copy.deepcopy(self._begin)  # which the next steps change
        if "param_groups" in begin:
            begin["param_groups"] = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict(begin)
