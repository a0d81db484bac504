"""What `ddp` can train, trained with gossip: each against its closed form.

The gradients of `Linear` are the rows, so that the consensus of all learners after any
sequence of steps is a sum over rows, whoever averaged with whom and when.

Learners train in each communication mode, one after the other: most of what a training
of a few steps costs is the start of its processes. `CASES`, at the end, has what the
same two learners train.
"""

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from tests.learners import (
    COMMUNICATIONS,
    LR,
    Linear,
    Quadratic,
    Rows,
    consensus_after,
    each,
    gossip,
    in_every_mode,
    learners,
    loader,
    trainer_of,
    values,
)

NUM_ROWS = 16

each_communication = pytest.mark.parametrize("communication", COMMUNICATIONS)
Result = tuple[Tensor, int, Any]
"""Of a learner: final weights, optimizer steps and `facts` of the module."""
Results = dict[str, list[Result]]
"""For each mode those of all learners."""


def strategy_of(communication: Any, **dials: Any) -> Any:
    topology = "complete" if communication == "delay_by_one" else "ring"
    return gossip(topology, communication, **dials)


class Case(NamedTuple):
    """What is trained: a module, and arguments of its Trainer or how to make them."""

    module: Callable[[], Linear]
    arguments: dict[str, Any]


def case(module: Callable[[], Linear] = Linear, **arguments: Any) -> Case:
    return Case(module, arguments)


def fit(rank: int, num: int, size: int, communication: str, case: Case) -> Result:
    """One learner's part in a training."""
    learner = case.module()
    strategy = strategy_of(communication, super_learner_size=size)
    made = {name: make() for name, make in case.arguments.items() if callable(make)}
    trainer = trainer_of(strategy, num, **{**case.arguments, **made})
    trainer.fit(learner, loader(NUM_ROWS, rank, num))
    facts = getattr(learner, "facts", None)
    return learner.weight.detach(), trainer.global_step, facts


@pytest.fixture(scope="module")
def trained() -> dict[str, Results]:
    """For each of `CASES` what two learners have come to."""

    def program(rank: int, both: tuple[str, str]) -> Result:
        name, communication = both
        return fit(rank, 2, 1, communication, CASES[name])

    pairs = list(itertools.product(CASES, COMMUNICATIONS))
    told = in_every_mode(2, program, pairs)
    return {name: {m: told[name, m] for m in COMMUNICATIONS} for name in CASES}


def assert_consensus(results: Results, expected: Tensor) -> None:
    for mode, (weight, *_) in each(results):
        assert torch.allclose(weight, expected, atol=1e-12, rtol=0), (mode, weight)


def rows() -> Tensor:
    return Rows(NUM_ROWS).rows


# --- optimizers


def test_clipping_by_norm_clips_the_gradient_of_each_learner(trained: Any) -> None:
    lengths = rows().norm(dim=1, keepdim=True)
    # torch divides by the norm plus 1e-6.
    clipped = rows() * (0.5 / (lengths + 1e-6)).clamp(max=1)
    assert_consensus(trained["clipped by norm"], -LR * clipped.sum(0) / 2)


def test_clipping_by_value_clips_the_gradient_of_each_learner(trained: Any) -> None:
    clipped = rows().clamp(-0.3, 0.3)
    assert_consensus(trained["clipped by value"], -LR * clipped.sum(0) / 2)


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


def test_a_schedule_by_steps_steps_once_a_step(trained: Any) -> None:
    rates = [LR * 0.5**step for step in range(8) for _ in range(2)]
    weighted = rows() * torch.tensor(rates, dtype=torch.float64)[:, None]
    assert_consensus(trained["scheduled by steps"], -weighted.sum(0) / 2)


def test_a_schedule_by_epochs_steps_once_an_epoch(trained: Any) -> None:
    results = trained["scheduled by epochs"]
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


def test_a_schedule_on_a_plateau_sees_the_reduced_metric(trained: Any) -> None:
    results = trained["on a plateau"]
    for mode, (_, _, rates) in each(results):
        assert rates == pytest.approx([LR, LR, LR / 2, LR / 4]), mode
    assert_consensus(results, 2.75 * consensus_after(NUM_ROWS, 2))


def test_accumulation_by_a_schedule(trained: Any) -> None:
    results = trained["accumulated"]
    assert {(mode, steps) for mode, (_, steps, _) in each(results)} == {
        (mode, 8 + 2) for mode in COMMUNICATIONS
    }
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


