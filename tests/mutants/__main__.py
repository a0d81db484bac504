"""Mutation testing: `python -m tests.mutants [--number 320] [--seed 0] [--rooms ...]`.

It draws as many mutants from each room and runs the room's fast tests against each. A
mutant is killed if a test fails or the tests do not end within their time. Each result
is a line of `results.jsonl` in the folder `--out`; a second call takes it up again.
"""

import argparse
import difflib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutants.drawing import Mutant, draw
from tests.mutants.rooms import ROOMS
from tests.mutants.trials import Ended, Trial, copy_of, import_what_is_never_mutated

ROOT = Path(__file__).parents[2]
# Of a run of tests without a mutant: what it takes on a busy machine.
LONGEST_S = 600.0


class Task(NamedTuple):
    """One mutant and its tests."""

    room: str
    mutant: Mutant
    tests: list[str]
    seconds: float


def main(arguments: Sequence[str]) -> int:
    """Runs all mutants that are not in the results; 1 if the tests fail without one."""
    options = _parse(arguments)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    import_what_is_never_mutated()
    copies = [copy_of(ROOT, out / f"copy-{number}") for number in range(options.jobs)]
    rooms = options.rooms.split(",")
    limits = {room: _seconds_without_mutant(room, copies[0]) for room in rooms}
    done = _read(out)
    share = -(-options.number // len(rooms))
    tasks = [
        Task(room, mutant, ROOMS[room].test_files(ROOT, Path(mutant.file)), limit)
        for room, limit in limits.items()
        for mutant in draw(ROOT, ROOMS[room].source_files(ROOT), share, options.seed)
        if _key(room, mutant) not in done
    ]
    _run_all(tasks, copies, out)
    for copy in copies:
        shutil.rmtree(copy)
    print(report(list(_read(out).values())))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--number", type=int, default=320, help="mutants in all")
    parser.add_argument("--seed", default="0", help="seed of the draw")
    parser.add_argument("--rooms", default=",".join(ROOMS), help="such as links,gossip")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/mutants"))
    return parser.parse_args(arguments)


def _seconds_without_mutant(room: str, copy: Path) -> float:
    """How long a mutant of this room may take: what its tests take without one."""
    tests = ROOMS[room].test_files(ROOT, Path("none"))
    ended = _wait([Trial(copy, tests, LONGEST_S)])[1]
    if ended.outcome != "survived":
        sys.exit(
            f"the tests of {room} {ended.outcome} without a mutant\n{ended.output}"
        )
    print(f"{room}: {ended.seconds:.1f} s without a mutant", flush=True)
    return 3 * ended.seconds + 20


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
            _write(out, task, ended)
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


def _write(out: Path, task: Task, ended: Ended) -> None:
    last = [line for line in ended.output.splitlines() if line.startswith("FAILED")]
    line = {
        "room": task.room,
        **task.mutant._asdict(),
        "change": _change(task.mutant),
        "outcome": ended.outcome,
        "seconds": round(ended.seconds, 1),
        "by": last[0].split()[1] if last else "",
    }
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _change(mutant: Mutant) -> list[str]:
    """The lines that the mutant takes away and adds, as a diff has them."""
    before = (ROOT / mutant.file).read_text(encoding="utf-8").splitlines()
    after = mutant.source(ROOT).splitlines()
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))
    return lines[3:]


def _read(out: Path) -> dict[str, dict[str, Any]]:
    path = out / "results.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return {
        _key(
            line["room"], Mutant(**{name: line[name] for name in Mutant._fields})
        ): line
        for line in lines
    }


def _key(room: str, mutant: Mutant) -> str:
    return f"{room} {mutant.file} {mutant.operator} {mutant.occurrence}"


def report(results: list[dict[str, Any]]) -> str:
    """A table of the rooms and a list of what survived, in Markdown."""
    rows = ["| room | mutants | killed | of these timed out | survived |"]
    rows += ["|---|---|---|---|---|"]
    for room in dict.fromkeys(result["room"] for result in results):
        rows.append(_row(room, [r for r in results if r["room"] == room]))
    rows += [_row("all", results), ""]
    for result in results:
        if result["outcome"] == "survived":
            line = result["position"][0]
            rows += [f"- `{result['file']}`, line {line}, {result['operator']}:", ""]
            rows += [f"      {change}" for change in result["change"]] + [""]
    return "\n".join(rows)


def _row(room: str, results: list[dict[str, Any]]) -> str:
    outcomes = [result["outcome"] for result in results]
    survived = outcomes.count("survived")
    share = 1 - survived / len(outcomes) if outcomes else 1.0
    return (
        f"| {room} | {len(outcomes)} | {share:.0%} "
        f"| {outcomes.count('timed out')} | {survived} |"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
