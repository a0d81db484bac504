"""Lightning's callbacks, logging, tuner, profilers and command line with gossip."""

import inspect
import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.tuner.tuning import Tuner
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_adpsgd.import_names import lightning_version
from tests import warm
from tests.helpers import PROGRAM_S, free_port
from tests.learners import (
    COMMUNICATIONS,
    LR,
    Linear,
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
from tests.strategy.test_trainer_integration import ALONE
from tests.strategy.test_training_integration import (
    NUM_ROWS,
    each_communication,
    rows,
    strategy_of,
)

ALL_NAMES = ("ddp", "sdpsgd", "d1psgd", "adpsgd")


# --- logging and collectives in hooks


class Logs(Linear):
    """Logs its rank from everywhere, and gathers it."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: dict[str, list[float]] = {}

    def note(self, where: str, **how: Any) -> None:
        self.log(where, float(self.global_rank), sync_dist=True, **how)

    def gather(self, where: str) -> None:
        gathered: Any = self.all_gather(torch.tensor([float(self.global_rank)]))
        self.gathered[where] = gathered.flatten().tolist()

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.note("step", on_step=True, on_epoch=False)
        self.note("epoch", on_step=False, on_epoch=True)
        self.gather("training_step")
        return super().training_step(batch, batch_idx)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("batch_end", on_step=True, on_epoch=False)

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.note("validation")

    @override
    def on_validation_epoch_end(self) -> None:
        self.gather("on_validation_epoch_end")

    @override
    def on_train_epoch_end(self) -> None:
        self.note("epoch_end")
        self.gather("on_train_epoch_end")


def test_metrics_are_reduced_over_those_who_come() -> None:
    def program(rank: int, communication: str) -> Any:
        module = Logs()
        trainer = trainer_of(strategy_of(communication), 2)
        # Unequal numbers of batches, where that is allowed: nobody comes to a step.
        length = NUM_ROWS + 8 * rank * (communication == "async")
        trainer.fit(module, loader(length), loader(2))
        metrics = {name: v.item() for name, v in trainer.callback_metrics.items()}
        return metrics, module.gathered

    for mode, told in in_every_mode(2, program).items():
        for rank, (metrics, gathered) in enumerate(told):
            in_step = float(rank) if mode == "async" else 0.5
            # The mean over all batches of the epoch: 16 of learner 0, 24 of learner 1.
            at_epoch = 0.6 if mode == "async" else 0.5
            ends = {"epoch": at_epoch, "validation": 0.5, "epoch_end": 0.5}
            expected = ends | {"step": in_step, "batch_end": in_step}
            assert metrics == pytest.approx(expected), mode
            alone = [float(rank)] if mode == "async" else [0.0, 1.0]
            assert gathered.pop("training_step") == alone, mode
            assert set(map(tuple, gathered.values())) == {(0.0, 1.0)}, mode


def test_hooks_at_the_end_of_training_see_the_consensus() -> None:
    class Exports(Linear):
        exported: Tensor

        @override
        def on_train_end(self) -> None:
            self.exported = self.weight.detach().clone()

    def program(rank: int, communication: str) -> Tensor:
        module = Exports()
        trainer_of(strategy_of(communication), 2).fit(module, loader(NUM_ROWS, rank, 2))
        assert torch.equal(module.exported, module.weight)
        return module.exported

    for _, exported in each(in_every_mode(2, program)):
        torch.testing.assert_close(exported, consensus_after(NUM_ROWS, 2))


def test_early_stopping_stops_all_strategies_at_one_epoch() -> None:
    class Module(Linear):
        @override
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            # The learners' own values would stop them at different epochs.
            own = self.current_epoch * (1 if self.global_rank else -0.5)
            self.log("metric", own, sync_dist=True)

    def program(rank: int) -> list[int]:
        epochs = []
        for name in ALL_NAMES:
            stopping = EarlyStopping("metric", mode="min", patience=2)
            trainer = trainer_of(name, 2, callbacks=[stopping], max_epochs=9)
            trainer.fit(Module(), loader(4, rank, 2), loader(2))
            epochs.append(trainer.current_epoch)
        return epochs

    # The mean grows: no epoch is better than the first.
    assert values(learners(2, program)) == [[3] * 4] * 2


# --- checkpoints


def test_checkpoints_by_metric_step_and_epoch(tmp_path: Path) -> None:
    class Module(Linear):
        @override
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            # Best in the second of four epochs.
            self.log("distance", abs(self.current_epoch - 1.0), sync_dist=True)

    def program(rank: int, communication: str) -> Any:
        folder = tmp_path / communication
        best = ModelCheckpoint(
            folder / "best", monitor="distance", save_top_k=2, save_weights_only=True
        )
        last = ModelCheckpoint(folder / "last", save_last=True, save_top_k=0)
        steps = ModelCheckpoint(folder / "steps", every_n_train_steps=5, save_top_k=-1)
        epochs = ModelCheckpoint(folder / "epochs", every_n_epochs=2, save_top_k=-1)
        callbacks: list[Any] = [best, last, steps, epochs]
        trainer = trainer_of(
            strategy_of(communication),
            2,
            callbacks=callbacks,
            enable_checkpointing=True,
            max_epochs=4,
        )
        trainer.fit(Module(), loader(NUM_ROWS, rank, 2), loader(2))
        return best.best_model_path

    for mode, (best, other) in in_every_mode(2, program).items():
        assert best == other
        expect_checkpoints(tmp_path / mode, Path(best))


def expect_checkpoints(folder: Path, best: Path) -> None:
    """Of four epochs of eight steps, of which the second was the best."""

    def load(path: Path) -> dict[str, Any]:
        return torch.load(path, weights_only=True)

    saved = load(best)
    expected = 2 * consensus_after(NUM_ROWS, 2)
    torch.testing.assert_close(saved["state_dict"]["weight"], expected)
    assert "optimizer_states" not in saved
    assert len(list((folder / "best").iterdir())) == 2
    assert len(list((folder / "epochs").iterdir())) == 2
    at_steps = {load(p)["global_step"]: load(p) for p in (folder / "steps").iterdir()}
    assert sorted(at_steps) == [5, 10, 15, 20, 25, 30]
    first_five = -LR * rows()[:10].sum(0) / 2
    torch.testing.assert_close(at_steps[5]["state_dict"]["weight"], first_five)
    torch.testing.assert_close(
        load(folder / "last" / "last.ckpt")["state_dict"]["weight"],
        4 * consensus_after(NUM_ROWS, 2),
    )


# Lightning 2.5.0 has no such argument.
SAVES_ON_EXCEPTION: dict[str, Any] = {
    name: True
    for name in inspect.signature(ModelCheckpoint).parameters
    if name == "save_on_exception"
}


@each_communication
def test_the_learner_that_fails_saves_its_own_weights(
    tmp_path: Path, communication: str
) -> None:
    class Fails(Linear):
        @override
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 3 and self.global_rank == 0:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    def program(rank: int) -> None:
        folder = tmp_path / str(rank)
        callbacks: list[Any] = [
            OnExceptionCheckpoint(folder),
            ModelCheckpoint(folder, filename="kept", **SAVES_ON_EXCEPTION),
        ]
        trainer = trainer_of(
            strategy_of(communication),
            2,
            callbacks=callbacks,
            enable_checkpointing=True,
        )
        trainer.fit(Fails(), loader(NUM_ROWS, rank, 2))

    outcomes = learners(2, program)
    assert "ZeroDivisionError" in outcomes[0].error
    assert outcomes[1].exit_code > 0
    saved = torch.load(tmp_path / "0" / "on_exception.ckpt", weights_only=True)
    assert saved["global_step"] == 3
    assert saved["state_dict"]["weight"].isfinite().all()


# --- averages of weights


class Normalised(Linear):
    """With batch-norm, for which SWA adds an epoch of forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False, dtype=torch.float64)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.norm(torch.cat([batch, -batch]))
        return super().training_step(batch, batch_idx)


