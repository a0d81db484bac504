"""What the convergence monitor writes, of trainings whose losses are given."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_adpsgd.callbacks import ConvergenceMonitor, convergence
from lightning_adpsgd.callbacks.algorithms import Algorithm
from lightning_adpsgd.callbacks.reporting import rates_of
from lightning_adpsgd.callbacks.runs import Run, read_runs


class Given(LightningModule):
    """The loss of training batch k is k + 1; validation n has the n-th given loss."""

    def __init__(self, *held_out: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self._held_out = list(held_out)

    def training_step(self, batch, batch_idx):
        return self.weight.sum() * 0 + batch_idx + 1

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self._loss = self._held_out.pop(0)
        self.log("val_loss", self._loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1.0)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, _up_and_down)
        return [optimizer], [{"scheduler": rates, "interval": "step"}]


def _up_and_down(step: int) -> float:
    return [0.1, 0.3, 0.2][min(step, 2)]


def fit(
    folder: Path,
    monitor: ConvergenceMonitor,
    *held_out: float,
    callbacks: tuple[Callback, ...] = (),
    ckpt_path: Path | None = None,
    **arguments: Any,
) -> list[dict[str, float]]:
    data = DataLoader(TensorDataset(torch.zeros(12, 1)), batch_size=2)
    settings: dict[str, Any] = {
        "max_epochs": len(held_out),
        "enable_checkpointing": bool(callbacks),
        "num_sanity_val_steps": 0,
    }
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[monitor, *callbacks],
        logger=CSVLogger(folder, name="", version=""),
        enable_progress_bar=False,
        enable_model_summary=False,
        **(settings | arguments),
    )
    trainer.fit(Given(*held_out), data, data, ckpt_path=ckpt_path)
    with (folder / "metrics.csv").open() as file:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


def column(table: list[dict[str, float]], name: str) -> list[float]:
    return [row[f"convergence/{name}"] for row in table if f"convergence/{name}" in row]


def row_of(monitor: ConvergenceMonitor) -> Run:
    assert monitor.run is not None
    return monitor.run


def test_the_training_loss_is_the_mean_since_the_last_validation(tmp_path):
    table = fit(
        tmp_path, ConvergenceMonitor(), 5, 4, max_epochs=1, val_check_interval=3
    )
    # Two validations an epoch, each after three batches.
    assert column(table, "train_loss") == [2, 5]


def test_losses_stand_against_samples_epochs_and_batch(tmp_path):
    table = fit(
        tmp_path, ConvergenceMonitor(), 5, 4, max_epochs=1, val_check_interval=3
    )
    assert column(table, "held_out_loss") == [5, 4]
    assert column(table, "global_samples") == [6, 12]
    assert column(table, "epochs") == [0.5, 1]
    assert column(table, "global_batch") == [2, 2]


def test_summed_gradients_make_a_larger_batch_and_not_a_smaller_loss(tmp_path):
    table = fit(tmp_path, ConvergenceMonitor(), 5, accumulate_grad_batches=3)
    assert column(table, "global_batch") == [6]
    assert column(table, "train_loss") == [3.5]


def test_the_best_loss_and_its_samples_are_kept(tmp_path):
    monitor = ConvergenceMonitor()
    table = fit(tmp_path, monitor, 3, 1, 2)
    assert column(table, "best_held_out_loss") == [3, 1, 1]
    run = row_of(monitor)
    assert (run.best_loss, run.best_loss_samples, run.last_loss) == (1, 24, 2)


def test_a_loss_at_chance_level_is_marked(tmp_path):
    chance = math.log(10)
    monitor = ConvergenceMonitor(chance=chance)
    losses = (chance - 0.06, chance - 0.04, math.inf, math.nan, 1.0)
    assert column(fit(tmp_path, monitor, *losses), "diverged") == [0, 1, 1, 1, 0]


def test_chance_is_the_very_first_loss_unless_it_is_given(tmp_path):
    table = fit(tmp_path, ConvergenceMonitor(), 0.94, 0.96)
    assert column(table, "diverged") == [0, 1]  # the first training loss is 1


def test_a_diverged_training_goes_on(tmp_path):
    table = fit(tmp_path, ConvergenceMonitor(chance=1), 5, 5, 5)
    assert len(column(table, "held_out_loss")) == 3


def test_the_row_says_what_the_run_was_and_came_to(tmp_path):
    monitor = ConvergenceMonitor(runs=tmp_path / "runs", name="one", seed=7)
    fit(tmp_path, monitor, 3, 1)
    run = row_of(monitor)
    assert run == Run(
        name="one",
        algorithm="sgd",
        topology="none",
        communication="none",
        num_super_learners=1,
        super_learner_size=1,
        global_batch=2,
        local_batch=2,
        lr=0.3,
        seed=7,
        epochs=2,
        global_samples=24,
        train_seconds=run.train_seconds,
        best_loss=1,
        best_loss_samples=24,
        last_loss=1,
        samples_per_second=24 / (run.train_seconds or 0),
        exposed_share=0,
        diverged=True,
    )
    assert read_runs(tmp_path) == [run]


def test_the_row_goes_to_the_logger_too(tmp_path):
    table = fit(tmp_path, ConvergenceMonitor(name="one"), 0.5)
    assert table[-1]["run/best_loss"] == 0.5
    assert "run/lr: 0.3" in (tmp_path / "hparams.yaml").read_text()


def test_runs_without_a_name_do_not_overwrite_one_another(tmp_path):
    for number in (1, 2):
        fit(tmp_path / str(number), ConvergenceMonitor(runs=tmp_path / "runs"), 0.5)
    assert len(read_runs(tmp_path / "runs")) == 2


def test_a_run_is_named_whatever_the_name_of_its_topology(tmp_path, monkeypatch):
    found = Algorithm("async-ring/of/two", "ring/of/two", "async", 2, 1)
    monkeypatch.setattr(convergence, "algorithm_of", lambda trainer: found)
    fit(tmp_path, ConvergenceMonitor(runs=tmp_path), 0.5)
    [run] = read_runs(tmp_path)
    assert run.name.startswith("async-ring-of-two-B2-lr")
    assert run.topology == "ring/of/two"


def test_an_optimizer_that_finds_its_own_rate_has_none():
    """Such as Adafactor with relative steps, whose `lr` is None."""
    adafactor: Any = SimpleNamespace(param_groups=[{"lr": None}, {"weight_decay": 0}])
    monitor, nobody = ConvergenceMonitor(), cast(Any, None)
    monitor.on_before_optimizer_step(nobody, nobody, adafactor)
    assert (rates_of(adafactor), monitor.state_dict()["peak_lr"]) == ([], 0.0)


class Breaks(Callback):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            raise self._error


def test_a_training_that_ends_in_numbers_that_are_none_has_its_row(tmp_path):
    monitor = ConvergenceMonitor(runs=tmp_path)
    with pytest.raises(FloatingPointError):
        fit(tmp_path, monitor, 0.5, 0.25, callbacks=(Breaks(FloatingPointError()),))
    [run] = read_runs(tmp_path)
    assert (run.diverged, run.best_loss) == (True, 0.25)


def test_a_row_that_cannot_be_written_is_no_reason_for_an_error(tmp_path):
    folder = tmp_path / "runs"
    folder.touch()
    monitor = ConvergenceMonitor(runs=folder, name="one")
    with pytest.warns(UserWarning, match=r"could not be written.*/runs'"):
        fit(tmp_path, monitor, 0.5)
    assert row_of(monitor).best_loss == 0.5


def raise_full_disk(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "place", [(convergence, "write_run"), (CSVLogger, "log_hyperparams")]
)
def test_results_that_cannot_be_written_take_the_place_of_no_error(
    tmp_path, monkeypatch, place
):
    monkeypatch.setattr(*place, raise_full_disk)
    monitor = ConvergenceMonitor(runs=tmp_path)
    with (
        pytest.warns(UserWarning, match="could not be written"),
        pytest.raises(FloatingPointError),
    ):
        fit(tmp_path, monitor, 0.5, 0.25, callbacks=(Breaks(FloatingPointError()),))


def test_a_training_that_ends_in_another_error_has_none(tmp_path):
    with pytest.raises(KeyError):
        fit(
            tmp_path,
            ConvergenceMonitor(runs=tmp_path),
            *(0.5, 0.4),
            callbacks=(Breaks(KeyError()),),
        )
    assert read_runs(tmp_path) == []


def test_a_resumed_training_remembers_its_best_loss_chance_and_rate(tmp_path):
    saved = ModelCheckpoint(tmp_path, filename="saved")
    fit(tmp_path / "first", ConvergenceMonitor(), 0.5, callbacks=(saved,))
    monitor = ConvergenceMonitor()
    path = tmp_path / "saved.ckpt"
    table = fit(tmp_path / "second", monitor, 0.9, 0.97, max_epochs=3, ckpt_path=path)
    assert column(table, "best_held_out_loss") == [0.5, 0.5]
    assert column(table, "diverged") == [0, 1]
    assert row_of(monitor).best_loss_samples == 12
    assert row_of(monitor).lr == 0.3  # before the resume


def test_a_training_that_had_ended_keeps_its_row_when_it_is_started_again(tmp_path):
    saved, path = ModelCheckpoint(tmp_path, filename="saved"), tmp_path / "saved.ckpt"
    monitors = [ConvergenceMonitor(runs=tmp_path, name="one") for _ in range(2)]
    fit(tmp_path, monitors[0], 0.5, callbacks=(saved,))
    with pytest.raises(FileNotFoundError, match=r"metrics\.csv"):  # nothing is logged
        fit(tmp_path / "again", monitors[1], 0.5, callbacks=(saved,), ckpt_path=path)
    assert monitors[1].run is None
    [run] = read_runs(tmp_path)
    assert (run.epochs, run.best_loss) == (1, 0.5)


def test_an_error_of_an_evaluation_is_none_of_the_training(tmp_path):
    monitor = ConvergenceMonitor(runs=tmp_path)
    fit(tmp_path, monitor, 0.5)
    nobody = cast(Any, None)
    monitor.setup(nobody, nobody, "test")
    monitor.on_exception(nobody, nobody, FloatingPointError())
    assert [run.diverged for run in read_runs(tmp_path)] == [False]


def test_a_second_training_begins_anew(tmp_path):
    monitor = ConvergenceMonitor()
    fit(tmp_path / "first", monitor, 0.25)
    fit(tmp_path / "second", monitor, 0.5)
    assert row_of(monitor).best_loss == 0.5
    assert row_of(monitor).global_samples == 12


class LogsWords(Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("wer", 0.125)


def test_a_word_error_rate_is_found_under_its_name(tmp_path):
    monitor = ConvergenceMonitor(wer="wer")
    fit(tmp_path, monitor, 0.5, callbacks=(LogsWords(),))
    assert row_of(monitor).wer == 0.125


def test_a_held_out_loss_that_nobody_logs_is_named(tmp_path):
    with pytest.raises(ValueError, match="'loss'; logged are: val_loss"):
        fit(tmp_path, ConvergenceMonitor("loss"), 0.5)


def test_a_training_without_validation_has_a_row_without_losses(tmp_path):
    monitor = ConvergenceMonitor()
    fit(tmp_path, monitor, 0.5, limit_val_batches=0)
    assert row_of(monitor).best_loss is None
    assert row_of(monitor).global_batch == 2


@pytest.mark.parametrize("argument", ["name", "algorithm"])
def test_a_name_that_is_no_file_is_refused_before_the_training(tmp_path, argument):
    given: dict[str, Any] = {argument: "a/b"}
    with pytest.raises(ValueError, match=f"`{argument}` of a run must be the name of"):
        ConvergenceMonitor(runs=tmp_path, **given)
    ConvergenceMonitor(**given)
