"""Fabric's strategy in real processes over Gloo, against closed forms.

The Trainer's strategy updates weights by the same `Job`, and its tests try every
topology, order and mode. Here four tests show that Fabric's loop reaches it. Learners
train in several cases one after the other, but where a case ends their process.

`Slope` has the same gradients whatever its weights, so that the mean of all learners is
known exactly, however they average: start - lr * sum of the mean gradients.
"""

import gc
import itertools
import os
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_adpsgd import HADPSGDFabricStrategy, Topology
from lightning_adpsgd.coordination.store import Coordinator
from lightning_adpsgd.strategy.job import NAMESPACE
from tests import warm
from tests.expectations import (
    expect_consensus,
    expect_delay_by_one,
    expect_matrices,
    expect_super_learners_of_two,
)
from tests.helpers import (
    OPEN_FILES,
    PROGRAM_S,
    engine_threads,
    num_open_files,
    until,
    without,
)
from tests.learners import (
    LR,
    Rows,
    consensus_after,
    each,
    in_every_mode,
    learners,
    loader,
    values,
)
from tests.strategy.fabric_learners import (
    Bowl,
    Slope,
    gossip,
    launched,
    sgd,
    strategy_of,
    train,
)

ALONE = Topology("alone", lambda index, *_: {index: 1.0}, lambda size: 1)
"""Nobody meets anybody: the local weights are those of plain SGD."""
BOTH = ("sync", "async")


def fit(
    num: int,
    strategy: Callable[[], Any],
    num_rows: int,
    module: Callable[[], Slope] = Slope,
) -> list[tuple[Tensor, Tensor]]:
    """Trajectory [step, weight] and final weights of every learner."""

    def program(rank: int) -> tuple[Tensor, Tensor]:
        fabric, learner = launched(strategy(), num), module()
        model, optimizer = fabric.setup(learner, sgd(learner))
        trajectory = train(fabric, model, optimizer, loader(num_rows, rank, num))
        if isinstance(fabric.strategy, HADPSGDFabricStrategy):
            fabric.strategy.finish()
        assert engine_threads() == []
        return torch.stack(trajectory), learner.weight.detach()

    return values(learners(num, program))


# --- arithmetic of the synchronous modes


def test_sync_processes_follow_the_matrix() -> None:
    order = "average_then_step"
    results = fit(3, lambda: gossip("random_ring", "sync", order=order), 15)
    expect_matrices(results, "random_ring", order)


def test_delay_by_one_processes_follow_the_recurrence() -> None:
    results = fit(3, lambda: gossip("complete", "delay_by_one"), 15, Bowl)
    expect_delay_by_one(results)


# --- the consensus, however it was reached


def test_async_processes_keep_the_mean() -> None:
    expect_consensus(fit(3, gossip, 36), consensus_after(36, 3))


def test_super_learners_of_two() -> None:
    results = fit(4, lambda: gossip(super_learner_size=2), 40)
    expect_super_learners_of_two(results)


def test_unequal_starts_are_made_equal() -> None:
    def program(rank: int) -> Tensor:
        fabric, module = launched(gossip(), 2), Slope(start=1.0 + rank)
        model, optimizer = fabric.setup(module, sgd(module))
        train(fabric, model, optimizer, loader(8, rank, 2))
        strategy_of(fabric).finish()
        return module.weight.detach()

    for final in values(learners(2, program)):
        torch.testing.assert_close(final, consensus_after(8, 2, 1.0))


# --- what users write in their loops


def test_gradients_of_three_batches_make_one_step() -> None:
    def program(rank: int, size: int) -> tuple[Tensor, list[Tensor]]:
        fabric, module = launched(gossip(super_learner_size=size), 4), Slope()
        model, optimizer = fabric.setup(module, sgd(module))
        between = []
        for index, batch in enumerate(loader(24, rank, 4), start=1):
            with fabric.no_backward_sync(model, enabled=index % 3 != 0):
                fabric.backward(model(batch) / 3)
            if index % 3 == 1:
                between.append(model.weight.grad.clone())
            if index % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        strategy_of(fabric).finish()
        return module.weight.detach(), between

    expected = consensus_after(24, 4) / 3
    for results in in_every_mode(4, program, [1, 2]).values():
        for rank, (final, between) in enumerate(results):
            torch.testing.assert_close(final, expected, atol=1e-12, rtol=0)
            # The learner's own gradient, not the one of its super-learner.
            torch.testing.assert_close(between[0], Rows(24).rows[rank] / 3)


