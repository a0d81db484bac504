"""The virtual cluster on modules, data and clusters of all kinds."""

import csv
import itertools
import math
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import lightning_adpsgd
from lightning_adpsgd.dials import ReadyPairs
from lightning_adpsgd.gossip.codecs import INT4
from lightning_adpsgd.virtual.clock import Compute, Link
from lightning_adpsgd.virtual.cluster import VirtualCluster
from lightning_adpsgd.virtual.report import Point, Report
from tests.helpers import topologies_of
from tests.learners import trainer_of

Batch = tuple[Tensor, Tensor]
TEACHER = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def batches(seed: int, size: int = 8) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.randn(size, 6, generator=generator)
        yield inputs, (inputs @ TEACHER).argmax(1)


def batches_of(learner: int) -> Iterator[Batch]:
    return batches(1 + learner)


def held_out() -> list[Batch]:
    return list(itertools.islice(batches(12345, 64), 4))


def classify(module: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def perceptron(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), *more, nn.ReLU(), nn.Linear(16, 3))


def cluster(size: int = 4, module: nn.Module | None = None, **given: Any) -> Any:
    settings: dict[str, Any] = {
        "loss": classify,
        "optimizer": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    }
    return VirtualCluster(module or perceptron(), size, **{**settings, **given})


UNEVEN: dict[str, Any] = {
    "compute": Compute(1.0, spread=0.3, slow={1: 4.0}),
    "link": Link(bandwidth=2000.0, latency=0.05),
}
MODES: list[dict[str, Any]] = [
    {"communication": "sync"},
    {"communication": "sync", "order": "average_then_step"},
    {"communication": "delay_by_one"},
    {"communication": "async"},
    {"communication": "async", "order": "average_then_step"},
    {"communication": "ready_pairs"},
]


# --- the same seed, the same run


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_the_same_seed_gives_the_same_run_to_the_last_bit(mode: Any, size: int) -> None:
    def run(seed: int) -> tuple[Report, list[Tensor]]:
        virtual = cluster(
            5,
            perceptron(nn.Dropout(0.2)),
            super_learner_size=size,
            topology="random_ring",
            seed=seed,
            **UNEVEN,
            **mode,
        )
        torch.manual_seed(torch.seed())  # what was drawn before makes no difference
        report = virtual.fit(
            batches_of,
            400,
            evaluate=held_out(),
            every_samples=100,
            local_losses=True,
        )
        return report, virtual.weights()

    (first, weights), (second, again) = run(3), run(3)
    assert all(map(torch.equal, weights, again))
    # Of numbers, for a NaN is equal to none.
    assert str([p.__dict__ | {"wall_seconds": 0} for p in first.points]) == str(
        [p.__dict__ | {"wall_seconds": 0} for p in second.points]
    )
    assert (first.totals, first.steps) == (second.totals, second.steps)
    assert not torch.equal(run(4)[1][0], weights[0])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_looking_more_often_changes_nothing(mode: Any) -> None:
    rarely, often = (cluster(3, **UNEVEN, **mode) for _ in range(2))
    rarely.fit(batches_of, 480, every_samples=480)
    often.fit(batches_of, 480, every_samples=50, evaluate=held_out())
    assert torch.equal(rarely.weights()[0], often.weights()[0])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_to_go_on_is_one_longer_run(mode: Any) -> None:
    whole, halves = (
        cluster(3, perceptron(nn.Dropout(0.3)), **UNEVEN, **mode) for _ in range(2)
    )
    whole.fit(batches_of, 480)
    halves.fit(batches_of, 240)
    torch.rand(3)
    report = halves.fit(batches_of, 480)
    assert torch.equal(whole.weights()[0], halves.weights()[0])
    assert report.samples == 480
    assert report.points[0].samples == 240


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_step_that_ctrl_c_has_ended_is_made_again(mode: Any) -> None:
    """No super-learner is a step behind the others, and no average is lost."""
    calls = itertools.count()

    def interrupted(module: nn.Module, batch: Batch) -> Tensor:
        if next(calls) == 10:
            raise KeyboardInterrupt
        return classify(module, batch)

    def same(learner: int) -> Iterator[Batch]:
        return itertools.repeat(next(batches_of(learner)))

    whole, halves = (
        cluster(3, loss=loss, **UNEVEN, **mode) for loss in (classify, interrupted)
    )
    whole.fit(same, 160)
    with pytest.raises(KeyboardInterrupt):
        halves.fit(same, 160)
    own = [halves.learners.shown(index)[0] for index in range(3)]
    weights = torch.cat([weight.flatten() for weight in halves.module.parameters()])
    torch.testing.assert_close(weights, torch.stack(own).mean(0))
    assert halves.fit(same, 160).steps == whole.learners.steps
    assert torch.equal(whole.weights()[0], halves.weights()[0])


