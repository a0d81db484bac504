"""What the callbacks write, against trainings whose figures are known."""

import csv
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

import lightning_adpsgd  # noqa: F401  registers the strategies
from lightning_adpsgd.callbacks import (
    AllreduceWait,
    ConvergenceMonitor,
    GossipMonitor,
    TrainingCurve,
)
from lightning_adpsgd.callbacks.algorithms import (
    Algorithm,
    algorithm_of,
    batches_per_step,
)
from lightning_adpsgd.callbacks.clock import Monitor, TrainingClock
from lightning_adpsgd.callbacks.gossip import (
    STALENESS_BINS,
    LearnerRecord,
    _ages,
    summarize,
)
from lightning_adpsgd.dials import Dials
from lightning_adpsgd.mixing.statistics import Statistics
from lightning_adpsgd.topology.named import find_topology


class Slope(LightningModule):
    """The loss of batch k is k: every figure can be told in advance."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        return self.weight.sum() * 0 + batch_idx

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.weight.sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class GossipingStrategy(SingleDeviceStrategy):
    """One learner that claims to have gossiped."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.last_consensus = SimpleNamespace(distance=2.0, relative_distance=0.5)

    def gossip_statistics(self):
        return Statistics(
            exchanges=30,
            merges=20,
            bytes_sent=1000,
            exposed_seconds=0.25,
            staleness={1: 6, 3: 2, 500: 1},
            refused=4,
            peer_ages={1: 3},
        )


def fit(
    folder: Path,
    *callbacks: Callback,
    epochs: int = 2,
    ckpt: Path | None = None,
    training: Any = None,
    **arguments: Any,
) -> list[dict[str, float]]:
    data = DataLoader(TensorDataset(torch.zeros(12, 1)), batch_size=2)
    settings: dict[str, Any] = {"devices": 1} | arguments
    trainer = Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=CSVLogger(folder, name="", version=""),
        max_epochs=epochs,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(Slope(), training or data, data, ckpt_path=ckpt)
    return list(rows(folder))


def figures_of_one_epoch(folder: Path) -> dict[str, float]:
    table = fit(folder, GossipMonitor(), epochs=1, strategy=GossipingStrategy())
    [row] = [row for row in table if "gossip/merges" in row]
    return row


