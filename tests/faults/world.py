"""Islands as processes of this machine, and what can happen to them.

They are forked, so that they need not import anything; see `island` for what each does.
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from lightning_adpsgd.rendezvous import serve
from tests.faults import island
from tests.helpers import free_port

SECONDS = 90.0  # on a machine that other tests share


class Step(NamedTuple):
    """A line of an island's diary."""

    time: float
    number: int
    members: int


class World:
    """A rendezvous and islands around it; all end with `close`.

    Args:
        folder: For diaries and outputs.
        host: Address of the rendezvous.
        namespace: Of the network in which it is; empty: that of this process.
    """

    def __init__(
        self, folder: Path, host: str = "127.0.0.1", namespace: str = ""
    ) -> None:
        self._folder, self._host, self._port = folder, host, free_port()
        self._namespace = namespace
        self._processes: dict[str, BaseProcess] = {}
        self.start_rendezvous()

    @property
    def folder(self) -> Path:
        return self._folder

    def start_rendezvous(self) -> None:
        serves = _serve, self._host, self._port
        self._start("rendezvous", self._namespace, *serves)
        if not self._namespace:
            until(self._listens, "the rendezvous")

    def start(self, name: str, steps: int = -1, namespace: str = "") -> None:
        """Starts an island, which may take a while to join."""
        url = f"tcp://{self._host}:{self._port}"
        trains = _train, url, str(self._folder), name, str(steps)
        self._start(name, namespace, *trains)

    def signal(self, name: str, number: signal.Signals) -> None:
        pid = self._processes[name].pid
        assert pid is not None
        os.kill(pid, number)
        if number == signal.SIGKILL:
            self._processes[name].join(SECONDS)

    def exit_code(self, name: str) -> int | None:
        """How it ended, once it has."""
        self._processes[name].join(SECONDS)
        return self._processes[name].exitcode

    def output(self, name: str) -> str:
        return (self._folder / f"{name}.out").read_text()

    def steps(self, name: str) -> list[Step]:
        """What an island has done so far."""
        path = self._folder / f"{name}.steps"
        lines = path.read_text().splitlines() if path.exists() else []
        words = (line.split() for line in lines if line.count(" ") == 2)
        return [Step(float(a), int(b), int(c)) for a, b, c in words]

    def all_see(self, names: str, members: int) -> bool:
        """Whether these islands know of so many, as of their last steps."""
        diaries = [self.steps(name) for name in names.split()]
        return all(diary and diary[-1].members == members for diary in diaries)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join(SECONDS)

    def _start(self, name: str, namespace: str, *work: Any) -> None:
        context = multiprocessing.get_context("fork")
        path = self._folder / f"{name}.out"
        process = context.Process(target=_written, args=(path, namespace, *work))
        process.start()
        self._processes[name] = process

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self._host, self._port)) == 0


@contextmanager
def world(
    folder: Path, host: str = "127.0.0.1", namespace: str = ""
) -> Iterator[World]:
    made = World(folder, host, namespace)
    try:
        yield made
    finally:
        made.close()


def until(condition: Callable[[], bool], what: str) -> float:
    """Waits for what other processes bring about; returns the seconds."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + SECONDS, f"waited in vain for {what}"
        time.sleep(0.02)
    return time.monotonic() - begin


def _serve(host: str, port: int) -> None:
    serve(host, port, threading.Event())


def _train(*arguments: str) -> None:
    island.main(*arguments)


def _written(
    path: Path, namespace: str, work: Callable[..., None], *arguments: Any
) -> None:
    if namespace:
        _enter(namespace)
    with path.open("a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        logging.basicConfig(stream=file, force=True)
        work(*arguments)


def _enter(namespace: str) -> None:
    """Moves this process into another network."""
    with Path(f"/run/netns/{namespace}").open() as file:
        # `os.setns` comes with Python 3.12.
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