@pytest.mark.parametrize(
    ("place", "mode"),
    [
        ("virtual.timeline._averaged_at", {"communication": "sync"}),
        ("mixing.super_learner.ShardGather._share_all", {"super_learner_size": 2}),
    ],
)
def test_a_cluster_goes_on_after_an_error_between_steps(
    monkeypatch: pytest.MonkeyPatch, place: str, mode: Any
) -> None:
    """Ctrl-C may come anywhere."""

    def interrupted(*_: Any) -> None:
        raise ZeroDivisionError

    virtual = cluster(3, **mode)
    with monkeypatch.context() as patch:
        patch.setattr(f"lightning_adpsgd.{place}", interrupted)
        with pytest.raises(ZeroDivisionError):
            virtual.fit(batches_of, 160)
    assert virtual.fit(batches_of, 160).samples >= 160


def test_what_goes_on_after_ctrl_c_draws_no_random_numbers_again() -> None:
    drawn = list[float]()

    def interrupted(module: nn.Module, batch: Batch) -> Tensor:
        drawn.append(torch.rand(()).item())
        if len(drawn) == 10:
            raise KeyboardInterrupt
        return classify(module, batch)

    virtual = cluster(3, loss=interrupted)
    with pytest.raises(KeyboardInterrupt):
        virtual.fit(batches_of, 160)
    virtual.fit(batches_of, 160)
    assert len({*drawn}) == len(drawn) == 21


def test_an_error_is_not_hidden_by_one_of_the_mean_that_follows_it() -> None:
    def fails() -> None:
        raise RuntimeError("out of memory")

    def interrupted(module: nn.Module, batch: Batch) -> Tensor:
        virtual.learners.consensus = fails
        raise KeyboardInterrupt

    virtual = cluster(3, loss=interrupted)
    with pytest.raises(KeyboardInterrupt):
        virtual.fit(batches_of, 160)


def test_the_common_generator_is_left_as_it_was() -> None:
    virtual = cluster(2, perceptron(nn.Dropout(0.5)))
    state = torch.get_rng_state()
    virtual.fit(batches_of, 100)
    assert torch.equal(torch.get_rng_state(), state)


# --- it learns, and says what it did


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_mode_learns(mode: Any) -> None:
    report = cluster(4, **mode).fit(batches_of, 3000, evaluate=held_out())
    first, last = report.points[0], report.points[-1]
    assert first.held_out_loss == pytest.approx(math.log(3), rel=0.2)
    assert last.held_out_loss < 0.3
    assert last.loss < 0.5
    assert math.isnan(first.loss)
    assert not report.diverged


@pytest.mark.parametrize(("topology", "size"), topologies_of(3, 32))
def test_any_topology_runs_asynchronously_at_odd_and_large_sizes(
    topology: str, size: int
) -> None:
    link, compute = Link(bandwidth=1e5, latency=0.05), UNEVEN["compute"]
    virtual = cluster(size, topology=topology, link=link, compute=compute)
    report = virtual.fit(batches_of, 8 * 6 * size)
    assert report.totals.exchanges > size
    assert math.isfinite(report.points[-1].loss)


def test_the_curve_has_a_point_at_the_start_and_then_every_so_many_samples() -> None:
    seen = []
    report = cluster(2).fit(
        batches_of, 100, every_samples=40, evaluate=lambda m: 7.0, on_point=seen.append
    )
    assert report.column("samples") == [0, 40, 80, 104]
    assert report.column("held_out_loss") == [7.0] * 4
    assert report.points == seen
    assert report.column("seconds") == [0.0, 3.0, 5.0, 7.0]
    assert report.steps == [7, 6]
    assert report.samples_per_second == 104 / 7