def test_stochastic_weight_averaging() -> None:
    def program(rank: int, communication: str) -> list[Any]:
        return [averaged(rank, communication, module()) for module in AVERAGED]

    # The average of the weights at the starts of the second, third and fourth epochs.
    expected = 2 * consensus_after(NUM_ROWS, 2)
    # Lightning's epoch of forward passes ends with a step of the last gradients.
    with_norm = expected - LR * rows()[-2:].mean(0)
    # Of x and -x the unbiased variance is 2 x².
    squares = 2 * rows().square().mean(0)
    results = in_every_mode(2, program, ["ddp", *COMMUNICATIONS])
    for mode, ((plain, _), (weight, variance)) in each(results):
        (first_plain, _), (first_weight, first_variance) = results[mode][0]
        torch.testing.assert_close(plain, expected, atol=1e-9, rtol=0)
        torch.testing.assert_close(weight, with_norm, atol=1e-9, rtol=0)
        assert torch.equal(plain, first_plain), mode
        assert torch.equal(weight, first_weight), mode
        # Under ddp each learner has its own.
        if mode != "ddp":
            torch.testing.assert_close(variance, first_variance)
            torch.testing.assert_close(variance, squares, atol=1e-6, rtol=0)


AVERAGED: tuple[Callable[[], Linear], ...] = (Linear, Normalised)