def rows(folder: Path) -> Iterator[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            yield {name: float(value) for name, value in row.items() if value}


def column(table: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in table if name in row]


def test_a_point_of_the_curve_is_the_mean_loss_since_the_last_one(tmp_path):
    table = fit(tmp_path, TrainingCurve(), log_every_n_steps=3)
    assert column(table, "curve/loss") == [1, 4, 1, 4]


def test_a_step_of_several_batches_is_one_point_of_the_curve(tmp_path):
    arguments: dict[str, Any] = {"log_every_n_steps": 1, "accumulate_grad_batches": 3}
    table = fit(tmp_path, TrainingCurve(), **arguments)
    assert column(table, "curve/loss") == [1, 4, 1, 4]


def test_a_trainer_that_logs_no_step_has_no_point_of_the_curve(tmp_path):
    table = fit(tmp_path, TrainingCurve(), log_every_n_steps=0)
    assert column(table, "curve/loss") == []
    assert column(table, "val_loss") == [1, 1]


def test_the_curve_counts_the_samples_of_the_steps(tmp_path):
    table = fit(tmp_path, TrainingCurve(), log_every_n_steps=2)
    assert column(table, "curve/global_samples") == [4, 8, 12, 16, 20, 24]


class Opaque:
    """A batch that does not tell its size."""


@pytest.mark.parametrize("monitor", [GossipMonitor, ConvergenceMonitor])
def test_a_batch_of_unknown_size_counts_no_samples(tmp_path, monitor):
    batches = [Opaque(), torch.zeros(2, 1), None, Opaque()]
    numbers: Any = range(4)
    loader = DataLoader(numbers, collate_fn=lambda rows: batches[rows[0]])
    table = fit(
        tmp_path,
        TrainingCurve(),
        monitor(),
        epochs=1,
        training=loader,
        log_every_n_steps=1,
    )
    assert column(table, "curve/global_samples") == [0, 2, 2]


def test_a_batch_that_lightning_skips_counts_no_samples():
    clock = TrainingClock()
    clock.begin(trainer_of(0, 1, strategy=None))
    clock.count(trainer_of(0, 1, strategy=None), None)
    assert clock.samples == 0


def test_the_time_of_the_curve_grows(tmp_path):
    table = fit(tmp_path, TrainingCurve(), log_every_n_steps=1)
    seconds = column(table, "curve/train_seconds")
    assert all(before < after for before, after in pairwise(seconds))


def test_without_gossip_nothing_is_said_about_gossip(tmp_path):
    table = fit(tmp_path, GossipMonitor())
    assert not [name for row in table for name in row if name.startswith("gossip/")]


def test_without_gossip_samples_and_speed_are_still_there(tmp_path):
    table = fit(tmp_path, GossipMonitor())
    assert column(table, "learners/global_samples") == [12, 24]
    assert min(column(table, "learners/steps_per_second_0")) > 0


def test_each_validation_tells_what_the_gossip_did(tmp_path):
    row = figures_of_one_epoch(tmp_path)
    expected = {
        "gossip/consensus_distance": 2.0,
        "gossip/relative_consensus_distance": 0.5,
        "gossip/merges": 20,
        "gossip/bytes_sent": 1000,
        "gossip/refused": 4,
        "gossip/staleness_1": 6,
        "gossip/staleness_3": 2,
        f"gossip/staleness_{STALENESS_BINS - 1}": 1,
    }
    assert {name: row[name] for name in expected} == expected


def test_waiting_is_told_as_a_part_of_the_training_time(tmp_path):
    row = figures_of_one_epoch(tmp_path)
    waited = row["learners/exposed_fraction"] * row["learners/train_seconds"]
    assert waited == pytest.approx(0.25)


def test_the_figures_of_a_validation_stand_at_the_step_of_its_metrics(tmp_path):
    table = fit(tmp_path, GossipMonitor())
    steps = [
        [row["step"] for row in table if name in row]
        for name in ("val_loss", "learners/global_samples")
    ]
    assert steps == [[5, 11], [5, 11]]


def test_a_sanity_check_before_training_writes_nothing(tmp_path):
    table = fit(tmp_path, GossipMonitor(), num_sanity_val_steps=2, epochs=1)
    assert column(table, "learners/global_samples") == [12]


def test_a_second_training_starts_to_count_at_zero(tmp_path):
    monitor = GossipMonitor()
    fit(tmp_path / "first", monitor)
    table = fit(tmp_path / "second", monitor)
    assert column(table, "learners/global_samples") == [12, 24]
    assert len(monitor.records) == 1
    curve: dict[str, Any] = {"limit_val_batches": 0, "log_every_n_steps": 1}
    fit(tmp_path / "third", monitor, TrainingCurve(), **curve)
    assert monitor.records == []


def test_a_resumed_training_goes_on_counting(tmp_path):
    saved = ModelCheckpoint(tmp_path, filename="saved")
    every: dict[str, Any] = {"log_every_n_steps": 6}
    fit(tmp_path / "first", TrainingCurve(), GossipMonitor(), saved, epochs=1, **every)
    curve, monitor, ckpt = TrainingCurve(), GossipMonitor(), tmp_path / "saved.ckpt"
    table = fit(tmp_path / "second", curve, monitor, ckpt=ckpt, **every)
    assert column(table, "curve/global_samples") == [24]
    assert column(table, "learners/global_samples") == [24]


def test_what_an_evaluation_has_loaded_is_no_resume(tmp_path):
    saved = ModelCheckpoint(tmp_path, filename="saved")
    fit(tmp_path / "first", GossipMonitor(), ConvergenceMonitor(), saved)
    monitors = GossipMonitor(), ConvergenceMonitor()
    data = DataLoader(TensorDataset(torch.zeros(12, 1)))
    evaluates = Trainer(accelerator="cpu", callbacks=list(monitors), logger=False)
    evaluates.validate(Slope(), data, ckpt_path=tmp_path / "saved.ckpt")
    table = fit(tmp_path / "second", *monitors, epochs=1)
    assert column(table, "learners/global_samples") == [12]
    assert column(table, "run/best_loss_samples") == [12]


def test_figures_of_communication_are_of_the_steps_since_the_resume(tmp_path):
    saved = ModelCheckpoint(tmp_path, filename="saved")
    one, two = GossipingStrategy(), GossipingStrategy()
    fit(tmp_path / "first", GossipMonitor(), saved, epochs=1, strategy=one)
    monitor, run, path = GossipMonitor(), ConvergenceMonitor(), tmp_path / "saved.ckpt"
    table = fit(tmp_path / "second", monitor, run, ckpt=path, strategy=two)
    assert column(table, "gossip/exchanges_per_step") == [30 / 6]
    [record] = monitor.records
    assert record.fit_steps == 6
    exposed = 0.25 / record.fit_seconds
    assert column(table, "learners/exposed_fraction") == pytest.approx([exposed])
    assert column(table, "run/exposed_share") == pytest.approx([exposed])
    assert record.train_seconds > record.fit_seconds


class Slow(Monitor):
    """Takes its time where other monitors only look at the clock."""

    def measure(self, trainer, pl_module):
        before = self.clock.seconds
        time.sleep(0.01)
        assert self.clock.seconds == before


def test_all_monitors_have_one_clock_whatever_one_of_them_takes(tmp_path):
    monitors = ConvergenceMonitor(), Slow(), GossipMonitor(), TrainingCurve()
    table = fit(tmp_path, *monitors, epochs=3, log_every_n_steps=6)
    seconds = column(table, "convergence/train_seconds")
    assert len(set(seconds)) == 3
    assert seconds == column(table, "learners/train_seconds")
    assert len({id(monitor.clock) for monitor in monitors}) == 1


def test_a_monitor_that_is_new_takes_over_the_clock_of_one_that_was_saved(tmp_path):
    saved = ModelCheckpoint(tmp_path, filename="saved")
    fit(tmp_path / "first", GossipMonitor(), saved, epochs=1)
    monitors = TrainingCurve(), GossipMonitor()
    table = fit(tmp_path / "second", *monitors, ckpt=tmp_path / "saved.ckpt")
    assert column(table, "learners/global_samples") == [24]
    assert [monitor.clock.samples for monitor in monitors] == [24, 24]


def record(**changes: Any) -> LearnerRecord:
    bins = [0.0] * STALENESS_BINS
    bins[2], bins[5] = 3.0, 1.0
    counts = 400, 10.0, 1.0, 50, 40, 1000, 0, 0, 100, 10.0
    plain = LearnerRecord(*counts, tuple(bins))
    return plain._replace(**changes)


def trainer_of(rank: int, num_learners: int, **attributes: Any) -> Any:
    return SimpleNamespace(
        global_rank=rank, world_size=num_learners, global_step=0, **attributes
    )


@pytest.mark.parametrize(("shared_by", "samples"), [(1, 9), (2, 4)])
def test_learners_that_read_the_same_samples_count_their_share(
    shared_by: int, samples: int
):
    strategy = SimpleNamespace(dials=SimpleNamespace(tensor_parallel_size=shared_by))
    trainer = trainer_of(0, 4, strategy=strategy)
    clock = TrainingClock()
    clock.begin(trainer)
    for _ in range(3):
        clock.count(trainer, torch.zeros(3, 1))
    assert clock.samples == samples
    assert batches_per_step(trainer) == 4 // shared_by


def island() -> Any:
    """The trainer of an island, which is alone in its job."""
    dials = Dials(find_topology("ring"), "async", 1, islands="tcp://10.0.0.1:29400")
    strategy = SimpleNamespace(dials=dials, num_super_learners=1, super_learner_size=1)
    return trainer_of(0, 1, strategy=strategy)


def test_the_row_of_an_island_names_its_algorithm():
    assert algorithm_of(island()) == Algorithm("adpsgd", "ring", "async", 1, 1)


def test_an_island_has_no_ages_of_peers_that_may_have_any_number():
    assert _ages(island(), {0: 3, 17: 1}) == ()


def test_a_record_survives_the_way_through_a_vector():
    assert LearnerRecord.from_row(record().row()) == record()


def test_figures_of_learners_add_up():
    figures = summarize(
        [record(), record(train_seconds=20.0, fit_steps=50, fit_seconds=20.0)]
    )
    expected = {
        "learners/global_samples": 800,
        "learners/samples_per_second": 40 + 20,
        "learners/exposed_fraction": (0.1 + 0.05) / 2,
        "learners/steps_per_second_least": 2.5,
        "learners/steps_per_second_most": 10,
        "gossip/exchanges_per_second": 5 + 2.5,
        "gossip/staleness_mean": (2 * 3 + 5) / 4,
        "gossip/staleness_max": 5,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_the_staleness_of_all_learners_is_one_histogram():
    figures = summarize([record(), record()])
    prefix = "gossip/staleness_"
    bins = {name: value for name, value in figures.items() if name[-1].isdigit()}
    expected = {f"{prefix}2": 6, f"{prefix}5": 2}
    assert {n: v for n, v in bins.items() if n.startswith(prefix)} == expected


@pytest.mark.parametrize("strategy", ["ddp_fork", "adpsgd_fork"])
def test_figures_of_two_processes_are_gathered(tmp_path, strategy):
    callbacks = [TrainingCurve(), GossipMonitor(), AllreduceWait()]
    table = fit(tmp_path, *callbacks, strategy=strategy, devices=2)
    assert column(table, "learners/global_samples") == [12, 24]
    assert len(column(table, "learners/steps_per_second_1")) == 2


def test_the_wait_of_ddp_for_its_gradients_and_their_bytes_are_measured(tmp_path):
    callbacks = [GossipMonitor(), AllreduceWait()]
    table = fit(tmp_path, *callbacks, strategy="ddp_fork", devices=2)
    assert 0 < column(table, "learners/exposed_fraction")[-1] < 1
    # One float32 in each of three steps; of two learners each sends it once.
    assert column(table, "learners/allreduce_bytes") == [24, 48]


def test_gossip_between_processes_reports_its_consensus_distance(tmp_path):
    table = fit(tmp_path, GossipMonitor(), strategy="adpsgd_fork", devices=2)
    assert column(table, "gossip/consensus_distance") == [0, 0]
