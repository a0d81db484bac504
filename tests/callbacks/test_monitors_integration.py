"""All callbacks between processes: their figures, and that nothing waits or hangs."""

import csv
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_adpsgd.callbacks import (
    AllreduceWait,
    ConsensusMonitor,
    ConvergenceMonitor,
    GossipMonitor,
    Timeline,
    TrainingCurve,
)
from lightning_adpsgd.callbacks.runs import Run, read_runs
from lightning_adpsgd.report import collect
from tests.learners import (
    COMMUNICATIONS,
    gossip,
    in_every_mode,
    learners,
    trainer_of,
    values,
)
from tests.strategy.test_trainer_integration import CountsCollectives

CHANCE = math.log(4)


class Classifier(pl.LightningModule):
    """Four classes told apart by the signs of two features."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 4))
        self._lr = lr

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self._lr)


def points(rank: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(rank)
    features = torch.randn(96, 2, generator=generator)
    labels = (features > 0).long() @ torch.tensor([1, 2])
    return DataLoader(TensorDataset(features, labels), batch_size=8)


def all_callbacks(folder: Path) -> list[pl.Callback]:
    return [
        TrainingCurve(),
        ConsensusMonitor(held_out=2, gradients=4),
        GossipMonitor(),
        ConvergenceMonitor(chance=CHANCE, runs=folder, name="run"),
        AllreduceWait(),
        Timeline(folder / "timeline"),
    ]


def train(
    folder: Path,
    strategies: dict[str, Any],
    num: int,
    lr: float = 0.5,
) -> dict[str, list[int]]:
    """Trains for three epochs with each strategy, in a folder of its name.

    Returns:
        For each strategy how many epochs each learner came to.
    """

    def program(rank: int, name: str) -> int:
        own = folder / name
        own.mkdir(exist_ok=True)
        trainer = trainer_of(
            strategies[name],
            num,
            max_epochs=3,
            log_every_n_steps=1,
            logger=CSVLogger(own, name="", version=""),
            callbacks=all_callbacks(own),
        )
        trainer.fit(Classifier(lr), points(rank), points(num + rank))
        return trainer.current_epoch

    return in_every_mode(num, program, list(strategies))


def last_figures(folder: Path) -> dict[str, float]:
    figures: dict[str, float] = {}
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            figures |= {name: float(value) for name, value in row.items() if value}
    return figures


def the_run(folder: Path) -> Run:
    [run] = read_runs(folder)
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two learners have left with each strategy, in a folder of its name."""
    folder = tmp_path_factory.mktemp("trained")
    gossips = {name: gossip("ring", name) for name in COMMUNICATIONS}
    told = train(folder, {**gossips, "ddp": "ddp"}, 2)
    assert set(map(tuple, told.values())) == {(3, 3)}
    return folder


@pytest.mark.parametrize("communication", COMMUNICATIONS)
def test_all_callbacks_work_while_two_learners_gossip(trained, communication) -> None:
    folder = trained / communication
    figures, run = last_figures(folder), the_run(folder)
    assert figures["convergence/global_samples"] == 2 * 3 * 96
    assert figures["learners/global_samples"] == 2 * 3 * 96
    assert run.best_loss is not None
    assert run.best_loss < CHANCE / 2
    assert (run.num_super_learners, run.super_learner_size) == (2, 1)
    assert (run.global_batch, run.local_batch, run.lr) == (16, 8, 0.5)
    assert (run.communication, run.diverged) == (communication, False)
    low, mean, high = (
        figures[f"consensus/local_loss_{name}"] for name in ("min", "mean", "max")
    )
    assert 0 < low < mean < high
    assert -1 <= figures["consensus/gradient_agreement"] <= 1
    assert figures["gossip/consensus_distance"] >= 0
    check_lanes(folder, communication)


def check_lanes(folder: Path, communication: str) -> None:
    """The page has all steps of both learners, and what they did in them."""
    [lanes] = collect([folder]).lanes
    assert lanes["name"] == "run"
    assert [one["name"] for one in lanes["learners"]] == ["0", "1"]
    for learner in lanes["learners"]:
        assert len(learner["steps"]) == 36
        events = [text for _, _, text in learner["events"]]
        assert events == [*["validation"] * 3, "end"]
        exchanges = sum(step[3] for step in learner["steps"])
        # A hidden round of the last step of an epoch ends in the validation after it.
        least = {"sync": 36, "delay_by_one": 33, "async": 0}[communication]
        assert least <= exchanges <= 36 or communication == "async"


def test_the_age_of_what_is_known_of_each_peer_is_that_of_the_engine(trained) -> None:
    figures = last_figures(trained / "async")
    # An exchange is with both, at whatever step either of them is.
    assert 0 <= figures["gossip/peer_age_mean"] <= figures["gossip/peer_age_max"] <= 36
    ages = [figures["gossip/peer_age_0"], figures["gossip/peer_age_1"]]
    assert max(ages) == figures["gossip/peer_age_max"]


