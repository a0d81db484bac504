"""The strategy in real processes over Gloo, against closed forms.

`Linear` has the same gradients whatever its weights, so that the mean of all learners
is known exactly, however they average: start - lr * sum of the mean gradients.
"""

import atexit
import gc
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    LambdaCallback,
    ModelCheckpoint,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from typing_extensions import override

from lightning_adpsgd import HADPSGDStrategy, Topology
from lightning_adpsgd.registration import NAMES
from lightning_adpsgd.strategy.set_up import set_up_job
from lightning_adpsgd.topology.partition import Partition
from tests import warm
from tests.expectations import (
    MODES,
    expect_death_named,
    expect_delay_by_one,
    expect_ends,
    expect_error_named,
    expect_matrices,
    expect_super_learners_of_two,
    gradients_of,
    kill,
    leave,
    raise_error,
)
from tests.helpers import (
    OPEN_FILES,
    PROGRAM_S,
    engine_threads,
    free_port,
    in_fresh_process,
    num_gpus,
    num_open_files,
    topologies_of,
    until,
    without,
)
from tests.learners import (
    LR,
    Linear,
    Quadratic,
    Rows,
    Sampled,
    Trajectory,
    consensus_after,
    each,
    gossip,
    in_every_mode,
    learners,
    loader,
    trainer_of,
    values,
)

ALONE = Topology("alone", lambda index, *_: {index: 1.0}, lambda size: 1)
"""Nobody meets anybody: the local weights are those of plain SGD."""


Weights = list[tuple[Tensor, Tensor]]
"""Trajectory [step, weight] and final weights of every learner."""


def fit_each(
    num: int,
    strategies: Mapping[str, Callable[[], Any]],
    num_rows: int,
    module: Callable[[], Linear] = Linear,
    **arguments: Any,
) -> dict[str, Weights]:
    """What comes of each strategy, by its name; the same processes train with all."""

    def program(rank: int, name: str) -> tuple[Tensor, Tensor]:
        learner, trajectory, strategy = module(), Trajectory(), strategies[name]()
        trainer = trainer_of(strategy, num, callbacks=[trajectory], **arguments)
        trainer.fit(learner, loader(num_rows, rank, num))
        assert engine_threads() == []
        return torch.stack(trajectory.weights), learner.weight.detach()

    return in_every_mode(num, program, list(strategies))


def fit_one(strategy: Any, rank: int, num: int) -> None:
    """One learner's part in a training of a few steps."""
    trainer_of(strategy, num).fit(Linear(), loader(4 * num, rank, num))


# --- arithmetic of the synchronous modes


def test_sync_processes_follow_the_matrix() -> None:
    """All topologies in both orders follow it over threads, in `test_mixing.py`."""
    names = [name for name, _ in topologies_of(3)]
    made = {name: partial(gossip, name, "sync") for name in names}
    other: Any = "average_then_step"
    made[other] = partial(gossip, "ring", "sync", order=other)
    results = fit_each(3, made, 15)
    expect_matrices(results.pop(other), "ring", other)
    for name in names:
        expect_matrices(results[name], name, "step_then_average")


@pytest.fixture(scope="module")
def in_a_bowl() -> dict[str, Weights]:
    """Five steps of three learners, whose gradients depend on their weights."""
    made = {
        "delayed": partial(gossip, "complete", "delay_by_one"),
        "complete": partial(gossip, "complete", "sync"),
        "ddp": lambda: "ddp",
    }
    return fit_each(3, made, 15, Quadratic)


def test_delay_by_one_processes_follow_the_recurrence(
    in_a_bowl: dict[str, Weights],
) -> None:
    expect_delay_by_one(in_a_bowl["delayed"])


def test_complete_in_lockstep_is_ddp_and_one_process_with_the_whole_batch(
    in_a_bowl: dict[str, Weights],
) -> None:
    results = [*in_a_bowl["complete"], *in_a_bowl["ddp"]]
    weight = torch.zeros(3, dtype=torch.float64)
    for step, batch in enumerate(gradients_of(15, 3)):
        weight = weight - LR * 2 / 3 * (weight - batch.mean(0))
        for trajectory, _ in results:
            torch.testing.assert_close(trajectory[step], weight, atol=1e-12, rtol=0)


# --- the consensus, however it was reached


