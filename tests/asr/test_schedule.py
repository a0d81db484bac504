"""The learning-rate schedule against the papers' figures."""

import pytest
import torch

from lightning_adpsgd.asr.schedule import GlobalSampleLR, PaperSchedule

SCHEDULE = PaperSchedule(corpus_samples=1_000_000, global_batch=8192)
PEAK = 0.1 * 8192 / 256


@pytest.mark.parametrize(
    ("epoch", "rate"),
    [
        (0, 0.1),
        (5, (0.1 + PEAK) / 2),
        (10, PEAK),
        (10.01, PEAK / 2**0.5),
        (11, PEAK / 2**0.5),
        (12, PEAK / 2),
        (15.5, PEAK / 8),
        (16, PEAK / 8),
    ],
)
def test_the_rate_passes_through_the_points_of_the_papers(epoch, rate):
    assert SCHEDULE.rate(round(epoch * 1_000_000)) == pytest.approx(rate)


def test_the_reference_batch_keeps_its_rate_until_the_decay():
    schedule = PaperSchedule(corpus_samples=1000, global_batch=256)
    assert [schedule.rate_at_epoch(e) for e in (0, 3, 10)] == pytest.approx([0.1] * 3)


def test_without_warmup_the_rate_starts_at_the_peak():
    schedule = PaperSchedule(1000, 512, warmup_epochs=0)
    assert schedule.rate(0) == pytest.approx(0.2)


def _scheduler(num_groups: int = 1) -> tuple[torch.optim.SGD, GlobalSampleLR]:
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(num_groups)
    ]
    optimizer = torch.optim.SGD(groups, lr=123.0)
    schedule = PaperSchedule(100, 10, base_batch=1, warmup_epochs=2)
    return optimizer, GlobalSampleLR(optimizer, schedule)


def _run(optimizer: torch.optim.Optimizer, scheduler: GlobalSampleLR, steps: int):
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[-1]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_the_optimizer_gets_the_rate_of_the_samples_seen_before_each_step():
    optimizer, scheduler = _scheduler(num_groups=2)
    expected = [scheduler.schedule.rate(10 * step) for step in range(40)]
    assert _run(optimizer, scheduler, 40) == pytest.approx(expected)


def test_a_restored_scheduler_continues_where_the_saved_one_was():
    whole = _run(*_scheduler(), 30)
    optimizer, scheduler = _scheduler()
    _run(optimizer, scheduler, 12)
    resumed_optimizer, resumed = _scheduler()
    resumed.load_state_dict(scheduler.state_dict())
    assert _run(resumed_optimizer, resumed, 18) == pytest.approx(whole[12:])


def test_the_saved_state_holds_plain_numbers_only():
    _, scheduler = _scheduler()
    assert {type(value) for value in scheduler.state_dict().values()} == {int}


@pytest.mark.parametrize(
    "wrong",
    [
        {"corpus_samples": 0},
        {"global_batch": -1},
        {"base_rate": float("nan")},
        {"decay": 1.5},
        {"warmup_epochs": -1},
    ],
)
def test_a_wrong_argument_is_named(wrong):
    arguments = {"corpus_samples": 10, "global_batch": 10} | wrong
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
        PaperSchedule(**arguments)
