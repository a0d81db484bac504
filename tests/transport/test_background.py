"""How threads of communication are scheduled."""

import os
import sys
import threading

import pytest

from lightning_adpsgd.transport.background import in_background

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def policies_inside_and_of_a_thread_started_there() -> list[int]:
    found = [os.sched_getscheduler(0)]
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found


def test_a_thread_and_those_that_it_starts_give_way() -> None:
    before = os.sched_getscheduler(0)
    with in_background():
        assert policies_inside_and_of_a_thread_started_there() == [os.SCHED_BATCH] * 2
    assert os.sched_getscheduler(0) == before == os.SCHED_OTHER


def test_it_ends_with_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), in_background():
        raise ValueError("inside")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_that_the_program_chose_stays() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        with in_background():
            assert os.sched_getscheduler(0) == os.SCHED_BATCH
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def test_a_refusal_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with in_background():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
