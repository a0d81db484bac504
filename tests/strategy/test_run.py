"""How a Trainer's learner ends that is told to, or fails."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.strategy.job import Job
from lightning_adpsgd.strategy.run import TrainingRun

DIALS = HADPSGDStrategy(islands="tcp://10.0.0.1:29400").dials


def island_job() -> Any:
    job = create_autospec(Job, instance=True, island=Mock())
    job.depart.return_value = "3-abc"
    return job


@pytest.mark.parametrize(
    ("folder", "root"), [("s3://bucket/run", "/tmp"), (None, "s3://bucket/run")]
)
def test_an_island_that_is_told_to_end_saves_into_a_remote_folder(
    folder: str | None, root: str
) -> None:
    callback = SimpleNamespace(dirpath=folder)
    trainer: Any = Mock(checkpoint_callback=callback, default_root_dir=root)
    TrainingRun(trainer, island_job(), DIALS, None).fail(SIGTERMException())
    path = "s3://bucket/run/preempted-3-abc.ckpt"
    trainer.save_checkpoint.assert_called_once_with(path)


def test_the_others_are_told_even_if_the_last_save_fails() -> None:
    trainer: Any = Mock(checkpoint_callback=None, default_root_dir="/tmp")
    trainer.save_checkpoint.side_effect = RuntimeError("of a hook")
    job, told = island_job(), SIGTERMException()
    with pytest.raises(RuntimeError, match="of a hook"):
        TrainingRun(trainer, job, DIALS, None).fail(told)
    job.fail.assert_called_once_with(told)