def test_lightnings_own_strategy_leaves_out_what_it_has_not(trained) -> None:
    figures, run = last_figures(trained / "ddp"), the_run(trained / "ddp")
    assert not [name for name in figures if name.startswith("gossip/")]
    assert figures["consensus/effective_lr_share"] == pytest.approx(1)
    assert (run.algorithm, run.num_super_learners, run.super_learner_size) == (
        "ddp",
        1,
        2,
    )
    local, of_mean = (
        figures[f"consensus/{name}"] for name in ("local_loss_mean", "loss_of_mean")
    )
    assert local == of_mean  # all have the same weights


def test_super_learners_of_two_are_told_apart(tmp_path) -> None:
    pairs = {"pairs": gossip(super_learner_size=2)}
    assert train(tmp_path, pairs, 4) == {"pairs": [3] * 4}
    run = the_run(tmp_path / "pairs")
    assert (run.algorithm, run.num_super_learners) == ("hadpsgd", 2)
    assert run.global_batch == 32


def test_the_row_of_a_diverged_training_says_so_in_each_strategy(tmp_path) -> None:
    # Not "async": weights that go far might end the training before its loss does.
    strategies = {
        "ddp": "ddp",
        "sync": gossip("ring", "sync"),
        "delay_by_one": gossip("complete", "delay_by_one"),
    }
    train(tmp_path, strategies, 2, lr=1e4)
    assert all(the_run(tmp_path / name).diverged for name in strategies)


class Explodes(Classifier):
    """Its weights are not finite after one epoch."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * math.inf


def test_weights_that_are_not_finite_end_the_run_with_its_row(tmp_path) -> None:
    def program(rank: int) -> str:
        trainer = trainer_of(
            gossip(), 2, callbacks=all_callbacks(tmp_path), max_epochs=3
        )
        with pytest.raises((FloatingPointError, SystemExit)) as error:
            trainer.fit(Explodes(), points(rank), points(2 + rank))
        return str(error.value)

    first, _ = values(learners(2, program))
    assert "training has diverged" in first
    assert the_run(tmp_path).diverged


def test_no_callback_adds_a_collective_to_an_asynchronous_step(tmp_path) -> None:
    def program(rank: int) -> list[int]:
        counts = CountsCollectives()
        callbacks = [*all_callbacks(tmp_path), counts]
        trainer = trainer_of(gossip(), 2, callbacks=callbacks)
        trainer.fit(Classifier(), points(rank), points(2 + rank))
        return counts.at_batches

    for at_batches in values(learners(2, program)):
        assert len(at_batches) == 12
        assert at_batches[-1] == at_batches[0]


class Apart(pl.LightningModule):
    """Goes to given weights: (3, 0) in learner 0 and (1, 2) in learner 1, from (2, 2).

    Four steps at 1/2 of constant gradients, which nothing averages meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 2.0, dtype=torch.float64))

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ways = torch.tensor([[-0.5, 1.0], [0.5, 0.0]], dtype=torch.float64)
        return ways[self.global_rank] @ self.weight

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing to evaluate."""

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


def quartic(module: Any, batch: Any) -> Tensor:
    return (module.weight**4).sum() / 4


def test_the_figures_of_two_given_weights_are_those_of_arithmetic(tmp_path) -> None:
    """At (3, 0) and (1, 2), mean (2, 1), with the gradient w^3 of a quartic.

    g = (8, 1), g_a = ((27, 0) + (1, 8)) / 2 = (14, 4).
    """

    def program(rank: int) -> None:
        data = DataLoader(TensorDataset(torch.zeros(4)))
        trainer = trainer_of(
            gossip("ring", "sync", gossip_every=1000),
            2,
            logger=CSVLogger(tmp_path, name="", version=""),
            callbacks=[ConsensusMonitor(held_out=1, gradients=2, loss=quartic)],
        )
        trainer.fit(Apart(), data, data)

    values(learners(2, program))
    figures = last_figures(tmp_path)
    share = (14 * 8 + 4 * 1) / (8**2 + 1**2)
    across = (14**2 + 4**2) - (14 * 8 + 4 * 1) ** 2 / (8**2 + 1**2)
    expected = {
        "gossip/consensus_distance": math.sqrt(2),
        "consensus/local_loss_min": (1 + 16) / 4,
        "consensus/local_loss_mean": (1 + 16 + 81) / 8,
        "consensus/local_loss_max": 81 / 4,
        "consensus/loss_of_mean": (16 + 1) / 4,
        "consensus/effective_lr": 0.5 * share,
        "consensus/effective_lr_share": share,
        "consensus/noise_strength": 0.5**2 * across,
        "consensus/gradient_agreement": 1,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
