"""What the strategy takes and refuses, without a process of its own."""

import logging
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core import rank_zero

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.registration import NAMES
from tests.learners import (
    Linear,
    consensus_after,
    gossip,
    learners,
    loader,
    trainer_of,
    values,
)


@pytest.mark.parametrize(
    ("dials", "message"),
    [
        ({"topology": "star"}, r"`topology` must be one of 'ring'.*got 'star'"),
        ({"topology": [[(0, 1), (0, 2)]]}, "super-learner 0 is in two pairs"),
        ({"communication": "later"}, r"`communication`.*'sync'.*got 'later'"),
        ({"super_learner_size": 0}, r"`super_learner_size`.*at least 1, got 0"),
        ({"super_learner_size": "rack"}, r"`super_learner_size`.*'node'.*got 'rack'"),
        ({"order": "both"}, r"`order` must be one of.*got 'both'"),
        ({"mixing_gain": 0.0}, r"`mixing_gain` must be in \(0, 1\], got 0"),
        ({"mixing_gain": 1.5}, r"`mixing_gain` must be in \(0, 1\], got 1.5"),
        ({"gossip_every": 0}, r"`gossip_every` must be at least 1, got 0"),
        ({"max_staleness": 0}, r"`max_staleness` must be at least 1, got 0"),
        ({"wire_dtype": torch.int16}, r"`wire_dtype` must be one of.*int16"),
        ({"link_budget": 0.0}, r"`link_budget` must be positive, got 0.0"),
        ({"cpu_share": 1.5}, r"`cpu_share` must be in \(0, 1\], got 1.5"),
        ({"after_evaluation": "keep"}, r"`after_evaluation`.*'adopt'.*got 'keep'"),
        ({"timeout": timedelta(0)}, r"`timeout` must be positive"),
        (
            {"communication": "sync", "wire_dtype": torch.bfloat16},
            r"`wire_dtype` applies to.*async.*'sync'",
        ),
        (
            {"communication": "delay_by_one", "max_staleness": 3},
            r"`max_staleness` applies to.*async.*'delay_by_one'",
        ),
        (
            {"communication": "delay_by_one", "order": "step_then_average"},
            r"`order` must be \"average_then_step\"",
        ),
    ],
)
def test_a_dial_out_of_its_bounds_is_refused_with_bound_and_value(
    dials: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        HADPSGDStrategy(**dials)


def test_the_order_depends_on_the_communication() -> None:
    orders = {
        communication: HADPSGDStrategy(
            communication=communication
        )._dials.effective_order
        for communication in ("sync", "delay_by_one", "async")
    }
    assert orders == {
        "sync": "step_then_average",
        "delay_by_one": "average_then_step",
        "async": "step_then_average",
    }


def test_a_strategy_travels_to_a_spawned_process() -> None:
    strategy = HADPSGDStrategy("random_ring", super_learner_size=2, mixing_gain=0.5)
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy._dials == strategy._dials


def test_nothing_communicates_before_training() -> None:
    strategy = HADPSGDStrategy()
    assert strategy.gossip_statistics() is None
    assert strategy.last_consensus is None


@pytest.mark.parametrize("name", NAMES)
def test_one_learner_alone_trains_as_plain_sgd(name: str) -> None:
    def program(rank: int) -> Any:
        module = Linear()
        trainer_of(name, 1).fit(module, loader(8))
        return module.weight.detach()

    (final,) = values(learners(1, program))
    torch.testing.assert_close(final, consensus_after(8, 1))


def timed_checkpoint() -> ModelCheckpoint:
    return ModelCheckpoint(train_time_interval=timedelta(seconds=1))


@pytest.mark.parametrize(
    ("size", "arguments", "message"),
    [
        (3, {}, "`super_learner_size` must divide the number of learners 2, got 3"),
        (1, {"sync_batchnorm": True}, "`sync_batchnorm` must be False"),
        (1, {"callbacks": [Timer(timedelta(hours=1))]}, "`max_time` must not be set"),
        (1, {"max_time": "00:01:00:00"}, "`max_time` must not be set"),
        (
            1,
            {"callbacks": [timed_checkpoint()], "enable_checkpointing": True},
            "`train_time_interval` must not be set",
        ),
        (1, {"val_check_interval": "00:00:01:00"}, "`val_check_interval` must be"),
    ],
)
def test_what_would_tie_learners_together_is_refused_at_set_up(
    size: int, arguments: dict[str, Any], message: str
) -> None:
    def program(rank: int) -> None:
        trainer = trainer_of(gossip(super_learner_size=size), 2, **arguments)
        trainer.fit(Linear(), loader(8), loader(2))

    for outcome in learners(2, program, seconds=20):
        assert message in outcome.error
        assert outcome.exit_code > 0


def test_one_node_alone_says_once_that_it_is_plain_allreduce() -> None:
    def program(rank: int) -> tuple[Any, list[str]]:
        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())
        rank_zero.log.addHandler(handler)
        trainer = trainer_of("hadpsgd", 2)
        trainer.fit(Linear(), loader(8, rank, 2))
        assert isinstance(trainer.strategy, HADPSGDStrategy)
        return trainer.strategy.gossip_statistics(), told

    results = values(learners(2, program))
    assert [statistics for statistics, _ in results] == [None, None]
    told = [message for _, messages in results for message in messages]
    (message,) = [m for m in told if "All 2 learners form one super-learner" in m]
    assert "`super_learner_size`" in message


def test_statistics_outlive_the_training() -> None:
    def program(rank: int) -> Any:
        strategy = gossip("complete", "sync")
        trainer_of(strategy, 2).fit(Linear(), loader(8, rank, 2))
        statistics, consensus = strategy.gossip_statistics(), strategy.last_consensus
        return statistics.exchanges, statistics.bytes_sent, consensus.distance

    # Four steps of three float64 weights; after a complete average all are equal.
    for exchanges, bytes_sent, distance in values(learners(2, program)):
        assert (exchanges, bytes_sent) == (4, 4 * 3 * 8)
        assert distance == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_other_precisions_train(precision: Any) -> None:
    class Single(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.weight.data = self.weight.data.float()

        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            return super().loss(batch.to(self.weight.dtype))

    def program(rank: int) -> Any:
        module = Single()
        trainer_of(gossip(), 2, precision=precision).fit(module, loader(16, rank, 2))
        return module.weight.detach().double()

    finals = values(learners(2, program))
    assert torch.equal(finals[0], finals[1])
    torch.testing.assert_close(finals[0], consensus_after(16, 2), atol=0.01, rtol=0)


def test_the_strategy_is_one_of_lightnings_own_kind() -> None:
    """Which is what Lightning asks before it samples or reduces for many learners."""
    assert isinstance(HADPSGDStrategy(), DDPStrategy)
