"""`Trainer(strategy="hadpsgd_virtual")` with a plain LightningModule."""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_adpsgd.callbacks import ConvergenceMonitor, GossipMonitor
from lightning_adpsgd.dials import ReadyPairs
from lightning_adpsgd.virtual.clock import Compute, Link
from lightning_adpsgd.virtual.cluster import VirtualCluster
from lightning_adpsgd.virtual.strategy import VirtualHADPSGDStrategy
from tests.learners import LR, Quadratic, Rows, loader

TEACHER = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def data(num: int, seed: int, shuffle: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num, 6, generator=generator)
    dataset = TensorDataset(inputs, (inputs @ TEACHER).argmax(1))
    return DataLoader(dataset, batch_size=8, shuffle=shuffle)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train_loss", loss := self.loss(batch))
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.02)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.999**n)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trainer_of(strategy: Any = "hadpsgd_virtual", **arguments: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    warnings.simplefilter("ignore")
    return pl.Trainer(
        accelerator="cpu", strategy=strategy, **{"devices": 1, **quiet, **arguments}
    )


def virtual(size: int = 4, *where: Any, **dials: Any) -> VirtualHADPSGDStrategy:
    return VirtualHADPSGDStrategy(size, *where, **dials)


def flat(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


class Watch(pl.Callback):
    """Whose turn each batch was, and the module's weights after its step."""

    def __init__(self) -> None:
        self.turns: list[int] = []
        self.weights: list[Tensor] = []

    @override
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.strategy = trainer.strategy

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.turns.append(trainer.strategy.learners.rows.held)
        self.weights.append(flat(pl_module).clone())


def test_the_name_trains_a_plain_module_and_validates_the_consensus() -> None:
    module, trainer = Classifier(), trainer_of(max_epochs=6)
    trainer.fit(module, data(480, 1, shuffle=True), data(160, 2))
    assert isinstance(trainer.strategy, VirtualHADPSGDStrategy)
    assert trainer.callback_metrics["val_loss"] < 0.5
    assert "train_loss" in trainer.callback_metrics
    # What was validated last is what training ended in.
    (again,) = trainer.validate(module, data(160, 2), verbose=False)
    assert again["val_loss"] == pytest.approx(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("order", ["step_then_average", "average_then_step"])
def test_lockstep_is_the_cluster_on_batches_dealt_round_robin(order: Any) -> None:
    watch, module = Watch(), Quadratic()
    strategy = virtual(4, 1, "ring", "sync", order=order)
    trainer_of(strategy, callbacks=[watch]).fit(module, loader(24))
    assert watch.turns == [0, 1, 2, 3] * 6
    cluster = VirtualCluster(Quadratic(), 4, 1, "ring", "sync", order=order)
    cluster.fit(lambda i: loader(24, i, 4), 24)
    expected = cluster.weights()[0].mean(0)
    torch.testing.assert_close(module.weight.detach(), expected, atol=1e-14, rtol=0)
    assert strategy.last_consensus is not None
    assert strategy.last_consensus.distance > 0


def test_a_save_within_a_turn_takes_the_first_state_and_leaves_the_turn_its_own() -> (
    None
):
    strategy, weight = virtual(2), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    strategy.optimizers, strategy.learners = [optimizer], Mock()
    first, second = strategy._states = [
        defaultdict(dict, {weight: {"momentum_buffer": torch.full((1,), number)}})
        for number in (1.0, 2.0)
    ]
    optimizer.state = second
    saved: Any = strategy.optimizer_state(optimizer)
    assert optimizer.state is second
    first[weight]["momentum_buffer"].fill_(3.0)  # a later step
    assert saved["state"][0]["momentum_buffer"].item() == 1.0


def test_one_super_learner_is_the_single_device_strategy() -> None:
    weights = []
    for strategy in (virtual(1), "auto"):
        module = Classifier()
        trainer_of(strategy).fit(module, data(160, 1))
        weights.append(flat(module))
    assert torch.equal(*weights)


def test_turns_follow_simulated_time() -> None:
    watch = Watch()
    strategy = virtual(3, compute=Compute(1.0, slow={1: 4.0}))
    trainer_of(strategy, callbacks=[watch]).fit(Classifier(), data(8 * 90, 1))
    assert [watch.turns.count(i) for i in range(3)] == [40, 10, 40]


def test_the_mean_of_all_is_changed_by_gradients_alone() -> None:
    """The gradients of `Quadratic` depend on the weights, those of a slope do not."""

    class Slope(Quadratic):
        @override
        def loss(self, batch: Tensor) -> Tensor:
            return (batch @ self.weight).mean()

    module = Slope()
    strategy = virtual(5, compute=Compute(1.0, spread=0.5), link=Link(20.0, 0.2))
    trainer_of(strategy).fit(module, loader(60))
    expected = -LR / 5 * Rows(60).rows.sum(0)
    torch.testing.assert_close(module.weight.detach(), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("dials", "name", "batch", "local"),
    [((4, 1), "adpsgd", 32, 8), ((2, 4), "hadpsgd", 16, 2), ((1, 4), "all", 8, 2)],
)
def test_the_row_of_a_run_names_the_virtual_learners(
    dials: tuple[int, int], name: str, batch: int, local: int
) -> None:
    monitor = ConvergenceMonitor(algorithm=name if name == "all" else None)
    strategy, held_out = virtual(*dials), data(160, 2)
    trainer = trainer_of(strategy, callbacks=[monitor])
    trainer.fit(Classifier(), data(160, 1), held_out)
    assert (run := monitor.run) is not None
    assert (run.algorithm, run.global_batch, run.local_batch) == (name, batch, local)
    assert (run.num_super_learners, run.super_learner_size) == dials
    assert run.global_samples == 160


def test_accumulated_batches_are_of_one_turn() -> None:
    watch, module = Watch(), Quadratic()
    strategy = virtual(4, 1, "ring", "sync")
    trainer = trainer_of(strategy, callbacks=[watch], accumulate_grad_batches=2)
    trainer.fit(module, loader(24))
    assert watch.turns == [i for i in (0, 1, 2, 3) for _ in range(2)] * 3


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=LR, momentum=0.9),
        partial(torch.optim.Adagrad, lr=LR),  # its state begins with it
    ],
    ids=["momentum", "Adagrad"],
)
def test_an_optimizers_state_stays_with_its_super_learner(make: Any) -> None:
    class Optimized(Quadratic):
        @override
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make(self.parameters())

    module = Optimized()
    trainer_of(virtual(3, 1, "ring", "sync")).fit(module, loader(18))
    cluster = VirtualCluster(Optimized(), 3, 1, "ring", "sync")
    cluster.fit(lambda i: loader(18, i, 3), 18)
    expected = cluster.weights()[0].mean(0)
    torch.testing.assert_close(module.weight.detach(), expected, atol=1e-14, rtol=0)