def test_async_processes_keep_the_mean() -> None:
    """Other sizes keep it over threads, in `gossip/test_engine.py`."""
    made = {name: partial(gossip, name) for name, _ in topologies_of(4)}
    matchings = [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]
    made["matchings"] = partial(gossip, matchings)
    made["matchings in rounds"] = partial(gossip, matchings, "sync")
    for _, (_, final) in each(fit_each(4, made, 24)):
        torch.testing.assert_close(final, consensus_after(24, 4), atol=1e-12, rtol=0)


def test_a_topology_of_another_size_is_refused_at_set_up() -> None:
    outcomes = learners(3, lambda rank: fit_one(gossip("hypercube"), rank, 3))
    for outcome in outcomes:
        assert "needs a power of two super-learners, got 3" in outcome.error


DIALS: list[dict[str, Any]] = [
    {"order": "average_then_step"},
    {"wire_dtype": torch.bfloat16},
    {"wire_dtype": torch.int8},
    {"wire_dtype": "int4"},
    {"max_staleness": 1},
    {"gossip_every": 3, "mixing_gain": 0.5},
    {"after_evaluation": "adopt"},
]


def test_no_dial_of_async_moves_the_mean() -> None:
    made = {str(dials): partial(gossip, "ring", **dials) for dials in DIALS}
    results = each(fit_each(3, made, 18, max_epochs=2))
    assert len(results) == 3 * len(DIALS)
    expected = 2 * consensus_after(18, 3)
    for dials, (_, final) in results:
        assert torch.allclose(final, expected, atol=1e-12, rtol=0), dials


def test_super_learners_of_two() -> None:
    two = partial(gossip, super_learner_size=2)
    made = {
        "sync": partial(two, "ring", "sync"),
        "delay_by_one": partial(two, "complete", "delay_by_one"),
        "async": partial(two, "ring", "async"),
    }
    for results in fit_each(4, made, 40).values():
        expect_super_learners_of_two(results)


def test_unequal_starts_are_made_equal() -> None:
    def program(rank: int) -> Tensor:
        module = Linear(start=1.0 + rank)
        trainer_of(gossip(), 2).fit(module, loader(8, rank, 2))
        return module.weight.detach()

    for final in values(learners(2, program)):
        torch.testing.assert_close(final, consensus_after(8, 2, 1.0))


# --- evaluation and checkpoints


