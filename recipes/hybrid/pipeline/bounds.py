"""Bounds of settings, checked where a value is given and not in the stage it breaks."""

import math
from collections.abc import Sequence
from typing import Any


def at_least(group: Any, least: float, *names: str) -> None:
    """Refuses numbers of a group below a bound, and those that are none.

    Raises:
        ValueError: One is; names it, the bound and the value.
    """
    for name in names:
        value = getattr(group, name)
        # NaN is refused here too.
        if not value >= least or not math.isfinite(value):
            raise ValueError(f"`{name}` must be at least {least}, got {value}")


def above_zero(group: Any, *names: str) -> None:
    """Refuses numbers of a group, or lists of them, that are not positive.

    Raises:
        ValueError: One is not; names it and the value.
    """
    for name in names:
        value = getattr(group, name)
        several = value if isinstance(value, tuple) else (value,)
        if not several or not all(v > 0 and math.isfinite(v) for v in several):
            raise ValueError(f"`{name}` must be above 0, got {_written(value)}")


def within(group: Any, low: float, high: float, *names: str) -> None:
    """Refuses numbers of a group outside of [low, high].

    Raises:
        ValueError: One is; names it, the bounds and the value.
    """
    for name in names:
        value = getattr(group, name)
        if not low <= value <= high:
            raise ValueError(f"`{name}` must be in [{low}, {high}], got {value}")


def one_of(group: Any, name: str, choices: Sequence[str | None]) -> None:
    """Refuses a value that is not among some.

    Raises:
        ValueError: It is not; names them and the value.
    """
    value = getattr(group, name)
    if value not in choices:
        listed = ", ".join("none" if one is None else one for one in choices)
        raise ValueError(f"`{name}` must be one of {listed}, got {value!r}")


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
