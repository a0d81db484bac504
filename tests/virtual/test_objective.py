"""What is trained without a Trainer."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from typing_extensions import override

from lightning_adpsgd.virtual.objective import Objective, evaluating, without_logging


class Module(pl.LightningModule):
    """Configures what it is given; logs, and returns its loss in a dictionary."""

    def __init__(self, configured: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.configured, self.numbers = configured, list[int]()

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        self.numbers.append(batch_idx)
        self.log("loss", loss := (batch * self.weight).sum())
        self.log_dict({"again": loss})
        return {"loss": loss}

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.5)
        return self.configured(optimizer) if self.configured else optimizer


class WithoutNumber(Module):
    @override
    def training_step(self, batch: Tensor) -> Tensor:  # pyright: ignore
        return batch.sum()


class NumberByAnotherName(Module):
    @override
    def training_step(self, batch: Tensor, number: int) -> Tensor:  # pyright: ignore
        return batch.sum() + number


class WithHook(Module):
    @override
    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return 2 * batch


class AsksTheTrainer(Module):
    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1 / self.trainer.max_epochs)  # pyright: ignore


def test_a_training_step_is_told_the_number_of_its_batch_by_place() -> None:
    objective = Objective(NumberByAnotherName())
    assert objective.loss(torch.ones(2), 3).item() == 5.0


class BuiltLater(Module):
    """Builds a layer in a hook that only a Trainer calls."""

    @override
    def configure_model(self) -> None:
        self.layer = nn.Linear(1, 1)


class SetsUp(Module):
    @override
    def setup(self, stage: str) -> None:
        self.scale = 3.0


class Begins(Module):
    @override
    def on_train_start(self) -> None:
        self.scale = 3.0


class BeginsEpochs(Module):
    @override
    def on_train_epoch_start(self) -> None:
        self.weight.data.zero_()


class LogsAtEnds(Module):
    @override
    def on_train_epoch_end(self) -> None:
        self.log("epochs", 1.0)

    @override
    def on_validation_epoch_end(self) -> None:
        self.log("validations", 1.0)

    @override
    def on_fit_end(self) -> None:
        self.numbers.clear()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (BuiltLater, "`configure_model`, which is not called .* got BuiltLater; "),
        (SetsUp, "`setup`, which is not called .* got SetsUp; "),
        (Begins, "`on_train_start`, which is not called .* got Begins; "),
        (BeginsEpochs, "`on_train_epoch_start`, which is not called .* BeginsEpochs; "),
        (WithHook, "`on_after_batch_transfer`, which is not called .* got WithHook; "),
        (AsksTheTrainer, "must not use the Trainer, .* got AsksTheTrainer; train "),
    ],
)
def test_what_needs_a_trainer_is_refused(module: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(module()).make_update()


def test_with_a_loss_and_an_optimizer_it_is_as_a_plain_module() -> None:
    made = Objective(
        WithHook(),
        lambda module, batch: batch.sum(),
        lambda parameters: torch.optim.SGD(parameters, 0.25),
    )
    assert made.loss(torch.ones(2)).item() == 2.0
    assert made.make_update().optimizer.param_groups[0]["lr"] == 0.25


def test_a_training_step_gives_the_loss_and_may_log_without_a_trainer(
    recwarn: pytest.WarningsRecorder,
) -> None:
    module = Module()
    objective = Objective(module)
    with without_logging(module):
        assert objective.loss(torch.tensor([1.0, 2.0]), 7).item() == 3.0
    assert module.numbers == [7]
    assert not recwarn
    assert "log" not in vars(module)
    assert Objective(WithoutNumber()).loss(torch.ones(2)).item() == 2.0


@pytest.mark.parametrize(
    ("configured", "interval"),
    [
        (lambda o: ([o], [StepLR(o, 2)]), "epoch"),
        (lambda o: {"optimizer": o, "lr_scheduler": StepLR(o, 2)}, "epoch"),
        (
            lambda o: {
                "optimizer": o,
                "lr_scheduler": {"scheduler": StepLR(o, 2), "interval": "step"},
            },
            "step",
        ),
    ],
)
def test_schedulers_move_on_with_steps_or_epochs(
    configured: Any, interval: str
) -> None:
    update = Objective(Module(configured)).make_update()
    rates = []
    for number in range(1, 5):
        update.optimizer.step()
        for each in ("step", "epoch"):
            if each != interval:
                update.passed(each, number)
        update.passed(interval, number)
        rates.append(update.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.5, 0.05, 0.05, 0.005])


def test_every_super_learner_has_an_optimizer_of_its_own() -> None:
    objective = Objective(Module())
    first, second = objective.make_update(), objective.make_update()
    first.scale(0.5)
    assert first.optimizer.param_groups[0]["lr"] == 0.25
    assert second.optimizer.param_groups[0]["lr"] == 0.5
    first.scale(2.0)  # of the first rate, not of the last
    assert first.optimizer.param_groups[0]["lr"] == 1.0


def test_a_score_is_the_mean_loss_per_sample_in_evaluation_mode() -> None:
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Dropout(0.5))
    nn.init.ones_(module[0].weight)  # pyright: ignore
    objective = Objective(
        module, lambda m, x: m(x).mean(), lambda p: torch.optim.SGD(p, 1.0)
    )
    score = objective.score([torch.ones(3, 1), torch.full((1, 1), 5.0)], len)
    assert score is not None
    state = torch.get_rng_state()
    with evaluating(module):
        assert not torch.is_grad_enabled()
        assert score(module) == 2.0
        torch.rand(5)
    assert module[1].training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("configured", "message"),
    [
        (lambda o: [o, o], "must return one optimizer, got 2 of Module"),
        (
            lambda o: {
                "optimizer": o,
                "lr_scheduler": {"scheduler": ReduceLROnPlateau(o), "monitor": "x"},
            },
            "must not return `ReduceLROnPlateau`",
        ),
    ],
)
def test_optimizers_without_a_meaning_here_are_refused(
    configured: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(Module(configured)).make_update()


def test_manual_optimization_and_missing_functions_are_refused() -> None:
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="must use automatic optimization"):
        Objective(module)
    with pytest.raises(ValueError, match="`loss` and `optimizer` are needed"):
        Objective(nn.Linear(1, 1), loss=lambda m, b: m(b))


def test_a_module_with_hooks_that_log_at_the_end_is_taken() -> None:
    objective = Objective(LogsAtEnds())
    with without_logging(objective.module):
        assert objective.loss(torch.ones(2)).item() == 2.0


def test_logging_stays_off_where_a_measurement_turns_it_off_again() -> None:
    module = Module()
    with without_logging(module):
        with without_logging(module):
            pass
        module.log("loss", 1.0)
    assert not {"log", "log_dict"} & vars(module).keys()


def plain(module: nn.Module, optimizer: Any = torch.optim.SGD) -> Objective:
    return Objective(module, lambda m, b: m(b).mean(), optimizer)


def test_a_module_without_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="must have weights, but Identity has none"):
        plain(nn.Identity())


@pytest.mark.parametrize("made", [None, []])
def test_a_function_that_makes_no_optimizer_is_refused(made: Any) -> None:
    objective = plain(nn.Linear(1, 1), lambda parameters: made)
    message = f"one optimizer of torch, got a {type(made).__name__}; for example"
    with pytest.raises(TypeError, match=message):
        objective.make_update()


def test_batches_of_which_there_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="`evaluate` must have a batch, got none; lea"):
        plain(nn.Linear(1, 1)).score([], len)


def test_a_step_without_a_loss_is_refused() -> None:
    objective = Objective(Module(), loss=lambda m, b: None)  # pyright: ignore
    with pytest.raises(TypeError, match="got NoneType"):
        objective.loss(torch.ones(2))
