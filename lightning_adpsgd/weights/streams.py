"""The order of GPU work among threads that each have a stream.

Work for a GPU is queued and runs later, each stream in its own order. A lock orders
what threads do in host memory. When they queue work on shared tensors, an event must
order that as well. This module has a lock that does both, and copies between a device
and pinned host memory. The training thread never waits for either; its stream does, on
the device. On a CPU there is nothing to order.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor


def has_streams(device: torch.device) -> bool:
    """Whether work on a device is queued and runs later."""
    return device.type != "cpu"


def side_stream(device: torch.device) -> AbstractContextManager[object]:
    """A context in which the calling thread queues its work on its own stream."""
    return torch.Stream(device) if has_streams(device) else nullcontext()


def host_memory(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pinned host memory, [length], from which a device copies asynchronously."""
    pinned = has_streams(device)
    return torch.empty(length, dtype=dtype, device="cpu", pin_memory=pinned)


class Mirrored(NamedTuple):
    """Memory on the host and on the device of the weights; on a CPU they are the same.

    Attributes:
        host: memory that the network reads and writes.
        here: memory on the device of the weights.
    """

    host: Tensor
    here: Tensor


def mirrored(here: Tensor) -> Mirrored:
    """Pairs a vector with memory on the host."""
    if not has_streams(here.device):
        return Mirrored(here, here)
    return Mirrored(host_memory(len(here), here.dtype, here.device), here)


def to_host(source: Tensor, target: Tensor) -> None:
    """Copies to the host; the calling thread waits only for its own stream."""
    if source is not target:
        target.copy_(source, non_blocking=True)
        wait_for_stream(source.device)


def to_device(source: Tensor, target: Tensor) -> None:
    """Queues a copy; the source must not change before the stream has made it."""
    if source is not target:
        target.copy_(source, non_blocking=True)


def wait_for_stream(device: torch.device) -> None:
    """Waits until all work in the calling thread's stream is done; the thread sleeps.

    A thread that waits for a CUDA stream otherwise occupies a core, and the driver,
    which the training thread needs for each kernel.
    """
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
    elif has_streams(device):
        torch.accelerator.current_stream(device).synchronize()


class Mark:
    """A point in the work of a stream that other streams can wait for.

    Args:
        device: device of the streams; a CPU works in order and needs no mark.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.Event(device) if has_streams(device) else None

    def set(self) -> None:
        """Marks the end of the work that the calling thread has queued so far."""
        if self._event is not None:
            self._event.record(torch.accelerator.current_stream(self._device))

    def follow(self) -> None:
        """Makes the calling thread's work from now on run after the mark."""
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)


class Guard:
    """A lock over tensors that also orders the work queued under it on their device."""

    def __init__(self, state: threading.Condition, device: torch.device) -> None:
        self._state, self._mark = state, Mark(device)

    def __enter__(self) -> None:
        self._state.acquire()
        self._mark.follow()

    def __exit__(self, *error: object) -> None:
        self.leave()

    def try_enter(self) -> bool:
        """Enters if the lock is free; `leave` must follow."""
        if not self._state.acquire(blocking=False):
            return False
        self._mark.follow()
        return True

    def leave(self) -> None:
        """Releases the lock for the next thread."""
        self._mark.set()
        self._state.release()