class Watch(Linear):
    """Notes the weights of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[Tensor] = []

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.validated.append(self.weight.detach().clone())


def test_the_mean_is_validated_and_the_local_weights_come_back() -> None:
    def program(rank: int, after_evaluation: Any) -> Any:
        module, trajectory = Watch(), Trajectory()
        strategy = gossip(ALONE, after_evaluation=after_evaluation)
        trainer = trainer_of(strategy, 2, callbacks=[trajectory], max_epochs=2)
        trainer.fit(module, loader(8, rank, 2), loader(2))
        return module.validated, trajectory.weights, strategy.last_consensus

    told = in_every_mode(2, program, ("restore", "adopt"))
    mean = consensus_after(8, 2)
    local = [-LR * Rows(8).rows[rank::2].sum(0) for rank in range(2)]
    origins = {"restore": local, "adopt": [mean, mean]}
    for after_evaluation, results in told.items():
        for rank, (validated, trajectory, _) in enumerate(results):
            torch.testing.assert_close(validated[0], mean)
            torch.testing.assert_close(validated[-1], 2 * mean)
            expected = origins[after_evaluation][rank] - LR * Rows(8).rows[rank]
            torch.testing.assert_close(trajectory[4], expected)
    away = (2 * local[0] - 2 * mean).norm().item()
    assert told["restore"][0][2].distance == pytest.approx(away)


class Thresholds(Linear):
    """Sets two buffers at the end of a validation."""

    placed: Tensor
    given: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("placed", torch.tensor(0.0))
        self.register_buffer("given", torch.tensor(0.0))

    @override
    def on_validation_epoch_end(self) -> None:
        self.placed.add_(1.0)
        self.given = self.given + 1


def test_buffers_that_a_validation_sets_keep_their_values() -> None:
    def program(rank: int, communication: Any) -> Any:
        module = Thresholds()
        trainer = trainer_of(gossip("ring", communication), 2, max_epochs=3)
        trainer.fit(module, loader(8, rank, 2), loader(2))
        return module.placed.item(), module.given.item()

    for results in in_every_mode(2, program).values():
        assert results == [(3.0, 3.0)] * 2


@pytest.mark.skipif(
    not OPEN_FILES.exists(), reason="the system does not list open files"
)
def test_one_fit_after_another_opens_no_more_connections() -> None:
    def program(rank: int, size: int) -> list[int]:
        num_open: list[int] = []
        for _ in range(3):
            trainer = trainer_of(gossip("ring", super_learner_size=size), 2)
            trainer.fit(Linear(), loader(4, rank, 2))
            gc.collect()  # a strategy is among its Trainer's cycles
            num_open.append(num_open_files())
        return num_open

    for size, told in in_every_mode(2, program, (1, 2)).items():
        for _, second, third in told:
            assert third == second, size


class Swap(pl.Callback):
    """Validates other weights, as averages of weights do that callbacks keep."""

    def __init__(self, in_place: bool) -> None:
        self.in_place, self.kept = in_place, torch.empty(0)

    @torch.no_grad()
    def put(self, weight: Tensor, values: Tensor) -> None:
        if self.in_place:
            weight.copy_(values)
        else:
            weight.data = values

    @override
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        weight = pl_module.weight
        self.kept = weight.detach().clone() if self.in_place else weight.data
        self.put(weight, torch.full_like(weight, 7.0))

    @override
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.put(pl_module.weight, self.kept)


def test_weights_that_a_callback_validates_change_no_training(tmp_path: Path) -> None:
    def program(rank: int, in_place: bool) -> Any:
        module, trajectory = Watch(), Trajectory()
        saver = ModelCheckpoint(tmp_path / str(in_place), "mean")
        trainer = trainer_of(
            gossip(ALONE),
            2,
            callbacks=[Swap(in_place), trajectory, saver],
            max_epochs=2,
            enable_checkpointing=True,
        )
        trainer.fit(module, loader(8, rank, 2), loader(2))
        return module.validated, trajectory.weights

    told = in_every_mode(2, program, (True, False))
    for in_place, results in told.items():
        for rank, (validated, trajectory) in enumerate(results):
            assert all(one.tolist() == [7.0] * 3 for one in validated)
            local = -LR * Rows(8).rows[rank::2].sum(0)
            torch.testing.assert_close(trajectory[-1], 2 * local)
        saved = torch.load(tmp_path / str(in_place) / "mean.ckpt", weights_only=True)
        expected = 2 * consensus_after(8, 2)
        torch.testing.assert_close(saved["state_dict"]["weight"], expected)


def test_a_checkpoint_is_the_mean_and_needs_nothing_of_this_package(
    tmp_path: Path,
) -> None:
    def program(rank: int) -> None:
        # Before 2.6 Lightning writes `last` once more, at the end of the epoch.
        checkpoint = ModelCheckpoint(tmp_path, "third", every_n_train_steps=3)
        trainer = trainer_of(
            gossip(ALONE), 2, callbacks=[checkpoint], enable_checkpointing=True
        )
        trainer.fit(Linear(), loader(8, rank, 2))

    values(learners(2, program))
    # `weights_only` refuses whatever is not a plain tensor or container.
    checkpoint = torch.load(tmp_path / "third.ckpt", weights_only=True)
    # After three steps of two learners, the first six rows.
    expected = -LR * Rows(8).rows[:6].mean(0) * 3
    torch.testing.assert_close(checkpoint["state_dict"]["weight"], expected)
    assert checkpoint["global_step"] == 3
    assert "pytorch-lightning_version" in checkpoint
    assert checkpoint["state_dict"]["weight"].untyped_storage().nbytes() == 3 * 8


class Unpicklable(Linear):
    """It has a state that no file could hold, and leaves it out of the files."""

    @override
    def get_extra_state(self) -> Any:
        return lambda: 0

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["_extra_state"]


def test_a_module_may_leave_out_of_its_checkpoints_what_no_file_holds(
    tmp_path: Path,
) -> None:
    def program(rank: int) -> None:
        saves = {"callbacks": [ModelCheckpoint(tmp_path)], "enable_checkpointing": True}
        trainer_of(gossip(), 2, **saves).fit(Unpicklable(), loader(8))

    values(learners(2, program))


class SaveAtEpochEnd(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / "end.ckpt")


def test_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    """From its own weights where they are saved, else from the mean."""
    local = [-LR * Rows(8).rows[rank::2].sum(0) for rank in range(2)]
    origins = {"learners": local, "mean": [consensus_after(8, 2)] * 2}

    def strategy(saved: str) -> HADPSGDStrategy:
        return gossip(ALONE, save_learners=saved == "learners")

    def first(rank: int, saved: str) -> None:
        saver = SaveAtEpochEnd(tmp_path / saved)
        trainer = trainer_of(strategy(saved), 2, callbacks=[saver])
        trainer.fit(Linear(), loader(8, rank, 2))

    def second(rank: int, saved: str) -> Any:
        module, trajectory = Linear(), Trajectory()
        trainer = trainer_of(strategy(saved), 2, max_epochs=2, callbacks=[trajectory])
        path = tmp_path / saved / "end.ckpt"
        trainer.fit(module, loader(8, rank, 2), ckpt_path=str(path))
        return trajectory.weights, module.weight.detach(), trainer.global_step

    in_every_mode(2, first, list(origins))
    for saved, results in in_every_mode(2, second, list(origins)).items():
        for rank, (weights, final, global_step) in enumerate(results):
            assert global_step == 8
            assert len(weights) == 4
            torch.testing.assert_close(final, 2 * consensus_after(8, 2))
            expected = origins[saved][rank] - LR * Rows(8).rows[rank]
            torch.testing.assert_close(weights[0], expected)


def test_evaluation_on_its_own() -> None:
    class Module(Watch):
        @override
        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

        @override
        def predict_step(self, batch: Tensor, batch_idx: int) -> None:
            self.validated.append(self.weight.detach().clone())

    def program(rank: int, method: str) -> int:
        module = Module()
        module.weight.data.fill_(2)
        getattr(trainer_of(gossip(), 2), method)(module, loader(8, rank, 2))
        assert all(weight.eq(2).all() for weight in module.validated)
        return len(module.validated)

    methods = "validate", "test", "predict"
    seen = in_every_mode(2, program, methods)
    assert seen == {method: [4, 4] for method in methods}


# --- nobody waits


class WaitsForOthers(Linear):
    """Learner 0's second step lasts until all steps of those named are done."""

    def __init__(self, folder: Path, others: list[int], last: int) -> None:
        super().__init__()
        self.folder, self.others, self.last = folder, others, last

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.last:
            (self.folder / str(self.global_rank)).touch()
        if batch_idx == 1 and self.global_rank == 0:
            files = [self.folder / str(rank) for rank in self.others]
            are_there = lambda: all(file.exists() for file in files)  # noqa: E731
            until(are_there, "the other learners", every_s=0.01)
        return super().training_step(batch, batch_idx)


