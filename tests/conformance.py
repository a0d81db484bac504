"""Runs Lightning's own tests with this package's strategy in the place of `ddp`.

    python -m tests.conformance CHECKOUT [--settings adpsgd,sdpsgd] [--only PATTERN]

`CHECKOUT` is a clone of Lightning's repository at the tag of the installed version, or
the nearest that there is; its tests need packages of their own
(`requirements/pytorch/test.txt` there). First all tests that mention several processes
run under `ddp`. Those that made a DDP strategy and
passed run again under each setting, with every alias of `ddp` and the name
`DDPStrategy` meaning ours. What passes under `ddp` and not under a setting is printed,
and the exit status is how many these are. Under a setting that ends in `_everywhere` it
is all of Lightning's tests: every Trainer that names no strategy has this one, alone.

The module is two things: this driver, and the plugin (`-p tests.conformance`) that the
driver loads into each run of pytest.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy as LightningStrategy
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer import Trainer

from lightning_adpsgd import HADPSGDStrategy
from lightning_adpsgd.registration import NAMES

SETTINGS: dict[str, dict[str, Any]] = {
    **NAMES,
    # Where a test asks for two learners it gets four, in two super-learners.
    "two_of_four": {"super_learner_size": 2, "devices": 4},
    "two_of_four_sync": {
        "communication": "sync",
        "super_learner_size": 2,
        "devices": 4,
    },
    "hadpsgd_everywhere": {"everywhere": True},
    "sdpsgd_everywhere": {**NAMES["sdpsgd"], "everywhere": True},
}
CONTROLS = {
    "ddp": {},
    "ddp_of_four": {"devices": 4},
    "ddp_everywhere": {"everywhere": True},
}
_OF_THE_TESTS = ("devices", "everywhere")  # what is no dial of the strategy
_SETTING = "ADPSGD_CONFORMANCE_SETTING"
_REPORT = "ADPSGD_CONFORMANCE_REPORT"
_SECONDS_PER_TEST = 90

# Read at import: some tests clear the environment.
_RUNNING = os.environ.get(_SETTING, "")


# --- the plugin: in the processes that run Lightning's tests


class DDPStrategy(HADPSGDStrategy):
    """Takes what Lightning's takes; the dials are those of the setting.

    It has Lightning's name, because tests are named after their arguments.
    """

    def __init__(self, accelerator: Any = None, **ddp: Any) -> None:
        setting = SETTINGS[_RUNNING].items()
        dials: Any = {k: v for k, v in setting if k not in _OF_THE_TESTS}
        # What Lightning's tests count under `ddp` are equal shares.
        dials = {"work_sharing": False, **dials}
        super().__init__(**dials, accelerator=accelerator, **ddp)


class _Recorder:
    """Notes for each test how it ended and whether it made a DDP strategy."""

    def __init__(self, path: str) -> None:
        self._path, self._touched = path, False
        original: Any = LightningStrategy.__init__

        def noting(strategy: LightningStrategy, *args: Any, **kwargs: Any) -> None:
            self._touched = True
            original(strategy, *args, **kwargs)

        setattr(LightningStrategy, "__init__", noting)  # noqa: B010  pyright knows the type

    def pytest_runtest_logreport(self, report: Any) -> None:
        line = {"test": report.nodeid, "when": report.when, "outcome": report.outcome}
        line |= {"touched": self._touched, "why": str(report.longrepr or "")[-3000:]}
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")
        if report.when == "teardown":
            self._touched = False


def pytest_configure(config: Any) -> None:
    """Loaded into pytest: replaces `ddp`, and records."""
    # The processes that a test launches load this too, and record nothing.
    if "LOCAL_RANK" not in os.environ:
        config.pluginmanager.register(_Recorder(os.environ[_REPORT]))


def _replace_ddp() -> None:
    for name in StrategyRegistry.available_strategies():
        if name.startswith("ddp"):
            arguments = StrategyRegistry[name]["init_params"]
            StrategyRegistry.register(name, DDPStrategy, override=True, **arguments)
    for name in ("lightning.pytorch.strategies", "lightning.pytorch.strategies.ddp"):
        vars(sys.modules[name])["DDPStrategy"] = DDPStrategy


def _replace_argument(name: str, old: Sequence[Any], new: Any) -> None:
    """Of every Trainer, where it is one of `old`."""
    original = Trainer.__init__

    def replaced(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if kwargs.get(name) in old:
            kwargs[name] = new
        original(trainer, *args, **kwargs)

    setattr(Trainer, "__init__", replaced)  # noqa: B010  pyright knows the type


if _RUNNING:
    # At import, because a spawned process imports this module and nothing more.
    if _RUNNING in SETTINGS:
        _replace_ddp()
    _setting = {**SETTINGS, **CONTROLS}[_RUNNING]
    if "devices" in _setting:
        _replace_argument("devices", [2], _setting["devices"])
    if "everywhere" in _setting:
        _replace_argument("strategy", [None, "auto"], "ddp")


# --- the driver


def main() -> int:
    """Runs the control and the settings; the number of differences is returned."""
    arguments = _parse_arguments()
    folder = arguments.checkout / "tests" / "tests_pytorch"
    run = partial(_run, folder, arguments.out, arguments.jobs)
    differences = 0
    controls: dict[str, list[str]] = {}
    for setting in arguments.settings.split(","):
        control = _control_of(setting)
        if control not in controls:
            everywhere = "everywhere" in CONTROLS[control]
            everything = _collect(folder, arguments.only, everywhere)
            ended = run(control, everything)
            controls[control] = [t for t in ended if _comparable(ended[t])]
            print(f"{control}: {len(controls[control])} tests to compare", flush=True)
        ended = run(setting, controls[control])
        failed = [test for test in ended if ended[test]["outcome"] == "failed"]
        skipped = [test for test in ended if ended[test]["outcome"] == "skipped"]
        passed = len(ended) - len(failed) - len(skipped)
        print(f"{setting}: {passed} passed, {len(failed)} failed", flush=True)
        for test in failed:
            print(f"  {test}: {_last_line(ended[test]['why'])}", flush=True)
        differences += len(failed) + len(skipped)
    return min(differences, 125)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--only", default="*", help="pattern of test names")
    parser.add_argument("--out", type=Path, default=Path("runs/conformance"))
    # Most of the time goes to Lightning's launcher, which looks every five seconds
    # whether its processes are there.
    parser.add_argument("--jobs", type=int, default=1, help="processes of pytest")
    return parser.parse_args()


def _control_of(setting: str) -> str:
    own = {k: v for k, v in SETTINGS[setting].items() if k in _OF_THE_TESTS}
    return next(name for name, control in CONTROLS.items() if control == own)


def _comparable(ended: dict[str, Any]) -> bool:
    return ended["touched"] and ended["outcome"] == "passed"


def _collect(folder: Path, only: str, everywhere: bool) -> list[str]:
    several = re.compile(r"ddp|devices=[2-9]|num_nodes", re.IGNORECASE)
    files = [
        str(path.relative_to(folder.parent))
        for path in sorted(folder.rglob("test_*.py"))
        if everywhere or several.search(path.read_text())
    ]
    output = _pytest(folder, ["--collect-only", "-q", *files], {}, 300)
    names = [line for line in output.splitlines() if "::" in line]
    return [name for name in names if fnmatch(name, only)]


def _run(
    folder: Path, out: Path, jobs: int, setting: str, tests: list[str]
) -> dict[str, dict[str, Any]]:
    """How each test ended; a test that took its process along has failed.

    Tests that the report of an earlier call has are not run again.
    """
    out.mkdir(parents=True, exist_ok=True)
    report = (out / f"{setting}.jsonl").resolve()
    known = _read(report)
    left = _batches([test for test in tests if test not in known])
    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(partial(_run_batch, folder, setting, report), left))
    alone = [test for test, end in _read(report).items() if _wants_to_be_alone(end)]
    for test in alone:
        variables = _variables(setting, report) | {"PL_RUN_STANDALONE_TESTS": "1"}
        _pytest(folder, [test], variables, 2 * _SECONDS_PER_TEST)
    return _read(report)


def _run_batch(folder: Path, setting: str, report: Path, batch: list[str]) -> None:
    waiting = batch
    while waiting:
        variables = _variables(setting, report)
        output = _pytest(folder, waiting, variables, 60 + 30 * len(waiting))
        done = _read(report)
        left = [test for test in waiting if test not in done]
        if left == waiting:
            _append_death(report, waiting[0], output)
            left = waiting[1:]
        waiting = left


def _variables(setting: str, report: Path) -> dict[str, str]:
    return {_SETTING: setting, _REPORT: str(report)}


def _batches(tests: list[str], size: int = 40) -> Iterator[list[str]]:
    """Some tests for each process: its start is expensive, and it may die."""
    for begin in range(0, len(tests), size):
        yield tests[begin : begin + size]


def _wants_to_be_alone(ended: dict[str, Any]) -> bool:
    return ended["outcome"] == "skipped" and "[Standalone execution]" in ended["why"]


def _pytest(
    folder: Path, arguments: list[str], variables: dict[str, str], seconds: float
) -> str:
    own = str(Path(__file__).parents[1])
    paths = [own, str(folder.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}
    plugin = ["-p", "tests.conformance"] if variables else []
    options = ["-p", "no:cacheprovider", "--rootdir", str(folder.parent)]
    options += ["-o", "addopts=", "-o", "strict=false"]
    options += [f"--timeout={_SECONDS_PER_TEST}", "--timeout-method=thread"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *plugin, *options, *arguments],
        cwd=folder.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        return "ran out of time"
    finally:
        with suppress(ProcessLookupError):  # learners that a test left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(report: Path) -> dict[str, dict[str, Any]]:
    ended: dict[str, dict[str, Any]] = {}
    lines = report.read_text().splitlines() if report.exists() else []
    for line in map(json.loads, lines):
        before = ended.get(line["test"])
        first = before is None or line["when"] == "setup"
        passing = before is not None and before["outcome"] != "failed"
        if first or line["outcome"] == "failed" or (passing and line["when"] == "call"):
            ended[line["test"]] = line
    return ended


def _append_death(report: Path, test: str, output: str) -> None:
    line = {"test": test, "when": "call", "outcome": "failed", "touched": True}
    with report.open("a") as file:
        file.write(json.dumps({**line, "why": output[-3000:]}) + "\n")


def _last_line(why: str) -> str:
    lines: Iterable[str] = (line for line in why.splitlines() if line.startswith("E "))
    return next(iter(lines), why.strip().splitlines()[-1] if why.strip() else "?")


if __name__ == "__main__":
    sys.exit(main())
