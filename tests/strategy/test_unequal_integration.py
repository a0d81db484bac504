"""Super-learners of two learners and of four in one job, as real processes.

One launch of six learners makes all trainings; the tests look at what came of them.
"""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_adpsgd import HADPSGDFabricStrategy, HADPSGDStrategy
from lightning_adpsgd.topology.partition import Partition
from tests.helpers import PATIENCE, PROGRAM_S
from tests.learners import Rows, Trajectory, learners, loader, trainer_of, values
from tests.sharded import (
    LR,
    Run,
    Transformer,
    held,
    needs_fsdp2_on_cpus,
    sequences,
)
from tests.strategy import fabric_learners

pytestmark = needs_fsdp2_on_cpus

SIZES = (2, 4)
NUM = sum(SIZES)
NUM_SEQUENCES = 4 * NUM


class Saves(pl.Callback):
    """Writes a checkpoint at the end of the first epoch, if it has a path for one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.path is not None and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def strategy(
    inside: Any, communication: Any, sizes: Any = SIZES, **dials: Any
) -> HADPSGDStrategy:
    options = {"inside": inside, "timeout": PATIENCE, **dials}
    return HADPSGDStrategy("complete", communication, sizes, **options)


def fit(
    rank: int,
    strategy: Any,
    lr: float = LR,
    save: Path | None = None,
    resume: Path | None = None,
    max_epochs: int = 1,
) -> Run:
    module, trajectory = Transformer(depth=1, seed=rank // 2), Trajectory(held)
    module.lr = lr
    arguments = {"callbacks": [trajectory, Saves(save)], "max_epochs": max_epochs}
    trainer = trainer_of(strategy, NUM, **arguments)
    training, validation = (sequences(n, rank, NUM) for n in (NUM_SEQUENCES, 2 * NUM))
    trainer.fit(module, training, validation, ckpt_path=resume)
    return Run.of_shards(trainer, module, trajectory)


KINDS = ("ddp", "model_parallel")
OTHER_SIZES = (1, 3, 2)


def program(folder: Path, rank: int) -> dict[Any, Any]:
    runs: dict[Any, Any] = {"fabric": with_fabric(rank)}
    for kind in KINDS:
        path, whole = folder / f"{kind}.ckpt", kind == "ddp"
        half = partial(strategy, kind, "sync", mixing_gain=0.5, save_learners=whole)
        runs["half", kind] = fit(rank, half(), save=path, max_epochs=2)
        other = half(OTHER_SIZES)
        runs["resumed", kind] = fit(rank, other, resume=path, max_epochs=2)
        gossip = strategy(kind, "async", cpu_share=1.0)
        runs["async", kind] = fit(rank, gossip, LR / 5, max_epochs=2)
        if whole:
            runs["exact"] = fit(rank, half(), resume=path, max_epochs=2)
    return runs


def with_fabric(rank: int) -> Tensor:
    """Two steps of a module whose gradient is the mean row of its batch."""
    options = {"super_learner_size": SIZES, "timeout": PATIENCE}
    chosen = HADPSGDFabricStrategy("complete", "sync", **options)
    fabric, module = fabric_learners.launched(chosen, NUM), fabric_learners.Slope()
    model, optimizer = fabric.setup(module, fabric_learners.sgd(module))
    rows = loader(2 * NUM, rank, NUM)
    fabric_learners.train(fabric, model, optimizer, rows)
    chosen.finish()
    return module.weight.detach()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("unequal")
    return values(learners(NUM, partial(program, folder), 2 * PROGRAM_S))


def assert_same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def of_matrix() -> Tensor:
    """Weights of both super-learners after each step: SGD of each, and T of half gain.

    Returns:
        Tensor [steps, super-learners, weights].
    """
    modules = [Transformer(depth=1) for _ in SIZES]
    for module in modules:
        module.configure_model()
    optimizers = [module.configure_optimizers() for module in modules]
    mixing = torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64)
    batches = [list(sequences(NUM_SEQUENCES, rank, NUM)) for rank in range(NUM)]
    steps = []
    for of_step in [*zip(*batches, strict=True)] * 2:
        of_learners = zip(Partition(SIZES).all_ranks, modules, optimizers, strict=True)
        for ranks, module, optimizer in of_learners:
            optimizer.zero_grad()
            losses = [module.loss(of_step[rank]) for rank in ranks]
            torch.stack(losses).mean().backward()
            optimizer.step()
        vectors = [nn.utils.parameters_to_vector(m.parameters()) for m in modules]
        steps.append(mixing.T @ torch.stack(vectors).detach())
        for module, mixed in zip(modules, steps[-1], strict=True):
            nn.utils.vector_to_parameters(mixed.clone(), module.parameters())
    return torch.stack(steps)


def test_two_learners_and_four_make_the_steps_of_the_matrix(results: Any) -> None:
    expected = of_matrix()
    for rank, runs in enumerate(results):
        own = expected[:, Partition(SIZES).super_learner(rank)]
        torch.testing.assert_close(runs["half", "ddp"].steps, own, atol=1e-9, rtol=0)


def test_in_a_complete_average_each_super_learner_counts_once(results: Any) -> None:
    rows, partition = Rows(2 * NUM).rows, Partition(SIZES)
    shares = torch.tensor([partition.weight(rank) / NUM for rank in range(NUM)] * 2)
    expected = -fabric_learners.LR * (shares[:, None] * rows).sum(0)
    for runs in results:
        assert_same(runs["fabric"], expected)


def test_sharded_learners_do_what_whole_ones_do(results: Any) -> None:
    for runs in results:
        whole, shards = (runs["half", kind] for kind in KINDS)
        assert_same(shards.steps, whole.steps)
        assert_same(shards.end, whole.end)
        assert shards.metrics == pytest.approx(whole.metrics)
        assert shards.distance == pytest.approx(whole.distance)


def test_the_runs_above_have_moved_apart(results: Any) -> None:
    """Otherwise any mixing would pass."""
    one, other = (results[rank]["half", "ddp"] for rank in (1, 2))
    assert (one.steps - other.steps).abs().max() > 1e-3
    assert torch.equal(one.end, other.end)


def test_the_distance_is_over_super_learners(results: Any) -> None:
    """Before the last average, each weighs as much as the other."""
    runs = [results[rank]["half", "ddp"] for rank in (0, NUM - 1)]
    last = [run.steps[-1] for run in runs]
    half = (last[0] - last[1]).norm() / 2
    assert runs[0].distance == pytest.approx(float(half))
    assert_same(runs[0].end, (last[0] + last[1]) / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_asynchronous_learners_exchange_and_end_in_one_mean(
    results: Any, kind: str
) -> None:
    first = results[0]["async", kind]
    for runs in results:
        assert torch.equal(runs["async", kind].end, first.end)
        assert runs["async", kind].statistics.exchanges > 0
        assert runs["async", kind].statistics.refused == 0
    assert first.end.isfinite().all()


def test_each_learner_sends_what_it_owns_alone(results: Any) -> None:
    """A learner of the small one owns twice what one of the large one does."""
    sent = [runs["half", "ddp"].statistics.bytes_sent for runs in results]
    assert sent[:2] == [2 * sent[2]] * 2
    assert sent[2:] == [sent[2]] * 4


def test_a_checkpoint_is_resumed_with_other_sizes(results: Any) -> None:
    """All begin with the mean, and the sharded ones do what whole ones do."""
    for runs in results:
        whole, shards = (runs["resumed", kind] for kind in KINDS)
        assert len(whole.steps) == len(runs["half", "ddp"].steps) // 2
        assert_same(shards.steps, whole.steps)


def test_each_learner_goes_on_exactly_from_what_was_saved_of_it(results: Any) -> None:
    for runs in results:
        steps = runs["half", "ddp"].steps
        assert_same(runs["exact"].steps, steps[len(steps) // 2 :])