class Held(NamedTuple):
    """Who goes on while learner 0 makes one step."""

    topology: str
    others: list[int]
    size: int = 1


HELD = {
    "ring": Held("ring", [1, 2, 3]),
    "random ring": Held("random_ring", [1, 2, 3]),
    "pairs": Held("alternating_pairs", [1, 2, 3]),
    "two by two": Held("ring", [2, 3], size=2),
}


def test_others_make_all_their_steps_while_a_straggler_makes_one(
    tmp_path: Path,
) -> None:
    for name in HELD:
        (tmp_path / name).mkdir()

    def program(rank: int, name: str) -> Tensor:
        topology, others, size = HELD[name]
        module = WaitsForOthers(tmp_path / name, others, last=14)
        trainer = trainer_of(gossip(topology, super_learner_size=size), 4)
        trainer.fit(module, loader(60, rank, 4))
        return module.weight.detach()

    for _, final in each(in_every_mode(4, program, list(HELD))):
        torch.testing.assert_close(final, consensus_after(60, 4), atol=1e-12, rtol=0)


COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "broadcast_object_list",
    "barrier",
    "monitored_barrier",
    "all_gather",
    "all_gather_object",
    "gather",
    "gather_object",
    "reduce",
    "scatter",
    "isend",
    "irecv",
    "send",
    "recv",
)


class CountsCollectives(pl.Callback):
    """Calls of torch.distributed by the training thread, from batch to batch."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.at_batches: list[int] = []
        for name in COLLECTIVES:
            for place in (dist, dist.distributed_c10d):
                setattr(place, name, self._counted(name, getattr(place, name)))

    def _counted(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                self.calls.append(name)
            return function(*args, **kwargs)

        return call

    @override
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.at_batches.append(len(self.calls))


class LooksAtThreads(pl.Callback):
    """Names of threads that give way at the last batch; Python knows none of Gloo's."""

    giving_way: Sequence[str] = ()

    @override
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if sys.platform == "linux":
            names = {one.native_id: one.name for one in threading.enumerate()}
            self.giving_way = [
                names.get(number, "Gloo's")
                for number in map(int, os.listdir("/proc/self/task"))
                if os.sched_getscheduler(number) == os.SCHED_BATCH
            ]


