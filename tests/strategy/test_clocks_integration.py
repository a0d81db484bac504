"""What Lightning does at a time, done by learners that are at different steps."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from torch import Tensor
from typing_extensions import override

from tests.learners import (
    LR,
    VALIDATES_BY_TIME,
    Linear,
    Rows,
    gossip,
    in_every_mode,
    learners,
    loader,
    trainer_of,
    values,
)

LIMIT = timedelta(seconds=0.6)
by_time = pytest.mark.skipif(
    not VALIDATES_BY_TIME, reason="Lightning before 2.6 validates at batches alone"
)


class Paced(Linear):
    """Learner 1 takes four times as long for a step; waits are what is tested."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[tuple[int, Tensor]] = []

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.02 if self.global_rank == 1 else 0.005)
        return super().training_step(batch, batch_idx)

    @override
    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            step = self.trainer.global_step
            self.validated.append((step, self.weight.detach().clone()))


def sum_of(num_steps: int, rank: int, num: int = 2) -> Tensor:
    """Of the gradients that a learner has seen after so many steps on 10 rows each."""
    own = Rows(10 * num).rows[rank::num]
    epochs, rest = divmod(num_steps, 10)
    return epochs * own.sum(0) + own[:rest].sum(0)


def consensus_at(steps: list[int]) -> Tensor:
    sums = [sum_of(count, rank, len(steps)) for rank, count in enumerate(steps)]
    return -LR * torch.stack(sums).mean(0)


class Ended(NamedTuple):
    """What a learner has come to."""

    steps: int
    seconds: float
    weight: Tensor
    validated: list[tuple[int, Tensor]]


def run(
    arguments: Callable[[], dict[str, Any]], num: int = 2, **options: Any
) -> list[Ended]:
    """What all learners come to; the options are those of `fit`."""
    return values(learners(num, lambda rank: fit(rank, arguments(), num, **options)))


def fit(
    rank: int,
    arguments: dict[str, Any],
    num: int = 2,
    validates: bool = False,
    **dials: Any,
) -> Ended:
    """One learner's part in a training, with these arguments of the Trainer."""
    module, begin = Paced(), time.monotonic()
    trainer = trainer_of(gossip(**dials), num, **{"max_epochs": -1, **arguments})
    held_out = loader(2) if validates else None
    trainer.fit(module, loader(10 * num, rank, num), held_out)
    seconds = time.monotonic() - begin
    weight = module.weight.detach().clone()
    return Ended(trainer.global_step, seconds, weight, module.validated)


ENDS: dict[str, Callable[[], dict[str, Any]]] = {
    "at a step": lambda: {"max_time": LIMIT},
    "at an epoch": lambda: {"callbacks": [Timer(LIMIT, interval="epoch")]},
    # Learner 0 waits for learner 1 at the end when its time is over.
    "one waits at the end": lambda: {"max_time": LIMIT, "max_epochs": 6},
}


@pytest.mark.parametrize("validates", [False, True])
def test_all_learners_end_when_the_time_of_learner_0_is_over(validates: bool) -> None:
    def program(rank: int, end: str) -> Ended:
        return fit(rank, ENDS[end](), validates=validates)

    for end, results in in_every_mode(2, program, list(ENDS)).items():
        steps = [result.steps for result in results]
        for result in results:
            assert result.steps > 0, end
            assert result.seconds >= LIMIT.total_seconds(), end
            torch.testing.assert_close(result.weight, consensus_at(steps))
        assert len(results[0].validated) == len(results[1].validated), end


def test_the_time_is_over_for_super_learners_of_two() -> None:
    results = run(lambda: {"max_time": LIMIT}, num=4, super_learner_size=2)
    steps = [result.steps for result in results]
    assert steps[0] == steps[1]
    assert steps[2] == steps[3]
    for result in results:
        torch.testing.assert_close(result.weight, consensus_at(steps))


@pytest.mark.parametrize(
    ("communication", "interval", "owner"),
    [("async", "step", 0), ("async", "epoch", 1), ("sync", "step", 1)],
)
def test_a_timer_of_one_learner_alone_is_refused_at_the_start(
    communication: Any, interval: str, owner: int
) -> None:
    def program(rank: int) -> None:
        timers = [Timer(LIMIT, interval=interval)]
        trainer = trainer_of(
            gossip(communication=communication, topology="complete"),
            2,
            callbacks=timers if rank == owner else [],
        )
        trainer.fit(Linear(), loader(20, rank, 2))

    for outcome in learners(2, program):
        assert outcome.exit_code == 1
        assert "set-up from step 0, with these clocks: Timer'" in outcome.error
        assert "set-up from step 0, with these clocks: none'" in outcome.error


