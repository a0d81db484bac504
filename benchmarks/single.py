"""Runs one benchmark in this process and writes its file in `results/`."""

import argparse
import importlib
import inspect
import time
from typing import Any

from benchmarks import results


def run(name: str, quick: bool) -> None:
    """Measures, and leaves `results/<name>.json`."""
    measure = importlib.import_module(f"benchmarks.{name}").measure
    print(f"== {name}", flush=True)
    begin = time.perf_counter()
    takes_quick = "quick" in inspect.signature(measure).parameters
    options: dict[str, Any] = {"quick": quick} if takes_quick else {}
    report = measure(**options)
    command = f"python -m benchmarks {name}" + (" --quick" if quick else "")
    path = results.write(name, report, command, time.perf_counter() - begin)
    print(f"   {time.perf_counter() - begin:.0f} s, {path.relative_to(results.ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.single")
    parser.add_argument("name", help="name of a benchmark")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    chosen = parser.parse_args()
    run(chosen.name, chosen.quick)


if __name__ == "__main__":
    main()
