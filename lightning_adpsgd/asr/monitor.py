"""The word error rate of the consensus model during training.

At each validation, learner 0 computes the log-likelihoods of a few held-out utterances
with the consensus model. A low-priority process decodes them, because decoders hold
Python's global lock. The training thread logs the word error rate when it is known,
because loggers belong to that thread.
"""

import multiprocessing
import os
import signal
import stat
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_adpsgd.asr.scoring import Errors, Glm, score
from lightning_adpsgd.callbacks.clock import Monitor, Outputs
from lightning_adpsgd.callbacks.reporting import epochs_so_far, gather, log

Decode = Callable[[np.ndarray], Sequence[str]]
"""A function from log-likelihoods [time, num_states] to words."""


class HeldOut(NamedTuple):
    """A held-out utterance, which is not in the training data.

    Attributes:
        frames: Frames [time, feature] for the module's `log_likelihoods`.
        words: Reference transcript.
    """

    frames: Tensor
    words: Sequence[str]


def module_log_likelihoods(module: LightningModule, frames: Tensor) -> Tensor:
    """The log-likelihoods from a module's own method, such as `AcousticModel`'s."""
    log_likelihoods: Any = module.log_likelihoods
    return log_likelihoods(frames)


class WordErrorMonitor(Monitor):
    """Logs the word error rate of the consensus model, after each validation in `fit`.

    The rate is a fraction, logged under `name` once it is known, which may be many
    steps later. `<name>/global_samples` and `<name>/epochs` give the time of the
    snapshot, and `<name>/seconds` the duration of decoding. The rate is also in
    `trainer.callback_metrics`, where `ConvergenceMonitor(wer=name)` finds the last one
    for its row; list that monitor after this one.

    One snapshot is decoded at a time, while the newest one waits. A decoding error
    becomes a warning. At the end of training, learner 0 waits for both.

    Args:
        utterances: Utterances by name.
        decode: Decoder, called in a forked process with one thread and no device.
        log_likelihoods: Function from module and frames (on the module's device) to
            log-likelihoods [time, num_states].
        glm: Spelling rules of the scoring, as of `asr.scoring.score`.
        name: Name of the rate in the loggers.
        wait: Longest wait at the end of training.

    Raises:
        ValueError: `utterances` is empty.
    """

    def __init__(
        self,
        utterances: Mapping[str, HeldOut],
        decode: Decode,
        *,
        log_likelihoods: Callable[
            [LightningModule, Tensor], Tensor
        ] = module_log_likelihoods,
        glm: Glm | None = None,
        name: str = "wer",
        wait: timedelta = timedelta(minutes=5),
    ) -> None:
        super().__init__()
        if not utterances:
            raise ValueError("`utterances` must have at least one utterance, got none")
        self._utterances, self._decode, self._glm = utterances, decode, glm
        self._log_likelihoods, self._name, self._wait = log_likelihoods, name, wait
        self._waiting: _Snapshot | None = None
        self._decoding: _Decoding | None = None

    @override
    def measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        samples = sum(number for [number] in gather(trainer, [self.clock.samples]))
        if not trainer.is_global_zero:
            return
        self._log_if_done(trainer)
        try:
            matrices = self._matrices(pl_module)
        except Exception as error:
            rank_zero_warn(f"no word error rate: {type(error).__name__}: {error}")
            return
        self._waiting = _Snapshot(samples, epochs_so_far(trainer), matrices)
        self._begin_next()

    @override
    def count(self, trainer: Trainer, outputs: Outputs, batch: Any) -> None:
        self._log_if_done(trainer)

    # After the last collective: no other learner waits for this one.
    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        deadline = time.monotonic() + self._wait.total_seconds()
        while self._decoding is not None:
            if not self._decoding.wait(deadline - time.monotonic()):
                rank_zero_warn(
                    f"The last word error rate was not known {self._wait} after the "
                    "training; raise `wait`, or give fewer `utterances`"
                )
                break
            self._log_if_done(trainer)
        self._stop()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    @torch.no_grad()
    def _matrices(self, module: LightningModule) -> dict[str, np.ndarray]:
        return {
            name: self._log_likelihoods(module, utterance.frames.to(module.device))
            .float()
            .cpu()
            .numpy()
            for name, utterance in self._utterances.items()
        }

    def _begin_next(self) -> None:
        if self._decoding is None and self._waiting is not None:
            snapshot, self._waiting = self._waiting, None
            references = {n: u.words for n, u in self._utterances.items()}
            task = _Task(snapshot.matrices, references, self._decode, self._glm)
            self._decoding = _Decoding.begin(snapshot, task)

    def _log_if_done(self, trainer: Trainer) -> None:
        if self._decoding is None or not self._decoding.wait(0):
            return
        done, self._decoding = self._decoding, None
        self._log(trainer, done.snapshot, done.outcome())
        self._begin_next()

    def _log(
        self, trainer: Trainer, snapshot: "_Snapshot", outcome: "_Outcome | str"
    ) -> None:
        if isinstance(outcome, str):
            rank_zero_warn(f"no word error rate: decoding failed: {outcome}")
            return
        rate = outcome.errors.wer
        trainer.callback_metrics[self._name] = torch.tensor(rate)
        figures = {
            self._name: rate,
            f"{self._name}/global_samples": snapshot.global_samples,
            f"{self._name}/epochs": snapshot.epochs,
            f"{self._name}/seconds": outcome.seconds,
        }
        log(trainer, figures)

    def _stop(self) -> None:
        if self._decoding is not None:
            self._decoding.kill()
        self._decoding = self._waiting = None


class _Snapshot(NamedTuple):
    global_samples: float
    epochs: float
    matrices: Mapping[str, np.ndarray]


class _Task(NamedTuple):
    matrices: Mapping[str, np.ndarray]
    references: Mapping[str, Sequence[str]]
    decode: Decode
    glm: Glm | None


class _Outcome(NamedTuple):
    errors: Errors
    seconds: float


@dataclass(frozen=True)
class _Decoding:
    """A forked process that decodes a snapshot, which it shares in memory."""

    snapshot: _Snapshot
    process: BaseProcess
    reader: Connection

    @classmethod
    def begin(cls, snapshot: _Snapshot, task: _Task) -> "_Decoding":
        context = multiprocessing.get_context("fork")
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_serve, args=(task, writer, os.getpid()), daemon=True
        )
        with warnings.catch_warnings():
            # Since Python 3.12. The process uses no lock that another thread may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        writer.close()
        return cls(snapshot, process, reader)

    def wait(self, seconds: float) -> bool:
        """Waits up to this time; returns whether decoding has ended."""
        return self.reader.poll(max(0.0, seconds))

    def outcome(self) -> "_Outcome | str":
        """The word errors of a finished decoding, or its failure."""
        try:
            return self.reader.recv()
        except EOFError:
            self.process.join()
            return f"its process died with exit code {self.process.exitcode}"
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.reader.close()


def _serve(task: _Task, writer: Connection, learner: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _close_sockets()
    os.nice(19)
    torch.set_num_threads(1)
    begin = time.monotonic()
    try:
        words = {}
        for name, matrix in task.matrices.items():
            # A learner that was killed asks for no rate, and this process would hold
            # its locks against the training that continues.
            if os.getppid() != learner:
                return
            words[name] = task.decode(matrix)
        errors = score(task.references, words, glm=task.glm)
        writer.send(_Outcome(errors, time.monotonic() - begin))
    except Exception:
        writer.send(traceback.format_exc().strip())


def _close_sockets() -> None:
    """Closes the copies of this learner's connections to other learners.

    While a copy is open, the others do not notice if this learner dies.
    """
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))
