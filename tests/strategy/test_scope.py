"""Who takes part in a collective, whatever the hook is called that asks for it."""

import time
import warnings
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn as distributed_nn
from lightning.pytorch.trainer import call
from torch import Tensor, nn
from torchmetrics import Metric, SumMetric
from typing_extensions import override

from lightning_adpsgd.coordination.store import LearnerFollows
from tests.learners import Linear, gossip, learners, loader, trainer_of, values


class Gathers(Linear):
    """Gathers its rank in a hook that no version of Lightning has."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: dict[str, list[float]] = {}

    def on_a_hook_of_tomorrow(self, where: str) -> None:
        gathered: Any = self.all_gather(torch.tensor([float(self.global_rank)]))
        self.gathered[where] = gathered.flatten().tolist()

    def ask(self, where: str) -> None:
        name = "on_a_hook_of_tomorrow"
        call._call_lightning_module_hook(self.trainer, name, where)

    @override
    def on_train_epoch_start(self) -> None:
        self.ask("start of the epoch")

    @override
    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.ask("batch")

    @override
    def on_validation_epoch_end(self) -> None:
        self.ask("validation")

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        gathered: Any = self.all_gather(torch.tensor([float(self.global_rank)]))
        self.gathered["checkpoint"] = gathered.flatten().tolist()


class SavesAtStep2(pl.Callback):
    def __init__(self, path: Any) -> None:
        self._path = path

    @override
    def on_train_batch_end(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, trainer: pl.Trainer, *arguments: Any
    ) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self._path)


def test_a_hook_of_no_list_is_local_inside_an_epoch_and_common_elsewhere(
    tmp_path: Any,
) -> None:
    def program(rank: int) -> Any:
        module = Gathers()
        saves = SavesAtStep2(tmp_path / "a.ckpt")
        trainer = trainer_of(gossip(), 2, callbacks=[saves], val_check_interval=3)
        trainer.fit(module, loader(6), loader(2))
        return module.gathered

    for rank, gathered in enumerate(values(learners(2, program))):
        assert gathered == {
            "start of the epoch": [0.0, 1.0],
            "batch": [float(rank)],
            "validation": [0.0, 1.0],
            "checkpoint": [0.0, 1.0],
        }


class LogsEachStep(Linear):
    """Reduces and gathers in every step and at the end of every epoch."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("step_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.all_gather(loss.detach())
        return loss

    @override
    def on_train_epoch_end(self) -> None:
        self.all_gather(torch.zeros(1))


class Sums(Linear):
    """Adds up 1 + its rank, and computes the sum wherever it may."""

    def __init__(self) -> None:
        super().__init__()
        self.metric, self.sums = SumMetric(), dict[str, float]()

    def look(self, where: str) -> None:
        self.sums[where] = self.metric.compute().item()

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.metric.update(1.0 + self.global_rank)
        self.look("batch")
        return super().training_step(batch, batch_idx)

    @override
    def on_validation_epoch_end(self) -> None:
        self.look("validation")

    @override
    def on_train_epoch_end(self) -> None:
        self.look("end of the epoch")


@pytest.mark.parametrize(("num", "size"), [(2, 1), (4, 2)])
def test_a_metric_is_over_one_super_learner_in_a_step_and_over_all_elsewhere(
    num: int, size: int
) -> None:
    own = Metric.sync

    def program(rank: int) -> dict[str, float]:
        module, strategy = Sums(), gossip(super_learner_size=size)
        trainer_of(strategy, num).fit(module, loader(3), loader(2))
        assert Metric.sync is own
        assert module.metric.compute_with_cache
        return module.sums

    numbers = [1.0 + rank for rank in range(num)]
    for rank, sums in enumerate(values(learners(num, program))):
        first = rank // size * size
        assert sums == {
            "batch": 3 * sum(numbers[first : first + size]),
            "validation": 3 * sum(numbers),
            "end of the epoch": 3 * sum(numbers),
        }