def test_a_step_of_async_has_no_collective_and_no_thread_that_interrupts_it() -> None:
    def program(rank: int, communication: str) -> tuple[list[int], Sequence[str]]:
        counts, look = CountsCollectives(), LooksAtThreads()
        trainer = trainer_of(gossip("ring", communication), 3, callbacks=[counts, look])
        trainer.fit(Linear(), loader(30, rank, 3))
        return counts.at_batches, look.giving_way

    # Threads of Gloo stay when a job ends: those of `async` come last.
    for mode, found in each(in_every_mode(3, program, ("sync", "async"))):
        at_batches, giving_way = found
        assert len(at_batches) == 10
        # The same counter sees those of `sync`.
        assert (at_batches[-1] > at_batches[0]) is (mode == "sync")
        if sys.platform == "linux":
            of_peers = [name for name in giving_way if name != "Gloo's"]
            assert len(of_peers) == (4 if mode == "async" else 0)
            assert all(re.match(r"adpsgd-(ask|answer)-\d", name) for name in of_peers)
            assert ("Gloo's" in giving_way) is (mode == "async")


def test_learners_with_different_numbers_of_batches_end_cleanly() -> None:
    def program(rank: int) -> tuple[int, Tensor]:
        module = Watch()
        trainer = trainer_of(gossip(), 3, max_epochs=2)
        trainer.fit(module, loader(4 + 5 * rank), loader(1))
        return trainer.global_step, module.weight.detach()

    results = values(learners(3, program))
    assert [steps for steps, _ in results] == [8, 18, 28]
    sums = [2 * Rows(4 + 5 * rank).rows.sum(0) for rank in range(3)]
    for _, final in results:
        torch.testing.assert_close(final, -LR * torch.stack(sums).mean(0))


def test_learners_that_step_together_need_equally_many_batches() -> None:
    """Two jobs of two learners, which wait for their time-outs together."""
    modes = ("ring", "sync"), ("complete", "delay_by_one")
    ports = free_port(), free_port()

    def program(rank: int) -> None:
        job, own = divmod(rank, 2)
        os.environ.update(
            RANK=str(own), LOCAL_RANK=str(own), MASTER_PORT=str(ports[job])
        )
        os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        strategy = gossip(*modes[job], timeout=timedelta(seconds=5))
        trainer_of(strategy, 2).fit(Linear(), loader(4 + 5 * own))

    for outcome in learners(4, program):
        assert "give all learners equally many batches" in outcome.error


def test_two_fits_in_one_process_and_nothing_of_them_is_left() -> None:
    def program(rank: int) -> Any:
        if rank == 0:
            # As in a program that is no test: it collects garbage, and leaves out
            # nothing. That copies half a gigabyte, and one learner is enough.
            gc.get_freeze_count = inspect.unwrap(gc.get_freeze_count)
            gc.unfreeze()
            gc.enable()
        module, left_out = Linear(), list[bool]()
        look = LambdaCallback(
            on_train_batch_start=lambda *_: left_out.append(gc.get_freeze_count() > 0)
        )
        for _ in range(2):
            trainer_of(gossip(), 2, callbacks=[look]).fit(module, loader(8, rank, 2))
        assert left_out
        assert all(left_out)
        assert rank > 0 or gc.get_freeze_count() == 0
        return module.weight.detach(), [t.name for t in threading.enumerate()]

    for final, threads in values(learners(2, program)):
        torch.testing.assert_close(final, 2 * consensus_after(8, 2))
        assert threads == ["MainThread"]


# --- failures


class Fails(Linear):
    """Does something in one learner's fourth step."""

    def __init__(self, rank: int, action: Callable[[], Any]) -> None:
        super().__init__()
        self.failing, self.action = rank, action

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if (self.global_rank, batch_idx) == (self.failing, 3):
            self.action()
        time.sleep(0.02)  # who goes on until it is told leaves the cores to others
        return super().training_step(batch, batch_idx)


def interrupt() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def failing(mode: Any, rank: int, action: Callable[[], Any]) -> list[Any]:
    topology, communication, size = mode

    def program(own: int) -> None:
        strategy = gossip(topology, communication, super_learner_size=size)
        # Without end: whoever is not told goes on until the test's patience is over.
        trainer = trainer_of(strategy, 4, max_epochs=-1)
        trainer.fit(Fails(rank, action), loader(40, own, 4))

    outcomes = learners(4, program)
    if action is terminate:
        # Lightning ends a process without an error where it was told to end.
        assert outcomes[rank].exit_code == 0
        others = [outcome for own, outcome in enumerate(outcomes) if own != rank]
        assert all(outcome.exit_code > 0 for outcome in others)
    else:
        expect_ends(outcomes, rank, action)
    return outcomes


