"""Learners as forked processes, on emulated hosts or on this one.

The imports are done once, by the process that forks, so that a run of a few seconds
costs a few seconds. Each learner has one thread to compute with.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore

from benchmarks.hosts import MASTER_PORT, Hosts

_Value = TypeVar("_Value")
_PR_SET_PDEATHSIG = 1
PATIENCE = timedelta(minutes=2)


@dataclass(frozen=True)
class Place:
    """The place of a learner.

    Args:
        rank: Rank among all learners; those of a host are consecutive.
        world_size: Number of all learners.
        per_host: Learners of each host.
        address: Of this learner's host.
        master: Address of the host of learner 0.
        port: Free port for the job's store; so are the nine that follow.
    """

    rank: int
    world_size: int
    per_host: int
    address: str = "127.0.0.1"
    master: str = "127.0.0.1"
    port: int = MASTER_PORT

    @property
    def host(self) -> int:
        """Number of this learner's host."""
        return self.rank // self.per_host

    def set_environment(self) -> None:
        """Tells torch and Lightning what `torchrun` would tell them."""
        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank % self.per_host),
            WORLD_SIZE=str(self.world_size),
            LOCAL_WORLD_SIZE=str(self.per_host),
            GROUP_RANK=str(self.host),
            MASTER_ADDR=self.master,
            MASTER_PORT=str(self.port),
            TORCHELASTIC_RUN_ID="benchmark",
        )

    def make_store(self) -> TCPStore:
        """Makes a store for the benchmark, besides the job's."""
        return TCPStore(
            self.master,
            self.port + 1,
            is_master=self.rank == 0,
            wait_for_workers=False,
            timeout=PATIENCE,
        )


class Meetings:
    """Meetings at which all learners wait for one another, without a process group.

    Args:
        place: Place of this learner.
    """

    def __init__(self, place: Place) -> None:
        self._place, self.store = place, place.make_store()

    def meet(self, name: str) -> None:
        """Waits for all learners."""
        self.store.add(f"{name}/arrived", 1)
        if self._place.rank == 0:
            self._await(f"{name}/arrived")
            self.store.set(f"{name}/go", "")
        self.store.wait([f"{name}/go"])

    def leave(self) -> None:
        """Ends together with all learners; learner 0, who hosts the store, is last."""
        self.meet("end")
        self.store.add("left", 1)
        if self._place.rank == 0:
            self._await("left")

    def _await(self, key: str) -> None:
        while self.store.add(key, 0) < self._place.world_size:
            time.sleep(0.005)


class LearnersFailed(RuntimeError):
    """A learner failed or did not end in time."""


def run(
    program: Callable[[Place], _Value],
    num_learners: int,
    timeout_s: float,
    hosts: Hosts | None = None,
    per_host: int | None = None,
) -> list[_Value]:
    """Runs a program as each learner and returns what they return, by rank.

    Args:
        program: Function, which may be a closure; its result must pickle.
        num_learners: Number of all learners; hosts have equally many, unless `per_host`
            says how many each of the first ones has.
        timeout_s: Seconds after which all are killed.
        hosts: Hosts of the learners; None: this machine, over its loopback.
        per_host: Number of learners of a host; without `hosts` it is only what they are
            told, and None means that they share one.

    Raises:
        LearnersFailed: The message has the trace of the first learner that failed.
    """
    places = make_places(num_learners, hosts, per_host)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            context.Process(target=_learner, args=(program, place, hosts, folder))
            for place in places
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, timeout_s)
        finally:
            _kill(processes)
        return _collect(folder, num_learners)


def make_places(
    num_learners: int, hosts: Hosts | None, per_host: int | None = None
) -> list[Place]:
    """The places of all learners, by rank."""
    if hosts is None:
        # Ports of earlier runs may linger; a random one is below those of the system.
        port = 20_000 + 10 * (int.from_bytes(os.urandom(2)) % 1000)
        return [
            Place(rank, num_learners, per_host or num_learners, port=port)
            for rank in range(num_learners)
        ]
    per_host, addresses = per_host or num_learners // len(hosts), hosts.addresses
    return [
        Place(rank, num_learners, per_host, addresses[rank // per_host], addresses[0])
        for rank in range(num_learners)
    ]


def end_with_parent() -> None:
    """Makes the system kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _learner(
    program: Callable[[Place], Any], place: Place, hosts: Hosts | None, folder: Path
) -> None:
    os.setsid()
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(folder / f"{place.rank}.log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    if hosts is not None:
        hosts.enter(place.host)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if hosts is None else "eth0"
    torch.set_num_threads(1)
    # Without it, Lightning's launcher gives each learner as many as there are cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")
    place.set_environment()
    try:
        value, error = program(place), ""
    except BaseException:
        value, error = None, traceback.format_exc()
    finished = folder / f"{place.rank}.partial"
    finished.write_bytes(pickle.dumps((value, error)))
    finished.rename(folder / f"{place.rank}.pickle")
    # Threads of libraries that were not joined must not hold the process.
    os._exit(bool(error))


def _wait(processes: list[Any], timeout_s: float) -> None:
    """Waits until all have ended, one has failed, or the time is over."""
    deadline = time.monotonic() + timeout_s
    running = {process.sentinel: process for process in processes}
    while running and (left := deadline - time.monotonic()) > 0:
        for sentinel in connection.wait(list(running), left):
            process = running.pop(sentinel)  # pyright: ignore
            process.join()
            if process.exitcode:
                return


def _kill(processes: list[Any]) -> None:
    for process in processes:
        if process.pid is not None and process.is_alive():
            # Its process group, unless it has not made one yet.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        if process.pid is not None:
            process.join()


def _collect(folder: Path, num_learners: int) -> list[Any]:
    found = [folder / f"{rank}.pickle" for rank in range(num_learners)]
    pairs = [
        pickle.loads(path.read_bytes()) if path.exists() else None for path in found
    ]
    for rank, pair in enumerate(pairs):
        if pair is not None and pair[1]:
            raise LearnersFailed(f"learner {rank}: {pair[1]}")
    for rank, pair in enumerate(pairs):
        if pair is None:
            said = (folder / f"{rank}.log").read_text(errors="replace")[-1500:]
            raise LearnersFailed(f"learner {rank} did not end in time: {said}")
    return [pair[0] for pair in pairs if pair is not None]
