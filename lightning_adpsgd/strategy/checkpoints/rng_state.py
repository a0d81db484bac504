"""The states of all random generators of one learner, as plain data.

The states are tensors and numbers, so loading a checkpoint of them runs no code.
"""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def generator_states(device: torch.device) -> dict[str, Any]:
    """The states of Python, torch and, where in use, NumPy and the learner's GPU."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (str(name), [int(key) for key in keys], *rest)
    return states


def set_generator_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restores all generators; leaves those without a saved state unchanged."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(states["torch"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])
