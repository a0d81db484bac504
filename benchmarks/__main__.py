"""Runs the benchmarks, each in a process of its own, and writes the page of results.

    python -m benchmarks                 everything that this machine can
    python -m benchmarks --quick         fewer repetitions: minutes, not hours
    python -m benchmarks merge overlap   these
    python -m benchmarks --page          only the page, from the files in results/

    python -m benchmarks race --help     the race takes a night, and has own options

A benchmark is any module of this folder that defines `measure`.
"""

import argparse
import ast
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks import page

FOLDER = Path(__file__).parent
# Enough for any of them twice over; a benchmark that hangs must not hold up the rest.
LIMIT_S = 90 * 60


def names() -> list[str]:
    """The modules of this folder that measure something, in order."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if _measures(path))


@cache
def _measures(path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(isinstance(n, ast.FunctionDef) and n.name == "measure" for n in body)


def run(name: str, quick: bool) -> str | None:
    """Runs one benchmark; returns the problem, or None."""
    words = [sys.executable, "-m", "benchmarks.single", name]
    process = subprocess.Popen(
        words + (["--quick"] if quick else []),
        cwd=FOLDER.parent,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"still ran after {LIMIT_S} s"
    finally:
        _end(process)
    return f"exit code {code}" if code else None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends what still runs, with SIGTERM first, so that emulated hosts are removed."""
    if process.poll() is None:
        process.terminate()
        time.sleep(2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code is the number of benchmarks that failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(names()))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["race"]:
        return importlib.import_module("benchmarks.race").main(given[1:])
    chosen = parser.parse_args(given)
    if unknown := set(chosen.names) - set(names()):
        parser.error(f"no benchmark {sorted(unknown)}; there are {names()}")
    wanted = [] if chosen.page else chosen.names or names()
    failures = {name: error for name in wanted if (error := run(name, chosen.quick))}
    for name, error in failures.items():
        print(f"benchmark {name} failed: {error}", file=sys.stderr)
    print(f"results: {page.write().relative_to(FOLDER.parent)}")
    return len(failures)


if __name__ == "__main__":
    sys.exit(main())
