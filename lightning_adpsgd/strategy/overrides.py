"""The replacement of Lightning's attributes, which is undone at the end of a fit.

Only `Overrides` replaces attributes of Lightning's objects.
`tests/strategy/lightning_names.py` lists them all, with the reasons.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, final


@final
class Overrides:
    """The owner of all replaced attributes of Lightning's objects, until `undo`."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str]] = []

    def replace(self, target: Any, attribute: str, value: Any) -> None:
        """Replaces an attribute of one object.

        Args:
            value: replacement; a module-level function or a method, not a lambda,
                because a Trainer may be pickled.
        """
        vars(target)[attribute] = value
        self._done.append((target, attribute))

    def wrap(self, target: Any, attribute: str, function: Callable[..., Any]) -> None:
        """Replaces a method by a function of Lightning's own one and the arguments."""
        # Not the bound method: in a copy of a Trainer it would be the replacement.
        own = partial(getattr(type(target), attribute), target)
        self.replace(target, attribute, partial(function, own))

    def undo(self) -> None:
        """Restores Lightning's attributes; can be called twice."""
        while self._done:
            target, attribute = self._done.pop()
            vars(target).pop(attribute, None)
