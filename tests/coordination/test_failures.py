import threading
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from lightning_adpsgd.coordination.failures import FailureReport, SuperLearnerBroken
from lightning_adpsgd.coordination.store import (
    Coordinator,
    LearnerDiverged,
    LearnerFailed,
    LearnerFollows,
)
from lightning_adpsgd.gossip.quarantine import WeightsDiverged
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


@pytest.mark.parametrize(
    "cause", [WeightsDiverged("it diverged"), FloatingPointError("it")]
)
def test_learner_0_hears_that_another_has_diverged(cause: Exception) -> None:
    first, second = reports(2)
    second.announce(cause)
    with pytest.raises(FloatingPointError, match=rf"learner 1 .* {cause}") as error:
        end_with(first)
    assert isinstance(error.value, LearnerDiverged)


def test_an_error_that_names_a_file_by_no_text_is_heard_too() -> None:
    """As Python has the name of a file whose bytes are of another encoding."""
    first, second = reports(2)
    second.announce(FileNotFoundError("caf\udce9.wav"))
    with pytest.raises(LearnerFailed, match=r"learner 1 .* caf\\udce9\.wav"):
        end_with(first)


def test_another_failure_is_no_divergence() -> None:
    first, second = reports(2)
    second.announce(ValueError("no such file"))
    with pytest.raises(LearnerFailed, match=r"learner 1 .* no such file") as error:
        end_with(first)
    assert not isinstance(error.value, FloatingPointError)


def test_the_others_end_when_learner_0_has_told_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A launcher that forks ends all learners as soon as one has ended.
    first, second = reports(2)
    second.announce(WeightsDiverged("it diverged"))
    second._coordinator.start()
    late = threading.Timer(0.1, first._coordinator.start)
    late.start()
    with pytest.raises(LearnerFollows):
        end_with(second)
    assert "Training ends: learner 1" in capsys.readouterr().err
    late.join()
    for report in (first, second):
        report._coordinator.stop()


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
# As torch 2.11 raises them.
LOST = [
    RuntimeError(f"{GLOO}pair.cc:547] Connection closed by peer [127.0.0.1]:9119"),
    RuntimeError(f"{GLOO}unbound_buffer.cc:129] Timed out waiting 4000ms for send"),
    RuntimeError("Application timeout caused pair closure"),
    DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited"),
    DistNetworkError("failed to recv, got 0 bytes"),
    DistStoreError("wait timeout after 4000ms, keys: /default_pg/0//none"),
    SuperLearnerBroken("the learners of this super-learner did not share"),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_what_torch_and_gloo_say_of_a_lost_connection_is_a_lost_learner(
    error: RuntimeError,
) -> None:
    (report,) = reports(1)
    with (
        pytest.raises(LearnerFailed, match="lost another learner") as failed,
        report.named(),
    ):
        raise error
    assert failed.value.__cause__ is error


@pytest.mark.parametrize(
    "message",
    [
        "database connection refused",
        "the request to the feature server timed out",
        "the gloo of the zoo is lost",
        "see [/data/gloo/notes.cc:1] for what went wrong",
    ],
)
def test_an_error_of_the_program_stays_what_it_is(message: str) -> None:
    (report,) = reports(1)
    mine = RuntimeError(message)
    with pytest.raises(RuntimeError) as error, report.named():
        raise mine
    assert error.value is mine
    assert report._coordinator.failure is None


def test_a_failure_that_is_named_twice_keeps_its_cause() -> None:
    (report,) = reports(1)
    with pytest.raises(LearnerFailed) as failed, report.named():
        end_with(report)
    assert isinstance(failed.value.__cause__, PeerLost)


def named(report: FailureReport, error: Exception, collective: str = "") -> str:
    """The message with which learner 0 ends by an error, in a collective if named."""
    coordinator: Any = report._coordinator
    for wait in ("explain", "silent_learners"):
        soon = partial(getattr(coordinator, wait), patience=timedelta(0))
        setattr(coordinator, wait, soon)
    with pytest.raises(LearnerFailed) as failed, report.named(collective):
        raise error
    return str(failed.value)


def test_a_loss_in_a_collective_of_all_names_the_collective() -> None:
    (report,) = reports(1)
    error = DistNetworkError("failed to recv, got 0 bytes")
    message = named(report, error, "barrier of all learners")
    assert message.startswith("learner 0 on host ")
    assert "lost another learner in barrier of all learners: failed to" in message


def test_a_loss_in_an_allreduce_names_the_super_learner() -> None:
    (report,) = reports(1)
    report._super_learner = [0, 3]
    message = named(report, SuperLearnerBroken("it did not share"))
    assert "another learner of its super-learner [0, 3] in an allreduce" in message


def test_who_is_silent_is_named_where_a_collective_of_all_lost_somebody() -> None:
    report, _ = reports(2)
    message = named(report, DistNetworkError("reset"), "broadcast of all learners")
    assert message.endswith(". No sign of life from learner [1]")


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed"


def test_the_reason_is_noted_on_a_connection_that_the_program_itself_has_lost() -> None:
    fails, follows = reports(2)
    fails.announce(KeyError("weights"))
    error = RuntimeError(f"{GLOO} by peer [127.0.0.1]:23")
    follows.announce(error)
    assert error.__notes__ == [fails._coordinator.failure]
    assert "raised KeyError" in error.__notes__[0]


def test_a_connection_that_is_lost_without_a_reason_is_told_to_all() -> None:
    (report,) = reports(1)
    coordinator: Any = report._coordinator
    coordinator.explain = partial(coordinator.explain, patience=timedelta(0))
    error = RuntimeError(f"{GLOO} by peer [127.0.0.1]:23")
    report.announce(error)
    told = report._coordinator.failure or ""
    assert told.startswith("learner 0 on host ")
    assert f" raised RuntimeError: {GLOO}" in told
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize(("peer", "told"), [(None, True), (1, False)])
def test_who_shows_no_sign_of_life_is_named_if_no_peer_is(
    peer: int | None, told: bool
) -> None:
    report, _ = reports(2)
    message = named(report, PeerLost(peer, "a round", "no answer"))
    assert message.endswith(". No sign of life from learner [1]") == told


def test_an_announcement_is_one_line_of_bounded_length() -> None:
    (report,) = reports(1)
    report.announce(ValueError("two\n  lines " + 600 * "x"))
    failure = report._coordinator.failure
    assert failure is not None
    begin, text = failure.split(" raised ValueError: ")
    assert begin.startswith("learner 0 on host ")
    assert text.startswith("two lines xxx")
    assert len(text) == 500


def test_an_error_without_a_word_is_announced_by_its_name() -> None:
    (report,) = reports(1)
    report.announce(KeyboardInterrupt())
    assert str(report._coordinator.failure).endswith(" raised KeyboardInterrupt")


def test_who_only_follows_announces_nothing_and_a_thread_its_loss() -> None:
    (report,) = reports(1)
    for error in (LearnerFailed("another"), LearnerFollows(1)):
        report.announce(error)
    assert report._coordinator.failure is None
    report.lost_peer("lost super-learner 1")
    told = str(report._coordinator.failure)
    assert told.startswith("learner 0 on host ")
    assert told.endswith(" lost super-learner 1")
