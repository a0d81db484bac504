"""A record of each learner's last steps: when it stepped, waited and exchanged.

`python -m lightning_adpsgd report` draws the files of a folder as one lane per learner.
"""

import csv
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_adpsgd.callbacks.diagnostic_files import DiagnosticFiles
from lightning_adpsgd.callbacks.gossip import exposed_seconds, statistics_of
from lightning_adpsgd.callbacks.reporting import within_training
from lightning_adpsgd.files import printable, written_whole
from lightning_adpsgd.mixing.statistics import Statistics

SUFFIX = ".timeline.csv"


class Entry(NamedTuple):
    """One line of the file: a step, or another `event`.

    Attributes:
        begin: Seconds since 1970, by the learner's host, when the training began.
        end: As `begin`.
        waited: Seconds in between for which the training thread waited for others.
        exchanges: Number of exchanges with a peer that ended in between.
        peers: Super-learners of these exchanges, separated by spaces, if known.
        members: Number of super-learners present; 0 if it never changes.
        lost: Number of super-learners that disappeared in between without a goodbye.
        event: "validation", "end" or the error that ended the learner; "" for a step.
    """

    begin: float
    end: float
    waited: float = 0.0
    exchanges: int = 0
    peers: str = ""
    members: int = 0
    lost: int = 0
    event: str = ""


class _Counts(NamedTuple):
    step: int
    waited: float
    gossip: Statistics

    @classmethod
    def of(cls, trainer: Trainer) -> "_Counts":
        gossip = statistics_of(trainer)
        return cls(trainer.global_step, exposed_seconds(trainer), gossip)


class Timeline(Callback):
    """Records this learner's last steps, and writes them to a file.

    Each learner rewrites `folder/<name>.timeline.csv` at each validation, at the end,
    after an error, and every `every_s` seconds in between; docs/report.md says what
    it has. A write error only warns, and nothing is communicated.

    Args:
        folder: Folder of the files, the same for all learners of a run.
        steps: Number of lines that are kept, the latest ones.
        every_s: Seconds between two writes.
        name: Name of this learner; by default its global rank. Islands that share a
            folder need different names, because each has a learner 0.

    Raises:
        ValueError: `steps` or `every_s` is not positive.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        steps: int = 2000,
        every_s: float = 30.0,
        name: str | None = None,
    ) -> None:
        for argument, value in (("steps", steps), ("every_s", every_s)):
            if value <= 0:
                raise ValueError(f"`{argument}` must be above 0, got {value}")
        self._folder, self._name, self._every_s = Path(folder), name, every_s
        self._entries = deque[Entry](maxlen=steps)
        self._before: _Counts | None = None
        self._begin = self._meeting = self._written = self._since_1970 = 0.0
        self._files = DiagnosticFiles()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._entries.clear()
        # The host's clock may be adjusted while the training runs.
        self._since_1970 = time.time() - time.monotonic()
        self._before, self._written = _Counts.of(trainer), self._now()

    @override
    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._begin = self._now()

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        assert self._before is not None
        now, after = self._now(), _Counts.of(trainer)
        self._entries.append(_entry(self._begin, now, self._before, after))
        self._before = after
        if now - self._written > self._every_s:
            self._write(trainer)

    def on_consensus_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins a validation's entry, which includes the meeting before it."""
        self._meeting = self._now()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin, self._meeting = self._meeting or self._now(), 0.0

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if within_training(trainer):
            self._note("validation", self._begin)
            self._before = _Counts.of(trainer)
            self._write(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note("end", self._now())
        self._write(trainer)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self._before is not None:
            message = f"{type(exception).__name__}: {exception}"
            # The message may hold a file name that UTF-8 cannot encode.
            self._note(printable(" ".join(message.split())), self._now())
            self._write(trainer)
            self._before = None

    @override
    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        self._before = None  # later errors do not belong to this training

    def _note(self, event: str, begin: float) -> None:
        self._entries.append(Entry(begin, self._now(), event=event))

    def _now(self) -> float:
        return self._since_1970 + time.monotonic()

    def _write(self, trainer: Trainer) -> None:
        name = self._name or str(trainer.global_rank)
        with self._files.may_fail():
            write_timeline(self._folder / f"{name}{SUFFIX}", self._entries)
        self._written = self._now()


def write_timeline(path: Path, entries: Iterable[Entry]) -> None:
    """Writes entries in their order, whole or not at all."""
    with written_whole(path, newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Entry._fields)
        writer.writerows(
            (f"{one.begin:.4f}", f"{one.end:.4f}", f"{one.waited:.4f}", *one[3:])
            for one in entries
        )


def _entry(begin: float, end: float, before: _Counts, after: _Counts) -> Entry:
    earlier, later = before.gossip, after.gossip
    return Entry(
        begin,
        end,
        waited=after.waited - before.waited,
        exchanges=later.exchanges - earlier.exchanges,
        peers=" ".join(map(str, _peers_met(before, after))),
        members=later.members,
        lost=max(0, later.lost - earlier.lost),
    )


def _peers_met(before: _Counts, after: _Counts) -> list[int]:
    """The peers of exchanges in between: their age has grown by less than the steps."""
    steps, ages = after.step - before.step, before.gossip.peer_ages
    found = sorted(after.gossip.peer_ages.items())
    return [peer for peer, age in found if peer in ages and age < ages[peer] + steps]
