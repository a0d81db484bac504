"""A resume with `save_learners=True` goes on to the last bit; so says the whole run.

Two learners make all whole runs, one after the other, and two others all resumes.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

from lightning_adpsgd import Topology
from tests.helpers import random_rows
from tests.learners import (
    Quadratic,
    Trajectory,
    gossip,
    in_every_mode,
    learners,
    loader,
    trainer_of,
    values,
)

NUM_ROWS, NUM_BATCHES, SAVE_AT = 24, 8, 5
ALONE = Topology("alone", lambda index, *_: {index: 1.0}, lambda size: 1)


class Noisy(Dataset[Tensor]):
    """Rows that no generator leaves as they are."""

    def __len__(self) -> int:
        return NUM_ROWS

    @override
    def __getitem__(self, index: int) -> Tensor:
        noise = random.random() + np.random.rand() + torch.rand(1).item()
        return torch.full((4,), float(index)) / NUM_ROWS + noise


def read_ahead(rank: int, num: int) -> DataLoader[Any]:
    """A loader whose worker reads before Lightning tells the sampler the epoch."""
    rows: Any = random_rows(num * NUM_ROWS, 4).float()
    return DataLoader(
        rows, 3, sampler=DistributedSampler(rows, num, rank), num_workers=1
    )


class Random(pl.LightningModule):
    """Momentum, a schedule by steps, dropout, and a buffer outside of averages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.register_buffer("count", torch.tensor(0))
        self.trajectory: dict[int, Tensor] = {}

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count += 1 + self.global_rank
        return self.layers(batch).square().mean() / (1 + self.count)

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.layers(batch)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        flat = nn.utils.parameters_to_vector(self.parameters())
        self.trajectory[self.trainer.global_step] = flat.detach().clone()

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class SaveAt(pl.Callback):
    """Saves once, after so many steps."""

    def __init__(self, path: Path, step: int) -> None:
        self._path, self._step = path, step

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path)


