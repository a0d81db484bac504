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
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from lightning_adpsgd.islands.rendezvous import serve
from tests.faults import island
from tests.helpers import free_port

SECONDS = 90.0  # on a machine that other tests share
Variables = Callable[[int], Mapping[str, str]]


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
        silence_s: Without a sign of life after which an island counts as dead. The
            default is longer than any process stalls that nobody has stopped.
    """

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        namespace: str = "",
        silence_s: float = 60.0,
    ) -> None:
        self._folder, self._host, self._port = folder, host, free_port()
        self._namespace, self._silence_s = namespace, silence_s
        self._processes: dict[str, list[BaseProcess]] = {}
        self._diaries: dict[str, _Diary] = {}
        self.start_rendezvous()

    @property
    def folder(self) -> Path:
        return self._folder

    def start_rendezvous(self) -> None:
        self._processes["rendezvous"] = []
        serves = _serve, self._host, self._port
        self._start("rendezvous", "rendezvous", self._namespace, {}, *serves)
        if not self._namespace:
            until(self._listens, "the rendezvous")

    @property
    def url(self) -> str:
        """Of the rendezvous."""
        return f"tcp://{self._host}:{self._port}"

    def start(self, name: str, steps: int = -1, namespace: str = "") -> None:
        """Starts an island, which may take a while to join."""
        self._processes[name] = []
        self._start(name, name, namespace, {}, *self._trains(name, steps, 1))

    def start_wide(
        self,
        name: str,
        variables: Variables,
        size: int = 2,
        *options: str,
        steps: int = -1,
    ) -> None:
        """Starts an island of several learners, with the variables of a launcher.

        What learner 1 of an island "a" writes is that of "a-1". The options are the
        last arguments of `island.main`.
        """
        self._processes[name] = []
        for rank in range(size):
            own = f"{name}-{rank}" if rank else name
            trains = *self._trains(name, steps, size), *options
            self._start(name, own, "", variables(rank), *trains)

    def signal_one(self, name: str, number: signal.Signals) -> None:
        """Sends it to the last learner of an island alone."""
        pid = self._processes[name][-1].pid
        assert pid is not None
        os.kill(pid, number)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to all learners of an island, or to the rendezvous."""
        for process in self._processes[name]:
            assert process.pid is not None
            os.kill(process.pid, number)
        if number == signal.SIGKILL:
            for process in self._processes[name]:
                process.join(SECONDS)

    def exit_code(self, name: str) -> int | None:
        """How it ended, once it has: the same for all its learners, or none."""
        for process in self._processes[name]:
            process.join(SECONDS)
        codes = {process.exitcode for process in self._processes[name]}
        return codes.pop() if len(codes) == 1 else None

    def output(self, name: str) -> str:
        return (self._folder / f"{name}.out").read_text()

    def steps(self, name: str) -> list[Step]:
        """What an island has done so far."""
        if name not in self._diaries:
            self._diaries[name] = _Diary(self._folder / f"{name}.steps")
        return self._diaries[name].read()

    def all_see(self, names: str, members: int) -> bool:
        """Whether these islands know of so many, as of their last steps."""
        diaries = [self.steps(name) for name in names.split()]
        return all(diary and diary[-1].members == members for diary in diaries)

    def close(self) -> None:
        started = [one for several in self._processes.values() for one in several]
        for process in started:
            process.kill()
        for process in started:
            process.join(SECONDS)

    def _start(
        self,
        name: str,
        output: str,
        namespace: str,
        variables: Mapping[str, str],
        *work: Any,
    ) -> None:
        context = multiprocessing.get_context("fork")
        path = self._folder / f"{output}.out"
        arguments = path, namespace, variables, *work
        process = context.Process(target=_written, args=arguments)
        process.start()
        self._processes[name].append(process)

    def _trains(self, name: str, steps: int, size: int) -> tuple[Any, ...]:
        numbers = str(steps), str(size), str(self._silence_s)
        return _train, self.url, str(self._folder), name, *numbers

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self._host, self._port)) == 0


def of_torchrun(num_learners: int = 2) -> Variables:
    """As `torchrun --standalone --nproc-per-node=...` sets them."""
    port = free_port()
    return lambda rank: {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_learners),
        "LOCAL_WORLD_SIZE": str(num_learners),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }


@contextmanager
def world(folder: Path, *arguments: Any, **options: Any) -> Iterator[World]:
    """Islands as those of `World`, ended in the end."""
    made = World(folder, *arguments, **options)
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


class _Diary:
    """A file of steps, of which each line is read once: who waits looks often."""

    def __init__(self, path: Path) -> None:
        self._path, self._length = path, 0
        self._steps: list[Step] = []

    def read(self) -> list[Step]:
        """All steps that are written as yet."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._length)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._length += len(whole)
            lines = (line for line in whole.splitlines() if line.count(b" ") == 2)
            words = (line.split() for line in lines)
            self._steps += [Step(float(a), int(b), int(c)) for a, b, c in words]
        return [*self._steps]


def _serve(host: str, port: int) -> None:
    serve(host, port, threading.Event())


def _train(*arguments: str) -> None:
    island.main(*arguments)


def _written(
    path: Path,
    namespace: str,
    variables: Mapping[str, str],
    work: Callable[..., None],
    *arguments: Any,
) -> None:
    # Lightning leaves it ignored in a process in which a training was interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(variables)
    if namespace:
        _enter(namespace)
    with path.open("a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        logging.basicConfig(stream=file, force=True)
        try:
            work(*arguments)
        except BaseException:
            # The file is closed when multiprocessing comes to print it.
            traceback.print_exc(file=file)
            raise


def _enter(namespace: str) -> None:
    """Moves this process into another network."""
    with Path(f"/run/netns/{namespace}").open() as file:
        # `os.setns` comes with Python 3.12.
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