def test_a_step_with_a_closure_is_one_step() -> None:
    def program(rank: int, case: tuple[Any, str]) -> tuple[Tensor, int]:
        kind, communication = case
        fabric, module = launched(gossip("complete", communication), 2), Slope()
        model, optimizer = fabric.setup(module, kind(module.parameters(), lr=LR))
        for batch in loader(8, rank, 2):

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = model(batch)
                fabric.backward(loss)
                return loss

            assert isinstance(optimizer.step(closure), Tensor)
        statistics = strategy_of(fabric).gossip_statistics()
        strategy_of(fabric).finish()
        return module.weight.detach(), statistics[0].merges

    cases = [*itertools.product((torch.optim.SGD, torch.optim.LBFGS), BOTH)]
    for (kind, mode), (one, other) in in_every_mode(2, program, cases).items():
        if kind is torch.optim.SGD:
            torch.testing.assert_close(one[0], consensus_after(8, 2))
        torch.testing.assert_close(one[0], other[0])
        if mode == "sync":
            assert one[1] == other[1] == 4


def test_the_groups_of_modules_that_a_program_has_let_go_of_end() -> None:
    """Super-learners of two have one for DDP, too, which serves until then."""

    def program(rank: int) -> tuple[list[int], Any]:
        fabric = launched(gossip("ring", "sync", super_learner_size=2), 4)
        batches, nums = loader(8, rank, 4), list[int]()

        def trained() -> Any:
            module = Slope()
            model, optimizer = fabric.setup(module, sgd(module))
            train(fabric, model, optimizer, batches)
            strategy_of(fabric).finish()
            nums.append(len(dist.distributed_c10d._world.pg_map))
            return model

        first = trained()
        for _ in range(3):
            trained()
            gc.collect()
        first.weight.grad = None
        fabric.backward(first(next(iter(batches))))
        return nums, first.weight.grad

    results = values(learners(4, program))
    assert [nums for nums, _ in results] == [[4, 5, 5, 5]] * 4
    # That of the first one still averages gradients.
    gradients = [gradient for _, gradient in results]
    assert gradients[0].equal(gradients[1])
    assert gradients[2].equal(gradients[3])
    assert not gradients[0].equal(gradients[2])


def test_two_optimizers_of_one_module_take_turns() -> None:
    def program(rank: int, communication: str) -> Tensor:
        fabric, module = launched(gossip("ring", communication), 2), Slope()
        model, first, second = fabric.setup(module, sgd(module), sgd(module))
        for batch in loader(16, rank, 2):
            for optimizer in (first, second):
                optimizer.zero_grad()
                fabric.backward(model(batch))
                optimizer.step()
        strategy_of(fabric).finish()
        return module.weight.detach()

    for _, final in each(in_every_mode(2, program, BOTH)):
        torch.testing.assert_close(final, 2 * consensus_after(16, 2))


def test_two_modules_with_an_optimizer_each() -> None:
    """As the two halves of a GAN."""

    def program(rank: int, communication: str) -> tuple[Tensor, Tensor, int]:
        fabric = launched(gossip("ring", communication), 3)
        pair = [Slope(), Slope(start=1.0)]
        halves = [fabric.setup(module, sgd(module)) for module in pair]
        for batch in loader(24, rank, 3):
            for model, optimizer in halves:
                train(fabric, model, optimizer, [batch])
        with strategy_of(fabric).consensus() as distances:
            num_measured = len(distances)
        strategy_of(fabric).finish()
        assert engine_threads() == []
        return pair[0].weight.detach(), pair[1].weight.detach(), num_measured

    told = each(in_every_mode(3, program, BOTH))
    for _, (first, second, num_measured) in told:
        torch.testing.assert_close(first, consensus_after(24, 3))
        torch.testing.assert_close(second, consensus_after(24, 3, 1.0))
        assert num_measured == 2


def test_one_optimizer_over_two_modules_changes_both() -> None:
    def program(rank: int) -> list[Tensor]:
        fabric, pair = launched(gossip("ring", "sync"), 2), [Slope(), Slope(1.0)]
        first, second = (fabric.setup_module(module) for module in pair)
        weights = [module.weight for module in pair]
        optimizer: Any = fabric.setup_optimizers(torch.optim.SGD(weights, LR))
        for batch in loader(8, rank, 2):
            optimizer.zero_grad()
            fabric.backward(first(batch) + second(batch))
            optimizer.step()
        strategy_of(fabric).finish()
        return [module.weight.detach() for module in pair]

    for first, second in values(learners(2, program)):
        torch.testing.assert_close(first, consensus_after(8, 2))
        torch.testing.assert_close(second, consensus_after(8, 2, 1.0))


