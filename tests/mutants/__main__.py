"""Mutation testing: `python -m tests.mutants [--number 320] [--seed 0] [--rooms ...]`.

It draws as many mutants from each room and runs the room's fast tests against each. A
mutant is killed if a test fails, or if the tests twice do not end within their time,
the second time alone. Each trial is a line of `results.jsonl` in the folder `--out`; a
second call takes it up again. `--again survived` tries what survived once more, with
the tests that were written since. `--again killed` runs the test that has failed alone:
one that passes had failed for another reason, such as the load of the machine.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants import results
from tests.mutants.drawing import Mutant, draw
from tests.mutants.rooms import ROOMS
from tests.mutants.trials import Ended, Trial, copy_of, import_what_is_never_mutated

ROOT = Path(__file__).parents[2]
# Of a run of tests without a mutant: what it takes on a busy machine.
LONGEST_S = 600.0


class Task(NamedTuple):
    """One mutant, its tests, and how long they may take."""

    room: str
    mutant: Mutant
    tests: list[str]
    seconds: float = 0.0


def main(arguments: Sequence[str]) -> int:
    """Runs all mutants that are not in the results; exits if tests fail without one."""
    options = _parse(arguments)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    import_what_is_never_mutated()
    copies = [copy_of(ROOT, out / f"copy-{number}") for number in range(options.jobs)]
    tasks = _again(options, out) if options.again else _drawn(options, out)
    rooms = dict.fromkeys(task.room for task in tasks)
    longest = {room: 3 * _known_seconds(room, copies, out) + 20 for room in rooms}
    tasks = [task._replace(seconds=longest[task.room]) for task in tasks]
    _run_all(tasks, copies, out)
    done = results.read(out)
    late = [t for t in tasks if done[results.key(t.room, t.mutant)].is_late_once]
    _run_all(late, copies[:1], out)
    for copy in copies:
        shutil.rmtree(copy)
    print(results.report(list(results.read(out).values())))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--number", type=int, default=320, help="mutants in all")
    parser.add_argument("--seed", default="0", help="seed of the draw")
    parser.add_argument("--rooms", default=",".join(ROOMS), help="such as links,gossip")
    parser.add_argument(
        "--again", metavar="OUTCOME", help="draw none; such as survived"
    )
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/mutants"))
    return parser.parse_args(arguments)


def _drawn(options: argparse.Namespace, out: Path) -> list[Task]:
    """The mutants of a draw that had no trial yet, or one that timed out."""
    done, rooms = results.read(out), options.rooms.split(",")
    share = -(-options.number // len(rooms))
    return [
        Task(room, mutant, _tests(room, mutant))
        for room in rooms
        for mutant in draw(ROOT, ROOMS[room].source_files(ROOT), share, options.seed)
        if (known := done.get(results.key(room, mutant))) is None or known.is_late_once
    ]


def _again(options: argparse.Namespace, out: Path) -> list[Task]:
    """The mutants whose last trial had this outcome, where they can still be made."""
    rooms = options.rooms.split(",")
    found = [
        result
        for result in results.read(out).values()
        if (result.last, result.room in rooms) == (options.again, True)
    ]
    return [
        Task(one.room, one.mutant, one.killer or _newest_first(one))
        for one in filter(_is_as_before, found)
    ]


def _newest_first(result: results.Result) -> list[str]:
    """Its tests; those that were written since may be about it."""
    tests = _tests(result.room, result.mutant)
    return sorted(tests, key=lambda file: -(ROOT / file).stat().st_mtime)


def _tests(room: str, mutant: Mutant) -> list[str]:
    return ROOMS[room].test_files(ROOT, Path(mutant.file))


def _is_as_before(result: results.Result) -> bool:
    """Whether the mutant is still the change that it was; says so if it is not."""
    try:
        if results.change_of(ROOT, result.mutant) == result.change:
            return True
    except (AssertionError, FileNotFoundError):
        pass
    print(f"the code is another since: {result.key}")
    return False


def _known_seconds(room: str, copies: list[Path], out: Path) -> float:
    """Of a run without a mutant, as an earlier call has measured them or this one."""
    path = out / "seconds.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    if room not in known:
        known[room] = round(_seconds_without_mutant(room, copies), 1)
        path.write_text(json.dumps(known))
    print(f"{room}: {known[room]} s without a mutant", flush=True)
    return known[room]


def _seconds_without_mutant(room: str, copies: list[Path]) -> float:
    """How long the tests of a room take without a mutant.

    They run in all copies at once, as mutants do, and so meet the same load.
    """
    tests = ROOMS[room].test_files(ROOT, Path("none"))
    trials = [Trial(copy, tests, LONGEST_S) for copy in copies]
    seconds = 0.0
    while trials:
        trial, ended = _wait(trials)
        trials.remove(trial)
        if ended.outcome != "survived":
            for other in trials:
                other.kill()
            sys.exit(
                f"the tests of {room} {ended.outcome} without a mutant\n{ended.output}"
            )
        seconds = max(seconds, ended.seconds)
    return seconds


def _run_all(tasks: list[Task], copies: list[Path], out: Path) -> None:
    waiting, free = tasks[::-1], list(copies)
    running: dict[Trial, Task] = {}
    try:
        while waiting or running:
            while waiting and free:
                task, copy = waiting.pop(), free.pop()
                target = copy / task.mutant.file
                target.write_text(task.mutant.source(ROOT), encoding="utf-8")
                running[Trial(copy, task.tests, task.seconds)] = task
            trial, ended = _wait(list(running))
            task = running.pop(trial)
            # With the old time, by which Python knows what it has compiled.
            shutil.copy2(ROOT / task.mutant.file, trial.copy / task.mutant.file)
            free.append(trial.copy)
            results.write(out, ROOT, task.room, task.mutant, ended)
            left = len(waiting) + len(running)
            print(f"{left} left: {ended.outcome} {task.mutant}", flush=True)
    finally:
        for trial in running:
            trial.kill()


def _wait(trials: list[Trial]) -> tuple[Trial, Ended]:
    while True:
        for trial in trials:
            if (ended := trial.ended()) is not None:
                return trial, ended
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
