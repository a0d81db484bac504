"""A batch sampler that begins in the middle, and generators that go on, in one process.

`test_exact_resume_integration.py` has the same in a Trainer.
"""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)
from typing_extensions import override

from lightning_adpsgd.strategy.checkpoints.contents import Resumed
from lightning_adpsgd.strategy.checkpoints.mid_epoch import (
    PlacedBatches,
    PlaceInEpoch,
    copy_with,
)
from lightning_adpsgd.strategy.checkpoints.rng_state import (
    generator_states,
    set_generator_states,
)
from tests.learners import Linear, Rows, gossip, trainer_of

CPU = torch.device("cpu")
DRAWS = [
    random.random,
    lambda: torch.rand(1).item(),
    lambda: numpy.random.rand(),
]


@pytest.mark.parametrize("draw", DRAWS, ids=["python", "torch", "numpy"])
def test_each_generator_goes_on_from_where_it_was(draw: Callable[[], float]) -> None:
    states = generator_states(CPU)
    drawn = [draw() for _ in range(3)]
    set_generator_states(states, CPU)
    assert [draw() for _ in range(3)] == drawn


def test_a_generator_without_a_state_is_left_alone() -> None:
    states = generator_states(CPU)
    numpy.random.seed(3)
    del states["numpy"]
    before = numpy.random.get_state()
    set_generator_states(states, CPU)
    assert str(numpy.random.get_state()) == str(before)


def test_the_state_of_a_gpu_is_left_alone_where_a_learner_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = {**generator_states(CPU), "cuda": torch.get_rng_state()}
    monkeypatch.setattr(torch.cuda, "set_rng_state", None)  # to call it is an error
    set_generator_states(states, CPU)


def placed(generator: torch.Generator | None) -> PlacedBatches:
    sampler = RandomSampler(range(12), generator=generator)
    return PlacedBatches(BatchSampler(sampler, 2, drop_last=False), CPU)


@pytest.mark.parametrize("has_its_own", [False, True])
def test_an_epoch_goes_on_in_its_middle_and_the_next_one_is_whole(
    has_its_own: bool,
) -> None:
    def generator() -> torch.Generator | None:
        return torch.Generator().manual_seed(5) if has_its_own else None

    first = placed(generator())
    assert first.state() is None
    begun = list(first)
    state = first.state()
    later = generator_states(CPU)
    expected = torch.rand(2).tolist()

    # Some other generators, as in a process that has begun anew.
    torch.manual_seed(77)
    second = placed(torch.Generator().manual_seed(78) if has_its_own else None)
    second.resume(state, 4, 4)
    set_generator_states(later, CPU)
    assert list(second) == begun[4:]
    # What is drawn afterwards has nothing to do with the order of this epoch.
    assert torch.rand(2).tolist() == expected
    assert second.state() == state
    assert sorted(sum(second, list[int]())) == list(range(12))
    assert second.state() is not state


def test_batches_are_left_out_of_an_order_that_nobody_wrote_down() -> None:
    batches = PlacedBatches(BatchSampler(range(12), 2, drop_last=False), CPU)
    batches.resume(None, 5, 5)
    assert list(batches) == [[10, 11]]
    assert len(list(batches)) == 6


def test_it_answers_as_the_sampler_that_it_wraps() -> None:
    inner = BatchSampler(range(7), 2, drop_last=False)
    batches = PlacedBatches(inner, CPU)
    assert (batches.sampler, batches.batch_size) == (inner.sampler, 2)
    assert batches.drop_last is False
    assert len(batches) == 4
    bare = PlacedBatches([[1], [2]], CPU)
    assert (bare.sampler, bare.batch_size, len(bare)) == (None, None, 2)


def test_a_program_that_iterates_moves_no_place() -> None:
    is_of_loop = [True]
    sampler = BatchSampler(RandomSampler(range(12)), 2, drop_last=False)
    batches = PlacedBatches(sampler, CPU, lambda: is_of_loop[0])
    next(iter(batches))
    begun = batches.state()
    batches.resume(begun, 4, 4)
    is_of_loop[0] = False
    assert len(list(batches)) == 6
    assert batches.state() is begun
    is_of_loop[0] = True
    assert len(list(batches)) == 2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