def test_points_of_a_lockstep_come_between_rounds() -> None:
    report = cluster(4, communication="sync").fit(batches_of, 100, every_samples=40)
    assert report.column("samples") == [0, 64, 128]
    assert report.column("steps") == [0, 2, 4]


def test_local_losses_are_of_each_super_learners_own_weights() -> None:
    virtual = cluster(3, **UNEVEN)
    report = virtual.fit(batches_of, 900, evaluate=held_out(), local_losses=True)
    last, own = report.points[-1], []
    module = perceptron()
    for row in virtual.weights()[0]:
        nn.utils.vector_to_parameters(row, module.parameters())
        losses = [classify(module, batch).item() for batch in held_out()]
        own.append(sum(losses) / len(losses))
    assert last.local_min == pytest.approx(min(own))
    assert last.local_mean == pytest.approx(sum(own) / 3)
    assert last.local_max == pytest.approx(max(own))


def test_the_module_ends_as_the_consensus_model() -> None:
    virtual = cluster(4, communication="sync")
    report = virtual.fit(batches_of, 640)
    mean = nn.utils.parameters_to_vector(virtual.module.parameters())
    torch.testing.assert_close(mean, virtual.weights()[0].mean(0))
    distance = (virtual.weights()[0] - mean).square().sum(1).mean().sqrt()
    last = report.points[-1]
    assert last.consensus_distance == pytest.approx(distance.item(), rel=1e-5)
    assert last.relative_distance == pytest.approx(
        (distance / mean.norm()).item(), rel=1e-5
    )


