"""What the other learners of an island know of the members: what its first one tells.

The threads stand still; `test_wide_islands.py` has whole islands of several learners.
"""

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import DistNetworkError

from lightning_adpsgd.islands import membership_reader
from lightning_adpsgd.islands.member_list import Heartbeat, Member, MemberList
from lightning_adpsgd.islands.membership_reader import (
    MembershipReader,
    publish,
)
from tests.helpers import PATIENCE_S, until
from tests.islands.archipelago import left_at_each_list

ONE, TWO = (Member(number, f"start {number}", "host", ()) for number in (1, 2))


def first_learner(**changes: Any) -> Any:
    """What the first learner of the island knows."""
    known = {
        "member": ONE,
        "is_in": True,
        "members": MemberList(4, {1: ONE, 2: TWO}),
        "left": frozenset({"start 9", "start 8"}),
        "outage": "",
    }
    return SimpleNamespace(**{**known, **changes})


class Pair:
    """One that tells and one that reads, turn by turn."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.store, self.num_changes = HashStore(), 0
        self.reader = MembershipReader(self.store, heartbeat, self._note, self._fail)

    def _note(self) -> None:
        self.num_changes += 1

    def _fail(self, error: BaseException) -> None:
        raise error


@pytest.fixture
def pair() -> Pair:
    return Pair(Heartbeat(interval_s=0.01, silence_s=3.0))


def test_all_that_the_first_learner_knows_is_read(pair: Pair) -> None:
    pair.reader._take_turn()
    assert (pair.num_changes, pair.reader.is_in) == (0, False)
    for told in (
        first_learner(),
        first_learner(is_in=False, outage="it is away", left=frozenset()),
        first_learner(member=ONE._replace(number=3, origin="x")),
    ):
        publish(told, pair.store)
        pair.reader._take_turn()
        for name in vars(told):
            assert getattr(pair.reader, name) == getattr(told, name)
    assert pair.num_changes == 3


def test_no_list_shows_before_those_that_have_left_it_are_known(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_at_each_list(MembershipReader, monkeypatch)
    publish(first_learner(), pair.store)
    pair.reader._take_turn()
    assert left == [first_learner().left]


def test_what_has_not_changed_is_not_read_again(pair: Pair) -> None:
    for _ in range(2):
        publish(first_learner(), pair.store)
        pair.reader._take_turn()
    assert pair.num_changes == 1
    pair.store.delete_key("membership")
    pair.reader._take_turn()
    assert pair.reader.is_in


def test_nothing_is_told_before_the_island_has_a_number(pair: Pair) -> None:
    for number, is_told in ((-1, False), (0, True)):
        member = ONE._replace(number=number)
        publish(first_learner(member=member, is_in=False), pair.store)
        assert pair.store.check(["membership"]) == is_told


def test_a_reader_is_awake_for_as_long_as_a_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=50.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(membership_reader, "uptime_s", clock.monotonic)
    pair = Pair(Heartbeat(silence_s=3.0))
    for now, is_awake in ((53.0, True), (53.25, False)):
        clock.now = now
        assert pair.reader.is_awake == is_awake
    monkeypatch.setattr(pair.reader._state, "wait", lambda seconds: None)
    pair.reader._rest()
    assert pair.reader.is_awake


def test_who_waits_is_woken_by_what_the_first_learner_tells(pair: Pair) -> None:
    """Each kind of wait; whoever is not woken waits for longer than the test may."""
    assert not pair.reader.enter()
    assert not pair.reader.refresh(0.0)
    waits = {
        "enter": lambda: pair.reader.enter(2 * PATIENCE_S),
        "refresh": lambda: pair.reader.refresh(2 * PATIENCE_S),
    }
    said: dict[str, bool] = {}
    threads = [
        threading.Thread(target=lambda n=n, w=w: said.update({n: w()}), daemon=True)
        for n, w in waits.items()
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(pair.reader._state._waiters) == 2, "those that wait")  # type: ignore[attr-defined]
    publish(first_learner(), pair.store)
    pair.reader.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    pair.reader.stop(PATIENCE_S)
    assert said == dict.fromkeys(waits, True)


def test_a_reader_ends_without_a_word_when_the_store_is_gone(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """The coordinator says it, and torch shows a trace for each further call."""
    publish(first_learner(), pair.store)
    pair.reader._take_turn()
    gone = DistNetworkError("Broken pipe")
    pair.reader._store = store = create_autospec(Store, instance=True)
    store.check.side_effect = gone
    pair.reader.start()
    pair.reader._thread.join(PATIENCE_S)
    assert not pair.reader._thread.is_alive()
    store.check.assert_called_once()
    assert (pair.reader.num_errors, caplog.text, pair.num_changes) == (0, "", 1)


def test_the_end_of_a_reader_is_waited_for_no_longer_than_a_turn() -> None:
    pair = Pair(Heartbeat(interval_s=10 * PATIENCE_S))
    pair.reader.stop(PATIENCE_S)  # before it began
    pair = Pair(Heartbeat(interval_s=10 * PATIENCE_S))
    pair.reader.start()
    until(lambda: pair.reader._num_turns == 1, "the first turn")
    pair.reader.stop(PATIENCE_S)
    assert not pair.reader._thread.is_alive()