def averaged(rank: int, communication: str, module: Linear) -> Any:
    """The weight that SWA leaves, and the variance of a layer that has one."""
    # Nobody averages with anybody, so that the mean is SWA's and not the gossip's.
    strategy = "ddp" if communication == "ddp" else gossip(ALONE, communication)
    swa = StochasticWeightAveraging(LR, swa_epoch_start=2, annealing_epochs=1)
    trainer = trainer_of(strategy, 2, max_epochs=4, callbacks=[swa])
    trainer.fit(module, loader(NUM_ROWS, rank, 2))
    norm = getattr(module, "norm", None)
    return module.weight.detach(), norm.running_var if norm else None


def test_an_average_that_a_callback_keeps_is_averaged_too(tmp_path: Path) -> None:
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")

    class Validates(Linear):
        seen: Tensor

        @override
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.seen = self.weight.detach().clone()

    def program(rank: int, communication: str) -> Any:
        module, folder = Validates(), tmp_path / communication
        path = folder / "last.ckpt"
        callbacks: list[Any] = [
            averaging.WeightAveraging(),
            ModelCheckpoint(folder, save_last=True),
        ]
        trainer = trainer_of(
            gossip(ALONE, communication),
            2,
            callbacks=callbacks,
            enable_checkpointing=True,
        )
        trainer.fit(module, loader(NUM_ROWS, rank, 2), loader(2))
        saved = torch.load(path, weights_only=True)["state_dict"]["weight"]
        return module.seen, module.weight.detach(), saved

    # The mean of the eight consensus models after the eight steps.
    steps = torch.arange(8, 0, -1, dtype=torch.float64).repeat_interleave(2)
    expected = -LR * (rows() * steps[:, None]).sum(0) / 2 / 8
    results = in_every_mode(2, program)
    for mode, (seen, final, saved) in each(results):
        for weight in (seen, final, saved):
            torch.testing.assert_close(weight, expected, atol=1e-9, rtol=0)
        torch.testing.assert_close(seen, results[mode][0][0])
        assert torch.equal(final, results[mode][0][1]), mode


