"""The word error rate during training, of a module whose words are known beforehand."""

import csv
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_adpsgd.asr.monitor import HeldOut, WordErrorMonitor
from lightning_adpsgd.callbacks import ConvergenceMonitor
from tests import warm
from tests.helpers import PATIENCE_S, expect_all_to_end
from tests.learners import gossip, learners, trainer_of, values

WORDS = ("alpha", "beta")
PATIENCE = timedelta(seconds=20)


class Counter(pl.LightningModule):
    """Its weight is the number of its steps; six to an epoch.

    It takes a frame of less than its weight for "alpha" and others for "beta".
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return -self.weight.sum()

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.weight.sum(), sync_dist=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1.0)

    def log_likelihoods(self, frames: Tensor) -> Tensor:
        is_beta = (frames >= self.weight).float()
        return torch.cat([1 - is_beta, is_beta], 1)


def read_off(matrix: np.ndarray) -> list[str]:
    return [WORDS[state] for state in matrix.argmax(1)]


# After one epoch the weight is 6 and one of four words is right; then 12, and all are.
UTTERANCES = {
    "a": HeldOut(torch.tensor([[5.0], [7.0], [7.0]]), ["alpha"] * 3),
    "b": HeldOut(torch.tensor([[8.0]]), ["alpha"]),
}


def fit(folder: Path, *callbacks: pl.Callback, epochs: int = 2) -> pl.Trainer:
    data = DataLoader(TensorDataset(torch.zeros(12, 1)), batch_size=2)
    trainer = trainer_of(
        "auto",  # pyright: ignore[reportArgumentType]
        1,
        max_epochs=epochs,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=list(callbacks),
    )
    trainer.fit(Counter(), data, data)
    return trainer


def rates(folder: Path) -> list[tuple[float, ...]]:
    """Rate, global samples and epochs of every row that has them, and its step."""
    names = ("wer", "wer/global_samples", "wer/epochs", "step")
    with (folder / "metrics.csv").open() as file:
        return [
            tuple(float(row[name]) for name in names)
            for row in csv.DictReader(file)
            if row.get("wer")
        ]


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def monitor(decode: Callable[..., Any] = read_off, **settings: Any) -> WordErrorMonitor:
    return WordErrorMonitor(UTTERANCES, decode, **{"wait": PATIENCE, **settings})


def test_the_rate_stands_beside_the_samples_of_its_model(tmp_path) -> None:
    fit(tmp_path, monitor())
    assert [row[:3] for row in rates(tmp_path)] == [(0.75, 12, 1), (0, 24, 2)]


def test_the_last_rate_is_in_the_row_of_the_run(tmp_path) -> None:
    convergence = ConvergenceMonitor(wer="wer")
    fit(tmp_path, monitor(), convergence, epochs=1)
    assert convergence.run is not None
    assert convergence.run.wer == 0.75


class Lets(pl.Callback):
    """Lets the decoder go on when training has come to a step."""

    def __init__(self, gate: Any, step: int) -> None:
        self._gate, self._step = gate, step

    @override
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            self._gate.set()


def test_training_goes_on_while_words_are_decoded(tmp_path) -> None:
    gate = multiprocessing.get_context("fork").Event()

    def wait_and_read(matrix: np.ndarray) -> list[str]:
        assert gate.wait(PATIENCE_S)
        return read_off(matrix)

    # It would wait forever if training waited for it.
    fit(tmp_path, monitor(wait_and_read), Lets(gate, step=15), epochs=3)
    table = rates(tmp_path)
    assert table[0][:3] == (0.75, 12, 1)
    assert table[0][3] >= 15 - 1
    assert table[-1][:3] == (0, 36, 3)


def test_of_those_that_wait_the_newest_is_decoded(tmp_path) -> None:
    gate = multiprocessing.get_context("fork").Event()

    def wait_and_read(matrix: np.ndarray) -> list[str]:
        assert gate.wait(PATIENCE_S)
        return read_off(matrix)

    # Let go after the last validation: one is under way, and the newest one waits.
    class LetsAtTheEnd(pl.Callback):
        @override
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            gate.set()

    fit(tmp_path, monitor(wait_and_read), LetsAtTheEnd(), epochs=4)
    assert [samples for _, samples, *_ in rates(tmp_path)] == [12, 48]


def broken(matrix: np.ndarray) -> list[str]:
    raise KeyError("no such state")


def dying(matrix: np.ndarray) -> list[str]:
    os._exit(3)


def refusing(module: pl.LightningModule, frames: Tensor) -> Tensor:
    raise ValueError("frames are too short")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decode": broken}, "decoding failed: .*no such state"),
        ({"decode": dying}, "decoding failed: .*died with exit code 3"),
        ({"log_likelihoods": refusing}, "ValueError: frames are too short"),
    ],
)
def test_what_goes_wrong_is_a_warning(tmp_path, settings, message) -> None:
    with pytest.warns(UserWarning, match=f"(?s)no word error rate: {message}"):
        trainer = fit(tmp_path, monitor(**settings))
    assert trainer.current_epoch == 2
    assert rates(tmp_path) == []


def test_a_decoder_that_never_ends_is_given_up(tmp_path) -> None:
    gate = multiprocessing.get_context("fork").Event()

    def wait_in_vain(matrix: np.ndarray) -> list[str]:
        gate.wait()
        return []

    seconds = timedelta(seconds=0.2)
    with pytest.warns(UserWarning, match="was not known 0:00:00.2"):
        fit(tmp_path, monitor(wait_in_vain, wait=seconds), epochs=1)


def test_a_training_that_fails_leaves_no_decoder_behind(tmp_path) -> None:
    gate = multiprocessing.get_context("fork").Event()

    def wait_in_vain(matrix: np.ndarray) -> list[str]:
        gate.wait()
        return []

    class Fails(pl.Callback):
        @override
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, monitor(wait_in_vain), Fails())


def test_the_decoder_ends_when_its_learner_is_killed(tmp_path) -> None:
    def lose_the_learner(matrix: np.ndarray) -> list[str]:
        if os.getppid() == learner.value:
            os.kill(learner.value, signal.SIGKILL)
        time.sleep(0.5)
        return []

    def train() -> None:
        learner.value = os.getpid()
        many = dict.fromkeys(map(str, range(10_000)), UTTERANCES["b"])
        fit(tmp_path, WordErrorMonitor(many, lose_the_learner), epochs=100)

    learner = multiprocessing.get_context("fork").Value("i", 0)
    expect_all_to_end(train)


def holds_sockets(matrix: np.ndarray) -> list[str]:
    """Says "beta" once too often for every socket that it has, which are none."""
    links = (f"/dev/fd/{name}" for name in os.listdir("/dev/fd"))
    names = (os.readlink(link) for link in links if os.path.exists(link))
    sockets = [name for name in names if name.startswith("socket")]
    return read_off(matrix) + ["beta"] * len(sockets)


def test_of_two_that_gossip_one_decodes_and_holds_no_connection(tmp_path) -> None:
    def program(rank: int) -> None:
        data = DataLoader(TensorDataset(torch.zeros(12, 1)), batch_size=2)
        trainer = trainer_of(
            gossip(),
            2,
            max_epochs=2,
            logger=CSVLogger(tmp_path, name="", version=""),
            callbacks=[monitor(holds_sockets)],
        )
        trainer.fit(Counter(), data, data)

    values(learners(2, program))
    # The weights of both are equal throughout, whatever they exchange.
    assert [row[:3] for row in rates(tmp_path)][-1] == (0, 48, 2)


def test_no_utterance_is_refused() -> None:
    with pytest.raises(
        ValueError, match="`utterances` must have at least one utterance"
    ):
        WordErrorMonitor({}, read_off)


def test_the_monitor_leaves_the_strategy_alone():
    """Speech needs a clock and a logger, and not the engine."""
    program = (
        "import sys, lightning_adpsgd.asr.monitor\n"
        "assert 'lightning_adpsgd.strategy.trainer' not in sys.modules"
    )
    subprocess.run([warm.python(), "-c", program], check=True, timeout=PATIENCE_S * 4)
