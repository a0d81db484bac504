"""Pairs that meet at step boundaries, in processes: Trainer and Fabric."""

import os
import signal
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd import reference
from lightning_adpsgd.dials import ReadyPairs
from tests.expectations import expect_super_learners_of_two
from tests.gossip.test_boundary import Boundary, in_order
from tests.helpers import engine_threads
from tests.learners import (
    LR,
    Quadratic,
    Rows,
    gossip,
    learners,
    loader,
    trainer_of,
    values,
)
from tests.strategy import fabric_learners as fabric

NUM, NUM_ROWS = 3, 36


class Log(pl.Callback):
    """With whom a learner has met after each of its steps, and its weights then."""

    def __init__(self) -> None:
        self.met: list[int | None] = []
        self.weights = torch.zeros(0)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        strategy: Any = trainer.strategy
        ages = strategy.gossip_statistics().peer_ages
        self.met.append(next((peer for peer, age in ages.items() if not age), None))
        self.weights = next(strategy.model.parameters()).detach().clone()


def test_processes_do_what_the_matrix_does() -> None:
    """Whoever met whom: the weights of each learner are those of the reference."""

    def program(rank: int) -> tuple[list[int | None], Tensor, Any]:
        log = Log()
        strategy = gossip("complete", ReadyPairs(max_wait=0.05))
        trainer = trainer_of(strategy, NUM, callbacks=[log])
        trainer.fit(Quadratic(), loader(NUM_ROWS, rank, NUM))
        found = strategy.gossip_statistics()
        assert engine_threads() == []
        return log.met, log.weights, (found.exchanges, found.skipped)

    results = values(learners(NUM, program))
    rows = Rows(NUM_ROWS).rows

    def gradients(weights: Tensor, number: int) -> Tensor:
        batches = rows[NUM * number : NUM * (number + 1)]
        return 2 * (weights - batches) / 3

    logs = [
        [Boundary(rank, k, partner) for k, partner in enumerate(met)]
        for rank, (met, _, _) in enumerate(results)
    ]
    events = reference.ready_pairs(in_order(logs))
    start = torch.zeros(NUM, 3, dtype=torch.float64)
    *_, (expected, _) = reference.asynchronous(start, gradients, events, LR)
    found = torch.stack([weights for _, weights, _ in results])
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    for met, _, counted in results:
        assert counted == (len(met) - met.count(None), met.count(None))


def test_super_learners_of_two_meet_as_a_whole() -> None:
    def program(rank: int) -> tuple[Tensor, Tensor]:
        strategy = fabric.gossip(
            "complete", ReadyPairs(max_wait=5.0), super_learner_size=2
        )
        started, learner = fabric.launched(strategy, 4), fabric.Slope()
        model, optimizer = started.setup(learner, fabric.sgd(learner))
        trajectory = fabric.train(started, model, optimizer, loader(40, rank, 4))
        strategy.finish()
        (counted,) = strategy.gossip_statistics()
        assert counted is not None
        assert set(counted.staleness) <= {0}
        return torch.stack(trajectory), learner.weight.detach()

    expect_super_learners_of_two(values(learners(4, program)))


def test_one_that_is_killed_ends_the_wait_of_the_others() -> None:
    class Dies(pl.Callback):
        @override
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            if trainer.global_rank == 1 and trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    def program(rank: int) -> None:
        strategy = gossip("complete", ReadyPairs(max_wait=5.0))
        trainer = trainer_of(strategy, NUM, callbacks=[Dies()])
        trainer.fit(Quadratic(), loader(NUM_ROWS, rank, NUM))

    outcomes = learners(NUM, program)
    for rank in (0, 2):
        assert "learner 1" in outcomes[rank].error