@pytest.mark.parametrize(
    ("mode", "rank"),
    # Learner 0 hosts the store.
    [(MODES[0], 1), (MODES[1], 0), (MODES[2], 0)],
)
def test_an_exception_ends_all_and_is_named(mode: Any, rank: int) -> None:
    expect_error_named(failing(mode, rank, raise_error), rank)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        # Alone in its super-learner a learner has no DDP that could say this.
        (1, "[/pytorch/gloo/transport/tcp/pair.cc:1] Connection closed by peer"),
        (2, "database connection refused"),
    ],
)
def test_an_error_of_the_program_is_told_as_it_is(size: int, message: str) -> None:
    """It ends all and is named, too."""

    def fail() -> None:
        raise RuntimeError(message)

    outcomes = failing(("ring", "async", size), 1, fail)
    assert f"RuntimeError: {message}" in outcomes[1].error
    named = rf"learner 1 on host \S+ raised RuntimeError: {re.escape(message)}"
    assert re.search(named, outcomes[0].error)
    for other in (2, 3):
        assert "LearnerFollows" in outcomes[other].error


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_learner_ends_the_rest_and_is_named(mode: Any) -> None:
    expect_death_named(failing(mode, 2, kill))


# With four learners in the only super-learner, no job watches them.
@pytest.mark.parametrize("size", [1, 4])
def test_the_death_of_the_host_of_the_store_ends_the_rest_who_say_so(
    size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes = failing(("ring", "async", size), 0, kill)
    assert all("LearnerFollows" in outcome.error for outcome in outcomes[1:])
    shown = capfd.readouterr().err
    assert all(f"learner {rank} ends: " in shown for rank in (1, 2, 3))


def test_a_death_in_the_only_super_learner_names_the_collective() -> None:
    outcomes = failing(("ring", "async", 4), 2, kill)
    assert "in allreduce of gradients of all learners: [" in outcomes[0].error
    assert "LearnerFailed" in outcomes[0].error


def test_a_hook_after_the_last_step_may_take_longer_than_the_timeout() -> None:
    """Such as a test by learner 0 alone."""

    class Slow(Linear):
        @override
        def on_train_end(self) -> None:
            time.sleep(2.5 * (self.global_rank == 0))

    def program(rank: int) -> Tensor:
        module, strategy = Slow(), gossip(timeout=1)
        trainer_of(strategy, 2).fit(module, loader(8, rank, 2))
        return module.weight.detach()

    for final in values(learners(2, program)):
        torch.testing.assert_close(final, consensus_after(8, 2))


# Lightning ends a process for each of these in a way of its own.
@pytest.mark.parametrize(
    ("mode", "action"),
    [
        (MODES[2], interrupt),
        (MODES[2], terminate),
        (MODES[3], terminate),
        (MODES[3], leave),
    ],
)
def test_an_interrupt_of_one_learner_ends_all(
    mode: Any, action: Callable[[], Any]
) -> None:
    outcomes = failing(mode, 1, action)
    assert "learner 1" in outcomes[0].error


def test_learners_of_the_only_super_learner_stop_together_at_sigterm() -> None:
    def program(own: int, told: int) -> tuple[int, bool]:
        strategy = gossip(super_learner_size=2)
        trainer = trainer_of(strategy, 2, max_epochs=-1)
        with pytest.raises(SIGTERMException):
            trainer.fit(Fails(told, terminate), loader(40, own, 2))
        return trainer.global_step, trainer.received_sigterm

    found = in_every_mode(2, program, [0, 1])
    assert found == {told: [(4, True)] * 2 for told in (0, 1)}


def test_sigterm_after_the_last_step_lets_all_learners_end() -> None:
    """Of one super-learner; the others wait for the one that has the signal."""

    class Told(Linear):
        told = 0

        @override
        def on_train_end(self) -> None:
            if self.global_rank == self.told:
                terminate()

    def program(own: int, told: int) -> tuple[int, bool]:
        module = Told()
        module.told = told
        trainer = trainer_of(gossip(super_learner_size=2), 2)
        trainer.fit(module, loader(8, own, 2))
        return trainer.global_step, trainer.received_sigterm

    found = in_every_mode(2, program, [0, 1])
    assert found == {0: [(4, True), (4, False)], 1: [(4, False), (4, True)]}


@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_an_exception_before_training_ends_all_and_is_named(hook: str) -> None:
    def raises(module: Any, **_: Any) -> None:
        if module.global_rank == 1:
            raise ValueError("no such file")

    def program(rank: int) -> None:
        module = type("Raises", (Linear,), {hook: raises})()
        trainer_of(gossip(), 3).fit(module, loader(16, rank, 3))

    first, failed, other = learners(3, program)
    assert "ValueError: no such file" in failed.error
    assert re.search(r"LearnerFailed: learner 1 .* raised ValueError", first.error)
    assert "LearnerFollows" in other.error


@pytest.mark.parametrize("hook", ["configure_optimizers", "on_fit_start"])
def test_an_exception_between_set_up_and_training_is_named(hook: str) -> None:
    """There is a job by then, in which nobody waits yet."""

    class Raises(Linear):
        @override
        def on_fit_start(self) -> None:
            self.fail_in("on_fit_start")

        @override
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.fail_in("configure_optimizers")
            return super().configure_optimizers()

        def fail_in(self, name: str) -> None:
            if (name, self.global_rank) == (hook, 1):
                raise ValueError("no such file")

    def program(rank: int) -> None:
        trainer_of(gossip(), 3).fit(Raises(), loader(16, rank, 3))

    first, failed, other = learners(3, program)
    assert "ValueError: no such file" in failed.error
    assert re.search(r"LearnerFailed: learner 1 .* raised ValueError", first.error)
    assert "LearnerFollows" in other.error


def test_an_exception_in_an_evaluation_ends_all_and_is_named() -> None:
    class Raises(Linear):
        @override
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            if self.global_rank == 1:
                raise ValueError("no such file")
            super().validation_step(batch, batch_idx)

    def program(rank: int) -> None:
        trainer_of(gossip(), 3).validate(Raises(), loader(3))

    first, failed, other = learners(3, program)
    assert "ValueError: no such file" in failed.error
    assert re.search(r"LearnerFailed: learner 1 .* raised ValueError", first.error)
    assert "LearnerFollows" in other.error


def test_sigterm_of_one_learner_in_an_evaluation_ends_all_and_is_named() -> None:
    class Told(Linear):
        @override
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            if (self.global_rank, batch_idx) == (1, 0):
                terminate()
            super().validation_step(batch, batch_idx)

    def program(rank: int) -> None:
        trainer_of(gossip(), 2).validate(Told(), loader(3))

    first, told = learners(2, program)
    assert "SIGTERMException" in told.error
    assert re.search(r"LearnerFailed: learner 1 .* raised SIGTERM", first.error)


def test_learners_whose_models_differ_are_told() -> None:
    def program(rank: int) -> None:
        module = Linear()
        if rank == 1:
            module.weight = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
        trainer_of(gossip(), 2).fit(module, loader(8, rank, 2))

    for outcome in learners(2, program):
        assert re.search(
            r"the model of learner 1 on host \S+ differs from that of learner 0 on "
            r"host \S+: the first weight to differ is `weight` of shape \(5,\) in "
            r"torch.float64, and there `weight` of shape \(3,\) in torch.float64",
            outcome.error,
        )


def test_meetings_that_depend_on_local_values_are_named(tmp_path: Path) -> None:
    class SavesAlone(pl.Callback):
        @override
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_rank == 1 and trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "alone.ckpt")

    def program(rank: int) -> None:
        trainer = trainer_of(gossip(), 2, callbacks=[SavesAlone()])
        trainer.fit(Linear(), loader(16, rank, 2))

    outcomes = learners(2, program)
    assert all(outcome.exit_code > 0 for outcome in outcomes)
    assert "'checkpoint'" in outcomes[0].error
    assert "'end of training'" in outcomes[0].error