class KeepsItsPlace(DataLoader[int]):
    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2, 3],
        DataLoader(Stream()),
        DataLoader(range(4), batch_size=None),  # pyright: ignore[reportArgumentType]
        KeepsItsPlace(range(4)),  # pyright: ignore[reportArgumentType]
    ],
    ids=["list", "stream", "no batches", "its own"],
)
def test_a_loader_that_can_have_no_place_is_left_as_it_is(loader: Any) -> None:
    place: Any = PlaceInEpoch(None, CPU)  # pyright: ignore[reportArgumentType]
    assert place.prepare(loader) is loader


def test_a_loader_gets_a_place_in_a_copy() -> None:
    loader: Any = DataLoader(range(6), batch_size=2)  # pyright: ignore
    place: Any = PlaceInEpoch(None, CPU)  # pyright: ignore[reportArgumentType]
    prepared = place.prepare(loader)
    assert isinstance(prepared.batch_sampler, PlacedBatches)
    assert not isinstance(loader.batch_sampler, PlacedBatches)
    assert [batch.tolist() for batch in prepared] == [[0, 1], [2, 3], [4, 5]]


def test_a_copy_of_a_loader_does_not_go_on_with_the_workers_of_before() -> None:
    """They read what the sampler of before gives."""
    loader: Any = DataLoader(range(6), batch_size=2)  # pyright: ignore
    loader._iterator = object()
    assert copy_with(loader, batch_sampler=None)._iterator is None


def test_a_loader_that_reads_out_of_order_has_no_place() -> None:
    loader: Any = DataLoader(range(6), num_workers=1)  # pyright: ignore
    loader.in_order = False
    place: Any = PlaceInEpoch(None, CPU)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"`in_order` .* True .*save_learners"):
        place.prepare(loader)


def test_a_loader_goes_on_at_the_saved_place() -> None:
    saved = {
        "num_samples": 40,
        "num_batches": 2,
        "begin": None,
        "generators": generator_states(CPU),
    }
    place: Any = PlaceInEpoch(None, CPU, saved)  # pyright: ignore[reportArgumentType]
    prepared = place.prepare(DataLoader(range(6), batch_size=2))  # pyright: ignore
    assert [batch.tolist() for batch in prepared] == [[4, 5]]


@pytest.mark.parametrize("begins_an_epoch", [False, True])
def test_the_generators_go_on_before_the_first_batch(begins_an_epoch: bool) -> None:
    states = generator_states(CPU)
    expected = torch.rand(1).item()
    saved = {"num_samples": 0, "num_batches": 0, "begin": None, "generators": states}
    place: Any = PlaceInEpoch(in_epoch(1, 1), CPU, saved)
    if begins_an_epoch:
        place.prepare(DataLoader(range(6)))  # pyright: ignore
    else:
        place.begin()
    assert torch.rand(1).item() == expected
    place.begin()  # they are set once
    assert torch.rand(1).item() != expected


def test_they_go_on_from_there_again_where_an_iterator_is_not_read() -> None:
    states = generator_states(CPU)
    expected = torch.rand(1).item()
    saved = {"num_samples": 0, "num_batches": 0, "begin": None, "generators": states}
    place: Any = PlaceInEpoch(in_epoch(1, 0), CPU, saved)
    iter(place.prepare(DataLoader(range(6))))  # pyright: ignore
    place.begin()
    assert torch.rand(1).item() == expected


def in_epoch(started: int, processed: int) -> Any:
    """A Trainer that has started and processed so many epochs."""
    current = SimpleNamespace(started=started, processed=processed)
    progress = SimpleNamespace(current=current)
    return SimpleNamespace(fit_loop=SimpleNamespace(epoch_progress=progress))


def test_samples_of_all_runs_are_counted() -> None:
    saved = {"num_samples": 40}
    starts = ({"saved": saved}, 43), ({"num_samples": 40}, 43), ({}, 3)
    for start, expected in starts:
        place: Any = PlaceInEpoch(None, CPU, **start)  # pyright: ignore
        place.count(torch.zeros(3, 7))
        assert place._num_samples == expected


