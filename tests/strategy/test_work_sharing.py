"""What cannot be shared is refused at set-up, with the reason and a way out."""

import re
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from torch._C._distributed_c10d import HashStore
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
)
from typing_extensions import override

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.callbacks import SaveWithinEpoch
from lightning_adpsgd.epochs.claims import LearnerIndex
from lightning_adpsgd.epochs.ranges import Ranges
from lightning_adpsgd.epochs.work_units import EpochState
from lightning_adpsgd.strategy.compatibility import problems_with_work_sharing
from lightning_adpsgd.strategy.default_sharing import problems_with_loader, refuse_for
from lightning_adpsgd.strategy.work_sharing import WorkSharing
from tests.learners import Linear, Rows, gossip, learners, trainer_of


@pytest.mark.parametrize("communication", ["sync", "delay_by_one"])
def test_it_is_refused_where_all_step_together(communication: Any) -> None:
    with pytest.raises(ValueError, match=r"`work_sharing` applies to .*\"async\""):
        HADPSGDStrategy(communication=communication, work_sharing=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_distributed_sampler": False}, "`use_distributed_sampler` must be True"),
        ({"limit_train_batches": 5}, r"`limit_train_batches` must be 1\.0 .* got 5"),
        ({"limit_train_batches": 1}, r"`limit_train_batches` .* got 1 \(a number of"),
        ({"overfit_batches": 1}, r"`limit_train_batches` .* got 1 \(a number of"),
        ({"overfit_batches": 0.5}, r"`limit_train_batches` .* got 0\.5.*Subset"),
        ({"val_check_interval": 1}, r"`val_check_interval` .* got 1 \(a number of"),
        ({"val_check_interval": 0.5}, r"`val_check_interval` must be 1\.0 .* got 0\.5"),
        (
            {"val_check_interval": 7, "check_val_every_n_epoch": None},
            r"`val_check_interval` must be 1\.0 .* got 7",
        ),
        ({"max_time": {"hours": 1}}, "`max_time` must not be set .*`max_epochs`"),
        ({"max_steps": 9}, r"`max_steps` must be -1 .* got 9.*`max_epochs`"),
        ({"min_steps": 9, "max_epochs": 2}, r"`min_steps` must be None .* got 9"),
        (
            {"callbacks": [ModelCheckpoint(every_n_train_steps=3)]},
            "`every_n_train_steps` must not be set .* got 3.*SaveWithinEpoch",
        ),
        ({"callbacks": [LearningRateFinder()]}, "`LearningRateFinder` cannot be used"),
        (
            {"callbacks": [StochasticWeightAveraging(0.1)]},
            "`StochasticWeightAveraging` cannot be used",
        ),
        ({"callbacks": [SpikeDetection()]}, "`SpikeDetection` cannot be used"),
    ],
)
def test_what_counts_one_learners_batches_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, barebones=False, **arguments)
    trainer.strategy._lightning_module = Linear()
    problems = [*problems_with_work_sharing(trainer)]
    assert any(re.search(message, one) for one in problems)
    # The note of equal shares, which quotes one, ends with this remedy.
    assert not any("work_sharing=False" in one for one in problems)
    with pytest.raises(ValueError, match=r"\. `work_sharing=False` allows it$"):
        refuse_for(iter(problems))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"limit_train_batches": 1.0},
        {"val_check_interval": 1.0},
        {"callbacks": [Timer()]},
        {"callbacks": [Timer({"hours": 1}, interval="epoch")]},
    ],
)
def test_whole_epochs_are_shared(arguments: dict[str, Any]) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, **arguments)
    trainer.strategy._lightning_module = Linear()
    assert not [*problems_with_work_sharing(trainer)]


def test_a_step_that_takes_the_iterator_is_refused() -> None:
    class Iterates(Linear):
        @override
        def training_step(self, dataloader_iter: Any) -> Any:  # pyright: ignore
            return None

    trainer = pl.Trainer(accelerator="cpu", logger=False)
    trainer.strategy._lightning_module = Iterates()
    (problem,) = problems_with_work_sharing(trainer)
    assert "must not take `dataloader_iter`" in problem


class Stream(IterableDataset[int]):
    @override
    def __iter__(self) -> Any:
        return iter(range(9))


