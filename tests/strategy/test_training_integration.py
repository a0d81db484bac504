"""What `ddp` can train, trained with gossip: each against its closed form.

The gradients of `Linear` are the rows, so that the consensus of all learners after any
sequence of steps is a sum over rows, whoever averaged with whom and when.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from tests.learners import (
    LR,
    Linear,
    Quadratic,
    Rows,
    consensus_after,
    gossip,
    learners,
    loader,
    trainer_of,
    values,
)

COMMUNICATIONS = ("sync", "delay_by_one", "async")
NUM_ROWS = 16

each_communication = pytest.mark.parametrize("communication", COMMUNICATIONS)


def strategy_of(communication: Any, **dials: Any) -> Any:
    topology = "complete" if communication == "delay_by_one" else "ring"
    return gossip(topology, communication, **dials)


def trained(
    communication: str,
    module: Callable[[], Linear] = Linear,
    num: int = 2,
    size: int = 1,
    **arguments: Any,
) -> list[tuple[Tensor, int, Any]]:
    """Final weights, optimizer steps and `facts` of the module, for each learner."""

    def program(rank: int) -> tuple[Tensor, int, Any]:
        learner = module()
        strategy = strategy_of(communication, super_learner_size=size)
        made = {name: make() for name, make in arguments.items() if callable(make)}
        trainer = trainer_of(strategy, num, **{**arguments, **made})
        trainer.fit(learner, loader(NUM_ROWS, rank, num))
        facts = getattr(learner, "facts", None)
        return learner.weight.detach(), trainer.global_step, facts

    return values(learners(num, program))


def assert_consensus(results: list[tuple[Tensor, int, Any]], expected: Tensor) -> None:
    for weight, *_ in results:
        torch.testing.assert_close(weight, expected, atol=1e-12, rtol=0)


def rows() -> Tensor:
    return Rows(NUM_ROWS).rows


# --- optimizers


@each_communication
def test_clipping_by_norm_clips_the_gradient_of_each_learner(communication: str):
    results = trained(communication, gradient_clip_val=0.5)
    lengths = rows().norm(dim=1, keepdim=True)
    # torch divides by the norm plus 1e-6.
    clipped = rows() * (0.5 / (lengths + 1e-6)).clamp(max=1)
    assert_consensus(results, -LR * clipped.sum(0) / 2)


@each_communication
def test_clipping_by_value_clips_the_gradient_of_each_learner(communication: str):
    results = trained(
        communication, gradient_clip_val=0.3, gradient_clip_algorithm="value"
    )
    assert_consensus(results, -LR * rows().clamp(-0.3, 0.3).sum(0) / 2)


class Scheduled(Linear):
    """Halves its learning rate every step or every epoch."""

    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), LR)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": self.interval},
        }


@each_communication
def test_a_schedule_by_steps_steps_once_a_step(communication: str) -> None:
    results = trained(communication, lambda: Scheduled("step"))
    rates = [LR * 0.5**step for step in range(8) for _ in range(2)]
    weighted = rows() * torch.tensor(rates, dtype=torch.float64)[:, None]
    assert_consensus(results, -weighted.sum(0) / 2)


@each_communication
def test_a_schedule_by_epochs_steps_once_an_epoch(communication: str) -> None:
    results = trained(communication, lambda: Scheduled("epoch"), max_epochs=3)
    assert_consensus(results, 1.75 * consensus_after(NUM_ROWS, 2))


class OnPlateau(Linear):
    """Its validation loss never improves, so that each epoch but the first halves."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[float] = []

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), LR)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "flat"},
        }

    @override
    def on_train_epoch_end(self) -> None:
        self.log("flat", 1.0, sync_dist=True)
        self.facts.append(self.trainer.optimizers[0].param_groups[0]["lr"])