def test_an_optimizer_that_calls_its_closure_many_times(trained: Any) -> None:
    results = trained["by a closure"]
    for mode, (weight, steps, closures) in each(results):
        assert closures > steps == 24, mode
        torch.testing.assert_close(weight, rows().mean(0), atol=2e-2, rtol=0)
        assert torch.equal(weight, results[mode][0][0]), mode


class Unoptimized(Linear):
    """Does all its work in hooks, or none."""

    @override
    def configure_optimizers(self) -> Any:
        return None


@pytest.mark.parametrize("size", [1, 2])
def test_a_module_without_an_optimizer(size: int) -> None:
    def program(rank: int, communication: str) -> Result:
        return fit(rank, 2 * size, size, communication, case(Unoptimized))

    results = in_every_mode(2 * size, program)
    for mode, (weight, steps, _) in each(results):
        assert torch.equal(weight, torch.zeros(3, dtype=torch.float64)), mode
        assert steps == NUM_ROWS // (2 * size), mode


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


def test_manual_optimizers_that_step_unequally_often() -> None:
    def program(rank: int, communication: str) -> Any:
        module = Manual()
        trainer = trainer_of(strategy_of(communication), 2)
        trainer.fit(module, loader(NUM_ROWS, rank, 2))
        return module.weight.detach(), module.bias.detach(), trainer.global_step

    odd = rows().view(8, 2, 3)[1::2].sum((0, 1))
    for mode, (weight, bias, steps) in each(in_every_mode(2, program)):
        torch.testing.assert_close(weight, consensus_after(NUM_ROWS, 2))
        torch.testing.assert_close(bias, -LR * odd / 2)
        assert steps == 8 + 4, mode


class Unheard(Manual):
    """Takes steps past Lightning: with the inner optimizer, or one of its own."""

    def __init__(self, keeps_optimizer: bool) -> None:
        super().__init__()
        self._own = torch.optim.SGD([self.weight], LR) if keeps_optimizer else None

    @override
    def configure_optimizers(self) -> Any:
        return None if self._own else torch.optim.SGD([self.weight], LR)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self._own or self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward((batch @ self.weight).mean())
        optimizer.step()


class Idle(Manual):
    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None


