"""Proposals of learner 0 between threads: done by all at one position, or by nobody."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, Store

from lightning_adpsgd.coordination.store import Coordinator
from lightning_adpsgd.strategy.agreement import Agreement
from tests.helpers import PATIENCE_S, together


class Busy:
    """Answers "busy" in a meeting."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def while_waiting(self, meeting: str) -> None:
        if self._agreement.pending(at_once=True) is not None:
            self._agreement.answer(None)
        assert not self._agreement.decided()

    def when_met(self) -> None:
        self._agreement.give_up()


def learner(
    store: Store, rank: int, num: int
) -> tuple[Coordinator, Agreement, list[int]]:
    """A learner that notes where it has agreed."""
    coordinator = Coordinator(store, rank, num, timedelta(seconds=20))
    agreement = Agreement(store, num, coordinator)
    return coordinator, agreement, []


def work(
    store: Store, rank: int, paces: list[list[int]], wanted: Callable[[int], bool]
) -> list[int]:
    """Steps of one learner: `paces[rank][k]` of them before its k-th meeting."""
    coordinator, agreement, done = learner(store, rank, len(paces))
    for meeting, num_steps in enumerate(paces[rank]):
        for step in range(num_steps):
            if rank == 0 and wanted(step):
                agreement.propose("save")
            while agreement.pending(at_once=True) is not None:
                if agreement.agree("save"):
                    done.append(agreement.position)
        coordinator.meet(f"meeting {meeting}", Busy(agreement))
    coordinator.stop()
    return done


PACES = st.integers(1, 3).flatmap(
    lambda num_meetings: st.lists(
        st.lists(st.integers(0, 4), min_size=num_meetings, max_size=num_meetings),
        min_size=2,
        max_size=4,
    )
)


@settings(max_examples=40, deadline=None)
@given(paces=PACES)
def test_what_is_agreed_happens_between_the_same_meetings_for_all(
    paces: list[list[int]],
) -> None:
    store = HashStore()
    done = together(
        [
            lambda rank=rank: work(store, rank, paces, lambda step: True)
            for rank in range(len(paces))
        ]
    )
    assert all(mine == done[0] for mine in done)


def test_learners_at_a_boundary_agree_at_once() -> None:
    store = HashStore()
    # Both stay at their boundaries until the other has come to one.
    barrier = threading.Barrier(2)

    def alone(rank: int) -> bool:
        _, agreement, _ = learner(store, rank, 2)
        if rank == 0:
            agreement.propose("save")
        barrier.wait(PATIENCE_S)
        assert agreement.pending(at_once=True) == "save"
        return agreement.agree("save")

    assert together([lambda r=r: alone(r) for r in range(2)]) == [True, True]


def test_different_plans_are_refused() -> None:
    store = HashStore()
    barrier = threading.Barrier(2)

    def alone(rank: int) -> bool:
        _, agreement, _ = learner(store, rank, 2)
        if rank == 0:
            agreement.propose("stop")
        barrier.wait(PATIENCE_S)
        assert agreement.pending(at_once=True) == "stop"
        return agreement.agree(f"epoch {rank}")

    assert together([lambda r=r: alone(r) for r in range(2)]) == [False, False]


def test_a_refused_proposal_waits_for_the_meeting_in_its_way() -> None:
    store = HashStore()
    coordinator, agreement, _ = learner(store, 0, 1)
    agreement.propose("save")
    agreement.answer(None)
    assert agreement.decided() is False
    agreement.propose("save")
    assert agreement.pending() is None
    coordinator.meet("checkpoint", Busy(agreement))
    agreement.propose("save")
    assert agreement.pending() == "save"
    assert agreement.agree("save")
    coordinator.stop()


def test_nothing_is_proposed_while_a_learner_is_away() -> None:
    store = HashStore()
    (_, first, _), (_, second, _) = (learner(store, rank, 2) for rank in range(2))
    second.note_away(True)
    second.note_away(True)
    first.propose("save")
    assert second.pending(at_once=True) is None
    second.note_away(False)
    first.propose("save")
    assert second.pending(at_once=True) == "save"


def test_a_proposal_is_withdrawn_if_a_learner_goes_away_and_made_again_later() -> None:
    store = HashStore()
    (_, first, _), (_, second, _), (_, third, _) = (
        learner(store, rank, 3) for rank in range(3)
    )
    first.propose("stop")
    third.note_away(True)

    def agrees(agreement: Agreement) -> bool:
        assert agreement.pending(at_once=True) == "stop"
        return agreement.agree("epoch 1")

    assert together([lambda: agrees(first), lambda: agrees(second)]) == [False, False]
    third.note_away(False)
    assert agrees(third) is False  # it comes late
    first.propose("stop")
    three = [lambda one=one: agrees(one) for one in (first, second, third)]
    assert together(three) == [True, True, True]


def test_looks_take_a_twentieth_of_the_time_where_the_store_is_far() -> None:
    class Far:
        num_looks = 0

        def check(self, keys: list[str]) -> bool:
            self.num_looks += 1
            time.sleep(0.03)
            return False

    far: Any = Far()
    agreement = Agreement(far, 2, Coordinator(HashStore(), 1, 2, timedelta(seconds=20)))
    begin = time.monotonic()
    assert agreement.pending() is None
    while time.monotonic() - begin < 0.3:
        assert agreement.pending() is None
    assert far.num_looks == 1
    assert agreement.pending(at_once=True) is None
    assert far.num_looks == 2