def test_a_run_that_ends_within_a_turn_ends_in_the_consensus(tmp_path: Path) -> None:
    class Stop(pl.Callback):
        @override
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            trainer.should_stop = batch_idx == 4

        @override
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    module = Quadratic()
    strategy = virtual(4, 1, "ring", "sync")
    trainer = trainer_of(strategy, callbacks=[Stop()], accumulate_grad_batches=2)
    trainer.fit(module, loader(24))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(module.weight.detach(), saved["weight"])


def test_a_save_within_a_validation_leaves_the_mean_in_the_module() -> None:
    class Saves(pl.Callback):
        @override
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            mean, strategy = flat(pl_module).clone(), trainer.strategy
            strategy.lightning_module_state_dict()
            assert torch.equal(flat(pl_module), mean)
            turns.append(strategy._turn)

    turns = list[int]()
    trainer = trainer_of(
        virtual(4, 1, "ring", "sync"),
        callbacks=[Saves()],
        accumulate_grad_batches=2,
        val_check_interval=1,
        num_sanity_val_steps=0,
    )
    trainer.fit(Classifier(), data(96, 1), data(16, 2))
    assert max(turns) > 0  # some validations lie within a turn


def test_validation_within_an_epoch_changes_nothing() -> None:
    weights = []
    for interval in (1.0, 7):
        module = Classifier()
        trainer = trainer_of(virtual(3), val_check_interval=interval, max_epochs=2)
        trainer.fit(module, data(320, 1), data(80, 2))
        weights.append(flat(module))
    assert torch.equal(*weights)


