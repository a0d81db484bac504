"""What surrounds a launch: the checkpoint that is resumed, and who hears of errors."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from lightning_adpsgd.strategy.launchers import (
    failures_outside_training,
    launch_from_whole,
)
from tests.helpers import PATIENCE


class Connector:
    def _parse_ckpt_path(self, *_: Any) -> str:
        return "Lightning's own choice"


def test_only_within_its_launch_a_trainer_looks_for_whole_checkpoints() -> None:
    trainer: Any = SimpleNamespace(_checkpoint_connector=Connector())

    def launch(*_: Any, trainer: Any) -> None:
        assert "_parse_ckpt_path" in vars(trainer._checkpoint_connector)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch_from_whole(launch, trainer=trainer)
    assert vars(trainer._checkpoint_connector) == {}


def test_a_failure_of_an_earlier_program_is_none_of_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose Trainer is another one of the same process."""
    store = HashStore()
    distributed = dist.distributed_c10d
    monkeypatch.setattr(distributed, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    earlier, later = (failures_outside_training(1, 2, PATIENCE) for _ in range(2))
    assert earlier is not None
    assert later is not None
    earlier.announce(ValueError("of the earlier one"))
    look = timedelta(seconds=0)
    assert later._coordinator.explain("a symptom", look) == "a symptom"
    assert failures_outside_training(0, 1, PATIENCE) is None


def test_a_program_that_has_ended_its_group_gets_its_own_exception(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There is no store to announce it in."""
    report = failures_outside_training(1, 2, PATIENCE)
    assert report is not None
    report.announce(KeyError("mine"))
    assert "raised KeyError: 'mine'" in capsys.readouterr().err
