"""Settings changed by assignments on a command line, `group.name=value`."""

import dataclasses
import types
import typing
from typing import Any

from recipes.hybrid.pipeline.settings import Settings

_NUMBERS = {int: "a whole number, such as 16", float: "a number, such as 0.5"}


def override(settings: Settings, *assignments: str) -> Settings:
    """Change values, each written as `group.name=value` (`lm.order=2`) or `name=value`.

    The order does not matter, because whether the values fit together is checked after
    all of them are changed. Of two values for one name the later one holds.

    Raises:
        ValueError: A setting does not exist, a value does not fit its type, or the
            settings do not fit together.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        value = _value(type(settings), assignment)
        *groups, name = _path(assignment)
        inside = changes
        for group in groups:
            inside = inside.setdefault(group, {})
        inside[name] = value
    return _changed(settings, changes)


def _changed(group: Any, changes: dict[str, Any]) -> Any:
    inner = {
        name: _changed(getattr(group, name), inside)
        for name, inside in changes.items()
        if isinstance(inside, dict)
    }
    return dataclasses.replace(group, **(changes | inner))


def _path(assignment: str) -> list[str]:
    path, equals, _ = assignment.partition("=")
    if not equals:
        raise ValueError(f"a setting is written group.name=value, got {assignment!r}")
    return path.split(".")


def _value(settings: type, assignment: str) -> Any:
    """The value, in the type that the setting has in `settings` or its groups."""
    *groups, name = _path(assignment)
    group: Any = settings
    for inner in groups:
        group = _hint(group, inner, assignment)
        if not dataclasses.is_dataclass(group):
            raise ValueError(f"{assignment!r}: {inner!r} is a value, not a group")
    hint = _hint(group, name, assignment)
    try:
        return _parse(assignment.partition("=")[2], hint)
    except ValueError as error:
        raise ValueError(f"{assignment!r}: {error}") from error


def _hint(group: Any, name: str, assignment: str) -> Any:
    hints = typing.get_type_hints(group)
    if name not in hints:
        raise ValueError(
            f"{assignment!r}: no setting {name!r}; there are {', '.join(hints)}"
        )
    return hints[name]


def _parse(text: str, hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if text.lower() == "none":
            return None
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if typing.get_origin(hint) is tuple:  # tuple[float, ...] is written 0.1,0.2
        return tuple(_parse(part, typing.get_args(hint)[0]) for part in text.split(","))
    if hint is bool:
        return _parse_bool(text)
    if dataclasses.is_dataclass(hint):
        raise ValueError("this is a group; name one of its settings")
    if hint in _NUMBERS:
        return _parse_number(text, hint)
    return hint(text)


def _parse_number(text: str, hint: type) -> Any:
    try:
        return hint(text)
    except ValueError:
        raise ValueError(f"must be {_NUMBERS[hint]}, got {text!r}") from None


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"must be true or false, got {text!r}")
    return text.lower() == "true"