def test_steps_of_which_lightning_does_not_know_are_told_once() -> None:
    modules = {
        "inner": partial(Unheard, False),
        "own": partial(Unheard, True),
        "heard": Manual,
        "none": Idle,
    }

    def program(rank: int, name: str) -> int:
        trainer = trainer_of(strategy_of("async"), 2, max_epochs=2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer.fit(modules[name](), loader(NUM_ROWS, rank, 2), loader(2))
        return sum("`self.optimizers()`" in str(one.message) for one in told)

    told = in_every_mode(2, program, list(modules))
    # Learner 0 speaks for all.
    assert told == {"inner": [1, 0], "own": [1, 0], "heard": [0, 0], "none": [0, 0]}


class Long(Unheard):
    """Counts in its 102nd batch how often it was told of such steps."""

    def __init__(self, told: list[warnings.WarningMessage]) -> None:
        super().__init__(keeps_optimizer=False)
        self._told, self.num_told = told, 0

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 101:
            texts = [str(one.message) for one in self._told]
            self.num_told = sum("`self.optimizers()`" in text for text in texts)


def test_steps_of_which_lightning_does_not_know_are_told_before_an_epoch_ends() -> None:
    def program(rank: int) -> int:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            module = Long(told)
            trainer_of(strategy_of("async"), 2).fit(module, loader(2 * 102, rank, 2))
        return module.num_told

    assert values(learners(2, program)) == [1, 0]


PRECISIONS: dict[Any, float] = {"64-true": 1e-12, "bf16-mixed": 1e-2, "32-true": 1e-5}
"""And the errors that they may make."""


def test_precisions() -> None:
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

    def program(rank: int, communication: str) -> dict[Any, Tensor]:
        finals = {}
        for precision in PRECISIONS:
            module = Layer()
            trainer = trainer_of(strategy_of(communication), 2, precision=precision)
            trainer.fit(module, loader(NUM_ROWS, rank, 2))
            finals[precision] = module.layer.weight.detach()[0]
        return finals

    expected = consensus_after(NUM_ROWS, 2)
    for mode, finals in each(in_every_mode(2, program)):
        for precision, atol in PRECISIONS.items():
            double = torch.float64 if precision == "64-true" else torch.float32
            final = finals[precision]
            assert final.dtype == double, (mode, precision)
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


def test_tied_weights_stay_tied(trained: Any) -> None:
    results = trained["tied"]
    assert_consensus(results, 2 * consensus_after(NUM_ROWS, 2))
    assert all(tied for _, (*_, tied) in each(results))


class Unused(Linear):
    """Half of its parameters get no gradient, and differ at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.rand(2, dtype=torch.float64))

    @override
    def on_train_end(self) -> None:
        self.facts = self.idle.detach().clone()


def test_unused_parameters_need_no_option_in_super_learners_of_one(
    trained: Any,
) -> None:
    results = trained["unused"]
    assert_consensus(results, consensus_after(NUM_ROWS, 2))
    for first, second in results.values():
        torch.testing.assert_close(first[2], second[2])


def test_unused_parameters_need_the_option_of_ddp_in_larger_super_learners() -> None:
    def run(rank: int, communication: str, find: bool) -> Tensor:
        dials = {"super_learner_size": 2, "find_unused_parameters": find}
        module = Unused()
        trainer = trainer_of(strategy_of(communication, **dials), 4)
        trainer.fit(module, loader(NUM_ROWS, rank, 4))
        return module.weight.detach()

    found = in_every_mode(4, partial(run, find=True))
    for _, final in each(found):
        torch.testing.assert_close(final, consensus_after(NUM_ROWS, 4))
    program = partial(run, communication="async", find=False)
    said = " ".join(outcome.error for outcome in learners(4, program))
    assert "`HADPSGDStrategy(..., find_unused_parameters=True)`" in said
    assert "strategy=DDPStrategy(" not in said


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


def test_a_weight_that_is_frozen_and_later_trained(trained: Any) -> None:
    results = trained["frozen at first"]
    for mode, (*_, facts) in each(results):
        # A learner that is an epoch ahead trains it already, and gossips.
        assert mode == "async" or facts[0].eq(0).all(), mode
    assert_consensus(results, consensus_after(NUM_ROWS, 2))


class Backbone(Frozen):
    """All weights are in the optimizer from the beginning, and all would move."""

    def __init__(self, first_steps: int) -> None:
        super().__init__()
        self.weight.data.fill_(1)
        self.first_steps, self.num_batches = first_steps, 0

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.weight.requires_grad_(self.num_batches >= self.first_steps)
        self.num_batches += 1
        self.facts.append(self.weight.detach().clone())
        return (batch @ (self.weight + self.head)).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), LR, momentum=0.9, weight_decay=0.1)


UNFREEZING: list[dict[str, Any]] = [
    {"super_learner_size": 2},
    {"super_learner_size": 2, "gradient_as_bucket_view": True},
    {"super_learner_size": 4},  # DDP without gossip
]


def backbones(rank: int, communication: str, dials: dict[str, Any]) -> Tensor:
    module = Backbone(first_steps=2)
    module.weight.requires_grad_(False)
    trainer = trainer_of(strategy_of(communication, **dials), 4)
    trainer.fit(module, loader(NUM_ROWS, rank, 4))
    return torch.stack(module.facts)


def test_super_learners_of_two_train_a_weight_that_was_frozen_at_first() -> None:
    def program(rank: int, mode: tuple[str, int]) -> Tensor:
        dials = {**UNFREEZING[mode[1]], "find_unused_parameters": True}
        return backbones(rank, mode[0], dials)

    modes = list(itertools.product(COMMUNICATIONS, range(len(UNFREEZING))))
    for (communication, number), told in in_every_mode(4, program, modes).items():
        first, second, third, fourth = told
        assert torch.equal(first, second), number
        assert torch.equal(third, fourth), number
        assert not torch.equal(first[3], first[2]), communication
        if communication != "async":  # the other super-learner may train it already
            assert first[:3].eq(1).all(), number


@pytest.mark.parametrize("dials", UNFREEZING)
def test_super_learners_of_two_refuse_it_where_ddp_does_not_know_the_weight(
    dials: dict[str, Any],
) -> None:
    program = partial(backbones, communication="sync", dials=dials)
    outcomes = learners(4, program)
    assert any("`find_unused_parameters=True`" in outcome.error for outcome in outcomes)
    assert any("`weight` was frozen" in outcome.error for outcome in outcomes)


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


@pytest.mark.parametrize("name", ["batch norm", "synchronised batch norm"])
def test_statistics_of_batch_norm_are_averaged(trained: Any, name: str) -> None:
    # In super-learners of one, to synchronise it is to leave it as it is.
    results = trained[name]
    for mode, (_, _, (mean, batches)) in each(results):
        assert batches == 8, mode
        torch.testing.assert_close(mean, results[mode][0][2][0])
        assert 0 < mean.min() < mean.max() + 1e-9 < 1, mode
    assert_consensus(results, consensus_after(NUM_ROWS, 2))


class Watched(Linear):
    """Notes the mean of its batch-norm before each forward of the training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.seen = nn.BatchNorm1d(3, dtype=torch.float64), list[float]()

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.note()
        return super().training_step(batch, batch_idx) + 0 * self.norm(batch).sum()

    def note(self) -> None:
        assert self.norm.running_mean is not None
        self.seen.append(self.norm.running_mean[0].item())

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.norm(batch)


def test_learners_of_a_super_learner_train_with_one_set_of_buffers() -> None:
    """After a validation, too, in which DDP sees no gradients."""

    def program(rank: int) -> list[float]:
        module = Watched()
        strategy = gossip("ring", "sync", super_learner_size=2)
        rows: Any = Rows(16).rows[rank::4]
        batches = DataLoader(rows, 2)
        trainer_of(strategy, 4, max_epochs=3).fit(module, batches, batches)
        return module.seen

    first, second, third, fourth = values(learners(4, program))
    assert len(first) == 6
    assert first == second != third == fourth


def test_a_compiled_module() -> None:
    def program(rank: int, communication: str) -> Tensor:
        module = Linear()
        compiled: Any = torch.compile(module, backend="eager")
        trainer_of(strategy_of(communication), 2).fit(
            compiled, loader(NUM_ROWS, rank, 2)
        )
        return module.weight.detach()

    for _, final in each(in_every_mode(2, program)):
        torch.testing.assert_close(final, consensus_after(NUM_ROWS, 2))


class Replaced(Linear):
    """Gives its weight other memory in the middle of every second step."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            self.weight.data = self.weight.data.clone()
        return super().training_step(batch, batch_idx)


def test_a_weight_that_is_given_other_memory(trained: Any) -> None:
    assert_consensus(trained["replaced"], consensus_after(NUM_ROWS, 2))


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


def test_streams_and_combined_loaders() -> None:
    def program(rank: int, communication: str) -> tuple[Tensor, Tensor]:
        module = Linear()
        stream = DataLoader(Stream(rank, 2))
        trainer_of(strategy_of(communication), 2, max_epochs=2).fit(module, stream)
        pair = Pair()
        loaders = [loader(NUM_ROWS, rank, 2), loader(NUM_ROWS // 2, rank, 2)]
        combined = CombinedLoader(loaders, "max_size_cycle")
        trainer_of(strategy_of(communication), 2).fit(pair, combined)
        return module.weight.detach(), pair.weight.detach()

    twice = 2 * Rows(NUM_ROWS // 2).rows.sum(0)
    for _, (streamed, paired) in each(in_every_mode(2, program)):
        torch.testing.assert_close(streamed, 2 * consensus_after(NUM_ROWS, 2))
        torch.testing.assert_close(paired, -LR * (rows().sum(0) + twice) / 2)


def test_the_amount_of_training_and_validation_is_that_of_ddp() -> None:
    class Counting(Linear):
        validated = 0

        @override
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.validated += 1

    def program(rank: int, name: str) -> list[tuple[int, int]]:
        counts = []
        for arguments, *_ in AMOUNTS:
            module = Counting()
            trainer = trainer_of(name, 2, **arguments)
            trainer.fit(module, loader(NUM_ROWS, rank, 2), loader(8, rank, 2))
            counts.append((trainer.global_step, module.validated))
        return counts

    expected = [(steps, validations) for _, steps, validations in AMOUNTS]
    # Loops know only whether learners step together.
    names = ("ddp", "sdpsgd", "adpsgd")
    for name, counts in each(in_every_mode(2, program, names)):
        assert counts == expected, name


AMOUNTS: list[tuple[dict[str, Any], int, int]] = [
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
]
"""Arguments of the Trainer, and the steps and validated batches that they make."""


CASES: dict[str, Case] = {
    "clipped by norm": case(gradient_clip_val=0.5),
    "clipped by value": case(gradient_clip_val=0.3, gradient_clip_algorithm="value"),
    "scheduled by steps": case(lambda: Scheduled("step")),
    "scheduled by epochs": case(lambda: Scheduled("epoch"), max_epochs=3),
    "on a plateau": case(OnPlateau, max_epochs=4),
    "accumulated": case(
        max_epochs=2,
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 4})],
    ),
    "by a closure": case(Lbfgs, max_epochs=3),
    "tied": case(Tied),
    "unused": case(Unused),
    "frozen at first": case(Frozen, max_epochs=2, callbacks=lambda: [Unfreeze()]),
    "batch norm": case(Normalised),
    "synchronised batch norm": case(Normalised, sync_batchnorm=True),
    "replaced": case(Replaced),
}
