"""What a replica's parts hold after any order of what an engine does with them."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_adpsgd.weights.replica import Part, Replica

LENGTH = 5


class Model:
    """w, d, what was taken of d, and what exchanges read instead of w."""

    def __init__(self, weights: Tensor) -> None:
        self.weights, self.changes = weights.double(), torch.zeros(LENGTH).double()
        self.taken = torch.zeros(LENGTH).double()
        self.others: Tensor | None = None

    @property
    def shown(self) -> Tensor:
        return self.weights if self.others is None else self.others

    @property
    def read(self) -> Tensor:
        return self.shown + self.changes + self.taken


def sections_of(vector: Tensor) -> list[list[Tensor]]:
    return [[vector[:3]], [vector[3:]]]


def whole(chunks: list[Tensor]) -> Tensor:
    return torch.cat(chunks).double()


def pieces(replica: Replica, vector: Tensor) -> list[Tensor]:
    return [*vector.split([len(chunk) for chunk in replica.chunks])]


class Both:
    """A replica and its model, to which the same is done."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.vector = torch.arange(LENGTH).to(dtype)
        state = threading.Condition(threading.RLock())
        self.replica = Replica(sections_of(self.vector), 2, state, part_elements=2)
        self.model = Model(self.vector)
        self._into = [torch.zeros(len(c), dtype=c.dtype) for c in self.replica.chunks]
        self._taken = list[int]()
        self.merged = self.vector.clone()

    def step(self, number: int) -> None:
        self.vector.add_(number)
        self.model.weights += number

    def exchange(self, number: int) -> None:
        change = torch.arange(LENGTH) * number - 1.0
        for chunk, piece in zip(
            self.replica.chunks, pieces(self.replica, change), strict=True
        ):
            chunk.add(piece.to(chunk.dtype), 0.5)
        self.model.changes += change.double() / 2

    def exchange_of_one(self, number: int) -> None:
        """Of the last part alone: the others have nothing to merge."""
        last = self.replica.chunks[-1].parts[-1]
        last.add(torch.full((len(last),), float(number), dtype=last.dtype), 1.0)
        self.model.changes[-len(last) :] += number

    def merge(self, number: int) -> None:
        was_changed = any(p.changed for c in self.replica.chunks for p in c.parts)
        self.merged = self.vector.clone()
        if number > 0:
            assert self.replica.merge() == was_changed
        else:
            self.replica.merge_all()
        self.model.weights += self.model.changes
        self.model.changes.zero_()

    def take(self, number: int) -> None:
        if self._taken:
            self.give_back()
            return
        self._taken = self.replica.take(self._into)
        for chunk in self._taken:
            begin = 2 * chunk - (chunk > 1)
            end = begin + len(self.replica.chunks[chunk])
            self.model.taken[begin:end] = self.model.changes[begin:end]
            self.model.changes[begin:end] = 0

    def give_back(self) -> None:
        for number in self._taken:
            self.replica.merge_taken(number, self._into[number])
            self._into[number].zero_()
        self._taken = []
        self.model.weights += self.model.taken
        self.model.taken.zero_()

    def show(self, number: int) -> None:
        """Others in the place of w, those of before the last merge, or w again."""
        if number == 0 or self.model.others is not None:
            self.replica.show(sections_of(self.vector))
            self.model.others = None
            return
        other = self.merged if number < 0 else self.vector + number
        self.replica.show(sections_of(other), unmerged=number < 0)
        if number < 0:
            self.model.changes += self.model.weights - other.double()
        self.model.others = other.double()

    def put(self, number: int) -> None:
        values = torch.full((LENGTH,), float(number))
        self.replica.put(pieces(self.replica, values))
        self.model.weights = values.double()
        self.model.changes.zero_()
        self.model.taken.zero_()
        self._taken = []
        for into in self._into:
            into.zero_()

    def check(self) -> None:
        assert torch.equal(self.vector.double(), self.model.weights)
        assert torch.equal(whole(self.replica.snapshot()), self.model.read)
        written = torch.zeros(LENGTH)
        self.replica.spread(self.replica.snapshot(), sections_of(written))
        assert torch.equal(written.double(), self.model.read)
        both = torch.stack([self.model.shown, self.model.read], dim=1)
        places = both.split([len(chunk) for chunk in self.replica.chunks])
        for chunk, values in zip(self.replica.chunks, places, strict=True):
            parts = values.split([len(part) for part in chunk.parts])
            for part, (shown, read) in zip(
                chunk.parts, map(_columns, parts), strict=True
            ):
                self._check_part(part, shown, read)

    def _check_part(self, part: Part, shown: Tensor, read: Tensor) -> None:
        into = torch.full((len(part),), 99.0, dtype=part.dtype)
        part.read(into)
        assert torch.equal(into.double(), read)
        if part.plain is not None:
            assert torch.equal(part.plain.double(), read)
        for begin in range(len(part)):
            into = shown[begin:].to(part.dtype)
            part.add_awaiting(into, begin)
            assert torch.equal(into.double(), read[begin:])


def _columns(pairs: Tensor) -> tuple[Tensor, Tensor]:
    return pairs[:, 0], pairs[:, 1]


ACTIONS = ("step", "exchange", "exchange_of_one", "merge", "take", "show", "put")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(-2, 2)), max_size=9))
def test_nothing_is_lost_in_any_order(
    dtype: torch.dtype, actions: list[tuple[str, int]]
) -> None:
    both: Any = Both(dtype)
    both.check()
    for action, number in actions:
        getattr(both, action)(number)
        both.check()
