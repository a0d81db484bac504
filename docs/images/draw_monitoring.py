"""Draws monitoring.png: `python docs/images/draw_monitoring.py [folder]`.

Trains a small classifier with four learners on this machine, with every callback and
two algorithms at three batch sizes (some minutes on two cores), and plots what
their CSV files hold: the figures that docs/monitoring.md explains. A folder that
already holds the runs is plotted as it is.
"""

import csv
import math
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_adpsgd.callbacks import (
    AllreduceWait,
    ConsensusMonitor,
    ConvergenceMonitor,
    GossipMonitor,
)
from lightning_adpsgd.callbacks.runs import read_runs

NUM_LEARNERS, NUM_CLASSES, EPOCHS = 4, 10, 8
LOCAL_BATCHES = (32, 128, 512)
SHOWN = 32  # the local batch of the plots of a single run
LR_PER_SAMPLE = 0.2 / 32
# Okabe and Ito's colours, which colour-blind readers can tell apart.
STYLES = {"ddp": ("#0072B2", "--", "s"), "adpsgd": ("#D55E00", "-", "o")}
GREEN, PURPLE = "#009E73", "#CC79A7"

Rows = list[dict[str, float]]


class Classifier(pl.LightningModule):
    """Learns the classes that another network of its shape gives to random points."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.net = network()
        self._lr = lr

    def loss(self, batch: Any) -> Tensor:
        """The mean cross-entropy."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self._lr)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)
    )


def points(seed: int, num: int) -> TensorDataset:
    torch.manual_seed(0)
    teacher = network()
    features = 3 * torch.randn(num, 20, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return TensorDataset(features, teacher(features).argmax(1))


def train(folder: Path, algorithm: str, local_batch: int) -> None:
    name = f"{algorithm}-{local_batch}"
    if (folder / f"{name}.run.csv").exists():
        return
    callbacks = [
        ConsensusMonitor(held_out=4, gradients=128),
        GossipMonitor(),
        ConvergenceMonitor(chance=math.log(NUM_CLASSES), runs=folder, name=name),
        AllreduceWait(),
    ]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_LEARNERS,
        strategy=f"{algorithm}_fork",
        max_epochs=EPOCHS,
        callbacks=callbacks,
        logger=CSVLogger(folder, name=name, version=""),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    pl.seed_everything(1)
    model = Classifier(LR_PER_SAMPLE * local_batch * NUM_LEARNERS)
    training = DataLoader(points(1, 32_768), batch_size=local_batch, shuffle=True)
    trainer.fit(model, training, DataLoader(points(2, 4096), batch_size=256))


def rows_of(folder: Path, algorithm: str, local_batch: int) -> Rows:
    with (folder / f"{algorithm}-{local_batch}" / "metrics.csv").open() as file:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


def column(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def plot_loss(axes: Axes, folder: Path) -> None:
    for algorithm, (colour, dash, marker) in STYLES.items():
        rows = rows_of(folder, algorithm, SHOWN)
        samples = column(rows, "convergence/global_samples")
        losses = column(rows, "convergence/held_out_loss")
        axes.plot(samples, losses, dash, color=colour, marker=marker, label=algorithm)
    axes.axhline(math.log(NUM_CLASSES), color="grey", linestyle=":", label="chance")
    axes.set(xlabel="samples of all learners", ylabel="held-out loss", ylim=(0, None))
    axes.set_title(f"convergence/held_out_loss, B = {SHOWN * NUM_LEARNERS}")


def plot_batches(axes: Axes, folder: Path) -> None:
    for algorithm, (colour, dash, marker) in STYLES.items():
        runs = [run for run in read_runs(folder) if run.algorithm == algorithm]
        runs.sort(key=lambda run: run.global_batch or 0)
        batches = [run.global_batch for run in runs]
        losses = [run.last_loss for run in runs]
        axes.plot(batches, losses, dash, color=colour, marker=marker, label=algorithm)
        for run in runs:
            if run.diverged:
                axes.plot(run.global_batch, run.last_loss, "x", color="black", ms=12)
    axes.set(xscale="log", xlabel="global batch B", ylabel="last held-out loss")
    batches = [NUM_LEARNERS * local_batch for local_batch in LOCAL_BATCHES]
    axes.set_xticks(batches, [str(batch) for batch in batches], minor=False)
    axes.minorticks_off()
    axes.set_ylim(0, None)
    axes.set_title("read_runs(folder); x: diverged")


def plot_local_losses(axes: Axes, folder: Path) -> None:
    rows = rows_of(folder, "adpsgd", SHOWN)
    epochs = range(1, EPOCHS + 1)
    low, high = (column(rows, f"consensus/local_loss_{end}") for end in ("min", "max"))
    mean = column(rows, "consensus/loss_of_mean")
    axes.fill_between(epochs, low, high, color=PURPLE, alpha=0.4, label="local models")
    axes.plot(epochs, mean, color=STYLES["adpsgd"][0], marker="o", label="their mean")
    axes.set(xlabel="epoch", ylabel="held-out loss", ylim=(0, None))
    axes.set_title("consensus/local_loss_min to _max")


def plot_rates(axes: Axes, folder: Path) -> None:
    for algorithm, (colour, dash, marker) in STYLES.items():
        rows = rows_of(folder, algorithm, SHOWN)
        share = column(rows, "consensus/effective_lr_share")
        epochs = range(1, len(share) + 1)
        axes.plot(epochs, share, dash, color=colour, marker=marker, label=algorithm)
    agreement = column(rows_of(folder, "adpsgd", SHOWN), "consensus/gradient_agreement")
    epochs = range(1, len(agreement) + 1)
    axes.plot(epochs, agreement, ":", color="grey", label="agreement (adpsgd)")
    axes.axhline(1, color="lightgrey", zorder=0)
    axes.set(xlabel="epoch", ylabel="share of the learning rate")
    axes.set_title("consensus/effective_lr_share")


def plot_staleness(axes: Axes, folder: Path) -> None:
    last = {k: v for row in rows_of(folder, "adpsgd", SHOWN) for k, v in row.items()}
    prefix = "gossip/staleness_"
    bins = {
        int(name.removeprefix(prefix)): count
        for name, count in last.items()
        if name.removeprefix(prefix).isdigit()
    }
    total = sum(bins.values())
    shares = [count / total for count in bins.values()]
    axes.bar(list(bins), shares, color=STYLES["adpsgd"][0])
    axes.set(xlabel="optimizer steps", ylabel="share of merged exchanges")
    axes.set_title("gossip/staleness_{steps}")


def draw(folder: Path, path: Path) -> None:
    figure = Figure(figsize=(12, 7), layout="constrained")
    plots = (
        plot_loss,
        plot_batches,
        plot_local_losses,
        plot_rates,
        plot_staleness,
    )
    *places, left_over = figure.subplots(2, 3).flat
    left_over.set_axis_off()
    for plot, axes in zip(plots, places, strict=True):
        plot(axes, folder)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(
        f"Four learners on one machine: what the callbacks wrote in {EPOCHS} epochs"
    )
    figure.savefig(path, dpi=80)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    for local_batch in LOCAL_BATCHES:
        for algorithm in STYLES:
            train(folder, algorithm, local_batch)
    draw(folder, Path(__file__).with_name("monitoring.png"))


if __name__ == "__main__":
    main()
