"""The same tests with other versions: `make matrix`, or `python -m tests.matrix`.

A cell is an environment with a Python, a torch and a Lightning of its own, into which
the wheel of this clone is installed. What a cell does not name comes from the
environment that runs this program, if that is of the same Python; otherwise pip fetches
everything. The tests are copied, so that they find the wheel and not the clone. For the
other import name of Lightning the copies are rewritten: `pytorch_lightning` for
`lightning.pytorch`, and there `lightning` is not installed at all.

    python -m tests.matrix                     # all cells
    python -m tests.matrix lightning-2.5       # one of them
    python -m tests.matrix --list

Cells are made in runs/matrix, and stay there: a second call installs the wheel alone.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "matrix"
_TRAINER = "tests/strategy/test_trainer_integration.py"
SMOKE = (
    "tests/test_installed.py",
    f"{_TRAINER}::test_sync_processes_follow_the_matrix",
    f"{_TRAINER}::test_delay_by_one_processes_follow_the_recurrence",
    f"{_TRAINER}::test_async_processes_keep_the_mean",
    f"{_TRAINER}::test_super_learners_of_two",
    f"{_TRAINER}::test_a_checkpoint_is_the_mean_and_needs_nothing_of_this_package",
    f"{_TRAINER}::test_training_resumes_from_a_checkpoint",
    f"{_TRAINER}::test_plain_lightning_loads_and_goes_on_from_a_checkpoint",
    f"{_TRAINER}::test_every_name_trains_by_the_fork_launcher",
    "tests/strategy/test_callbacks_integration.py",
    "tests/strategy/test_fabric.py",
    "tests/strategy/test_overrides.py::test_each_name_is_one_of_lightnings",
    "tests/strategy/test_scope.py",
    "tests/strategy/checkpoints/test_last_good.py",
    "tests/strategy/checkpoints/test_format.py",
    "tests/callbacks/test_monitors.py",
    "tests/callbacks/test_progress_line.py",
    "tests/virtual/test_strategy.py",
    "tests/weights/test_flat.py",
)
"""Set-up, training, resuming, evaluation, Fabric, callbacks, the virtual cluster."""

_TEST_TOOLS = (
    "hypothesis>=6.100",
    "matplotlib>=3.8",
    "numpy>=2",
    "pytest>=8.1",
    "pytest-rerunfailures>=16.3",
    "pytest-timeout>=2.3",
)
_PATIENCE_S = 3600.0
_RENAMED = (
    (r"\blightning\.pytorch\b", "pytorch_lightning"),
    (r"\blightning\.fabric\b", "lightning_fabric"),
    (r"\bimport lightning\b(?!\.)", "import pytorch_lightning"),
)


@dataclass(frozen=True)
class Cell:
    """One environment.

    Attributes:
        needs: what pip installs, with what that requires in turn.
        lacks: packages that are not taken from the environment that runs this.
        python: "3.12"; empty: that of the environment that runs this.
        renames: whether tests say `pytorch_lightning`.
    """

    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    python: str = ""
    renames: bool = False


# 2.6.2 and 2.6.3 of Lightning were malicious uploads: versions are named.
CELLS: Mapping[str, Cell] = {
    "floor": Cell(("lightning==2.5.0.post0", "torch==2.6.0")),
    "lightning-2.5": Cell(("lightning==2.5.6",)),
    "locked": Cell(),
    "torch-2.13": Cell(("torch==2.13.0",)),
    "newest": Cell(("lightning==2.6.6", "torch==2.15.0")),
    "pytorch-lightning": Cell(
        ("pytorch-lightning==2.6.6",), lacks=("lightning",), renames=True
    ),
    "pytorch-lightning-2.5": Cell(
        ("pytorch-lightning==2.5.6",),
        lacks=("lightning", "pytorch_lightning", "lightning_fabric"),
        renames=True,
    ),
    "python-3.12": Cell(("lightning==2.6.6", "torch==2.11.0"), python="3.12"),
    "python-3.13": Cell(("lightning==2.6.6", "torch==2.11.0"), python="3.13"),
}


class Outcome(NamedTuple):
    """What came of a cell: pytest's last line, or why there is none."""

    cell: str
    versions: str
    said: str
    seconds: float
    passed: bool

    def __str__(self) -> str:
        mark = " " if self.passed else "!"
        return (
            f"{mark} {self.cell:<22} {self.versions:<44} {self.said} "
            f"({self.seconds:.0f} s)"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cells that are named, or all; returns 1 if a test failed in one."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=", ".join(CELLS))
    parser.add_argument("--list", action="store_true", help="name the cells and end")
    chosen = parser.parse_args(arguments)
    if unknown := [name for name in chosen.cells if name not in CELLS]:
        parser.error(f"CELL must be one of {', '.join(CELLS)}, got {unknown[0]!r}")
    if chosen.list:
        print("\n".join(CELLS))
        return 0
    wheel = build_wheel(FOLDER / "wheel")
    outcomes = []
    for name in chosen.cells or CELLS:
        outcomes.append(run(name, CELLS[name], wheel))
        print(outcomes[-1], flush=True)
    return int(not all(outcome.passed for outcome in outcomes))


def build_wheel(folder: Path) -> Path:
    """The wheel of this clone."""
    shutil.rmtree(folder, ignore_errors=True)
    pip(
        sys.executable, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def run(name: str, cell: Cell, wheel: Path) -> Outcome:
    """Makes a cell and runs its tests."""
    begin, folder = time.perf_counter(), FOLDER / name
    interpreter = interpreter_of(cell)
    if interpreter is None:
        return Outcome(name, "", f"no Python {cell.python} here: left out", 0, True)
    try:
        python = make_environment(folder, cell, interpreter, wheel)
        copy_tests(folder / "clone", cell.renames)
        said, passed = run_tests(python, folder / "clone")
        versions = versions_of(python)
    except subprocess.CalledProcessError as error:
        told = (error.stderr or "").strip().splitlines()[-1:] or [str(error)]
        said, passed, versions = told[0], False, ""
    return Outcome(name, versions, said, time.perf_counter() - begin, passed)


def interpreter_of(cell: Cell) -> str | None:
    """A Python of the cell's version that runs; None: there is none."""
    if not cell.python:
        return sys.executable
    named = shutil.which(f"python{cell.python}")
    roots = (Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions",)
    kept = (p for root in roots for p in sorted(root.glob(f"{cell.python}.*/bin")))
    for one in filter(None, (named, *(str(folder / "python3") for folder in kept))):
        # Captured: a version manager complains about names of interpreters it lacks.
        tried = subprocess.run([one, "-c", "import venv"], capture_output=True)
        if not tried.returncode:
            return one
    return None


def make_environment(folder: Path, cell: Cell, interpreter: str, wheel: Path) -> str:
    """An environment with what the cell needs and the wheel; returns its Python."""
    venv, made = folder / "venv", folder / "made"
    python = str(venv / "bin" / "python")
    wanted = repr(cell)
    if not made.exists() or made.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        command([interpreter, "-m", "venv", str(venv)])
        if cell.python:
            pip(python, "install", *cell.needs, *_TEST_TOOLS, "xxhash", "setuptools")
        else:
            link_base(folder / "base", venv, cell.lacks)
            if cell.needs:
                pip(python, "install", *cell.needs)
        made.write_text(wanted)
    pip(python, "install", "--no-deps", "--force-reinstall", wheel)
    return python


def link_base(base: Path, venv: Path, lacks: Sequence[str]) -> None:
    """Shows an environment the packages of this one but for those that it lacks.

    By links in a folder of their own: pip leaves alone what is outside of the
    environment, and what it installs there comes first.
    """
    base.mkdir(parents=True)
    left_out = ("lightning_adpsgd", "__editable__", "pip", *lacks)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        root = re.split(r"[-.]", entry.name)[0]
        if root not in left_out and not entry.name.startswith("__editable__"):
            (base / entry.name).symlink_to(entry)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "base.pth").write_text(f"{base}\n")


def copy_tests(clone: Path, renames: bool) -> None:
    """Copies the tests, under Lightning's other name if they are to use that."""
    shutil.rmtree(clone, ignore_errors=True)
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests", clone / "tests", ignore=no_caches)
    shutil.copy(ROOT / "pyproject.toml", clone)
    for path in (clone / "tests").rglob("*.py") if renames else ():
        path.write_text(renamed(path.read_text("utf-8")), "utf-8")


def renamed(text: str) -> str:
    """A program that says `pytorch_lightning` where it said `lightning.pytorch`."""
    for old, new in _RENAMED:
        text = re.sub(old, new, text)
    return text


def run_tests(python: str, clone: Path) -> tuple[str, bool]:
    """Pytest's last line, and whether all have passed."""
    log = clone.parent / "log.txt"
    with log.open("w") as output:
        ran = subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SMOKE],
            cwd=clone,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=clean_environment(),
            timeout=_PATIENCE_S,
        )
    said = summary_of(log.read_text("utf-8", "replace"))
    return (said if not ran.returncode else f"{said}; see {log}"), not ran.returncode


