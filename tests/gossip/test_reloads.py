"""How often, and how soon, a diverged learner goes on from the weights of a peer."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_adpsgd.gossip import quarantine
from lightning_adpsgd.gossip.members import Members
from lightning_adpsgd.gossip.protocol import Outcome
from lightning_adpsgd.gossip.quarantine import (
    MOST_FAR_EXCHANGES,
    Quarantine,
    WeightsDiverged,
)
from lightning_adpsgd.mixing.super_learner import SuperLearnerGroup
from lightning_adpsgd.topology.named import find_topology
from lightning_adpsgd.topology.schedule import Schedule
from lightning_adpsgd.weights.replica import Replica
from tests.helpers import PATIENCE_S

ILL = Outcome(finite=False, bytes_sent=0, first_step=5, is_to_blame=True)


class Clock:
    """Seconds that a test lets pass."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Patient:
    """A learner whose peers give what a test says."""

    def __init__(self) -> None:
        self.clock, vectors = Clock(), [torch.zeros(4)]
        self.gives: list[Tensor] | None = [torch.ones(4)]
        self.state = threading.Condition()
        self._replica = Replica([vectors], 1 << 20, self.state)
        self.quarantine = Quarantine(
            Members.fixed(Schedule(find_topology("ring"), 3), 0),
            vectors,
            SuperLearnerGroup(),
            self._replica,
            timedelta(seconds=1),
            self.clock,
        )

    def fall_ill(self) -> None:
        self._replica.step += 10
        self.quarantine.note(ILL._replace(first_step=self._replica.step))

    def reload(self) -> None:
        self.quarantine.reload([1, 2], lambda peer, seconds: self.gives)

    def waits(self) -> float:
        """Seconds until it may try again."""
        begin = self.clock.now
        while not self.quarantine.wants_reload:
            self.clock.now += 0.125
        return self.clock.now - begin


def test_the_first_reload_is_at_once_and_each_next_one_waits_twice_as_long() -> None:
    patient, waited = Patient(), list[float]()
    for _ in range(3):
        patient.fall_ill()
        waited.append(patient.waits())
        patient.reload()
    assert waited == [0.0, 0.5, 1.0]
    patient.fall_ill()
    assert patient.waits() == 2.0
    with pytest.raises(WeightsDiverged, match=r"after 3 attempts in 10 minutes"):
        patient.reload()
    assert patient.quarantine.num_reloads == 3


def test_a_reload_says_what_was_wrong_and_whose_weights_it_takes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    patient = Patient()
    for number, (gives, said) in enumerate(
        ((None, "none of its peers [1, 2]"), ([torch.ones(4)], "of super-learner 1 "))
    ):
        patient.gives = gives
        patient.fall_ill()
        patient.reload()
        assert said in caplog.text
        assert f"(attempt {number + 1} of 3)" in caplog.text
        assert "the weights of super-learner 0" in caplog.text
        caplog.clear()


def test_what_is_long_ago_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MOST_RELOADS", 1)
    patient = Patient()
    for _ in range(20):
        patient.fall_ill()
        assert patient.waits() == 0.0
        patient.reload()
        patient.clock.now += 601.0
    assert patient.quarantine.num_reloads == 20


def test_it_asks_again_where_all_peers_are_ill_at_the_same_time() -> None:
    patient = Patient()
    patient.gives = [torch.full((4,), float("nan"))]
    patient.fall_ill()
    patient.reload()
    assert patient.quarantine.num_reloads == 0
    patient.gives = [torch.ones(4)]
    assert patient.waits() == 0.5
    patient.reload()
    assert patient.quarantine.num_reloads == 1
    assert not patient.quarantine.wants_reload


def test_it_ends_where_no_peer_becomes_healthy() -> None:
    patient = Patient()
    patient.gives = None
    patient.fall_ill()
    for _ in range(2):
        patient.waits()
        patient.reload()
    patient.waits()
    with pytest.raises(WeightsDiverged, match=r"none of its peers \[1, 2\] has finite"):
        patient.reload()


def test_weights_that_go_on_being_too_far_have_diverged() -> None:
    far = ILL._replace(finite=True, near=False)
    learner = Patient()
    for _ in range(2):
        for _ in range(MOST_FAR_EXCHANGES - 1):
            learner.quarantine.note(far)
            assert not learner.quarantine.wants_reload
        learner.quarantine.note(far._replace(is_to_blame=False))  # counts anew
    for _ in range(MOST_FAR_EXCHANGES):
        assert not learner.quarantine.wants_reload
        learner.quarantine.note(far)
    assert learner.quarantine.wants_reload
    learner.reload()
    for _ in range(MOST_FAR_EXCHANGES):
        assert not learner.quarantine.wants_reload
        learner.clock.now += 3600
        learner.quarantine.note(far._replace(first_step=99))
    assert learner.quarantine.wants_reload


def test_an_exchange_of_the_step_of_a_reload_may_have_read_the_old_weights() -> None:
    patient = Patient()
    patient.fall_ill()
    patient.reload()
    patient.clock.now += 60
    patient.quarantine.note(ILL._replace(first_step=patient._replica.step))
    assert not patient.quarantine.wants_reload
    patient.quarantine.note(ILL._replace(first_step=patient._replica.step + 1))
    assert patient.quarantine.wants_reload


def test_a_reload_asks_eight_peers_at_most() -> None:
    """All learners of a super-learner agree on as many numbers."""
    patient, asked = Patient(), list[int]()
    patient.fall_ill()
    patient.quarantine.reload(range(1, 20), lambda peer, seconds: asked.append(peer))
    assert asked == [*range(1, 9)]


def test_training_that_goes_on_from_an_earlier_step_begins_anew() -> None:
    """A program has loaded a checkpoint of before the last reload."""
    patient = Patient()
    patient._replica.step = 1000
    patient.fall_ill()
    patient.reload()
    patient.clock.now += 60
    patient.fall_ill()
    patient._replica.step = 10
    patient.quarantine.begin_anew()
    assert not patient.quarantine.wants_reload
    patient.quarantine.note(ILL._replace(first_step=10))  # perhaps of the old weights
    assert not patient.quarantine.wants_reload
    patient.quarantine.note(ILL._replace(first_step=11))
    assert patient.quarantine.wants_reload


class Late:
    """An outcome of the old weights; in the middle of its note something happens."""

    finite, first_step = False, 10

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile

    @property
    def is_to_blame(self) -> bool:
        self._meanwhile()
        return True


def test_an_exchange_of_the_old_weights_that_is_noted_at_a_reload_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patient = Patient()
    patient.fall_ill()
    monkeypatch.setattr(patient._replica, "put", lambda values: None)
    reloading = threading.Thread(target=patient.reload)

    def meanwhile() -> None:
        reloading.start()
        reloading.join(0.1)

    late: Any = Late(meanwhile)
    with patient.state:
        patient.quarantine.note(late)
    reloading.join(PATIENCE_S)
    patient.clock.now += 3600
    assert not patient.quarantine.wants_reload