class TwoLayers(Linear):
    """Random weights, not those that its optimizer trains, are pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.pruned = nn.Linear(8, 8, bias=False, dtype=torch.float64)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        pull = self.pruned(torch.ones(1, 8, dtype=torch.float64)).square().mean()
        return super().training_step(batch, batch_idx) + pull * (1 + self.global_rank)


PRUNED = list(
    itertools.product(["l1_unstructured", "random_unstructured"], [False, True])
)
"""Methods of pruning, and whether what stays begins anew, as in the lottery."""


def test_all_learners_prune_the_same_weights() -> None:
    def program(rank: int, communication: str) -> list[tuple[Tensor, Tensor]]:
        return [pruned(rank, communication, *case) for case in PRUNED]

    for mode, (firsts, seconds) in in_every_mode(2, program).items():
        cases = zip(PRUNED, firsts, seconds, strict=True)
        for case, (first, weight), (second, _) in cases:
            # A quarter of 64, and a quarter of what is left.
            assert int((first == 0).sum()) == 16 + 12, (mode, case)
            assert torch.equal(first, second), (mode, case)
            torch.testing.assert_close(weight, 2 * consensus_after(NUM_ROWS, 2))


def pruned(
    rank: int, communication: str, method: str, lottery: bool
) -> tuple[Tensor, Tensor]:
    """The pruned weight and the trained one, after two epochs of a learner."""
    torch.manual_seed(rank)
    module = TwoLayers()
    pruning = ModelPruning(
        method,
        [(module.pruned, "weight")],
        amount=0.25,
        use_lottery_ticket_hypothesis=lottery,
    )
    trainer = trainer_of(
        strategy_of(communication), 2, max_epochs=2, callbacks=[pruning]
    )
    trainer.fit(module, loader(NUM_ROWS, rank, 2), loader(2))
    return module.pruned.weight.detach(), module.weight.detach()


# --- tuner, profilers, command line


@pytest.mark.skipif(
    Version(lightning_version()) < Version("2.5.6"),
    reason="Lightning 2.5.0 loses batches behind its finder",
)
def test_the_learning_rate_finder_gives_all_learners_one_rate() -> None:
    class Rated(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.lr = LR

        @override
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), self.lr)

    def program(rank: int) -> list[tuple[float, Tensor]]:
        os.chdir(os.environ["TUNER_FOLDER"])
        found = []
        for name in ALL_NAMES:
            module = Rated()
            finder = LearningRateFinder(num_training_steps=20)
            trainer = trainer_of(name, 2, callbacks=[finder], enable_checkpointing=True)
            trainer.fit(module, loader(60, rank, 2))
            found.append((module.lr, module.weight.detach() / module.lr))
        return found

    results = values(learners(2, program))
    for (lr, direction), (other_lr, other) in zip(*results, strict=True):
        assert lr == other_lr
        # Training begins at the start again, with the rate that was found.
        torch.testing.assert_close(direction, -30 * Rows(60).rows.mean(0))
        assert torch.equal(direction, other)


@pytest.fixture(autouse=True)
def _tuner_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_FOLDER", str(tmp_path))


def test_the_batch_size_is_not_scaled_as_under_ddp() -> None:
    def program(rank: int) -> list[str]:
        refusals = []
        for name in ALL_NAMES:
            trainer = trainer_of(name, 2)
            with pytest.raises(ValueError, match="not supported") as refusal:
                Tuner(trainer).scale_batch_size(Linear(), loader(4))
            refusals.append(str(refusal.value))
        return refusals

    for refusals in values(learners(2, program)):
        assert len(set(refusals)) == 1


PROFILED = [
    ("simple", "async"),
    ("simple", "sync"),
    ("simple", "delay_by_one"),
    ("advanced", "async"),
    ("pytorch", "async"),
]


def test_profilers_see_the_step(tmp_path: Path) -> None:
    def program(rank: int, case: str) -> Tensor:
        profiler, communication = case.split()
        module, folder = Linear(), tmp_path / case
        trainer = trainer_of(
            gossip("complete", communication),
            2,
            profiler=profiler,
            default_root_dir=folder,
            logger=False,
        )
        written: Any = vars(trainer)["profiler"]
        written.dirpath, written.filename = folder, "profile"
        trainer.fit(module, loader(NUM_ROWS, rank, 2))
        return module.weight.detach()

    cases = [" ".join(case) for case in PROFILED]
    for case, weights in in_every_mode(2, program, cases).items():
        for weight in weights:
            torch.testing.assert_close(weight, consensus_after(NUM_ROWS, 2))
        texts = [path.read_text() for path in (tmp_path / case).glob("*profile*.txt")]
        assert len(texts) == 2, case
        assert all("optimizer_step" in text for text in texts), case


CLI = """
from lightning.pytorch.cli import LightningCLI
from tests.learners import Sampled

