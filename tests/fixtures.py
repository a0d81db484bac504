"""What all tests have: devices, the profile of hypothesis, and an end of each job."""

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from tests.helpers import EARLIER_THREADS, free_port, num_gpus
from tests.learners import Linear, as_torchrun, gossip, loader, trainer_of

# jsonschema, which nbformat imports, would compile a grammar at its import, for over a
# second of each worker; no notebook has an address that this checks.
sys.modules.setdefault("rfc3987_syntax", None)  # pyright: ignore[reportArgumentType]

# How long an example takes is the machine's affair; which ones are tried, the code's.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

# pytest adds its handlers in each phase of a test to all loggers that do not propagate.
# Torch has fifty of them, which is a quarter of what pytest takes for a test.
for name, logger in logging.root.manager.loggerDict.items():
    if name.startswith("torch") and isinstance(logger, logging.Logger):
        logger.propagate = True


def devices() -> list[str]:
    """The CPU, and the accelerator of this machine if it has one."""
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, where there is none
        found = None
    is_cuda = found is None or found.type == "cuda"
    present = num_gpus() if is_cuda else torch.accelerator.is_available()
    return ["cpu", f"{found.type}:0"] if found is not None and present else ["cpu"]


# FSDP registers a device, even on a machine that has none. The first backward pass of a
# process looks for devices, and if it finds one, learners that this process forks may
# make none: so it comes before FSDP. With an accelerator it would forbid them itself.
if devices() == ["cpu"]:
    torch.ones((), requires_grad=True).backward()


def pytest_collection_finish() -> None:
    """Trains in this process, which forks the learners of all tests.

    What a first training looks up and keeps, they then have: an eighth of what a
    learner takes that trains a few steps.
    """
    if devices() != ["cpu"]:
        return
    logging.disable()
    with (
        mock.patch.dict(os.environ, as_torchrun(0, 1, free_port())),
        # A learner that is forked could use no GPU if this process had asked for one.
        mock.patch("torch._C._cuda_getDeviceCount", return_value=0, create=True),
        warnings.catch_warnings(action="ignore"),
    ):
        for communication in ("async", "sync"):
            trainer = trainer_of(gossip("ring", communication), 1)
            trainer.fit(Linear(), loader(4), loader(2))
    dist.destroy_process_group()
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module", params=devices())
def engine_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where a test's weights lie: tensors that it makes without a device are there."""
    device = torch.device(request.param)
    # Any default device, even the CPU, sends all calls of torch through Python.
    if device.type != "cpu":
        torch.set_default_device(device)
    yield device
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def threads_of_earlier_tests() -> Iterator[None]:
    """So that a thread which one test leaves fails none of those that follow."""
    EARLIER_THREADS.update(threading.enumerate())
    yield
    EARLIER_THREADS.clear()


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """A command that a test runs in this process may take Ctrl-C, and keeps it."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# What Lightning tells the learners that it starts, by the environment.
LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def nothing_of_a_job_is_left() -> Iterator[None]:
    """A Trainer of one process leaves its group and its environment to what follows."""
    before = {name: os.environ.get(name) for name in LAUNCHED}
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
