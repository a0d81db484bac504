"""What exchanges take from training where it is measured in steps, as on a GPU."""

import random
from typing import NamedTuple, Self

import pytest
import torch

from lightning_adpsgd.gossip import engine, pacing
from lightning_adpsgd.gossip.pacing import CoreShare
from lightning_adpsgd.gossip.slowdown import Slowdown
from tests.gossip.test_pacing import Clock
from tests.helpers import engines_of_super_learners

SHARE = 0.05


class Steps:
    """Steps one after another, some of them beside an exchange."""

    def __init__(self) -> None:
        self.slowdown, self._now = Slowdown(), 0.0
        self.slowdown.stepped(self._now)

    def take(self, number: int, seconds: float) -> Self:
        for _ in range(number):
            self._now += seconds
            self.slowdown.stepped(self._now)
        return self

    def beside_one(self, number: int, seconds: float) -> Self:
        """Ten exchanges begin and end in each step."""
        for _ in range(number):
            for _ in range(10):
                with self.slowdown.exchange():
                    pass
            self.take(1, seconds)
        return self

    def taken(self, exchange_s: float) -> float:
        return self.slowdown.taken_s(exchange_s, SHARE)


def measured(beside: float, alone: float) -> Steps:
    return Steps().beside_one(10, beside).take(10, alone)


def test_an_exchange_is_charged_with_what_it_adds_to_the_steps_that_it_touches() -> (
    None
):
    steps = measured(beside=0.03, alone=0.02)
    assert steps.taken(0.09) == pytest.approx(4 * 0.01)
    assert steps.taken(0.003) == pytest.approx(1.1 * 0.01)
    assert measured(beside=0.02, alone=0.021).taken(0.09) == 0.0


def test_an_exchange_touches_all_steps_until_it_ends() -> None:
    steps = Steps().take(10, 0.02)
    with steps.slowdown.exchange():
        steps.take(10, 0.03)
    steps.take(1, 0.03).take(10, 0.02)
    assert steps.taken(0.09) == pytest.approx(4 * 0.01)


def test_a_validation_among_the_steps_changes_nothing() -> None:
    steps = measured(beside=0.03, alone=0.02).take(1, 60.0).beside_one(1, 60.0)
    assert steps.taken(0.09) == pytest.approx(4 * 0.01)


def test_while_too_little_is_known_five_steps_pass_without_an_exchange() -> None:
    # It may have been charged when it began.
    steps, a_rest = Steps(), pytest.approx((1.0 + 5 * 0.02) * SHARE)
    assert steps.taken(1.0) == 0.0
    assert steps.take(10, 0.02).taken(1.0) == a_rest
    assert steps.beside_one(4, 0.04).taken(1.0) == a_rest
    assert steps.beside_one(1, 0.04).taken(0.0) == pytest.approx(0.02)


def test_steps_without_an_exchange_that_are_long_ago_are_measured_again() -> None:
    steps = measured(beside=0.03, alone=0.04).beside_one(63, 0.03)
    assert steps.taken(1.0) == 0.0
    a_rest = pytest.approx((1.0 + 5 * 0.03) * SHARE)
    assert steps.beside_one(1, 0.03).taken(1.0) == a_rest
    assert steps.take(1, 0.04).taken(1.0) == 0.0


def test_an_exchange_that_lasts_for_many_steps_is_charged_with_all_of_them() -> None:
    steps = measured(beside=0.03, alone=0.02).beside_one(100, 0.03)
    assert steps.taken(3.0) == pytest.approx(101 * 0.01)


def cores_of(slowdown: Slowdown) -> CoreShare:
    return CoreShare(SHARE, in_full=True, slowdown=slowdown)


class Training(NamedTuple):
    """What became of a simulated learner.

    Attributes:
        lost: share of the time that exchanges took from the steps.
        exchanging: share of the time in which an exchange ran.
    """

    lost: float
    exchanging: float


def train(cores: CoreShare, clock: Clock, exchange_s: float, slower: float) -> Training:
    """2,000 steps of 20 ms, `slower` times as long while an exchange runs."""
    noise, begin, running = random.Random(0), clock.now, 0.0
    context, ends_at = None, 0.0
    for _ in range(2000):
        left = 0.02 * noise.uniform(0.9, 1.1)
        while left > 0:
            if context is None and not cores.pause_s():
                context, ends_at = cores.exchange(), clock.now + exchange_s
                context.__enter__()
            pace = slower if context is not None else 1.0
            part = min(left, 0.001)
            clock.run(part * pace, work=part * pace)
            running += part * pace if context is not None else 0.0
            left -= part
            if context is not None and clock.now >= ends_at:
                context.__exit__(None, None, None)
                context = None
        cores.stepped(clock.now)
    seconds = clock.now - begin
    return Training(1 - 2000 * 0.02 / seconds, running / seconds)


@pytest.mark.parametrize("exchange_s", [0.005, 0.08, 0.15, 0.5, 2.0])
@pytest.mark.parametrize("slower", [1.1, 1.5, 2.0])
def test_exchanges_take_their_share_and_no_less(
    exchange_s: float, slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "time", clock := Clock())
    lost, _ = train(cores_of(Slowdown()), clock, exchange_s, slower)
    assert 0.03 < lost < 0.075


def test_exchanges_that_take_nothing_are_made_nearly_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pacing, "time", clock := Clock())
    _, exchanging = train(cores_of(Slowdown()), clock, 0.08, slower=1.0)
    assert exchanging > 0.5


def test_no_exchange_is_charged_with_more_than_its_processor_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pacing, "time", clock := Clock())
    cores = cores_of(measured(beside=2.0, alone=1.0).slowdown)
    assert cores.pause_s() == 0.0
    with cores.exchange():
        clock.run(10.0, work=0.01)
    assert cores.pause_s() == pytest.approx(0.01 / SHARE)


@pytest.mark.parametrize(("size", "charged"), [(1, 0.0), (2, 0.3)])
def test_steps_tell_nothing_where_they_wait_for_other_learners(
    size: int, charged: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are as long then: beside each of them one of the learners exchanges."""
    monkeypatch.setattr(pacing, "time", clock := Clock())
    monkeypatch.setattr(engine, "has_streams", lambda device: True)
    rows, options = torch.zeros(2, 4), {"cpu_share": SHARE}
    _, learners = engines_of_super_learners(rows, size, "ring", **options)
    cores = learners[0][0]._traffic.cores
    for _ in range(10):
        with cores.exchange():
            clock.run(1.0, work=0.3)
        cores.stepped(clock.now)
        clock.run(1.0)
        cores.stepped(clock.now)
    clock.run(1000.0)  # all is paid for
    with cores.exchange():
        clock.run(0.5, work=0.3)
    assert cores.pause_s() == pytest.approx(charged / SHARE)