def test_gradients_are_clipped_by_each_learner() -> None:
    def program(rank: int, how: str) -> Tensor:
        fabric, module = launched(gossip(ALONE), 2), Slope()
        model, optimizer = fabric.setup(module, sgd(module))
        bound: dict[str, Any] = {how: 0.5}
        for batch in loader(8, rank, 2):
            optimizer.zero_grad()
            model(batch).backward()
            fabric.clip_gradients(model, optimizer, **bound)
            optimizer.step()
        strategy_of(fabric).finish()
        return module.weight.detach()

    rows = Rows(8).rows
    lengths = rows.norm(dim=1, keepdim=True)
    clipped = {
        "max_norm": rows * (0.5 / lengths).clamp(max=1.0),
        "clip_val": rows.clamp(-0.5, 0.5),
    }
    for how, final in each(in_every_mode(2, program, list(clipped))):
        expected = -LR * 4 * clipped[how].mean(0)
        torch.testing.assert_close(final, expected, atol=1e-6, rtol=0)


PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")


def test_other_precisions_train() -> None:
    def program(rank: int, precision: Any) -> Tensor:
        fabric = launched(gossip(), 2, precision=precision)
        module = Slope(dtype=torch.float32)
        model, optimizer = fabric.setup(module, sgd(module))
        train(fabric, model, optimizer, loader(16, rank, 2))
        strategy_of(fabric).finish()
        return module.weight.detach().double()

    expected = consensus_after(16, 2)
    for precision, (one, other) in in_every_mode(2, program, PRECISIONS).items():
        assert torch.equal(one, other), precision
        torch.testing.assert_close(one, expected, atol=0.02, rtol=0)


def test_a_module_without_gradients_is_left_as_it_is() -> None:
    def program(rank: int) -> tuple[bool, list[str]]:
        fabric = launched(gossip(), 2)
        teacher = Slope(start=float(rank)).requires_grad_(False)
        model = fabric.setup_module(teacher)
        fabric.barrier()  # the store ends with learner 0, and the other may still join
        return model.module is teacher, engine_threads()

    assert values(learners(2, program)) == [(True, []), (True, [])]


def test_a_module_that_is_trained_later_is_set_up_again() -> None:
    """Else each learner would train it by itself, without a word."""

    def program(rank: int) -> Tensor:
        fabric, module = launched(gossip(), 2), Slope()
        model = fabric.setup_module(module.requires_grad_(False))
        optimizer: Any = fabric.setup_optimizers(sgd(module))
        module.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"again with `fabric\.setup`"):
            train(fabric, model, optimizer, loader(1))
        model, optimizer = fabric.setup(module, sgd(module))
        train(fabric, model, optimizer, loader(8, rank, 2))
        strategy_of(fabric).finish()
        return module.weight.detach()

    for final in values(learners(2, program)):
        torch.testing.assert_close(final, consensus_after(8, 2))


def test_a_module_set_up_to_be_evaluated_alone_communicates_with_nobody() -> None:
    def program(rank: int) -> list[str]:
        fabric = launched(gossip(), 2)
        fabric.setup_module(Slope())
        gossiping = [name for name in engine_threads() if "watch" not in name]
        strategy_of(fabric).finish()
        return gossiping + engine_threads()

    assert values(learners(2, program)) == [[], []]


class WithHead(Bowl):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.ones(1, dtype=torch.float64))

    @override
    def forward(self, batch: Tensor) -> Tensor:
        return self.head * super().forward(batch)


def test_super_learners_of_two_train_a_weight_that_was_frozen_at_first() -> None:
    def program(rank: int, find: bool) -> list[Tensor]:
        dials = {"super_learner_size": 2, "find_unused_parameters": find}
        fabric, module = launched(gossip(**dials), 4), WithHead()
        module.weight.requires_grad_(False)
        model, optimizer = fabric.setup(module, sgd(module))
        first, *rest = loader(16, rank, 4)
        trajectory = train(fabric, model, optimizer, [first])
        module.weight.requires_grad_(True)
        trajectory += train(fabric, model, optimizer, rest)
        strategy_of(fabric).finish()
        return trajectory

    one, other, *_ = values(learners(4, partial(program, find=True)))
    assert one[0].eq(0).all()
    assert not one[-1].eq(one[-2]).any()
    assert torch.equal(torch.stack(one), torch.stack(other))
    refused = learners(4, partial(program, find=False))
    assert any("`find_unused_parameters=True`" in outcome.error for outcome in refused)