class SaveInValidation(pl.Callback):
    """Saves when the first validation ends, as `ModelCheckpoint` does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.current_epoch:
            trainer.save_checkpoint(self._path)


class Case(NamedTuple):
    """After which step a run is saved, and what its strategy is given."""

    save_at: int
    dials: dict[str, Any]
    in_validation: bool = False
    reads_ahead: bool = False


RARELY: dict[str, Any] = {"topology": "random_pairs", "gossip_every": 2}
NOBODY: dict[str, Any] = {"communication": "async", "topology": ALONE}
ONE: dict[str, Any] = {"communication": "async", "super_learner_size": 2}
OF_TWO = {
    "within an epoch": Case(SAVE_AT, {}),
    "at its end": Case(NUM_BATCHES, {}),
    "at its end, by a worker": Case(NUM_BATCHES, {}, reads_ahead=True),
    "between rounds": Case(NUM_BATCHES + 3, RARELY),
    "delayed": Case(SAVE_AT, {"communication": "delay_by_one"}),
    "alone": Case(SAVE_AT, NOBODY),
    "one super-learner": Case(SAVE_AT, ONE),
    "in a validation": Case(NUM_BATCHES, {}, in_validation=True),
}
OF_FOUR = {"two super-learners": Case(SAVE_AT, {"super_learner_size": 2})}
Trajectories = dict[str, list[dict[int, Tensor]]]
"""For each case the weights after each step of every learner."""


def run(
    num: int, cases: Mapping[str, Case], folder: Path, resumed: bool
) -> Trajectories:
    """Two epochs of each case, or what is left of them."""

    def program(rank: int, name: str) -> dict[int, Tensor]:
        pl.seed_everything(100 * resumed + rank)
        save_at, dials, validates, reads_ahead = cases[name]
        module, path = Random(), folder / f"{name}.ckpt"
        loader = read_ahead(rank, num) if reads_ahead else DataLoader(Noisy(), 3, True)
        held_out = DataLoader(Noisy(), 3) if validates else None
        saver = SaveInValidation(path) if validates else SaveAt(path, save_at)
        options = {"communication": "sync", "save_learners": True, **dials}
        strategy = gossip(**options)
        callbacks = [] if resumed else [saver]
        trainer = trainer_of(strategy, num, max_epochs=2, callbacks=callbacks)
        ckpt_path = str(path) if resumed else None
        trainer.fit(module, loader, held_out, ckpt_path=ckpt_path)
        return module.trajectory

    return in_every_mode(num, program, list(cases))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def of_two(folder: Path) -> Trajectories:
    """Whole runs of two learners, which leave their checkpoints in the folder."""
    return run(2, OF_TWO, folder, resumed=False)


def rest_of(trajectory: dict[int, Tensor], step: int) -> dict[int, Tensor]:
    return {at: weights for at, weights in trajectory.items() if at > step}


def expect_rest(whole: Trajectories, resumed: Trajectories, name: str) -> None:
    save_at = (OF_TWO | OF_FOUR)[name].save_at
    for before, after in zip(whole[name], resumed[name], strict=True):
        expected = rest_of(before, save_at)
        assert list(after) == list(expected) == list(range(save_at + 1, 17)), name
        assert all(after[step].equal(expected[step]) for step in expected), name


def test_a_resume_equals_the_run_that_was_not_interrupted(
    folder: Path, of_two: Trajectories
) -> None:
    resumed = run(2, OF_TWO, folder, resumed=True)
    for name in OF_TWO:
        expect_rest(of_two, resumed, name)


def test_so_does_one_of_super_learners_of_two(tmp_path: Path) -> None:
    whole, resumed = (run(4, OF_FOUR, tmp_path, again) for again in (False, True))
    for name in OF_FOUR:
        expect_rest(whole, resumed, name)


@pytest.mark.parametrize(("num", "size"), [(3, 1), (2, 2), (1, 1)])
def test_a_resume_with_another_number_starts_from_the_consensus(
    folder: Path, of_two: Trajectories, num: int, size: int
) -> None:
    path = folder / "alone.ckpt"
    saved = [trajectory[SAVE_AT] for trajectory in of_two["alone"]]
    consensus = torch.stack(saved).mean(0)

    class Begins(Random):
        start: Tensor

        @override
        def on_train_start(self) -> None:
            self.start = nn.utils.parameters_to_vector(self.parameters()).detach()

    def program(rank: int) -> Tensor:
        module = Begins()
        strategy = gossip(super_learner_size=size, save_learners=True, **NOBODY)
        trainer = trainer_of(strategy, num, max_epochs=2)
        trainer.fit(module, DataLoader(Noisy(), 3), ckpt_path=str(path))
        return module.start

    for start in values(learners(num, program)):
        torch.testing.assert_close(start, consensus)


def test_so_does_one_from_a_validation_whose_mean_is_kept_or_not(
    tmp_path: Path,
) -> None:
    def weights(rank: int, name: str, resumed: bool) -> list[Tensor]:
        path, trajectory = tmp_path / name, Trajectory()
        # Three do not become equal in one round, and the last two steps have none.
        dials = {"after_evaluation": name, "gossip_every": 3, "save_learners": True}
        trainer = trainer_of(
            gossip(communication="sync", **dials),
            3,
            max_epochs=2,
            callbacks=[trajectory] if resumed else [trajectory, SaveInValidation(path)],
        )
        data = loader(24, rank, 3), loader(2)
        trainer.fit(Quadratic(), *data, ckpt_path=str(path) if resumed else None)
        return trajectory.weights

    def program(rank: int, name: str) -> tuple[list[Tensor], list[Tensor]]:
        return weights(rank, name, False), weights(rank, name, True)

    for name, told in in_every_mode(3, program, ("restore", "adopt")).items():
        for whole, resumed in told:
            assert torch.stack(whole[NUM_BATCHES:]).equal(torch.stack(resumed)), name


class Least(Quadratic):
    """Keeps the least number that it has seen, in a buffer that begins without one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.tensor(torch.inf))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        seen = torch.tensor(-float(self.global_rank))
        self.least = torch.minimum(self.least, seen)
        return super().training_step(batch, batch_idx)


def test_a_buffer_that_had_no_mean_is_not_averaged_after_a_resume(
    tmp_path: Path,
) -> None:
    def least(rank: int, save_learners: bool, resumed: bool) -> float:
        module, path = Least(), tmp_path / str(save_learners)
        callbacks = [] if resumed else [SaveInValidation(path)]
        strategy = gossip(communication="sync", save_learners=save_learners)
        trainer = trainer_of(strategy, 2, max_epochs=2, callbacks=callbacks)
        data = loader(8, rank, 2), loader(2)
        trainer.fit(module, *data, ckpt_path=str(path) if resumed else None)
        return module.least.item()

    def program(rank: int, save_learners: bool) -> list[float]:
        return [least(rank, save_learners, resumed) for resumed in (False, True)]

    for name, told in in_every_mode(2, program, (False, True)).items():
        assert told == [[0.0, 0.0], [-1.0, -1.0]], name


