"""The live line: what it shows in either bar, and whose samples it counts."""

import re
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from packaging.version import Version
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader, TensorDataset

from lightning_adpsgd.callbacks import ProgressLine
from lightning_adpsgd.callbacks.progress_line import Look
from lightning_adpsgd.import_names import lightning_version
from tests.callbacks.test_monitors import GossipingStrategy, Slope
from tests.learners import Linear, gossip, learners, loader, trainer_of, values


class Counting(GossipingStrategy):
    """Claims an exchange at every look, among three islands."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = count()

    def gossip_statistics(self):
        number = next(self.looks)
        return replace(super().gossip_statistics(), exchanges=number, members=3)


def fit(line: ProgressLine, bar: Callback | None = None, **arguments: Any) -> Trainer:
    data = DataLoader(TensorDataset(torch.zeros(12, 1)), batch_size=2)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[line, *([bar] if bar is not None else [])],
        logger=False,
        max_epochs=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(Slope(), data)
    return trainer


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_the_line_is_in_either_progress_bar(
    bar: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if bar is RichProgressBar:
        pytest.importorskip("rich")
        if Version(lightning_version()) < Version("2.5.6"):
            pytest.skip("the bar of Lightning 2.5.0 fails with rich of today")
    monkeypatch.setenv("COLUMNS", "200")
    fit(ProgressLine(0), bar(), strategy=Counting())
    printed = "".join(capsys.readouterr())
    for name, value in [("distance", "0.5"), ("members", "3")]:
        assert re.search(rf"{name}[:=] ?{value}", printed)
    assert re.search(r"samples/s[:=] ?\d", printed)
    assert re.search(r"exchanges/step[:=] ?1", printed)


def test_what_a_strategy_lacks_is_left_out() -> None:
    trainer = fit(ProgressLine(0), TQDMProgressBar())
    assert set(trainer.progress_bar_metrics) == {"samples/s"}
    assert float(trainer.progress_bar_metrics["samples/s"]) > 0


def test_a_look_is_taken_no_more_often_than_asked_for() -> None:
    trainer = fit(ProgressLine(1000), TQDMProgressBar(), strategy=Counting())
    assert trainer.progress_bar_metrics == {}


def test_nothing_is_asked_where_no_bar_is() -> None:
    strategy = Counting()
    fit(ProgressLine(0), strategy=strategy, enable_progress_bar=False)
    assert next(strategy.looks) == 0


@pytest.mark.parametrize("every_s", [-1, float("nan"), float("inf")])
def test_a_time_out_of_bounds_is_refused(every_s: float) -> None:
    with pytest.raises(ValueError, match="`every_s` must be 0 or more seconds, got"):
        ProgressLine(every_s)


def test_speeds_are_over_the_window() -> None:
    first, last = Look(1.0, 100, 10, 4, 0), Look(3.0, 500, 20, 9, 0)
    assert last.figures_since(first) == {"samples/s": 200, "exchanges/step": 0.5}


def test_islands_count_alike() -> None:
    first, last = Look(1.0, 100, 10, 0, 4), Look(3.0, 500, 20, 0, 3)
    assert last.figures_since(first) == {"samples/s": 600, "members": 3}


def counting(told: int, store: Any) -> Any:
    """How a line counts that has told a store so many samples."""
    line = ProgressLine(0)
    line._told, line._store = told, store
    return line._add_up


def test_all_learners_count_together_from_where_each_began() -> None:
    store = HashStore()
    fresh, resumed = counting(0, store), counting(70, store)
    assert [fresh(8), resumed(74), fresh(9)] == [8, 12, 13]


class Lost:
    """A store whose host is away every second time."""

    def __init__(self) -> None:
        self.turns, self.total = count(), 0

    def add(self, key: str, amount: int, /) -> int:
        if next(self.turns) % 2:
            raise dist.DistNetworkError("connection reset")
        self.total += amount
        return self.total


def test_a_store_that_is_gone_ends_no_training() -> None:
    lost: Any = Lost()
    counted = counting(0, lost)
    assert [counted(own) for own in (2, 4, 6)] == [2, 2, 6]


def test_learners_of_one_job_add_up_their_samples() -> None:
    """Whoever looks last has seen the samples of both."""

    def program(rank: int) -> int:
        line = ProgressLine(0)
        bar = TQDMProgressBar()
        arguments: dict[str, Any] = {"callbacks": [line, bar]}
        trainer = trainer_of(gossip(), 2, enable_progress_bar=True, **arguments)
        trainer.fit(Linear(), loader(6))
        return line._looks[-1].samples

    assert max(values(learners(2, program))) == 12