# --- the consensus model


def test_the_mean_is_evaluated_and_the_local_weights_come_back() -> None:
    def program(rank: int, after_evaluation: Any) -> Any:
        strategy = gossip(ALONE, after_evaluation=after_evaluation)
        fabric, module = launched(strategy, 2), Slope()
        model, optimizer = fabric.setup(module, sgd(module))
        train(fabric, model, optimizer, loader(8, rank, 2))
        with strategy.consensus() as (apart,):
            evaluated = module.weight.detach().clone()
            with strategy.consensus() as nothing:
                assert nothing == []
        after = module.weight.detach().clone()
        strategy.finish()
        return evaluated, after, apart.distance

    mean = consensus_after(8, 2)
    local = [-LR * Rows(8).rows[rank::2].sum(0) for rank in range(2)]
    expected = {"restore": local, "adopt": [mean, mean]}
    for mode, results in in_every_mode(2, program, list(expected)).items():
        for rank, (evaluated, after, distance) in enumerate(results):
            torch.testing.assert_close(evaluated, mean)
            torch.testing.assert_close(after, expected[mode][rank])
            assert distance == pytest.approx((local[0] - mean).norm().item())


PLAIN = """
import sys, torch
state = torch.load(sys.argv[1], weights_only=True)
assert set(state) == {"model", "optimizer", "epoch"}, state
assert state["model"]["weight"].untyped_storage().nbytes() == 3 * 8
print(state["epoch"], *state["model"]["weight"].tolist())
"""


def test_a_checkpoint_is_the_mean_and_needs_torch_alone(tmp_path: Path) -> None:
    """Whether or not the mean is in place while it is saved."""

    def program(rank: int, within: bool) -> Tensor:
        path = tmp_path / f"{within}.ckpt"
        strategy, module = gossip(ALONE), Slope()
        fabric = launched(strategy, 2)
        model, optimizer = fabric.setup(module, sgd(module))
        train(fabric, model, optimizer, loader(8, rank, 2))
        state = {"model": model, "optimizer": optimizer, "epoch": 1}
        if within:
            with strategy.consensus():
                fabric.save(path, state)
        else:
            fabric.save(path, state)
        local = module.weight.detach().clone()
        strategy.finish()
        return local

    for within, results in in_every_mode(2, program, [False, True]).items():
        for rank, local in enumerate(results):
            torch.testing.assert_close(local, -LR * Rows(8).rows[rank::2].sum(0))
        expect_mean(tmp_path / f"{within}.ckpt")


def expect_mean(path: Path) -> None:
    """A process without this package finds the mean of eight rows in the file."""
    done = subprocess.run(
        [
            warm.python(),
            "-W",
            "ignore",
            "-c",
            without("lightning", "lightning_adpsgd") + PLAIN,
            str(path),
        ],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        cwd=path.parent,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert done.returncode == 0, done.stderr
    epoch, *weight = done.stdout.split()
    assert epoch == "1"
    saved = torch.tensor([float(x) for x in weight], dtype=torch.float64)
    torch.testing.assert_close(saved, consensus_after(8, 2))


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def momentum(module: Slope) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), LR, momentum=0.5)

    def first(rank: int, size: int) -> None:
        fabric, module = launched(gossip(super_learner_size=size), 4), Slope()
        model, optimizer = fabric.setup(module, momentum(module))
        train(fabric, model, optimizer, loader(4, rank, 4))
        state = {"model": model, "optimizer": optimizer, "epoch": 1}
        fabric.save(tmp_path / f"{size}.ckpt", state)
        strategy_of(fabric).finish()

    def second(rank: int, size: int) -> tuple[Tensor, Any]:
        fabric, module = launched(gossip(ALONE, super_learner_size=size), 4), Slope(9)
        model, optimizer = fabric.setup(module, momentum(module))
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        fabric.load(tmp_path / f"{size}.ckpt", state)
        (after_step,) = train(fabric, model, optimizer, loader(4, rank, 4))
        strategy_of(fabric).finish()
        return after_step, state["epoch"]

    in_every_mode(4, first, [1, 2])
    rows = Rows(4).rows
    for size, results in in_every_mode(4, second, [1, 2]).items():
        for rank, (after_step, epoch) in enumerate(results):
            begin = rank - rank % size
            own = rows[begin : begin + size].mean(0)
            # What learner 0 remembers of its first gradient: its state was saved.
            remembered = 0.5 * rows[:size].mean(0)
            expected = consensus_after(4, 4) - LR * (remembered + own)
            torch.testing.assert_close(after_step, expected)
            assert epoch == 1


