"""The ledger of an epoch's work units among islands, which survives its own loss.

    left       units that no island has
    held       units that each island has claimed and not finished
    awaited    units claimed before the ledger was lost, as other islands remember
    resting    islands that want no more of this epoch

A unit in none of these is finished. An island that reads a ledger from the rendezvous
computes the ledger that should replace it, and writes that. If another island was
faster, it computes again. All methods are pure functions of a ledger, so any
interleaving of islands is a sequence of them. Nothing here communicates.

If a rendezvous comes back empty, the first island to notice writes its own ledger under
a new `life`. Every other island adds its knowledge when it sees a life that it does not
know. Until all have done so, no unit is claimed.
"""

import json
from collections.abc import Collection, Mapping
from typing import NamedTuple

from lightning_adpsgd.epochs.ranges import (
    Ranges,
    common,
    from_rows,
    take,
    union,
    without,
)
from lightning_adpsgd.epochs.work_units import Terms

_MOST = 1 << 62
_MALFORMED = TypeError, AttributeError, ValueError, OverflowError, RecursionError


class OtherTerms(ValueError):
    """A ledger is about different samples than this island's."""


class Ledger(NamedTuple):
    """The ledger of one epoch; the module describes the fields that are not here.

    Attributes:
        life: life of the rendezvous in which the ledger was begun.
        terms: terms by which the units of the epoch are numbered.
        revision: number that each change within a life increases.
    """

    life: str
    terms: Terms
    left: Ranges
    held: Mapping[str, Ranges] = {}
    awaited: Mapping[str, Ranges] = {}
    resting: tuple[str, ...] = ()
    revision: int = 0

    # --- what it says

    @property
    def names(self) -> set[str]:
        """The islands that have or had a part in it."""
        return {*self.held, *self.awaited}

    @property
    def end(self) -> int:
        """One more than the number of the last unit in it; 0 if it has none."""
        rows = (self.left, *self.held.values(), *self.awaited.values())
        return max((ranges[-1][1] for ranges in rows if ranges), default=0)

    @property
    def is_settled(self) -> bool:
        """Whether the remaining units are known."""
        return not self.awaited

    @property
    def is_over(self) -> bool:
        """Whether no island will ask for more, unless one dies."""
        rests = all(name in self.resting for name in self.held)
        return self.is_settled and not self.left and rests

    def another_waits(self, name: str) -> bool:
        """Whether another island has asked for a unit and got none."""
        return any(other in self.resting for other in self.held if other != name)

    def of_others(self, name: str) -> dict[str, Ranges]:
        """The units that other islands hold, or are remembered to have held."""
        found = {**self.awaited, **self.held}
        return {other: ranges for other, ranges in found.items() if other != name}

    # --- what becomes of it

    def after(self, found: "Ledger") -> "Ledger":
        """This ledger as the successor of a found one, or the found one if equal."""
        if self == found:
            return found
        return self._replace(revision=found.revision + 1)

    def report(
        self, name: str, holds: Ranges, finished: Ranges
    ) -> "tuple[Ledger, Ranges]":
        """Records the units of an island, from the island itself.

        Args:
            holds: units that it has claimed, or taken on its own, but not finished.
            finished: units that it has finished since its last report.

        Returns:
            The ledger, and the units that another island has or had as well.
        """
        known, mine = self.held.get(name, ()), union(holds, finished)
        twice = without(without(mine, known), self.left)
        # Units that it claimed without knowing, because the answer never arrived.
        left = union(without(self.left, mine), without(known, mine))
        held = {**self.held, name: without(holds, twice)}
        return self._replace(left=left, held=held), twice

    def without_names(self, gone: Collection[str]) -> "Ledger":
        """Returns the units of islands that are gone."""
        back = [self.held.get(name, ()) for name in gone]
        back += [self.awaited.get(name, ()) for name in gone]
        return self._replace(
            left=union(self.left, *back),
            held={n: r for n, r in self.held.items() if n not in gone},
            awaited={n: r for n, r in self.awaited.items() if n not in gone},
            resting=tuple(n for n in self.resting if n not in gone),
        )

    def claim(self, name: str, num: int) -> "tuple[Ledger, Ranges]":
        """Claims the first `num` units or all; returns the ledger and the units."""
        taken = take(self.left, 0, num)
        held = {**self.held, name: union(self.held.get(name, ()), taken)}
        return self._replace(left=without(self.left, taken), held=held), taken

    def rest(self, name: str, rests: bool) -> "Ledger":
        """Records whether an island wants no more units."""
        others = {other for other in self.resting if other != name}
        now = others | {name} if rests else others
        return self._replace(resting=tuple(sorted(now)))

    # --- after the loss of a ledger

    def begun_anew(self, name: str, life: str) -> "Ledger":
        """This island's version of the ledger, for a rendezvous that has none."""
        held = {name: self.held.get(name, ())}
        return Ledger(life, self.terms, self.left, held, self.of_others(name))

    def joined(self, known: "Ledger", name: str, mine: Ranges) -> "Ledger":
        """Adds the knowledge of an island that has not seen this life of the ledger.

        `known` is the last ledger that the island knew. `mine` has the units that it
        holds, or has finished since its last report.
        """
        if self.terms != known.terms:
            raise OtherTerms(
                "the rendezvous holds the pool of other samples, or of another part of "
                "the epoch, than this super-learner trains on"
            )
        written, recalled = self.held.get(name, ()), self.awaited.get(name, ())
        told = union(written, recalled)
        # The island cannot have finished a claim that it never heard of. What it
        # already has in this life, it wrote itself, by a claim whose answer was lost.
        unheard = union(
            without(written, mine), common(without(recalled, mine), known.left)
        )
        theirs = {n: r for n, r in known.of_others(name).items() if n in self.held}
        # An island in this life already knows best what it has, or has given back.
        may_be_left = union(known.left, mine, *theirs.values())
        left = union(common(self.left, may_be_left), unheard)
        held_here = union(*self.held.values())
        # An island that has a unit is the authority on it.
        contested = common(mine, union(*self.awaited.values()))
        settled = union(held_here, contested)
        remembered, awaited = known.of_others(name), self.awaited
        # The memory of both, because the first to write may know less.
        awaited = {
            other: without(
                union(remembered.get(other, ()), awaited.get(other, ())), settled
            )
            for other in {*remembered, *awaited} - {*self.held, name}
        }
        held = {**self.held, name: union(common(told, mine), contested)}
        return self._replace(left=left, held=held, awaited=awaited)

    # --- as text

    def to_json(self) -> str:
        """The text for the rendezvous; equal ledgers give equal texts."""
        held, awaited = (dict(sorted(x.items())) for x in (self.held, self.awaited))
        return json.dumps(self._replace(held=held, awaited=awaited))

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """Reads a text of `to_json`; any other is a ValueError."""
        try:
            life, terms, left, held, awaited, rest, revision = json.loads(text)
            if type(revision) is not int or not 0 <= revision < _MOST:
                raise ValueError(f"`revision` must be from 0 to 2^62, got {revision!r}")
            return cls(
                str(life),
                Terms.from_row(terms),
                from_rows(left),
                {str(name): from_rows(rows) for name, rows in held.items()},
                {str(name): from_rows(rows) for name, rows in awaited.items()},
                tuple(map(str, rest)),
                revision,
            )
        except _MALFORMED as error:
            raise ValueError(f"it is not a ledger of this package: {error}") from error
