"""A resume with `save_learners=True` goes on to the last bit; so says the whole run."""

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_adpsgd import Topology
from tests.learners import gossip, learners, trainer_of, values

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


class Random(pl.LightningModule):
    """Momentum, a schedule by steps, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.trajectory: dict[int, Tensor] = {}

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

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


def run(
    num: int, path: Path, resumed: bool, save_at: int = SAVE_AT, **dials: Any
) -> list[dict[int, Tensor]]:
    """Weights after each step of every learner, of two epochs or what is left."""

    def program(rank: int) -> dict[int, Tensor]:
        pl.seed_everything(100 * resumed + rank)
        module = Random()
        loader = DataLoader(Noisy(), 3, shuffle=True)
        callbacks = [] if resumed else [SaveAt(path, save_at)]
        options = {"communication": "sync", "save_learners": True, **dials}
        strategy = gossip(**options)
        trainer = trainer_of(strategy, num, max_epochs=2, callbacks=callbacks)
        trainer.fit(module, loader, ckpt_path=str(path) if resumed else None)
        return module.trajectory

    return values(learners(num, program))


def rest_of(trajectory: dict[int, Tensor], step: int) -> dict[int, Tensor]:
    return {at: weights for at, weights in trajectory.items() if at > step}


@pytest.mark.parametrize(
    ("num", "save_at", "dials"),
    [
        (2, SAVE_AT, {}),
        (2, NUM_BATCHES, {}),
        (2, NUM_BATCHES + 3, {"topology": "random_pairs", "gossip_every": 2}),
        (2, SAVE_AT, {"communication": "delay_by_one"}),
        (2, SAVE_AT, {"communication": "async", "topology": ALONE}),
        (2, SAVE_AT, {"communication": "async", "super_learner_size": 2}),
        (4, SAVE_AT, {"super_learner_size": 2}),
    ],
)
def test_a_resume_equals_the_run_that_was_not_interrupted(
    tmp_path: Path, num: int, save_at: int, dials: dict[str, Any]
) -> None:
    path = tmp_path / "a.ckpt"
    whole = run(num, path, resumed=False, save_at=save_at, **dials)
    resumed = run(num, path, resumed=True, **dials)
    for before, after in zip(whole, resumed, strict=True):
        expected = rest_of(before, save_at)
        assert list(after) == list(expected) == list(range(save_at + 1, 17))
        assert all(after[step].equal(expected[step]) for step in expected)


@pytest.mark.parametrize(("num", "size"), [(3, 1), (2, 2), (1, 1)])
def test_a_resume_with_another_number_starts_from_the_consensus(
    tmp_path: Path, num: int, size: int
) -> None:
    path = tmp_path / "a.ckpt"
    dials = {"topology": ALONE, "communication": "async"}
    before = run(2, path, resumed=False, **dials)
    consensus = torch.stack([trajectory[SAVE_AT] for trajectory in before]).mean(0)

    class Begins(Random):
        start: Tensor

        @override
        def on_train_start(self) -> None:
            self.start = nn.utils.parameters_to_vector(self.parameters()).detach()

    def program(rank: int) -> Tensor:
        module = Begins()
        strategy = gossip(super_learner_size=size, save_learners=True, **dials)
        trainer = trainer_of(strategy, num, max_epochs=2)
        trainer.fit(module, DataLoader(Noisy(), 3), ckpt_path=str(path))
        return module.start

    for start in values(learners(num, program)):
        torch.testing.assert_close(start, consensus)


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


def test_what_is_kept_is_plain_data(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run(2, path, resumed=False)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["lightning_adpsgd/samples"] == 2 * SAVE_AT * 3
    kept = checkpoint["lightning_adpsgd"]
    assert len(kept) == 2
    for group in kept:
        assert set(group) == {"weights", "states", "position", "learners"}
        (own,) = group["learners"]
        assert own["place"]["num_batches"] == SAVE_AT
        assert set(own["place"]["generators"]) == {"python", "numpy", "torch"}
        assert {"loops", "lr_schedulers"} <= set(own["lightning"])