class Seen(Linear):
    """Keeps the batches that it trains on, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[int, list[float]]] = []

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append((self.trainer.current_epoch, batch[:, 0].tolist()))
        return super().training_step(batch, batch_idx)


class StopAt(pl.Callback):
    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.should_stop = trainer.global_step == CUT_AT


class SaveAtTheEnd(pl.Callback):
    def __init__(self, hook: str, path: Path) -> None:
        self.path = path
        setattr(self, hook, self._save)

    def _save(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


class SaveWithin(pl.Callback):
    """Saves once, within the batch that follows so many."""

    def __init__(self, hook: str, num_batches: int, path: Path) -> None:
        self.num_batches, self.path, self.num_calls = num_batches, path, 0
        setattr(self, hook, self._save)

    def _save(self, trainer: Any, *arguments: Any) -> None:
        if self.num_calls == self.num_batches:
            trainer.save_checkpoint(self.path)
        self.num_calls += 1


CUT_AT, NUM_BATCHES = 7, 5


def seen_by(
    *callbacks: Any,
    max_steps: int = 3 * NUM_BATCHES,
    ckpt_path: Any = None,
    draws: bool = False,
    **validation: Any,
) -> Seen:
    """A training in an order from common generators (`draws`), or of the epoch."""
    module, rows = Seen(), Rows(2 * NUM_BATCHES)
    sampler: Any = DistributedSampler(rows, 1, 0, shuffle=True)  # as Lightning's
    if draws:
        sampler = RandomSampler(rows)
    arguments: Any = {
        "max_steps": max_steps,
        "callbacks": [*callbacks],
        "max_epochs": -1,
        **validation,
    }
    trainer = trainer_of(
        gossip(communication="sync", save_learners=True), 1, **arguments
    )
    loader = DataLoader(rows, 2, sampler=sampler)
    held_out = DataLoader(rows, 2) if validation else None
    trainer.fit(module, loader, held_out, ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end"])
@pytest.mark.parametrize("by", ["steps", "callback"])
def test_an_epoch_that_was_cut_goes_on_in_its_own_order(
    tmp_path: Path, hook: str, by: str
) -> None:
    """A sampler draws it from its number, which Lightning raises before the hooks."""
    whole = seen_by()
    assert [epoch for epoch, _ in whole.batches] == [0] * 5 + [1] * 5 + [2] * 5
    path = tmp_path / "cut.ckpt"
    stops = {"steps": {"max_steps": CUT_AT}, "callback": {}}[by]
    callbacks = [SaveAtTheEnd(hook, path), *([StopAt()] if by == "callback" else [])]
    cut = seen_by(*callbacks, **stops)
    assert cut.batches == whole.batches[:CUT_AT]
    rest = seen_by(ckpt_path=path)
    assert rest.batches == whole.batches[CUT_AT:]
    assert rest.weight.equal(whole.weight)


@pytest.mark.parametrize("num", [0, 2, NUM_BATCHES - 1, NUM_BATCHES, 7])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step"])
def test_a_batch_that_has_begun_is_trained_on_after_the_resume(
    tmp_path: Path, hook: str, num: int
) -> None:
    path = tmp_path / "begun.ckpt"
    whole = seen_by(SaveWithin(hook, num, path), draws=True)
    saved = torch.load(path, weights_only=True)
    assert saved["lightning_adpsgd/samples"] == 2 * num
    torch.manual_seed(77)
    rest = seen_by(ckpt_path=path, draws=True)
    assert rest.batches == whole.batches[num:]
    assert rest.weight.equal(whole.weight)


@pytest.mark.parametrize("num", [2, NUM_BATCHES - 1, NUM_BATCHES])
def test_a_resume_within_a_batch_can_itself_be_resumed(
    tmp_path: Path, num: int
) -> None:
    """Lightning goes by its totals in a save that follows the last batch."""
    paths = [tmp_path / "first.ckpt", tmp_path / "second.ckpt"]
    whole = seen_by(SaveWithin("on_train_batch_start", num, paths[0]), draws=True)
    num_more = -num % NUM_BATCHES or NUM_BATCHES
    last = SaveWithin("on_train_batch_end", num_more - 1, paths[1])
    torch.manual_seed(77)
    seen_by(last, ckpt_path=paths[0], draws=True)
    torch.manual_seed(78)
    rest = seen_by(ckpt_path=paths[1], draws=True)
    assert rest.batches == whole.batches[num + num_more :]
    assert rest.weight.equal(whole.weight)


@pytest.mark.parametrize(
    "every",
    [
        {"val_check_interval": 2},
        {"val_check_interval": 3, "check_val_every_n_epoch": None},
    ],
    ids=["within epochs", "across epochs"],
)
@pytest.mark.parametrize("num", [2, 3, NUM_BATCHES])
def test_a_resume_within_a_batch_validates_as_often_and_draws_as_much(
    tmp_path: Path, every: dict[str, Any], num: int
) -> None:
    """A validation's loader draws a number; that of before the batch is over."""
    path = tmp_path / "begun.ckpt"
    arguments: dict[str, Any] = {"draws": True, "limit_val_batches": 1, **every}
    saving = SaveWithin("on_train_batch_start", num, path)
    whole = seen_by(saving, **arguments)
    torch.manual_seed(77)
    rest = seen_by(ckpt_path=path, **arguments)
    assert rest.batches == whole.batches[num:]
    assert rest.weight.equal(whole.weight)