class Long(nn.Module):
    """More weights than an exchange or a mean works on at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(300_001, dtype=torch.float64))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_mean_of_long_rows_is_that_of_what_peers_see(mode: Any) -> None:
    def scales(learner: int) -> Iterator[Tensor]:
        return itertools.repeat(torch.tensor([learner + 1.0]))

    module = Long()
    virtual = cluster(
        3,
        module,
        loss=lambda module, scale: (module.weight.sin() * scale).sum(),
        communication=mode,
        compute=Compute(1.0, slow={1: 4.0}),
    )
    virtual.fit(scales, 12)
    seen = torch.stack([virtual.learners.shown(i)[0] for i in range(3)])
    assert torch.equal(seen, virtual.weights()[0]) == (mode == "sync")
    found, mean = virtual.learners.consensus(), seen.mean(0)
    torch.testing.assert_close(module.weight.detach(), mean, atol=1e-15, rtol=1e-14)
    distance = (seen - mean).square().sum(1).mean().sqrt()
    assert found.distance == pytest.approx(distance.item(), rel=1e-12)
    assert found.relative_distance == pytest.approx(
        (distance / mean.norm()).item(), rel=1e-12
    )


def test_a_distance_too_large_for_single_precision_is_told() -> None:
    virtual = cluster(2)
    virtual.weights()[0][0] += 1e25
    num_weights = virtual.weights()[0].shape[1]
    expected = 0.5e25 * num_weights**0.5
    assert virtual.learners.consensus().distance == pytest.approx(expected, rel=1e-5)


def test_a_report_is_written_as_a_table(tmp_path: Path) -> None:
    report = cluster(2).fit(batches_of, 100)
    path = report.to_csv(tmp_path / "runs" / "curve.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows[1:]] == report.column("loss")[1:]
    assert list(rows[0]) == [field.name for field in fields(Point)]
    assert [file.name for file in path.parent.iterdir()] == ["curve.csv"]


def test_bytes_are_those_of_the_messages() -> None:
    num_weights = 6 * 16 + 16 + 16 * 3 + 3
    full, half = (cluster(4, wire_dtype=d) for d in (None, torch.bfloat16))
    lockstep = cluster(4, communication="sync")
    for virtual, width in ((full, 4), (half, 2), (lockstep, 8)):  # two neighbours
        totals = virtual.fit(batches_of, 640).totals
        assert totals.bytes_sent == totals.exchanges * width * num_weights


# --- what a straggler does


def test_a_straggler_delays_all_in_lockstep_and_only_itself_in_async() -> None:
    slow: dict[str, Any] = {"compute": Compute(1.0, slow={2: 10.0})}
    reports = {
        mode: cluster(4, communication=mode, **slow).fit(batches_of, 3200)
        for mode in ("sync", "async")
    }
    assert reports["sync"].samples_per_second == pytest.approx(4 * 8 / 10)
    # Three learners and a tenth of one.
    assert reports["async"].samples_per_second == pytest.approx(3.1 * 8, rel=0.02)
    assert reports["async"].steps[2] == pytest.approx(400 / 31, abs=1)
    # What the slow one is given waits ten times as long for its boundary.
    assert max(reports["async"].totals.staleness) == 1
    assert reports["sync"].totals.staleness == {0: 4 * 100}


def test_slow_links_make_exchanges_stale() -> None:
    def staleness(bandwidth: float) -> dict[int, int]:
        virtual = cluster(4, link=Link(bandwidth))
        return virtual.fit(batches_of, 1600).totals.staleness

    message = 4 * (6 * 16 + 16 + 16 * 3 + 3)
    assert set(staleness(math.inf)) == {1}
    assert min(staleness(message / 5)) >= 5


# --- failures and joins


# --- modules of all kinds


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(2, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.output = nn.Linear(24, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output(self.lstm(inputs.view(-1, 3, 2))[0][:, -1])


def test_an_lstm_learns() -> None:
    virtual = cluster(3, Recurrent(), optimizer=lambda p: torch.optim.Adam(p, 0.03))
    report = virtual.fit(batches_of, 2000, evaluate=held_out())
    assert report.points[-1].held_out_loss < 0.5


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_statistics_of_batch_norm_are_averaged_and_counts_are_not(mode: Any) -> None:
    norm = nn.BatchNorm1d(16)
    virtual = cluster(3, perceptron(norm), topology="complete", **mode)
    report = virtual.fit(batches_of, 1500, evaluate=held_out())
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == virtual.learners.steps[0]
    assert norm.running_mean is not None
    held = []
    for i in range(3):
        virtual.learners.hold(i)
        held.append(norm.running_mean.clone())
    virtual.learners.hold_consensus()
    torch.testing.assert_close(
        norm.running_mean, torch.stack(held).mean(0), atol=0.05, rtol=0.05
    )
    assert report.points[-1].held_out_loss < 0.5


def test_in_a_super_learner_batch_norm_keeps_the_first_learners_statistics() -> None:
    norm = nn.BatchNorm1d(6, momentum=1.0)
    virtual = cluster(1, nn.Sequential(norm, nn.Linear(6, 3)), super_learner_size=3)
    virtual.fit(batches_of, 24)
    virtual.learners.hold(0)
    inputs, _ = next(batches_of(0))
    torch.testing.assert_close(norm.running_mean, inputs.mean(0))


class Counts(nn.Module):
    """Assigns its count of batches, which others change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.count = self.count + 1
        return self.net(inputs)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_assigned_count_is_of_each_super_learner(mode: Any, size: int) -> None:
    virtual = cluster(3, Counts(), super_learner_size=size, communication=mode)
    report = virtual.fit(batches_of, 240 * size, evaluate=held_out())
    assert report.steps == [10] * 3
    assert virtual.module.count.item() == 10


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_trained_module_has_memory_of_its_own_between_two_fits(mode: Any) -> None:
    trained = [cluster(3, Counts(), communication=mode) for _ in range(2)]
    for virtual in trained:
        virtual.fit(batches_of, 240)
    mean = trained[0].weights()[0].mean(0)
    for one in trained[0].module.state_dict().values():
        assert one.untyped_storage().nbytes() == one.nbytes
    torch.testing.assert_close(
        nn.utils.parameters_to_vector(trained[0].module.parameters()), mean
    )
    # What a program does with it, with an assigned count, changes no super-learner.
    trained[0].module(next(batches_of(0))[0])
    with torch.no_grad():
        trained[0].module.net[0].weight.fill_(9.0)
    for virtual in trained:
        virtual.fit(batches_of, 480)
    assert torch.equal(*(virtual.weights()[0] for virtual in trained))
    assert [virtual.module.count.item() for virtual in trained] == [20, 20]


def test_who_is_told_of_a_point_finds_the_consensus_in_memory_of_its_own() -> None:
    def look(point: Any) -> None:
        mean, weights = virtual.weights()[0].mean(0), [*virtual.module.parameters()]
        torch.testing.assert_close(nn.utils.parameters_to_vector(weights), mean)
        for weight in weights:
            assert weight.untyped_storage().nbytes() == weight.nbytes

    virtual = cluster(3, communication="sync")
    score: Any = {"evaluate": held_out(), "local_losses": True}
    virtual.fit(batches_of, 240, on_point=look, **score)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.output = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output(self.second(self.first(inputs).relu()).relu())


