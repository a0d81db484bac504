"""The reset of optimizers to their state before the first step."""

import copy
from typing import Any

from torch.optim import Optimizer


class InitialState:
    """The initial state of an optimizer, to which `restore` returns.

    After a reload, momentum belongs to weights that were replaced, and is non-finite
    where they were. Most optimizers start without state, so this costs no memory.
    Lightning's stand-in for a module without an optimizer has no state either.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._begin: dict[str, Any] = copy.deepcopy(optimizer.state_dict())

    def restore(self, optimizer: Optimizer) -> None:
        """Resets the state; learning rates and other options stay as they are."""
        begin = copy.deepcopy(self._begin)  # which the next steps change
        if "param_groups" in begin:
            begin["param_groups"] = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(begin)