def test_a_resume_with_as_many_learners_goes_on_from_their_own_weights(
    tmp_path: Path,
) -> None:
    """Steps with momentum, in one go and with a resume between, are the same."""

    def steps(folder: str, rows: range, load: str | None) -> Callable[[int], Tensor]:
        def program(rank: int) -> Tensor:
            fabric, module = launched(gossip(ALONE, save_learners=True), 2), Slope()
            heavy = torch.optim.SGD(module.parameters(), LR, momentum=0.5)
            model, optimizer = fabric.setup(module, heavy)
            state = {"model": model, "optimizer": optimizer}
            if load:
                assert fabric.load(tmp_path / load, state) == {}
            own = Rows(8).rows[rows][rank::2]
            train(fabric, model, optimizer, own.unsqueeze(1))
            fabric.save(tmp_path / folder, state)
            local = module.weight.detach().clone()
            strategy_of(fabric).finish()
            return local

        return program

    whole = values(learners(2, steps("whole.ckpt", range(8), None)))
    values(learners(2, steps("half.ckpt", range(4), None)))
    resumed = values(learners(2, steps("end.ckpt", range(4, 8), "half.ckpt")))
    for at_once, after_resume in zip(whole, resumed, strict=True):
        torch.testing.assert_close(after_resume, at_once)
    assert not torch.allclose(whole[0], whole[1])


def test_a_resume_with_another_number_of_learners_starts_from_the_mean(
    tmp_path: Path,
) -> None:
    def program(rank: int) -> Tensor:
        num = int(os.environ["WORLD_SIZE"])
        fabric, module = launched(gossip(ALONE, save_learners=True), num), Slope()
        model, optimizer = fabric.setup(module, sgd(module))
        state = {"model": model, "optimizer": optimizer}
        if num == 3:
            fabric.load(tmp_path / "two.ckpt", state)
        else:
            train(fabric, model, optimizer, loader(8, rank, num))
            fabric.save(tmp_path / "two.ckpt", state)
        local = module.weight.detach().clone()
        strategy_of(fabric).finish()
        return local

    values(learners(2, program))
    for local in values(learners(3, program)):
        torch.testing.assert_close(local, consensus_after(8, 2))


def test_a_checkpoint_that_is_loaded_in_the_middle_replaces_all_weights(
    tmp_path: Path,
) -> None:
    def program(rank: int) -> Tensor:
        fabric, module = launched(gossip(), 2), Slope(start=2.0)
        model, optimizer = fabric.setup(module, sgd(module))
        fabric.save(tmp_path / "start.ckpt", {"model": model})
        train(fabric, model, optimizer, loader(8, rank, 2))
        fabric.load(tmp_path / "start.ckpt", {"model": model})
        train(fabric, model, optimizer, loader(4, rank, 2))
        strategy_of(fabric).finish()
        return module.weight.detach()

    for final in values(learners(2, program)):
        torch.testing.assert_close(final, consensus_after(4, 2, 2.0))


