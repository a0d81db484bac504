"""Saves in the background: the training takes a snapshot, and a thread writes it.

Lightning's `AsyncCheckpointIO` is not sufficient. It removes an old file before the new
one is on the disk, holds any number of snapshots, and raises an error again in each
call. Before version 2.5.4 it takes no snapshot. All of its methods would have to be
replaced.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any, final

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override


@final
class BackgroundCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints one after another, each in a thread that ends with it.

    The training thread waits only for a copy in host memory, not for the disk. At most
    one checkpoint is being written; the next save waits for it. An old checkpoint is
    removed once the new one is on the disk, or not at all.

    Only the training thread calls the methods. A writing thread touches nothing but its
    snapshot, and the interpreter does not exit before its work is done. If it fails,
    the next call that waits raises the error, once.
    """

    def __init__(self, checkpoint_io: CheckpointIO) -> None:
        self._io = checkpoint_io
        self._thread: Thread | None = None
        self._pending: Future[None] | None = None

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Takes a snapshot and queues it for writing; waits for the previous save."""
        self.wait()
        snapshot = snapshot_of(checkpoint)
        save = partial(self._io.save_checkpoint, snapshot, path, storage_options)
        self._submit(save)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Loads a checkpoint, once pending writes are on the disk."""
        self.wait()
        return self._io.load_checkpoint(path, *args, **options)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint once pending writes are done; keeps it if one failed."""
        remove = partial(self._io.remove_checkpoint, path)
        if self._pending is None:
            remove()
        else:
            self._submit(partial(_after, self._pending, remove))

    @override
    def teardown(self) -> None:
        """Waits for pending writes and the end of the thread; can be called twice."""
        thread, self._thread = self._thread, None
        try:
            self.wait()
        finally:
            if thread is not None:
                thread.join()
            self._io.teardown()

    def wait(self) -> None:
        """Waits until all files are on the disk; raises the error of a failed write."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _submit(self, action: Callable[[], None]) -> None:
        self._pending, before = Future(), self._thread
        work = partial(_fulfil, self._pending, action, before)
        self._thread = Thread(target=work, name="adpsgd-save")
        self._thread.start()


def _fulfil(done: Future[None], act: Callable[[], None], before: Thread | None) -> None:
    """Acts once the thread before this one has ended."""
    if before is not None:
        before.join()
    try:
        done.set_result(act())
    except BaseException as error:
        done.set_exception(error)


def finish_saves(checkpoint_io: CheckpointIO, interrupted: bool) -> None:
    """Waits until all files are on the disk, and ends the thread that writes.

    If an exception has interrupted the training, a failed save is only a warning, so
    that it does not hide the exception.
    """
    if not isinstance(checkpoint_io, BackgroundCheckpointIO):
        return
    try:
        checkpoint_io.teardown()
    except Exception as error:
        if not interrupted:
            raise
        rank_zero_warn(str(error))


def must_wait(trainer: pl.Trainer | None, path: Any) -> bool:
    """Whether a save must wait until its file is on the disk.

    A program may read a file that is saved after the training at once. A SLURM job ends
    right after its checkpoint. Some loggers upload each file as soon as it is saved.
    """
    if trainer is None or trainer.interrupted:
        return True
    running = TrainerFn.FITTING, TrainerStatus.RUNNING
    if (trainer.state.fn, trainer.state.status) != running:
        return True
    at_signal = os.path.basename(path).startswith("hpc_ckpt_")
    return at_signal or any(uploads_checkpoints(logger) for logger in trainer.loggers)


def uploads_checkpoints(logger: Any) -> bool:
    """Whether a Lightning logger reads each checkpoint as soon as it is saved."""
    names = ("_log_model", "_log_model_checkpoints")
    return any(getattr(logger, name, False) for name in names)


def snapshot_of(checkpoint: Any) -> Any:
    """A copy of a checkpoint on the host: all tensors, in copies of all containers.

    Tensors that share memory in the checkpoint do so in the copy.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if tensor.numel() == 0 or tensor.layout != torch.strided:
            return tensor.detach().to("cpu", copy=True)
        at = tensor.device, tensor.data_ptr()
        key = (*at, tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    return apply_to_collection(checkpoint, Tensor, copy)


def _after(pending: "Future[None]", action: Callable[[], None]) -> None:
    pending.result()
    action()
