"""How much of the learning rate is left where learners disagree (arXiv 2112.01433).

    python -m recipes.batch_size.effective_rate

Trains the classifier of the sweep at the papers' rule, a rate in proportion to the
batch, and measures at each point of the curve

    alpha_e / alpha = (g_a . g) / |g|^2

g_a the mean of the gradients at the learners' own weights, g the gradient at their
mean, all over the same training samples. Where all weights are equal it is 1.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_adpsgd import VirtualCluster
from lightning_adpsgd.virtual.report import Point
from recipes.batch_size.settings import CLASSIFIER, Cell, Run, Setting, Settings
from recipes.batch_size.training import make_cluster, schedule_of
from recipes.batch_size.workloads import Samples, Workload, batches_of, classifier

ALGORITHMS = ("ssgd", "sdpsgd_random", "adpsgd_random")
STEPS = {4096: 4, 1024: 0}  # of the grid of rates, by batch: 4 and 1
_PROBED = 1024  # samples


class Shares(NamedTuple):
    """The effective rate of one run.

    Attributes:
        least: smallest share after the start.
        last: share at the end.
        loss: held-out loss at the end.
    """

    least: float
    last: float
    loss: float


def effective_share(cluster: VirtualCluster, workload: Workload) -> float:
    """alpha_e / alpha of a cluster whose consensus was just taken.

    Args:
        cluster: cluster whose module holds the consensus afterwards.
        workload: workload whose first training samples the gradients are taken over.
    """
    probe = (workload.train[0][:_PROBED], workload.train[1][:_PROBED])
    own = []
    for index in range(len(cluster.learners.steps)):
        cluster.learners.hold(index)
        own.append(_gradient(cluster.module, workload, probe))
    cluster.learners.hold_consensus()
    of_mean = _gradient(cluster.module, workload, probe)
    mean = torch.stack(own).mean(0)
    return float(mean @ of_mean / (of_mean @ of_mean))


def _gradient(module: nn.Module, workload: Workload, probe: Samples) -> Tensor:
    loss = workload.loss(module, probe)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]).double()


def shares_of(run: Run, workload: Workload, settings: Settings) -> Shares:
    """Trains once and looks at each point of the curve."""
    cluster, corpus = make_cluster(run, workload, settings), len(workload.train[0])
    samples, shares = corpus * settings.epochs, list[float]()

    def look(point: Point) -> None:
        shares.append(effective_share(cluster, workload))

    report = cluster.fit(
        batches_of(workload.train, run.cell.batch, cluster.num_learners, run.seed),
        samples,
        lr_schedule=schedule_of(run, corpus, settings).rate,
        evaluate=lambda model: float(workload.loss(model, workload.to_report)),
        every_samples=samples // settings.points,
        on_point=look,
    )
    return Shares(min(shares[1:]), shares[-1], report.points[-1].held_out_loss)


def table(workload: Workload, settings: Settings) -> str:
    """Mean [least, greatest] over the seeds, as Markdown."""
    lines = [
        "| batch | algorithm | least share | share at the end | held-out loss |",
        "| --- | --- | --- | --- | --- |",
    ]
    for batch, step in STEPS.items():
        for name in ALGORITHMS:
            runs = [
                Run(Cell(name, batch), Setting(step), seed)
                for seed in range(settings.seeds)
            ]
            found = [shares_of(run, workload, settings) for run in runs]
            figures = " | ".join(map(_spread, zip(*found, strict=True)))
            lines.append(f"| {batch} | {name} | {figures} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.3f} [{min(values):.3f}, {max(values):.3f}]"


def main() -> None:
    """Prints each line as it comes and then the table."""
    argparse.ArgumentParser(
        prog="python -m recipes.batch_size.effective_rate", description=table.__doc__
    ).parse_args()
    torch.set_num_threads(1)
    workload = classifier().cut(CLASSIFIER.largest_batch)
    print(table(workload, CLASSIFIER))


if __name__ == "__main__":
    main()