class Swap(pl.Callback):
    """Validates other weights, as averages of weights do that callbacks keep."""

    def __init__(self) -> None:
        self.kept, self.seen = list[Tensor](), list[Tensor]()

    @override
    @torch.no_grad()
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = [weight.clone() for weight in pl_module.parameters()]
        for weight in pl_module.parameters():
            weight.fill_(7.0)

    @override
    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, *_: Any, **__: Any
    ) -> None:
        self.seen.append(flat(pl_module).clone())

    @override
    @torch.no_grad()
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        for weight, kept in zip(pl_module.parameters(), self.kept, strict=True):
            weight.copy_(kept)


@pytest.mark.parametrize("batches", [1, 2])
def test_weights_that_a_callback_validates_change_no_training(batches: int) -> None:
    """With two batches to a step, a validation comes within the turn of one."""
    weights, swap = [], Swap()
    for callbacks in ([], [swap]):
        module = Classifier()
        trainer = trainer_of(
            virtual(3),
            callbacks=callbacks,
            val_check_interval=7,
            accumulate_grad_batches=batches,
            max_epochs=2,
        )
        trainer.fit(module, data(320, 1), data(80, 2))
        weights.append(flat(module))
    assert torch.equal(*weights)
    assert swap.seen
    assert all(seen.eq(7.0).all() for seen in swap.seen)


