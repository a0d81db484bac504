"""Runs a room's tests against a mutant, in a process that is forked after the imports.

torch and Lightning take seconds to import and are never mutated. The parent imports
them once; a child works in its own copy of the checkout and imports the package, the
mutant within, and the tests from there.
"""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

OWN = ("lightning_adpsgd", "tests", "recipes", "benchmarks", "notebooks")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:rerunfailures")
_fork = multiprocessing.get_context("fork")


class Ended(NamedTuple):
    """How a run of tests ended.

    Args:
        outcome: "survived" if all tests passed, "killed" if one failed, "timed out" if
            they had not ended within their time.
        seconds: duration of the run.
        output: what pytest printed.
    """

    outcome: str
    seconds: float
    output: str


class Trial:
    """One run of tests in a copy of the checkout, begun at once.

    Args:
        copy: folder of the copy.
        tests: test files below it.
        seconds: duration after which the run is killed.
    """

    def __init__(self, copy: Path, tests: Sequence[str], seconds: float) -> None:
        self.copy = copy
        self._seconds, self._begin = seconds, time.monotonic()
        self._process: Any = _fork.Process(target=_run, args=(copy, list(tests)))
        self._process.start()

    def ended(self) -> Ended | None:
        """How it ended, or None while it runs."""
        seconds = time.monotonic() - self._begin
        if self._process.is_alive() and seconds < self._seconds:
            return None
        outcome = "timed out"
        if not self._process.is_alive():
            outcome = "killed" if self._process.exitcode else "survived"
        self.kill()
        output = (self.copy / "trial.log").read_text(errors="replace")
        return Ended(outcome, seconds, output)

    def kill(self) -> None:
        """Ends the run, with the processes that its tests have started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()


def _run(copy: Path, tests: list[str]) -> None:
    os.setsid()
    os.chdir(copy)
    log = os.open("trial.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
        del sys.modules[name]
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1")
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    in_order: list[Any] = [_InOrder(tests)]
    status = pytest.main(["-o", "addopts=", *OPTIONS, *tests], in_order)
    sys.stdout.flush()
    os._exit(int(status))


class _InOrder:
    """Runs files as they were given; `tests/conftest.py` puts slow ones first."""

    def __init__(self, files: list[str]) -> None:
        self._files = files

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files = [file.partition("::")[0] for file in self._files]
        items.sort(key=lambda item: files.index(item.nodeid.partition("::")[0]))


def copy_of(root: Path, folder: Path) -> Path:
    """A copy of all files of a checkout that git does not ignore."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


def import_what_is_never_mutated() -> None:
    """Imports the heavy libraries into this process, and starts no thread."""
    # The plugin of torch would import the package from here.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import hypothesis  # noqa: F401
    import lightning.fabric
    import lightning.pytorch  # noqa: F401
    import torch

    torch.set_num_threads(1)
