"""In which order tests run and on which devices; and what none may leave behind."""

import gc
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from tests import warm
from tests.helpers import num_gpus

# How long an example takes is the machine's affair; which ones are tried, the code's.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")


def devices() -> list[str]:
    """The CPU, and the accelerator of this machine if it has one."""
    found = torch.accelerator.current_accelerator()
    is_cuda = found is None or found.type == "cuda"
    present = num_gpus() if is_cuda else torch.accelerator.is_available()
    return ["cpu", f"{found.type}:0"] if found is not None and present else ["cpu"]


@pytest.fixture(scope="module", params=devices())
def engine_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where a test's weights lie: tensors that it makes without a device are there."""
    before = torch.get_default_device()
    torch.set_default_device(device := torch.device(request.param))
    yield device
    torch.set_default_device(before)


# By what a test's module starts processes, or connects islands over real sockets.
STARTERS = {
    "fork_map",
    "forked",
    "in_fresh_process",
    "learners",
    "multiprocessing",
    "rendezvous",
    "subprocess",
    "victim",
    "warm",
    "world",
}


# Seconds that files of tests take, if more than a few; written by `--record-seconds`.
SECONDS = Path(__file__).with_name("seconds.txt")
# Of a file that starts processes and is not in the list.
SECONDS_OF_PROCESSES = 10.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-seconds",
        action="store_true",
        help=f"write how long each file takes to {SECONDS.name}",
    )


def pytest_configure(config: pytest.Config) -> None:
    """One server of warm programs for all workers of pytest-xdist, which inherit it."""
    if server := warm.start():
        config.add_cleanup(server.close)
    # Of processes that recipes and launchers spawn.
    multiprocessing.set_executable(warm.python())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files come first, and tests that start processes run again if they fail.

    Dealt by file to several workers, a slow file at the end would leave all but one of
    them without work.

    What the system does with several processes on a machine that has other work is not
    in a test's hands: it stops one for seconds, or has no memory for another. The rest
    is deterministic, and fails at once. The summary names what ran again.
    """
    recorded = recorded_seconds()
    seconds: dict[pytest.Item, float] = {}
    for item in items:
        guess = 0.0
        if isinstance(item, pytest.Function) and starts_processes(item.module):
            item.add_marker(pytest.mark.flaky(reruns=1))
            guess = SECONDS_OF_PROCESSES
        seconds[item] = recorded.get(item.nodeid.partition("::")[0], guess)
    items.sort(key=lambda item: -seconds[item])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leaves what imports and collection make out of garbage collections.

    None of it is garbage, and a forked learner that looked for some would write to all
    of it, and so get a copy of half a gigabyte.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        os.register_at_fork(after_in_child=gc.freeze)


def recorded_seconds() -> dict[str, float]:
    """Seconds of each file that is in the list; a file that is not takes few."""
    lines = SECONDS.read_text().splitlines() if SECONDS.exists() else []
    return {file: float(seconds) for seconds, file in map(str.split, lines)}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Writes the list anew after a run of all tests that was to record it."""
    if not config.getoption("--record-seconds"):
        return
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    slow = sorted((-s, file) for file, s in seconds.items() if s >= 2)
    SECONDS.write_text("".join(f"{-s:.0f} {file}\n" for s, file in slow))


def starts_processes(module: Any) -> bool:
    """By its name, or by what it imports."""
    name = module.__name__
    is_named = name.endswith(("_integration", "test_notebooks")) or ".faults." in name
    return is_named or bool(STARTERS & vars(module).keys())


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
