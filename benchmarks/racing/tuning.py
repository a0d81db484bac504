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
    losses: Mapping[Setting, float],
    start: Setting,
    bounds: Bounds | None,
    rate_factor: float = 2.0,
) -> Setting | None:
    """The setting to try next: a neighbour of the best so far; None if all are known.

    Neighbours differ in one number, by a factor of two or, in the rate, by another one.
    So the best rate and the best option lie inside of what was tried, or at a bound of
    the option.

    Args:
        losses: Losses of the tried settings; infinite where one diverged.
        start: First setting.
        bounds: Bounds of the option; None: the method has none.
        rate_factor: Factor between neighbouring rates.
    """
    if not losses:
        return start

    def place(setting: Setting) -> tuple[int, float]:
        # On the grid, because a rate that is reached on two ways is one.
        return round(math.log(setting.rate / start.rate, rate_factor)), setting.option

    tried = {place(setting) for setting in losses}
    around = neighbours(best(losses), bounds, rate_factor)
    return next((setting for setting in around if place(setting) not in tried), None)


def best(losses: Mapping[Setting, float]) -> Setting:
    """The setting of the least loss; if all have diverged, the lowest rate."""
    return min(losses, key=lambda setting: (losses[setting], setting.rate))


def neighbours(
    setting: Setting, bounds: Bounds | None, rate_factor: float
) -> list[Setting]:
    """The neighbours of a setting, in the order in which they are tried."""
    rate, option = setting
    rates = rate_factor * rate, rate / rate_factor
    found = [Setting(other, option) for other in rates]
    if bounds is not None:
        low, high = bounds
        options = (option * factor for factor in (2, 0.5))
        found += [Setting(rate, o) for o in options if low <= o <= high]
    return found


def loss_or_infinity(loss: float | None) -> float:
    """The loss of a run; infinity if it diverged or failed."""
    return math.inf if loss is None else loss
