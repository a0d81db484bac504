"""How tests are dealt to processes, in which order, and again if they fail.

pytest-xdist's controller imports this too, which runs no test: so torch, Lightning and
hypothesis are imported by `tests.fixtures`, in the processes that run tests.
"""

import functools
import gc
import importlib.metadata
import multiprocessing
import os
import resource
import shlex
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import warm

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


# What files of tests take, if more than a few seconds; written by `--record-seconds`.
SECONDS = Path(__file__).with_name("seconds.txt")
PROCESSOR = "processor seconds"
USED = pytest.StashKey[float]()
# Of a file that starts processes and is not in the list.
SECONDS_OF_PROCESSES = 10.0
# A file that uses less than this share of a core mostly waits.
WAITS = 0.45
# Where a file or socket that is only dropped, not closed, is an error: Python closes it
# at once, but only as long as nothing else, such as a trace, holds it.
CLOSES = (
    "tests/coordination/",
    "tests/epochs/",
    "tests/islands/test_connections.py",
    "tests/islands/test_rendezvous.py",
    "tests/strategy/checkpoints/",
    "tests/test_files.py",
    "tests/transport/",
)
UNCLOSED = "error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning"


class Seconds(NamedTuple):
    """What a file of tests takes, and how much of a processor in that time."""

    seconds: float
    processor: float


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-seconds",
        action="store_true",
        help=f"write how long each file and its processes take to {SECONDS.name}",
    )


def pytest_configure(config: pytest.Config) -> None:
    """One server of warm programs for all workers of pytest-xdist, which inherit it."""
    # Each run of wandb reads the metadata of all that is installed, twice: 0.2 s.
    os.environ.setdefault("WANDB_X_SAVE_REQUIREMENTS", "false")
    if server := warm.start():
        config.add_cleanup(server.close)
    if config.getoption("dist", "no") != "no":
        return  # the controller
    # Jobs of a shell in the background ignore it, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.executable = getattr(config, "workerinput", {}).get("python", sys.executable)
    # Of processes that recipes and launchers spawn.
    multiprocessing.set_executable(warm.python())
    # Every Trainer looks for callbacks in the metadata of all that is installed, which
    # is a third of the processor time of a learner that takes a few steps.
    select = functools.cache(importlib.metadata.entry_points().select)
    importlib.metadata.entry_points = select
    config.pluginmanager.import_plugin("tests.fixtures")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Iterable[Any]) -> None:
    """Workers are warm programs, and so need not import torch and Lightning."""
    for spec in specs:
        spec.python = shlex.quote(warm.python())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker its interpreter without the server, and if all are collected."""
    node.workerinput["python"] = sys.executable
    asked = node.config
    takes_all = asked.args_source is pytest.Config.ArgsSource.TESTPATHS
    node.workerinput["imports"] = takes_all and not asked.getoption("ignore")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files come first, and tests that start processes run again if they fail.

    Dealt by file to several workers, a slow file at the end would leave all but one of
    them without work. Files that mostly wait and files that mostly compute are mixed
    evenly, or all workers would wait at first, and want a core at once later.

    What the system does with several processes on a machine that has other work is not
    in a test's hands. It stops one for seconds, or has no memory for another. The rest
    is deterministic, and fails at once. The summary names what ran again.
    """
    for item in items:
        if isinstance(item, pytest.Function) and starts_processes(item.module):
            item.add_marker(pytest.mark.flaky(reruns=1))
        if item.nodeid.startswith(CLOSES):
            item.add_marker(pytest.mark.filterwarnings(*UNCLOSED))
    places = {file: place for place, file in enumerate(mixed(items))}
    items.sort(key=lambda item: places[file_of(item)])


