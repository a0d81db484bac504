"""How a Trainer's learner ends that is told to, or fails."""

import warnings
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, create_autospec

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.gossip.protocol import Position
from lightning_adpsgd.strategy import run as run_module
from lightning_adpsgd.strategy.checkpoints.contents import Resumed
from lightning_adpsgd.strategy.checkpoints.saving import BackgroundCheckpointIO
from lightning_adpsgd.strategy.job import Job
from lightning_adpsgd.strategy.run import TrainingRun
from lightning_adpsgd.strategy.work_sharing import WorkSharing
from lightning_adpsgd.topology.partition import Partition

DIALS = HADPSGDStrategy(islands="tcp://10.0.0.1:29400").dials


def island_job() -> Any:
    job = create_autospec(Job, instance=True, island=Mock(), groups=Mock())
    job.depart.return_value, job.has_finished = "3-abc", False
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


def test_a_learner_that_is_told_to_end_before_it_begins_begins_nothing() -> None:
    trainer: Any = Mock(received_sigterm=True)
    run = TrainingRun(trainer, job := island_job(), DIALS, None)
    with pytest.raises(SIGTERMException):
        run.begin(Resumed())
    job.start.assert_not_called()
    run.close()


def test_an_island_notes_the_samples_of_all_its_readers_and_catches_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, trainer = island_job(), cast(Any, Mock(current_epoch=3))
    job.partition, position = Partition((4,), 2), Position(9, 0, 3)
    job.island.note.side_effect = [None, position]
    caught_up = Mock()
    monkeypatch.setattr(run_module, "catch_up", caught_up)
    run = TrainingRun(trainer, job, DIALS, None)
    run.begin_batch(torch.zeros(5, 1))
    caught_up.assert_not_called()
    run.begin_batch(torch.zeros(5, 1))
    job.island.note.assert_called_with(10, 3)
    caught_up.assert_called_once_with(trainer, position)


def test_steps_that_lightning_does_not_see_are_told_once() -> None:
    module, trainer = nn.Linear(1, 1), cast(Any, Mock(global_step=7))
    trainer.received_sigterm, trainer.lr_scheduler_configs = False, []
    job = island_job()
    job.flat, job.start.return_value = SimpleNamespace(module=module), None
    job.enter_consensus.return_value = None
    run = TrainingRun(trainer, job, DIALS, None)
    run.begin(Resumed())
    trainer.callbacks, trainer.global_rank, job.partition = [], 0, Partition((1,))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.enter("validation")
        assert not told
        for changes in (True, True):
            with torch.no_grad():
                module.weight.add_(changes)
            run.enter("validation")
    assert ["exchanged nothing" in str(one.message) for one in told] == [True]
    run.close()


def test_a_training_whose_last_save_failed_ends_without_its_last_mean() -> None:
    """All learners hear of it, and none waits for the others in vain."""
    saves = create_autospec(BackgroundCheckpointIO, instance=True)
    saves.wait.side_effect = OSError("no space left")
    trainer: Any = Mock(strategy=Mock(checkpoint_io=saves))
    run, ends = TrainingRun(trainer, job := island_job(), DIALS, None), Mock()
    with pytest.raises(OSError, match="no space left"):
        run._end(ends)
    job.finish.assert_not_called()
    ends.assert_not_called()


@pytest.mark.parametrize("island", [None, Mock()])
def test_the_rest_of_an_epoch_is_known_until_callbacks_have_saved_at_the_end(
    island: Any,
) -> None:
    """Of an island, others need what it holds."""
    job: Any = create_autospec(Job, instance=True, island=island, running=True)
    job.partition, job.finish.return_value, ends = Partition((1,)), None, Mock()
    sharing = create_autospec(WorkSharing, instance=True, shares=True)
    trainer: Any = Mock(strategy=Mock(checkpoint_io=None), global_rank=0, callbacks=[])
    run = TrainingRun(trainer, job, DIALS, sharing)
    run._end(ends)
    assert sharing.leave.called == (island is not None)
    ends.assert_called_once_with()