def test_tied_weights_stay_tied() -> None:
    virtual = cluster(3, Tied(), **UNEVEN)
    report = virtual.fit(batches_of, 2000, evaluate=held_out())
    assert virtual.module.second.weight is virtual.module.first.weight
    assert virtual.weights()[0].shape == (3, 36 + 6 + 6 + 21)
    assert report.points[-1].held_out_loss < 0.7


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_weights_that_are_frozen_in_a_pause_stay(mode: Any) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1)

    virtual = cluster(4, communication=mode, optimizer=sgd, **UNEVEN)
    virtual.fit(batches_of, 300)
    frozen = virtual.module[0].requires_grad_(False)
    before, trained = frozen.weight.clone(), virtual.module[2].weight.clone()
    virtual.module.zero_grad()
    virtual.fit(batches_of, 900)
    torch.testing.assert_close(frozen.weight, before, atol=1e-6, rtol=0)
    assert not torch.allclose(virtual.module[2].weight, trained, atol=1e-3)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_half_precision_is_averaged_in_single(mode: Any) -> None:
    def loss(module: nn.Module, batch: Batch) -> Tensor:
        outputs = module(batch[0].bfloat16()).float()
        return nn.functional.cross_entropy(outputs, batch[1])

    virtual = cluster(3, perceptron().bfloat16(), loss=loss, communication=mode)
    report = virtual.fit(batches_of, 2000, evaluate=held_out())
    assert report.points[-1].held_out_loss < 0.6


@cache
def loss_with(wire_dtype: torch.dtype | None) -> float:
    virtual = cluster(4, wire_dtype=wire_dtype, compute=Compute(1.0, spread=0.2))
    return virtual.fit(batches_of, 2000, evaluate=held_out()).points[-1].held_out_loss


@pytest.mark.parametrize(
    "wire_dtype", [torch.bfloat16, torch.float16, torch.int8, INT4]
)
def test_coarse_messages_cost_little_loss(wire_dtype: torch.dtype) -> None:
    assert loss_with(wire_dtype) < 1.3 * loss_with(None) + 0.05


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_run_that_diverges_ends_early_and_says_so(mode: Any) -> None:
    virtual = cluster(4, optimizer=lambda p: torch.optim.SGD(p, 1e20), **mode)
    report = virtual.fit(batches_of, 10**6, every_samples=500, evaluate=held_out())
    assert "the training loss was nan after" in report.diverged
    assert report.samples < 10_000
    assert math.isnan(report.points[-1].loss)


def test_a_diverged_super_learner_does_not_take_the_others_with_it() -> None:
    def poisoned(learner: int) -> Iterator[Batch]:
        for inputs, classes in batches_of(learner):
            yield inputs * (math.nan if learner == 1 else 1.0), classes

    virtual = cluster(4)
    report = virtual.fit(poisoned, 400, every_samples=100)
    assert report.diverged
    assert report.totals.refused > 0
    finite = virtual.weights()[0].isfinite().all(1)
    assert finite.tolist() == [True, False, True, True]
    assert math.isfinite(report.points[-1].consensus_distance)


def test_lbfgs_averages_once_a_step() -> None:
    virtual = cluster(
        2,
        communication="sync",
        order="average_then_step",
        optimizer=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
    )
    report = virtual.fit(batches_of, 640)
    assert report.totals.merges == 2 * 40


