"""Meetings at step boundaries, whoever comes when, with what, and dies where."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_adpsgd.coordination.store import LearnerFailed
from lightning_adpsgd.gossip.engine import Gossip, GossipOptions
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.transport.base import PeerLost, Pending
from tests.helpers import PATIENCE, engine_threads, random_rows, running, together
from tests.threads import ThreadTransport

NUM_STEPS, EXACT = 10, torch.float64
KINDS = {EXACT: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4}
"""What is trained, and what rounding leaves of a sum."""

Speed = Callable[[int, int, random.Random], float]
SPEEDS: dict[str, Speed] = {
    "equal": lambda own, number, dice: 0.001,
    "random": lambda own, number, dice: 0.005 * dice.random(),
    "in bursts": lambda own, number, dice: 0.0 if number % 4 else 0.01,
    "one ten times slower": lambda own, number, dice: 0.0005 if own else 0.005,
    "one pauses": lambda own, number, dice: 0.5 * (not own and number == 3),
}
"""Seconds of a learner's step."""


def engines_of(
    weights: Sequence[list[Tensor]],
    across: Sequence[ThreadTransport],
    topology: str,
    on_error: Callable[[str], None] = lambda message: None,
    **options: Any,
) -> list[Gossip]:
    """One engine (not started) for each learner's vectors."""
    schedule = Schedule(find_topology(topology), len(across))
    given = GossipOptions(**{"timeout": PATIENCE, "in_pairs": True, **options})
    return [
        Gossip(
            vectors,
            transport,
            SuperLearnerGroup(),
            Members.fixed(schedule, transport.index),
            given,
            on_error,
        )
        for vectors, transport in zip(weights, across, strict=True)
    ]


def sums(weights: Sequence[list[Tensor]]) -> list[Tensor]:
    """The sum over all learners of each of their vectors."""
    return [torch.stack(same).sum(0) for same in zip(*weights, strict=True)]


@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(2, 9),
    topology=st.sampled_from(["complete", "ring"]),
    kinds=st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=3, unique=True),
    speed=st.sampled_from(list(SPEEDS)),
    max_wait=st.sampled_from([0.0, 0.001, 0.02, 1.0, None]),
    in_pairs=st.booleans(),
    wire_dtype=st.sampled_from([None, torch.int8]),
    seed=st.integers(0, 10_000),
)
def test_only_gradients_change_the_sum_and_both_ends_have_met_or_neither(
    size: int,
    topology: str,
    kinds: list[torch.dtype],
    speed: str,
    max_wait: float | None,
    in_pairs: bool,
    wire_dtype: torch.dtype | None,
    seed: int,
) -> None:
    rows = random_rows(size, 24, seed)
    weights = [[row.to(kind) for kind in kinds] for row in rows]
    before = sums(weights)
    options: dict[str, Any] = (
        {"max_wait": max_wait} if in_pairs else {"in_pairs": False}
    )
    gossips = engines_of(
        weights,
        ThreadTransport.connect(size),
        topology,
        chunk_elements=10,
        wire_dtype=wire_dtype,
        **options,
    )

    def learner(own: int) -> None:
        dice = random.Random(f"{seed} {own}")
        for number in range(NUM_STEPS):
            time.sleep(SPEEDS[speed](own, number, dice))
            gossips[own].before_update()
            for vector in weights[own]:
                vector.add_(0.1)
            gossips[own].after_update()

    with running(gossips):
        together([lambda own=own: learner(own) for own in range(size)])
        counted = [gossip.statistics() for gossip in gossips]
    for kind, old, new in zip(kinds, before, sums(weights), strict=True):
        tolerance = KINDS[kind]
        expected = old + size * NUM_STEPS * 0.1
        torch.testing.assert_close(new, expected, atol=tolerance, rtol=tolerance)
    if in_pairs:
        assert sum(one.exchanges for one in counted) % 2 == 0
        for one in counted:
            assert one.exchanges + one.skipped == NUM_STEPS
            assert set(one.staleness) <= {0}
    assert engine_threads() == []


class Mortal(ThreadTransport):
    """A connection over which the first learner sends so many messages, and dies.

    Its peers notice, as they do when its connections close. Those of all others close
    in the end.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.left, self.dead, self.closed = 0, threading.Event(), threading.Event()

    def post_send(self, peer: int, lane: int, tensor: Tensor) -> Pending:
        if self.index == 0:
            self.left -= 1
        if self.left < 0:
            self.dead.set()
        if self.dead.is_set() and 0 in (self.index, peer):
            raise PeerLost(peer, "sending to it", "it was killed")
        return super().post_send(peer, lane, tensor)

    def post_receive(self, peer: int, lane: int, into: Tensor) -> Pending:
        over = self.dead if 0 in (self.index, peer) else self.closed
        return _Receipt(super().post_receive(peer, lane, into), peer, over)


class _Receipt:
    def __init__(self, inner: Pending, peer: int, over: threading.Event) -> None:
        self._inner, self._peer, self._over = inner, peer, over

    def wait(self, timeout: timedelta) -> None:
        while True:
            is_over = self._over.is_set()  # what came before still arrives
            try:
                return self._inner.wait(timedelta(milliseconds=2))
            except PeerLost:
                if is_over:
                    raise PeerLost(
                        self._peer, "receiving from it", "it was killed"
                    ) from None


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(2, 6),
    topology=st.sampled_from(["complete", "ring"]),
    num_messages=st.integers(0, 40),
    max_wait=st.sampled_from([0.0, 0.01, 1.0]),
    in_pairs=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_a_death_in_any_phase_of_a_meeting_ends_all_with_the_name_of_the_dead(
    size: int,
    topology: str,
    num_messages: int,
    max_wait: float,
    in_pairs: bool,
    seed: int,
) -> None:
    """Before a word, after an offer, an answer or a part, before or after a verdict."""
    rows = random_rows(size, 12, seed)
    weights = [[row.clone()] for row in rows]
    across: Any = Mortal.connect(size)
    for one in across:
        one.left, one.dead, one.closed = num_messages, across[0].dead, across[0].closed

    def end_all(message: str) -> None:  # as the job does when one has failed
        for gossip in gossips:
            gossip.release()

    options: dict[str, Any] = (
        {"max_wait": max_wait} if in_pairs else {"in_pairs": False}
    )
    gossips = engines_of(
        weights, across, topology, end_all, chunk_elements=5, **options
    )

    def learner(own: int) -> str:
        dice = random.Random(f"{seed} {own}")
        try:
            while True:
                time.sleep(0.002 * dice.random())
                gossips[own].before_update()
                gossips[own].after_update()
        except (PeerLost, LearnerFailed) as error:
            return str(error)

    for gossip in gossips:
        gossip.start()
    _, *said = together([lambda own=own: learner(own) for own in range(size)])
    across[0].closed.set()
    together([gossip.abort for gossip in gossips])
    assert all(
        "super-learner 0" in one or "a learner of the job" in one for one in said
    )
    # A meeting that broke off may have changed one end alone: both were averages.
    found = torch.stack([vector for (vector,) in weights])
    assert (found <= rows.amax(0) + 1e-9).all()
    assert (found >= rows.amin(0) - 1e-9).all()
    assert engine_threads() == []