@by_time
def test_validation_by_time_sees_the_consensus_of_unequal_steps() -> None:
    def arguments() -> dict[str, Any]:
        return {"val_check_interval": timedelta(seconds=0.2), "max_epochs": 6}

    first, second = (one.validated for one in run(arguments, validates=True))
    assert len(first) == len(second) >= 1
    for (steps, weight), (other_steps, other_weight) in zip(first, second, strict=True):
        assert torch.equal(weight, other_weight)
        torch.testing.assert_close(weight, consensus_at([steps, other_steps]))


TOGETHER = ("sync", "delay_by_one")


def test_learners_that_step_together_end_and_save_at_one_step(tmp_path: Path) -> None:
    def program(rank: int, communication: str) -> Ended:
        timed = ModelCheckpoint(
            tmp_path / communication,
            train_time_interval=timedelta(seconds=0.1),
            save_top_k=-1,
        )
        arguments = {
            "callbacks": [timed],
            "enable_checkpointing": True,
            "max_time": LIMIT,
        }
        return fit(rank, arguments, topology="complete", communication=communication)

    for mode, results in in_every_mode(2, program, TOGETHER).items():
        steps = [result.steps for result in results]
        assert steps[0] == steps[1], mode
        for result in results:
            torch.testing.assert_close(result.weight, consensus_at(steps))
        paths = list((tmp_path / mode).glob("*.ckpt"))
        assert paths, mode
        for path in paths:
            saved = torch.load(path, weights_only=True)
            expected = consensus_at([saved["global_step"]] * 2)
            torch.testing.assert_close(saved["state_dict"]["weight"], expected)


@by_time
def test_validation_by_time_comes_at_one_step_where_learners_step_together() -> None:
    def program(rank: int, communication: str) -> list[int]:
        arguments = {"val_check_interval": timedelta(seconds=0.1), "max_epochs": 2}
        dials: dict[str, Any] = {"topology": "complete", "communication": communication}
        ended = fit(rank, arguments, validates=True, **dials)
        return [step for step, _ in ended.validated]

    for mode, (first, second) in in_every_mode(2, program, TOGETHER).items():
        assert first == second, mode
        assert first, mode


def test_checkpoints_by_time_hold_the_consensus(tmp_path: Path) -> None:
    class Noting(ModelCheckpoint):
        def __init__(self) -> None:
            interval = timedelta(seconds=0.2)
            super().__init__(tmp_path, train_time_interval=interval, save_top_k=-1)
            self.steps: list[int] = []

        @override
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            self.steps.append(trainer.global_step)
            super()._save_checkpoint(trainer, filepath)

    def program(rank: int) -> list[int]:
        noting = Noting()
        arguments = {"callbacks": [noting], "enable_checkpointing": True}
        trainer_of(gossip(), 2, max_epochs=6, **arguments).fit(
            Paced(), loader(20, rank, 2)
        )
        return noting.steps

    first, second = values(learners(2, program))
    assert len(first) == len(second) >= 1
    paths = sorted(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    for path, steps in zip(paths, zip(first, second, strict=True), strict=True):
        saved = torch.load(path, weights_only=True)["state_dict"]["weight"]
        torch.testing.assert_close(saved, consensus_at(list(steps)))


def test_a_save_by_time_passes_learners_that_wait_outside_of_the_strategy(
    tmp_path: Path,
) -> None:
    """As the metrics of an epoch do, which ask torch for a barrier."""

    class Waits(Paced):
        @override
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            time.sleep(0.0 if self.global_rank == 1 else 0.05)
            return Linear.training_step(self, batch, batch_idx)

        @override
        def on_train_epoch_end(self) -> None:
            dist.barrier()

    def program(rank: int) -> int:
        timed = ModelCheckpoint(tmp_path, train_time_interval=timedelta(seconds=0.2))
        arguments = {"callbacks": [timed], "enable_checkpointing": True}
        trainer = trainer_of(gossip(), 2, max_epochs=2, **arguments)
        trainer.fit(Waits(), loader(20, rank, 2))
        return trainer.global_step

    assert values(learners(2, program)) == [20, 20]


@by_time
def test_all_clocks_together_beside_meetings_at_steps(tmp_path: Path) -> None:
    """Whatever is due when some wait for others, all come to the same meetings."""

    def program(rank: int, communication: str) -> Ended:
        folder = tmp_path / communication
        timed = ModelCheckpoint(folder, train_time_interval=timedelta(seconds=0.05))
        stepped = ModelCheckpoint(folder, every_n_train_steps=7)
        arguments = {
            "callbacks": [timed, stepped],
            "enable_checkpointing": True,
            "val_check_interval": timedelta(seconds=0.08),
            "max_time": timedelta(seconds=1),
        }
        topology = "complete" if communication == "delay_by_one" else "ring"
        dials = {"topology": topology, "communication": communication}
        return fit(rank, arguments, num=3, validates=True, **dials)

    for mode, results in in_every_mode(3, program).items():
        steps = [result.steps for result in results]
        assert len({len(result.validated) for result in results}) == 1, mode
        for result in results:
            torch.testing.assert_close(result.weight, consensus_at(steps))
