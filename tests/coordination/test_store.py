import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec, patch

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from lightning_adpsgd.coordination import heartbeats
from lightning_adpsgd.coordination import store as store_module
from lightning_adpsgd.coordination.store import (
    Coordinator,
    LearnerFailed,
    near_store,
    own_connection,
    serve_near,
    store_at,
)
from tests.helpers import PATIENCE, PATIENCE_S, forked, together, until
from tests.stores import own_connections, served_and_near, while_a_call_waits

QUICK = timedelta(seconds=0.01)
LONG = PATIENCE


def mocked_store() -> Any:
    """A store whose connections are all the same one."""
    store = create_autospec(Store, instance=True)
    store.clone = Mock(return_value=store)  # torch before 2.8 has none
    return store


def coordinators(num: int) -> list[Coordinator]:
    store = HashStore()
    return [Coordinator(store, rank, num, LONG, QUICK) for rank in range(num)]


def test_no_learner_leaves_a_meeting_before_the_last_has_come() -> None:
    first, second, last = coordinators(3)
    left = [threading.Event(), threading.Event()]

    def come(coordinator: Coordinator, event: threading.Event) -> None:
        coordinator.meet("validation")
        event.set()

    threads = [
        threading.Thread(target=come, args=pair)
        for pair in zip((first, second), left, strict=True)
    ]
    for thread in threads:
        thread.start()
    assert not left[0].wait(0.1)
    assert not left[1].is_set()
    last.meet("validation")
    for event, thread in zip(left, threads, strict=True):
        assert event.wait(PATIENCE_S)
        thread.join()


def test_meetings_of_one_name_follow_one_another() -> None:
    def meet_thrice(coordinator: Coordinator) -> int:
        for _ in range(3):
            coordinator.meet("checkpoint")
        return coordinator.num_meetings

    both = coordinators(2)
    assert together([lambda c=c: meet_thrice(c) for c in both]) == [3, 3]


def test_who_waits_for_others_looks_sooner_the_less_it_has_waited() -> None:
    first, second = coordinators(2)
    pauses, clock = list[float](), [100.0]
    first._stopped = Mock()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds
        if clock[0] > 100.1:
            second.meet("validation")

    first._stopped.wait = pause
    with patch.object(store_module.time, "monotonic", lambda: clock[0]):
        first.meet("validation")
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.001, 0.01)
    assert all(later <= 1.26 * one for one, later in pairwise(pauses))


def test_the_last_to_come_to_a_meeting_looks_no_more() -> None:
    store = mocked_store()
    store.compare_set.return_value, store.add.return_value = b"validation\t0", 2
    Coordinator(store, 1, 2, LONG).meet("validation")
    store.add.assert_called_once()


def test_learners_at_different_meetings_fail_with_both_names() -> None:
    both = coordinators(2)
    names = ("validation", "end of training")
    messages = []

    def come(coordinator: Coordinator, name: str) -> None:
        coordinator.start()
        with pytest.raises(LearnerFailed) as failed:
            coordinator.meet(name)
        messages.append(str(failed.value))
        coordinator.stop()

    pairs = zip(both, names, strict=True)
    together([lambda c=coordinator, n=name: come(c, n) for coordinator, name in pairs])
    first, second = messages
    assert first == second
    assert all(name in first for name in ("learner 0", "learner 1", *names))
    # What differs between learners that share an epoch, and what to do.
    told = ("batches or steps", "in every batch", "`work_sharing=False`")
    assert all(words in first for words in told)


def test_a_failure_reaches_all_and_the_first_message_wins() -> None:
    learners = coordinators(3)
    for coordinator in learners:
        coordinator.start()
    learners[1].announce_failure("learner 1 raised ValueError: no")
    learners[2].announce_failure("learner 2 lost learner 1")
    for coordinator in learners:
        until(lambda c=coordinator: c.failure is not None, "the failure")
        with pytest.raises(LearnerFailed, match="learner 1 raised ValueError: no"):
            coordinator.raise_if_failed()
        coordinator.stop()


def test_a_failure_ends_a_meeting() -> None:
    first, second = coordinators(2)
    first.start()

    second.announce_failure("learner 1 raised RuntimeError")
    with pytest.raises(LearnerFailed, match="learner 1 raised RuntimeError"):
        first.meet("validation")
    first.stop()