def mixed(items: Iterable[pytest.Item]) -> list[str]:
    """The files, waiting and computing ones each spread over the whole time."""
    waiting, computing = list[tuple[float, str]](), list[tuple[float, str]]()
    recorded = recorded_seconds()
    modules = {file_of(item): getattr(item, "module", None) for item in items}
    for file, module in modules.items():
        starts = module is not None and starts_processes(module)
        guess = Seconds(SECONDS_OF_PROCESSES * starts, 0.0)
        seconds, processor = recorded.get(file, guess)
        waits = processor < WAITS * seconds
        (waiting if waits else computing).append((seconds, file))
    places = [*spread(sorted(waiting)), *spread(sorted(computing))]
    return [file for _, file in sorted(places, reverse=True)]


def spread(files: list[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    """Each file, after the share of all seconds that is left when it begins."""
    total, left = sum(seconds for seconds, _ in files), 0.0
    for seconds, file in files:
        left += seconds
        yield left / (total or 1.0), file


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Leaves what imports and collection make out of garbage collections.

    None of it is garbage, and a forked learner that looked for some would write to all
    of it, and so get a copy of half a gigabyte.
    """
    gc.disable()
    try:
        import_share(session.config)
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        os.register_at_fork(after_in_child=gc.freeze)
        # Each fit asks how many there are, and Python counts them one by one.
        gc.get_freeze_count = functools.cache(gc.get_freeze_count)
        gc.get_freeze_count()
        session.config.stash[USED] = processor_seconds()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Clears what other tests have left before the first one that must close all."""
    result = yield
    if nextitem and nextitem.nodeid.startswith(CLOSES) > item.nodeid.startswith(CLOSES):
        gc.collect()
    return result


def import_share(config: pytest.Config) -> None:
    """Imports a worker's share of all files of tests, before they are collected.

    In a fresh clone all workers would compile all files, each for itself. So each finds
    most of them compiled by another.
    """
    mine: dict[str, Any] = getattr(config, "workerinput", {})
    if not mine.get("imports"):
        return
    files = sorted(config.rootpath.glob("tests/**/test_*.py"))
    number = int(mine["workerid"].removeprefix("gw"))
    for file in files[number :: mine["workercount"]]:
        name = ".".join(file.relative_to(config.rootpath).with_suffix("").parts)
        with suppress(Exception, pytest.skip.Exception):  # the collection tells of it
            importlib.import_module(name)


def recorded_seconds() -> dict[str, Seconds]:
    """Seconds of each file that is in the list; a file that is not takes few."""
    lines = SECONDS.read_text().splitlines() if SECONDS.exists() else []
    rows = map(str.split, lines)
    return {file: Seconds(*map(float, numbers)) for *numbers, file in rows}


def file_of(item: pytest.Item) -> str:
    """The file of a test, from the root of the checkout."""
    return item.nodeid.partition("::")[0]


def processor_seconds() -> float:
    """Of this process and of those that it has waited for; not of warm programs."""
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes in each report how much of the processor was used since the last one."""
    report = yield
    if not item.config.getoption("--record-seconds"):
        return report
    before, now = item.config.stash[USED], processor_seconds()
    item.config.stash[USED] = now
    report.user_properties.append((PROCESSOR, now - before))
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Writes the list anew after a run of all tests that was to record it."""
    if not config.getoption("--record-seconds"):
        return
    seconds, processor = (
        defaultdict(float),
        defaultdict(float, warm.processor_seconds()),
    )
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.partition("::")[0]
                seconds[file] += report.duration
                used: dict[str, Any] = dict(report.user_properties)
                processor[file] += used.get(PROCESSOR, 0.0)
    slow = sorted((-s, file) for file, s in seconds.items() if s >= 2)
    lines = (f"{-s:.0f} {processor[file]:.0f} {file}\n" for s, file in slow)
    SECONDS.write_text("".join(lines))
    terminalreporter.write_line(f"processor: {sum(processor.values()):.0f} s in tests")


def starts_processes(module: Any) -> bool:
    """By its name, or by what it imports."""
    name = module.__name__
    is_named = name.endswith(("_integration", "test_notebooks")) or ".faults." in name
    return is_named or bool(STARTERS & vars(module).keys())