def test_no_weights_of_before_a_load_reach_a_learner_that_has_left_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two learners one wakes late from the meeting; rates of 0 change no weights.

    Nor do the updates of before, of a training that has perhaps exploded.
    """
    meet = Coordinator.meet

    def wake_late(self: Coordinator, name: str, meanwhile: Any = None) -> None:
        meet(self, name, meanwhile)
        if name == "end of the load" and dist.get_rank():
            time.sleep(0.05)

    monkeypatch.setattr(Coordinator, "meet", wake_late)

    def program(rank: int) -> list[Tensor]:
        fabric, module = launched(gossip(), 2), Slope()
        model, optimizer = fabric.setup(module, sgd(module, 0.0))
        trajectory = []
        for _ in range(3):
            fabric.barrier()  # nobody trains with what follows
            optimizer.param_groups[0]["lr"] = 1e3
            train(fabric, model, optimizer, 12 * [torch.full((1, 3), rank + 1.0)])
            optimizer.param_groups[0]["lr"] = 0.0
            fabric.barrier()
            module.weight.data.fill_(100.0)
            strategy_of(fabric).load_module_state_dict(module, Slope().state_dict())
            for batch in loader(24, rank, 2):
                trajectory += train(fabric, model, optimizer, [batch])
                time.sleep(0.005)
        strategy_of(fabric).finish()
        return trajectory

    for trajectory in values(learners(2, program)):
        assert len(trajectory) == 3 * 12
        assert not torch.stack(trajectory).any()


def test_the_mean_in_a_file_is_that_of_the_learners_in_it(tmp_path: Path) -> None:
    """Also of those whose last exchange was merged at one end alone."""

    def program(rank: int) -> None:
        fabric, module = launched(gossip(save_learners=True), 2), Bowl()
        model, optimizer = fabric.setup(module, sgd(module, 0.3))
        for number in range(8):
            for batch in loader(14, rank, 2):
                train(fabric, model, optimizer, [batch])
                time.sleep(0.004 if rank else 0.001)
            fabric.save(tmp_path / f"{number}.ckpt", {"model": model})
        strategy_of(fabric).finish()

    values(learners(2, program))
    for number in range(8):
        saved = torch.load(tmp_path / f"{number}.ckpt", weights_only=True)
        own = [one["weights"][0] for one in saved[NAMESPACE][0]]
        torch.testing.assert_close(saved["model"]["weight"], torch.stack(own).mean(0))


def test_one_learner_of_a_super_learner_may_evaluate_the_mean_alone() -> None:
    """All hold its buffers, so that DDP has none to broadcast."""

    def program(rank: int) -> int:
        fabric = launched(gossip("ring", "sync", super_learner_size=2), 4)
        module, batch = Watched(), torch.ones(2, 3, dtype=torch.float64)
        model, optimizer = fabric.setup(module, sgd(module))
        for _ in range(2):
            fabric.backward(model(batch))
            optimizer.step()
            model.eval()
            for evaluating in ([0, 1, 2, 3], [0]):
                with strategy_of(fabric).consensus(), torch.no_grad():
                    if rank in evaluating:
                        model(batch)
                    fabric.barrier()
            model.train()
        strategy_of(fabric).finish()
        return len(module.seen)

    assert values(learners(4, program)) == [2] * 4


class Remembers(Bowl):
    """Its gradient depends on a buffer, which each forward changes."""

    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(3, dtype=torch.float64))

    @override
    def forward(self, batch: Tensor) -> Tensor:
        self.memory.mul_(0.9).add_(batch.mean(0), alpha=0.1)
        return super().forward(batch - self.memory)


def test_a_save_between_the_batches_of_a_step_changes_no_training(
    tmp_path: Path,
) -> None:
    """There DDP broadcasts no buffers, with the save as without."""

    def program(rank: int, saves: bool) -> Tensor:
        fabric = launched(gossip("ring", "sync", super_learner_size=2), 4)
        module = Remembers()
        model, optimizer = fabric.setup(module, sgd(module, 0.3))
        for number, batch in enumerate(Rows(48).rows[rank::4].split(2)):
            takes = number % 3 == 2
            with fabric.no_backward_sync(model, enabled=not takes):
                fabric.backward(model(batch))
            if saves and number % 3 == 1:
                fabric.save(tmp_path / "one.ckpt", {"model": model})
            if takes:
                optimizer.step()
                optimizer.zero_grad()
        strategy_of(fabric).finish()
        return module.weight.detach().clone()

    without, with_saves = (
        values(learners(4, partial(program, saves=saves))) for saves in (False, True)
    )
    torch.testing.assert_close(with_saves, without, rtol=0, atol=0)


def save_two_learners(path: Path) -> None:
    """Two learners save their own weights; the mean is `consensus_after(8, 2)`."""

    def program(rank: int) -> None:
        fabric, module = launched(gossip(ALONE, save_learners=True), 2), Slope()
        model, optimizer = fabric.setup(module, sgd(module))
        train(fabric, model, optimizer, loader(8, rank, 2))
        fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": 1})
        strategy_of(fabric).finish()

    values(learners(2, program))


@pytest.mark.parametrize("num", [1, 2])
def test_a_checkpoint_of_learners_is_the_mean_where_no_module_is_trained(
    tmp_path: Path, num: int
) -> None:
    """As in a program that evaluates, of one learner or of as many as have saved."""
    path = tmp_path / "two.ckpt"
    save_two_learners(path)

    def program(rank: int) -> tuple[Tensor, dict[str, Any]]:
        fabric, module = launched(gossip(save_learners=True), num), Slope()
        model = fabric.setup_module(module)
        remainder = fabric.load(path, {"model": model})
        strategy_of(fabric).finish()
        return module.weight.detach(), {**remainder, "optimizer": None}

    for weight, remainder in values(learners(num, program)):
        torch.testing.assert_close(weight, consensus_after(8, 2))
        assert remainder == {"epoch": 1, "optimizer": None}


def test_the_learners_of_a_checkpoint_come_back_with_their_modules_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "two.ckpt"
    save_two_learners(path)

    def program(rank: int) -> tuple[Tensor, int, str]:
        fabric, module = launched(gossip(save_learners=True), 2), Slope(start=5.0)
        model, _ = fabric.setup(module, sgd(module))
        state = {"epoch": 0}
        fabric.load(path, state)
        kept, other = module.weight.detach().clone(), Slope()
        fabric.setup(other, sgd(other))
        with pytest.raises(ValueError, match=r"of 1 modules .* and 2 are in") as error:
            fabric.load(path, {"model": model})
        strategy_of(fabric).finish()
        return kept, state["epoch"], str(error.value)

    for kept, epoch, told in values(learners(2, program)):
        assert torch.equal(kept, torch.full_like(kept, 5.0))
        assert epoch == 1
        assert "before `fabric.load`" in told


def test_a_load_that_fails_leaves_the_learners_as_they_were() -> None:
    def program(rank: int) -> tuple[bool, Tensor]:
        strategy, module = gossip(), Slope()
        fabric = launched(strategy, 2)
        model, optimizer = fabric.setup(module, sgd(module))
        train(fabric, model, optimizer, loader(8, rank, 2))
        with pytest.raises(RuntimeError, match="Missing key"):
            strategy.load_module_state_dict(module, {})
        is_whole = not any(job.in_consensus for job in strategy.jobs)
        train(fabric, model, optimizer, loader(8, rank, 2))
        strategy.finish()
        return is_whole, module.weight.detach()

    for is_whole, final in values(learners(2, program)):
        assert is_whole
        torch.testing.assert_close(final, 2 * consensus_after(8, 2))


class Normed(Slope):
    """Has buffers that are averaged, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)


