"""The search for a method's best setting, each setting one run."""

import math
from collections.abc import Mapping
from typing import NamedTuple


class Setting(NamedTuple):
    """A peak learning rate, and the method's own option; 0 where it has none."""

    rate: float
    option: float = 0.0


Bounds = tuple[float, float]


def next_setting(
    losses: Mapping[Setting, float], start: Setting, bounds: Bounds | None
) -> Setting | None:
    """The setting to try next: a neighbour of the best so far; None if all are known.

    Neighbours differ by a factor of two in one number. So the best rate and the best
    option lie inside of what was tried, or at a bound of the option.

    Args:
        losses: Losses of the tried settings; infinite where one diverged.
        start: First setting.
        bounds: Bounds of the option; None: the method has none.
    """
    if not losses:
        return start
    return next((s for s in neighbours(best(losses), bounds) if s not in losses), None)


def best(losses: Mapping[Setting, float]) -> Setting:
    """The setting of the least loss; if all have diverged, the lowest rate."""
    return min(losses, key=lambda setting: (losses[setting], setting.rate))


def neighbours(setting: Setting, bounds: Bounds | None) -> list[Setting]:
    """The neighbours of a setting, in the order in which they are tried."""
    rate, option = setting
    found = [Setting(2 * rate, option), Setting(rate / 2, option)]
    if bounds is not None:
        low, high = bounds
        options = (option * factor for factor in (2, 0.5))
        found += [Setting(rate, o) for o in options if low <= o <= high]
    return found


def loss_or_infinity(loss: float | None) -> float:
    """The loss of a run; infinity if it diverged or failed."""
    return math.inf if loss is None else loss
