"""How long somebody has given no sign of life, by the clock of the one who looks."""

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

# A silence is counted over so many looks or more.
_LEAST_LOOKS = 4
Name = TypeVar("Name", bound=Hashable)


class SilenceWatch(Generic[Name]):
    """Measures how long signs of life, which are counted up, have been missing.

    At most a quarter of `silence_s` counts between two looks. So nobody counts as dead
    because the whole machine was suspended, whichever process wakes first.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._looked_at = 0.0
        self._silent_for: dict[tuple[Name, int], float] = {}
        self._counts: dict[Name, int] = {}

    def look(self, counts: Mapping[Name, int | None], now: float) -> list[Name]:
        """Takes note of the counts of those who are watched.

        Only a rising count is a sign of life; an old one that is written again is not.

        Args:
            counts: number of signs of life by name; None: there is none.
            now: seconds of a clock that never goes back.

        Returns:
            The names that were silent for too long while watched.
        """
        known = self._counts
        self._counts = {n: max(known.get(n, 0), c or 0) for n, c in counts.items()}
        passed_s = min(now - self._looked_at, self._silence_s / _LEAST_LOOKS)
        self._looked_at, before = now, self._silent_for
        self._silent_for = {
            seen: before[seen] + passed_s if seen in before else 0.0
            for seen in self._counts.items()
        }
        return [n for (n, _), s in self._silent_for.items() if s > self._silence_s]

    def forget(self) -> None:
        """Resets all silences, because the observer itself was inactive for long."""
        self._silent_for.clear()