def test_a_load_that_fails_leaves_buffers_too() -> None:
    def program(rank: int) -> list[Tensor]:
        strategy, module = gossip(), Normed()
        fabric = launched(strategy, 2)
        fabric.setup(module, sgd(module))
        next(module.norm.buffers()).fill_(float(rank))
        found = {
            f"norm.{name}": value + 7 for name, value in module.norm.named_buffers()
        }
        with pytest.raises(RuntimeError, match="Missing key"):
            strategy.load_module_state_dict(module, found)
        left = [buffer.clone() for buffer in module.norm.buffers()]
        strategy.finish()
        return left

    for rank, (mean, variance, num) in enumerate(values(learners(2, program))):
        assert (mean.item(), variance.item(), num.item()) == (rank, 1.0, 0)


class Watched(Normed):
    """Notes the mean of its batch-norm in each forward of the training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    @override
    def forward(self, batch: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            assert self.norm.running_mean is not None
            self.seen.append(self.norm.running_mean.item())
        return super().forward(batch) + 0 * self.norm(batch[:, :1].float()).sum()


def test_learners_of_a_super_learner_train_with_one_set_of_buffers() -> None:
    """After an evaluation, too, in which DDP sees no gradients."""

    def program(rank: int) -> list[float]:
        fabric = launched(gossip("ring", "sync", super_learner_size=2), 4)
        module = Watched()
        model, optimizer = fabric.setup(module, sgd(module))
        for _ in range(3):
            for batch in Rows(16).rows[rank::4].split(2):
                optimizer.zero_grad()
                fabric.backward(model(batch))
                optimizer.step()
            model.eval()
            with strategy_of(fabric).consensus(), torch.no_grad():
                model(torch.ones(2, 3, dtype=torch.float64))
            model.train()
        strategy_of(fabric).finish()
        return module.seen

    first, second, third, fourth = values(learners(4, program))
    assert len(first) == 6
    assert first == second != third == fourth


# --- nobody waits, but where all come


def test_others_make_all_their_steps_while_a_straggler_makes_one(
    tmp_path: Path,
) -> None:
    def batches(rank: int, size: int) -> Iterable[Tensor]:
        """Learner 0 gets its second batch when the others have had their last."""
        files = [tmp_path / f"{size} {other}" for other in range(size, 4)]
        for index, batch in enumerate(loader(120, rank, 4)):
            if index == 29:
                (tmp_path / f"{size} {rank}").touch()
            if index == 1 and rank == 0:
                are_there = lambda: all(file.exists() for file in files)  # noqa: E731
                until(are_there, "the others", every_s=0.01)
            yield batch

    def program(rank: int, size: int) -> Tensor:
        fabric, module = launched(gossip(super_learner_size=size), 4), Slope()
        model, optimizer = fabric.setup(module, sgd(module))
        train(fabric, model, optimizer, batches(rank, size))
        strategy_of(fabric).finish()
        return module.weight.detach()

    for _, final in each(in_every_mode(4, program, [1, 2])):
        torch.testing.assert_close(final, consensus_after(120, 4), atol=1e-12, rtol=0)


COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "broadcast_object_list",
    "barrier",
    "all_gather",
    "all_gather_object",
    "gather_object",
    "reduce",
    "isend",
    "irecv",
    "send",
    "recv",
)


def count_collectives() -> list[str]:
    """Calls of torch.distributed by the training thread, from here on."""
    calls: list[str] = []

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                calls.append(name)
            return function(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        for place in (dist, dist.distributed_c10d):
            setattr(place, name, counted(name, getattr(place, name)))
    return calls


def test_a_step_of_async_has_no_collective_on_the_training_thread() -> None:
    def program(rank: int, communication: str) -> int:
        calls = count_collectives()
        fabric, module = launched(gossip("ring", communication), 3), Slope()
        model, optimizer = fabric.setup(module, sgd(module))
        before = len(calls)
        train(fabric, model, optimizer, loader(30, rank, 3))
        num_calls = len(calls) - before
        strategy_of(fabric).finish()
        return num_calls

    for mode, num_calls in each(in_every_mode(3, program, BOTH)):
        # The same counter sees those of `sync`.
        assert (num_calls > 0) is (mode == "sync")


def test_collectives_of_all_learners_bring_all_together() -> None:
    """In "async" after unequal numbers of steps, so that all are at other times."""

    def program(rank: int, communication: str) -> Any:
        fabric, module = launched(gossip("ring", communication), 3), Slope()
        model, optimizer = fabric.setup(module, sgd(module))
        num_rows = 4 + 9 * rank if communication == "async" else 6
        train(fabric, model, optimizer, loader(num_rows))
        own = torch.tensor(float(rank))
        total: Any = fabric.all_reduce(own.clone(), reduce_op="sum")
        every: Any = fabric.all_gather(own)
        seen = total.item(), every.tolist(), fabric.broadcast(rank + 7, src=1)
        fabric.barrier("evening")
        strategy_of(fabric).finish()
        return seen

    for mode, seen in each(in_every_mode(3, program, BOTH)):
        assert seen == (3.0, [0.0, 1.0, 2.0], 8), mode


def test_learners_with_different_numbers_of_batches_end_in_the_mean() -> None:
    def program(rank: int) -> Tensor:
        fabric, module = launched(gossip(), 3), Slope()
        model, optimizer = fabric.setup(module, sgd(module))
        train(fabric, model, optimizer, loader(4 + 5 * rank) if rank else [])
        strategy_of(fabric).finish()
        return module.weight.detach()

    sums = [Rows(4 + 5 * rank).rows.sum(0) for rank in (1, 2)]
    for final in values(learners(3, program)):
        torch.testing.assert_close(final, -LR * torch.stack(sums).sum(0) / 3)


def test_two_trainings_in_one_process_and_no_thread_is_left() -> None:
    def program(rank: int) -> Any:
        fabric, module = launched(gossip(), 2), Slope()
        for _ in range(2):
            model, optimizer = fabric.setup(module, sgd(module))
            train(fabric, model, optimizer, loader(8, rank, 2))
            strategy_of(fabric).finish()
        assert not module._forward_pre_hooks
        return module.weight.detach(), [t.name for t in threading.enumerate()]

    for final, threads in values(learners(2, program)):
        torch.testing.assert_close(final, 2 * consensus_after(8, 2))
        assert threads == ["MainThread"]


@pytest.mark.skipif(
    not OPEN_FILES.exists(), reason="the system does not list open files"
)
def test_the_training_of_one_module_after_another_opens_no_more_connections() -> None:
    def program(rank: int) -> tuple[list[int], list[Any]]:
        fabric, num_open = launched(gossip(), 2), list[int]()
        trained = list[Any]()
        for _ in range(3):
            module = Slope()
            model, optimizer = fabric.setup(module, sgd(module))
            train(fabric, model, optimizer, loader(4, rank, 2))
            strategy_of(fabric).finish()
            num_open.append(num_open_files())
            trained.append(weakref.ref(module))
            del module, model, optimizer
        gc.collect()
        return num_open, [found() for found in trained]

    for (_, second, third), alive in values(learners(2, program)):
        assert third == second
        assert alive == [None] * 3  # nor does it keep the modules
