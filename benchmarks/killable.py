"""Learners that are killed and started again, and the files that they leave.

A learner is a forked process in a process group of its own. It writes each step into a
file at once, so that a kill loses none of them, and at the end its weights. Steps are
waits of a fixed length around a gradient of a small model: the figures show how
learners wait for one another, not how they share these cores.
"""

import ctypes
import multiprocessing
import os
import random
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks import workload
from benchmarks.workload import NARROW, Batch
from lightning_adpsgd.files import write_json

STEP_S = 0.05
_STAMP = struct.Struct("d")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Killable:
    """One life of a learner.

    Args:
        number: Number of the learner.
        num_learners: Number of all learners.
        life: Number of earlier starts.
        port: Free port for a method's use; so are the hundred that follow.
        folder: Folder into which all learners of the run write.
        until: End of the run, on the machine's monotonic clock.
    """

    number: int
    num_learners: int
    life: int
    port: int
    folder: Path
    until: float

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return time.monotonic() >= self.until

    def make_model(self) -> nn.Module:
        """Makes the model, with the same weights for all learners."""
        return workload.make_model(widths=NARROW)

    def batches(self) -> Iterator[Batch]:
        """Batches until the run ends, one for each step of the fixed length."""
        journal = os.open(self.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for batch in self.paced(STEP_S):
            os.write(journal, _STAMP.pack(time.monotonic()))
            yield batch

    def paced(self, step_s: float) -> Iterator[Batch]:
        """Batches for steps of another length, which no journal records."""
        for batch in workload.batches(1 + self.number + self.num_learners * self.life):
            begin = time.monotonic()
            if self.over:
                return
            yield batch
            time.sleep(max(0.0, begin + step_s - time.monotonic()))

    @property
    def journal(self) -> Path:
        """The journal of the steps of this life."""
        return self.folder / f"{self.number}.{self.life}.steps"

    def announce(self) -> None:
        """Tells the process that kills learners which process this one is."""
        write_json(self.folder / f"{self.number}.pid", os.getpid())

    def leave(self, weights: Tensor) -> None:
        """Saves the weights of this learner at the end of the run."""
        torch.save(weights, self.folder / f"{self.number}.weights")


@dataclass
class Outcome:
    """The outcome of a run.

    Args:
        lives: Times at which steps began, by learner and life, on the machine's clock.
        weights: Weights of the learners that lived to the end.
        kills: Time and learner of each kill.
        trouble: Output of learners that ended in an error of their own.
    """

    lives: dict[int, list[list[float]]]
    weights: list[Tensor]
    kills: list[tuple[float, int]]
    trouble: list[str] = field(default_factory=list)


Program = Callable[[Killable], None]


def run(
    program: Program,
    first: Killable,
    seconds: float,
    kill_every_s: float | None,
    absent_s: float,
    seed: int = 0,
    supervised: bool = False,
) -> Outcome:
    """Runs a program as each learner, and kills one of them at intervals.

    Args:
        program: Of one life; it ends soon after `until`. If supervised: of a process
            that starts all learners, and starts them again if one of them dies.
        first: A learner as it is at the beginning; its number does not matter.
        seconds: Length of the run.
        kill_every_s: Seconds from one kill to the next; None: no learner is killed.
        absent_s: Seconds after which a killed learner is started again.
        seed: Seed of the choice of the learners to kill.
        supervised: Whether a process other than this one starts the learners.
    """
    begin = time.monotonic()
    first = replace(first, until=begin + seconds)
    crowd = (_Supervised if supervised else Crowd)(program, first)
    dice, kills = random.Random(seed), list[tuple[float, int]]()
    due = begin + (kill_every_s or seconds)
    returns: list[tuple[float, int]] = []
    try:
        while (now := time.monotonic()) < first.until:
            if kill_every_s and now >= due and due < first.until - absent_s:
                victim = dice.choice(crowd.alive())
                crowd.kill(victim)
                kills.append((now, victim))
                returns.append((now + absent_s, victim))
                due += kill_every_s
            while returns and now >= returns[0][0]:
                crowd.start(returns.pop(0)[1])
            time.sleep(0.02)
        crowd.wait(60.0)
    finally:
        crowd.kill_all()
    return _collect(first.folder, first.num_learners, kills)


class Crowd:
    """The processes of all learners."""

    def __init__(self, program: Program, first: Killable) -> None:
        self._program, self._first = program, first
        self._context = multiprocessing.get_context("fork")
        self._lives = [0] * first.num_learners
        self._processes: dict[int, Any] = {}
        self.start_all()

    def start_all(self) -> None:
        """Starts the first life of each learner."""
        for number in range(self._first.num_learners):
            self.start(number)

    def alive(self) -> list[int]:
        """The learners whose processes run or are stopped."""
        return sorted(n for n, p in self._processes.items() if p.is_alive())

    def start(self, number: int) -> None:
        """Starts the next life of a learner."""
        killable = replace(self._first, number=number, life=self._lives[number])
        self._lives[number] += 1
        process = self._context.Process(target=_live, args=(self._program, killable))
        process.start()
        self._processes[number] = process

    def kill(self, number: int) -> None:
        """Kills a learner, as a system that has run out of memory does."""
        process = self._processes[number]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()

    def signal(self, number: int, which: signal.Signals) -> None:
        """Sends a learner a signal; does nothing if it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self._processes[number].pid, which)

    def wait(self, seconds: float) -> None:
        """Waits for all to end by themselves."""
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))

    def kill_all(self) -> None:
        """Kills all learners."""
        for number in self._processes:
            Crowd.kill(self, number)


class _Supervised(Crowd):
    """Learners that another process starts and restarts; they announce themselves."""

    @override
    def start_all(self) -> None:
        super().start(0)

    @override
    def alive(self) -> list[int]:
        return sorted(int(path.stem) for path in self._first.folder.glob("*.pid"))

    @override
    def start(self, number: int) -> None:
        """Does nothing, because the other process starts learners."""

    @override
    def kill(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(int((self._first.folder / f"{number}.pid").read_text()), 9)


def _live(program: Program, killable: Killable) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = killable.folder / f"{killable.number}.{killable.life}.log"
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        program(killable)
    except BaseException:
        traceback.print_exc()
        (killable.folder / f"{log.name}.trouble").write_text(traceback.format_exc())
    sys.stderr.flush()
    # Threads of libraries that were not joined must not hold the process.
    os._exit(0)


def _collect(folder: Path, size: int, kills: list[tuple[float, int]]) -> Outcome:
    lives = {number: _lives_of(folder, number) for number in range(size)}
    weights = [torch.load(path) for path in sorted(folder.glob("*.weights"))]
    trouble = [path.read_text()[-500:] for path in sorted(folder.glob("*.trouble"))]
    return Outcome(lives, weights, kills, trouble)


def _lives_of(folder: Path, number: int) -> list[list[float]]:
    journals = sorted(
        folder.glob(f"{number}.*.steps"), key=lambda p: int(p.suffixes[-2][1:])
    )
    return [[s for (s,) in _STAMP.iter_unpack(d.read_bytes())] for d in journals]