# --- the launchers


def train_by_fork(names: str) -> dict[str, tuple[list[float], list[str]]]:
    """The final weights, and the engine's threads that are left, for each name."""
    trained = {}
    for name in names.split():
        os.environ["MASTER_PORT"] = str(free_port())
        module = Sampled()
        trainer_of(f"{name}_fork", 2).fit(module)
        trained[name] = module.weight.tolist(), engine_threads()
    return trained


@pytest.fixture(scope="module")
def trained_by_fork() -> Any:
    """By all names in one process, most of whose time are its imports."""
    return in_fresh_process(train_by_fork, " ".join(NAMES), finalizes=False)


@pytest.mark.skipif(num_gpus() > 0, reason="CUDA forbids to fork")
@pytest.mark.parametrize("name", NAMES)
def test_every_name_trains_by_the_fork_launcher(
    name: str, trained_by_fork: Any
) -> None:
    weights, threads = trained_by_fork[name]
    final = torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(final, consensus_after(16, 2), atol=1e-12, rtol=0)
    assert threads == []


def leave_a_job_open(_: str) -> None:
    """Prints the engine's threads before and after what is done at the exit."""
    # Handlers run in the opposite order.
    atexit.register(lambda: print(json.dumps([before, engine_threads()])))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    set_up_job(Linear(), gossip().dials, Partition((1,)))
    before = engine_threads()