@each_communication
def test_a_schedule_on_a_plateau_sees_the_reduced_metric(communication: str) -> None:
    results = trained(communication, OnPlateau, max_epochs=4)
    for _, _, rates in results:
        assert rates == pytest.approx([LR, LR, LR / 2, LR / 4])
    assert_consensus(results, 2.75 * consensus_after(NUM_ROWS, 2))


@each_communication
def test_accumulation_by_a_schedule(communication: str) -> None:
    results = trained(
        communication,
        max_epochs=2,
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 4})],
    )
    assert [steps for _, steps, _ in results] == [8 + 2] * 2
    # Lightning divides the loss by the batches of a step.
    assert_consensus(results, 1.25 * consensus_after(NUM_ROWS, 2))


class Lbfgs(Quadratic):
    """Counts how often its closure runs."""

    def __init__(self) -> None:
        super().__init__()
        self.facts = 0

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.facts += 1
        return self.loss(rows())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3)


@each_communication
def test_an_optimizer_that_calls_its_closure_many_times(communication: str) -> None:
    results = trained(communication, Lbfgs, max_epochs=3)
    for weight, steps, closures in results:
        assert closures > steps == 24
        torch.testing.assert_close(weight, rows().mean(0), atol=2e-2, rtol=0)
        assert torch.equal(weight, results[0][0])


class Unoptimized(Linear):
    """Does all its work in hooks, or none."""

    @override
    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.filterwarnings("ignore:.*will run with no optimizer")
@each_communication
@pytest.mark.parametrize("size", [1, 2])
def test_a_module_without_an_optimizer(communication: str, size: int) -> None:
    for weight, steps, _ in trained(
        communication, Unoptimized, num=2 * size, size=size
    ):
        assert torch.equal(weight, torch.zeros(3, dtype=torch.float64))
        assert steps == NUM_ROWS // (2 * size)


class Manual(Linear):
    """Two optimizers for two halves of the weights, one of them every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    @override
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], LR) for p in (self.weight, self.bias)]

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        chosen = optimizers if batch_idx % 2 else optimizers[:1]
        for optimizer in chosen:
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward((batch @ (self.weight + self.bias)).mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)


@each_communication
def test_manual_optimizers_that_step_unequally_often(communication: str) -> None:
    def program(rank: int) -> Any:
        module = Manual()
        trainer = trainer_of(strategy_of(communication), 2)
        trainer.fit(module, loader(NUM_ROWS, rank, 2))
        return module.weight.detach(), module.bias.detach(), trainer.global_step

    odd = rows().view(8, 2, 3)[1::2].sum((0, 1))
    for weight, bias, steps in values(learners(2, program)):
        torch.testing.assert_close(weight, consensus_after(NUM_ROWS, 2))
        torch.testing.assert_close(bias, -LR * odd / 2)
        assert steps == 8 + 4


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "32-true"])
@each_communication
def test_precisions(communication: str, precision: Any) -> None:
    class Layer(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1, bias=False)
            nn.init.zeros_(self.layer.weight)

        @override
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layer(batch.to(self.layer.weight.dtype)).mean()

        @override
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), LR)

    def program(rank: int) -> Tensor:
        module = Layer()
        trainer = trainer_of(strategy_of(communication), 2, precision=precision)
        trainer.fit(module, loader(NUM_ROWS, rank, 2))
        return module.layer.weight.detach()[0]

    finals = values(learners(2, program))
    atol = {"64-true": 1e-12, "bf16-mixed": 1e-2, "32-true": 1e-5}[precision]
    expected = consensus_after(NUM_ROWS, 2)
    for final in finals:
        double = torch.float64 if precision == "64-true" else torch.float32
        assert final.dtype == double
        torch.testing.assert_close(final.double(), expected, atol=atol, rtol=0)


# --- modules


class Tied(Linear):
    """Two names for one weight; the gradients of both uses add up."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self.weight

    @override
    def loss(self, batch: Tensor) -> Tensor:
        return (batch @ self.weight + batch @ self.other).mean()

    @override
    def on_train_end(self) -> None:
        self.facts = self.other is self.weight


