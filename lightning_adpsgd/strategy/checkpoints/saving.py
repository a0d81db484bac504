"""Saving beside the training: a snapshot is taken, and a thread writes it.

Lightning's `AsyncCheckpointIO` does not serve: it removes an old file before the new
one is on the disk, holds any number of snapshots, and raises an error again in each
call. Before version 2.5.4 it takes no snapshot. All of its methods would have to be
replaced, so nothing of it would be left.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
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
    """Writes checkpoints one after another in a thread of its own.

    The training thread waits for a copy in the memory of the host, and no longer for
    the disk. One checkpoint at most is on its way: the next save waits for it. An old
    checkpoint is removed once the new one is on the disk, or not at all.

    The training thread alone calls this. The thread touches nothing but the snapshot
    that it was given. The first save starts it, and the interpreter does not end before
    its work is done. The next call that waits raises an error of the thread, once.
    """

    def __init__(self, checkpoint_io: CheckpointIO) -> None:
        self._io = checkpoint_io
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Takes a snapshot and has it written; waits for the save before."""
        self.wait()
        snapshot = snapshot_of(checkpoint)
        save = partial(self._io.save_checkpoint, snapshot, path, storage_options)
        self._submit(save)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Loads a checkpoint, after what is on its way to the disk."""
        self.wait()
        return self._io.load_checkpoint(path, *args, **options)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint when all is written, and not at all after an error."""
        remove = partial(self._io.remove_checkpoint, path)
        if self._pending is None:
            remove()
        else:
            self._submit(partial(_after, self._pending, remove))

    @override
    def teardown(self) -> None:
        """Waits until all is on the disk, and ends the thread; can be called twice."""
        executor, self._executor = self._executor, None
        try:
            self.wait()
        finally:
            if executor is not None:
                executor.shutdown()
            self._io.teardown()

    def wait(self) -> None:
        """Waits until all is on the disk; raises what went wrong with it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _submit(self, action: Callable[[], None]) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "adpsgd-save")
        self._pending = self._executor.submit(action)


def finish_saves(checkpoint_io: CheckpointIO, interrupted: bool) -> None:
    """Waits until all is on the disk, and ends the thread that writes.

    Where an exception has interrupted the training, an error of a save is a warning, so
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
    """Whether a save ends only when its file is on the disk.

    A program reads the file of a save after the training at once. The job's end follows
    on SLURM's checkpoint. Some loggers upload each file as soon as it is saved.
    """
    if trainer is None or trainer.interrupted:
        return True
    running = TrainerFn.FITTING, TrainerStatus.RUNNING
    if (trainer.state.fn, trainer.state.status) != running:
        return True
    at_signal = os.path.basename(path).startswith("hpc_ckpt_")
    return at_signal or any(uploads_checkpoints(logger) for logger in trainer.loggers)


def uploads_checkpoints(logger: Any) -> bool:
    """Whether a logger of Lightning's reads each checkpoint as soon as it is saved."""
    names = ("_log_model", "_log_model_checkpoints")
    return any(getattr(logger, name, False) for name in names)


def snapshot_of(checkpoint: Any) -> Any:
    """A copy of all tensors, on the host, in copies of all containers.

    Tensors that are one in the checkpoint are one in the copy.
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
