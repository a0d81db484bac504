from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.coordination.failures import FailureReport
from lightning_adpsgd.coordination.store import (
    Coordinator,
    LearnerDiverged,
    LearnerFailed,
    LearnerFollows,
)
from lightning_adpsgd.mixing.sickness import SickLearner
from lightning_adpsgd.transport.base import PeerLost


def reports(num: int) -> list[FailureReport]:
    store, poll = HashStore(), timedelta(seconds=0.01)
    coordinators = [
        Coordinator(store, rank, num, timedelta(seconds=30), poll)
        for rank in range(num)
    ]
    return [FailureReport(each, rank, [rank]) for rank, each in enumerate(coordinators)]


def end_with(report: FailureReport) -> None:
    with report.named():
        raise PeerLost(1, "averaging", "no answer")


@pytest.mark.parametrize("cause", [SickLearner("it is ill"), FloatingPointError("it")])
def test_learner_0_hears_that_another_has_diverged(cause: Exception) -> None:
    first, second = reports(2)
    second.announce(cause)
    with pytest.raises(FloatingPointError, match=rf"learner 1 .* {cause}") as error:
        end_with(first)
    assert isinstance(error.value, LearnerDiverged)


def test_another_failure_is_no_divergence() -> None:
    first, second = reports(2)
    second.announce(ValueError("no such file"))
    with pytest.raises(LearnerFailed, match=r"learner 1 .* no such file") as error:
        end_with(first)
    assert not isinstance(error.value, FloatingPointError)


def test_the_others_end_without_a_message_of_their_own() -> None:
    first, second = reports(2)
    first.announce(SickLearner("it is ill"))
    with pytest.raises(LearnerFollows):
        end_with(second)
