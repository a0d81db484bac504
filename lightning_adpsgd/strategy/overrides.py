"""What this package replaces in Lightning's objects while it trains, and puts back.

Only `Overrides` replaces attributes, and it refuses to replace one twice. When a new
version of Lightning changes something, search for its calls `overrides.replace` and
`overrides.wrap`, each in the module that says why it needs another function.
`tests/strategy/private_names.py` lists the private names that are read, or set to
another value of the same kind.
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

        Raises:
            RuntimeError: The attribute is replaced already.
        """
        if any(one is target and other == attribute for one, other in self._done):
            name = f"`{type(target).__name__}.{attribute}`"
            raise RuntimeError(f"{name} must have one owner: let one call the other")
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