def end_a_job(_: str) -> None:
    """Prints whether torch's groups are there before and after the exit's handlers."""
    atexit.register(lambda: print(json.dumps([before, dist.is_initialized()])))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    job = set_up_job(Linear(), gossip(ALONE).dials, Partition((1,)))
    job.start()
    job.finish()
    job.close()
    before = dist.is_initialized()


def leave_in_training(_: str) -> None:
    """Prints what the others are told when a process ends between two steps."""
    atexit.register(lambda: print(json.dumps(job.coordinator.failure)))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    job = set_up_job(Linear(), gossip(ALONE).dials, Partition((1,)))
    job.start()


def test_the_others_are_told_of_a_process_that_ends_within_training() -> None:
    """As where a callback raises while Lightning tells it of an exception."""
    told = in_fresh_process(leave_in_training, "")
    assert re.search(r"learner 0 .* its process ended within training", told)


def test_the_groups_of_a_job_that_has_ended_are_gone_before_the_interpreter() -> None:
    assert in_fresh_process(end_a_job, "") == [True, False]


def test_no_thread_outlives_a_process_that_leaves_its_job_open() -> None:
    before, after = in_fresh_process(leave_a_job_open, "")
    assert before == ["adpsgd-watch"]
    assert after == []


SCRIPT = """
import sys
from pathlib import Path

import torch
from tests.learners import Sampled, gossip, trainer_of

if __name__ == "__main__":
    name, folder = sys.argv[1:]
    module = Sampled()
    trainer = trainer_of(name, 2)
    trainer.fit(module)
    path = Path(folder) / f"{trainer.global_rank}.pt"
    torch.save(module.weight.detach(), path)
"""


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node=2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "name", "num_files"),
    [
        ("", "adpsgd", 2),
        # The weights of learner 0 come back to the process that made it.
        ("", "sdpsgd_spawn", 1),
        (TORCHRUN, "d1psgd", 2),
    ],
    ids=["script", "spawn", "torchrun"],
)
def test_names_train_by_the_other_launchers(
    tmp_path: Path, launcher: str, name: str, num_files: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    quick = {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **quick, "MASTER_PORT": str(free_port())}
    words = [*launcher.split(), str(script), name, str(tmp_path)]
    result = subprocess.run(
        [warm.python(), *words],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        env=environment,
        cwd=root,
    )
    assert result.returncode == 0, result.stderr
    finals = [torch.load(path) for path in sorted(tmp_path.glob("*.pt"))]
    assert len(finals) == num_files
    for final in finals:
        torch.testing.assert_close(final, consensus_after(16, 2), atol=1e-12, rtol=0)


PLAIN = """
import sys
import lightning.pytorch as pl, torch

class Plain(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        return (batch @ self.weight).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

module = Plain.load_from_checkpoint(sys.argv[1])
print(*module.weight.tolist())
rows = torch.ones(8, 3, dtype=torch.float64)
trainer = pl.Trainer(accelerator="cpu", logger=False, max_epochs=2, barebones=True)
trainer.fit(module, torch.utils.data.DataLoader(rows), ckpt_path=sys.argv[1])
print(*module.weight.tolist())
"""


def test_plain_lightning_loads_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        trainer = trainer_of(gossip(), 2, callbacks=[SaveAtEpochEnd(tmp_path)])
        trainer.fit(Linear(), loader(8, rank, 2))

    values(learners(2, program))
    plain = without("lightning_adpsgd") + PLAIN
    result = subprocess.run(
        [warm.python(), "-W", "ignore", "-c", plain, str(tmp_path / "end.ckpt")],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        cwd=tmp_path,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert result.returncode == 0, result.stderr
    loaded, trained = (
        torch.tensor([float(x) for x in line.split()], dtype=torch.float64)
        for line in result.stdout.strip().splitlines()[-2:]
    )
    torch.testing.assert_close(loaded, consensus_after(8, 2))
    # A second epoch, in one process: eight steps whose gradient is one.
    torch.testing.assert_close(trained, consensus_after(8, 2) - 8 * LR)