@each_communication
def test_tied_weights_stay_tied(communication: str) -> None:
    results = trained(communication, Tied)
    assert_consensus(results, 2 * consensus_after(NUM_ROWS, 2))
    assert all(tied for *_, tied in results)


class Unused(Linear):
    """Half of its parameters get no gradient, and differ at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.rand(2, dtype=torch.float64))

    @override
    def on_train_end(self) -> None:
        self.facts = self.idle.detach().clone()


@each_communication
def test_unused_parameters_need_no_option_in_super_learners_of_one(
    communication: str,
) -> None:
    results = trained(communication, Unused)
    assert_consensus(results, consensus_after(NUM_ROWS, 2))
    torch.testing.assert_close(results[0][2], results[1][2])


@each_communication
def test_unused_parameters_need_the_option_of_ddp_in_larger_super_learners(
    communication: str,
) -> None:
    def program(find: bool) -> Callable[[int], Tensor]:
        def run(rank: int) -> Tensor:
            dials = {"super_learner_size": 2, "find_unused_parameters": find}
            strategy = strategy_of(communication, **dials)
            module = Unused()
            trainer_of(strategy, 4).fit(module, loader(NUM_ROWS, rank, 4))
            return module.weight.detach()

        return run

    for final in values(learners(4, program(True))):
        torch.testing.assert_close(final, consensus_after(NUM_ROWS, 4))
    outcomes = learners(4, program(False))
    assert any("find_unused_parameters" in outcome.error for outcome in outcomes)


class Unfreeze(BaseFinetuning):
    """Adds the frozen weight to the optimizer in the second epoch."""

    @override
    def freeze_before_training(self, pl_module: Any) -> None:
        pl_module.weight.requires_grad_(False)

    @override
    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            pl_module.weight.requires_grad_(True)
            optimizer.add_param_group({"params": [pl_module.weight]})


class Frozen(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.facts: list[Tensor] = []

    @override
    def loss(self, batch: Tensor) -> Tensor:
        return (batch @ (self.weight + self.head)).mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.head], LR)

    @override
    def on_train_epoch_end(self) -> None:
        self.facts.append(self.weight.detach().clone())


@each_communication
def test_a_weight_that_is_frozen_and_later_trained(communication: str) -> None:
    results = trained(
        communication, Frozen, max_epochs=2, callbacks=lambda: [Unfreeze()]
    )
    # A learner that is an epoch ahead trains it already, and gossips.
    if communication != "async":
        assert all(facts[0].eq(0).all() for *_, facts in results)
    assert_consensus(results, consensus_after(NUM_ROWS, 2))


class Normalised(Linear):
    """Batch-norm whose statistics depend on the learner."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.5, dtype=torch.float64)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.norm(batch.new_full((2, 3), float(self.global_rank)))
        return super().training_step(batch, batch_idx)

    @override
    def on_train_end(self) -> None:
        self.facts = (self.norm.running_mean, self.norm.num_batches_tracked)


@pytest.mark.parametrize("synchronised", [False, True])
@each_communication
def test_statistics_of_batch_norm_are_averaged(
    communication: str, synchronised: bool
) -> None:
    # In super-learners of one, to synchronise it is to leave it as it is.
    results = trained(communication, Normalised, sync_batchnorm=synchronised)
    for _, _, (mean, batches) in results:
        assert batches == 8
        torch.testing.assert_close(mean, results[0][2][0])
        assert 0 < mean.min() < mean.max() + 1e-9 < 1
    assert_consensus(results, consensus_after(NUM_ROWS, 2))


@each_communication
def test_a_compiled_module(communication: str) -> None:
    def program(rank: int) -> Tensor:
        module = Linear()
        compiled: Any = torch.compile(module, backend="eager")
        trainer_of(strategy_of(communication), 2).fit(
            compiled, loader(NUM_ROWS, rank, 2)
        )
        return module.weight.detach()

    for final in values(learners(2, program)):
        torch.testing.assert_close(final, consensus_after(NUM_ROWS, 2))