def summary_of(output: str) -> str:
    """Pytest's last line, behind which libraries may complain at their end."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip()]
    sums = [line for line in lines if re.search(r"\d+ \w+.* in \d.*s\b", line)]
    return (sums or lines or ["said nothing"])[-1]


def versions_of(python: str) -> str:
    """What a cell runs on, in one line."""
    program = (
        "import platform; from importlib.metadata import version, distributions\n"
        "names = {d.name for d in distributions()}\n"
        "of = ('torch', 'lightning', 'pytorch-lightning')\n"
        "print('Python', platform.python_version(), *("
        "f'{n} {version(n)}' for n in of if n in names))"
    )
    return command([python, "-c", program])


def pip(python: str, *arguments: object) -> None:
    """Runs pip, which asks the registry that it is configured for."""
    quiet = ("-qq", "--disable-pip-version-check")
    command([python, "-m", "pip", *map(str, arguments), *quiet])


def command(words: Sequence[str]) -> str:
    """What a program prints; raises `CalledProcessError` with what it complains of."""
    ran = subprocess.run(
        words,
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=clean_environment(),
        timeout=_PATIENCE_S,
    )
    return ran.stdout.strip()


def clean_environment() -> dict[str, str]:
    """This one's, without the way to the clone."""
    kept = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