def test_the_action_on_a_failure_is_done_once() -> None:
    calls, store = list[int](), HashStore()
    first = Coordinator(store, 0, 2, LONG, QUICK, lambda: calls.append(1))
    second = Coordinator(store, 1, 2, LONG, QUICK)
    first.start()
    second.announce_failure("no")
    second.announce_failure("no again")
    first.silent_learners(timedelta(seconds=0.2))
    until(lambda: bool(calls), "the action")
    first.stop()
    assert calls == [1]


def test_a_symptom_is_explained_by_the_announced_cause() -> None:
    first, second = coordinators(2)
    first.start()
    second.announce_failure("learner 1 raised KeyError")
    assert first.explain("lost super-learner 1") == "learner 1 raised KeyError"
    first.stop()


def test_a_symptom_without_a_cause_becomes_the_failure() -> None:
    first, second = coordinators(2)
    assert first.explain("lost super-learner 1", QUICK) == "lost super-learner 1"
    assert second.explain("lost super-learner 0", QUICK) == "lost super-learner 1"


def test_the_host_of_the_store_lingers_until_all_have_seen_the_failure() -> None:
    host, other = coordinators(2)
    host.start()
    host.announce_failure("no")
    begin = time.perf_counter()
    host.silent_learners(timedelta(seconds=0.2))
    assert time.perf_counter() - begin >= 0.2
    other.start()
    host.silent_learners(LONG)
    assert other.failure == "no"
    host.stop()
    other.stop()


def store_that_is_gone() -> Any:
    store = mocked_store()
    for call in ("check", "compare_set", "set"):
        reset = RuntimeError("Connection reset by peer\nframe #0: a trace")
        getattr(store, call).side_effect = reset
    return store


def test_a_store_that_is_gone_is_a_failure_which_each_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, called = store_that_is_gone(), threading.Event()
    coordinator = Coordinator(store, 1, 2, LONG, QUICK, called.set)
    coordinator.start()
    assert called.wait(PATIENCE_S)
    coordinator.stop()
    failure = coordinator.failure or ""
    assert "hosts the job's store is gone (Connection reset by peer); see" in failure
    assert "learner 0" in failure
    assert capsys.readouterr().err == f"learner 1 ends: {failure}\n"
    # torch shows a trace of each call.
    assert store.check.call_count == 1
    assert coordinator.silent_learners() == []
    assert store.check.call_count == 1
    store.set.assert_not_called()


def test_a_store_that_is_gone_is_not_asked_again_where_its_answer_was_late() -> None:
    """The next look begins as soon as a slow one has ended."""
    store, ended = mocked_store(), threading.Event()

    def end_late(keys: list[str]) -> bool:
        time.sleep(3.5 * QUICK.total_seconds())  # the next look waits for this one
        raise RuntimeError("Connection reset by peer")

    store.check.side_effect = end_late
    one = Coordinator(store, 1, 2, LONG, QUICK, ended.set)
    one.start()
    assert ended.wait(PATIENCE_S)
    one.stop()
    assert store.check.call_count == 1


def test_what_a_learner_lost_is_told_though_the_store_is_gone_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Outside of training none looks before: a plain allreduce has ended with it."""
    one = Coordinator(store_that_is_gone(), 1, 2, LONG, QUICK)
    symptom = "learner 1 lost another learner in an allreduce"
    told = one.explain(symptom)
    gone = "the learner that hosts the job's store is gone (Connection reset by peer)"
    assert told == one.failure == f"{symptom}; {gone}; see what learner 0 printed last"
    assert capsys.readouterr().err == f"learner 1 ends: {told}\n"


def test_a_store_may_go_when_all_have_ended(capsys: pytest.CaptureFixture[str]) -> None:
    store, called = store_that_is_gone(), threading.Event()
    coordinator = Coordinator(store, 1, 2, LONG, QUICK, called.set)
    coordinator.has_ended = True
    coordinator.start()
    assert coordinator._thread is not None
    coordinator._thread.join(PATIENCE_S)
    coordinator.stop()
    assert coordinator.failure is None
    assert not called.is_set()
    assert not capsys.readouterr().err
    assert store.check.call_count == 1


def test_the_first_that_is_alive_speaks_for_a_learner_0_that_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = coordinators(3)
    for one in (second, third):
        one.explain("lost super-learner 0", QUICK)
        seen = partial(one.silent_learners, QUICK)
        monkeypatch.setattr(one, "silent_learners", seen)
    third.show_for_learner_0()
    assert not capsys.readouterr().err
    second.show_for_learner_0()
    assert capsys.readouterr().err == "learner 1 ends: lost super-learner 0\n"
    first.explain("lost super-learner 1", QUICK)
    second.show_for_learner_0()
    assert not capsys.readouterr().err


class StoppedHost:
    """Calls of a store whose host is stopped: they return once the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.store = mocked_store()
        for call in ("add", "check", "compare_set", "get", "set"):
            getattr(self.store, call).side_effect = self._hang

    def _hang(self, *_: object) -> None:
        self.over.wait(PATIENCE_S)
        raise RuntimeError("the host has ended")


