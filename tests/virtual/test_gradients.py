"""One pass over stacked weights is what a loop over super-learners computes."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_adpsgd.virtual.clock import Compute, Link
from lightning_adpsgd.virtual.cluster import VirtualCluster
from lightning_adpsgd.virtual.gradients import rows_at_once
from lightning_adpsgd.virtual.timeline import Change

Batch = tuple[Tensor, Tensor]
UNEVEN = {"compute": Compute(1.0, spread=0.4), "link": Link(latency=0.3)}
FAILS_AND_COMES_BACK = (Change(4.5, 2, "fails"), Change(9.2, 2, "joins"))


def batches_of(learner: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(learner)
    for size in itertools.cycle((8, 8, 5)):  # for all alike, but for learner 1
        size += learner == 1 and size == 5
        inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        yield inputs, inputs.abs().argmax(1) % 3


def module(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 12), *more, nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 3))
    return nn.Sequential(*layers).double()


def loss(module: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def cluster(trained: nn.Module, vectorize: bool, *where: Any, **more: Any) -> Any:
    given: dict[str, Any] = {
        "loss": loss,
        "optimizer": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "communication": "sync",
        "samples_in": lambda batch: len(batch[1]),
        **more,
    }
    return VirtualCluster(trained, 4, *where, vectorize=vectorize, **given)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.output = nn.LSTM(2, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output(self.lstm(inputs.view(-1, 3, 2).transpose(0, 1))[0][-1])


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"order": "average_then_step"},
        {"communication": "delay_by_one"},
        {"super_learner_size": 3},
        {"gradient_clip": 0.05},
        {"trained": Recurrent},
        {"communication": "async", **UNEVEN},
        {"communication": "async", "order": "average_then_step", **UNEVEN},
        {"communication": "async", "super_learner_size": 2, **UNEVEN},
        {"communication": "async", "changes": FAILS_AND_COMES_BACK, **UNEVEN},
    ],
    ids=str,
)
def test_it_is_what_the_loop_computes(more: dict[str, Any]) -> None:
    """Every third batch cannot be stacked, and is taken in the loop."""

    def make(vectorize: bool) -> Any:
        torch.manual_seed(0)
        dials = {name: given for name, given in more.items() if name != "trained"}
        return cluster(more.get("trained", module)().double(), vectorize, **dials)

    batched, looped = make(True), make(False)
    for each in (batched, looped):
        each.fit(batches_of, 600)
    torch.testing.assert_close(
        batched.weights()[0], looped.weights()[0], atol=1e-12, rtol=0
    )


def test_without_lockstep_gradients_are_taken_together_too() -> None:
    calls = []

    def counted(module: nn.Module, batch: Batch) -> Tensor:
        calls.append(batch)
        return loss(module, batch)

    def even(learner: int) -> Iterator[Batch]:
        yield next(batches_of(learner))

    batched = cluster(module(), True, communication="async", loss=counted, **UNEVEN)
    batched.fit(even, 4 * 8 * 10)
    assert sum(batched.learners.steps) == 40
    # At least a gradient of somebody else comes with each that is asked for.
    assert len(calls) <= 20


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_weights_that_were_changed_in_a_pause_are_trained_on_from(mode: Any) -> None:
    batched, looped = (cluster(module(), v, communication=mode, **UNEVEN)
                       for v in (True, False))  # fmt: skip
    for each in (batched, looped):
        each.fit(batches_of, 300)
        each.weights()[0][2:] += 0.5
        each.fit(batches_of, 900)
    torch.testing.assert_close(
        batched.weights()[0], looped.weights()[0], atol=1e-12, rtol=0
    )


def test_weights_that_are_frozen_in_a_pause_stay() -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1)

    trained = module()
    virtual = cluster(trained, True, communication="async", optimizer=sgd, **UNEVEN)
    virtual.fit(batches_of, 300)
    before = torch.stack([virtual.learners.shown(i)[0] for i in range(4)]).mean(0)
    trained[0].requires_grad_(False)
    for parameter in trained.parameters():
        parameter.grad = None
    virtual.fit(batches_of, 900)
    after = torch.stack([virtual.learners.shown(i)[0] for i in range(4)]).mean(0)
    size = 6 * 12 + 12
    torch.testing.assert_close(after[:size], before[:size], atol=1e-13, rtol=0)
    assert not torch.allclose(after[size:], before[size:], atol=1e-3)


def test_a_pass_takes_as_many_gradients_as_fit_into_a_cache() -> None:
    def of(row_bytes: int) -> Any:
        row = torch.empty(row_bytes, dtype=torch.uint8, device="meta")
        return SimpleNamespace(vectors=lambda number: [row])

    assert rows_at_once(of(40_000), 16) == 16
    assert rows_at_once(of((24 << 20) // 100), 1000) == 100
    assert rows_at_once(of(24 << 20), 16) == 8


def test_frozen_weights_stay_and_tied_ones_are_one() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(1)
        made = module(nn.Linear(12, 12))
        made[0].requires_grad_(False)
        made[3].weight = made[1].weight
        return made

    batched, looped = cluster(make(), True), cluster(make(), False)
    before = batched.module[0].weight.clone()
    for each in (batched, looped):
        each.fit(batches_of, 600)
    torch.testing.assert_close(
        batched.weights()[0], looped.weights()[0], atol=1e-12, rtol=0
    )
    # To rounding: a third of three equal weights is not always that weight.
    torch.testing.assert_close(batched.module[0].weight, before, atol=1e-14, rtol=0)


def test_dropout_draws_differently_for_each_row() -> None:
    def same(learner: int) -> Iterator[Batch]:
        return batches_of(0)

    batched = cluster(module(nn.Dropout(0.5)), True)
    batched.fit(same, 40, every_samples=40)
    rows = batched.weights()[0]
    assert batched.learners.consensus().distance > 0
    assert not torch.equal(rows[0], rows[2])


@pytest.mark.parametrize(
    ("trained", "more", "message"),
    [
        (
            lambda: module(nn.BatchNorm1d(12)),
            {},
            "a module with buffers, .* got `1.running_mean` of shape",
        ),
        (
            module,
            {"optimizer": lambda p: torch.optim.LBFGS(p)},
            "with LBFGS, which asks for several gradients",
        ),
    ],
)
def test_what_cannot_be_one_pass_is_refused(
    trained: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cluster(trained(), True, **more)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs)
        return outputs if outputs.sum() > 0 else -outputs


def test_a_module_that_cannot_run_over_stacked_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="`vectorize` must be False for this module"):
        cluster(Branches().double(), True).fit(batches_of, 100)
