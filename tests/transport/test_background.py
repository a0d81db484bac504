"""How threads of communication are scheduled."""

import os
import sys
import threading
from typing import Any

import pytest

from lightning_adpsgd.transport.background import in_background

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER,
    reason="needs Linux, and its usual policy",
)


def own_policy_and_that_of_a_thread_started_now() -> list[int]:
    found = [os.sched_getscheduler(0)]
    thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return found


def test_a_thread_and_those_that_it_starts_give_way() -> None:
    with in_background():
        inside = own_policy_and_that_of_a_thread_started_now()
    assert inside == [os.SCHED_BATCH] * 2
    assert own_policy_and_that_of_a_thread_started_now() == [os.SCHED_OTHER] * 2


def test_an_error_inside_ends_it_and_is_raised() -> None:
    with pytest.raises(ValueError, match="inside"), in_background():
        raise ValueError("inside")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_that_the_program_chose_stays() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        with in_background():
            pass
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@pytest.mark.parametrize("refused", ["sched_getscheduler", "sched_setscheduler"])
def test_a_system_that_refuses_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(os, refused, refuse)
        with in_background():
            pass
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
