"""Weights that are not a number, infinite or far too large, in one learner of several.

First the engines alone, in threads; then whole trainings, in processes.
"""

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_adpsgd.gossip import quarantine
from lightning_adpsgd.gossip.codecs import INT4
from lightning_adpsgd.gossip.engine import Gossip
from lightning_adpsgd.gossip.quarantine import (
    NUM_FIRST,
    Disagreement,
    Quarantine,
    WeightsDiverged,
)
from tests.gossip.test_exchange import exchange, two_ends
from tests.helpers import engines, random_rows, running, until
from tests.learners import (
    Quadratic,
    each,
    gossip,
    in_every_mode,
    learners,
    loader,
    trainer_of,
)

NAN = float("nan")


def step(vector: Tensor, engine: Gossip, noise: float = 0.0) -> None:
    """An optimizer step whose gradient is noise."""
    engine.before_update()
    vector.add_(torch.randn_like(vector), alpha=noise)
    engine.after_update()


def steps_until(
    vectors: list[Tensor],
    gossips: list[Gossip],
    condition: Callable[[], bool],
    noise: float = 0.01,
) -> None:
    """Steps of all learners until something has come about."""
    for _ in range(10_000):
        if condition():
            return
        done = [e.statistics() for e in gossips]
        for vector, engine in zip(vectors, gossips, strict=True):
            step(vector, engine, noise)
        until(lambda done=done: progressed(gossips, done), "an exchange")
    raise AssertionError("10,000 steps were not enough")


def progressed(gossips: list[Gossip], before: list[Any]) -> bool:
    now = [e.statistics() for e in gossips]
    pairs = zip(now, before, strict=True)
    return any(n.exchanges + n.refused > b.exchanges + b.refused for n, b in pairs)


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[Disagreement]:
    """What is usual on each lane of the engines that a test starts."""
    made: list[Disagreement] = []

    class Noted(Disagreement):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr("lightning_adpsgd.gossip.exchange.Disagreement", Noted)
    return made