class Even(Dataset[int]):
    def __len__(self) -> int:
        return 8

    @override
    def __getitem__(self, index: int) -> int:
        return index


def unshareable() -> dict[str, tuple[Any, str]]:
    distributed = DistributedSampler(Even(), num_replicas=2, rank=0)
    return {
        "bare": ([torch.ones(1)], "a torch.utils.data.DataLoader .* got Bare"),
        "stream": (DataLoader(Stream()), "indices, got the iterable Stream"),
        "items": (DataLoader(Even(), batch_size=None), "got `batch_size=None`"),
        "dealt": (DataLoader(Even(), sampler=distributed), "with a DistributedSampler"),
        "two": ([DataLoader(Rows(4)), DataLoader(Rows(8))], "single .* loader, got 2"),
    }


@pytest.mark.parametrize("name", list(unshareable()))
def test_loaders_without_a_common_pool_are_refused(name: str) -> None:
    loader, message = unshareable()[name]
    loaders = loader if name == "two" else {"only": loader}
    if name == "bare":
        # A list would be several loaders to Lightning.
        loaders = Bare(loader)

    def program(rank: int) -> None:
        strategy = gossip(work_sharing=True)
        trainer = trainer_of(strategy, 2, use_distributed_sampler=True)
        with pytest.raises(ValueError, match=message):
            trainer.fit(Linear(), loaders)

    outcomes = learners(2, program)
    # One of them may hear of the other's refusal first.
    assert any(not outcome.error for outcome in outcomes)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_that_cannot_begin_ends_with_its_reason(num_workers: int) -> None:
    """Lightning's teardown used to fail too: `Please call iter(combined_loader)`."""
    loader = DataLoader(Rows(5), batch_size=4, drop_last=True, num_workers=num_workers)

    def program(rank: int) -> None:
        trainer = trainer_of(gossip(work_sharing=True), 2, use_distributed_sampler=True)
        with pytest.raises(ValueError, match=r"at least as many full batches .* 1"):
            trainer.fit(Linear(), loader)

    outcomes = learners(2, program)
    # One of them may hear of the other's refusal first.
    assert any(not outcome.error for outcome in outcomes)


def test_a_loader_that_keeps_its_own_place_is_refused() -> None:
    """A resume would leave out batches twice: the loader's, and those of the pool."""

    class Stateful(DataLoader[int]):
        def load_state_dict(self, state: Any) -> None:
            """Lightning calls it when a training is resumed."""

    (problem,) = problems_with_loader(Stateful(Even()))
    assert "got Stateful, which has `load_state_dict`" in problem


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_out_of_order_are_refused(num_workers: int) -> None:
    """Workers alone change the order, and torch before 2.7 has no such option."""
    loader: Any = DataLoader(Even(), num_workers=num_workers)
    assert not [*problems_with_loader(loader)]
    loader.in_order = False
    problems = [*problems_with_loader(loader)]
    assert len(problems) == num_workers
    assert all(re.match("`in_order` .* True .*work_sharing", one) for one in problems)


