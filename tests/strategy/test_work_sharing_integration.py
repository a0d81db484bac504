"""Work sharing in real processes: who trains on what, and what a checkpoint keeps.

Two learners make several trainings, one after the other, and so do three.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler
from typing_extensions import override

from lightning_adpsgd.asr.frames.block_sampler import BlockSampler
from lightning_adpsgd.callbacks import Monitor, SaveWithinEpoch
from tests.helpers import until
from tests.learners import (
    LR,
    Linear,
    Rows,
    gossip,
    in_every_mode,
    learners,
    trainer_of,
    values,
)

Seen = tuple[dict[int, list[list[int]]], list[int], int, Tensor]
"""Of a learner: its rows by epoch, those of validations, last batches, weights."""


class Numbered(Rows):
    """Rows that begin with their own number."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rows[:, 0] = torch.arange(length)


class Records(Linear):
    """Writes down the numbers of the rows it trains on, by epoch, and validates on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, list[list[int]]] = {}
        self.before: dict[int, list[list[int]]] = {}  # the checkpoint
        self.validated: list[int] = []
        self.num_last = 0

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rows = batch[:, 0].int().tolist()
        self.seen.setdefault(self.current_epoch, []).append(rows)
        self.num_last += self.trainer.is_last_batch
        return self.loss(batch)

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated += batch[:, 0].int().tolist()


class Slow(Records):
    """The last learner's step ends when the others have made 15, or come to a point."""

    def point(self) -> int:
        return 10**9

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batches = self.trainer.strategy.work_sharing._batches  # pyright: ignore
        if self.global_rank == self.trainer.world_size - 1:
            pool, num_units = batches._pool(), len(batches.under_way.units)
            enough = min(pool._counted() + 16, self.point(), num_units)
            # To look is to ask the job's store.
            has_come = lambda: pool._counted() >= enough  # noqa: E731
            until(has_come, "the others' steps", every_s=0.01)
        return super().training_step(batch, batch_idx)


def sharing(**dials: Any) -> Any:
    return gossip("ring", work_sharing=True, **dials)


def numbered(num_rows: int, batch_size: int = 2, **arguments: Any) -> DataLoader[Any]:
    arguments = {"shuffle": True, **arguments}
    return DataLoader(Numbered(num_rows), batch_size=batch_size, **arguments)


def fit(num: int, loader: Any, **arguments: Any) -> list[Records]:
    """What the module of every learner has seen; the arguments are those of `train`."""
    trained = values(learners(num, lambda rank: train(num, loader, **arguments)))
    return list(map(known, trained))


def train(
    num: int,
    loader: Any,
    *,
    module: type[Records] = Records,
    dials: dict[str, Any] | None = None,
    ckpt_path: Path | None = None,
    validation: Any = None,
    **arguments: Any,
) -> Seen:
    """One learner's part in a training."""
    learner = module()
    trainer = trainer_of(
        sharing(**dials or {}), num, **{"use_distributed_sampler": True} | arguments
    )
    trainer.fit(learner, loader, validation, ckpt_path=ckpt_path)
    weight = learner.weight.detach()
    return learner.seen, learner.validated, learner.num_last, weight


def known(seen: Seen) -> Records:
    """The module of a learner that has ended."""
    result = Records()
    result.seen, result.validated, result.num_last, result.weight.data = seen
    return result


def fit_each(num: int, cases: dict[str, Callable[[], Seen]]) -> dict[str, Any]:
    """The modules of all learners in each case; the same processes train in all."""
    told = in_every_mode(num, lambda rank, case: cases[case](), list(cases))
    return {case: list(map(known, seen)) for case, seen in told.items()}


def rows_of(modules: list[Records], epoch: int) -> list[int]:
    batches = chain.from_iterable(module.seen.get(epoch, []) for module in modules)
    return sorted(chain.from_iterable(batches))


LOADERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "worker": {"num_workers": 1, "prefetch_factor": 2},
    "persistent worker": {"num_workers": 1, "persistent_workers": True},
}