if __name__ == "__main__":
    cli = LightningCLI(Sampled, seed_everything_default=False, run=True)
    rank = cli.trainer.global_rank
    print("final", *cli.model.weight.tolist(), cli.trainer.strategy.dials.mixing_gain)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "gain"),
    [
        (["--trainer.strategy=adpsgd_fork"], 1.0),
        (
            [
                "--trainer.strategy=lightning_adpsgd.HADPSGDStrategy",
                "--trainer.strategy.init_args.topology=random_ring",
                "--trainer.strategy.init_args.super_learner_size=1",
                "--trainer.strategy.init_args.mixing_gain=0.5",
                "--trainer.strategy.init_args.start_method=fork",
            ],
            0.5,
        ),
    ],
    ids=["name", "class path"],
)
def test_the_command_line_takes_names_and_typed_arguments(
    tmp_path: Path, options: list[str], gain: float
) -> None:
    pytest.importorskip("jsonargparse")
    script = tmp_path / "train.py"
    script.write_text(CLI)
    root = str(Path(__file__).parents[2])
    quiet = ["logger=false", "enable_checkpointing=false", "enable_progress_bar=false"]
    quiet += ["accelerator=cpu", "devices=2", "max_epochs=1"]
    quiet += ["use_distributed_sampler=false"]
    result = subprocess.run(
        [warm.python(), "-W", "ignore", str(script), "fit", *options]
        + [f"--trainer.{setting}" for setting in quiet],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        env={
            **os.environ,
            "PYTHONPATH": root,
            "OMP_NUM_THREADS": "1",
            "MASTER_PORT": str(free_port()),
        },
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    final = next(x for x in result.stdout.splitlines() if x.startswith("final"))
    *weight, found = (float(x) for x in final.split()[1:])
    torch.testing.assert_close(
        torch.tensor(weight, dtype=torch.float64), consensus_after(16, 2)
    )
    assert found == gain


# --- evaluation before, between and after


def test_every_entry_point_in_one_process() -> None:
    class Module(Linear):
        @override
        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

        @override
        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.loss(batch)

    def program(rank: int, name: str) -> Any:
        module, data = Module(), loader(4, rank, 2)
        trainer = trainer_of(name, 2)
        losses = [trainer.validate(module, data)[0]["val_loss"]]
        trainer.fit(module, data, data)
        losses.append(trainer.validate(module, data)[0]["val_loss"])
        losses.append(trainer.test(module, data)[0]["test_loss"])
        predicted = trainer.predict(module, data)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, data, data)
        return losses, predicted, module.weight.detach()

    trained = consensus_after(4, 2)
    for name, told in in_every_mode(2, program, ALL_NAMES).items():
        for rank, (losses, predicted, final) in enumerate(told):
            loss = float(Rows(4).rows.mean(0) @ trained)
            assert losses == pytest.approx([0.0, loss, loss]), name
            expected = Rows(4).rows[rank::2] @ trained
            torch.testing.assert_close(torch.stack(predicted), expected)
            torch.testing.assert_close(final, 2 * trained)


def test_collectives_of_the_user_in_hooks_where_all_come() -> None:
    class Sums(pl.Callback):
        sums: Tensor

        @override
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.sums = torch.ones(1)
            dist.all_reduce(self.sums)

    def program(rank: int) -> float:
        sums = Sums()
        trainer = trainer_of(gossip(), 3, callbacks=[sums], max_epochs=2)
        trainer.fit(Linear(), loader(6 + 3 * rank), loader(1))
        return sums.sums.item()

    assert values(learners(3, program)) == [3.0] * 3


def test_learners_meet_in_spike_detection() -> None:
    def program(rank: int, communication: str) -> int:
        spikes = SpikeDetection(atol=1e9, rtol=1e9)
        arguments = {"callbacks": [spikes], "use_distributed_sampler": True}
        trainer = trainer_of(strategy_of(communication), 2, **arguments)
        trainer.fit(Linear(), DataLoader(Rows(NUM_ROWS)))
        return trainer.global_step

    for mode, steps in in_every_mode(2, program).items():
        # Shared epochs would have steps as they come.
        assert steps == [NUM_ROWS // 2] * 2, mode
