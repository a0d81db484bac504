"""Applies a function to many items in forked processes; yields results as they come.

kaldi-decoder and kaldifst hold Python's global lock, so threads do not help. Graphs
cannot be pickled, so the processes are forked and find function and items in memory.
If the calling process is killed, they end with the item that each is at.
Each process computes with one thread. This limits torch's threads but not those of
numpy's matrix products; use `product` for these. With two threads in each of two
processes on two cores, an alignment takes four times as long.
"""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import numpy as np
import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def fork_map(
    function: Callable[[Item], Result], items: Sequence[Item], num_processes: int
) -> Generator[tuple[int, Result], None, None]:
    """Yields (index of the item, result) in the order in which results arrive.

    With one process or one item, everything runs in the calling process. Results are
    pickled; the function and the items are not.

    Raises:
        OSError: The function raised it, in any process: a full disk, a missing file.
        RuntimeError: The function raised another error in a process (its traceback is
            in the message), or a process died.
    """
    num_processes = min(num_processes, len(items))
    if num_processes <= 1 or not hasattr(os, "fork"):
        yield from ((index, function(item)) for index, item in enumerate(items))
        return
    context = multiprocessing.get_context("fork")
    counter = context.Value("q", 0)
    ends: dict[Connection, BaseProcess] = {}
    for _ in range(num_processes):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_serve,
            args=(function, items, counter, writer, [*ends, reader]),
            daemon=True,
        )
        process.start()
        writer.close()
        ends[reader] = process
    try:
        yield from _collect(ends)
    finally:
        for reader, process in ends.items():
            reader.close()
            process.terminate()
            process.join()


def in_order(results: Iterable[tuple[int, Result]]) -> Iterator[Result]:
    """Yields results in the order of their indices; early ones wait for their turn."""
    early: dict[int, Result] = {}
    turn = 0
    for index, result in results:
        early[index] = result
        while turn in early:
            yield early.pop(turn)
            turn += 1


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The matrix product of two float arrays of the same dtype, computed by torch."""
    return (torch.from_numpy(left) @ torch.from_numpy(right)).numpy()


def _serve(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    counter,  # multiprocessing's shared integer has no public type
    writer: Connection,
    readers: Sequence[Connection],
) -> None:
    torch.set_num_threads(1)
    # While a copy is open, nothing tells that the calling process was killed.
    for reader in readers:
        reader.close()
    with suppress(BrokenPipeError):
        _answer(function, items, counter, writer)


def _answer(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    counter,
    writer: Connection,
) -> None:
    """Sends the results of items until there are no more; raises if nobody reads."""
    while True:
        with counter.get_lock():
            index = counter.value
            counter.value += 1
        if index >= len(items):
            writer.send(None)
            return
        try:
            writer.send((index, function(items[index])))
        except Exception as error:
            is_of_system = isinstance(error, OSError)
            writer.send(error if is_of_system else traceback.format_exc())
            return


def _collect(
    ends: dict[Connection, BaseProcess],
) -> Iterator[tuple[int, Any]]:
    running = dict(ends)
    while running:
        ready = wait(list(running))
        for reader in [end for end in ends if end in ready]:
            message = _received(reader, ends[reader])
            if message is None:
                del running[reader]
            else:
                yield message


def _received(reader: Connection, process: BaseProcess) -> tuple[int, Any] | None:
    try:
        message = reader.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        killed = "it was killed, most often for lack of memory: use fewer processes"
        why = killed if code == -signal.SIGKILL else "look at what it printed last"
        raise RuntimeError(f"a process died with exit code {code}; {why}") from None
    if isinstance(message, OSError):
        raise message
    if isinstance(message, str):
        raise RuntimeError(f"a process failed:\n{message}")
    return message
