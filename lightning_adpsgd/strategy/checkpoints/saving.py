"""Saving beside the training: a snapshot is taken, and a thread writes it.

The training thread waits for a copy in the memory of the host, and no longer for the
disk. One checkpoint at most is on its way: the next waits for it, so that there is one
more copy on the host and not several. A checkpoint is removed after the one that takes
its place is on the disk, or not at all.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, final

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

Action = Callable[[], None]


@final
class SaveThread:
    """Writes checkpoints one after another in a thread of its own.

    Used by the training thread alone; the thread touches nothing but the snapshot that
    it was given. The first save starts it, and the interpreter does not end before what
    it was given is done.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def save(self, checkpoint: Any, path: Any, write: Callable[[Any], None]) -> None:
        """Takes a snapshot and has it written; waits for the one before.

        Args:
            checkpoint: May change as soon as this returns.
            path: For messages.
            write: Called in the thread, with the snapshot.

        Raises:
            RuntimeError: The one before could not be written.
        """
        self.wait()
        snapshot = snapshot_of(checkpoint)
        self._submit(lambda: _named(path, lambda: write(snapshot)))

    def afterwards(self, action: Action) -> None:
        """Does something when all is written, and nothing after an error."""
        pending = self._pending
        if pending is None:
            action()
        else:
            self._submit(lambda: _after(pending, action))

    def wait(self) -> None:
        """Waits until all is on the disk.

        Raises:
            RuntimeError: It could not be written; names the file and the cause.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def stop(self) -> None:
        """Waits until all is on the disk, and ends the thread; can be called twice.

        Raises:
            RuntimeError: It could not be written; names the file and the cause.
        """
        executor, self._executor = self._executor, None
        try:
            self.wait()
        finally:
            if executor is not None:
                executor.shutdown()

    def _submit(self, action: Action) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "adpsgd-save")
        self._pending = self._executor.submit(action)


def uploads_checkpoints(loggers: Iterable[Any]) -> bool:
    """Whether a logger reads each checkpoint as soon as it is saved.

    Args:
        loggers: Of Lightning; those that can, keep the choice under one of two names.
    """
    names = ("_log_model", "_log_model_checkpoints")
    return any(getattr(logger, name, False) for logger in loggers for name in names)


def snapshot_of(checkpoint: Any) -> Any:
    """A copy of all tensors, on the host, in copies of all containers.

    Tensors that are one in the checkpoint are one in the copy.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape)
        if tensor.numel() == 0 or tensor.layout != torch.strided:
            return tensor.detach().to("cpu", copy=True)
        key = (*key, tensor.stride())
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    return apply_to_collection(checkpoint, Tensor, copy)


def _named(path: Any, write: Action) -> None:
    try:
        write()
    except Exception as error:
        raise RuntimeError(
            f"a checkpoint could not be saved in the background, {path}: {error}"
        ) from error


def _after(pending: "Future[None]", action: Action) -> None:
    pending.result()
    action()
