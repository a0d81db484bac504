"""Gradients are taken together by themselves only where a loop does the same."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_adpsgd.virtual.clock import Compute, Link
from lightning_adpsgd.virtual.cluster import VirtualCluster
from lightning_adpsgd.virtual.together import FEWEST, TOGETHER_BYTES, rows_at_once

Batch = tuple[Tensor, Tensor]
UNEVEN: dict[str, Any] = {"compute": Compute(1.0, spread=0.4), "link": Link(1e5, 0.3)}
MODES: list[dict[str, Any]] = [
    {"communication": "sync"},
    {"communication": "sync", "order": "average_then_step"},
    {"communication": "delay_by_one"},
    {"communication": "async", **UNEVEN},
    {"communication": "async", "super_learner_size": 2, **UNEVEN},
]


def batches_of(learner: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(learner)
    for _ in itertools.count():
        inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        yield inputs, inputs.abs().argmax(1) % 3


class Classifier(pl.LightningModule):
    """Dense layers, one of which nothing is computed with."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(6, 12), nn.LayerNorm(12), *more, nn.Tanh())
        self.net = nn.Sequential(*layers, nn.Linear(12, 3)).double()
        self.spare = nn.Linear(6, 3).double()

    def loss(self, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.log("train_loss", loss := self.loss(batch))
        return loss / (1 + batch_idx)

    @override
    def configure_optimizers(self) -> Any:
        # Decay moves a weight with a gradient of zeros, but none without one.
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=0.1)


def cluster(
    module: nn.Module, vectorize: bool | None = None, **more: Any
) -> VirtualCluster:
    return VirtualCluster(module, FEWEST, vectorize=vectorize, **more)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_plain_module_is_trained_together_as_it_is_in_a_loop(mode: Any) -> None:
    together, looped = (cluster(Classifier(), v, **mode) for v in (None, False))
    for each in (together, looped):
        each.fit(batches_of, 8 * 8 * 6 * mode.get("super_learner_size", 1))
    assert (together.in_a_loop, looped.in_a_loop) == ("", "`vectorize` is False")
    assert together.fleet.steps == looped.fleet.steps
    found, expected = together.weights()[0], looped.weights()[0]
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    spare = nn.utils.parameters_to_vector(Classifier().spare.parameters())
    kept = nn.utils.parameters_to_vector(looped.module.spare.parameters())  # pyright: ignore
    torch.testing.assert_close(kept, spare, atol=1e-14, rtol=0)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_same_seed_and_a_pause_give_the_same_run_to_the_last_bit(mode: Any) -> None:
    whole, again, halves = (cluster(Classifier(), **mode) for _ in range(3))
    for each in (whole, again):
        each.fit(batches_of, 1600)
    halves.fit(batches_of, 700)
    halves.fit(batches_of, 1600)
    assert whole.in_a_loop == halves.in_a_loop == ""
    assert torch.equal(whole.weights()[0], again.weights()[0])
    assert torch.equal(whole.weights()[0], halves.weights()[0])


def test_weights_that_were_changed_in_a_pause_are_trained_on_from() -> None:
    together, looped = (
        cluster(Classifier(), v, communication="async", **UNEVEN) for v in (None, False)
    )
    for each in (together, looped):
        each.fit(batches_of, 700)
        each.weights()[0][3:] += 0.5
        each.fit(batches_of, 1600)
    torch.testing.assert_close(
        together.weights()[0], looped.weights()[0], atol=1e-12, rtol=0
    )


def test_weights_that_are_trained_no_more_stay() -> None:
    module = Classifier()
    virtual = cluster(module, communication="async", **UNEVEN)
    virtual.fit(batches_of, 700)
    module.net[0].requires_grad_(False)
    # What a pass has prepared is not used either.
    virtual._updates = [virtual._objective.make_update() for _ in range(FEWEST)]
    rows = [virtual.fleet.shown(i)[0] for i in range(FEWEST)]
    before = torch.stack(rows).mean(0)
    virtual.fit(batches_of, 1600)
    assert virtual.in_a_loop == "`requires_grad` of a weight has changed"
    rows = [virtual.fleet.shown(i)[0] for i in range(FEWEST)]
    after = torch.stack(rows).mean(0)
    size = 6 * 12 + 12
    torch.testing.assert_close(after[:size], before[:size], atol=1e-13, rtol=0)
    assert not torch.allclose(after[size:], before[size:], atol=1e-3)


# --- what a loop alone does right


class Recurrent(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6).double()

    @override
    def loss(self, batch: Batch) -> Tensor:
        return super().loss((self.lstm(batch[0])[0], batch[1]))


class Counting(Classifier):
    calls = 0

    @override
    def loss(self, batch: Batch) -> Tensor:
        self.calls += 1
        return super().loss(batch) / self.calls