class Scaled(Quadratic):
    """Has a scale that DDP is to ignore, which each learner trains alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self._ddp_params_and_buffers_to_ignore = ["scale"]

    @override
    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * self.scale.sum()


def test_a_weight_that_ddp_is_to_ignore_goes_on_as_each_learners_own(
    tmp_path: Path,
) -> None:
    def scale(rank: int, resumed: bool) -> float:
        module, path = Scaled(), tmp_path / "a.ckpt"
        callbacks = [] if resumed else [SaveInValidation(path)]
        strategy = gossip(communication="sync", save_learners=True)
        trainer = trainer_of(strategy, 2, max_epochs=2, callbacks=callbacks)
        data = loader(8, rank, 2), loader(2)
        trainer.fit(module, *data, ckpt_path=str(path) if resumed else None)
        return module.scale.item()

    def program(rank: int) -> list[float]:
        return [scale(rank, resumed) for resumed in (False, True)]

    told = values(learners(2, program))
    assert told[0] != told[1]
    assert all(whole == resumed for whole, resumed in told)


def test_a_save_at_the_end_of_training_keeps_all_learners(tmp_path: Path) -> None:
    """As of `ModelCheckpoint(save_last=True)` after an epoch that it did not save."""
    path = tmp_path / "a.ckpt"

    class SavesAtTheEnd(pl.Callback):
        @override
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(path)

    def program(rank: int) -> Tensor:
        module = Random()
        strategy = gossip(communication="sync", save_learners=True)
        trainer = trainer_of(strategy, 2, callbacks=[SavesAtTheEnd()])
        trainer.fit(module, DataLoader(Noisy(), 3))
        strategy = gossip(communication="sync", save_learners=True)
        more = trainer_of(strategy, 2, max_epochs=2)
        more.fit(Random(), DataLoader(Noisy(), 3), ckpt_path=str(path))
        assert more.global_step == 2 * NUM_BATCHES
        return nn.utils.parameters_to_vector(module.parameters()).detach()

    consensus, same = values(learners(2, program))
    assert consensus.equal(same)
    kept = torch.load(path, weights_only=True)["lightning_adpsgd"]
    assert [group["position"] for group in kept] == [None, None]
    assert kept[0]["weights"][0].equal(kept[1]["weights"][0])


def test_learners_do_not_begin_from_different_checkpoints(tmp_path: Path) -> None:
    """A network file system may show a file to one learner before another."""

    def train(saver: ModelCheckpoint, ckpt_path: str | None) -> None:
        strategy = gossip("complete")
        options: Any = {"callbacks": [saver], "enable_checkpointing": True}
        trainer = trainer_of(strategy, 2, max_steps=4, **options)
        trainer.fit(Quadratic(), loader(12), ckpt_path=ckpt_path)

    def first(rank: int) -> None:
        saver = ModelCheckpoint(
            tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1
        )
        train(saver, None)

    def second(rank: int) -> None:
        train(ModelCheckpoint(tmp_path / str(rank)), "last")

    values(learners(2, first))
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        found = tmp_path / f"step={1 + rank}.ckpt"
        found.rename(tmp_path / str(rank) / "last.ckpt")
    for outcome in learners(2, second):
        assert outcome.exit_code == 1
        assert "'set-up from step 1, with" in outcome.error
        assert "'set-up from step 2, with" in outcome.error


@pytest.mark.usefixtures("of_two")
def test_what_is_kept_is_plain_data(folder: Path) -> None:
    checkpoint = torch.load(folder / "within an epoch.ckpt", weights_only=True)
    assert checkpoint["lightning_adpsgd/samples"] == 2 * SAVE_AT * 3
    kept = checkpoint["lightning_adpsgd"]
    assert len(kept) == 2
    for group in kept:
        assert set(group) == {"layout", "weights", "states", "position", "learners"}
        (own,) = group["learners"]
        assert own["place"]["num_batches"] == SAVE_AT
        assert set(own["place"]["generators"]) == {"python", "numpy", "torch"}
        assert {"loops", "lr_schedulers"} <= set(own["lightning"])
