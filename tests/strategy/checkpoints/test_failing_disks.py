"""A save whose error may pass is tried again, for a bounded time."""

import errno
import math
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_adpsgd.strategy.checkpoints import io as checkpoint_io
from lightning_adpsgd.strategy.checkpoints.io import WholeCheckpointIO
from lightning_adpsgd.strategy.checkpoints.saving import BackgroundCheckpointIO
from lightning_adpsgd.strategy.overrides import Overrides
from lightning_adpsgd.strategy.run import TrainingRun
from lightning_adpsgd.strategy.signals import SharedStop
from tests.helpers import PATIENCE_S, forked, free_port
from tests.learners import Linear, gossip, loader, trainer_of

MAY_PASS = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT]
MAY_PASS += [errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EPIPE]
MAY_PASS += [errno.ECONNREFUSED, errno.ECONNRESET, socket.EAI_AGAIN]


def checkpoint(number: int) -> dict[str, Any]:
    return {"number": number, "weights": torch.full((300,), float(number))}


def number_in(path: Path) -> int:
    return WholeCheckpointIO().load_checkpoint(path)["number"]


class Disk:
    """Fails some times with an error, then works; its pauses take no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, left: int) -> None:
        self.number, self.left, self.now = number, left, 0.0
        self.num_attempts = 0
        self._write = checkpoint_io.write_checkpoint
        monkeypatch.setattr(checkpoint_io, "write_checkpoint", self.write)
        # Not of the module `time` itself: other threads sleep, too.
        self.time = SimpleNamespace(sleep=self.sleep, monotonic=lambda: self.now)
        monkeypatch.setattr(checkpoint_io, "time", self.time)

    def write(self, value: Any, file: Any) -> None:
        self.num_attempts += 1
        if self.left:
            file.write(b"half of it")
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))
        self._write(value, file)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def pauses_told(record: Sequence[Any]) -> list[int]:
    """The seconds that warnings name."""
    found = (re.search(r"attempt is in (\d+) s", str(one.message)) for one in record)
    return [int(one[1]) for one in found if one]


@pytest.mark.parametrize("number", MAY_PASS)
def test_a_save_whose_error_passes_is_tried_again_and_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path, disk = tmp_path / "a.ckpt", Disk(monkeypatch, number, 4)
    with pytest.warns(UserWarning, match=r"a\.ckpt could not be written") as record:
        WholeCheckpointIO().save_checkpoint(checkpoint(1), path)
    assert number_in(path) == 1
    assert list(tmp_path.iterdir()) == [path]
    assert pauses_told(record.list) == [1, 2, 4, 8]
    assert disk.now == 15


def test_a_save_whose_error_does_not_pass_ends_after_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plugin = tmp_path / "a.ckpt", WholeCheckpointIO(patience_s=100)
    plugin.save_checkpoint(checkpoint(1), path)
    disk = Disk(monkeypatch, errno.ENOSPC, 1000)
    with (
        pytest.warns(UserWarning, match="next attempt") as record,
        pytest.raises(OSError, match=r"a\.ckpt could not be written \(No space left"),
    ):
        plugin.save_checkpoint(checkpoint(2), path)
    assert disk.now == 100
    assert max(pauses_told(record.list)) == 30
    assert number_in(path) == 1


def test_a_server_that_is_away_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(monkeypatch, 0, 0), f"ftp://127.0.0.1:{free_port()}/a.ckpt"
    with (
        pytest.warns(UserWarning, match="next attempt"),
        pytest.raises(OSError, match="Connection refused"),
    ):
        WholeCheckpointIO(patience_s=3).save_checkpoint(checkpoint(1), path)
    assert disk.now == 3


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EFBIG])
def test_an_error_that_cannot_pass_is_raised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    disk = Disk(monkeypatch, number, 1)
    with pytest.raises(OSError, match=os.strerror(number)) as error:
        WholeCheckpointIO().save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    assert disk.now == 0
    # There was none.
    assert str(error.value).endswith("an earlier one at this path, if any, is intact")


def test_an_old_checkpoint_that_cannot_be_removed_at_once_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plugin = tmp_path / "a.ckpt", WholeCheckpointIO()
    plugin.save_checkpoint(checkpoint(1), path)
    disk, remove = Disk(monkeypatch, errno.EIO, 0), TorchCheckpointIO.remove_checkpoint

    def fails_once(self: Any, path: Any) -> None:
        if not disk.now:
            raise OSError(errno.EIO, "Input/output error")
        remove(self, path)

    monkeypatch.setattr(TorchCheckpointIO, "remove_checkpoint", fails_once)
    said = r"a\.ckpt could not be removed \(Input/output error\)\. The next"
    with pytest.warns(UserWarning, match=said):
        plugin.remove_checkpoint(path)
    assert not path.exists()


@pytest.mark.parametrize("patience_s", [-1.0, math.nan])
def test_a_patience_that_never_ends_or_begins_is_refused(patience_s: float) -> None:
    with pytest.raises(ValueError, match=f"`patience_s` .* 0, got {patience_s}"):
        WholeCheckpointIO(patience_s)


# --- while the training ends


@pytest.mark.parametrize("wrap", [lambda io: io, BackgroundCheckpointIO])
@pytest.mark.parametrize(("end", "num"), [(3, 3), (5, 4)])
def test_a_pause_ends_with_the_training_and_one_attempt_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrap: Callable[[Any], Any],
    end: int,
    num: int,
) -> None:
    disk, plugin = Disk(monkeypatch, errno.ENOSPC, 1000), wrap(WholeCheckpointIO())
    plugin.hurry_if(lambda: disk.now >= end)
    save = partial(plugin.save_checkpoint, checkpoint(1), tmp_path / "a.ckpt")
    with (
        pytest.warns(UserWarning, match="next attempt"),
        pytest.raises(OSError, match="No space left"),
    ):
        save()
    assert (disk.now, disk.num_attempts) == (end, num)
    with pytest.raises(OSError, match="No space left"):
        save()
    assert (disk.now, disk.num_attempts) == (end, num + 1)


def test_sigterm_ends_a_training_that_waits_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, second_step = Disk(monkeypatch, errno.ENOSPC, 1000), threading.Event()
    saver = ModelCheckpoint(
        tmp_path, every_n_train_steps=1, save_last=True, save_top_k=0
    )

    class Marks(Callback):
        """Its hook is called before the save of the second step, which waits."""

        @override
        def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
            if trainer.global_step == 2:
                second_step.set()

    def learner(rank: int) -> tuple[int, float]:
        callbacks: list[Any] = [Marks(), saver]
        trainer = trainer_of(
            gossip(), 1, callbacks=callbacks, enable_checkpointing=True
        )

        def sleep(seconds: float) -> None:
            disk.sleep(seconds)
            assert second_step.wait(PATIENCE_S)
            os.kill(os.getpid(), signal.SIGTERM)
            while not trainer.received_sigterm:
                assert second_step.wait(PATIENCE_S)

        disk.time.sleep = sleep
        with (
            pytest.warns(UserWarning, match=r"No space left.*intact$"),
            pytest.raises(SIGTERMException),
        ):
            trainer.fit(Linear(), loader(6))
        return trainer.global_step, disk.now

    (outcome,) = forked(1, learner)
    assert outcome.value == (2, 1), outcome.error
    assert not list(tmp_path.iterdir())


def test_a_learner_ends_soon_before_its_super_learner_has_agreed_to() -> None:
    trainer, strategy = trainer_of("ddp", 1), gossip()
    strategy._stop = SharedStop(trainer, Overrides(), strategy._together)
    assert not strategy._ends_soon()
    frame: Any = None
    trainer._signal_connector._sigterm_notifier_fn(signal.SIGTERM, frame)
    assert not trainer.received_sigterm
    assert strategy._ends_soon()


def test_a_learner_of_an_island_ends_soon_once_one_of_them_is_told_to_leave() -> None:
    members = SimpleNamespace(wants_to_leave=False)
    island = SimpleNamespace(engine=SimpleNamespace(members=members))
    job: Any = SimpleNamespace(island=island)
    strategy = gossip()
    strategy._run = TrainingRun(trainer_of(strategy, 1), job, strategy.dials, None)
    assert not strategy._ends_soon()
    members.wants_to_leave = True
    assert strategy._ends_soon()