class Replaced(Linear):
    """Gives its weight other memory in the middle of every second step."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            self.weight.data = self.weight.data.clone()
        return super().training_step(batch, batch_idx)


@each_communication
def test_a_weight_that_is_given_other_memory(communication: str) -> None:
    assert_consensus(trained(communication, Replaced), consensus_after(NUM_ROWS, 2))


class Reshaped(Linear):
    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.weight.data = torch.zeros(4, dtype=torch.float64)
        return self.weight.sum()


def test_a_weight_that_is_given_another_shape_is_refused() -> None:
    def program(rank: int) -> None:
        trainer_of(gossip(), 2).fit(Reshaped(), loader(NUM_ROWS, rank, 2))

    outcomes = learners(2, program)
    assert any("was given ([4], 'torch.float64'" in o.error for o in outcomes)


# --- data, and how much of it


class Stream(IterableDataset[Tensor]):
    def __init__(self, rank: int, num: int) -> None:
        self.part = rows()[rank::num]

    @override
    def __iter__(self) -> Any:
        return iter(self.part)


class Pair(Linear):
    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = batch
        return self.loss(first) + self.loss(second)


@each_communication
def test_streams_and_combined_loaders(communication: str) -> None:
    def program(rank: int) -> tuple[Tensor, Tensor]:
        module = Linear()
        stream = DataLoader(Stream(rank, 2))
        trainer_of(strategy_of(communication), 2, max_epochs=2).fit(module, stream)
        pair = Pair()
        loaders = [loader(NUM_ROWS, rank, 2), loader(NUM_ROWS // 2, rank, 2)]
        combined = CombinedLoader(loaders, "max_size_cycle")
        trainer_of(strategy_of(communication), 2).fit(pair, combined)
        return module.weight.detach(), pair.weight.detach()

    twice = 2 * Rows(NUM_ROWS // 2).rows.sum(0)
    for streamed, paired in values(learners(2, program)):
        torch.testing.assert_close(streamed, 2 * consensus_after(NUM_ROWS, 2))
        torch.testing.assert_close(paired, -LR * (rows().sum(0) + twice) / 2)


@pytest.mark.parametrize(
    ("arguments", "steps", "validations"),
    [
        ({"max_steps": 3, "max_epochs": -1}, 3, 0),
        ({"fast_dev_run": 2}, 2, 2),
        ({"limit_train_batches": 5, "limit_val_batches": 3}, 5, 3),
        ({"limit_train_batches": 0.5, "limit_val_batches": 0}, 4, 0),
        ({"overfit_batches": 2, "max_epochs": 3}, 6, 6),
        ({"val_check_interval": 3}, 8, 2 * 4),
        ({"val_check_interval": 0.25}, 8, 4 * 4),
        ({"check_val_every_n_epoch": 2, "max_epochs": 5}, 40, 2 * 4),
        ({"val_check_interval": 6, "check_val_every_n_epoch": None}, 8, 4),
        ({"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}, 16, 8),
        ({"num_sanity_val_steps": 2, "min_epochs": 1}, 8, 6),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_amount_of_training_and_validation_is_that_of_ddp(
    arguments: dict[str, Any], steps: int, validations: int
) -> None:
    class Counting(Linear):
        validated = 0

        @override
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.validated += 1

    def program(rank: int) -> list[tuple[int, int]]:
        counts = []
        for strategy in ("ddp", "sdpsgd", "d1psgd", "adpsgd"):
            module = Counting()
            trainer = trainer_of(strategy, 2, **arguments)
            trainer.fit(module, loader(NUM_ROWS, rank, 2), loader(8, rank, 2))
            counts.append((trainer.global_step, module.validated))
        return counts

    for counts in values(learners(2, program)):
        assert counts == [(steps, validations)] * 4