def said_of_collectives(
    strategy: Any, num: int, module: type[Linear] = LogsEachStep
) -> list[list[str]]:
    def program(rank: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer_of(strategy, num).fit(module(), loader(4))
        said = [str(warning.message) for warning in caught]
        about = ("of one super-learner", "`torch.distributed`")
        return [words for words in said if any(one in words for one in about)]

    return values(learners(num, program))


def test_a_step_is_told_once_that_its_collectives_are_over_one_super_learner() -> None:
    first, second = said_of_collectives(gossip(), 2)
    reduced, gathered = first
    assert "`reduce` in `training_step` is over 1 of the 2 learners" in reduced
    assert "`self.log(..., on_step=False, on_epoch=True, sync_dist=True)`" in reduced
    assert "`all_gather` in `training_step` is over 1 of the 2" in gathered
    assert "`on_train_epoch_end`" in gathered
    assert second == []  # learner 0 speaks for all


def test_a_step_is_told_once_that_its_metrics_are_over_one_super_learner() -> None:
    (said,), others = said_of_collectives(gossip(), 2, Sums)
    assert "`compute` in `training_step` is over 1 of the 2 learners" in said
    assert '`self.log("name", metric)`' in said
    assert others == []


def test_learners_that_step_together_are_told_nothing() -> None:
    assert said_of_collectives(gossip("ring", "sync"), 2) == [[], []]


class Centres(Linear):
    """Calls a collective of torch itself, as losses of self-supervised learning do."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        dist.all_reduce(torch.zeros(1))
        dist.get_world_size()
        return super().training_step(batch, batch_idx)


class CentresByHand(Centres):
    """The same with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("module", [Centres, CentresByHand])
def test_a_step_is_told_once_that_its_own_collectives_wait_for_all(
    module: type[Linear],
) -> None:
    (said,), others = said_of_collectives(gossip(work_sharing=False), 2, module)
    assert "`training_step` calls `torch.distributed` over all learners" in said
    assert "`work_sharing=False`" not in said
    assert others == []


class ByHand(CentresByHand):
    """Manual optimization, and no collective."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pytest.mark.parametrize(("size", "module"), [(1, ByHand), (2, ByHand), (2, Linear)])
def test_a_step_without_collectives_of_its_own_is_told_nothing(
    size: int, module: type[Linear]
) -> None:
    strategy = gossip(super_learner_size=size, work_sharing=False)
    assert said_of_collectives(strategy, 2 * size, module) == [[]] * (2 * size)


@pytest.mark.parametrize("num_batches", [6, 7])
def test_learners_whose_steps_wait_for_all_share_epochs_in_turns(
    num_batches: int,
) -> None:
    """One learner is slow: it would leave batches to the other, which waits for it."""

    class Slow(Centres):
        @override
        def on_before_zero_grad(self, optimizer: Any) -> None:
            time.sleep(0.02 * self.global_rank)

    def program(rank: int) -> int:
        strategy = gossip(work_sharing=True, timeout=timedelta(seconds=20))
        arguments: Any = {"use_distributed_sampler": True, "max_epochs": 3}
        trainer = trainer_of(strategy, 2, **arguments)
        trainer.fit(Slow(), loader(num_batches))
        return trainer.global_step

    assert values(learners(2, program)) == [9, 9]


def meet() -> None:
    dist.all_reduce(torch.zeros(1))


class Meets(Linear):
    """Meets all learners in each batch, in a function of the program."""

    @override
    def on_before_zero_grad(self, optimizer: Any) -> None:
        meet()


class WaitsLater(Linear):
    """Waits for a collective that it has begun, in C++ alone."""

    @override
    def on_before_zero_grad(self, optimizer: Any) -> None:
        begun: Any = dist.all_reduce(torch.zeros(1), async_op=True)
        begun.wait()


class Differentiates(Linear):
    """Calls a collective that has a gradient, as losses of libraries do."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return nn.functional.relu(distributed_nn.all_reduce(loss))


@pytest.mark.parametrize(
    ("module", "caller"),
    [
        (Centres, "training_step"),
        (Meets, "meet"),
        (WaitsLater, "on_before_zero_grad"),
        (Differentiates, "training_step"),
    ],
)
def test_a_collective_that_hangs_at_the_end_of_a_shared_epoch_is_explained(
    module: type[Linear], caller: str
) -> None:
    """Three batches for two learners: one has a step more before this is known."""

    def program(rank: int) -> tuple[str, str]:
        strategy = gossip(work_sharing=True, timeout=timedelta(seconds=4))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = trainer_of(strategy, 2, use_distributed_sampler=True)
            with pytest.raises((RuntimeError, LearnerFollows)) as error:
                trainer.fit(module(), loader(3))
        return str(error.value), " ".join(str(one.message) for one in caught)

    first, second = values(learners(2, program))
    told = f"`torch.distributed`, which `{caller}` ({__file__}:"
    assert any(
        told in e and "calls, has waited in vain for other learners" in e
        for e, _ in (first, second)
    )
    assert "equal shares" in first[0]  # learner 0 speaks for all
    if module is Centres:
        assert "in turns" in first[1]
        assert "hang at the end of the epoch: `work_sharing=False` gives" in first[1]


class MeetsElsewhere(Linear):
    """Waits in vain for one peer."""

    @override
    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.global_rank == 0:
            dist.recv(torch.zeros(1), 1)


class MeetsLateInValidation(Linear):
    """All come to the collective, one of them after the timeout."""

    @override
    def on_validation_epoch_end(self) -> None:
        time.sleep(6 * self.global_rank)
        dist.all_reduce(torch.zeros(1))


class Stalls(Linear):
    """Waits in vain for something else."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise RuntimeError("Timed out reading a file")


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Stalls, "Timed out reading a file"),
        (MeetsElsewhere, "Timed out waiting"),
        (MeetsLateInValidation, "Timed out waiting"),
    ],
)
def test_what_waits_for_something_else_keeps_its_words(
    module: type[Linear], expected: str
) -> None:
    def program(rank: int) -> str:
        strategy = gossip(work_sharing=True, timeout=timedelta(seconds=4))
        arguments: Any = {"use_distributed_sampler": True, "limit_val_batches": 1.0}
        trainer = trainer_of(strategy, 2, **arguments)
        with pytest.raises((RuntimeError, LearnerFollows)) as error:
            trainer.fit(module(), loader(4), loader(2))
        return str(error.value)

    said = values(learners(2, program))
    assert any(expected in one for one in said)
    assert not any("in vain" in one for one in said)
