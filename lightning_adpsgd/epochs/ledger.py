"""Who has which portion of an epoch, where learners come, go, and lose their books.

    left       portions that nobody has
    held       what each has claimed and not finished
    awaited    what some had claimed before the books were lost, as others remember it
    resting    who wants no more of this epoch

What is in none of them is finished. Whoever reads a ledger from the rendezvous computes
the one that should be there and puts it in its place, unless another was faster; then
it computes again. All are pure functions of a ledger, so that any interleaving of
learners is one of these. Nothing here communicates.

A rendezvous that comes back empty gets the ledger of the first one that finds it so,
under another `life`. What that one did not know, the others add when they see the life
that they do not know; until all have, nothing is claimed.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from lightning_adpsgd.epochs.work_units import Ranges, take, without


class Terms(NamedTuple):
    """What all must agree upon to mean the same by the number of a portion.

    Attributes:
        seed: Of the order of samples.
        base: The positions in that order from which portions are cut.
        fingerprint: Of the epoch.
    """

    seed: int
    base: Ranges
    fingerprint: str

    @classmethod
    def from_row(cls, row: Iterable[Any]) -> "Terms":
        """Reads what JSON has made of it."""
        seed, base, fingerprint = row
        return cls(int(seed), _ranges(base), str(fingerprint))


class OtherTerms(ValueError):
    """A ledger is of other samples than one's own."""