@pytest.fixture
def stopped_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoppedHost]:
    monkeypatch.setattr(store_module, "_ANSWER_S", 0.05)
    host = StoppedHost()
    yield host
    host.over.set()


def test_a_loss_is_told_though_the_host_of_the_store_is_stopped(
    stopped_host: StoppedHost, capsys: pytest.CaptureFixture[str]
) -> None:
    """Learner 1, which printed nothing and waited for good."""
    called = threading.Event()
    coordinator = Coordinator(stopped_host.store, 1, 2, LONG, QUICK, called.set)
    coordinator.start()
    told = coordinator.explain("lost super-learner 0", QUICK)
    assert told.startswith("lost super-learner 0; the job's store, which learner 0")
    assert coordinator.silent_learners() == []
    assert called.wait(PATIENCE_S)
    coordinator.stop()
    assert told in capsys.readouterr().err


def test_what_is_told_to_a_stopped_host_reaches_the_others_once_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it need not be told twice, and who tells it does not wait for that."""
    monkeypatch.setattr(store_module, "_ANSWER_S", 0.05)
    store, slow, goes_on = HashStore(), mocked_store(), threading.Event()

    def tell_later(*words: str) -> bytes:
        goes_on.wait(PATIENCE_S)
        return store.compare_set(*words)

    slow.compare_set.side_effect = tell_later
    one, other = Coordinator(slow, 1, 3, LONG), Coordinator(store, 2, 3, LONG)
    one.announce_failure("learner 1 raised KeyError")
    assert str(one.failure).startswith("learner 1 raised KeyError; the job's store")
    goes_on.set()
    until(lambda: store.check(["failure"]), "the failure in the store")
    assert other.explain("lost super-learner 1") == "learner 1 raised KeyError"


def test_a_store_that_stays_silent_is_a_failure_that_names_its_host(
    stopped_host: StoppedHost,
) -> None:
    patience = timedelta(seconds=0.1)
    coordinator = Coordinator(stopped_host.store, 1, 2, patience, QUICK)
    ended = threading.Event()
    with patch.object(coordinator, "_end_process", ended.set):
        coordinator.start()
        # Its training thread is stuck in a call of the store.
        assert ended.wait(PATIENCE_S)
    assert "which learner 0 or its launcher hosts, does not" in str(coordinator.failure)
    coordinator.stop()


def test_stopping_waits_for_a_look_that_is_slow() -> None:
    """Else its thread outlived a training on a busy machine."""
    before, looking = set(threading.enumerate()), threading.Event()

    def look(_: object) -> bool:
        looking.set()
        time.sleep(2 * QUICK.total_seconds())
        return False

    store = mocked_store()
    store.check.side_effect = look
    coordinator = Coordinator(store, 1, 2, LONG, QUICK)
    coordinator.start()
    assert looking.wait(PATIENCE_S)
    coordinator.stop()
    # By its name: what tests before have left may start a thread now.
    new = set(threading.enumerate()) - before
    assert "adpsgd-watch" not in {thread.name for thread in new}


def test_stopping_ends_the_thread_and_can_be_repeated() -> None:
    (alone,) = coordinators(1)
    alone.start()
    alone.stop()
    alone.stop()
    assert "adpsgd-watch" not in [thread.name for thread in threading.enumerate()]


def test_a_process_whose_training_thread_is_stuck_is_ended(tmp_path: Path) -> None:
    def stuck(rank: int) -> None:
        patience = timedelta(seconds=0.2)
        coordinator = Coordinator(HashStore(), rank, 1, patience, QUICK)
        coordinator.start()
        coordinator.announce_failure("learner 3 died")
        threading.Event().wait(60)

    (outcome,) = forked(1, stuck)
    assert outcome.exit_code == 1
    assert outcome.error == "ended without a word"


def test_learners_that_show_no_sign_of_life_are_found() -> None:
    first, second, _dead = coordinators(3)
    for coordinator in (first, second):
        coordinator.start()
    first.announce_failure("lost a super-learner")
    until(lambda: first.silent_learners(QUICK) == [2], "signs of life of two")
    for coordinator in (first, second):
        coordinator.stop()


@pytest.mark.parametrize("wait", ["meeting", "condition"])
def test_a_wait_for_a_learner_that_has_died_ends_and_names_it(
    wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "_SHORTEST_SILENCE_S", 0.15)
    store, soon = HashStore(), timedelta(seconds=0.3)
    waits, lives, dies = (Coordinator(store, r, 3, soon, QUICK) for r in range(3))
    for one in (waits, lives, dies):
        one.start()
    dies.stop()
    begin = {
        "meeting": lambda: waits.meet("validation"),
        "condition": lambda: waits.wait_until(lambda: False),
    }
    with pytest.raises(LearnerFailed, match=r"learner \[2\] has shown no sign"):
        begin[wait]()
    until(lambda: lives.failure is not None, "the failure at the other learner")
    for one in (waits, lives):
        one.stop()


def test_the_older_server_takes_the_socket_where_the_newer_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in torch 2.6, where no job could begin."""
    made = create_autospec(lambda *place, **options: None, return_value=HashStore())
    refusal = NotImplementedError("libuv does not support a listen fd")
    made.side_effect = [refusal, made.return_value]
    monkeypatch.setattr(store_module, "TCPStore", made)
    assert store_at(7, "host", 1, is_master=True) is made.return_value
    first, second = made.call_args_list
    assert first.kwargs == {"master_listen_fd": 7, "is_master": True}
    assert second.kwargs == {**first.kwargs, "use_libuv": False}
    assert first.args == second.args == ("host", 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_store_that_a_learner_serves_is_found_by_its_address(host: str) -> None:
    served, address = serve_near(host, PATIENCE)
    near_store(address, PATIENCE).set("unit", "7")
    assert served.get("unit") == b"7"


@own_connections
def test_an_own_connection_does_not_wait_for_the_calls_of_others() -> None:
    _served, store = served_and_near()
    with while_a_call_waits(store) as waiting:
        own = own_connection(PrefixStore("claims", store))
        assert own.add("claimed", 2) == 2
        assert waiting.is_alive()


@own_connections
def test_a_failure_is_seen_while_the_training_thread_waits_for_the_store() -> None:
    """Far from the store, each of its calls takes a round trip."""
    served, store = served_and_near()
    coordinator = Coordinator(store, 1, 2, LONG, QUICK)
    with while_a_call_waits(store) as waiting:
        coordinator.start()
        served.set("failure", "learner 0 died")
        until(lambda: coordinator.failure is not None, "the failure")
        assert waiting.is_alive()
        assert coordinator.failure == "learner 0 died"
    coordinator.stop()


def test_a_store_without_connections_is_its_own() -> None:
    class Unclonable(Store):
        pass

    store = Unclonable()
    assert own_connection(store) is store


def test_an_own_connection_to_a_host_that_has_ended_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A learner that began as learner 0 ended waited for half an hour."""
    monkeypatch.setattr(store_module, "_ANSWER_S", 0.05)
    served, store = served_and_near()
    del served
    begin = time.perf_counter()
    assert own_connection(store) is store
    assert time.perf_counter() - begin < PATIENCE_S / 2


@own_connections
@pytest.mark.parametrize("is_there", [True, False])
def test_an_own_connection_leaves_the_time_limit_of_the_job_as_it_is(
    is_there: bool,
) -> None:
    """Else a learner that is minutes ahead of learner 0 would end for its silence."""
    served, store = served_and_near()
    given: Any = store
    if not is_there:
        given = create_autospec(Store, instance=True, timeout=PATIENCE)
        given.set_timeout = lambda limit: setattr(given, "timeout", limit)
        given.clone.side_effect = RuntimeError("the host has ended")
    own: Any = own_connection(given)
    assert own.timeout == given.timeout == PATIENCE
    assert (own is given) != is_there
    del served


class Doing:
    """What a learner does while it waits for others."""

    def __init__(self) -> None:
        self.meetings, self.met = list[str](), 0

    def while_waiting(self, meeting: str) -> None:
        self.meetings.append(meeting)

    def when_met(self) -> None:
        self.met += 1


def test_who_waits_in_a_meeting_works_on_until_all_have_come() -> None:
    first, second = coordinators(2)
    doing, late = Doing(), Doing()

    def come_late() -> None:
        until(lambda: len(doing.meetings) > 2, "its work")
        second.meet("validation", late)

    together([lambda: first.meet("validation", doing), come_late])
    assert set(doing.meetings) == {"validation"}
    assert (doing.met, late.meetings, late.met) == (1, [], 1)


def test_who_waits_for_a_condition_ends_with_the_job() -> None:
    first, second = coordinators(2)
    looks, later = iter([False, False, True]), iter(range(9))
    first.wait_until(lambda: next(looks))
    assert next(looks, None) is None
    second.announce_failure("learner 1 raised KeyError")
    first.announce_failure("it lost learner 1")
    with pytest.raises(LearnerFailed, match="learner 1 raised KeyError"):
        first.wait_until(lambda: next(later) == 8)


@pytest.mark.parametrize(
    ("act", "pause"),
    [
        (lambda one: one.wait_until(iter([False] * 3 + [True]).__next__), 0.01),
        (lambda one: one.silent_learners(timedelta(seconds=0.1)), 0.05),
        (lambda one: one.explain("it lost learner 1", timedelta(seconds=0.1)), 0.02),
    ],
)
def test_who_waits_rests_between_two_looks(act: Any, pause: float) -> None:
    one, _ = coordinators(2)
    rests, one._stopped = list[float](), Mock()
    one._stopped.wait = rests.append
    clock = SimpleNamespace(
        monotonic=lambda: sum(rests), perf_counter=lambda: sum(rests)
    )
    with patch.object(store_module, "time", clock):
        act(one)
    assert 2 <= len(rests) <= 6
    assert set(rests) == {pause}


def test_silences_of_the_store_count_only_in_a_row() -> None:
    """Each is half a second here, and the job ends after more than one second."""
    poll = timedelta(seconds=0.25)
    one = Coordinator(HashStore(), 1, 2, timedelta(seconds=1), poll)
    for _ in range(3):
        one._judge_silence()
        one._judge_silence()
        assert one.failure is None
        one._look()
    for _ in range(3):
        one._judge_silence()
    assert one.failure is not None
    assert one.failure.endswith("(2 s)")


def test_a_failure_is_known_here_though_the_store_has_gone() -> None:
    store = mocked_store()
    store.compare_set.side_effect = RuntimeError("Connection reset by peer")
    store.check.side_effect = RuntimeError("Connection reset by peer")
    one = Coordinator(store, 1, 2, LONG, QUICK)
    one.announce_failure("learner 1 raised KeyError")
    assert one.failure == "learner 1 raised KeyError"
    assert one.silent_learners() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_learner_0_alone_shows_what_another_has_announced(
    rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    store, called = HashStore(), threading.Event()
    one = Coordinator(store, rank, 3, LONG, QUICK, called.set)
    Coordinator(store, 2, 3, LONG, QUICK).announce_failure("learner 2 raised KeyError")
    one.start()
    assert called.wait(PATIENCE_S)
    one.stop()
    shown = "Training ends: learner 2 raised KeyError\n"
    assert capsys.readouterr().err == (shown if rank == 0 else "")


def test_no_thread_or_connection_of_a_coordinator_outlives_it() -> None:
    store = mocked_store()
    store.check.return_value, store.compare_set.return_value = False, b"no"
    store.clone.return_value = another = mocked_store()
    another.check.return_value = False
    one = Coordinator(store, 1, 2, LONG, QUICK)
    one.start()
    assert one._watched is another
    one.stop()
    one.announce_failure("no")
    assert not {id(store), id(another)} & {id(one._watched), id(one._store)}
    names = {"adpsgd-watch", "adpsgd-look", "adpsgd-failure"}
    until(lambda: not names & {t.name for t in threading.enumerate()}, "their end")


def test_the_failure_that_is_known_here_stays_when_another_is_read() -> None:
    """It has been shown, and the training thread may have raised it."""
    store = HashStore()
    one = Coordinator(store, 0, 2, LONG, QUICK)
    one.failure = "the store does not answer"
    store.set("failure", "learner 1 raised ValueError")
    one._look()
    assert one.failure == "the store does not answer"