def used_to_each_other(
    vectors: list[Tensor], gossips: list[Gossip], lanes: list[Disagreement]
) -> None:
    """Exchanges enough on each lane for what is usual to be known."""
    num_lanes = 2 * len(gossips) * (len(gossips) - 1)

    def is_known() -> bool:
        enough = [lane for lane in list(lanes) if lane._num_seen > NUM_FIRST]
        return len(enough) == num_lanes

    steps_until(vectors, gossips, is_known)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between attempts; how long they are is tested by a clock, in `test_reloads`."""
    monkeypatch.setattr(quarantine, "_FIRST_PAUSE_S", 0.05)


def refused(gossips: list[Gossip]) -> int:
    return sum(e.statistics().refused for e in gossips)


# --- the engines


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.int8, INT4])
def test_an_exploded_learner_is_refused_counted_and_named(
    wire_dtype: torch.dtype | None,
    caplog: pytest.LogCaptureFixture,
    lanes: list[Disagreement],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Quarantine, "wants_reload", False)
    vectors, gossips = engines(
        random_rows(3, length=40), "complete", wire_dtype=wire_dtype
    )
    with running(gossips), caplog.at_level(logging.WARNING):
        used_to_each_other(vectors, gossips, lanes)
        assert refused(gossips) == 0
        vectors[0].mul_(1e6)
        far = 3 if wire_dtype not in (torch.int8, INT4) else 1
        steps_until(
            vectors,
            gossips,
            lambda: all(e.statistics().far >= far for e in gossips),
        )
    for vector in vectors[1:]:
        assert vector.abs().max() < 100
    text = caplog.text
    assert "super-learner 1 ignores super-learner 0" in text
    # On a lattice an exchange may leave out each block by itself, and count as merged.
    told = text.count("super-learner 2 ignores super-learner 0")
    assert told == 1 or (told > 1 and wire_dtype in (torch.int8, INT4))


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_what_is_too_far_is_left_out_by_both_ends(
    wire_dtype: torch.dtype | None,
) -> None:
    first, second = torch.randn(2, 7)
    ends = two_ends(first, second, wire_dtype=wire_dtype)
    for _ in range(20):
        first.add_(torch.randn(7), alpha=0.01)
        assert all(outcome.averaged for outcome in exchange(ends))
    first.mul_(1e6)
    before = first.clone(), second.clone()
    outcomes = exchange(ends)
    assert [outcome.near for outcome in outcomes] == [False, False]
    assert [outcome.is_to_blame for outcome in outcomes] == [True, False]
    assert first.equal(before[0])
    assert second.equal(before[1])


def test_an_exploded_learner_goes_on_from_a_peer_after_a_while(
    lanes: list[Disagreement],
) -> None:
    vectors, gossips = engines(random_rows(3, length=40), "complete")
    with running(gossips):
        used_to_each_other(vectors, gossips, lanes)
        vectors[0].mul_(1e6)
        steps_until(vectors, gossips, lambda: gossips[0].statistics().reloads > 0)
        assert vectors[0].abs().max() < 100
    assert [e.statistics().reloads for e in gossips] == [1, 0, 0]


def test_a_learner_that_is_no_number_goes_on_from_a_peer_with_a_fresh_optimizer() -> (
    None
):
    vectors, gossips = engines(random_rows(3), "ring")
    with running(gossips):
        vectors[1][2] = NAN
        steps_until(vectors, gossips, lambda: gossips[1].statistics().reloads > 0)
        assert vectors[1].isfinite().all()
    assert torch.stack(vectors).isfinite().all()
    assert [engine.num_reloads for engine in gossips] == [0, 1, 0]


@pytest.mark.usefixtures("short_pauses")
def test_it_ends_when_it_has_gone_on_from_others_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quarantine, "MOST_RELOADS", 2)
    vectors, gossips = engines(random_rows(2), "ring")

    def fall_ill() -> bool:
        vectors[1].fill_(NAN)
        return False

    what = r"super-learner 1 .*after 2 attempts"
    with running(gossips), pytest.raises(WeightsDiverged, match=what):
        steps_until(vectors, gossips, fall_ill)
    assert vectors[0].isfinite().all()
    assert gossips[0].statistics().reloads == 0


@pytest.mark.usefixtures("short_pauses")
def test_it_ends_when_no_peer_is_healthy() -> None:
    vectors, gossips = engines(random_rows(2), "ring")

    def all_fall_ill() -> bool:
        for vector in vectors:
            vector.fill_(NAN)
        return False

    what = r"none of its peers \[\d\] has finite weights"
    with running(gossips), pytest.raises(WeightsDiverged, match=what):
        steps_until(vectors, gossips, all_fall_ill)


# --- whole trainings

SICK, AT = 1, 6


class Falls(Quadratic):
    """Learner 1 falls ill at its seventh step; a momentum that would keep it so."""

    def __init__(self, how: str) -> None:
        super().__init__(start=5.0)
        self.how = how

    def is_time(self, batch_idx: int) -> bool:
        return self.global_rank == SICK and batch_idx == AT

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.how == "data" and self.is_time(batch_idx):
            batch = batch * NAN
        self.batch_idx = batch_idx
        return super().training_step(batch, batch_idx)

    @override
    def on_after_backward(self) -> None:
        if self.how == "gradients" and self.is_time(self.batch_idx):
            assert self.weight.grad is not None
            self.weight.grad[0] = NAN

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.how == "weights" and self.is_time(batch_idx):
            self.weight.data[2] = NAN

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)


def test_a_training_survives_the_illness_of_one_learner() -> None:
    """Three learners, one of which falls ill, end alike and with a fresh optimizer."""

    def program(rank: int, how: str) -> Any:
        # Who waits for an exchange at least every second step is found ill.
        module, strategy = Falls(how), gossip("complete", max_staleness=1)
        trainer = trainer_of(strategy, 3)
        trainer.fit(module, loader(180, rank, 3))
        momentum = [s["momentum_buffer"] for s in trainer.optimizers[0].state.values()]
        return module.weight.detach(), strategy.gossip_statistics().reloads, momentum

    illnesses = "gradients", "weights", "data"
    for how, results in in_every_mode(3, program, illnesses).items():
        assert [reloads for _, reloads, _ in results] == [0, 1, 0], how
        for weights, _, (momentum,) in results:
            assert weights.equal(results[0][0]), how
            # The rows that it goes to are about 0.
            assert weights.abs().max() < 2.0, how
            assert momentum.isfinite().all(), how


@pytest.mark.usefixtures("short_pauses")
def test_a_learner_whose_data_are_all_ill_ends_with_its_name() -> None:
    class Broken(Falls):
        @override
        def is_time(self, batch_idx: int) -> bool:
            return self.global_rank == SICK

    def program(rank: int) -> Any:
        strategy = gossip("complete", max_staleness=1)
        trainer_of(strategy, 2).fit(Broken("data"), loader(20000, rank, 2))

    errors = [outcome.error for outcome in learners(2, program)]
    assert errors[SICK]
    assert "super-learner 1" in errors[SICK]
    assert "after 3 attempts" in errors[SICK]
    assert errors[0]
    assert "after 3 attempts" in errors[0]


class Network(pl.LightningModule):
    """A small network from its own initialisation, one layer of which is zero.

    Learners stay within ten steps of one another: who was stopped by the system for
    hundreds of large steps would be far away.
    """

    def __init__(self, rate: float, steps: Tensor) -> None:
        super().__init__()
        self.steps = steps
        torch.manual_seed(0)
        last = torch.nn.Linear(16, 1)
        torch.nn.init.zeros_(last.weight)
        layers = [torch.nn.Linear(3, 16), torch.nn.Tanh(), last]
        self.layers, self.rate = torch.nn.Sequential(*layers).double(), rate

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps[self.global_rank] += 1
        least = self.steps[self.global_rank] - 10
        until(lambda: bool(self.steps.min() >= least), "those behind")
        goal = batch.prod(1, keepdim=True).tanh()
        return (self.layers(batch) - goal).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.rate)


RATES = {"small": 1e-3, "large": 0.1, "far too large": 1.0}


def test_no_healthy_learner_is_refused() -> None:
    steps = {name: torch.zeros(3, dtype=torch.int64).share_memory_() for name in RATES}

    def program(rank: int, name: str) -> Any:
        strategy = gossip("complete", max_staleness=2)
        rows: Any = loader(300, rank, 3).dataset
        module = Network(RATES[name], steps[name])
        trainer = trainer_of(strategy, 3, max_epochs=2)
        trainer.fit(module, DataLoader(rows, 2, shuffle=True))
        return strategy.gossip_statistics()

    for name, statistics in each(in_every_mode(3, program, list(RATES))):
        assert statistics.exchanges > 20, name
        found = statistics.refused, statistics.far, statistics.reloads
        assert found == (0, 0, 0), name