@pytest.mark.parametrize(
    ("num", "size", "names"),
    [(3, 1, ["alone", "worker", "persistent worker"]), (4, 2, ["alone", "worker"])],
    ids=["one by one", "two by two"],
)
def test_every_row_is_seen_once_in_each_epoch(
    num: int, size: int, names: list[str]
) -> None:
    def program(rank: int, name: str) -> Seen:
        loader, dials = numbered(45, **LOADERS[name]), {"super_learner_size": size}
        return train(num, loader, dials=dials, max_epochs=2)

    for name, seen in in_every_mode(num, program, names).items():
        modules = list(map(known, seen))
        for epoch in range(2):
            assert rows_of(modules, epoch) == list(range(45)), name
        # Every learner knew its last batch of each epoch as such.
        assert [module.num_last for module in modules] == [2] * num, name
        assert modules[0].seen[0] != modules[0].seen[1], name
        for first in range(0, num, size):
            group = modules[first : first + size]
            for epoch in range(2):
                assert len({len(module.seen[epoch]) for module in group}) == 1, name


class Steps(Records):
    """Four batches make a step, but the last."""

    @override
    def on_train_epoch_end(self) -> None:
        num = len(self.seen[self.current_epoch])
        assert self.trainer.global_step == -(-num // 4)


class Counts(Records):
    """Asks the pool after its only step what the others have claimed meanwhile."""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.counted: list[int] = []
        batches = self.trainer.strategy.work_sharing._batches  # pyright: ignore
        batches._pool().end_last_step = self.counted.append
        return super().training_step(batch, batch_idx)

    @override
    def on_train_epoch_end(self) -> None:
        assert self.counted == [1]


class Looks(Records):
    """Reads all of its loader, of 11 batches, outside of the training loop."""

    def look(self) -> None:
        loader: Any = self.trainer.train_dataloader
        with pytest.raises(TypeError, match="has no length"):
            len(loader)
        assert len(list(loader)) == 6

    @override
    def on_train_start(self) -> None:
        self.look()

    @override
    def on_train_epoch_start(self) -> None:
        self.look()

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx < 2:
            self.look()

    @override
    def on_train_epoch_end(self) -> None:
        self.look()

    @override
    def on_train_end(self) -> None:
        self.look()


class Reloads(Records):
    """Asks for the number of steps at set-up, and gets another loader in each epoch."""

    @override
    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == -1
        return super().configure_optimizers()


class OfEpoch(Numbered):
    """Rows that hold the number of the epoch, of which somebody must tell them."""

    epoch: int

    @override
    def __getitem__(self, index: int) -> Tensor:
        row = super().__getitem__(index).clone()
        row[1] = self.epoch
        return row


class Tells(Records):
    """Tells its data set of each epoch as late as Lightning's hooks allow."""

    @override
    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.dataset.epoch = self.current_epoch  # pyright: ignore

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert batch[:, 1].tolist() == [self.current_epoch] * len(batch)
        return super().training_step(batch, batch_idx)


def tells(**arguments: Any) -> Seen:
    loader = DataLoader(OfEpoch(21), batch_size=2, shuffle=True)
    return train(2, loader, module=Tells, max_epochs=3, **arguments)


def reloads(num_workers: int) -> Seen:
    return train(
        2,
        numbered(21, num_workers=num_workers),
        module=Reloads,
        max_epochs=3,
        reload_dataloaders_every_n_epochs=1,
    )


def looked_at(name: str) -> Seen:
    return train(2, numbered(21, **LOADERS[name]), module=Looks, max_epochs=3)


NUM_OF_BLOCKS = 2 * 64 + 5  # two blocks, and the rest of one
BLOCKS = BlockSampler(range(NUM_OF_BLOCKS))
WEIGHTED = WeightedRandomSampler([0.0] * 10 + [1.0] * 10, 30)
OTHER_TIMES = "reloaded", "looked", "told"
OF_TWO: dict[str, Callable[[], Seen]] = {
    "computed": lambda: train(
        2, numbered(NUM_OF_BLOCKS, shuffle=False, sampler=BLOCKS), max_epochs=2
    ),
    "in order": lambda: train(2, numbered(12, shuffle=False)),
    "weighted": lambda: train(2, numbered(20, shuffle=None, sampler=WEIGHTED)),
    "accumulated": lambda: train(
        2, numbered(23), module=Steps, accumulate_grad_batches=4
    ),
    "looked at": lambda: looked_at("alone"),
    "looked at with a persistent worker": lambda: looked_at("persistent worker"),
    "told of epochs": lambda: tells(),
    "told of epochs and reloaded": lambda: tells(reload_dataloaders_every_n_epochs=1),
    "reloaded": lambda: reloads(0),
    "reloaded by a worker": lambda: reloads(1),
    "fast": lambda: train(2, numbered(20), fast_dev_run=2),
}
OF_THREE: dict[str, Callable[[], Seen]] = {
    "all": lambda: train(3, numbered(48)),
    "few": lambda: train(3, numbered(5, 4), module=Counts, max_epochs=2),
    "validated": lambda: train(
        3,
        numbered(20),
        module=Slow,
        validation=numbered(12, shuffle=False),
        max_epochs=2,
    ),
}


@pytest.fixture(scope="module")
def of_two() -> dict[str, list[Records]]:
    return fit_each(2, OF_TWO)


@pytest.fixture(scope="module")
def of_three() -> dict[str, list[Records]]:
    return fit_each(3, OF_THREE)


def test_an_order_that_is_computed_is_shared_without_being_listed(of_two: Any) -> None:
    modules = of_two["computed"]
    for epoch in range(2):
        assert rows_of(modules, epoch) == list(range(NUM_OF_BLOCKS))
    assert modules[0].seen[0] != modules[0].seen[1]


def test_a_learner_that_waits_for_fifteen_batches_of_others_gets_a_sixteenth() -> None:
    modules = fit(4, numbered(160, 1), module=Slow, max_epochs=2)
    for epoch in range(2):
        assert rows_of(modules, epoch) == list(range(160))
        nums = [len(module.seen[epoch]) for module in modules]
        # A tenth of 160 steps, and what it claims ahead; less on a machine that stalls.
        assert 1 <= nums[3] <= 13


class StepsAlone(Linear):
    """After the first epoch learner 1 never has the batches for a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @override
    def training_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, batch: Tensor, batch_idx: int
    ) -> None:
        self.manual_backward(self.loss(batch))
        if self.global_rank == 0 or self.current_epoch == 0:
            optimizer: Any = self.optimizers()
            optimizer.step()


def test_a_learner_without_a_step_in_an_epoch_saves_with_the_others(
    tmp_path: Path,
) -> None:
    def program(rank: int, validation: Any) -> int:
        saver = ModelCheckpoint(tmp_path / str(bool(validation)), save_top_k=-1)
        trainer = trainer_of(
            sharing(),
            2,
            use_distributed_sampler=True,
            callbacks=[saver],
            enable_checkpointing=True,
            max_epochs=3,
        )
        trainer.fit(StepsAlone(), numbered(12), validation)
        return trainer.global_step

    validation = numbered(4, shuffle=False)
    in_every_mode(2, program, [None, validation])
    assert [len([*folder.iterdir()]) for folder in tmp_path.iterdir()] == [3, 3]


def test_the_mean_is_what_all_batches_make_it(of_three: Any) -> None:
    rows, first = Numbered(48).rows, of_three["all"][0]
    # 24 batches of two, wherever they were trained on, in the mean of three learners.
    expected = -LR * 24 / 3 * rows.mean(0)
    torch.testing.assert_close(first.weight.detach(), expected)


def test_fewer_batches_than_learners_are_cut_up(of_three: Any) -> None:
    modules = of_three["few"]
    for epoch in range(2):
        assert rows_of(modules, epoch) == list(range(5))
        assert sorted(len(m.seen[epoch][0]) for m in modules) == [1, 2, 2]


def test_learners_with_seeds_of_their_own_share_an_order() -> None:
    def program(rank: int) -> Seen:
        pl.seed_everything(7 + rank)
        return train(2, numbered(20), max_epochs=2)

    modules = list(map(known, values(learners(2, program))))
    for epoch in range(2):
        assert rows_of(modules, epoch) == list(range(20))


def test_fewer_samples_than_learners_are_refused() -> None:
    outcomes = learners(
        2,
        lambda rank: trainer_of(sharing(), 2, use_distributed_sampler=True).fit(
            Records(), numbered(1)
        ),
    )
    message = "at least as many samples as learners in an epoch, 2, got 1"
    assert all(message in outcome.error for outcome in outcomes)


def test_a_loader_in_order_stays_in_order(of_two: Any) -> None:
    for module in of_two["in order"]:
        flat = list(chain.from_iterable(module.seen[0]))
        assert flat == sorted(flat)


def test_a_weighted_sampler_is_drawn_alike_by_all(of_two: Any) -> None:
    rows = rows_of(of_two["weighted"], 0)
    assert len(rows) == 30
    assert min(rows) >= 10


def test_validation_comes_once_an_epoch_with_equal_shares(of_three: Any) -> None:
    rows = chain.from_iterable(one.validated for one in of_three["validated"])
    assert Counter(rows) == Counter(dict.fromkeys(range(12), 2))


def test_accumulation_ends_with_each_learners_last_batch(of_two: Any) -> None:
    assert rows_of(of_two["accumulated"], 0) == list(range(23))


@pytest.mark.parametrize("name", [n for n in OF_TWO if n.split()[0] in OTHER_TIMES])
def test_loaders_made_at_other_times_lose_nothing(of_two: Any, name: str) -> None:
    for epoch in range(3):
        assert rows_of(of_two[name], epoch) == list(range(21))


# --- checkpoints


class StopsAfterASave(SaveWithinEpoch):
    """Ends the run right after a checkpoint, as if it had been interrupted.

    A learner that looks for the file may see it only in a later epoch, whose own
    checkpoint has then taken its place.
    """

    @override
    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        pl_module.before = {k: list(v) for k, v in pl_module.seen.items()}

    @override
    def on_train_batch_end(self, trainer: Any, *arguments: Any, **named: Any) -> None:
        super().on_train_batch_end(trainer, *arguments, **named)
        if trainer.lightning_module.before:
            raise Interrupted


class Interrupted(Exception):
    pass


class TellsSamples(Monitor):
    """Writes down how many samples its learner has counted."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        path = self._folder / f"{trainer.global_rank}.samples"
        path.write_text(str(self.clock.samples))

    def of_all(self) -> int:
        return sum(int(path.read_text()) for path in self._folder.glob("*.samples"))


@pytest.mark.parametrize(
    ("before", "after", "num_workers"),
    [
        ((3, 1), (3, 1), 0),
        ((3, 1), (2, 1), 1),
        ((4, 2), (3, 1), 0),
        ((2, 1), (4, 2), 0),
    ],
)
def test_the_rest_of_an_epoch_is_trained_on_after_a_resume(
    tmp_path: Path,
    before: tuple[int, int],
    after: tuple[int, int],
    num_workers: int,
) -> None:
    path, told = tmp_path / "within.ckpt", TellsSamples(tmp_path)
    loader = numbered(90, num_workers=num_workers)

    def program(rank: int) -> Any:
        module = Records()
        trainer = trainer_of(
            sharing(super_learner_size=before[1]),
            before[0],
            use_distributed_sampler=True,
            max_epochs=3,
            # A slow learner could leave the rest to the others after 20 claims, and
            # then nothing is written in this epoch.
            callbacks=[StopsAfterASave(path, 10), TellsSamples(tmp_path)],
        )
        with pytest.raises((Interrupted, RuntimeError, SystemExit)):
            trainer.fit(module, loader)
        return module.before

    trained = list(
        chain.from_iterable(
            chain.from_iterable(seen.get(0, []))
            for seen in values(learners(before[0], program))
        )
    )
    assert 0 < len(trained) < 90
    modules = fit(
        after[0],
        loader,
        dials={"super_learner_size": after[1]},
        ckpt_path=path,
        max_epochs=2,
        callbacks=[told],
    )
    assert told.of_all() == 2 * 90
    assert sorted(trained + rows_of(modules, 0)) == list(range(90))
    assert rows_of(modules, 1) == list(range(90))


ENDS = ("at the end of an epoch", "after its validation", "cut short")


class Cuts(pl.Callback):
    """Ends the second epoch before its end, in all learners."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        trainer.should_stop = trainer.current_epoch == 1


def test_a_resume_at_the_end_of_an_epoch_begins_the_next(tmp_path: Path) -> None:
    def run(saved: str, max_epochs: int, ckpt_path: Path | None, rows: int) -> Any:
        folder, at_epoch_end = tmp_path / saved, saved != ENDS[1]
        saver = ModelCheckpoint(folder, save_on_train_epoch_end=at_epoch_end)
        # Lightning, too, goes on in the next epoch where one was cut short.
        cuts = [Cuts()] if saved == ENDS[2] and ckpt_path is None else []
        seen = train(
            2,
            numbered(rows),
            validation=numbered(4, shuffle=False),
            ckpt_path=ckpt_path,
            callbacks=[saver, *cuts],
            enable_checkpointing=True,
            max_epochs=max_epochs,
        )
        return seen, Path(saver.best_model_path)

    first = in_every_mode(2, lambda rank, saved: run(saved, 2, None, 21), ENDS)
    paths = {saved: the_only_file(tmp_path / saved) for saved in ENDS}
    for saved, learners_own in first.items():
        # Their numbers of steps differ, and only learner 0 has written.
        assert {path for _, path in learners_own} == {paths[saved]}
        modules = [known(one) for one, _ in learners_own]
        assert (rows_of(modules, 1) == list(range(21))) == (saved != ENDS[2]), saved
    # The data may have grown meanwhile.
    told = in_every_mode(2, lambda rank, saved: run(saved, 4, paths[saved], 33), ENDS)
    for saved, seen in told.items():
        modules = [known(one) for one, _ in seen]
        epochs = {epoch for module in modules for epoch in module.seen}
        assert epochs == {2, 3}, saved
        for epoch in (2, 3):
            assert rows_of(modules, epoch) == list(range(33)), saved


def the_only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.ckpt")
    return path


def test_points_within_an_epoch_are_the_same_for_slow_and_fast(tmp_path: Path) -> None:
    class Count(SaveWithinEpoch):
        num = 0

        @override
        def on_save_checkpoint(
            self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
        ) -> None:
            type(self).num += 1

    def program(rank: int) -> int:
        saver = Count(tmp_path / "a.ckpt", 12)
        trainer = trainer_of(
            sharing(), 4, use_distributed_sampler=True, callbacks=[saver]
        )
        module = Slow()
        # The others wait at their next point, without claiming, for this learner.
        module.point = lambda: 12 * (saver._num_points + 1)
        trainer.fit(module, numbered(100, 1))
        return saver.num

    nums = values(learners(4, program))
    assert len(set(nums)) == 1
    assert 1 <= nums[0] <= 8


def test_a_fast_dev_run_gives_each_learner_its_batches(of_two: Any) -> None:
    assert [len(module.seen[0]) for module in of_two["fast"]] == [2, 2]


class Dies(Records):
    """One learner's process is killed in the middle of an epoch."""

    dying = 0

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_rank == self.dying and batch_idx == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)  # who goes on until it is told leaves the cores to others
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("size", "dying"), [(1, 1), (1, 0), (2, 3), (2, 2)])
def test_a_killed_learner_ends_the_rest(size: int, dying: int) -> None:
    num = 2 * size

    def program(rank: int) -> None:
        module = Dies()
        module.dying = dying
        strategy = sharing(super_learner_size=size)
        trainer_of(strategy, num, use_distributed_sampler=True).fit(
            # More than any learner gets through before it hears of the death.
            module,
            numbered(200_000),
        )

    outcomes = learners(num, program)
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == (-signal.SIGKILL if rank == dying else 1)