class Keeping(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    @override
    def loss(self, batch: Batch) -> Tensor:
        self.losses.append((loss := super().loss(batch)).detach())
        return loss


KEPT_BY_OTHERS: dict[str, list[Tensor]] = {"losses": []}


def keep_elsewhere(loss: Tensor) -> None:
    KEPT_BY_OTHERS["losses"].append(loss.detach())


class KeepingElsewhere(Classifier):
    @override
    def loss(self, batch: Batch) -> Tensor:
        keep_elsewhere(loss := super().loss(batch))
        return loss


class Branching(Classifier):
    @override
    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        return loss if loss > 1 else 2 * loss


class BranchingByNumber(Classifier):
    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch) * (2 if batch_idx % 3 == 0 else 1)


class Drawing(Classifier):
    draw: Callable[[], float] = staticmethod(random.random)

    @override
    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) * self.draw()


class DrawingFromNumpy(Drawing):
    draw = staticmethod(np.random.rand)


class DrawingFromItsOwn(Drawing):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)

    @override
    def draw(self) -> float:  # pyright: ignore
        return float(self.generator.random())


class Bare(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    @override
    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) * self.scale


def _twice(layer: nn.Module, inputs: Any, outputs: Any) -> Tensor:
    return 2 * outputs


def hooked() -> Classifier:
    module = Classifier()
    module.get_submodule("net.0").register_forward_hook(_twice)
    return module


def hooked_at_a_weight() -> Classifier:
    module = Classifier()
    module.net[0].weight.register_hook(lambda gradient: gradient / 2)  # pyright: ignore
    return module


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Recurrent, "`lstm` has weights and is a LSTM"),
        (Bare, "`` has weights and is a Bare"),
        (
            lambda: Classifier(nn.BatchNorm1d(12)),
            "keep the buffer `net.2.running_mean`",
        ),
        (lambda: Classifier(nn.Dropout(0.3)), "its loss draws random numbers"),
        (Drawing, "its loss draws random numbers"),
        (DrawingFromNumpy, "its loss draws random numbers"),
        (DrawingFromItsOwn, "its loss counts or keeps something"),
        (Counting, "its loss counts or keeps something"),
        (Keeping, "its loss counts or keeps something"),
        (KeepingElsewhere, "its loss keeps tensors of its computation"),
        (Branching, "a pass over stacked weights is impossible: vmap"),
        (BranchingByNumber, "a pass over stacked weights is impossible: vmap"),
        (hooked, "`net.0` has a hook"),
        (hooked_at_a_weight, "`net.0.weight` has a hook"),
    ],
)
def test_what_is_not_the_same_together_is_taken_in_a_loop(make: Any, why: str) -> None:
    def weights(vectorize: bool | None) -> Tensor:
        random.seed(1)
        np.random.seed(1)
        virtual = cluster(make(), vectorize)
        virtual.fit(batches_of, 8 * 8 * 3)
        reason = virtual.in_a_loop
        assert reason is not None
        assert why in reason or vectorize is False
        return virtual.weights()[0].clone()

    assert torch.equal(weights(None), weights(False))


def test_what_was_kept_by_a_loss_is_plain_tensors() -> None:
    KEPT_BY_OTHERS["losses"].clear()
    cluster(KeepingElsewhere()).fit(batches_of, 8 * 8 * 2)
    assert torch.stack(KEPT_BY_OTHERS["losses"]).isfinite().all()
    assert len(KEPT_BY_OTHERS["losses"]) == 2 * 8


def test_a_loss_that_counts_in_its_closure_is_taken_in_a_loop() -> None:
    calls: list[int] = []

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        calls.append(len(calls))
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    module = nn.Linear(6, 3).double()
    virtual = cluster(module, loss=loss, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    virtual.fit(batches_of, 8 * 8 * 3)
    assert virtual.in_a_loop == "its loss counts or keeps something"
    assert calls == list(range(3 * 8))


def few(**more: Any) -> VirtualCluster:
    return VirtualCluster(Classifier(), FEWEST - 1, **more)


def with_lbfgs() -> VirtualCluster:
    return cluster(
        Classifier(),
        loss=lambda module, batch: module.loss(batch),  # pyright: ignore
        optimizer=lambda p: torch.optim.LBFGS(p, 0.1),
    )


def large() -> VirtualCluster:
    return cluster(
        nn.Linear(800, 1000),
        loss=lambda module, batch: module(batch).square().mean(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (few, "fewer than 8 super-learners, 7"),
        (with_lbfgs, "LBFGS asks for several gradients"),
        (large, "with more than 1048576 bytes of weights"),
    ],
)
def test_where_it_does_not_pay_nothing_is_tried(make: Any, why: str) -> None:
    reason = make().in_a_loop
    assert reason is not None
    assert why in reason


def test_a_pass_takes_as_many_gradients_as_fit_into_a_cache() -> None:
    assert rows_at_once(16, 40_000) == 16
    assert rows_at_once(1000, TOGETHER_BYTES // 100) == 100
    assert rows_at_once(16, TOGETHER_BYTES) == FEWEST