def test_a_sampler_knows_the_epoch_before_workers_read() -> None:
    """Lightning tells it once they have begun to read the rest."""
    rows = Rows(8)
    sampler = DistributedSampler(rows, 1, 0, shuffle=True)
    loops = {"fit_loop": {"epoch_progress": {"current": {"processed": 3}}}}
    saved = {"num_samples": 0, "num_batches": 1, "begin": None, "generators": {}}
    learner = {"own": {"place": saved, "lightning": {"loops": loops}}}
    found = Resumed(learner).place
    assert found == {**saved, "epoch": 3}
    place: Any = PlaceInEpoch(None, CPU, found)  # pyright: ignore[reportArgumentType]
    place.prepare(DataLoader(rows, 2, sampler=sampler))
    assert sampler.epoch == 3


def test_a_checkpoint_without_places_has_none() -> None:
    assert Resumed().place is None
    assert Resumed({"own": {}}).place is None


class Training:
    """What a Trainer tells of its place in an epoch."""

    def __init__(self, loaders: list[Any], num: int, is_last_batch: bool) -> None:
        current = SimpleNamespace(ready=num, started=num, processed=num)
        progress = SimpleNamespace(current=current, is_last_batch=is_last_batch)
        self.fit_loop = SimpleNamespace(
            epoch_loop=SimpleNamespace(batch_progress=progress),
            _combined_loader=SimpleNamespace(flattened=loaders) if loaders else None,
        )


@pytest.mark.parametrize(
    ("num_placed", "is_last", "num_batches"),
    [(1, False, 4), (1, True, 0), (0, False, 0), (2, False, 0)],
)
def test_a_place_is_kept_within_an_epoch_of_one_loader(
    num_placed: int, is_last: bool, num_batches: int
) -> None:
    """Others begin a whole epoch, as the checkpoint has no place to go back to."""
    loaders = [SimpleNamespace(batch_sampler=placed(None)) for _ in range(num_placed)]
    for loader in loaders:
        assert len(list(loader.batch_sampler)) == 6
    training: Any = Training(loaders, 4, is_last)
    state = PlaceInEpoch(training, CPU, num_samples=8).state()
    assert (state["num_samples"], state["num_batches"]) == (8, num_batches)
    expected = loaders[0].batch_sampler.state() if num_placed == 1 else None
    assert state["begin"] is expected


def test_a_sampler_of_another_kind_is_no_place() -> None:
    loader = SimpleNamespace(batch_sampler=BatchSampler(range(4), 2, False))
    training: Any = Training([loader], 4, False)
    state = PlaceInEpoch(training, CPU).state()
    assert (state["num_batches"], state["begin"]) == (0, None)