def test_schedules_and_loggers_count_the_steps_of_all(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = trainer_of(
        virtual(4),
        logger=logger,
        log_every_n_steps=1,
        callbacks=[LearningRateMonitor("step"), GossipMonitor()],
    )
    trainer.fit(Classifier(), data(160, 1), data(80, 2))
    assert trainer.global_step == 20
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    assert rate == pytest.approx(0.02 * 0.999**20)
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    for name in ("train_loss", "lr-Adam", "gossip/consensus_distance"):
        assert name in header
    assert isinstance(trainer.strategy, VirtualHADPSGDStrategy)
    statistics = trainer.strategy.gossip_statistics()
    assert statistics is not None
    assert statistics.exchanges > 0
    assert statistics.staleness == {1: statistics.exchanges}


def test_a_checkpoint_holds_the_consensus_and_a_resume_starts_from_it(
    tmp_path: Path,
) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    first, trainer = (
        Classifier(),
        trainer_of(
            virtual(4), enable_checkpointing=True, callbacks=[checkpoint], max_epochs=2
        ),
    )
    trainer.fit(first, data(160, 1))
    saved = torch.load(checkpoint.last_model_path, weights_only=False)
    mean = torch.cat([v.flatten() for v in saved["state_dict"].values()])
    assert torch.equal(mean, flat(first))
    resumed, starts = Classifier(), []

    class Start(pl.Callback):
        @override
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            learners = trainer.strategy.learners
            starts.extend(learners.rows.vectors(i)[0].clone() for i in range(4))
            self.states = [
                [int(kept["step"]) for kept in state.values()]
                for state in trainer.strategy._states
            ]

    start = Start()
    again = trainer_of(virtual(4), max_epochs=3, callbacks=[start])
    with pytest.warns(
        UserWarning, match="for the same numbers as without a break, train again"
    ):
        again.fit(resumed, data(160, 1), ckpt_path=checkpoint.last_model_path)
    assert all(torch.equal(row, mean) for row in starts)
    # Forty steps of four super-learners were ten of the first.
    assert start.states == [[10] * 4] * 4
    assert again.current_epoch == 3
    assert again.global_step == 60
    assert not torch.equal(flat(resumed), mean)


def test_the_module_has_memory_of_its_own_afterwards() -> None:
    module, strategy = Classifier(), virtual(16)
    trainer = trainer_of(strategy)
    trainer.fit(module, data(160, 1))
    for parameter in module.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert strategy.learners is None
    assert "on_run_end" not in vars(trainer.fit_loop)


def test_to_fit_once_more_begins_from_the_mean() -> None:
    module, trainer = Classifier(), trainer_of(virtual(4), max_epochs=1)
    trainer.fit(module, data(320, 1), data(160, 2))
    first = trainer.callback_metrics["val_loss"]
    trainer.fit_loop.max_epochs = 8
    trainer.fit(module, data(320, 1), data(160, 2))
    assert trainer.callback_metrics["val_loss"] < first


class Breaks(Classifier):
    """Fails in its third batch, once."""

    breaks = True

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.breaks and batch_idx == 2:
            self.breaks = False
            raise ValueError("batch 2")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("communication", ["async", "sync"])
def test_a_fit_after_one_that_failed_is_as_the_first(communication: Any) -> None:
    unbroken, module = Classifier(), Breaks()
    begin = deepcopy(module.state_dict())
    trainer_of(virtual(4, communication=communication)).fit(unbroken, data(160, 1))
    trainer = trainer_of(virtual(4, communication=communication))
    with pytest.raises(ValueError, match="batch 2"):
        trainer.fit(module, data(160, 1))
    module.load_state_dict(begin)
    trainer.fit(module, data(160, 1))
    assert torch.equal(flat(module), flat(unbroken))


def test_mixed_precision_and_clipping_go_through_the_trainer() -> None:
    module = Classifier()
    trainer = trainer_of(
        virtual(3), precision="bf16-mixed", gradient_clip_val=1.0, max_epochs=4
    )
    trainer.fit(module, data(480, 1), data(160, 2))
    assert trainer.callback_metrics["val_loss"] < 0.7


# --- refused


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Two(Classifier):
    @override
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (Manual, {}, "`automatic_optimization` must be True"),
        (
            Classifier,
            {"devices": 2},
            "`devices` and `num_nodes` must be 1 .* got 2 and",
        ),
        (
            Classifier,
            {"callbacks": [StochasticWeightAveraging(0.1)]},
            "`callbacks` must hold no StochasticWeightAveraging",
        ),
    ],
)
def test_what_has_no_meaning_is_refused_at_set_up(
    module: Callable[[], Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(virtual(4), **arguments).fit(module(), data(16, 1))


def test_several_optimizers_are_refused() -> None:
    with pytest.raises(Exception, match="optimizer"):
        trainer_of(virtual(4)).fit(Two(), data(16, 1))


def test_impossible_clusters_are_refused_when_they_are_made() -> None:
    with pytest.raises(ValueError, match="power of two super-learners, got 6"):
        virtual(6, 1, "hypercube")
    with pytest.raises(ValueError, match="`num_super_learners` must be at least 1"):
        virtual(0)
    assert math.isfinite(virtual(1)._scenario.compute.seconds)


def test_ready_pairs_train_a_plain_module_and_count_who_waited_in_vain() -> None:
    compute = Compute(spread=0.3, slow={0: 5.0})
    strategy = virtual(3, 1, "complete", ReadyPairs(max_wait=0.1), compute=compute)
    module, trainer = Classifier(), trainer_of(strategy, max_epochs=2)
    trainer.fit(module, data(480, 1, shuffle=True), data(160, 2))
    found = strategy.gossip_statistics()
    assert found is not None
    # The run ends with some of them at a boundary.
    assert 0 <= trainer.global_step - found.exchanges - found.skipped <= 3
    assert min(found.exchanges, found.skipped) > 0
    assert found.partner_seconds > 0
    assert float(trainer.callback_metrics["val_loss"]) < math.log(3)
