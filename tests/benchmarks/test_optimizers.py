"""The benchmark of adaptive optimizers, in a few steps."""

import math
from collections.abc import Iterable, Sequence

import pytest
import torch

from benchmarks import optimizers
from benchmarks.optimizers import Outcome, Run, Trials, best_rates, schedule, train


@pytest.fixture(autouse=True)
def in_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "STEPS", 4)
    monkeypatch.setattr(optimizers, "CONTEXT", 8)


def test_with_sgd_an_average_of_all_weights_is_ddp_and_with_adamw_it_is_not() -> None:
    losses = {
        (method, name): train(Run(method, rate, 0, name)).loss
        for name, rate in (("SGD", 0.1), ("AdamW", 4e-3))
        for method in ("ddp", "sync, complete")
    }
    sgd, mean_of_weights = losses["ddp", "SGD"], losses["sync, complete", "SGD"]
    assert mean_of_weights == pytest.approx(sgd, rel=1e-5)
    adamw, local_moments = losses["ddp", "AdamW"], losses["sync, complete", "AdamW"]
    assert abs(local_moments - adamw) > 1e-3 * adamw


def test_local_second_moments_are_larger_than_those_of_the_mean_gradient() -> None:
    ddp, local = (train(Run(m, 4e-3, 0)) for m in ("ddp", "sync, complete"))
    assert local.second > ddp.second


def test_a_run_that_diverges_is_told() -> None:
    assert train(Run("ddp", 1e30, 0, "SGD")).loss == math.inf


def test_the_rate_rises_and_falls_to_a_tenth() -> None:
    factor = schedule(warm_up=0.5)
    batch = optimizers.LEARNERS * optimizers.BATCH
    assert [factor(batch * step) for step in (0, 1, 2)] == [0.5, 0.5, 1.0]
    assert factor(4 * batch) == pytest.approx(0.1)
    assert factor(batch - 1) == factor(0)
    assert schedule(warm_up=0.0)(0) == 1.0


class Known(Trials):
    """Losses by a formula of the rate in place of trainings."""

    def __init__(self, best: float) -> None:
        self._best, self.tried = best, set[float]()

    def of(self, runs: Iterable[Run]) -> list[Outcome]:
        rates = [run.rate for run in runs]
        self.tried |= set(rates)
        losses = (abs(math.log2(rate / self._best)) for rate in rates)
        return [Outcome(loss, loss, loss, loss) for loss in losses]


@pytest.mark.parametrize("best", [0.5, 1.0, 16.0])
def test_the_search_ends_where_both_neighbours_are_worse(best: float) -> None:
    trials = Known(best)
    (found,) = best_rates(trials, [Run("ddp", 1.0, 0)])
    assert found.rate == best
    assert {best / 2, best, best * 2} <= trials.tried


def test_a_rate_is_compared_by_the_mean_over_seeds() -> None:
    def outcomes(*losses: float) -> Sequence[Outcome]:
        return [Outcome(loss, loss, 0.0, 0.0) for loss in losses]

    assert optimizers.mean_loss(outcomes(1.0, 2.0)) == 1.5
    assert optimizers.mean_loss(outcomes(1.0, math.inf)) == math.inf


def test_pieces_of_the_text_are_ascii_and_kept_apart() -> None:
    training, held_out = optimizers.text(False), optimizers.text(True)
    assert max(training.max(), held_out.max()) < optimizers.SYMBOLS
    assert 0.02 < len(held_out) / len(training) < 0.5
    found = optimizers.sequences(training, 3, torch.Generator())
    assert found.shape == (3, optimizers.CONTEXT + 1)
