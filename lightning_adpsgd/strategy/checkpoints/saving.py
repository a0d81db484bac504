"""Saves in the background: the training takes a snapshot, and a thread writes it.

Lightning's `AsyncCheckpointIO` is not sufficient. It removes an old file before the new
one is on the disk, holds any number of snapshots, and raises an error again in each
call. Before version 2.5.4 it takes no snapshot.
"""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from threading import Thread
from typing import Any, final

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from lightning_adpsgd.strategy.checkpoints.io import WholeCheckpointIO


@final
class BackgroundCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints with another plugin, in the background if it is asked to.

    `save_checkpoint` returns once the file is on the disk. `save_in_background` returns
    once there is a copy of the checkpoint in host memory. At most one checkpoint is
    being written; the next save waits for it. An old checkpoint is removed only after
    the new one is safely on the disk.

    Only the training thread calls the methods, a signal handler in it included. A
    writing thread touches nothing but its snapshot, and the interpreter does not exit
    before its work is done. If it fails, the next call that waits raises the error,
    once. If the training is about to end, that call warns instead, so that a preempted
    learner still leaves.
    """

    def __init__(self, checkpoint_io: CheckpointIO) -> None:
        self._io = checkpoint_io
        self._work: _Work | None = None
        self._pending: set[str] = set()
        self._ends_soon: Callable[[], bool] = bool  # never, until a strategy says

    def hurry_if(self, ends_soon: Callable[[], bool]) -> None:
        """Turns errors of earlier saves into warnings once the training `ends_soon`."""
        self._ends_soon = ends_soon
        if isinstance(self._io, WholeCheckpointIO):
            self._io.hurry_if(ends_soon)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint, once pending writes are on the disk."""
        self.finish()
        self._io.save_checkpoint(checkpoint, path, storage_options)

    def save_in_background(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Waits for the previous save, and takes a snapshot, which a thread writes.

        What cannot be pickled has no snapshot. It is written at once, and the write
        says why if it cannot be.
        """
        self.finish()
        try:
            snapshot = snapshot_of(checkpoint)
        except Exception:  # whatever a class of the user raises
            self._io.save_checkpoint(checkpoint, path, storage_options)
            return
        save = partial(self._io.save_checkpoint, snapshot, path, storage_options)
        self._begin(save, path)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Loads a checkpoint, once pending writes are on the disk."""
        self.wait()
        return self._io.load_checkpoint(path, *args, **options)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint once pending writes are done; keeps it if one failed.

        Keeps it also if the training is about to end, when a save that fails only
        warns: the checkpoint that was to take its place may be missing.
        """
        if self._ends_soon():
            return
        remove = partial(self._io.remove_checkpoint, path)
        if self._work is None:
            remove()
        else:
            self._begin(remove, path)

    @override
    def teardown(self) -> None:
        """Waits until all files are on the disk; can be called twice."""
        try:
            self.wait()
        finally:
            self._io.teardown()

    def wait(self) -> None:
        """Waits until all files are on the disk; raises the error of a write, once."""
        if (work := self._work) is None:
            return
        work.join()
        self._work = None
        self._pending.clear()
        if work.error is not None:
            raise work.error

    def wait_for(self, path: Any) -> None:
        """Waits if this file is being written or removed; raises as `wait` does."""
        if str(path) in self._pending:
            self.finish()

    def finish(self) -> None:
        """As `wait`, but warns of an error once the training is about to end."""
        with only_warns(self._ends_soon):
            self.wait()

    def _begin(self, action: Callable[[], None], path: Any) -> None:
        work = _Work(action, after=self._work)
        # Before others know of it: a thread that never started cannot be waited for.
        work.start()
        self._pending.add(str(path))
        self._work = work


@final
class _Work(Thread):
    """A thread for one action, which begins once the work before it has succeeded."""

    def __init__(self, action: Callable[[], None], after: "_Work | None") -> None:
        super().__init__(name="adpsgd-save")
        self._action, self._after = action, after
        self.error: BaseException | None = None

    @override
    def run(self) -> None:
        try:
            if self._after is not None:
                self._after.join()
                if self._after.error is not None:
                    raise self._after.error
            self._action()
        except BaseException as error:
            self.error = error
        finally:
            del self._action  # its snapshot is as large as a checkpoint


@contextmanager
def only_warns(condition: Callable[[], bool]) -> Iterator[None]:
    """Warns of an error of a save if the condition holds.

    It would hide the error that has interrupted the training.
    """
    try:
        yield
    except Exception as error:
        if not condition():
            raise
        rank_zero_warn(str(error))


def must_wait(trainer: pl.Trainer | None, path: Any) -> bool:
    """Whether a save must wait until its file is on the disk.

    After the training, a program may read the file at once. A SLURM job ends
    right after its checkpoint. Some loggers upload each file as soon as it is saved.
    """
    if trainer is None or trainer.interrupted:
        return True
    running = TrainerFn.FITTING, TrainerStatus.RUNNING
    if (trainer.state.fn, trainer.state.status) != running:
        return True
    uploads = "_log_model", "_log_model_checkpoints"
    has = (getattr(one, name, False) for one in trainer.loggers for name in uploads)
    return os.path.basename(path).startswith("hpc_ckpt_") or any(has)


def snapshot_of(checkpoint: Any, on_host: bool = True) -> Any:
    """A copy of a checkpoint, which does not change with the training.

    Tensors over the same elements, such as tied weights, share memory in the copy too.
    Everything else is copied by what a file would hold of it. Without `on_host`, each
    copy is on the device of its original.

    Raises:
        Exception: Something cannot be pickled; the type depends on its class.
    """
    file = BytesIO()
    pickler = _Pickler(file, on_host)
    pickler.dump(checkpoint)
    file.seek(0)
    return _Unpickler(file, pickler.copies).load()


def apart(state: dict[str, Any]) -> dict[str, Any]:
    """A module's state, with copies of its tensors on their devices.

    Other entries stay: averages do not change them, and some cannot be pickled.
    """
    tensors = {name: one for name, one in state.items() if isinstance(one, Tensor)}
    state.update(snapshot_of(tensors, on_host=False))
    return state


class _Pickler(pickle.Pickler):
    """Copies tensors instead of writing them.

    It keeps the originals alive, so that no other tensor gets the address of one.
    """

    def __init__(self, file: BytesIO, on_host: bool) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._on_host = on_host
        self.copies: list[Tensor] = []
        self._numbers: dict[int, tuple[int, Tensor]] = {}
        self._by_memory: dict[tuple[Any, ...], Tensor] = {}

    @override
    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.copies), obj
            self.copies.append(self._copy(obj))
        return self._numbers[id(obj)][0]

    def _copy(self, tensor: Tensor) -> Tensor:
        copied = self._of_memory(tensor).detach()
        if isinstance(tensor, Parameter):  # a module knows its weights by that
            return Parameter(copied, tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    def _of_memory(self, tensor: Tensor) -> Tensor:
        device = "cpu" if self._on_host else tensor.device
        is_plain = type(tensor) in (Tensor, Parameter)  # others may have no address
        if not is_plain or tensor.numel() == 0 or tensor.layout != torch.strided:
            return tensor.detach().to(device, copy=True)
        at = tensor.device, tensor.data_ptr(), tensor.is_conj(), tensor.is_neg()
        key = (*at, tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._by_memory:
            self._by_memory[key] = tensor.detach().to(device, copy=True)
        return self._by_memory[key]


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` has written, with the copies in place of the tensors."""

    def __init__(self, file: BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    @override
    def persistent_load(self, pid: Any) -> Tensor:
        return self._tensors[pid]