class Ledger(NamedTuple):
    """The books of one epoch; see the module.

    Attributes:
        life: Of the rendezvous in which it was begun.
        terms: Of the epoch.
        left: Numbers of portions.
        held: Numbers of portions, by learner (here: an incarnation of an island).
        awaited: The same.
        resting: Learners.
    """

    life: str
    terms: Terms
    left: Ranges
    held: Mapping[str, Ranges] = {}
    awaited: Mapping[str, Ranges] = {}
    resting: tuple[str, ...] = ()

    # --- what it says

    @property
    def names(self) -> set[str]:
        """All who have, or had, a part in it."""
        return {*self.held, *self.awaited}

    @property
    def is_settled(self) -> bool:
        """Whether it is known what is left."""
        return not self.awaited

    @property
    def is_over(self) -> bool:
        """Whether nobody will ask for more, whatever else happens but a death."""
        rests = all(name in self.resting for name in self.held)
        return self.is_settled and not self.left and rests

    def others_rest(self, name: str) -> bool:
        """Whether all others want no more."""
        return all(other in self.resting for other in self.held if other != name)

    def anybody_waits(self, name: str) -> bool:
        """Whether another one has asked and got nothing."""
        return any(other in self.resting for other in self.held if other != name)

    def of_others(self, name: str) -> dict[str, Ranges]:
        """What all others hold, or are remembered to have held."""
        found = {**self.awaited, **self.held}
        return {other: ranges for other, ranges in found.items() if other != name}

    # --- what becomes of it

    def report(self, name: str, holds: Ranges, finished: Ranges) -> "Report":
        """Writes down what a learner has, which knows best.

        Args:
            name: The learner.
            holds: What it has claimed, or taken alone, and not finished.
            finished: What it has finished since its last report.
        """
        known, mine = self.held.get(name, ()), union(holds, finished)
        twice = without(without(mine, known), self.left)
        # What it does not remember to have claimed: an answer that never reached it.
        left = union(without(self.left, mine), without(known, mine))
        held = {**self.held, name: without(holds, twice)}
        return Report(self._replace(left=left, held=held), twice)

    def without_names(self, gone: Collection[str]) -> "Ledger":
        """What those hold that are gone is left once more."""
        back = [self.held.get(name, ()) for name in gone]
        back += [self.awaited.get(name, ()) for name in gone]
        return self._replace(
            left=union(self.left, *back),
            held={n: r for n, r in self.held.items() if n not in gone},
            awaited={n: r for n, r in self.awaited.items() if n not in gone},
            resting=tuple(n for n in self.resting if n not in gone),
        )

    def claim(self, name: str, num: int) -> "Claim":
        """Takes so many of the first that are left, or all."""
        taken = take(self.left, 0, num)
        held = {**self.held, name: union(self.held.get(name, ()), taken)}
        ledger = self._replace(left=without(self.left, taken), held=held)
        return Claim(ledger, numbers(taken))

    def rest(self, name: str, rests: bool) -> "Ledger":
        """Whether a learner wants no more."""
        others = {other for other in self.resting if other != name}
        now = others | {name} if rests else others
        return self._replace(resting=tuple(sorted(now)))

    # --- where the books were lost

    def begun_anew(self, name: str, life: str) -> "Ledger":
        """As a learner knows it, for a rendezvous that has none."""
        held = {name: self.held.get(name, ())}
        return Ledger(life, self.terms, self.left, held, self.of_others(name))

    def joined(self, known: "Ledger", name: str, mine: Ranges) -> "Ledger":
        """With what a learner knows that has not seen this life of it.

        Args:
            known: The ledger as the learner knew it.
            name: The learner.
            mine: What it holds, or has finished since its last report.

        Raises:
            OtherTerms: They are of different epochs.
        """
        if self.terms != known.terms:
            raise OtherTerms(
                "the rendezvous holds the pool of other samples, or of another part of "
                "the epoch, than this super-learner trains on"
            )
        told = union(self.held.get(name, ()), self.awaited.get(name, ()))
        # A claim of which the learner never heard is not one that it has finished.
        unheard = common(without(told, mine), known.left)
        theirs = {n: r for n, r in known.of_others(name).items() if n in self.held}
        # Who is in this life already knows best what it has, or has given back.
        may_be_left = union(known.left, mine, *theirs.values())
        left = union(common(self.left, may_be_left), unheard)
        held_here = union(*self.held.values())
        others = {**known.of_others(name), **self.awaited}
        awaited = {
            other: without(ranges, held_here)
            for other, ranges in others.items()
            if other not in {*self.held, name}
        }
        held = {**self.held, name: common(told, mine)}
        return self._replace(left=left, held=held, awaited=awaited)

    # --- as text

    def to_json(self) -> str:
        """As the rendezvous keeps it; equal ledgers are equal texts."""
        held, awaited = (dict(sorted(x.items())) for x in (self.held, self.awaited))
        return json.dumps(self._replace(held=held, awaited=awaited))

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """Reads what `to_json` has written.

        Raises:
            ValueError: It is something else.
        """
        try:
            life, terms, left, held, awaited, rest = json.loads(text)
            return cls(
                str(life),
                Terms.from_row(terms),
                _ranges(left),
                {str(name): _ranges(rows) for name, rows in held.items()},
                {str(name): _ranges(rows) for name, rows in awaited.items()},
                tuple(map(str, rest)),
            )
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"it holds no ledger of ours: {error}") from error


class Report(NamedTuple):
    """What a report leads to.

    Attributes:
        ledger: With it.
        twice: What the learner has, or had, though another one has it or had it.
    """

    ledger: Ledger
    twice: Ranges


class Claim(NamedTuple):
    """What a claim leads to.

    Attributes:
        ledger: With it.
        numbers: Of the portions that it got.
    """

    ledger: Ledger
    numbers: list[int]


def union(*ranges: Ranges) -> Ranges:
    """All positions that are in any of them."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(one for rows in ranges for one in rows):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def common(one: Ranges, other: Ranges) -> Ranges:
    """The positions that are in both."""
    return without(one, without(one, other))


def as_ranges(positions: Iterable[int]) -> Ranges:
    """Positions, in any order, as ranges."""
    return union(tuple((position, position + 1) for position in positions))


def numbers(ranges: Ranges) -> list[int]:
    """The positions, one by one."""
    return [position for first, last in ranges for position in range(first, last)]


def _ranges(rows: list[list[int]]) -> Ranges:
    found = tuple((int(first), int(last)) for first, last in rows)
    ends = [end for row in found for end in row]
    if ends != sorted(ends) or min(ends, default=0) < 0:
        raise ValueError(f"ranges that do not rise: {found[:4]}")
    return found
