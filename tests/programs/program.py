"""What a random program is: its choices, its fault, and the line that names them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Arguments = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """What happens to one learner.

    Args:
        kind: "raise", or a signal: "kill", "term", "stop".
        learner: its rank.
        hook: method that raises.
        call: how many calls of the hook pass before the one that raises.
        seconds: from the learner's `on_fit_start` to the signal.
    """

    kind: str
    learner: int
    hook: str = ""
    call: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.kind == "raise":
            return f"learner {self.learner} raises in call {self.call} of {self.hook}"
        return f"{self.kind} of learner {self.learner} after {self.seconds:.2f} s"


@dataclass(frozen=True)
class Program:
    """One choice of each dimension; the first of a dimension's table is the plain one.

    Args:
        seed: what it was drawn by.
        choices: names of choices by dimension, without plain ones.
        fault: what happens to a learner, if anything does.
    """

    seed: int
    choices: Mapping[str, str] = field(default_factory=dict[str, str])
    fault: Fault | None = None

    @property
    def num_learners(self) -> int:
        """How many processes train."""
        return int(self.choices.get("learners", "2"))

    def pick(self, dimension: str, table: Mapping[str, T]) -> T:
        """What the table of a dimension has for this program's choice."""
        return table[self.choices.get(dimension, next(iter(table)))]

    def merged(self, tables: Mapping[str, Mapping[str, Arguments]]) -> Arguments:
        """The arguments of all dimensions; a later dimension overrides an earlier."""
        picked = (self.pick(dimension, table) for dimension, table in tables.items())
        return {name: value for each in picked for name, value in each.items()}

    def has(self, choices: Mapping[str, tuple[str, ...]]) -> bool:
        """Whether a dimension has one of these choices, none of them a plain one."""
        return any(self.choices.get(name) in ones for name, ones in choices.items())

    def __str__(self) -> str:
        parts = [f"{name}={choice}" for name, choice in sorted(self.choices.items())]
        return ", ".join([*parts, str(self.fault)] if self.fault else parts)