class Counting(nn.Module):
    """Counts its forwards in a buffer, by which it multiplies its weight."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.weight, self.assigns = nn.Parameter(torch.zeros(())), assigns
        self.num: Tensor
        self.register_buffer("num", torch.zeros(()))

    @override
    def forward(self) -> Tensor:
        if self.assigns:
            self.num = self.num + 1
        else:
            self.num += 1
        return self.weight * self.num


@pytest.mark.parametrize("assigns", [False, True])
def test_learners_begin_a_step_with_the_same_buffers(assigns: bool) -> None:
    """As in DDP, which broadcasts those of the first learner before a forward."""
    module = Counting(assigns)
    settings: dict[str, Any] = {
        "loss": lambda module, batch: module(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, 1.0),
        "samples_in": lambda batch: 1,
    }
    whole = VirtualCluster(module, 1, 4, **settings)
    for step, weight in enumerate((-1.0, -3.0), 1):
        whole.fit(lambda learner: [None] * 9, 4 * step)
        assert (module.weight.item(), module.num.item()) == (weight, step)


def test_gradients_are_clipped_by_their_norm() -> None:
    virtual = cluster(
        1, optimizer=lambda p: torch.optim.SGD(p, 1.0), gradient_clip=1e-3
    )
    before = virtual.weights()[0].clone()
    virtual.fit(batches_of, 8)
    moved = (virtual.weights()[0] - before).norm()
    assert moved.item() == pytest.approx(1e-3, rel=1e-3)


def test_the_norm_is_of_the_weights_that_the_optimizer_has() -> None:
    weights = []
    for is_frozen in (True, False):
        module = perceptron()
        module[0].requires_grad_(not is_frozen)
        head = module[2].parameters()
        virtual = cluster(
            2,
            module,
            optimizer=lambda _, head=[*head]: torch.optim.SGD(head, 0.1),
            gradient_clip=0.1,
        )
        virtual.fit(batches_of, 80)
        weights.append(virtual.weights()[0].clone())
    assert torch.equal(*weights)


# --- LightningModules and data sets


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = classify(self.net, batch)
        self.log("train_loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
        return [optimizer], [scheduler]


def data_set(num_samples: int = 96) -> TensorDataset:
    return TensorDataset(*next(batches(5, num_samples)))


def test_a_lightning_module_trains_on_the_shares_of_its_loader() -> None:
    loader = DataLoader(data_set(), batch_size=8, shuffle=True)
    virtual = VirtualCluster(Lit(), 4, topology="ring", communication="sync")
    report = virtual.fit(loader, 96 * 3)
    assert report.steps == [9] * 4
    # Three steps to an epoch, and the first epoch that has ended halves the rate.
    assert report.points[-1].learning_rate == pytest.approx(0.2 * 0.5**2)


class EverySecondStep(Lit):
    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
        each = {"scheduler": scheduler, "interval": "step", "frequency": 2}
        return [optimizer], [each]


def test_steps_between_those_of_a_scheduler_are_counted_within_the_epoch() -> None:
    virtual = VirtualCluster(EverySecondStep(), 4, communication="sync")
    report = virtual.fit(data_set(), 96 * 3, local_batch_size=8)
    # Three steps to an epoch: the second of each halves the rate.
    assert report.points[-1].learning_rate == pytest.approx(0.2 * 0.5**3)


class Noting(Lit):
    """Writes down `batch_idx` and learning rate of each step."""

    def __init__(self, **schedule: Any) -> None:
        super().__init__()
        self.schedule, self.noted = schedule, list[tuple[int, float]]()

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.noted.append((batch_idx, self.optimizer.param_groups[0]["lr"]))
        return super().training_step(batch, batch_idx)

    @override
    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.SGD(self.parameters(), 0.2)
        halving = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.5**n)
        return [self.optimizer], [{"scheduler": halving, **self.schedule}]


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("frequency", [1, 2])
def test_batches_and_rates_are_those_of_lightning(
    interval: str, frequency: int, tmp_path: Path
) -> None:
    virtual, lightnings = (
        Noting(interval=interval, frequency=frequency) for _ in range(2)
    )
    loader = DataLoader(data_set(), batch_size=32)
    VirtualCluster(virtual, 1).fit(loader, 96 * 4)
    trainer = trainer_of("auto", 1, max_epochs=4, default_root_dir=tmp_path)
    trainer.fit(lightnings, loader)
    assert virtual.noted == lightnings.noted


def test_a_learning_rate_schedule_counts_the_samples_of_all() -> None:
    virtual = cluster(2)
    report = virtual.fit(
        batches_of, 96, every_samples=16, lr_schedule=lambda samples: samples / 100
    )
    # Of the step that brought the last samples: 8 before it is counted.
    assert report.column("learning_rate")[1:] == pytest.approx(
        [0.05 * (n - 8) / 100 for n in report.column("samples")[1:]]
    )


def test_the_class_is_public() -> None:
    assert lightning_adpsgd.VirtualCluster is VirtualCluster


def test_numbers_of_numpy_are_the_numbers_that_they_are() -> None:
    numpy = pytest.importorskip("numpy")
    given = {"gossip_every": numpy.int32(2), "mixing_gain": numpy.float32(0.5)}
    sizes = {"size": numpy.int64(3), "super_learner_size": numpy.int64(2)}
    virtual = cluster(**sizes, **given, communication="sync")
    assert virtual.fit(batches_of, 96).steps == [2, 2, 2]


# --- refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "`num_super_learners` must be at least 1, got 0"),
        ({"super_learner_size": 0}, "`super_learner_size` must be at least 1, got 0"),
        ({"super_learner_size": "node"}, "`super_learner_size` must be one number"),
        ({"mixing_gain": 2.0}, r"`mixing_gain` must be in \(0, 1\], got 2.0"),
        ({"communication": "later"}, "`communication` must be one of"),
        ({"size": 3, "topology": "hypercube"}, "power of two super-learners, got 3"),
        ({"communication": "sync", "wire_dtype": torch.int8}, "`wire_dtype` applies"),
        ({"gradient_clip": 0.0}, "`gradient_clip` must be positive and finite, got 0"),
        ({"loss": None}, "`loss` and `optimizer` are needed with a plain module"),
    ],
    ids=str,
)
def test_impossible_clusters_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cluster(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 2.5}, "`num_super_learners` must be a whole number, got 2.5 of type"),
        ({"size": True}, "`num_super_learners` must be a whole number, got True"),
        ({"gradient_clip": "1"}, "`gradient_clip` must be a number, got '1' of type"),
    ],
    ids=str,
)
def test_a_wrong_type_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        cluster(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("islands", "tcp://localhost:1234/x"),
        ("inside", "model_parallel"),
        ("work_sharing", True),
        ("after_evaluation", "adopt"),
        ("cpu_share", 0.1),
        ("timeout", 1000),
        ("foo", 1),
    ],
)
def test_what_is_no_option_here_is_refused(name: str, value: Any) -> None:
    message = (
        f"`{name}` is not an option of a virtual cluster, got {value!r}; its options"
    )
    with pytest.raises(TypeError, match=message):
        cluster(**{name: value})


@pytest.mark.parametrize("name", ["compute", "link", "inner_link"])
@pytest.mark.parametrize("value", [1.0, 0, {"seconds": 1.0}])
def test_times_and_links_are_objects_of_the_clock(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"`{name}` must be a `.*clock\.\w+`, got "):
        cluster(**{name: value})


def test_a_longest_wait_is_in_simulated_seconds_and_has_no_other_bound() -> None:
    pairs: dict[str, Any] = {"compute": Compute(1200.0, slow={1: 10.0})}
    totals = (
        cluster(2, communication=ReadyPairs(400), **pairs).fit(batches_of, 24).totals
    )
    assert totals.skipped > 0
    assert totals.partner_seconds == 400 * totals.skipped
    for wait in (0, math.inf, math.nan):
        with pytest.raises(
            ValueError, match=f"must be positive and finite, got {wait}"
        ):
            cluster(2, communication=ReadyPairs(wait), **pairs)


@pytest.mark.parametrize(
    "data", [None, [], torch.zeros(8, 6), pl.LightningDataModule()], ids=type
)
def test_data_of_no_use_are_refused(data: Any) -> None:
    kind = type(data).__name__
    with pytest.raises(TypeError, match=f"got a {kind}; for example `TensorDataset"):
        cluster(2).fit(data, 80, local_batch_size=4)


def test_impossible_runs_are_refused() -> None:
    virtual = cluster(2)
    with pytest.raises(ValueError, match=r"`local_batch_size` must be None .*got 8"):
        virtual.fit(batches_of, 80, local_batch_size=8)
    virtual.fit(batches_of, 80)
    with pytest.raises(ValueError, match="more than the 80 that this cluster has seen"):
        virtual.fit(batches_of, 80)
    with pytest.raises(ValueError, match="`every_samples` must be positive"):
        virtual.fit(batches_of, 90, every_samples=-1)
    lit = VirtualCluster(Lit(), 2)
    with pytest.raises(ValueError, match="`lr_schedule` takes the place of the"):
        lit.fit(data_set(), 96, local_batch_size=8, lr_schedule=lambda n: 1.0)