class Bare:
    """An iterable that is no loader of torch's."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Any:
        return iter(self._items)


def test_evaluation_loaders_and_the_users_own_are_left_alone() -> None:
    loader = DataLoader(Rows(8), batch_size=2)
    sampler = loader.sampler
    seen: dict[str, Any] = {}

    class Looker(Linear):
        @override
        def on_validation_end(self) -> None:
            assert self.trainer.val_dataloaders is not None
            seen["val"] = self.trainer.val_dataloaders.sampler

    def program(rank: int) -> tuple[str, bool, bool]:
        trainer = trainer_of(gossip(work_sharing=True), 2, use_distributed_sampler=True)
        trainer.fit(Looker(), loader, DataLoader(Rows(8)))
        untouched = loader.sampler is sampler and loader.batch_sampler is not None
        restored = "_prepare_dataloader" not in vars(trainer._data_connector)
        return type(seen["val"]).__name__, untouched, restored

    outcomes = learners(2, program)
    assert [outcome.value for outcome in outcomes] == [
        ("DistributedSampler", True, True)
    ] * 2


def test_one_super_learner_alone_has_nobody_to_share_with() -> None:
    def program(rank: int) -> str:
        strategy = HADPSGDStrategy(super_learner_size=2, work_sharing=True)
        trainer = trainer_of(strategy, 2, use_distributed_sampler=True)
        trainer.fit(Linear(), DataLoader(Rows(8), batch_size=2))
        assert trainer.train_dataloader is not None
        return type(trainer.train_dataloader.sampler).__name__

    outcomes = learners(2, program)
    assert [outcome.value for outcome in outcomes] == ["DistributedSampler"] * 2


def test_a_callback_that_never_saves_is_refused() -> None:
    with pytest.raises(ValueError, match="`every_n_batches` must be at least 1, got 0"):
        SaveWithinEpoch("a.ckpt", 0)


# --- loaders after a resume


class Alone:
    """One learner that shares the epochs of its job with nobody, after a resume."""

    def __init__(self, remaining: Ranges) -> None:
        self.at = SimpleNamespace(processed=1)
        batches = SimpleNamespace(current=SimpleNamespace(ready=0, completed=0))
        loop = SimpleNamespace(
            epoch_progress=SimpleNamespace(current=self.at),
            epoch_loop=SimpleNamespace(batch_progress=batches),
        )
        trainer: Any = SimpleNamespace(fit_loop=loop, num_nodes=1)
        job: Any = SimpleNamespace(store=HashStore(), meet=None, raise_if_failed=None)
        state = EpochState(1, seed=7, num_samples=8, remaining=remaining)
        trainer.strategy = SimpleNamespace(broadcast=int)
        index = LearnerIndex(0, 1, 0, 1)
        saved = state._asdict()
        self._sharing = WorkSharing(trainer, job, index, saved, None, None)

    def seen(self, num_rows: int) -> list[int]:
        """The rows of the epoch in which the training is, from a new loader."""
        given = DataLoader(Rows(num_rows), shuffle=True)
        loader = self._sharing.iterators.expect(self._sharing.prepare(given))
        self._sharing.iterators.are_early = False  # an epoch starts
        assert self._sharing._batches is not None
        assert self._sharing._batches.seed == 7
        return [row for batch in loader.batch_sampler for row in batch]


@pytest.mark.parametrize("processed", [1, 2])
def test_after_the_end_of_an_epoch_the_data_may_be_others(processed: int) -> None:
    """Lightning counts an epoch as processed before or after the checkpoint."""
    alone = Alone(remaining=())
    alone.at.processed = processed
    assert len(alone.seen(12)) == 12 * (processed - 1)


def test_the_rest_of_an_epoch_needs_its_data_and_later_epochs_do_not() -> None:
    alone = Alone(remaining=((3, 8),))
    assert len(alone.seen(8)) == 5
    alone.at.processed = 2
    assert sorted(alone.seen(12)) == list(range(12))
    with pytest.raises(ValueError, match="an epoch of 8 samples and this one has 12"):
        Alone(remaining=((3, 8),)).seen(12)


def near_of(num_nodes: int, index: LearnerIndex, store: HashStore) -> Any:
    """The store in which a learner hears what its leader claims."""
    trainer: Any = SimpleNamespace(num_nodes=num_nodes, num_devices=2)
    job: Any = SimpleNamespace(store=store, raise_if_failed=lambda: None)
    sharing = WorkSharing(trainer, job, index, None, None, None)
    return sharing._near()


def test_learners_of_a_machine_hear_claims_in_a_store_of_their_own() -> None:
    job = HashStore()
    leader = near_of(2, LearnerIndex(1, 2, 0, 2), job)
    follower = near_of(2, LearnerIndex(1, 2, 1, 2), job)
    leader.set("unit", "7")
    assert follower.get("unit") == b"7"
    assert not job.check(["unit"])


@pytest.mark.parametrize(
    ("num_nodes", "index"),
    [
        (1, LearnerIndex(1, 2, 0, 2)),
        (2, LearnerIndex(1, 2, 0, 1)),
        (2, LearnerIndex(0, 1, 0, 2)),
    ],
    ids=["one machine", "one learner", "one super-learner"],
)
def test_others_need_no_further_store(num_nodes: int, index: LearnerIndex) -> None:
    job = HashStore()
    assert near_of(num_nodes, index, job) is job
